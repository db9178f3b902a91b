//! Inputs and results of training.

use std::fmt;

use crate::Result;
use crate::callback::{Callback, Logs};
use crate::data::Data;
use crate::step::{Metrics, StepOutput};

/// Data, length and callbacks of a training with [`Context::fit`](crate::Context::fit).
pub struct Fit<B> {
    pub(crate) train: Data<B>,
    pub(crate) validation: Option<Data<B>>,
    pub(crate) batch_size: usize,
    pub(crate) epochs: Option<u64>,
    pub(crate) initial_epoch: u64,
    pub(crate) callbacks: Vec<Box<dyn Callback>>,
    pub(crate) continue_id: String,
}

impl<B> fmt::Debug for Fit<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Fit")
            .field("batch_size", &self.batch_size)
            .field("epochs", &self.epochs)
            .finish_non_exhaustive()
    }
}

impl<B> Fit<B> {
    /// Creates a training with batches of 32 samples per rank. The experiment sets its length;
    /// without one, it is one epoch.
    pub fn new(train: Data<B>) -> Self {
        Self {
            train,
            validation: None,
            batch_size: 32,
            epochs: None,
            initial_epoch: 0,
            callbacks: vec![],
            continue_id: String::new(),
        }
    }

    /// Sets the validation data.
    #[must_use]
    pub fn validation(self, data: Data<B>) -> Self {
        Self { validation: Some(data), ..self }
    }

    /// Sets the number of samples per batch on each rank (default: 32). See
    /// [`Context::batch_size`](crate::Context::batch_size).
    #[must_use]
    pub fn batch_size(self, batch_size: usize) -> Self {
        Self { batch_size, ..self }
    }

    /// Sets the length in epochs for programs without a runner, at least 1 (default: 1). Ignored if
    /// the experiment or [`Standalone::length`](crate::Standalone::length) sets the length.
    #[must_use]
    pub fn epochs(self, epochs: u64) -> Self {
        Self { epochs: Some(epochs), ..self }
    }

    /// Sets the ID of this training. A checkpoint with the same ID is resumed in full. From any
    /// other checkpoint, training takes only the weights and starts at epoch 0 (a warm start), so
    /// data, batch size and optimizers may differ.
    #[must_use]
    pub fn continue_id(self, id: impl Into<String>) -> Self {
        Self { continue_id: id.into(), ..self }
    }

    /// Starts at this epoch, counted from 0. Data, callbacks and [`epochs`](Self::epochs) count the
    /// epochs before it as trained. The optimizers do not: their learning rate schedules start at
    /// step 0. Ignored under a runner, and when a checkpoint is resumed.
    #[must_use]
    pub fn initial_epoch(self, initial_epoch: u64) -> Self {
        Self { initial_epoch, ..self }
    }

    /// Adds callbacks. They run in this order, after those already added.
    #[must_use]
    pub fn callbacks(mut self, callbacks: Vec<Box<dyn Callback>>) -> Self {
        self.callbacks.extend(callbacks);
        self
    }
}

/// Result of training.
#[derive(Debug)]
pub struct Fitted<M> {
    /// Trained model.
    pub model: M,
    /// Metrics of each epoch. Metrics of a validation at its end begin with `val_`.
    pub history: Vec<Logs>,
    /// Why a callback stopped training before its length; `None` if none did.
    pub stopped: Option<String>,
}

/// Training and validation steps of a model, for models whose steps differ.
///
/// Before the first batch, [`Context::fit_with`](crate::Context::fit_with) validates one batch on
/// each rank, to check the names of the metrics: it calls [`validate`](Self::validate), then
/// [`validated`](Self::validated).
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not a step of `{M}` on batches of `{B}`",
    note = "pass a plain function `fn(&{M}, {B}) -> StepOutput` to `fit` instead of `fit_with`"
)]
pub trait Step<M, B> {
    /// Returns loss and metrics of a training batch.
    fn train(&self, model: &M, batch: B) -> StepOutput;

    /// Returns metrics of a validation batch. The model is on a device without autodiff.
    fn validate(&self, model: &M, batch: B) -> StepOutput {
        self.train(model, batch)
    }

    /// Returns the metrics of a validation, given the sums over this rank's batches. Override this
    /// for metrics that are not means over batches. Called on every rank; the sums and counts of
    /// all ranks are then added up.
    ///
    /// # Errors
    ///
    /// An error ends the attempt.
    fn validated(&self, sums: Metrics) -> Result<Metrics> {
        Ok(sums)
    }
}

/// One function for training and validation steps.
pub(crate) struct FnStep<F>(pub(crate) F);

impl<M, B, F: Fn(&M, B) -> StepOutput> Step<M, B> for FnStep<F> {
    fn train(&self, model: &M, batch: B) -> StepOutput {
        (self.0)(model, batch)
    }
}
