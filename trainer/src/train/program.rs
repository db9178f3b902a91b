//! Program around a training: its configuration and exit code.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::process;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use serde_json::{Value, json};
use stoker_api::contract::{
    CONTRACT_VERSION, Directive, ExitCode, ReportEndpoint, StorageConfig, TrialConfig,
};
use stoker_api::experiment::{CheckpointPolicy, GradientCompression, Length, MixedPrecision, Unit};
use stoker_api::names::ENV_TRIAL_CONFIG;

use super::{Trial, run_trial};
use crate::checkpoint::RetentionLimits;
use crate::collective::{Distributed, LaunchConfig, RankActivity};
use crate::context::Context;
use crate::device::{self, RankDevice};
use crate::error::{Infrastructure, Interrupted, error_from_unwind, exit_code};
use crate::session::thread_dump;
use crate::stop::StopSignal;
use crate::terminal::Terminal;
use crate::trial_io::TrialIo;
use crate::{Result, allocator, termination};

pub(crate) mod arguments;
pub(crate) mod under_runner;

/// How long an exiting process waits for its last rows of metrics. A working storage takes less,
/// and a failing one must not delay the exit.
const FLUSH_MAX: Duration = Duration::from_secs(5);

/// How long a failed process waits for a checkpoint in progress. The launcher kills it 30 s after
/// another rank has failed, so this leaves time for rows and reports.
const SAVE_MAX: Duration = Duration::from_secs(20);

/// Configuration of a program without a runner.
#[derive(Clone, Debug, PartialEq)]
pub struct Standalone {
    /// Hyperparameters.
    pub hyperparameters: Value,
    /// Value of the experiment's `data`.
    pub data: Value,
    /// Seed of all random numbers.
    pub seed: u32,
    /// Training length. With `None`, [`Fit::epochs`](crate::Fit::epochs) sets it, or else it is one
    /// epoch.
    pub length: Option<Length>,
    /// Directory for checkpoints and metrics. Training resumes from its latest checkpoint that can
    /// be read, and fails if there are checkpoints but none can be. With `None`, nothing is stored.
    /// Only one program at a time may use a directory.
    pub folder: Option<PathBuf>,
    /// Number of latest checkpoints to retain in the directory (default and minimum: 1). Until
    /// training is over, at least 3 are retained.
    pub save_trial_latest: u32,
    /// Number of best checkpoints by `validation_loss` to retain in the directory (default: 1).
    pub save_trial_best: u32,
    /// How often to save (default: after each epoch). The end of training is always saved.
    pub checkpoint_period: Option<Length>,
    /// Batches between rows of training metrics (default: 100).
    pub scheduling_unit: u64,
    /// Half precision of steps and validations (default: none).
    pub mixed_precision: MixedPrecision,
    /// Whether to print nothing.
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
            mixed_precision: MixedPrecision::None,
            quiet: false,
        }
    }
}

impl Standalone {
    /// Returns the context of a program without a runner.
    ///
    /// Training samples weights from `seed`. For random numbers that the program samples itself,
    /// call `context.device().seed(..)`.
    ///
    /// # Errors
    ///
    /// Fails if the directory cannot be used.
    pub fn context(self) -> Result<Context> {
        let (quiet, limits) = (self.quiet, self.retention_limits());
        let context = context(self.config()?, Some(limits))?;
        if quiet {
            context.silence();
        }
        Ok(context)
    }

    /// Returns how many checkpoints to retain.
    pub(crate) fn retention_limits(&self) -> RetentionLimits {
        RetentionLimits { latest: self.save_trial_latest, best: self.save_trial_best }
    }

    /// Returns the configuration that a runner would provide.
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
            search_space: Value::Null,
            data: self.data,
            spec: Value::Null,
            unit,
            units,
            metric: "validation_loss".into(),
            time_metric: None,
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
            mixed_precision: self.mixed_precision,
            storage: StorageConfig {
                url: url.unwrap_or_default(),
                endpoint: None,
                trial_path: "trial".into(),
            },
            resume_from: vec![],
            unreported_since: None,
            report_endpoint: ReportEndpoint {
                url: String::new(),
                token_file: String::new(),
                ca: None,
            },
            gang: None,
            context: None,
            inference: None,
            records: None,
        })
    }
}

impl Context {
    /// Disables terminal output of training.
    pub(crate) fn silence(&self) {
        self.io().terminal = Terminal::silent();
    }
}

/// Returns the absolute path of a directory, as the storage requires it.
fn folder_url(folder: &Path) -> Result<String> {
    let absolute = std::path::absolute(folder)
        .map_err(|error| format!("cannot use directory {}: {error}", folder.display()))?;
    Ok(absolute.to_string_lossy().into_owned())
}

/// Returns the context of this process. Under a runner, it belongs to the trial that the runner
/// started. Otherwise, hyperparameters come from `STOKER_HPARAMS`, a JSON object, if it is set.
///
/// With a runner or several ranks, the process must exit with the right code. [`run`] and [`main`]
/// take care of that.
///
/// Seeds burn's random stream with the trial's seed, so call this before the program samples random
/// numbers.
///
/// # Errors
///
/// Fails if the configuration of this process cannot be read, or belongs to an inference job.
pub fn init() -> Result<Context> {
    let context = create_context()?;
    context.seed_program();
    Ok(context)
}

/// Same as [`init`], without seeding burn's random stream.
fn create_context() -> Result<Context> {
    allocator::keep_freed_memory();
    match std::env::var_os(ENV_TRIAL_CONFIG) {
        Some(path) => under_runner::training(Path::new(&path)),
        None => alone(arguments::from_environment()?, "call `run_in(FOLDER, program)`"),
    }
}

/// Complete `fn main` for a trial. Without a runner, the program's arguments configure the
/// training; see `--help`.
pub fn main<T: Trial>() -> process::ExitCode {
    main_with::<T>(std::env::args().skip(1))
}

/// Same as [`main`], with these arguments instead of the program's, for programs with several
/// trials.
pub fn main_with<T: Trial>(arguments: impl IntoIterator<Item = String>) -> process::ExitCode {
    run_with(arguments, |context| run_trial::<T>(context).map(drop))
}

/// Complete `fn main` for a script: creates the context, runs `program`, and converts its result or
/// panic into the exit code that the runner expects. Ignores the command line; see [`run_with`].
pub fn run(program: impl FnOnce(&Context) -> Result<()>) -> process::ExitCode {
    finish(create_context(), program)
}

/// Same as [`run`], but without a runner, these arguments configure the training, as in [`main`]:
/// `run_with(std::env::args().skip(1), program)`.
pub fn run_with(
    arguments: impl IntoIterator<Item = String>,
    program: impl FnOnce(&Context) -> Result<()>,
) -> process::ExitCode {
    allocator::keep_freed_memory();
    let context = match std::env::var_os(ENV_TRIAL_CONFIG) {
        Some(path) => under_runner::training(Path::new(&path)),
        None => match arguments::parse(arguments) {
            Ok(Some(standalone)) => alone(standalone, "set `--folder PATH`"),
            Ok(None) => {
                println!("{}", arguments::HELP);
                return process::ExitCode::SUCCESS;
            }
            Err(error) => Err(error),
        },
    };
    finish(context, program)
}

/// Same as [`run`], but without a runner, the program stores checkpoints and metrics in this
/// directory and resumes from the latest checkpoint. Also ignores the command line.
pub fn run_in(
    folder: impl Into<PathBuf>,
    program: impl FnOnce(&Context) -> Result<()>,
) -> process::ExitCode {
    allocator::keep_freed_memory();
    let context = match std::env::var_os(ENV_TRIAL_CONFIG) {
        Some(path) => under_runner::training(Path::new(&path)),
        None => arguments::from_environment().and_then(|standalone| {
            Standalone { folder: Some(folder.into()), ..standalone }.context()
        }),
    };
    finish(context, program)
}

/// Returns the context of a program without a runner. If it stores nothing, prints a note with
/// `remedy`, because some entry points ignore the program's arguments.
fn alone(standalone: Standalone, remedy: &str) -> Result<Context> {
    let (has_folder, context) = (standalone.folder.is_some(), standalone.context()?);
    if !has_folder && context.distributed().rank() == 0 {
        eprintln!("note: no checkpoint is stored; {remedy} to store them and resume");
    }
    Ok(context)
}

/// Creates the context of one rank and waits for the other ranks. `standalone_limits` is `None`
/// under a runner.
pub(crate) fn context(
    mut config: TrialConfig,
    standalone_limits: Option<RetentionLimits>,
) -> Result<Context> {
    device::prefer_host()?;
    let is_alone = standalone_limits.is_some();
    let launched =
        if is_alone { LaunchConfig::for_program() } else { LaunchConfig::for_trial(&config) }?;
    let rank_device = RankDevice::for_local_rank(launched.topology.local_rank)?;
    // Keep the configuration that all ranks share, before `TrialIo` changes this process's copy.
    let shared = config.clone();
    let io = TrialIo::open(&mut config, standalone_limits, launched.topology.rank == 0)?;
    let stop = StopSignal::default();
    let installed = stop.listen(io.runtime(), is_alone);
    installed
        .map_err(|error| Infrastructure(format!("cannot install signal handlers: {error}")))?;
    let progress = Arc::<OnceLock<_>>::default();
    let installed = thread_dump::listen(io.runtime(), launched.topology.rank, progress.clone());
    installed
        .map_err(|error| Infrastructure(format!("cannot install signal handlers: {error}")))?;
    let ranks = Distributed::join(&shared, &launched, rank_device.gpu, &stop)?;
    let _ = progress.set(ranks.progress.clone());
    Ok(Context::new(config, io, stop, rank_device.device, ranks))
}

/// Runs `program`, reports its end, and returns the exit code.
pub(crate) fn finish(
    context: Result<Context>,
    program: impl FnOnce(&Context) -> Result<()>,
) -> process::ExitCode {
    let context = match context {
        Ok(context) => context,
        Err(error) => {
            let code = exit_code(&*error);
            eprintln!("error: {error}");
            termination::record_exit(code, Some(&error.to_string()), vec![]);
            return process::ExitCode::from(code as u8);
        }
    };
    context.seed_program();
    let result = catch_unwind(AssertUnwindSafe(|| program(&context)))
        .unwrap_or_else(|panic| Err(error_from_unwind(panic, |why| panic_text(&context, why))));
    #[cfg(feature = "learner")]
    let result = context.learner_state.outcome(result);
    let (code, message) = match &result {
        Ok(()) => (ExitCode::Completed, None),
        Err(error) => (exit_code(&**error), Some(error.to_string())),
    };
    if !matches!(code, ExitCode::Completed | ExitCode::Preempted) {
        context.distributed().progress.record_failure();
    }
    match (&message, code) {
        (Some(message), ExitCode::Completed | ExitCode::Preempted) => eprintln!("{message}"),
        (Some(message), _) => eprintln!("error: {message}"),
        (None, _) => {}
    }
    let interrupted = result.as_ref().err().and_then(|error| error.downcast_ref::<Interrupted>());
    // A panic in the loop poisons the lock, but rows and reports can still be sent.
    let mut io = context.io();
    if interrupted.is_some_and(|interrupted| interrupted.fenced)
        || io.directive() == Some(Directive::Fenced)
    {
        exit_fenced(code, message.as_deref());
    }
    io.report_last_validation();
    finish_save(&context, &mut io, code, message.as_deref());
    if code == ExitCode::Completed {
        io.end_training();
    }
    io.end_session(code);
    // Store the rows before a failure: they help to explain it.
    if let Err(error) = io.flush_within(FLUSH_MAX) {
        eprintln!("stoker: cannot store the last rows of metrics: {error}");
    }
    io.close(io.batches(), code, message.clone());
    termination::record_exit(code, message.as_deref(), io.unsent());
    process::ExitCode::from(code as u8)
}

/// Exits without the queued writes: another attempt has replaced this one.
fn exit_fenced(code: ExitCode, message: Option<&str>) -> ! {
    termination::record_exit(code, message, vec![]);
    process::exit(code as i32)
}

/// Reports complete checkpoints, and waits a while for a save in progress.
fn finish_save(context: &Context, io: &mut TrialIo, code: ExitCode, message: Option<&str>) {
    let log = |saved: Result<()>| {
        if let Err(error) = saved {
            eprintln!("stoker: cannot store the last checkpoint: {error}");
        }
    };
    log(io.report_saved(false));
    // Record the exit before the waits of this and later steps: the process may be killed.
    termination::record_exit(code, message, io.unsent());
    let Some(name) = io.checkpoint_in_progress() else { return };
    eprintln!("stoker: storing checkpoint {name} before the exit");
    // The watchdog must not force the exit meanwhile, but must do so if a later part hangs.
    context.distributed().record_activity(RankActivity::Wait);
    log(io.report_saved_within(SAVE_MAX));
    context.distributed().record_activity(RankActivity::Train);
    if io.directive() == Some(Directive::Fenced) {
        exit_fenced(code, message);
    }
    termination::record_exit(code, message, io.unsent());
}

/// Formats a panic message, with a hint for mixed precision, where layers that create tensors
/// panic.
pub(super) fn panic_text(context: &Context, message: &str) -> String {
    let hint = match context.config.mixed_precision {
        MixedPrecision::None => "",
        MixedPrecision::Bf16 => {
            " (optimizations.mixedPrecision is bf16: create tensors with `context.dtype()`, and \
             call `BatchNormExt::forward_fused` instead of `BatchNorm::forward`; see docs/gpus.md)"
        }
    };
    format!("panicked: {message}{hint}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn relative_folders_start_at_the_working_directory() {
        let here = std::env::current_dir().unwrap();
        let check = |folder: &str, expected: &Path| {
            assert_eq!(folder_url(Path::new(folder)).unwrap(), expected.to_str().unwrap());
        };
        check("runs/1", &here.join("runs/1"));
        check("./runs", &here.join("runs"));
        check("/runs", Path::new("/runs"));
    }
}
