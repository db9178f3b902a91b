//! Trials that all train to the full length: single, random and grid search.

use std::collections::{BTreeMap, BTreeSet};

use stoker_api::trial::CloseCause;

use super::SearchMethod;
use crate::search::book::{Before, Book, TrialState};
use crate::search::turn::{Edit, Event, Step};
use crate::search::view::{BracketView, Rule, Standing};

/// Creates a number of trials, each with the full length.
#[derive(Clone, Debug, PartialEq)]
pub struct FixedLength {
    units: u64,
    max_trials: u32,
    concurrency: u32,
    replaces_invalid: bool,
    num_created: u32,
    num_invalid: u32,
    num_active: u32,
    undecided: Option<u32>,
    /// Trials with a result that continue after their end, when a place is free.
    reopened: BTreeSet<u32>,
}

impl FixedLength {
    /// Returns a search of `max_trials` trials of this length. At most `concurrency` of them are
    /// active; 0 means no limit.
    pub fn new(units: u64, max_trials: u32, concurrency: u32, replaces_invalid: bool) -> Self {
        Self {
            units,
            max_trials,
            concurrency: limit_or_none(concurrency),
            replaces_invalid,
            num_created: 0,
            num_invalid: 0,
            num_active: 0,
            undecided: None,
            reopened: BTreeSet::new(),
        }
    }

    fn num_missing(&self, book: &Book) -> u32 {
        let replaced =
            if self.replaces_invalid && book.may_replace() { self.num_invalid } else { 0 };
        (self.max_trials + replaced).saturating_sub(self.num_created)
    }
}

fn limit_or_none(concurrency: u32) -> u32 {
    if concurrency == 0 { u32::MAX } else { concurrency }
}

impl SearchMethod for FixedLength {
    fn observe(&mut self, event: &Event, before: Option<Before>, _book: &Book) {
        self.num_active -= u32::from(before.is_some_and(Before::was_active));
        if let Some(trial) = event.trial() {
            self.reopened.remove(&trial);
        }
        match *event {
            Event::Result { trial, .. } => self.undecided = Some(trial),
            Event::Closed { cause: CloseCause::InvalidHyperparameters, .. } => {
                self.num_invalid += 1;
            }
            // A deleted trial counts as one of `max_trials`, even if its hyperparameters were
            // invalid: its record is gone, so a rebuilt search does not know its end.
            Event::Deleted { .. } => {
                self.num_invalid -= u32::from(before.is_some_and(Before::was_invalid))
            }
            Event::Began
            | Event::Closed { .. }
            | Event::Edited(_)
            | Event::LimitReached
            | Event::Answered(_)
            | Event::Reopened => {}
        }
    }

    fn commit(&mut self, step: &Step, book: &Book) {
        match step {
            Step::Create { .. } => {
                self.num_created += 1;
                self.num_active += 1;
            }
            Step::Continue { trial, .. } | Step::Pause { trial } | Step::Stop { trial } => {
                self.undecided.take_if(|undecided| undecided == trial);
                self.reopened.remove(trial);
                self.num_active -= u32::from(book.trial(*trial).state == TrialState::Active);
                self.num_active += u32::from(matches!(step, Step::Continue { .. }));
            }
            Step::Reopen { trials } => {
                for trial in trials {
                    let entry = book.trial(*trial);
                    // The trial is active if the record of its end was deleted.
                    self.num_active -= u32::from(entry.state == TrialState::Active);
                    match entry.has_result() {
                        true => self.reopened.extend([*trial]),
                        false => self.num_active += 1,
                    }
                }
            }
            Step::PromoteClosed { .. } | Step::StopPaused { .. } | Step::StopAll | Step::Finish => {
            }
        }
    }

    fn decide(&self, book: &Book) -> Option<Step> {
        let has_place = self.num_active < self.concurrency;
        // The length may have been raised since.
        let is_short = |trial: u32| book.trial(trial).units < self.units;
        let reopened = self.reopened.first().copied();
        let continued = reopened.filter(|trial| has_place || !is_short(*trial));
        if let Some(trial) = self.undecided.or(continued) {
            return Some(match is_short(trial) {
                true => Step::Continue { trial, units: self.units },
                false => Step::Stop { trial },
            });
        }
        let may_create = self.num_missing(book) > 0 && has_place;
        may_create.then_some(Step::Create {
            group: 0,
            units: self.units,
            source: None,
            hyperparameters: None,
        })
    }

    fn edit(&mut self, edit: &Edit) {
        self.max_trials = edit.max_trials.unwrap_or(self.max_trials);
        self.concurrency = edit.max_concurrent.map_or(self.concurrency, limit_or_none);
        self.units = self.units.max(edit.units_max);
    }

    fn places(&self) -> Option<u32> {
        (self.concurrency < u32::MAX).then_some(self.concurrency)
    }

    fn num_groups(&self) -> u32 {
        1
    }

    fn first_units(&self, _group: u32) -> u64 {
        self.units
    }

    fn length_at(&self, _group: u32, _units: u64) -> u64 {
        self.units
    }

    fn forecast(&self) -> BTreeMap<u64, u64> {
        BTreeMap::from([(self.units, u64::from(self.max_trials))])
    }

    fn rule(&self) -> Rule {
        Rule::FullLength
    }

    fn standing(&self, _trial: u32, _units: u64, _book: &Book) -> Option<Standing> {
        None
    }

    fn views(&self, book: &Book) -> Vec<BracketView> {
        let (num_missing, places) = (self.num_missing(book), self.places());
        vec![BracketView { rungs: vec![], num_missing, places }]
    }
}
