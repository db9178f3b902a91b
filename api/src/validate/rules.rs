//! Validation rules of experiments, one function for each part.

use std::collections::BTreeSet;

use serde_json::{Value, json};

use super::{
    FieldError, Method, NAME_BYTES_MAX, SEED_END, SOBOL_DIMENSIONS_MAX, TRIALS_MAX,
    ValidExperiment, item, member, searches,
};
use crate::experiment::{
    Entrypoint, EnvVar, ExperimentSpec, Length, SAVE_MAX, SEARCH_METHODS, Searcher, Unit,
};
use crate::hyperparameters::{Space, TRIAL_BYTES_MAX};
use crate::names::ENV_SETTABLE;

/// Path of the length that other rules read.
pub(super) const MAX_LENGTH: &str = "spec.searcher.maxLength";

/// URL schemes of supported storage.
const SCHEMES: [&str; 5] = ["file", "s3", "gs", "az", "memory"];

pub(super) fn check(name: &str, spec: &ExperimentSpec) -> Result<ValidExperiment, Vec<FieldError>> {
    let mut errors = Vec::new();
    check_name(name, &mut errors);
    check_entrypoint(&spec.entrypoint, &mut errors);
    let space =
        Space::parse(&spec.hyperparameters).map_err(|mut more| errors.append(&mut more)).ok();
    if !spec.data.is_object() {
        errors.push(FieldError::new("spec.data", &spec.data, "must be an object"));
    }
    let method = check_searcher(&spec.searcher, &mut errors);
    searches::check_own_name(name, &spec.searcher, &mut errors);
    if let (Some(space), Some(Method::Grid { .. })) = (&space, &method) {
        check_grid(space, &mut errors);
    }
    if let Some(space) = &space {
        check_dimensions(&spec.searcher, space, &mut errors);
    }
    let length = match spec.searcher.pbt {
        Some(search) => search.length(),
        None => check_length(MAX_LENGTH, &spec.searcher.max_length, &mut errors),
    };
    check_env(&spec.env, &mut errors);
    check_storage(spec, &mut errors);
    check_periods(spec, &mut errors);
    check_numbers(spec, &mut errors);
    super::pods::check(spec, &mut errors);
    match (space, method, length) {
        (Some(space), Some(method), Some((unit, units_max))) if errors.is_empty() => {
            let (name, mut spec) = (name.to_owned(), spec.clone());
            spec.searcher.max_length = Length::new(unit, units_max);
            Ok(ValidExperiment { name, spec, space, method, unit, units_max })
        }
        _ => Err(errors),
    }
}

/// Refuses hyperparameters that would not fit into a Trial beside its status.
pub(super) fn check_trial_bytes(spec: &ExperimentSpec, space: &Space) -> Option<FieldError> {
    let bytes = space.trial_bytes_max();
    let rule = format!(
        "a trial's hyperparameters can take {bytes} bytes as JSON, but must take at most \
         {TRIAL_BYTES_MAX}: put large values into a file, and name the file here or in spec.data"
    );
    let path = crate::hyperparameters::ROOT;
    (bytes > TRIAL_BYTES_MAX).then(|| FieldError::new(path, &spec.hyperparameters, &rule))
}

/// Limit of what each program receives of an experiment or a job, in bytes of JSON. On a cluster,
/// it is an annotation of the pod, beside at most 64 KiB of other content. Kubernetes permits
/// 256 KiB.
const PROGRAM_BYTES_MAX: usize = 160 << 10;

/// Refuses fields that would not fit into the pods. `spec` are the fields besides `data` and
/// `hyperparameters`.
pub(super) fn check_program_bytes(
    data: &Value,
    hyperparameters: Option<&Value>,
    spec: &Value,
) -> Option<FieldError> {
    let none = Value::Null;
    let hyperparameters = hyperparameters.unwrap_or(&none);
    let fields =
        [("spec.data", data), (crate::hyperparameters::ROOT, hyperparameters), ("spec", spec)];
    let sizes = fields.map(|(path, value)| (value.to_string().len(), path, value));
    let total: usize = sizes.iter().map(|(bytes, ..)| bytes).sum();
    let (bytes, path, value) = sizes.into_iter().max_by_key(|(bytes, ..)| *bytes)?;
    let rule = format!(
        "takes {bytes} of {total} bytes of JSON that programs receive, which must be at most \
         {PROGRAM_BYTES_MAX}: put large values into a file in the image or the bucket, and name \
         the file here"
    );
    (total > PROGRAM_BYTES_MAX).then(|| FieldError::new(path, value, &rule))
}

pub(super) fn check_name(name: &str, errors: &mut Vec<FieldError>) {
    let bytes = name.as_bytes();
    let is_label = bytes.first().is_some_and(u8::is_ascii_lowercase)
        && bytes.last().is_some_and(|byte| *byte != b'-')
        && bytes.iter().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || *b == b'-')
        && bytes.len() <= NAME_BYTES_MAX;
    if !is_label {
        let rule = format!(
            "must be at most {NAME_BYTES_MAX} lowercase letters, digits and `-`, begin with a \
             letter and not end with `-`"
        );
        errors.push(FieldError::new("metadata.name", &json!(name), &rule));
    }
}

pub(super) fn check_entrypoint(entrypoint: &Entrypoint, errors: &mut Vec<FieldError>) {
    let command = &entrypoint.command;
    let path = "spec.entrypoint.command";
    match command.first() {
        None => errors.push(FieldError::new(path, &json!([]), "must name the program to run")),
        Some(program) if program.trim().is_empty() => {
            let rule = "the first word must name the program to run";
            errors.push(FieldError::new(&item(path, 0), &json!(program), rule));
        }
        Some(_) if starts_launcher(entrypoint) => {
            let rule = "must be the program alone, because Stoker starts the launcher itself; \
                        remove `stoker-trainer launch --`";
            errors.push(FieldError::new(path, &json!(command), rule));
        }
        Some(_) => {}
    }
    for (path, words) in [(path, command), ("spec.entrypoint.args", &entrypoint.args)] {
        for (i, word) in words.iter().enumerate() {
            check_no_nul(&item(path, i), word, errors);
        }
    }
}

/// Returns `true` if the command is the launcher of the stock trainer. A second launcher would
/// start all ranks of the pod again for each of them.
fn starts_launcher(entrypoint: &Entrypoint) -> bool {
    let mut words = entrypoint.command.iter().chain(&entrypoint.args);
    let program = words.next().and_then(|program| program.rsplit('/').next());
    program == Some("stoker-trainer") && words.next().is_some_and(|word| word == "launch")
}

fn check_no_nul(path: &str, text: &str, errors: &mut Vec<FieldError>) {
    if text.contains('\0') {
        errors.push(FieldError::new(path, &json!(text), "must not contain a NUL character"));
    }
}

fn check_searcher(searcher: &Searcher, errors: &mut Vec<FieldError>) -> Option<Method> {
    if searcher.metric.trim().is_empty() {
        let rule = "must name the validation metric that ranks trials";
        errors.push(FieldError::new("spec.searcher.metric", &json!(searcher.metric), rule));
    }
    if let Some(name) = &searcher.time_metric {
        if name.trim().is_empty() {
            let rule = "must name the validation metric that is the trained length";
            errors.push(FieldError::new("spec.searcher.timeMetric", &json!(name), rule));
        }
        if searcher.max_length.units.is_none() {
            let rule = "must be unset: it requires maxLength.units";
            let error = FieldError::new("spec.searcher.timeMetric", &json!(name), rule);
            errors.push(error.reading(&[MAX_LENGTH]));
        }
    }
    let set = searcher.methods_set();
    if set.len() != 1 {
        let rule = format!("exactly one of {} must be set", SEARCH_METHODS.join(", "));
        errors.push(union_error("spec.searcher", &set, &rule));
        return None;
    }
    searches::method(searcher, errors)
}

/// End of the rule for a union without a variant.
pub(super) const NONE_IS_SET: &str = ", but none is";

/// Returns the error of a union that does not have exactly one variant.
pub(super) fn union_error(path: &str, set: &[&str], rule: &str) -> FieldError {
    let actual = match set {
        [] => NONE_IS_SET.to_owned(),
        several => format!(", but {} are", several.join(" and ")),
    };
    FieldError::absent(path, &format!("{rule}{actual}"))
}

fn check_grid(space: &Space, errors: &mut Vec<FieldError>) {
    let num_points = space.num_points();
    let mut without_count = Vec::new();
    space.for_each_parameter(&mut |path, parameter| {
        if parameter.num_points().is_none() {
            without_count.push(member(path, parameter.kind()));
        }
    });
    for path in &without_count {
        let rule = "is required by grid search: set it to the number of grid points";
        errors.push(FieldError::absent(&member(path, "count"), rule));
    }
    if num_points > u128::from(TRIALS_MAX) {
        let rule = format!(
            "the grid has {num_points} points, more than {TRIALS_MAX} trials; lower the counts"
        );
        errors.push(FieldError::absent("spec.hyperparameters", &rule));
    }
}

/// The table of direction numbers has this many rows.
fn check_dimensions(searcher: &Searcher, space: &Space, errors: &mut Vec<FieldError>) {
    let is_sobol =
        searcher.sobol.is_some() || searcher.sampler.is_some_and(|sampler| sampler.sobol.is_some());
    let num = space.num_dimensions();
    if is_sobol && num > SOBOL_DIMENSIONS_MAX {
        let rule = format!(
            "has {num} dimensions, but sobol has {SOBOL_DIMENSIONS_MAX}; make some \
             hyperparameters constant, or use random or tpe"
        );
        errors.push(FieldError::absent("spec.hyperparameters", &rule));
    }
}

/// Checks a length and returns its unit and number of units.
pub(super) fn check_length(
    path: &str,
    length: &Length,
    errors: &mut Vec<FieldError>,
) -> Option<(Unit, u64)> {
    let fields = [
        ("records", length.records),
        ("batches", length.batches),
        ("epochs", length.epochs),
        ("units", length.units),
    ];
    for (name, units) in fields {
        if units == Some(0) {
            errors.push(FieldError::new(&member(path, name), &json!(0), "must be at least 1"));
        }
    }
    let is_set = |(_, units): &&(&str, Option<u64>)| units.is_some();
    let set: Vec<_> = fields.iter().filter(is_set).map(|(name, _)| *name).collect();
    if set.len() != 1 {
        let rule = "exactly one of records, batches, epochs and units must be set";
        errors.push(union_error(path, &set, rule));
    }
    length.get()
}

fn check_periods(spec: &ExperimentSpec, errors: &mut Vec<FieldError>) {
    let periods = [
        ("spec.minValidationPeriod", &spec.min_validation_period),
        ("spec.minCheckpointPeriod", &spec.min_checkpoint_period),
    ];
    for (path, period) in periods {
        let Some(period) = period else { continue };
        if let Some((Unit::Units, units)) = check_length(path, period, errors) {
            let rule = "must be unset: a program that counts units validates and saves by itself; \
                        use records, batches or epochs, or remove the field";
            errors.push(FieldError::new(&member(path, "units"), &json!(units), rule));
        }
    }
}

pub(super) fn check_env(env: &[EnvVar], errors: &mut Vec<FieldError>) {
    let mut seen = BTreeSet::new();
    for (i, var) in env.iter().enumerate() {
        let path = member(&item("spec.env", i), "name");
        let mut refuse = |rule: &str| errors.push(FieldError::new(&path, &json!(var.name), rule));
        let is_valid = var.name.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_')
            && var.name.bytes().next().is_some_and(|byte| !byte.is_ascii_digit());
        if !is_valid {
            refuse("must consist of letters, digits and `_`, and not begin with a digit");
        } else if var.name.starts_with("STOKER_") && !ENV_SETTABLE.contains(&var.name.as_str()) {
            let settable = ENV_SETTABLE.join(", ");
            refuse(&format!(
                "names that start with STOKER_ are reserved, except {settable}; choose another"
            ));
        } else if !seen.insert(var.name.as_str()) {
            refuse("is set twice; keep one");
        }
        check_no_nul(&member(&item("spec.env", i), "value"), &var.value, errors);
    }
}

fn check_storage(spec: &ExperimentSpec, errors: &mut Vec<FieldError>) {
    let storage = &spec.checkpoint_storage;
    if let Some(url) = &storage.url {
        check_storage_url("spec.checkpointStorage.url", url, true, errors);
    }
    check_endpoint("spec.checkpointStorage.endpoint", storage.endpoint.as_ref(), errors);
}

/// Checks the URL of a storage. The objects of `memory:` exist within one process only.
pub(super) fn check_storage_url(
    path: &str,
    url: &str,
    allows_memory: bool,
    errors: &mut Vec<FieldError>,
) {
    if !is_storage_url(url) || (!allows_memory && url.starts_with("memory:")) {
        let rule = "must be file:///PATH, s3://BUCKET/PREFIX, gs://BUCKET/PREFIX, \
                    az://CONTAINER/PREFIX or an absolute path";
        errors.push(FieldError::new(path, &json!(url), rule));
    }
}

pub(super) fn check_endpoint(path: &str, endpoint: Option<&String>, errors: &mut Vec<FieldError>) {
    let is_http = |url: &str| url.starts_with("http://") || url.starts_with("https://");
    if let Some(endpoint) = endpoint.filter(|url| !is_http(url)) {
        let rule = "must be the address of an S3 server, such as http://127.0.0.1:8333";
        errors.push(FieldError::new(path, &json!(endpoint), rule));
    }
}

fn is_storage_url(url: &str) -> bool {
    let Some((scheme, rest)) = url.split_once("://") else { return url.starts_with('/') };
    match scheme {
        "file" => rest.starts_with('/'),
        "memory" => true,
        _ => SCHEMES.contains(&scheme) && !rest.is_empty() && !rest.starts_with('/'),
    }
}

fn check_numbers(spec: &ExperimentSpec, errors: &mut Vec<FieldError>) {
    let at_least_1: [(&str, u64); 4] = [
        ("spec.resources.slotsPerTrial", spec.resources.slots_per_trial.into()),
        ("spec.schedulingUnit", spec.scheduling_unit),
        ("spec.preemptionTimeoutSeconds", spec.preemption_timeout_seconds.into()),
        (
            "spec.optimizations.aggregationFrequency",
            spec.optimizations.aggregation_frequency.into(),
        ),
    ];
    for (path, value) in at_least_1 {
        if value == 0 {
            errors.push(FieldError::new(path, &json!(0), "must be at least 1"));
        }
    }
    let storage = &spec.checkpoint_storage;
    for (name, value) in [
        ("saveExperimentBest", storage.save_experiment_best),
        ("saveTrialBest", storage.save_trial_best),
        ("saveTrialLatest", storage.save_trial_latest),
    ] {
        if value > SAVE_MAX {
            let rule = format!("must be at most {SAVE_MAX}");
            errors.push(FieldError::new(
                &member("spec.checkpointStorage", name),
                &json!(value),
                &rule,
            ));
        }
    }
    if let Some(seed) = spec.reproducibility.experiment_seed
        && seed >= SEED_END
    {
        let path = "spec.reproducibility.experimentSeed";
        errors.push(FieldError::new(path, &Value::from(seed), "must be from 0 to 2^31 - 1"));
    }
}
