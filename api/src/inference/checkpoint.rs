//! Selection of the checkpoint that provides the weights of an inference job.

use serde::{Deserialize, Serialize};

/// Checkpoint with the weights. Exactly one of `trial`, `folder` and `stored` must be set. The job
/// selects the checkpoint once, when it is planned, for all workers and restarts.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "crd", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase", default)]
pub struct CheckpointChoice {
    /// Name of a trial in the job's storage and namespace, such as `mnist-3`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub trial: Option<String>,
    /// Path of a checkpoint directory where the program runs, such as a downloaded checkpoint.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub folder: Option<String>,
    /// A trial in any storage.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stored: Option<StoredTrial>,
    /// Which of the trial's checkpoints to use. Default: `latest`.
    pub which: WhichCheckpoint,
    /// Name of the checkpoint to use instead of `which`, such as `000000000400-0`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
}

/// A trial in any storage.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "crd", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct StoredTrial {
    /// URL of the storage root.
    pub url: String,
    /// Endpoint of an S3-compatible server other than AWS.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub endpoint: Option<String>,
    /// Directory of the trial below the root, such as `default/mnist-0b3f9c1e/trials/3`.
    #[cfg_attr(feature = "crd", schemars(length(min = 1)))]
    pub trial_path: String,
}

/// Which of a trial's checkpoints to use.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "crd", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub enum WhichCheckpoint {
    /// The latest checkpoint.
    #[default]
    Latest,
    /// The checkpoint with the smallest searched metric, among those saved at a validation.
    SmallestMetric,
    /// The checkpoint with the largest searched metric, among those saved at a validation.
    LargestMetric,
}
