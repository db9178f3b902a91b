//! Tests of reports: results, metrics, checkpoints, and reports of other attempts.

use std::collections::BTreeMap;

use stoker_api::experiment::Objective;

use super::*;

#[test]
fn the_first_result_at_a_length_wins() {
    let mut record = plain_record(0);
    begin_attempt(&mut record, 0);
    let mut send = |batches, loss: &str, units| {
        record_report(&mut record, &report(0, batches, validated(loss, units)), &LOSS)
    };
    assert_eq!(send(10, "0.5", None), ReportEffect::New);
    assert_eq!(send(10, "0.5", None), ReportEffect::Repeat);
    assert_eq!(send(10, "0.5", Some(10)), ReportEffect::Repeat, "never granted");
    assert_eq!(send(20, "0.4", Some(9)), ReportEffect::New);
    assert_eq!(send(20, "0.4", Some(9)), ReportEffect::Repeat);
    assert_eq!(send(20, "0.3", Some(9)), ReportEffect::New, "the latest metrics still change");
    assert_eq!(send(10, "0.5", None), ReportEffect::Repeat, "a late report reverts nothing");
    let expected = Fact::Result(ResultFact {
        units: 9,
        metric: "0.4".to_owned(),
        values: vec![],
        checkpoint: None,
        at: None,
    });
    assert_eq!(record.status.facts, [expected]);
    assert_eq!((record.status.batches, record.status.metrics["loss"].as_str()), (20, "0.3"));
}

#[test]
fn results_exist_at_granted_lengths_only() {
    let mut record = plain_record(0);
    record.spec.grants.push(Grant { order: 1, fact: None, units: 20, steps: None });
    begin_attempt(&mut record, 0);
    for units in [15, 20, 30] {
        record_report(&mut record, &report(0, units, validated("0.5", Some(units))), &LOSS);
    }
    let lengths = [9, 15, 20, 30].map(|units| result_at(&record, units).is_some());
    assert_eq!(lengths, [false, false, true, false]);
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
            ReportEffect::New => assert!(is_accepted, "{name}"),
            ReportEffect::Refused { why } => {
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
    assert_eq!(send(&mut record, 0), ReportEffect::Fenced, "not begun");
    begin_attempt(&mut record, 0);
    end_attempt(&mut record, Preempted, None, &LIMITS);
    assert_eq!(send(&mut record, 0), ReportEffect::Fenced, "over");
    begin_attempt(&mut record, 1);
    assert_eq!(send(&mut record, 0), ReportEffect::Fenced, "old");
    assert_eq!(record.status.facts, []);
    assert_eq!(send(&mut record, 1), ReportEffect::New);
}

#[test]
fn checkpoints_are_listed_once_and_offered_newest_first() {
    let mut record = plain_record(0);
    begin_attempt(&mut record, 0);
    let send = |record: &mut TrialRecord, attempt, batches, name: &str| {
        record_report(record, &report(attempt, batches, checkpointed(name, None)), &LOSS)
    };
    assert_eq!(send(&mut record, 0, 20, "000000000020-0"), ReportEffect::New);
    assert_eq!(send(&mut record, 0, 20, "000000000020-0"), ReportEffect::Repeat);
    end_attempt(&mut record, UserError, None, &LIMITS);
    begin_attempt(&mut record, 1);
    // The checkpoint at 20 was corrupt, so the attempt started from scratch. Then a report arrived
    // late.
    send(&mut record, 1, 10, "000000000010-1");
    send(&mut record, 1, 15, "000000000015-0");
    end_attempt(&mut record, UserError, None, &LIMITS);
    let NextStep::Start { resume_from, .. } = next(&record, TargetState::Run) else {
        panic!("no start")
    };
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
    assert_eq!(record_report(&mut record, &first, &LOSS), ReportEffect::New);
    let progress = ReportEvent::Progress { batches_total: 100, activity: None };
    assert_eq!(record_report(&mut record, &report(0, 50, progress), &LOSS), ReportEffect::New);
    assert_eq!(record.status.activity.as_deref(), Some("warming up"));
    let long = activity(&"ä".repeat(300));
    assert_eq!(record_report(&mut record, &report(0, 50, long), &LOSS), ReportEffect::New);
    assert_eq!(record.status.activity.as_ref().map(|text| text.chars().count()), Some(200));
    end_attempt(&mut record, UserError, Some("division by zero".to_owned()), &LIMITS);
    begin_attempt(&mut record, 1);
    let started = ReportEvent::Started {
        resumed_from: Some("000000000040-0".to_owned()),
        batches_total: 100,
        refused: BTreeMap::from([("000000000050-0".to_owned(), "wrong hash".to_owned())]),
    };
    assert_eq!(record_report(&mut record, &report(1, 40, started), &LOSS), ReportEffect::New);
    assert_eq!((record.status.batches, record.status.batches_total), (40, 100));
    assert_eq!(record.status.activity, None);
    let [first, second] = record.status.attempts.as_slice() else { panic!("two attempts") };
    assert_eq!(first.message.as_deref(), Some("division by zero"));
    assert_eq!(second.resumed_from.as_deref(), Some("000000000040-0"));
    let message = "skipped checkpoints: 000000000050-0: wrong hash";
    assert_eq!(second.message.as_deref(), Some(message));
}

#[test]
fn checkpoints_stay_refused_until_restored() {
    let (first, second) = ("000000000010-0", "000000000020-0");
    let mut record = plain_record(0);
    begin_attempt(&mut record, 0);
    for (batches, name) in [(10, first), (20, second)] {
        record_report(&mut record, &report(0, batches, checkpointed(name, Some("0.5"))), &LOSS);
    }
    let mut restart = |resumed_from: Option<&str>, refused: &[&str], expected: [bool; 2]| {
        end_attempt(&mut record, Preempted, None, &LIMITS);
        let attempt = record.status.attempts.len() as u32;
        begin_attempt(&mut record, attempt);
        let before = record.status.checkpoints.len();
        let started = ReportEvent::Started {
            resumed_from: resumed_from.map(str::to_owned),
            batches_total: 100,
            refused: refused.iter().map(|name| ((*name).to_owned(), "x".to_owned())).collect(),
        };
        record_report(&mut record, &report(attempt, 10, started), &LOSS);
        let marks = record.status.checkpoints.iter().map(|checkpoint| checkpoint.refused);
        assert_eq!(marks.collect::<Vec<_>>(), expected, "{resumed_from:?} {refused:?}");
        assert_eq!(record.status.checkpoints.len(), before, "the entries stay");
        // The next attempt tries all of them again.
        assert_eq!(resume_from(&record).len(), before);
        assert_eq!(record.status.best_metric.as_deref(), Some("0.5"));
    };
    restart(Some(first), &[second], [false, true]);
    restart(Some(first), &[second], [false, true]);
    restart(None, &[first, second], [true, true]);
    restart(Some(first), &[second], [false, true]);
    // For example, the last attempts ran an older trainer.
    restart(Some(second), &[], [false, false]);
    // A copy restored the checkpoint of its source, whose name is the same.
    restart(Some(first), &[first, second], [true, true]);
    restart(None, &["000000000030-0"], [true, true]);
}

#[test]
fn copies_do_not_start_from_refused_checkpoints() {
    let searched = SearchedMetric { is_copied: true, ..LOSS };
    let mut record = plain_record(0);
    begin_attempt(&mut record, 0);
    for batches in [4, 9] {
        let name = format!("{batches:012}-0");
        record_report(&mut record, &report(0, batches, checkpointed(&name, None)), &searched);
    }
    record.status.checkpoints[1].refused = true;
    record_report(&mut record, &report(0, 9, validated("0.5", Some(9))), &searched);
    let checkpoint = result_at(&record, 9).and_then(|result| result.checkpoint.clone());
    assert_eq!(checkpoint.unwrap().name, "000000000004-0");
}

#[test]
fn results_contain_the_values_of_all_objectives() {
    let objective = |name: &str| Objective { metric: name.to_owned(), smaller_is_better: true };
    let others = ["val_error", "seconds", "size"].map(objective);
    let searched = SearchedMetric { others: &others, ..LOSS };
    let mut record = plain_record(0);
    begin_attempt(&mut record, 0);
    let metrics = [("loss", "0.5"), ("validation_error", "0.25"), ("seconds", "fast")];
    let metrics = metrics.map(|(name, value)| (name.to_owned(), value.to_owned())).into();
    let event = ReportEvent::Validated { metrics, granted_units: Some(9) };
    record_report(&mut record, &report(0, 9, event), &searched);
    let result = result_at(&record, 9).unwrap();
    assert_eq!(
        (result.metric.as_str(), &result.values[..]),
        ("0.5", &["0.25", "NaN", "NaN"].map(str::to_owned)[..])
    );
}
