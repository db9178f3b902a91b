//! Validation rules of inference jobs, one function for each part of the spec.

use std::collections::BTreeSet;

use serde_json::json;

use super::rules::{
    check_endpoint, check_entrypoint, check_env, check_name, check_storage_url, union_error,
};
use super::{FieldError, ValidInferenceJob, item, member, pods};
use crate::experiment::Resources;
use crate::inference::{CheckpointChoice, InferenceJobSpec};

/// Maximum number of workers.
const SLOTS_MAX: u32 = 1024;
/// Maximum number of rows in a shard or batch: a worker holds them in memory.
const ROWS_MAX: u32 = 10_000_000;

pub(super) fn check(
    name: &str,
    spec: &InferenceJobSpec,
) -> Result<ValidInferenceJob, Vec<FieldError>> {
    let mut errors = Vec::new();
    check_name(name, &mut errors);
    check_entrypoint(&spec.entrypoint, &mut errors);
    let hyperparameters = spec.hyperparameters.as_ref();
    for (path, value) in
        [("spec.data", Some(&spec.data)), ("spec.hyperparameters", hyperparameters)]
    {
        if let Some(value) = value.filter(|value| !value.is_object()) {
            errors.push(FieldError::new(path, value, "must be an object"));
        }
    }
    if let Some(checkpoint) = &spec.checkpoint {
        check_checkpoint(checkpoint, &mut errors);
    }
    check_input(spec, &mut errors);
    check_output(spec, &mut errors);
    check_numbers(spec, &mut errors);
    check_env(&spec.env, &mut errors);
    check_storage(spec, &mut errors);
    check_pods(spec, &mut errors);
    match errors.is_empty() {
        true => Ok(ValidInferenceJob { name: name.to_owned(), spec: spec.clone() }),
        false => Err(errors),
    }
}

/// Rejects a relative output path: on a cluster, it is in the pod's file system and lost with the
/// pod.
pub(super) fn check_locations(spec: &InferenceJobSpec) -> Vec<FieldError> {
    let is_relative = |url: &&String| !url.contains("://") && !url.starts_with('/');
    let rule = "is a relative path, which is lost with its pod; on a cluster, use a bucket \
                (s3://, gs://, az://), an absolute path in a volume that all pods mount, or omit \
                it to use the job's storage";
    let url = spec.output.url.as_ref().filter(is_relative);
    url.map(|url| FieldError::new("spec.output.url", &json!(url), rule)).into_iter().collect()
}

fn check_checkpoint(checkpoint: &CheckpointChoice, errors: &mut Vec<FieldError>) {
    let path = "spec.checkpoint";
    let set = [
        ("trial", checkpoint.trial.is_some()),
        ("folder", checkpoint.folder.is_some()),
        ("stored", checkpoint.stored.is_some()),
    ];
    let set: Vec<_> = set.into_iter().filter(|(_, is_set)| *is_set).map(|(name, _)| name).collect();
    if set.len() != 1 {
        let rule = "exactly one of trial, folder and stored must be set";
        errors.push(union_error(path, &set, rule));
    }
    if let Some(trial) = &checkpoint.trial {
        let is_trial =
            trial.rsplit_once('-').is_some_and(|(_, index)| index.parse::<u32>().is_ok());
        if !is_trial {
            let rule = "must be a trial's name, EXPERIMENT-INDEX, such as mnist-3";
            errors.push(FieldError::new(&member(path, "trial"), &json!(trial), rule));
        }
    }
    if let Some(stored) = &checkpoint.stored {
        let path = member(path, "stored");
        check_url(&member(&path, "url"), &stored.url, errors);
        check_endpoint(&member(&path, "endpoint"), stored.endpoint.as_ref(), errors);
    }
    if checkpoint.folder.is_some() && checkpoint.name.is_some() {
        let rule = "must not be set with folder, which is one checkpoint; remove it";
        errors.push(FieldError::new(&member(path, "name"), &json!(checkpoint.name), rule));
    }
}

fn check_input(spec: &InferenceJobSpec, errors: &mut Vec<FieldError>) {
    let (input, path) = (&spec.input, "spec.input.url");
    let scheme = input.url.split_once("://").map(|(scheme, _)| scheme);
    match scheme {
        _ if input.url.trim().is_empty() => {
            let rule = "must name a file, a directory or a pattern";
            errors.push(FieldError::new(path, &json!(input.url), rule));
        }
        Some("memory") => {
            let rule = "memory is not shared with the workers' processes; use files or a bucket";
            errors.push(FieldError::new(path, &json!(input.url), rule));
        }
        Some(_) => check_url(path, &input.url, errors),
        None => {}
    }
    check_endpoint("spec.input.endpoint", input.endpoint.as_ref(), errors);
}

fn check_output(spec: &InferenceJobSpec, errors: &mut Vec<FieldError>) {
    let output = &spec.output;
    if let Some(url) = output.url.as_ref().filter(|url| url.contains("://")) {
        check_url("spec.output.url", url, errors);
    }
    check_endpoint("spec.output.endpoint", output.endpoint.as_ref(), errors);
    let path = "spec.output.columns";
    if output.format.is_typed() && output.columns.is_empty() {
        let rule = "must list the columns and their types, which this format requires, such as \
                    [{ name: label, type: string }]";
        errors.push(FieldError::absent(path, rule).reading(&["spec.output.format"]));
    }
    if !output.format.is_typed() && !output.columns.is_empty() {
        let rule = "must not be set except for parquet and arrow; remove them";
        let error = FieldError::new(path, &json!(output.columns), rule);
        errors.push(error.reading(&["spec.output.format"]));
    }
    let mut seen = BTreeSet::new();
    for (i, column) in output.columns.iter().enumerate() {
        if !seen.insert(&column.name) {
            let path = member(&item(path, i), "name");
            errors.push(FieldError::new(&path, &json!(column.name), "is set twice; keep one"));
        }
    }
}

fn check_numbers(spec: &InferenceJobSpec, errors: &mut Vec<FieldError>) {
    let numbers = [
        ("spec.shardRows", spec.shard_rows, ROWS_MAX),
        ("spec.batchRows", spec.batch_rows, ROWS_MAX),
        ("spec.resources.slots", spec.resources.slots, SLOTS_MAX),
        ("spec.preemptionTimeoutSeconds", spec.preemption_timeout_seconds, u32::MAX),
    ];
    for (path, value, max) in numbers {
        if value == 0 {
            errors.push(FieldError::new(path, &json!(0), "must be at least 1"));
        } else if value > max {
            errors.push(FieldError::new(path, &json!(value), &format!("must be at most {max}")));
        }
    }
}

fn check_storage(spec: &InferenceJobSpec, errors: &mut Vec<FieldError>) {
    if let Some(url) = &spec.storage.url {
        check_url("spec.storage.url", url, errors);
    }
    check_endpoint("spec.storage.endpoint", spec.storage.endpoint.as_ref(), errors);
    pods::check_secret("spec.storage.secretName", &spec.storage.secret_name, errors);
}

/// Checks resources and pods by the rules of an experiment whose trials have one slot.
fn check_pods(spec: &InferenceJobSpec, errors: &mut Vec<FieldError>) {
    let resources = Resources {
        slots_per_trial: 1,
        slots_per_pod: None,
        slot_resource: spec.resources.slot_resource.clone(),
        requests: spec.resources.requests.clone(),
        limits: spec.resources.limits.clone(),
        shm_size: spec.resources.shm_size.clone(),
    };
    pods::check_resources(&resources, errors);
    pods::check_template(&spec.pod, errors);
    if let Some(overrides) = &spec.pod_overrides {
        pods::check_overrides(overrides, errors);
    }
    pods::check_context(spec.context.as_ref(), errors);
}

/// Checks a URL that all processes of a job use.
fn check_url(path: &str, url: &str, errors: &mut Vec<FieldError>) {
    check_storage_url(path, url, false, errors);
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;
    use crate::validate::{
        validate_inference, validate_inference_on_cluster, validate_started_inference,
        validate_started_local_inference,
    };

    /// Validates a job with the fields of `change`. `expected` lists the paths of the errors.
    fn check_fields(change: Value, expected: &[&str]) {
        let mut spec = json!({
            "entrypoint": {"command": ["./infer"]},
            "input": {"url": "rows.jsonl"},
        });
        for (name, value) in change.as_object().unwrap() {
            spec[name] = value.clone();
        }
        let spec: InferenceJobSpec = serde_json::from_value(spec).unwrap();
        let paths: Vec<String> = match check("job", &spec) {
            Ok(_) => vec![],
            Err(errors) => errors.into_iter().map(|error| error.path).collect(),
        };
        assert_eq!(paths, expected, "{change}");
    }

    #[test]
    fn each_field_is_validated() {
        check_fields(json!({}), &[]);
        check_fields(json!({"entrypoint": {"command": []}}), &["spec.entrypoint.command"]);
        check_fields(json!({"data": 1}), &["spec.data"]);
        check_fields(json!({"hyperparameters": []}), &["spec.hyperparameters"]);
        check_fields(
            json!({"shardRows": 0, "batchRows": 0}),
            &["spec.shardRows", "spec.batchRows"],
        );
        check_fields(json!({"resources": {"slots": 0}}), &["spec.resources.slots"]);
        check_fields(json!({"resources": {"slots": 1025}}), &["spec.resources.slots"]);
        check_fields(json!({"resources": {"shmSize": "x"}}), &["spec.resources.shmSize"]);
        check_fields(json!({"env": [{"name": "STOKER_X"}]}), &["spec.env[0].name"]);
        check_fields(json!({"storage": {"url": "ftp://x"}}), &["spec.storage.url"]);
        check_fields(json!({"storage": {"secretName": "A B"}}), &["spec.storage.secretName"]);
        check_fields(json!({"pod": {"image": " "}}), &["spec.pod.image"]);
        let overrides = json!({"spec": {"nodeName": "x"}});
        check_fields(json!({"podOverrides": overrides}), &["spec.podOverrides.spec.nodeName"]);
    }

    #[test]
    fn large_fields_are_refused_before_the_start() {
        let spec = json!({
            "entrypoint": {"command": ["./infer"]}, "input": {"url": "rows.jsonl"},
            "data": {"list": "x".repeat(170_000)},
        });
        let spec: InferenceJobSpec = serde_json::from_value(spec).unwrap();
        for validate in [validate_inference, validate_inference_on_cluster] {
            let errors = validate("job", &spec).unwrap_err();
            assert_eq!(errors[0].path, "spec.data", "{errors:?}");
        }
        validate_started_inference("job", &spec).unwrap();
        validate_started_local_inference("job", &spec).unwrap();
    }

    #[test]
    fn inputs_and_outputs_are_paths_or_urls() {
        for url in ["rows.jsonl", "/data/*.csv", "s3://bucket/a/*.jsonl", "file:///a"] {
            check_fields(json!({"input": {"url": url}}), &[]);
            check_fields(json!({"output": {"url": url}}), &[]);
        }
        for url in ["ftp://x/y", "memory:///"] {
            check_fields(json!({"input": {"url": url}}), &["spec.input.url"]);
            check_fields(json!({"output": {"url": url}}), &["spec.output.url"]);
        }
        check_fields(json!({"input": {"url": ""}}), &["spec.input.url"]);
        let input = json!({"url": "s3://x/y", "endpoint": "x"});
        check_fields(json!({"input": input}), &["spec.input.endpoint"]);
        check_fields(json!({"output": {"format": "parquet"}}), &["spec.output.columns"]);
        let column = json!({"name": "a", "type": "double"});
        check_fields(json!({"output": {"format": "arrow", "columns": [column]}}), &[]);
        check_fields(json!({"output": {"columns": [column]}}), &["spec.output.columns"]);
        let twice = json!({"format": "parquet", "columns": [column, column]});
        check_fields(json!({"output": twice}), &["spec.output.columns[1].name"]);
    }

    #[test]
    fn cluster_output_must_be_reachable_from_all_pods() {
        let check = |url: Option<&str>, expected: usize| {
            let spec = json!({
                "entrypoint": {"command": ["./infer"]},
                "input": {"url": "rows.jsonl"},
                "output": {"url": url},
            });
            let spec: InferenceJobSpec = serde_json::from_value(spec).unwrap();
            assert_eq!(check_locations(&spec).len(), expected, "{url:?}");
        };
        check(None, 0);
        check(Some("s3://bucket/out"), 0);
        check(Some("/mnt/out"), 0);
        check(Some("file:///mnt/out"), 0);
        check(Some("predictions"), 1);
        check(Some("./predictions"), 1);
    }

    #[test]
    fn a_checkpoint_is_selected_in_one_way() {
        check_fields(json!({"checkpoint": {"trial": "mnist-3"}}), &[]);
        check_fields(json!({"checkpoint": {}}), &["spec.checkpoint"]);
        let both = json!({"trial": "mnist-3", "folder": "best"});
        check_fields(json!({"checkpoint": both}), &["spec.checkpoint"]);
        check_fields(json!({"checkpoint": {"trial": "mnist"}}), &["spec.checkpoint.trial"]);
        let stored = json!({"url": "x", "trialPath": "a/b/trials/1"});
        check_fields(json!({"checkpoint": {"stored": stored}}), &["spec.checkpoint.stored.url"]);
        let named = json!({"folder": "best", "name": "000000000400-0"});
        check_fields(json!({"checkpoint": named}), &["spec.checkpoint.name"]);
    }
}
