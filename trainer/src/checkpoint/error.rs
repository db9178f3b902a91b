//! Checkpoint errors, by the action they require.

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
