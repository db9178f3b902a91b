//! Training: the loop, the programs around it, and trials.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

use burn::module::Module;

use crate::callback::Callback;
use crate::collective::Distributed;
use crate::context::Context;
use crate::error::{catch_raised, error_from_unwind};
use crate::optim::Optimizers;
use crate::step::StepOutput;
use crate::{Control, Error, Result};

mod best_weights;
mod custom_loop;
mod directives;
mod early_loader;
mod exchange;
mod fit;
mod gradient_check;
mod hooks;
mod late_metrics;
mod model_slot;
pub(crate) mod program;
mod restore;
mod run;
mod save;
mod start;
mod state;
mod test_mode;
mod timetable;
mod trial;
mod validate;

pub use custom_loop::{NextAction, Training};
pub(crate) use directives::{SEARCH_POLL_INTERVAL, silent_runner_error};
use fit::FnStep;
pub use fit::{Fit, Fitted, Step};
pub use program::{Standalone, init, main, main_with, run, run_in, run_with};
use run::Run;
pub(crate) use state::ReadOrder;
pub(crate) use test_mode::TestStage;
pub(crate) use timetable::Timetable;
pub(crate) use trial::run_trial_with;
pub use trial::{Trial, run_trial};

/// How long to wait for a response before checking for signals again.
pub(crate) const RESPONSE_TIMEOUT: Duration = Duration::from_secs(1);

impl Context {
    /// Trains a model. If this program has a checkpoint, training resumes from the latest one and
    /// is bit-identical to an uninterrupted run.
    ///
    /// # Errors
    ///
    /// Fails if the data, a callback, the storage or the runner fails. Returns
    /// [`Interrupted`](crate::Interrupted) if the program should stop.
    pub fn fit<M: Module + 'static, B: Send + 'static>(
        &self,
        model: M,
        optimizers: Optimizers,
        step: impl Fn(&M, B) -> StepOutput,
        fit: Fit<B>,
    ) -> Result<Fitted<M>> {
        self.fit_with(model, optimizers, FnStep(step), fit)
    }

    /// Same as [`Context::fit`], with different steps for training and validation.
    ///
    /// # Errors
    ///
    /// Same as [`Context::fit`].
    pub fn fit_with<M: Module + 'static, B: Send + 'static>(
        &self,
        model: M,
        optimizers: Optimizers,
        step: impl Step<M, B>,
        fit: Fit<B>,
    ) -> Result<Fitted<M>> {
        catch_raised(|| {
            start::check_validation_data(&fit)?;
            start::warn_of_rare_validations(self, &fit);
            Run::start(self, model, optimizers, &step, fit)?.train()
        })
    }
}

/// Error of a callback, with the callback's name.
#[derive(Debug, thiserror::Error)]
#[error("callback {name}: {source}")]
struct CallbackError {
    name: String,
    source: Error,
}

/// Calls one hook of every callback that runs on this rank, in order.
pub(crate) fn call_hook(
    callbacks: &mut [Box<dyn Callback>],
    control: &mut Control,
    ranks: &Distributed,
    mut hook: impl FnMut(&mut dyn Callback, &mut Control) -> Result<()>,
) -> Result<()> {
    call_hook_with_index(callbacks, control, ranks, |_, callback, control| hook(callback, control))
}

/// Same as [`hook`], and passes each callback's index.
fn call_hook_with_index(
    callbacks: &mut [Box<dyn Callback>],
    control: &mut Control,
    ranks: &Distributed,
    mut hook: impl FnMut(usize, &mut dyn Callback, &mut Control) -> Result<()>,
) -> Result<()> {
    for index in 0..callbacks.len() {
        let callback = &mut callbacks[index];
        let is_chief_only = callback.chief_only() && ranks.size() > 1;
        if is_chief_only && ranks.rank() > 0 {
            continue;
        }
        // Set aside requests of earlier callbacks: they are not this callback's.
        let requests = is_chief_only.then(|| control.take_requests());
        let done = match catch_panic(|| hook(index, &mut **callback, control)) {
            Ok(()) if is_chief_only && control.has_requests() => {
                let text = "a `chief_only` callback cannot stop training, keep weights or change \
                            the learning rate with several ranks; return false from `chief_only`";
                Err(text.into())
            }
            done => done,
        };
        requests.into_iter().for_each(|requests| control.set_requests(requests));
        done.map_err(|source| CallbackError {
            name: unique_names(callbacks).swap_remove(index),
            source,
        })?;
    }
    Ok(())
}

/// Calls a callback and turns its panic into an error.
fn catch_panic<T>(call: impl FnOnce() -> Result<T>) -> Result<T> {
    catch_unwind(AssertUnwindSafe(call))
        .unwrap_or_else(|panic| Err(error_from_unwind(panic, |why| format!("panicked: {why}"))))
}

/// Returns the callbacks' names for errors and checkpoints. The second callback of a name gets `2`
/// after its name, the third `3`.
fn unique_names(callbacks: &[Box<dyn Callback>]) -> Vec<String> {
    let mut names: Vec<String> = vec![];
    for callback in callbacks {
        let name = callback.name();
        let numbered = (2..).map(|number| format!("{name} {number}"));
        let mut all = std::iter::once(name.clone()).chain(numbered);
        names.extend(all.find(|name| !names.contains(name)));
    }
    names
}

#[cfg(test)]
pub(crate) mod tests;
