//! Commands on experiments and inference jobs of a cluster, through the Kubernetes API and their
//! storage.
//!
//! ```text
//!  kubeconfig -- [connect] --> API server -- objects, pods, events --> text or JSON
//!  program's files -- [archive] --> storage -- logs, metrics, checkpoints --> text, files
//! ```
//!
//! These commands make no decisions: they write the desired state to the spec, and the operator
//! acts on it.
//!
//! # Reading order
//!
//! 1. [`connect`] and [`request`]: select the cluster, limit requests and translate their errors.
//! 2. [`create`] and [`archive`]: create an experiment or a job from a file and a directory.
//!    [`resource`] is the common interface of experiments and jobs.
//! 3. [`experiment`], [`trial`], [`job`], [`wait`]: show progress and change the desired state.
//! 4. [`logs`], [`metrics`], [`checkpoint`], [`storage`]: read logs, metrics and checkpoints.
//! 5. [`events`], [`text`], [`version`].

pub(crate) mod archive;
pub(crate) mod best_trial;
pub(crate) mod checkpoint;
pub(crate) mod connect;
pub(crate) mod create;
mod events;
pub(crate) mod experiment;
pub(crate) mod job;
pub(crate) mod logs;
pub(crate) mod metrics;
mod proxy;
mod request;
pub(crate) mod resource;
pub(crate) mod storage;
pub(crate) mod text;
pub(crate) mod trial;
pub(crate) mod version;
pub(crate) mod wait;
