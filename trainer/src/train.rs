//! Training: the loop, what drives it, and trials on top of it.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

use burn::module::Module;

use crate::callback::Callback;
use crate::collective::Distributed;
use crate::context::Context;
use crate::error::{caught, unraised};
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
pub(crate) use state::ReadOrder;
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
        unraised(|| Run::start(self, model, optimizers, &step, fit)?.train())
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
    hook_each(callbacks, control, ranks, |_, callback, control| hook(callback, control))
}

/// As [`hook`], with each callback's place in the list.
fn hook_each(
    callbacks: &mut [Box<dyn Callback>],
    control: &mut Control,
    ranks: &Distributed,
    mut hook: impl FnMut(usize, &mut dyn Callback, &mut Control) -> Result<()>,
) -> Result<()> {
    for index in 0..callbacks.len() {
        let callback = &mut callbacks[index];
        let is_alone = callback.chief_only() && ranks.size() > 1;
        if is_alone && ranks.rank() > 0 {
            continue;
        }
        // What others have asked for in this hook is not its own.
        let asked = is_alone.then(|| control.take_asked());
        let done = match guarded(|| hook(index, &mut **callback, control)) {
            Ok(()) if is_alone && control.asks() => {
                let text = "it runs on rank 0 alone (`chief_only`) and so cannot stop training or \
                            change the learning rate";
                Err(text.into())
            }
            done => done,
        };
        asked.into_iter().for_each(|it| control.ask(it));
        done.map_err(|source| CallbackFailed {
            name: names(callbacks).swap_remove(index),
            source,
        })?;
    }
    Ok(())
}

/// A panic of a callback's is an error with its name.
fn guarded<T>(call: impl FnOnce() -> Result<T>) -> Result<T> {
    catch_unwind(AssertUnwindSafe(call))
        .unwrap_or_else(|panic| Err(caught(panic, |why| format!("panicked: {why}"))))
}

/// What each callback is called in errors and in checkpoints: its name, and from the second of a name on
/// its number with it.
fn names(callbacks: &[Box<dyn Callback>]) -> Vec<String> {
    let mut names: Vec<String> = vec![];
    for callback in callbacks {
        let name = callback.name();
        let numbered = (2..).map(|number| format!("{name} {number}"));
        let mut all = std::iter::once(name.clone()).chain(numbered);
        names.extend(all.find(|it| !names.contains(it)));
    }
    names
}

#[cfg(test)]
pub(crate) mod tests;
