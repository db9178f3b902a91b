//! Experiments and inference jobs on a cluster: what `stoker` asks of the Kubernetes API and of their
//! storage.
//!
//! ```text
//!  kubeconfig -- [connect] --> API server -- Experiment, Trial, InferenceJob, pods, events --> text or JSON
//!  program's files -- [archive] --> storage <-- logs, checkpoints
//! ```
//!
//! Nothing is decided here: a state that is asked for is written into a spec, and the operator does
//! the rest.
//!
//! # Reading order
//!
//! 1. [`connect`]: which cluster, and what its answers mean.
//! 2. [`create`] and [`archive`]: a file and a folder become an experiment or a job, which [`kind`] has
//!    in common.
//! 3. [`experiment`], [`trial`], [`job`], [`wait`]: how it is going, and what is wanted of it.
//! 4. [`logs`], [`checkpoint`], [`storage`]: what it printed and kept.
//! 5. [`events`], [`text`], [`version`].

pub(crate) mod archive;
pub(crate) mod checkpoint;
pub(crate) mod connect;
pub(crate) mod create;
mod events;
pub(crate) mod experiment;
pub(crate) mod job;
pub(crate) mod kind;
pub(crate) mod logs;
mod proxy;
pub(crate) mod storage;
pub(crate) mod text;
pub(crate) mod trial;
pub(crate) mod version;
pub(crate) mod wait;
