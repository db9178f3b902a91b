//! What the runner knows: the record, and what follows from it.
//!
//! Everything is decided by the engine; here its decisions are written down before anybody acts on
//! them.

use std::collections::{BTreeMap, BTreeSet};

use stoker_api::contract::{Directive, Report, ReportEvent};
use stoker_api::experiment::{CheckpointStorage, Experiment, ExperimentStatus};
use stoker_api::trial::AttemptEnd;
use stoker_api::validate::ValidExperiment;
use stoker_engine::experiment::plan;
use stoker_engine::retention;
use stoker_engine::search::{Draw, SearchConfig};
use stoker_engine::trial::{
    self, BackOff, BackOffLimits, NextStep, ReportEffect, RestartLimits, SearchedMetric,
    TargetState, TrialRecord,
};
use tokio::sync::mpsc::UnboundedSender;

use super::record::RecordDir;
use crate::cluster::text::now;
use crate::failure::Failure;

/// Rounds of planning after which something is wrong: a plan that was carried out leaves nothing to
/// do.
const ROUNDS_MAX: u32 = 1000;

/// Something to tell the user about a trial.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Happening {
    /// An attempt was started; checkpoints were refused, with what is wrong with them.
    Started { attempt: u32, from: Option<String>, refused: BTreeMap<String, String> },
    /// A validation has finished.
    Validated { batches: u64, metrics: BTreeMap<String, String> },
    /// A checkpoint exists.
    Checkpointed { batches: u64, name: String },
    /// An attempt ended.
    Ended { attempt: u32, end: AttemptEnd, message: Option<String> },
}

/// The record in memory, and what it was last planned to be.
#[derive(Debug)]
pub(crate) struct State {
    /// The experiment's object.
    pub(crate) experiment: Experiment,
    /// Its trials, by index.
    pub(crate) trials: BTreeMap<u32, TrialRecord>,
    /// Whether the user asked to stop for now.
    pub(crate) is_pausing: bool,
    /// What is done of the search, from 0 to 1.
    pub(crate) progress: f64,
    /// What has not been shown yet, in order.
    pub(crate) happenings: Vec<(u32, Happening)>,
    /// Where to tell the user what fits no trial.
    pub(crate) notes: Option<UnboundedSender<String>>,
    /// What was told last.
    noted: Option<String>,
    folder: RecordDir,
    search: SearchConfig,
    limits: RestartLimits,
    metric: String,
    unwanted: BTreeSet<u32>,
    tokens: BTreeMap<u32, BTreeMap<String, u32>>,
}

impl State {
    /// The state that a record tells. Attempts that were alive when their runner died are ended:
    /// their processes died with it.
    pub(crate) fn new(
        experiment: Experiment,
        trials: BTreeMap<u32, TrialRecord>,
        valid: &ValidExperiment,
        seed: u32,
        folder: RecordDir,
    ) -> Result<Self, Failure> {
        let mut state = Self {
            experiment,
            trials,
            is_pausing: false,
            progress: 0.0,
            happenings: Vec::new(),
            notes: None,
            noted: None,
            folder,
            search: SearchConfig::new(valid, seed),
            limits: RestartLimits::new(valid.spec.max_restarts, BackOffLimits::LOCAL),
            metric: valid.spec.searcher.metric.clone(),
            unwanted: BTreeSet::new(),
            tokens: BTreeMap::new(),
        };
        state.end_orphans()?;
        Ok(state)
    }

    fn end_orphans(&mut self) -> Result<(), Failure> {
        for record in self.trials.values_mut() {
            if trial::live_attempt(record).is_some() {
                let message = "the runner ended without warning, and this attempt with it";
                // It counts for nothing: it never fails a trial, however often.
                let end = AttemptEnd::RunnerLost;
                trial::end_attempt(record, end, Some(message.to_owned()), &self.limits);
                self.folder.save_trial(record)?;
            }
        }
        Ok(())
    }

    /// The experiment's status.
    pub(crate) fn status(&self) -> ExperimentStatus {
        self.experiment.status.clone().unwrap_or_default()
    }

    /// The experiment's name.
    pub(crate) fn name(&self) -> &str {
        self.experiment.metadata.name.as_deref().unwrap_or_default()
    }

    /// Plans and writes the plan down, until nothing is left to write.
    pub(crate) fn settle(&mut self) -> Result<(), Failure> {
        for _ in 0..ROUNDS_MAX {
            let trials: Vec<&TrialRecord> = self.trials.values().collect();
            let plan = plan(&self.search, &trials, self.status().trials_created, false);
            self.unwanted = plan.stop.iter().copied().collect();
            self.progress = plan.progress;
            let is_settled = plan.grants.is_empty() && plan.create.is_empty();
            let granted: BTreeSet<u32> = plan.grants.iter().map(|it| it.0).collect();
            for (index, grant) in plan.grants {
                if let Some(record) = self.trials.get_mut(&index) {
                    record.spec.grants.push(grant);
                }
            }
            for index in granted {
                self.save(index)?;
            }
            for draw in plan.create {
                self.create(draw)?;
            }
            let closed_some = self.close_unwanted()?;
            if self.status() != plan.status {
                self.experiment.status = Some(plan.status);
                self.folder.save_experiment(&self.experiment)?;
            }
            if is_settled && !closed_some {
                return Ok(());
            }
        }
        Err(Failure::System(format!("the search still has more to do after {ROUNDS_MAX} plans")))
    }

    /// Reckons anew what is done of the search: between two plans, trials train on.
    pub(crate) fn reckon_progress(&mut self) {
        let trials: Vec<&TrialRecord> = self.trials.values().collect();
        let plan = plan(&self.search, &trials, self.status().trials_created, false);
        self.progress = plan.progress;
    }

    fn create(&mut self, draw: Draw) -> Result<(), Failure> {
        let spec = draw.into_spec(self.name(), self.search.unit);
        let index = spec.index;
        self.trials.insert(index, TrialRecord { spec, status: Default::default() });
        self.save(index)
    }

    fn close_unwanted(&mut self) -> Result<bool, Failure> {
        let mut closed = Vec::new();
        for (&index, record) in &mut self.trials {
            let wanted = wanted(&self.unwanted, self.is_pausing, index);
            if let NextStep::Close { cause } = trial::next(record, wanted) {
                trial::close(record, cause, None);
                closed.push(index);
            }
        }
        closed.iter().try_for_each(|index| self.save(*index))?;
        Ok(!closed.is_empty())
    }

    /// What to do with each trial, by index.
    pub(crate) fn next(&self) -> Vec<(u32, NextStep)> {
        let next = |(index, record): (&u32, &TrialRecord)| {
            (*index, trial::next(record, wanted(&self.unwanted, self.is_pausing, *index)))
        };
        self.trials.iter().map(next).collect()
    }

    /// Whether the trial's running attempt has been told to end.
    pub(crate) fn is_to_end(&self, index: u32) -> bool {
        self.unwanted.contains(&index) || self.is_pausing
    }

    /// Records that an attempt begins and that `token` is its.
    pub(crate) fn begin(&mut self, index: u32, attempt: u32, token: &str) -> Result<(), Failure> {
        if let Some(record) = self.trials.get_mut(&index) {
            trial::begin_attempt(record, attempt);
            if let Some(attempt) = record.status.attempts.last_mut() {
                attempt.started_at = Some(now());
            }
        }
        self.tokens.entry(index).or_default().insert(token.to_owned(), attempt);
        self.save(index)
    }

    /// Records how the live attempt ended.
    pub(crate) fn end(
        &mut self,
        index: u32,
        end: AttemptEnd,
        message: Option<String>,
    ) -> Result<(), Failure> {
        let Some(record) = self.trials.get_mut(&index) else { return Ok(()) };
        let Some(attempt) = trial::live_attempt(record) else { return Ok(()) };
        // What the program said of its own end is better than the last lines of its log.
        let said = record.status.attempts.last().and_then(|it| it.message.clone());
        let message = if end == AttemptEnd::Completed { said } else { said.or(message) };
        trial::end_attempt(record, end, message.clone(), &self.limits);
        if let Some(attempt) = record.status.attempts.last_mut() {
            attempt.ended_at = Some(now());
        }
        self.save(index)?;
        self.happenings.push((index, Happening::Ended { attempt, end, message }));
        self.settle()
    }

    /// Returns the wait before the trial's next attempt, if there is one.
    pub(crate) fn back_off(&self, index: u32) -> Option<BackOff> {
        let record = self.trials.get(&index).filter(|record| trial::closed(record).is_none())?;
        trial::back_off(record, now(), &self.limits.back_off)
    }

    /// Whether `token` belongs to an attempt of this trial, and to which.
    pub(crate) fn attempt_of(&self, index: u32, token: &str) -> Option<u32> {
        self.tokens.get(&index)?.get(token).copied()
    }

    /// Whether an attempt was replaced or has ended, or its trial has.
    pub(crate) fn is_over(&self, index: u32, attempt: u32) -> bool {
        let is_over =
            |record| trial::directive(record, attempt, TargetState::Run) == Directive::Fenced;
        self.trials.get(&index).is_none_or(is_over)
    }

    /// Records a report and says what its trainer is to do. Nothing is changed if it cannot be
    /// written, or cannot be true: that is [`Failure::Input`].
    pub(crate) fn report(&mut self, index: u32, report: &Report) -> Result<Directive, Failure> {
        let Some(record) = self.trials.get_mut(&index) else { return Ok(Directive::Fenced) };
        let before = record.clone();
        let searched =
            SearchedMetric { name: &self.metric, smaller_is_better: self.search.smaller_is_better };
        let recorded = trial::record_report(record, report, &searched);
        if let ReportEffect::Refused { why } = recorded {
            self.note(format!("trial {index}: a report is refused: {why}"));
            return Err(Failure::Input(why));
        }
        let record = record.clone();
        // Progress alone decides nothing and is not worth a write.
        let is_durable = !matches!(report.event, ReportEvent::Progress { .. });
        if recorded == ReportEffect::New && is_durable {
            if let Err(error) = self.save(index) {
                self.trials.insert(index, before);
                self.note(format!("trial {index}: a report could not be recorded: {error}"));
                return Err(error);
            }
            self.tell(index, report);
            if record.status.facts != before.status.facts {
                self.settle()?;
            }
        }
        let wanted = wanted(&self.unwanted, self.is_pausing, index);
        let record = self.trials.get(&index).unwrap_or(&record);
        Ok(trial::directive(record, report.attempt, wanted))
    }

    fn tell(&mut self, index: u32, report: &Report) {
        let happening = match &report.event {
            ReportEvent::Started { resumed_from, refused, .. } => Happening::Started {
                attempt: report.attempt,
                from: resumed_from.clone(),
                refused: refused.clone(),
            },
            ReportEvent::Validated { metrics, .. } => {
                Happening::Validated { batches: report.batches, metrics: metrics.clone() }
            }
            ReportEvent::Checkpointed { name, .. } => {
                Happening::Checkpointed { batches: report.batches, name: name.clone() }
            }
            ReportEvent::Progress { .. } | ReportEvent::Exiting { .. } => return,
        };
        self.happenings.push((index, happening));
    }

    /// Checkpoints that may go while the search runs, by trial.
    pub(crate) fn superfluous(
        &self,
        policy: &CheckpointStorage,
        smaller_is_better: bool,
    ) -> Vec<(u32, BTreeSet<String>)> {
        let of = |(index, record): (&u32, &TrialRecord)| {
            let checkpoints = &record.status.checkpoints;
            let gone = retention::prunable(policy, smaller_is_better, checkpoints);
            (*index, gone.into_iter().collect())
        };
        let all = self.trials.iter().map(of);
        all.filter(|(_, gone): &(u32, BTreeSet<String>)| !gone.is_empty()).collect()
    }

    /// Takes checkpoints that were deleted out of the record.
    pub(crate) fn forget(&mut self, index: u32, names: &BTreeSet<String>) -> Result<(), Failure> {
        if let Some(record) = self.trials.get_mut(&index) {
            record.status.checkpoints.retain(|it| !names.contains(&it.name));
        }
        self.save(index)
    }

    /// Tells the user, once as long as it is the same.
    fn note(&mut self, text: String) {
        if self.noted.as_ref() != Some(&text) {
            self.noted = Some(text.clone());
            let _ = self.notes.as_ref().map(|it| it.send(text));
        }
    }

    fn save(&self, index: u32) -> Result<(), Failure> {
        self.trials.get(&index).map_or(Ok(()), |record| self.folder.save_trial(record))
    }
}

fn wanted(unwanted: &BTreeSet<u32>, is_pausing: bool, index: u32) -> TargetState {
    match (unwanted.contains(&index), is_pausing) {
        (true, _) => TargetState::Stop,
        (false, true) => TargetState::Pause,
        (false, false) => TargetState::Run,
    }
}
