//! Validations of a custom loop, which a stop signal may interrupt.

use burn::module::Module;

use super::{Stage, Training, out_of_order};
use crate::data::Data;
use crate::step::{Metrics, StepOutput};
use crate::train::validate::{ValidationStopped, is_stopped};
use crate::{Error, Result};

impl<M: Module + 'static, B: Send + 'static> Training<'_, M, B> {
    /// Evaluates the model at [`NextAction::Validate`](super::NextAction::Validate). Same as
    /// [`Context::evaluate`](crate::Context::evaluate), except that a stop signal interrupts it, as
    /// with [`check_stop`](Self::check_stop) before each batch. Pass the metrics to
    /// [`validated`](Self::validated). Collective.
    ///
    /// # Errors
    ///
    /// Fails if the current action is not `NextAction::Validate`, or if the data or another rank
    /// fails. Returns [`Interrupted`](crate::Interrupted) after a stop signal; a checkpoint is then
    /// already stored.
    pub fn evaluate<V: Send + 'static>(
        &mut self,
        step: impl Fn(&M, V) -> StepOutput,
        data: &Data<V>,
        batch_size: usize,
    ) -> Result<Metrics> {
        if !self.stage.is_validation() {
            return Err(out_of_order("evaluate", "after `NextAction::Validate`", self.stage));
        }
        let context = self.run.context;
        let (ranks, mut all) = (context.distributed(), Metrics::default());
        let model = &*self.run.model;
        let read = context.for_each_batch(model, data, batch_size, |index, model, batch| {
            if is_stopped(&context.stop, index, ranks)? {
                return Err(ValidationStopped.into());
            }
            if let Some(batch) = batch {
                all.add(&step(model, batch).into_metrics());
            }
            Ok(())
        });
        match read {
            Err(error) if error.is::<ValidationStopped>() => return Err(self.stop_validation()),
            read => read?,
        }
        all.all_reduce(ranks.collective())
    }

    /// Checks for a stop signal during a validation. After a signal, saves a checkpoint from which
    /// training resumes with this validation.
    ///
    /// Call this about once per batch of a long validation without [`evaluate`](Self::evaluate).
    /// Several ranks must call it equally often. They agree in the first and in every 16th further
    /// call.
    ///
    /// # Errors
    ///
    /// Fails if the current action is not `NextAction::Validate`, or if another rank fails. Returns
    /// [`Interrupted`](crate::Interrupted) after a stop signal, when the checkpoint is stored.
    pub fn check_stop(&mut self) -> Result<()> {
        if !self.stage.is_validation() {
            return Err(out_of_order("check_stop", "after `NextAction::Validate`", self.stage));
        }
        let context = self.run.context;
        let index = self.num_checks;
        self.num_checks += 1;
        match is_stopped(&context.stop, index, context.distributed())? {
            true => Err(self.stop_validation()),
            false => Ok(()),
        }
    }

    /// Saves a checkpoint without the current validation, and returns the error to exit with.
    fn stop_validation(&mut self) -> Error {
        // Validations before the first batch and at the end of the length follow from the rest of
        // the state.
        self.run.state.is_validation_due = matches!(self.stage, Stage::Validate(_));
        let error = self.run.stop_by_signal();
        self.run.state.is_validation_due = false;
        error
    }
}
