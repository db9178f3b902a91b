//! Steps taken by another training loop, which owns the model, optimizer and schedule.

use std::any::Any;

use burn::lr_scheduler::LrSchedulerRecord;
use burn::module::Module;
use burn::optim::{GradientsParams, OptimizerRecord};
use burn::tensor::Bytes;

use super::Optimizers;
use crate::Result;

/// State of another loop's optimizer and schedule.
pub(crate) type ForeignSnapshot = (OptimizerRecord, LrSchedulerRecord);

/// Model and optimizer of another loop.
pub(crate) trait Foreign {
    /// Takes a step and returns the updated model.
    fn step(&mut self, gradients: GradientsParams) -> Box<dyn Any>;

    /// Replaces the model by one that was not the result of a step.
    fn adopt(&mut self, model: &dyn Any);

    /// Returns the number of batches whose gradients are summed, not averaged, before a step.
    fn sums(&self) -> Option<u32>;

    /// Returns a snapshot of the current state.
    fn snapshot(&self) -> Result<ForeignSnapshot>;

    /// Restores a saved state. [`adopt`](Self::adopt) sets the model.
    fn restore(&mut self, optimizer: Bytes, schedule: Bytes) -> Result<()>;
}

impl Optimizers {
    /// Creates optimizers that delegate steps to another loop.
    pub(crate) fn foreign(foreign: impl Foreign + 'static) -> Self {
        let aggregate = foreign.sums().unwrap_or(1);
        Self { foreign: Some(Box::new(foreign)), aggregate, ..Self::none() }
    }

    /// Passes another loop a model that was not the result of a step.
    pub(crate) fn adopt<M: Module + 'static>(&mut self, model: &M) {
        if let Some(foreign) = &mut self.foreign {
            foreign.adopt(model);
        }
    }

    /// Returns whether a step uses the sum over batches, regardless of the experiment's settings.
    pub(crate) fn sums_batches(&self) -> bool {
        self.foreign.as_ref().is_some_and(|foreign| foreign.sums().is_some())
    }
}

/// Takes a step of another loop and returns the updated model.
pub(super) fn stepped<M: 'static>(
    foreign: &mut dyn Foreign,
    gradients: GradientsParams,
) -> Result<M> {
    let model = foreign.step(gradients).downcast::<M>();
    Ok(*model.map_err(|_| "the training loop returned a model of another type")?)
}
