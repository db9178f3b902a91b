//! Errors, split by how the process ends.

use std::any::Any;
use std::error::Error as StdError;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

use stoker_api::contract::ExitCode;
use stoker_storage::StorageError;

use crate::checkpoint::CheckpointError;

/// Any error; `?` takes what user code returns.
pub type Error = Box<dyn StdError + Send + Sync>;
/// A result with any error.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// These hyperparameters cannot be trained: the search closes the trial and draws another.
#[derive(Clone, Debug, thiserror::Error)]
#[error("invalid hyperparameters: {0}")]
pub struct InvalidHyperparameters(
    /// Which one, its value and the rule.
    pub String,
);

/// Leaves user code with an error where none can be returned: a step, a batcher, a module's `forward`.
/// [`fit`](crate::Context::fit), `evaluate` and `predict` return it, and so a search draws others where it is
/// [`InvalidHyperparameters`]; raised in a loop of one's own it ends what [`run`](crate::run) or [`main`](crate::main)
/// was given. A thread that the program has started by itself ends as by a panic, without a word.
pub fn raise(error: impl Into<Error>) -> ! {
    // Unlike a panic it prints nothing: the error is told once, by who catches it.
    resume_unwind(Box::new(Raised(error.into())))
}

/// What [`raise`] unwinds with.
struct Raised(Error);

/// The error that user code has unwound with: the one raised, or else the panic's message in the words of `told`.
pub(crate) fn caught(panic: Box<dyn Any + Send>, told: impl FnOnce(&str) -> String) -> Error {
    match panic.downcast::<Raised>() {
        Ok(raised) => raised.0,
        Err(panic) => told(&panic_message(&*panic)).into(),
    }
}

/// Gives back what was raised in `act`; a panic goes on.
pub(crate) fn unraised<T>(act: impl FnOnce() -> Result<T>) -> Result<T> {
    catch_unwind(AssertUnwindSafe(act)).unwrap_or_else(|panic| match panic.downcast::<Raised>() {
        Ok(raised) => Err(raised.0),
        Err(panic) => resume_unwind(panic),
    })
}

/// What a panic said.
fn panic_message(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(ToString::to_string);
    text.or_else(|| panic.downcast_ref::<String>().cloned())
        .unwrap_or_else(|| "a panic without a text".into())
}

/// An input that cannot be put through a model, or a job that cannot be run: trying again would not help.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{0}")]
pub struct InvalidInput(
    /// Which file and row, what is wrong with it, and what to do.
    pub String,
);

/// Training ended before its length was reached, by no error: what the process does next is exit.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{why}")]
pub struct Interrupted {
    /// The exit code.
    pub code: ExitCode,
    /// Whether the runner has given this attempt up, so that nothing is written or sent any more.
    pub fenced: bool,
    /// What asked for it.
    pub why: String,
}

/// What is under the program failed.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{0}")]
pub(crate) struct Infrastructure(pub(crate) String);

/// Another rank is gone; says nothing of this one.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{0}")]
pub(crate) struct PeerFailed(pub(crate) String);

/// How a process with this error ends. Looks through the error's sources, so that context may be
/// added to an error without changing what it means.
pub(crate) fn exit_code(error: &(dyn StdError + 'static)) -> ExitCode {
    let mut next = Some(error);
    while let Some(error) = next {
        if error.is::<InvalidHyperparameters>() || error.is::<InvalidInput>() {
            return ExitCode::InvalidHyperparameters;
        }
        if let Some(interrupted) = error.downcast_ref::<Interrupted>() {
            return interrupted.code;
        }
        if error.is::<PeerFailed>() {
            return ExitCode::PeerFailed;
        }
        if let Some(CheckpointError::Make { .. }) = error.downcast_ref() {
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

/// An error with its causes: reqwest's own text names the least of them.
pub(crate) fn chain(error: &dyn std::error::Error) -> String {
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
    fn each_error_has_the_exit_code_of_what_to_do_next() {
        check("a plain text", ExitCode::UserError);
        check(InvalidHyperparameters("x".into()), ExitCode::InvalidHyperparameters);
        check(InvalidInput("x".into()), ExitCode::InvalidHyperparameters);
        check(Infrastructure("x".into()), ExitCode::Infrastructure);
        check(PeerFailed("x".into()), ExitCode::PeerFailed);
        let make = CheckpointError::Make { name: "a".into(), reason: "b".into() };
        check(make, ExitCode::UserError);
        let broken = CheckpointError::Broken { name: "a".into(), reason: "b".into() };
        check(broken, ExitCode::Infrastructure);
        let code = ExitCode::Preempted;
        check(Interrupted { code, fenced: false, why: "asked".into() }, code);
    }

    #[test]
    fn context_around_an_error_changes_nothing() {
        #[derive(Debug, thiserror::Error)]
        #[error("while building the model")]
        struct Outer(#[source] InvalidHyperparameters);
        check(Outer(InvalidHyperparameters("x".into())), ExitCode::InvalidHyperparameters);
    }
}
