//! Why a command ends early, split by its exit code.

use std::path::Path;

use stoker_storage::StorageError;

/// Why a command could not do what it was asked to.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Failure {
    /// What the user gave is wrong: exit code 2.
    #[error("{0}")]
    Input(String),
    /// Something under us failed: exit code 1.
    #[error("{0}")]
    System(String),
    /// The storage failed: exit code 1.
    #[error(transparent)]
    Storage(#[from] StorageError),
}

impl Failure {
    /// What a file operation failed with.
    pub(crate) fn file(what: &str, path: &Path, error: impl std::fmt::Display) -> Self {
        Self::System(format!("cannot {what} {}: {error}", path.display()))
    }

    /// The exit code of the command.
    pub(crate) fn code(&self) -> u8 {
        match self {
            Self::Input(_) => 2,
            Self::System(_) | Self::Storage(_) => 1,
        }
    }
}
