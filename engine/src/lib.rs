//! Pure decision logic: which trials to create, how long each trains, when it restarts, and which
//! checkpoints are kept.
//!
//! ```text
//!   recorded facts -> search: Event -> Step: create, continue, pause, stop, finish
//!                  -> experiment: writes, desired states, status
//!   one record     -> trial: start, wait, close; report -> record; record -> directive
//! ```
//!
//! The crate decides and never acts. It opens no socket, reads no clock and uses no ambient
//! randomness. The same seed and the same facts give the same answers on every machine and for
//! every runner.
//!
//! # Reading order
//!
//! 1. [`search`]: search methods, as events and steps.
//! 2. [`trial`]: record of one trial: attempts, restarts, reports, directives.
//! 3. [`gang`]: pods of one trial: how they exit, and what follows.
//! 4. [`experiment`]: the search in step with its record, and what follows from it.
//! 5. [`inference`]: processes and pods of an inference job.
//! 6. [`retention`]: which checkpoints are kept.
//! 7. [`preview`]: simulation of a search.
//! 8. [`devices`]: which local process may use which GPU.
//!
//! # Invariants
//!
//! - **Every created trial is closed exactly once**, and no search goes on for ever.
//! - **Decisions are recorded.** A search that is rebuilt from its record equals the live one.
//! - **Repeats are harmless.** Handling an event twice, or recording a report twice, has no further
//!   effect.
//! - **Writes may be cut anywhere.** After any prefix of a turn's writes, a rebuilt search returns
//!   the rest.

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
