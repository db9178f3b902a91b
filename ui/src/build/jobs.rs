//! List of batch inference jobs.

use std::cmp::Reverse;
use std::sync::Arc;

use serde_json::{Value, json};
use stoker_api::inference::Role;
use stoker_api::time::Timestamp;
use stoker_engine::inference::percent;

use super::plain_frame;
use crate::job::Job;
use crate::site::Site;
use crate::state::{self, INVALID};
use crate::text;
use crate::views::{Badge, JobRow, JobsPage};
use crate::visible::Visible;

/// Returns all jobs: running ones first, then the newest.
fn sorted(visible: &Visible) -> Vec<Arc<Job>> {
    let mut jobs = visible.jobs();
    jobs.sort_by_key(|job| (Reverse(job.is_live()), Reverse(job.created)));
    jobs
}

/// Returns the page with all jobs.
pub(crate) fn page(site: &Site, visible: &Visible) -> JobsPage {
    // Read first: a later change then only loads the page again.
    let version = visible.version();
    let jobs = sorted(visible);
    let mut frame = plain_frame(site, "jobs", "Inference jobs · Stoker");
    frame.live = Some(format!("/live?v={version}"));
    let first_command = match site.is_cluster {
        true => site.creation("stoker job create job.yaml"),
        false => site.creation("stoker job run job.yaml"),
    };
    let now = text::now();
    let rows = jobs.iter().map(|job| row(job, now)).collect();
    let error = visible.jobs_error().map(|error| text::escape(&error));
    JobsPage { frame, rows, error, first_command }
}

/// Returns the phase. Without a runner, a job that has not ended is paused or stopped.
pub(super) fn badge(job: &Job) -> Badge {
    match job.phase() {
        _ if job.invalid().is_some() => INVALID,
        phase if phase.is_terminal() || job.is_running => state::of_phase(phase),
        _ => state::without_runner(job.job.spec.state),
    }
}

/// Returns the word of a stage.
pub(super) fn stage(role: Role) -> &'static str {
    match role {
        Role::Plan => "plan",
        Role::Work => "work",
        Role::Finish => "finish",
    }
}

fn row(job: &Job, now: Timestamp) -> JobRow {
    let status = job.status();
    let failed = num_failed(job);
    let message = match (job.invalid(), job.is_running || job.phase().is_terminal()) {
        (Some(invalid), _) => invalid,
        (None, true) => status.message.clone().unwrap_or_default(),
        (None, false) => "no runner works on it now".to_owned(),
    };
    JobRow {
        namespace: job.namespace.clone(),
        name: text::name(&job.name),
        href: job.base(),
        phase: badge(job),
        stage: match job.phase().is_terminal() {
            true => text::NONE.to_owned(),
            false => stage(status.stage).to_owned(),
        },
        progress: format!("{} %", percent(&status)),
        rows: rows(status.rows, status.rows_total),
        rejected: rejected(job),
        attempts: match failed {
            0 => text::count(status.attempts.into()),
            failed => format!("{failed} of {} failed", text::count(status.attempts.into())),
        },
        message: text::escape(&message),
        age: job
            .created
            .map_or_else(|| text::NONE.to_owned(), |at| text::age(now.seconds_since(at))),
        created: job.created.map(|at| at.to_string()).unwrap_or_default(),
    }
}

/// Returns `done / total`, or a dash before the job is planned.
pub(super) fn rows(rows: u64, total: u64) -> String {
    match total {
        0 => text::NONE.to_owned(),
        total => format!("{} / {}", text::count(rows), text::count(total)),
    }
}

/// Returns the number of rejected rows. It is recorded when the job ends.
pub(super) fn rejected(job: &Job) -> String {
    let status = job.status();
    match status.phase.is_terminal() || status.rejected > 0 {
        true => text::count(status.rejected),
        false => text::NONE.to_owned(),
    }
}

/// Returns the number of failures of the program. Earlier local runners recorded them by slot only.
pub(super) fn num_failed(job: &Job) -> u32 {
    let status = job.status();
    let by_slot: u32 = status.workers.iter().map(|worker| worker.restarts).sum();
    status.restarts.max(by_slot)
}

/// Returns the list for export.
pub(crate) fn export(visible: &Visible) -> Vec<Value> {
    let of = |job: &Arc<Job>| {
        let status = job.status();
        json!({
            "namespace": job.namespace, "name": job.name, "id": job.id(),
            "phase": badge(job).word, "stage": stage(status.stage),
            "progressPercent": percent(&status),
            "rows": status.rows, "rowsTotal": status.rows_total,
            "rejected": status.phase.is_terminal().then_some(status.rejected),
            "attempts": status.attempts, "failures": num_failed(job),
            "created": job.created.map(|at| at.to_string()), "output": job.output_url,
            "message": status.message,
        })
    };
    sorted(visible).iter().map(of).collect()
}

#[cfg(test)]
mod tests {
    use stoker_api::experiment::DesiredState;

    use super::*;
    use crate::fixture;
    use crate::store::Store;

    /// Columns phase, stage, progress, rows, rejected, attempts and message.
    fn check(status: Value, is_running: bool, expected: [&str; 7]) {
        let job = fixture::job(status.clone(), is_running);
        let row = row(&job, Timestamp(3_600));
        let cells = [
            row.phase.word,
            &row.stage,
            &row.progress,
            &row.rows,
            &row.rejected,
            &row.attempts,
            &row.message,
        ];
        assert_eq!(cells, expected, "{status}");
        assert_eq!((row.age.as_str(), row.href.as_str()), ("1 h", "/jobs/ml/species-01234567"));
    }

    #[test]
    fn rows_show_progress_and_failures() {
        check(json!({}), true, ["Pending", "plan", "0 %", "–", "–", "0", ""]);
        // Earlier local runners recorded neither the percentage nor the sum of the restarts.
        let mut local = json!({
            "phase": "Running", "stage": "work", "rows": 20, "rowsTotal": 80, "attempts": 5,
            "workers": [{"restarts": 1}, {"restarts": 1}],
        });
        let failed = "2 of 5 failed";
        let running = ["Running", "work", "25 %", "20 / 80", "–", failed, ""];
        check(local.clone(), true, running);
        let why = "no runner works on it now";
        let stopped = ["Stopped", "work", "25 %", "20 / 80", "–", failed, why];
        check(local.clone(), false, stopped);
        local["phase"] = json!("Completed");
        local["rejected"] = json!(3);
        check(local, false, ["Completed", "–", "100 %", "20 / 80", "3", failed, ""]);
        let damaged = json!({"phase": "Running", "stage": "work", "rows": 9, "rowsTotal": 8});
        check(damaged, true, ["Running", "work", "100 %", "9 / 8", "–", "0", ""]);
        let failed = json!({"phase": "Failed", "restarts": 6, "attempts": 6, "message": "a\u{7}"});
        let cells = ["Failed", "–", "0 %", "–", "0", "6 of 6 failed", "a\\u{7}"];
        check(failed, true, cells);
        let invalid = json!({"conditions": [{
            "type": "Valid", "status": "False", "reason": "Invalid", "message": "spec.input",
            "lastTransitionTime": "2026-11-21T19:00:00Z",
        }]});
        check(invalid, true, ["Invalid", "plan", "0 %", "–", "–", "0", "spec.input"]);
    }

    #[test]
    fn paused_job_without_a_runner_is_paused() {
        let mut job = fixture::job(json!({"phase": "Running"}), false);
        job.job.spec.state = DesiredState::Paused;
        let row = row(&job, Timestamp(0));
        assert_eq!((row.phase.word, row.message.as_str()), ("Paused", "no runner works on it now"));
    }

    #[test]
    fn export_has_rejected_rows_after_the_end() {
        let store = Arc::new(Store::default());
        let visible = Visible::all(store.clone());
        store.replace_job(fixture::job(json!({"phase": "Running"}), true));
        let rows = export(&visible);
        assert_eq!((&rows[0]["phase"], &rows[0]["rejected"]), (&json!("Running"), &Value::Null));
        assert_eq!(rows[0]["id"], "species-01234567");
        store.replace_job(fixture::job(json!({"phase": "Completed", "rejected": 2}), true));
        assert_eq!(export(&visible)[0]["rejected"], 2);
    }
}
