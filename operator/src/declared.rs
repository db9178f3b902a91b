//! What is kept of an object that a user writes.

use std::sync::Arc;

use kube::core::DeserializeGuard;
use kube::core::error_boundary::InvalidObject;
use kube::{Resource, ResourceExt as _};
use serde::de::DeserializeOwned;
use stoker_api::experiment::Experiment;
use stoker_api::inference::{InferenceJob, InferenceStatus};
use stoker_api::validate::{
    FieldError, ValidExperiment, ValidInferenceJob, validate, validate_begun,
    validate_inference_begun, validate_inference_on_cluster,
};

use crate::cache::{Cached, Key};
use crate::objects::without_noise;

/// An experiment as it was last seen.
pub type CachedExperiment = CachedObject<Experiment>;
/// An inference job as it was last seen.
pub type CachedJob = CachedObject<InferenceJob>;

/// A kind with rules that its schema cannot say.
pub trait Declared: Resource<DynamicType = ()> + DeserializeOwned + Send + Sync + 'static {
    /// What can run.
    type Valid: Send + Sync;

    /// What can run of an object of this name, or all that is wrong with it.
    ///
    /// # Errors
    ///
    /// Each field that cannot be as it is.
    fn check(&self, name: &str) -> Result<Self::Valid, Vec<FieldError>>;
}

impl Declared for Experiment {
    type Valid = ValidExperiment;

    fn check(&self, name: &str) -> Result<ValidExperiment, Vec<FieldError>> {
        let has_begun = self.status.as_ref().is_some_and(|status| status.trials_created > 0);
        match has_begun {
            true => validate(name, &self.spec).or_else(|_| validate_begun(name, &self.spec)),
            false => validate(name, &self.spec),
        }
    }
}

impl Declared for InferenceJob {
    type Valid = ValidInferenceJob;

    fn check(&self, name: &str) -> Result<ValidInferenceJob, Vec<FieldError>> {
        let has_begun = self.status.as_ref().is_some_and(|status| status.attempts > 0);
        let strict = validate_inference_on_cluster(name, &self.spec);
        match has_begun {
            true => strict.or_else(|_| validate_inference_begun(name, &self.spec)),
            false => strict,
        }
    }
}

/// An object, or why it cannot be read.
#[derive(Debug)]
pub struct CachedObject<K: Declared> {
    /// The object.
    pub object: Result<K, InvalidObject>,
    /// What is wrong with it, if it can be read; checked once.
    pub checked: Option<Result<Arc<K::Valid>, Vec<FieldError>>>,
    key: Key,
    version: String,
}

impl<K: Declared> CachedObject<K> {
    /// Keeps an object that a watch or a write gave.
    pub fn new(object: DeserializeGuard<K>) -> Self {
        let key = Key::of(&object);
        let version = object.resource_version().unwrap_or_default();
        let object = object.0.map(without_noise);
        let checked = object.as_ref().ok().map(|it| it.check(&key.name).map(Arc::new));
        Self { object, checked, key, version }
    }

    /// The object, if it can run.
    pub fn valid(&self) -> Option<Arc<K::Valid>> {
        self.checked.as_ref()?.as_ref().ok().cloned()
    }

    /// Its UID.
    pub fn uid(&self) -> &str {
        let metadata = match &self.object {
            Ok(object) => object.meta(),
            Err(invalid) => &invalid.metadata,
        };
        metadata.uid.as_deref().unwrap_or_default()
    }
}

impl CachedExperiment {
    /// The object, if it can be read.
    pub fn experiment(&self) -> Option<&Experiment> {
        self.object.as_ref().ok()
    }
}

impl CachedJob {
    /// What is recorded of it.
    pub fn status(&self) -> InferenceStatus {
        self.object.as_ref().ok().and_then(|it| it.status.clone()).unwrap_or_default()
    }
}

impl<K: Declared> Cached for CachedObject<K> {
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
