//! Phase, reason and conditions of a planned trial.

use stoker_api::condition;
use stoker_api::experiment::Phase;
use stoker_api::time::Timestamp;
use stoker_api::trial::{AttemptEnd, DesiredTrialState, Fact, ResultFact};

use super::text::{pod, record};
use super::{plan_of, view};
use crate::gang::{GangView, ObservedPod, PodPhase, Waiting, plan, refuse};
use crate::trial::TrialRecord;

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
    check("gated", "0@0P 1@0H", gated);
    check("made", "0@0P 1@0U", "Pending Unschedulable pod t-a0-r1 is not scheduled: 0/2 nodes");
    check("made", "0@0R 1@0S", "Pending Starting not all pods are running yet");
    check("made", "0@0R 1@0R", "Running");
    check("made", "0@0R 1@0C", "Running");
    check("made", "0@0R", "Running");
    check("NotStarted@0", "", "Pending BackOff retry at 1970-01-01T00:00:10Z:");
    let earlier = "Pending EarlierAttempt pod t-a0-r0 of an earlier attempt has not terminated";
    check("Infra@0", "0@0R", earlier);
}

/// The plan is due again when the message changes.
#[test]
fn slow_creation_of_containers_is_reported() {
    let check = |waits: &str, now: i64, message: &str, wake_seconds: u64| {
        let mut pods = ["0@0R", "1@0S"].map(pod);
        if let Ok(since) = waits.parse() {
            pods[1].creating_since = Some(Timestamp(since));
        }
        let plan = plan(&view(&record("made"), &pods, now));
        let status = plan.record.status;
        assert_eq!(status.reason.as_deref(), Some("Starting"));
        let actual = status.message.unwrap_or_default();
        assert!(actual.starts_with(message), "{waits} {now}: {actual}");
        assert_eq!(plan.wake_seconds.unwrap_or_default(), wake_seconds, "{waits} {now}");
    };
    check("no", 999, "not all pods are running yet", 0);
    check("100", 219, "not all pods are running yet", 1);
    let late = "the containers of pod t-a0-r1 have been waiting for more than";
    check("100", 220, &format!("{late} 2 minutes"), 120);
    check("100", 340, &format!("{late} 4 minutes"), 240);
}

/// A result at the granted length.
fn result() -> Fact {
    Fact::Result(ResultFact {
        units: 9,
        metric: "0.5".to_owned(),
        values: vec![],
        checkpoint: None,
        at: None,
    })
}

/// Formats a condition as its status, reason and message.
fn condition_text(record: &TrialRecord, type_: &str) -> String {
    let condition = condition::find(&record.status.conditions, type_).unwrap();
    let (reason, message) = (&condition.reason, &condition.message);
    format!("{:?} {reason} {message}", condition.status).trim_end().to_owned()
}

#[test]
fn trials_with_a_result_wait_for_the_search() {
    let mut record = record("Preempted@1");
    record.status.facts.push(result());
    let status = plan_of(&record, "", 2, 9).record.status;
    assert_eq!(status.reason.as_deref(), Some("WaitingForSearch"));
}

#[test]
fn a_resumed_trial_is_pending_until_it_runs() {
    let phase_of = |desired_state, attempts: &str, pods: &str| {
        let mut record = record(attempts);
        record.spec.desired_state = desired_state;
        record.status.phase = Phase::Paused;
        let status = plan_of(&record, pods, 2, 9).record.status;
        format!("{:?} {:?}", status.phase, status.reason)
    };
    assert_eq!(phase_of(DesiredTrialState::Pause, "Preempted@1", ""), "Paused None");
    assert_eq!(phase_of(DesiredTrialState::Pause, "made", "0@0R 1@0R"), "Running None");
    let waits = "Pending Some(\"WaitingForAdmission\")";
    assert_eq!(phase_of(DesiredTrialState::Run, "Preempted@1", ""), waits);
}

#[test]
fn conditions_explain_why_no_attempt_runs() {
    let check = |attempts: &str, pods: &str, is_admitted, expected: [(&str, bool, &str); 2]| {
        let mut pods: Vec<ObservedPod> = pods.split_whitespace().map(pod).collect();
        for pod in &mut pods {
            if pod.phase == PodPhase::Pending && pod.scheduled_at.is_some() {
                let reason = "ImagePullBackOff".to_owned();
                pod.waiting = Some(Waiting { reason, ..Waiting::default() });
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

/// The search pauses trials beyond its limit. A pause by the user, or after the trained length,
/// does not wait for other trials.
#[test]
fn paused_trials_show_who_paused_them() {
    let check = |is_paused_by_user, has_result: bool, phase: Phase, scheduled: &str| {
        let mut record = record("Preempted@1");
        record.spec.desired_state = DesiredTrialState::Pause;
        record.status.facts.extend(has_result.then(result));
        let record = plan(&GangView { is_paused_by_user, ..view(&record, &[], 9) }).record;
        let case = format!("by the user: {is_paused_by_user}, has a result: {has_result}");
        assert_eq!(record.status.phase, phase, "{case}");
        assert_eq!(condition_text(&record, "Scheduled"), scheduled, "{case}");
    };
    let place = "False WaitingForPlace as many trials of the search train as it allows \
                 (maxConcurrentTrials)";
    check(false, false, Phase::Pending, place);
    let none = "False NoAttempt no attempt is running or due";
    check(false, true, Phase::Paused, none);
    check(true, false, Phase::Paused, none);
    check(true, true, Phase::Paused, none);
}

#[test]
fn ended_trials_have_final_conditions() {
    let check = |pods: &str, phase: Phase, completed: &str, failed: &str| {
        let mut record = record("made");
        record.status.facts.push(result());
        let record = plan_of(&record, pods, 2, 200).record;
        assert_eq!(record.status.phase, phase);
        assert_eq!(condition_text(&record, "Scheduled"), "False Ended");
        assert_eq!(condition_text(&record, "Running"), "False Ended");
        assert_eq!(condition_text(&record, "Completed"), completed);
        assert_eq!(condition_text(&record, "Failed"), failed);
    };
    let completed = "True Completed pod t-a0-r0: exit code 0";
    let not_failed = completed.replace("True", "False");
    check("0@0C1 1@0C2", Phase::Completed, completed, &not_failed);
    let failed = "True InvalidHyperparameters pod t-a0-r0: exit code 78";
    let not_completed = failed.replace("True", "False");
    check("0@0E78 1@0C", Phase::Failed, &not_completed, failed);
}

#[test]
fn only_ended_trials_have_an_end_time() {
    let running = plan_of(&record("made"), "0@0R 1@0R", 2, 9).record;
    assert_eq!(running.status.ended_at, None);
    let ended = plan_of(&running, "0@0E78 1@0E78", 2, 100).record;
    assert_eq!(ended.status.ended_at, Some(Timestamp(100)));
    let later = plan_of(&ended, "", 2, 200).record;
    assert_eq!(later.status.ended_at, Some(Timestamp(100)));
}

/// A refusal by a quota is retried. A malformed pod counts as a failure.
#[test]
fn refused_pods_end_the_attempt() {
    let check = |end: AttemptEnd, restarts: u32| {
        let mut record = record("live");
        let limits = view(&record, &[], 0).limits;
        refuse(&mut record, end, "Forbidden", "exceeded quota".to_owned(), &limits, Timestamp(7));
        let attempt = &record.status.attempts[0];
        assert_eq!((attempt.end, attempt.ended_at), (Some(end), Some(Timestamp(7))));
        assert_eq!(attempt.reason.as_deref(), Some("Forbidden"));
        assert_eq!(attempt.message.as_deref(), Some("exceeded quota"));
        assert_eq!(record.status.restarts, restarts);
    };
    check(AttemptEnd::NotStarted, 0);
    check(AttemptEnd::UserError, 1);
}
