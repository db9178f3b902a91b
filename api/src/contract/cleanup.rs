//! Instructions of a clean-up pod.

use serde::{Deserialize, Serialize};

/// Checkpoints that a clean-up pod deletes, and records that it stores.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Cleanup {
    /// Storage of the checkpoints.
    pub storage: CleanupStorage,
    /// Checkpoints to delete, by trial.
    pub delete: Vec<CleanupTrial>,
    /// [`StoredRecord`](super::StoredRecord)s, [packed](crate::packed). The pod stores them after
    /// the deletions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub records: Option<String>,
}

/// A storage root. Credentials come from the environment.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct CleanupStorage {
    /// URL of the storage root, as in `checkpointStorage.url`.
    pub url: String,
    /// Endpoint of an S3-compatible server other than AWS.
    #[serde(default)]
    pub endpoint: Option<String>,
}

/// Checkpoints of one trial to delete and to keep.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct CleanupTrial {
    /// Directory of the trial below the root.
    pub trial_path: String,
    /// Names of checkpoints to delete.
    #[serde(default)]
    pub checkpoints: Vec<String>,
    /// Names of checkpoints to keep. Takes precedence over the other fields.
    #[serde(default)]
    pub keep: Vec<String>,
    /// Attempts with lower numbers have ended. Their checkpoints in neither list, such as partial
    /// ones, are deleted too. 0: delete none of these.
    #[serde(default)]
    pub attempts_over: u32,
}
