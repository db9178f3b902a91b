//! Callbacks: what runs between steps.

use std::collections::BTreeMap;

use serde_json::Value;

use crate::Result;

mod early_stopping;

pub use early_stopping::EarlyStopping;

/// Metric means by name; those of validation begin with `val_`.
pub type Logs = BTreeMap<String, f64>;

/// What a callback may ask of the loop. It is a note, not a handle: the loop reads it after each
/// hook.
#[derive(Debug, Default)]
pub struct Control {
    pub(crate) stop: Option<String>,
    pub(crate) scale: Option<f64>,
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
        self.learning_rate_scale
    }

    /// Ends training after this batch; the trial's last validation is its result.
    pub fn stop_training(&mut self, why: impl Into<String>) {
        self.stop.get_or_insert(why.into());
    }

    /// Multiplies what the schedule says from now on; kept in checkpoints.
    pub fn scale_learning_rate(&mut self, factor: f64) {
        *self.scale.get_or_insert(1.0) *= factor;
    }
}

/// Hooks around training. Every hook does nothing unless written; an error ends the trial under the
/// callback's name.
///
/// In a gang they run on every rank, on the same logs, and must ask for the same on each: not for
/// what a clock says, for example.
#[expect(unused_variables, reason = "the names tell an implementor what the arguments are")]
pub trait Callback: Send {
    /// The name in errors and in checkpoints; give one if a trial has two of a type.
    fn name(&self) -> String {
        std::any::type_name::<Self>().rsplit("::").next().unwrap_or_default().into()
    }

    /// Before the first batch of this process, before [`Callback::load_state`].
    ///
    /// # Errors
    ///
    /// Whatever should end the trial.
    fn on_train_begin(&mut self, control: &mut Control) -> Result<()> {
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

    /// Before the process leaves training, for whatever reason but an error.
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
