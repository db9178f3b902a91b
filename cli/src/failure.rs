//! Errors of commands, grouped by exit code.

use std::path::Path;

use stoker_storage::StorageError;

/// Error of a command.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Failure {
    /// Invalid user input: exit code 2.
    #[error("{0}")]
    Input(String),
    /// The infrastructure failed: exit code 1.
    #[error("{0}")]
    System(String),
    /// The storage failed: exit code 1.
    #[error(transparent)]
    Storage(#[from] StorageError),
}

impl Failure {
    /// Returns `cannot {what} {path}: {error}`.
    pub(crate) fn file(what: &str, path: &Path, error: impl std::fmt::Display) -> Self {
        Self::System(format!("cannot {what} {}: {error}", path.display()))
    }

    /// Returns the exit code of the command.
    pub(crate) fn code(&self) -> u8 {
        match self {
            Self::Input(_) => 2,
            Self::System(_) | Self::Storage(_) => 1,
        }
    }
}
