//! Translates the parts of a file in Determined's format, one function per part, and lists the
//! known fields.

use serde_json::{Value, json};

use super::{Work, hyperparameters, item};

/// All parts, in the order of their notes.
pub(super) const ALL: [fn(&mut Work<'_>); 11] = [
    plain,
    data,
    entrypoint,
    hyperparameters::translate,
    searcher,
    periods,
    resources,
    environment,
    storage,
    precision,
    rest,
];

/// Returns the known fields of an object. Those that no part reads have no counterpart.
pub(super) fn known(parent: &str) -> &'static [&'static str] {
    match parent {
        "" => &[
            "batches_per_step",
            "bind_mounts",
            "checkpoint_policy",
            "checkpoint_storage",
            "data",
            "data_layer",
            "debug",
            "description",
            "entrypoint",
            "environment",
            "hyperparameters",
            "integrations",
            "internal",
            "labels",
            "log_policies",
            "max_restarts",
            "min_checkpoint_period",
            "min_validation_period",
            "name",
            "optimizations",
            "pbs",
            "perform_initial_validation",
            "preemption_timeout",
            "profiling",
            "project",
            "records_per_epoch",
            "reproducibility",
            "resources",
            "retention_policy",
            "scheduling_unit",
            "searcher",
            "security",
            "slurm",
            "tensorboard_storage",
            "workspace",
        ],
        "searcher" => &[
            "bracket_rungs",
            "budget",
            "divisor",
            "max_concurrent_trials",
            "max_length",
            "max_rungs",
            "max_steps",
            "max_time",
            "max_trials",
            "metric",
            "mode",
            "name",
            "num_rungs",
            "smaller_is_better",
            "source_checkpoint_uuid",
            "source_trial_id",
            "step_budget",
            "stop_once",
            "target_trial_steps",
            "time_metric",
            "train_stragglers",
            "unit",
        ],
        "resources" => &[
            "agent_label",
            "devices",
            "is_single_node",
            "max_slots",
            "native_parallel",
            "priority",
            "resource_pool",
            "shm_size",
            "slots",
            "slots_per_trial",
            "weight",
        ],
        "environment" => &[
            "add_capabilities",
            "drop_capabilities",
            "environment_variables",
            "force_pull_image",
            "image",
            "pod_spec",
            "ports",
            "proxy_ports",
            "registry_auth",
        ],
        "checkpoint_storage" => &[
            "access_key",
            "account_url",
            "bucket",
            "connection_string",
            "container",
            "container_path",
            "credential",
            "endpoint_url",
            "host_path",
            "prefix",
            "propagation",
            "save_experiment_best",
            "save_trial_best",
            "save_trial_latest",
            "secret_key",
            "storage_path",
            "type",
        ],
        "optimizations" => &[
            "aggregation_frequency",
            "auto_tune_tensor_fusion",
            "average_aggregated_gradients",
            "average_training_metrics",
            "grad_updates_size_file",
            "gradient_compression",
            "mixed_precision",
            "tensor_fusion_cycle_time",
            "tensor_fusion_threshold",
        ],
        "reproducibility" => &["experiment_seed"],
        _ => &[],
    }
}

/// Returns `true` if the fields of this object are checked one by one.
pub(super) fn is_group(name: &str) -> bool {
    !name.is_empty() && !known(name).is_empty()
}

/// Returns `true` if the value disables its feature.
pub(super) fn is_off(value: &Value) -> bool {
    match value {
        Value::Null | Value::Bool(false) => true,
        Value::String(text) => text.is_empty(),
        Value::Array(values) => values.is_empty(),
        Value::Object(members) => {
            members.is_empty() || members.get("enabled") == Some(&json!(false))
        }
        Value::Bool(true) | Value::Number(_) => false,
    }
}

fn plain(work: &mut Work<'_>) {
    let fields = [
        ("labels", "spec.labels"),
        ("checkpoint_policy", "spec.checkpointPolicy"),
        ("perform_initial_validation", "spec.performInitialValidation"),
        ("records_per_epoch", "spec.recordsPerEpoch"),
        ("scheduling_unit", "spec.schedulingUnit"),
        ("max_restarts", "spec.maxRestarts"),
        ("preemption_timeout", "spec.preemptionTimeoutSeconds"),
        ("reproducibility.experiment_seed", "spec.reproducibility.experimentSeed"),
        ("optimizations.aggregation_frequency", "spec.optimizations.aggregationFrequency"),
        (
            "optimizations.average_aggregated_gradients",
            "spec.optimizations.averageAggregatedGradients",
        ),
    ];
    for (from, to) in fields {
        work.carry(from, to);
    }
}

fn data(work: &mut Work<'_>) {
    let Some(value) = work.take("data") else { return };
    let mut data = value.clone();
    let secrets = data.as_object_mut().and_then(|members| members.remove("secrets"));
    if secrets.is_some_and(|secrets| !is_off(&secrets)) {
        let rule = "is readable by all users who can view the experiment; remove it from the file \
                    and pass environment variables to the program; on a cluster, name a Secret in \
                    spec.pod.envFromSecrets";
        work.refuse("data.secrets", &json!("..."), rule);
    }
    work.set("spec.data", data, "data");
}

fn entrypoint(work: &mut Work<'_>) {
    let from = "entrypoint";
    let Some(value) = work.take(from) else { return };
    match value {
        Value::String(text) if is_class(text) => {
            let rule = "is a Python class, which Stoker cannot train; set a program to run";
            work.refuse(from, value, rule);
            work.set("spec.entrypoint.command", json!([text]), from);
        }
        Value::String(text) => {
            work.set("spec.entrypoint.command", json!(["sh", "-c", text]), from);
            work.notes
                .push(r#"entrypoint -> spec.entrypoint.command: ["sh", "-c", TEXT]"#.to_owned());
        }
        other => {
            work.set("spec.entrypoint.command", other.clone(), from);
            work.note(from, "spec.entrypoint.command");
        }
    }
}

/// Returns `true` for `module.of.python:Class`.
fn is_class(text: &str) -> bool {
    let is_name = |text: &str| {
        !text.is_empty()
            && text.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_' || b == b'.')
    };
    text.split_once(':').is_some_and(|(module, class)| is_name(module) && is_name(class))
}

fn searcher(work: &mut Work<'_>) {
    let Some(value) = work.take("searcher") else { return };
    work.set("spec.searcher", json!({}), "searcher");
    if !value.is_object() {
        work.set("spec.searcher", value.clone(), "searcher");
        return;
    }
    work.carry("searcher.metric", "spec.searcher.metric");
    work.carry("searcher.smaller_is_better", "spec.searcher.smallerIsBetter");
    length(work, "searcher.max_length", "spec.searcher.maxLength");
    if let Some(steps) = work.take("searcher.max_steps") {
        steps_length(work, steps, "searcher.max_steps", "spec.searcher.maxLength");
    }
    let Some(name) = work.take("searcher.name") else {
        let rule = "is required and missing; set it to single, random or grid";
        work.refuse("searcher.name", &Value::Null, rule);
        return work.set("spec.searcher.single", json!({}), "searcher");
    };
    let kind = name.as_str().unwrap_or_default();
    let fields: &[(&str, &str)] = match kind {
        "single" => &[],
        "random" => {
            &[("max_trials", "maxTrials"), ("max_concurrent_trials", "maxConcurrentTrials")]
        }
        "grid" => &[("max_concurrent_trials", "maxConcurrentTrials")],
        _ => return unknown_searcher(work, name),
    };
    let to = format!("spec.searcher.{kind}");
    work.set(&to, json!({}), "searcher.name");
    work.note(&format!("searcher.name: {kind}"), &to);
    for (theirs, ours) in fields {
        work.carry(&format!("searcher.{theirs}"), &format!("{to}.{ours}"));
    }
}

/// Refuses an unknown searcher, without further errors about its fields.
fn unknown_searcher(work: &mut Work<'_>, name: &Value) {
    let theirs = [
        "adaptive",
        "adaptive_asha",
        "adaptive_simple",
        "async_halving",
        "custom",
        "pbt",
        "sync_halving",
    ];
    let rule = if name.as_str().is_some_and(|name| theirs.contains(&name)) {
        "is not supported; use random, which samples as many trials and stops none early"
    } else {
        "must be one of single, random and grid"
    };
    work.refuse("searcher.name", name, rule);
    for field in known("searcher") {
        work.take(&format!("searcher.{field}"));
    }
    work.set("spec.searcher.single", json!({}), "searcher.name");
}

/// Translates a length with a unit.
fn length(work: &mut Work<'_>, from: &str, to: &str) {
    let Some(value) = work.take(from) else { return };
    if value.is_number() {
        let rule = "has no unit; write {batches: N}, {records: N} or {epochs: N}";
        work.refuse(from, value, rule);
        return work.set(to, json!({ "batches": 1 }), from);
    }
    work.set(to, value.clone(), from);
    work.note(from, to);
}

/// Translates a length in steps of Determined 0.12.
fn steps_length(work: &mut Work<'_>, steps: &Value, from: &str, to: &str) {
    let size = work.batches_per_step();
    let Some(batches) = steps.as_u64().and_then(|steps| steps.checked_mul(size)) else {
        work.refuse(from, steps, "must be a number of steps");
        return work.set(to, json!({ "batches": 1 }), from);
    };
    work.set(to, json!({ "batches": batches }), from);
    work.notes.push(format!("{from}: {steps} steps of {size} batches -> {to}.batches: {batches}"));
}

fn periods(work: &mut Work<'_>) {
    let fields = [
        ("min_validation_period", "spec.minValidationPeriod"),
        ("min_checkpoint_period", "spec.minCheckpointPeriod"),
    ];
    for (from, to) in fields {
        let Some(value) = work.take(from) else { continue };
        let is_zero = |value: &Value| value.as_u64() == Some(0);
        let is_off = value
            .as_object()
            .is_some_and(|length| length.len() == 1 && length.values().all(is_zero));
        if is_off {
            work.ignore(from, "0 disables it");
        } else if value.is_number() {
            steps_length(work, value, from, to);
        } else {
            length(work, from, to);
        }
    }
    work.take("batches_per_step");
}

fn resources(work: &mut Work<'_>) {
    let from = "resources.slots_per_trial";
    let to = "spec.resources.slotsPerTrial";
    if work.take(from).and_then(Value::as_u64) == Some(0) {
        work.set(to, json!(1), from);
        work.notes
            .push(format!("{from}: 0, a CPU -> {to}: 1, which is a CPU on machines without GPUs"));
    } else {
        work.carry(from, to);
    }
    for field in ["native_parallel", "agent_label"] {
        work.ignore(&format!("resources.{field}"), "it has no effect");
    }
}

fn environment(work: &mut Work<'_>) {
    let from = "environment.environment_variables";
    let Some(value) = work.take(from) else { return };
    let Some(entries) = value.as_array() else {
        return work.refuse(
            from,
            value,
            "must be a list of NAME=VALUE; lists by device are not supported",
        );
    };
    let mut vars: Vec<Value> = Vec::new();
    for (i, entry) in entries.iter().enumerate() {
        let Some((name, value)) = entry.as_str().and_then(|entry| entry.split_once('=')) else {
            work.refuse(&item(from, i), entry, "must be NAME=VALUE");
            continue;
        };
        let to = item("spec.env", vars.len());
        work.places.adopt(work.source, &item(from, i), &to);
        // In Determined the last value of a name counts; in Stoker names are unique.
        vars.retain(|var| var["name"] != name);
        vars.push(json!({ "name": name, "value": value }));
    }
    work.set("spec.env", Value::Array(Vec::new()), "environment.environment_variables");
    work.value["spec"]["env"] = Value::Array(vars);
    work.note(from, "spec.env");
}

fn storage(work: &mut Work<'_>) {
    for kept in ["experiment_best", "trial_best", "trial_latest"] {
        let to = match kept {
            "experiment_best" => "saveExperimentBest",
            "trial_best" => "saveTrialBest",
            _ => "saveTrialLatest",
        };
        let from = format!("checkpoint_storage.save_{kept}");
        work.carry(&from, &format!("spec.checkpointStorage.{to}"));
    }
    for field in ["access_key", "secret_key", "connection_string", "account_url", "credential"] {
        let path = format!("checkpoint_storage.{field}");
        if work.take(&path).is_some() {
            let rule = "credentials come from the environment; remove the field from the file";
            work.refuse(&path, &json!("..."), rule);
        }
    }
    work.ignore("checkpoint_storage.propagation", "no host directory is mounted");
    let from = "checkpoint_storage.type";
    let Some(kind) = work.take(from) else { return };
    match url(work, kind.as_str().unwrap_or_default()) {
        Some(url) => {
            work.notes.push(format!("checkpoint_storage -> spec.checkpointStorage.url: {url}"));
            work.set("spec.checkpointStorage.url", json!(url), from);
        }
        None => {
            let rule = "must be shared_fs, directory, s3, gcs or azure, together with its path, \
                        bucket or container";
            work.refuse(from, kind, rule);
        }
    }
    work.carry("checkpoint_storage.endpoint_url", "spec.checkpointStorage.endpoint");
}

/// Returns the URL of a storage of this type; `None` if a required field is missing.
fn url(work: &mut Work<'_>, kind: &str) -> Option<String> {
    let mut text = |field: &str| {
        let value = work.take(&format!("checkpoint_storage.{field}"))?;
        value.as_str().filter(|text| !text.is_empty()).map(str::to_owned)
    };
    let bucket = |scheme: &str, bucket: String, prefix: Option<String>| {
        let prefix = prefix.unwrap_or_default();
        let prefix = prefix.trim_matches('/');
        let slash = if prefix.is_empty() { "" } else { "/" };
        format!("{scheme}://{bucket}{slash}{prefix}")
    };
    // Read this first: otherwise a missing bucket would give a second error for the prefix.
    let prefix = text("prefix");
    match kind {
        "shared_fs" => {
            let host = text("host_path")?;
            match text("storage_path") {
                Some(below) if !below.starts_with('/') => {
                    Some(format!("file://{}/{below}", host.trim_end_matches('/')))
                }
                Some(absolute) => Some(format!("file://{absolute}")),
                None => Some(format!("file://{host}")),
            }
        }
        "directory" => text("container_path").map(|path| format!("file://{path}")),
        "s3" => Some(bucket("s3", text("bucket")?, prefix)),
        "gcs" => Some(bucket("gs", text("bucket")?, prefix)),
        "azure" => Some(bucket("az", text("container")?, None)),
        _ => None,
    }
}

/// Translates reduced precision.
fn precision(work: &mut Work<'_>) {
    let from = "optimizations.gradient_compression";
    if work.source.value["optimizations"].get("gradient_compression") == Some(&json!(true)) {
        work.take(from);
        work.set("spec.optimizations.gradientCompression", json!("f16"), from);
    }
    let from = "optimizations.mixed_precision";
    let level = work.source.value["optimizations"].get("mixed_precision").and_then(Value::as_str);
    if matches!(level, Some("O1" | "O2" | "O3")) {
        work.take(from);
        work.set("spec.optimizations.mixedPrecision", json!("bf16"), from);
        work.notes.push(format!(
            "{from} -> spec.optimizations.mixedPrecision: bf16, which needs no loss scaling"
        ));
    }
}

/// Ignores fields that have no effect, or none at their default value.
fn rest(work: &mut Work<'_>) {
    for field in ["workspace", "project"] {
        work.ignore(field, "use labels to group experiments");
    }
    work.ignore("debug", "it only affects logs");
    let defaults = [
        ("average_training_metrics", json!(true)),
        ("mixed_precision", json!("O0")),
        ("gradient_compression", json!(false)),
    ];
    for (field, default) in defaults {
        let path = format!("optimizations.{field}");
        if work.source.value["optimizations"].get(field) == Some(&default) {
            work.ignore(&path, "it is the default");
        }
    }
    for field in ["tensor_fusion_threshold", "tensor_fusion_cycle_time", "auto_tune_tensor_fusion"]
    {
        work.ignore(&format!("optimizations.{field}"), "it tunes Horovod");
    }
}
