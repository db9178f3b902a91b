//! Tests of a trial's record: attempts and their ends, reports, directives.

use std::collections::BTreeMap;

use stoker_api::contract::ReportEvent;
use stoker_api::trial::Grant;

use super::*;
use crate::fixture::{LOSS, checkpointed, plain_record, report, validated};

const LIMITS: Limits =
    Limits { max_restarts: 2, infrastructure_attempts_max: 3, back_off: BackOffLimits::CLUSTER };

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
        if let Next::Start { attempt, .. } = next(&record, Wanted::Run) {
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
fn limits_allow_ten_lost_attempts() {
    let mut record = plain_record(0);
    for number in 0..10 {
        assert_eq!(closed(&record), None, "before attempt {number}");
        begin_attempt(&mut record, number);
        let message = Some("no route to the store".to_owned());
        end_attempt(&mut record, Infrastructure, message, &Limits::new(5, BackOffLimits::CLUSTER));
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
        Recorded::Fenced
    });
    assert_eq!(record, ended);
    assert_eq!((record.status.facts, record.status.phase), (facts, Phase::Cancelled));
    assert_eq!(next(&ended, Wanted::Run), Next::Done);
}

#[test]
fn attempts_begin_once_and_in_order() {
    let mut record = plain_record(0);
    begin_attempt(&mut record, 0);
    begin_attempt(&mut record, 0);
    assert_eq!(next(&record, Wanted::Run), Next::Running);
    end_attempt(&mut record, Preempted, None, &LIMITS);
    end_attempt(&mut record, UserError, None, &LIMITS);
    begin_attempt(&mut record, 0);
    assert_eq!((record.status.attempts.len(), record.status.restarts), (1, 0));
    let expected = Next::Start { attempt: 1, resume_from: Vec::new(), units: 9 };
    assert_eq!(next(&record, Wanted::Run), expected);
}

/// Checks the directive of a live attempt, and the next step after that attempt was preempted.
fn check_wanted(has_result: bool, wanted: Wanted, expected: (Directive, Next)) {
    let mut record = plain_record(0);
    begin_attempt(&mut record, 0);
    if has_result {
        record_report(&mut record, &report(0, 7, validated("0.5", Some(9))), &LOSS);
    }
    let live_directive = directive(&record, 0, wanted);
    assert_eq!(directive(&record, 1, wanted), Directive::Fenced);
    end_attempt(&mut record, Preempted, None, &LIMITS);
    assert_eq!(directive(&record, 0, wanted), Directive::Fenced, "the attempt has ended");
    assert_eq!((live_directive, next(&record, wanted)), expected, "{has_result} {wanted:?}");
}

#[test]
fn desired_state_determines_directive_and_next_step() {
    let start = Next::Start { attempt: 1, resume_from: Vec::new(), units: 9 };
    let close = |cause| Next::Close { cause };
    check_wanted(false, Wanted::Run, (Directive::Continue { units: 9 }, start));
    check_wanted(true, Wanted::Run, (Directive::Wait, Next::Idle));
    check_wanted(false, Wanted::Stop, (Directive::Preempt, close(CloseCause::Cancelled)));
    check_wanted(true, Wanted::Stop, (Directive::Stop, close(CloseCause::Completed)));
    check_wanted(false, Wanted::Pause, (Directive::Preempt, Next::Idle));
    check_wanted(true, Wanted::Pause, (Directive::Preempt, Next::Idle));
}

#[test]
fn a_longer_grant_resumes_a_waiting_trial() {
    let mut record = plain_record(0);
    record.spec.units = 3;
    begin_attempt(&mut record, 0);
    record_report(&mut record, &report(0, 7, validated("0.5", Some(3))), &LOSS);
    assert_eq!(directive(&record, 0, Wanted::Run), Directive::Wait);
    record.spec.grants.push(Grant { order: 0, fact: 0, units: 9 });
    assert_eq!(directive(&record, 0, Wanted::Run), Directive::Continue { units: 9 });
    end_attempt(&mut record, Completed, None, &LIMITS);
    assert_eq!(
        closed(&record),
        Some(CloseCause::StoppedEarly),
        "the program exited before length 9"
    );
}

#[test]
fn the_first_result_at_a_length_wins() {
    let mut record = plain_record(0);
    begin_attempt(&mut record, 0);
    let mut send = |batches, loss: &str, units| {
        record_report(&mut record, &report(0, batches, validated(loss, units)), &LOSS)
    };
    assert_eq!(send(10, "0.5", None), Recorded::New);
    assert_eq!(send(10, "0.5", None), Recorded::Repeat);
    assert_eq!(send(10, "0.5", Some(10)), Recorded::Repeat, "never granted");
    assert_eq!(send(20, "0.4", Some(9)), Recorded::New);
    assert_eq!(send(20, "0.4", Some(9)), Recorded::Repeat);
    assert_eq!(send(20, "0.3", Some(9)), Recorded::New, "the latest metrics still change");
    assert_eq!(send(10, "0.5", None), Recorded::Repeat, "a late report reverts nothing");
    let expected = Fact::Result(ResultFact { units: 9, metric: "0.4".to_owned() });
    assert_eq!(record.status.facts, [expected]);
    assert_eq!((record.status.batches, record.status.metrics["loss"].as_str()), (20, "0.3"));
}

#[test]
fn a_result_without_a_usable_metric_is_nan() {
    for (metric, loss) in [("accuracy", "0.5"), ("loss", "many"), ("loss", "NaN")] {
        let mut record = plain_record(0);
        begin_attempt(&mut record, 0);
        let searched = SearchedMetric { name: metric, ..LOSS };
        record_report(&mut record, &report(0, 1, validated(loss, Some(9))), &searched);
        let result = result_at(&record, 9).map(|result| result.metric.as_str());
        assert_eq!(result, Some("NaN"), "{metric} {loss}");
    }
}

#[test]
fn the_searched_metric_may_have_the_short_prefix() {
    let check = |name, expected: Option<&str>| {
        let names = ["loss", "validation_loss", "validation_val_x"];
        let metrics = names.map(|name| (name.to_owned(), name.to_owned())).into();
        let searched = SearchedMetric { name, ..LOSS };
        assert_eq!(searched.of(&metrics).map(String::as_str), expected, "{name}");
    };
    check("loss", Some("loss"));
    check("validation_loss", Some("validation_loss"));
    check("val_loss", Some("validation_loss"));
    check("val_accuracy", None);
    check("accuracy", None);
}

#[test]
fn best_metric_covers_all_validations() {
    let check = |smaller_is_better, losses: &[&str], expected: Option<&str>| {
        let mut record = plain_record(0);
        begin_attempt(&mut record, 0);
        for (batches, loss) in (1..).zip(losses) {
            let searched = SearchedMetric { smaller_is_better, ..LOSS };
            record_report(&mut record, &report(0, batches, validated(loss, None)), &searched);
        }
        assert_eq!(record.status.best_metric.as_deref(), expected, "{losses:?}");
    };
    check(true, &[], None);
    check(true, &["many"], None);
    check(true, &["NaN"], Some("NaN"));
    check(true, &["NaN", "0.5", "0.25", "0.250", "1"], Some("0.25"));
    check(false, &["0.5", "2", "NaN"], Some("2"));
}

#[test]
fn checkpoint_names_must_match_their_report() {
    let check = |name: &str, is_accepted: bool| {
        let mut record = plain_record(0);
        begin_attempt(&mut record, 0);
        end_attempt(&mut record, Preempted, None, &LIMITS);
        begin_attempt(&mut record, 1);
        let before = record.clone();
        let report = report(1, 20, checkpointed(name, Some("0.5")));
        match record_report(&mut record, &report, &LOSS) {
            Recorded::New => assert!(is_accepted, "{name}"),
            Recorded::Refused { why } => {
                assert!(!is_accepted && why.contains("\"000000000020-1\""), "{name}: {why}");
                assert_eq!(record, before);
            }
            other => panic!("{name}: {other:?}"),
        }
    };
    check("000000000020-1", true);
    check("000000000020-0", true);
    check("000000000020-2", false);
    check("000000000021-1", false);
    check("20-1", false);
    check("../../x", false);
    check("", false);
}

#[test]
fn reports_of_another_attempt_are_fenced() {
    let mut record = plain_record(0);
    let send = |record: &mut TrialRecord, attempt| {
        record_report(record, &report(attempt, 1, validated("0.5", Some(9))), &LOSS)
    };
    assert_eq!(send(&mut record, 0), Recorded::Fenced, "not begun");
    begin_attempt(&mut record, 0);
    end_attempt(&mut record, Preempted, None, &LIMITS);
    assert_eq!(send(&mut record, 0), Recorded::Fenced, "over");
    begin_attempt(&mut record, 1);
    assert_eq!(send(&mut record, 0), Recorded::Fenced, "old");
    assert_eq!(record.status.facts, []);
    assert_eq!(send(&mut record, 1), Recorded::New);
}

#[test]
fn checkpoints_are_listed_once_and_offered_newest_first() {
    let mut record = plain_record(0);
    begin_attempt(&mut record, 0);
    let send = |record: &mut TrialRecord, attempt, batches, name: &str| {
        record_report(record, &report(attempt, batches, checkpointed(name, None)), &LOSS)
    };
    assert_eq!(send(&mut record, 0, 20, "000000000020-0"), Recorded::New);
    assert_eq!(send(&mut record, 0, 20, "000000000020-0"), Recorded::Repeat);
    end_attempt(&mut record, UserError, None, &LIMITS);
    begin_attempt(&mut record, 1);
    // The checkpoint at 20 was corrupt, so the attempt started from scratch. Then a report arrived
    // late.
    send(&mut record, 1, 10, "000000000010-1");
    send(&mut record, 1, 15, "000000000015-0");
    end_attempt(&mut record, UserError, None, &LIMITS);
    let Next::Start { resume_from, .. } = next(&record, Wanted::Run) else { panic!("no start") };
    let names: Vec<_> = resume_from.iter().map(|checkpoint| checkpoint.name.as_str()).collect();
    assert_eq!(names, ["000000000010-1", "000000000020-0", "000000000015-0"]);
    assert_eq!(resume_from[0].manifest_sha256, "hash of 000000000010-1");
}

#[test]
fn a_start_resets_batches_and_names_skipped_checkpoints() {
    let mut record = plain_record(0);
    begin_attempt(&mut record, 0);
    let activity =
        |text: &str| ReportEvent::Progress { batches_total: 100, activity: Some(text.into()) };
    let first = report(0, 40, activity("warming up"));
    assert_eq!(record_report(&mut record, &first, &LOSS), Recorded::New);
    let progress = ReportEvent::Progress { batches_total: 100, activity: None };
    assert_eq!(record_report(&mut record, &report(0, 50, progress), &LOSS), Recorded::New);
    assert_eq!(record.status.activity.as_deref(), Some("warming up"));
    let long = activity(&"ä".repeat(300));
    assert_eq!(record_report(&mut record, &report(0, 50, long), &LOSS), Recorded::New);
    assert_eq!(record.status.activity.as_ref().map(|text| text.chars().count()), Some(200));
    end_attempt(&mut record, UserError, Some("division by zero".to_owned()), &LIMITS);
    begin_attempt(&mut record, 1);
    let started = ReportEvent::Started {
        resumed_from: Some("000000000040-0".to_owned()),
        batches_total: 100,
        refused: BTreeMap::from([("000000000050-0".to_owned(), "wrong hash".to_owned())]),
    };
    assert_eq!(record_report(&mut record, &report(1, 40, started), &LOSS), Recorded::New);
    assert_eq!((record.status.batches, record.status.batches_total), (40, 100));
    assert_eq!(record.status.activity, None);
    let [first, second] = record.status.attempts.as_slice() else { panic!("two attempts") };
    assert_eq!(first.message.as_deref(), Some("division by zero"));
    assert_eq!(second.resumed_from.as_deref(), Some("000000000040-0"));
    let message = "skipped checkpoints: 000000000050-0: wrong hash";
    assert_eq!(second.message.as_deref(), Some(message));
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
