//! Gangs of which some pods have ended.

use stoker_api::contract::Termination;
use stoker_api::experiment::Phase;
use stoker_api::time::Timestamp;
use stoker_api::trial::{AttemptEnd, DesiredTrialState};

use super::text::record;
use super::{Case, check, plan_of, pods, view};
use crate::fixture::{checkpointed, report};
use crate::gang::plan;
use crate::trial::live_attempt;

#[test]
fn rank_0_may_store_after_clean_exits() {
    check("made", "0@0R 1@0E79", 120, "wake=3559");
    check("made", "0@0R 1@0C7", 120, "wake=3487");
    check("made", "0@0RD700 1@0E79", 120, "wake=3559");
    let late = "end=Preempted:Preempted delete=t-a0-r0:30 wake=600";
    check("made", "0@0R 1@0E79", 3679, late);
    // Other pods store nothing.
    check("made", "0@0E79 1@0R", 108, "wake=1");
    check("made", "0@0E79 1@0R", 109, &late.replace("r0", "r1"));
    // A gang that has not started has trained nothing.
    check("made", "0@0S 1@0E79", 109, late);
}

/// Rank 0 ends with code 80 if the others do not connect in time.
#[test]
fn gangs_with_an_unscheduled_pod_have_not_failed() {
    let end = |reason: &str| format!("end=NotStarted:{reason} delete=t-a0-r1:30 wake=600");
    check("gated", "0@0E80 1@0H", 109, "wake=1");
    check("gated", "0@0E80 1@0H", 110, &end("SchedulingGated"));
    check("made@0", "0@0E80 1@0U", 110, &end("Unschedulable"));
    // A scheduled pod holds its slots, and may never start.
    check(
        "made",
        "0@0E80 1@0S",
        110,
        "end=Infrastructure:InfrastructureError delete=t-a0-r1:30 wake=600",
    );
    let case = Case { record: record("gated"), pods: "0@0E1 1@0H", now: 31, is_admitted: false };
    assert!(case.render().starts_with("end=UserError:ProgramFailed"));
    let plan = plan_of(&record("gated"), "0@0E80 1@0H", 2, 110);
    let message = plan.record.status.attempts[0].message.clone().unwrap_or_default();
    assert!(message.contains("scheduling gates: queue.test/a; pod t-a0-r0: exit code 80"));
}

/// Checks the plan of a trial of two pods that is not admitted.
#[track_caller]
fn check_end(pods: &str, now: i64, expected: &str) {
    let case = Case { record: record("made"), pods, now, is_admitted: false };
    assert_eq!(case.render(), expected, "pods {pods}, now {now}");
}

#[test]
fn a_deleted_pod_ends_the_attempt() {
    let deleted = "end=Infrastructure:PodDeleted";
    check_end("", 9, deleted);
    check_end("1@0R", 9, &format!("{deleted} delete=t-a0-r1:30"));
    // Pod 0 has nothing to store.
    check_end("0@0S", 9, &format!("{deleted} delete=t-a0-r0:30"));
    check_end("0@0RG", 9, &format!("{deleted} delete=t-a0-r0:0"));
    check_end("0@0RND90", 91, &format!("{deleted} delete=t-a0-r0:0"));
    check_end("0@0E1", 9, &format!("{deleted} wake=600"));
}

/// A drained pod disappears soon after it exited with code 79.
#[test]
fn rank_0_may_store_after_a_pod_is_deleted() {
    check_end("0@0R", 9, "delete=t-a0-r0:600 wake=610");
    check_end("0@0RD39", 10, "wake=39");
    check_end("0@0RD39", 48, "wake=1");
    check_end("0@0RD39", 49, "end=Infrastructure:PodDeleted wake=1");
    check_end("0@0E79D100", 80, "end=Preempted:Preempted wake=600");
    check_end("0@0E81D100", 82, "end=Infrastructure:PodDeleted wake=600");
    check_end("0@0RN", 60, "delete=t-a0-r0:600 wake=31");
    check("made", "0@0E79D100", 80, "begin=1 create=[0, 1] wake=600");
}

#[test]
fn drains_leave_rank_0_time_to_store() {
    check("made", "0@0R 1@0E79D200", 120, "delete=t-a0-r0:600 wake=3559");
    check("made", "0@0RD720 1@0E79D200", 121, "wake=3558");
    check("made", "0@0RD720", 122, "wake=608");
    check("made", "0@0RN 1@0E79D200", 120, "delete=t-a0-r0:600 wake=1");
    let graces = |pods: &str| {
        let plan = plan_of(&record("made"), pods, 3, 120);
        assert_eq!(live_attempt(&plan.record), Some(0), "{pods}");
        plan.delete.iter().map(|pod| pod.grace_seconds).collect::<Vec<_>>()
    };
    // The exit of pod 1 may have been clean.
    assert_eq!(graces("0@0R 2@0R"), [600, 30]);
    assert_eq!(graces("0@0R 2@0E81"), [30]);
    assert_eq!(graces("0@0R 2@0E79"), [600]);
    assert_eq!(graces("0@0R 1@0E79D200 2@0R"), [600]);
}

#[test]
fn lost_nodes_are_noticed_after_clean_exits() {
    check("made", "0@0RN 1@0E79", 120, "delete=t-a0-r0:600 wake=1");
    let lost = "begin=1 create=[0, 1] delete=t-a0-r0:0 wake=600";
    check("made", "0@0RND150 1@0E79", 151, lost);
}

#[test]
fn failures_after_clean_exits_have_a_short_grace() {
    let check = |pods: &str, now, expected: Option<u64>| {
        let plan = plan_of(&record("made"), pods, 3, now);
        let is_live = live_attempt(&plan.record).is_some();
        let wake_seconds = plan.wake_seconds.filter(|_| is_live);
        assert_eq!(wake_seconds, expected, "{pods}, {now}");
    };
    check("0@0R 1@0C7 2@0R", 70, Some(3537));
    check("0@0R 1@0C7 2@0E80", 109, Some(1));
    check("0@0R 1@0C7 2@0E80", 110, None);
}

/// The operator was unavailable while pod 0 saved a checkpoint and exited.
#[test]
fn ended_pods_count_after_the_stop_deadline() {
    let check = |desired_state, pods_text: &str, expected: &str| {
        let mut record = record("made");
        record.spec.desired_state = desired_state;
        record.spec.desired_since = Some(Timestamp(100));
        let unsent = vec![report(0, 4, checkpointed("000000000004-0", None))];
        let termination = Termination { code: 79, message: None, unsent };
        let mut pods = pods(pods_text);
        let exit = pods[0].exit.as_mut().unwrap();
        exit.message = serde_json::to_string(&termination).unwrap();
        let status = plan(&view(&record, &pods, 3700)).record.status;
        let attempt = &status.attempts[0];
        let reason = attempt.reason.as_deref().unwrap_or_default();
        assert_eq!(format!("{:?}:{reason}", attempt.end), expected, "{pods_text}");
        let names: Vec<&str> =
            status.checkpoints.iter().map(|checkpoint| checkpoint.name.as_str()).collect();
        assert_eq!(names, ["000000000004-0"], "{pods_text}");
    };
    for desired_state in [DesiredTrialState::Pause, DesiredTrialState::Stop] {
        check(desired_state, "0@0E79 1@0E79", "Some(Preempted):Preempted");
        check(desired_state, "0@0E79 1@0R", "Some(RunnerLost):PreemptionTimeout");
    }
    check(DesiredTrialState::Kill, "0@0E79 1@0R", "Some(RunnerLost):Killed");
}

#[test]
fn unrecoverable_error_closes_the_trial_at_once() {
    let plan = plan_of(&record("made"), "0@0E82 1@0E81", 2, 200);
    let status = &plan.record.status;
    let end = (status.attempts[0].end, status.attempts[0].reason.as_deref(), status.phase);
    let expected = (Some(AttemptEnd::UserError), Some("Unrecoverable"), Phase::Failed);
    assert_eq!(end, expected);
    let message = "failed once; last failure: pod t-a0-r0: exit code 82";
    assert_eq!(status.message.as_deref(), Some(message));
    let restarted = plan_of(&record("made"), "0@0E1 1@0E81", 2, 200);
    assert_eq!(restarted.record.status.phase, Phase::Pending);
}
