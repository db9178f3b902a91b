//! Callbacks: what runs between steps.

use std::collections::BTreeMap;

use bytes::Bytes;
use serde_json::Value;

use crate::Result;

mod csv_log;
mod early_stopping;
mod lambda;
mod learning_rate;
mod plateau;
mod tensor_board;

pub use csv_log::CsvLog;
pub use early_stopping::EarlyStopping;
pub use lambda::Lambda;
pub use learning_rate::LearningRateSchedule;
pub use plateau::ReduceOnPlateau;
pub use tensor_board::TensorBoard;

/// Metric means by name; those of validation begin with `val_`.
pub type Logs = BTreeMap<String, f64>;

/// What a callback may ask of the loop. It is a note, not a handle: the loop reads it after each
/// hook.
#[derive(Debug, Default)]
pub struct Control {
    pub(crate) stop: Option<String>,
    pub(crate) scale: Option<f64>,
    pub(crate) rows: Vec<(String, Logs)>,
    pub(crate) histograms: Vec<(String, Vec<f32>)>,
    pub(crate) keeps_weights: bool,
    pub(crate) batches: u64,
    pub(crate) learning_rate_scale: f64,
}

impl Control {
    /// Global batches trained so far.
    pub fn batches(&self) -> u64 {
        self.batches
    }

    /// What the learning rate is multiplied by at the moment.
    pub fn learning_rate_scale(&self) -> f64 {
        self.scale.unwrap_or(self.learning_rate_scale)
    }

    /// Ends training after this batch; the trial's last validation is its result.
    pub fn stop_training(&mut self, why: impl Into<String>) {
        self.stop.get_or_insert(why.into());
    }

    /// Multiplies what the schedule says from now on; kept in checkpoints.
    pub fn scale_learning_rate(&mut self, factor: f64) {
        self.scale = Some(self.learning_rate_scale() * factor);
    }

    /// Makes this what the schedule is multiplied by from now on; kept in checkpoints.
    pub fn set_learning_rate_scale(&mut self, scale: f64) {
        self.scale = Some(scale);
    }

    /// Writes a row of metrics of any group, such as `model`, at this batch: to the metrics of the
    /// trial and to TensorBoard.
    pub fn report(&mut self, group: &str, metrics: Logs) {
        self.rows.push((group.into(), metrics));
    }

    /// Writes a histogram of these values at this batch, for TensorBoard.
    pub fn histogram(&mut self, name: &str, values: Vec<f32>) {
        self.histograms.push((name.into(), values));
    }

    /// Keeps the model's weights and buffers as they are now, in place of any kept before: they are
    /// those that training ends with. Where a callback stops it they are in its last checkpoint, with
    /// the metrics of the validation at this batch; where it reaches its length, from which a longer
    /// one would go on, they are in [`Fitted::model`](crate::Fitted::model) alone. Until then
    /// checkpoints hold them beside the model's, which makes them larger by as much. A trial keeps one
    /// such state.
    pub fn keep_weights(&mut self) {
        self.keeps_weights = true;
    }

    /// Whether training itself is to change.
    pub(crate) fn asks(&self) -> bool {
        self.stop.is_some() || self.scale.is_some() || self.keeps_weights
    }

    /// Takes out how training is to change.
    pub(crate) fn take_asked(&mut self) -> Asked {
        (self.stop.take(), self.scale.take(), std::mem::take(&mut self.keeps_weights))
    }

    /// Puts back what [`take_asked`](Self::take_asked) gave.
    pub(crate) fn ask(&mut self, asked: Asked) {
        (self.stop, self.scale, self.keeps_weights) = asked;
    }
}

/// How training is to change: why it stops, the learning rate's scale, and whether weights are kept.
pub(crate) type Asked = (Option<String>, Option<f64>, bool);

/// Files that a checkpoint will have beside its own.
#[derive(Debug, Default)]
pub struct CheckpointFiles(BTreeMap<String, Bytes>);

impl CheckpointFiles {
    /// Adds a file, which is stored as `callbacks-NAME`.
    ///
    /// # Errors
    ///
    /// The name is no plain file name, or another callback has added it.
    pub fn add(&mut self, name: &str, bytes: impl Into<Bytes>) -> Result<()> {
        let is_plain = |it: char| it.is_ascii_alphanumeric() || "._-".contains(it);
        if name.is_empty() || !name.chars().all(is_plain) {
            let text = format!(
                "checkpoint file {name:?}: a name has letters, digits, `.`, `_` and `-` alone"
            );
            return Err(text.into());
        }
        match self.0.insert(format!("callbacks-{name}"), bytes.into()) {
            None => Ok(()),
            Some(_) => Err(format!("checkpoint file {name:?} was added before").into()),
        }
    }

    /// A file that a callback added under this name.
    pub fn get(&self, name: &str) -> Option<&[u8]> {
        self.0.get(&format!("callbacks-{name}")).map(Bytes::as_ref)
    }

    /// Those of a checkpoint's files that callbacks added.
    pub(crate) fn of(parts: &BTreeMap<String, Bytes>) -> Self {
        let added = parts.iter().filter(|(name, _)| name.starts_with("callbacks-"));
        Self(added.map(|(name, bytes)| (name.clone(), bytes.clone())).collect())
    }

    pub(crate) fn into_files(self) -> BTreeMap<String, Bytes> {
        self.0
    }
}

/// A model's trained weights and buffers on the host.
#[derive(Debug, Default)]
pub struct Weights {
    pub(crate) tensors: Vec<(String, Vec<f32>)>,
    pub(crate) num_trained: u64,
}

impl Weights {
    /// Paths and values of all floating-point parameters and buffers, in the order of the model's
    /// fields.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &[f32])> {
        self.tensors.iter().map(|(path, values)| (path.as_str(), values.as_slice()))
    }

    /// Numbers that optimizers change.
    pub fn num_trained(&self) -> u64 {
        self.num_trained
    }
}

/// Hooks around training. Every hook does nothing unless written; an error or a panic ends the trial under the
/// callback's name, and with [`InvalidHyperparameters`](crate::InvalidHyperparameters) the search
/// draws others.
///
/// # Order
///
/// ```text
/// on_train_begin  load_state  on_restore (if it goes on from a checkpoint)
///   on_epoch_begin                                   an epoch's first batch
///     on_workload_begin                              batches until the next look around
///       on_batch_begin  on_batch_end                 each batch
///     on_workload_end
///     on_validation_begin
///       on_validation_batch_begin  on_validation_batch_end
///     on_validation_end
///   on_epoch_end  on_weights (if wanted)
///   on_checkpoint
/// on_train_end
/// ```
///
/// [`Context::evaluate_with`](crate::Context::evaluate_with) calls the hooks of a validation alone, and
/// [`Context::predict_with`](crate::Context::predict_with) those of a prediction.
///
/// Where validations or checkpoints do not go by epochs, an epoch may end, and the next begin, within a workload.
///
/// A process that goes on in the midst of an epoch does not begin it again: epochs, batches and
/// validations are those of a run never stopped. `on_train_begin`, `on_train_end` and workloads are
/// of a process.
///
/// # Gangs
///
/// In a gang they run on every rank, on the same logs, and must ask for the same on each: not for
/// what a clock says, for example. See [`Callback::chief_only`].
#[expect(unused_variables, reason = "the names tell an implementor what the arguments are")]
pub trait Callback: Send {
    /// The name in errors and in checkpoints. A trial's second of a name has `2` after it there, and so on: keep their
    /// order, or give them names of their own.
    fn name(&self) -> String {
        std::any::type_name::<Self>().rsplit("::").next().unwrap_or_default().into()
    }

    /// Whether it runs on rank 0 alone, as what writes a file does. In a gang it cannot stop training or
    /// change the learning rate then: the other ranks would not know.
    fn chief_only(&self) -> bool {
        false
    }

    /// Before the first batch of this process, before [`Callback::load_state`].
    ///
    /// # Errors
    ///
    /// Whatever should end the trial.
    fn on_train_begin(&mut self, control: &mut Control) -> Result<()> {
        Ok(())
    }

    /// Before the first batch of epoch `epoch`, counted from 0.
    ///
    /// # Errors
    ///
    /// Whatever should end the trial.
    fn on_epoch_begin(&mut self, epoch: u64, control: &mut Control) -> Result<()> {
        Ok(())
    }

    /// Before `requested` batches, at most `schedulingUnit`, after which there is a row of metrics, a
    /// validation or a checkpoint.
    ///
    /// # Errors
    ///
    /// Whatever should end the trial.
    fn on_workload_begin(&mut self, requested: u64, control: &mut Control) -> Result<()> {
        Ok(())
    }

    /// Before each batch.
    ///
    /// # Errors
    ///
    /// Whatever should end the trial.
    fn on_batch_begin(&mut self, control: &mut Control) -> Result<()> {
        Ok(())
    }

    /// After each batch, with that batch's means.
    ///
    /// # Errors
    ///
    /// Whatever should end the trial.
    fn on_batch_end(&mut self, logs: &Logs, control: &mut Control) -> Result<()> {
        Ok(())
    }

    /// After the batches of a workload, with their means.
    ///
    /// # Errors
    ///
    /// Whatever should end the trial.
    fn on_workload_end(&mut self, logs: &Logs, control: &mut Control) -> Result<()> {
        Ok(())
    }

    /// Before each validation.
    ///
    /// # Errors
    ///
    /// Whatever should end the trial.
    fn on_validation_begin(&mut self, control: &mut Control) -> Result<()> {
        Ok(())
    }

    /// Before a batch of validation, counted from 0 in each.
    ///
    /// # Errors
    ///
    /// Whatever should end the trial.
    fn on_validation_batch_begin(&mut self, batch: u64, control: &mut Control) -> Result<()> {
        Ok(())
    }

    /// After a batch of validation.
    ///
    /// # Errors
    ///
    /// Whatever should end the trial.
    fn on_validation_batch_end(&mut self, batch: u64, control: &mut Control) -> Result<()> {
        Ok(())
    }

    /// After each validation, with the means over all of its data.
    ///
    /// # Errors
    ///
    /// Whatever should end the trial.
    fn on_validation_end(&mut self, logs: &Logs, control: &mut Control) -> Result<()> {
        Ok(())
    }

    /// After epoch `epoch`, counted from 0, with its means and those of a validation at its end.
    ///
    /// # Errors
    ///
    /// Whatever should end the trial.
    fn on_epoch_end(&mut self, epoch: u64, logs: &Logs, control: &mut Control) -> Result<()> {
        Ok(())
    }

    /// Whether [`Callback::on_weights`] is to be called after this epoch: it takes all weights to the
    /// host.
    fn wants_weights(&self, epoch: u64) -> bool {
        false
    }

    /// After epoch `epoch`, if [`Callback::wants_weights`].
    ///
    /// # Errors
    ///
    /// Whatever should end the trial.
    fn on_weights(&mut self, epoch: u64, weights: &Weights, control: &mut Control) -> Result<()> {
        Ok(())
    }

    /// Before a checkpoint is stored; `files` are stored with it.
    ///
    /// # Errors
    ///
    /// Whatever should end the trial.
    fn on_checkpoint(&mut self, files: &mut CheckpointFiles, control: &mut Control) -> Result<()> {
        Ok(())
    }

    /// After [`load_state`](Self::load_state), with the files that callbacks had added to the
    /// checkpoint. Called on every rank, where the callback runs there.
    ///
    /// # Errors
    ///
    /// The files are not what was added.
    fn on_restore(&mut self, files: &CheckpointFiles) -> Result<()> {
        Ok(())
    }

    /// Before [`Context::predict_with`](crate::Context::predict_with) reads its first batch.
    ///
    /// # Errors
    ///
    /// Whatever should end the trial.
    fn on_predict_begin(&mut self) -> Result<()> {
        Ok(())
    }

    /// Before a batch of a prediction, counted from 0.
    ///
    /// # Errors
    ///
    /// Whatever should end the trial.
    fn on_predict_batch_begin(&mut self, batch: u64) -> Result<()> {
        Ok(())
    }

    /// After a batch of a prediction.
    ///
    /// # Errors
    ///
    /// Whatever should end the trial.
    fn on_predict_batch_end(&mut self, batch: u64) -> Result<()> {
        Ok(())
    }

    /// After the last batch of a prediction.
    ///
    /// # Errors
    ///
    /// Whatever should end the trial.
    fn on_predict_end(&mut self) -> Result<()> {
        Ok(())
    }

    /// Before the process leaves training, for whatever reason but an error; after its last checkpoint.
    ///
    /// # Errors
    ///
    /// Whatever should end the trial as failed.
    fn on_train_end(&mut self, control: &mut Control) -> Result<()> {
        Ok(())
    }

    /// What a checkpoint keeps.
    ///
    /// # Errors
    ///
    /// When the state cannot be written down.
    fn state(&self) -> Result<Value> {
        Ok(Value::Null)
    }

    /// Takes on what [`Callback::state`] gave.
    ///
    /// # Errors
    ///
    /// When this is no state of the callback's.
    fn load_state(&mut self, state: Value) -> Result<()> {
        Ok(())
    }

    /// For the list that a trial gives.
    fn boxed(self) -> Box<dyn Callback>
    where
        Self: Sized + 'static,
    {
        Box::new(self)
    }
}
