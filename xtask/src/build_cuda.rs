//! Builds the stock trainer with the feature `cuda`, by a script that brings the LLVM it needs.

use std::process::Command;

use crate::repository;

/// Why there is no program.
#[derive(Debug, thiserror::Error)]
pub(crate) enum BuildCudaError {
    /// The script could not be started.
    #[error("scripts/build-cuda cannot be started: {0}")]
    Start(#[from] std::io::Error),
    /// The script failed, and has said why.
    #[error("scripts/build-cuda failed; it says why above")]
    Failed,
}

/// Builds, and prints the program's path.
///
/// # Errors
///
/// LLVM cannot be fetched, or the build fails.
pub(crate) fn run(arguments: &[String]) -> Result<(), BuildCudaError> {
    let status = Command::new(repository().join("scripts/build-cuda")).args(arguments).status()?;
    if status.success() { Ok(()) } else { Err(BuildCudaError::Failed) }
}
