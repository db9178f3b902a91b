//! `stoker experiment list|describe|pause|activate|cancel|kill|delete` on a cluster.

use std::collections::BTreeMap;

use kube::api::{DeleteParams, ListParams, Patch, PatchParams, Preconditions};
use serde_json::json;
use stoker_api::condition::{Condition, ConditionStatus};
use stoker_api::experiment::{DesiredState, Experiment, ExperimentSpec, Phase, Searcher, Unit};
use stoker_api::names::LABEL_EXPERIMENT;
use stoker_api::time::Timestamp;
use stoker_api::trial::Trial;
use stoker_engine::trial::TrialRecord;

use super::connect::Cluster;
use super::resource::ClusterResource;
use super::text::{self, Fields};
use super::{events, storage};
use crate::explain::Explained;
use crate::failure::Failure;
use crate::print::{self, Output};
use crate::run;

/// Maximum number of failed trials shown with their messages.
const FAILURES_MAX: usize = 5;

/// Prints the experiments of the namespace, or with `all` of all namespaces.
pub(crate) async fn list(cluster: &Cluster, all: bool, output: Output) -> Result<(), Failure> {
    let listed = cluster.list::<Experiment>("experiments", &ListParams::default(), all).await?;
    if output == Output::Json {
        let values: Vec<_> = listed.into_iter().map(|(_, value)| value).collect();
        print::out(json!(values));
        return Ok(());
    }
    if listed.is_empty() {
        let scope =
            if all { "any namespace" } else { &format!("namespace `{}`", cluster.namespace) };
        print::err(format!("no experiments in {scope} of the cluster at {}", cluster.server));
        return Ok(());
    }
    let now = text::now();
    let rows: Vec<Vec<String>> =
        listed.iter().map(|(experiment, _)| row(experiment, all, now)).collect();
    let header = ["NAME", "PHASE", "TRIALS", "RUNNING", "ENDED", "PROGRESS", "BEST", "AGE"];
    let namespace = all.then_some("NAMESPACE");
    let header: Vec<&str> = namespace.into_iter().chain(header).collect();
    print::out(print::table(&header, &rows));
    Ok(())
}

fn row(experiment: &Experiment, all: bool, now: Timestamp) -> Vec<String> {
    let metadata = &experiment.metadata;
    let status = experiment.status.clone().unwrap_or_default();
    let best = status.best.map(|best| format!("{} (trial {})", best.metric, best.index));
    let mut cells = vec![
        metadata.name.clone().unwrap_or_default(),
        phase(experiment),
        status.trials_created.to_string(),
        status.trials_running.to_string(),
        status.trials_closed.to_string(),
        format!("{}%", status.progress_percent),
        best.unwrap_or_else(|| "-".to_owned()),
        text::age(text::created(metadata), now),
    ];
    if all {
        cells.insert(0, metadata.namespace.clone().unwrap_or_default());
    }
    cells
}

/// Returns the phase, or `Invalid`: the operator does not act on an invalid experiment.
fn phase(experiment: &Experiment) -> String {
    let status = experiment.status.clone().unwrap_or_default();
    let is_false = |condition: &Condition| {
        condition.type_ == "Valid" && condition.status == ConditionStatus::False
    };
    let is_invalid = status.conditions.iter().any(is_false);
    match is_invalid && !status.phase.is_terminal() {
        true => "Invalid".to_owned(),
        false => format!("{:?}", status.phase),
    }
}

/// Lists the trials of an experiment, sorted by index.
pub(crate) async fn trials(
    cluster: &Cluster,
    experiment: &Experiment,
) -> Result<Vec<(Trial, serde_json::Value)>, Failure> {
    let name = experiment.metadata.name.clone().unwrap_or_default();
    let params = ListParams::default().labels(&format!("{LABEL_EXPERIMENT}={name}"));
    let mut trials = cluster.list::<Trial>("trials", &params, false).await?;
    // Skip trials of an earlier experiment of the same name that are still being deleted.
    trials.retain(|(trial, _)| {
        let owners = trial.metadata.owner_references.iter().flatten();
        let mut owners = owners.filter(|owner| owner.kind == "Experiment").peekable();
        owners.peek().is_none()
            || owners.any(|owner| Some(&owner.uid) == experiment.metadata.uid.as_ref())
    });
    trials.sort_by_key(|(trial, _)| trial.spec.index);
    Ok(trials)
}

/// Prints one experiment.
pub(crate) async fn describe(cluster: &Cluster, name: &str, output: Output) -> Result<(), Failure> {
    let experiment = cluster.experiment(name).await?;
    let trials: Vec<Trial> =
        trials(cluster, &experiment).await?.into_iter().map(|(trial, _)| trial).collect();
    let explained = explained(&experiment, &trials);
    if output == Output::Json {
        print::out(explained.add_to_experiment(json!(experiment)));
        return Ok(());
    }
    let events = events::section(cluster, "Experiment", name, None).await;
    let sections = explained.experiment_sections();
    print::out(render(&experiment, &trials, text::now()) + &sections + &events);
    Ok(())
}

/// Explains the search of an experiment with these trials.
pub(crate) fn explained(experiment: &Experiment, trials: &[Trial]) -> Explained {
    let record = |trial: &Trial| TrialRecord {
        spec: trial.spec.clone(),
        status: trial.status.clone().unwrap_or_default(),
    };
    let records: Vec<TrialRecord> = trials.iter().map(record).collect();
    Explained::new(experiment, &records)
}

fn render(experiment: &Experiment, trials: &[Trial], now: Timestamp) -> String {
    let (metadata, spec) = (&experiment.metadata, &experiment.spec);
    let status = experiment.status.clone().unwrap_or_default();
    let mut fields = Fields::default();
    fields.add("Name", metadata.name.clone().unwrap_or_default());
    fields.add("Namespace", metadata.namespace.clone().unwrap_or_default());
    fields.add("Description", spec.description.clone().unwrap_or_default());
    fields.add("Labels", spec.labels.join(", "));
    let created = text::created(metadata);
    let since = created.map(|time| format!("{time} ({} ago)", text::age(created, now)));
    fields.add("Created", since.unwrap_or_default());
    let ended = status.ended_at.map(|time| format!("{time} ({} ago)", text::age(Some(time), now)));
    fields.add("Ended", ended.unwrap_or_default());
    fields.add("Desired", desired(spec.state));
    let message =
        status.message.as_ref().map_or_else(String::new, |message| format!(": {message}"));
    fields.add("Phase", format!("{}{message}", phase(experiment)));
    fields.add("Progress", format!("{}%", status.progress_percent));
    fields.add("Search", search(&spec.searcher));
    fields.add("Program", program(spec));
    fields.add("Pods", pods(spec));
    fields.add("Storage", storage_location(experiment));
    fields.add("Trials", counts(trials));
    fields.add("Best", best(experiment, trials));
    fields.add("Pareto front", pareto(experiment));
    fields.add("Failures", failures(trials));
    fields.to_string() + &conditions(&status.conditions, now)
}

/// Returns a state as it is spelled in the spec.
fn desired(state: DesiredState) -> String {
    json!(state).as_str().unwrap_or_default().to_owned()
}

fn search(searcher: &Searcher) -> String {
    let method = searcher.methods_set().first().copied().unwrap_or_default();
    let settings = json!(searcher)[method].clone();
    let number = |name: &str| settings[name].as_u64().filter(|number| *number > 0);
    let trials = number("maxTrials").map(|num| format!(", {num} trials"));
    let population = number("populationSize").map(|num| format!(", population of {num}"));
    let rounds = number("numRounds").map(|num| format!(", {num} rounds"));
    let concurrent = number("maxConcurrentTrials").map(|num| format!(", {num} concurrent"));
    let size: String = [trials, population, rounds].into_iter().flatten().collect();
    let kind = format!("{method}{size}");
    let length = searcher.length().map(|(unit, units)| {
        let unit = match unit {
            Unit::Records => "records",
            Unit::Batches => "batches",
            Unit::Epochs => "epochs",
        };
        format!(", {units} {unit} each")
    });
    let better = if searcher.smaller_is_better { "smaller" } else { "larger" };
    let (concurrent, length) = (concurrent.unwrap_or_default(), length.unwrap_or_default());
    format!("{kind}{concurrent}{length}; {}, {better} is better", searcher.metric)
}

fn program(spec: &ExperimentSpec) -> String {
    let words: Vec<&str> =
        spec.entrypoint.command.iter().chain(&spec.entrypoint.args).map(String::as_str).collect();
    let image = spec.pod.image.as_deref().unwrap_or("the stock image");
    let uploaded = spec.context.as_ref().map(|context| {
        let sha256 = &context.sha256;
        format!(", with uploaded files {}", sha256.get(..12).unwrap_or(sha256))
    });
    format!("{} in {image}{}", words.join(" "), uploaded.unwrap_or_default())
}

fn pods(spec: &ExperimentSpec) -> String {
    let resources = &spec.resources;
    let slot = resources.slot_resource.as_deref().unwrap_or("CPU rank");
    format!(
        "{} per trial, with {} slots ({slot}) each",
        resources.num_pods(),
        resources.slots_per_pod()
    )
}

/// Returns the location of the experiment's files.
pub(crate) fn storage_location(experiment: &Experiment) -> String {
    let path = storage::experiment_path(experiment);
    match storage::of(experiment).url {
        Some(url) => format!("{}/{path}", url.trim_end_matches('/')),
        None => format!("{path} in the operator's storage"),
    }
}

fn counts(trials: &[Trial]) -> String {
    let mut by_phase: BTreeMap<String, usize> = BTreeMap::new();
    for trial in trials {
        let phase = trial.status.as_ref().map(|status| status.phase).unwrap_or_default();
        *by_phase.entry(format!("{phase:?}").to_lowercase()).or_default() += 1;
    }
    let parts: Vec<String> = by_phase.iter().map(|(phase, num)| format!("{num} {phase}")).collect();
    match trials.len() {
        0 => "none".to_owned(),
        num => format!("{num}: {}", parts.join(", ")),
    }
}

fn best(experiment: &Experiment, trials: &[Trial]) -> String {
    let status = experiment.status.as_ref();
    let Some(best) = status.and_then(|status| status.best.as_ref()) else { return String::new() };
    let metric = &experiment.spec.searcher.metric;
    let mut lines = vec![format!("trial {} with {metric} {}", best.index, best.metric)];
    if let Some(trial) = trials.iter().find(|trial| trial.spec.index == best.index) {
        let values = run::hyperparameters(&trial.spec.hyperparameters);
        lines.push(format!("hyperparameters: {values}"));
    }
    if let Some(name) = &best.checkpoint {
        let address = storage::checkpoint_address(experiment, best.index, name);
        lines.push(format!("checkpoint: {address}"));
    }
    lines.join("\n")
}

fn pareto(experiment: &Experiment) -> String {
    let front = experiment.status.as_ref().map_or(&[][..], |status| &status.pareto);
    run::pareto(&experiment.spec.searcher, front).join("\n")
}

fn failures(trials: &[Trial]) -> String {
    let has_failed =
        |trial: &&Trial| trial.status.as_ref().is_some_and(|status| status.phase == Phase::Failed);
    let failed: Vec<&Trial> = trials.iter().filter(has_failed).collect();
    let mut lines: Vec<String> = failed
        .iter()
        .take(FAILURES_MAX)
        .map(|trial| {
            let message = trial.status.as_ref().and_then(|status| status.message.as_deref());
            format!("trial {}: {}", trial.spec.index, message.unwrap_or("no message"))
        })
        .collect();
    if failed.len() > FAILURES_MAX {
        lines.push(format!("and {} more", failed.len() - FAILURES_MAX));
    }
    lines.join("\n")
}

/// Formats conditions as a table.
pub(crate) fn conditions(conditions: &[Condition], now: Timestamp) -> String {
    let row = |condition: &Condition| {
        vec![
            condition.type_.clone(),
            format!("{:?}", condition.status),
            condition.reason.clone(),
            text::age(Some(condition.last_transition_time), now),
            condition.message.replace('\n', " "),
        ]
    };
    let rows: Vec<Vec<String>> = conditions.iter().map(row).collect();
    text::section("Conditions", &["TYPE", "STATUS", "REASON", "SINCE", "MESSAGE"], &rows)
}

/// Sets the desired state of an experiment or a job.
pub(crate) async fn set_state<K: ClusterResource>(
    cluster: &Cluster,
    name: &str,
    state: DesiredState,
    output: Output,
) -> Result<(), Failure> {
    let word = K::KIND_NAME;
    let mut object: K = cluster.read(name).await?;
    let phase = object.phase();
    if phase.is_terminal() {
        return Err(Failure::Input(format!(
            "cannot change the state of {word} `{name}`: it has ended ({phase:?}); create a new \
             {word}"
        )));
    }
    let patch = json!({ "spec": { "state": state } });
    let api = cluster.api::<K>();
    let (params, patch) = (PatchParams::default(), Patch::Merge(&patch));
    cluster.request(&format!("{word} `{name}`"), api.patch(name, &params, &patch)).await?;
    let is_same = *object.state() == state;
    match output {
        Output::Json => print::out(json!({word: name, "state": state, "changed": !is_same})),
        Output::Text => print::out(match (is_same, state) {
            (true, _) => format!("{word} {name}: the desired state is already {}", desired(state)),
            (_, DesiredState::Active) => format!("{word} {name} resumes"),
            (_, DesiredState::Paused) => {
                format!("{word} {name} is being paused: {}", K::STOP_EFFECT)
            }
            (_, DesiredState::Cancelled) => {
                format!("{word} {name} is being cancelled: {}", K::STOP_EFFECT)
            }
            (_, DesiredState::Killed) => format!("{word} {name} is being killed"),
        }),
    }
    Ok(())
}

/// Deletes an experiment or a job in the background. Returns the object as it was before.
pub(crate) async fn remove<K: ClusterResource>(
    cluster: &Cluster,
    name: &str,
) -> Result<K, Failure> {
    let object: K = cluster.read(name).await?;
    let preconditions = Preconditions { uid: object.meta().uid.clone(), resource_version: None };
    let params = DeleteParams::background().preconditions(preconditions);
    let api = cluster.api::<K>();
    cluster.request(&format!("{} `{name}`", K::KIND_NAME), api.delete(name, &params)).await?;
    Ok(object)
}

/// Deletes an experiment, and with it its trials.
pub(crate) async fn delete(cluster: &Cluster, name: &str, output: Output) -> Result<(), Failure> {
    let experiment: Experiment = remove(cluster, name).await?;
    let left = storage_location(&experiment);
    match output {
        Output::Json => print::out(json!({"experiment": name, "deleted": true, "left": left})),
        Output::Text => {
            print::out(format!("experiment {name} and its trials deleted"));
            print::out(format!("checkpoints, metrics and logs remain in {left}"));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn experiment() -> Experiment {
        serde_json::from_value(json!({
            "apiVersion": "stoker.dev/v1alpha1", "kind": "Experiment",
            "metadata": {"name": "mnist", "namespace": "ml", "uid": "0b3f9c1e-77aa",
                "creationTimestamp": "2026-11-21T19:00:00Z"},
            "spec": {
                "entrypoint": {"command": ["stoker-trainer", "mnist"]},
                "searcher": {"metric": "val_loss", "maxLength": {"epochs": 2},
                    "random": {"maxTrials": 8, "maxConcurrentTrials": 2}},
                "checkpointStorage": {"url": "s3://bucket/a/"},
                "resources": {"slotsPerTrial": 16, "slotResource": "nvidia.com/gpu"},
            },
            "status": {
                "phase": "Running", "trialsCreated": 3, "trialsClosed": 2, "trialsRunning": 1,
                "progressPercent": 25,
                "best": {"index": 1, "metric": "0.25", "checkpoint": "000000000100-0"},
                "conditions": [{"type": "Valid", "status": "True", "reason": "Valid",
                    "message": "", "lastTransitionTime": "2026-11-21T19:00:01Z"}],
            },
        }))
        .unwrap()
    }

    fn trial(index: u32, phase: &str, message: Option<&str>) -> Trial {
        serde_json::from_value(json!({
            "apiVersion": "stoker.dev/v1alpha1", "kind": "Trial",
            "metadata": {"name": format!("mnist-{index}")},
            "spec": {"experiment": "mnist", "index": index, "requestId": "x", "seed": 1,
                "hyperparameters": {"lr": 0.5}, "unit": "epochs", "units": 2},
            "status": {"phase": phase, "message": message},
        }))
        .unwrap()
    }

    fn now() -> Timestamp {
        "2026-11-21T19:05:00Z".parse().unwrap()
    }

    #[test]
    fn row_matches_the_print_columns() {
        let cells = row(&experiment(), true, now());
        assert_eq!(cells, ["ml", "mnist", "Running", "3", "1", "2", "25%", "0.25 (trial 1)", "5m"]);
    }

    #[test]
    fn phase_defaults_to_pending_and_shows_invalid() {
        let mut experiment = experiment();
        experiment.status.as_mut().unwrap().conditions[0].status = ConditionStatus::False;
        assert_eq!(phase(&experiment), "Invalid");
        experiment.status = None;
        assert_eq!(phase(&experiment), "Pending");
    }

    #[test]
    fn description_shows_progress_and_failures() {
        let trials = [
            trial(0, "Failed", Some("no such file")),
            trial(1, "Completed", None),
            trial(2, "Running", None),
        ];
        let text = render(&experiment(), &trials, now());
        let expected = "\
Name:       mnist
Namespace:  ml
Created:    2026-11-21T19:00:00Z (5m ago)
Desired:    active
Phase:      Running
Progress:   25%
Search:     random, 8 trials, 2 concurrent, 2 epochs each; val_loss, smaller is better
Program:    stoker-trainer mnist in the stock image
Pods:       2 per trial, with 8 slots (nvidia.com/gpu) each
Storage:    s3://bucket/a/ml/mnist-0b3f9c1e
Trials:     3: 1 completed, 1 failed, 1 running
Best:       trial 1 with val_loss 0.25
            hyperparameters: lr=0.5
            checkpoint: s3://bucket/a/ml/mnist-0b3f9c1e/trials/1/checkpoints/000000000100-0
Failures:   trial 0: no such file

Conditions:
  TYPE   STATUS  REASON  SINCE  MESSAGE
  Valid  True    Valid   4m59s";
        assert_eq!(text, expected);
    }
}
