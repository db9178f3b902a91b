//! Validation of experiments and inference jobs. Code that receives a [`ValidExperiment`] need not
//! check the user's input again.

mod at_once;
mod edits;
mod external;
mod inference;
mod new;
#[cfg(feature = "crd")]
mod overrides;
mod pods;
mod rules;
mod searches;
pub mod sizes;

use std::fmt;

use serde::Serialize;
use serde_json::Value;

use crate::experiment::{
    AdaptiveAshaSearch, AdaptiveSearch, AdaptiveSimpleSearch, AsyncHalvingSearch, ExperimentSpec,
    ExternalSearch, HyperbandSearch, PbtSearch, SobolSearch, SyncHalvingSearch, TpeSearch, Unit,
};
use crate::hyperparameters::Space;
use crate::inference::InferenceJobSpec;

pub use at_once::check_num_at_once;
pub use edits::{check_edit, check_max_trials, with_edits, with_settings};
pub use external::check_on_cluster;

/// Maximum length of an experiment's name. Names of trials, pods and paths extend it.
pub const NAME_BYTES_MAX: usize = 40;

/// Maximum number of trials in a search. Each trial has a separate record, and every plan reads all
/// records.
pub const TRIALS_MAX: u32 = 100_000;

/// Exclusive upper bound of seeds.
pub const SEED_END: u32 = 1 << 31;

/// Maximum number of dimensions of a Sobol sequence.
pub const SOBOL_DIMENSIONS_MAX: usize = 64;

/// An invalid field.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct FieldError {
    /// Path of the field from the root of the object, such as `spec.searcher.maxLength` or
    /// `spec.env[2].name`.
    pub path: String,
    /// Value of the field as shortened JSON. Empty if the field is absent.
    pub value: String,
    /// The violated rule, with a remedy.
    pub rule: String,
    /// Paths of other fields that the rule reads. The error may be due to their values.
    #[serde(skip)]
    pub other_paths: Vec<String>,
}

/// A validated experiment.
#[derive(Clone, Debug, PartialEq)]
pub struct ValidExperiment {
    /// Name of the experiment, a DNS label.
    pub name: String,
    /// The complete spec.
    pub spec: ExperimentSpec,
    /// Parsed hyperparameters.
    pub space: Space,
    /// Search method.
    pub method: Method,
    /// Unit of the searcher's lengths.
    pub unit: Unit,
    /// Training length of a trial, in `unit`, unless it is stopped early.
    pub units_max: u64,
}

/// Search method.
#[derive(Clone, Debug, PartialEq)]
pub enum Method {
    /// One trial.
    Single,
    /// Trials with randomly sampled hyperparameters.
    Random {
        /// Total number of trials, from 1 to [`TRIALS_MAX`].
        max_trials: u32,
        /// Maximum number of concurrent trials; 0 means no limit.
        max_concurrent: u32,
    },
    /// One trial for each point of a grid with at most [`TRIALS_MAX`] points.
    Grid {
        /// Maximum number of concurrent trials; 0 means no limit.
        max_concurrent: u32,
    },
    /// One bracket of asynchronous halving.
    AsyncHalving(AsyncHalvingSearch),
    /// Several brackets of asynchronous halving.
    AdaptiveAsha(AdaptiveAshaSearch),
    /// One synchronous bracket.
    SyncHalving {
        /// The search.
        search: SyncHalvingSearch,
        /// Its budget, in the unit of the experiment.
        budget: u64,
    },
    /// Several synchronous brackets that share a budget.
    Adaptive {
        /// The search.
        search: AdaptiveSearch,
        /// Its budget, in the unit of the experiment.
        budget: u64,
    },
    /// Several synchronous brackets that share a number of trials.
    AdaptiveSimple(AdaptiveSimpleSearch),
    /// Brackets of Hyperband.
    Hyperband(HyperbandSearch),
    /// Trials whose hyperparameters a tree-structured Parzen estimator samples.
    Tpe(TpeSearch),
    /// Trials at the points of a Sobol sequence.
    Sobol(SobolSearch),
    /// Population based training.
    Pbt {
        /// The search.
        search: PbtSearch,
        /// Length of a round, in the unit of the experiment.
        units_per_round: u64,
    },
    /// Trials that a service of the user decides.
    External(ExternalSearch),
}

/// Validates an experiment against all rules, including those of its schema.
///
/// # Errors
///
/// All violated rules, grouped by part of the spec.
pub fn validate(name: &str, spec: &ExperimentSpec) -> Result<ValidExperiment, Vec<FieldError>> {
    let valid = validate_local(name, spec)?;
    match check_num_at_once(&valid) {
        Some(error) => Err(vec![error]),
        None => Ok(valid),
    }
}

/// Same as [`validate`], for an experiment on one machine. Its log has space for any number of
/// trials that the search creates at once.
///
/// # Errors
///
/// Same as [`validate`].
pub fn validate_local(
    name: &str,
    spec: &ExperimentSpec,
) -> Result<ValidExperiment, Vec<FieldError>> {
    let mut more = new::check_values(spec);
    match rules::check(name, spec) {
        Ok(valid) => {
            more.extend(new::check_search(&valid));
            if more.is_empty() { Ok(valid) } else { Err(more) }
        }
        Err(mut errors) => {
            errors.append(&mut more);
            Err(errors)
        }
    }
}

/// Same as [`validate`], for an experiment that has already started. An earlier version may have
/// accepted it with keys of `podOverrides` that it dropped, with larger fields or more trials.
///
/// # Errors
///
/// Same as [`validate`].
pub fn validate_started(
    name: &str,
    spec: &ExperimentSpec,
) -> Result<ValidExperiment, Vec<FieldError>> {
    let bare = ExperimentSpec { pod_overrides: None, ..spec.clone() };
    let mut valid = rules::check(name, &bare)?;
    valid.spec.pod_overrides.clone_from(&spec.pod_overrides);
    Ok(valid)
}

/// A validated inference job.
#[derive(Clone, Debug, PartialEq)]
pub struct ValidInferenceJob {
    /// Name of the job, a DNS label.
    pub name: String,
    /// The complete spec.
    pub spec: InferenceJobSpec,
}

/// Validates an inference job against all rules, including those of its schema.
///
/// # Errors
///
/// All violated rules, grouped by part of the spec.
pub fn validate_inference(
    name: &str,
    spec: &InferenceJobSpec,
) -> Result<ValidInferenceJob, Vec<FieldError>> {
    refuse_large_job(inference::check(name, spec)?)
}

fn refuse_large_job(valid: ValidInferenceJob) -> Result<ValidInferenceJob, Vec<FieldError>> {
    let InferenceJobSpec { data, hyperparameters, .. } = &valid.spec;
    let for_programs = valid.spec.for_programs();
    let error = rules::check_program_bytes(data, hyperparameters.as_ref(), &for_programs);
    error.map_or(Ok(valid), |error| Err(vec![error]))
}

/// Validates an inference job for a cluster. In addition to the rules of [`validate_inference`],
/// the output must be reachable from several machines.
///
/// # Errors
///
/// Same as [`validate_inference`].
pub fn validate_inference_on_cluster(
    name: &str,
    spec: &InferenceJobSpec,
) -> Result<ValidInferenceJob, Vec<FieldError>> {
    refuse_large_job(inference_on_cluster(name, spec)?)
}

fn inference_on_cluster(
    name: &str,
    spec: &InferenceJobSpec,
) -> Result<ValidInferenceJob, Vec<FieldError>> {
    let mut errors = inference::check_locations(spec);
    match inference::check(name, spec) {
        Ok(valid) if errors.is_empty() => Ok(valid),
        Ok(_) => Err(errors),
        Err(mut others) => {
            others.append(&mut errors);
            Err(others)
        }
    }
}

/// Validates an inference job that already runs on a cluster. Like [`validate_started`], it accepts
/// unknown keys in `podOverrides`, and larger fields.
///
/// # Errors
///
/// Same as [`validate_inference`].
pub fn validate_started_inference(
    name: &str,
    spec: &InferenceJobSpec,
) -> Result<ValidInferenceJob, Vec<FieldError>> {
    started_inference(name, spec, inference_on_cluster)
}

/// Same as [`validate_started_inference`], for a job on one machine. Like [`validate_inference`],
/// it accepts an output that is not reachable from other machines.
///
/// # Errors
///
/// Same as [`validate_inference`].
pub fn validate_started_local_inference(
    name: &str,
    spec: &InferenceJobSpec,
) -> Result<ValidInferenceJob, Vec<FieldError>> {
    started_inference(name, spec, inference::check)
}

fn started_inference(
    name: &str,
    spec: &InferenceJobSpec,
    check: fn(&str, &InferenceJobSpec) -> Result<ValidInferenceJob, Vec<FieldError>>,
) -> Result<ValidInferenceJob, Vec<FieldError>> {
    let bare = InferenceJobSpec { pod_overrides: None, ..spec.clone() };
    let mut valid = check(name, &bare)?;
    valid.spec.pod_overrides.clone_from(&spec.pod_overrides);
    Ok(valid)
}

/// Returns the seed of an experiment that does not set one, from 0 to 2^31 - 1. The seed depends
/// only on the ID.
///
/// # Examples
///
/// ```
/// use stoker_api::validate::derive_seed;
///
/// assert_eq!(derive_seed("mnist-0b5f"), derive_seed("mnist-0b5f"));
/// assert_ne!(derive_seed("mnist-0b5f"), derive_seed("mnist-0b60"));
/// ```
pub fn derive_seed(id: &str) -> u32 {
    // FNV-1a, then the finalizer of SplitMix64: IDs that differ in one digit get unrelated seeds.
    let mut hash = id.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
    });
    hash = (hash ^ (hash >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    hash = (hash ^ (hash >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    ((hash ^ (hash >> 31)) >> 33) as u32
}

/// Returns the path of the field `name` of the object at `path`.
///
/// # Examples
///
/// ```
/// use stoker_api::validate::member;
///
/// assert_eq!(member("spec", "searcher"), "spec.searcher");
/// assert_eq!(member("", "spec"), "spec");
/// assert_eq!(member("spec.data", "a.b"), r#"spec.data["a.b"]"#);
/// ```
pub fn member(path: &str, name: &str) -> String {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'-' | b'/');
    if name.is_empty() || !name.bytes().all(is_plain) {
        return format!("{path}[{}]", Value::from(name));
    }
    if path.is_empty() { name.to_owned() } else { format!("{path}.{name}") }
}

/// Returns the path of item `idx` of the list at `path`.
pub fn item(path: &str, idx: usize) -> String {
    format!("{path}[{idx}]")
}

/// Returns a value as JSON, truncated to 80 characters and `...`.
pub fn shortened(value: &Value) -> String {
    const CHARS_MAX: usize = 80;
    let text = value.to_string();
    match text.char_indices().nth(CHARS_MAX) {
        Some((end, _)) => format!("{}...", &text[..end]),
        None => text,
    }
}

impl FieldError {
    /// Creates an error of the field at `path` with this value.
    pub fn new(path: &str, value: &Value, rule: &str) -> Self {
        Self { value: shortened(value), ..Self::absent(path, rule) }
    }

    /// Creates an error of the field at `path`, which is absent or need not be shown.
    pub fn absent(path: &str, rule: &str) -> Self {
        let (path, rule) = (path.to_owned(), rule.to_owned());
        Self { path, value: String::new(), rule, other_paths: Vec::new() }
    }

    /// Returns `true` if the object must have exactly one of several fields, but has none.
    pub fn is_empty_union(&self) -> bool {
        self.rule.ends_with(rules::NONE_IS_SET)
    }

    /// Adds paths of other fields that the rule reads.
    #[must_use]
    pub(crate) fn reading(mut self, others: &[&str]) -> Self {
        self.other_paths.extend(others.iter().map(|path| (*path).to_owned()));
        self
    }
}

impl fmt::Display for FieldError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.path, self.rule)?;
        if self.value.is_empty() { Ok(()) } else { write!(f, " (found {})", self.value) }
    }
}

impl std::error::Error for FieldError {}

#[cfg(test)]
mod tests;
