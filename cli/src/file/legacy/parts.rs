//! Translates the parts of a file in Determined's format, one function per part.

use serde_json::{Value, json};

use super::searcher::{length, steps_length};
use super::{Translation, entrypoint, hyperparameters, item, known_fields, searcher};

/// All parts, in the order of their notes.
pub(super) const ALL: [fn(&mut Translation<'_>); 11] = [
    plain,
    data,
    entrypoint::translate,
    hyperparameters::translate,
    searcher::translate,
    periods,
    resources,
    environment,
    storage,
    precision,
    ignored_fields,
];

/// Returns `true` if the value disables its feature.
pub(super) fn is_disabled(value: &Value) -> bool {
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

fn plain(translation: &mut Translation<'_>) {
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
        translation.copy_field(from, to);
    }
}

fn data(translation: &mut Translation<'_>) {
    let Some(value) = translation.take("data") else { return };
    let mut data = value.clone();
    let secrets = data.as_object_mut().and_then(|members| members.remove("secrets"));
    if secrets.is_some_and(|secrets| !is_disabled(&secrets)) {
        let rule = "is readable by all users who can view the experiment; remove it from the file \
                    and pass environment variables to the program; on a cluster, name a Secret in \
                    spec.pod.envFromSecrets";
        translation.refuse("data.secrets", &json!("..."), rule);
    }
    translation.set("spec.data", data, "data");
}

fn periods(translation: &mut Translation<'_>) {
    let fields = [
        ("min_validation_period", "spec.minValidationPeriod"),
        ("min_checkpoint_period", "spec.minCheckpointPeriod"),
    ];
    for (from, to) in fields {
        let Some(value) = translation.take(from) else { continue };
        let is_zero = |value: &Value| value.as_u64() == Some(0);
        let is_disabled = value
            .as_object()
            .is_some_and(|length| length.len() == 1 && length.values().all(is_zero));
        if is_disabled {
            translation.ignore(from, "0 disables it");
        } else if value.is_number() {
            steps_length(translation, value, from, to);
        } else {
            length(translation, from, to);
        }
    }
    translation.take("batches_per_step");
}

fn resources(translation: &mut Translation<'_>) {
    let from = "resources.slots_per_trial";
    let to = "spec.resources.slotsPerTrial";
    if translation.take(from).and_then(Value::as_u64) == Some(0) {
        translation.set(to, json!(1), from);
        translation
            .notes
            .push(format!("{from}: 0, a CPU -> {to}: 1, which is a CPU on machines without GPUs"));
    } else {
        translation.copy_field(from, to);
    }
}

fn environment(translation: &mut Translation<'_>) {
    let from = "environment.environment_variables";
    let Some(value) = translation.take(from) else { return };
    let Some(entries) = value.as_array() else {
        return translation.refuse(
            from,
            value,
            "must be a list of NAME=VALUE; lists by device are not supported",
        );
    };
    let mut vars: Vec<Value> = Vec::new();
    for (i, entry) in entries.iter().enumerate() {
        let Some((name, value)) = entry.as_str().and_then(|entry| entry.split_once('=')) else {
            translation.refuse(&item(from, i), entry, "must be NAME=VALUE");
            continue;
        };
        let to = item("spec.env", vars.len());
        translation.position_tree.copy_positions(translation.source, &item(from, i), &to);
        // In Determined the last value of a name counts; in Stoker names are unique.
        vars.retain(|var| var["name"] != name);
        vars.push(json!({ "name": name, "value": value }));
    }
    translation.set("spec.env", Value::Array(Vec::new()), "environment.environment_variables");
    translation.value["spec"]["env"] = Value::Array(vars);
    translation.note(from, "spec.env");
}

fn storage(translation: &mut Translation<'_>) {
    for kept in ["experiment_best", "trial_best", "trial_latest"] {
        let to = match kept {
            "experiment_best" => "saveExperimentBest",
            "trial_best" => "saveTrialBest",
            _ => "saveTrialLatest",
        };
        let from = format!("checkpoint_storage.save_{kept}");
        translation.copy_field(&from, &format!("spec.checkpointStorage.{to}"));
    }
    for field in ["access_key", "secret_key", "connection_string", "account_url", "credential"] {
        let path = format!("checkpoint_storage.{field}");
        if translation.take(&path).is_some() {
            let rule = "credentials come from the environment; remove the field from the file";
            translation.refuse(&path, &json!("..."), rule);
        }
    }
    translation.ignore("checkpoint_storage.propagation", "no host directory is mounted");
    let from = "checkpoint_storage.type";
    let Some(kind) = translation.take(from) else { return };
    match url(translation, kind.as_str().unwrap_or_default()) {
        Some(url) => {
            translation
                .notes
                .push(format!("checkpoint_storage -> spec.checkpointStorage.url: {url}"));
            translation.set("spec.checkpointStorage.url", json!(url), from);
        }
        None => {
            let rule = "must be shared_fs, directory, s3, gcs or azure, together with its path, \
                        bucket or container";
            translation.refuse(from, kind, rule);
        }
    }
    translation.copy_field("checkpoint_storage.endpoint_url", "spec.checkpointStorage.endpoint");
}

/// Returns the URL of a storage of this type; `None` if a required field is missing.
fn url(translation: &mut Translation<'_>, kind: &str) -> Option<String> {
    let mut text = |field: &str| {
        let value = translation.take(&format!("checkpoint_storage.{field}"))?;
        value.as_str().filter(|text| !text.is_empty()).map(str::to_owned)
    };
    let bucket = |scheme: &str, bucket: String, prefix: Option<String>| {
        let prefix = prefix.unwrap_or_default();
        let prefix = prefix.trim_matches('/');
        let slash = if prefix.is_empty() { "" } else { "/" };
        format!("{scheme}://{bucket}{slash}{prefix}")
    };
    // Read this first: otherwise a missing bucket would give a second error for the prefix.
    // Types without a prefix leave it unread, which refuses it.
    let prefix = if matches!(kind, "s3" | "gcs") { text("prefix") } else { None };
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
fn precision(translation: &mut Translation<'_>) {
    let from = "optimizations.gradient_compression";
    if translation.source.value["optimizations"].get("gradient_compression") == Some(&json!(true)) {
        translation.take(from);
        let to = "spec.optimizations.gradientCompression";
        translation.set(to, json!("f16"), from);
        translation.notes.push(format!("{from} -> {to}: f16, which rounds the gradients"));
    }
    let from = "optimizations.mixed_precision";
    let level =
        translation.source.value["optimizations"].get("mixed_precision").and_then(Value::as_str);
    if matches!(level, Some("O1" | "O2" | "O3")) {
        translation.take(from);
        translation.set("spec.optimizations.mixedPrecision", json!("bf16"), from);
        translation.notes.push(format!(
            "{from} -> spec.optimizations.mixedPrecision: bf16, which needs no loss scaling"
        ));
    }
}

/// Ignores fields without an effect, and fields whose value equals a default without an effect.
fn ignored_fields(translation: &mut Translation<'_>) {
    for field in ["workspace", "project"] {
        translation.ignore(field, "use labels to group experiments");
    }
    translation.ignore("debug", "it only affects logs");
    let why = "metrics are always over all ranks";
    translation.ignore("optimizations.average_training_metrics", why);
    let defaults = [("mixed_precision", json!("O0")), ("gradient_compression", json!(false))];
    for (field, default) in defaults {
        let path = format!("optimizations.{field}");
        if translation.source.value["optimizations"].get(field) == Some(&default) {
            translation.ignore(&path, "it is the default");
        }
    }
    for (path, why) in known_fields::LEFT_OUT {
        translation.ignore_enabled(path, why);
    }
}
