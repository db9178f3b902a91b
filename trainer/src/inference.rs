//! Batch inference: applies a trained model to a data set, exactly once per input row.
//!
//! ```text
//!  plan    input -> shards, checkpoint                  writes plan.json once
//!  work    shard -> rows -> batches -> model -> part    writes a part, then its commit
//!  finish  commits -> parts in order                    writes manifest.json last
//! ```
//!
//! Processes may be killed at any time. A part without a commit is ignored. A shard without a
//! commit is processed again by the worker that owns its slot. Readers follow the manifest, which
//! lists one part for each shard.
//!
//! Correctness does not depend on which process is first: if two process the same shard, they write
//! two parts, and one commit remains.

#[cfg(feature = "parquet")]
mod cell;
mod commits;
mod field_names;
mod finish;
mod input_reader;
mod output_folder;
mod part_writer;
mod plan;
mod remedy;
mod rows;
mod scan;
mod source;
mod standalone;
#[cfg(feature = "parquet")]
mod table;
#[cfg(feature = "parquet")]
mod table_reader;
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
use crate::{Error, InvalidInput, Result, allocator};

/// A model for batch inference. Run it with [`infer`].
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
///         Ok(inputs.iter().map(|row| Sum { sum: row.left + row.right }).collect())
///     }
/// }
///
/// fn main() -> std::process::ExitCode { stoker_trainer::infer::<Add>() }
/// ```
pub trait Inference: Sized {
    /// An input row. For JSON lines, the value of a line; for tables, a struct with the columns as
    /// fields.
    type Input: DeserializeOwned;
    /// The output for one row. It is not joined with the input, so include a key of the row if
    /// needed.
    type Output: Serialize;

    /// Loads the model. [`Context::checkpoint`] returns the job's checkpoint, and
    /// `context.hparams()` the hyperparameters of its training.
    ///
    /// # Errors
    ///
    /// Return [`InvalidInput`] for permanent errors. After any other error, the job retries.
    fn new(context: &Context) -> Result<Self>;

    /// Validates a row. A row that fails is handled like a row that cannot be parsed.
    ///
    /// # Errors
    ///
    /// Return the reason why the row is invalid.
    fn check(&self, _input: &Self::Input) -> Result<()> {
        Ok(())
    }

    /// Returns one output for each input, in the same order. For output that is bit-identical
    /// despite restarts, the result must depend only on the inputs. Batches never span shards, so
    /// they are the same in every run.
    ///
    /// # Errors
    ///
    /// Same as [`Inference::new`].
    fn batch(&mut self, inputs: Vec<Self::Input>) -> Result<Vec<Self::Output>>;
}

/// Complete `main` function of an inference program. Without a runner, the program's arguments
/// specify input and output; see `--help`.
pub fn infer<T: Inference>() -> process::ExitCode {
    infer_with::<T>(std::env::args().skip(1))
}

/// Same as [`infer`], with explicit arguments, for a program with several functions.
pub fn infer_with<T: Inference>(arguments: impl IntoIterator<Item = String>) -> process::ExitCode {
    allocator::keep_freed_memory();
    let (context, is_standalone) = match std::env::var_os(ENV_TRIAL_CONFIG) {
        Some(path) => (program::under_runner::inference(path.as_ref()), false),
        None => match standalone::context(arguments) {
            Ok(Some(context)) => (Ok(context), true),
            Ok(None) => {
                print_line(standalone::HELP);
                return process::ExitCode::SUCCESS;
            }
            Err(error) => (Err(error), true),
        },
    };
    let context = context.and_then(|context| prepare(context, is_standalone));
    program::finish(context, |context| run::<T>(context, is_standalone))
}

/// Ensures that the plan exists, if this process needs it, and selects its checkpoint.
fn prepare(mut context: Context, is_standalone: bool) -> Result<Context> {
    if is_standalone {
        standalone::select_run(&mut context)?;
    }
    let task = task(&context)?;
    if is_standalone || task.role == Role::Plan {
        plan::plan(&context)?;
    }
    if is_standalone {
        plan::refuse_stale(&context)?;
    }
    if is_standalone || task.role == Role::Work {
        let pinned = output_folder::OutputFolder::open(&context)?.plan()?.checkpoint;
        let with_hyperparameters = pinned
            .as_ref()
            .filter(|pinned| !task.has_hyperparameters && pinned.hyperparameters.is_object());
        if let Some(pinned) = with_hyperparameters {
            context.config.hyperparameters = pinned.hyperparameters.clone();
        }
        context.pinned = pinned;
        context = context.with_device(device::for_worker(task.slot)?);
    }
    Ok(context)
}

fn run<T: Inference>(context: &Context, is_standalone: bool) -> Result<()> {
    match task(context)?.role {
        _ if is_standalone => {
            work::work::<T>(context)?;
            finish::finish(context)
        }
        Role::Plan => Ok(()),
        Role::Work => work::work::<T>(context),
        Role::Finish => finish::finish(context),
    }
}

/// Returns the task of this process.
fn task(context: &Context) -> Result<InferenceTask> {
    let none = "this is an inference program; run it with `stoker job run`, not as a trial of an \
                experiment";
    Ok(context.config.inference.clone().ok_or_else(|| InvalidInput(none.into()))?)
}

/// Reports the number of rows done and in total; never blocks.
fn progress(context: &Context, done: u64, total: u64) {
    context.io().progress(done, total);
}

/// Error for a process that stops on request.
fn interrupted() -> Error {
    let why = "preempted; committed shards are kept".to_owned();
    Interrupted { code: ExitCode::Preempted, fenced: false, why }.into()
}

/// Prints a line; ignores a closed pipe.
fn print_line(line: &str) {
    let _ = writeln!(std::io::stdout(), "{line}");
}

/// Error for a format that requires a feature which this program was built without.
#[cfg(not(feature = "parquet"))]
fn unsupported_format(format: stoker_api::inference::RowFormat) -> Error {
    let text = format!(
        "this program does not support {format:?}; enable the feature `parquet` of stoker-trainer"
    );
    InvalidInput(text).into()
}

fn infrastructure(text: String) -> Error {
    Infrastructure(text).into()
}
