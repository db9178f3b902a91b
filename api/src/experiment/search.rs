//! Search methods.

use serde::{Deserialize, Serialize};

use super::external::ExternalSearch;
use super::full_length::{GridSearch, RandomSearch, SingleSearch, SobolSearch, TpeSearch};
use super::length::{Length, Unit};
use super::limits::SearchLimits;
use super::pbt::PbtSearch;
use super::samplers::{MedianStopping, Objective, PriorTrials, SamplerSpec};
#[cfg(feature = "crd")]
use super::schema::{
    ADAPTIVE, ADAPTIVE_ASHA, ADAPTIVE_SIMPLE, ASYNC_HALVING, HYPERBAND, SYNC_HALVING, fixed,
};
use crate::validate::sizes::sync_bracket_rungs;

/// Names of the search methods. Exactly one of them must be set.
pub const SEARCH_METHODS: [&str; 13] = [
    "single",
    "random",
    "grid",
    "asyncHalving",
    "adaptiveAsha",
    "syncHalving",
    "adaptive",
    "adaptiveSimple",
    "hyperband",
    "tpe",
    "sobol",
    "pbt",
    "external",
];

/// Search method and the metric that ranks trials. Exactly one search method must be set.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
#[cfg_attr(feature = "crd", derive(schemars::JsonSchema))]
#[cfg_attr(
    feature = "crd",
    schemars(extend("x-kubernetes-validations" = super::schema::searcher_rules()))
)]
#[serde(rename_all = "camelCase")]
pub struct Searcher {
    /// Name of the validation metric that ranks trials.
    #[cfg_attr(feature = "crd", schemars(length(min = 1)))]
    pub metric: String,
    /// Whether a smaller metric is better. Default: true.
    #[serde(default = "default_true")]
    pub smaller_is_better: bool,
    /// All objectives, if there are several: at most 4, and the first one is `metric` with
    /// `smallerIsBetter`. TPE and the Pareto front compare by all of them, and methods that stop
    /// trials early by the first one.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[cfg_attr(feature = "crd", schemars(extend("maxItems" = 4)))]
    pub objectives: Vec<Objective>,
    /// Training length of a trial, unless it is stopped early. Required, except for `pbt`: there it
    /// is `lengthPerRound` times `numRounds`, and may be unset.
    #[serde(default, skip_serializing_if = "Length::is_unset")]
    pub max_length: Length,
    /// Name of the validation metric whose value is the trained length, such as `env_steps`. Only
    /// with `maxLength.units`. Unset: the length is what the program passes as `batches` to the
    /// session API.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "crd", schemars(length(min = 1)))]
    pub time_metric: Option<String>,
    /// Runs one trial.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub single: Option<SingleSearch>,
    /// Runs trials with randomly sampled hyperparameters.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub random: Option<RandomSearch>,
    /// Runs one trial for each point of a grid.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub grid: Option<GridSearch>,
    /// Asynchronous successive halving (ASHA): continues the best trials of each rung.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub async_halving: Option<AsyncHalvingSearch>,
    /// Several brackets of asynchronous halving with different numbers of rungs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub adaptive_asha: Option<AdaptiveAshaSearch>,
    /// Synchronous successive halving with a budget.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sync_halving: Option<SyncHalvingSearch>,
    /// Several brackets of synchronous halving that share a budget.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub adaptive: Option<AdaptiveSearch>,
    /// Several brackets of synchronous halving that share a number of trials.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub adaptive_simple: Option<AdaptiveSimpleSearch>,
    /// Brackets of synchronous halving with the sizes of the Hyperband paper.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hyperband: Option<HyperbandSearch>,
    /// Runs trials with hyperparameters sampled near those of good trials.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tpe: Option<TpeSearch>,
    /// Runs trials at the points of a Sobol sequence, which cover the space evenly.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sobol: Option<SobolSearch>,
    /// Population based training: after each round, copies of the best trials replace the worst.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pbt: Option<PbtSearch>,
    /// Asks a service of the user which trials run, and how long.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub external: Option<ExternalSearch>,
    /// Samples hyperparameters in another way than at random. Not for `grid`, `tpe`, `sobol` and
    /// `pbt`. With `external`, applies to trials that are created without hyperparameters.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sampler: Option<SamplerSpec>,
    /// Trials of earlier experiments. TPE learns from them, and the other samplers begin with their
    /// hyperparameters, best first. Not for `grid` and `external`, and not with `objectives`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prior_trials: Option<PriorTrials>,
    /// Limits on time, slot time and trained length. Unset: no limits.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limits: Option<SearchLimits>,
    /// Stops trials that are worse than most others at the same length, in addition to the search
    /// method.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub median_stopping: Option<MedianStopping>,
    /// Seconds for which a paused trial keeps its slots while no other trial waits for them. If it
    /// is continued within this time, it does not have to restart. Default: 60.
    #[serde(default = "default_release_seconds")]
    #[cfg_attr(feature = "crd", schemars(range(max = u32::MAX)))]
    pub release_seconds: u32,
}

impl Searcher {
    /// Returns the training length of a trial: that of `pbt`, or else `maxLength`.
    pub fn length(&self) -> Option<(Unit, u64)> {
        self.pbt.map_or_else(|| self.max_length.get(), |pbt| pbt.length())
    }

    /// Returns the objectives after the first one.
    pub fn other_objectives(&self) -> &[Objective] {
        self.objectives.get(1..).unwrap_or_default()
    }

    /// Returns the search methods that are set.
    pub fn methods_set(&self) -> Vec<&'static str> {
        let is_set = [
            self.single.is_some(),
            self.random.is_some(),
            self.grid.is_some(),
            self.async_halving.is_some(),
            self.adaptive_asha.is_some(),
            self.sync_halving.is_some(),
            self.adaptive.is_some(),
            self.adaptive_simple.is_some(),
            self.hyperband.is_some(),
            self.tpe.is_some(),
            self.sobol.is_some(),
            self.pbt.is_some(),
            self.external.is_some(),
        ];
        let methods = SEARCH_METHODS.into_iter().zip(is_set);
        methods.filter(|(_, is_set)| *is_set).map(|(name, _)| name).collect()
    }
}

/// Asynchronous successive halving. The rungs have the lengths `maxLength / divisor^k`, rounded
/// down.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "crd", derive(schemars::JsonSchema))]
#[cfg_attr(feature = "crd", schemars(extend("x-kubernetes-validations" = fixed(&ASYNC_HALVING))))]
#[serde(rename_all = "camelCase")]
pub struct AsyncHalvingSearch {
    /// Total number of trials, from 1 to 100,000.
    #[cfg_attr(feature = "crd", schemars(range(min = 1, max = 100_000)))]
    pub max_trials: u32,
    /// Number of rungs, at least 1. The shortest rung must have at least one unit.
    #[cfg_attr(feature = "crd", schemars(range(min = 1)))]
    pub num_rungs: u32,
    /// One of this many trials continues at each rung; at least 2. Default: 4.
    #[serde(default = "default_divisor")]
    #[cfg_attr(feature = "crd", schemars(range(min = 2)))]
    pub divisor: u32,
    /// Maximum number of trials that train concurrently; 0 means as many as keep all rungs busy.
    /// Default: 16.
    #[serde(default = "default_max_concurrent_trials")]
    #[cfg_attr(feature = "crd", schemars(range(max = u32::MAX)))]
    pub max_concurrent_trials: u32,
    /// Whether a trial is stopped for good at the first rung where it is not among the best. By
    /// default it is paused, and continues if it later is. Default: false.
    #[serde(default)]
    pub stop_once: bool,
}

/// Number of brackets of an adaptive search.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "crd", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub enum SearchMode {
    /// One bracket for each number of rungs: stops the fewest trials early.
    Conservative,
    /// Brackets for the larger half of the numbers of rungs.
    #[default]
    Standard,
    /// One bracket with all rungs: stops the most trials early.
    Aggressive,
}

/// Adaptive ASHA: brackets of asynchronous halving.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "crd", derive(schemars::JsonSchema))]
#[cfg_attr(feature = "crd", schemars(extend("x-kubernetes-validations" = fixed(&ADAPTIVE_ASHA))))]
#[serde(rename_all = "camelCase")]
pub struct AdaptiveAshaSearch {
    /// Total number of trials, from 1 to 100,000.
    #[cfg_attr(feature = "crd", schemars(range(min = 1, max = 100_000)))]
    pub max_trials: u32,
    /// Numbers of rungs of the brackets: only the largest (`aggressive`), the larger half
    /// (`standard`), or each from 1 on (`conservative`). Default: `standard`.
    #[serde(default)]
    pub mode: SearchMode,
    /// Maximum number of rungs of a bracket, at least 1. Default: 5.
    #[serde(default = "default_max_rungs")]
    #[cfg_attr(feature = "crd", schemars(range(min = 1)))]
    pub max_rungs: u32,
    /// Numbers of rungs of the brackets, instead of `mode` and `maxRungs`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[cfg_attr(feature = "crd", schemars(extend("maxItems" = 16)))]
    pub bracket_rungs: Vec<u32>,
    /// One of this many trials continues at each rung; at least 2. Default: 4.
    #[serde(default = "default_divisor")]
    #[cfg_attr(feature = "crd", schemars(range(min = 2)))]
    pub divisor: u32,
    /// Maximum number of trials of all brackets that train concurrently; 0 means as many as keep
    /// all brackets busy. Default: 16.
    #[serde(default = "default_max_concurrent_trials")]
    #[cfg_attr(feature = "crd", schemars(range(max = u32::MAX)))]
    pub max_concurrent_trials: u32,
    /// Same as in `asyncHalving`. Default: false.
    #[serde(default)]
    pub stop_once: bool,
}

/// Synchronous successive halving.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "crd", derive(schemars::JsonSchema))]
#[cfg_attr(feature = "crd", schemars(extend("x-kubernetes-validations" = fixed(&SYNC_HALVING))))]
#[serde(rename_all = "camelCase")]
pub struct SyncHalvingSearch {
    /// Number of rungs, at least 1. The shortest rung must have at least one unit.
    #[cfg_attr(feature = "crd", schemars(range(min = 1)))]
    pub num_rungs: u32,
    /// Approximate training length of all trials together, in the unit of `maxLength`.
    pub budget: Length,
    /// One of this many trials continues at each rung; at least 2. Default: 4.
    #[serde(default = "default_divisor")]
    #[cfg_attr(feature = "crd", schemars(range(min = 2)))]
    pub divisor: u32,
    /// Maximum number of trials that train concurrently; 0 means no limit. Default: 16.
    #[serde(default = "default_max_concurrent_trials")]
    #[cfg_attr(feature = "crd", schemars(range(max = u32::MAX)))]
    pub max_concurrent_trials: u32,
}

/// Brackets of synchronous halving with a budget.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "crd", derive(schemars::JsonSchema))]
#[cfg_attr(feature = "crd", schemars(extend("x-kubernetes-validations" = fixed(&ADAPTIVE))))]
#[serde(rename_all = "camelCase")]
pub struct AdaptiveSearch {
    /// Approximate training length of all trials together, in the unit of `maxLength`.
    pub budget: Length,
    /// Numbers of rungs of the brackets: only the largest (`aggressive`), the larger half
    /// (`standard`), or each from 1 on (`conservative`). Default: `standard`.
    #[serde(default)]
    pub mode: SearchMode,
    /// Maximum number of rungs of a bracket, at least 1. Default: 5.
    #[serde(default = "default_max_rungs")]
    #[cfg_attr(feature = "crd", schemars(range(min = 1)))]
    pub max_rungs: u32,
    /// Numbers of rungs of the brackets, instead of `mode` and `maxRungs`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[cfg_attr(feature = "crd", schemars(extend("maxItems" = 16)))]
    pub bracket_rungs: Vec<u32>,
    /// One of this many trials continues at each rung; at least 2. Default: 4.
    #[serde(default = "default_divisor")]
    #[cfg_attr(feature = "crd", schemars(range(min = 2)))]
    pub divisor: u32,
    /// Maximum number of trials that train concurrently; 0 means no limit. Default: 16.
    #[serde(default = "default_max_concurrent_trials")]
    #[cfg_attr(feature = "crd", schemars(range(max = u32::MAX)))]
    pub max_concurrent_trials: u32,
}

impl AdaptiveSearch {
    /// Returns the numbers of rungs of the brackets, most first, if trials train `units`.
    pub fn rungs(&self, units: u64) -> Vec<u32> {
        sync_bracket_rungs(&self.bracket_rungs, self.mode, self.max_rungs, units, self.divisor)
    }
}

/// Brackets of synchronous halving with a number of trials.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "crd", derive(schemars::JsonSchema))]
#[cfg_attr(feature = "crd", schemars(extend("x-kubernetes-validations" = fixed(&ADAPTIVE_SIMPLE))))]
#[serde(rename_all = "camelCase")]
pub struct AdaptiveSimpleSearch {
    /// Total number of trials, from 1 to 100,000.
    #[cfg_attr(feature = "crd", schemars(range(min = 1, max = 100_000)))]
    pub max_trials: u32,
    /// Numbers of rungs of the brackets: only the largest (`aggressive`), the larger half
    /// (`standard`), or each from 1 on (`conservative`). Default: `standard`.
    #[serde(default)]
    pub mode: SearchMode,
    /// Maximum number of rungs of a bracket, at least 1. Default: 5.
    #[serde(default = "default_max_rungs")]
    #[cfg_attr(feature = "crd", schemars(range(min = 1)))]
    pub max_rungs: u32,
    /// Numbers of rungs of the brackets, instead of `mode` and `maxRungs`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[cfg_attr(feature = "crd", schemars(extend("maxItems" = 16)))]
    pub bracket_rungs: Vec<u32>,
    /// One of this many trials continues at each rung; at least 2. Default: 4.
    #[serde(default = "default_divisor")]
    #[cfg_attr(feature = "crd", schemars(range(min = 2)))]
    pub divisor: u32,
    /// Maximum number of trials that train concurrently; 0 means no limit. Default: 16.
    #[serde(default = "default_max_concurrent_trials")]
    #[cfg_attr(feature = "crd", schemars(range(max = u32::MAX)))]
    pub max_concurrent_trials: u32,
}

impl AdaptiveSimpleSearch {
    /// Returns the numbers of rungs of the brackets, most first, if trials train `units`.
    pub fn rungs(&self, units: u64) -> Vec<u32> {
        sync_bracket_rungs(&self.bracket_rungs, self.mode, self.max_rungs, units, self.divisor)
    }
}

/// Hyperband: brackets from the most trials with the shortest rungs to the fewest with the longest.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "crd", derive(schemars::JsonSchema))]
#[cfg_attr(feature = "crd", schemars(extend("x-kubernetes-validations" = fixed(&HYPERBAND))))]
#[serde(rename_all = "camelCase")]
pub struct HyperbandSearch {
    /// Number of brackets, the one with the most trials first; 0 means all. Default: 0.
    #[serde(default)]
    pub num_brackets: u32,
    /// One of this many trials continues at each rung; at least 2. Default: 4.
    #[serde(default = "default_divisor")]
    #[cfg_attr(feature = "crd", schemars(range(min = 2)))]
    pub divisor: u32,
    /// Maximum number of trials that train concurrently; 0 means no limit. Default: 16.
    #[serde(default = "default_max_concurrent_trials")]
    #[cfg_attr(feature = "crd", schemars(range(max = u32::MAX)))]
    pub max_concurrent_trials: u32,
}

pub(super) fn default_true() -> bool {
    true
}

pub(super) fn default_max_concurrent_trials() -> u32 {
    16
}

fn default_divisor() -> u32 {
    4
}

fn default_max_rungs() -> u32 {
    5
}

fn default_release_seconds() -> u32 {
    60
}
