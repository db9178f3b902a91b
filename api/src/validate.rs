//! Which experiments can run. What passed here is a [`ValidExperiment`], and nothing after it
//! fails because of what
//! the user wrote.

mod inference;
#[cfg(feature = "crd")]
mod overrides;
mod pods;
mod rules;

use std::fmt;

use serde::Serialize;
use serde_json::Value;

use crate::experiment::{ExperimentSpec, Unit};
use crate::hyperparameters::Space;
use crate::inference::InferenceJobSpec;

/// The longest name of an experiment: trials, pods and paths add to it.
pub const NAME_BYTES_MAX: usize = 40;

/// The most trials that a search may have: each is a record of its own, and a plan reads them all.
pub const TRIALS_MAX: u32 = 100_000;

/// The end of seeds: they are below 2^31.
pub const SEED_END: u32 = 1 << 31;

/// What is wrong with one field.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct FieldError {
    /// The field, from the root of the object: `spec.searcher.maxLength`, `spec.env[2].name`.
    pub path: String,
    /// What it holds, as JSON and shortened; empty if it is absent.
    pub value: String,
    /// What it should be, and what to do.
    pub rule: String,
}

/// An experiment that can run.
#[derive(Clone, Debug, PartialEq)]
pub struct ValidExperiment {
    /// Its name, a DNS label.
    pub name: String,
    /// All of it.
    pub spec: ExperimentSpec,
    /// Its hyperparameters, parsed.
    pub space: Space,
    /// How trials are chosen.
    pub method: Method,
    /// What its searcher's lengths count.
    pub unit: Unit,
    /// How long a trial trains if nothing stops it, in `unit`.
    pub units_max: u64,
}

/// How trials are chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Method {
    /// One trial.
    Single,
    /// Trials drawn at random.
    Random {
        /// Trials in all, from 1 to [`TRIALS_MAX`].
        max_trials: u32,
        /// Trials at a time; 0 means no limit.
        max_concurrent: u32,
    },
    /// A trial for every point of a grid, of which there are [`TRIALS_MAX`] at most.
    Grid {
        /// Trials at a time; 0 means no limit.
        max_concurrent: u32,
    },
}

/// Checks an experiment by every rule that its schema cannot say, and by those that it can.
///
/// # Errors
///
/// Everything that is wrong with it, in the order of its fields.
pub fn validate(name: &str, spec: &ExperimentSpec) -> Result<ValidExperiment, Vec<FieldError>> {
    let valid = rules::check(name, spec)?;
    match rules::check_trial_bytes(spec, &valid.space) {
        Some(error) => Err(vec![error]),
        None => Ok(valid),
    }
}

/// Same as [`validate`], for an experiment that has already started. An earlier version may have
/// accepted it with keys of `podOverrides` that it dropped, or with larger hyperparameters.
///
/// # Errors
///
/// As [`validate`].
pub fn validate_begun(
    name: &str,
    spec: &ExperimentSpec,
) -> Result<ValidExperiment, Vec<FieldError>> {
    let bare = ExperimentSpec { pod_overrides: None, ..spec.clone() };
    let mut valid = rules::check(name, &bare)?;
    valid.spec.pod_overrides.clone_from(&spec.pod_overrides);
    Ok(valid)
}

/// An inference job that can run.
#[derive(Clone, Debug, PartialEq)]
pub struct ValidInferenceJob {
    /// Its name, a DNS label.
    pub name: String,
    /// All of it.
    pub spec: InferenceJobSpec,
}

/// Checks an inference job, as [`validate`] does an experiment.
///
/// # Errors
///
/// Everything that is wrong with it, in the order of its fields.
pub fn validate_inference(
    name: &str,
    spec: &InferenceJobSpec,
) -> Result<ValidInferenceJob, Vec<FieldError>> {
    inference::check(name, spec)
}

/// As [`validate_inference`], and by what a cluster asks besides: its processes are on several machines.
///
/// # Errors
///
/// As [`validate_inference`].
pub fn validate_inference_on_cluster(
    name: &str,
    spec: &InferenceJobSpec,
) -> Result<ValidInferenceJob, Vec<FieldError>> {
    let mut errors = inference::check_places(spec);
    match inference::check(name, spec) {
        Ok(valid) if errors.is_empty() => Ok(valid),
        Ok(_) => Err(errors),
        Err(mut others) => {
            others.append(&mut errors);
            Err(others)
        }
    }
}

/// As [`validate_inference_on_cluster`], for a job that runs already: see [`validate_begun`].
///
/// # Errors
///
/// As [`validate_inference`].
pub fn validate_inference_begun(
    name: &str,
    spec: &InferenceJobSpec,
) -> Result<ValidInferenceJob, Vec<FieldError>> {
    let bare = InferenceJobSpec { pod_overrides: None, ..spec.clone() };
    let mut valid = validate_inference_on_cluster(name, &bare)?;
    valid.spec.pod_overrides.clone_from(&spec.pod_overrides);
    Ok(valid)
}

/// The seed of an experiment that sets none: from 0 to 2^31 - 1, the same for the same id on every
/// machine.
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
    // FNV-1a, then the finalizer of SplitMix64: ids that differ in one digit get unrelated seeds.
    let mut hash = id.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
    });
    hash = (hash ^ (hash >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    hash = (hash ^ (hash >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    ((hash ^ (hash >> 31)) >> 33) as u32
}

/// The path of the field `name` of the object at `path`.
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

/// The path of item `idx` of the list at `path`.
pub fn item(path: &str, idx: usize) -> String {
    format!("{path}[{idx}]")
}

/// A value as JSON, cut where it gets long.
pub fn shortened(value: &Value) -> String {
    const CHARS_MAX: usize = 80;
    let text = value.to_string();
    match text.char_indices().nth(CHARS_MAX) {
        Some((end, _)) => format!("{}...", &text[..end]),
        None => text,
    }
}

impl FieldError {
    /// An error of the field at `path`, which holds `value`.
    pub fn new(path: &str, value: &Value, rule: &str) -> Self {
        Self { path: path.to_owned(), value: shortened(value), rule: rule.to_owned() }
    }

    /// An error of the field at `path`, which is absent.
    pub fn absent(path: &str, rule: &str) -> Self {
        Self { path: path.to_owned(), value: String::new(), rule: rule.to_owned() }
    }
}

impl fmt::Display for FieldError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.value.is_empty() {
            write!(f, "{}: {}", self.path, self.rule)
        } else {
            write!(f, "{}: {}: {}", self.path, self.value, self.rule)
        }
    }
}

impl std::error::Error for FieldError {}

#[cfg(test)]
mod tests;
