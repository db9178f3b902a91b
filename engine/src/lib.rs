//! Every decision, pure: which trials there are, how long each trains, when it restarts and what is
//! kept.
//!
//! ```text
//!   recorded facts -> search: Event -> Action: Create, Continue, Stop, Shutdown
//!                  -> experiment: grants, creates, stops, status
//!   one record     -> trial: start, wait, close; report -> record; record -> directive
//! ```
//!
//! The crate decides and never does. It opens no socket, reads no clock and draws no ambient
//! randomness: the same seed and the same facts give the same answers on every machine, whichever
//! runner asks.
//!
//! # Reading order
//!
//! 1. [`search`]: which trials there are, by events and actions.
//! 2. [`trial`]: one trial's record: attempts, restarts, reports, directives.
//! 3. [`gang`]: one trial's pods: their ends, and what follows.
//! 4. [`experiment`]: the fold of recorded facts into a search, and what follows from it.
//! 5. [`retention`]: which checkpoints are kept.
//! 6. [`preview`]: what a search would do.
//! 7. [`devices`]: which local process may use which GPU.
//!
//! # Invariants
//!
//! - **Every created trial is closed exactly once**, and `Shutdown` follows the last close.
//! - **Repeats are harmless.** An event handled twice, or a report recorded twice, changes nothing
//!   more.
//! - **A plan may be cut anywhere.** Planning again after any first part of a plan was applied
//!   gives the rest.

pub mod search;
pub mod trial;

pub mod experiment;
pub mod gang;

pub mod inference;

pub mod devices;
pub mod preview;
pub mod retention;

#[cfg(test)]
mod fixture;
#[cfg(test)]
mod properties;
