//! Steps that another training loop takes, which keeps the model, optimizer and schedule.

use std::any::Any;

use burn::lr_scheduler::LrSchedulerRecord;
use burn::module::Module;
use burn::optim::{GradientsParams, OptimizerRecord};
use burn::tensor::Bytes;

use super::Optimizers;
use crate::Result;

/// The state of another loop's optimizer and schedule.
pub(crate) type ForeignSnapshot = (OptimizerRecord, LrSchedulerRecord);

/// Another loop's model and what steps it.
pub(crate) trait Foreign {
    /// Takes a step; gives the model after it.
    fn step(&mut self, gradients: GradientsParams) -> Box<dyn Any>;

    /// Takes on a model that came to be by no step.
    fn adopt(&mut self, model: &dyn Any);

    /// Batches whose gradients are added up, not averaged, before a step.
    fn sums(&self) -> Option<u32>;

    /// The state now.
    fn snapshot(&self) -> Result<ForeignSnapshot>;

    /// Takes on a saved state; the model comes by [`adopt`](Self::adopt).
    fn restore(&mut self, optimizer: Bytes, schedule: Bytes) -> Result<()>;
}

impl Optimizers {
    /// What another loop does.
    pub(crate) fn foreign(foreign: impl Foreign + 'static) -> Self {
        let aggregate = foreign.sums().unwrap_or(1);
        Self { foreign: Some(Box::new(foreign)), aggregate, ..Self::none() }
    }

    /// Tells another loop of a model that came to be by no step.
    pub(crate) fn adopt<M: Module + 'static>(&mut self, model: &M) {
        if let Some(foreign) = &mut self.foreign {
            foreign.adopt(model);
        }
    }

    /// Whether a step learns from the sum over batches, whatever the experiment says.
    pub(crate) fn sums_batches(&self) -> bool {
        self.foreign.as_ref().is_some_and(|it| it.sums().is_some())
    }
}

/// The model after a step of another loop.
pub(super) fn stepped<M: 'static>(
    foreign: &mut dyn Foreign,
    gradients: GradientsParams,
) -> Result<M> {
    let model = foreign.step(gradients).downcast::<M>();
    Ok(*model.map_err(|_| "the other loop trains a model of another type")?)
}
