//! Steps taken by another training loop, which owns the model, optimizer and schedule.

use std::any::Any;

use burn::lr_scheduler::LrSchedulerRecord;
use burn::module::Module;
use burn::optim::{GradientsParams, OptimizerRecord};
use burn::tensor::Bytes;

use super::Optimizers;
use crate::Result;

/// State of another loop's optimizer and schedule.
pub(crate) type ExternalSnapshot = (OptimizerRecord, LrSchedulerRecord);

/// Model and optimizer of another loop.
pub(crate) trait ExternalOptimizer {
    /// Takes a step and returns the updated model.
    fn step(&mut self, gradients: GradientsParams) -> Box<dyn Any>;

    /// Replaces the model by one that was not the result of a step.
    fn set_model(&mut self, model: &dyn Any);

    /// Returns the number of batches whose gradients are summed, not averaged, before a step.
    fn summed_batches(&self) -> Option<u32>;

    /// Returns a snapshot of the current state.
    fn snapshot(&self) -> Result<ExternalSnapshot>;

    /// Restores a saved state. [`set_model`](Self::set_model) sets the model.
    fn restore(&mut self, optimizer: Bytes, schedule: Bytes) -> Result<()>;
}

impl Optimizers {
    /// Creates optimizers that delegate steps to another loop.
    pub(crate) fn external(external: impl ExternalOptimizer + 'static) -> Self {
        let aggregate = external.summed_batches().unwrap_or(1);
        Self { external: Some(Box::new(external)), aggregate, ..Self::none() }
    }

    /// Passes another loop a model that was not the result of a step.
    pub(crate) fn set_model<M: Module + 'static>(&mut self, model: &M) {
        if let Some(external) = &mut self.external {
            external.set_model(model);
        }
    }

    /// Returns whether a step uses the sum over batches, regardless of the experiment's settings.
    pub(crate) fn sums_batches(&self) -> bool {
        self.external.as_ref().is_some_and(|external| external.summed_batches().is_some())
    }
}

/// Takes a step of another loop and returns the updated model.
pub(super) fn step_external<M: 'static>(
    external: &mut dyn ExternalOptimizer,
    gradients: GradientsParams,
) -> Result<M> {
    let model = external.step(gradients).downcast::<M>();
    Ok(*model.map_err(|_| "the training loop returned a model of another type")?)
}
