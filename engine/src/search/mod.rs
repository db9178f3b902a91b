//! Hyperparameter search as a state machine: told what happened to trials, it says what should
//! happen next.
//!
//! ```text
//!              Event                             Action
//!   Result { trial, units, metric }  ->  Create(draw), Continue { trial, units }
//!   Closed { trial, cause }              Stop { trial }, Shutdown { outcome }
//! ```
//!
//! [`Search`] keeps the books (who is closed, who has which length, what was drawn); a
//! [`method::SearchMethod`] only decides. A trial with a result at its granted length and neither
//! `Continue` nor `Stop` waits undecided.
//!
//! Runners use [`Search`]. Methods that compare trials are built on [`state::SearchState`], which
//! records its steps and will replace it:
//!
//! 1. [`turn`]: events and steps.
//! 2. [`book`]: trials, with their lengths, results and states.
//! 3. [`rung`]: ranking of the results at one length; [`layout`]: rungs and brackets.
//! 4. [`methods`]: how long trials train. A new method implements [`methods::SearchMethod`],
//!    becomes a variant of [`state::AnyMethod`], and joins the list in the property tests.
//! 5. [`samplers`]: hyperparameters of new trials.
//! 6. [`state`]: decides turns and replays recorded ones; [`simulate`]: runs a search on curves.

pub mod book;
pub mod layout;
pub mod method;
pub mod methods;
pub mod rng;
pub mod rung;
pub mod samplers;
pub mod simulate;
pub mod state;
pub mod turn;

mod grid;
mod sample;

use serde_json::Value;
use stoker_api::experiment::Unit;
use stoker_api::hyperparameters::Space;
use stoker_api::trial::{CloseCause, DesiredTrialState, TrialSpec};
use stoker_api::validate::{Method, ValidExperiment};

pub use crate::search::sample::normalized;

use crate::search::method::{GridMethod, RandomMethod, SearchMethod, Step};
use crate::search::rng::Random;

/// All that a search depends on.
#[derive(Clone, Debug, PartialEq)]
pub struct SearchConfig {
    /// How trials are chosen.
    pub method: Method,
    /// Whether a smaller metric is a better one.
    pub smaller_is_better: bool,
    /// What lengths count.
    pub unit: Unit,
    /// How long a trial trains if nothing stops it, in `unit`.
    pub units_max: u64,
    /// What may vary.
    pub space: Space,
    /// The experiment's seed, from 0 to 2^31 - 1.
    pub seed: u32,
}

impl SearchConfig {
    /// The search that a valid experiment asks for.
    pub fn new(valid: &ValidExperiment, seed: u32) -> Self {
        Self {
            method: valid.method,
            smaller_is_better: valid.spec.searcher.smaller_is_better,
            unit: valid.unit,
            units_max: valid.units_max,
            space: valid.space.clone(),
            seed,
        }
    }
}

/// What happened to a trial.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Event {
    /// The searched metric at a granted length.
    Result {
        /// The trial's index.
        trial: u32,
        /// The granted length.
        units: u64,
        /// The metric; NaN ranks last.
        metric: f64,
    },
    /// The trial will do nothing more.
    Closed {
        /// The trial's index.
        trial: u32,
        /// Why.
        cause: CloseCause,
    },
}

/// What should happen next.
#[derive(Clone, Debug, PartialEq)]
pub enum Action {
    /// A new trial.
    Create(Draw),
    /// The trial may train to this length.
    Continue {
        /// The trial's index.
        trial: u32,
        /// The length, more than before.
        units: u64,
    },
    /// The trial has done what was wanted of it.
    Stop {
        /// The trial's index.
        trial: u32,
    },
    /// All trials are closed and no more will come. The last action, once.
    Shutdown {
        /// How the search ended.
        outcome: Outcome,
    },
}

/// A trial's hyperparameters, identity and seed: all that the search draws for it.
#[derive(Clone, Debug, PartialEq)]
pub struct Draw {
    /// The trial's index, from 0 in the order of creation.
    pub index: u32,
    /// A version 4 UUID.
    pub request_id: String,
    /// The trial's seed, from 0 to 2^31 - 1.
    pub seed: u32,
    /// The values drawn, [`normalized`].
    pub hyperparameters: Value,
    /// The length granted from the start.
    pub units: u64,
}

impl Draw {
    /// The trial of an experiment that has this draw, with lengths in `unit`.
    pub fn into_spec(self, experiment: &str, unit: Unit) -> TrialSpec {
        TrialSpec {
            experiment: experiment.to_owned(),
            index: self.index,
            request_id: self.request_id,
            seed: self.seed,
            hyperparameters: self.hyperparameters,
            unit,
            units: self.units,
            grants: Vec::new(),
            desired_state: DesiredTrialState::Run,
            desired_since: None,
        }
    }
}

/// How a search ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// Neither of the others.
    Completed,
    /// All trials failed.
    Failed,
    /// All trials were cancelled or deleted.
    Cancelled,
}

/// How trials that ended so make a search end.
///
/// Deleted trials count no more, and neither do trials with invalid hyperparameters unless there
/// are no others: then nothing could be trained, which is a failure.
pub(crate) fn outcome(causes: impl IntoIterator<Item = CloseCause>) -> Outcome {
    let (mut num_failed, mut num_cancelled, mut num_invalid, mut num_ended) = (0, 0, 0, 0);
    for cause in causes {
        match cause {
            CloseCause::Completed | CloseCause::StoppedEarly => num_ended += 1,
            CloseCause::InvalidHyperparameters => num_invalid += 1,
            CloseCause::Failed => num_failed += 1,
            CloseCause::Cancelled => num_cancelled += 1,
            CloseCause::Deleted => {}
        }
    }
    match (num_ended, num_failed, num_cancelled, num_invalid) {
        (0, 0, 0, 1..) | (0, 1.., 0, _) => Outcome::Failed,
        (0, 0, _, _) => Outcome::Cancelled,
        _ => Outcome::Completed,
    }
}

/// A search in progress. Rebuilt from recorded facts, never saved.
#[derive(Debug)]
pub struct Search {
    smaller_is_better: bool,
    units_max: u64,
    method: Box<dyn SearchMethod>,
    random: Random,
    trials: Vec<TrialState>,
    is_shut_down: bool,
}

#[derive(Debug)]
struct TrialState {
    units: u64,
    result_units: Vec<u64>,
    closed: Option<CloseCause>,
}

impl Search {
    /// A search that has not begun.
    pub fn new(config: SearchConfig) -> Self {
        let space = config.space.clone();
        let units_max = config.units_max;
        let method: Box<dyn SearchMethod> = match config.method {
            Method::Single => Box::new(RandomMethod::single(space, units_max)),
            Method::Random { max_trials, max_concurrent } => {
                Box::new(RandomMethod::new(space, units_max, max_trials, max_concurrent))
            }
            Method::Grid { max_concurrent } => {
                Box::new(GridMethod::new(space, units_max, max_concurrent))
            }
        };
        Self::with_method(&config, method)
    }

    /// A search by a method other than the configured one.
    pub(crate) fn with_method(config: &SearchConfig, method: Box<dyn SearchMethod>) -> Self {
        Self {
            smaller_is_better: config.smaller_is_better,
            units_max: config.units_max,
            method,
            random: Random::new(config.seed),
            trials: Vec::new(),
            is_shut_down: false,
        }
    }

    /// The first actions. To be called once, before any event.
    pub fn start(&mut self) -> Vec<Action> {
        let steps = self.method.start();
        self.carry_out(steps)
    }

    /// What follows from an event.
    ///
    /// Nothing follows from an event that was handled before, nor from one of a trial that is
    /// unknown or closed, nor from a result at a length that was not granted.
    pub fn handle(&mut self, event: Event) -> Vec<Action> {
        let steps = match event {
            Event::Result { trial, units, metric } => self.on_result(trial, units, metric),
            Event::Closed { trial, cause } => self.on_closed(trial, cause),
        };
        self.carry_out(steps.unwrap_or_default())
    }

    /// The part of the search that is done, from 0 to 1. Open trials count by the results they
    /// have.
    pub fn progress(&self) -> f64 {
        self.progress_with(|_| 0.0)
    }

    /// As [`progress`](Self::progress), where `fraction` says how much of `units_max` an open trial
    /// has trained.
    pub(crate) fn progress_with(&self, fraction: impl Fn(u32) -> f64) -> f64 {
        if self.is_shut_down {
            return 1.0;
        }
        let mut sum = 0.0;
        for (trial, state) in (0_u32..).zip(&self.trials) {
            let of_results = state.result_units.iter().max().copied().unwrap_or(0);
            let done = of_results as f64 / self.units_max.max(1) as f64;
            sum += match state.closed {
                Some(_) => 1.0,
                None => done.max(fraction(trial)).clamp(0.0, 1.0),
            };
        }
        let num_expected = self.method.num_expected().max(self.trials.len() as u64);
        if num_expected == 0 { 0.0 } else { sum / num_expected as f64 }
    }

    /// Trials by the length they train to if nothing goes wrong: `(units, trials)`, shortest first.
    pub(crate) fn lengths(&self) -> Vec<(u64, u64)> {
        self.method.lengths()
    }

    fn on_result(&mut self, trial: u32, units: u64, metric: f64) -> Option<Vec<Step>> {
        let state = self.trials.get_mut(trial as usize)?;
        let is_new = state.closed.is_none() && !state.result_units.contains(&units);
        if !is_new || units > state.units {
            return None;
        }
        state.result_units.push(units);
        let loss = if self.smaller_is_better { metric } else { -metric };
        let loss = if loss.is_nan() { f64::INFINITY } else { loss };
        Some(self.method.on_result(trial, units, loss))
    }

    fn on_closed(&mut self, trial: u32, cause: CloseCause) -> Option<Vec<Step>> {
        let state = self.trials.get_mut(trial as usize)?;
        if state.closed.is_some() {
            return None;
        }
        state.closed = Some(cause);
        Some(self.method.on_closed(trial, cause))
    }

    fn carry_out(&mut self, steps: Vec<Step>) -> Vec<Action> {
        let mut actions: Vec<_> = steps.into_iter().filter_map(|it| self.act(it)).collect();
        let is_over = self.trials.iter().all(|it| it.closed.is_some());
        if is_over && !self.is_shut_down {
            self.is_shut_down = true;
            let outcome = outcome(self.trials.iter().filter_map(|it| it.closed));
            actions.push(Action::Shutdown { outcome });
        }
        actions
    }

    fn act(&mut self, step: Step) -> Option<Action> {
        match step {
            Step::Create { units } => self.draw(units).map(Action::Create),
            Step::Continue { trial, units } => {
                let state = self.trials.get_mut(trial as usize)?;
                if state.closed.is_some() || units <= state.units {
                    return None;
                }
                state.units = units;
                Some(Action::Continue { trial, units })
            }
            Step::Stop { trial } => {
                let state = self.trials.get(trial as usize)?;
                state.closed.is_none().then_some(Action::Stop { trial })
            }
        }
    }

    /// Hyperparameters first, then the identity, then the seed: the order fixes what each is.
    fn draw(&mut self, units: u64) -> Option<Draw> {
        let index = u32::try_from(self.trials.len()).ok()?;
        let hyperparameters = normalized(&self.method.draw(&mut self.random)?);
        let request_id = self.random.uuid();
        let seed = self.random.seed();
        self.trials.push(TrialState { units, result_units: Vec::new(), closed: None });
        Some(Draw { index, request_id, seed, hyperparameters, units })
    }
}

#[cfg(test)]
mod tests;
