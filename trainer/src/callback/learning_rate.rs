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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rate_of_none_is_followed_by_any() {
        let mut schedule = LearningRateSchedule::by_epoch(|epoch| [0.0, 0.5, -1.0][epoch as usize]);
        let mut scale = 1.0;
        for (epoch, expected) in [(0, 0.0), (1, 0.5)] {
            let mut control = Control { learning_rate_scale: scale, ..Control::default() };
            schedule.on_epoch_begin(epoch, &mut control).unwrap();
            scale = control.learning_rate_scale();
            assert_eq!(scale, expected, "epoch {epoch}");
        }
        let error = schedule.on_epoch_begin(2, &mut Control::default()).unwrap_err();
        assert_eq!(error.to_string(), "epoch 2 has a scale of -1: it must be at least 0");
    }
}
