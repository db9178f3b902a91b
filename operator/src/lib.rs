//! Kubernetes operator: watches experiments, trials, inference jobs and pods, and applies the
//! plans of the engine. Trainers report to its report server.
//!
//! ```text
//!   watches -> caches -> queues -> reconcile: observe -> validate -> plan (engine) -> apply
//!   trainers -> report server -> Trial.status, InferenceJob.status
//! ```
//!
//! Every replica watches objects and serves reports. Only the leader runs the controllers.

pub mod cache;
pub mod context;
pub mod dispatch;
pub mod error;
mod event_queue;
pub mod experiment;
#[cfg(test)]
mod fixture;
pub mod job;
pub mod leader;
pub mod metrics;
pub mod namespaces;
pub mod node;
pub mod objects;
pub mod options;
mod patch;
mod pod;
pub mod queue;
mod records;
pub mod report_server;
pub mod searchers;
pub mod serve;
pub(crate) mod storage;
pub mod tasks;
pub mod trial;
pub mod user_resources;
