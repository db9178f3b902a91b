//! Configuration of an attempt, as its trainers read it.

use stoker_api::contract::{
    CONTRACT_VERSION, CheckpointRef, ContextRef, Gang, ReportEndpoint, StorageConfig, TrialConfig,
};
use stoker_api::names::trial_path;
use stoker_api::trial::TrialSpec;
use stoker_api::validate::{ValidExperiment, derive_seed};

/// Attempt of a trial, with the storage and the report endpoint of its runner.
#[derive(Clone, Debug)]
pub struct AttemptContext<'a> {
    /// The experiment.
    pub valid: &'a ValidExperiment,
    /// Namespace of the experiment.
    pub namespace: &'a str,
    /// Unique ID of the experiment.
    pub experiment_id: &'a str,
    /// The trial.
    pub trial: &'a TrialSpec,
    /// Attempt number, from 0.
    pub attempt: u32,
    /// Length granted so far, in the unit of the trial.
    pub units: u64,
    /// The trial's own checkpoints to resume from, in order of preference.
    pub resume_from: Vec<CheckpointRef>,
    /// First attempt whose checkpoints may be missing in `resume_from`; see
    /// [`unreported_since`](super::unreported_since).
    pub unreported_since: Option<u32>,
    /// URL of the storage root.
    pub root: String,
    /// Address of an S3 server other than Amazon's.
    pub endpoint: Option<String>,
    /// Report endpoint of the trial.
    pub report_endpoint: ReportEndpoint,
    /// Ranks of the attempt, as in [`TrialConfig::gang`].
    pub gang: Option<Gang>,
    /// Files of the program, which are unpacked before it starts.
    pub context: Option<ContextRef>,
}

/// Returns the seed of an experiment: `experimentSeed`, or else a seed derived from `id`.
pub fn experiment_seed(valid: &ValidExperiment, id: &str) -> u32 {
    valid.spec.reproducibility.experiment_seed.unwrap_or_else(|| derive_seed(id))
}

/// Returns the configuration of an attempt.
pub fn trial_config(attempt: AttemptContext<'_>) -> TrialConfig {
    let AttemptContext { valid, trial, experiment_id, .. } = attempt;
    let spec = &valid.spec;
    let path_of = |index: u32| trial_path(attempt.namespace, &valid.name, experiment_id, index);
    let mut resume_from = attempt.resume_from;
    // A copy never starts from scratch, even if all of its own checkpoints are corrupt.
    resume_from.extend(trial.source.as_ref().and_then(|source| {
        Some(CheckpointRef {
            name: source.checkpoint.clone()?,
            manifest_sha256: source.manifest_sha256.clone()?,
            trial_path: Some(path_of(source.trial)),
        })
    }));
    let (searcher, optimizations) = (&spec.searcher, &spec.optimizations);
    TrialConfig {
        version: CONTRACT_VERSION,
        experiment: valid.name.clone(),
        experiment_id: experiment_id.to_owned(),
        trial: trial.index,
        attempt: attempt.attempt,
        seed: trial.seed,
        experiment_seed: experiment_seed(valid, experiment_id),
        hyperparameters: trial.hyperparameters.clone(),
        search_space: spec.hyperparameters.clone(),
        data: spec.data.clone(),
        spec: spec.for_programs(),
        unit: trial.unit,
        units: attempt.units,
        metric: searcher.metric.clone(),
        time_metric: searcher.time_metric.clone(),
        smaller_is_better: searcher.smaller_is_better,
        scheduling_unit: spec.scheduling_unit,
        records_per_epoch: spec.records_per_epoch,
        validation_period: spec.min_validation_period,
        checkpoint_period: spec.min_checkpoint_period,
        checkpoint_policy: spec.checkpoint_policy,
        perform_initial_validation: spec.perform_initial_validation,
        aggregation_frequency: optimizations.aggregation_frequency,
        average_aggregated_gradients: optimizations.average_aggregated_gradients,
        gradient_compression: optimizations.gradient_compression,
        mixed_precision: optimizations.mixed_precision,
        storage: StorageConfig {
            url: attempt.root,
            endpoint: attempt.endpoint,
            trial_path: path_of(trial.index),
        },
        resume_from,
        unreported_since: attempt.unreported_since,
        report_endpoint: attempt.report_endpoint,
        gang: attempt.gang,
        context: attempt.context,
        inference: None,
        records: None,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};
    use stoker_api::validate::validate;

    use super::*;

    const ID: &str = "0b3f9c1e-77aa";

    /// Returns the configuration of attempt 2 of trial 3, for a spec with this field.
    fn config_with(field: &str, value: &Value) -> Value {
        let mut spec = json!({
            "entrypoint": { "command": ["train"] },
            "searcher": { "metric": "loss", "maxLength": { "epochs": 3 }, "single": {} },
        });
        spec[field] = value.clone();
        let spec = serde_json::from_value(spec).unwrap();
        let trial: TrialSpec = serde_json::from_value(json!({
            "experiment": "mnist", "index": 3, "requestId": "r", "seed": 7,
            "hyperparameters": { "rate": 0.1 }, "unit": "epochs", "units": 3,
            "source": { "trial": 1, "units": 2, "checkpoint": "s", "manifestSha256": "t" },
        }))
        .unwrap();
        let named = |name: &str| name.to_owned();
        let config = trial_config(AttemptContext {
            valid: &validate("mnist", &spec).unwrap(),
            namespace: "ml",
            experiment_id: ID,
            trial: &trial,
            attempt: 2,
            units: 9,
            resume_from: vec![CheckpointRef {
                name: named("c"),
                manifest_sha256: named("d"),
                trial_path: None,
            }],
            unreported_since: Some(1),
            root: named("s3://runs"),
            endpoint: Some(named("http://s3:1")),
            report_endpoint: ReportEndpoint {
                url: named("http://server"),
                token_file: named("/token"),
                ca: None,
            },
            gang: None,
            context: Some(ContextRef { path: named("ml/contexts/e"), sha256: named("e") }),
        });
        serde_json::to_value(config).unwrap()
    }

    #[track_caller]
    fn check(field: &str, value: &Value, pointer: &str, expected: &Value) {
        let config = config_with(field, value);
        assert_eq!(config.pointer(pointer), Some(expected), "{pointer} by {field} {value}");
    }

    #[test]
    fn attempts_and_trials_reach_the_program() {
        for (pointer, expected) in [
            ("/version", json!(1)),
            ("/experiment", json!("mnist")),
            ("/experimentId", json!(ID)),
            ("/trial", json!(3)),
            ("/attempt", json!(2)),
            ("/seed", json!(7)),
            ("/experimentSeed", json!(derive_seed(ID))),
            ("/hyperparameters", json!({ "rate": 0.1 })),
            ("/unit", json!("epochs")),
            ("/units", json!(9)),
            ("/resumeFrom/0", json!({ "name": "c", "manifestSha256": "d" })),
            // A copy falls back to the checkpoint of its source.
            (
                "/resumeFrom/1",
                json!({
                    "name": "s", "manifestSha256": "t",
                    "trialPath": "ml/mnist-0b3f9c1e/trials/1",
                }),
            ),
            ("/unreportedSince", json!(1)),
            ("/storage/url", json!("s3://runs")),
            ("/storage/endpoint", json!("http://s3:1")),
            ("/storage/trialPath", json!("ml/mnist-0b3f9c1e/trials/3")),
            ("/door/url", json!("http://server")),
            ("/door/tokenFile", json!("/token")),
            ("/gang", Value::Null),
            ("/context/path", json!("ml/contexts/e")),
        ] {
            check("maxRestarts", &json!(1), pointer, &expected);
        }
    }

    #[test]
    fn spec_fields_reach_the_program() {
        let searcher = json!({
            "metric": "accuracy", "smallerIsBetter": false, "maxLength": { "epochs": 3 },
            "single": {},
        });
        let (period, accumulated) = (json!({ "batches": 5 }), json!({ "aggregationFrequency": 4 }));
        let summed = json!({ "aggregationFrequency": 4, "averageAggregatedGradients": false });
        for (field, value, pointer, expected) in [
            ("reproducibility", json!({ "experimentSeed": 5 }), "/experimentSeed", json!(5)),
            ("data", json!({ "root": "x" }), "/data/root", json!("x")),
            ("maxRestarts", json!(2), "/spec/maxRestarts", json!(2)),
            ("searcher", searcher.clone(), "/metric", json!("accuracy")),
            ("searcher", searcher, "/smallerIsBetter", json!(false)),
            ("schedulingUnit", json!(8), "/schedulingUnit", json!(8)),
            ("recordsPerEpoch", json!(64), "/recordsPerEpoch", json!(64)),
            ("minValidationPeriod", period.clone(), "/validationPeriod", period.clone()),
            ("minCheckpointPeriod", period.clone(), "/checkpointPeriod", period),
            ("checkpointPolicy", json!("all"), "/checkpointPolicy", json!("all")),
            ("performInitialValidation", json!(true), "/performInitialValidation", json!(true)),
            ("optimizations", accumulated, "/aggregationFrequency", json!(4)),
            ("optimizations", summed, "/averageAggregatedGradients", json!(false)),
            (
                "optimizations",
                json!({ "gradientCompression": "f16" }),
                "/gradientCompression",
                json!("f16"),
            ),
            (
                "optimizations",
                json!({ "mixedPrecision": "bf16" }),
                "/mixedPrecision",
                json!("bf16"),
            ),
        ] {
            check(field, &value, pointer, &expected);
        }
    }
}
