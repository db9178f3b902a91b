//! The program around a training: what it is told, and its exit code.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::process;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use serde_json::{Value, json};
use stoker_api::contract::{
    CONTRACT_VERSION, Directive, Door, ExitCode, StorageConfig, TrialConfig,
};
use stoker_api::experiment::{CheckpointPolicy, GradientCompression, Length, MixedPrecision, Unit};
use stoker_api::names::ENV_TRIAL_CONFIG;

use super::{Trial, run_trial};
use crate::checkpoint::Keep;
use crate::collective::{Distributed, Launched};
use crate::context::Context;
use crate::device::{self, Place};
use crate::error::{Infrastructure, Interrupted, caught, exit_code};
use crate::outlet::Outlet;
use crate::session::threads;
use crate::stop::StopSignal;
use crate::terminal::Terminal;
use crate::{Error, Result, termination};

pub(crate) mod arguments;

/// How long a process that ends waits for its last rows of metrics: a storage that works takes less,
/// and one that does not must not hold the end up.
const FLUSH_MAX: Duration = Duration::from_secs(5);

/// How a program trains that no runner has started.
#[derive(Clone, Debug, PartialEq)]
pub struct Standalone {
    /// The hyperparameters.
    pub hyperparameters: Value,
    /// What an experiment's `data` would be.
    pub data: Value,
    /// The seed of everything.
    pub seed: u32,
    /// How long to train; `None` leaves it to [`Fit::epochs`](crate::Fit::epochs), or else one
    /// epoch.
    pub length: Option<Length>,
    /// A folder for checkpoints and metrics, from whose latest checkpoint training goes on; `None`
    /// keeps none. One program at a time uses a folder.
    pub folder: Option<PathBuf>,
    /// How many of the latest checkpoints to keep in the folder (default: 1, the least), and at least 3 until
    /// training is over.
    pub save_trial_latest: u32,
    /// How many of the best checkpoints by `validation_loss` to keep in the folder (default: 1).
    pub save_trial_best: u32,
    /// How often to save (default: after each epoch); at the end in any case.
    pub checkpoint_period: Option<Length>,
    /// Batches between two rows of training metrics.
    pub scheduling_unit: u64,
    /// Prints nothing.
    pub quiet: bool,
}

impl Default for Standalone {
    fn default() -> Self {
        Self {
            hyperparameters: json!({}),
            data: json!({}),
            seed: 0,
            length: None,
            folder: None,
            save_trial_latest: 1,
            save_trial_best: 1,
            checkpoint_period: None,
            scheduling_unit: 100,
            quiet: false,
        }
    }
}

impl Standalone {
    /// The session of a program that trains alone.
    ///
    /// Training draws weights from `seed`. Random numbers that the program draws itself are not seeded:
    /// call `context.device().seed(..)` for those.
    ///
    /// # Errors
    ///
    /// The folder cannot be used.
    pub fn context(self) -> Result<Context> {
        let (quiet, keep) = (self.quiet, self.keep());
        let context = context(self.config()?, Some(keep))?;
        if quiet {
            context.silence();
        }
        Ok(context)
    }

    /// The checkpoints to keep.
    pub(crate) fn keep(&self) -> Keep {
        Keep { latest: self.save_trial_latest, best: self.save_trial_best }
    }

    /// What a runner would tell.
    pub(crate) fn config(self) -> Result<TrialConfig> {
        let (unit, units) =
            self.length.and_then(|length| length.get()).unwrap_or((Unit::Epochs, 0));
        let url = self.folder.as_deref().map(folder_url).transpose()?;
        let epoch = Some(Length::new(Unit::Epochs, 1));
        Ok(TrialConfig {
            version: CONTRACT_VERSION,
            experiment: "alone".into(),
            experiment_id: "alone".into(),
            trial: 0,
            attempt: 0,
            seed: self.seed,
            experiment_seed: self.seed,
            hyperparameters: self.hyperparameters,
            data: self.data,
            spec: Value::Null,
            unit,
            units,
            metric: "validation_loss".into(),
            smaller_is_better: true,
            scheduling_unit: self.scheduling_unit,
            records_per_epoch: 0,
            validation_period: epoch,
            checkpoint_period: self.checkpoint_period.or(epoch),
            checkpoint_policy: CheckpointPolicy::None,
            perform_initial_validation: false,
            aggregation_frequency: 1,
            average_aggregated_gradients: true,
            gradient_compression: GradientCompression::None,
            mixed_precision: MixedPrecision::None,
            storage: StorageConfig {
                url: url.unwrap_or_default(),
                endpoint: None,
                trial_path: "trial".into(),
            },
            resume_from: vec![],
            door: Door { url: String::new(), token_file: String::new(), ca: None },
            gang: None,
            context: None,
            inference: None,
        })
    }
}

impl Context {
    /// Prints nothing of training from here on.
    pub(crate) fn silence(&self) {
        self.outlet().terminal = Terminal::silent();
    }
}

/// A folder as the storage takes it: absolute, wherever the program was started.
fn folder_url(folder: &Path) -> Result<String> {
    let absolute = std::path::absolute(folder)
        .map_err(|error| format!("folder {} cannot be used: {error}", folder.display()))?;
    Ok(absolute.to_string_lossy().into_owned())
}

/// The session of this process: of the trial that a runner has started it for, or alone, with the
/// hyperparameters in `STOKER_HPARAMS`, a JSON object, if it is set.
///
/// In a gang or under a runner the exit code says what happened, which [`run`] and [`main`] see to.
///
/// Seeds burn's random stream by the trial's seed: call it before the program draws random numbers.
///
/// # Errors
///
/// What the process was told cannot be read.
pub fn init() -> Result<Context> {
    let context = session()?;
    context.seed_program();
    Ok(context)
}

/// As [`init`], with burn's random stream left alone.
fn session() -> Result<Context> {
    match std::env::var_os(ENV_TRIAL_CONFIG) {
        Some(path) => under_runner(Path::new(&path)),
        None => arguments::from_environment()?.context(),
    }
}

/// A whole `fn main` for a trial. Alone, the program's arguments say how to train: `--help` tells.
pub fn main<T: Trial>() -> process::ExitCode {
    main_with::<T>(std::env::args().skip(1))
}

/// As [`main`], with these arguments in place of the program's: for a program of several trials.
pub fn main_with<T: Trial>(arguments: impl IntoIterator<Item = String>) -> process::ExitCode {
    run_with(arguments, |context| run_trial::<T>(context).map(drop))
}

/// A whole `fn main` for a script: makes the session, runs `program`, and turns what it returns,
/// and a panic, into the exit code that a runner understands.
pub fn run(program: impl FnOnce(&Context) -> Result<()>) -> process::ExitCode {
    finish(session(), program)
}

/// As [`run`]; alone, these arguments say how to train, as those of [`main`] do.
pub fn run_with(
    arguments: impl IntoIterator<Item = String>,
    program: impl FnOnce(&Context) -> Result<()>,
) -> process::ExitCode {
    let told = match std::env::var_os(ENV_TRIAL_CONFIG) {
        Some(path) => under_runner(Path::new(&path)),
        None => match arguments::parse(arguments) {
            Ok(Some(standalone)) => standalone.context(),
            Ok(None) => {
                println!("{}", arguments::HELP);
                return process::ExitCode::SUCCESS;
            }
            Err(error) => Err(error),
        },
    };
    finish(told, program)
}

/// As [`run`]; alone, the program keeps checkpoints and metrics in this folder, and goes on from the
/// latest.
pub fn run_in(
    folder: impl Into<PathBuf>,
    program: impl FnOnce(&Context) -> Result<()>,
) -> process::ExitCode {
    let told = match std::env::var_os(ENV_TRIAL_CONFIG) {
        Some(path) => under_runner(Path::new(&path)),
        None => arguments::from_environment().and_then(|standalone| {
            Standalone { folder: Some(folder.into()), ..standalone }.context()
        }),
    };
    finish(told, program)
}

pub(crate) fn under_runner(path: &Path) -> Result<Context> {
    let told = std::fs::read(path)
        .map_err(Error::from)
        .and_then(|bytes| serde_json::from_slice::<TrialConfig>(&bytes).map_err(Error::from));
    let told = told.map_err(|error| {
        Infrastructure(format!("{ENV_TRIAL_CONFIG}: {} cannot be read: {error}", path.display()))
    })?;
    context(told, None)
}

/// The session of one rank; waits for the others. `alone` is `None` under a runner.
pub(crate) fn context(mut config: TrialConfig, alone: Option<Keep>) -> Result<Context> {
    device::prefer_host()?;
    let is_alone = alone.is_some();
    let launched = if is_alone { Launched::for_program() } else { Launched::for_trial(&config) }?;
    let place = Place::of(launched.numbers.local_rank)?;
    // As all were told, before the session fills in what is its own.
    let told = config.clone();
    let outlet = Outlet::open(&mut config, alone, launched.numbers.rank == 0)?;
    let stop = StopSignal::default();
    let listening = stop.listen(outlet.runtime(), is_alone);
    listening.map_err(|error| Infrastructure(format!("no signal handlers: {error}")))?;
    let pulse = Arc::<OnceLock<_>>::default();
    let telling = threads::listen(outlet.runtime(), launched.numbers.rank, pulse.clone());
    telling.map_err(|error| Infrastructure(format!("no signal handlers: {error}")))?;
    let ranks = Distributed::join(&told, &launched, place.gpu, &stop)?;
    let _ = pulse.set(ranks.pulse.clone());
    Ok(Context::new(config, outlet, stop, place.device, ranks))
}

/// Runs, reports the end, gives the exit code.
pub(crate) fn finish(
    context: Result<Context>,
    program: impl FnOnce(&Context) -> Result<()>,
) -> process::ExitCode {
    let context = match context {
        Ok(context) => context,
        Err(error) => {
            let code = exit_code(&*error);
            eprintln!("error: {error}");
            termination::leave(code, Some(&error.to_string()), vec![]);
            return process::ExitCode::from(code as u8);
        }
    };
    context.seed_program();
    let result = catch_unwind(AssertUnwindSafe(|| program(&context)))
        .unwrap_or_else(|panic| Err(caught(panic, |why| panicked(&context, why))));
    #[cfg(feature = "learner")]
    let result = context.learning.outcome(result);
    let (code, message) = match &result {
        Ok(()) => (ExitCode::Completed, None),
        Err(error) => (exit_code(&**error), Some(error.to_string())),
    };
    if !matches!(code, ExitCode::Completed | ExitCode::Preempted) {
        context.distributed().pulse.fail();
    }
    match (&message, code) {
        (Some(message), ExitCode::Completed | ExitCode::Preempted) => eprintln!("{message}"),
        (Some(message), _) => eprintln!("error: {message}"),
        (None, _) => {}
    }
    let interrupted = result.as_ref().err().and_then(|error| error.downcast_ref::<Interrupted>());
    // A panic in the loop poisons the lock, but rows and reports can still be sent.
    let mut outlet = context.outlet();
    if interrupted.is_some_and(|it| it.fenced) || outlet.directive() == Some(Directive::Fenced) {
        // Another attempt has this one's place: whatever is still queued must not be written.
        termination::leave(code, message.as_deref(), vec![]);
        process::exit(code as i32);
    }
    outlet.tell_validation();
    // Before the waits below: the process may be given less time than they take.
    termination::leave(code, message.as_deref(), outlet.unsent());
    if code == ExitCode::Completed {
        outlet.end_training();
    }
    // The rows before a failure are those that explain it.
    if let Err(error) = outlet.flush_within(FLUSH_MAX) {
        eprintln!("stoker: the last rows of metrics are not stored: {error}");
    }
    outlet.close(outlet.batches(), code, message.clone());
    termination::leave(code, message.as_deref(), outlet.unsent());
    process::ExitCode::from(code as u8)
}

/// What a panic says. Layers that make tensors themselves panic in mixed precision.
pub(super) fn panicked(context: &Context, message: &str) -> String {
    let hint = match context.config.mixed_precision {
        MixedPrecision::None => "",
        MixedPrecision::Bf16 => {
            " (optimizations.mixedPrecision is bf16: tensors that a program or a layer makes itself \
             must be of `context.dtype()`; see docs/gpus.md)"
        }
    };
    format!("panicked: {message}{hint}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_is_taken_from_where_the_program_was_started() {
        let here = std::env::current_dir().unwrap();
        let check = |folder: &str, expected: &Path| {
            assert_eq!(folder_url(Path::new(folder)).unwrap(), expected.to_str().unwrap());
        };
        check("runs/1", &here.join("runs/1"));
        check("./runs", &here.join("runs"));
        check("/runs", Path::new("/runs"));
    }
}
