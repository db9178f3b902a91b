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

use super::{pods, tell};
use crate::cache::Key;
use crate::declared::CachedJob;
use crate::error::{Error, refusal};
use crate::metrics::Kind;
use crate::patch::{self, Part};
use crate::trial::apply::create_pod;
use crate::world::{World, now};

/// Writes the changed fields of a job's status. Fails with a conflict if the job changed since it
/// was read.
pub(crate) async fn write_status(
    world: &World,
    key: &Key,
    job: &InferenceJob,
    status: InferenceStatus,
) -> Result<Arc<CachedJob>, Error> {
    let api = world.job_api(&key.namespace);
    world.metrics.writes.get_or_create(&Kind::JOB_STATUS).inc();
    let doing = format!("write the status of job {key}");
    let change = (&job.status, &Some(status));
    match patch::write(&api, doing, job, Part::Status, change).await {
        Ok(written) => Ok(keep(world, written)),
        Err(error) => {
            if matches!(error, Error::Gone { .. }) {
                world.jobs.forget(key);
            }
            Err(error)
        }
    }
}

/// Stores the response to a write in the cache.
pub(crate) fn keep(world: &World, written: InferenceJob) -> Arc<CachedJob> {
    world.jobs.put(CachedJob::new(DeserializeGuard(Ok(written.clone()))));
    Arc::new(CachedJob::new(DeserializeGuard(Ok(written))))
}

/// Creates the pod of a recorded process. If the API server refuses the pod, ends the attempt and
/// returns the job as written.
pub(super) async fn create(
    world: &World,
    key: &Key,
    job: &CachedJob,
    valid: &ValidInferenceJob,
    storage: &StorageRecord,
    config: &TrialConfig,
    start: ProcessStart,
) -> Result<Option<Arc<CachedJob>>, Error> {
    let pod = pods::pod(&world.setup, valid, storage, &key.namespace, config, start);
    let pod_key = Key::new(&key.namespace, &pods::pod_name(&valid.name, start));
    let Err(error) = create_pod(world, &pod_key, job.uid(), pod).await else { return Ok(None) };
    let (end, reason, text) = refusal(error)?;
    refused(world, key, job, valid, start, (end, reason, &text)).await.map(Some)
}

/// Ends an attempt because no storage is configured.
pub(super) async fn no_storage(
    world: &World,
    key: &Key,
    job: &CachedJob,
    valid: &ValidInferenceJob,
    start: ProcessStart,
) -> Result<(), Error> {
    let text = "spec.storage.url is not set, and the operator has no default: set it, or \
                install the chart with storage.url";
    let end = (AttemptEnd::NotStarted, "NoStorage", text);
    refused(world, key, job, valid, start, end).await.map(drop)
}

async fn refused(
    world: &World,
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
        return Err(Error::Gone { doing: format!("read job {key}") });
    };
    let written = write_status(world, key, object, status).await?;
    tell::tell(world, key, object, &before, &written.status()).await;
    Ok(written)
}
