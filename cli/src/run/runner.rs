//! Main loop of a run: starts trainers and records their exits until the experiment ends.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use stoker_api::contract::{
    CONTRACT_VERSION, CheckpointRef, Gang, ReportEndpoint, StorageConfig, TrialConfig,
};
use stoker_api::names::ENV_LAUNCHER_LOGS;
use stoker_api::trial::AttemptEnd;
use stoker_api::validate::ValidExperiment;
use stoker_engine::devices::GpuPool;
use stoker_engine::trial::{BackOff, NextStep, TrialRecord};
use stoker_storage::Storage;
use tokio::sync::mpsc::{self, UnboundedReceiver, UnboundedSender};
use tokio::task::JoinHandle;
use tokio::time::{Instant, MissedTickBehavior, interval};

use super::copies::Copies;
use super::display::{Searched, View};
use super::door::{self, Desk};
use super::gpus;
use super::outcome::{self, Paths};
use super::process::{self, Ended, Running, Start};
use super::record::{self, Folder};
use super::setup::LAUNCHER;
use super::signals::Signals;
use crate::failure::Failure;

/// Interval of display updates and time limit checks.
const TICK: Duration = Duration::from_millis(200);
/// Wait before the next deletion of old checkpoints after a storage failure.
const PRUNE_AGAIN: Duration = Duration::from_secs(60);

/// Runs one experiment.
#[derive(Debug)]
pub(crate) struct Runner<'a> {
    desk: Desk,
    valid: &'a ValidExperiment,
    storage: Storage,
    paths: Paths,
    seed: u32,
    slots: u32,
    devices: GpuPool,
    door: String,
    folder: Folder,
    lock: PathBuf,
    running: BTreeMap<u32, Running>,
    /// Earliest start of the next attempt, by trial. A new runner starts every trial at once.
    back_off: BTreeMap<u32, Instant>,
    /// Time of the stop request, by running trial.
    asked: BTreeMap<u32, Instant>,
    ended: UnboundedReceiver<Ended>,
    tell_ended: UnboundedSender<Ended>,
    interrupts: u32,
    /// Background task that deletes old checkpoints; at most one runs.
    pruning: Option<JoinHandle<Result<(), Failure>>>,
    /// Earliest start of the next deletion, set after a failure.
    prune_after: Instant,
    copies: Copies,
    notes: UnboundedReceiver<String>,
}

/// Inputs of a runner.
#[derive(Debug)]
pub(crate) struct Job<'a> {
    pub(crate) desk: Desk,
    pub(crate) valid: &'a ValidExperiment,
    pub(crate) storage: Storage,
    pub(crate) paths: Paths,
    /// Experiment seed.
    pub(crate) seed: u32,
    /// Maximum number of concurrent ranks.
    pub(crate) slots: u32,
    /// GPUs; running trials never share one.
    pub(crate) devices: GpuPool,
    /// Address of the report server.
    pub(crate) door: String,
    pub(crate) folder: Folder,
    /// File that is locked while any trainer process is alive.
    pub(crate) lock: PathBuf,
}

impl<'a> Runner<'a> {
    /// Creates a runner; [`run`](Self::run) starts the trials.
    pub(crate) fn new(job: Job<'a>) -> Self {
        let Job { desk, valid, storage, paths, seed, slots, devices, door, folder, lock } = job;
        let (tell_ended, ended) = mpsc::unbounded_channel();
        let (note, notes) = mpsc::unbounded_channel();
        desk.state().notes = Some(note.clone());
        let copies = Copies::start(desk.clone(), storage.clone(), paths.clone(), note);
        Self {
            desk,
            valid,
            storage,
            paths,
            seed,
            slots,
            devices,
            door,
            folder,
            lock,
            running: BTreeMap::new(),
            back_off: BTreeMap::new(),
            asked: BTreeMap::new(),
            ended,
            tell_ended,
            interrupts: 0,
            pruning: None,
            prune_after: Instant::now(),
            copies,
            notes,
        }
    }

    /// Runs until the experiment has ended or was stopped and no trial is running.
    pub(crate) async fn run(
        mut self,
        signals: &mut Signals,
        view: &mut View,
    ) -> Result<(), Failure> {
        self.work(signals, view).await?;
        // Safe to abort: the remaining checkpoints are deleted at the end or on resume.
        self.pruning.take().inspect(JoinHandle::abort);
        tokio::select! {
            () = self.copies.finish() => {}
            () = signals.next() => view.say("stopped copying trial records to the storage"),
        }
        while let Ok(note) = self.notes.try_recv() {
            view.say(&note);
        }
        Ok(())
    }

    async fn work(&mut self, signals: &mut Signals, view: &mut View) -> Result<(), Failure> {
        let mut ticks = interval(TICK);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        self.desk.state().settle()?;
        loop {
            self.start_what_may_run(view)?;
            self.kill_what_is_late();
            self.prune(view).await;
            self.show(view);
            if self.running.is_empty() && self.is_over() {
                return Ok(());
            }
            tokio::select! {
                biased;
                () = signals.next() => self.interrupt(view),
                Some(ended) = self.ended.recv() => self.end(ended, view)?,
                Some(note) = self.notes.recv() => view.say(&note),
                () = self.desk.changed() => {}
                _ = ticks.tick() => {}
            }
        }
    }

    fn is_over(&self) -> bool {
        let state = self.desk.state();
        state.is_pausing || state.status().phase.is_terminal()
    }

    fn show(&self, view: &mut View) {
        let searcher = &self.valid.spec.searcher;
        let searched =
            Searched { metric: &searcher.metric, smaller_is_better: searcher.smaller_is_better };
        view.update(&mut self.desk.state(), &searched);
    }

    fn start_what_may_run(&mut self, view: &View) -> Result<(), Failure> {
        let next = self.desk.state().next();
        let now = Instant::now();
        for (index, next) in next {
            let taken = (self.running.len() as u32 + 1) * self.slots_per_trial();
            if taken > self.slots {
                break;
            }
            let is_ready = self.back_off.get(&index).is_none_or(|until| *until <= now);
            if let NextStep::Start { attempt, resume_from, units } = next
                && is_ready
                && !self.running.contains_key(&index)
            {
                self.start(index, attempt, resume_from, units, view)?;
            }
        }
        Ok(())
    }

    fn slots_per_trial(&self) -> u32 {
        self.valid.spec.resources.slots_per_trial
    }

    /// Returns the rendezvous address and the secret for the ranks of an attempt; `None` for one
    /// rank.
    fn gang(&self) -> Result<Option<Gang>, Failure> {
        let world_size = self.slots_per_trial();
        if world_size == 1 {
            return Ok(None);
        }
        // Another process could bind the port before rank 0 does. Then the attempt fails, and the
        // next attempt uses another port.
        let listener = std::net::TcpListener::bind(("127.0.0.1", 0));
        let address = listener.and_then(|listener| listener.local_addr()).map_err(|error| {
            Failure::System(format!("cannot find a free port for the ranks of a trial: {error}"))
        })?;
        let port = address.port();
        let secret = record::random_hex(32)?;
        let rendezvous = format!("127.0.0.1:{port}");
        Ok(Some(Gang { world_size, ranks_per_pod: world_size, rendezvous, secret }))
    }

    /// Records the attempt, then starts its trainer.
    fn start(
        &mut self,
        index: u32,
        attempt: u32,
        resume_from: Vec<CheckpointRef>,
        units: u64,
        view: &View,
    ) -> Result<(), Failure> {
        let token = record::random_hex(32)?;
        let folder = self.folder.attempt(index, attempt)?;
        let token_file = folder.join("token");
        record::write(&token_file, token.as_bytes())?;
        let Some(trial) = self.desk.state().trials.get(&index).cloned() else { return Ok(()) };
        let visible = self.devices.take(index, self.slots_per_trial());
        if visible.is_none() && !self.devices.is_empty() {
            return Ok(());
        }
        let gang = self.gang()?;
        let mut config = self.config(&trial, attempt, resume_from, units, &token_file);
        config.gang.clone_from(&gang);
        let config_file = folder.join("trial.json");
        record::write_json(&config_file, &config)?;
        self.desk.state().begin(index, attempt, &token)?;
        let spec = &self.valid.spec;
        let program = spec.entrypoint.command.iter().chain(&spec.entrypoint.args).cloned();
        let mut env: Vec<_> = spec
            .env
            .iter()
            .map(|variable| (variable.name.clone(), variable.value.clone()))
            .collect();
        let mut command = vec![];
        if gang.is_some() {
            command.extend([LAUNCHER, "launch", "--"].map(str::to_owned));
            env.push((ENV_LAUNCHER_LOGS.to_owned(), "off".to_owned()));
        }
        command.extend(program);
        env.extend(visible.map(|gpus| (gpus::ENV_VISIBLE.to_owned(), gpus)));
        let start = Start {
            trial: index,
            attempt,
            command,
            env,
            config: &config_file,
            trial_path: &config.storage.trial_path,
            lock: &self.lock,
            folder: None,
        };
        match process::start(start, &self.storage, self.tell_ended.clone()) {
            Ok(running) => {
                self.running.insert(index, running);
            }
            Err(error) => {
                self.devices.release(index);
                let (end, message) = (AttemptEnd::Infrastructure, "cannot start a process");
                self.desk.state().end(index, end, Some(format!("{message}: {error}")))?;
                self.wait_before_restart(index, view);
            }
        }
        Ok(())
    }

    fn config(
        &self,
        trial: &TrialRecord,
        attempt: u32,
        resume_from: Vec<CheckpointRef>,
        units: u64,
        token_file: &Path,
    ) -> TrialConfig {
        let spec = &self.valid.spec;
        TrialConfig {
            version: CONTRACT_VERSION,
            experiment: self.paths.name.clone(),
            experiment_id: self.paths.uid.clone(),
            trial: trial.spec.index,
            attempt,
            seed: trial.spec.seed,
            experiment_seed: self.seed,
            hyperparameters: trial.spec.hyperparameters.clone(),
            data: spec.data.clone(),
            spec: spec.for_programs(),
            unit: trial.spec.unit,
            units,
            metric: spec.searcher.metric.clone(),
            smaller_is_better: spec.searcher.smaller_is_better,
            scheduling_unit: spec.scheduling_unit,
            records_per_epoch: spec.records_per_epoch,
            validation_period: spec.min_validation_period,
            checkpoint_period: spec.min_checkpoint_period,
            checkpoint_policy: spec.checkpoint_policy,
            perform_initial_validation: spec.perform_initial_validation,
            aggregation_frequency: spec.optimizations.aggregation_frequency,
            average_aggregated_gradients: spec.optimizations.average_aggregated_gradients,
            gradient_compression: spec.optimizations.gradient_compression,
            mixed_precision: spec.optimizations.mixed_precision,
            storage: StorageConfig {
                url: self.paths.root.clone(),
                endpoint: spec.checkpoint_storage.endpoint.clone(),
                trial_path: self.paths.trial(trial.spec.index),
            },
            resume_from,
            report_endpoint: ReportEndpoint {
                url: door::reports_url(&self.door, trial.spec.index),
                token_file: PathBuf::from(token_file).display().to_string(),
                ca: None,
            },
            gang: None,
            context: None,
            inference: None,
        }
    }

    /// Records the end of an attempt.
    fn end(&mut self, ended: Ended, view: &View) -> Result<(), Failure> {
        let Ended { trial: index, attempt, end, message, log_error } = ended;
        if self.running.get(&index).is_none_or(|running| running.attempt != attempt) {
            return Ok(());
        }
        self.running.remove(&index);
        self.devices.release(index);
        self.asked.remove(&index);
        if let Some(error) = log_error {
            view.say(&format!("trial {index}: cannot store the last lines of the log: {error}"));
        }
        self.desk.state().end(index, end, message)?;
        self.wait_before_restart(index, view);
        self.copies.want(index);
        Ok(())
    }

    fn wait_before_restart(&mut self, index: u32, view: &View) {
        self.back_off.remove(&index);
        let back_off = self.desk.state().back_off(index);
        if let Some(BackOff { wait, .. }) = back_off.filter(|_| self.interrupts == 0) {
            view.say(&format!("trial {index}: the next attempt starts in {wait:?}"));
            self.back_off.insert(index, Instant::now() + wait);
        }
    }

    /// Deletes checkpoints that are no longer needed, so that a long trial does not fill the
    /// storage.
    async fn prune(&mut self, view: &View) {
        if self.pruning.as_ref().is_some_and(JoinHandle::is_finished)
            && let Some(pruning) = self.pruning.take()
            && let Ok(Err(error)) = pruning.await
        {
            view.say(&format!(
                "cannot delete old checkpoints: {error}; trying again in {} s",
                PRUNE_AGAIN.as_secs()
            ));
            self.prune_after = Instant::now() + PRUNE_AGAIN;
        }
        if self.pruning.is_some() || Instant::now() < self.prune_after {
            return;
        }
        let spec = &self.valid.spec;
        let smaller_is_better = spec.searcher.smaller_is_better;
        let prunable = self.desk.state().superfluous(&spec.checkpoint_storage, smaller_is_better);
        if prunable.is_empty() {
            return;
        }
        let (desk, storage, paths) = (self.desk.clone(), self.storage.clone(), self.paths.clone());
        self.pruning = Some(tokio::spawn(async move {
            for (index, names) in prunable {
                outcome::delete(&desk, &storage, &paths, index, &names).await?;
            }
            Ok(())
        }));
    }

    fn kill_what_is_late(&mut self) {
        let timeout = Duration::from_secs(self.valid.spec.preemption_timeout_seconds.into());
        let state = self.desk.state();
        for (index, running) in &mut self.running {
            if state.is_to_end(*index) {
                let since = self.asked.entry(*index).or_insert_with(Instant::now);
                if since.elapsed() > timeout {
                    running.kill();
                }
            }
        }
    }

    fn interrupt(&mut self, view: &View) {
        self.interrupts += 1;
        self.desk.state().is_pausing = true;
        let num = self.running.len();
        let what = if num == 1 { "one running trial" } else { &format!("{num} running trials") };
        if num == 0 {
            view.say("stopping: no trial is running");
        } else if self.interrupts == 1 {
            view.say(&format!(
                "stopping: waiting for {what} to checkpoint and exit (at most {} s); send the \
                 signal again to kill immediately",
                self.valid.spec.preemption_timeout_seconds
            ));
            self.running.values().for_each(Running::ask_to_exit);
        } else {
            view.say(&format!("killing {what}"));
            self.running.values_mut().for_each(Running::kill);
        }
    }
}
