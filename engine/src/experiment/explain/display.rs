//! The state of a trial, as commands and the web page show it.

use stoker_api::experiment::Phase;

use super::State;
use crate::trial::{TrialRecord, live_attempt};

/// State of a trial from its record and the search, for users.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum DisplayState {
    /// It has trained to the end.
    Completed,
    /// Its programs run.
    Running,
    /// The search has decided nothing, or no attempt runs yet.
    Waiting,
    /// The search wants it to train, and it waits for a start.
    Queued,
    /// The search has not begun.
    Pending,
    /// The search or the user has paused it.
    Paused,
    /// The search has stopped it.
    Stopped,
    /// Its program has ended the training early.
    StoppedEarly,
    /// Its program failed too often.
    Failed,
    /// Its hyperparameters are invalid.
    Invalid,
    /// The user has ended it.
    Cancelled,
    /// Its object was deleted.
    Deleted,
}

impl DisplayState {
    /// All states in the order in which they are listed.
    pub const ALL: [Self; 12] = [
        Self::Completed,
        Self::Running,
        Self::Waiting,
        Self::Queued,
        Self::Pending,
        Self::Paused,
        Self::Stopped,
        Self::StoppedEarly,
        Self::Failed,
        Self::Invalid,
        Self::Cancelled,
        Self::Deleted,
    ];

    /// Returns the state of a trial. `state` is that in the search, if there is an explanation.
    /// Without a runner (`has_runner`), no program runs.
    pub fn of(trial: &TrialRecord, state: Option<State>, has_runner: bool) -> Self {
        match (state, trial.status.phase) {
            (Some(State::Training) | None, Phase::Running) if live_attempt(trial).is_some() => {
                // The programs of a local run end with its runner.
                if has_runner { Self::Running } else { Self::Queued }
            }
            (Some(State::Training), _) => Self::Queued,
            (Some(State::Waiting), _) | (None, Phase::Running) => Self::Waiting,
            (Some(State::Paused), _) | (None, Phase::Paused) => Self::Paused,
            (Some(State::Stopped), _) => Self::Stopped,
            (Some(State::EndedEarly), _) => Self::StoppedEarly,
            (Some(State::Completed), _) | (None, Phase::Completed) => Self::Completed,
            (Some(State::Failed), _) | (None, Phase::Failed) => Self::Failed,
            (Some(State::Invalid), _) => Self::Invalid,
            (Some(State::Cancelled), _) | (None, Phase::Cancelled) => Self::Cancelled,
            (Some(State::Deleted), _) => Self::Deleted,
            (None, Phase::Pending) => Self::Pending,
        }
    }

    /// Returns the state in one or two words.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Completed => "Completed",
            Self::Running => "Running",
            Self::Waiting => "Waiting",
            Self::Queued => "Queued",
            Self::Pending => "Pending",
            Self::Paused => "Paused",
            Self::Stopped => "Stopped",
            Self::StoppedEarly => "Stopped early",
            Self::Failed => "Failed",
            Self::Invalid => "Invalid",
            Self::Cancelled => "Cancelled",
            Self::Deleted => "Deleted",
        }
    }
}

#[cfg(test)]
mod tests {
    use stoker_api::trial::Attempt;

    use super::*;
    use crate::fixture::plain_record;

    #[test]
    fn only_live_attempts_with_a_runner_run() {
        let mut trial = plain_record(0);
        let training = Some(State::Training);
        assert_eq!(DisplayState::of(&trial, training, true), DisplayState::Queued);
        trial.status.phase = Phase::Running;
        assert_eq!(DisplayState::of(&trial, training, true), DisplayState::Queued);
        trial.status.attempts.push(Attempt::default());
        assert_eq!(DisplayState::of(&trial, training, true), DisplayState::Running);
        assert_eq!(DisplayState::of(&trial, training, false), DisplayState::Queued);
        assert_eq!(DisplayState::of(&trial, None, true), DisplayState::Running);
        assert_eq!(DisplayState::of(&trial, Some(State::Paused), true), DisplayState::Paused);
    }
}
