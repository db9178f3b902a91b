//! Exit codes of a trainer process, and the resulting end of its attempt.
//!
//! | exit code | class | attempt end |
//! |---|---|---|
//! | 0 | `Completed` | `Completed` |
//! | 79 | `Preempted` | `Preempted`, with or without a stop request |
//! | 81 | `PeerFailed` | `Infrastructure` |
//! | 80 | `Infrastructure` | `Infrastructure` |
//! | any other, or a signal | `UserError` | `UserError` |
//! | 82 | `Unrecoverable` | `UserError`, without a restart |
//! | 78 | `InvalidHyperparameters` | `InvalidHyperparameters` |
//!
//! The rows are sorted by severity, the least severe first. The most severe class of a gang's ranks
//! determines the end of the attempt. Runners make exceptions only to `UserError`: a process that
//! the runner or a disruption terminated is not at fault.
//!
//! Runners that do not know code 82 restart the program, as after any other code.

use crate::contract::ExitCode;
use crate::trial::AttemptEnd;

/// Class of an exit code, ordered by severity.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum ExitClass {
    /// The program finished.
    Completed,
    /// The program saved a checkpoint and exited before it reached its length.
    Preempted,
    /// Another rank failed. If no rank has a more severe class, the ranks lost their connection.
    PeerFailed,
    /// The infrastructure failed: storage, network, node or runner.
    Infrastructure,
    /// The program failed.
    UserError,
    /// The program failed, and a restart would fail in the same way.
    Unrecoverable,
    /// The hyperparameters cannot be trained.
    InvalidHyperparameters,
}

impl ExitClass {
    /// Returns the class of an exit code. Unknown codes are [`UserError`](Self::UserError),
    /// including `128 + signal` for a process that a signal terminated.
    pub fn of_code(code: i32) -> Self {
        match ExitCode::from_code(code) {
            Some(ExitCode::Completed) => Self::Completed,
            Some(ExitCode::Preempted) => Self::Preempted,
            Some(ExitCode::PeerFailed) => Self::PeerFailed,
            Some(ExitCode::Infrastructure) => Self::Infrastructure,
            Some(ExitCode::UserError) | None => Self::UserError,
            Some(ExitCode::Unrecoverable) => Self::Unrecoverable,
            Some(ExitCode::InvalidHyperparameters) => Self::InvalidHyperparameters,
        }
    }

    /// Returns the end of an attempt whose most severe class is this one. Records have the same end
    /// for [`Unrecoverable`](Self::Unrecoverable) and [`UserError`](Self::UserError), so that
    /// earlier versions can read them.
    pub fn attempt_end(self) -> AttemptEnd {
        match self {
            Self::Completed => AttemptEnd::Completed,
            Self::Preempted => AttemptEnd::Preempted,
            Self::PeerFailed | Self::Infrastructure => AttemptEnd::Infrastructure,
            Self::UserError | Self::Unrecoverable => AttemptEnd::UserError,
            Self::InvalidHyperparameters => AttemptEnd::InvalidHyperparameters,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_exit_code_has_its_class() {
        let check = |code, class, end| {
            assert_eq!(ExitClass::of_code(code), class, "{code}");
            assert_eq!(class.attempt_end(), end, "{code}");
        };
        check(0, ExitClass::Completed, AttemptEnd::Completed);
        check(79, ExitClass::Preempted, AttemptEnd::Preempted);
        check(81, ExitClass::PeerFailed, AttemptEnd::Infrastructure);
        check(80, ExitClass::Infrastructure, AttemptEnd::Infrastructure);
        check(78, ExitClass::InvalidHyperparameters, AttemptEnd::InvalidHyperparameters);
        check(82, ExitClass::Unrecoverable, AttemptEnd::UserError);
        for code in [1, 2, 77, 83, 101, 127, 137, 143, 255, -1] {
            check(code, ExitClass::UserError, AttemptEnd::UserError);
        }
    }

    #[test]
    fn classes_are_ordered_by_severity() {
        let worst = |codes: &[i32]| codes.iter().map(|code| ExitClass::of_code(*code)).max();
        assert_eq!(worst(&[79, 81]), Some(ExitClass::PeerFailed));
        assert_eq!(worst(&[0, 81]), Some(ExitClass::PeerFailed));
        assert_eq!(worst(&[0, 79]), Some(ExitClass::Preempted));
        assert_eq!(worst(&[81, 80]), Some(ExitClass::Infrastructure));
        assert_eq!(worst(&[80, 1]), Some(ExitClass::UserError));
        assert_eq!(worst(&[82, 1, 81]), Some(ExitClass::Unrecoverable));
        assert_eq!(worst(&[82, 78]), Some(ExitClass::InvalidHyperparameters));
    }
}
