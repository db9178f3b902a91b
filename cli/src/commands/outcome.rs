//! Exit codes and asynchronous runs of commands.

use std::future::Future;

use crate::failure::Failure;

/// Maps success to exit code 0.
pub(crate) fn done(result: Result<(), Failure>) -> Result<u8, Failure> {
    result.map(|()| 0)
}

/// Runs `future` to completion on a single-threaded runtime.
pub(crate) fn block_on<T>(future: impl Future<Output = Result<T, Failure>>) -> Result<T, Failure> {
    tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|error| Failure::System(format!("cannot start the async runtime: {error}")))?
        .block_on(future)
}
