//! Why a checkpoint could not be saved or read, split by what to do next.

use stoker_storage::StorageError;

/// Why a checkpoint could not be saved or read.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CheckpointError {
    /// The program could not say what its state is: an error of the user's program.
    #[error("the state for checkpoint {name} could not be written: {reason}")]
    Make {
        /// The checkpoint.
        name: String,
        /// What the program said.
        reason: String,
    },
    /// The files are no whole checkpoint: use another.
    #[error("checkpoint {name} is not whole: {reason}")]
    Broken {
        /// The checkpoint or its folder.
        name: String,
        /// Which file, and what was expected of it.
        reason: String,
    },
    /// The storage failed, which says nothing of the checkpoint.
    #[error("checkpoint {name}: {source}")]
    Storage {
        /// The checkpoint.
        name: String,
        /// What failed.
        source: StorageError,
    },
    /// This machine's disk failed.
    #[error("checkpoint {name}: {reason}")]
    Local {
        /// The checkpoint.
        name: String,
        /// Which file, and what failed.
        reason: String,
    },
    /// The runtime that saves and restores was shut down.
    #[error("checkpoint {name}: the runtime was shut down before it was done")]
    ShutDown {
        /// The checkpoint.
        name: String,
    },
}
