//! Learning rate schedules.

use std::fmt;

use burn::lr_scheduler::module_lr_scheduler::ModuleLrScheduler;

/// Learning rate: a constant, a function of the optimizer step, or a scheduler of burn.
pub enum Schedule {
    /// Constant learning rate.
    Constant(f64),
    /// Function of the optimizer step, from 0. It has no state to save.
    ByStep(Box<dyn Fn(u64) -> f64 + Send>),
    /// Scheduler of burn, whose state is saved. Only its first scheduler is used: use
    /// [`Optimizers::group`](crate::Optimizers::group) for groups of parameters.
    Burn(ModuleLrScheduler),
}

impl fmt::Debug for Schedule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Constant(rate) => f.debug_tuple("Constant").field(rate).finish(),
            Self::ByStep(_) => f.write_str("ByStep"),
            Self::Burn(_) => f.write_str("Burn"),
        }
    }
}

impl Schedule {
    /// Returns the learning rate for `step`. Must be called once per step, in order.
    pub(super) fn next(&mut self, step: u64) -> f64 {
        match self {
            Self::Constant(rate) => *rate,
            Self::ByStep(rate) => rate(step),
            Self::Burn(scheduler) => scheduler.step().base(),
        }
    }
}

impl From<f64> for Schedule {
    fn from(rate: f64) -> Self {
        Self::Constant(rate)
    }
}

impl From<ModuleLrScheduler> for Schedule {
    fn from(scheduler: ModuleLrScheduler) -> Self {
        Self::Burn(scheduler)
    }
}

impl<F: Fn(u64) -> f64 + Send + 'static> From<F> for Schedule {
    fn from(rate: F) -> Self {
        Self::ByStep(Box::new(rate))
    }
}
