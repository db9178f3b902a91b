//! A service of the user decides which trials run, and how long.
//!
//! Events wait until a question contains them. A question with its number, its *call*, is due as
//! soon as an event waits. Its events follow from the record alone: all that had happened before
//! the latest answer, or else the first one since. So a question that is asked again has the same
//! events.

mod actions;

use std::collections::BTreeMap;

use stoker_api::experiment::ExternalSearch;
use stoker_api::hyperparameters::Space;

use super::SearchMethod;
use crate::search::book::{Before, Book};
use crate::search::turn::{Edit, Event, Step};
use crate::search::view::{BracketView, Rule, Standing};

/// A question that must be answered now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DueQuestion {
    /// Number of the question, from 0.
    pub call: u64,
    /// Position of its last event.
    pub through: u64,
}

/// A search by the answers of a service. All trials belong to group 0.
#[derive(Clone, Debug, PartialEq)]
pub struct External {
    units: u64,
    max_trials: u32,
    concurrency: u32,
    space: Space,
    /// Number of the next question.
    call: u64,
    /// Position of the latest answer; 0 without one.
    answered_in: u64,
    /// Events that no answered question contained, with their positions.
    unsent: Vec<(u64, Event)>,
    /// Trial with a result at the full length.
    completed: Option<u32>,
    /// Number of entries that turns have added to the grants of each trial, or slightly more.
    num_grants: BTreeMap<u32, u32>,
}

impl External {
    /// Returns a search without trials. `units` is the full length of a trial.
    pub fn new(units: u64, search: &ExternalSearch, space: Space) -> Self {
        Self {
            units,
            max_trials: search.max_trials,
            concurrency: search.max_concurrent_trials,
            space,
            call: 0,
            answered_in: 0,
            unsent: vec![],
            completed: None,
            num_grants: BTreeMap::new(),
        }
    }

    /// Returns the events that no answered question contained, with their positions, in order.
    pub fn unsent(&self) -> &[(u64, Event)] {
        &self.unsent
    }

    /// Returns the number of answers.
    pub fn num_answers(&self) -> u64 {
        self.call
    }

    fn note_grant(&mut self, trial: u32) {
        *self.num_grants.entry(trial).or_default() += 1;
    }
}

impl SearchMethod for External {
    fn observe(&mut self, event: &Event, _before: Option<Before>, book: &Book) {
        if let Event::Result { trial, .. } | Event::Closed { trial, .. } = event {
            self.note_grant(*trial);
        }
        match event {
            Event::Answered(answered) => {
                self.unsent.retain(|(order, _)| *order > answered.through);
                self.call = answered.call + 1;
                self.answered_in = book.order();
                return;
            }
            Event::Result { trial, units, .. } if *units >= self.units => {
                self.completed = Some(*trial);
            }
            Event::Deleted { trial } => {
                self.unsent.retain(|(_, unsent)| unsent.trial() != event.trial());
                self.num_grants.remove(trial);
            }
            Event::Began
            | Event::Result { .. }
            | Event::Closed { .. }
            | Event::Edited(_)
            | Event::LimitReached => {}
            // No trial continues, see `may_reopen`.
            Event::Reopened => return,
        }
        self.unsent.push((book.order(), event.clone()));
    }

    fn commit(&mut self, step: &Step, _book: &Book) {
        if let Step::Continue { trial, .. } | Step::Pause { trial } | Step::Stop { trial } = step {
            self.note_grant(*trial);
        }
        if let Step::Stop { trial } = step {
            self.completed.take_if(|completed| completed == trial);
        }
    }

    fn decide(&self, _book: &Book) -> Option<Step> {
        self.completed.map(|trial| Step::Stop { trial })
    }

    /// The service was told that the trial has ended, and may have replaced it.
    fn may_reopen(&self, _trial: u32, _book: &Book) -> bool {
        false
    }

    fn edit(&mut self, edit: &Edit) {
        self.max_trials = edit.max_trials.unwrap_or(self.max_trials);
        self.concurrency = edit.max_concurrent.unwrap_or(self.concurrency);
        self.units = self.units.max(edit.units_max);
    }

    fn places(&self) -> Option<u32> {
        (self.concurrency > 0).then_some(self.concurrency)
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

    fn question(&self) -> Option<DueQuestion> {
        let (first, _) = self.unsent.first()?;
        let is_earlier = |(order, _): &&(u64, Event)| *order < self.answered_in;
        let last = self.unsent.iter().rev().find(is_earlier);
        let through = last.map_or(*first, |(order, _)| *order);
        Some(DueQuestion { call: self.call, through })
    }

    fn forecast(&self) -> BTreeMap<u64, u64> {
        BTreeMap::from([(self.units, u64::from(self.max_trials))])
    }

    fn rule(&self) -> Rule {
        Rule::External
    }

    fn standing(&self, _trial: u32, _units: u64, _book: &Book) -> Option<Standing> {
        None
    }

    fn views(&self, _book: &Book) -> Vec<BracketView> {
        // How many trials follow is known to the service alone.
        vec![BracketView { rungs: vec![], num_missing: 0, places: self.places() }]
    }
}

#[cfg(test)]
mod tests;
