//! Commands that run in a trial's pod around the user's program.
//!
//! * [`main`]: starts the program once for each rank of the pod and returns the worst exit code.
//! * [`setup`]: copies the launcher and the program's files into the pod before the start.
//! * [`clean_up`]: deletes checkpoints of an ended experiment and stores its final records.
//!
//! The stock trainer provides them as `stoker-trainer launch`, `setup` and `gc`. Any program may do
//! the same.

use std::path::{Path, PathBuf};
use std::process;
use std::time::{Duration, SystemTime};

use stoker_api::contract::{ExitCode, Report, Termination, TrialConfig};
use stoker_api::names::{
    ENV_LAUNCHED, ENV_LAUNCHER_LOGS, ENV_POD_INDEX, ENV_TERMINATION_FILE, ENV_TRIAL_CONFIG,
};
use stoker_api::time::Timestamp;
use stoker_storage::Storage;
use stoker_storage::segments::SegmentWriter;
use tokio::runtime::{Builder, Runtime};
use tokio::task::JoinSet;

use crate::error::{Infrastructure, Interrupted, exit_code};
use crate::{Result, termination};

mod children;
mod cleanup;
mod layout;
mod outcome;
mod output;
mod setup;
mod signals;
mod stored_attempts;
mod trial_record;
mod unpack;

use children::Children;
pub use cleanup::clean_up;
use layout::{GangLayout, RankTopology};
use outcome::{RankOutcome, worst_outcome};
use output::Output;
pub use setup::setup;
use signals::Signals;

/// Number of threads of burn's CPU backend.
const ENV_THREADS: &str = "RAYON_NUM_THREADS";
/// Maximum wait for remaining output once all processes have exited.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(5);
/// The same while descendants of a rank may still run.
const DRAIN_EARLY_TIMEOUT: Duration = Duration::from_millis(500);
/// Maximum wait for the storage to accept the rest of the logs.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(60);
/// Maximum wait for the storage to accept the end of the attempt.
const RECORD_TIMEOUT: Duration = Duration::from_secs(10);

/// Starts `command` once for each rank of this pod. Waits until all ranks and all processes that
/// they started have ended. Returns the worst exit code and writes its reason to the termination
/// message.
///
/// The output is printed, and stored in the trial's logs. Signals are forwarded to the ranks. If a
/// rank fails, the others are terminated. Without a trial in the environment, there is one rank and
/// no storage. Refuses to run as a rank, because Stoker itself starts the launcher around the
/// program of an experiment.
pub fn main(command: &[String]) -> process::ExitCode {
    finish(launch(command))
}

/// Result of a launch.
struct LaunchOutcome {
    code: u8,
    message: Option<String>,
    unsent: Vec<Report>,
}

fn finish(outcome: Result<LaunchOutcome>) -> process::ExitCode {
    match outcome {
        Ok(outcome) => process::ExitCode::from(outcome.code),
        Err(error) => report_error(&*error),
    }
}

/// Reports the error of this program itself and returns its exit code.
fn report_error(error: &(dyn std::error::Error + 'static)) -> process::ExitCode {
    let code = exit_code(error);
    let message = error.to_string();
    eprintln!("stoker: {message}");
    termination::record_exit(code, Some(&message), vec![]);
    process::ExitCode::from(code as u8)
}

fn launch(command: &[String]) -> Result<LaunchOutcome> {
    if command.is_empty() {
        return Err("launch requires a program: stoker-trainer launch -- PROGRAM ARGS".into());
    }
    if std::env::var_os(ENV_LAUNCHED).is_some() {
        let program = command.join(" ");
        let text = format!(
            "launch cannot start ranks below another launcher or `stoker run`; set \
             spec.entrypoint.command to the program alone, without the launcher: {program}"
        );
        return Err(text.into());
    }
    let runtime = runtime()?;
    runtime.block_on(async {
        // First of all: the kernel drops signals for which the first process of a container does
        // not listen.
        let mut signals = Signals::listen()?;
        let config = trial_config()?;
        let gang = config.as_ref().and_then(|config| config.gang.as_ref());
        let layout = GangLayout::new(gang, pod_index()?)?;
        let storage = open_storage(config.as_ref())?;
        if let (Some(storage), Some(config), 0) = (&storage, &config, layout.pod_index) {
            tokio::select! {
                biased;
                () = signals.stop_requested() => return Err(preempted_before_start()),
                checked = check(storage, config) => checked?,
            }
        }
        let is_stored = std::env::var(ENV_LAUNCHER_LOGS).map_or(true, |value| value != "off");
        // Outside a cluster, the runner keeps the trial's record. Job processes belong to no trial.
        let has_record = is_stored && layout.pod_index == 0;
        let recorded = config.as_ref().filter(|config| has_record && config.inference.is_none());
        let recorded = storage.clone().map(Storage::with_few_retries).zip(recorded);
        if let Some((storage, config)) = &recorded {
            tokio::select! {
                biased;
                () = signals.stop_requested() => return Err(preempted_before_start()),
                // Training does not need the record, so a failure must not stop it.
                written = trial_record::write(storage, config) => report_unwritten(written),
            }
        }
        let store = storage.filter(|_| is_stored).zip(config.as_ref());
        let outcome = run(command, &layout, store, signals).await?;
        if let Some((storage, config)) = &recorded {
            let (code, message) = (outcome.code, outcome.message.as_deref());
            let written = trial_record::complete(storage, config, code, message, now());
            match tokio::time::timeout(RECORD_TIMEOUT, written).await {
                Ok(written) => report_unwritten(written),
                Err(_) => report_unwritten(Err("the storage does not answer".into())),
            }
        }
        Ok(outcome)
    })
}

fn report_unwritten(written: Result<()>) {
    if let Err(error) = written {
        eprintln!("stoker: cannot write the trial's record to its directory: {error}");
    }
}

fn now() -> Timestamp {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    Timestamp(i64::try_from(now.as_secs()).unwrap_or(i64::MAX))
}

/// Reads the configuration of this pod's trial, if any.
fn trial_config() -> Result<Option<TrialConfig>> {
    match std::env::var_os(ENV_TRIAL_CONFIG) {
        Some(path) => read_json(Path::new(&path)).map(Some),
        None => Ok(None),
    }
}

/// Reads a configuration file of this pod.
fn read_json<T: serde::de::DeserializeOwned>(path: &Path) -> Result<T> {
    let read = std::fs::read(path).map_err(crate::Error::from);
    let parsed = read.and_then(|text| serde_json::from_slice(&text).map_err(crate::Error::from));
    Ok(parsed
        .map_err(|error| Infrastructure(format!("cannot read {}: {error}", path.display())))?)
}

fn pod_index() -> Result<u32> {
    let Ok(text) = std::env::var(ENV_POD_INDEX) else { return Ok(0) };
    Ok(text.parse().map_err(|_| {
        Infrastructure(format!("{ENV_POD_INDEX} is {text:?}, but must be a number"))
    })?)
}

fn runtime() -> Result<Runtime> {
    let runtime = Builder::new_current_thread().enable_all().build();
    Ok(runtime.map_err(|error| Infrastructure(format!("cannot start the runtime: {error}")))?)
}

fn open_storage(config: Option<&TrialConfig>) -> Result<Option<Storage>> {
    let config = config.map(|config| &config.storage).filter(|storage| !storage.url.is_empty());
    let open = |storage: &stoker_api::contract::StorageConfig| {
        Storage::open(&storage.url, storage.endpoint.as_deref())
    };
    Ok(config.map(open).transpose()?)
}

/// Tests the storage, and checks that this attempt of a trial may write to it.
async fn check(storage: &Storage, config: &TrialConfig) -> Result<()> {
    let few = || storage.clone().with_few_retries();
    let storage = patient(storage, config).unwrap_or_else(few);
    storage.probe().await?;
    if config.inference.is_none() {
        stored_attempts::check(&storage, &config.storage.trial_path, config.attempt).await?;
    }
    Ok(())
}

/// Returns the storage with long retries if the trial has a checkpoint, which shows that the
/// storage has worked. In an outage, attempts that fail soon would use up the trial's attempts.
fn patient(storage: &Storage, config: &TrialConfig) -> Option<Storage> {
    (!config.resume_from.is_empty()).then(|| storage.clone().with_long_retries())
}

fn preempted_before_start() -> crate::Error {
    let why = "preempted before the program was started".into();
    Interrupted { code: ExitCode::Preempted, fenced: false, why }.into()
}

async fn run(
    command: &[String],
    layout: &GangLayout,
    store: Option<(Storage, &TrialConfig)>,
    mut signals: Signals,
) -> Result<LaunchOutcome> {
    let folder = tempfile::Builder::new().prefix("stoker-launch-").tempdir();
    let folder = folder.map_err(|error| {
        let temp_dir = std::env::temp_dir();
        Infrastructure(format!("cannot write to {}: {error}; set TMPDIR", temp_dir.display()))
    })?;
    let mut children = Children::new()?;
    let mut outputs = vec![];
    for topology in layout.ranks() {
        let (file, environment) = environment(folder.path(), &topology);
        let output = Output::new(topology, store.as_ref());
        if let Err(error) = children.start(command, environment, &output) {
            children.kill_all().await;
            return Err(error);
        }
        outputs.push((topology.rank, file, output));
    }
    let writers = outputs.iter().filter_map(|(_, _, output)| output.writer()).collect();
    let storage_check = tokio::spawn(output::report_storage_outages(writers));
    let outcomes = children.wait_for_ranks(&mut signals).await;
    let is_stop_requested = children.is_stop_requested();
    if !is_stop_requested {
        children.kill_all().await;
    }
    for (_, _, output) in &outputs {
        output.drain(if is_stop_requested { DRAIN_EARLY_TIMEOUT } else { DRAIN_TIMEOUT }).await;
    }
    let outcome = combine_outcomes(&outputs, &outcomes);
    write_termination(&outcome);
    children.wait_for_descendants(&mut signals).await;
    for (_, _, output) in &outputs {
        output.drain(DRAIN_TIMEOUT).await;
    }
    storage_check.abort();
    flush(outputs).await;
    Ok(outcome)
}

/// Returns the path of a rank's termination file, and its environment variables.
fn environment(folder: &Path, topology: &RankTopology) -> (PathBuf, Vec<(&'static str, String)>) {
    let file = folder.join(format!("{}.json", topology.rank));
    let mut environment = topology.environment();
    environment.push((ENV_TERMINATION_FILE, file.display().to_string()));
    environment.push((ENV_LAUNCHED, "1".to_owned()));
    environment.extend(thread_limit(topology.local_world_size));
    (file, environment)
}

/// Divides the cores evenly between the ranks of a machine, unless the variable is already set.
fn thread_limit(num_ranks: u32) -> Option<(&'static str, String)> {
    if num_ranks == 1 || std::env::var_os(ENV_THREADS).is_some() {
        return None;
    }
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    Some((ENV_THREADS, (cores / num_ranks as usize).max(1).to_string()))
}

/// Combines the results of the ranks.
fn combine_outcomes(outputs: &[(u32, PathBuf, Output)], outcomes: &[RankOutcome]) -> LaunchOutcome {
    let terminations: Vec<Option<Termination>> =
        outputs.iter().map(|(_, file, _)| termination::read(file)).collect();
    let (worst_idx, code) = worst_outcome(outcomes);
    let termination_of_worst =
        terminations[worst_idx].as_ref().filter(|termination| termination.code == code);
    let message = match termination_of_worst {
        Some(termination_of_worst) => termination_of_worst.message.clone(),
        None => outcomes[worst_idx].describe(&outputs[worst_idx].2.last_lines()),
    };
    let (rank, _, output) = &outputs[worst_idx];
    let message =
        message.map(|text| if output.has_prefix() { format!("rank {rank}: {text}") } else { text });
    let unsent = terminations.into_iter().flatten().map(|termination| termination.unsent);
    let unsent = unsent.into_iter().find(|reports| !reports.is_empty()).unwrap_or_default();
    LaunchOutcome { code, message, unsent }
}

/// Writes the pod's termination message before waiting for remaining processes: the kubelet may
/// kill the pod meanwhile.
fn write_termination(outcome: &LaunchOutcome) {
    if let Some(path) = std::env::var_os(ENV_TERMINATION_FILE) {
        let (code, message) = (outcome.code, outcome.message.clone());
        let unsent = outcome.unsent.clone();
        termination::write_to(Path::new(&path), Termination { code, message, unsent });
    }
}

/// Stores the rest of the logs.
async fn flush(outputs: Vec<(u32, PathBuf, Output)>) {
    let writers: Vec<SegmentWriter> =
        outputs.iter().filter_map(|(_, _, output)| output.writer()).collect();
    // At the same time: the failure of one must not use up the time of the others.
    let mut flushes = JoinSet::new();
    for writer in writers {
        flushes.spawn(async move { writer.flush().await });
    }
    let all = async {
        for flushed in flushes.join_all().await {
            if let Err(error) = flushed {
                eprintln!("stoker: cannot store the end of the log: {error}");
            }
        }
    };
    match tokio::time::timeout(FLUSH_TIMEOUT, all).await {
        Ok(()) => {}
        Err(_) => {
            let seconds = FLUSH_TIMEOUT.as_secs();
            eprintln!("stoker: cannot store the end of the log within {seconds} s");
        }
    }
}
