//! A learning rate by epoch.

use std::fmt;

use super::{Callback, Control};
use crate::Result;

/// Multiplies the learning rates by what a function says of each epoch, counted from 0. For a rate by
/// step, give [`Optimizers`](crate::Optimizers) a schedule.
pub struct LearningRateSchedule {
    scale: Box<dyn Fn(u64) -> f64 + Send>,
}

impl fmt::Debug for LearningRateSchedule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LearningRateSchedule").finish_non_exhaustive()
    }
}

impl LearningRateSchedule {
    /// `scale` is a pure function: a run that goes on asks it for the epochs that are left alone.
    pub fn by_epoch(scale: impl Fn(u64) -> f64 + Send + 'static) -> Self {
        Self { scale: Box::new(scale) }
    }
}

impl Callback for LearningRateSchedule {
    fn on_epoch_begin(&mut self, epoch: u64, control: &mut Control) -> Result<()> {
        let scale = (self.scale)(epoch);
        if !scale.is_finite() || scale < 0.0 {
            return Err(
                format!("epoch {epoch} has a scale of {scale}: it must be at least 0").into()
            );
        }
        control.set_learning_rate_scale(scale);
        Ok(())
    }
}
