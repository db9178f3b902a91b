//! Checks the actions of an answer, and turns them into steps.

use std::collections::BTreeSet;

use serde_json::{Value, json};
use stoker_api::external::{Action, ContinueAction, CreateAction, TAG_BYTES_MAX};
use stoker_api::validate::shortened;

use super::External;
use crate::search::book::{Book, TrialState};
use crate::search::sample::{is_in_space, normalized};
use crate::search::turn::{Event, Step};

/// Maximum number of grants of a trial, by the schema of `Trial.spec.grants`.
const GRANTS_MAX: u32 = 512;
/// Number of grants that may follow from a continue: the continue itself, its result, a pause, and
/// an end of the trial.
const GRANTS_OF_CONTINUE: u32 = 4;

impl External {
    /// Returns the steps of an answer to the question with events up to `through`. Actions on
    /// trials that have ended meanwhile have none: the next question tells the service.
    ///
    /// # Errors
    ///
    /// The first action that the search cannot take, and why.
    pub fn steps(
        &self,
        actions: &[Action],
        through: u64,
        book: &Book,
    ) -> Result<Vec<Step>, String> {
        let later = self.unsent.iter().filter(|(order, _)| *order > through);
        let is_edited = later.clone().any(|(_, event)| matches!(event, Event::Edited(_)));
        let (changed, steps) = (BTreeSet::new(), vec![]);
        let mut plan = Plan { method: self, book, is_edited, changed, steps };
        for (i, action) in actions.iter().enumerate() {
            let is_last = i + 1 == actions.len();
            plan.add(action, is_last).map_err(|why| format!("actions[{i}].{why}"))?;
        }
        if later.count() == 0 && plan.is_stalled() {
            return Err("actions: no trial trains after them, and nothing can happen any more; \
                        create or continue a trial, or finish"
                .to_owned());
        }
        Ok(plan.steps)
    }

    /// Checks that the records of trials on a cluster have space for what follows from an answer.
    ///
    /// # Errors
    ///
    /// The first action that continues a trial whose record is full.
    pub fn check_grants(&self, actions: &[Action], book: &Book) -> Result<(), String> {
        for (i, action) in actions.iter().enumerate() {
            let Action::Continue(ContinueAction { trial, .. }) = action else { continue };
            let state = book.trials().get(*trial as usize).map(|entry| entry.state);
            let num_grants = self.num_grants.get(trial).copied().unwrap_or_default();
            let continues = matches!(state, Some(TrialState::Waiting | TrialState::Paused));
            if continues && num_grants + GRANTS_OF_CONTINUE > GRANTS_MAX {
                return Err(format!(
                    "actions[{i}].continue.trial: {trial}: its record is full: it has \
                     {num_grants} results, continues and pauses; stop it"
                ));
            }
        }
        Ok(())
    }
}

struct Plan<'a> {
    method: &'a External,
    book: &'a Book,
    /// Whether the user has edited the search since the question. The service must hear of it
    /// before the search ends.
    is_edited: bool,
    /// Trials of other actions.
    changed: BTreeSet<u32>,
    steps: Vec<Step>,
}

impl Plan<'_> {
    fn num_created(&self) -> u32 {
        self.steps.iter().filter(|step| matches!(step, Step::Create { .. })).count() as u32
    }

    fn add(&mut self, action: &Action, is_last: bool) -> Result<(), String> {
        match action {
            Action::Create(create) => {
                let step = self.create(create).map_err(|why| format!("create{why}"))?;
                self.steps.push(step);
            }
            Action::Continue(action) => {
                let step = self.continue_(*action).map_err(|why| format!("continue.{why}"))?;
                self.steps.extend(step);
            }
            Action::Pause(action) => {
                let trial = action.trial;
                match self.state(trial).map_err(|why| format!("pause.{why}"))? {
                    TrialState::Active => {
                        return Err(format!(
                            "pause.trial: {trial}: it has no result at its granted length yet; \
                             pause it after its result, or stop it"
                        ));
                    }
                    TrialState::Waiting => self.steps.push(Step::Pause { trial }),
                    _ => {}
                }
            }
            Action::Stop(action) => {
                let state = self.state(action.trial).map_err(|why| format!("stop.{why}"))?;
                let step = Step::Stop { trial: action.trial };
                self.steps.extend(state.is_open().then_some(step));
            }
            Action::Finish(_) if !is_last => {
                return Err("finish: other actions follow it; make it the last one".to_owned());
            }
            Action::Finish(_) => {
                let stop = (self.num_open() > 0).then_some(Step::StopAll);
                let end = (!self.is_edited).then_some(Step::Finish);
                self.steps.extend(stop.into_iter().chain(end));
            }
        }
        Ok(())
    }

    fn create(&self, create: &CreateAction) -> Result<Step, String> {
        let CreateAction { trial, hyperparameters, units, tag } = create;
        let next = self.book.next_index() + self.num_created();
        if let Some(trial) = trial.filter(|trial| *trial != next) {
            return Err(format!(".trial: {trial}: the next trial is {next}; leave the field out"));
        }
        let External { max_trials, units: units_max, space, .. } = self.method;
        if next >= *max_trials {
            return Err(format!(
                ": trial {next} would be one more than spec.searcher.external.maxTrials, which is \
                 {max_trials}; create fewer trials, or raise maxTrials"
            ));
        }
        let units = units.unwrap_or(*units_max);
        if !(1..=*units_max).contains(&units) {
            return Err(format!(
                ".units: {units}: must be from 1 to spec.searcher.maxLength, which is {units_max}"
            ));
        }
        if let Some(tag) = tag.as_ref().filter(|tag| tag.len() > TAG_BYTES_MAX) {
            let tag = shortened(&json!(tag));
            return Err(format!(".tag: {tag}: must have at most {TAG_BYTES_MAX} bytes"));
        }
        let is_outside = |values: &&Value| !is_in_space(space, &normalized(values));
        if let Some(values) = hyperparameters.as_ref().filter(is_outside) {
            let values = shortened(values);
            return Err(format!(
                ".hyperparameters: {values}: not in the space of spec.hyperparameters; give every \
                 name a value in its range"
            ));
        }
        let hyperparameters = hyperparameters.clone();
        Ok(Step::Create { group: 0, units, source: None, hyperparameters })
    }

    fn continue_(&mut self, action: ContinueAction) -> Result<Option<Step>, String> {
        let ContinueAction { trial, units } = action;
        match self.state(trial)? {
            TrialState::Active => {
                return Err(format!(
                    "trial: {trial}: it has no result at its granted length yet; continue it \
                     after its result"
                ));
            }
            // The service has not heard of the limit yet.
            TrialState::Stopped if self.book.trial(trial).is_cut => return Ok(None),
            TrialState::Stopped => {
                return Err(format!("trial: {trial}: it was stopped, and cannot continue"));
            }
            TrialState::Closed(_) | TrialState::Deleted => return Ok(None),
            TrialState::Waiting | TrialState::Paused => {}
        }
        let trained = self.book.trial(trial).trained();
        let units_max = self.method.units;
        if units <= trained {
            return Err(format!(
                "units: {units}: must be above {trained}, the length of the latest result of trial \
                 {trial}"
            ));
        }
        if units > units_max {
            return Err(format!(
                "units: {units}: must be at most spec.searcher.maxLength, which is {units_max}"
            ));
        }
        Ok(Some(Step::Continue { trial, units }))
    }

    /// Returns the state of a trial that no other action is about.
    fn state(&mut self, trial: u32) -> Result<TrialState, String> {
        let num_trials = self.book.next_index();
        let Some(entry) = self.book.trials().get(trial as usize) else {
            return Err(format!(
                "trial: {trial}: no such trial; {num_trials} exist before this answer"
            ));
        };
        match self.changed.insert(trial) {
            true => Ok(entry.state),
            false => Err(format!("trial: {trial}: another action is about it; leave one of them")),
        }
    }

    /// Returns the number of open trials after the steps.
    fn num_open(&self) -> u32 {
        let num_stopped =
            self.steps.iter().filter(|step| matches!(step, Step::Stop { .. })).count() as u32;
        self.book.num_open() + self.num_created() - num_stopped
    }

    /// Returns whether open trials are left after the steps, and none of them trains.
    fn is_stalled(&self) -> bool {
        let is_end = |step: &Step| matches!(step, Step::StopAll | Step::Finish);
        let starts = |step: &Step| matches!(step, Step::Create { .. } | Step::Continue { .. });
        if self.num_open() == 0 || self.steps.iter().any(|step| is_end(step) || starts(step)) {
            return false;
        }
        let stopped = |step: &Step| match step {
            Step::Stop { trial } => Some(*trial),
            _ => None,
        };
        let stopped: BTreeSet<u32> = self.steps.iter().filter_map(stopped).collect();
        let trials = (0..).zip(self.book.trials());
        let mut active = trials.filter(|(_, entry)| entry.state == TrialState::Active);
        active.all(|(trial, _)| stopped.contains(&trial))
    }
}
