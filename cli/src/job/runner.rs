//! Main loop of a job: starts processes and records their exits until the job ends.

mod commits;
mod saving;
mod stops;

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::time::Duration;

use serde_json::json;
use stoker_api::contract::{ReportEndpoint, TrialConfig};
use stoker_api::experiment::{DesiredState, Phase};
use stoker_api::inference::{InferenceJobSpec, OutputManifest, Role, ShardPlan};
use stoker_api::names::{ENV_LAUNCHED, ENV_TERMINATION_FILE, MANIFEST};
use stoker_api::trial::AttemptEnd;
use stoker_engine::devices::GpuPool;
use stoker_engine::inference::config::{JobContext, trial_config};
use stoker_engine::inference::{self, ProcessEnd, ProcessStart};
use stoker_engine::trial::BackOffLimits;
use stoker_storage::{Storage, StorageError};
use tokio::sync::mpsc::{self, UnboundedReceiver, UnboundedSender};
use tokio::time::{Instant, MissedTickBehavior, interval};

use self::saving::Unsaved;
use self::stops::Requests;
use super::manifest::{ManifestError, read_manifest};
use super::record::Record;
use super::view::View;
use crate::cluster::text;
use crate::failure::Failure;
use crate::file::LoadedJob;
use crate::run::RESUME_REMEDY;
use crate::run::gpus;
use crate::run::process::{self, TrainerOutcome, TrainerProcess};
use crate::run::signals::{Signals, StopRequests};
use crate::run_root::RunRoot;

/// Interval of time limit checks.
const TICK: Duration = Duration::from_millis(200);

/// Inputs of a [`Runner`].
#[derive(Debug)]
pub(super) struct RunnerConfig<'a> {
    pub(super) loaded: &'a LoadedJob,
    /// Working directory of the program.
    pub(super) folder: PathBuf,
    pub(super) run_root: RunRoot,
    /// Storage of the logs.
    pub(super) storage: Storage,
    /// Output directory.
    pub(super) output: Storage,
    /// File that is locked while any process of the job is alive.
    pub(super) lock: PathBuf,
    pub(super) record: Record,
    /// ID of the job whose output this job may replace, if any.
    pub(super) replaced_job: Option<String>,
    /// Manifest of the output, if the job has completed.
    pub(super) manifest: Option<OutputManifest>,
    /// GPUs assigned to the slots.
    pub(super) devices: GpuPool,
    /// Number of concurrent workers.
    pub(super) slots: u32,
}

/// Runs one job.
#[derive(Debug)]
pub(super) struct Runner<'a> {
    job: RunnerConfig<'a>,
    running: BTreeMap<u32, RunningWorker>,
    /// Earliest start of the next attempt, by slot.
    backoff: BTreeMap<u32, Instant>,
    outcomes: UnboundedReceiver<TrainerOutcome>,
    outcome_sender: UnboundedSender<TrainerOutcome>,
    interrupts: StopRequests,
    requests: Requests,
    /// Failed write of the record.
    unsaved: Option<Unsaved>,
    /// Time of the stop request to the running processes.
    stop_requested_at: Option<Instant>,
    plan: Option<ShardPlan>,
    /// Indexes of committed shards.
    committed: BTreeSet<u32>,
    /// Last time when commits were counted.
    commits_counted_at: Option<Instant>,
}

/// A running process.
#[derive(Debug)]
struct RunningWorker {
    process: TrainerProcess,
    /// Number of shards that the slot had committed when the process started.
    committed: usize,
    /// File for the process's termination message.
    termination_file: PathBuf,
}

impl<'a> Runner<'a> {
    pub(super) fn new(job: RunnerConfig<'a>) -> Self {
        let (outcome_sender, outcomes) = mpsc::unbounded_channel();
        Self {
            job,
            running: BTreeMap::new(),
            backoff: BTreeMap::new(),
            outcomes,
            outcome_sender,
            interrupts: StopRequests::default(),
            requests: Requests::default(),
            unsaved: None,
            stop_requested_at: None,
            plan: None,
            committed: BTreeSet::new(),
            commits_counted_at: None,
        }
    }

    /// Runs until the job has ended or was stopped and no process is running. Returns the exit
    /// code.
    pub(super) async fn run(
        mut self,
        signals: &mut Signals,
        view: &mut View,
    ) -> Result<u8, Failure> {
        let mut ticks = interval(TICK);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        if self.state() != DesiredState::Active && !self.phase().is_terminal() {
            self.announce(view);
        }
        loop {
            self.obey(view);
            self.retry_save(view);
            let is_over = self.interrupts.any() || self.phase().is_terminal();
            let is_saved = self.unsaved.is_none() || self.interrupts.any();
            if is_over && is_saved && self.running.is_empty() {
                break;
            }
            if is_over || self.state() != DesiredState::Active {
                self.stop_workers();
            } else {
                self.stop_requested_at = None;
                self.start_ready_workers(view)?;
            }
            tokio::select! {
                biased;
                () = signals.next() => self.interrupt(view),
                Some(outcome) = self.outcomes.recv() => self.record_outcome(outcome, view).await?,
                _ = ticks.tick() => self.update_progress(view).await,
            }
        }
        view.finish();
        self.print_outcome(view)
    }

    fn phase(&self) -> Phase {
        self.job.record.phase()
    }

    fn spec(&self) -> &'a InferenceJobSpec {
        &self.job.loaded.valid.spec
    }

    fn start_ready_workers(&mut self, view: &mut View) -> Result<(), Failure> {
        let now = Instant::now();
        let is_ready = |slot: &u32| self.backoff.get(slot).is_none_or(|until| *until <= now);
        let next = inference::next(self.job.record.status());
        let ready: Vec<ProcessStart> =
            next.into_iter().filter(|start| is_ready(&start.slot)).collect();
        for (start, attempt) in ready.into_iter().zip(self.job.record.status().attempts..) {
            if self.unsaved.is_some() {
                break;
            }
            self.start(ProcessStart { attempt, ..start }, view)?;
        }
        Ok(())
    }

    /// Records a process, then starts it.
    fn start(&mut self, start: ProcessStart, view: &mut View) -> Result<(), Failure> {
        let ProcessStart { role, slot, attempt } = start;
        let Some((folder, config)) = self.record_start(start, view) else { return Ok(()) };
        let config_file = folder.join("trial.json");
        let spec = self.spec();
        let termination_file = folder.join("termination.json");
        let mut env: Vec<_> = spec
            .env
            .iter()
            .map(|variable| (variable.name.clone(), variable.value.clone()))
            .collect();
        env.push((ENV_TERMINATION_FILE.to_owned(), termination_file.display().to_string()));
        env.push((ENV_LAUNCHED.to_owned(), "1".to_owned()));
        let visible = self.job.devices.of_worker(slot);
        env.extend(visible.map(|gpu| (gpus::ENV_VISIBLE.to_owned(), gpu.to_owned())));
        let program = spec.entrypoint.command.iter().chain(&spec.entrypoint.args);
        let started = process::start(
            process::TrainerStart {
                trial: slot,
                attempt,
                command: program.cloned().collect(),
                env,
                config: &config_file,
                trial_path: &config.storage.trial_path,
                lock: &self.job.lock,
                folder: Some(&self.job.folder),
            },
            &self.job.storage,
            self.outcome_sender.clone(),
        );
        let process = started.map_err(|error| {
            Failure::System(format!("cannot start a process: {error}; {RESUME_REMEDY}"))
        })?;
        view.started(role, slot, attempt);
        let committed = self.committed_by(slot);
        self.running.insert(slot, RunningWorker { process, committed, termination_file });
        Ok(())
    }

    fn config(&mut self, start: ProcessStart) -> TrialConfig {
        let spec = self.spec();
        let RunnerConfig { loaded, folder, run_root, record, replaced_job, .. } = &mut self.job;
        let slots = record.status().workers.len() as u32;
        let job = JobContext {
            name: &loaded.name,
            uid: record.uid(),
            spec,
            slots,
            root: run_root.root.clone(),
            endpoint: spec.storage.endpoint.clone(),
            path: record.own_path(),
            output_url: record.output_url(run_root, spec, folder),
            replaced_job: replaced_job.as_deref(),
            report_endpoint: ReportEndpoint {
                url: String::new(),
                token_file: String::new(),
                ca: None,
            },
            context: None,
        };
        trial_config(&job, start)
    }

    /// Records the exit of a process.
    async fn record_outcome(
        &mut self,
        outcome: TrainerOutcome,
        view: &mut View,
    ) -> Result<(), Failure> {
        let TrainerOutcome { trial: slot, attempt, end, message, log_error, .. } = outcome;
        if self.running.get(&slot).is_none_or(|worker| worker.process.attempt != attempt) {
            return Ok(());
        }
        let Some(worker) = self.running.remove(&slot) else { return Ok(()) };
        if let Some(error) = log_error {
            view.print_message(&format!(
                "slot {slot}: cannot store the last lines of the log: {error}"
            ));
        }
        self.count_commits(view).await;
        let has_committed = self.committed_by(slot) > worker.committed;
        let termination = process::termination(&worker.termination_file);
        let message = termination.and_then(|termination| termination.message).or(message);
        view.ended(slot, attempt, end, message.as_deref());
        let max_restarts = self.spec().max_restarts;
        let (reason, at) = (end_reason(end).to_owned(), text::now());
        let record = ProcessEnd { slot, attempt, end, reason, message, has_committed, at };
        inference::record_process_end(self.job.record.status(), record, max_restarts);
        if self.phase() == Phase::Completed {
            self.check_output().await?;
        }
        self.save(view);
        self.wait_before_restart(slot, end, view);
        Ok(())
    }

    fn wait_before_restart(&mut self, slot: u32, end: AttemptEnd, view: &View) {
        self.backoff.remove(&slot);
        let status = self.job.record.status();
        let Some(worker) = status.workers.get(slot as usize) else { return };
        let wait = inference::back_off(end, worker, &BackOffLimits::LOCAL);
        let is_over = status.phase.is_terminal() || self.interrupts.any();
        if is_over || wait.is_zero() || self.state() != DesiredState::Active {
            return;
        }
        view.print_message(&format!("slot {slot}: the next attempt starts in {wait:?}"));
        self.backoff.insert(slot, Instant::now() + wait);
    }

    /// Reads the manifest after all processes have completed. The job fails if it has none.
    ///
    /// Call this before the record is saved. If the runner is killed or the storage fails before
    /// the save, the next run repeats the finishing stage.
    async fn check_output(&mut self) -> Result<(), Failure> {
        let found = read_manifest(&self.job.output, self.job.record.uid()).await;
        let url = self.job.output.url().trim_end_matches('/');
        let what = match found {
            Ok(manifest) => {
                self.job.manifest = Some(manifest);
                self.copy_row_counts();
                return Ok(());
            }
            Err(ManifestError::Missing) => {
                let what = "no output found although all processes exited with code 0; the \
                            program must implement `Inference`";
                what.to_owned()
            }
            Err(ManifestError::Damaged(error)) => format!(
                "{url}/{MANIFEST} is not from a job ({error}) although all processes exited with \
                 code 0; the program must implement `Inference`, and no other program may write \
                 there"
            ),
            Err(ManifestError::OtherJob { id, .. }) => format!(
                "{url} contains the output of job {id} although all processes exited with code \
                 0; the program must implement `Inference`, and no other job may write there"
            ),
            Err(ManifestError::Storage(error)) => {
                let what = format!("cannot check the output: {error}; {RESUME_REMEDY}");
                return Err(Failure::System(what));
            }
        };
        let status = self.job.record.status();
        (status.phase, status.message) = (Phase::Failed, Some(what));
        Ok(())
    }

    /// Copies the row counts of the manifest, if any, to the status.
    fn copy_row_counts(&mut self) {
        let Some(manifest) = &self.job.manifest else { return };
        let status = self.job.record.status();
        status.rows = manifest.input_rows;
        status.rows_total = manifest.input_rows;
        status.rejected = manifest.rejected;
    }

    /// Prints the outcome and returns the exit code.
    fn print_outcome(mut self, view: &View) -> Result<u8, Failure> {
        self.copy_row_counts();
        let manifest = self.job.manifest.take();
        self.job.record.save()?;
        let (id, phase) = (self.job.record.id(), self.phase());
        let output = self.job.output.url().trim_end_matches('/').to_owned();
        let remedy = self.resume_remedy();
        let outcome = json!({
            "job": self.job.loaded.name,
            "id": id,
            "phase": phase,
            "rows": manifest.as_ref().map(|manifest| manifest.rows),
            "inputRows": self.job.record.status().rows_total,
            "done": self.job.record.status().rows,
            "rejected": self.job.record.status().rejected,
            "attempts": self.job.record.status().attempts,
            "manifest": manifest.map(|_| format!("{output}/{MANIFEST}")),
            "output": output,
            "message": self.job.record.status().message.clone(),
        });
        view.outcome(&outcome, &remedy);
        Ok(crate::cluster::wait::exit_code(phase))
    }
}

/// Returns why a process ended, in the words of a cluster.
fn end_reason(end: AttemptEnd) -> &'static str {
    match end {
        AttemptEnd::Completed => "Completed",
        AttemptEnd::Preempted => "Preempted",
        AttemptEnd::InvalidHyperparameters => "InvalidHyperparameters",
        AttemptEnd::UserError => "ProgramFailed",
        AttemptEnd::Infrastructure => "InfrastructureError",
        AttemptEnd::RunnerLost => "Killed",
        AttemptEnd::NotStarted => "NotStarted",
    }
}

/// Reads a JSON object; `None` if it does not exist.
async fn read_json<T: serde::de::DeserializeOwned>(
    storage: &Storage,
    path: &str,
) -> Result<Option<T>, Failure> {
    match storage.get(path).await {
        Ok(text) => serde_json::from_slice(&text).map(Some).map_err(|error| {
            Failure::System(format!("cannot parse {}/{path}: {error}", storage.url()))
        }),
        Err(StorageError::NotFound { .. }) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// Returns the human-readable name of a stage.
pub(super) fn stage_name(role: Role, slot: u32) -> String {
    match role {
        Role::Plan => "planning".to_owned(),
        Role::Work => format!("worker {slot}"),
        Role::Finish => "finishing".to_owned(),
    }
}
