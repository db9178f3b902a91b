//! Counts, progress and the best trial of an experiment, kept up to date trial by trial.

mod message;

use std::cmp::Ordering;
use std::collections::{BTreeMap, BTreeSet};

use stoker_api::experiment::{BestTrial, ExperimentStatus, ParetoTrial, Phase};
use stoker_api::number;
use stoker_api::time::Timestamp;
use stoker_api::trial::{CheckpointRecord, CloseCause, Fact};

use super::{Ledger, recorded};
use crate::search::rung::Loss;
use crate::search::{Outcome, SearchConfig, outcome, pareto};
use crate::trial::{
    TrialRecord, closed, compare, ended_seconds, is_open, running_since, trained_units,
};

/// Parts into which the full length is divided to measure progress.
const PARTS: u64 = 1_000_000;

/// Contribution of one trial.
#[derive(Clone, Debug, PartialEq)]
struct Share {
    closed: Option<CloseCause>,
    is_running: bool,
    /// Part of the full length that was trained, in millionths; all of them for an ended trial.
    parts: u64,
    best: Option<(Rank, String)>,
    spent: Spent,
    /// Losses and values of several objectives, by the latest result.
    objectives: Option<(Vec<Loss>, Vec<String>)>,
}

/// Resources that a trial has spent. Units are the length of its latest result; of a copy, from its
/// source.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Spent {
    units: u64,
    ended_seconds: u64,
    running_since: Option<Timestamp>,
}

/// Maximum number of trials of the Pareto front in a status.
const PARETO_MAX: usize = 64;

/// Position among the trials: NaN last, then the lowest index.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Rank {
    is_nan: bool,
    loss: Loss,
    index: u32,
}

/// Sums over the trials of an experiment.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Summary {
    shares: BTreeMap<u32, Share>,
    num_closed: BTreeMap<CloseCause, u32>,
    num_running: u32,
    parts: u64,
    ranking: BTreeSet<Rank>,
    units: u64,
    ended_seconds: u64,
    num_attempts: u32,
    /// Sum over the live attempts.
    running_since: i64,
    /// Trials of the Pareto front.
    front: BTreeSet<u32>,
}

impl Summary {
    /// Returns the summary of these trials.
    pub fn new<'a>(
        config: &SearchConfig,
        trials: impl IntoIterator<Item = &'a TrialRecord>,
    ) -> Self {
        let mut summary = Self::default();
        trials.into_iter().for_each(|trial| summary.update(config, trial));
        summary
    }

    /// Takes in a new or changed trial.
    pub fn update(&mut self, config: &SearchConfig, record: &TrialRecord) {
        let index = record.spec.index;
        let share = share(config, record);
        if self.shares.get(&index) == Some(&share) {
            return;
        }
        let is_moved = self.losses(index) != share.objectives.as_ref().map(|(losses, _)| losses);
        self.withdraw(index);
        if let Some(cause) = share.closed {
            *self.num_closed.entry(cause).or_default() += 1;
        }
        self.num_running += u32::from(share.is_running);
        self.parts += share.parts;
        self.ranking.extend(share.best.as_ref().map(|(rank, _)| *rank));
        self.units += share.spent.units;
        self.ended_seconds += share.spent.ended_seconds;
        self.num_attempts += u32::from(share.spent.running_since.is_some());
        self.running_since += share.spent.running_since.map_or(0, |since| since.0);
        self.shares.insert(index, share);
        if is_moved {
            self.place(index);
        }
    }

    /// Takes in that a trial was deleted.
    pub fn remove(&mut self, index: u32) {
        self.withdraw(index);
        self.place(index);
    }

    fn losses(&self, index: u32) -> Option<&Vec<Loss>> {
        self.shares.get(&index)?.objectives.as_ref().map(|(losses, _)| losses)
    }

    /// Updates the Pareto front after a change of one trial.
    fn place(&mut self, index: u32) {
        if self.front.remove(&index) {
            // Trials that this one surpassed may be on the front now.
            let trials: Vec<u32> = self.shares.keys().copied().collect();
            self.front.clear();
            trials.into_iter().for_each(|trial| self.add_to_front(trial));
        } else {
            self.add_to_front(index);
        }
    }

    fn add_to_front(&mut self, index: u32) {
        let Some(losses) = self.losses(index) else { return };
        let of = |trial: &u32| self.losses(*trial).map_or(&[][..], Vec::as_slice);
        if self.front.iter().any(|other| pareto::dominates(of(other), losses)) {
            return;
        }
        let is_surpassed = |other: &&u32| pareto::dominates(losses, of(other));
        let surpassed: Vec<u32> = self.front.iter().filter(is_surpassed).copied().collect();
        surpassed.iter().for_each(|other| {
            self.front.remove(other);
        });
        self.front.insert(index);
    }

    /// Returns the Pareto front by index. A large front is thinned out along the first objective.
    fn pareto(&self) -> Vec<ParetoTrial> {
        let mut trials: Vec<u32> = self.front.iter().copied().collect();
        if trials.len() > PARETO_MAX {
            trials.sort_by(|one, other| {
                self.losses(*one).cmp(&self.losses(*other)).then(one.cmp(other))
            });
            let last = trials.len() - 1;
            trials = (0..PARETO_MAX).map(|i| trials[i * last / (PARETO_MAX - 1)]).collect();
            trials.sort_unstable();
        }
        let trial = |index: u32| {
            let (_, values) = self.shares.get(&index)?.objectives.clone()?;
            Some(ParetoTrial { index, values })
        };
        trials.into_iter().filter_map(trial).collect()
    }

    /// Takes a trial out of all sums.
    fn withdraw(&mut self, index: u32) {
        let Some(share) = self.shares.remove(&index) else { return };
        if let Some(num) = share.closed.and_then(|cause| self.num_closed.get_mut(&cause)) {
            *num -= 1;
        }
        self.num_running -= u32::from(share.is_running);
        self.parts -= share.parts;
        self.units -= share.spent.units;
        self.ended_seconds -= share.spent.ended_seconds;
        self.num_attempts -= u32::from(share.spent.running_since.is_some());
        self.running_since -= share.spent.running_since.map_or(0, |since| since.0);
        if let Some((rank, _)) = share.best {
            self.ranking.remove(&rank);
        }
    }

    /// Returns the units that all trials have spent.
    pub(super) fn units(&self) -> u64 {
        self.units
    }

    /// Returns the seconds of all attempts.
    pub(super) fn attempt_seconds(&self, now: Timestamp) -> u64 {
        let live = i64::from(self.num_attempts).saturating_mul(now.0) - self.running_since;
        self.ended_seconds + u64::try_from(live).unwrap_or(0)
    }

    /// Returns the number of live attempts that hold slots.
    pub(super) fn num_attempts(&self) -> u32 {
        self.num_attempts
    }

    /// Returns the number of trials that have not ended.
    pub fn num_open(&self) -> u32 {
        self.shares.len() as u32 - self.num_closed.values().sum::<u32>()
    }

    /// Returns the best trial. `checkpoints` returns the checkpoints of a trial.
    pub fn best<'a>(
        &self,
        checkpoints: impl Fn(u32) -> Option<&'a TrialRecord>,
    ) -> Option<BestTrial> {
        let index = self.ranking.first()?.index;
        let (_, metric) = self.shares.get(&index)?.best.clone()?;
        let checkpoint = checkpoints(index).and_then(|trial| checkpoint_with(trial, &metric));
        Some(BestTrial { index, metric, checkpoint })
    }

    /// Returns the status of an experiment, without conditions. With `is_cancelled`, the user wants
    /// it to end. `name` is the experiment's name in commands, such as `mnist -n ml`.
    pub fn status<'a>(
        &self,
        ledger: &Ledger,
        is_cancelled: bool,
        name: &str,
        trial: impl Fn(u32) -> Option<&'a TrialRecord>,
    ) -> ExperimentStatus {
        let best = self.best(&trial);
        let num_created = ledger.book().next_index() - ledger.num_uncreated();
        let phase = self.phase(ledger, is_cancelled);
        let message = match phase {
            Phase::Failed if ledger.has_given_up() => Some(self.failures(ledger, name, trial)),
            _ => self.message(phase, ledger, best.is_some()),
        };
        ExperimentStatus {
            phase,
            trials_created: num_created,
            trials_closed: num_created - self.num_open().min(num_created),
            message,
            best,
            pareto: self.pareto(),
            trials_running: self.num_running,
            progress_percent: (self.progress(ledger, phase).clamp(0.0, 1.0) * 100.0) as u32,
            ..ExperimentStatus::default()
        }
    }

    fn phase(&self, ledger: &Ledger, is_cancelled: bool) -> Phase {
        let is_decided = ledger.book().is_finished();
        let causes = self.num_closed.iter().filter(|(_, num)| **num > 0).map(|(cause, _)| *cause);
        let has_cancelled = self.num_closed.get(&CloseCause::Cancelled).is_some_and(|num| *num > 0);
        match self.num_open() {
            0 if is_cancelled && (has_cancelled || !is_decided) => Phase::Cancelled,
            0 if is_decided => match outcome(causes) {
                Outcome::Completed => Phase::Completed,
                Outcome::Failed => Phase::Failed,
                // The trials ended because of a limit that the user has set.
                Outcome::Cancelled if ledger.limit_reached().is_some() => Phase::Completed,
                Outcome::Cancelled => Phase::Cancelled,
            },
            _ if self.num_running > 0 => Phase::Running,
            _ => Phase::Pending,
        }
    }

    /// Returns the part of the experiment that is done, from 0 to 1.
    pub fn progress(&self, ledger: &Ledger, phase: Phase) -> f64 {
        if phase == Phase::Completed || ledger.book().is_finished() {
            return 1.0;
        }
        let book = ledger.book();
        let num_deleted =
            u64::from(book.next_index()) - self.shares.len().min(book.next_index() as usize) as u64;
        let num_deleted = num_deleted.saturating_sub(u64::from(ledger.num_uncreated()));
        let expected = ledger.num_expected().max(u64::from(book.next_index()));
        match expected {
            0 => 0.0,
            expected => {
                (self.parts + num_deleted * PARTS) as f64 / (expected as f64 * PARTS as f64)
            }
        }
    }
}

fn share(config: &SearchConfig, record: &TrialRecord) -> Share {
    let closed = closed(record).filter(|_| !is_open(record));
    let best = best_metric(record, config.smaller_is_better).map(|metric| {
        let value = number::parse(&metric).unwrap_or(f64::NAN);
        let loss = Loss::of_metric(value, config.smaller_is_better);
        (Rank { is_nan: value.is_nan(), loss, index: record.spec.index }, metric)
    });
    let units = record.status.facts.iter().rev().find_map(|fact| match fact {
        Fact::Result(result) => Some(result.units),
        Fact::Closed(_) | Fact::Reopened(_) => None,
    });
    let inherited = record.spec.source.as_ref().map_or(0, |source| source.units);
    let spent = Spent {
        units: units.unwrap_or(0).saturating_sub(inherited),
        ended_seconds: ended_seconds(record),
        running_since: running_since(record),
    };
    Share {
        spent,
        closed,
        is_running: closed.is_none() && record.status.phase == Phase::Running,
        parts: if closed.is_some() { PARTS } else { trained_parts(config, record) },
        best,
        objectives: objectives(config, record),
    }
}

/// Returns the losses and values of several objectives; `None` without a result.
fn objectives(config: &SearchConfig, record: &TrialRecord) -> Option<(Vec<Loss>, Vec<String>)> {
    if config.other_objectives.is_empty() {
        return None;
    }
    let results = record.status.facts.iter().filter_map(|fact| match fact {
        Fact::Result(result) => Some(result),
        Fact::Closed(_) | Fact::Reopened(_) => None,
    });
    let latest = results.max_by_key(|result| result.units)?;
    let mut values = latest.values.clone();
    values.resize(config.other_objectives.len(), number::format(f64::NAN));
    values.insert(0, latest.metric.clone());
    Some((recorded::losses(latest, config), values))
}

/// Returns the metric by which a trial is compared: the best of its results. A trial whose program
/// stopped early has no result at its length, so its best validation counts, too.
pub fn best_metric(record: &TrialRecord, smaller_is_better: bool) -> Option<String> {
    let results = record.status.facts.iter().filter_map(|fact| match fact {
        Fact::Result(result) => Some(result.metric.clone()),
        Fact::Closed(_) | Fact::Reopened(_) => None,
    });
    let has_stopped = closed(record) == Some(CloseCause::StoppedEarly);
    let of_validations = record.status.best_metric.clone().filter(|_| has_stopped);
    results.chain(of_validations).min_by(|a, b| compare(a, b, smaller_is_better))
}

/// Returns the newest checkpoint with this metric that no attempt refused.
fn checkpoint_with(record: &TrialRecord, metric: &str) -> Option<String> {
    let has_metric = |checkpoint: &&CheckpointRecord| {
        let of = checkpoint.metric.as_deref();
        !checkpoint.refused && of.is_some_and(|of| compare(of, metric, true) == Ordering::Equal)
    };
    let checkpoints = record.status.checkpoints.iter().rev();
    checkpoints.into_iter().find(has_metric).map(|checkpoint| checkpoint.name.clone())
}

/// Returns the part of the full length that an open trial has trained, in millionths.
fn trained_parts(config: &SearchConfig, record: &TrialRecord) -> u64 {
    let part = trained_units(record) / config.units_max.max(1) as f64;
    (part.min(1.0) * PARTS as f64) as u64
}
