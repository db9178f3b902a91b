//! Callbacks: hooks that run between steps.

use std::collections::BTreeMap;

use bytes::Bytes;
use serde_json::Value;

use crate::Result;

mod control;
mod csv_log;
mod early_stopping;
mod lambda;
mod learning_rate;
mod name;
mod plateau;
mod tensor_board;

pub use control::Control;
pub use csv_log::CsvLog;
pub use early_stopping::EarlyStopping;
pub(crate) use early_stopping::missing_metric;
pub use lambda::Lambda;
pub use learning_rate::LearningRateSchedule;
use name::short_name;
pub use plateau::ReduceOnPlateau;
pub use tensor_board::TensorBoard;

/// Metric means by name. Names of validation metrics begin with `val_`.
pub type Logs = BTreeMap<String, f64>;

/// Additional files for a checkpoint.
#[derive(Debug, Default)]
pub struct CheckpointFiles(BTreeMap<String, Bytes>);

impl CheckpointFiles {
    /// Adds a file, which is stored as `callbacks-NAME`.
    ///
    /// # Errors
    ///
    /// Fails if the name is not a plain file name, or if a callback has already added it.
    pub fn add(&mut self, name: &str, bytes: impl Into<Bytes>) -> Result<()> {
        let is_plain = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
        if name.is_empty() || !name.chars().all(is_plain) {
            let text = format!(
                "invalid checkpoint file name {name:?}: use only letters, digits, `.`, `_` and `-`"
            );
            return Err(text.into());
        }
        match self.0.insert(format!("callbacks-{name}"), bytes.into()) {
            None => Ok(()),
            Some(_) => {
                let text = format!(
                    "checkpoint file {name:?} was already added by another callback; choose \
                     another file name"
                );
                Err(text.into())
            }
        }
    }

    /// Returns the file that a callback added under this name.
    pub fn get(&self, name: &str) -> Option<&[u8]> {
        self.0.get(&format!("callbacks-{name}")).map(Bytes::as_ref)
    }

    /// Selects the files of a checkpoint that callbacks added.
    pub(crate) fn from_contents(contents: &BTreeMap<String, Bytes>) -> Self {
        let added = contents.iter().filter(|(name, _)| name.starts_with("callbacks-"));
        Self(added.map(|(name, bytes)| (name.clone(), bytes.clone())).collect())
    }

    pub(crate) fn into_files(self) -> BTreeMap<String, Bytes> {
        self.0
    }
}

/// Trained weights and buffers of a model, on the host.
#[derive(Debug, Default)]
pub struct Weights {
    pub(crate) tensors: Vec<(String, Vec<f32>)>,
    pub(crate) num_trained: u64,
}

impl Weights {
    /// Iterates over paths and values of all floating-point parameters and buffers, in the order of
    /// the model's fields.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &[f32])> {
        self.tensors.iter().map(|(path, values)| (path.as_str(), values.as_slice()))
    }

    /// Returns the number of trainable values.
    pub fn num_trained(&self) -> u64 {
        self.num_trained
    }
}

/// Hooks around training. The default implementation of every hook does nothing.
///
/// An error or a panic in a hook ends the attempt, and the error message contains the callback's
/// name. After [`InvalidHyperparameters`](crate::InvalidHyperparameters), the search samples other
/// hyperparameters.
///
/// # Order
///
/// ```text
/// on_train_begin  load_state  on_restore (if resumed from a checkpoint)
///   on_epoch_begin                                   first batch of an epoch
///     on_workload_begin                              batches until the scheduling boundary
///       on_batch_begin  on_batch_end                 each batch
///     on_workload_end
///     on_validation_begin
///       on_validation_batch_begin  on_validation_batch_end
///     on_validation_end
///   on_epoch_end  on_weights (if requested)
///   on_checkpoint
/// on_train_end
/// ```
///
/// [`Context::evaluate_with`](crate::Context::evaluate_with) calls only the validation hooks, and
/// [`Context::predict_with`](crate::Context::predict_with) only the prediction hooks.
///
/// If validations or checkpoints are not aligned with epochs, an epoch may end, and the next begin,
/// within a workload.
///
/// If training ends within an epoch, `on_epoch_end` and `on_weights` are not called for that epoch.
///
/// If a process resumes in the middle of an epoch, it does not begin the epoch again. Hooks of
/// epochs, batches and validations are called as in an uninterrupted run, but a validation that a
/// signal or the runner interrupts starts over with all of its hooks. `on_train_begin`,
/// `on_train_end` and the workload hooks are called per process.
///
/// # Gangs
///
/// With several ranks, callbacks run on every rank with the same logs, and must make the same
/// requests on each. They must not depend on a clock, for example. See [`Callback::chief_only`].
#[expect(unused_variables, reason = "parameter names document the hooks")]
pub trait Callback: Send {
    /// Returns the name for errors and checkpoints. If several callbacks of a trial have the same
    /// name, the second is called `NAME 2`, and so on. Keep their order, or give them unique names.
    fn name(&self) -> String {
        short_name(std::any::type_name::<Self>()).into()
    }

    /// Returns `true` to run this callback on rank 0 only, for example to write a file. With
    /// several ranks, such a callback must not stop training, keep weights or change the learning
    /// rate; doing so is an error.
    fn chief_only(&self) -> bool {
        false
    }

    /// Called before the first batch of this process, before [`Callback::load_state`].
    ///
    /// # Errors
    ///
    /// An error ends the attempt.
    fn on_train_begin(&mut self, control: &mut Control) -> Result<()> {
        Ok(())
    }

    /// Called before the first batch of epoch `epoch`, counted from 0.
    ///
    /// With `recordsPerEpoch`, an epoch of callbacks is rounded down to whole batches. Lengths
    /// round the total of their epochs instead, so a training may have more epochs than its length,
    /// unless `recordsPerEpoch` is a multiple of the global batch size.
    ///
    /// # Errors
    ///
    /// An error ends the attempt.
    fn on_epoch_begin(&mut self, epoch: u64, control: &mut Control) -> Result<()> {
        Ok(())
    }

    /// Called before `requested` batches, at most `schedulingUnit`. A row of metrics, a validation
    /// or a checkpoint follows them.
    ///
    /// # Errors
    ///
    /// An error ends the attempt.
    fn on_workload_begin(&mut self, requested: u64, control: &mut Control) -> Result<()> {
        Ok(())
    }

    /// Called before each batch.
    ///
    /// # Errors
    ///
    /// An error ends the attempt.
    fn on_batch_begin(&mut self, control: &mut Control) -> Result<()> {
        Ok(())
    }

    /// Returns whether [`Callback::on_batch_end`] uses its logs (default: true).
    ///
    /// If no callback of any rank does, that hook gets empty logs, and the training loop reads
    /// metrics one batch late, so that it does not wait until a GPU has computed them. Called at
    /// most once per training, before [`Callback::on_train_begin`].
    fn wants_batch_logs(&self) -> bool {
        true
    }

    /// Called after each batch, with that batch's means. They are empty if no callback
    /// [wants](Self::wants_batch_logs) them.
    ///
    /// # Errors
    ///
    /// An error ends the attempt.
    fn on_batch_end(&mut self, logs: &Logs, control: &mut Control) -> Result<()> {
        Ok(())
    }

    /// Called after the batches of a workload, with their means.
    ///
    /// # Errors
    ///
    /// An error ends the attempt.
    fn on_workload_end(&mut self, logs: &Logs, control: &mut Control) -> Result<()> {
        Ok(())
    }

    /// Returns whether this callback requires validations (default: false). Then
    /// [`Context::fit`](crate::Context::fit) fails at the start without validation data. Ignored in
    /// custom loops, which validate themselves.
    fn needs_validation(&self) -> bool {
        false
    }

    /// Returns the validation metric that this callback requires, named like `val_loss` (default:
    /// none). [`Context::fit`](crate::Context::fit) fails before the first batch if the first
    /// validation batch does not have it. Ignored in custom loops.
    fn watched_metric(&self) -> Option<&str> {
        None
    }

    /// Called before each validation.
    ///
    /// # Errors
    ///
    /// An error ends the attempt.
    fn on_validation_begin(&mut self, control: &mut Control) -> Result<()> {
        Ok(())
    }

    /// Called before each validation batch, counted from 0 in each validation.
    ///
    /// # Errors
    ///
    /// An error ends the attempt.
    fn on_validation_batch_begin(&mut self, batch: u64, control: &mut Control) -> Result<()> {
        Ok(())
    }

    /// Called after each validation batch.
    ///
    /// # Errors
    ///
    /// An error ends the attempt.
    fn on_validation_batch_end(&mut self, batch: u64, control: &mut Control) -> Result<()> {
        Ok(())
    }

    /// Called after each validation, with the means over all of its data.
    ///
    /// # Errors
    ///
    /// An error ends the attempt.
    fn on_validation_end(&mut self, logs: &Logs, control: &mut Control) -> Result<()> {
        Ok(())
    }

    /// Called after epoch `epoch`, counted from 0, with its means and those of a validation at its
    /// end. Epochs are those of [`on_epoch_begin`](Self::on_epoch_begin).
    ///
    /// # Errors
    ///
    /// An error ends the attempt.
    fn on_epoch_end(&mut self, epoch: u64, logs: &Logs, control: &mut Control) -> Result<()> {
        Ok(())
    }

    /// Returns whether to call [`Callback::on_weights`] after this epoch. That call copies all
    /// weights to the host.
    fn wants_weights(&self, epoch: u64) -> bool {
        false
    }

    /// Called after epoch `epoch` if [`Callback::wants_weights`] returns true.
    ///
    /// # Errors
    ///
    /// An error ends the attempt.
    fn on_weights(&mut self, epoch: u64, weights: &Weights, control: &mut Control) -> Result<()> {
        Ok(())
    }

    /// Called before a checkpoint is stored. Files added to `files` are stored with it.
    ///
    /// # Errors
    ///
    /// An error ends the attempt.
    fn on_checkpoint(&mut self, files: &mut CheckpointFiles, control: &mut Control) -> Result<()> {
        Ok(())
    }

    /// Called after [`load_state`](Self::load_state), on every rank where the callback runs, with
    /// the files that callbacks added to the checkpoint. [Workers](crate::Data::workers) may
    /// already prepare the first batches.
    ///
    /// # Errors
    ///
    /// Fails if the files are not those that this callback added.
    fn on_restore(&mut self, files: &CheckpointFiles) -> Result<()> {
        Ok(())
    }

    /// Called before [`Context::predict_with`](crate::Context::predict_with) reads its first batch.
    ///
    /// # Errors
    ///
    /// An error ends the attempt.
    fn on_predict_begin(&mut self) -> Result<()> {
        Ok(())
    }

    /// Called before each prediction batch, counted from 0.
    ///
    /// # Errors
    ///
    /// An error ends the attempt.
    fn on_predict_batch_begin(&mut self, batch: u64) -> Result<()> {
        Ok(())
    }

    /// Called after each prediction batch.
    ///
    /// # Errors
    ///
    /// An error ends the attempt.
    fn on_predict_batch_end(&mut self, batch: u64) -> Result<()> {
        Ok(())
    }

    /// Called after the last prediction batch.
    ///
    /// # Errors
    ///
    /// An error ends the attempt.
    fn on_predict_end(&mut self) -> Result<()> {
        Ok(())
    }

    /// Called before the process exits from training for any reason except an error, after its last
    /// checkpoint.
    ///
    /// # Errors
    ///
    /// An error makes the attempt fail, although training is over.
    fn on_train_end(&mut self, control: &mut Control) -> Result<()> {
        Ok(())
    }

    /// Returns the state to store in checkpoints.
    ///
    /// # Errors
    ///
    /// Fails if the state cannot be serialized.
    fn state(&self) -> Result<Value> {
        Ok(Value::Null)
    }

    /// Restores the state that [`Callback::state`] returned.
    ///
    /// # Errors
    ///
    /// Fails if the value is not a state of this callback.
    fn load_state(&mut self, state: Value) -> Result<()> {
        Ok(())
    }

    /// Boxes this callback for [`Fit::callbacks`](crate::Fit::callbacks).
    fn boxed(self) -> Box<dyn Callback>
    where
        Self: Sized + 'static,
    {
        Box::new(self)
    }
}
