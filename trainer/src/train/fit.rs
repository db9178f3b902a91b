//! What to train on, and what training gives back.

use std::fmt;

use crate::Result;
use crate::callback::{Callback, Logs};
use crate::data::Data;
use crate::step::{Metrics, StepOutput};

/// What [`Context::fit`](crate::Context::fit) trains on and for how long.
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
    /// Batches of 32 on each rank, for as long as the experiment says, or else for one epoch.
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

    /// What to validate on.
    #[must_use]
    pub fn validation(self, data: Data<B>) -> Self {
        Self { validation: Some(data), ..self }
    }

    /// Samples of one rank in one batch.
    #[must_use]
    pub fn batch_size(self, batch_size: usize) -> Self {
        Self { batch_size, ..self }
    }

    /// The length where the program trains alone; in an experiment, the experiment says it.
    #[must_use]
    pub fn epochs(self, epochs: u64) -> Self {
        Self { epochs: Some(epochs), ..self }
    }

    /// Names this training. It goes on exactly where it was from a checkpoint of the same name; from one of
    /// another, or of none, it takes the weights alone and trains its whole length: other data, batch size
    /// and optimizers are welcome. Change it where a trial is to be gone on with that way.
    #[must_use]
    pub fn continue_id(self, id: impl Into<String>) -> Self {
        Self { continue_id: id.into(), ..self }
    }

    /// Begins with this epoch, counted from 0, as if those before it were trained: data, callbacks and
    /// [`epochs`](Self::epochs) count from 0 all the same. Only where the program trains alone and has no
    /// checkpoint to go on from, which says better where it was.
    #[must_use]
    pub fn initial_epoch(self, initial_epoch: u64) -> Self {
        Self { initial_epoch, ..self }
    }

    /// Adds callbacks, which run in this order.
    #[must_use]
    pub fn callbacks(mut self, callbacks: Vec<Box<dyn Callback>>) -> Self {
        self.callbacks.extend(callbacks);
        self
    }
}

/// What training gives back.
#[derive(Debug)]
pub struct Fitted<M> {
    /// The trained model.
    pub model: M,
    /// Metrics of each epoch; those of a validation at its end as `val_...`.
    pub history: Vec<Logs>,
    /// Why a callback ended it before its length, if one did.
    pub stopped: Option<String>,
}

/// How a model learns from a batch, where training and validation differ.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not a step of `{M}` on batches of `{B}`",
    note = "a plain function `fn(&{M}, {B}) -> StepOutput` goes to `fit`, not to `fit_with`"
)]
pub trait Step<M, B> {
    /// Loss and metrics of a training batch.
    fn train(&self, model: &M, batch: B) -> StepOutput;

    /// Metrics of a validation batch; the model is on the device without autodiff.
    fn validate(&self, model: &M, batch: B) -> StepOutput {
        self.train(model, batch)
    }

    /// What a validation says, given the sums over this rank's batches: the place for metrics that are
    /// no means over batches. Called on every rank; sums and counts of all ranks are added up.
    ///
    /// # Errors
    ///
    /// Whatever should end the trial.
    fn validated(&self, sums: Metrics) -> Result<Metrics> {
        Ok(sums)
    }
}

/// The same function for both.
pub(crate) struct Both<F>(pub(crate) F);

impl<M, B, F: Fn(&M, B) -> StepOutput> Step<M, B> for Both<F> {
    fn train(&self, model: &M, batch: B) -> StepOutput {
        (self.0)(model, batch)
    }
}
