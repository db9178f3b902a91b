//! An experiment as a whole: its search, the desired states of its trials, and its status.
//!
//! 1. [`Ledger`]: the search, in step with its record.
//! 2. [`wishes`]: the desired states of trials, from the search and the user.
//! 3. [`Summary`]: counts, progress and the best trial.
//! 4. [`conditions`], [`refusal`]: what users are told.

mod ledger;
mod recorded;
mod refusal;
mod steer;
mod summary;

pub use crate::trial::TrialRecord;
pub use ledger::{Ledger, PendingFact, Record, Unreadable, Write};
pub use refusal::{POD_INVALID, Refusal, TRIAL_INVALID, failed, refusal, set_refusal};
pub use steer::{Request, Wishes, conditions, kills, set_phase, start_position, wishes};
pub use summary::Summary;

#[cfg(test)]
mod tests;
