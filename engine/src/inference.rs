//! State machine of an inference job: which processes start next, and what their exits mean.
//!
//! ```text
//!  plan (one process)  ->  work (one for each slot)  ->  finish (one)  ->  Completed
//! ```
//!
//! The output directory records which shards are committed; the status does not. A restarted
//! process finds the committed shards and processes the others. So losing a status loses only the
//! count of attempts.
//!
//! * [`config`]: configuration of a process.
//! * [`pods`]: pods of a job on a cluster.

mod conditions;
pub mod config;
pub mod pods;

use std::time::Duration;

use stoker_api::experiment::{DesiredState, Phase};
use stoker_api::inference::{INCOMPLETE_SHARDS, InferenceStatus, Role, WorkerEnd, WorkerStatus};
use stoker_api::time::Timestamp;
use stoker_api::trial::AttemptEnd;

use crate::trial::{BackOffLimits, times};

/// Consecutive failures of a slot, of any class, at which an infrastructure failure fails the job.
/// A committed shard resets the count.
pub const CONSECUTIVE_FAILURES_MAX: u32 = 10;
/// Latest ends that are kept, and latest failures.
const ENDS_MAX: usize = 16;
/// Maximum length of an end's message, in characters. A status must stay small.
const MESSAGE_CHARS_MAX: usize = 1000;

/// A process to start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProcessStart {
    /// Role of the process.
    pub role: Role,
    /// Slot of the process.
    pub slot: u32,
    /// Attempt number, unique among the job's processes.
    pub attempt: u32,
}

/// Exit of a process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProcessEnd {
    /// Slot of the process.
    pub slot: u32,
    /// Attempt number of the process.
    pub attempt: u32,
    /// Class of the exit.
    pub end: AttemptEnd,
    /// Why the process ended, in one word.
    pub reason: String,
    /// Human-readable reason.
    pub message: Option<String>,
    /// Whether a shard was committed while the process ran.
    pub has_committed: bool,
    /// Time when the runner or the operator saw the exit.
    pub at: Timestamp,
}

/// Starts or resumes the job from its planning stage: the planner reads the input again, and every
/// slot searches for uncommitted shards. No process of an earlier run may still run. A failed job
/// starts over, with its committed shards.
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
    enter_stage(status, Role::Plan);
}

/// Applies the state that the user requested. A paused or cancelled job waits for its live
/// attempts; those of a killed job count as ended.
pub fn apply_desired_state(status: &mut InferenceStatus, desired: DesiredState, slots: u32) {
    if status.phase.is_terminal() {
        return;
    }
    if desired == DesiredState::Killed {
        status.workers.iter_mut().for_each(|worker| worker.attempt = None);
    }
    let is_alive = status.workers.iter().any(|worker| worker.attempt.is_some());
    match desired {
        DesiredState::Active if matches!(status.phase, Phase::Pending | Phase::Paused) => {
            resume(status, slots);
        }
        DesiredState::Paused if !is_alive => status.phase = Phase::Paused,
        DesiredState::Cancelled | DesiredState::Killed if !is_alive => {
            status.phase = Phase::Cancelled;
            let word = if desired == DesiredState::Killed { "killed" } else { "cancelled" };
            status.message = Some(word.to_owned());
        }
        _ => {}
    }
}

/// Returns the processes that may start now. None of them is running.
pub fn next(status: &InferenceStatus) -> Vec<ProcessStart> {
    if status.phase != Phase::Running {
        return vec![];
    }
    let num_slots = match status.stage {
        Role::Work => status.workers.len(),
        Role::Plan | Role::Finish => 1,
    };
    let slots = (0..).zip(status.workers.iter().take(num_slots));
    let idle = slots.filter(|(_, worker)| !worker.is_done && worker.attempt.is_none());
    let numbered = (status.attempts..).zip(idle);
    numbered
        .map(|(attempt, (slot, _))| ProcessStart { role: status.stage, slot, attempt })
        .collect()
}

/// Records that a process starts. The status must be written before the process starts.
pub fn begin(status: &mut InferenceStatus, start: ProcessStart) {
    status.attempts = status.attempts.max(start.attempt + 1);
    if let Some(worker) = status.workers.get_mut(start.slot as usize) {
        worker.attempt = Some(start.attempt);
    }
}

/// Updates the fields that follow from the workers. A process of a live attempt counts as running
/// if `is_started` accepts its slot.
pub fn update_totals(status: &mut InferenceStatus, is_started: impl Fn(&WorkerStatus) -> bool) {
    if status.phase.is_terminal() {
        status.workers.iter_mut().for_each(|worker| worker.attempt = None);
    }
    status.restarts = status.workers.iter().map(|worker| worker.restarts).sum();
    let running = status.workers.iter().filter(|worker| worker.attempt.is_some());
    status.running = running.filter(|worker| is_started(worker)).count() as u32;
    status.progress_percent = percent(status);
}

/// Adds an end other than `Completed` to the kept ends.
fn keep_end(status: &mut InferenceStatus, end: &ProcessEnd) {
    if end.end == AttemptEnd::Completed {
        return;
    }
    let message = end.message.as_deref().unwrap_or_default();
    let kept = WorkerEnd {
        attempt: end.attempt,
        role: status.stage,
        slot: end.slot,
        end: end.end,
        reason: end.reason.clone(),
        message: message.chars().take(MESSAGE_CHARS_MAX).collect(),
        at: end.at,
    };
    status.ends.push(kept);
    drop_old_ends(&mut status.ends);
}

/// Keeps the latest ends, because the last end of a slot decides whether other pods may start, and
/// the latest failures, which many pauses would otherwise displace.
fn drop_old_ends(ends: &mut Vec<WorkerEnd>) {
    let mut num_later = ends.len();
    let mut num_later_failures = ends.iter().filter(|end| is_failure(end.end)).count();
    ends.retain(|end| {
        let is_failure = is_failure(end.end);
        num_later -= 1;
        num_later_failures -= usize::from(is_failure);
        num_later < ENDS_MAX || (is_failure && num_later_failures < ENDS_MAX)
    });
}

fn is_failure(end: AttemptEnd) -> bool {
    match end {
        AttemptEnd::InvalidHyperparameters | AttemptEnd::UserError | AttemptEnd::Infrastructure => {
            true
        }
        AttemptEnd::Completed
        | AttemptEnd::Preempted
        | AttemptEnd::RunnerLost
        | AttemptEnd::NotStarted => false,
    }
}

/// Records how a process ended. Keeps reason and message of an end other than `Completed`. Does
/// nothing if the process is not recorded as running.
pub fn record_process_end(status: &mut InferenceStatus, end: ProcessEnd, max_restarts: u32) {
    let is_live = |worker: &WorkerStatus| worker.attempt == Some(end.attempt);
    if !status.workers.get(end.slot as usize).is_some_and(is_live) {
        return;
    }
    keep_end(status, &end);
    let Some(worker) = status.workers.get_mut(end.slot as usize) else { return };
    worker.attempt = None;
    if status.phase != Phase::Running {
        return;
    }
    if end.has_committed {
        (worker.consecutive_failures, worker.backoff_count) = (0, 0);
    }
    match end.end {
        AttemptEnd::Preempted | AttemptEnd::NotStarted => worker.backoff_count += 1,
        AttemptEnd::Completed => worker.backoff_count = 0,
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
            // Other roles keep the count: a failed finish may repeat the work stage, whose
            // processes then complete without having done anything.
            if status.stage == Role::Plan {
                worker.consecutive_failures = 0;
            }
            advance(status);
            return;
        }
        AttemptEnd::Preempted | AttemptEnd::RunnerLost | AttemptEnd::NotStarted => return,
        AttemptEnd::InvalidHyperparameters => Some(format!("{what}: {why}")),
        AttemptEnd::UserError => {
            worker.restarts += 1;
            worker.consecutive_failures += 1;
            let is_over = worker.restarts > max_restarts;
            is_over.then(|| format!("{what} failed {}: {why}", times(worker.restarts)))
        }
        AttemptEnd::Infrastructure => {
            worker.consecutive_failures += 1;
            let is_over = worker.consecutive_failures >= CONSECUTIVE_FAILURES_MAX;
            is_over.then(|| {
                format!(
                    "{what} failed {CONSECUTIVE_FAILURES_MAX} times in a row without a new shard: \
                     {why}"
                )
            })
        }
    };
    let num_failures = worker.consecutive_failures;
    if let Some(message) = failed {
        status.phase = Phase::Failed;
        status.message = Some(message);
    } else if status.stage == Role::Finish {
        enter_stage(status, stage_after_failed_finish(num_failures, &why));
    }
}

/// Returns the stage that follows a failure of the finishing process, its `num_failures`th in a
/// row.
fn stage_after_failed_finish(num_failures: u32, message: &str) -> Role {
    // The finish deletes the commits of shards whose parts are missing, and reports these shards.
    // Other failures, such as a lost node, do not need the workers and their GPUs. But the report
    // may be lost, so every second failure repeats the work stage.
    match message.contains(INCOMPLETE_SHARDS) || num_failures.is_multiple_of(2) {
        true => Role::Work,
        false => Role::Finish,
    }
}

/// Returns the wait of a slot before its next attempt, from how the last attempt ended.
pub fn back_off(end: AttemptEnd, worker: &WorkerStatus, limits: &BackOffLimits) -> Duration {
    match end {
        AttemptEnd::Completed | AttemptEnd::RunnerLost | AttemptEnd::InvalidHyperparameters => {
            Duration::ZERO
        }
        // No other limit applies to these ends, so even the first retry waits.
        AttemptEnd::Preempted | AttemptEnd::NotStarted => {
            limits.after_refusals(worker.backoff_count)
        }
        AttemptEnd::UserError | AttemptEnd::Infrastructure => {
            limits.after_failures(worker.consecutive_failures)
        }
    }
}

/// Returns whether an attempt is the live attempt of a slot.
pub fn is_live(status: &InferenceStatus, attempt: u32) -> bool {
    status.workers.iter().any(|worker| worker.attempt == Some(attempt))
}

/// Records the progress that a process reported. Returns whether the process is recorded as
/// running.
///
/// | role | `done` | `total` |
/// |---|---|---|
/// | plan | ignored | rows of the input |
/// | work | committed rows of the slot | rows of the slot |
/// | finish | rows of the input that have an output | rows of the input |
pub fn record_progress(status: &mut InferenceStatus, attempt: u32, done: u64, total: u64) -> bool {
    let live = status.workers.iter_mut().find(|worker| worker.attempt == Some(attempt));
    let Some(worker) = live.filter(|_| status.phase == Phase::Running) else { return false };
    match status.stage {
        Role::Plan => (status.rows_total, status.reported) = (total, true),
        Role::Work => {
            if done > worker.rows {
                (worker.consecutive_failures, worker.backoff_count) = (0, 0);
            }
            worker.rows = done;
            status.rows = status.workers.iter().map(|worker| worker.rows).sum();
        }
        Role::Finish => {
            (status.rows, status.rows_total, status.reported) = (total, total, true);
            status.rejected = total.saturating_sub(done);
        }
    }
    status.progress_percent = percent(status);
    true
}

/// Returns the progress of a job in percent, rounded down.
pub fn percent(status: &InferenceStatus) -> u32 {
    match status.rows_total {
        _ if status.phase == Phase::Completed => 100,
        0 => 0,
        total => u32::try_from(status.rows.saturating_mul(100) / total).unwrap_or(100).min(100),
    }
}

/// Enters the next stage once all slots have completed the current one.
fn advance(status: &mut InferenceStatus) {
    if status.phase != Phase::Running {
        return;
    }
    match status.stage {
        Role::Plan => enter_stage(status, Role::Work),
        Role::Work if status.workers.iter().all(|worker| worker.is_done) => {
            enter_stage(status, Role::Finish);
        }
        Role::Work => {}
        Role::Finish => status.phase = Phase::Completed,
    }
}

fn enter_stage(status: &mut InferenceStatus, stage: Role) {
    (status.stage, status.reported) = (stage, false);
    for worker in &mut status.workers {
        worker.is_done = false;
        worker.attempt = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn process_end(start: ProcessStart, end: AttemptEnd) -> ProcessEnd {
        ProcessEnd {
            slot: start.slot,
            attempt: start.attempt,
            end,
            reason: "Why".into(),
            message: Some("why".into()),
            has_committed: false,
            at: Timestamp(0),
        }
    }

    /// Runs a job of two slots. The n-th process ends as the n-th item of `script`, and later
    /// processes complete. Returns the started processes and the status.
    fn check(script: &[AttemptEnd], max_restarts: u32) -> (Vec<(Role, u32)>, InferenceStatus) {
        let mut status = InferenceStatus::default();
        resume(&mut status, 2);
        let (mut started, mut script) = (vec![], script.iter());
        while let Some(start) = next(&status).first().copied() {
            begin(&mut status, start);
            started.push((start.role, start.slot));
            let end = script.next().copied().unwrap_or(AttemptEnd::Completed);
            let end = process_end(start, end);
            record_process_end(&mut status, end.clone(), max_restarts);
            let before = status.clone();
            record_process_end(&mut status, end, max_restarts);
            assert_eq!(status, before, "recording an end twice changes nothing");
        }
        assert_eq!(status.attempts as usize, started.len());
        (started, status)
    }

    #[test]
    fn a_job_runs_plan_work_and_finish() {
        let (started, status) = check(&[], 0);
        let expected = [(Role::Plan, 0), (Role::Work, 0), (Role::Work, 1), (Role::Finish, 0)];
        assert_eq!(started, expected);
        assert_eq!(status.phase, Phase::Completed);
    }

    #[test]
    fn failures_are_retried_up_to_the_limits() {
        use AttemptEnd::{Completed, Infrastructure, InvalidHyperparameters, UserError};
        let (_, status) = check(&[Completed, UserError, UserError], 2);
        assert_eq!((status.phase, status.workers[0].restarts), (Phase::Completed, 2));
        let (started, status) = check(&[Completed, UserError, UserError, UserError], 2);
        assert_eq!((started.len(), status.phase), (4, Phase::Failed));
        assert_eq!(status.message.as_deref(), Some("worker 0 failed 3 times: why"));
        let (_, status) = check(&[Completed, UserError], 0);
        assert_eq!(status.message.as_deref(), Some("worker 0 failed once: why"));
        let (started, status) = check(&[InvalidHyperparameters], 5);
        assert_eq!((started.len(), status.message.as_deref()), (1, Some("planning: why")));
        let (started, status) = check(&[Infrastructure; 20], 0);
        assert_eq!((started.len(), status.phase), (10, Phase::Failed));
        let (_, status) = check(&[Infrastructure; 9], 0);
        assert_eq!((status.phase, status.workers[0].restarts), (Phase::Completed, 0));
    }

    #[test]
    fn a_failed_finish_is_first_retried_alone() {
        use AttemptEnd::{Completed, Infrastructure, RunnerLost, UserError};
        let roles = |failures: &[AttemptEnd]| -> Vec<Role> {
            let (started, status) = check(&[&[Completed; 3], failures].concat(), 5);
            assert_eq!(status.phase, Phase::Completed);
            started[3..].iter().map(|(role, _)| *role).collect()
        };
        let (finish, work) = (Role::Finish, Role::Work);
        assert_eq!(roles(&[Infrastructure]), [finish, finish]);
        assert_eq!(roles(&[UserError]), [finish, finish]);
        assert_eq!(roles(&[RunnerLost, RunnerLost]), [finish, finish, finish]);
        assert_eq!(roles(&[Infrastructure; 2]), [finish, finish, work, work, finish]);
        let later = [Infrastructure, UserError, Completed, Completed, Infrastructure];
        assert_eq!(roles(&later), [finish, finish, work, work, finish, finish]);
        let (_, status) = check(&[&[Completed; 3][..], &[UserError; 2]].concat(), 1);
        assert_eq!(status.message.as_deref(), Some("finishing failed 2 times: why"));
    }

    #[test]
    fn incomplete_shards_are_processed_again_at_once() {
        let message = "shards without a complete part, including 3; they will be processed again";
        assert_eq!(stage_after_failed_finish(1, message), Role::Work);
        assert_eq!(stage_after_failed_finish(1, &format!("error: {message}")), Role::Work);
        assert_eq!(stage_after_failed_finish(1, "the node was lost"), Role::Finish);
    }

    #[test]
    fn success_ends_waits_and_planning_failures() {
        use AttemptEnd::{Completed, Infrastructure, NotStarted, UserError};
        let counts = |script: &[AttemptEnd]| {
            let (_, status) = check(script, 2);
            (status.workers[0].consecutive_failures, status.workers[0].backoff_count)
        };
        assert_eq!(counts(&[NotStarted, NotStarted]), (0, 0));
        assert_eq!(counts(&[Infrastructure]), (0, 0));
        // A process of another role may complete without having done anything.
        assert_eq!(counts(&[Completed, Infrastructure]), (1, 0));
        assert_eq!(counts(&[Completed, UserError]), (1, 0));
    }

    #[test]
    fn latest_failures_are_kept() {
        use AttemptEnd::{Completed, UserError};
        let (_, status) = check(&[Completed, UserError, UserError], 2);
        let ends: Vec<_> =
            status.ends.iter().map(|end| (end.attempt, end.role, end.reason.as_str())).collect();
        assert_eq!(ends, [(1, Role::Work, "Why"), (2, Role::Work, "Why")]);
    }

    #[test]
    fn pauses_do_not_displace_failures() {
        use AttemptEnd::{Infrastructure, NotStarted, Preempted, RunnerLost, UserError};
        let kept = |script: &[(AttemptEnd, usize)]| -> Vec<u32> {
            let script: Vec<AttemptEnd> =
                script.iter().flat_map(|(end, times)| vec![*end; *times]).collect();
            let (_, status) = check(&script, 40);
            status.ends.iter().map(|end| end.attempt).collect()
        };
        let range = |attempts: std::ops::Range<u32>| attempts.collect::<Vec<_>>();
        for other in [Preempted, RunnerLost, NotStarted] {
            assert_eq!(kept(&[(other, 20)]), range(4..20), "{other:?}");
            assert_eq!(kept(&[(UserError, 20), (other, 2)]), range(4..22), "{other:?}");
            let failures_first = [(UserError, 20), (other, 20)];
            assert_eq!(kept(&failures_first), [range(4..20), range(24..40)].concat(), "{other:?}");
            let failure_between = [(other, 3), (Infrastructure, 1), (other, 20)];
            assert_eq!(kept(&failure_between), [vec![3], range(8..24)].concat(), "{other:?}");
        }
        assert_eq!(kept(&[(Preempted, 20), (UserError, 20)]), range(24..40));
    }

    #[test]
    fn totals_follow_from_the_workers() {
        let mut status = InferenceStatus::default();
        resume(&mut status, 2);
        status.stage = Role::Work;
        next(&status).into_iter().for_each(|start| begin(&mut status, start));
        status.workers[1].restarts = 3;
        let mut check = |phase: Phase, is_started: bool, running: u32| {
            status.phase = phase;
            update_totals(&mut status, |_| is_started);
            assert_eq!((status.running, status.restarts), (running, 3), "{phase:?}");
        };
        check(Phase::Running, true, 2);
        check(Phase::Running, false, 0);
        check(Phase::Failed, true, 0);
    }

    #[test]
    fn only_the_running_attempt_is_live() {
        let mut status = InferenceStatus::default();
        resume(&mut status, 1);
        let start = next(&status)[0];
        assert!(!is_live(&status, start.attempt));
        begin(&mut status, start);
        assert!(is_live(&status, start.attempt));
        assert!(!is_live(&status, start.attempt + 1));
    }

    #[test]
    fn completed_jobs_have_full_progress() {
        let status = |phase, rows| InferenceStatus {
            phase,
            rows,
            rows_total: 8,
            ..InferenceStatus::default()
        };
        assert_eq!(percent(&status(Phase::Running, 3)), 37);
        assert_eq!(percent(&status(Phase::Completed, 3)), 100);
        assert_eq!(percent(&InferenceStatus::default()), 0);
    }

    #[test]
    fn reports_of_running_processes_are_summed() {
        let mut status = InferenceStatus::default();
        resume(&mut status, 2);
        let mut run = |role: Role, reports: &[(u32, u64, u64)], expected: (u64, u64, u64)| {
            let starts = next(&status);
            starts.iter().for_each(|start| begin(&mut status, *start));
            assert_eq!(starts[0].role, role);
            for (slot, done, total) in reports {
                assert!(record_progress(
                    &mut status,
                    starts[*slot as usize].attempt,
                    *done,
                    *total
                ));
            }
            assert!(!record_progress(&mut status, 99, 1, 1), "no process has this number");
            assert_eq!((status.rows, status.rows_total, status.rejected), expected, "{role:?}");
            for start in starts {
                record_process_end(&mut status, process_end(start, AttemptEnd::Completed), 0);
            }
        };
        run(Role::Plan, &[(0, 0, 10)], (0, 10, 0));
        run(Role::Work, &[(0, 2, 6), (1, 4, 4), (0, 6, 6)], (10, 10, 0));
        run(Role::Finish, &[(0, 7, 10)], (10, 10, 3));
        assert_eq!(status.phase, Phase::Completed);
    }

    #[test]
    fn a_new_shard_resets_the_failure_count() {
        let mut status = InferenceStatus::default();
        resume(&mut status, 1);
        status.stage = Role::Work;
        let start = next(&status)[0];
        begin(&mut status, start);
        status.workers[0].consecutive_failures = 9;
        record_progress(&mut status, 0, 0, 10);
        assert_eq!(status.workers[0].consecutive_failures, 9);
        record_progress(&mut status, 0, 1, 10);
        assert_eq!((status.workers[0].consecutive_failures, status.workers[0].rows), (0, 1));
    }

    #[test]
    fn resumed_jobs_use_new_attempt_numbers() {
        let mut status = InferenceStatus::default();
        resume(&mut status, 2);
        let first = next(&status)[0];
        begin(&mut status, first);
        assert_eq!(next(&status), []);
        resume(&mut status, 3);
        let start = ProcessStart { role: Role::Plan, slot: 0, attempt: 1 };
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
