//! Training: the loop, what drives it, and trials on top of it.

use std::time::Duration;

use burn::module::Module;

use crate::callback::Callback;
use crate::collective::Distributed;
use crate::context::Context;
use crate::optim::Optimizers;
use crate::step::StepOutput;
use crate::{Control, Error, Result};

mod by_hand;
mod fit;
mod held;
mod hooks;
mod kept;
mod length;
pub(crate) mod program;
mod run;
mod save;
mod state;
mod timetable;
mod trial;
mod trying;
mod validate;

pub use by_hand::{Training, Turn};
use fit::Both;
pub use fit::{Fit, Fitted, Step};
pub(crate) use length::{UNANSWERED_MAX, UNDECIDED_PAUSE};
pub use program::{Standalone, init, main, main_with, run, run_in, run_with};
use run::Run;
pub(crate) use timetable::Timetable;
pub(crate) use trial::run_watched;
pub use trial::{Trial, run_trial};
pub(crate) use trying::Part;

/// How long to wait for an answer before looking at signals again.
pub(crate) const ANSWER_WAIT: Duration = Duration::from_secs(1);

impl Context {
    /// Trains. Goes on from this program's latest checkpoint where there is one, with the bits of a
    /// run never stopped.
    ///
    /// # Errors
    ///
    /// What the data, a callback, the storage or the runner failed with;
    /// [`Interrupted`](crate::Interrupted) where training was asked to leave.
    pub fn fit<M: Module + 'static, B: Send + 'static>(
        &self,
        model: M,
        optimizers: Optimizers,
        step: impl Fn(&M, B) -> StepOutput,
        fit: Fit<B>,
    ) -> Result<Fitted<M>> {
        self.fit_with(model, optimizers, Both(step), fit)
    }

    /// [`Context::fit`] with steps that differ in validation.
    ///
    /// # Errors
    ///
    /// As [`Context::fit`].
    pub fn fit_with<M: Module + 'static, B: Send + 'static>(
        &self,
        model: M,
        optimizers: Optimizers,
        step: impl Step<M, B>,
        fit: Fit<B>,
    ) -> Result<Fitted<M>> {
        Run::start(self, model, optimizers, &step, fit)?.train()
    }
}

/// What a callback failed with.
#[derive(Debug, thiserror::Error)]
#[error("callback {name}: {source}")]
struct CallbackFailed {
    name: String,
    source: Error,
}

/// Calls a hook of every callback of this rank, in order.
pub(crate) fn hook(
    callbacks: &mut [Box<dyn Callback>],
    control: &mut Control,
    ranks: &Distributed,
    mut hook: impl FnMut(&mut dyn Callback, &mut Control) -> Result<()>,
) -> Result<()> {
    for callback in callbacks {
        let is_alone = callback.chief_only() && ranks.size() > 1;
        if is_alone && ranks.rank() > 0 {
            continue;
        }
        let has_asked = control.asks();
        let done = hook(&mut **callback, control);
        let done = match done {
            Ok(()) if is_alone && !has_asked && control.asks() => {
                let text = "it runs on rank 0 alone (`chief_only`) and so cannot stop training or \
                            change the learning rate";
                Err(text.into())
            }
            done => done,
        };
        done.map_err(|source| CallbackFailed { name: callback.name(), source })?;
    }
    Ok(())
}

#[cfg(test)]
pub(crate) mod tests;
