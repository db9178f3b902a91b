//! The manifest of a job's output, which is the last file that a job writes.

use stoker_api::inference::OutputManifest;
use stoker_api::names::MANIFEST;
use stoker_storage::{Storage, StorageError};

use crate::run_root::run_id;

/// Why the manifest of a job cannot be read from an output directory.
#[derive(Debug)]
pub(super) enum ManifestError {
    /// The directory contains no manifest.
    Missing,
    /// The file is not the manifest of an output.
    Damaged(serde_json::Error),
    /// The manifest is from another job.
    OtherJob {
        /// Run ID of that job.
        id: String,
        /// Unique ID of that job.
        uid: String,
    },
    /// The storage failed.
    Storage(StorageError),
}

/// Reads the manifest of the job with this UID from its output directory.
pub(super) async fn read_manifest(
    output: &Storage,
    uid: &str,
) -> Result<OutputManifest, ManifestError> {
    let text = match output.get(MANIFEST).await {
        Ok(text) => text,
        Err(StorageError::NotFound { .. }) => return Err(ManifestError::Missing),
        Err(error) => return Err(ManifestError::Storage(error)),
    };
    let manifest: OutputManifest = serde_json::from_slice(&text).map_err(ManifestError::Damaged)?;
    match manifest.job_id == uid {
        true => Ok(manifest),
        false => {
            let id = run_id(&manifest.job, &manifest.job_id);
            Err(ManifestError::OtherJob { id, uid: manifest.job_id })
        }
    }
}
