//! Main loop of a run: starts trainers and records their exits until the experiment ends.

mod asking;
mod ends;
mod stops;
mod trial_config;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use stoker_api::contract::CheckpointRef;
use stoker_api::names::{ENV_LAUNCHED, ENV_LAUNCHER_LOGS, ENV_TERMINATION_FILE};
use stoker_api::validate::ValidExperiment;
use stoker_engine::devices::GpuPool;
use stoker_engine::trial::{NextStep, unreported_since};
use stoker_storage::Storage;
use tokio::sync::mpsc::{self, UnboundedReceiver, UnboundedSender};
use tokio::task::JoinHandle;
use tokio::time::{Instant, MissedTickBehavior, interval};

use self::asking::Asker;
use self::ends::TERMINATION_FILE;
use self::stops::Obeyed;
use self::trial_config::AttemptStart;
use super::display::{MetricRanking, View};
use super::gpus;
use super::outcome::{self, RunPaths};
use super::process::{self, TrainerOutcome, TrainerProcess, TrainerStart};
use super::record::{self, RecordDir};
use super::record_copies::RecordCopier;
use super::report_server::SharedState;
use super::setup::LAUNCHER;
use super::signals::{Signals, StopRequests};
use crate::failure::Failure;

/// Interval of display updates and time limit checks.
const TICK: Duration = Duration::from_millis(200);
/// Wait before the next deletion of old checkpoints after a storage failure.
const PRUNE_RETRY_WAIT: Duration = Duration::from_secs(60);

/// Runs one experiment.
#[derive(Debug)]
pub(crate) struct Runner<'a> {
    shared: SharedState,
    valid: &'a ValidExperiment,
    storage: Storage,
    paths: RunPaths,
    slots: u32,
    devices: GpuPool,
    server_url: String,
    folder: RecordDir,
    lock: PathBuf,
    test_hint: Option<String>,
    running: BTreeMap<u32, TrainerProcess>,
    /// Earliest start of the next attempt, by trial. A new runner starts every trial at once.
    back_off: BTreeMap<u32, Instant>,
    /// Time of the stop request, by running trial.
    stop_requested_at: BTreeMap<u32, Instant>,
    outcomes: UnboundedReceiver<TrainerOutcome>,
    outcome_sender: UnboundedSender<TrainerOutcome>,
    interrupts: StopRequests,
    obeyed: Obeyed,
    /// Background task that deletes old checkpoints; at most one runs.
    pruning: Option<JoinHandle<Result<(), Failure>>>,
    /// Earliest start of the next deletion, set after a failure.
    prune_after: Instant,
    record_copier: RecordCopier,
    notes: UnboundedReceiver<String>,
    asker: Option<Asker>,
}

/// Inputs of a [`Runner`].
#[derive(Debug)]
pub(crate) struct RunnerConfig<'a> {
    pub(crate) shared: SharedState,
    pub(crate) valid: &'a ValidExperiment,
    pub(crate) storage: Storage,
    pub(crate) paths: RunPaths,
    /// Maximum number of concurrent ranks.
    pub(crate) slots: u32,
    /// GPUs; running trials never share one.
    pub(crate) devices: GpuPool,
    /// Address of the report server.
    pub(crate) server_url: String,
    pub(crate) folder: RecordDir,
    /// File that is locked while any trainer process is alive.
    pub(crate) lock: PathBuf,
    /// Message that recommends `--test`, unless this is such a run.
    pub(crate) test_hint: Option<String>,
}

impl<'a> Runner<'a> {
    /// Creates a runner; [`run`](Self::run) starts the trials.
    ///
    /// # Errors
    ///
    /// The external searcher cannot be asked from this machine.
    pub(crate) fn new(config: RunnerConfig<'a>) -> Result<Self, Failure> {
        let RunnerConfig {
            shared,
            valid,
            storage,
            paths,
            slots,
            devices,
            server_url,
            folder,
            lock,
            test_hint,
        } = config;
        let (outcome_sender, outcomes) = mpsc::unbounded_channel();
        let (note, notes) = mpsc::unbounded_channel();
        let asker = Asker::new(&valid.spec.searcher)?;
        shared.state().notes = Some(note.clone());
        let record_copier =
            RecordCopier::start(shared.clone(), storage.clone(), paths.clone(), note);
        Ok(Self {
            shared,
            valid,
            storage,
            paths,
            slots,
            devices,
            server_url,
            folder,
            lock,
            test_hint,
            running: BTreeMap::new(),
            back_off: BTreeMap::new(),
            stop_requested_at: BTreeMap::new(),
            outcomes,
            outcome_sender,
            interrupts: StopRequests::default(),
            obeyed: Obeyed::default(),
            pruning: None,
            prune_after: Instant::now(),
            record_copier,
            notes,
            asker,
        })
    }

    /// Runs until the experiment has ended or was stopped and no trial is running.
    pub(crate) async fn run(
        mut self,
        signals: &mut Signals,
        view: &mut View,
    ) -> Result<(), Failure> {
        self.run_loop(signals, view).await?;
        self.shared.state().finish_status();
        self.finish_asking().await;
        // Safe to abort: the remaining checkpoints are deleted at the end or on resume.
        self.pruning.take().inspect(JoinHandle::abort);
        tokio::select! {
            () = self.record_copier.finish() => {}
            () = signals.next() => {
                view.print_message("stopped copying trial records to the storage");
            }
        }
        while let Ok(note) = self.notes.try_recv() {
            view.print_message(&note);
        }
        Ok(())
    }

    async fn run_loop(&mut self, signals: &mut Signals, view: &mut View) -> Result<(), Failure> {
        let mut ticks = interval(TICK);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        self.shared.state().settle()?;
        loop {
            self.shared.state().tick();
            self.obey(view);
            self.start_ready_trials();
            self.ask();
            self.kill_overdue_trials();
            self.prune(view).await;
            self.show(view);
            if self.running.is_empty() && self.is_over() {
                return Ok(());
            }
            tokio::select! {
                biased;
                () = signals.next() => self.interrupt(view),
                Some(outcome) = self.outcomes.recv() => self.record_outcome(outcome, view),
                Some(note) = self.notes.recv() => view.print_message(&note),
                outcome = Asker::outcome(&mut self.asker) => self.take_answer(outcome, view),
                () = self.shared.changed() => {}
                _ = ticks.tick() => {}
            }
        }
    }

    fn is_over(&self) -> bool {
        let state = self.shared.state();
        state.is_pausing || state.phase().is_terminal()
    }

    fn show(&self, view: &mut View) {
        let searcher = &self.valid.spec.searcher;
        let ranking = MetricRanking {
            metric: &searcher.metric,
            smaller_is_better: searcher.smaller_is_better,
        };
        view.update(&mut self.shared.state(), &ranking);
    }

    /// Starts trials while there is room. If a trial waits for room, trials that have nothing to
    /// train end their attempts.
    fn start_ready_trials(&mut self) {
        // Trials that wait or run are skipped, and the first that finds no slot ends the loop.
        let num = self.back_off.len() + self.slots as usize + 1;
        let startable = self.shared.state().startable(num);
        let places = self.shared.state().places();
        let now = Instant::now();
        let mut is_room_wanted = false;
        for index in startable {
            let is_waiting = self.back_off.get(&index).is_some_and(|until| *until > now);
            if is_waiting || self.running.contains_key(&index) {
                continue;
            }
            let num_running = self.running.len() as u32;
            let has_slots = (num_running + 1) * self.slots_per_trial() <= self.slots;
            if !has_slots || places.is_some_and(|places| num_running >= places) {
                is_room_wanted = true;
                break;
            }
            let next = self.shared.state().next(index);
            if let NextStep::Start { attempt, resume_from, units } = next
                && let Err(error) = self.start(index, attempt, resume_from, units)
            {
                if !self.running.contains_key(&index) {
                    self.devices.release(index);
                }
                self.shared.state().fail(error);
                return;
            }
        }
        self.shared.state().release(is_room_wanted);
    }

    fn slots_per_trial(&self) -> u32 {
        self.valid.spec.resources.slots_per_trial
    }

    /// Records the attempt, then starts its trainer.
    fn start(
        &mut self,
        index: u32,
        attempt: u32,
        resume_from: Vec<CheckpointRef>,
        units: u64,
    ) -> Result<(), Failure> {
        let token = record::random_hex(32)?;
        let folder = self.folder.attempt(index, attempt)?;
        let token_file = folder.join("token");
        record::write_for_attempt(&token_file, token.as_bytes())?;
        let Some(trial) = self.shared.state().trials.get(&index).cloned() else { return Ok(()) };
        let visible = self.devices.take(index, self.slots_per_trial());
        if visible.is_none() && !self.devices.is_empty() {
            return Ok(());
        }
        let gang = self.gang()?;
        let config = self.trial_config(AttemptStart {
            trial: &trial.spec,
            attempt,
            resume_from,
            unreported_since: unreported_since(&trial, attempt),
            units,
            token_file: &token_file,
            gang: gang.clone(),
        });
        let config_file = folder.join("trial.json");
        record::write_for_attempt(&config_file, &record::to_json(&config_file, &config)?)?;
        self.shared.state().begin(index, attempt, &token)?;
        let spec = &self.valid.spec;
        let program = spec.entrypoint.command.iter().chain(&spec.entrypoint.args).cloned();
        let mut env: Vec<_> =
            spec.env.iter().map(|var| (var.name.clone(), var.value.clone())).collect();
        let mut command = vec![];
        if gang.is_some() {
            command.extend([LAUNCHER, "launch", "--"].map(str::to_owned));
            env.push((ENV_LAUNCHER_LOGS.to_owned(), "off".to_owned()));
            let file = folder.join(TERMINATION_FILE).display().to_string();
            env.push((ENV_TERMINATION_FILE.to_owned(), file));
        } else {
            env.push((ENV_LAUNCHED.to_owned(), "1".to_owned()));
        }
        command.extend(program);
        env.extend(visible.map(|gpus| (gpus::ENV_VISIBLE.to_owned(), gpus)));
        let start = TrainerStart {
            trial: index,
            attempt,
            command,
            env,
            config: &config_file,
            trial_path: &config.storage.trial_path,
            lock: &self.lock,
            folder: None,
        };
        match process::start(start, &self.storage, self.outcome_sender.clone()) {
            Ok(running) => {
                self.running.insert(index, running);
            }
            Err(error) => {
                self.devices.release(index);
                let end = process::end_of_failed_start(&error);
                let message = format!("cannot start a process: {error}");
                self.shared.state().end(index, end, Some(message));
                self.wait_before_restart(index);
            }
        }
        Ok(())
    }

    /// Deletes checkpoints that are no longer needed, so that a long trial does not fill the
    /// storage.
    async fn prune(&mut self, view: &View) {
        if self.pruning.as_ref().is_some_and(JoinHandle::is_finished)
            && let Some(pruning) = self.pruning.take()
            && let Ok(Err(error)) = pruning.await
        {
            view.print_message(&format!(
                "cannot delete old checkpoints: {error}; trying again in {} s",
                PRUNE_RETRY_WAIT.as_secs()
            ));
            self.prune_after = Instant::now() + PRUNE_RETRY_WAIT;
        }
        if self.pruning.is_some() || Instant::now() < self.prune_after {
            return;
        }
        let spec = &self.valid.spec;
        let prunable = self.shared.state().superfluous(&spec.checkpoint_storage);
        if prunable.is_empty() {
            return;
        }
        let (shared, storage, paths) =
            (self.shared.clone(), self.storage.clone(), self.paths.clone());
        self.pruning = Some(tokio::spawn(async move {
            let mut result = Ok(());
            for (index, names) in prunable {
                if result.is_ok() {
                    result = outcome::delete(&shared, &storage, &paths, index, &names).await;
                }
                if result.is_err() {
                    shared.state().keep_prunable(index);
                }
            }
            result
        }));
    }
}
