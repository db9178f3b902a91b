//! How trials are chosen, and how long they train.

use serde::{Deserialize, Serialize};

/// How trials are chosen and compared. Exactly one of `single`, `random` and `grid` is set.
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
    /// The validation metric by which trials are compared.
    #[cfg_attr(feature = "crd", schemars(length(min = 1)))]
    pub metric: String,
    /// Whether a smaller metric is a better one.
    #[serde(default = "yes")]
    pub smaller_is_better: bool,
    /// How long a trial trains if nothing stops it.
    pub max_length: Length,
    /// One trial.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub single: Option<SingleSearch>,
    /// Trials with hyperparameters drawn at random.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub random: Option<RandomSearch>,
    /// Trials for every point of a grid.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub grid: Option<GridSearch>,
}

/// One trial; parameters that vary are drawn once.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "crd", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct SingleSearch {}

/// Trials with hyperparameters drawn at random.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "crd", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct RandomSearch {
    /// Trials in all, at least 1.
    #[cfg_attr(feature = "crd", schemars(range(min = 1)))]
    pub max_trials: u32,
    /// Trials at a time; 0 means no limit.
    #[serde(default = "default_max_concurrent_trials")]
    pub max_concurrent_trials: u32,
}

/// Trials for every point of a grid: `int`, `double` and `log` parameters need a `count`.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "crd", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct GridSearch {
    /// Trials at a time; 0 means no limit.
    #[serde(default = "default_max_concurrent_trials")]
    pub max_concurrent_trials: u32,
}

/// A length of training. Exactly one field is set.
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
    /// Samples seen.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "crd", schemars(range(min = 1)))]
    pub records: Option<u64>,
    /// Global batches.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "crd", schemars(range(min = 1)))]
    pub batches: Option<u64>,
    /// Passes over the training data.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "crd", schemars(range(min = 1)))]
    pub epochs: Option<u64>,
}

/// What a length counts.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "crd", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub enum Unit {
    /// Samples seen.
    Records,
    /// Global batches.
    Batches,
    /// Passes over the training data.
    Epochs,
}

impl Length {
    /// A length of `units` in `unit`.
    pub fn new(unit: Unit, units: u64) -> Self {
        let of = |this| (unit == this).then_some(units);
        Self { records: of(Unit::Records), batches: of(Unit::Batches), epochs: of(Unit::Epochs) }
    }

    /// What it counts, and how many; `None` unless exactly one field is set.
    pub fn get(&self) -> Option<(Unit, u64)> {
        match (self.records, self.batches, self.epochs) {
            (Some(units), None, None) => Some((Unit::Records, units)),
            (None, Some(units), None) => Some((Unit::Batches, units)),
            (None, None, Some(units)) => Some((Unit::Epochs, units)),
            _ => None,
        }
    }
}

fn yes() -> bool {
    true
}

fn default_max_concurrent_trials() -> u32 {
    16
}
