//! `stoker experiment list|describe|pause|activate|cancel|kill|delete` on a cluster.

use kube::api::{DeleteParams, ListParams, Patch, PatchParams, Preconditions};
use serde_json::json;
use stoker_api::condition::{Condition, ConditionStatus};
use stoker_api::experiment::{DesiredState, Experiment};
use stoker_api::names::LABEL_EXPERIMENT;
use stoker_api::trial::Trial;
use stoker_engine::trial::TrialRecord;

use super::connect::Cluster;
use super::resource::ClusterResource;
use super::{events, storage, text};
use crate::commands::names::TrialRef;
use crate::describe::{self, Description, desired};
use crate::explain::Explained;
use crate::failure::Failure;
use crate::json;
use crate::list::List;
use crate::list::experiments::{self, Listed};
use crate::print::{self, Format, Output};

/// Lists the experiments of the namespace, or with `all` of all namespaces.
pub(crate) async fn list(
    cluster: &Cluster,
    all: bool,
    selector: Option<String>,
) -> Result<List, Failure> {
    let with_labels = with_labels(selector.as_deref());
    let params = ListParams { label_selector: selector, ..ListParams::default() };
    let listed = cluster.list::<Experiment>("experiments", &params, all).await?.into_iter();
    let scope = if all { "any namespace" } else { &format!("namespace `{}`", cluster.namespace) };
    let empty =
        format!("no experiments{with_labels} in {scope} of the cluster at {}", cluster.server);
    let experiments = listed.map(|(experiment, _)| {
        let (name, phase) = (experiment.name(), phase(&experiment));
        Listed { experiment, name, phase }
    });
    Ok(experiments::list(experiments.collect(), all, empty))
}

/// Returns words for a label selector, which the API server applies; empty without one.
pub(crate) fn with_labels(selector: Option<&str>) -> String {
    selector.map_or_else(String::new, |selector| format!(" with the labels {selector}"))
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

/// Reads the experiment with this name, or the trial with this name and its experiment.
pub(crate) async fn experiment_or_trial(
    cluster: &Cluster,
    name: &str,
) -> Result<(Experiment, Option<Trial>), Failure> {
    match (cluster.experiment(name).await, TrialRef::split(name)) {
        (Ok(experiment), _) => Ok((experiment, None)),
        (Err(_), Some(trial)) => {
            let trial = cluster.trial(&trial.to_string()).await?;
            Ok((cluster.experiment(&trial.spec.experiment).await?, Some(trial)))
        }
        (Err(error), None) => Err(error),
    }
}

/// Lists the trials of an experiment, sorted by index.
pub(crate) async fn trials(
    cluster: &Cluster,
    experiment: &Experiment,
) -> Result<Vec<(Trial, serde_json::Value)>, Failure> {
    trials_with(cluster, experiment, None).await
}

/// Same as [`trials`], for those with matching labels.
pub(crate) async fn trials_with(
    cluster: &Cluster,
    experiment: &Experiment,
    selector: Option<String>,
) -> Result<Vec<(Trial, serde_json::Value)>, Failure> {
    let of = format!("{LABEL_EXPERIMENT}={}", experiment.name());
    let labels: Vec<String> = std::iter::once(of).chain(selector).collect();
    let params = ListParams::default().labels(&labels.join(","));
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
pub(crate) async fn describe(cluster: &Cluster, name: &str, format: Format) -> Result<(), Failure> {
    let experiment = cluster.experiment(name).await?;
    let trials: Vec<Trial> =
        trials(cluster, &experiment).await?.into_iter().map(|(trial, _)| trial).collect();
    let records = records(&trials);
    let explained = Explained::new(&experiment, &records);
    let importance = describe::importance(&experiment, &records);
    if format != Format::Text {
        let object = explained.add_to_experiment(json::object(&experiment));
        let object = importance.add_to(&experiment.spec.searcher.metric, object);
        return print::object(&object, format);
    }
    let events = events::section(cluster, "Experiment", name, None).await;
    let description = Description {
        experiment: &experiment,
        trials: &records.iter().collect::<Vec<_>>(),
        explained: &explained,
        importance: &importance,
        phase: phase(&experiment),
        storage: storage_location(&experiment),
        checkpoint: &|index, name| storage::checkpoint_address(&experiment, index, name),
        id: name,
        is_local: false,
        now: text::now(),
    };
    print::out(format!("{description}{events}"));
    Ok(())
}

/// Explains the search of an experiment with these trials.
pub(crate) fn explained(experiment: &Experiment, trials: &[Trial]) -> Explained {
    Explained::new(experiment, &records(trials))
}

fn records(trials: &[Trial]) -> Vec<TrialRecord> {
    let record = |trial: &Trial| TrialRecord {
        spec: trial.spec.clone(),
        status: trial.status.clone().unwrap_or_default(),
    };
    trials.iter().map(record).collect()
}

/// Returns the location of the experiment's files.
pub(crate) fn storage_location(experiment: &Experiment) -> String {
    let path = storage::experiment_path(experiment);
    match storage::of(experiment).url {
        Some(url) => format!("{}/{path}", url.trim_end_matches('/')),
        None => format!("{path} in the operator's storage"),
    }
}

/// Reads an experiment or a job. With `uid`, refuses another object of the same name.
pub(crate) async fn read_same<K: ClusterResource>(
    cluster: &Cluster,
    name: &str,
    uid: Option<&str>,
) -> Result<K, Failure> {
    let object: K = cluster.read(name).await?;
    let found = object.meta().uid.as_deref();
    match uid.filter(|uid| Some(*uid) != found) {
        Some(uid) => Err(Failure::Input(format!(
            "{} `{name}` was replaced: its UID is {}, not {uid}",
            K::KIND_NAME,
            found.unwrap_or_default()
        ))),
        None => Ok(object),
    }
}

/// Sends a change of an object's spec. The API server refuses it if another object has the name by
/// then.
pub(crate) async fn patch_spec<K: ClusterResource>(
    cluster: &Cluster,
    object: &K,
    spec: serde_json::Value,
) -> Result<(), Failure> {
    let name = object.name();
    let patch = json!({ "metadata": { "uid": object.meta().uid }, "spec": spec });
    let api = cluster.api::<K>();
    let (params, patch) = (PatchParams::default(), Patch::Merge(&patch));
    let target = format!("{} `{name}`", K::KIND_NAME);
    cluster.request(&target, api.patch(&name, &params, &patch)).await?;
    Ok(())
}

/// Sets the desired state of an experiment or a job. Returns the effect as a sentence, and whether
/// the state has changed. With `uid`, refuses another object of the same name.
pub(crate) async fn request_state<K: ClusterResource>(
    cluster: &Cluster,
    name: &str,
    uid: Option<&str>,
    state: DesiredState,
) -> Result<(String, bool), Failure> {
    let word = K::KIND_NAME;
    let mut object: K = read_same(cluster, name, uid).await?;
    let phase = object.phase();
    if phase.is_terminal() {
        return Err(Failure::Input(format!(
            "cannot change the state of {word} `{name}`: it has ended ({phase:?}); create a new \
             {word}"
        )));
    }
    patch_spec(cluster, &object, json!({ "state": state })).await?;
    let is_same = *object.state() == state;
    let effect = match (is_same, state) {
        (true, _) => format!("{word} {name}: the desired state is already {}", desired(state)),
        (_, DesiredState::Active) => format!("{word} {name} resumes"),
        (_, DesiredState::Paused) => {
            format!("{word} {name} is being paused: {}", K::STOP_EFFECT)
        }
        (_, DesiredState::Cancelled) => {
            format!("{word} {name} is being cancelled: {}", K::STOP_EFFECT)
        }
        (_, DesiredState::Killed) => format!("{word} {name} is being killed"),
    };
    Ok((effect, !is_same))
}

/// Sets the desired state of an experiment or a job, and prints the effect.
pub(crate) async fn set_state<K: ClusterResource>(
    cluster: &Cluster,
    name: &str,
    state: DesiredState,
    output: Output,
) -> Result<(), Failure> {
    let (effect, is_changed) = request_state::<K>(cluster, name, None, state).await?;
    match output {
        Output::Json => {
            print::out(json!({K::KIND_NAME: name, "state": state, "changed": is_changed}));
        }
        Output::Text => print::out(effect),
    }
    Ok(())
}

/// Deletes an experiment or a job in the background. Returns the object as it was before. With
/// `uid`, refuses another object of the same name.
pub(crate) async fn remove<K: ClusterResource>(
    cluster: &Cluster,
    name: &str,
    uid: Option<&str>,
) -> Result<K, Failure> {
    let object: K = read_same(cluster, name, uid).await?;
    let preconditions = Preconditions { uid: object.meta().uid.clone(), resource_version: None };
    let params = DeleteParams::background().preconditions(preconditions);
    let api = cluster.api::<K>();
    cluster.request(&format!("{} `{name}`", K::KIND_NAME), api.delete(name, &params)).await?;
    Ok(object)
}

/// Deletes an experiment, and with it its trials.
pub(crate) async fn delete(cluster: &Cluster, name: &str, output: Output) -> Result<(), Failure> {
    let experiment: Experiment = remove(cluster, name, None).await?;
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

    #[test]
    fn phase_defaults_to_pending_and_shows_invalid() {
        let mut experiment = experiment();
        experiment.status.as_mut().unwrap().conditions[0].status = ConditionStatus::False;
        assert_eq!(phase(&experiment), "Invalid");
        experiment.status = None;
        assert_eq!(phase(&experiment), "Pending");
    }
}
