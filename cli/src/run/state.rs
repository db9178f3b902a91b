//! The runner's knowledge: the record, and the search in step with it.
//!
//! Nothing takes effect before it is recorded: a change is written before trainers, users or the
//! storage see anything that follows from it; see [`writes`]. If a write fails, trainers continue
//! to their granted lengths, and the record is read again and the write is repeated after a while.

mod answers;
mod attempts;
mod changes;
mod checkpoints;
mod copies;
mod noted;
mod queue;
mod reports;
mod status;
mod trouble;
mod writes;

use std::collections::{BTreeMap, BTreeSet};
use std::time::Instant;

use stoker_api::decisions::PriorTrial;
use stoker_api::experiment::Experiment;
use stoker_api::trial::{AttemptEnd, DesiredTrialState, TrialSpec};
use stoker_api::validate::ValidExperiment;
use stoker_engine::experiment::{
    Ledger, Record, Refusal, Summary, Unreadable, Write, append, requested,
};
use stoker_engine::search::SearchConfig;
use stoker_engine::trial::{
    self, BackOffLimits, NextStep, RestartLimits, TargetState, TrialRecord,
};
use tokio::sync::mpsc::UnboundedSender;

use self::noted::Noted;
use self::queue::Queue;
use self::status::StatusFile;
use self::trouble::Trouble;
use self::writes::Waiting;
use super::record::RecordDir;
use super::request::{Request, is_final};
use crate::cluster::text::now;
use crate::failure::Failure;

/// News about a trial for the user.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Happening {
    /// An attempt has started. Maps refused checkpoints to the reason.
    Started { attempt: u32, from: Option<String>, refused: BTreeMap<String, String> },
    /// A validation has finished.
    Validated { batches: u64, metrics: BTreeMap<String, String> },
    /// A checkpoint exists.
    Checkpointed { batches: u64, name: String },
    /// An attempt has ended. `is_failure`: the trial failed, with exit code 0.
    Ended { attempt: u32, end: AttemptEnd, is_failure: bool, message: Option<String> },
}

/// End of an attempt that is not recorded yet.
#[derive(Clone, Debug)]
struct UnrecordedEnd {
    trial: u32,
    end: AttemptEnd,
    message: Option<String>,
    limits: RestartLimits,
}

/// The record in memory, and its search.
#[derive(Debug)]
pub(crate) struct State {
    /// The experiment's object.
    pub(crate) experiment: Experiment,
    /// Its trials, by index.
    pub(crate) trials: BTreeMap<u32, TrialRecord>,
    /// Trials of earlier experiments, with which the search begins.
    prior: Vec<PriorTrial>,
    /// Whether the user asked to stop for now.
    pub(crate) is_pausing: bool,
    /// News that were not shown yet, in order.
    pub(crate) happenings: Vec<(u32, Happening)>,
    /// Receives messages for the user.
    pub(crate) notes: Option<UnboundedSender<String>>,
    /// The latest messages.
    noted: Noted,
    folder: RecordDir,
    /// The search as the spec says. That of the ledger follows once the edit is recorded.
    config: SearchConfig,
    ledger: Ledger,
    summary: Summary,
    queue: Queue,
    limits: RestartLimits,
    metric: String,
    release_seconds: u32,
    /// Trials whose files are behind the memory.
    waiting: Waiting,
    /// Trials that have changed since their records were copied to the storage.
    uncopied: BTreeSet<u32>,
    /// Trials whose checkpoints have changed since the last deletion.
    prunable: BTreeSet<u32>,
    tokens: BTreeMap<u32, BTreeMap<String, u32>>,
    unrecorded: Vec<UnrecordedEnd>,
    status_file: StatusFile,
    trouble: Option<Trouble>,
    /// Why the external searcher has not answered.
    refusal: Option<Refusal>,
    /// Requests of commands. They take effect when the record contains them.
    request: Request,
    /// When the record last noted that this runner is alive.
    noted_alive_at: Option<Instant>,
}

impl State {
    /// Returns the state of a record. Ends the attempts that were alive when their runner died:
    /// their processes died with it. Requests that cannot be read change nothing; the runner
    /// reports them.
    pub(crate) fn new(
        experiment: Experiment,
        trials: BTreeMap<u32, TrialRecord>,
        prior: Vec<PriorTrial>,
        valid: &ValidExperiment,
        seed: u32,
        folder: RecordDir,
    ) -> Result<Self, Failure> {
        let config = SearchConfig::new(valid, seed);
        let request = Request::read(folder.path()).unwrap_or_default();
        let (ledger, missing) = rebuild(&config, &experiment, &trials, &folder)?;
        let mut state = Self {
            experiment,
            is_pausing: false,
            happenings: vec![],
            notes: None,
            noted: Noted::default(),
            folder,
            summary: Summary::new(&config, trials.values()),
            queue: Queue::default(),
            waiting: Waiting::default(),
            uncopied: trials.keys().copied().collect(),
            prunable: trials.keys().copied().collect(),
            trials,
            prior,
            config,
            ledger,
            limits: RestartLimits::new(valid.spec.max_restarts, BackOffLimits::LOCAL, false),
            metric: valid.spec.searcher.metric.clone(),
            release_seconds: valid.spec.searcher.release_seconds,
            tokens: BTreeMap::new(),
            unrecorded: vec![],
            status_file: StatusFile::default(),
            trouble: None,
            refusal: None,
            request,
            noted_alive_at: None,
        };
        state.end_orphans()?;
        state.execute(missing)?;
        state.queue.touch_all(state.trials.keys());
        Ok(state)
    }

    /// Returns the experiment's name.
    pub(crate) fn name(&self) -> &str {
        self.experiment.metadata.name.as_deref().unwrap_or_default()
    }

    /// Lets the search take in everything that is recorded, and records what follows.
    ///
    /// # Errors
    ///
    /// The record could not be written. [`retry`](Self::retry) repeats the write.
    pub(crate) fn settle(&mut self) -> Result<(), Failure> {
        self.recover()?;
        let settled = self.record_ends().and_then(|()| self.decide());
        settled.and_then(|()| self.write_fact()).map_err(|error| self.fail(error))
    }

    /// Does what is due: repeats a failed write, ends the search at a limit, and writes the status.
    pub(crate) fn tick(&mut self) {
        self.retry();
        self.enforce_limits();
        self.flush_status();
        self.note_alive();
    }

    /// Ends the search if a limit is reached.
    fn enforce_limits(&mut self) {
        if !is_final(self.desired_state())
            && self.ledger.seconds_to_limit(&self.summary, now()) == Some(0)
        {
            // A failed write is repeated.
            let _ = self.settle();
        }
    }

    fn record_ends(&mut self) -> Result<(), Failure> {
        while let Some(end) = self.unrecorded.first().cloned() {
            self.record_end(end, now())?;
            self.unrecorded.remove(0);
        }
        Ok(())
    }

    fn decide(&mut self) -> Result<(), Failure> {
        self.record_request()?;
        if is_final(self.desired_state()) {
            return self.end_search();
        }
        let writes = self.ledger.begin(env!("CARGO_PKG_VERSION"), self.prior.clone(), now());
        self.execute(writes)?;
        let mut waits = self.edit()?;
        loop {
            if !waits {
                let writes = self.ledger.reach_limit(&self.summary, now());
                self.execute(writes)?;
                self.create_missing();
            }
            self.take_in_touched(waits)?;
            let is_settled = if waits {
                waits = self.edit()?;
                self.queue.touch_all(self.trials.keys().filter(|_| !waits));
                waits
            } else {
                !self.reopen()?
            };
            if is_settled {
                self.unpin()?;
                return self.save_status();
            }
        }
    }

    /// Takes in changed trials. While an edit `waits`, nothing is decided about them.
    fn take_in_touched(&mut self, waits: bool) -> Result<(), Failure> {
        while let Some(touched) = self.queue.take_touched() {
            let records = touched.iter().filter_map(|index| self.trials.get(index));
            let pending = if waits { vec![] } else { self.ledger.pending(records) };
            for fact in pending {
                let writes = self.ledger.advance(&fact);
                self.execute(writes)?;
                self.create_missing();
            }
            for index in touched {
                self.follow(index)?;
                self.enqueue(index);
            }
        }
        Ok(())
    }

    fn execute(&mut self, writes: Vec<Write>) -> Result<(), Failure> {
        for write in writes {
            match write {
                Write::Log(entry) => {
                    let mut experiment = self.experiment.clone();
                    append(&mut experiment.status.get_or_insert_default().log, entry);
                    self.save_experiment(experiment)?;
                }
                Write::Grant { trial, grant } => {
                    let Some(mut record) = self.trials.get(&trial).cloned() else { continue };
                    record.spec.grants.push(grant);
                    self.save(record)?;
                }
                Write::Pin { trial, checkpoints } => self.pin(trial, checkpoints)?,
            }
        }
        Ok(())
    }

    fn create_missing(&mut self) {
        let missing: Vec<TrialSpec> = self.ledger.missing().cloned().collect();
        for spec in missing {
            let index = spec.index;
            self.add(TrialRecord { spec, status: Default::default() });
            self.ledger.created(index);
        }
    }

    /// Closes or reopens a trial if that follows from the search.
    fn follow(&mut self, index: u32) -> Result<(), Failure> {
        let Some(record) = self.trials.get(&index) else { return Ok(()) };
        let change = match trial::next(record, self.target(index)) {
            NextStep::Close { cause } => Some(cause),
            NextStep::Reopen => None,
            NextStep::Start { .. } | NextStep::Running | NextStep::Idle | NextStep::Done => {
                return Ok(());
            }
        };
        let mut record = record.clone();
        let num_facts = record.status.facts.len();
        match change {
            Some(cause) => trial::close(&mut record, cause, None),
            None => trial::reopen(&mut record),
        }
        trial::stamp_facts(&mut record, num_facts, now());
        self.save(record)
    }

    /// Returns what is wanted of a trial now.
    fn target(&self, index: u32) -> TargetState {
        use DesiredTrialState as D;
        match requested(self.desired_state(), self.ledger.state(index)) {
            _ if self.is_killed(index) => TargetState::Stop,
            Some(D::Stop | D::Kill) => TargetState::Stop,
            Some(D::Pause) => TargetState::Pause,
            _ if self.is_pausing || self.queue.is_released(index) => TargetState::Pause,
            Some(D::Run) | None => TargetState::Run,
        }
    }

    /// Returns whether the trial's running attempt was told to end.
    pub(crate) fn is_to_end(&self, index: u32) -> bool {
        self.target(index) != TargetState::Run
    }

    /// Returns the maximum number of concurrent gangs; `None` means no limit.
    pub(crate) fn places(&self) -> Option<u32> {
        self.ledger.places()
    }

    /// Returns the first `num` trials that may start an attempt, in the order in which they start.
    pub(crate) fn startable(&self, num: usize) -> Vec<u32> {
        match self.is_paused() || self.trouble.is_some() {
            true => vec![],
            false => self.queue.startable(num),
        }
    }

    /// Returns how a trial continues.
    pub(crate) fn next(&self, index: u32) -> NextStep {
        let record = self.trials.get(&index);
        record.map_or(NextStep::Done, |record| trial::next(record, self.target(index)))
    }

    /// Releases trials that have nothing to train: at once if another trial waits for room.
    pub(crate) fn release(&mut self, is_room_wanted: bool) {
        let now = now();
        for index in self.queue.idle() {
            let Some(record) = self.trials.get(&index) else { continue };
            let until = trial::last_result_at(record).plus(self.release_seconds.into());
            if is_room_wanted || until <= now {
                self.queue.release(index);
            }
        }
    }

    /// Updates the queues of a trial that has changed.
    fn enqueue(&mut self, index: u32) {
        if let Some(record) = self.trials.get(&index) {
            self.queue.update(&self.ledger, record);
        }
    }

    /// Sends a message to the user, unless it was sent recently.
    fn note(&mut self, text: String) {
        if self.noted.is_due(&text) {
            let _ = self.notes.as_ref().map(|notes| notes.send(text));
        }
    }
}

/// Rebuilds the search from a record.
fn rebuild(
    config: &SearchConfig,
    experiment: &Experiment,
    trials: &BTreeMap<u32, TrialRecord>,
    folder: &RecordDir,
) -> Result<(Ledger, Vec<Write>), Failure> {
    let read = |record: Record<'_>| Ledger::rebuild(config, record);
    read_record(experiment, trials, folder, read)
}

/// Derives something from a record.
fn read_record<T>(
    experiment: &Experiment,
    trials: &BTreeMap<u32, TrialRecord>,
    folder: &RecordDir,
    read: impl FnOnce(Record<'_>) -> Result<T, Unreadable>,
) -> Result<T, Failure> {
    let status = experiment.status.clone().unwrap_or_default();
    let by_index = trials.iter().map(|(index, record)| (*index, record)).collect();
    let record =
        Record { log: &status.log, trials: &by_index, trials_created: status.trials_created };
    read(record).map_err(|error| {
        Failure::Input(format!(
            "cannot read the record in {}: {error}; restore the file, or use --fresh to start over",
            folder.path().display()
        ))
    })
}

#[cfg(test)]
mod tests;
