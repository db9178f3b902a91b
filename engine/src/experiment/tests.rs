//! Tests of the summary: counts, phase, progress, best trial.

use std::collections::BTreeMap;

use stoker_api::experiment::{BestTrial, ExperimentStatus, Objective, Phase};
use stoker_api::time::Timestamp;
use stoker_api::trial::{
    Attempt, AttemptEnd, CloseCause, ClosedFact, Fact, Grant, ReopenedFact, ResultFact,
};
use stoker_api::validate::Method;

use super::*;
use crate::fixture::{LOSS, checkpointed, config, plain_record, report, validated};
use crate::search::SearchConfig;
use crate::trial::{BackOffLimits, RestartLimits, begin_attempt, end_attempt, record_report};

const RANDOM: Method = Method::Random { max_trials: 4, max_concurrent: 2 };

fn result(units: u64, metric: &str) -> Fact {
    Fact::Result(ResultFact {
        units,
        metric: metric.to_owned(),
        values: vec![],
        checkpoint: None,
        at: None,
    })
}

fn end(cause: CloseCause) -> Fact {
    Fact::Closed(ClosedFact { cause, at: None })
}

/// Returns running trials with these facts, by index.
fn records(facts: &[&[Fact]]) -> Vec<TrialRecord> {
    let record = |(index, facts): (u32, &&[Fact])| {
        let mut record = plain_record(index);
        record.status.phase = Phase::Running;
        record.status.facts = facts.to_vec();
        record
    };
    (0..).zip(facts).map(record).collect()
}

/// Returns the search after all facts of a record by an earlier version.
fn ledger(config: &SearchConfig, trials: &[TrialRecord], created: u32) -> Ledger {
    let by_index = trials.iter().map(|trial| (trial.spec.index, trial)).collect();
    let record = Record { log: &[], trials: &by_index, trials_created: created };
    let (mut ledger, _) = Ledger::rebuild(config, record).unwrap();
    ledger.begin("test", vec![], Timestamp(0));
    for fact in ledger.pending(trials) {
        ledger.advance(&fact);
    }
    ledger
}

fn status(
    config: &SearchConfig,
    trials: &[TrialRecord],
    created: u32,
    is_cancelled: bool,
) -> ExperimentStatus {
    let ledger = ledger(config, trials, created);
    let summary = Summary::new(config, trials);
    summary.status(&ledger, is_cancelled, "mnist", |index| {
        trials.iter().find(|trial| trial.spec.index == index)
    })
}

use CloseCause::{Cancelled, Completed, Failed};

#[test]
fn phase_follows_from_all_trials() {
    let check = |first: CloseCause, last: Option<CloseCause>, is_cancelled, expected: Phase| {
        let (first, last): (Vec<Fact>, Vec<Fact>) =
            (vec![end(first)], last.into_iter().map(end).collect());
        let trials = records(&[&first, &first, &first, &last]);
        let status = status(&config(RANDOM), &trials, 4, is_cancelled);
        assert_eq!(status.phase, expected, "{first:?} {last:?}");
        let num_closed = 3 + last.len() as u32;
        assert_eq!((status.trials_closed, status.trials_created), (num_closed, 4));
        assert!(!expected.is_terminal() || status.progress_percent == 100, "{status:?}");
        let message = match expected {
            Phase::Completed => Some("no trial has a result"),
            Phase::Failed => Some("no trial completed"),
            _ => None,
        };
        assert_eq!(status.message.as_deref(), message, "{first:?} {last:?}");
    };
    check(Completed, None, false, Phase::Running);
    check(Completed, Some(Completed), false, Phase::Completed);
    check(Failed, Some(Completed), false, Phase::Completed);
    check(Failed, Some(Failed), false, Phase::Failed);
    check(Cancelled, Some(Cancelled), false, Phase::Cancelled);
    check(Completed, Some(Cancelled), false, Phase::Completed);
    check(Completed, Some(Cancelled), true, Phase::Cancelled);
    check(Completed, Some(Completed), true, Phase::Completed);
    check(Completed, None, true, Phase::Running);
}

#[test]
fn search_that_was_cancelled_before_its_end_is_cancelled() {
    let trials = records(&[&[end(Completed)], &[end(Completed)]]);
    assert_eq!(status(&config(RANDOM), &trials, 2, true).phase, Phase::Cancelled);
    assert_eq!(status(&config(RANDOM), &[], 0, true).phase, Phase::Cancelled);
    // Without the request, the search creates the other two trials.
    assert_eq!(status(&config(RANDOM), &trials, 2, false).phase, Phase::Pending);
}

/// A trial that was reopened or deleted no longer counts by its earlier end.
#[test]
fn only_latest_ends_determine_the_phase() {
    let check = |before: CloseCause, after: CloseCause, is_cancelled, expected: Phase| {
        let (first, last) = ([end(before)], [end(after)]);
        let trials = records(&[&last, &last, &last, &last]);
        let config = config(RANDOM);
        let mut summary = Summary::new(&config, &records(&[&first]));
        trials.iter().for_each(|trial| summary.update(&config, trial));
        let ledger = ledger(&config, &trials, 4);
        let status = summary.status(&ledger, is_cancelled, "mnist", |_| None);
        assert_eq!(status.phase, expected, "{before:?} {after:?}");
    };
    check(Completed, Failed, false, Phase::Failed);
    check(Cancelled, Completed, true, Phase::Completed);
}

#[test]
fn rejection_of_all_hyperparameters_is_explained() {
    // The first trial and its 100 replacements.
    let invalid = [end(CloseCause::InvalidHyperparameters)];
    let trials = records(&[&invalid[..]; 101]);
    let status = status(&config(Method::Single), &trials, 101, false);
    let expected = "the program rejected the hyperparameters of 101 of 101 trials, so no more were \
                    created; change spec.hyperparameters or the program's checks";
    assert_eq!((status.phase, status.message.as_deref()), (Phase::Failed, Some(expected)));
}

/// Each trial has one result, or none. A trial that stopped early has validations instead, or after
/// the result of a rung.
fn check_best(smaller: bool, results: &[&str], expected: Option<(u32, &str)>) {
    let mut trials = Vec::new();
    for (index, metric) in (0..).zip(results) {
        let mut record = plain_record(index);
        match metric.split_once("stopped ") {
            Some((rung, metric)) => {
                if let Some(metric) = rung.strip_suffix(' ') {
                    record.status.facts.push(result(3, metric));
                }
                begin_attempt(&mut record, 0);
                for (batches, metric) in (1..).zip([metric, "1e9"]) {
                    let report = report(0, batches, validated(metric, None));
                    record_report(&mut record, &report, &LOSS);
                }
                let limits = RestartLimits::new(0, BackOffLimits::CLUSTER, false);
                end_attempt(&mut record, AttemptEnd::Completed, None, &limits);
            }
            None if metric.is_empty() => {}
            None => record.status.facts.push(result(9, metric)),
        }
        trials.push(record);
    }
    let config = SearchConfig { smaller_is_better: smaller, ..config(RANDOM) };
    let best = Summary::new(&config, &trials).best(|_| None);
    let found = best.as_ref().map(|best| (best.index, best.metric.as_str()));
    assert_eq!(found, expected, "{results:?}");
}

#[test]
fn best_trial_has_best_metric_then_lowest_index() {
    check_best(true, &["", ""], None);
    check_best(true, &["0.5", "0.25", "0.25"], Some((1, "0.25")));
    check_best(false, &["0.5", "0.25", "10"], Some((2, "10")));
    check_best(true, &["NaN", "inf"], Some((1, "inf")));
    check_best(false, &["NaN", "-inf"], Some((1, "-inf")));
    check_best(true, &["", "NaN", "NaN"], Some((1, "NaN")));
    check_best(true, &["0.5", "stopped 0.4"], Some((1, "0.4")));
    check_best(true, &["0.5", "0.6 stopped 0.4"], Some((1, "0.4")));
    check_best(true, &["0.5", "0.3 stopped 0.4"], Some((1, "0.3")));
    check_best(true, &["0.5", "NaN stopped 0.4"], Some((1, "0.4")));
    check_best(false, &["0.5", "0.25 stopped 0.75"], Some((1, "0.75")));
}

#[test]
fn early_stopped_trial_can_be_the_best() {
    let mut record = plain_record(0);
    begin_attempt(&mut record, 0);
    for (batches, loss) in [(1, "0.5"), (2, "0.25"), (3, "0.75")] {
        record_report(&mut record, &report(0, batches, validated(loss, None)), &LOSS);
    }
    let saved = checkpointed("000000000002-0", Some("0.25"));
    record_report(&mut record, &report(0, 2, saved), &LOSS);
    let limits = RestartLimits::new(0, BackOffLimits::CLUSTER, false);
    end_attempt(&mut record, AttemptEnd::Completed, None, &limits);
    let check = |record: &TrialRecord, checkpoint: Option<&str>| {
        let status = status(&config(Method::Single), std::slice::from_ref(record), 1, false);
        assert_eq!(status.phase, Phase::Completed);
        let checkpoint = checkpoint.map(str::to_owned);
        let best = BestTrial { index: 0, metric: "0.25".to_owned(), checkpoint };
        assert_eq!((status.best, status.message), (Some(best), None));
    };
    check(&record, Some("000000000002-0"));
    record.status.checkpoints.clear();
    check(&record, None);
}

#[test]
fn experiment_whose_only_trial_never_validated_has_failed() {
    let mut record = plain_record(0);
    begin_attempt(&mut record, 0);
    let limits = RestartLimits::new(0, BackOffLimits::CLUSTER, false);
    end_attempt(&mut record, AttemptEnd::Completed, None, &limits);
    let status = status(&config(Method::Single), &[record], 1, false);
    let message = "no trial completed".to_owned();
    assert_eq!((status.phase, status.best, status.message), (Phase::Failed, None, Some(message)));
}

#[test]
fn best_trial_names_the_newest_checkpoint_with_its_metric() {
    let mut record = plain_record(0);
    begin_attempt(&mut record, 0);
    for (batches, metric) in [(1, Some("0.5")), (2, Some("0.50")), (3, Some("0.7")), (4, None)] {
        let event = checkpointed(&format!("{batches:012}-0"), metric);
        record_report(&mut record, &report(0, batches, event), &LOSS);
    }
    for (metric, expected) in [("0.5", Some("000000000002-0")), ("0.6", None)] {
        record.status.facts = vec![result(9, metric)];
        let summary = Summary::new(&config(RANDOM), std::slice::from_ref(&record));
        let best = summary.best(|_| Some(&record));
        assert_eq!(best.unwrap().checkpoint.as_deref(), expected, "{metric}");
    }
    record.status.facts = vec![result(9, "0.5")];
    for expected in [Some("000000000001-0"), None] {
        // Checkpoint 2 is refused, then also checkpoint 1.
        let newest = record.status.checkpoints.iter_mut().rev().skip(2);
        newest.filter(|checkpoint| !checkpoint.refused).take(1).for_each(|one| one.refused = true);
        let summary = Summary::new(&config(RANDOM), std::slice::from_ref(&record));
        let best = summary.best(|_| Some(&record));
        assert_eq!(best.unwrap().checkpoint.as_deref(), expected);
    }
}

#[test]
fn progress_counts_ended_and_partly_trained_trials() {
    let mut trials = records(&[&[end(Failed)], &[], &[]]);
    trials[1].status.batches = 50;
    trials[1].status.batches_total = 100;
    assert_eq!(status(&config(RANDOM), &trials, 3, false).progress_percent, 37);
    trials[1].status.facts.push(result(3, "0.5"));
    trials[1].status.batches = 0;
    assert_eq!(status(&config(RANDOM), &trials, 3, false).progress_percent, 33);
    // The failed trial was deleted, and still counts as one of four.
    assert_eq!(status(&config(RANDOM), &trials[1..], 3, false).progress_percent, 33);
}

#[test]
fn promotion_alone_is_no_progress() {
    let config = config(RANDOM);
    let mut trials = records(&[&[]]);
    let ledger = ledger(&config, &trials, 1);
    let trial = &mut trials[0];
    (trial.spec.units, trial.status.facts) = (3, vec![result(3, "0.5")]);
    (trial.status.batches, trial.status.batches_total) = (300, 300);
    // A third of one of four trials.
    for _ in 0..2 {
        let status = Summary::new(&config, &trials).status(&ledger, false, "mnist", |_| None);
        assert_eq!(status.progress_percent, 8);
        trials[0].spec.grants.push(Grant { units: 9, ..Grant::default() });
    }
}

#[test]
fn summary_that_is_updated_equals_a_new_one() {
    let config = config(RANDOM);
    let before = records(&[&[], &[result(9, "0.5")], &[end(Failed)]]);
    let after = records(&[&[result(9, "0.5")], &[result(9, "0.5"), end(Completed)]]);
    let mut summary = Summary::new(&config, &before);
    after.iter().for_each(|trial| summary.update(&config, trial));
    summary.remove(2);
    let mut fresh = Summary::new(&config, &after);
    // A count that has fallen to zero stays in the map.
    fresh.update(&config, &before[2]);
    fresh.remove(2);
    assert_eq!(summary, fresh);
}

/// Trials have an ended attempt from 0 to 5 and a live one since 10. All sums are of the latest
/// records.
#[test]
fn updated_sums_forget_earlier_values() {
    let config = config(RANDOM);
    let attempt = |started_at, ended_at: Option<i64>| Attempt {
        started_at: Some(Timestamp(started_at)),
        ended_at: ended_at.map(Timestamp),
        end: ended_at.map(|_| AttemptEnd::Preempted),
        ..Attempt::default()
    };
    let mut trials = records(&[&[], &[result(3, "0.5")], &[result(9, "0.5"), end(Failed)]]);
    for trial in &mut trials {
        trial.status.attempts = vec![attempt(0, Some(5)), attempt(10, None)];
    }
    let mut summary = Summary::new(&config, &trials);
    let sums = |summary: &Summary| {
        let seconds = summary.attempt_seconds(Timestamp(30));
        (summary.units(), summary.num_open(), summary.num_attempts(), seconds)
    };
    assert_eq!(sums(&summary), (12, 2, 3, 3 * (5 + 20)));
    // The first trial has a result, the second one pauses, and the third one continues.
    trials[0].status.facts.push(result(3, "0.5"));
    trials[1].status.attempts[1] = attempt(10, Some(12));
    trials[2].status.facts.push(Fact::Reopened(ReopenedFact { number: 1, attempt: 2, at: None }));
    trials.iter().for_each(|trial| summary.update(&config, trial));
    assert_eq!(sums(&summary), (15, 3, 2, 3 * 5 + 20 + 2 + 20));
    summary.remove(1);
    assert_eq!(sums(&summary), (12, 2, 2, 2 * (5 + 20)));
}

/// Trials by the values of two objectives, of which larger is better in the second one.
#[test]
fn pareto_front_follows_results_and_deletions() {
    let accuracy = Objective { metric: "accuracy".to_owned(), smaller_is_better: false };
    let config = SearchConfig { other_objectives: vec![accuracy], ..config(RANDOM) };
    let record = |index: u32, results: &[(u64, &str, &str)]| {
        let mut record = plain_record(index);
        for (units, metric, other) in results {
            let (metric, values) = ((*metric).to_owned(), vec![(*other).to_owned()]);
            let result = ResultFact { units: *units, metric, values, checkpoint: None, at: None };
            record.status.facts.push(Fact::Result(result));
        }
        record
    };
    let mut summary = Summary::default();
    let (ledger, _) =
        Ledger::rebuild(&config, Record { log: &[], trials: &BTreeMap::new(), trials_created: 0 })
            .unwrap();
    let mut check = |change: Result<TrialRecord, u32>, expected: &[(u32, [&str; 2])]| {
        match change {
            Ok(record) => summary.update(&config, &record),
            Err(deleted) => summary.remove(deleted),
        }
        let status = summary.status(&ledger, false, "mnist", |_| None);
        let front: Vec<_> =
            status.pareto.iter().map(|trial| (trial.index, &trial.values[..])).collect();
        let expected: Vec<_> = expected.iter().map(|(index, values)| (*index, *values)).collect();
        assert_eq!(format!("{front:?}"), format!("{expected:?}"));
    };
    check(Ok(record(0, &[(3, "0.5", "0.8")])), &[(0, ["0.5", "0.8"])]);
    let both = [(0, ["0.5", "0.8"]), (1, ["0.6", "0.9"])];
    check(Ok(record(1, &[(3, "0.6", "0.9")])), &both);
    check(Ok(record(2, &[(3, "0.6", "0.8")])), &both);
    check(Ok(record(3, &[(3, "NaN", "NaN")])), &both);
    // The latest result counts, and a trial that was surpassed returns.
    check(Ok(record(4, &[(3, "0.4", "0.95")])), &[(4, ["0.4", "0.95"])]);
    check(
        Ok(record(4, &[(3, "0.4", "0.95"), (9, "0.4", "0.7")])),
        &[(0, both[0].1), (1, both[1].1), (4, ["0.4", "0.7"])],
    );
    check(Err(0), &[(1, both[1].1), (4, ["0.4", "0.7"])]);
}

/// Of more than 64 trials, evenly spaced ones by the first objective stay, with both ends.
#[test]
fn large_pareto_front_is_thinned_out() {
    let other = Objective { metric: "size".to_owned(), smaller_is_better: true };
    let config = SearchConfig { other_objectives: vec![other], ..config(RANDOM) };
    let ledger = ledger(&config, &[], 0);
    // Indexes are not in the order of the first objective.
    let loss = |index: u32| index * 50 % 127;
    let mut summary = Summary::default();
    let mut add = |index: u32| {
        let mut record = plain_record(index);
        record.status.facts.push(Fact::Result(ResultFact {
            units: 9,
            metric: loss(index).to_string(),
            values: vec![(127 - loss(index)).to_string()],
            checkpoint: None,
            at: None,
        }));
        summary.update(&config, &record);
        let front = summary.status(&ledger, false, "mnist", |_| None).pareto;
        front.into_iter().map(|trial| trial.index).collect::<Vec<_>>()
    };
    let fronts: Vec<_> = (0..127).map(&mut add).collect();
    assert_eq!(fronts[63], (0..64).collect::<Vec<_>>());
    assert_eq!(fronts[64].len(), 64);
    let even: Vec<u32> = (0..127).filter(|index| loss(*index) % 2 == 0).collect();
    assert_eq!(fronts[126], even);
}
