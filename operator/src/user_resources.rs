//! Cached form of objects that users write: experiments and inference jobs.

use std::sync::Arc;

use kube::core::DeserializeGuard;
use kube::core::error_boundary::InvalidObject;
use kube::{Resource, ResourceExt as _};
use serde::de::DeserializeOwned;
use stoker_api::condition;
use stoker_api::experiment::{Experiment, ExperimentStatus};
use stoker_api::inference::{InferenceJob, InferenceStatus};
use stoker_api::validate::{
    FieldError, ValidExperiment, ValidInferenceJob, check_on_cluster, validate,
    validate_inference_on_cluster, validate_started, validate_started_inference,
};
use stoker_engine::experiment::without_edit;

use crate::cache::{Cached, Key};
use crate::objects::without_managed_fields;

/// An experiment as last observed.
pub type CachedExperiment = CachedObject<Experiment>;
/// An inference job as last observed.
pub type CachedJob = CachedObject<InferenceJob>;

/// Reason of the conditions of an experiment that was never valid.
pub(crate) const INVALID: &str = "Invalid";

/// A kind with validation rules beyond its schema.
pub trait UserResource:
    Resource<DynamicType = ()> + DeserializeOwned + Send + Sync + 'static
{
    /// Validated form of the spec.
    type Valid: Send + Sync;

    /// Validates the spec of the object with this name.
    ///
    /// # Errors
    ///
    /// Every field error.
    fn validate_spec(&self, name: &str) -> Result<Self::Valid, Vec<FieldError>>;
}

impl UserResource for Experiment {
    type Valid = ValidExperiment;

    fn validate_spec(&self, name: &str) -> Result<ValidExperiment, Vec<FieldError>> {
        let valid = match self.status.as_ref().is_some_and(was_accepted) {
            true => validate(name, &self.spec).or_else(|_| validate_started(name, &self.spec)),
            false => validate(name, &self.spec),
        };
        let valid = valid
            .or_else(|errors| without_edit(name, &self.spec, self.status.as_ref()).ok_or(errors))?;
        check_on_cluster(&self.spec.searcher).map_err(|error| vec![error])?;
        Ok(valid)
    }
}

/// Returns whether an operator has accepted an experiment. Rules of newer versions do not end it,
/// also if it waits for its first trial.
pub(crate) fn was_accepted(status: &ExperimentStatus) -> bool {
    let valid = condition::find(&status.conditions, "Valid");
    status.trials_created > 0 || valid.is_some_and(|valid| valid.reason != INVALID)
}

impl UserResource for InferenceJob {
    type Valid = ValidInferenceJob;

    fn validate_spec(&self, name: &str) -> Result<ValidInferenceJob, Vec<FieldError>> {
        let has_started = self.status.as_ref().is_some_and(|status| status.attempts > 0);
        let strict = validate_inference_on_cluster(name, &self.spec);
        match has_started {
            true => strict.or_else(|_| validate_started_inference(name, &self.spec)),
            false => strict,
        }
    }
}

/// An object, or the error with which it cannot be parsed, with its validation result.
#[derive(Debug)]
pub struct CachedObject<K: UserResource> {
    /// The object, or the parse error.
    pub object: Result<K, InvalidObject>,
    /// Validation result, computed once; `None` if the object cannot be parsed.
    pub validation: Option<Result<Arc<K::Valid>, Vec<FieldError>>>,
    key: Key,
    version: String,
}

impl<K: UserResource> CachedObject<K> {
    /// Caches an object from a watch event or a write response.
    pub fn new(object: DeserializeGuard<K>) -> Self {
        let key = Key::of(&object);
        let version = object.resource_version().unwrap_or_default();
        let object = object.0.map(without_managed_fields);
        let validation =
            object.as_ref().ok().map(|object| object.validate_spec(&key.name).map(Arc::new));
        Self { object, validation, key, version }
    }

    /// Validated spec; `None` if the object is invalid or cannot be parsed.
    pub fn valid(&self) -> Option<Arc<K::Valid>> {
        self.validation.as_ref()?.as_ref().ok().cloned()
    }

    /// UID of the object.
    pub fn uid(&self) -> &str {
        let metadata = match &self.object {
            Ok(object) => object.meta(),
            Err(invalid) => &invalid.metadata,
        };
        metadata.uid.as_deref().unwrap_or_default()
    }
}

impl CachedExperiment {
    /// The experiment; `None` if it cannot be parsed.
    pub fn experiment(&self) -> Option<&Experiment> {
        self.object.as_ref().ok()
    }
}

impl CachedJob {
    /// Status of the job; the default if it is unset or the job cannot be parsed.
    pub fn status(&self) -> InferenceStatus {
        self.object.as_ref().ok().and_then(|job| job.status.clone()).unwrap_or_default()
    }
}

impl<K: UserResource> Cached for CachedObject<K> {
    fn key(&self) -> Key {
        self.key.clone()
    }

    fn group(&self) -> Option<Key> {
        None
    }

    fn version(&self) -> &str {
        &self.version
    }

    fn is_same(&self, other: &Self) -> bool {
        self.version == other.version
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};
    use stoker_api::experiment::DesiredState;

    use super::*;

    /// Validates an experiment whose search has recorded 9 epochs, and returns its length and its
    /// desired state.
    fn length(max_length: u64, every_units: u64, log: &Value) -> Option<(u64, bool)> {
        let searcher = json!({
            "metric": "loss", "maxLength": { "epochs": max_length }, "random": { "maxTrials": 2 },
            "medianStopping": { "everyUnits": every_units },
        });
        let experiment = json!({
            "apiVersion": "stoker.dev/v1alpha1",
            "kind": "Experiment",
            "metadata": { "name": "e", "uid": "u" },
            "spec": {
                "entrypoint": { "command": ["train"] }, "searcher": searcher, "state": "killed",
            },
            "status": { "trialsCreated": 2, "log": log },
        });
        let experiment: Experiment = serde_json::from_value(experiment).unwrap();
        let valid = experiment.validate_spec("e").ok()?;
        Some((valid.units_max, valid.spec.state == DesiredState::Killed))
    }

    #[test]
    fn newer_rules_do_not_end_accepted_experiments() {
        let check = |reason: &str, is_valid: bool| {
            let searcher = json!({ "metric": "loss", "maxLength": { "epochs": 9 }, "single": {} });
            let condition = json!({
                "type": "Valid", "status": "True", "reason": reason, "message": "",
                "lastTransitionTime": "2026-01-01T00:00:00Z", "observedGeneration": 1,
            });
            let experiment = json!({
                "apiVersion": "stoker.dev/v1alpha1",
                "kind": "Experiment",
                "metadata": { "name": "e", "uid": "u" },
                "spec": {
                    "entrypoint": { "command": ["train"] }, "searcher": searcher,
                    "hyperparameters": { "a,b": 1 },
                },
                "status": { "conditions": [condition] },
            });
            let experiment: Experiment = serde_json::from_value(experiment).unwrap();
            assert_eq!(experiment.validate_spec("e").is_ok(), is_valid, "{reason}");
        };
        check("Accepted", true);
        check("NoLongerValid", true);
        check(INVALID, false);
    }

    #[test]
    fn invalid_edit_leaves_recorded_settings() {
        let settings = json!({
            "maxTrials": 2, "maxConcurrentTrials": 16, "maxLength": 9, "releaseSeconds": 60,
        });
        let began = |settings: Value| {
            let event = json!({ "began": { "version": "1", "settings": settings } });
            json!([{ "order": 0, "at": "2026-01-01T00:00:00Z", "event": event }])
        };
        let log = began(settings);
        assert_eq!(length(9, 1, &log), Some((9, true)));
        assert_eq!(length(128, 1, &log), Some((128, true)));
        assert_eq!(length(129, 1, &log), Some((9, true)));
        // Other fields are invalid with the recorded settings too.
        assert_eq!(length(129, 0, &log), None);
        // An earlier version has recorded no settings.
        assert_eq!(length(129, 1, &began(json!(null))), None);
    }
}
