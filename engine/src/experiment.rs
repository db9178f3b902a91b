//! An experiment as a whole: its search, the desired states of its trials, and its status.
//!
//! 1. [`Ledger`]: the search, in step with its record.
//! 2. [`desired_states`]: the desired states of trials, from the search and the user.
//! 3. [`Summary`]: counts, progress and the best trial.
//! 4. [`explain`]: reasons for all decisions, as data and sentences.
//! 5. [`importance`]: the share of the results' variance that each hyperparameter explains.
//! 6. [`prior_trials`]: trials of earlier experiments from which a search learns.
//! 7. [`conditions`], [`refusal`]: conditions and messages for users.
//! 8. [`validate_recorded`]: validation despite an invalid edit.

pub mod explain;
pub mod importance;

mod ledger;
mod prior;
mod recorded;
mod refusal;
mod steer;
mod summary;
mod validity;

pub use crate::trial::TrialRecord;
pub use ledger::{
    Asked, EDIT_REFUSED, LOG_FULL, Ledger, PendingFact, Record, Unreadable, Write, append,
    full_log, is_edited, is_requested, recorded_settings, refused_deletions, refused_edit,
};
pub use prior::{PriorExperiment, prior_trials};
pub use refusal::{
    ADMISSION_REFUSED, POD_INVALID, Refusal, TRIAL_INVALID, failed, malformed_pod, malformed_trial,
    refusal, set_refusal, set_unreadable,
};
pub use steer::{
    DesiredStates, Request, conditions, desired_states, kills, requested, set_phase,
    start_position, stops, without_search,
};
pub use summary::{Summary, best_metric};
pub use validity::{validate_recorded, without_edit};

#[cfg(test)]
mod tests;
