//! A batch inference job, and the files of its output.

use std::sync::Arc;

use serde_json::Value;
use stoker_api::condition::{self, ConditionStatus};
use stoker_api::experiment::Phase;
use stoker_api::inference::{InferenceJob, InferenceStatus};
use stoker_api::names::MANIFEST;
use stoker_api::time::Timestamp;
use stoker_storage::Storage;

/// Maximum size of a manifest that the page reads. One part takes about 200 bytes.
const MANIFEST_BYTES_MAX: u64 = 32 << 20;
/// Bytes at the start of the list of rejected rows that the page reads.
const REJECTED_BYTES: u64 = 64 << 10;

/// A batch inference job.
#[derive(Clone, Debug)]
pub struct Job {
    /// Namespace of the job.
    pub namespace: String,
    /// Name of the job.
    pub name: String,
    /// UID of the job.
    pub uid: String,
    /// The job.
    pub job: InferenceJob,
    /// Whether a runner or the operator works on the job.
    pub is_running: bool,
    /// Time of creation, if it is known.
    pub created: Option<Timestamp>,
    /// Path or URL of the output directory; empty if it is not known yet.
    pub output_url: String,
    /// Output directory, or the reason why it cannot be read.
    pub output: Result<Arc<Storage>, String>,
    /// Number of the change that this state contains; assigned by the store.
    pub version: u64,
}

impl Job {
    /// Creates a job from its record.
    pub fn new(
        job: InferenceJob,
        is_running: bool,
        created: Option<Timestamp>,
        output_url: String,
        output: Result<Arc<Storage>, String>,
    ) -> Self {
        let metadata = job.metadata.clone();
        Self {
            namespace: metadata.namespace.unwrap_or_default(),
            name: metadata.name.unwrap_or_default(),
            uid: metadata.uid.unwrap_or_default(),
            job,
            is_running,
            created,
            output_url,
            output,
            version: 0,
        }
    }

    /// Returns the name and the first 8 characters of the UID.
    pub fn id(&self) -> String {
        format!("{}-{}", self.name, self.uid.get(..8).unwrap_or(&self.uid))
    }

    /// Returns the path of the job's page.
    pub(crate) fn base(&self) -> String {
        format!("/jobs/{}/{}", self.namespace, self.id())
    }

    /// Returns the status, or that of a new job.
    pub(crate) fn status(&self) -> InferenceStatus {
        self.job.status.clone().unwrap_or_default()
    }

    /// Returns the phase.
    pub(crate) fn phase(&self) -> Phase {
        self.job.status.as_ref().map(|status| status.phase).unwrap_or_default()
    }

    /// Returns whether the record may still change.
    pub(crate) fn is_live(&self) -> bool {
        self.is_running && !self.phase().is_terminal()
    }

    /// Returns why the spec is invalid. The operator does not act on such a job.
    pub(crate) fn invalid(&self) -> Option<String> {
        let conditions = &self.job.status.as_ref()?.conditions;
        let valid = condition::find(conditions, "Valid")?;
        let is_invalid = valid.status == ConditionStatus::False && !self.phase().is_terminal();
        is_invalid.then(|| valid.message.clone())
    }

    /// Returns the manifest of the output as it is stored.
    ///
    /// # Errors
    ///
    /// The output is not complete, belongs to another job, or cannot be read.
    pub(crate) async fn manifest(&self) -> Result<Value, String> {
        let storage = self.output.as_ref().map_err(Clone::clone)?;
        let failed = |error: stoker_storage::StorageError| error.to_string();
        let Some(bytes) = storage.size(MANIFEST).await.map_err(failed)? else {
            return Err("The manifest is written last, after the last row".to_owned());
        };
        if bytes > MANIFEST_BYTES_MAX {
            let size = crate::text::bytes(bytes);
            return Err(format!("{MANIFEST} has {size}: too large for this page"));
        }
        let text = storage.get(MANIFEST).await.map_err(failed)?;
        let manifest: Value = serde_json::from_slice(&text)
            .map_err(|error| format!("cannot parse {MANIFEST}: {error}"))?;
        if manifest["jobId"].as_str() != Some(&self.uid) {
            let other = manifest["job"].as_str().unwrap_or_default();
            return Err(format!("the output directory contains that of another job, `{other}`"));
        }
        Ok(manifest)
    }

    /// Returns the first rejected rows that a manifest lists, each as a JSON object.
    ///
    /// # Errors
    ///
    /// The list cannot be read.
    pub(crate) async fn rejected(&self, manifest: &Value) -> Result<Vec<Value>, String> {
        let errors = &manifest["errors"];
        let (Some(name), Some(bytes)) = (errors["name"].as_str(), errors["bytes"].as_u64()) else {
            return Ok(Vec::new());
        };
        let storage = self.output.as_ref().map_err(Clone::clone)?;
        let end = bytes.min(REJECTED_BYTES);
        let read = storage.get_range(name, 0..end).await.map_err(|error| error.to_string())?;
        let text = String::from_utf8_lossy(&read);
        // The last line may be cut.
        Ok(text.lines().map_while(|line| serde_json::from_str(line).ok()).collect())
    }
}
