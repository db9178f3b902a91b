//! Trains models made with [burn], the same program on a laptop and in a gang of ranks.
//!
//! There are three ways in, each a few lines on the one below it:
//!
//! * [`Trial`] and [`main`]: says what to train; an experiment says with which hyperparameters, how
//!   long, and when to validate and save.
//! * [`run`] and [`Context::fit`]: a script that drives itself.
//! * [`Context::training`]: a loop of the program's own, with all that `fit` does; [`Session`]: for models
//!   that are not burn's, or to report and save more beside.
//!
//! [`Inference`] and [`infer`] put a data set through a trained model.
//!
//! The pieces that a training is made of: [`Data`], in an order that is a function of the seed;
//! [`StepOutput`], loss and metrics as sums and counts; [`Optimizers`], with their schedules;
//! [`Callback`]s. A training that is stopped after any batch and resumed, in this process or
//! another, gives the bits of one that was not.
//!
//! Data that takes long to read is built once for each machine: [`Context::cached`]. With the feature
//! `learner`, a program of burn's own `SupervisedTraining` trains as `fit` does, with one line changed
//! for five.
//!
//! [`testing`] tries a trial from a program's own tests: builds it, takes a few steps, validates, saves
//! and restores.
//!
//! # Metric names
//!
//! A step names its metrics, such as `loss` and `accuracy`. Training reports them under these names,
//! validation as `validation_loss` and `validation_accuracy`. Callbacks know the latter as `val_loss`
//! and `val_accuracy`, and an experiment's searched metric may be written either way.

// Trained models come out of modules in reading order: what a user writes first.
mod cache;
mod callback;
mod context;
mod data;
mod error;
mod inference;
mod optim;
mod session;
mod step;
mod train;

#[cfg(feature = "learner")]
mod learner;

mod collective;
mod outlet;
mod precision;
mod record;
mod rng;
mod stop;
mod terminal;
mod termination;

pub mod checkpoint;
pub mod datasets;
mod device;
pub mod launch;
pub mod metrics;
pub mod reporter;
mod tensorboard;
pub mod testing;

pub use burn;

pub use cache::{Cached, DataCache, Split};
pub use callback::{
    Callback, CheckpointFiles, Control, CsvLog, EarlyStopping, Lambda, LearningRateSchedule, Logs,
    ReduceOnPlateau, TensorBoard, Weights,
};
pub use checkpoint::CheckpointSource;
pub use collective::{Collective, Distributed, ThreadRank};
pub use context::Context;
pub use data::{
    At, Data, Field, Found, Loader, Pass, Permutation, Plan, Rows, Sequence, Source, Stream,
};
pub use device::host;
pub use error::{Error, Interrupted, InvalidHyperparameters, InvalidInput, Result, raise};
pub use inference::{Inference, infer, infer_with};
pub use optim::{Optimizers, Schedule};
pub use record::WeightsFile;
pub use rng::key;
pub use session::{ClusterInfo, Download, PreemptMode, Profiler, Saved, Session, Upload};
pub use step::{Metrics, Number, StepOutput};
pub use train::{
    Fit, Fitted, Standalone, Step, Training, Trial, Turn, init, main, main_with, run, run_in,
    run_trial, run_with,
};

/// The programs of the guides, which the tests compile and, but for those marked `no_run`, run.
#[cfg(doctest)]
mod guides {
    #[doc = include_str!("../../docs/checkpoints.md")]
    struct Checkpoints;
    #[doc = include_str!("../../docs/data.md")]
    struct Data;
    #[doc = include_str!("../../docs/data-cache.md")]
    struct DataCache;
    #[doc = include_str!("../../docs/inference.md")]
    struct Inference;
    #[cfg(feature = "learner")]
    #[doc = include_str!("../../docs/learner.md")]
    struct Learner;
    #[doc = include_str!("../../docs/session.md")]
    struct Session;
    #[doc = include_str!("../../docs/porting.md")]
    struct Porting;
}
