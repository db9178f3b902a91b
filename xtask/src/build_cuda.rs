//! Builds the stock trainer with the feature `cuda`, using a script that fetches LLVM.

use std::process::Command;

use crate::repository;

/// Why the build failed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum BuildCudaError {
    /// The script could not be started.
    #[error("cannot start scripts/build-cuda: {0}")]
    Start(#[from] std::io::Error),
    /// The script failed and printed the reason.
    #[error("scripts/build-cuda failed; the output above has the reason")]
    Failed,
}

/// Builds the trainer and prints its path.
///
/// # Errors
///
/// LLVM cannot be fetched, or the build fails.
pub(crate) fn run(arguments: &[String]) -> Result<(), BuildCudaError> {
    let status = Command::new(repository().join("scripts/build-cuda")).args(arguments).status()?;
    if status.success() { Ok(()) } else { Err(BuildCudaError::Failed) }
}
