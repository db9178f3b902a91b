//! Searches that train every trial to the full length, with samplers other than random.

use serde::{Deserialize, Serialize};

#[cfg(feature = "crd")]
use super::schema::{TPE, fixed};

/// A search by a tree-structured Parzen estimator (TPE): after ten random trials, hyperparameters
/// are sampled near those of the best trials.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "crd", derive(schemars::JsonSchema))]
#[cfg_attr(feature = "crd", schemars(extend("x-kubernetes-validations" = fixed(&TPE))))]
#[serde(rename_all = "camelCase")]
pub struct TpeSearch {
    /// Total number of trials, from 1 to 100,000.
    #[cfg_attr(feature = "crd", schemars(range(min = 1)))]
    pub max_trials: u32,
    /// Maximum number of trials that train concurrently; 0 means no limit. Default: 16.
    #[serde(default = "super::search::default_max_concurrent_trials")]
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
    #[cfg_attr(feature = "crd", schemars(range(min = 1)))]
    pub max_trials: u32,
    /// Maximum number of trials that train concurrently; 0 means no limit. Default: 16.
    #[serde(default = "super::search::default_max_concurrent_trials")]
    pub max_concurrent_trials: u32,
}
