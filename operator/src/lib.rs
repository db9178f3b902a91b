//! The edge to Kubernetes: watches experiments, trials and pods, has the engine decide, and applies
//! what it decided. Trainers report to its door.
//!
//! ```text
//!   watches -> caches -> queues -> reconcile: observe -> validate -> plan (engine) -> apply
//!   trainers -> door -> Trial.status
//! ```
//!
//! Every replica watches and serves the door; the controllers run where the lease is held.

pub mod cache;
pub mod door;
pub mod error;
pub mod experiment;
pub mod leader;
pub mod metrics;
pub mod objects;
pub mod options;
pub mod queue;
pub mod serve;
pub mod trial;
pub mod world;
