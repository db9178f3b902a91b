//! What is kept of a job.

use std::sync::Arc;

use kube::ResourceExt as _;
use kube::core::DeserializeGuard;
use kube::core::error_boundary::InvalidObject;
use stoker_api::inference::{InferenceJob, InferenceStatus};
use stoker_api::validate::{FieldError, ValidInferenceJob, validate_inference_on_cluster};

use crate::cache::{Cached, Key};
use crate::objects::without_noise;

/// An inference job, or why it cannot be read.
#[derive(Debug)]
pub struct CachedJob {
    /// The object.
    pub object: Result<InferenceJob, InvalidObject>,
    /// What is wrong with it, if it can be read; checked once.
    pub checked: Option<Result<Arc<ValidInferenceJob>, Vec<FieldError>>>,
    key: Key,
    version: String,
}

impl CachedJob {
    /// Keeps an object that a watch or a write gave.
    pub fn new(object: DeserializeGuard<InferenceJob>) -> Self {
        let key = Key::of(&object);
        let version = object.resource_version().unwrap_or_default();
        let object = object.0.map(without_noise);
        let check = |it: &InferenceJob| validate_inference_on_cluster(&key.name, &it.spec);
        let checked = object.as_ref().ok().map(|it| check(it).map(Arc::new));
        Self { object, checked, key, version }
    }

    /// Its UID.
    pub fn uid(&self) -> &str {
        let metadata = match &self.object {
            Ok(job) => &job.metadata,
            Err(invalid) => &invalid.metadata,
        };
        metadata.uid.as_deref().unwrap_or_default()
    }

    /// What is recorded of it.
    pub fn status(&self) -> InferenceStatus {
        self.object.as_ref().ok().and_then(|it| it.status.clone()).unwrap_or_default()
    }
}

impl Cached for CachedJob {
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
