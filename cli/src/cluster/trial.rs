//! `stoker trial list|describe|kill` on a cluster.

use k8s_openapi::api::core::v1::{ContainerStatus, Pod};
use kube::api::{ListParams, Patch, PatchParams};
use serde_json::json;
use stoker_api::experiment::Experiment;
use stoker_api::names::LABEL_TRIAL;
use stoker_api::time::Timestamp;
use stoker_api::trial::{Attempt, CheckpointRecord, DesiredTrialState, Trial, TrialStatus};
use stoker_engine::trial::ended_at;

use super::connect::Cluster;
use super::text::{self, Fields};
use super::{events, experiment};
use crate::describe::conditions;
use crate::explain::Explained;
use crate::failure::Failure;
use crate::json;
use crate::list::{List, trials};
use crate::print::{self, Format, Output};
use crate::run;

/// Maximum number of retries after a write conflict.
const CONFLICTS_MAX: u32 = 5;

/// Lists the trials of an experiment.
pub(crate) async fn list(
    cluster: &Cluster,
    name: &str,
    selector: Option<String>,
) -> Result<List, Failure> {
    let experiment = cluster.experiment(name).await?;
    let with_labels = experiment::with_labels(selector.as_deref());
    let has_selector = selector.is_some();
    let trials = experiment::trials_with(cluster, &experiment, selector).await?;
    let trials: Vec<Trial> = trials.into_iter().map(|(trial, _)| trial).collect();
    let mut list = trials::list(&experiment.spec.searcher, name, &trials);
    if has_selector {
        list.empty = format!("experiment {name} has no trials{with_labels}");
    }
    Ok(list)
}

/// Prints one trial.
pub(crate) async fn describe(cluster: &Cluster, name: &str, format: Format) -> Result<(), Failure> {
    let trial = cluster.trial(name).await?;
    let experiment = cluster.experiment(&trial.spec.experiment).await;
    let explained = explained(cluster, &experiment).await;
    if format != Format::Text {
        let object = explained.add_to_trial(trial.spec.index, json::object(&trial));
        return print::object(&object, format);
    }
    let experiment = experiment.ok();
    let params = ListParams::default().labels(&format!("{LABEL_TRIAL}={name}"));
    let pods = match cluster.list::<Pod>("pods", &params, false).await {
        Ok(pods) => {
            let pods: Vec<Pod> = pods.into_iter().map(|(pod, _)| pod).collect();
            pods_section(&pods, text::now())
        }
        Err(error) => format!("\n\nPods: {error}"),
    };
    let events = events::section(cluster, "Trial", name, Some(&format!("{name}-a"))).await;
    let text = render(&trial, experiment.as_ref(), &explained, text::now());
    print::out(text + &pods + &events);
    Ok(())
}

/// Explains the search of a trial's experiment, which compares all its trials.
async fn explained(cluster: &Cluster, experiment: &Result<Experiment, Failure>) -> Explained {
    let experiment = match experiment {
        Ok(experiment) => experiment,
        Err(error) => return Explained::unavailable(error.to_string()),
    };
    match experiment::trials(cluster, experiment).await {
        Ok(trials) => {
            let trials: Vec<Trial> = trials.into_iter().map(|(trial, _)| trial).collect();
            experiment::explained(experiment, &trials)
        }
        Err(error) => Explained::unavailable(error.to_string()),
    }
}

/// Describes a trial.
pub(crate) fn render(
    trial: &Trial,
    experiment: Option<&Experiment>,
    explained: &Explained,
    now: Timestamp,
) -> String {
    let (metadata, spec) = (&trial.metadata, &trial.spec);
    let status = trial.status.clone().unwrap_or_default();
    let mut fields = Fields::default();
    fields.add("Name", metadata.name.clone().unwrap_or_default());
    fields.add("Namespace", metadata.namespace.clone().unwrap_or_default());
    fields.add("Experiment", spec.experiment.clone());
    fields.add("Index", spec.index.to_string());
    fields.add("Seed", spec.seed.to_string());
    let created = text::created(metadata);
    let since = created.map(|time| format!("{time} ({} ago)", text::age(created, now)));
    fields.add("Created", since.unwrap_or_default());
    let ended =
        ended_at(&status).map(|time| format!("{time} ({} ago)", text::age(Some(time), now)));
    fields.add("Ended", ended.unwrap_or_default());
    fields.add("Desired", json!(spec.desired_state).as_str().unwrap_or_default());
    let message =
        status.message.as_ref().map_or_else(String::new, |message| format!(": {message}"));
    fields.add("Phase", format!("{:?}{message}", status.phase));
    fields.add("Why", explained.why(spec.index).unwrap_or_default());
    let total = Some(status.batches_total).filter(|total| *total > 0);
    let of = total.map(|total| format!(" of {total}"));
    fields.add("Batches", format!("{}{}", status.batches, of.unwrap_or_default()));
    fields.add("Activity", status.activity.clone().unwrap_or_default());
    let max = experiment.map(|experiment| format!(" of at most {}", experiment.spec.max_restarts));
    fields.add("Restarts", format!("{}{}", status.restarts, max.unwrap_or_default()));
    fields.add("Hyperparameters", run::hyperparameters(&spec.hyperparameters).replace(' ', "\n"));
    let metrics = status.metrics.iter().map(|(name, value)| format!("{name}={value}"));
    fields.add("Last metrics", metrics.collect::<Vec<_>>().join("\n"));
    fields.add("Best metric", best_metric(&status, experiment));
    fields.to_string()
        + &explained.trial_section(spec.index)
        + &attempts(&status.attempts, now)
        + &checkpoints(&status.checkpoints)
        + &conditions(&status.conditions, now)
}

fn best_metric(status: &TrialStatus, experiment: Option<&Experiment>) -> String {
    let Some(best) = &status.best_metric else { return String::new() };
    match experiment {
        Some(experiment) => format!("{}={best}", experiment.spec.searcher.metric),
        None => best.clone(),
    }
}

fn attempts(attempts: &[Attempt], now: Timestamp) -> String {
    let dash = || "-".to_owned();
    let row = |attempt: &Attempt| {
        let took = attempt
            .started_at
            .map(|start| text::length(attempt.ended_at.unwrap_or(now).seconds_since(start)));
        vec![
            attempt.number.to_string(),
            attempt.started_at.map_or_else(dash, |start| start.to_string()),
            took.unwrap_or_else(dash),
            attempt.end.map_or_else(|| "running".to_owned(), |end| format!("{end:?}")),
            attempt.reason.clone().unwrap_or_else(dash),
            attempt.resumed_from.clone().unwrap_or_else(dash),
            attempt.message.clone().unwrap_or_default().replace('\n', " | "),
        ]
    };
    let rows: Vec<Vec<String>> = attempts.iter().map(row).collect();
    let header = ["ATTEMPT", "STARTED", "TOOK", "END", "REASON", "FROM", "MESSAGE"];
    text::section("Attempts", &header, &rows)
}

fn checkpoints(checkpoints: &[CheckpointRecord]) -> String {
    let row = |checkpoint: &CheckpointRecord| {
        vec![
            checkpoint.name.clone(),
            checkpoint.batches.to_string(),
            checkpoint.metric.clone().unwrap_or_else(|| "-".to_owned()),
            text::bytes(checkpoint.bytes),
            if checkpoint.refused { "refused" } else { "usable" }.to_owned(),
        ]
    };
    let rows: Vec<Vec<String>> = checkpoints.iter().map(row).collect();
    text::section("Checkpoints", &["NAME", "BATCHES", "METRIC", "SIZE", "STATE"], &rows)
}

fn pods_section(pods: &[Pod], now: Timestamp) -> String {
    let row = |pod: &Pod| {
        let node = pod.spec.as_ref().and_then(|spec| spec.node_name.clone());
        vec![
            pod.metadata.name.clone().unwrap_or_default(),
            pod_state(pod),
            node.unwrap_or_else(|| "-".to_owned()),
            text::age(text::created(&pod.metadata), now),
        ]
    };
    let rows: Vec<Vec<String>> = pods.iter().map(row).collect();
    text::section("Pods", &["NAME", "STATE", "NODE", "AGE"], &rows)
}

/// Returns a pod's phase, with the reason of a waiting or failed container.
pub(crate) fn pod_state(pod: &Pod) -> String {
    let Some(status) = &pod.status else { return "Unknown".to_owned() };
    let init = status.init_container_statuses.iter().flatten();
    let main = status.container_statuses.iter().flatten();
    let reason_of = |container: &ContainerStatus| {
        let state = container.state.as_ref()?;
        let waiting = state.waiting.as_ref().and_then(|waiting| waiting.reason.clone());
        let failed = state.terminated.as_ref().filter(|terminated| terminated.exit_code != 0);
        waiting.or_else(|| failed.and_then(|terminated| terminated.reason.clone()))
    };
    let phase = status.phase.clone().unwrap_or_else(|| "Unknown".to_owned());
    if pod.metadata.deletion_timestamp.is_some() {
        return "Terminating".to_owned();
    }
    match init.chain(main).find_map(reason_of) {
        Some(reason) => format!("{phase} ({reason})"),
        None => match &status.reason {
            Some(reason) => format!("{phase} ({reason})"),
            None => phase,
        },
    }
}

/// Sets the desired state of a trial to `kill`.
pub(crate) async fn kill(cluster: &Cluster, name: &str, output: Output) -> Result<(), Failure> {
    let api = cluster.api::<Trial>();
    let mut tries_left = CONFLICTS_MAX;
    loop {
        let trial = cluster.trial(name).await?;
        let phase = trial.status.as_ref().map(|status| status.phase).unwrap_or_default();
        if phase.is_terminal() {
            let text = format!("cannot kill trial `{name}`: it has ended ({phase:?})");
            return Err(Failure::Input(text));
        }
        // The operator writes the spec too, so require the version that was read.
        let patch = json!({
            "metadata": { "resourceVersion": trial.metadata.resource_version },
            "spec": { "wanted": DesiredTrialState::Kill },
        });
        match api.patch(name, &PatchParams::default(), &Patch::Merge(&patch)).await {
            Ok(_) => break,
            Err(kube::Error::Api(status)) if status.is_conflict() && tries_left > 0 => {
                tries_left -= 1;
            }
            Err(error) => return Err(cluster.failure(&format!("trial `{name}`"), error)),
        }
    }
    match output {
        Output::Json => print::out(json!({"trial": name, "wanted": DesiredTrialState::Kill})),
        Output::Text => print::out(format!("trial {name} is being killed")),
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;

    fn trial() -> Trial {
        serde_json::from_value(json!({
            "apiVersion": "stoker.dev/v1alpha1", "kind": "Trial",
            "metadata": {"name": "mnist-3", "namespace": "ml",
                "creationTimestamp": "2026-11-21T19:00:00Z"},
            "spec": {"experiment": "mnist", "index": 3, "requestId": "x", "seed": 77,
                "hyperparameters": {"lr": 0.5, "net": {"width": 8}},
                "unit": "batches", "units": 100,
                "grants": [{"order": 5, "fact": 0, "units": 400}]},
            "status": {
                "phase": "Running", "restarts": 1, "batches": 120, "batchesTotal": 400,
                "activity": "warming up",
                "facts": [{"result": {"units": 100, "metric": "0.5"}}],
                "metrics": {"val_loss": "0.4", "accuracy": "0.9"}, "bestMetric": "0.4",
                "attempts": [
                    {"number": 0, "end": "UserError", "reason": "OOMKilled",
                        "message": "killed\nat 7",
                        "startedAt": "2026-11-21T19:00:10Z", "endedAt": "2026-11-21T19:01:00Z"},
                    {"number": 1, "resumedFrom": "000000000100-0",
                        "startedAt": "2026-11-21T19:01:10Z"},
                ],
                "checkpoints": [{"name": "000000000100-0", "batches": 100, "metric": "0.5",
                    "manifestSha256": "ab", "bytes": 1_500_000, "refused": true}],
            },
        }))
        .unwrap()
    }

    #[test]
    fn description_shows_hyperparameters_decisions_and_attempts() {
        let now = "2026-11-21T19:05:10Z".parse().unwrap();
        let explained = Explained::unavailable("the experiment was deleted".to_owned());
        let text = render(&trial(), None, &explained, now);
        let expected = "\
Name:             mnist-3
Namespace:        ml
Experiment:       mnist
Index:            3
Seed:             77
Created:          2026-11-21T19:00:00Z (5m10s ago)
Desired:          run
Phase:            Running
Batches:          120 of 400
Activity:         warming up
Restarts:         1
Hyperparameters:  lr=0.5
                  net.width=8
Last metrics:     accuracy=0.9
                  val_loss=0.4
Best metric:      0.4

Decisions: the experiment was deleted

Attempts:
  ATTEMPT  STARTED               TOOK  END        REASON     FROM            MESSAGE
  0        2026-11-21T19:00:10Z  50s   UserError  OOMKilled  -               killed | at 7
  1        2026-11-21T19:01:10Z  4m    running    -          000000000100-0

Checkpoints:
  NAME            BATCHES  METRIC  SIZE    STATE
  000000000100-0  100      0.5     1.5 MB  refused";
        assert_eq!(text, expected);
    }

    #[test]
    fn pod_state_shows_the_container_reason() {
        let check = |status: Value, expected: &str| {
            let pod: Pod =
                serde_json::from_value(json!({"metadata": {}, "status": status})).unwrap();
            assert_eq!(pod_state(&pod), expected, "{status}");
        };
        let main = |state: Value| {
            json!({"phase": "Pending", "containerStatuses": [{
                "name": "trainer", "image": "", "imageID": "", "ready": false, "restartCount": 0,
                "state": state,
            }]})
        };
        check(json!({"phase": "Running"}), "Running");
        check(json!({"phase": "Failed", "reason": "Evicted"}), "Failed (Evicted)");
        check(
            main(json!({"waiting": {"reason": "ImagePullBackOff"}})),
            "Pending (ImagePullBackOff)",
        );
        check(
            main(json!({"terminated": {"exitCode": 137, "reason": "OOMKilled"}})),
            "Pending (OOMKilled)",
        );
        check(main(json!({"terminated": {"exitCode": 0, "reason": "Completed"}})), "Pending");
    }
}
