//! Median stopping: ends trials that are worse than most others at the same length.
//!
//! Source: Golovin et al., "Google Vizier: A Service for Black-Box Optimization" (2017), section
//! 3.2.2: a trial stops if its best result so far is worse than the median of the other trials'
//! running means. There, only completed trials are compared; here, all that reached the length.

use std::collections::{BTreeMap, BTreeSet};

use stoker_api::experiment::MedianStopping;
use stoker_api::trial::CloseCause;

use super::SearchMethod;
use crate::search::book::{Before, Book, TrialState};
use crate::search::rung::Loss;
use crate::search::state::AnyMethod;
use crate::search::turn::{Edit, Event, Step};
use crate::search::view::{BracketView, MedianStanding, Rule, Standing};

/// A method whose trials train in steps, and may be stopped after each of them.
///
/// The inner method decides at its own lengths. It sees neither the results in between nor the
/// steps to them, and takes a stopped trial for one that ended by itself.
#[derive(Clone, Debug, PartialEq)]
pub struct Median {
    inner: Box<AnyMethod>,
    rule: MedianStopping,
    /// Running means by length.
    means: BTreeMap<u64, Means>,
    /// Trial with a result between the lengths of the inner method, and whether it stops.
    undecided: Option<(u32, bool)>,
    /// Trial that the latest event stops, and its comparison.
    stopped: Option<(u32, MedianStanding)>,
}

impl Median {
    /// Returns a search by `inner` that also stops trials by `rule`.
    pub fn new(inner: AnyMethod, rule: MedianStopping) -> Self {
        Self {
            inner: Box::new(inner),
            rule,
            means: BTreeMap::new(),
            undecided: None,
            stopped: None,
        }
    }

    fn inner(&self) -> &dyn SearchMethod {
        self.inner.as_dyn()
    }

    /// Returns the end of the step that begins at `from`, on the way to `to`.
    fn step_end(&self, from: u64, to: u64) -> u64 {
        let every = self.rule.every_units.max(1);
        (from / every + 1).saturating_mul(every).min(to)
    }

    /// Returns the length that the inner method granted to a trial that trains to `units`.
    fn goal_of(&self, trial: u32, units: u64, book: &Book) -> u64 {
        self.inner().length_at(book.trial(trial).group, units)
    }

    /// Takes in the results of a trial up to `units`. Returns the comparison if it must stop.
    fn compare(&mut self, trial: u32, units: u64, book: &Book) -> Option<MedianStanding> {
        let losses: Vec<Loss> = book.trial(trial).results.iter().map(|(_, loss)| *loss).collect();
        let best = *losses.iter().min()?;
        let sum: f64 = losses.iter().map(|loss| loss.value()).sum();
        let means = self.means.entry(units).or_default();
        let num_others = means.len();
        let may_stop =
            units >= self.rule.start_units && num_others >= self.rule.min_trials.max(1) as usize;
        let median = means.median().filter(|median| may_stop && best > *median);
        means.insert(trial, Loss::new(sum / losses.len() as f64));
        median.map(|median| MedianStanding { best, median, num_others })
    }

    fn forget(&mut self, trial: u32) {
        self.undecided.take_if(|(undecided, _)| *undecided == trial);
        self.means.retain(|_, means| {
            means.remove(trial);
            means.len() > 0
        });
    }
}

impl SearchMethod for Median {
    fn observe(&mut self, event: &Event, before: Option<Before>, book: &Book) {
        self.stopped = None;
        if let Event::Result { trial, units, .. } = *event {
            let stopped = self.compare(trial, units, book);
            if self.goal_of(trial, units, book) > units {
                self.undecided = Some((trial, stopped.is_some()));
                self.stopped = stopped.map(|standing| (trial, standing));
                return;
            }
        }
        if let Event::Deleted { trial }
        | Event::Closed { trial, cause: CloseCause::InvalidHyperparameters } = *event
        {
            self.forget(trial);
        }
        let before = event.trial().zip(before).map(|(trial, before)| {
            let units = self.goal_of(trial, before.units, book);
            Before { units, ..before }
        });
        self.inner.as_dyn_mut().observe(event, before, book);
    }

    fn commit(&mut self, step: &Step, book: &Book) {
        if let Step::Continue { trial, .. } | Step::Stop { trial } = step {
            self.undecided.take_if(|(undecided, _)| undecided == trial);
        }
        let step = match step {
            Step::Create { group, units, source, hyperparameters } => Step::Create {
                group: *group,
                units: self.inner().length_at(*group, *units),
                source: *source,
                hyperparameters: hyperparameters.clone(),
            },
            Step::Continue { trial, units } => {
                let entry = book.trial(*trial);
                // The inner method has continued a paused trial. It may have reached the full
                // length before an edit raised it.
                let is_paused = entry.state == TrialState::Paused;
                if *units <= self.goal_of(*trial, entry.units, book) && !is_paused {
                    return;
                }
                Step::Continue { trial: *trial, units: self.goal_of(*trial, *units, book) }
            }
            Step::Stop { trial } => {
                let units = book.trial(*trial).units;
                let goal = self.goal_of(*trial, units, book);
                if goal > units {
                    // The inner method counts the trial as active, unless a limit stops it after it
                    // was reopened and before it has continued.
                    let is_paused = book.trial(*trial).state == TrialState::Paused;
                    let state = if is_paused { TrialState::Paused } else { TrialState::Active };
                    let event = Event::Closed { trial: *trial, cause: CloseCause::StoppedEarly };
                    let before = Before { state, units: goal };
                    return self.inner.as_dyn_mut().observe(&event, Some(before), book);
                }
                step.clone()
            }
            _ => step.clone(),
        };
        self.inner.as_dyn_mut().commit(&step, book);
    }

    fn decide(&self, book: &Book) -> Option<Step> {
        if let Some((trial, is_worse)) = self.undecided {
            let units = book.trial(trial).units;
            let next = self.step_end(units, self.goal_of(trial, units, book));
            return Some(match is_worse {
                true => Step::Stop { trial },
                false => Step::Continue { trial, units: next },
            });
        }
        Some(match self.inner().decide(book)? {
            Step::Create { group, units, source, hyperparameters } => {
                let from = source.map_or(0, |source| source.units);
                let units = self.step_end(from, units);
                Step::Create { group, units, source, hyperparameters }
            }
            Step::Continue { trial, units } => {
                let units = self.step_end(book.trial(trial).units, units);
                Step::Continue { trial, units }
            }
            step => step,
        })
    }

    fn may_reopen(&self, trial: u32, book: &Book) -> bool {
        self.inner().may_reopen(trial, book)
    }

    fn places(&self) -> Option<u32> {
        self.inner().places()
    }

    fn num_groups(&self) -> u32 {
        self.inner().num_groups()
    }

    fn first_units(&self, group: u32) -> u64 {
        self.step_end(0, self.inner().first_units(group))
    }

    fn length_at(&self, group: u32, units: u64) -> u64 {
        self.step_end(units.saturating_sub(1), self.inner().length_at(group, units))
    }

    fn goal(&self, group: u32, units: u64) -> u64 {
        self.inner().length_at(group, units)
    }

    fn median_of(&self, trial: u32) -> Option<MedianStanding> {
        self.stopped.filter(|(stopped, _)| *stopped == trial).map(|(_, standing)| standing)
    }

    fn forecast(&self) -> BTreeMap<u64, u64> {
        self.inner().forecast()
    }

    fn edit(&mut self, edit: &Edit) {
        self.inner.as_dyn_mut().edit(edit);
    }

    fn bracket_trials(&self) -> Vec<u32> {
        self.inner().bracket_trials()
    }

    fn rule(&self) -> Rule {
        self.inner().rule()
    }

    fn standing(&self, trial: u32, units: u64, book: &Book) -> Option<Standing> {
        self.inner().standing(trial, units, book)
    }

    fn views(&self, book: &Book) -> Vec<BracketView> {
        self.inner().views(book)
    }
}

/// Running means of the trials that reached one length, split at the median. All operations take
/// O(log n).
#[derive(Clone, Debug, Default, PartialEq)]
struct Means {
    by_trial: BTreeMap<u32, Loss>,
    /// The smaller half, with one more mean if their number is odd.
    low: BTreeSet<(Loss, u32)>,
    high: BTreeSet<(Loss, u32)>,
}

impl Means {
    fn len(&self) -> usize {
        self.by_trial.len()
    }

    /// Returns the median: of an even number, the mean of both in the middle.
    fn median(&self) -> Option<Loss> {
        let (low, _) = *self.low.last()?;
        match self.high.first() {
            Some((high, _)) if self.high.len() == self.low.len() => {
                Some(Loss::new(low.value().midpoint(high.value())))
            }
            _ => Some(low),
        }
    }

    fn insert(&mut self, trial: u32, mean: Loss) {
        self.remove(trial);
        self.by_trial.insert(trial, mean);
        let is_low = self.high.first().is_none_or(|least| (mean, trial) < *least);
        let half = if is_low { &mut self.low } else { &mut self.high };
        half.insert((mean, trial));
        self.balance();
    }

    fn remove(&mut self, trial: u32) {
        let Some(mean) = self.by_trial.remove(&trial) else { return };
        self.low.remove(&(mean, trial));
        self.high.remove(&(mean, trial));
        self.balance();
    }

    fn balance(&mut self) {
        while self.low.len() > self.high.len() + 1 {
            self.high.extend(self.low.pop_last());
        }
        while self.low.len() < self.high.len() {
            self.low.extend(self.high.pop_first());
        }
    }
}

#[cfg(test)]
mod tests;
