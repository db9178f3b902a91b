//! Waits until a local run or job ends.

use std::time::Duration;

use super::RecordedRun;
use super::steer::RunFiles;
use crate::cluster::resource::ClusterResource;
use crate::cluster::text;
use crate::cluster::wait::{Outcome, exit_code, print_experiment, stopped};
use crate::failure::Failure;
use crate::print::{self, Output};
use crate::run::length_of_best;

/// Interval between two reads of the record.
const INTERVAL: Duration = Duration::from_millis(500);

/// End of a wait.
#[derive(Debug)]
pub(crate) enum Waited<K> {
    /// The run or job has ended, and its runner has exited.
    Ended(K),
    /// The wait has ended for another reason, which was printed.
    Stopped {
        /// Exit code of the command.
        code: u8,
    },
}

/// Waits until a run or job has ended and its runner has exited. `read` reads its record.
pub(crate) async fn wait_for_end<K: ClusterResource>(
    files: &RunFiles,
    name: &str,
    timeout: Option<Duration>,
    output: Output,
    read: impl Fn() -> Result<Option<K>, Failure>,
) -> Result<Waited<K>, Failure> {
    let word = K::KIND_NAME;
    let ended = poll(files, name, output, &read);
    let Some(timeout) = timeout else { return ended.await };
    if let Ok(ended) = tokio::time::timeout(timeout, ended).await {
        return ended;
    }
    let phase = read()?.map(|object| object.phase()).unwrap_or_default();
    let length = text::length(timeout.as_secs());
    let message = format!("timed out after {length}: {word} {name} is still {phase:?}");
    Ok(Waited::Stopped { code: stopped("timeout", &message, name, output) })
}

async fn poll<K: ClusterResource>(
    files: &RunFiles,
    name: &str,
    output: Output,
    read: &impl Fn() -> Result<Option<K>, Failure>,
) -> Result<Waited<K>, Failure> {
    let word = K::KIND_NAME;
    let mut shown = String::new();
    loop {
        // Look for the runner first: it writes the outcome before it exits.
        let has_runner = files.has_runner()?;
        let Some(object) = read()? else {
            let message = format!("{word} {name} was deleted before it ended");
            return Ok(Waited::Stopped { code: stopped("deleted", &message, name, output) });
        };
        if !has_runner && object.phase().is_terminal() {
            return Ok(Waited::Ended(object));
        }
        if !has_runner {
            let message = stop_message::<K>(name);
            return Ok(Waited::Stopped { code: stopped("stopped", &message, name, output) });
        }
        let line = object.progress();
        if output == Output::Text && shown != line {
            print::err(&line);
            shown = line;
        }
        tokio::time::sleep(INTERVAL).await;
    }
}

/// Returns the message for a run or job that has stopped without an outcome.
pub(crate) fn stop_message<K: ClusterResource>(name: &str) -> String {
    let (word, run) = (K::KIND_NAME, K::RUN_COMMAND);
    format!("{word} {name} has stopped: no runner is alive; run `{run}` again to resume")
}

/// Waits until a run has ended, then prints the outcome. Returns the exit code.
pub(crate) async fn wait(
    root: Option<&str>,
    name: &str,
    timeout: Option<Duration>,
    output: Output,
) -> Result<u8, Failure> {
    let run = RecordedRun::open(root, name).await?;
    let files = RunFiles::of(root, &run, "wait for")?;
    let read = || files.record.experiment();
    let experiment = match wait_for_end(&files, name, timeout, output, read).await? {
        Waited::Ended(experiment) => experiment,
        Waited::Stopped { code } => return Ok(code),
    };
    let status = experiment.status.clone().unwrap_or_default();
    let trials = files.record.trials()?;
    let best = status.best.as_ref().and_then(|best| trials.get(&best.index));
    let hyperparameters = best.map(|trial| &trial.spec.hyperparameters);
    let address = |index, name: &str| run.paths.checkpoint(index, name);
    let searcher = &experiment.spec.searcher;
    let of_best = status.best.as_ref().zip(best);
    let best_length = of_best.map(|(of, trial)| length_of_best(&trial.status, of, searcher));
    let best_length = best_length.unwrap_or_default();
    let outcome =
        Outcome { experiment: &experiment, hyperparameters, best_length, address: &address };
    print_experiment(&outcome, output);
    Ok(exit_code(status.phase))
}
