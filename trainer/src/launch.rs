//! What a trial's pod runs beside the user's program.
//!
//! * [`main`]: starts the program once for each rank of the pod, and gives the exit code of the
//!   worst.
//! * [`setup`]: before it, puts the launcher and the program's files into the pod.
//! * [`clean_up`]: deletes an ended experiment's checkpoints.
//!
//! The stock trainer offers them as `stoker-trainer launch`, `setup` and `gc`; so may any program.

use std::path::{Path, PathBuf};
use std::process;
use std::time::Duration;

use stoker_api::contract::{ExitCode, Report, Termination, TrialConfig};
use stoker_api::names::{ENV_LAUNCHER_LOGS, ENV_POD_INDEX, ENV_TERMINATION_FILE, ENV_TRIAL_CONFIG};
use stoker_storage::Storage;
use stoker_storage::segments::SegmentWriter;
use tokio::runtime::{Builder, Runtime};

use crate::error::{Infrastructure, Interrupted, exit_code};
use crate::{Result, termination};

mod children;
mod cleanup;
mod draw;
mod output;
mod setup;
mod shape;
mod signals;
mod unpack;
mod verdict;

use children::Children;
pub use cleanup::clean_up;
use output::Output;
pub use setup::setup;
use shape::{RankNumbers, Shape};
use signals::Signals;
use verdict::{Ended, worst};

/// How many threads burn's CPU backend computes with.
const ENV_THREADS: &str = "RAYON_NUM_THREADS";
/// How long output may take to arrive once all processes are dead.
const DRAIN_MAX: Duration = Duration::from_secs(5);
/// The same while what a rank has started may still run.
const DRAIN_EARLY_MAX: Duration = Duration::from_millis(500);
/// How long the storage may take for the rest of the logs before it is given up.
const FLUSH_MAX: Duration = Duration::from_secs(60);

/// Starts `command` once for each rank of this pod and waits until all have ended and nothing that
/// they started is left. Gives the worst of their exit codes, and says why in the termination
/// message.
///
/// What they print is shown and stored in the trial's logs. Signals are passed on. Where one rank
/// fails, the others are ended. Without a trial in the environment there is one rank and no
/// storage.
pub fn main(command: &[String]) -> process::ExitCode {
    finish(launch(command))
}

/// How a launch ended.
struct Outcome {
    code: u8,
    message: Option<String>,
    unsent: Vec<Report>,
}

fn finish(outcome: Result<Outcome>) -> process::ExitCode {
    match outcome {
        Ok(outcome) => process::ExitCode::from(outcome.code),
        Err(error) => failed(&*error),
    }
}

/// Says why this program itself failed.
fn failed(error: &(dyn std::error::Error + 'static)) -> process::ExitCode {
    let code = exit_code(error);
    let message = error.to_string();
    eprintln!("stoker: {message}");
    termination::leave(code, Some(&message), vec![]);
    process::ExitCode::from(code as u8)
}

fn launch(command: &[String]) -> Result<Outcome> {
    if command.is_empty() {
        return Err("launch needs a program: stoker-trainer launch -- PROGRAM ARGS".into());
    }
    let config = told()?;
    let shape = Shape::new(config.as_ref().and_then(|it| it.gang.as_ref()), pod_index()?)?;
    let runtime = runtime()?;
    runtime.block_on(async {
        let mut signals = Signals::listen()?;
        let storage = open_storage(config.as_ref())?;
        if let (Some(storage), 0) = (&storage, shape.pod_index) {
            tokio::select! {
                biased;
                () = signals.end() => return Err(asked_before_start()),
                tried = storage.probe() => tried?,
            }
        }
        let is_stored = std::env::var(ENV_LAUNCHER_LOGS).map_or(true, |it| it != "off");
        // Elsewhere whoever started this keeps the trial's record. A job's processes are of no trial.
        if let (Some(storage), Some(config), true, 0) =
            (&storage, config.as_ref(), is_stored, shape.pod_index)
            && config.inference.is_none()
        {
            let storage = storage.clone().impatient();
            tokio::select! {
                biased;
                () = signals.end() => return Err(asked_before_start()),
                // It is for jobs of later, and no reason to train nothing.
                written = draw::write(&storage, config) => if let Err(error) = written {
                    eprintln!("stoker: what the trial was drawn is not written beside it: {error}");
                },
            }
        }
        let store = storage.filter(|_| is_stored).zip(config.as_ref());
        run(command, &shape, store, signals).await
    })
}

/// The trial that this pod is of, if any.
fn told() -> Result<Option<TrialConfig>> {
    match std::env::var_os(ENV_TRIAL_CONFIG) {
        Some(path) => read_json(Path::new(&path)).map(Some),
        None => Ok(None),
    }
}

/// Reads a file that this pod was given.
fn read_json<T: serde::de::DeserializeOwned>(path: &Path) -> Result<T> {
    let read = std::fs::read(path).map_err(crate::Error::from);
    let parsed = read.and_then(|it| serde_json::from_slice(&it).map_err(crate::Error::from));
    Ok(parsed
        .map_err(|error| Infrastructure(format!("{} cannot be read: {error}", path.display())))?)
}

fn pod_index() -> Result<u32> {
    let Ok(text) = std::env::var(ENV_POD_INDEX) else { return Ok(0) };
    Ok(text.parse().map_err(|_| {
        Infrastructure(format!("{ENV_POD_INDEX} is {text:?}, but must be a number"))
    })?)
}

fn runtime() -> Result<Runtime> {
    let runtime = Builder::new_current_thread().enable_all().build();
    Ok(runtime.map_err(|error| Infrastructure(format!("no runtime: {error}")))?)
}

fn open_storage(config: Option<&TrialConfig>) -> Result<Option<Storage>> {
    let place = config.map(|it| &it.storage).filter(|it| !it.url.is_empty());
    let open =
        |it: &stoker_api::contract::StorageConfig| Storage::open(&it.url, it.endpoint.as_deref());
    Ok(place.map(open).transpose()?)
}

fn asked_before_start() -> crate::Error {
    let why = "asked to stop before the program was started".into();
    Interrupted { code: ExitCode::Preempted, fenced: false, why }.into()
}

async fn run(
    command: &[String],
    shape: &Shape,
    store: Option<(Storage, &TrialConfig)>,
    mut signals: Signals,
) -> Result<Outcome> {
    let folder = tempfile::Builder::new().prefix("stoker-launch-").tempdir();
    let folder = folder.map_err(|error| {
        let place = std::env::temp_dir();
        Infrastructure(format!("{} is not writable: {error}; set TMPDIR", place.display()))
    })?;
    let mut children = Children::new()?;
    let mut outputs = vec![];
    for numbers in shape.ranks() {
        let (file, environment) = environment(folder.path(), &numbers);
        let output = Output::new(numbers.rank, shape.world_size, store.as_ref());
        if let Err(error) = children.start(command, environment, &output) {
            children.kill_all().await;
            return Err(error);
        }
        outputs.push((numbers.rank, file, output));
    }
    let watched = outputs.iter().filter_map(|(_, _, output)| output.writer()).collect();
    let watch = tokio::spawn(output::watch_storage(watched));
    let ended = children.ended(&mut signals).await;
    let may_linger = children.is_asked();
    if !may_linger {
        children.kill_all().await;
    }
    for (_, _, output) in &outputs {
        output.drain(if may_linger { DRAIN_EARLY_MAX } else { DRAIN_MAX }).await;
    }
    let outcome = outcome(&outputs, &ended);
    leave(&outcome);
    children.gone(&mut signals).await;
    for (_, _, output) in &outputs {
        output.drain(DRAIN_MAX).await;
    }
    watch.abort();
    flush(outputs).await;
    Ok(outcome)
}

/// The variables of one rank, and the file that its last words go to.
fn environment(folder: &Path, numbers: &RankNumbers) -> (PathBuf, Vec<(&'static str, String)>) {
    let file = folder.join(format!("{}.json", numbers.rank));
    let mut environment = numbers.environment();
    environment.push((ENV_TERMINATION_FILE, file.display().to_string()));
    environment.extend(threads(numbers.local_world_size));
    (file, environment)
}

/// Ranks that share a machine share its cores too, unless somebody has said otherwise.
fn threads(num_ranks: u32) -> Option<(&'static str, String)> {
    if num_ranks == 1 || std::env::var_os(ENV_THREADS).is_some() {
        return None;
    }
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    Some((ENV_THREADS, (cores / num_ranks as usize).max(1).to_string()))
}

/// What the ranks' ends come to.
fn outcome(outputs: &[(u32, PathBuf, Output)], ended: &[Ended]) -> Outcome {
    let last_words: Vec<Option<Termination>> =
        outputs.iter().map(|(_, file, _)| termination::read(file)).collect();
    let (idx, code) = worst(ended);
    let said = last_words[idx].as_ref().filter(|it| it.code == code);
    let message = match said {
        Some(said) => said.message.clone(),
        None => ended[idx].describe(&outputs[idx].2.last_lines()),
    };
    let (rank, _, output) = &outputs[idx];
    let message =
        message.map(|it| if output.has_prefix() { format!("rank {rank}: {it}") } else { it });
    let unsent = last_words.into_iter().flatten().map(|it| it.unsent);
    let unsent = unsent.into_iter().find(|it| !it.is_empty()).unwrap_or_default();
    Outcome { code, message, unsent }
}

/// Writes the pod's termination message, before the wait for what is left: a node may give no time.
fn leave(outcome: &Outcome) {
    if let Some(path) = std::env::var_os(ENV_TERMINATION_FILE) {
        let (code, message) = (outcome.code, outcome.message.clone());
        let unsent = outcome.unsent.clone();
        termination::write(Path::new(&path), Termination { code, message, unsent });
    }
}

/// Stores the rest of the logs.
async fn flush(outputs: Vec<(u32, PathBuf, Output)>) {
    let writers: Vec<SegmentWriter> =
        outputs.iter().filter_map(|(_, _, output)| output.writer()).collect();
    let all = async {
        for writer in &writers {
            writer.flush().await?;
        }
        Ok::<(), stoker_storage::StorageError>(())
    };
    match tokio::time::timeout(FLUSH_MAX, all).await {
        Ok(Ok(())) => {}
        Ok(Err(error)) => eprintln!("stoker: the end of the log is not stored: {error}"),
        Err(_) => {
            eprintln!("stoker: the end of the log is not stored within {} s", FLUSH_MAX.as_secs());
        }
    }
}
