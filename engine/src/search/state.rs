//! A search in progress: method, sampler and trials.

mod answers;
mod replay;
mod view;

pub use answers::search_event;

use std::collections::BTreeMap;

use super::Draw;
use super::book::Book;
pub use super::methods::AnyMethod;
use super::rng::Random;
use super::rung::Loss;
use super::sample::normalized;
use super::samplers::Sampler;
use super::turn::{Event, Source, Step};
use serde_json::Value;
use stoker_api::trial::CloseCause;

/// Events with the steps that were decided on them.
#[derive(Clone, Debug, PartialEq)]
pub struct Turn {
    /// Position in the log, unique and increasing.
    pub order: u64,
    /// The events: one, or several deletions. In a simulation also a result with the limit that it
    /// reaches.
    pub events: Vec<Event>,
    /// The decisions, in order.
    pub steps: Vec<Step>,
    /// Trials that the steps changed, in order.
    pub changes: Vec<Change>,
    /// The trials of the `Create` steps that were drawn now, in order.
    pub created: Vec<Draw>,
    /// 32-bit words taken from the random stream up to and with each `Create` step.
    pub random_words: Vec<u64>,
}

/// Change of a trial by a step.
#[derive(Clone, Debug, PartialEq)]
pub struct Change {
    /// Index of the trial.
    pub trial: u32,
    /// Granted length after the step.
    pub units: u64,
    /// The step, about this trial alone.
    pub step: Step,
}

/// Record of a trial that a turn created.
#[derive(Clone, Debug, PartialEq)]
pub enum RecordedDraw {
    /// The record of the trial exists.
    Present {
        /// Hyperparameters.
        hyperparameters: Value,
        /// 32-bit words taken from the experiment's random stream up to and with this trial.
        random_words: u64,
    },
    /// The trial was deleted.
    Deleted {
        /// Same as in `Present`. Unset if nobody recorded the deletion: the trial is drawn once
        /// more, for the position of the random stream.
        random_words: Option<u64>,
    },
    /// The trial was never created. It is drawn now.
    Missing,
}

/// The record of a search does not fit its method.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unreadable {
    /// Order of the turn.
    pub order: u64,
    /// Mismatch between the turn and the turns before it.
    pub reason: &'static str,
}

/// A search in progress.
///
/// Invariant: replaying all recorded turns gives an equal state.
#[derive(Clone, Debug, PartialEq)]
pub struct SearchState {
    method: AnyMethod,
    sampler: Sampler,
    random: Random,
    book: Book,
    next_order: u64,
}

impl SearchState {
    /// Returns a search without trials. The first event is [`Event::Began`].
    pub fn new(method: AnyMethod, sampler: Sampler, seed: u32) -> Self {
        let random = Random::new(seed);
        Self { method, sampler, random, book: Book::default(), next_order: 0 }
    }

    /// Returns the same search with trials of earlier experiments, best first. It has not begun.
    #[must_use]
    pub fn with_prior(self, prior: &[(Value, Loss)]) -> Self {
        Self { sampler: self.sampler.with_prior(prior), ..self }
    }

    /// Returns the trials.
    pub fn book(&self) -> &Book {
        &self.book
    }

    /// Returns the position of the next turn.
    pub fn next_order(&self) -> u64 {
        self.next_order
    }

    /// Reserves all positions below `order`, for turns that were recorded but decide nothing.
    pub fn skip_to_order(&mut self, order: u64) {
        self.next_order = self.next_order.max(order);
    }

    /// Returns the maximum number of active trials; `None` means no limit.
    pub fn places(&self) -> Option<u32> {
        self.method.as_dyn().places()
    }

    /// Returns the length with which the trials of a bracket begin.
    pub fn first_units(&self, group: u32) -> u64 {
        self.method.as_dyn().first_units(group)
    }

    /// Returns the number of trials by the length that they train to if none of them fails.
    pub fn forecast(&self) -> BTreeMap<u64, u64> {
        self.method.as_dyn().forecast()
    }

    /// Returns the number of groups: brackets, or rounds of a population.
    pub fn num_groups(&self) -> u32 {
        self.method.as_dyn().num_groups()
    }

    /// Returns `true` if the search creates no trial because [all fail](Book::is_hopeless). An
    /// external searcher makes this decision itself. A grid trains all of its points: all
    /// failures may have the same value of one hyperparameter, because a grid starts with all
    /// points of one value.
    pub fn has_given_up(&self) -> bool {
        let has_exception = matches!(self.method, AnyMethod::External(_))
            || matches!(self.sampler, Sampler::Grid { .. });
        self.book.is_hopeless() && !has_exception
    }

    /// Lets the search create trials even if all fail, as versions did that recorded no steps.
    pub fn ignore_failures(&mut self) {
        self.book.ignore_failures();
    }

    /// Notes the message of a trial that rejects its hyperparameters, before its end is taken in or
    /// replayed.
    pub fn note_rejection(&mut self, event: &Event, message: &str) {
        if let Event::Closed { trial, cause: CloseCause::InvalidHyperparameters } = event
            && self.accepts(event)
        {
            self.book.note_rejection(*trial, message);
        }
    }

    /// Returns `true` if a turn follows from an event now.
    pub fn accepts(&self, event: &Event) -> bool {
        let continues = matches!(event, Event::Edited(_) | Event::Reopened);
        let may_continue = continues || !self.book.is_finished();
        let is_asked = match event {
            Event::Answered(answered) => {
                self.question().is_some_and(|question| question.call == answered.call)
            }
            _ => true,
        };
        may_continue && is_asked && self.book.accepts(event)
    }

    /// Same as [`advance_all`](Self::advance_all), for one event.
    pub fn advance(&mut self, event: Event) -> Option<Turn> {
        self.advance_all(vec![event])
    }

    /// Takes in events and decides what follows. Returns `None` for repeated, late and foreign
    /// events, which change nothing.
    pub fn advance_all(&mut self, events: Vec<Event>) -> Option<Turn> {
        self.advance_with(events, vec![])
    }

    /// Takes in an edit or a request that reopens these trials, and decides what follows. The
    /// trials have ended, and [`may_reopen`](Self::may_reopen) is true for each.
    pub fn reopen(&mut self, event: Event, trials: Vec<u32>) -> Option<Turn> {
        self.advance_with(vec![event], reopening(trials))
    }

    /// Passes the steps of [`reopen`](Self::reopen) to `takes`, in order, until it returns `false`.
    /// Samples no hyperparameters.
    pub fn preview(
        mut self,
        event: &Event,
        trials: Vec<u32>,
        mut takes: impl FnMut(&Step) -> bool,
    ) {
        let order = self.next_order;
        self.observe(order, event);
        let mut given = reopening(trials).into_iter();
        while let Some(step) = given.next().or_else(|| self.decide()) {
            if !takes(&step) || step == Step::Finish {
                return;
            }
            self.commit(&step, &mut vec![]);
        }
    }

    /// Returns the number of trials of each bracket, without those with invalid hyperparameters;
    /// empty if no edit depends on it.
    pub fn bracket_trials(&self) -> Vec<u32> {
        self.method.as_dyn().bracket_trials()
    }

    /// Returns whether the method has use for a trial that continues after its end.
    pub fn may_reopen(&self, trial: u32) -> bool {
        self.method.as_dyn().may_reopen(trial, &self.book)
    }

    /// Takes in events. `given` are the first steps; the method decides what follows.
    fn advance_with(&mut self, mut events: Vec<Event>, given: Vec<Step>) -> Option<Turn> {
        events.retain(|event| self.accepts(event));
        if events.is_empty() {
            return None;
        }
        let order = self.next_order;
        self.next_order += 1;
        events.iter().for_each(|event| self.observe(order, event));
        let mut turn = Turn {
            order,
            events,
            steps: vec![],
            changes: vec![],
            created: vec![],
            random_words: vec![],
        };
        let mut given = given.into_iter();
        while let Some(step) = given.next().or_else(|| self.decide()) {
            let is_last = step == Step::Finish;
            if let Step::Create { units, source, hyperparameters, .. } = &step {
                let given = hyperparameters.clone();
                let Some(draw) = self.draw(*units, source.as_ref(), given) else { break };
                self.sampler.record(Some(&draw.hyperparameters));
                turn.created.push(draw);
                turn.random_words.push(self.random.num_words());
            }
            self.commit(&step, &mut turn.changes);
            turn.steps.push(step);
            if is_last {
                break;
            }
        }
        Some(turn)
    }

    fn commit(&mut self, step: &Step, changes: &mut Vec<Change>) {
        if *step == Step::StopAll {
            // An external searcher also ends a search by this step, and its trials stay ended.
            let is_cut = self.book.is_limited();
            for trial in self.book.open() {
                self.commit(&Step::Stop { trial }, changes);
                if is_cut {
                    self.book.cut(trial);
                }
            }
            return;
        }
        self.method.as_dyn_mut().commit(step, &self.book);
        let mut change = |trial: u32, units: u64, step: Step| {
            changes.push(Change { trial, units, step });
        };
        match step {
            Step::Continue { trial, units } | Step::PromoteClosed { trial, units } => {
                change(*trial, *units, step.clone());
            }
            Step::Pause { trial } | Step::Stop { trial } => {
                change(*trial, self.book.trial(*trial).units, step.clone());
            }
            Step::StopPaused { group, units, except } => {
                let members = self.book.paused_at(*group, *units, except);
                members.into_iter().for_each(|trial| change(trial, *units, Step::Stop { trial }));
            }
            Step::Reopen { trials } => trials.iter().for_each(|trial| {
                let step = Step::Reopen { trials: vec![*trial] };
                change(*trial, self.book.trial(*trial).units, step);
            }),
            Step::Create { .. } | Step::StopAll | Step::Finish => {}
        }
        self.book.commit(step);
    }

    fn observe(&mut self, order: u64, event: &Event) {
        let before = self.book.observe(order, event);
        if let Event::Edited(edit) = event {
            self.method.as_dyn_mut().edit(edit);
        }
        self.method.as_dyn_mut().observe(event, before, &self.book);
        if let Event::Deleted { trial } = event {
            self.sampler.forget(*trial);
        }
    }

    fn decide(&self) -> Option<Step> {
        if self.book.is_limited() {
            return Some(if self.book.num_open() > 0 { Step::StopAll } else { Step::Finish });
        }
        let step = self.method.as_dyn().decide(&self.book);
        // Without any result, a creation hides no other steps than promotions of failed trials.
        let is_possible =
            |step: &Step| !matches!(step, Step::Create { .. }) || !self.has_given_up();
        let step = step.filter(is_possible);
        let is_over = self.book.num_open() == 0 && !self.book.is_finished() && !self.is_asking();
        step.or_else(|| is_over.then_some(Step::Finish))
    }

    /// Draws hyperparameters, identity and seed, in this order.
    fn draw(&mut self, units: u64, source: Option<&Source>, given: Option<Value>) -> Option<Draw> {
        let index = self.book.next_index();
        let sampled = match given {
            Some(hyperparameters) => hyperparameters,
            None => self.sampler.draw(source, &self.book, &mut self.random)?,
        };
        let request_id = self.random.uuid();
        let seed = self.random.seed();
        Some(Draw { index, request_id, seed, hyperparameters: normalized(&sampled), units })
    }

    /// Returns the number of 32-bit words taken from the experiment's random stream.
    pub fn random_words(&self) -> u64 {
        self.random.num_words()
    }
}

/// Returns the step that reopens these trials, if there are any.
fn reopening(trials: Vec<u32>) -> Vec<Step> {
    if trials.is_empty() { vec![] } else { vec![Step::Reopen { trials }] }
}

#[cfg(test)]
mod tests;
