//! The edge to Kubernetes: watches experiments, trials, inference jobs and pods, has the engine decide, and applies
//! what it decided. Trainers report to its door.
//!
//! ```text
//!   watches -> caches -> queues -> reconcile: observe -> validate -> plan (engine) -> apply
//!   trainers -> door -> Trial.status, InferenceJob.status
//! ```
//!
//! Every replica watches and serves the door; the controllers run where the lease is held.

pub mod cache;
pub mod declared;
pub mod door;
pub mod error;
pub mod experiment;
pub mod job;
pub mod leader;
pub mod metrics;
pub mod objects;
pub mod options;
mod patch;
mod pod;
pub mod queue;
pub mod serve;
pub(crate) mod storage;
pub mod tasks;
pub mod trial;
pub mod world;
