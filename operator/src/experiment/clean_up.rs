//! Clean-up after an experiment's end: pods delete the checkpoints that no setting retains, and
//! store the final records. The operator itself has no access to storage.

mod batch;

use std::sync::Arc;
use std::time::Duration;

use kube::runtime::events::EventType;
use stoker_api::experiment::{Experiment, ExperimentStatus, StorageRecord};
use stoker_api::names::trial_path;
use stoker_api::validate::ValidExperiment;
use stoker_engine::experiment::{Refusal, set_refusal, stops};
use stoker_engine::gang::{
    CleanUpStep, DELETE_GRACE_SECONDS, PodDeletion, PodPhase, clean_up_step,
};
use stoker_engine::trial::closed;

use self::batch::{BatchContext, CleanUpBatch};
use super::apply;
use crate::cache::Key;
use crate::context::{Context, now};
use crate::error::Error;
use crate::objects::{CachedPod, CachedTrial};
use crate::storage;
use crate::trial::apply::{create_pod, delete_pod, find_nodes, write_status};
use crate::trial::observe::{unknown_nodes, with_node_state};
use crate::trial::pods;

/// Delay before a refused clean-up pod is created again.
const RETRY_INTERVAL: Duration = Duration::from_secs(60);
/// Delay before the next check for pods that have not ended yet.
const POLL_INTERVAL: Duration = Duration::from_secs(2);

/// State of the clean-up of an experiment that is to continue.
pub(super) enum CleanUpState {
    /// Nothing is being deleted.
    Idle,
    /// A pod is being deleted. Try again after this time.
    Stopping(Duration),
    /// A pod has finished, and the checkpoints that it has deleted are still in the records.
    Finished,
}

/// Stops the clean-up of an experiment that is to continue, so that no pod deletes checkpoints from
/// which trials resume, and no later clean-up takes an old pod for its own.
pub(super) async fn stop(
    context: &Context,
    key: &Key,
    experiment: &Experiment,
    valid: &ValidExperiment,
    status: &ExperimentStatus,
) -> Result<CleanUpState, Error> {
    let uid = experiment.metadata.uid.as_deref().unwrap_or_default();
    let pod = context.pods.get(&pod_key(key, status)).filter(|pod| pod.owner == uid);
    let Some(pod) = pod.filter(|_| !status.cleaned_up) else { return Ok(CleanUpState::Idle) };
    match next_step(context, key, valid, &pod, false).await? {
        CleanUpStep::Finish => return Ok(CleanUpState::Finished),
        CleanUpStep::Delete(grace_seconds) => {
            delete_pod(context, &key.namespace, &deletion(&pod, grace_seconds)).await?;
        }
        CleanUpStep::Retry(_) | CleanUpStep::Wait(_) | CleanUpStep::Report { .. } => {}
    }
    Ok(CleanUpState::Stopping(POLL_INTERVAL))
}

/// Returns the next step for the clean-up pod. Looks up its node first if the cache lacks it.
async fn next_step(
    context: &Context,
    key: &Key,
    valid: &ValidExperiment,
    pod: &CachedPod,
    is_wanted: bool,
) -> Result<CleanUpStep, Error> {
    let mut observed = [with_node_state(context, pod)];
    if find_nodes(context, &unknown_nodes(context, &key.namespace, &observed)).await? {
        observed = [with_node_state(context, pod)];
    }
    let timeouts = context.options.timeouts(valid.spec.preemption_timeout_seconds);
    Ok(clean_up_step(&observed[0], pod.failed_at, is_wanted, &timeouts, now()))
}

fn pod_key(key: &Key, status: &ExperimentStatus) -> Key {
    Key::new(&key.namespace, &format!("{}-cleanup-{}", key.name, status.trials_cleaned))
}

/// Deletes the checkpoints of an ended experiment that no setting retains, and stores its records,
/// one batch of trials at a time. Unless `is_wanted`, the experiment is to continue, and the pod
/// has finished.
pub(super) async fn clean_up(
    context: &Context,
    key: &Key,
    experiment: &Experiment,
    valid: &ValidExperiment,
    status: &ExperimentStatus,
    is_wanted: bool,
) -> Result<Option<Duration>, Error> {
    if status.cleaned_up {
        return Ok(None);
    }
    let uid = experiment.metadata.uid.as_deref().unwrap_or_default();
    let trials = apply::trials_of(context, key, uid);
    end_open_trials(context, experiment, &trials).await?;
    // Do not delete checkpoints while a pod may still write or read them.
    let is_alive = |pod: &Arc<CachedPod>| !pod.observed.is_terminal();
    let has_pods =
        |trial: &Arc<CachedTrial>| context.pods.group(&key_of(key, trial)).iter().any(is_alive);
    if trials.iter().any(|trial| is_open(trial) || has_pods(trial)) {
        return Ok(Some(POLL_INTERVAL));
    }
    let storage = storage::of_experiment(context, key, experiment, valid, &trials).await?;
    if storage.is_some() && storage != status.storage {
        let after = ExperimentStatus { storage, ..status.clone() };
        apply::write_status(context, experiment, after).await?;
        return Ok(Some(Duration::ZERO));
    }
    let batch = storage.as_ref().and_then(|storage| {
        let namespace = &*key.namespace;
        BatchContext { namespace, experiment, valid, status, storage, trials: &trials }.next(now())
    });
    let (Some(batch), Some(storage)) = (batch, storage) else {
        let after = ExperimentStatus {
            trials_cleaned: status.trials_created,
            cleaned_up: true,
            ..status.clone()
        };
        apply::write_status(context, experiment, after).await?;
        return Ok(None);
    };
    let pod_key = pod_key(key, status);
    let Some(pod) = context.pods.get(&pod_key).filter(|pod| pod.owner == uid) else {
        if !is_wanted {
            return Ok(Some(POLL_INTERVAL));
        }
        let created = create_batch_pod(context, &pod_key, valid, &storage, uid, &batch).await;
        let Err(error) = created else { return Ok(Some(context.resync_interval(key))) };
        let records = trials.iter().map(|trial| &trial.record);
        let (_, reason, message) = crate::error::pod_refusal(error, records)?;
        let refusal = Refusal { reason: reason.to_owned(), message };
        record_refusal(context, experiment, status, Some(&refusal)).await?;
        return Ok(Some(RETRY_INTERVAL));
    };
    let grace_seconds = match next_step(context, key, valid, &pod, is_wanted).await? {
        CleanUpStep::Finish => {
            return finish_batch(context, key, experiment, status, &trials, &batch, &pod).await;
        }
        step @ (CleanUpStep::Wait(_) | CleanUpStep::Report { .. }) => {
            return wait_for_pod(context, key, experiment, status, &pod, step).await;
        }
        CleanUpStep::Retry(why) => {
            let note = format!("cannot delete checkpoints: {why}; retrying");
            context.event(experiment, EventType::Warning, "CleanUpFailed", note);
            DELETE_GRACE_SECONDS
        }
        CleanUpStep::Delete(grace_seconds) => grace_seconds,
    };
    delete_pod(context, &key.namespace, &deletion(&pod, grace_seconds)).await?;
    Ok(Some(POLL_INTERVAL))
}

fn is_open(trial: &CachedTrial) -> bool {
    closed(&trial.record).is_none()
}

/// Ends trials that were created while the experiment ended.
async fn end_open_trials(
    context: &Context,
    experiment: &Experiment,
    trials: &[Arc<CachedTrial>],
) -> Result<(), Error> {
    let mut writer = apply::Writer::new(context, experiment, trials);
    let wanted = stops(&writer.records(), experiment.spec.state);
    writer.want(&wanted).await;
    super::most_severe(writer.errors).map_or(Ok(()), Err)
}

/// Records why the clean-up pod does not start, until it runs. Returns the delay until the next
/// check.
async fn wait_for_pod(
    context: &Context,
    key: &Key,
    experiment: &Experiment,
    status: &ExperimentStatus,
    pod: &CachedPod,
    step: CleanUpStep,
) -> Result<Option<Duration>, Error> {
    let mut wait = context.resync_interval(key);
    let refusal = match step {
        CleanUpStep::Report { reason, message } => Some(Refusal { reason, message }),
        CleanUpStep::Wait(Some(seconds)) => {
            wait = wait.min(Duration::from_secs(seconds));
            None
        }
        _ => None,
    };
    // A pending pod may still be unable to start: its deadline begins again when the operator
    // restarts.
    if refusal.is_some() || pod.observed.phase == PodPhase::Running {
        record_refusal(context, experiment, status, refusal.as_ref()).await?;
    }
    Ok(Some(wait))
}

/// Removes deleted checkpoints from the records, deletes the pod, and records the batch as done.
async fn finish_batch(
    context: &Context,
    key: &Key,
    experiment: &Experiment,
    status: &ExperimentStatus,
    trials: &[Arc<CachedTrial>],
    batch: &CleanUpBatch,
    pod: &CachedPod,
) -> Result<Option<Duration>, Error> {
    // The pod may be of an earlier plan, which contained other trials. A pod of an earlier version
    // has no label, and does not store the records.
    let end = pod.cleanup_end.unwrap_or(batch.end.min(status.trials_created));
    let uid = experiment.metadata.uid.as_deref().unwrap_or_default();
    for trial in trials.iter().filter(|trial| trial.record.spec.index < end) {
        let index = trial.record.spec.index;
        let path = trial_path(&key.namespace, &key.name, uid, index);
        if let Some(names) = deleted_by(pod, batch, &path, index) {
            remove_from_record(context, trial, names).await?;
        }
    }
    // Delete the pod first: if the status write then fails, the batch is repeated, which is
    // harmless.
    delete_pod(context, &key.namespace, &deletion(pod, DELETE_GRACE_SECONDS)).await?;
    // The last pod processes one more than all trials: the experiment's record.
    let cleaned_up = end > status.trials_created;
    let trials_cleaned = end.min(status.trials_created);
    let mut after = ExperimentStatus { trials_cleaned, cleaned_up, ..status.clone() };
    set_refusal(&mut after, None, generation(experiment), now());
    apply::write_status(context, experiment, after).await?;
    Ok(Some(Duration::from_millis(100)))
}

/// Returns the names of a trial's checkpoints that a finished pod has deleted. The batch as of now
/// may differ from the pod's instructions: a trial was deleted since, or the operator upgraded.
fn deleted_by<'a>(
    pod: &'a CachedPod,
    batch: &'a CleanUpBatch,
    trial_path: &str,
    index: u32,
) -> Option<&'a Vec<String>> {
    match &pod.cleanup_deletions {
        Some(deletions) => deletions.get(trial_path),
        None => batch.deleted.get(&index),
    }
}

fn deletion(pod: &CachedPod, grace_seconds: u32) -> PodDeletion {
    let (name, uid) = (pod.observed.name.clone(), pod.observed.uid.clone());
    PodDeletion { name, uid, grace_seconds, is_for_node: false }
}

/// Records why the clean-up pod was refused or cannot start, and emits an event if the reason is
/// new.
async fn record_refusal(
    context: &Context,
    experiment: &Experiment,
    status: &ExperimentStatus,
    refusal: Option<&Refusal>,
) -> Result<(), Error> {
    let mut after = status.clone();
    set_refusal(&mut after, refusal, generation(experiment), now());
    if after != *status {
        let written = apply::write_status(context, experiment, after.clone()).await?;
        super::emit_refusal(context, &written, status, &after);
    }
    Ok(())
}

fn generation(experiment: &Experiment) -> i64 {
    experiment.metadata.generation.unwrap_or_default()
}

fn key_of(key: &Key, trial: &CachedTrial) -> Key {
    let name = trial.trial.metadata.name.as_deref().unwrap_or_default();
    Key::new(&key.namespace, name)
}

async fn create_batch_pod(
    context: &Context,
    key: &Key,
    valid: &ValidExperiment,
    storage: &StorageRecord,
    uid: &str,
    batch: &CleanUpBatch,
) -> Result<(), Error> {
    let (config, content) = (&context.operator_config, (&batch.cleanup, batch.end));
    let pod = pods::cleanup_pod(config, valid, storage, &key.namespace, uid, &key.name, content);
    create_pod(context, key, uid, pod).await
}

/// Removes deleted checkpoints from a trial's record.
async fn remove_from_record(
    context: &Context,
    trial: &CachedTrial,
    names: &[String],
) -> Result<(), Error> {
    let mut status = trial.record.status.clone();
    let before = status.checkpoints.len();
    status.checkpoints.retain(|checkpoint| !names.contains(&checkpoint.name));
    if status.checkpoints.len() < before {
        write_status(context, trial, status).await?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn pod(annotations: &Value) -> CachedPod {
        let pod = json!({
            "metadata": {
                "name": "e-cleanup-0", "namespace": "ns", "annotations": annotations,
                "labels": { "stoker.dev/experiment": "e", "stoker.dev/component": "cleanup" },
            },
        });
        CachedPod::new(serde_json::from_value(pod).unwrap())
    }

    #[test]
    fn records_follow_the_instructions_of_the_pod() {
        let cleanup = json!({
            "storage": { "url": "s3://b" },
            "delete": [{ "trialPath": "ns/e/trials/0", "checkpoints": ["a", "b"] }],
        });
        let batch = CleanUpBatch {
            cleanup: serde_json::from_value(cleanup.clone()).unwrap(),
            deleted: [(0, vec!["a".to_owned()]), (1, vec!["c".to_owned()])].into(),
            end: 3,
        };
        let deleted = |annotations: Value, index: u32| {
            let path = format!("ns/e/trials/{index}");
            deleted_by(&pod(&annotations), &batch, &path, index).cloned().unwrap_or_default()
        };
        let instructed = || json!({ "stoker.dev/trial-config": cleanup.to_string() });
        assert_eq!(deleted(instructed(), 0), ["a", "b"]);
        assert_eq!(deleted(instructed(), 1), [""; 0]);
        assert_eq!(deleted(json!({}), 0), ["a"]);
        assert_eq!(deleted(json!({}), 1), ["c"]);
    }
}
