//! Importance of hyperparameters: the share of the results' variance that each one explains.
//!
//! ```text
//!   results at one length -> 64 regression trees      (tree)
//!   space                 -> axes                     (axes)
//!   tree + axes           -> variances of marginals   (marginal)
//!   mean over the trees   -> share ± deviation
//! ```
//!
//! Source: functional ANOVA by Hutter, Hoos and Leyton-Brown, "An Efficient Approach for Assessing
//! Hyperparameter Importance" (ICML 2014). The numbers of trees and their depth are those of
//! Optuna's `FanovaImportanceEvaluator`.
//!
//! # Invariants
//!
//! - The same trials and seed give the same numbers; the order of the trials does not matter.
//! - Results of different lengths are never mixed.
//! - All shares and the remainder, which is due to interactions, sum up to 1.

mod axes;
mod marginal;
mod tree;

use std::collections::BTreeMap;
use std::fmt;

use serde::Serialize;
use stoker_api::experiment::Unit;
use stoker_api::number;
use stoker_api::trial::{CloseCause, Fact};

use self::axes::{Axes, Point};
use self::tree::Forest;
use super::explain::length;
use crate::search::SearchConfig;
use crate::search::rng::Random;
use crate::trial::{TrialRecord, closed};

/// Minimum number of results at one length. Below it, a forest mostly describes noise.
pub const RESULTS_MIN: usize = 10;

const NUM_TREES: usize = 64;

/// Importance of the hyperparameters of an experiment, at one length.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Importance {
    /// Length of the results.
    pub units: u64,
    /// Unit of the length.
    pub unit: Unit,
    /// Number of results, one for each trial.
    pub results: u32,
    /// Number of results at this length that are not finite, and do not count.
    pub not_finite: u32,
    /// Hyperparameters that vary, the most important first.
    pub hyperparameters: Vec<Share>,
    /// Share of the variance that only combinations of hyperparameters explain.
    pub interactions: f64,
}

/// Importance of one hyperparameter.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Share {
    /// Path, such as `optimizer.rate`.
    pub name: String,
    /// Group of a choice that the hyperparameter is in, such as `name=adam`. Unset for those that
    /// are always active.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub group: Option<String>,
    /// Share of the variance, from 0 to 1: the mean over the trees.
    pub importance: f64,
    /// Standard deviation over the trees.
    pub deviation: f64,
}

/// Reason why the importance is unknown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unknown {
    /// No hyperparameter varies.
    NothingVaries,
    /// No length has enough results.
    TooFewResults {
        /// Greatest number of finite results at one length.
        results: u32,
        /// The length; `None` without a result.
        length: Option<(u64, Unit)>,
    },
    /// All results are equal.
    EqualResults {
        /// Number of results.
        results: u32,
        /// Their length.
        length: (u64, Unit),
    },
    /// All results have the same hyperparameters.
    EqualHyperparameters {
        /// Number of results.
        results: u32,
        /// Their length.
        length: (u64, Unit),
    },
}

impl fmt::Display for Unknown {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::NothingVaries => f.write_str("no hyperparameter varies"),
            Self::TooFewResults { length: None, .. } => {
                write!(f, "needs {RESULTS_MIN} results, has none")
            }
            Self::TooFewResults { results, length: Some((units, unit)) } => {
                let length = length(units, unit);
                write!(f, "needs {RESULTS_MIN} results at one length, has {results} at {length}")
            }
            Self::EqualResults { results, length: (units, unit) } => {
                write!(f, "all {results} results at {} are equal", length(units, unit))
            }
            Self::EqualHyperparameters { results, length: (units, unit) } => {
                let length = length(units, unit);
                write!(f, "all {results} results at {length} have the same hyperparameters")
            }
        }
    }
}

/// Returns the importance of an experiment's hyperparameters for the searched metric.
///
/// Of all lengths with at least [`RESULTS_MIN`] finite results, the greatest counts. Trials without
/// a result there, such as failed ones, and those that rejected their hyperparameters are left out.
///
/// # Errors
///
/// [`Unknown`].
pub fn importance<'a>(
    config: &SearchConfig,
    trials: impl IntoIterator<Item = &'a TrialRecord>,
) -> Result<Importance, Unknown> {
    importance_at(config, trials, None)
}

/// Same as [`importance`], from the results at the length `units` if it is set.
///
/// # Errors
///
/// [`Unknown`].
pub fn importance_at<'a>(
    config: &SearchConfig,
    trials: impl IntoIterator<Item = &'a TrialRecord>,
    units: Option<u64>,
) -> Result<Importance, Unknown> {
    let axes = Axes::new(&config.space);
    if axes.varying().next().is_none() {
        return Err(Unknown::NothingVaries);
    }
    let mut all = Results::by_length(&axes, trials);
    all.retain(|results| units.is_none_or(|units| units == results.units));
    let Results { units, points, values, not_finite } = Results::longest(all, config.unit)?;
    let results = points.len() as u32;
    let values = normalized(values)
        .ok_or(Unknown::EqualResults { results, length: (units, config.unit) })?;
    let mut forest = Forest::new(&axes, &points, &values);
    let mut random = Random::new(config.seed);
    let trees: Vec<Vec<f64>> =
        (0..NUM_TREES).filter_map(|_| marginal::shares(&axes, &forest.grow(&mut random))).collect();
    if trees.is_empty() {
        // No tree has a split.
        return Err(Unknown::EqualHyperparameters { results, length: (units, config.unit) });
    }
    let mut hyperparameters: Vec<Share> = (0..)
        .zip(axes.varying())
        .map(|(i, axis)| {
            let (importance, deviation) = mean(trees.iter().map(|shares| shares[i]));
            Share { name: axis.name.clone(), group: axis.group(), importance, deviation }
        })
        .collect();
    let explained: f64 = hyperparameters.iter().map(|share| share.importance).sum();
    // Stable: equal shares stay in the order of the space.
    hyperparameters.sort_by(|one, other| other.importance.total_cmp(&one.importance));
    let interactions = (1.0 - explained).max(0.0);
    let unit = config.unit;
    Ok(Importance { units, unit, results, not_finite, hyperparameters, interactions })
}

/// Returns the lengths with at least [`RESULTS_MIN`] finite results, ascending.
pub fn lengths<'a>(
    config: &SearchConfig,
    trials: impl IntoIterator<Item = &'a TrialRecord>,
) -> Vec<u64> {
    let all = Results::by_length(&Axes::new(&config.space), trials);
    let enough = all.iter().rev().filter(|results| results.values.len() >= RESULTS_MIN);
    enough.map(|results| results.units).collect()
}

/// Finite results at one length.
struct Results {
    units: u64,
    points: Vec<Point>,
    values: Vec<f64>,
    not_finite: u32,
}

impl Results {
    /// Returns the results at each length, the greatest length first.
    fn by_length<'a>(axes: &Axes, trials: impl IntoIterator<Item = &'a TrialRecord>) -> Vec<Self> {
        let is_valid =
            |trial: &&TrialRecord| closed(trial) != Some(CloseCause::InvalidHyperparameters);
        let trials: BTreeMap<u32, &TrialRecord> =
            trials.into_iter().filter(is_valid).map(|trial| (trial.spec.index, trial)).collect();
        let mut by_length: BTreeMap<u64, BTreeMap<u32, f64>> = BTreeMap::new();
        for (index, trial) in &trials {
            for fact in &trial.status.facts {
                let Fact::Result(result) = fact else { continue };
                let value = number::parse(&result.metric).unwrap_or(f64::NAN);
                by_length.entry(result.units).or_default().entry(*index).or_insert(value);
            }
        }
        let results = |(units, results): (u64, BTreeMap<u32, f64>)| {
            let num_all = results.len();
            let finite = results.into_iter().filter(|(_, value)| value.is_finite());
            let finite: Vec<(u32, f64)> = finite.collect();
            let not_finite = (num_all - finite.len()) as u32;
            let point = |(index, value): (u32, f64)| {
                let hyperparameters = &trials.get(&index)?.spec.hyperparameters;
                Some((axes.point(hyperparameters)?, value))
            };
            let (points, values) = finite.into_iter().filter_map(point).unzip();
            Self { units, points, values, not_finite }
        };
        by_length.into_iter().rev().map(results).collect()
    }

    /// Returns the first entry with enough results. The greatest length comes first.
    fn longest(all: Vec<Self>, unit: Unit) -> Result<Self, Unknown> {
        let mut most: Option<Self> = None;
        for results in all {
            if results.values.len() >= RESULTS_MIN {
                return Ok(results);
            }
            if most.as_ref().is_none_or(|most| most.values.len() < results.values.len()) {
                most = Some(results);
            }
        }
        let length = most.as_ref().map(|results| (results.units, unit));
        let results = most.map_or(0, |results| results.values.len() as u32);
        Err(Unknown::TooFewResults { results, length })
    }
}

/// Shifts and scales values to a mean of 0 and a greatest magnitude of 1, which changes no share.
/// `None` if all are equal.
fn normalized(mut values: Vec<f64>) -> Option<Vec<f64>> {
    let greatest = |values: &[f64]| values.iter().fold(0.0, |max: f64, value| max.max(value.abs()));
    // First scale, because the sum of large values would be infinite.
    for is_first in [true, false] {
        let scale = greatest(&values);
        if scale == 0.0 {
            return None;
        }
        values.iter_mut().for_each(|value| *value /= scale);
        if is_first {
            // Equal values are all 1 or all -1 now, so their distances to the mean are exactly 0.
            let mean = values.iter().sum::<f64>() / values.len() as f64;
            values.iter_mut().for_each(|value| *value -= mean);
        }
    }
    Some(values)
}

/// Returns the mean and the standard deviation; 0 without values.
fn mean(values: impl Iterator<Item = f64> + Clone) -> (f64, f64) {
    let num = (values.clone().count() as f64).max(1.0);
    let mean = values.clone().sum::<f64>() / num;
    let variance = values.map(|value| (value - mean) * (value - mean)).sum::<f64>() / num;
    (mean, variance.sqrt())
}

#[cfg(test)]
mod tests;
