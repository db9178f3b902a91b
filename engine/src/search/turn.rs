//! Events that a search reacts to, and the steps that it decides.

use serde_json::Value;
use stoker_api::decisions::AnsweredEvent;
use stoker_api::trial::CloseCause;

use super::rung::Loss;

/// Something that a search must react to.
#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    /// The search begins. Always the first event.
    Began,
    /// A trial has trained to its granted length.
    Result {
        /// Index of the trial.
        trial: u32,
        /// Granted length.
        units: u64,
        /// Searched metric.
        loss: Loss,
        /// Other objectives.
        others: Vec<Loss>,
    },
    /// A trial has ended by itself or by the user. The search did not stop it.
    Closed {
        /// Index of the trial.
        trial: u32,
        /// Cause of the end.
        cause: CloseCause,
    },
    /// A trial was deleted. Its results leave every comparison.
    Deleted {
        /// Index of the trial.
        trial: u32,
    },
    /// The user has edited the experiment. A finished search continues.
    Edited(Edit),
    /// A limit is reached. The search ends.
    LimitReached,
    /// The external searcher answered.
    Answered(AnsweredEvent),
    /// The user has asked to reopen trials. A finished search continues.
    Reopened,
}

/// New numbers of a search.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Edit {
    /// Total number of trials, if the method has one.
    pub max_trials: Option<u32>,
    /// Maximum number of active trials, if the method has one; 0 as in the method.
    pub max_concurrent: Option<u32>,
    /// Full length of a trial, not less than before.
    pub units_max: u64,
    /// Whether a limit that was reached still ends the search.
    pub is_limited: bool,
    /// Number of trials of each bracket, without those with invalid hyperparameters. They are
    /// recorded because some of them may be deleted later. Empty in records of earlier versions.
    pub bracket_trials: Vec<u32>,
}

impl Event {
    /// Returns the trial that an event is about.
    pub fn trial(&self) -> Option<u32> {
        match self {
            Self::Began
            | Self::Edited(_)
            | Self::LimitReached
            | Self::Answered(_)
            | Self::Reopened => None,
            Self::Result { trial, .. } | Self::Closed { trial, .. } | Self::Deleted { trial } => {
                Some(*trial)
            }
        }
    }
}

/// Trial whose weights and hyperparameters another trial starts from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Source {
    /// Index of the trial.
    pub trial: u32,
    /// Length at which its checkpoint was saved.
    pub units: u64,
}

/// One decision of a search. Steps are recorded, and a rebuilt search takes them from the record
/// instead of deciding again.
#[derive(Clone, Debug, PartialEq)]
pub enum Step {
    /// Create the trial with the next index.
    Create {
        /// Bracket or generation.
        group: u32,
        /// Granted length.
        units: u64,
        /// Trial to copy.
        source: Option<Source>,
        /// Hyperparameters, if the method determines them instead of the sampler.
        hyperparameters: Option<Value>,
    },
    /// Train an open trial to this length.
    Continue {
        /// Index of the trial.
        trial: u32,
        /// New granted length.
        units: u64,
    },
    /// Promote a trial that has ended before this length. It takes its place in the next rung, with
    /// an infinite loss, but does not train.
    PromoteClosed {
        /// Index of the trial.
        trial: u32,
        /// Length of the next rung.
        units: u64,
    },
    /// Release the GPUs of a trial, which may continue later.
    Pause {
        /// Index of the trial.
        trial: u32,
    },
    /// End a trial: it has the full length, or the search does not need it any more.
    Stop {
        /// Index of the trial.
        trial: u32,
    },
    /// End all paused trials of a group that have this length.
    StopPaused {
        /// Bracket or generation.
        group: u32,
        /// Length that the trials have.
        units: u64,
        /// Trials of the group that stay paused.
        except: Vec<u32>,
    },
    /// End all open trials.
    StopAll,
    /// Continue trials that have ended, at their granted lengths. Trials with a result there are
    /// paused, and the others train.
    Reopen {
        /// Indexes of the trials.
        trials: Vec<u32>,
    },
    /// End the search. No other step follows.
    Finish,
}
