//! What a search method decides, and the methods that compare no trials: single, random and grid.

use std::fmt::Debug;

use serde_json::Value;
use stoker_api::hyperparameters::Space;
use stoker_api::trial::CloseCause;

use crate::search::grid::Grid;
use crate::search::rng::Random;
use crate::search::sample::sample;

/// What a method decides. The search carries it out and keeps the books.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// A new trial that may train to this length. Its index is the number of trials before it.
    Create {
        /// The length.
        units: u64,
    },
    /// The trial may train on to this length: it may have waited, and the event may be another
    /// trial's.
    Continue {
        /// The trial's index.
        trial: u32,
        /// The length.
        units: u64,
    },
    /// Nothing more is wanted of the trial.
    Stop {
        /// The trial's index.
        trial: u32,
    },
}

/// How trials are chosen and compared.
///
/// A method sees each result and each close once, in the recorded order, and answers by [`Step`]s.
/// It answers nothing where it cannot decide yet: the trial then waits, and a later event may
/// continue or stop it. It reads nothing but its arguments: the same events give the same steps.
pub trait SearchMethod: Debug + Send {
    /// The trials to begin with.
    fn start(&mut self) -> Vec<Step>;

    /// What follows from a result at a granted length. `loss` is the metric, signed so that less is
    /// better; NaN is infinity.
    fn on_result(&mut self, trial: u32, units: u64, loss: f64) -> Vec<Step>;

    /// What follows from the end of a trial.
    fn on_closed(&mut self, trial: u32, cause: CloseCause) -> Vec<Step>;

    /// The hyperparameters of the next trial; called once for each [`Step::Create`], in order.
    /// `None`: no more.
    fn draw(&mut self, random: &mut Random) -> Option<Value>;

    /// Trials that there will be in all, as far as is known.
    fn num_expected(&self) -> u64;

    /// Trials by the length they train to if nothing goes wrong: `(units, trials)`, shortest first.
    fn lengths(&self) -> Vec<(u64, u64)>;
}

/// Replacements of trials with invalid hyperparameters, for each trial wanted. Without a bound, a
/// program that refuses everything would be asked for ever; with this one, a space of which a
/// hundredth is valid is still searched.
pub const REPLACEMENTS_PER_TRIAL_MAX: u32 = 100;

/// Trials drawn at random; a single one is a special case.
#[derive(Debug)]
pub struct RandomMethod {
    space: Space,
    units_max: u64,
    trials_max: u32,
    concurrent_max: u32,
    num_created: u32,
    num_replaced: u32,
    replacements_max: u32,
}

impl RandomMethod {
    /// `trials_max` trials, `concurrent_max` at a time (0: all). A trial with invalid
    /// hyperparameters is replaced, at most [`REPLACEMENTS_PER_TRIAL_MAX`] times `trials_max`
    /// times.
    pub fn new(space: Space, units_max: u64, trials_max: u32, concurrent_max: u32) -> Self {
        let replacements_max = trials_max.saturating_mul(REPLACEMENTS_PER_TRIAL_MAX);
        Self {
            space,
            units_max,
            trials_max,
            concurrent_max,
            num_created: 0,
            num_replaced: 0,
            replacements_max,
        }
    }

    /// One trial, not replaced.
    pub fn single(space: Space, units_max: u64) -> Self {
        Self { replacements_max: 0, ..Self::new(space, units_max, 1, 1) }
    }

    fn num_wanted(&self) -> u32 {
        self.trials_max.saturating_add(self.num_replaced)
    }
}

impl SearchMethod for RandomMethod {
    fn start(&mut self) -> Vec<Step> {
        let num_first = at_a_time(u64::from(self.trials_max), self.concurrent_max);
        vec![Step::Create { units: self.units_max }; num_first]
    }

    fn on_result(&mut self, trial: u32, units: u64, _loss: f64) -> Vec<Step> {
        stop_at(self.units_max, trial, units)
    }

    fn on_closed(&mut self, _trial: u32, cause: CloseCause) -> Vec<Step> {
        let is_invalid = cause == CloseCause::InvalidHyperparameters;
        if is_invalid && self.num_replaced < self.replacements_max {
            self.num_replaced += 1;
        }
        let is_wanted = self.num_created < self.num_wanted();
        is_wanted.then_some(Step::Create { units: self.units_max }).into_iter().collect()
    }

    fn draw(&mut self, random: &mut Random) -> Option<Value> {
        self.num_created += 1;
        Some(sample(&self.space, random))
    }

    fn num_expected(&self) -> u64 {
        u64::from(self.num_wanted())
    }

    fn lengths(&self) -> Vec<(u64, u64)> {
        vec![(self.units_max, u64::from(self.trials_max))]
    }
}

/// A trial for every point of a grid, the last point first. Invalid hyperparameters are not
/// replaced.
#[derive(Debug)]
pub struct GridMethod {
    grid: Grid,
    units_max: u64,
    concurrent_max: u32,
    num_left: u64,
}

impl GridMethod {
    /// A trial for every point, `concurrent_max` at a time (0: all).
    pub fn new(space: Space, units_max: u64, concurrent_max: u32) -> Self {
        let grid = Grid::new(space);
        Self { num_left: grid.num_points(), grid, units_max, concurrent_max }
    }
}

impl SearchMethod for GridMethod {
    fn start(&mut self) -> Vec<Step> {
        let num_first = at_a_time(self.grid.num_points(), self.concurrent_max);
        vec![Step::Create { units: self.units_max }; num_first]
    }

    fn on_result(&mut self, trial: u32, units: u64, _loss: f64) -> Vec<Step> {
        stop_at(self.units_max, trial, units)
    }

    fn on_closed(&mut self, _trial: u32, _cause: CloseCause) -> Vec<Step> {
        let is_wanted = self.num_left > 0;
        is_wanted.then_some(Step::Create { units: self.units_max }).into_iter().collect()
    }

    fn draw(&mut self, _random: &mut Random) -> Option<Value> {
        self.num_left = self.num_left.checked_sub(1)?;
        self.grid.point(self.num_left)
    }

    fn num_expected(&self) -> u64 {
        self.grid.num_points()
    }

    fn lengths(&self) -> Vec<(u64, u64)> {
        vec![(self.units_max, self.grid.num_points())]
    }
}

fn at_a_time(num_trials: u64, concurrent_max: u32) -> usize {
    let num_first = match concurrent_max {
        0 => num_trials,
        max => num_trials.min(u64::from(max)),
    };
    usize::try_from(num_first.min(u64::from(u32::MAX))).unwrap_or(usize::MAX)
}

fn stop_at(units_max: u64, trial: u32, units: u64) -> Vec<Step> {
    (units >= units_max).then_some(Step::Stop { trial }).into_iter().collect()
}
