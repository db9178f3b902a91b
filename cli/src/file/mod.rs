//! Files of experiments and jobs: YAML in, a [`ValidExperiment`] out, or every error of the file at once.
//!
//! ```text
//!  text -- tree --> value + places -- set --> with --set -- legacy --> an Experiment
//!                                                     schema, then api's typed rules, then places
//! ```

mod legacy;
mod scalar;
mod schema;
mod set;
mod tree;

use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};

use serde::de::DeserializeOwned;
use serde::{Serialize, Serializer};
use serde_json::{Value, json};
use stoker_api::inference::InferenceJobSpec;
use stoker_api::names::API_VERSION;
use stoker_api::validate::{
    FieldError, ValidExperiment, ValidInferenceJob, validate, validate_inference,
    validate_inference_on_cluster,
};

use schema::Checked;
use tree::{Place, Tree};

/// The namespace of a file that names none.
const NAMESPACE: &str = "default";

/// Bytes of a file: an Experiment is held by etcd, which takes 1.5 MB.
const FILE_BYTES_MAX: u64 = 1 << 20;

/// A file that can run.
#[derive(Clone, Debug)]
pub(crate) struct Loaded {
    /// The experiment's name.
    pub(crate) name: String,
    /// Its namespace: [`NAMESPACE`] where the file names none.
    pub(crate) namespace: String,
    /// What the file says of the object itself.
    pub(crate) metadata: Metadata,
    /// The experiment.
    pub(crate) valid: ValidExperiment,
    /// What was translated, where the file has another format.
    pub(crate) notes: Vec<String>,
    /// Its spec, with every default filled in.
    pub(crate) spec_json: Value,
}

/// A file of an inference job that can run.
#[derive(Clone, Debug)]
pub(crate) struct LoadedJob {
    /// The job's name.
    pub(crate) name: String,
    /// Its namespace: [`NAMESPACE`] where the file names none.
    pub(crate) namespace: String,
    /// What the file says of the object itself.
    pub(crate) metadata: Metadata,
    /// The job.
    pub(crate) valid: ValidInferenceJob,
}

/// What a file says of an object beside its name.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Metadata {
    /// Its namespace.
    pub(crate) namespace: Option<String>,
    /// Its labels.
    pub(crate) labels: BTreeMap<String, String>,
    /// Its annotations.
    pub(crate) annotations: BTreeMap<String, String>,
}

/// One error of a file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct Problem {
    /// From 1; none if the field is in no file, but from `--set`.
    pub(crate) line: Option<usize>,
    /// From 1, in characters.
    pub(crate) column: Option<usize>,
    /// The field's path; empty for the file as a whole.
    pub(crate) field: String,
    /// What it holds; empty if it is absent.
    pub(crate) value: String,
    /// What it should be.
    pub(crate) rule: String,
}

/// Every error of a file. As JSON it is the list of them.
#[derive(Clone, Debug)]
pub(crate) struct FileError {
    /// The file.
    pub(crate) path: PathBuf,
    /// Its errors, by line and column; at least one.
    pub(crate) problems: Vec<Problem>,
}

/// Reads the experiment file at `path`, with `PATH=VALUE` in `sets` laid over it.
///
/// # Errors
///
/// Everything that is wrong with the file.
pub(crate) fn load(path: &Path, sets: &[String]) -> Result<Loaded, FileError> {
    let stem = path.file_stem().unwrap_or_default().to_string_lossy();
    load_with(path, |text| parse(text, &stem, sets))
}

/// Whether the file at `path` says that it holds an inference job.
pub(crate) fn is_job(path: &Path) -> bool {
    let tree = read(path).ok().and_then(|text| tree::read(&text).0);
    tree.is_some_and(|it| it.value["kind"] == "InferenceJob")
}

/// As [`load`], of an inference job.
///
/// # Errors
///
/// Everything that is wrong with the file.
pub(crate) fn load_job(path: &Path, sets: &[String]) -> Result<LoadedJob, FileError> {
    load_with(path, |text| parse_job(text, sets, validate_inference))
}

/// As [`load_job`], of one that is to run on a cluster.
///
/// # Errors
///
/// As [`load_job`].
pub(crate) fn load_cluster_job(path: &Path, sets: &[String]) -> Result<LoadedJob, FileError> {
    load_with(path, |text| parse_job(text, sets, validate_inference_on_cluster))
}

fn load_with<T>(
    path: &Path,
    parse: impl FnOnce(&str) -> Result<T, Vec<Problem>>,
) -> Result<T, FileError> {
    let result = match read(path) {
        Ok(text) => parse(&text),
        Err(rule) => Err(vec![Problem::nowhere("", "", &rule)]),
    };
    result.map_err(|mut problems| {
        problems.sort_by_key(|problem| (problem.line, problem.column));
        FileError { path: path.to_owned(), problems }
    })
}

fn read(path: &Path) -> Result<String, String> {
    let bytes = std::fs::metadata(path).map_err(|error| format!("cannot be read: {error}"))?.len();
    if bytes > FILE_BYTES_MAX {
        return Err(format!("{bytes} bytes are more than an experiment's {FILE_BYTES_MAX}"));
    }
    std::fs::read_to_string(path).map_err(|error| format!("cannot be read: {error}"))
}

/// `stem` names an experiment whose file, in another format, does not.
fn parse(text: &str, stem: &str, sets: &[String]) -> Result<Loaded, Vec<Problem>> {
    let (tree, problems) = tree::read(text);
    // A file that cannot be read may have either format.
    let may_be_legacy = tree.as_ref().is_none_or(|tree| legacy::is_legacy(&tree.value));
    parse_tree(tree, problems, stem, sets).map_err(|mut problems| {
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
    let schema = file_schema("Experiment", stoker_api::crd::experiment_spec_schema());
    match check(&tree, &schema, validate) {
        Ok((metadata, valid)) if problems.is_empty() => {
            let spec_json = json!(valid.spec);
            let namespace = metadata.namespace.clone().unwrap_or_else(|| NAMESPACE.to_owned());
            let name = valid.name.clone();
            Ok(Loaded { name, namespace, metadata, valid, notes, spec_json })
        }
        Ok(_) => Err(problems),
        Err(errors) => Err(placed(problems, &errors, &tree)),
    }
}

/// Rules of a job.
type JobRules = fn(&str, &InferenceJobSpec) -> Result<ValidInferenceJob, Vec<FieldError>>;

fn parse_job(text: &str, sets: &[String], rules: JobRules) -> Result<LoadedJob, Vec<Problem>> {
    let (tree, mut problems) = tree::read(text);
    let Some(mut tree) = tree else { return Err(problems) };
    for set in sets {
        if let Err(problem) = set::apply(&mut tree, set, false) {
            problems.push(problem);
        }
    }
    let schema = file_schema("InferenceJob", stoker_api::crd::inference_spec_schema());
    match check(&tree, &schema, rules) {
        Ok((metadata, valid)) if problems.is_empty() => {
            let namespace = metadata.namespace.clone().unwrap_or_else(|| NAMESPACE.to_owned());
            Ok(LoadedJob { name: valid.name.clone(), namespace, metadata, valid })
        }
        Ok(_) => Err(problems),
        Err(errors) => Err(placed(problems, &errors, &tree)),
    }
}

/// The problems, and those errors that are not among them, with their places.
fn placed(mut problems: Vec<Problem>, errors: &[FieldError], tree: &Tree) -> Vec<Problem> {
    for problem in errors.iter().map(|error| Problem::of(error, tree)) {
        let is_known = |it: &Problem| it.field == problem.field && it.line == problem.line;
        if !problems.iter().any(is_known) {
            problems.push(problem);
        }
    }
    problems
}

/// What the file says of the object, and what its kind's own rules make of its `spec`.
fn check<S: DeserializeOwned, V>(
    tree: &Tree,
    schema: &Value,
    validate: impl Fn(&str, &S) -> Result<V, Vec<FieldError>>,
) -> Result<(Metadata, V), Vec<FieldError>> {
    let mut checked = Checked::default();
    let object = checked.check(schema, &tree.value, "");
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let name = text(&object["metadata"]["name"]);
    let metadata = metadata(&object["metadata"]);
    let namespace = metadata.namespace.as_deref();
    if !checked.is_replaced("metadata.namespace") && namespace.is_some_and(|it| !is_namespace(it)) {
        let rule = "must be at most 63 lower-case letters, digits and `-`, and begin and end with a \
                    letter or digit";
        checked.errors.push(FieldError::new("metadata.namespace", &json!(namespace), rule));
    }
    let result = match serde_json::from_value::<S>(object["spec"].clone()) {
        Ok(spec) => validate(&name, &spec),
        // The schema and the reader are made from one type, so this says more than the schema
        // could.
        Err(error) => Err(vec![FieldError::new("spec", &object["spec"], &error.to_string())]),
    };
    let mut errors = std::mem::take(&mut checked.errors);
    match result {
        Ok(valid) if errors.is_empty() => Ok((metadata, valid)),
        Ok(_) => Err(errors),
        Err(those) => {
            errors.extend(those.into_iter().filter(|error| !checked.is_replaced(&error.path)));
            Err(errors)
        }
    }
}

fn metadata(value: &Value) -> Metadata {
    let texts = |name: &str| -> BTreeMap<String, String> {
        let fields = value[name].as_object().into_iter().flatten();
        fields.filter_map(|(key, it)| Some((key.clone(), it.as_str()?.to_owned()))).collect()
    };
    Metadata {
        namespace: value["namespace"].as_str().map(str::to_owned),
        labels: texts("labels"),
        annotations: texts("annotations"),
    }
}

fn is_namespace(text: &str) -> bool {
    let is_inner = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit();
    text.len() <= 63
        && text.bytes().all(|byte| is_inner(byte) || byte == b'-')
        && text.bytes().next().is_some_and(is_inner)
        && text.bytes().last().is_some_and(is_inner)
}

/// The schema of a whole file, of which the definition in `crds/` has the spec alone.
fn file_schema(kind: &str, spec: Value) -> Value {
    json!({
        "type": "object",
        "required": ["apiVersion", "kind", "metadata", "spec"],
        "properties": {
            "apiVersion": {
                "type": "string", "enum": [API_VERSION], "description": API_VERSION,
            },
            "kind": { "type": "string", "enum": [kind], "description": kind },
            "metadata": {
                "type": "object",
                "description": format!("The {kind}'s name and labels"),
                "required": ["name"],
                "properties": {
                    "name": { "type": "string", "description": format!("The {kind}'s name") },
                    "namespace": { "type": "string" },
                    "labels": { "type": "object", "additionalProperties": { "type": "string" } },
                    "annotations": {
                        "type": "object", "additionalProperties": { "type": "string" },
                    },
                },
            },
            "spec": spec,
        },
    })
}

impl Problem {
    fn at(place: Place, field: &str, value: &str, rule: &str) -> Self {
        let (line, column) = (Some(place.line), Some(place.column));
        Self { line, column, ..Self::nowhere(field, value, rule) }
    }

    fn nowhere(field: &str, value: &str, rule: &str) -> Self {
        let (field, value, rule) = (field.to_owned(), value.to_owned(), rule.to_owned());
        Self { line: None, column: None, field, value, rule }
    }

    fn of(error: &FieldError, tree: &Tree) -> Self {
        match tree.place(&error.path) {
            Some(place) => Self::at(place, &error.path, &error.value, &error.rule),
            None => Self::nowhere(&error.path, &error.value, &error.rule),
        }
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let (Some(line), Some(column)) = (self.line, self.column) {
            write!(f, "{line}:{column}: ")?;
        } else if !self.field.is_empty() {
            write!(f, "(--set): ")?;
        }
        if !self.field.is_empty() {
            write!(f, "{}: ", self.field)?;
        }
        write!(f, "{}", self.rule)?;
        if self.value.is_empty() { Ok(()) } else { write!(f, " (found {})", self.value) }
    }
}

impl fmt::Display for FileError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, problem) in self.problems.iter().enumerate() {
            let separator = if problem.line.is_some() { ":" } else { ": " };
            let newline = if i == 0 { "" } else { "\n" };
            write!(f, "{newline}{}{separator}{problem}", self.path.display())?;
        }
        Ok(())
    }
}

impl std::error::Error for FileError {}

impl Serialize for FileError {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        self.problems.serialize(serializer)
    }
}

#[cfg(test)]
mod tests;
