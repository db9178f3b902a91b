//! Applies the plan of a job. Every write fails if another client has changed the object.

use std::sync::Arc;

use kube::core::DeserializeGuard;
use stoker_api::contract::TrialConfig;
use stoker_api::experiment::StorageRecord;
use stoker_api::inference::{InferenceJob, InferenceStatus};
use stoker_api::trial::AttemptEnd;
use stoker_api::validate::ValidInferenceJob;
use stoker_engine::inference::ProcessStart;
use stoker_engine::inference::pods::refuse;

use super::{events, pods};
use crate::cache::Key;
use crate::context::{Context, now};
use crate::error::{Error, refusal};
use crate::metrics::Kind;
use crate::patch::{self, ObjectPart};
use crate::trial::apply::create_pod;
use crate::user_resources::CachedJob;

/// Writes the changed fields of a job's status. Fails with a conflict if the job changed since it
/// was read.
pub(crate) async fn write_status(
    context: &Context,
    key: &Key,
    job: &InferenceJob,
    status: InferenceStatus,
) -> Result<Arc<CachedJob>, Error> {
    let api = context.job_api(&key.namespace);
    context.metrics.writes.get_or_create(&Kind::JOB_STATUS).inc();
    let operation = format!("write the status of job {key}");
    let change = (&job.status, &Some(status));
    match patch::write(&api, operation, job, ObjectPart::Status, change).await {
        Ok(written) => Ok(cache_job(context, written)),
        Err(error) => {
            if matches!(error, Error::Gone { .. }) {
                context.jobs.forget(key);
            }
            Err(error)
        }
    }
}

/// Stores the response to a write in the cache.
pub(crate) fn cache_job(context: &Context, written: InferenceJob) -> Arc<CachedJob> {
    context.jobs.put(CachedJob::new(DeserializeGuard(Ok(written.clone()))));
    Arc::new(CachedJob::new(DeserializeGuard(Ok(written))))
}

/// Creates the pod of a recorded process. If the API server refuses the pod, ends the attempt and
/// returns the job as written.
pub(super) async fn create(
    context: &Context,
    key: &Key,
    job: &CachedJob,
    valid: &ValidInferenceJob,
    storage: &StorageRecord,
    config: &TrialConfig,
    start: ProcessStart,
) -> Result<Option<Arc<CachedJob>>, Error> {
    let pod = pods::pod(&context.operator_config, valid, storage, &key.namespace, config, start);
    let pod_key = Key::new(&key.namespace, &pods::pod_name(&valid.name, start));
    let Err(error) = create_pod(context, &pod_key, job.uid(), pod).await else { return Ok(None) };
    let (end, reason, text) = refusal(error)?;
    end_refused_attempt(context, key, job, valid, start, (end, reason, &text)).await.map(Some)
}

/// Ends an attempt because no storage is configured.
pub(super) async fn end_without_storage(
    context: &Context,
    key: &Key,
    job: &CachedJob,
    valid: &ValidInferenceJob,
    start: ProcessStart,
) -> Result<(), Error> {
    let text = "spec.storage.url is not set, and the operator has no default: set it, or \
                install the chart with storage.url";
    let end = (AttemptEnd::NotStarted, "NoStorage", text);
    end_refused_attempt(context, key, job, valid, start, end).await.map(drop)
}

async fn end_refused_attempt(
    context: &Context,
    key: &Key,
    job: &CachedJob,
    valid: &ValidInferenceJob,
    start: ProcessStart,
    (end, reason, message): (AttemptEnd, &str, &str),
) -> Result<Arc<CachedJob>, Error> {
    let before = job.status();
    let mut status = before.clone();
    refuse(&mut status, start, end, reason, message, valid.spec.max_restarts, now());
    let Ok(object) = &job.object else {
        return Err(Error::Gone { operation: format!("read job {key}") });
    };
    let written = write_status(context, key, object, status).await?;
    events::emit_events(context, key, object, &before, &written.status());
    Ok(written)
}
