//! Learning rates by step.

use std::fmt;

use burn::lr_scheduler::module_lr_scheduler::ModuleLrScheduler;

/// A learning rate: a number, a function of the optimizer's step, or one of burn's schedulers.
pub enum Schedule {
    /// Always the same.
    Constant(f64),
    /// By the optimizer's step, from 0: nothing to save.
    ByStep(Box<dyn Fn(u64) -> f64 + Send>),
    /// burn's, whose state is saved. Its first scheduler alone counts: groups of parameters and their rates are said
    /// by [`Optimizers::group`](crate::Optimizers::group).
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
    /// The rate for step `step`. Each step is asked for once, in order.
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
