//! Validations of a custom loop, which a signal or the runner may interrupt.

use burn::module::Module;

use super::{Stage, Training, out_of_order};
use crate::data::Data;
use crate::step::{Metrics, StepOutput};
use crate::train::validate::check_stop;
use crate::{Error, Result};

impl<M: Module + 'static, B: Send + 'static> Training<'_, M, B> {
    /// Evaluates the model at [`NextAction::Validate`](super::NextAction::Validate). Same as
    /// [`Context::evaluate`](crate::Context::evaluate), except that a signal or the runner may
    /// interrupt it, as with [`check_stop`](Self::check_stop) before each batch. Pass the metrics
    /// to [`validated`](Self::validated). Collective.
    ///
    /// # Errors
    ///
    /// Fails if the current action is not `NextAction::Validate`, or if the data or another rank
    /// fails. Returns [`Interrupted`](crate::Interrupted) after such a request; a checkpoint is
    /// then already stored.
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
        let (batches, granted) = (self.run.state.batches, self.run.granted);
        let model = &*self.run.model;
        let read = context.for_each_batch(model, data, batch_size, |index, model, batch| {
            context.io().progress_if_due(batches, granted);
            check_stop(context, index)?;
            if let Some(batch) = batch {
                all.add(&step(model, batch).into_metrics());
            }
            Ok(())
        });
        read.map_err(|error| self.stop_validation(error))?;
        all.all_reduce(ranks.collective())
    }

    /// Checks for a request to stop, by a signal or the runner, during a validation. After one,
    /// saves a checkpoint from which training resumes with this validation.
    ///
    /// Call this about once per batch of a long validation without [`evaluate`](Self::evaluate).
    /// Several ranks must call it equally often. They agree in the first and in every 16th further
    /// call.
    ///
    /// # Errors
    ///
    /// Fails if the current action is not `NextAction::Validate`, or if another rank fails. Returns
    /// [`Interrupted`](crate::Interrupted) after such a request, when the checkpoint is stored.
    pub fn check_stop(&mut self) -> Result<()> {
        if !self.stage.is_validation() {
            return Err(out_of_order("check_stop", "after `NextAction::Validate`", self.stage));
        }
        let context = self.run.context;
        let index = self.num_checks;
        self.num_checks += 1;
        context.io().progress_if_due(self.run.state.batches, self.run.granted);
        check_stop(context, index).map_err(|error| self.stop_validation(error))
    }

    /// If requests have stopped the validation, saves a checkpoint without it and returns the error
    /// to exit with. Returns other errors unchanged.
    fn stop_validation(&mut self, error: Error) -> Error {
        // Validations before the first batch and at the end of the length follow from the rest of
        // the state.
        self.run.state.is_validation_due = matches!(self.stage, Stage::Validate(_));
        let error = self.run.stop_validation(error);
        self.run.state.is_validation_due = false;
        error
    }
}
