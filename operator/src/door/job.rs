//! Reports of a job's processes: how far each is.

use std::sync::Arc;

use axum::Json;
use axum::body::Body;
use axum::extract::{Path, State};
use axum::http::{HeaderMap, StatusCode};
use stoker_api::contract::{Directive, Report, ReportEvent};
use stoker_api::inference::InferenceStatus;
use stoker_engine::inference::progressed;

use super::auth::{Caller, Denied};
use super::{Door, Refusal};
use crate::cache::Key;
use crate::declared::CachedJob;
use crate::error::{Error, request};
use crate::job::apply::{keep, write_status};
use crate::metrics::Answer;

/// Tries to write a report, when others write the job at the same time.
const TRIES_MAX: u32 = 16;
/// Parts of a job's way of which each is recorded once, over all slots: finer progress is in the logs.
const PROGRESS_PARTS: u64 = 64;

/// The answer to a process that may go on. What else is wanted of it, it hears by a signal.
const GO_ON: Directive = Directive::Continue { units: 0 };

/// Takes one report of a job's process.
pub(super) async fn report(
    State(door): State<Arc<Door>>,
    Path((namespace, name)): Path<(String, String)>,
    headers: HeaderMap,
    body: Body,
) -> Result<Json<Directive>, Refusal> {
    let key = Key::new(&namespace, &name);
    let (caller, report) = door.hear(&headers, body).await?;
    let slot = door.slot_of(&caller, &key, &report).await?;
    door.record_job(&key, slot, &report).await.map(Json)
}

impl Door {
    /// The slot of the caller, if its pod is of the job and of the attempt that the report is of.
    async fn slot_of(&self, caller: &Caller, key: &Key, report: &Report) -> Result<u32, Refusal> {
        let forbidden = |why: String| {
            self.count(Answer::Unauthorized);
            Err((StatusCode::FORBIDDEN, why))
        };
        let not_of = || format!("pod {} is not of job {key}", caller.pod);
        if caller.pod.namespace != key.namespace {
            return forbidden(not_of());
        }
        let pod = match self.callers.pod(&self.world, caller).await {
            Ok(Some(pod)) => pod,
            Ok(None) => return forbidden(format!("pod {} is gone", caller.pod)),
            Err(error) => return Err(self.denied(Denied::Away(error.to_string()))),
        };
        let job = match self.world.jobs.get(key) {
            Some(job) => Some(job),
            None => self.read_job(key).await?,
        };
        // Whether there is such a job is nobody else's business.
        if job.is_none_or(|it| it.uid() != pod.owner || pod.owner.is_empty()) {
            return forbidden(not_of());
        }
        if pod.seen.attempt != report.attempt {
            return forbidden(format!(
                "pod {} is of attempt {}, the report of attempt {}",
                caller.pod, pod.seen.attempt, report.attempt
            ));
        }
        Ok(pod.seen.index)
    }

    async fn read_job(&self, key: &Key) -> Result<Option<Arc<CachedJob>>, Refusal> {
        let api = self.world.job_api(&key.namespace);
        let found = request(format!("read job {key}"), api.get_opt(&key.name)).await;
        let found = found.map_err(|it| self.denied(Denied::Away(it.to_string())))?;
        Ok(found.map(|it| keep(&self.world, it)))
    }

    /// Records how far a process is, if that is worth a write, and answers it.
    async fn record_job(
        &self,
        key: &Key,
        slot: u32,
        report: &Report,
    ) -> Result<Directive, Refusal> {
        let ReportEvent::Progress { batches_total, .. } = report.event else {
            // Its pod says how it ended; it has begun when it is further.
            self.count(Answer::Repeat);
            return Ok(GO_ON);
        };
        let is_idle = |before: &InferenceStatus| {
            let mut after = before.clone();
            progressed(&mut after, report.attempt, report.batches, batches_total)
                && is_fine(before, &after, slot, batches_total)
        };
        if self.world.jobs.get(key).is_some_and(|it| is_idle(&it.status())) {
            self.count(Answer::Repeat);
            return Ok(GO_ON);
        }
        let _turn = self.world.job_reports.lock().await;
        let mut is_live = false;
        let mut current = self.world.jobs.get(key);
        for _ in 0..TRIES_MAX {
            let job = match current.take() {
                Some(job) => job,
                None => {
                    is_live = true;
                    let Some(job) = self.read_job(key).await? else {
                        self.count(Answer::Fenced);
                        return Ok(Directive::Fenced);
                    };
                    job
                }
            };
            let Ok(object) = &job.object else {
                let why = format!("job {key} cannot be read by this operator");
                return Err(self.denied(Denied::Away(why)));
            };
            let before = job.status();
            let mut after = before.clone();
            if !progressed(&mut after, report.attempt, report.batches, batches_total) {
                // What is cached may be older than the attempt.
                if is_live {
                    self.count(Answer::Fenced);
                    return Ok(Directive::Fenced);
                }
                continue;
            }
            if is_fine(&before, &after, slot, batches_total) {
                self.count(Answer::Repeat);
                return Ok(GO_ON);
            }
            match write_status(&self.world, key, object, after).await {
                Ok(_) => {
                    self.count(Answer::Directive);
                    return Ok(GO_ON);
                }
                Err(Error::Conflict { .. } | Error::Gone { .. }) => {}
                Err(error) => return Err(self.denied(Denied::Away(error.to_string()))),
            }
        }
        Err(self.denied(Denied::Away(format!("job {key} is written by too many at once"))))
    }
}

/// Whether a report tells nothing but a little more progress of one slot, which is not worth a write.
fn is_fine(before: &InferenceStatus, after: &InferenceStatus, slot: u32, total: u64) -> bool {
    let at = |it: &InferenceStatus| it.workers.get(slot as usize).cloned().unwrap_or_default();
    let (old, new) = (at(before), at(after));
    let is_end = new.rows >= total && old.rows < total;
    let parts = (PROGRESS_PARTS / (after.workers.len() as u64).max(1)).max(1);
    let part = |rows: u64| match total {
        0 => 0,
        total => rows.saturating_mul(parts) / total,
    };
    let said = |it: &InferenceStatus| (it.rows_total, it.rejected, it.reported);
    let same = said(before) == said(after);
    same && old.barren == new.barren && !is_end && part(old.rows) == part(new.rows)
}

#[cfg(test)]
mod tests {
    use stoker_api::inference::WorkerStatus;

    use super::*;

    #[test]
    fn progress_of_a_job_is_recorded_in_parts() {
        let status = |rows: u64, slots: usize, barren: u32| InferenceStatus {
            workers: vec![WorkerStatus { rows, barren, ..Default::default() }; slots],
            rows_total: 1000,
            ..Default::default()
        };
        let check = |old: u64, new: u64, slots: usize, expected: bool| {
            let (before, after) = (status(old, slots, 0), status(new, slots, 0));
            assert_eq!(is_fine(&before, &after, 0, 640), expected, "{old} {new} {slots}");
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
        assert!(!is_fine(&status(0, 1, 1), &status(1, 1, 0), 0, 640), "it has committed again");
        let planned = InferenceStatus { rows_total: 10, ..Default::default() };
        assert!(!is_fine(&InferenceStatus::default(), &planned, 0, 10));
    }
}
