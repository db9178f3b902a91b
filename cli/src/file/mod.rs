//! Reads files of experiments and jobs: converts YAML to a [`ValidExperiment`] or a
//! [`ValidInferenceJob`], or reports all errors of the file at once.
//!
//! ```text
//!  text -- tree --> value + positions -- set --> with --set -- legacy --> an Experiment
//!                                     schema, then typed rules of the api crate, then positions
//! ```

mod kinds;
mod legacy;
mod metadata;
mod notes;
mod problem;
mod scalar;
mod schema;
mod set;
mod tree;
mod unions;

use std::path::Path;

use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use stoker_api::experiment::ExperimentSpec;
use stoker_api::inference::InferenceJobSpec;
use stoker_api::names::API_VERSION;
use stoker_api::validate::{
    FieldError, ValidExperiment, ValidInferenceJob, check_num_at_once, validate,
    validate_inference, validate_inference_on_cluster, validate_local, validate_started,
    validate_started_local_inference,
};

pub(crate) use metadata::Metadata;
use metadata::Target;
pub(crate) use problem::{FileError, Problem};
use schema::{Checked, file_schema};
use tree::Tree;

/// Kinds of files.
const EXPERIMENT: &str = "Experiment";
const JOB: &str = "InferenceJob";

/// Namespace of files without one.
const NAMESPACE: &str = "default";

/// Maximum size of a file: etcd stores objects of up to 1.5 MB.
const FILE_BYTES_MAX: u64 = 1 << 20;

/// A valid experiment file.
#[derive(Clone, Debug)]
pub(crate) struct Loaded {
    /// Name of the experiment.
    pub(crate) name: String,
    /// Namespace of the file, by default [`NAMESPACE`].
    pub(crate) namespace: String,
    /// Other metadata of the file.
    pub(crate) metadata: Metadata,
    /// Validated experiment.
    pub(crate) valid: ValidExperiment,
    /// Notes on translated fields, if the file has Determined's format, on metadata that a cluster
    /// refuses, and on probable mistakes.
    pub(crate) notes: Vec<String>,
    /// Spec with all defaults.
    pub(crate) spec_json: Value,
}

/// A valid inference job file.
#[derive(Clone, Debug)]
pub(crate) struct LoadedJob {
    /// Name of the job.
    pub(crate) name: String,
    /// Namespace of the file, by default [`NAMESPACE`].
    pub(crate) namespace: String,
    /// Other metadata of the file.
    pub(crate) metadata: Metadata,
    /// Validated job.
    pub(crate) valid: ValidInferenceJob,
    /// Notes on metadata that a cluster refuses.
    pub(crate) notes: Vec<String>,
}

/// Reads the experiment file at `path` and applies the `PATH=VALUE` overrides in `sets`.
///
/// # Errors
///
/// All errors of the file.
pub(crate) fn load(path: &Path, sets: &[String]) -> Result<Loaded, FileError> {
    let stem = path.file_stem().unwrap_or_default().to_string_lossy();
    load_with(path, |text| parse(text, &stem, sets, Target::Local))
}

/// Like [`load`], without the rules of new experiments. An earlier version may have started the run
/// that the file resumes.
///
/// # Errors
///
/// All errors of the file.
pub(crate) fn load_started(path: &Path, sets: &[String]) -> Result<Loaded, FileError> {
    let stem = path.file_stem().unwrap_or_default().to_string_lossy();
    load_with(path, |text| parse(text, &stem, sets, Target::Started))
}

/// Like [`load`], with the additional rules for experiments on a cluster.
///
/// # Errors
///
/// All errors of the file.
pub(crate) fn load_for_cluster(path: &Path, sets: &[String]) -> Result<Loaded, FileError> {
    let stem = path.file_stem().unwrap_or_default().to_string_lossy();
    load_with(path, |text| parse(text, &stem, sets, Target::Cluster))
}

/// Returns `true` if the `kind` of the file at `path` is `InferenceJob`.
pub(crate) fn is_job(path: &Path) -> bool {
    let tree = read(path).ok().and_then(|text| tree::read(&text).0);
    tree.is_some_and(|tree| tree.value["kind"] == JOB)
}

/// Returns the field that names the object in the file at `path`, which depends on the format.
pub(crate) fn name_field(path: &Path) -> &'static str {
    let tree = read(path).ok().and_then(|text| tree::read(&text).0);
    match tree.is_some_and(|tree| legacy::is_legacy(&tree.value)) {
        true => "name",
        false => "metadata.name",
    }
}

/// Like [`load`], for an inference job.
///
/// # Errors
///
/// All errors of the file.
pub(crate) fn load_job(path: &Path, sets: &[String]) -> Result<LoadedJob, FileError> {
    load_with(path, |text| parse_job(text, sets, Target::Local))
}

/// Like [`load_started`], for an inference job.
///
/// # Errors
///
/// All errors of the file.
pub(crate) fn load_started_job(path: &Path, sets: &[String]) -> Result<LoadedJob, FileError> {
    load_with(path, |text| parse_job(text, sets, Target::Started))
}

/// Like [`load_job`], with the additional rules for jobs on a cluster.
///
/// # Errors
///
/// All errors of the file.
pub(crate) fn load_cluster_job(path: &Path, sets: &[String]) -> Result<LoadedJob, FileError> {
    load_with(path, |text| parse_job(text, sets, Target::Cluster))
}

fn load_with<T>(
    path: &Path,
    parse: impl FnOnce(&str) -> Result<T, Vec<Problem>>,
) -> Result<T, FileError> {
    let result = match read(path) {
        Ok(text) => parse(&text),
        Err(rule) => Err(vec![Problem::without_position("", "", &rule)]),
    };
    result.map_err(|mut problems| {
        problems.sort_by_key(|problem| (problem.line, problem.column));
        FileError { path: path.to_owned(), problems }
    })
}

fn read(path: &Path) -> Result<String, String> {
    let bytes = std::fs::metadata(path).map_err(|error| format!("cannot be read: {error}"))?.len();
    if bytes > FILE_BYTES_MAX {
        return Err(format!("the file has {bytes} bytes; the maximum is {FILE_BYTES_MAX}"));
    }
    let bytes = std::fs::read(path).map_err(|error| format!("cannot be read: {error}"))?;
    decode(bytes)
}

/// Decodes UTF-8. The error names the line of the first other byte.
fn decode(bytes: Vec<u8>) -> Result<String, String> {
    if bytes.starts_with(b"\xff\xfe") || bytes.starts_with(b"\xfe\xff") {
        return Err("cannot be read: the file is UTF-16; save it as UTF-8".to_owned());
    }
    String::from_utf8(bytes).map_err(|error| {
        let valid = error.as_bytes().get(..error.utf8_error().valid_up_to()).unwrap_or_default();
        let line = 1 + valid.iter().filter(|byte| **byte == b'\n').count();
        format!("cannot be read: line {line} is not UTF-8; save the file as UTF-8")
    })
}

/// Parses an experiment. `stem` is the default name for a file in Determined's format.
fn parse(text: &str, stem: &str, sets: &[String], target: Target) -> Result<Loaded, Vec<Problem>> {
    let (tree, problems) = tree::read(text);
    // The format of an unparsable file is unknown, so it may contain credentials too.
    let may_be_legacy = tree.as_ref().is_none_or(|tree| legacy::is_legacy(&tree.value));
    parse_tree(tree, problems, stem, sets, target).map_err(|mut problems| {
        if may_be_legacy {
            problems.iter_mut().for_each(legacy::mask);
        }
        problems
    })
}

fn parse_tree(
    tree: Option<Tree>,
    mut problems: Vec<Problem>,
    stem: &str,
    sets: &[String],
    target: Target,
) -> Result<Loaded, Vec<Problem>> {
    let Some(mut tree) = tree else { return Err(problems) };
    let is_legacy = legacy::is_legacy(&tree.value);
    for set in sets {
        if let Err(problem) = set::apply(&mut tree, set, is_legacy) {
            problems.push(problem);
        }
    }
    let mut notes = Vec::new();
    if is_legacy {
        let translated = legacy::translate(&tree, stem);
        problems.extend(translated.errors.iter().map(|error| Problem::of(error, &tree)));
        (tree, notes) = (translated.tree, translated.notes);
    }
    if let Some(error) = wrong_kind(&tree, EXPERIMENT) {
        return Err(with_positions(problems, &with_version(error, &tree), &tree));
    }
    let schema = file_schema(EXPERIMENT, stoker_api::crd::experiment_spec_schema());
    let rules = |name: &str, spec: &ExperimentSpec| match target {
        Target::Local => validate_local(name, spec),
        Target::Started => validate_started(name, spec),
        Target::Cluster => validate(name, spec),
    };
    match check(&tree, &schema, target, rules) {
        Ok((metadata, valid)) if problems.is_empty() => {
            let spec_json = json!(valid.spec);
            let namespace = metadata.namespace.clone().unwrap_or_else(|| NAMESPACE.to_owned());
            let name = valid.name.clone();
            notes.extend(metadata.notes(&tree));
            notes.extend(notes::notes(&valid, &tree.value, is_legacy));
            let refused = check_num_at_once(&valid);
            notes.extend(refused.map(|error| format!("note: a cluster refuses {error}")));
            Ok(Loaded { name, namespace, metadata, valid, notes, spec_json })
        }
        Ok(_) => Err(problems),
        Err(errors) => Err(with_positions(problems, &errors, &tree)),
    }
}

fn parse_job(text: &str, sets: &[String], target: Target) -> Result<LoadedJob, Vec<Problem>> {
    let (tree, mut problems) = tree::read(text);
    let Some(mut tree) = tree else { return Err(problems) };
    for set in sets {
        if let Err(problem) = set::apply(&mut tree, set, false) {
            problems.push(problem);
        }
    }
    if let Some(error) = wrong_kind(&tree, JOB) {
        return Err(with_positions(problems, &with_version(error, &tree), &tree));
    }
    let schema = file_schema(JOB, stoker_api::crd::inference_spec_schema());
    let rules = |name: &str, spec: &InferenceJobSpec| match target {
        Target::Local => validate_inference(name, spec),
        Target::Started => validate_started_local_inference(name, spec),
        Target::Cluster => validate_inference_on_cluster(name, spec),
    };
    match check(&tree, &schema, target, rules) {
        Ok((metadata, valid)) if problems.is_empty() => {
            let namespace = metadata.namespace.clone().unwrap_or_else(|| NAMESPACE.to_owned());
            let notes = metadata.notes(&tree);
            Ok(LoadedJob { name: valid.name.clone(), namespace, metadata, valid, notes })
        }
        Ok(_) => Err(problems),
        Err(errors) => Err(with_positions(problems, &errors, &tree)),
    }
}

/// Returns the error of a file of another kind. Its fields would only lead to further errors.
fn wrong_kind(tree: &Tree, expected: &str) -> Option<FieldError> {
    let value = &tree.value["kind"];
    let kind = value.as_str().filter(|kind| *kind != expected)?;
    Some(match kind {
        EXPERIMENT => {
            let rule = "is an Experiment; use `stoker run` or `stoker experiment create`";
            FieldError::absent("kind", rule)
        }
        JOB => {
            let rule = "is an InferenceJob; use `stoker job run` or `stoker job create`";
            FieldError::absent("kind", rule)
        }
        _ => FieldError::new("kind", value, &format!("must be {EXPERIMENT} or {JOB}")),
    })
}

/// Returns the error of the kind. An error of `apiVersion` comes first.
fn with_version(kind: FieldError, tree: &Tree) -> Vec<FieldError> {
    let value = &tree.value["apiVersion"];
    let is_known = value.is_null() || value == API_VERSION;
    let rule = format!("must be {API_VERSION}");
    let version = (!is_known).then(|| FieldError::new("apiVersion", value, &rule));
    version.into_iter().chain([kind]).collect()
}

/// Converts `errors` to problems with positions, and appends those not in `problems` yet.
fn with_positions(mut problems: Vec<Problem>, errors: &[FieldError], tree: &Tree) -> Vec<Problem> {
    for problem in errors.iter().map(|error| Problem::of(error, tree)) {
        let is_known = |other: &Problem| other.field == problem.field && other.line == problem.line;
        if !problems.iter().any(is_known) {
            problems.push(problem);
        }
    }
    problems
}

/// Checks the file with the schema and its `spec` with `validate`. Returns metadata and result.
fn check<S: DeserializeOwned, V>(
    tree: &Tree,
    schema: &Value,
    target: Target,
    validate: impl Fn(&str, &S) -> Result<V, Vec<FieldError>>,
) -> Result<(Metadata, V), Vec<FieldError>> {
    let mut checked = Checked::default();
    let object = checked.check(schema, &tree.value, "");
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let name = text(&object["metadata"]["name"]);
    let metadata = Metadata::read(&object["metadata"]);
    let mut of_metadata = Vec::new();
    metadata.check(target, &mut of_metadata);
    of_metadata.retain(|error| !checked.is_replaced(&error.path));
    checked.errors.append(&mut of_metadata);
    let result = match serde_json::from_value::<S>(object["spec"].clone()) {
        Ok(spec) => validate(&name, &spec),
        // Schema and deserializer come from the same type, so this error is beyond the schema.
        Err(error) => Err(vec![FieldError::new("spec", &object["spec"], &error.to_string())]),
    };
    let mut errors = std::mem::take(&mut checked.errors);
    match result {
        Ok(valid) if errors.is_empty() => Ok((metadata, valid)),
        Ok(_) => Err(errors),
        Err(more) => {
            let more: Vec<_> =
                more.into_iter().filter(|error| !checked.reads_replaced(error)).collect();
            // Texts of rules have better remedies than those of the schema.
            errors.retain(|error| more.iter().all(|rule| rule.path != error.path));
            errors.extend(more);
            unions::explain(&mut errors, &tree.value);
            Err(errors)
        }
    }
}

#[cfg(test)]
mod tests;
