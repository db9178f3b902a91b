//! The fold of recorded facts into a search, and what follows from it for the experiment.
//!
//! Facts that have a place are replayed in its order; facts without one get the next places, by
//! trial and then by age. Whatever a fold says of a trial beyond what is granted to it becomes a
//! grant. Nothing is remembered between plans.

use std::borrow::Borrow;
use std::cmp::Ordering;
use std::collections::{BTreeMap, BTreeSet, VecDeque};

use stoker_api::experiment::{BestTrial, ExperimentStatus, Phase};
use stoker_api::number;
use stoker_api::trial::{CheckpointRecord, CloseCause, Fact, Grant, TrialStatus};

pub use crate::trial::TrialRecord;

use crate::search::{Action, Draw, Event, Outcome, Search, SearchConfig, outcome};
use crate::trial::{closed, compare, granted_units};

/// What is to be done, in this order: all grants, then creates by index, then stops, then the
/// status.
///
/// A grant must be recorded before anything that follows from it exists, so cutting the list
/// anywhere and planning again gives the rest. `status` is what holds once all of it was done.
#[derive(Clone, Debug, PartialEq)]
pub struct ExperimentPlan {
    /// Grants to add to `spec.grants`, by trial index, in order.
    pub grants: Vec<(u32, Grant)>,
    /// Trials to create, in order.
    pub create: Vec<Draw>,
    /// Open trials of which nothing more is wanted.
    pub stop: Vec<u32>,
    /// How the experiment is going.
    pub status: ExperimentStatus,
    /// The part of it that is done, from 0 to 1.
    pub progress: f64,
}

/// Folds the recorded facts into the search and says what is to be done.
///
/// `trials_created` is the experiment's recorded status; an index below it, or below a recorded
/// one, that has no record was deleted: it counts as closed from its start, its facts count no
/// more, and it is not created again. With `cancelled` no trial is created and all open ones are in
/// `stop`.
pub fn plan<R: Borrow<TrialRecord>>(
    config: &SearchConfig,
    trials: &[R],
    trials_created: u32,
    cancelled: bool,
) -> ExperimentPlan {
    plan_with(Search::new(config.clone()), config, trials, trials_created, cancelled)
}

/// As [`plan`], with a search that has not begun.
pub(crate) fn plan_with<R: Borrow<TrialRecord>>(
    search: Search,
    config: &SearchConfig,
    trials: &[R],
    trials_created: u32,
    cancelled: bool,
) -> ExperimentPlan {
    let trials = trials.iter().map(Borrow::borrow);
    let trials: BTreeMap<u32, &TrialRecord> = trials.map(|it| (it.spec.index, it)).collect();
    let end = trials.keys().last().map_or(0, |it| it.saturating_add(1)).max(trials_created);
    let mut fold = Fold::new(search, &trials, end);
    fold.run();
    let Fold { search, mut grants, draws, stopped, units, next_order, .. } = fold;
    grants.extend(raises(&trials, &grants, &units, next_order));

    let mut create: Vec<Draw> = draws.into_iter().filter(|it| it.index >= end).collect();
    let is_cut_short = cancelled && !create.is_empty();
    if cancelled {
        create.clear();
    }
    let is_open = |it: &u32| trials.get(it).is_some_and(|record| closed(record).is_none());
    let is_unwanted = |it: &u32| cancelled || stopped.contains(it);
    let stop = trials.keys().copied().filter(|it| is_open(it) && is_unwanted(it)).collect();

    let causes: Vec<CloseCause> = trials.values().filter_map(|it| closed(it)).collect();
    let num_open = (trials.len() - causes.len() + create.len()) as u32;
    let is_cancelled = is_cut_short || cancelled && causes.contains(&CloseCause::Cancelled);
    let any_runs = trials.values().any(|trial| trial.status.phase == Phase::Running);
    let phase = match num_open {
        0 if is_cancelled => Phase::Cancelled,
        0 => final_phase(&causes),
        _ if any_runs => Phase::Running,
        _ => Phase::Pending,
    };
    let best = best(config.smaller_is_better, &trials);
    let trials_created = end.saturating_add(create.len() as u32);
    let status = ExperimentStatus {
        phase,
        trials_created,
        trials_closed: trials_created - num_open,
        message: message(phase, causes.len(), best.is_some()),
        best,
        ..ExperimentStatus::default()
    };
    let trained = |trial| trials.get(&trial).map_or(0.0, |it| trained(config, it));
    let progress = match phase {
        Phase::Completed => 1.0,
        _ => search.progress_with(trained),
    };
    ExperimentPlan { grants, create, stop, status, progress }
}

struct Fold<'a> {
    trials: &'a BTreeMap<u32, &'a TrialRecord>,
    /// The first index that was never used.
    end: u32,
    search: Search,
    grants: Vec<(u32, Grant)>,
    draws: Vec<Draw>,
    stopped: BTreeSet<u32>,
    /// Lengths by what the search said.
    units: BTreeMap<u32, u64>,
    next_order: u64,
}

impl<'a> Fold<'a> {
    fn new(search: Search, trials: &'a BTreeMap<u32, &'a TrialRecord>, end: u32) -> Self {
        let orders = trials.values().flat_map(|it| &it.spec.grants).map(|it| it.order);
        Self {
            trials,
            end,
            search,
            grants: Vec::new(),
            draws: Vec::new(),
            stopped: BTreeSet::new(),
            units: BTreeMap::new(),
            next_order: orders.max().map_or(0, |it| it + 1),
        }
    }

    fn run(&mut self) {
        let actions = self.search.start();
        self.note(actions);
        let mut placed: Vec<(u64, u32, u32)> = Vec::new();
        for (&trial, record) in self.trials {
            placed.extend(record.spec.grants.iter().map(|it| (it.order, trial, it.fact)));
        }
        placed.sort_unstable();
        // A fact that was placed twice had its trial's length raised by another trial's fact.
        let mut seen = BTreeSet::new();
        for (_, trial, fact) in placed {
            if seen.insert((trial, fact)) {
                self.replay(trial, fact);
            }
        }
        for (&trial, record) in self.trials {
            for fact in 0..record.status.facts.len() as u32 {
                if seen.insert((trial, fact)) {
                    self.replay(trial, fact);
                    let units = self.units_of(trial);
                    self.grants.push((trial, Grant { order: self.next_order, fact, units }));
                    self.next_order += 1;
                }
            }
        }
    }

    fn replay(&mut self, trial: u32, fact: u32) {
        let facts = self.trials.get(&trial).map(|it| &it.status.facts);
        let event = match facts.and_then(|it| it.get(fact as usize)) {
            Some(Fact::Result(it)) => {
                let metric = number::parse(&it.metric).unwrap_or(f64::NAN);
                Event::Result { trial, units: it.units, metric }
            }
            Some(Fact::Closed(it)) => Event::Closed { trial, cause: it.cause },
            None => return,
        };
        let actions = self.search.handle(event);
        self.note(actions);
    }

    fn note(&mut self, actions: Vec<Action>) {
        let mut rest = VecDeque::from(actions);
        while let Some(action) = rest.pop_front() {
            match action {
                Action::Create(draw) => {
                    let trial = draw.index;
                    self.draws.push(draw);
                    if trial < self.end && !self.trials.contains_key(&trial) {
                        let event = Event::Closed { trial, cause: CloseCause::Deleted };
                        rest.extend(self.search.handle(event));
                    }
                }
                Action::Continue { trial, units } => {
                    self.units.insert(trial, units);
                }
                Action::Stop { trial } => {
                    self.stopped.insert(trial);
                }
                Action::Shutdown { .. } => {}
            }
        }
    }

    fn units_of(&self, trial: u32) -> u64 {
        let recorded = self.trials.get(&trial).map_or(0, |it| granted_units(&it.spec));
        self.units.get(&trial).copied().unwrap_or(0).max(recorded)
    }
}

/// Grants for trials whose length another trial's fact raised: their own latest fact is placed once
/// more.
fn raises(
    trials: &BTreeMap<u32, &TrialRecord>,
    grants: &[(u32, Grant)],
    units: &BTreeMap<u32, u64>,
    first_order: u64,
) -> Vec<(u32, Grant)> {
    let granted = |trial: u32, record: &TrialRecord| {
        let new = grants.iter().filter(|it| it.0 == trial).map(|it| it.1.units);
        new.fold(granted_units(&record.spec), u64::max)
    };
    let raised = trials.iter().filter_map(|(&trial, &record)| {
        let units = *units.get(&trial)?;
        let fact = u32::try_from(record.status.facts.len().checked_sub(1)?).ok()?;
        (units > granted(trial, record)).then_some((trial, fact, units))
    });
    (first_order..)
        .zip(raised)
        .map(|(order, (trial, fact, units))| (trial, Grant { order, fact, units }))
        .collect()
}

fn final_phase(causes: &[CloseCause]) -> Phase {
    match outcome(causes.iter().copied()) {
        Outcome::Completed => Phase::Completed,
        Outcome::Failed => Phase::Failed,
        Outcome::Cancelled => Phase::Cancelled,
    }
}

fn message(phase: Phase, num_closed: usize, has_best: bool) -> Option<String> {
    match phase {
        Phase::Failed => Some(format!("none of {num_closed} trials could be trained to an end")),
        Phase::Completed if !has_best => Some("no trial has a result".to_owned()),
        _ => None,
    }
}

/// The part of `units_max` that an open trial has trained, by its last report.
fn trained(config: &SearchConfig, record: &TrialRecord) -> f64 {
    let TrialStatus { batches, batches_total, .. } = record.status;
    if batches_total == 0 {
        return 0.0;
    }
    let of_granted = batches as f64 / batches_total as f64;
    let granted = granted_units(&record.spec) as f64 / config.units_max.max(1) as f64;
    of_granted.min(1.0) * granted.min(1.0)
}

/// The trial with the best metric: NaN last, then the lowest index.
///
/// A trial counts by its best result. One without a result, because its program stopped early,
/// counts by its best validation, whether or not that has a checkpoint.
fn best(smaller_is_better: bool, trials: &BTreeMap<u32, &TrialRecord>) -> Option<BestTrial> {
    let of_trial = |record: &TrialRecord| {
        let results = record.status.facts.iter().filter_map(|it| match it {
            Fact::Result(it) => Some(it.metric.clone()),
            Fact::Closed(_) => None,
        });
        let has_stopped = closed(record) == Some(CloseCause::StoppedEarly);
        let of_validations = || record.status.best_metric.clone().filter(|_| has_stopped);
        results.min_by(|a, b| compare(a, b, smaller_is_better)).or_else(of_validations)
    };
    let candidates = trials.iter().filter_map(|(&trial, &it)| Some((trial, of_trial(it)?)));
    let (index, metric) = candidates.min_by(|a, b| compare(&a.1, &b.1, smaller_is_better))?;
    let checkpoint = trials.get(&index).and_then(|it| checkpoint_with(it, &metric));
    Some(BestTrial { index, metric, checkpoint })
}

/// The newest checkpoint with this metric.
fn checkpoint_with(record: &TrialRecord, metric: &str) -> Option<String> {
    let has_metric = |it: &&CheckpointRecord| {
        it.metric.as_deref().is_some_and(|it| compare(it, metric, true) == Ordering::Equal)
    };
    record.status.checkpoints.iter().rev().find(has_metric).map(|it| it.name.clone())
}

mod refusal;
mod steer;

pub use refusal::{POD_INVALID, Refusal, TRIAL_INVALID, failed, refusal, set_refusal};
pub use steer::{Steering, conditions, kills, steer};

#[cfg(test)]
mod tests;
