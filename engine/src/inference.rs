//! The life of an inference job: which processes run next, and what an end means.
//!
//! ```text
//!  plan (one process)  ->  work (one for each slot)  ->  finish (one)  ->  Completed
//! ```
//!
//! What is done is in the output folder, not here: a process that is started again finds the shards that are committed
//! and does the others. So a status may be lost without harm, but for its count of attempts.
//!
//! * [`config`]: what a process is told.
//! * [`pods`]: on a cluster, which pods are made and deleted for it.

mod conditions;
pub mod config;
pub mod pods;

use std::time::Duration;

use stoker_api::experiment::Phase;
use stoker_api::inference::{InferenceStatus, Role, WorkerStatus};
use stoker_api::trial::AttemptEnd;

use crate::trial::BackOffLimits;

/// Failures in a row of a process that commits nothing between them, after which the job fails, whosever they are.
pub const BARREN_MAX: u32 = 10;

/// A process to start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Start {
    /// What it does.
    pub role: Role,
    /// Which of the slots it is.
    pub slot: u32,
    /// Its number, which no other process of the job has had.
    pub attempt: u32,
}

/// How a process ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct End {
    /// Whose it was.
    pub slot: u32,
    /// Its number.
    pub attempt: u32,
    /// How.
    pub end: AttemptEnd,
    /// Why, for people.
    pub message: Option<String>,
    /// Whether a shard was committed while it ran.
    pub has_committed: bool,
}

/// Begins a life of the job, or goes on with it: the input is looked at again, and every slot looks for what is left.
/// Nothing of an earlier life runs any more. A job that failed is tried again, with what is committed.
pub fn resume(status: &mut InferenceStatus, slots: u32) {
    if status.phase == Phase::Completed {
        return;
    }
    if status.phase == Phase::Failed {
        status.workers.clear();
    }
    status.phase = Phase::Running;
    status.message = None;
    status.workers.resize(slots as usize, WorkerStatus::default());
    enter(status, Role::Plan);
}

/// The processes that may start now, none of which runs.
pub fn next(status: &InferenceStatus) -> Vec<Start> {
    if status.phase != Phase::Running {
        return vec![];
    }
    let wanted = match status.stage {
        Role::Work => status.workers.len(),
        Role::Plan | Role::Finish => 1,
    };
    let slots = (0..).zip(status.workers.iter().take(wanted));
    let idle = slots.filter(|(_, it)| !it.is_done && it.attempt.is_none());
    let numbered = (status.attempts..).zip(idle);
    numbered.map(|(attempt, (slot, _))| Start { role: status.stage, slot, attempt }).collect()
}

/// Records that a process starts. Before it does.
pub fn begin(status: &mut InferenceStatus, start: Start) {
    status.attempts = status.attempts.max(start.attempt + 1);
    if let Some(worker) = status.workers.get_mut(start.slot as usize) {
        worker.attempt = Some(start.attempt);
    }
}

/// Records how a process ended; one that is not known to run changes nothing.
pub fn ended(status: &mut InferenceStatus, end: End, max_restarts: u32) {
    let Some(worker) = status.workers.get_mut(end.slot as usize) else { return };
    if worker.attempt != Some(end.attempt) {
        return;
    }
    worker.attempt = None;
    if status.phase != Phase::Running {
        return;
    }
    if end.has_committed {
        (worker.barren, worker.turned_away) = (0, 0);
    }
    match end.end {
        AttemptEnd::Preempted | AttemptEnd::NotStarted => worker.turned_away += 1,
        AttemptEnd::Completed => worker.turned_away = 0,
        _ => {}
    }
    let what = match status.stage {
        Role::Plan => "planning".to_owned(),
        Role::Work => format!("worker {}", end.slot),
        Role::Finish => "finishing".to_owned(),
    };
    let why = end.message.unwrap_or_else(|| format!("{:?}", end.end));
    let failed = match end.end {
        AttemptEnd::Completed => {
            worker.is_done = true;
            // Not of the others: a finish that fails leads back to work, which then has nothing to do.
            if status.stage == Role::Plan {
                worker.barren = 0;
            }
            advance(status);
            return;
        }
        AttemptEnd::Preempted | AttemptEnd::RunnerLost | AttemptEnd::NotStarted => return,
        AttemptEnd::InvalidHyperparameters => Some(format!("{what}: {why}")),
        AttemptEnd::UserError => {
            worker.restarts += 1;
            worker.barren += 1;
            let is_over = worker.restarts > max_restarts;
            is_over.then(|| format!("{what} failed {} times: {why}", worker.restarts))
        }
        AttemptEnd::Infrastructure => {
            worker.barren += 1;
            let is_over = worker.barren >= BARREN_MAX;
            is_over.then(|| {
                format!("{what} failed {BARREN_MAX} times in a row and committed nothing: {why}")
            })
        }
    };
    if let Some(message) = failed {
        status.phase = Phase::Failed;
        status.message = Some(message);
    } else if status.stage == Role::Finish {
        // It may have found a part missing that a commit names, and taken the commit back.
        enter(status, Role::Work);
    }
}

/// Returns the wait of a slot before its next attempt, after one that ended in this way.
pub fn back_off(end: AttemptEnd, worker: &WorkerStatus, limits: &BackOffLimits) -> Duration {
    match end {
        AttemptEnd::Completed | AttemptEnd::RunnerLost | AttemptEnd::InvalidHyperparameters => {
            Duration::ZERO
        }
        // No other limit applies to these ends, so also the first retry waits.
        AttemptEnd::Preempted | AttemptEnd::NotStarted => limits.after_refusals(worker.turned_away),
        AttemptEnd::UserError | AttemptEnd::Infrastructure => limits.after_failures(worker.barren),
    }
}

/// Whether an attempt is the live one of a slot.
pub fn is_live(status: &InferenceStatus, attempt: u32) -> bool {
    status.workers.iter().any(|worker| worker.attempt == Some(attempt))
}

/// Records what a process has reported; says whether it is one that is known to run.
///
/// A planner reports the rows of the input as `total`, a worker those of its slot, of which `done` are committed, and
/// who finishes those of the input and how many of them have an output.
pub fn progressed(status: &mut InferenceStatus, attempt: u32, done: u64, total: u64) -> bool {
    let live = status.workers.iter_mut().find(|it| it.attempt == Some(attempt));
    let Some(worker) = live.filter(|_| status.phase == Phase::Running) else { return false };
    match status.stage {
        Role::Plan => (status.rows_total, status.reported) = (total, true),
        Role::Work => {
            if done > worker.rows {
                (worker.barren, worker.turned_away) = (0, 0);
            }
            worker.rows = done;
            status.rows = status.workers.iter().map(|it| it.rows).sum();
        }
        Role::Finish => {
            (status.rows, status.rows_total, status.reported) = (total, total, true);
            status.rejected = total.saturating_sub(done);
        }
    }
    status.progress_percent = percent(status);
    true
}

/// The part of a job that is done.
fn percent(status: &InferenceStatus) -> u32 {
    match status.rows_total {
        _ if status.phase == Phase::Completed => 100,
        0 => 0,
        total => u32::try_from(status.rows.saturating_mul(100) / total).unwrap_or(100).min(100),
    }
}

/// Goes to the next stage once all slots have ended this one.
fn advance(status: &mut InferenceStatus) {
    if status.phase != Phase::Running {
        return;
    }
    match status.stage {
        Role::Plan => enter(status, Role::Work),
        Role::Work if status.workers.iter().all(|it| it.is_done) => enter(status, Role::Finish),
        Role::Work => {}
        Role::Finish => status.phase = Phase::Completed,
    }
}

fn enter(status: &mut InferenceStatus, stage: Role) {
    (status.stage, status.reported) = (stage, false);
    for worker in &mut status.workers {
        worker.is_done = false;
        worker.attempt = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs a job of two slots, each process of which ends as `script` says in turn (then as it should), and gives
    /// the processes started and the status.
    fn check(script: &[AttemptEnd], max_restarts: u32) -> (Vec<(Role, u32)>, InferenceStatus) {
        let mut status = InferenceStatus::default();
        resume(&mut status, 2);
        let (mut started, mut script) = (vec![], script.iter());
        while let Some(start) = next(&status).first().copied() {
            begin(&mut status, start);
            started.push((start.role, start.slot));
            let end = script.next().copied().unwrap_or(AttemptEnd::Completed);
            let Start { slot, attempt, .. } = start;
            let end = End { slot, attempt, end, message: Some("why".into()), has_committed: false };
            ended(&mut status, end.clone(), max_restarts);
            let before = status.clone();
            ended(&mut status, end, max_restarts);
            assert_eq!(status, before, "an end that is told twice changes nothing");
        }
        assert_eq!(status.attempts as usize, started.len());
        (started, status)
    }

    #[test]
    fn a_job_is_planned_worked_and_finished() {
        let (started, status) = check(&[], 0);
        let expected = [(Role::Plan, 0), (Role::Work, 0), (Role::Work, 1), (Role::Finish, 0)];
        assert_eq!(started, expected);
        assert_eq!(status.phase, Phase::Completed);
    }

    #[test]
    fn failures_are_tried_again_as_often_as_allowed() {
        use AttemptEnd::{Completed, Infrastructure, InvalidHyperparameters, UserError};
        let (_, status) = check(&[Completed, UserError, UserError], 2);
        assert_eq!((status.phase, status.workers[0].restarts), (Phase::Completed, 2));
        let (started, status) = check(&[Completed, UserError, UserError, UserError], 2);
        assert_eq!((started.len(), status.phase), (4, Phase::Failed));
        assert_eq!(status.message.as_deref(), Some("worker 0 failed 3 times: why"));
        let (started, status) = check(&[InvalidHyperparameters], 5);
        assert_eq!((started.len(), status.message.as_deref()), (1, Some("planning: why")));
        let (started, status) = check(&[Infrastructure; 20], 0);
        assert_eq!((started.len(), status.phase), (10, Phase::Failed));
        let (_, status) = check(&[Infrastructure; 9], 0);
        assert_eq!((status.phase, status.workers[0].restarts), (Phase::Completed, 0));
    }

    #[test]
    fn a_finish_that_fails_looks_for_work_first() {
        let ends = [
            AttemptEnd::Completed,
            AttemptEnd::Completed,
            AttemptEnd::Completed,
            AttemptEnd::Infrastructure,
        ];
        let (started, status) = check(&ends, 0);
        assert_eq!(started[3..5], [(Role::Finish, 0), (Role::Work, 0)]);
        assert_eq!((started.len(), status.phase), (7, Phase::Completed));
    }

    #[test]
    fn reports_of_processes_that_run_add_up() {
        let mut status = InferenceStatus::default();
        resume(&mut status, 2);
        let mut run = |role: Role, reports: &[(u32, u64, u64)], expected: (u64, u64, u64)| {
            let starts = next(&status);
            starts.iter().for_each(|it| begin(&mut status, *it));
            assert_eq!(starts[0].role, role);
            for (slot, done, total) in reports {
                assert!(progressed(&mut status, starts[*slot as usize].attempt, *done, *total));
            }
            assert!(!progressed(&mut status, 99, 1, 1), "nobody has this number");
            assert_eq!((status.rows, status.rows_total, status.rejected), expected, "{role:?}");
            for Start { slot, attempt, .. } in starts {
                let (end, message) = (AttemptEnd::Completed, None);
                ended(&mut status, End { slot, attempt, end, message, has_committed: false }, 0);
            }
        };
        run(Role::Plan, &[(0, 0, 10)], (0, 10, 0));
        run(Role::Work, &[(0, 2, 6), (1, 4, 4), (0, 6, 6)], (10, 10, 0));
        run(Role::Finish, &[(0, 7, 10)], (10, 10, 3));
        assert_eq!(status.phase, Phase::Completed);
    }

    #[test]
    fn a_new_shard_begins_the_count_of_failures_anew() {
        let mut status = InferenceStatus::default();
        resume(&mut status, 1);
        status.stage = Role::Work;
        let start = next(&status)[0];
        begin(&mut status, start);
        status.workers[0].barren = 9;
        progressed(&mut status, 0, 0, 10);
        assert_eq!(status.workers[0].barren, 9);
        progressed(&mut status, 0, 1, 10);
        assert_eq!((status.workers[0].barren, status.workers[0].rows), (0, 1));
    }

    #[test]
    fn a_job_goes_on_with_numbers_that_nobody_had() {
        let mut status = InferenceStatus::default();
        resume(&mut status, 2);
        let first = next(&status)[0];
        begin(&mut status, first);
        assert_eq!(next(&status), []);
        resume(&mut status, 3);
        let start = Start { role: Role::Plan, slot: 0, attempt: 1 };
        assert_eq!((next(&status), status.workers.len()), (vec![start], 3));
        status.phase = Phase::Failed;
        status.workers[0].restarts = 9;
        resume(&mut status, 3);
        assert_eq!((status.phase, status.workers[0].restarts), (Phase::Running, 0));
        status.phase = Phase::Completed;
        resume(&mut status, 3);
        assert_eq!(next(&status), []);
    }
}
