//! Table tests of job plans: events, and the pods that are created and deleted after each.

mod simulation;

use std::fmt::Write as _;

use stoker_api::condition;
use stoker_api::inference::Role;

use super::*;
use crate::gang::PodPhase;
use simulation::{Job, TIMEOUTS};

/// Checks which pods of a job of two slots are created and deleted during `script`, and its phase.
#[track_caller]
fn check(script: &str, expected: &str) {
    let job = Job::run(script, 2);
    let actions = job.actions.trim_start();
    assert_eq!(format!("{actions} {:?}", job.status.phase), expected, "{script}");
}

const PLANNING: &str = "0R 0C";
const AFTER_PLANNING: &str = "+Plan0#0 +Work0#1 +Work1#2";

#[track_caller]
fn check_workers(script: &str, expected: &str) {
    check(
        &format!("{PLANNING} {script}"),
        &format!("{AFTER_PLANNING} {expected}").replace("  ", " "),
    );
}

#[test]
fn jobs_complete_and_keep_pods_for_logs() {
    check("", "+Plan0#0 Running");
    check(PLANNING, &format!("{AFTER_PLANNING} Running"));
    check_workers("1R 2R 1C", "Running");
    check_workers("1C 2C", "+Finish0#3 Running");
    check_workers("1C 2C 3C", "+Finish0#3 Completed");
    let deleted = "-uid-0/30 -uid-1/30 -uid-2/30 -uid-3/30";
    check_workers("1C 2C 3C t600", &format!("+Finish0#3 {deleted} Completed"));
    check_workers("1C 2C 3C 3X 2X", "+Finish0#3 Completed");
}

#[test]
fn pods_about_to_finish_are_not_deleted() {
    check_workers("2R 1P t29", "Running");
    check_workers("2R 1P t30", "-uid-1/30 Running");
    check_workers("2R 1P t29 1C t570", "Running");
    let job = Job::run(&format!("{PLANNING} 2R 1P t29"), 2);
    assert_eq!(job.plan().wake_seconds, Some(1));
}

/// All slots search for missing shards, but only if the finish found them or failed twice.
#[test]
fn a_failed_finish_is_first_retried_alone() {
    check_workers("1C 2C 3E80", "+Finish0#3 +Finish0#4 Running");
    check_workers("1C 2C 3E80 4C", "+Finish0#3 +Finish0#4 Completed");
    check_workers("1C 2C 3X", "+Finish0#3 +Finish0#4 Running");
    let script = "1C 2C 3E80 4E80";
    check_workers(script, "+Finish0#3 +Finish0#4 +Work1#5 Running");
    check_workers(&format!("{script} t10"), "+Finish0#3 +Finish0#4 +Work1#5 +Work0#6 Running");
    let repeated = "+Finish0#3 +Work0#4 +Work1#5";
    check_workers("1C 2C 3I", &format!("{repeated} Running"));
    let script = "1C 2C 3I 4C 5C 6I";
    check_workers(script, &format!("{repeated} +Finish0#6 +Work1#7 Running"));
    let after = format!("{repeated} +Finish0#6 +Work1#7 +Work0#8 Running");
    check_workers(&format!("{script} t10"), &after);
}

#[test]
fn a_failed_slot_is_retried_alone() {
    check_workers("1R 2R 1E1", "+Work0#3 Running");
    check_workers("1E1 3E1", "+Work0#3 -uid-2/30 Failed");
    check_workers("1E1 3E137", "+Work0#3 -uid-2/30 Failed");
    check_workers("2E78", "-uid-1/30 Failed");
    check_workers("1E80", "+Work0#3 Running");
    // The second consecutive failure waits 10 s, the third 20 s. A new shard resets the count.
    check_workers("1E80 3E80 t9", "+Work0#3 Running");
    check_workers("1E80 3E80 t10", "+Work0#3 +Work0#4 Running");
    check_workers("1E80 3E80 t10 4E80 t19", "+Work0#3 +Work0#4 Running");
    check_workers("1E80 3E80 t10 4E80 t20", "+Work0#3 +Work0#4 +Work0#5 Running");
    check_workers("1E80 3=2/9 3E80", "+Work0#3 +Work0#4 Running");
    // Preempted without a stop request of the operator.
    check_workers("1E79 t9", "Running");
    check_workers("1E79 t10", "+Work0#3 Running");
}

#[test]
fn ten_shardless_infrastructure_failures_fail_the_job() {
    let mut script = PLANNING.to_owned();
    for attempt in 1..=10 {
        let attempt = if attempt == 1 { 1 } else { attempt + 1 };
        write!(script, " {attempt}E80 t300").unwrap();
    }
    let job = Job::run(&script, 2);
    assert_eq!((job.status.phase, job.status.restarts), (Phase::Failed, 0));
    let message = job.status.message.as_deref().unwrap_or_default();
    assert!(message.contains("10 times in a row without a new shard"), "{message}");
}

#[test]
fn deleted_and_lost_pods_are_replaced() {
    check_workers("1R 1X", "+Work0#3 Running");
    check_workers("1R 1N t59", "Running");
    // The pod is deleted first. After 30 s, it counts as lost and is removed.
    check_workers("1R 1N t60 t30", "-uid-1/600 Running");
    check_workers("1R 1N t60 t31", "-uid-1/600 +Work0#3 -uid-1/0 Running");
    let job = Job::run(&format!("{PLANNING} 1R 1X"), 2);
    assert_eq!((job.status.restarts, job.status.workers[0].consecutive_failures), (0, 1));
    assert_eq!(job.status.ends[0].reason, "PodDeleted");
}

/// Returns a job whose two workers were recorded, but whose pods were not created.
fn job_after_crash() -> Job {
    let mut job = Job::run(PLANNING, 2);
    job.pods.retain(|pod| pod.attempt == 0);
    job.status.workers.iter_mut().for_each(|worker| worker.has_pod = false);
    job.actions.clear();
    job
}

#[test]
fn recorded_pods_are_created_after_a_crash() {
    let mut job = job_after_crash();
    job.apply_plans();
    assert_eq!(job.actions, " +Work0#1 +Work1#2");
    assert_eq!(job.status.attempts, 3);
    // Another leader created the pod of the next attempt, and its record is not known yet.
    let late = ObservedPod { attempt: 3, phase: PodPhase::Running, ..ObservedPod::default() };
    job.pods.push(late);
    job.actions.clear();
    job.apply_plans();
    assert_eq!(job.actions, "");
}

#[test]
fn paused_jobs_resume_with_the_uncommitted_shards() {
    let preempted = "-uid-1/3600 -uid-2/3600";
    check_workers("1R 2R pause", &format!("{preempted} Running"));
    check_workers("1R 2R pause 1E79 2X", &format!("{preempted} Paused"));
    let again = "+Plan0#3 +Work0#4 +Work1#5";
    check_workers("1R 2R pause 1X 2X go 3C", &format!("{preempted} {again} Running"));
    // The failure of a pod that is being deleted is not counted.
    let job = Job::run(&format!("{PLANNING} 1R 2R pause 1E1 2X"), 2);
    assert_eq!((job.status.phase, job.status.restarts), (Phase::Paused, 0));
    assert!(
        job.status.workers.iter().all(|worker| worker.consecutive_failures == 0),
        "{:?}",
        job.status
    );
    // A job that is resumed in time loses only the processes that exit.
    check_workers("1R 2R pause go 1E79 t10", &format!("{preempted} +Work0#3 Running"));
    check_workers("1R 2R pause 1C 2C", &format!("{preempted} Paused"));
    // A job that is paused before it starts is paused at once.
    let mut paused = Job::new(2);
    paused.desired_state = DesiredState::Paused;
    paused.apply_plans();
    assert_eq!((paused.actions.as_str(), paused.status.phase), ("", Phase::Paused));
    assert_eq!(paused.status.started_at, None);
}

#[test]
fn recorded_pods_of_paused_jobs_are_not_created() {
    let mut job = job_after_crash();
    job.desired_state = DesiredState::Paused;
    job.apply_plans();
    assert_eq!((job.actions.as_str(), job.status.phase), ("", Phase::Paused));
}

#[test]
fn cancelled_and_killed_jobs_never_resume() {
    let preempted = "-uid-1/3600 -uid-2/3600";
    check_workers("1R 2R cancel", &format!("{preempted} Running"));
    check_workers("1R 2R cancel 1E79 2X", &format!("{preempted} Cancelled"));
    check_workers("1R 2R cancel 1E79 2X go", &format!("{preempted} Cancelled"));
    check_workers("1R 2R kill", "-uid-1/1 -uid-2/1 Cancelled");
    // Killing shortens the grace period of an earlier deletion.
    check_workers("1R 2R cancel kill", &format!("{preempted} -uid-1/1 -uid-2/1 Cancelled"));
    check_workers("1C 2C cancel 3C", "+Finish0#3 -uid-3/3600 Completed");
    // The clocks may differ by 10 s, so a drain that ends in 11 s is not cut short.
    check_workers("1R 2R 1D11 2D12 kill", "-uid-2/1 Cancelled");
    for (event, message) in [("cancel", "cancelled"), ("kill", "killed")] {
        let job = Job::run(&format!("{PLANNING} 1R 2R {event} 1X 2X"), 2);
        assert_eq!(job.status.message.as_deref(), Some(message));
    }
}

#[test]
fn unscheduled_pods_of_a_job_are_limited() {
    let job = Job::run("0C", 5);
    assert_eq!(job.actions, " +Plan0#0 +Work0#1 +Work1#2");
    let job = Job::run("0C 2S", 5);
    assert_eq!(job.actions, " +Plan0#0 +Work0#1 +Work1#2 +Work2#3");
    let job = Job::run("0C 1S 2S", 5);
    assert_eq!(job.actions, " +Plan0#0 +Work0#1 +Work1#2 +Work2#3 +Work3#4");
}

#[test]
fn refusals_back_off_or_count_as_failures() {
    let refused = |end: AttemptEnd, reason: &str, times: u32| {
        let mut job = Job::run(PLANNING, 2);
        for _ in 0..times {
            let attempt = job.status.workers[0].attempt.unwrap();
            let start = ProcessStart { role: Role::Work, slot: 0, attempt };
            refuse(&mut job.status, start, end, reason, "why", 1, Timestamp(job.now));
            job.pods.retain(|pod| pod.attempt != attempt);
            job.now += 300;
            job.apply_plans();
        }
        job.status
    };
    let status = refused(AttemptEnd::NotStarted, "Reason", 20);
    assert_eq!((status.phase, status.restarts, status.ends.len()), (Phase::Running, 0, 16));
    let status = refused(AttemptEnd::UserError, "PodInvalid", 20);
    assert_eq!((status.phase, status.restarts), (Phase::Running, 0), "a pod was accepted before");
    let status = refused(AttemptEnd::UserError, "Reason", 2);
    assert_eq!((status.phase, status.restarts), (Phase::Failed, 2));
    let failed = condition::find(&status.conditions, "Failed").unwrap();
    assert!(failed.message.contains("why") && status.ended_at.is_some(), "{status:?}");
}

/// A quota that refuses one pod would refuse the next. So all slots wait, longer each time.
#[test]
fn a_refused_pod_blocks_the_other_slots() {
    let mut job = Job::run("0C 1S 2S", 5);
    let refuse_last = |job: &mut Job| {
        let (slot, attempt) = (0..)
            .zip(&job.status.workers)
            .filter_map(|(slot, worker)| Some((slot, worker.attempt?)))
            .max_by_key(|(_, attempt)| *attempt)
            .unwrap();
        let start = ProcessStart { role: Role::Work, slot, attempt };
        let end = AttemptEnd::NotStarted;
        refuse(&mut job.status, start, end, "Forbidden", "quota", 1, Timestamp(job.now));
        job.pods.retain(|pod| pod.attempt != attempt);
        job.actions.clear();
        job.apply_plans();
    };
    refuse_last(&mut job);
    assert_eq!((job.actions.as_str(), job.status.phase), ("", Phase::Running));
    job.apply_event("t9");
    job.apply_plans();
    assert_eq!(job.actions, "", "no retry before the back-off has passed");
    job.apply_event("t1");
    job.apply_plans();
    assert!(!job.actions.is_empty(), "the pod is created again");
    refuse_last(&mut job);
    job.apply_event("t10");
    job.apply_plans();
    assert_eq!(job.actions, "", "the second wait is longer");
}

/// The operator stops at the first refusal, before it creates the recorded pods of other slots.
#[test]
fn a_refused_pod_postpones_recorded_pods() {
    let mut job = job_after_crash();
    let start = ProcessStart { role: Role::Work, slot: 0, attempt: 1 };
    let now = Timestamp(job.now);
    refuse(&mut job.status, start, AttemptEnd::NotStarted, "Forbidden", "quota", 1, now);
    job.apply_plans();
    assert_eq!(job.actions, "");
    job.apply_event("t10");
    job.apply_plans();
    assert_eq!(job.actions, " +Work0#3 +Work1#4");
}

/// Covers a script that swallows an exit code, and a program without `Inference`.
#[test]
fn exit_code_0_without_report_is_a_failure() {
    let job = Job::run("0R 0Q", 2);
    assert_eq!((job.actions.as_str(), job.status.stage), (" +Plan0#0 +Plan0#1", Role::Plan));
    assert_eq!(job.status.workers[0].consecutive_failures, 1);
    assert!(job.status.ends[0].message.contains("without a report"), "{:?}", job.status.ends);
    let job = Job::run("0R 0C 1C 2C 3Q", 2);
    assert_eq!(job.status.stage, Role::Finish, "{}", job.actions);
    assert!(job.actions.ends_with(" +Finish0#3 +Finish0#4"), "{}", job.actions);
}

#[test]
fn conditions_follow_from_status_and_pods() {
    let check = |script: &str, type_: &str, expected: (bool, &str)| {
        let job = Job::run(script, 2);
        let condition = condition::find(&job.status.conditions, type_).unwrap();
        let holds = condition.status == condition::ConditionStatus::True;
        assert_eq!((holds, condition.reason.as_str()), expected, "{script}: {}", condition.message);
    };
    check("", "Valid", (true, "Accepted"));
    check("", "Scheduled", (false, "Unschedulable"));
    check("0S", "Scheduled", (true, "AllPodsScheduled"));
    check("pause 0X", "Scheduled", (false, "NoAttempt"));
    check("0C 1C 2C 3C", "Scheduled", (false, "Ended"));
    check("0S", "Running", (false, "Starting"));
    check("0R", "Running", (true, "Planning"));
    check("0C 1R", "Running", (true, "WorkersRun"));
    check("0C 1S 2S 1E80 3E80", "Scheduled", (false, "BackOff"));
    check("0C 1C 2C 3R", "Running", (true, "Finishing"));
    check("0C 1C 2C 3C", "Running", (false, "Ended"));
    check("0C 1C 2C 3C", "Completed", (true, "Completed"));
    check("0C 1E78", "Failed", (true, "Failed"));
    check("pause 0X", "Running", (false, "Paused"));
    check("kill", "Cancelled", (true, "Cancelled"));
    check("0W", "Scheduled", (true, "AllPodsScheduled"));
    check("0W", "Running", (false, "ImagePullBackOff"));
    check("0C 1R 2W", "Running", (false, "ImagePullBackOff"));
}

#[test]
fn condition_messages_explain_what_processes_wait_for() {
    let message = |script: &str, type_: &str| {
        let job = Job::run(script, 2);
        condition::find(&job.status.conditions, type_).unwrap().message.clone()
    };
    assert_eq!(message("0W", "Running"), "no such image");
    // Slot 0 waits. Slot 1 has failed after it, and runs again.
    let back_off = "retry at 1970-01-01T00:01:50Z: pod j-a3: exit code 80";
    assert_eq!(message("0C 1S 2S 1E80 3E80 2E1 4S", "Scheduled"), back_off);
}

#[test]
fn new_processes_are_not_yet_scheduled() {
    let mut job = Job::run("0R", 2);
    job.apply_event("0C");
    let plan = job.plan();
    assert_eq!(plan.create.len(), 2);
    let scheduled = condition::find(&plan.status.conditions, "Scheduled").unwrap();
    let actual = (scheduled.status, scheduled.reason.as_str());
    assert_eq!(actual, (condition::ConditionStatus::False, "Starting"));
    // The pods are recorded, but not created.
    assert_eq!(plan.status.running, 0);
}

#[test]
fn slow_creation_of_containers_is_reported() {
    let check = |script: &str, attempt: usize, now: i64, expected: (&str, bool, u64)| {
        let mut job = Job::run(script, 2);
        job.pods[attempt].creating_since = Some(Timestamp(100));
        job.now = now;
        let plan = job.plan();
        let running = condition::find(&plan.status.conditions, "Running").unwrap();
        let is_late = running.message.contains("for more than 2 minutes");
        let wake_seconds = plan.wake_seconds.unwrap_or_default();
        assert_eq!((running.reason.as_str(), is_late, wake_seconds), expected, "{script} {now}");
    };
    check("0S", 0, 219, ("Starting", false, 1));
    check("0S", 0, 220, ("Starting", true, 120));
    check("0C 1R 2S", 2, 220, ("WorkersRun", true, 120));
}

#[test]
fn status_reports_rows_and_progress() {
    let job = Job::run("0=0/10 0C 1R 2R 1=2/6", 2);
    let status = &job.status;
    assert_eq!((status.rows, status.rows_total, status.progress_percent), (2, 10, 20));
    assert_eq!((status.running, status.started_at), (2, Some(Timestamp(100))));
    let job = Job::run("0R t5 kill", 2);
    let status = &job.status;
    assert_eq!((status.running, status.started_at), (0, Some(Timestamp(100))));
    let job = Job::run("0=0/10 0C 1=6/6 1C 2=4/4 2C 3=9/10 t5 3C", 2);
    let status = &job.status;
    assert_eq!((status.rows, status.rejected, status.progress_percent), (10, 1, 100));
    assert_eq!((status.running, status.ended_at), (0, Some(Timestamp(105))));
    let after = plan(&JobView { now: Timestamp(900), ..view_of(&job) });
    assert_eq!(after.status, job.status, "the status of an ended job does not change");
}

fn view_of(job: &Job) -> JobView<'_> {
    JobView {
        status: &job.status,
        desired_state: DesiredState::Killed,
        generation: 2,
        slots: 2,
        max_restarts: 1,
        pods: &[],
        starting_max: 2,
        timeouts: TIMEOUTS,
        now: Timestamp(0),
    }
}
