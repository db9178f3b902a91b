//! Controller of inference jobs: their processes, each in one pod, and their outcome.
//!
//! ```text
//!   cache -> validate -> engine: inference::pods::plan -> apply: status, deletes, creates
//! ```

pub(crate) mod apply;
mod events;
mod invalid;
mod observe;
pub mod pods;

use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use stoker_api::experiment::{DesiredState, StorageRecord};
use stoker_api::inference::{InferenceJob, InferenceStatus};
use stoker_api::names::LABEL_JOB;
use stoker_api::validate::ValidInferenceJob;
use stoker_engine::inference::config::JobContext;
use stoker_engine::inference::pods::{JobPlan, plan};

use crate::cache::Key;
use crate::context::Context;
use crate::error::Error;
use crate::experiment::state_in_deletion;
use crate::node::report_deletion;
use crate::storage;
use crate::trial::apply::{delete_pod, find_nodes};
use crate::trial::observe::unknown_nodes;
use crate::user_resources::CachedJob;

/// Reconciles one job and returns the delay until the next reconcile.
///
/// Idempotent: the plan depends only on the recorded status and the observed pods.
///
/// # Errors
///
/// See [`Error`]. Completed writes stay.
pub async fn reconcile(context: &Context, key: &Key) -> Result<Option<Duration>, Error> {
    let Some(cached) = context.jobs.get(key) else { return Ok(None) };
    let Ok(job) = &cached.object else {
        return invalid::report_unparsable(context, key, &cached).await;
    };
    let Some(state) = desired_state(&job.metadata, job.spec.state) else { return Ok(None) };
    match &cached.validation {
        Some(Ok(valid)) => run(context, key, &cached, (job, valid), state).await,
        Some(Err(errors)) if !cached.status().phase.is_terminal() => {
            invalid::fail(context, key, job, state, errors).await
        }
        Some(Err(_)) | None => Ok(None),
    }
}

/// Returns the state that a job is to reach. While a finalizer of another program holds back its
/// deletion, its pods would keep their GPUs. `None` if Kubernetes deletes or releases the pods.
fn desired_state(metadata: &ObjectMeta, state: DesiredState) -> Option<DesiredState> {
    match &metadata.deletion_timestamp {
        Some(_) => state_in_deletion(metadata, state),
        None => Some(state),
    }
}

async fn run(
    context: &Context,
    key: &Key,
    cached: &Arc<CachedJob>,
    (job, valid): (&InferenceJob, &ValidInferenceJob),
    state: DesiredState,
) -> Result<Option<Duration>, Error> {
    let mut pods = observe::pods(context, key, cached.uid());
    if find_nodes(context, &unknown_nodes(context, &key.namespace, &pods)).await? {
        pods = observe::pods(context, key, cached.uid());
    }
    let mut status = cached.status();
    let mut job_context =
        pods::job_context(&context.operator_config, valid, &key.namespace, cached.uid());
    let storage = storage_of(context, key, cached, valid, &job_context).await?;
    if let Some(storage) = &storage {
        (job_context.root, job_context.endpoint) = (storage.url.clone(), storage.endpoint.clone());
        let recorded = status.storage.as_ref().is_some_and(|recorded| !recorded.url.is_empty());
        if let Some(output) = status.output.as_ref().filter(|_| recorded) {
            job_context.output_url.clone_from(output);
        }
        if !status.phase.is_terminal() {
            status.storage = Some(storage.clone());
            status.output = Some(job_context.output_url.clone());
        }
    }
    let planned = plan(&observe::view(context, (job, valid), state, &status, &pods));
    let JobPlan { status, delete, create, wake_seconds } = planned;
    let mut retry = None;
    let mut current = cached.clone();
    let state_key = state_key(key);
    if status != cached.status() {
        let is_deferrable = is_only_conditions(&status, &cached.status());
        match if is_deferrable { context.debounce(&state_key) } else { Ok(()) } {
            Err(rest) => retry = Some(rest),
            Ok(()) => {
                current = apply::write_status(context, key, job, status).await?;
                context.clear_debounce(&state_key);
                events::emit_events(context, key, job, &cached.status(), &current.status());
            }
        }
    } else {
        context.clear_debounce(&state_key);
    }
    for pod in &delete {
        delete_pod(context, &key.namespace, pod).await?;
        report_deletion(context, job, pod);
    }
    for start in create {
        let Some(storage) = &storage else {
            apply::end_without_storage(context, key, &current, valid, start).await?;
            break;
        };
        let config = stoker_engine::inference::config::trial_config(&job_context, start);
        let made = apply::create(context, key, &current, valid, storage, &config, start).await?;
        if made.is_some() {
            // A refused pod ended the attempt. The API server would refuse the other pods too.
            break;
        }
    }
    let wake = wake_seconds.map(Duration::from_secs);
    Ok([retry, wake, Some(context.resync_interval(key))].into_iter().flatten().min())
}

/// Returns the storage of a job: its fixed record, or the record to write. `None` if neither the
/// job nor the operator specifies a storage.
async fn storage_of(
    context: &Context,
    key: &Key,
    cached: &CachedJob,
    valid: &ValidInferenceJob,
    job_context: &JobContext<'_>,
) -> Result<Option<StorageRecord>, Error> {
    let status = cached.status();
    if let Some(fixed) = status.storage.as_ref().filter(|storage| storage.is_fixed()) {
        return Ok(Some(fixed.clone()));
    }
    let settings = pods::used_storage(&context.operator_config, valid, job_context);
    let in_pod = match status.attempts {
        0 => None,
        _ if status.phase.is_terminal() => None,
        _ => {
            let labels = format!("{LABEL_JOB}={}", valid.name);
            let secrets = &valid.spec.pod.env_from_secrets;
            let owners = [cached.uid()].into();
            storage::of_newest_pod(context, key, &labels, &owners, secrets).await?
        }
    };
    let default_secret = context.operator_config.storage_secret.as_ref();
    let default_secret = default_secret
        .filter(|_| status.workers.iter().any(|worker| worker.has_pod) || !status.ends.is_empty());
    Ok(storage::to_record(settings, in_pod, status.storage.as_ref(), default_secret))
}

/// Key of the job in state that all kinds share by name. No experiment or trial has such a key.
fn state_key(key: &Key) -> Key {
    Key::new(&key.namespace, &format!("inferencejob/{}", key.name))
}

/// Whether two statuses differ in conditions only. Such a change can be written a few seconds
/// later.
fn is_only_conditions(a: &InferenceStatus, b: &InferenceStatus) -> bool {
    let bare = |status: &InferenceStatus| InferenceStatus {
        conditions: vec![],
        observed_generation: 0,
        ..status.clone()
    };
    !a.conditions.is_empty() && !b.conditions.is_empty() && bare(a) == bare(b)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn held_deletion_stops_a_job() {
        let check = |metadata: serde_json::Value, state, expected| {
            let metadata: ObjectMeta = serde_json::from_value(metadata).unwrap();
            assert_eq!(desired_state(&metadata, state), expected, "{metadata:?}");
        };
        let deleted = |finalizer: &str| {
            let finalizers = [finalizer];
            json!({ "deletionTimestamp": "2026-01-01T00:00:00Z", "finalizers": finalizers })
        };
        let backup = || deleted("example.com/backup");
        check(json!({}), DesiredState::Active, Some(DesiredState::Active));
        check(json!({}), DesiredState::Paused, Some(DesiredState::Paused));
        check(backup(), DesiredState::Active, Some(DesiredState::Cancelled));
        check(backup(), DesiredState::Paused, Some(DesiredState::Cancelled));
        check(backup(), DesiredState::Killed, Some(DesiredState::Killed));
        check(deleted("foregroundDeletion"), DesiredState::Active, None);
        check(deleted("orphan"), DesiredState::Killed, None);
    }
}
