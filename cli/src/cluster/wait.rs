//! `stoker experiment wait` and `stoker job wait`.

use std::time::{Duration, Instant};

use futures::{StreamExt as _, TryStreamExt as _};
use kube::api::{WatchEvent, WatchParams};
use serde_json::{Value, json};
use stoker_api::condition::{Condition, ConditionStatus};
use stoker_api::experiment::{Experiment, ExperimentStatus, Phase};

use super::connect::Cluster;
use super::resource::ClusterResource;
use super::{storage, text};
use crate::failure::{Failure, error_value};
use crate::json;
use crate::print::{self, Output};
use crate::run;

/// Maximum duration of one watch, in seconds. The object is read again after each watch.
const WATCH_SECONDS: u32 = 240;
/// Exit code for cancelled, deleted, stopped and timed out.
const STOPPED: u8 = 3;

/// Limits of a wait.
#[derive(Clone, Copy, Debug)]
struct WaitLimits {
    /// Shortest time between two watches. The object is read after each watch.
    retry_interval: Duration,
    /// Longest time of consecutive failed reads for which the API server denies access.
    denied_max: Duration,
    /// Longest time of failed reads for any reason. It covers an upgrade of the API server.
    unreachable_max: Duration,
}

/// Limits for the commands.
const WAIT_LIMITS: WaitLimits = WaitLimits {
    retry_interval: Duration::from_secs(2),
    denied_max: Duration::from_secs(60),
    unreachable_max: Duration::from_secs(600),
};

/// Waits until the experiment or job has ended, then prints the outcome. Returns the exit code.
pub(crate) async fn wait<K: ClusterResource>(
    cluster: &Cluster,
    name: &str,
    timeout: Option<Duration>,
    output: Output,
) -> Result<u8, Failure> {
    let mut is_found = false;
    let end = wait_for_end::<K>(cluster, name, WAIT_LIMITS, output, &mut is_found);
    let Some(timeout) = timeout else { return end.await };
    let ended = tokio::time::timeout(timeout, end).await;
    match ended {
        Ok(ended) => ended,
        Err(_) => {
            let state = match cluster.read::<K>(name).await {
                Ok(object) => format!("{} {name} is still {:?}", K::KIND_NAME, object.phase()),
                Err(Failure::Input(_)) if is_found => return Ok(deleted::<K>(name, output)),
                Err(error @ Failure::Input(_)) => return Err(error),
                Err(error) => error.to_string(),
            };
            let message = format!("timed out after {}: {state}", text::length(timeout.as_secs()));
            Ok(stopped("timeout", &message, name, output))
        }
    }
}

/// Waits without a timeout. Sets `is_found` after the first read.
async fn wait_for_end<K: ClusterResource>(
    cluster: &Cluster,
    name: &str,
    limits: WaitLimits,
    output: Output,
    is_found: &mut bool,
) -> Result<u8, Failure> {
    let target = format!("{} `{name}`", K::KIND_NAME);
    let api = cluster.api::<K>();
    let mut shown = String::new();
    let mut has_warned = false;
    let mut failed_since: Option<Instant> = None;
    let mut denied_since: Option<Instant> = None;
    let mut uid = None;
    // Do not retry the first request: the name may be wrong, or the cluster unreachable.
    let mut object: K = cluster.read(name).await?;
    *is_found = true;
    loop {
        if uid.get_or_insert_with(|| object.meta().uid.clone()) != &object.meta().uid {
            return Ok(deleted::<K>(name, output));
        }
        if object.phase().is_terminal() {
            return object.print_outcome(cluster, output).await;
        }
        show(&object, &mut shown, output);
        let started = Instant::now();
        match watch_until_ended(cluster, &object, &mut shown, output).await {
            Ok(Some(ended)) => {
                object = ended;
                continue;
            }
            Ok(None) => has_warned = false,
            // Reads detect the end even if all watches fail.
            Err(error) => {
                if !has_warned {
                    print::err(format!("{error}; retrying"));
                }
                has_warned = true;
            }
        }
        // A server or a proxy may end each watch at once.
        tokio::time::sleep(limits.retry_interval.saturating_sub(started.elapsed())).await;
        match cluster.try_request(&target, api.get_opt(name)).await {
            Ok(Some(current)) => {
                object = current;
                (failed_since, denied_since) = (None, None);
            }
            Ok(None) => return Ok(deleted::<K>(name, output)),
            Err(error) => {
                let failed_for = failed_since.get_or_insert_with(Instant::now).elapsed();
                denied_since = error.is_denied().then(|| denied_since.unwrap_or_else(Instant::now));
                let denied_for = denied_since.map_or(Duration::ZERO, |since| since.elapsed());
                if failed_for >= limits.unreachable_max || denied_for >= limits.denied_max {
                    let message = format!(
                        "timed out after {} of failed reads: {}; {} {name} may still run",
                        text::length(failed_for.as_secs()),
                        error.failure,
                        K::KIND_NAME
                    );
                    return Ok(stopped("timeout", &message, name, output));
                }
            }
        }
    }
}

/// Watches the object and returns it once it has ended; `None` if the watch ends first.
async fn watch_until_ended<K: ClusterResource>(
    cluster: &Cluster,
    object: &K,
    shown: &mut String,
    output: Output,
) -> Result<Option<K>, Failure> {
    let name = object.name();
    let target = format!("{} `{name}`", K::KIND_NAME);
    let params =
        WatchParams::default().fields(&format!("metadata.name={name}")).timeout(WATCH_SECONDS);
    let since = object.meta().resource_version.clone().unwrap_or_default();
    let api = cluster.api::<K>();
    let mut events = cluster.request(&target, api.watch(&params, &since)).await?.boxed();
    // A silently broken connection delivers neither an event nor the end of the watch.
    let limit = Duration::from_secs(u64::from(WATCH_SECONDS) + 10);
    while let Ok(event) = tokio::time::timeout(limit, events.try_next()).await {
        match event.map_err(|error| cluster.failure(&target, error))? {
            Some(WatchEvent::Added(object) | WatchEvent::Modified(object)) => {
                if object.phase().is_terminal() {
                    return Ok(Some(object));
                }
                show(&object, shown, output);
            }
            Some(WatchEvent::Bookmark(_)) => {}
            Some(WatchEvent::Deleted(_) | WatchEvent::Error(_)) | None => break,
        }
    }
    Ok(None)
}

fn deleted<K: ClusterResource>(name: &str, output: Output) -> u8 {
    let message = format!("{} {name} was deleted before it ended", K::KIND_NAME);
    stopped("deleted", &message, name, output)
}

/// Prints why the wait is over and returns the exit code.
pub(crate) fn stopped(kind: &str, message: &str, name: &str, output: Output) -> u8 {
    match output {
        Output::Text => print::err(message),
        Output::Json => {
            let mut value = error_value(kind, message, STOPPED);
            value["error"]["name"] = name.into();
            print::err(value);
        }
    }
    STOPPED
}

/// Prints the progress line if it has changed.
fn show<K: ClusterResource>(object: &K, shown: &mut String, output: Output) {
    let line = object.progress();
    if output == Output::Text && *shown != line {
        print::err(&line);
        *shown = line;
    }
}

/// Returns an experiment's progress as one line.
pub(crate) fn progress(name: &str, status: &ExperimentStatus) -> String {
    let best = status.best.as_ref();
    let best = best.map(|best| format!(", best {} (trial {})", best.metric, best.index));
    // An operator of another version may be unable to parse the spec.
    let is_invalid = |condition: &&Condition| {
        condition.type_ == "Valid" && condition.status == ConditionStatus::False
    };
    let invalid = status.conditions.iter().find(is_invalid).map(|condition| &condition.message);
    let message = invalid.or(status.message.as_ref()).map(|message| format!("; {message}"));
    format!(
        "{name}: {:?}, {}%, {} of {} trials ended{}{}",
        status.phase,
        status.progress_percent,
        status.trials_closed,
        status.trials_created,
        best.unwrap_or_default(),
        message.unwrap_or_default()
    )
}

/// Prints an experiment's outcome and returns the exit code.
pub(crate) async fn print_outcome(
    cluster: &Cluster,
    experiment: &Experiment,
    output: Output,
) -> Result<u8, Failure> {
    let status = experiment.status.clone().unwrap_or_default();
    let name = experiment.metadata.name.clone().unwrap_or_default();
    let trial = match &status.best {
        Some(best) => cluster.trial(&format!("{name}-{}", best.index)).await.ok(),
        None => None,
    };
    let hyperparameters = trial.as_ref().map(|trial| &trial.spec.hyperparameters);
    let address =
        |index, checkpoint: &str| storage::checkpoint_address(experiment, index, checkpoint);
    let of_best = status.best.as_ref().zip(trial.as_ref().and_then(|trial| trial.status.as_ref()));
    let searcher = &experiment.spec.searcher;
    let best_length = of_best.map(|(best, trial)| run::length_of_best(trial, best, searcher));
    let best_length = best_length.unwrap_or_default();
    let outcome = Outcome { experiment, hyperparameters, best_length, address: &address };
    print_experiment(&outcome, output);
    Ok(exit_code(status.phase))
}

/// An experiment that has ended.
pub(crate) struct Outcome<'a> {
    pub(crate) experiment: &'a Experiment,
    /// Hyperparameters of the best trial, if known.
    pub(crate) hyperparameters: Option<&'a Value>,
    /// Length of the best result in words, as of [`run::length_of_best`].
    pub(crate) best_length: String,
    /// Returns the location of a trial's checkpoint.
    pub(crate) address: &'a dyn Fn(u32, &str) -> String,
}

/// Prints the outcome of an experiment.
pub(crate) fn print_experiment(outcome: &Outcome<'_>, output: Output) {
    match output {
        Output::Json => print::out(outcome.json()),
        Output::Text => print::out(outcome.text()),
    }
}

/// Returns the exit code for a phase.
pub(crate) fn exit_code(phase: Phase) -> u8 {
    match phase {
        Phase::Completed => 0,
        Phase::Failed => 1,
        Phase::Cancelled | Phase::Pending | Phase::Running | Phase::Paused => STOPPED,
    }
}

impl Outcome<'_> {
    /// Returns the outcome in the format of the last line of `stoker run --output json`.
    fn json(&self) -> Value {
        let status = self.experiment.status.clone().unwrap_or_default();
        let best = status.best.as_ref().map(|best| {
            let address = |name: &String| (self.address)(best.index, name);
            json!({
                "trial": best.index,
                "metric": json::metric(&best.metric),
                "hyperparameters": self.hyperparameters,
                "checkpoint": best.checkpoint.as_ref().map(address),
            })
        });
        let mut pareto = json!(status.pareto);
        json::metrics_to_numbers(&mut pareto);
        json!({
            "experiment": self.experiment.metadata.name,
            "phase": status.phase,
            "message": status.message,
            "trials": status.trials_created,
            "best": best,
            "pareto": pareto,
        })
    }

    fn text(&self) -> String {
        let status = self.experiment.status.clone().unwrap_or_default();
        let name = self.experiment.metadata.name.as_deref().unwrap_or_default();
        let what = match status.phase {
            Phase::Completed => "completed",
            Phase::Failed => "failed",
            Phase::Cancelled => "was cancelled",
            Phase::Pending | Phase::Running | Phase::Paused => "has not ended",
        };
        let message = status.message.map_or_else(String::new, |message| format!(": {message}"));
        let mut lines = vec![format!("experiment {name} {what}{message}")];
        if let Some(best) = &status.best {
            let metric = &self.experiment.spec.searcher.metric;
            let length = &self.best_length;
            lines.push(format!("best: trial {} with {metric} {}{length}", best.index, best.metric));
            let values = self.hyperparameters.map(run::hyperparameters);
            lines.extend(values.map(|values| format!("  hyperparameters: {values}")));
            let checkpoint = best.checkpoint.as_ref();
            let address = |name: &String| (self.address)(best.index, name);
            lines.extend(checkpoint.map(|name| format!("  checkpoint: {}", address(name))));
        }
        lines.join("\n")
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use axum::extract::State;
    use axum::http::StatusCode;
    use axum::routing::get;

    use super::*;

    fn experiment(phase: &str) -> Experiment {
        serde_json::from_value(json!({
            "apiVersion": "stoker.dev/v1alpha1", "kind": "Experiment",
            "metadata": {"name": "mnist", "namespace": "ml", "uid": "0b3f9c1e-77aa"},
            "spec": {
                "entrypoint": {"command": ["x"]},
                "searcher": {"metric": "loss", "maxLength": {"epochs": 2}, "single": {}},
                "checkpointStorage": {"url": "s3://b"},
            },
            "status": {"phase": phase, "trialsCreated": 2, "trialsClosed": 1, "message": "so it is",
                "progressPercent": 50,
                "best": {"index": 1, "metric": "0.25", "checkpoint": "000000000100-0"}},
        }))
        .unwrap()
    }

    #[test]
    fn each_phase_has_its_exit_code() {
        let check =
            |phase: Phase, expected: u8| assert_eq!(exit_code(phase), expected, "{phase:?}");
        check(Phase::Completed, 0);
        check(Phase::Failed, 1);
        check(Phase::Cancelled, 3);
        check(Phase::Running, 3);
    }

    #[test]
    fn outcome_matches_that_of_run() {
        let experiment = experiment("Completed");
        let address = |index, name: &str| storage::checkpoint_address(&experiment, index, name);
        let best_length = " after 1 of 2 epochs".to_owned();
        let experiment = &experiment;
        let outcome = Outcome { experiment, hyperparameters: None, best_length, address: &address };
        let at = "s3://b/ml/mnist-0b3f9c1e/trials/1/checkpoints/000000000100-0";
        assert_eq!(
            outcome.text(),
            format!(
                "experiment mnist completed: so it is\nbest: trial 1 with loss 0.25 after 1 \
                 of 2 epochs\n  checkpoint: {at}"
            )
        );
        assert_eq!(
            outcome.json(),
            json!({"experiment": "mnist", "phase": "Completed", "message": "so it is",
                "trials": 2, "pareto": [], "best":
                {"trial": 1, "metric": 0.25, "hyperparameters": null, "checkpoint": at}})
        );
    }

    #[test]
    fn progress_is_one_line() {
        let line = progress("mnist", &experiment("Running").status.unwrap());
        assert_eq!(line, "mnist: Running, 50%, 1 of 2 trials ended, best 0.25 (trial 1); so it is");
    }

    /// Serves an experiment. `reads` are the responses to successive reads: a phase or a status
    /// code. The last one repeats. All watches return `watch_code` and end at once.
    async fn serve(reads: &[String], watch_code: u16) -> Cluster {
        type Reads = Arc<Mutex<Vec<String>>>;
        let left: Reads = Arc::new(Mutex::new(reads.iter().rev().cloned().collect()));
        let read = async |State(left): State<Reads>| {
            let mut left = left.lock().unwrap();
            let read = if left.len() > 1 { left.pop().unwrap() } else { left[0].clone() };
            match read.parse::<u16>() {
                Ok(code) => {
                    let status = json!({
                        "status": "Failure", "message": "", "reason": "", "code": code,
                        "details": {"name": "mnist", "kind": "experiments"},
                    });
                    (StatusCode::from_u16(code).unwrap(), status.to_string())
                }
                Err(_) => (StatusCode::OK, json!(experiment(&read)).to_string()),
            }
        };
        let watch = async move || StatusCode::from_u16(watch_code).unwrap();
        let path = "/apis/stoker.dev/v1alpha1/namespaces/ml/experiments";
        let app = axum::Router::new()
            .route(path, get(watch))
            .route(&format!("{path}/mnist"), get(read))
            .with_state(left);
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let server = format!("http://{}", listener.local_addr().unwrap());
        tokio::spawn(async move { axum::serve(listener, app).await });
        let client = kube::Client::try_from(kube::Config::new(server.parse().unwrap())).unwrap();
        Cluster { client, namespace: "ml".to_owned(), server }
    }

    /// Returns `first`, then `num` times `read`, then `last`.
    fn reads(first: &str, num: usize, read: &str, last: &str) -> Vec<String> {
        let all = [first].into_iter().chain(std::iter::repeat_n(read, num)).chain([last]);
        all.map(str::to_owned).collect()
    }

    /// Waits for the experiment, and returns the exit code.
    async fn code(reads: &[String], watch_code: u16) -> u8 {
        let cluster = serve(reads, watch_code).await;
        let limits = WaitLimits {
            retry_interval: Duration::from_millis(20),
            denied_max: Duration::from_millis(500),
            unreachable_max: Duration::from_secs(60),
        };
        let mut is_found = false;
        let end =
            wait_for_end::<Experiment>(&cluster, "mnist", limits, Output::Json, &mut is_found);
        end.await.unwrap()
    }

    #[tokio::test]
    async fn only_lasting_failures_of_reads_end_the_wait() {
        // Reads are 20 ms apart, and the API server may deny access for 500 ms.
        assert_eq!(code(&reads("Running", 20, "Running", "Completed"), 403).await, 0);
        assert_eq!(code(&reads("Running", 40, "500", "Completed"), 500).await, 0);
        assert_eq!(code(&reads("Running", 2, "403", "Completed"), 403).await, 0);
        let mut mixed = reads("Running", 40, "500", "403");
        mixed.push("Completed".to_owned());
        assert_eq!(code(&mixed, 500).await, 0);
        assert_eq!(code(&reads("Running", 200, "403", "Completed"), 403).await, 3);
    }

    #[tokio::test]
    async fn watches_that_end_at_once_are_spaced() {
        let started = Instant::now();
        assert_eq!(code(&reads("Running", 9, "Running", "Completed"), 200).await, 0);
        assert!(started.elapsed() >= Duration::from_millis(200), "{:?}", started.elapsed());
    }

    #[tokio::test]
    async fn timeout_without_a_server_ends_with_code_3() {
        let cluster = serve(&reads("Running", 1, "500", "500"), 500).await;
        let timeout = Some(Duration::from_millis(200));
        let waited = wait::<Experiment>(&cluster, "mnist", timeout, Output::Json).await;
        assert_eq!(waited.unwrap(), 3);
    }

    #[tokio::test]
    async fn deletion_just_before_the_timeout_ends_with_code_3() {
        let waited = async |reads: &[String]| {
            let cluster = serve(reads, 500).await;
            // Shorter than the interval of reads.
            let timeout = Some(Duration::from_secs(1));
            wait::<Experiment>(&cluster, "mnist", timeout, Output::Json).await
        };
        assert_eq!(waited(&reads("Running", 1, "404", "404")).await.unwrap(), 3);
        let missing = waited(&reads("404", 1, "404", "404")).await.unwrap_err();
        assert!(missing.to_string().contains("not found in namespace"), "{missing}");
    }
}
