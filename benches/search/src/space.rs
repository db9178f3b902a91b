//! Experiments of the benchmarks.

use serde_json::{Value, json};
use stoker_api::experiment::ExperimentSpec;
use stoker_api::validate::validate;
use stoker_engine::search::SearchConfig;

use crate::BenchError;

/// Length of the longest rung.
pub(crate) const UNITS_MAX: u64 = 256;

/// Returns the search of an experiment with four hyperparameters.
///
/// # Errors
///
/// The searcher is not valid.
pub(crate) fn config(searcher: &Value, seed: u32) -> Result<SearchConfig, BenchError> {
    config_of(&four(), searcher, seed)
}

/// Returns four hyperparameters.
fn four() -> Value {
    json!({
        "rate": {"log": {"min": -5, "max": -1}},
        "momentum": {"double": {"min": 0.0, "max": 1.0}},
        "width": {"int": {"min": 16, "max": 1024}},
        "optimizer": {"categorical": ["sgd", "adam", "lamb"]},
    })
}

/// Returns the search of an experiment with these hyperparameters, which minimizes the metric.
///
/// # Errors
///
/// The searcher or the hyperparameters are not valid.
pub(crate) fn config_of(
    space: &Value,
    searcher: &Value,
    seed: u32,
) -> Result<SearchConfig, BenchError> {
    let spec: ExperimentSpec = serde_json::from_value(spec_of(space, searcher))?;
    let valid = validate("bench", &spec)
        .map_err(|errors| errors.iter().map(ToString::to_string).collect::<Vec<_>>().join("; "))?;
    Ok(SearchConfig::new(&valid, seed))
}

/// Returns the spec of an experiment with four hyperparameters and a seed, as JSON.
pub(crate) fn spec(searcher: &Value, seed: u32) -> Value {
    let mut spec = spec_of(&four(), searcher);
    spec["reproducibility"] = json!({ "experimentSeed": seed });
    spec
}

fn spec_of(space: &Value, searcher: &Value) -> Value {
    let mut all = json!({"metric": "loss", "maxLength": {"batches": UNITS_MAX}});
    if let (Some(all), Some(searcher)) = (all.as_object_mut(), searcher.as_object()) {
        all.extend(searcher.clone());
    }
    json!({
        "entrypoint": {"command": ["train"]},
        "hyperparameters": space,
        "searcher": all,
    })
}

/// Returns a metric for the result of a trial: a fixed, well-mixed function.
pub(crate) fn metric(trial: u32, units: u64) -> f64 {
    let mut bits = u64::from(trial) << 32 | units;
    // The finalizer of SplitMix64 (Steele et al. 2014).
    bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    bits ^= bits >> 31;
    (bits >> 11) as f64 / (1u64 << 53) as f64
}
