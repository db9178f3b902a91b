//! `--test`: reduces an experiment to one batch, a validation, a checkpoint and its restore.

use std::path::{Path, PathBuf};

use serde_json::json;
use stoker_api::experiment::{DesiredState, EnvVar, Length, Searcher, Unit};
use stoker_api::names::{ENV_TEST, experiment_path};
use stoker_api::validate::validate;
use stoker_storage::Storage;

use crate::failure::Failure;
use crate::file::Loaded;
use crate::run::{RunPaths, record};
use crate::run_root::RunRoot;

/// Suffix of the test experiment's name.
const SUFFIX: &str = "-test";
/// Maximum length of an experiment name, in bytes.
const NAME_MAX: usize = 40;

/// Reduces `loaded` to a smoke test: one trial of one batch, with hyperparameters sampled once and
/// without restarts.
///
/// # Errors
///
/// [`Failure::Input`] if the reduced experiment is invalid.
pub(crate) fn to_smoke_test(mut loaded: Loaded) -> Result<Loaded, Failure> {
    let mut spec = loaded.valid.spec.clone();
    spec.searcher = one_batch(&spec.searcher)?;
    (spec.min_validation_period, spec.min_checkpoint_period) = (None, None);
    spec.perform_initial_validation = false;
    spec.max_restarts = 0;
    spec.state = DesiredState::Active;
    spec.env.retain(|variable| variable.name != ENV_TEST);
    spec.env.push(EnvVar { name: ENV_TEST.to_owned(), value: "1".to_owned() });
    let stem = &loaded.name[..loaded.name.len().min(NAME_MAX - SUFFIX.len())];
    let name = format!("{}{SUFFIX}", stem.trim_end_matches('-'));
    loaded.valid = validate(&name, &spec).map_err(|errors| {
        let errors = errors.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ");
        Failure::Input(format!("cannot reduce the experiment to a test: {errors}"))
    })?;
    loaded.spec_json = json!(loaded.valid.spec);
    loaded.name = name;
    Ok(loaded)
}

/// Returns a search of one trial with the same metrics. Nothing else of the search stays: methods
/// and limits do not fit one trial, and the storage root of the test has no other runs.
fn one_batch(searcher: &Searcher) -> Result<Searcher, Failure> {
    let Searcher { metric, smaller_is_better, objectives, time_metric, .. } = searcher;
    // A program that counts units has no batches.
    let unit = if searcher.max_length.units.is_some() { Unit::Units } else { Unit::Batches };
    let mut one = json!({
        "metric": metric,
        "smallerIsBetter": smaller_is_better,
        "objectives": objectives,
        "maxLength": Length::new(unit, 1),
        "single": {},
    });
    if let Some(time_metric) = time_metric {
        one["timeMetric"] = json!(time_metric);
    }
    serde_json::from_value(one).map_err(|error| Failure::System(error.to_string()))
}

/// Returns a unique directory for a test's record, and for its files if no storage is configured.
pub(crate) fn new_test_folder() -> Result<PathBuf, Failure> {
    Ok(std::env::temp_dir().join(format!("stoker-test-{}", record::random_hex(8)?)))
}

/// Returns the storage and record location of a test. The record is never stored next to those of
/// experiments.
pub(crate) fn test_run_root(
    test_folder: &Path,
    flag: Option<&str>,
    file: Option<&str>,
) -> Result<RunRoot, Failure> {
    match (flag, file) {
        (None, None) => RunRoot::resolve(test_folder.to_str(), None),
        _ => Ok(RunRoot { state_dir: test_folder.to_owned(), ..RunRoot::resolve(flag, file)? }),
    }
}

/// Deletes all files of a test.
pub(crate) async fn delete_files(
    test_folder: &Path,
    storage: &Storage,
    paths: &RunPaths,
) -> Result<(), Failure> {
    let folder = experiment_path(&paths.namespace, &paths.name, &paths.uid);
    storage.delete_folder(&format!("{folder}/")).await?;
    std::fs::remove_dir_all(test_folder)
        .map_err(|error| Failure::file("delete", test_folder, error))
}

#[cfg(test)]
mod tests {
    use serde_json::Value;
    use stoker_api::experiment::{ExperimentSpec, SEARCH_METHODS};

    use super::*;

    /// Checks the test of a search with this method and these fields besides.
    fn check(method: &str, fields: Value, more: Value) {
        let mut searcher = json!({
            "metric": "loss", "smallerIsBetter": false, "maxLength": { "epochs": 81 },
            method: fields,
        });
        for (name, value) in more.as_object().into_iter().flatten() {
            searcher[name] = value.clone();
        }
        let rate = json!({ "double": { "min": 0, "max": 1, "count": 2 } });
        let spec: ExperimentSpec = serde_json::from_value(json!({
            "entrypoint": { "command": ["x"] },
            "hyperparameters": { "rate": rate },
            "searcher": searcher,
        }))
        .unwrap();
        let valid = validate("search", &spec).unwrap();
        let reduced = one_batch(&valid.spec.searcher).unwrap();
        assert_eq!(reduced.methods_set(), ["single"], "{method}");
        assert_eq!(reduced.max_length, Length::new(Unit::Batches, 1));
        assert_eq!((&reduced.metric[..], reduced.smaller_is_better), ("loss", false));
        validate("search-test", &ExperimentSpec { searcher: reduced, ..spec }).unwrap();
    }

    #[test]
    fn every_search_is_reduced_to_one_batch() {
        for method in SEARCH_METHODS {
            let fields = match method {
                "single" | "grid" | "hyperband" => json!({}),
                "asyncHalving" => json!({ "maxTrials": 9, "numRungs": 3 }),
                "syncHalving" => json!({ "numRungs": 3, "budget": { "epochs": 400 } }),
                "adaptive" => json!({ "budget": { "epochs": 400 } }),
                "pbt" => json!({
                    "populationSize": 4, "lengthPerRound": { "epochs": 27 }, "numRounds": 3,
                }),
                "external" => json!({ "maxTrials": 9, "command": ["searcher"] }),
                _ => json!({ "maxTrials": 9 }),
            };
            check(method, fields, json!({}));
        }
        let more = json!({
            "medianStopping": { "everyUnits": 9 },
            "limits": { "seconds": 1 },
            "sampler": { "tpe": {} },
            "priorTrials": { "experiments": ["old"] },
        });
        check("random", json!({ "maxTrials": 9 }), more);
    }

    #[test]
    fn programs_that_count_units_train_one_unit() {
        let searcher = json!({
            "metric": "loss", "maxLength": { "units": 900 }, "timeMetric": "steps", "single": {},
        });
        let reduced = one_batch(&serde_json::from_value(searcher).unwrap()).unwrap();
        let of = (reduced.max_length, reduced.time_metric.as_deref());
        assert_eq!(of, (Length::new(Unit::Units, 1), Some("steps")));
    }
}
