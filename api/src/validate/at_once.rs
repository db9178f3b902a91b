//! Number of trials that a search creates at once.

use serde_json::json;

use super::sizes::{self, integer_log, split_trials};
use super::{FieldError, Method, ValidExperiment, new};
use crate::experiment::AdaptiveAshaSearch;

/// Maximum number of trials that a search creates when it begins. One entry of the experiment's log
/// records them with up to 70 bytes each, and etcd stores objects of at most 1.5 MB.
const CREATED_AT_ONCE_MAX: u32 = 20_000;

/// Trials of a search with `maxConcurrentTrials`.
struct Trials {
    method: &'static str,
    /// Value of `maxConcurrentTrials`.
    concurrency: u32,
    /// Total number of trials.
    num: u128,
    /// Maximum number of trials that train at the same time with a `concurrency` of 0.
    unlimited: u128,
}

impl Trials {
    fn new(method: &'static str, concurrency: u32, num: u128) -> Self {
        Self { method, concurrency, num, unlimited: num }
    }
}

/// Checks the number of trials that a search creates at once when it begins. Only clusters have
/// this limit.
pub fn check_num_at_once(valid: &ValidExperiment) -> Option<FieldError> {
    let Trials { method, concurrency, num, unlimited } = trials(valid)?;
    let places = match concurrency {
        0 => unlimited,
        limit => limit.into(),
    };
    let num_at_once = num.min(places);
    let rule = format!(
        "lets the search create {num_at_once} trials at once; set it to a number from 1 to \
         {CREATED_AT_ONCE_MAX}"
    );
    let path = format!("spec.searcher.{method}.maxConcurrentTrials");
    let is_large = num_at_once > u128::from(CREATED_AT_ONCE_MAX);
    is_large.then(|| FieldError::new(&path, &json!(concurrency), &rule))
}

/// Returns the trials of a search that may create many at once.
fn trials(valid: &ValidExperiment) -> Option<Trials> {
    let units = valid.units_max;
    Some(match &valid.method {
        Method::Random { max_trials, max_concurrent } => {
            Trials::new("random", *max_concurrent, (*max_trials).into())
        }
        Method::Grid { max_concurrent } => {
            Trials::new("grid", *max_concurrent, valid.space.num_points())
        }
        Method::Tpe(search) => {
            Trials::new("tpe", search.max_concurrent_trials, search.max_trials.into())
        }
        Method::Sobol(search) => {
            Trials::new("sobol", search.max_concurrent_trials, search.max_trials.into())
        }
        Method::AsyncHalving(search) => {
            let num = u128::from(search.max_trials);
            let places = search.divisor.saturating_pow(search.num_rungs.saturating_sub(1));
            let all = Trials::new("asyncHalving", search.max_concurrent_trials, num);
            Trials { unlimited: num.min(places.into()), ..all }
        }
        Method::AdaptiveAsha(search) => {
            let num = u128::from(search.max_trials);
            let all = Trials::new("adaptiveAsha", search.max_concurrent_trials, num);
            Trials { unlimited: adaptive_asha_places(search, units), ..all }
        }
        Method::AdaptiveSimple(search) => {
            Trials::new("adaptiveSimple", search.max_concurrent_trials, search.max_trials.into())
        }
        Method::SyncHalving { search, .. } => {
            let num = new::num_trials(&valid.method, units)?;
            Trials::new("syncHalving", search.max_concurrent_trials, num)
        }
        Method::Adaptive { search, .. } => {
            let num = new::num_trials(&valid.method, units)?;
            Trials::new("adaptive", search.max_concurrent_trials, num)
        }
        Method::Hyperband(search) => {
            let num = new::num_trials(&valid.method, units)?;
            Trials::new("hyperband", search.max_concurrent_trials, num)
        }
        // An answer has a maximum size, and a population at most 1,000 trials.
        Method::Single | Method::Pbt { .. } | Method::External(_) => return None,
    })
}

/// Returns how many trials of all brackets train at the same time if each bracket determines its
/// number.
fn adaptive_asha_places(search: &AdaptiveAshaSearch, units: u64) -> u128 {
    let AdaptiveAshaSearch { max_trials, max_rungs, divisor, mode, .. } = *search;
    let rungs_max = max_rungs.min(integer_log(divisor, max_trials.into()) + 1);
    let rungs = sizes::sync_bracket_rungs(&search.bracket_rungs, mode, rungs_max, units, divisor);
    let trials = split_trials(max_trials, divisor, &rungs);
    let places = trials.last().copied().unwrap_or(1).max(divisor);
    trials.iter().map(|num| u128::from(places.min(*num))).sum()
}
