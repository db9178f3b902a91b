//! Tests of a trial's record: attempts and their ends, directives.

mod reports;

use std::collections::BTreeMap;

use stoker_api::contract::ReportEvent;
use stoker_api::trial::Grant;

use super::*;
use crate::fixture::{LOSS, checkpointed, plain_record, report, validated};

const LIMITS: RestartLimits = RestartLimits {
    max_restarts: 2,
    infrastructure_attempts_max: 3,
    back_off: BackOffLimits::CLUSTER,
    has_trained: false,
};

/// Event in an attempt: a result at the granted length, a validation before that length, a
/// checkpoint, or an end.
#[derive(Clone, Copy, Debug)]
enum Step {
    Result,
    Validation,
    Checkpoint,
    End(AttemptEnd),
}

use AttemptEnd::{
    Completed, Infrastructure, InvalidHyperparameters, Preempted, RunnerLost, UserError,
};
use Step::{Checkpoint, End};

/// Applies the steps, and begins an attempt whenever none is alive. `expected` is the close cause,
/// the restarts and the number of attempts.
fn check(steps: &[Step], expected: (Option<CloseCause>, u32, usize)) {
    let mut record = plain_record(0);
    for (batches, step) in (1..).zip(steps) {
        if let NextStep::Start { attempt, .. } = next(&record, TargetState::Run) {
            begin_attempt(&mut record, attempt);
        }
        let attempt = live_attempt(&record).unwrap_or(0);
        match *step {
            Step::Result => {
                let report = report(attempt, batches, validated("0.5", Some(9)));
                record_report(&mut record, &report, &LOSS);
            }
            Step::Validation => {
                record_report(&mut record, &report(attempt, batches, validated("2", None)), &LOSS);
            }
            Checkpoint => {
                let name = format!("{batches:012}-{attempt}");
                let report = report(attempt, batches, checkpointed(&name, None));
                record_report(&mut record, &report, &LOSS);
            }
            End(end) => end_attempt(&mut record, end, None, &LIMITS),
        }
    }
    let outcome = (closed(&record), record.status.restarts, record.status.attempts.len());
    assert_eq!(outcome, expected, "{steps:?}");
}

#[test]
fn completed_requires_a_result_at_granted_length() {
    check(&[Step::Result, End(Completed)], (Some(CloseCause::Completed), 0, 1));
    check(&[Step::Validation, End(Completed)], (Some(CloseCause::StoppedEarly), 0, 1));
    check(&[Step::Validation, End(UserError), End(Completed)], {
        (Some(CloseCause::StoppedEarly), 1, 2)
    });
}

#[test]
fn completed_without_validation_fails_with_a_message() {
    check(&[End(Completed)], (Some(CloseCause::Failed), 0, 1));
    check(&[Checkpoint, End(Completed)], (Some(CloseCause::Failed), 0, 1));
    for (message, expected) in [(None, "another code"), (Some("done"), "; last message: done")] {
        let mut record = plain_record(0);
        begin_attempt(&mut record, 0);
        end_attempt(&mut record, Completed, message.map(str::to_owned), &LIMITS);
        let message = record.status.message.unwrap();
        assert!(message.contains("exited with code 0 without"), "{message}");
        assert!(message.ends_with(expected), "{message}");
        assert_eq!(record.status.phase, Phase::Failed);
    }
}

#[test]
fn two_restarts_mean_three_runs() {
    check(&[End(UserError)], (None, 1, 1));
    check(&[End(UserError); 2], (None, 2, 2));
    check(&[End(UserError); 3], (Some(CloseCause::Failed), 3, 3));
    check(&[End(UserError); 4], (Some(CloseCause::Failed), 3, 3));
    check(&[Checkpoint, End(UserError), End(UserError), End(UserError)], {
        (Some(CloseCause::Failed), 3, 3)
    });
}

#[test]
fn preemptions_are_not_counted() {
    check(&[End(Preempted); 20], (None, 0, 20));
    check(&[End(UserError), End(Preempted), End(UserError)], (None, 2, 3));
}

#[test]
fn invalid_hyperparameters_close_at_once() {
    check(&[End(InvalidHyperparameters)], (Some(CloseCause::InvalidHyperparameters), 0, 1));
}

#[test]
fn a_checkpoint_resets_infrastructure_failures() {
    check(&[End(Infrastructure); 2], (None, 0, 2));
    check(&[End(Infrastructure); 3], (Some(CloseCause::Failed), 0, 3));
    let lost = End(Infrastructure);
    check(&[Checkpoint, lost, lost, lost], (None, 0, 3));
    check(&[Checkpoint, lost, lost, lost, lost], (Some(CloseCause::Failed), 0, 4));
    check(&[lost, lost, Checkpoint, lost, lost, lost], (None, 0, 5));
    check(&[lost, lost, End(UserError), lost], (Some(CloseCause::Failed), 1, 4));
}

#[test]
fn lost_runners_are_not_counted() {
    check(&[End(RunnerLost); 20], (None, 0, 20));
    let mixed = [End(Infrastructure), End(RunnerLost), End(RunnerLost), End(Infrastructure)];
    check(&mixed, (None, 0, 4));
}

#[test]
fn outages_before_training_are_not_counted() {
    let limits = RestartLimits { has_trained: true, ..LIMITS };
    let mut record = plain_record(0);
    for number in 0..50 {
        begin_attempt(&mut record, number);
        end_attempt(&mut record, Infrastructure, Some("no bucket".to_owned()), &limits);
        let last = record.status.attempts.last().unwrap();
        assert_eq!(last.end, Some(AttemptEnd::NotStarted));
        assert_eq!(last.message.as_deref(), Some("no bucket"));
    }
    assert_eq!(closed(&record), None);
    assert!(!has_trained(&record));
    for number in 50..53 {
        assert_eq!(closed(&record), None);
        begin_attempt(&mut record, number);
        let (resumed_from, refused) = (None, BTreeMap::new());
        let started = ReportEvent::Started { resumed_from, batches_total: 9, refused };
        record_report(&mut record, &report(number, 0, started), &LOSS);
        assert!(has_trained(&record));
        end_attempt(&mut record, Infrastructure, None, &limits);
    }
    assert_eq!(closed(&record), Some(CloseCause::Failed));
    let message = record.status.message.unwrap();
    assert!(message.starts_with("lost 3 attempts without a new checkpoint"), "{message}");
}

/// The round of the copy must not wait if the checkpoint of its source is lost.
#[test]
fn copies_do_not_wait_for_a_lost_source() {
    let limits = RestartLimits { has_trained: true, ..LIMITS };
    let mut record = plain_record(0);
    record.spec.source = Some(TrialSource {
        trial: 1,
        units: 9,
        checkpoint: Some("000000000009-0".to_owned()),
        manifest_sha256: None,
    });
    for number in 0..3 {
        assert_eq!(closed(&record), None);
        begin_attempt(&mut record, number);
        end_attempt(&mut record, Infrastructure, Some("missing".to_owned()), &limits);
    }
    assert_eq!(closed(&record), Some(CloseCause::Failed));
}

#[test]
fn limits_allow_ten_lost_attempts() {
    let mut record = plain_record(0);
    for number in 0..10 {
        assert_eq!(closed(&record), None, "before attempt {number}");
        begin_attempt(&mut record, number);
        let message = Some("no route to the store".to_owned());
        end_attempt(
            &mut record,
            Infrastructure,
            message,
            &RestartLimits::new(5, BackOffLimits::CLUSTER, false),
        );
    }
    assert_eq!(closed(&record), Some(CloseCause::Failed));
    let message = "lost 10 attempts without a new checkpoint; last failure: no route to the store";
    assert_eq!(record.status.message.as_deref(), Some(message));
}

#[test]
fn closed_trials_never_change() {
    let mut record = plain_record(0);
    begin_attempt(&mut record, 0);
    close(&mut record, CloseCause::Cancelled, None);
    let facts = record.status.facts.clone();
    end_attempt(&mut record, InvalidHyperparameters, None, &LIMITS);
    assert_eq!(record.status.attempts[0].end, Some(InvalidHyperparameters));
    let ended = record.clone();
    close(&mut record, CloseCause::Failed, None);
    begin_attempt(&mut record, 1);
    end_attempt(&mut record, UserError, None, &LIMITS);
    assert_eq!(record_report(&mut record, &report(0, 1, validated("1", None)), &LOSS), {
        ReportEffect::Fenced
    });
    assert_eq!(record, ended);
    assert_eq!((record.status.facts, record.status.phase), (facts, Phase::Cancelled));
    assert_eq!(next(&ended, TargetState::Run), NextStep::Done);
}

#[test]
fn attempts_begin_once_and_in_order() {
    let mut record = plain_record(0);
    begin_attempt(&mut record, 0);
    begin_attempt(&mut record, 0);
    assert_eq!(next(&record, TargetState::Run), NextStep::Running);
    end_attempt(&mut record, Preempted, None, &LIMITS);
    end_attempt(&mut record, UserError, None, &LIMITS);
    begin_attempt(&mut record, 0);
    assert_eq!((record.status.attempts.len(), record.status.restarts), (1, 0));
    let expected = NextStep::Start { attempt: 1, resume_from: Vec::new(), units: 9 };
    assert_eq!(next(&record, TargetState::Run), expected);
}

/// Checks the directive of a live attempt, and the next step after that attempt was preempted.
fn check_target(has_result: bool, target: TargetState, expected: (Directive, NextStep)) {
    let mut record = plain_record(0);
    begin_attempt(&mut record, 0);
    if has_result {
        record_report(&mut record, &report(0, 7, validated("0.5", Some(9))), &LOSS);
    }
    let live_directive = directive(&record, 0, target);
    assert_eq!(directive(&record, 1, target), Directive::Fenced);
    end_attempt(&mut record, Preempted, None, &LIMITS);
    assert_eq!(directive(&record, 0, target), Directive::Fenced, "the attempt has ended");
    assert_eq!((live_directive, next(&record, target)), expected, "{has_result} {target:?}");
}

#[test]
fn desired_state_determines_directive_and_next_step() {
    let start = NextStep::Start { attempt: 1, resume_from: Vec::new(), units: 9 };
    let close = |cause| NextStep::Close { cause };
    check_target(false, TargetState::Run, (Directive::Continue { units: 9 }, start));
    check_target(true, TargetState::Run, (Directive::Wait, NextStep::Idle));
    check_target(false, TargetState::Stop, (Directive::Preempt, close(CloseCause::Cancelled)));
    check_target(true, TargetState::Stop, (Directive::Stop, close(CloseCause::Completed)));
    check_target(false, TargetState::Pause, (Directive::Preempt, NextStep::Idle));
    check_target(true, TargetState::Pause, (Directive::Preempt, NextStep::Idle));
}

#[test]
fn a_longer_grant_resumes_a_waiting_trial() {
    let mut record = plain_record(0);
    record.spec.units = 3;
    begin_attempt(&mut record, 0);
    record_report(&mut record, &report(0, 7, validated("0.5", Some(3))), &LOSS);
    assert_eq!(directive(&record, 0, TargetState::Run), Directive::Wait);
    record.spec.grants.push(Grant { fact: Some(0), units: 9, ..Grant::default() });
    assert_eq!(directive(&record, 0, TargetState::Run), Directive::Continue { units: 9 });
    end_attempt(&mut record, Completed, None, &LIMITS);
    assert_eq!(
        closed(&record),
        Some(CloseCause::StoppedEarly),
        "the program exited before length 9"
    );
}

#[test]
fn the_runners_message_replaces_the_programs() {
    for (message, expected) in [(None, "out of memory"), (Some("killed"), "killed")] {
        let mut record = plain_record(0);
        begin_attempt(&mut record, 0);
        let exiting = ReportEvent::Exiting { code: 1, message: Some("out of memory".to_owned()) };
        record_report(&mut record, &report(0, 1, exiting), &LOSS);
        end_attempt(&mut record, UserError, message.map(str::to_owned), &LIMITS);
        assert_eq!(record.status.attempts[0].message.as_deref(), Some(expected));
    }
}

#[test]
fn only_the_latest_attempts_keep_their_messages() {
    let mut record = plain_record(0);
    for number in 0..40 {
        begin_attempt(&mut record, number);
        end_attempt(&mut record, Preempted, Some("preempted".to_owned()), &LIMITS);
    }
    let with_message = record.status.attempts.iter().filter(|attempt| attempt.message.is_some());
    let numbers: Vec<_> = with_message.map(|attempt| attempt.number).collect();
    assert_eq!(numbers, (24..40).collect::<Vec<_>>());
}

#[test]
fn facts_keep_the_time_of_their_record() {
    let time = |seconds| Timestamp::default().plus(seconds);
    let mut record = plain_record(0);
    assert_eq!(last_result_at(&record), time(0));
    begin_attempt(&mut record, 0);
    record_report(&mut record, &report(0, 9, validated("0.5", Some(9))), &LOSS);
    stamp_facts(&mut record, 0, time(5));
    close(&mut record, CloseCause::Completed, None);
    stamp_facts(&mut record, 1, time(7));
    // A time that is recorded stays.
    stamp_facts(&mut record, 0, time(9));
    let at = record.status.facts.iter().map(|fact| match fact {
        Fact::Result(result) => result.at,
        Fact::Closed(closed) => closed.at,
        Fact::Reopened(reopened) => reopened.at,
    });
    assert_eq!(at.collect::<Vec<_>>(), [Some(time(5)), Some(time(7))]);
    assert_eq!(last_result_at(&record), time(5));
}
