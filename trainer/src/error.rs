//! Errors, and the exit code of a process that ends with each of them.

use std::any::Any;
use std::error::Error as StdError;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

use stoker_api::contract::ExitCode;
use stoker_storage::StorageError;

use crate::checkpoint::CheckpointError;
use crate::datasets::DataError;

/// Any error. The `?` operator converts errors of user code into it.
pub type Error = Box<dyn StdError + Send + Sync>;
/// Result with any error.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Error for hyperparameters that cannot be trained. The trial ends, and the search may sample
/// others instead.
#[derive(Clone, Debug, thiserror::Error)]
#[error("invalid hyperparameters: {0}")]
pub struct InvalidHyperparameters(
    /// Name, value and violated rule of the hyperparameter.
    pub String,
);

/// Raises an error where none can be returned: in a step, a batcher or a module's `forward`.
///
/// [`fit`](crate::Context::fit), `evaluate` and `predict` catch the error and return it. Elsewhere,
/// such as in a custom training loop, the error ends the program passed to [`run`](crate::run) or
/// [`main`](crate::main). In both cases, [`InvalidHyperparameters`] has the same effect as if it
/// were returned. In a thread started by the program, the error ends that thread like a panic, but
/// prints nothing.
pub fn raise(error: impl Into<Error>) -> ! {
    // Unlike a panic, this prints nothing: the code that catches the error reports it once.
    resume_unwind(Box::new(Raised(error.into())))
}

/// Payload of the unwind that [`raise`] starts.
struct Raised(Error);

/// Converts the payload of an unwind of user code to an error: the error passed to [`raise`], or
/// the panic's message formatted by `describe`.
pub(crate) fn error_from_unwind(
    panic: Box<dyn Any + Send>,
    describe: impl FnOnce(&str) -> String,
) -> Error {
    match panic.downcast::<Raised>() {
        Ok(raised) => raised.0,
        Err(panic) => describe(&panic_message(&*panic)).into(),
    }
}

/// Calls `act`. Returns its result, or the error that it raises. Panics propagate.
pub(crate) fn catch_raised<T>(act: impl FnOnce() -> Result<T>) -> Result<T> {
    catch_unwind(AssertUnwindSafe(act)).unwrap_or_else(|panic| match panic.downcast::<Raised>() {
        Ok(raised) => Err(raised.0),
        Err(panic) => resume_unwind(panic),
    })
}

/// Returns the message of a panic.
fn panic_message(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(ToString::to_string);
    text.or_else(|| panic.downcast_ref::<String>().cloned())
        .unwrap_or_else(|| "no panic message".into())
}

/// Error for an input that the model cannot process, or for a job that cannot run. A retry would
/// not help.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{0}")]
pub struct InvalidInput(
    /// File and row, the problem, and the remedy.
    pub String,
);

/// Error that ends a program before its work is complete, although nothing failed. A program that
/// gets it must return it.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{why}")]
pub struct Interrupted {
    /// Exit code of the process.
    pub code: ExitCode,
    /// Whether the runner has ended this attempt. If so, the program must not write or send
    /// anything more.
    pub fenced: bool,
    /// Reason for the stop.
    pub why: String,
}

/// Failure of the infrastructure: storage, network or runner.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{0}")]
pub(crate) struct Infrastructure(pub(crate) String);

/// Failure of the user's program that a restart would repeat.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{0}")]
pub(crate) struct Unrecoverable(pub(crate) String);

/// Failure of another rank. This rank is not at fault.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{0}")]
pub(crate) struct PeerFailed(pub(crate) String);

/// Returns the exit code of a process that ends with this error. Searches the error's sources, so
/// callers may wrap an error without changing its exit code.
pub(crate) fn exit_code(error: &(dyn StdError + 'static)) -> ExitCode {
    let mut next = Some(error);
    while let Some(error) = next {
        if error.is::<InvalidHyperparameters>() || error.is::<InvalidInput>() {
            return ExitCode::InvalidHyperparameters;
        }
        if let Some(interrupted) = error.downcast_ref::<Interrupted>() {
            return interrupted.code;
        }
        if error.is::<Unrecoverable>() {
            return ExitCode::Unrecoverable;
        }
        if error.is::<PeerFailed>() {
            return ExitCode::PeerFailed;
        }
        if let Some(CheckpointError::Contents { .. }) = error.downcast_ref() {
            return ExitCode::UserError;
        }
        // The storage has answered, so this is not an outage.
        if error.downcast_ref().is_some_and(DataError::is_missing) {
            return ExitCode::UserError;
        }
        if error.is::<CheckpointError>()
            || error.is::<StorageError>()
            || error.is::<Infrastructure>()
        {
            return ExitCode::Infrastructure;
        }
        next = error.source();
    }
    ExitCode::UserError
}

/// Joins an error with its sources: reqwest's own text contains only the outermost cause.
pub(crate) fn with_sources(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(error) = next {
        text = format!("{text}: {error}");
        next = error.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(error: impl Into<Error>, expected: ExitCode) {
        assert_eq!(exit_code(&*error.into()), expected);
    }

    #[test]
    fn each_error_has_its_exit_code() {
        check("a plain text", ExitCode::UserError);
        check(InvalidHyperparameters("x".into()), ExitCode::InvalidHyperparameters);
        check(InvalidInput("x".into()), ExitCode::InvalidHyperparameters);
        check(Infrastructure("x".into()), ExitCode::Infrastructure);
        check(PeerFailed("x".into()), ExitCode::PeerFailed);
        check(Unrecoverable("x".into()), ExitCode::Unrecoverable);
        let contents = CheckpointError::Contents { name: "a".into(), reason: "b".into() };
        check(contents, ExitCode::UserError);
        let corrupt = CheckpointError::Corrupt { name: "a".into(), reason: "b".into() };
        check(corrupt, ExitCode::Infrastructure);
        let source = StorageError::BufferFull { url: "s3://b".into(), bytes: 9 };
        check(source.clone(), ExitCode::Infrastructure);
        check(DataError::Storage { url: "s3://b/a".into(), source }, ExitCode::Infrastructure);
        let missing = StorageError::NotFound {
            url: "s3://b".into(),
            path: "a".into(),
            reason: "no such key".into(),
        };
        check(missing.clone(), ExitCode::Infrastructure);
        let missing = DataError::Storage { url: "s3://b/a".into(), source: missing };
        check(missing, ExitCode::UserError);
        let code = ExitCode::Preempted;
        check(Interrupted { code, fenced: false, why: "stopped".into() }, code);
    }

    #[test]
    fn wrapped_error_keeps_its_exit_code() {
        #[derive(Debug, thiserror::Error)]
        #[error("while building the model")]
        struct Outer(#[source] InvalidHyperparameters);
        check(Outer(InvalidHyperparameters("x".into())), ExitCode::InvalidHyperparameters);
    }
}
