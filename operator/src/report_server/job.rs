//! Reports of a job's processes: the progress of each.

use std::sync::Arc;

use axum::Json;
use axum::body::Body;
use axum::extract::{Path, State};
use axum::http::HeaderMap;
use stoker_api::contract::{Directive, Report, ReportEvent};
use stoker_api::experiment::DesiredState;
use stoker_api::inference::InferenceStatus;
use stoker_engine::inference::{is_live, record_progress};

use super::auth::{AuthError, Caller};
use super::{Accepted, Authorization, Refusal, ReportServer, pod_names};
use crate::cache::Key;
use crate::error::{Error, request};
use crate::job::apply::{cache_job, write_status};
use crate::metrics::Answer;
use crate::user_resources::CachedJob;

/// Maximum number of tries to write a report while other clients write the job.
const TRIES_MAX: u32 = 16;
/// Steps of a job's progress that are recorded, over all slots. Logs have finer progress.
const PROGRESS_STEPS: u64 = 64;

/// Returns the directive for a process of a live attempt. A pause or cancellation also reaches it
/// as a signal, but a process that is starting may miss that.
fn directive(job: &CachedJob) -> Directive {
    match &job.object {
        Ok(object) if object.spec.state != DesiredState::Active => Directive::Preempt,
        _ => Directive::Continue { units: 0 },
    }
}

/// Handles one report of a job's process.
pub(super) async fn report(
    State(server): State<Arc<ReportServer>>,
    Path((namespace, name)): Path<(String, String)>,
    headers: HeaderMap,
    body: Body,
) -> Result<Json<Directive>, Refusal> {
    let key = Key::new(&namespace, &name);
    let accepted = server.handle_job_report(&key, &headers, body).await;
    server
        .count(accepted.as_ref().map_or_else(|refusal| refusal.answer, |accepted| accepted.answer));
    accepted.map(|accepted| Json(accepted.directive))
}

impl ReportServer {
    async fn handle_job_report(
        &self,
        key: &Key,
        headers: &HeaderMap,
        body: Body,
    ) -> Result<Accepted, Refusal> {
        let is_known = self.context.jobs.get(key).is_some();
        let (caller, report) = self.authenticate(key, is_known, headers, body).await?;
        match self.authorize_job_report(&caller, key, &report).await? {
            Authorization::Granted { owner, index } => {
                self.record_job(key, &owner, index, &report).await
            }
            Authorization::Fenced => Ok(Accepted::fenced()),
        }
    }

    /// Checks that the caller is a process of the job and that the report is for the caller's
    /// attempt.
    async fn authorize_job_report(
        &self,
        caller: &Caller,
        key: &Key,
        report: &Report,
    ) -> Result<Authorization, Refusal> {
        let not_owned =
            || Refusal::forbidden(format!("pod {} does not belong to job {key}", caller.pod));
        let pod_names = pod_names::parse_job_pod(&caller.pod.name, &key.name);
        let pod_names = pod_names.filter(|_| caller.pod.namespace == key.namespace);
        let (attempt, index) = pod_names.ok_or_else(not_owned)?;
        let Some(owner) = self.owner(caller, (attempt, index)).await? else {
            return Ok(Authorization::Fenced);
        };
        let owner = owner.ok_or_else(not_owned)?;
        let Some(job) = self.owned_job(key, &owner).await? else {
            return Ok(Authorization::Fenced);
        };
        // The cached status may be older than the pod's attempt.
        if !is_live(&job.status(), attempt) {
            let job = self.read_owned_job(key, &owner).await?;
            if job.is_none_or(|job| !is_live(&job.status(), attempt)) {
                return Ok(Authorization::Fenced);
            }
        }
        if attempt != report.attempt {
            return Err(Refusal::forbidden(format!(
                "pod {} belongs to attempt {attempt}, but its report is for attempt {}",
                caller.pod, report.attempt
            )));
        }
        Ok(Authorization::Granted { owner, index })
    }

    /// Returns the job with this name and UID, from the cache or else from the API server. Returns
    /// `None` if it was deleted, even if another job has its name now.
    async fn owned_job(&self, key: &Key, uid: &str) -> Result<Option<Arc<CachedJob>>, Refusal> {
        match self.context.jobs.get(key).filter(|job| job.uid() == uid) {
            Some(job) => Ok(Some(job)),
            None => self.read_owned_job(key, uid).await,
        }
    }

    async fn read_owned_job(
        &self,
        key: &Key,
        uid: &str,
    ) -> Result<Option<Arc<CachedJob>>, Refusal> {
        let api = self.context.job_api(&key.namespace);
        let job = request(format!("read job {key}"), api.get_opt(&key.name)).await;
        let job = job.map_err(|error| AuthError::Unavailable(error.to_string()))?;
        Ok(job.map(|job| cache_job(&self.context, job)).filter(|job| job.uid() == uid))
    }

    /// Records the progress of a process, if it is worth a write, and answers the report.
    async fn record_job(
        &self,
        key: &Key,
        uid: &str,
        slot: u32,
        report: &Report,
    ) -> Result<Accepted, Refusal> {
        let repeat = |job: &CachedJob| Ok(Accepted::new(Answer::Repeat, directive(job)));
        let Some(job) = self.owned_job(key, uid).await? else { return Ok(Accepted::fenced()) };
        let ReportEvent::Progress { batches_total, .. } = report.event else {
            // The pod's exit shows how the process ended, and progress shows that it has started.
            return repeat(&job);
        };
        let is_idle = |before: &InferenceStatus| {
            let mut after = before.clone();
            record_progress(&mut after, report.attempt, report.batches, batches_total)
                && is_minor_progress(before, &after, slot, batches_total)
        };
        if is_idle(&job.status()) {
            return repeat(&job);
        }
        // Wait before taking the lock: one namespace must not block the jobs of others.
        self.wait_to_write(key, true).await?;
        let _write_lock = self.context.job_reports.lock().await;
        let mut current = self.owned_job(key, uid).await?;
        let mut is_read = false;
        for _ in 0..TRIES_MAX {
            let Some(job) = current else { return Ok(Accepted::fenced()) };
            let Ok(object) = &job.object else {
                let why = format!("job {key} cannot be parsed by this operator version");
                return Err(Refusal::unavailable(why));
            };
            let before = job.status();
            let mut after = before.clone();
            if record_progress(&mut after, report.attempt, report.batches, batches_total) {
                if is_minor_progress(&before, &after, slot, batches_total) {
                    return repeat(&job);
                }
                match write_status(&self.context, key, object, after).await {
                    Ok(_) => return Ok(Accepted::new(Answer::Directive, directive(&job))),
                    Err(Error::Conflict { .. } | Error::Gone { .. }) => {}
                    Err(error) => return Err(Refusal::unavailable(error.to_string())),
                }
            } else if is_read {
                return Ok(Accepted::fenced());
            }
            // The cache may be older than the attempt, so check the API server before fencing.
            current = self.read_owned_job(key, uid).await?;
            is_read = true;
        }
        let why = format!("job {key} has too many concurrent writes; retry later");
        Err(Refusal::unavailable(why))
    }
}

/// Whether a report contains only a little more progress of one slot, which is not worth a write.
fn is_minor_progress(
    before: &InferenceStatus,
    after: &InferenceStatus,
    slot: u32,
    total: u64,
) -> bool {
    let at =
        |status: &InferenceStatus| status.workers.get(slot as usize).cloned().unwrap_or_default();
    let (old, new) = (at(before), at(after));
    let is_end = new.rows >= total && old.rows < total;
    let parts = (PROGRESS_STEPS / (after.workers.len() as u64).max(1)).max(1);
    let part = |rows: u64| match total {
        0 => 0,
        total => rows.saturating_mul(parts) / total,
    };
    let counts = |status: &InferenceStatus| (status.rows_total, status.rejected, status.reported);
    let same = counts(before) == counts(after);
    same && old.consecutive_failures == new.consecutive_failures
        && !is_end
        && part(old.rows) == part(new.rows)
}

#[cfg(test)]
mod tests {
    use kube::core::DeserializeGuard;
    use serde_json::json;
    use stoker_api::inference::{InferenceJob, WorkerStatus};

    use super::*;

    #[test]
    fn process_of_a_paused_job_is_preempted() {
        let directive_of = |state: DesiredState| {
            let spec = json!({ "entrypoint": { "command": ["x"] }, "input": { "url": "s3://b" } });
            let mut job = InferenceJob::new("a", serde_json::from_value(spec).unwrap());
            job.metadata.namespace = Some("default".to_owned());
            job.spec.state = state;
            directive(&CachedJob::new(DeserializeGuard(Ok(job))))
        };
        assert_eq!(directive_of(DesiredState::Active), Directive::Continue { units: 0 });
        for state in [DesiredState::Paused, DesiredState::Cancelled, DesiredState::Killed] {
            assert_eq!(directive_of(state), Directive::Preempt, "{state:?}");
        }
    }

    #[test]
    fn job_progress_is_recorded_in_parts() {
        let status = |rows: u64, slots: usize, consecutive_failures: u32| InferenceStatus {
            workers: vec![WorkerStatus { rows, consecutive_failures, ..Default::default() }; slots],
            rows_total: 1000,
            ..Default::default()
        };
        let check = |old: u64, new: u64, slots: usize, expected: bool| {
            let (before, after) = (status(old, slots, 0), status(new, slots, 0));
            assert_eq!(is_minor_progress(&before, &after, 0, 640), expected, "{old} {new} {slots}");
        };
        check(0, 0, 1, true);
        check(0, 9, 1, true);
        check(0, 10, 1, false);
        check(10, 19, 1, true);
        check(0, 79, 8, true);
        check(0, 80, 8, false);
        check(0, 639, 1000, true);
        check(0, 640, 1000, false);
        check(639, 640, 1, false);
        assert!(
            !is_minor_progress(&status(0, 1, 1), &status(1, 1, 0), 0, 640),
            "the slot has committed again"
        );
        let planned = InferenceStatus { rows_total: 10, ..Default::default() };
        assert!(!is_minor_progress(&InferenceStatus::default(), &planned, 0, 10));
    }
}
