//! `stoker experiment wait` and `stoker job wait`: until the end.

use std::time::Duration;

use futures::{StreamExt as _, TryStreamExt as _};
use kube::api::{WatchEvent, WatchParams};
use serde_json::{Value, json};
use stoker_api::condition::{Condition, ConditionStatus};
use stoker_api::experiment::{Experiment, ExperimentStatus, Phase};
use stoker_api::trial::Trial;

use super::connect::Cluster;
use super::kind::Kind;
use super::storage;
use crate::failure::Failure;
use crate::print::{self, Output};
use crate::run;

/// Seconds that one watch lasts at most. The object is read again after each.
const WATCH_SECONDS: u32 = 240;
/// Between two tries, where the cluster cannot be reached.
const AGAIN: Duration = Duration::from_secs(2);
/// Tries in a row that may fail.
const FAILURES_MAX: u32 = 30;
/// The exit code where the end was not seen.
const STOPPED: u8 = 3;

/// Waits until the experiment or job has ended; prints its end and returns the exit code.
pub(crate) async fn wait<K: Kind>(
    cluster: &Cluster,
    name: &str,
    timeout: Option<Duration>,
    output: Output,
) -> Result<u8, Failure> {
    let Some(timeout) = timeout else {
        return end::<K>(cluster, name, output).await;
    };
    match tokio::time::timeout(timeout, end::<K>(cluster, name, output)).await {
        Ok(ended) => ended,
        Err(_) => {
            let phase = cluster.read::<K>(name).await?.phase();
            print::err(format!(
                "{} {name} has not ended within {}: it is {phase:?}",
                K::WORD,
                super::text::length(timeout.as_secs())
            ));
            Ok(STOPPED)
        }
    }
}

async fn end<K: Kind>(cluster: &Cluster, name: &str, output: Output) -> Result<u8, Failure> {
    let mut shown = String::new();
    let mut num_failures = 0;
    let mut uid = None;
    // The first question may be about a name that is wrong, or a cluster that is not there.
    let mut object: K = cluster.read(name).await?;
    loop {
        if uid.get_or_insert_with(|| object.meta().uid.clone()) != &object.meta().uid {
            return Ok(deleted::<K>(name));
        }
        if object.phase().is_terminal() {
            return object.tell(cluster, output).await;
        }
        show(&object, &mut shown, output);
        match next(cluster, &object, &mut shown, output).await {
            Ok(Some(ended)) => {
                object = ended;
                continue;
            }
            Ok(None) => num_failures = 0,
            Err(error) if num_failures < FAILURES_MAX => {
                if num_failures == 0 {
                    print::err(format!("{error}; trying again"));
                }
                num_failures += 1;
                tokio::time::sleep(AGAIN).await;
            }
            Err(error) => return Err(error),
        }
        match cluster.api::<K>().get_opt(name).await {
            Ok(Some(found)) => object = found,
            Ok(None) => return Ok(deleted::<K>(name)),
            // Counted by the watch, which fails too.
            Err(_) => {}
        }
    }
}

/// Watches the object; returns it when it has ended, and nothing when the watch has.
async fn next<K: Kind>(
    cluster: &Cluster,
    object: &K,
    shown: &mut String,
    output: Output,
) -> Result<Option<K>, Failure> {
    let name = object.name();
    let asked = format!("{} `{name}`", K::WORD);
    let params =
        WatchParams::default().fields(&format!("metadata.name={name}")).timeout(WATCH_SECONDS);
    let since = object.meta().resource_version.clone().unwrap_or_default();
    let api = cluster.api::<K>();
    let mut events = cluster.ask(&asked, api.watch(&params, &since)).await?.boxed();
    // A connection that died silently brings no event, and no end either.
    let patience = Duration::from_secs(u64::from(WATCH_SECONDS) + 10);
    while let Ok(event) = tokio::time::timeout(patience, events.try_next()).await {
        match event.map_err(|error| cluster.failure(&asked, error))? {
            Some(WatchEvent::Added(it) | WatchEvent::Modified(it)) => {
                if it.phase().is_terminal() {
                    return Ok(Some(it));
                }
                show(&it, shown, output);
            }
            Some(WatchEvent::Bookmark(_)) => {}
            Some(WatchEvent::Deleted(_) | WatchEvent::Error(_)) | None => break,
        }
    }
    Ok(None)
}

fn deleted<K: Kind>(name: &str) -> u8 {
    print::err(format!("{} {name} was deleted before its end", K::WORD));
    STOPPED
}

/// Tells people where it stands, if that has changed.
fn show<K: Kind>(object: &K, shown: &mut String, output: Output) {
    let line = object.progress();
    if output == Output::Text && *shown != line {
        print::err(&line);
        *shown = line;
    }
}

/// How an experiment is going, in one line.
pub(crate) fn progress(name: &str, status: &ExperimentStatus) -> String {
    let best = status.best.as_ref();
    let best = best.map(|it| format!(", best {} (trial {})", it.metric, it.index));
    // An operator of another version may not even be able to read it.
    let of = |it: &&Condition| it.type_ == "Valid" && it.status == ConditionStatus::False;
    let invalid = status.conditions.iter().find(of).map(|it| &it.message);
    let message = invalid.or(status.message.as_ref()).map(|it| format!("; {it}"));
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

/// Prints an experiment's end; returns the exit code.
pub(crate) async fn tell(
    cluster: &Cluster,
    experiment: &Experiment,
    output: Output,
) -> Result<u8, Failure> {
    let status = experiment.status.clone().unwrap_or_default();
    let name = experiment.metadata.name.clone().unwrap_or_default();
    let trial = match &status.best {
        Some(best) => cluster.api::<Trial>().get_opt(&format!("{name}-{}", best.index)).await.ok(),
        None => None,
    };
    match output {
        Output::Json => print::out(outcome(experiment, trial.flatten().as_ref())),
        Output::Text => print::out(verdict(experiment, trial.flatten().as_ref())),
    }
    Ok(code(status.phase))
}

/// The exit code that a phase is.
pub(crate) fn code(phase: Phase) -> u8 {
    match phase {
        Phase::Completed => 0,
        Phase::Failed => 1,
        Phase::Cancelled | Phase::Pending | Phase::Running | Phase::Paused => STOPPED,
    }
}

/// As the last line of `run --output json`.
fn outcome(experiment: &Experiment, trial: Option<&Trial>) -> Value {
    let status = experiment.status.clone().unwrap_or_default();
    let best = status.best.as_ref().map(|best| {
        let address = |name: &String| storage::checkpoint_address(experiment, best.index, name);
        json!({
            "trial": best.index,
            "metric": best.metric,
            "hyperparameters": trial.map(|it| &it.spec.hyperparameters),
            "checkpoint": best.checkpoint.as_ref().map(address),
        })
    });
    json!({
        "experiment": experiment.metadata.name,
        "phase": status.phase,
        "trials": status.trials_created,
        "best": best,
    })
}

fn verdict(experiment: &Experiment, trial: Option<&Trial>) -> String {
    let status = experiment.status.clone().unwrap_or_default();
    let name = experiment.metadata.name.as_deref().unwrap_or_default();
    let what = match status.phase {
        Phase::Completed => "completed",
        Phase::Failed => "failed",
        Phase::Cancelled => "was cancelled",
        Phase::Pending | Phase::Running | Phase::Paused => "has not ended",
    };
    let message = status.message.map_or_else(String::new, |it| format!(": {it}"));
    let mut lines = vec![format!("experiment {name} {what}{message}")];
    if let Some(best) = &status.best {
        let metric = &experiment.spec.searcher.metric;
        lines.push(format!("best: trial {} with {metric} {}", best.index, best.metric));
        let values = trial.map(|it| run::hyperparameters(&it.spec.hyperparameters));
        lines.extend(values.map(|it| format!("  hyperparameters: {it}")));
        let address = |name| storage::checkpoint_address(experiment, best.index, name);
        lines.extend(best.checkpoint.as_ref().map(|it| format!("  checkpoint: {}", address(it))));
    }
    lines.join("\n")
}

#[cfg(test)]
mod tests {
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
        let check = |phase: Phase, expected: u8| assert_eq!(code(phase), expected, "{phase:?}");
        check(Phase::Completed, 0);
        check(Phase::Failed, 1);
        check(Phase::Cancelled, 3);
        check(Phase::Running, 3);
    }

    #[test]
    fn the_end_is_told_as_run_tells_it() {
        let experiment = experiment("Completed");
        let at = "s3://b/ml/mnist-0b3f9c1e/trials/1/checkpoints/000000000100-0";
        assert_eq!(
            verdict(&experiment, None),
            format!(
                "experiment mnist completed: so it is\nbest: trial 1 with loss 0.25\n  \
                 checkpoint: {at}"
            )
        );
        assert_eq!(
            outcome(&experiment, None),
            json!({"experiment": "mnist", "phase": "Completed", "trials": 2, "best":
                {"trial": 1, "metric": "0.25", "hyperparameters": null, "checkpoint": at}})
        );
    }

    #[test]
    fn progress_is_one_line() {
        let line = progress("mnist", &experiment("Running").status.unwrap());
        assert_eq!(line, "mnist: Running, 50%, 1 of 2 trials ended, best 0.25 (trial 1); so it is");
    }
}
