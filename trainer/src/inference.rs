//! A data set through a trained model, every input exactly once.
//!
//! ```text
//!  plan    input -> shards, checkpoint                  plan.json, once
//!  work    shard -> rows -> batches -> model -> part    a part, then the commit that names it
//!  finish  commits -> parts in order                    manifest.json, last
//! ```
//!
//! A process may be killed anywhere. A part that no commit names was never written, as far as anybody looks; a shard
//! without a commit is done again, by whoever has the slot. Readers follow the manifest, which names one part for each
//! shard. Nothing depends on who is first: two that do the same shard write two parts, and one commit stays.

mod alone;
#[cfg(feature = "parquet")]
mod cell;
mod finish;
mod names;
mod output;
mod parts;
mod plan;
mod rows;
mod scan;
mod source;
#[cfg(feature = "parquet")]
mod table;
#[cfg(test)]
mod tests;
mod work;

use std::io::Write as _;
use std::process;

use serde::Serialize;
use serde::de::DeserializeOwned;
use stoker_api::contract::ExitCode;
use stoker_api::inference::{InferenceTask, Role};
use stoker_api::names::ENV_TRIAL_CONFIG;

use crate::context::Context;
use crate::device;
use crate::error::{Infrastructure, Interrupted};
use crate::train::program;
use crate::{Error, InvalidInput, Result};

/// What puts rows through a model. Run it by [`infer`].
///
/// # Examples
///
/// ```no_run
/// use stoker_trainer::{Context, Inference, Result};
///
/// #[derive(serde::Deserialize)]
/// struct Numbers { left: f64, right: f64 }
///
/// #[derive(serde::Serialize)]
/// struct Sum { sum: f64 }
///
/// struct Add;
///
/// impl Inference for Add {
///     type Input = Numbers;
///     type Output = Sum;
///
///     fn new(_: &Context) -> Result<Self> { Ok(Self) }
///
///     fn batch(&mut self, inputs: Vec<Numbers>) -> Result<Vec<Sum>> {
///         Ok(inputs.iter().map(|it| Sum { sum: it.left + it.right }).collect())
///     }
/// }
///
/// fn main() -> std::process::ExitCode { stoker_trainer::infer::<Add>() }
/// ```
pub trait Inference: Sized {
    /// A row of the input: of JSON the value of a line, of a table a struct with its columns.
    type Input: DeserializeOwned;
    /// What the model says of a row. To make one row of the other, hand on what names it.
    type Output: Serialize;

    /// Loads the model: [`Context::checkpoint`] is the one that the job names, `context.hparams()` those that it was
    /// trained with.
    ///
    /// # Errors
    ///
    /// [`InvalidInput`] where trying again would not help; after any other it is tried again.
    fn new(context: &Context) -> Result<Self>;

    /// Whether a row can be put through the model. One that cannot is treated as one that cannot be read.
    ///
    /// # Errors
    ///
    /// What is wrong with it.
    fn check(&self, _input: &Self::Input) -> Result<()> {
        Ok(())
    }

    /// One output for each input, in their order. To give the same bits whatever was killed, it must depend on nothing
    /// else; batches never reach over the end of a shard, so they are the same in every run.
    ///
    /// # Errors
    ///
    /// As [`Inference::new`].
    fn batch(&mut self, inputs: Vec<Self::Input>) -> Result<Vec<Self::Output>>;
}

/// A whole `fn main` for an inference. Without a runner, the program's arguments say what to read and where to write:
/// `--help` tells.
pub fn infer<T: Inference>() -> process::ExitCode {
    infer_with::<T>(std::env::args().skip(1))
}

/// As [`infer`], with these arguments in place of the program's: for a program of several.
pub fn infer_with<T: Inference>(arguments: impl IntoIterator<Item = String>) -> process::ExitCode {
    let (told, is_alone) = match std::env::var_os(ENV_TRIAL_CONFIG) {
        Some(path) => (program::under_runner(path.as_ref()), false),
        None => match alone::context(arguments) {
            Ok(Some(context)) => (Ok(context), true),
            Ok(None) => {
                say(alone::HELP);
                return process::ExitCode::SUCCESS;
            }
            Err(error) => (Err(error), true),
        },
    };
    let told = told.and_then(|context| prepare(context, is_alone));
    program::finish(told, |context| run::<T>(context, is_alone))
}

/// Sees to it that there is a plan where one is needed, and takes the checkpoint from it.
fn prepare(mut context: Context, is_alone: bool) -> Result<Context> {
    let task = task(&context)?;
    if is_alone || task.role == Role::Plan {
        plan::plan(&context)?;
    }
    if is_alone {
        plan::refuse_stale(&context)?;
    }
    if is_alone || task.role == Role::Work {
        let pinned = output::Output::open(&context)?.plan()?.checkpoint;
        if let Some(pinned) =
            pinned.as_ref().filter(|it| !task.has_hyperparameters && it.hyperparameters.is_object())
        {
            context.config.hyperparameters = pinned.hyperparameters.clone();
        }
        context.pinned = pinned;
        context = context.on(device::of_worker(task.slot)?);
    }
    Ok(context)
}

fn run<T: Inference>(context: &Context, is_alone: bool) -> Result<()> {
    match task(context)?.role {
        _ if is_alone => {
            work::work::<T>(context)?;
            finish::finish(context)
        }
        Role::Plan => Ok(()),
        Role::Work => work::work::<T>(context),
        Role::Finish => finish::finish(context),
    }
}

/// What this process is to do.
fn task(context: &Context) -> Result<InferenceTask> {
    let none = "this program puts rows through a model: run it by `stoker job run`, not as an experiment's trial";
    Ok(context.config.inference.clone().ok_or_else(|| InvalidInput(none.into()))?)
}

/// Reports how many rows are done of how many; never waits.
fn progress(context: &Context, done: u64, total: u64) {
    context.outlet().progress(done, total);
}

/// Leaves, as it was asked to.
fn interrupted() -> Error {
    let why = "asked to leave: what is committed stays".to_owned();
    Interrupted { code: ExitCode::Preempted, fenced: false, why }.into()
}

/// Tells whoever watches. A reader that has gone away ends nothing.
fn say(line: &str) {
    let _ = writeln!(std::io::stdout(), "{line}");
}

/// A format that this program was built without.
#[cfg(not(feature = "parquet"))]
fn not_built(format: stoker_api::inference::RowFormat) -> Error {
    let text = format!(
        "this program reads and writes no {format:?}: build it with the feature `parquet` of stoker-trainer"
    );
    InvalidInput(text).into()
}

fn infrastructure(text: String) -> Error {
    Infrastructure(text).into()
}
