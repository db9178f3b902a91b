//! Tests of the fold: grants, creates, stops, status.

use stoker_api::trial::{AttemptEnd, ClosedFact, ResultFact};
use stoker_api::validate::Method;

use super::*;
use crate::fixture::{
    BetterOfTwo, LOSS, checkpointed, config, plain_record, record, report, validated,
};
use crate::trial::{BackOffLimits, RestartLimits, begin_attempt, end_attempt, record_report};

const RANDOM: Method = Method::Random { max_trials: 4, max_concurrent: 2 };

fn result(units: u64, metric: &str) -> Fact {
    Fact::Result(ResultFact { units, metric: metric.to_owned() })
}

fn end(cause: CloseCause) -> Fact {
    Fact::Closed(ClosedFact { cause })
}

const NONE: &[TrialRecord] = &[];

/// Trials by index with their facts; grants are as yet unrecorded.
fn records(facts: &[(u32, &[Fact])]) -> Vec<TrialRecord> {
    let record = |&(index, facts): &(u32, &[Fact])| {
        let mut record = plain_record(index);
        record.status.phase = Phase::Running;
        record.status.facts = facts.to_vec();
        record
    };
    facts.iter().map(record).collect()
}

/// A plan in words: `1@3=9` grants trial 1's fact the place 3 and the length 9, `+2` creates a
/// trial, `-0` stops one.
fn written(plan: &ExperimentPlan) -> String {
    let grants = plan.grants.iter().map(|(trial, it)| format!("{trial}@{}={}", it.order, it.units));
    let creates = plan.create.iter().map(|it| format!("+{}", it.index));
    let stops = plan.stop.iter().map(|it| format!("-{it}"));
    let status = &plan.status;
    let end = format!("{:?} {}/{}", status.phase, status.trials_closed, status.trials_created);
    grants.chain(creates).chain(stops).chain([end]).collect::<Vec<_>>().join(" ")
}

/// `created` is what the status says; `cancelled` whether somebody asked.
fn check(facts: &[(u32, &[Fact])], created: u32, cancelled: bool, expected: &str) {
    let plan = plan(&config(RANDOM), &records(facts), created, cancelled);
    assert_eq!(written(&plan), expected, "{facts:?}");
}

use CloseCause::{Cancelled, Completed, Failed};

#[test]
fn a_plan_creates_what_is_missing_and_places_new_facts() {
    check(&[], 0, false, "+0 +1 Pending 0/2");
    check(&[(0, &[])], 0, false, "+1 Running 0/2");
    check(&[(0, &[]), (1, &[])], 0, false, "Running 0/2");
    check(&[(0, &[]), (1, &[result(9, "1")])], 2, false, "1@0=9 -1 Running 0/2");
    let one_ends = [result(9, "1"), end(Completed)];
    check(&[(0, &[]), (1, &one_ends)], 2, false, "1@0=9 1@1=9 +2 Running 1/3");
    check(&[(0, &one_ends), (1, &[end(Failed)])], 2, false, "0@0=9 0@1=9 1@2=9 +2 +3 Running 2/4");
}

#[test]
fn an_experiment_ends_when_all_trials_have() {
    let ended = |cause| [end(cause)];
    let (done, failed, gone) = (ended(Completed), ended(Failed), ended(Cancelled));
    let all = |a: &[Fact], b: &[Fact], expected: &str| {
        let facts: [(u32, &[Fact]); 4] = [(0, a), (1, a), (2, a), (3, b)];
        let plan = plan(&config(RANDOM), &records(&facts), 4, false);
        let words = written(&plan);
        let (_, status) = words.rsplit_once("=9 ").unwrap_or(("", &words));
        assert_eq!(status, expected);
        let progress = plan.progress;
        assert!(!plan.status.phase.is_terminal() || progress == 1.0, "{progress}");
    };
    all(&done, &[], "Running 3/4");
    all(&done, &done, "Completed 4/4");
    all(&failed, &done, "Completed 4/4");
    all(&failed, &failed, "Failed 4/4");
    all(&gone, &gone, "Cancelled 4/4");
    all(&done, &gone, "Completed 4/4");
}

#[test]
fn cancelling_creates_nothing_and_stops_what_is_open() {
    check(&[], 0, true, "Cancelled 0/0");
    let done = [end(Completed)];
    check(&[(0, &[]), (1, &done)], 2, true, "1@0=9 -0 Running 1/2");
    check(&[(0, &[end(Cancelled)]), (1, &done)], 2, true, "0@0=9 1@1=9 Cancelled 2/2");
    let all: [(u32, &[Fact]); 4] = [(0, &done), (1, &done), (2, &done), (3, &done)];
    check(&all, 4, true, "0@0=9 1@1=9 2@2=9 3@3=9 Completed 4/4");
}

#[test]
fn a_deleted_trial_counts_as_closed_and_its_index_is_not_used_again() {
    check(&[(1, &[])], 2, false, "+2 Running 1/3");
    check(&[(1, &[])], 0, false, "+2 Running 1/3");
    check(&[], 2, false, "+2 +3 Pending 2/4");
    check(&[], 4, false, "Cancelled 4/4");
    let done = [end(Completed)];
    check(&[(0, &done), (3, &done)], 4, false, "0@0=9 3@1=9 Completed 4/4");
}

#[test]
fn a_trial_beyond_what_the_search_now_wants_is_left_to_its_end() {
    let random = Method::Random { max_trials: 1, max_concurrent: 1 };
    let invalid = end(CloseCause::InvalidHyperparameters);
    let replaced: [(u32, &[Fact]); 2] = [(0, &[invalid]), (1, &[])];
    let before = plan(&config(random), &records(&replaced), 2, false);
    assert_eq!(written(&before), "0@0=9 Running 1/2");
    let after = plan(&config(random), &records(&replaced[1..]), 2, false);
    assert_eq!(written(&after), "Running 1/2", "trial 0 was deleted, and trial 1 replaced it");
}

#[test]
fn placed_facts_keep_their_places() {
    let mut trials = records(&[(0, &[end(Completed)]), (1, &[end(Failed)])]);
    trials[1].spec.grants.push(Grant { order: 4, fact: 0, units: 9 });
    let plan = plan(&config(RANDOM), &trials, 2, false);
    assert_eq!(written(&plan), "0@5=9 +2 +3 Running 2/4");
}

#[test]
fn draws_are_the_same_whatever_happened_before_them() {
    let first = plan(&config(Method::Random { max_trials: 4, max_concurrent: 0 }), NONE, 0, false);
    let facts: [(u32, &[Fact]); 2] = [(0, &[end(Failed)]), (1, &[end(Completed)])];
    let then = plan(&config(RANDOM), &records(&facts), 2, false);
    assert_eq!(then.create, first.create[2..]);
}

#[test]
fn a_trial_whose_length_another_ones_result_raised_gets_a_grant_of_its_own() {
    let config = config(Method::Single);
    let plan = |trials: &[TrialRecord]| {
        let search = Search::with_method(&config, Box::new(BetterOfTwo::default()));
        plan_with(search, &config, trials, 0, false)
    };
    let mut trials: Vec<_> = plan(&[]).create.iter().map(record).collect();
    trials[0].status.facts.push(result(3, "0.1"));
    let mut waiting = plan(&trials);
    assert_eq!(written(&waiting), "0@0=3 Pending 0/2");
    let (_, grant) = waiting.grants.remove(0);
    trials[0].spec.grants.push(grant);
    trials[1].status.facts.push(result(3, "0.2"));
    let decided = plan(&trials);
    assert_eq!(written(&decided), "1@1=3 0@2=9 -1 Pending 0/2");
    // Each first part of the plan, and then the rest.
    for (idx, (trial, grant)) in decided.grants.iter().enumerate() {
        trials[*trial as usize].spec.grants.push(*grant);
        assert_eq!(plan(&trials).grants, decided.grants[idx + 1..]);
    }
    assert_eq!(granted_units(&trials[0].spec), 9);
    trials[0].status.facts.push(result(9, "0.05"));
    assert_eq!(written(&plan(&trials)), "0@3=9 -0 -1 Pending 0/2");
}

/// Each trial's results; a trial that stopped early has validations instead.
fn check_best(smaller: bool, results: &[&str], expected: Option<(u32, &str)>) {
    let mut trials = Vec::new();
    for (index, metric) in (0..).zip(results) {
        let mut record = plain_record(index);
        match metric.strip_prefix("stopped ") {
            Some(metric) => {
                begin_attempt(&mut record, 0);
                for (batches, metric) in (1..).zip([metric, "1e9"]) {
                    let report = report(0, batches, validated(metric, None));
                    record_report(&mut record, &report, &LOSS);
                }
                end_attempt(
                    &mut record,
                    AttemptEnd::Completed,
                    None,
                    &RestartLimits::new(0, BackOffLimits::CLUSTER),
                );
            }
            None if metric.is_empty() => {}
            None => record.status.facts.push(result(9, metric)),
        }
        trials.push(record);
    }
    let config = SearchConfig { smaller_is_better: smaller, ..config(RANDOM) };
    let best = plan(&config, &trials, 0, false).status.best;
    let found = best.as_ref().map(|it| (it.index, it.metric.as_str()));
    assert_eq!(found, expected, "{results:?}");
}

#[test]
fn the_best_trial_has_the_best_metric_and_then_the_lowest_index() {
    check_best(true, &["", ""], None);
    check_best(true, &["0.5", "0.25", "0.25"], Some((1, "0.25")));
    check_best(false, &["0.5", "0.25", "10"], Some((2, "10")));
    check_best(true, &["NaN", "inf"], Some((1, "inf")));
    check_best(false, &["NaN", "-inf"], Some((1, "-inf")));
    check_best(true, &["", "NaN", "NaN"], Some((1, "NaN")));
    check_best(true, &["0.5", "stopped 0.4"], Some((1, "0.4")));
}

#[test]
fn a_search_whose_only_trial_stopped_early_is_completed_with_a_best_trial() {
    let mut record = plain_record(0);
    begin_attempt(&mut record, 0);
    for (batches, loss) in [(1, "0.5"), (2, "0.25"), (3, "0.75")] {
        record_report(&mut record, &report(0, batches, validated(loss, None)), &LOSS);
    }
    let saved = checkpointed("000000000002-0", Some("0.25"));
    record_report(&mut record, &report(0, 2, saved), &LOSS);
    end_attempt(
        &mut record,
        AttemptEnd::Completed,
        None,
        &RestartLimits::new(0, BackOffLimits::CLUSTER),
    );
    let check = |record: &TrialRecord, checkpoint: Option<&str>| {
        let plan = plan(&config(Method::Single), std::slice::from_ref(record), 1, false);
        assert_eq!(written(&plan), "0@0=9 Completed 1/1");
        let checkpoint = checkpoint.map(str::to_owned);
        let best = BestTrial { index: 0, metric: "0.25".to_owned(), checkpoint };
        assert_eq!((plan.status.best, plan.status.message, plan.progress), (Some(best), None, 1.0));
    };
    check(&record, Some("000000000002-0"));
    record.status.checkpoints.clear();
    check(&record, None);
}

#[test]
fn an_experiment_whose_only_trial_never_validated_has_failed() {
    let mut record = plain_record(0);
    begin_attempt(&mut record, 0);
    end_attempt(
        &mut record,
        AttemptEnd::Completed,
        None,
        &RestartLimits::new(0, BackOffLimits::CLUSTER),
    );
    let plan = plan(&config(Method::Single), &[record], 1, false);
    assert_eq!((written(&plan).as_str(), plan.status.best), ("0@0=9 Failed 1/1", None));
}

#[test]
fn the_best_trial_names_the_newest_checkpoint_with_its_metric() {
    let mut record = plain_record(0);
    begin_attempt(&mut record, 0);
    for (batches, metric) in [(1, Some("0.5")), (2, Some("0.50")), (3, Some("0.7")), (4, None)] {
        let event = checkpointed(&format!("{batches:012}-0"), metric);
        record_report(&mut record, &report(0, batches, event), &LOSS);
    }
    for (metric, expected) in [("0.5", Some("000000000002-0")), ("0.6", None)] {
        record.status.facts = vec![result(9, metric)];
        let best = plan(&config(RANDOM), std::slice::from_ref(&record), 0, false).status.best;
        assert_eq!(best.unwrap().checkpoint.as_deref(), expected, "{metric}");
    }
}

#[test]
fn progress_counts_closed_trials_and_what_open_ones_have_trained() {
    let mut trials = records(&[(0, &[end(Failed)]), (1, &[]), (2, &[])]);
    trials[1].status.batches = 50;
    trials[1].status.batches_total = 100;
    assert_eq!(plan(&config(RANDOM), &trials, 3, false).progress, 1.5 / 4.0);
}
