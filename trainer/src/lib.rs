//! Trains [burn] models. The same program runs on a laptop and as a gang of ranks in a cluster.
//!
//! There are three ways to use this crate, from the highest level to the lowest:
//!
//! * [`Trial`] and [`main`]: the program defines what to train. The experiment sets
//!   hyperparameters, length, and when to validate and save.
//! * [`run`] and [`Context::fit`]: a script that controls its own training.
//! * [`Context::training`]: a custom training loop with all features of `fit`. [`Session`]: for
//!   models that are not burn modules, or to report and save more.
//!
//! [`Inference`] and [`infer`] run batch inference with a trained model.
//!
//! A training consists of these parts:
//!
//! * [`Data`], whose order is a function of the seed;
//! * [`StepOutput`], loss and metrics as sums and counts;
//! * [`Optimizers`] with their learning rate schedules;
//! * [`Callback`]s.
//!
//! A training can be stopped after any batch and resumed, in this process or another. The result is
//! bit-identical to an uninterrupted run.
//!
//! [`Context::cached`] builds data that is slow to read once per machine. With the feature
//! `learner`, a program that uses burn's `SupervisedTraining` trains as with `fit`, with one line
//! replaced by five.
//!
//! [`testing`] runs a trial in a program's own tests: it builds the trial, takes a few steps,
//! validates, saves and restores.
//!
//! # Metric names
//!
//! A step names its metrics, for example `loss` and `accuracy`. Training reports them under these
//! names, validation as `validation_loss` and `validation_accuracy`. Callbacks receive validation
//! metrics as `val_loss` and `val_accuracy`. An experiment's searched metric accepts both forms.

// Modules are in reading order: first what a user writes.
mod cache;
mod callback;
mod context;
mod data;
mod error;
mod hparams;
mod inference;
mod optim;
mod session;
mod step;
mod train;

#[cfg(feature = "learner")]
mod learner;

mod allocator;
#[cfg(test)]
mod closed_port;
mod collective;
mod precision;
mod record;
mod rng;
mod stop;
mod terminal;
mod termination;
mod trial_io;

pub mod checkpoint;
pub mod datasets;
mod device;
pub mod launch;
pub mod metrics;
pub mod reporter;
mod tensorboard;
pub mod testing;

pub use burn;
pub use stoker_kernels as kernels;

pub use cache::{Cached, DataCache, Split};
pub use callback::{
    Callback, CheckpointFiles, Control, CsvLog, EarlyStopping, Lambda, LearningRateSchedule, Logs,
    ReduceOnPlateau, TensorBoard, Weights,
};
pub use checkpoint::CheckpointSource;
pub use collective::{Collective, Distributed, ThreadRank};
pub use context::Context;
pub use data::{
    BatchContext, Data, Field, IntoItem, Loader, LoaderPlan, Pass, Permutation, Rows, Sequence,
    Source, Stream,
};
pub use device::host;
pub use error::{Error, Interrupted, InvalidHyperparameters, InvalidInput, Result, raise};
pub use inference::{Inference, infer, infer_with};
pub use optim::{Optimizers, Schedule};
pub use record::{WeightsFile, blend, deep_copy};
pub use rng::mix_seed;
pub use session::{
    CheckpointMetadata, ClusterInfo, Download, PreemptMode, Profiler, Session, Upload,
};
pub use step::{Metrics, Number, StepOutput};
pub use tensorboard::Image;
pub use train::{
    Fit, Fitted, NextAction, Standalone, Step, Training, Trial, init, main, main_with, run, run_in,
    run_trial, run_with,
};

/// Programs from the guides. The tests compile all of them except fragments marked `ignore`, and
/// run those not marked `no_run`.
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
    #[doc = include_str!("../../docs/kernels.md")]
    struct Kernels;
    #[cfg(feature = "learner")]
    #[doc = include_str!("../../docs/learner.md")]
    struct Learner;
    #[doc = include_str!("../../docs/session.md")]
    struct Session;
    #[doc = include_str!("../../docs/porting.md")]
    struct Porting;
}
