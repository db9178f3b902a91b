//! Parts of a search that fit any method: objectives, samplers, prior trials and median stopping.

use serde::{Deserialize, Serialize};

/// A way to sample hyperparameters. Exactly one field must be set.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "crd", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct SamplerSpec {
    /// Samples near the hyperparameters of good trials, compared at the greatest length that ten
    /// trials have reached.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tpe: Option<TpeSampler>,
    /// Samples the points of a scrambled Sobol sequence, for up to 64 hyperparameters.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sobol: Option<SobolSampler>,
}

impl SamplerSpec {
    /// Returns the samplers that are set.
    pub fn set(&self) -> Vec<&'static str> {
        let samplers = [("tpe", self.tpe.is_some()), ("sobol", self.sobol.is_some())];
        samplers.into_iter().filter(|(_, is_set)| *is_set).map(|(name, _)| name).collect()
    }
}

/// Settings of a Sobol sequence.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "crd", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct SobolSampler {}

/// Settings of a tree-structured Parzen estimator.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "crd", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct TpeSampler {
    /// Whether hyperparameters are estimated jointly, so that dependencies between them are
    /// learned. Default: true.
    #[serde(default = "default_true")]
    pub multivariate: bool,
}

/// A metric that a search improves, with its direction.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "crd", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct Objective {
    /// Name of the validation metric.
    #[cfg_attr(feature = "crd", schemars(length(min = 1)))]
    pub metric: String,
    /// Whether a smaller metric is better. Default: true.
    #[serde(default = "default_true")]
    pub smaller_is_better: bool,
}

/// Trials of earlier experiments with the same metric, whose hyperparameters lie in the space of
/// this experiment. They are read once, when the search begins.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "crd", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct PriorTrials {
    /// Names of the experiments, from 1 to 16: of the same namespace on a cluster, and of the same
    /// storage root under `stoker run`.
    #[cfg_attr(feature = "crd", schemars(extend("minItems" = 1, "maxItems" = 16)))]
    pub experiments: Vec<String>,
    /// Maximum number of trials, the best ones first, from 1 to 64. Default: 32.
    #[serde(default = "default_prior_trials")]
    #[cfg_attr(feature = "crd", schemars(range(min = 1, max = 64)))]
    pub trials: u32,
}

fn default_prior_trials() -> u32 {
    32
}

fn default_true() -> bool {
    true
}

/// Maximum number of steps of median stopping. Each is recorded in the trial.
pub const MEDIAN_STEPS_MAX: u64 = 128;

/// Median stopping. A trial is validated after each step. It is stopped if its best result so far
/// is worse than the median of the other trials' running means at the same length.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "crd", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct MedianStopping {
    /// Shortest length at which a trial is stopped, in the unit of `maxLength`. Default: 0.
    #[serde(default)]
    pub start_units: u64,
    /// Length of a step, in the unit of `maxLength`. A trial has at most 128 steps.
    #[cfg_attr(feature = "crd", schemars(range(min = 1)))]
    pub every_units: u64,
    /// Number of other trials that must have a result at the same length; at least 1. Default: 5.
    #[serde(default = "default_min_trials")]
    #[cfg_attr(feature = "crd", schemars(range(min = 1)))]
    pub min_trials: u32,
}

fn default_min_trials() -> u32 {
    5
}
