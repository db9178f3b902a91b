//! Spending of small experiments, and the end that a limit causes.

use std::collections::BTreeMap;

use stoker_api::decisions::StepRecord;
use stoker_api::experiment::SearchLimits;
use stoker_api::trial::{Attempt, AttemptEnd, Fact, ResultFact, TrialSource};
use stoker_api::validate::Method;

use super::*;
use crate::experiment::Record;
use crate::fixture::config;
use crate::trial::TrialRecord;

const NONE: SearchLimits = SearchLimits { seconds: None, slot_seconds: None, units: None };

/// Begins a search of two trials of two slots each at 100.
fn begun(limits: SearchLimits) -> (Ledger, Vec<TrialRecord>) {
    let config = config(Method::Random { max_trials: 3, max_concurrent: 2 });
    let config = SearchConfig { limits, ..config };
    let trials = BTreeMap::new();
    let record = Record { log: &[], trials: &trials, trials_created: 0 };
    let mut ledger = Ledger::rebuild(&config, record).unwrap().0;
    ledger.begin("test", vec![], Timestamp(100));
    let specs: Vec<_> = ledger.missing().cloned().collect();
    specs.iter().for_each(|spec| ledger.created(spec.index));
    let record = |spec| TrialRecord { spec, status: Default::default() };
    (ledger, specs.into_iter().map(record).collect())
}

/// Adds an attempt from `since` to `until`; a live one without `until`.
fn add_attempt(record: &mut TrialRecord, since: i64, until: Option<i64>) {
    record.status.attempts.push(Attempt {
        started_at: Some(Timestamp(since)),
        end: until.map(|_| AttemptEnd::Preempted),
        ended_at: until.map(Timestamp),
        ..Attempt::default()
    });
}

/// Checks the seconds to the limit at 120, and what is spent if it is reached then. One trial had
/// an attempt from 105 to 110, and both run since 115. One has a result at three units.
fn check(limits: SearchLimits, seconds: Option<u64>, expected: Option<(SearchLimit, u64)>) {
    let (mut ledger, mut trials) = begun(limits);
    add_attempt(&mut trials[0], 105, Some(110));
    trials.iter_mut().for_each(|trial| add_attempt(trial, 115, None));
    let result = ResultFact {
        units: 3,
        metric: "0.5".to_owned(),
        values: vec![],
        checkpoint: None,
        at: None,
    };
    trials[1].status.facts.push(Fact::Result(result));
    let summary = Summary::new(ledger.config(), &trials);
    let now = Timestamp(120);
    assert_eq!(ledger.seconds_to_limit(&summary, now), seconds, "{limits:?}");
    let writes = ledger.reach_limit(&summary, now);
    let reached = ledger.limit_reached().map(|reached| (reached.limit, reached.spent));
    assert_eq!((reached, writes.is_empty()), (expected, expected.is_none()), "{limits:?}");
}

#[test]
fn limits_count_time_slots_and_results() {
    check(NONE, None, None);
    check(SearchLimits { seconds: Some(21), ..NONE }, Some(1), None);
    check(SearchLimits { seconds: Some(20), ..NONE }, Some(0), Some((SearchLimit::Seconds, 20)));
    // Two slots for 5 + 5 + 5 seconds are 30, and four slots run now.
    check(SearchLimits { slot_seconds: Some(35), ..NONE }, Some(2), None);
    let slots = SearchLimits { slot_seconds: Some(30), ..NONE };
    check(slots, Some(0), Some((SearchLimit::SlotSeconds, 30)));
    check(SearchLimits { units: Some(4), ..NONE }, None, None);
    let units = SearchLimits { seconds: Some(90), units: Some(3), ..NONE };
    check(units, Some(70), Some((SearchLimit::Units, 3)));
}

#[test]
fn units_of_a_copy_count_from_its_source() {
    let (ledger, mut trials) = begun(NONE);
    let result = |units| {
        let (metric, values) = ("0.5".to_owned(), vec![]);
        Fact::Result(ResultFact { units, metric, values, checkpoint: None, at: None })
    };
    trials[0].status.facts.push(result(5));
    trials[1].spec.source = Some(TrialSource { trial: 0, units: 5, ..TrialSource::default() });
    let spent = |trials: &[TrialRecord]| Summary::new(ledger.config(), trials).units();
    assert_eq!(spent(&trials), 5);
    trials[1].status.facts.push(result(8));
    assert_eq!(spent(&trials), 8);
}

#[test]
fn limit_stops_all_trials_and_finishes() {
    let (mut ledger, trials) = begun(SearchLimits { seconds: Some(20), ..NONE });
    let summary = Summary::new(ledger.config(), &trials);
    assert_eq!(ledger.reach_limit(&summary, Timestamp(119)), []);
    let writes = ledger.reach_limit(&summary, Timestamp(120));
    let [Write::Log(entry), effects @ ..] = &writes[..] else { panic!("{writes:?}") };
    assert!(matches!(entry.steps[..], [StepRecord::StopAll(_), StepRecord::Finish(_)]));
    let stopped: Vec<u32> = effects
        .iter()
        .map(|write| match write {
            Write::Grant { trial, grant } => {
                assert!(matches!(grant.steps.as_deref(), Some([StepRecord::Stop(_)])));
                *trial
            }
            Write::Log(_) | Write::Pin { .. } => panic!("{write:?}"),
        })
        .collect();
    assert_eq!(stopped, [0, 1]);
    assert!(ledger.book().is_finished());
    // Nothing is left to train, although the stopped trials have not ended.
    assert_eq!(summary.status(&ledger, false, "mnist", |_| None).progress_percent, 100);
    assert_eq!(ledger.reach_limit(&summary, Timestamp(500)), []);
    assert_eq!(ledger.seconds_to_limit(&summary, Timestamp(500)), None);
}

#[test]
fn trials_that_were_not_created_stay_so() {
    let config = config(Method::Random { max_trials: 3, max_concurrent: 2 });
    let config = SearchConfig { limits: SearchLimits { seconds: Some(1), ..NONE }, ..config };
    let trials = BTreeMap::new();
    let record = Record { log: &[], trials: &trials, trials_created: 0 };
    let mut ledger = Ledger::rebuild(&config, record).unwrap().0;
    ledger.begin("test", vec![], Timestamp(0));
    assert_eq!((ledger.missing().len(), ledger.num_uncreated()), (2, 2));
    let summary = Summary::new(&config, []);
    ledger.reach_limit(&summary, Timestamp(1));
    assert_eq!((ledger.missing().len(), ledger.num_uncreated()), (0, 2));
    let status = summary.status(&ledger, false, "mnist", |_| None);
    assert_eq!(status.trials_created, 0);
    let message = "the search reached spec.searcher.limits.seconds, 1, with 1, and no trial has a \
                   result";
    assert_eq!(status.message.as_deref(), Some(message));
}

/// A trial that is created late has the steps of all turns since its creation was decided.
#[test]
fn late_creation_includes_the_earlier_effects() {
    let config = config(Method::Random { max_trials: 3, max_concurrent: 2 });
    let limited =
        SearchConfig { limits: SearchLimits { seconds: Some(1), ..NONE }, ..config.clone() };
    let trials = BTreeMap::new();
    let record = Record { log: &[], trials: &trials, trials_created: 0 };
    let mut ledger = Ledger::rebuild(&limited, record).unwrap().0;
    let mut writes = ledger.begin("test", vec![], Timestamp(0));
    let summary = Summary::new(&config, []);
    writes.extend(ledger.reach_limit(&summary, Timestamp(1)));
    writes.extend(ledger.edit(&config, &summary, |_| None, Timestamp(2)).unwrap());
    let logged = writes.into_iter().filter_map(|write| match write {
        Write::Log(entry) => Some(entry),
        Write::Grant { .. } | Write::Pin { .. } => None,
    });
    let log: Vec<_> = logged.collect();
    let records: Vec<_> = ledger
        .missing()
        .map(|spec| TrialRecord { spec: spec.clone(), status: Default::default() })
        .collect();
    assert_eq!(records.len(), 2);
    records.iter().for_each(|record| ledger.created(record.spec.index));
    let trials = records.iter().map(|record| (record.spec.index, record)).collect();
    let record = Record { log: &log, trials: &trials, trials_created: 2 };
    assert_eq!(Ledger::rebuild(&limited, record), Ok((ledger, vec![])));
}
