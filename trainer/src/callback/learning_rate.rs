//! Learning rate factor per epoch.

use std::fmt;

use super::{Callback, Control};
use crate::Result;

/// Multiplies the learning rates by a function of the epoch, counted from 0. For a learning rate
/// per step, pass a schedule to [`Optimizers`](crate::Optimizers).
pub struct LearningRateSchedule {
    scale: Box<dyn Fn(u64) -> f64 + Send>,
}

impl fmt::Debug for LearningRateSchedule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LearningRateSchedule").finish_non_exhaustive()
    }
}

impl LearningRateSchedule {
    /// Creates the callback. `scale` must be a pure function: a resumed run calls it only for the
    /// remaining epochs.
    pub fn by_epoch(scale: impl Fn(u64) -> f64 + Send + 'static) -> Self {
        Self { scale: Box::new(scale) }
    }
}

impl Callback for LearningRateSchedule {
    fn wants_batch_logs(&self) -> bool {
        false
    }

    fn on_epoch_begin(&mut self, epoch: u64, control: &mut Control) -> Result<()> {
        let scale = (self.scale)(epoch);
        if !scale.is_finite() || scale < 0.0 {
            let text = format!("learning rate scale of epoch {epoch} is {scale}; it must be >= 0");
            return Err(text.into());
        }
        control.set_learning_rate_scale(scale);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scale_recovers_after_zero() {
        let mut schedule = LearningRateSchedule::by_epoch(|epoch| [0.0, 0.5, -1.0][epoch as usize]);
        let mut scale = 1.0;
        for (epoch, expected) in [(0, 0.0), (1, 0.5)] {
            let mut control = Control { learning_rate_scale: scale, ..Control::default() };
            schedule.on_epoch_begin(epoch, &mut control).unwrap();
            scale = control.learning_rate_scale();
            assert_eq!(scale, expected, "epoch {epoch}");
        }
        let error = schedule.on_epoch_begin(2, &mut Control::default()).unwrap_err();
        assert_eq!(error.to_string(), "learning rate scale of epoch 2 is -1; it must be >= 0");
    }
}
