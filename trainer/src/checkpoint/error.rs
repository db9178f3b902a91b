//! Checkpoint errors, by the action they require.

use std::collections::BTreeMap;

use stoker_api::contract::CheckpointRef;
use stoker_storage::StorageError;

/// Error while saving or reading a checkpoint.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CheckpointError {
    /// The program failed to produce its state; a user error.
    #[error("cannot produce the state for checkpoint {name}: {reason}")]
    Contents {
        /// Name of the checkpoint.
        name: String,
        /// Error of the program.
        reason: String,
    },
    /// The checkpoint is incomplete or corrupt; use another.
    #[error("checkpoint {name} is incomplete or corrupt: {reason}")]
    Corrupt {
        /// Name of the checkpoint, or its directory.
        name: String,
        /// Affected file, and what was expected of it.
        reason: String,
    },
    /// Another version of Stoker wrote the checkpoint, which may be intact.
    #[error("checkpoint {name}: {reason}")]
    Format {
        /// Name of the checkpoint.
        name: String,
        /// Format of the checkpoint, the formats that this version reads, and a remedy.
        reason: String,
    },
    /// The local directory of the checkpoint does not exist.
    #[error("checkpoint directory {path} not found; set the directory that contains manifest.json")]
    NotFound {
        /// Path of the directory.
        path: String,
    },
    /// The trial is a copy, and the checkpoint of its source is missing or corrupt. A copy must not
    /// start from scratch.
    #[error(
        "cannot start from checkpoint {name} of {trial_path}, which this trial copies: {reason}"
    )]
    Source {
        /// Name of the checkpoint.
        name: String,
        /// Directory of the source below the storage root.
        trial_path: String,
        /// Affected file, and what was expected of it.
        reason: String,
    },
    /// The storage failed; the checkpoint may be intact.
    #[error("checkpoint {name}: {source}")]
    Storage {
        /// Name of the checkpoint.
        name: String,
        /// Error of the storage.
        source: StorageError,
    },
    /// The local disk failed.
    #[error("checkpoint {name}: {reason}")]
    Local {
        /// Name of the checkpoint.
        name: String,
        /// Affected file and the error.
        reason: String,
    },
    /// The runtime that saves and restores was shut down.
    #[error("checkpoint {name}: the runtime was shut down before the operation finished")]
    ShutDown {
        /// Name of the checkpoint.
        name: String,
    },
}

/// Refuses to train a copy from scratch, if its source's checkpoint is among those that were
/// refused.
///
/// # Errors
///
/// [`CheckpointError::Source`].
pub(crate) fn check_source(
    wanted: &[CheckpointRef],
    refused: &BTreeMap<String, String>,
) -> Result<(), CheckpointError> {
    let source = wanted
        .iter()
        .find_map(|checkpoint| Some((checkpoint.name.clone(), checkpoint.trial_path.clone()?)));
    let Some((name, trial_path)) = source else { return Ok(()) };
    let reason = refused.get(&name).cloned().unwrap_or_default();
    Err(CheckpointError::Source { name, trial_path, reason })
}
