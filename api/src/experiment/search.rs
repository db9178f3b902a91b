//! Search methods and training lengths.

use serde::{Deserialize, Serialize};

/// Search method and the metric that ranks trials. Exactly one of `single`, `random` and `grid`
/// must be set.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "crd", derive(schemars::JsonSchema))]
#[cfg_attr(
    feature = "crd",
    schemars(extend("x-kubernetes-validations" = [{
        "rule": "[has(self.single), has(self.random), has(self.grid)].exists_one(x, x)",
        "message": "exactly one of single, random and grid must be set"
    }]))
)]
#[serde(rename_all = "camelCase")]
pub struct Searcher {
    /// Name of the validation metric that ranks trials.
    #[cfg_attr(feature = "crd", schemars(length(min = 1)))]
    pub metric: String,
    /// Whether a smaller metric is better. Default: true.
    #[serde(default = "default_true")]
    pub smaller_is_better: bool,
    /// Training length of a trial, unless it is stopped early.
    pub max_length: Length,
    /// Runs one trial.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub single: Option<SingleSearch>,
    /// Runs trials with randomly sampled hyperparameters.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub random: Option<RandomSearch>,
    /// Runs one trial for each point of a grid.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub grid: Option<GridSearch>,
}

/// A search with one trial. Hyperparameters with a range are sampled once.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "crd", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct SingleSearch {}

/// A search with randomly sampled hyperparameters.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "crd", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct RandomSearch {
    /// Total number of trials, from 1 to 100,000.
    #[cfg_attr(feature = "crd", schemars(range(min = 1)))]
    pub max_trials: u32,
    /// Maximum number of concurrent trials; 0 means no limit. Default: 16.
    #[serde(default = "default_max_concurrent_trials")]
    pub max_concurrent_trials: u32,
}

/// A grid search with at most 100,000 points. `int`, `double` and `log` parameters require a
/// `count`.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "crd", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct GridSearch {
    /// Maximum number of concurrent trials; 0 means no limit. Default: 16.
    #[serde(default = "default_max_concurrent_trials")]
    pub max_concurrent_trials: u32,
}

/// A training length. Exactly one field must be set.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "crd", derive(schemars::JsonSchema))]
#[cfg_attr(
    feature = "crd",
    schemars(extend("x-kubernetes-validations" = [{
        "rule": "[has(self.records), has(self.batches), has(self.epochs)].exists_one(x, x)",
        "message": "exactly one of records, batches and epochs must be set"
    }]))
)]
#[serde(rename_all = "camelCase")]
pub struct Length {
    /// Length in training samples, rounded down to whole global batches; at least 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "crd", schemars(range(min = 1)))]
    pub records: Option<u64>,
    /// Length in global batches; at least 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "crd", schemars(range(min = 1)))]
    pub batches: Option<u64>,
    /// Length in epochs: passes over the training data, or multiples of `recordsPerEpoch` if that
    /// is set; at least 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "crd", schemars(range(min = 1)))]
    pub epochs: Option<u64>,
}

/// Unit of a training length.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "crd", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub enum Unit {
    /// Training samples.
    Records,
    /// Global batches.
    Batches,
    /// Passes over the training data, or multiples of `recordsPerEpoch`.
    Epochs,
}

impl Length {
    /// Creates a length of `units` in `unit`.
    pub fn new(unit: Unit, units: u64) -> Self {
        let of = |this| (unit == this).then_some(units);
        Self { records: of(Unit::Records), batches: of(Unit::Batches), epochs: of(Unit::Epochs) }
    }

    /// Returns the unit and the number of units; `None` unless exactly one field is set.
    pub fn get(&self) -> Option<(Unit, u64)> {
        match (self.records, self.batches, self.epochs) {
            (Some(units), None, None) => Some((Unit::Records, units)),
            (None, Some(units), None) => Some((Unit::Batches, units)),
            (None, None, Some(units)) => Some((Unit::Epochs, units)),
            _ => None,
        }
    }
}

fn default_true() -> bool {
    true
}

fn default_max_concurrent_trials() -> u32 {
    16
}
