//! Checkpoints of trials, and copies that start from them.

use serde::{Deserialize, Serialize};

use super::is_false;

/// An existing checkpoint: its manifest is written.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "crd", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct CheckpointRecord {
    /// Directory name of the checkpoint below `checkpoints/`: batches (12 digits) and attempt.
    #[cfg_attr(feature = "crd", schemars(extend("maxLength" = 63)))]
    pub name: String,
    /// Number of global batches trained.
    pub batches: u64,
    /// Searched metric of a validation at the same batch, as a decimal string.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "crd", schemars(extend("maxLength" = 32)))]
    pub metric: Option<String>,
    /// SHA-256 of the manifest, in hex.
    #[cfg_attr(feature = "crd", schemars(extend("maxLength" = 64)))]
    pub manifest_sha256: String,
    /// Total size of the files in bytes.
    pub bytes: u64,
    /// Whether the latest attempt that tried to start from this checkpoint refused it: a file was
    /// missing or corrupt, or the attempt could not read its format. Other checkpoints are then
    /// preferred, but this one is not deleted for that reason.
    #[serde(default, skip_serializing_if = "is_false")]
    pub refused: bool,
}

/// A trial that another one copies: where the weights of the copy come from.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "crd", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct TrialSource {
    /// Index of the source in the same experiment.
    pub trial: u32,
    /// Length that the source had trained, in the trial's unit. The copy continues from there.
    pub units: u64,
    /// Name of the source's checkpoint at this length. Unset: the source had none, and the copy
    /// fails.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "crd", schemars(extend("maxLength" = 63)))]
    pub checkpoint: Option<String>,
    /// SHA-256 of the checkpoint's manifest, in hex.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "crd", schemars(extend("maxLength" = 64)))]
    pub manifest_sha256: Option<String>,
}

/// The checkpoint of a result.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "crd", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct ResultCheckpoint {
    /// Directory name of the checkpoint below `checkpoints/`.
    #[cfg_attr(feature = "crd", schemars(extend("maxLength" = 63)))]
    pub name: String,
    /// SHA-256 of the manifest, in hex.
    #[cfg_attr(feature = "crd", schemars(extend("maxLength" = 64)))]
    pub manifest_sha256: String,
}
