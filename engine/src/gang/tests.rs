//! Table tests of gang plans.

use std::fmt::Write as _;

use stoker_api::time::Timestamp;
use stoker_api::trial::{Attempt, AttemptEnd, CheckpointRecord, DesiredTrialState};

use super::{GangPlan, GangView, ObservedPod, Timeouts, Waiting, plan};
use crate::fixture::LOSS;
use crate::trial::{BackOffLimits, RestartLimits, TrialRecord, live_attempt};

mod clean_up;
mod exits;
mod scheduled;
mod status;
mod stops;
mod text;

use self::text::{pod, record};

const TIMEOUTS: Timeouts = Timeouts {
    start_deadline_seconds: 300,
    pull_deadline_seconds: 200,
    node_lost_seconds: 60,
    finished_pods_seconds: 600,
    end_grace_seconds: 30,
    preemption_timeout_seconds: 3600,
};

struct Case<'a> {
    record: TrialRecord,
    pods: &'a str,
    now: i64,
    is_admitted: bool,
}

/// Returns the view of a trial of two pods.
fn view<'a>(record: &'a TrialRecord, pods: &'a [ObservedPod], now: i64) -> GangView<'a> {
    GangView {
        record,
        generation: 1,
        pods,
        num_pods: 2,
        desired_state_seen_at: Timestamp(0),
        is_paused_by_user: true,
        is_admitted: true,
        searched: LOSS,
        timeouts: TIMEOUTS,
        limits: RestartLimits::new(2, BackOffLimits::CLUSTER, false),
        now: Timestamp(now),
    }
}

fn pods(text: &str) -> Vec<ObservedPod> {
    text.split_whitespace().map(pod).collect()
}

/// Plans a trial that is not admitted.
fn plan_of(record: &TrialRecord, text: &str, num_pods: u32, now: i64) -> GangPlan {
    plan(&GangView { num_pods, is_admitted: false, ..view(record, &pods(text), now) })
}

impl Case<'_> {
    fn render(&self) -> String {
        let pods = pods(self.pods);
        let is_admitted = self.is_admitted;
        let plan = plan(&GangView { is_admitted, ..view(&self.record, &pods, self.now) });
        let mut text = String::new();
        let (before, after) = (&self.record.status.attempts, &plan.record.status.attempts);
        if let Some(last) = after.last() {
            let previous = before.get(last.number as usize);
            let has_ended = previous.is_none_or(|previous| previous.end != last.end);
            match (&last.end, &last.reason) {
                (Some(end), Some(reason)) if has_ended => {
                    write!(text, "end={end:?}:{reason} ").unwrap()
                }
                _ if after.len() > before.len() => write!(text, "begin={} ", last.number).unwrap(),
                _ => {}
            }
            if before.len() == after.len()
                && before.last().is_some_and(|attempt| !attempt.has_pods)
                && last.has_pods
            {
                text += "made ";
            }
        }
        let ungated_at = |attempts: &[Attempt]| attempts.last().and_then(|last| last.ungated_at);
        if let Some(at) = ungated_at(after).filter(|at| ungated_at(before) != Some(*at)) {
            write!(text, "ungated={} ", at.0).unwrap();
        }
        if !plan.create.is_empty() {
            write!(text, "create={:?} ", plan.create).unwrap();
        }
        if plan.delete_service {
            text += "service ";
        }
        for pod in &plan.delete {
            write!(text, "delete={}:{} ", pod.name, pod.grace_seconds).unwrap();
        }
        if plan.record.status.phase.is_terminal() {
            write!(text, "{:?} ", plan.record.status.phase).unwrap();
        }
        if let Some(seconds) = plan.wake_seconds {
            write!(text, "wake={seconds} ").unwrap();
        }
        text.trim_end().to_owned()
    }
}

#[track_caller]
fn check(attempts: &str, pods: &str, now: i64, expected: &str) {
    let case = Case { record: record(attempts), pods, now, is_admitted: true };
    assert_eq!(case.render(), expected, "attempts {attempts}, pods {pods}, now {now}");
}

#[test]
fn attempts_are_recorded_before_their_pods() {
    check("", "", 0, "begin=0 create=[0, 1]");
    check("live", "", 0, "create=[0, 1] wake=60");
    check("live", "0@0P", 60, "create=[1] wake=240");
    let late = "end=NotStarted:PodsNotMade delete=t-a0-r0:30";
    check("live", "0@0P", 300, late);
    check("live", "0@0P 1@0P", 7, "made ungated=7 wake=60");
    // The operator was unavailable until the pods were scheduled, or had ended.
    check("live", "0@0S 1@0S", 7, "made ungated=0");
    check("live", "0@0R 1@0E79", 120, "made ungated=0 wake=3559");
    check("made", "0@0R 1@0R", 0, "");
}

#[test]
fn unadmitted_gangs_wait() {
    let case = Case { record: record(""), pods: "", now: 0, is_admitted: false };
    assert_eq!(case.render(), "");
}

#[test]
fn one_failed_rank_ends_the_gang_after_grace() {
    check("made", "0@0E1 1@0R", 2, "wake=29");
    check("made", "0@0E1 1@0R", 31, "end=UserError:ProgramFailed delete=t-a0-r1:30 wake=600");
    check(
        "made",
        "0@0E80 1@0R",
        110,
        "end=Infrastructure:InfrastructureError delete=t-a0-r1:30 wake=600",
    );
    check("made", "0@0C 1@0R", 29, "wake=1");
}

#[test]
fn the_worst_rank_determines_the_attempts_end() {
    let end = |pods: &str| {
        let case = Case { record: record("made"), pods, now: 200, is_admitted: false };
        case.render().split(' ').next().unwrap().to_owned()
    };
    assert_eq!(end("0@0C 1@0E79"), "end=Preempted:Preempted");
    assert_eq!(end("0@0E81 1@0E80"), "end=Infrastructure:InfrastructureError");
    assert_eq!(end("0@0E81 1@0E81"), "end=Infrastructure:PeerFailed");
    assert_eq!(end("0@0E80 1@0E1"), "end=UserError:ProgramFailed");
    assert_eq!(end("0@0E1 1@0E78"), "end=InvalidHyperparameters:InvalidHyperparameters");
}

#[test]
fn next_attempt_waits_for_all_earlier_pods() {
    check("Infra@10", "0@0E80 1@0R", 11, "delete=t-a0-r1:30 wake=599");
    check("Infra@10", "0@0E80 1@0RD40", 11, "wake=30");
    check("Infra@10", "0@0E80 1@0RD600", 11, "delete=t-a0-r1:30 wake=599");
    // The clocks may differ by 10 s, so a deletion that ends in 40 s is not cut short.
    check("Infra@10", "0@0E80 1@0RD51", 11, "wake=41");
    check("Infra@10", "0@0E80 1@0RD52", 11, "delete=t-a0-r1:30 wake=599");
    check("Infra@10", "0@0E80 1@0E80", 11, "begin=1 create=[0, 1] wake=599");
    check("Infra@10", "", 11, "begin=1 create=[0, 1]");
}

#[test]
fn lost_pods_do_not_block_the_next_attempt() {
    check("made", "0@0R 1@0RN", 59, "wake=1");
    // If the node returns, the pod may need a long time to store a checkpoint.
    check("made", "0@0R 1@0RN", 60, "delete=t-a0-r1:600 wake=31");
    check("made", "0@0R 1@0RND660", 61, "wake=30");
    check("made", "0@0R 1@0RND660", 90, "wake=1");
    check("made", "0@0R 1@0RND90", 61, "wake=30");
    // The node was drained with a long grace period, and then became not ready.
    check("made", "0@0R 1@0RND3600", 59, "wake=1");
    check("made", "0@0R 1@0RND3600", 61, "delete=t-a0-r1:600 wake=30");
    let lost = "end=Infrastructure:NodeLost delete=t-a0-r0:30 delete=t-a0-r1:0";
    check("made", "0@0R 1@0RND660", 91, lost);
    check("made", "0@0R 1@0RND90", 91, lost);
    check("made", "0@0R 1@0RG", 1, lost);
    check("Infra@91", "1@0RND90", 92, "begin=1 create=[0, 1] delete=t-a0-r1:0");
}

#[test]
fn unschedulable_gangs_release_their_pods_and_back_off() {
    check("made@7", "0@0R 1@0P", 306, "wake=1");
    let late = "end=NotStarted:Unschedulable delete=t-a0-r0:30 delete=t-a0-r1:30";
    check("made@7", "0@0R 1@0P", 307, late);
    check("NotStarted@300", "", 309, "wake=1");
    check("NotStarted@300", "", 310, "begin=1 create=[0, 1]");
    check("NotStarted@1 NotStarted@300", "", 319, "wake=1");
    check("NotStarted@1 NotStarted@300", "", 320, "begin=2 create=[0, 1]");
}

/// The start deadline counts from the moment when no pod has a gate.
#[test]
fn gated_gangs_have_no_deadline() {
    check("live", "0@0H 1@0H", 0, "made");
    check("gated", "0@0H 1@0H", 99_000, "");
    check("gated", "0@0S 1@0H", 99_000, "");
    check("gated", "0@0P 1@0H", 99_000, "");
    check("gated", "0@0P 1@0U", 99_000, "ungated=99000 wake=300");
    check("gated", "0@0R 1@0R", 99_000, "ungated=0");
    check("made@99000", "0@0P 1@0U", 99_299, "wake=1");
    let late = "end=NotStarted:Unschedulable delete=t-a0-r0:30 delete=t-a0-r1:30";
    check("made@99000", "0@0P 1@0U", 99_300, late);
    check("made@99000", "0@0S 1@0R", 99_300, "");
}

#[test]
fn one_pod_trials_have_no_deadline() {
    for pods in ["0@0P", "0@0U", "0@0H"] {
        let plan = plan_of(&record("made@0"), pods, 1, 99_000);
        assert_eq!(live_attempt(&plan.record), Some(0), "{pods}");
        assert_eq!((plan.delete, plan.create, plan.wake_seconds), (vec![], vec![], None), "{pods}");
    }
}

#[test]
fn start_stage_follows_from_pods() {
    use super::admission::StartStage::{Gated, Scheduling, Unschedulable, Waiting};
    let check = |attempts: &str, pods: &str, num_pods, now, expected| {
        let plan = plan_of(&record(attempts), pods, num_pods, now);
        assert_eq!(plan.start_stage, expected, "{attempts}, {pods}, {num_pods} pods, {now}");
    };
    check("", "", 2, 0, Some(Waiting));
    check("NotStarted@0", "", 2, 9, None);
    check("Infra@0", "0@0R", 2, 9, None);
    check("live", "", 2, 0, Some(Scheduling));
    check("live", "0@0U", 2, 0, Some(Scheduling));
    check("made", "0@0P 1@0P", 2, 0, Some(Scheduling));
    check("made", "0@0P 1@0R", 2, 0, Some(Scheduling));
    check("gated", "0@0P 1@0H", 2, 0, Some(Gated));
    check("gated", "0@0U 1@0H", 2, 0, Some(Gated));
    check("made", "0@0P 1@0U", 2, 0, Some(Unschedulable));
    check("made@0", "0@0P 1@0U", 2, 300, None);
    check("made", "0@0S 1@0S", 2, 0, None);
    // The API server does not accept the pods.
    check("live", "", 2, 59, Some(Scheduling));
    check("live", "", 2, 60, Some(Unschedulable));
    check("live", "0@0R", 2, 60, Some(Unschedulable));
    check("live", "", 1, 60, Some(Unschedulable));
    check("live", "", 2, 300, None);
    // No scheduler processes the pod.
    check("made@0", "0@0P", 1, 59, Some(Scheduling));
    check("made@0", "0@0P", 1, 60, Some(Unschedulable));
    check("made@0", "0@0P 1@0R", 2, 59, Some(Scheduling));
    check("made@0", "0@0P 1@0R", 2, 60, Some(Unschedulable));
}

/// Once the experiment has trained, its image and its Secrets have existed.
#[test]
fn pulls_have_a_separate_deadline() {
    let end_at = |reason: &str, now, has_trained| {
        let (mut pods, since) = (["0@0R", "1@0S"].map(pod), Timestamp(1000));
        pods[1].waiting =
            Some(Waiting { reason: reason.to_owned(), message: String::new(), since });
        let limits = RestartLimits::new(2, BackOffLimits::CLUSTER, has_trained);
        let plan = plan(&GangView { limits, ..view(&record("made@0"), &pods, now) });
        (plan.record.status.attempts[0].end, plan.wake_seconds)
    };
    assert_eq!(end_at("ImagePullBackOff", 1199, false), (None, Some(1)));
    assert_eq!(end_at("ImagePullBackOff", 1200, false).0, Some(AttemptEnd::Infrastructure));
    assert_eq!(end_at("CreateContainerConfigError", 1200, false).0, Some(AttemptEnd::UserError));
    for reason in ["ImagePullBackOff", "CreateContainerConfigError", "RunContainerError"] {
        assert_eq!(end_at(reason, 1200, true).0, Some(AttemptEnd::NotStarted), "{reason}");
    }
    assert_eq!(end_at("InvalidImageName", 1200, true).0, Some(AttemptEnd::UserError));
}

#[test]
fn back_off_grows_until_a_new_checkpoint() {
    check("User@5", "", 5, "begin=1 create=[0, 1]");
    check("User@5 User@7", "", 16, "wake=1");
    check("User@5 User@7", "", 17, "begin=2 create=[0, 1]");
    check("Preempted@7", "", 7, "begin=1 create=[0, 1]");
    check("User@5 Preempted@7", "", 7, "wake=10");
    let mut record = record("User@5 User@7");
    record.status.checkpoints.push(CheckpointRecord {
        name: "000000000009-1".to_owned(),
        batches: 9,
        metric: None,
        manifest_sha256: String::new(),
        bytes: 0,
        refused: false,
    });
    let case = Case { record, pods: "", now: 7, is_admitted: true };
    assert_eq!(case.render(), "begin=2 create=[0, 1]");
}

/// The program of an `X` pod has exited, and the node has not reported the end of the pod yet.
#[test]
fn pods_about_to_finish_are_not_deleted() {
    let rest = "0@1R 1@1R";
    let check_at = |now: i64, expected: &str| {
        check("Preempted@7 made", &format!("0@0X 1@0X {rest}"), now, expected);
    };
    check_at(36, "wake=1");
    let over = Case {
        record: record("Preempted@7 made"),
        pods: "0@0C 1@0C 0@1R 1@1R",
        now: 607,
        is_admitted: true,
    };
    assert_eq!(over.render(), "delete=t-a0-r0:30 delete=t-a0-r1:30");
    check_at(37, "delete=t-a0-r0:30 delete=t-a0-r1:30");
}

#[test]
fn finished_pods_are_kept_for_their_logs() {
    check("Preempted@7 made", "0@0E79 1@0E79 0@1R 1@1R", 606, "wake=1");
    let expected = "delete=t-a0-r0:30 delete=t-a0-r1:30";
    check("Preempted@7 made", "0@0E79 1@0E79 0@1R 1@1R", 607, expected);
}

/// A Service that is left counts against a quota of the namespace.
#[test]
fn services_are_deleted_with_the_last_attempt() {
    let check = |record: &TrialRecord, pods_text: &str, num_pods: u32, now, expected| {
        let pods = pods(pods_text);
        let plan = plan(&GangView { num_pods, ..view(record, &pods, now) });
        assert_eq!(plan.delete_service, expected, "{pods_text}, {num_pods} pods, {now}");
        plan.record
    };
    let made = record("made");
    check(&made, "0@0R 1@0R", 2, 1, false);
    // Another attempt follows.
    check(&made, "0@0E79 1@0E79", 2, 100, false);
    check(&record("Infra@10"), "0@0E80 1@0R", 2, 11, false);
    // The trial ends. Its pods are kept for their logs, and cost no further request.
    let ended = check(&made, "0@0C 1@0C", 2, 1, true);
    assert_eq!(ended.status.phase, stoker_api::experiment::Phase::Failed);
    check(&ended, "0@0C 1@0C", 2, 2, false);
    check(&ended, "0@0C 1@0C", 2, 601, true);
    check(&ended, "", 2, 602, false);
    check(&made, "0@0C", 1, 1, false);
    // A paused trial may hold its place for days.
    let mut paused = record("made");
    paused.spec.desired_state = DesiredTrialState::Pause;
    let paused = check(&paused, "0@0E79 1@0E79", 2, 100, true);
    check(&paused, "0@0E79 1@0E79", 2, 101, false);
}

#[test]
fn unsent_reports_are_read_from_termination_messages() {
    let mut pods = [pod("0@0C"), pod("1@0C")];
    let report = r#"{"version":1,"attempt":0,"batches":4,
        "event":{"validated":{"metrics":{"loss":"0.5"},"grantedUnits":9}}}"#;
    let text = format!(r#"{{"code":0,"unsent":[{report}]}}"#);
    pods[0].exit.as_mut().unwrap().message = text;
    let record = record("made");
    let view = view(&record, &pods, 1);
    let status = plan(&view).record.status;
    assert_eq!(status.phase, stoker_api::experiment::Phase::Completed);
    assert_eq!(status.best_metric.as_deref(), Some("0.5"));
    assert_eq!(status.ended_at, Some(Timestamp(1)));
}
