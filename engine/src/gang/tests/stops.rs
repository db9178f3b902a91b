//! Trials that are paused, stopped or killed.

use stoker_api::time::Timestamp;
use stoker_api::trial::{DesiredTrialState, Fact, ResultFact};

use super::text::record;
use super::{Case, GangView, pods, view};
use crate::gang::{Timeouts, plan};

#[test]
fn paused_stopped_and_killed_trials_end() {
    let check = |attempts: &str, desired_state: DesiredTrialState, now: i64, expected: &str| {
        let mut record = record(attempts);
        record.spec.desired_state = desired_state;
        record.spec.desired_since = Some(Timestamp(100));
        let pods = if attempts == "made" { "0@0R 1@0R" } else { "" };
        let case = Case { record, pods, now, is_admitted: true };
        assert_eq!(case.render(), expected, "{attempts} {desired_state:?} {now}");
    };
    check("", DesiredTrialState::Pause, 100, "");
    check("", DesiredTrialState::Stop, 100, "service Cancelled");
    check("live", DesiredTrialState::Pause, 100, "end=RunnerLost:NotWanted service wake=3600");
    let mut done = record("live");
    let result = ResultFact {
        units: 9,
        metric: "0.5".to_owned(),
        values: vec![],
        checkpoint: None,
        at: None,
    };
    done.status.facts.push(Fact::Result(result));
    done.spec.desired_state = DesiredTrialState::Stop;
    done.spec.desired_since = Some(Timestamp(100));
    let case = Case { record: done, pods: "0@0R", now: 100, is_admitted: true };
    assert_eq!(case.render(), "create=[1] wake=200");
    let mut waiting = record("made");
    waiting.spec.desired_state = DesiredTrialState::Pause;
    let case = Case { record: waiting, pods: "0@0P 1@0S", now: 9, is_admitted: true };
    let expected = "end=RunnerLost:NotWanted service delete=t-a0-r0:30 delete=t-a0-r1:30 wake=3591";
    assert_eq!(case.render(), expected);
    check("made", DesiredTrialState::Pause, 3699, "wake=1");
    let late = "end=RunnerLost:PreemptionTimeout service delete=t-a0-r0:30 delete=t-a0-r1:30";
    check("made", DesiredTrialState::Pause, 3700, late);
    check("made", DesiredTrialState::Stop, 3700, &format!("{late} Cancelled"));
    let killed = "end=RunnerLost:Killed service delete=t-a0-r0:1 delete=t-a0-r1:1 Cancelled";
    check("made", DesiredTrialState::Kill, 100, killed);
}

/// The clock of the replica that wrote the request may be behind.
#[test]
fn stops_have_time_after_the_first_observation() {
    let mut record = record("made");
    record.spec.desired_state = DesiredTrialState::Pause;
    record.spec.desired_since = Some(Timestamp(100));
    let pods = pods("0@0R 1@0R");
    let check = |preemption_timeout_seconds, seen_at, now, expected| {
        let base = view(&record, &pods, now);
        let timeouts = Timeouts { preemption_timeout_seconds, ..base.timeouts };
        let desired_state_seen_at = Timestamp(seen_at);
        let plan = plan(&GangView { timeouts, desired_state_seen_at, ..base });
        let wake = plan.wake_seconds.filter(|_| plan.delete.is_empty());
        assert_eq!(wake, expected, "{preemption_timeout_seconds} {seen_at} {now}");
    };
    check(60, 1000, 1059, Some(1));
    check(60, 1000, 1060, None);
    check(3600, 5000, 5299, Some(1));
    check(3600, 5000, 5300, None);
    // Later times in the record count.
    check(3600, 50, 3699, Some(1));
    check(3600, 3399, 3700, None);
}
