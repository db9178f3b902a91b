//! Hyperparameter search.
//!
//! A search takes in events (a result, an end, a deletion) and decides steps (create, continue,
//! pause, stop). An event with its steps is a turn. Turns are recorded; a search that is rebuilt
//! takes recorded steps in, and decides nothing again.
//!
//! 1. [`turn`]: events and steps.
//! 2. [`book`]: trials, with their lengths, results and states.
//! 3. [`rung`]: ranking of the results at one length; [`layout`]: rungs and brackets.
//! 4. [`methods`]: how long trials train. A new method implements [`methods::SearchMethod`],
//!    becomes a variant of [`state::AnyMethod`], and joins the list in the property tests.
//! 5. [`samplers`]: hyperparameters of new trials.
//! 6. [`view`]: rungs and ranks, to explain decisions.
//! 7. [`state`]: decides turns and replays recorded ones; [`simulate`]: runs a search on curves.

pub mod book;
mod config;
pub mod layout;
pub mod methods;
pub(crate) mod pareto;
pub mod rng;
pub mod rung;
pub mod samplers;
pub mod simulate;
pub mod state;
pub mod turn;
pub mod view;

mod grid;
mod sample;
mod settings;

use serde_json::Value;
use stoker_api::experiment::{MedianStopping, Objective, SamplerSpec, SearchLimits, Unit};
use stoker_api::hyperparameters::Space;
use stoker_api::trial::{CloseCause, DesiredTrialState, TrialSpec};
use stoker_api::validate::{Method, ValidExperiment};

pub use self::sample::{is_in_space, normalized};

/// All that a search depends on.
#[derive(Clone, Debug, PartialEq)]
pub struct SearchConfig {
    /// Name of the experiment.
    pub experiment: String,
    /// Search method.
    pub method: Method,
    /// Sampler, if it is not that of the method.
    pub sampler: Option<SamplerSpec>,
    /// Median stopping, in addition to the method.
    pub median_stopping: Option<MedianStopping>,
    /// Whether a smaller metric is better.
    pub smaller_is_better: bool,
    /// Objectives after the searched metric.
    pub other_objectives: Vec<Objective>,
    /// Unit of lengths.
    pub unit: Unit,
    /// Full length of a trial, in `unit`.
    pub units_max: u64,
    /// Limits on the resources of the search.
    pub limits: SearchLimits,
    /// Slots of each trial.
    pub slots: u32,
    /// Seconds for which a paused trial keeps its GPUs.
    pub release_seconds: u32,
    /// Search space.
    pub space: Space,
    /// Seed of the experiment, from 0 to 2^31 - 1.
    pub seed: u32,
}

impl SearchConfig {
    /// Returns the search of a valid experiment.
    pub fn new(valid: &ValidExperiment, seed: u32) -> Self {
        Self {
            experiment: valid.name.clone(),
            method: valid.method.clone(),
            sampler: valid.spec.searcher.sampler,
            median_stopping: valid.spec.searcher.median_stopping,
            smaller_is_better: valid.spec.searcher.smaller_is_better,
            other_objectives: valid.spec.searcher.other_objectives().to_vec(),
            unit: valid.unit,
            units_max: valid.units_max,
            limits: valid.spec.searcher.limits.unwrap_or_default(),
            slots: valid.spec.resources.slots_per_trial,
            release_seconds: valid.spec.searcher.release_seconds,
            space: valid.space.clone(),
            seed,
        }
    }
}

/// Hyperparameters, identity and seed of a trial: all that the search draws for it.
#[derive(Clone, Debug, PartialEq)]
pub struct Draw {
    /// Index of the trial, from 0 in the order of creation.
    pub index: u32,
    /// A version 4 UUID.
    pub request_id: String,
    /// Seed of the trial, from 0 to 2^31 - 1.
    pub seed: u32,
    /// Sampled hyperparameters, [`normalized`].
    pub hyperparameters: Value,
    /// Length granted from the start.
    pub units: u64,
}

impl Draw {
    /// Returns the trial of an experiment that has this draw, with lengths in `unit`.
    pub fn into_spec(self, experiment: &str, unit: Unit) -> TrialSpec {
        TrialSpec {
            experiment: experiment.to_owned(),
            index: self.index,
            request_id: self.request_id,
            seed: self.seed,
            hyperparameters: self.hyperparameters,
            unit,
            units: self.units,
            order: None,
            group: 0,
            random_words: None,
            source: None,
            pins: vec![],
            tag: None,
            grants: vec![],
            desired_state: DesiredTrialState::Run,
            desired_since: None,
        }
    }
}

/// Outcome of a search.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// Neither of the others.
    Completed,
    /// All trials failed.
    Failed,
    /// All trials were cancelled or deleted.
    Cancelled,
}

/// Returns the outcome of a search whose trials ended so.
///
/// Deleted trials do not count. Trials with invalid hyperparameters count only if there are no
/// others: then nothing could be trained, which is a failure.
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

#[cfg(test)]
mod tests;
