//! Searches that train every trial to the full length.

use serde::{Deserialize, Serialize};

#[cfg(feature = "crd")]
use super::schema::{TPE, fixed};

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
    #[cfg_attr(feature = "crd", schemars(range(min = 1, max = 100_000)))]
    pub max_trials: u32,
    /// Maximum number of concurrent trials; 0 means no limit. Default: 16.
    #[serde(default = "super::search::default_max_concurrent_trials")]
    #[cfg_attr(feature = "crd", schemars(range(max = u32::MAX)))]
    pub max_concurrent_trials: u32,
}

/// A grid search with at most 100,000 points. `int`, `double` and `log` parameters require a
/// `count`.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "crd", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct GridSearch {
    /// Maximum number of concurrent trials; 0 means no limit. Default: 16.
    #[serde(default = "super::search::default_max_concurrent_trials")]
    #[cfg_attr(feature = "crd", schemars(range(max = u32::MAX)))]
    pub max_concurrent_trials: u32,
}

/// A search by a tree-structured Parzen estimator (TPE): after ten random trials, hyperparameters
/// are sampled near those of the best trials.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "crd", derive(schemars::JsonSchema))]
#[cfg_attr(feature = "crd", schemars(extend("x-kubernetes-validations" = fixed(&TPE))))]
#[serde(rename_all = "camelCase")]
pub struct TpeSearch {
    /// Total number of trials, from 1 to 100,000.
    #[cfg_attr(feature = "crd", schemars(range(min = 1, max = 100_000)))]
    pub max_trials: u32,
    /// Maximum number of trials that train concurrently; 0 means no limit. Default: 16.
    #[serde(default = "super::search::default_max_concurrent_trials")]
    #[cfg_attr(feature = "crd", schemars(range(max = u32::MAX)))]
    pub max_concurrent_trials: u32,
    /// Whether hyperparameters are estimated jointly, so that dependencies between them are
    /// learned. Default: true.
    #[serde(default = "super::search::default_true")]
    pub multivariate: bool,
}

/// A search at the points of a scrambled Sobol sequence, for up to 64 hyperparameters. The point of
/// a trial depends on the seed and the index of the trial alone.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "crd", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct SobolSearch {
    /// Total number of trials, from 1 to 100,000. Powers of two cover the space best.
    #[cfg_attr(feature = "crd", schemars(range(min = 1, max = 100_000)))]
    pub max_trials: u32,
    /// Maximum number of trials that train concurrently; 0 means no limit. Default: 16.
    #[serde(default = "super::search::default_max_concurrent_trials")]
    #[cfg_attr(feature = "crd", schemars(range(max = u32::MAX)))]
    pub max_concurrent_trials: u32,
}
