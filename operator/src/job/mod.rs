//! Controller of inference jobs: their processes, each in one pod, and their outcome.
//!
//! ```text
//!   cache -> validate -> engine: inference::pods::plan -> apply: status, deletes, creates
//! ```

pub(crate) mod apply;
mod events;
mod observe;
pub mod pods;

use std::sync::Arc;
use std::time::Duration;

use kube::runtime::events::EventType;
use stoker_api::condition;
use stoker_api::condition::ConditionStatus;
use stoker_api::experiment::{Phase, StorageRecord};
use stoker_api::inference::{InferenceJob, InferenceStatus};
use stoker_api::names::LABEL_JOB;
use stoker_api::validate::{FieldError, ValidInferenceJob};
use stoker_engine::inference::config::JobContext;
use stoker_engine::inference::pods::{JobPlan, plan};

use crate::cache::Key;
use crate::context::{Context, now};
use crate::error::Error;
use crate::experiment::{new_condition, set_invalid};
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
        return report_unparsable(context, key, &cached).await;
    };
    if job.metadata.deletion_timestamp.is_some() {
        return Ok(None);
    }
    match &cached.validation {
        Some(Ok(valid)) => run(context, key, &cached, job, valid).await,
        Some(Err(errors)) if !cached.status().phase.is_terminal() => {
            fail_invalid(context, key, job, errors).await
        }
        Some(Err(_)) | None => Ok(None),
    }
}

async fn run(
    context: &Context,
    key: &Key,
    cached: &Arc<CachedJob>,
    job: &InferenceJob,
    valid: &ValidInferenceJob,
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
    let planned = plan(&observe::view(context, job, valid, &status, &pods));
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

/// Fails a job with an invalid spec, which cannot change. A job that has already started stays as
/// it is, and continues once an operator accepts it.
async fn fail_invalid(
    context: &Context,
    key: &Key,
    job: &InferenceJob,
    errors: &[FieldError],
) -> Result<Option<Duration>, Error> {
    let message = errors.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ");
    let mut after = job.status.clone().unwrap_or_default();
    let generation = job.metadata.generation.unwrap_or_default();
    if after.attempts > 0 {
        let uid = job.metadata.uid.as_deref().unwrap_or_default();
        if !context.reported.contains(&state_key(key), uid, generation) {
            let valid = new_condition(
                "Valid",
                ConditionStatus::False,
                generation,
                "NoLongerValid",
                &message,
            );
            condition::set(&mut after.conditions, valid);
            tracing::error!(
                job = %key,
                message,
                "running job is invalid under newer validation rules"
            );
            apply::write_status(context, key, job, after).await?;
            context.reported.add(&state_key(key), uid, generation);
        }
        return Ok(Some(context.resync_interval(key)));
    }
    after.phase = Phase::Failed;
    after.message = Some(format!("invalid: {message}"));
    after.observed_generation = generation;
    after.ended_at = Some(now());
    set_invalid(&mut after.conditions, generation, &message);
    tracing::info!(job = %key, message, "job is invalid");
    apply::write_status(context, key, job, after).await?;
    context.metrics.job_ended(Phase::Failed);
    context.event(job, EventType::Warning, "Invalid", message);
    Ok(None)
}

/// Writes the parse error of an object to its status. Other objects are not affected.
async fn report_unparsable(
    context: &Context,
    key: &Key,
    cached: &CachedJob,
) -> Result<Option<Duration>, Error> {
    let Err(error) = &cached.object else { return Ok(None) };
    let generation = error.metadata.generation.unwrap_or_default();
    if !context.reported.contains(&state_key(key), cached.uid(), generation) {
        tracing::warn!(job = %key, error = error.error, "cannot parse a job");
        let version = error.metadata.resource_version.clone();
        let valid =
            new_condition("Valid", ConditionStatus::False, generation, "Unreadable", &error.error);
        crate::experiment::apply::mark_unreadable::<InferenceJob>(context, key, version, &valid)
            .await?;
        context.reported.add(&state_key(key), cached.uid(), generation);
    }
    Ok(Some(context.resync_interval(key)))
}
