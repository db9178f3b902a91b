//! Table tests of gang plans.

use std::fmt::Write as _;

use stoker_api::condition;
use stoker_api::time::Timestamp;
use stoker_api::trial::{
    Attempt, AttemptEnd, CheckpointRecord, DesiredTrialState, Fact, ResultFact,
};

use super::{GangPlan, GangView, Patience, PodPhase, PodSeen, Waiting, plan};
use crate::fixture::LOSS;
use crate::trial::{BackOffLimits, Limits, TrialRecord, live_attempt};

mod text;

use self::text::{pod, record};

const PATIENCE: Patience = Patience {
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
fn view<'a>(record: &'a TrialRecord, pods: &'a [PodSeen], now: i64) -> GangView<'a> {
    GangView {
        record,
        generation: 1,
        pods,
        num_pods: 2,
        is_admitted: true,
        searched: LOSS,
        patience: PATIENCE,
        limits: Limits::new(2, BackOffLimits::CLUSTER),
        now: Timestamp(now),
    }
}

fn pods(text: &str) -> Vec<PodSeen> {
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
    check("live", "", 0, "create=[0, 1] wake=300");
    check("live", "0@0P", 0, "create=[1] wake=300");
    let late = "end=NotStarted:PodsNotMade delete=t-a0-r0:30";
    check("live", "0@0P", 300, late);
    check("live", "0@0P 1@0P", 7, "made ungated=7 wake=60");
    check("live", "0@0S 1@0S", 7, "made");
    check("made", "0@0R 1@0R", 0, "");
}

#[test]
fn unadmitted_gangs_wait() {
    let case = Case { record: record(""), pods: "", now: 0, is_admitted: false };
    assert_eq!(case.render(), "");
}

#[test]
fn a_deleted_pod_ends_the_attempt() {
    check(
        "made",
        "0@0R",
        9,
        "end=Infrastructure:PodDeleted delete=t-a0-r0:30 begin=1 create=[0, 1]"
            .split(" begin")
            .next()
            .unwrap(),
    );
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
    check("Infra@10", "0@0E80 1@0E80", 11, "begin=1 create=[0, 1] wake=599");
    check("Infra@10", "", 11, "begin=1 create=[0, 1]");
}

#[test]
fn lost_pods_do_not_block_the_next_attempt() {
    check("made", "0@0R 1@0RN", 59, "wake=1");
    check("made", "0@0R 1@0RN", 60, "delete=t-a0-r1:30 wake=1");
    check("made", "0@0R 1@0RND90", 61, "wake=1");
    // The node was drained with a long grace period, and then became not ready.
    check("made", "0@0R 1@0RND600", 59, "wake=1");
    check("made", "0@0R 1@0RND600", 61, "delete=t-a0-r1:30 wake=1");
    let lost = "end=Infrastructure:NodeLost delete=t-a0-r0:30 delete=t-a0-r1:0";
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
    check("made", "0@0H 1@0H", 99_000, "");
    check("made", "0@0S 1@0H", 99_000, "");
    check("made", "0@0P 1@0H", 99_000, "");
    check("made", "0@0P 1@0U", 99_000, "ungated=99000 wake=300");
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
fn standing_follows_from_pods() {
    use super::admission::Standing::{Gated, Scheduling, Unschedulable, Waiting};
    let check = |attempts: &str, pods: &str, num_pods, now, expected| {
        let plan = plan_of(&record(attempts), pods, num_pods, now);
        assert_eq!(plan.standing, expected, "{attempts}, {pods}, {num_pods} pods, {now}");
    };
    check("", "", 2, 0, Some(Waiting));
    check("NotStarted@0", "", 2, 9, None);
    check("Infra@0", "0@0R", 2, 9, None);
    check("live", "", 2, 0, Some(Scheduling));
    check("live", "0@0U", 2, 0, Some(Scheduling));
    check("made", "0@0P 1@0P", 2, 0, Some(Scheduling));
    check("made", "0@0P 1@0R", 2, 0, Some(Scheduling));
    check("made", "0@0P 1@0H", 2, 0, Some(Gated));
    check("made", "0@0U 1@0H", 2, 0, Some(Gated));
    check("made", "0@0P 1@0U", 2, 0, Some(Unschedulable));
    check("made@0", "0@0P 1@0U", 2, 300, None);
    check("made", "0@0S 1@0S", 2, 0, None);
    // No scheduler processes the pod.
    check("made@0", "0@0P", 1, 59, Some(Scheduling));
    check("made@0", "0@0P", 1, 60, Some(Unschedulable));
    check("made@0", "0@0P 1@0R", 2, 59, Some(Scheduling));
    check("made@0", "0@0P 1@0R", 2, 60, Some(Unschedulable));
}

#[test]
fn pulls_have_a_separate_deadline() {
    let end_at = |reason: &str, now| {
        let mut pods = ["0@0R", "1@0S"].map(pod);
        pods[1].scheduled_at = Some(Timestamp(1000));
        let waiting = Waiting { reason: reason.to_owned(), message: String::new() };
        pods[1].waiting = Some(waiting);
        let plan = plan(&view(&record("made@0"), &pods, now));
        (plan.record.status.attempts[0].end, plan.wake_seconds)
    };
    assert_eq!(end_at("ImagePullBackOff", 1199), (None, Some(1)));
    assert_eq!(end_at("ImagePullBackOff", 1200).0, Some(AttemptEnd::Infrastructure));
    assert_eq!(end_at("CreateContainerConfigError", 1200).0, Some(AttemptEnd::UserError));
}

/// Also checks the reason and the message of a pending trial.
#[test]
fn phase_is_running_while_all_pods_run() {
    let check = |attempts: &str, pods: &str, expected: &str| {
        let status = plan_of(&record(attempts), pods, 2, 9).record.status;
        let (reason, message) = (status.reason.unwrap_or_default(), status.message);
        let text = format!("{:?} {reason} {}", status.phase, message.unwrap_or_default());
        assert_eq!(text.trim_end(), expected, "{attempts}, {pods}");
    };
    check("", "", "Pending WaitingForAdmission other trials start first");
    check("live", "0@0P", "Pending Starting pods are being created");
    let gated = "Pending SchedulingGated pod t-a0-r1 is held by scheduling gates: queue.test/a";
    check("made", "0@0P 1@0H", gated);
    check("made", "0@0P 1@0U", "Pending Unschedulable pod t-a0-r1 is not scheduled: 0/2 nodes");
    check("made", "0@0R 1@0S", "Pending Starting not all pods are running yet");
    check("made", "0@0R 1@0R", "Running");
    check("made", "0@0R 1@0C", "Running");
    check("NotStarted@0", "", "Pending BackOff retry at 1970-01-01T00:00:10Z:");
    let earlier = "Pending EarlierAttempt pod t-a0-r0 of an earlier attempt has not terminated";
    check("Infra@0", "0@0R", earlier);
}

#[test]
fn trials_with_a_result_wait_for_the_search() {
    let mut record = record("Preempted@1");
    record.status.facts.push(Fact::Result(ResultFact { units: 9, metric: "0.5".to_owned() }));
    let status = plan_of(&record, "", 2, 9).record.status;
    assert_eq!(status.reason.as_deref(), Some("WaitingForSearch"));
}

#[test]
fn a_resumed_trial_is_pending_until_it_runs() {
    let phase_of = |wanted, attempts: &str, pods: &str| {
        let mut record = record(attempts);
        record.spec.desired_state = wanted;
        record.status.phase = stoker_api::experiment::Phase::Paused;
        let status = plan_of(&record, pods, 2, 9).record.status;
        format!("{:?} {:?}", status.phase, status.reason)
    };
    assert_eq!(phase_of(DesiredTrialState::Pause, "Preempted@1", ""), "Paused None");
    assert_eq!(phase_of(DesiredTrialState::Pause, "made", "0@0R 1@0R"), "Running None");
    let waits = "Pending Some(\"WaitingForAdmission\")";
    assert_eq!(phase_of(DesiredTrialState::Run, "Preempted@1", ""), waits);
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

#[test]
fn paused_stopped_and_killed_trials_end() {
    let check = |attempts: &str, wanted: DesiredTrialState, now: i64, expected: &str| {
        let mut record = record(attempts);
        record.spec.desired_state = wanted;
        record.spec.desired_since = Some(Timestamp(100));
        let pods = if attempts == "made" { "0@0R 1@0R" } else { "" };
        let case = Case { record, pods, now, is_admitted: true };
        assert_eq!(case.render(), expected, "{attempts} {wanted:?} {now}");
    };
    check("", DesiredTrialState::Pause, 100, "");
    check("", DesiredTrialState::Stop, 100, "Cancelled");
    check("live", DesiredTrialState::Pause, 100, "end=RunnerLost:NotWanted wake=3600");
    let mut done = record("live");
    let result = ResultFact { units: 9, metric: "0.5".to_owned() };
    done.status.facts.push(Fact::Result(result));
    done.spec.desired_state = DesiredTrialState::Stop;
    done.spec.desired_since = Some(Timestamp(100));
    let case = Case { record: done, pods: "0@0R", now: 100, is_admitted: true };
    assert_eq!(case.render(), "create=[1] wake=200");
    let mut waiting = record("made");
    waiting.spec.desired_state = DesiredTrialState::Pause;
    let case = Case { record: waiting, pods: "0@0P 1@0S", now: 9, is_admitted: true };
    let expected = "end=RunnerLost:NotWanted delete=t-a0-r0:30 delete=t-a0-r1:30 wake=3591";
    assert_eq!(case.render(), expected);
    check("made", DesiredTrialState::Pause, 3699, "wake=1");
    let late = "end=RunnerLost:PreemptionTimeout delete=t-a0-r0:30 delete=t-a0-r1:30";
    check("made", DesiredTrialState::Pause, 3700, late);
    check("made", DesiredTrialState::Stop, 3700, &format!("{late} Cancelled"));
    let killed = "end=RunnerLost:Killed delete=t-a0-r0:1 delete=t-a0-r1:1 Cancelled";
    check("made", DesiredTrialState::Kill, 100, killed);
}

#[test]
fn unsent_reports_are_read_from_termination_messages() {
    let mut pods = [pod("0@0C"), pod("1@0C")];
    let report = r#"{"version":1,"attempt":0,"batches":4,"event":{"validated":{"metrics":{"loss":"0.5"},"grantedUnits":9}}}"#;
    let text = format!(r#"{{"code":0,"unsent":[{report}]}}"#);
    pods[0].exit.as_mut().unwrap().message = text;
    let record = record("made");
    let view = view(&record, &pods, 1);
    let status = plan(&view).record.status;
    assert_eq!(status.phase, stoker_api::experiment::Phase::Completed);
    assert_eq!(status.best_metric.as_deref(), Some("0.5"));
    assert_eq!(status.ended_at, Some(Timestamp(1)));
}

#[test]
fn conditions_explain_why_no_attempt_runs() {
    let check = |attempts: &str, pods: &str, is_admitted, expected: [(&str, bool, &str); 2]| {
        let mut pods: Vec<PodSeen> = pods.split_whitespace().map(pod).collect();
        for pod in &mut pods {
            if pod.phase == PodPhase::Pending && pod.scheduled_at.is_some() {
                let reason = "ImagePullBackOff".to_owned();
                pod.waiting = Some(Waiting { reason, message: String::new() });
            }
        }
        let record = record(attempts);
        let view = GangView { generation: 7, is_admitted, ..view(&record, &pods, 1) };
        let conditions = plan(&view).record.status.conditions;
        for (type_, holds, reason) in expected {
            let condition = condition::find(&conditions, type_).unwrap();
            let is_true = condition.status == condition::ConditionStatus::True;
            assert_eq!((is_true, condition.reason.as_str()), (holds, reason), "{attempts} {type_}");
            assert_eq!(condition.observed_generation, 7);
        }
    };
    let none = ("Running", false, "NoAttempt");
    check("", "", false, [("Scheduled", false, "WaitingForAdmission"), none]);
    check("NotStarted@0", "", true, [("Scheduled", false, "BackOff"), none]);
    check("Infra@0", "0@0R", true, [("Scheduled", false, "EarlierAttempt"), none]);
    let starting = ("Running", false, "Starting");
    check("made", "0@0R 1@0P", true, [("Scheduled", false, "Unschedulable"), starting]);
    let scheduled = ("Scheduled", true, "AllPodsScheduled");
    check("made", "0@0R 1@0S", true, [scheduled, ("Running", false, "ImagePullBackOff")]);
    check("made", "0@0R 1@0R", true, [scheduled, ("Running", true, "AllPodsRunning")]);
}
