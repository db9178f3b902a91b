//! Records of earlier versions, damaged records, and the recorded form of decisions.

pub(super) mod case;

use serde_json::json;
use stoker_api::experiment::{AsyncHalvingSearch, Phase, ReopenedTrials};
use stoker_api::trial::{CloseCause, ClosedFact, ResultFact};
use stoker_api::validate::Method;

use super::*;
use crate::experiment::Summary;
use crate::experiment::explain::State;
use crate::fixture::config;
use crate::search::state::SearchState;
use crate::trial::close;
use case::Case;

const RANDOM: Method = Method::Random { max_trials: 3, max_concurrent: 2 };

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

/// Returns a record as a version without recorded steps wrote it. Each fact has a place.
fn old_records(config: &SearchConfig, facts: &[&[(u64, Fact)]]) -> Vec<TrialRecord> {
    let draws = SearchState::of(&SearchConfig {
        method: Method::Random { max_trials: 20, max_concurrent: 0 },
        ..config.clone()
    })
    .advance(Event::Began)
    .unwrap()
    .created;
    let record = |(draw, facts): (crate::search::Draw, &&[(u64, Fact)])| {
        let mut spec = draw.into_spec("mnist", config.unit);
        spec.grants = (0..)
            .zip(*facts)
            .map(|(fact, (order, _))| Grant {
                order: *order,
                fact: Some(fact),
                units: 9,
                ..Grant::default()
            })
            .collect();
        let mut record = TrialRecord { spec, status: Default::default() };
        record.status.facts = facts.iter().map(|(_, fact)| fact.clone()).collect();
        record
    };
    draws.into_iter().zip(facts).map(record).collect()
}

fn rebuild(
    config: &SearchConfig,
    log: &[LogEntry],
    trials: &[TrialRecord],
) -> Result<(Ledger, Vec<Write>), Unreadable> {
    let trials = trials.iter().map(|trial| (trial.spec.index, trial)).collect();
    Ledger::rebuild(config, Record { log, trials: &trials, trials_created: 0 })
}

#[test]
fn record_of_an_earlier_version_continues() {
    let config = config(Method::Random { max_trials: 4, max_concurrent: 2 });
    let facts: [&[(u64, Fact)]; 2] =
        [&[(0, result(9, "0.5")), (1, end(CloseCause::Completed))], &[]];
    let trials = old_records(&config, &facts);
    let (mut ledger, writes) = rebuild(&config, &[], &trials).unwrap();
    assert_eq!(writes, []);
    assert_eq!(ledger.begin("test", vec![], Timestamp(0)), []);
    // The third trial was decided, but its creation was not written.
    let missing: Vec<&TrialSpec> = ledger.missing().collect();
    assert_eq!(missing.iter().map(|spec| spec.index).collect::<Vec<_>>(), [2]);
    assert!(missing[0].random_words.is_some_and(|words| words > 0), "{missing:?}");
    assert_eq!(ledger.state(0), Some(TrialState::Stopped));
    let mut trials = trials;
    trials[1].status.facts.push(result(9, "0.25"));
    let pending = ledger.pending(&trials);
    let writes = ledger.advance(&pending[0]);
    let [Write::Grant { trial: 1, grant }] = &writes[..] else { panic!("{writes:?}") };
    assert_eq!((grant.order, grant.fact, grant.units), (2, Some(0), 9));
    let create = json!({ "create": { "trial": 3, "group": 0, "units": 9 } });
    assert_eq!(json!(grant.steps), json!([{ "stop": { "trial": 1 } }, create]));
    // The record has turns of both versions now.
    trials[1].spec.grants.push(grant.clone());
    let created: Vec<TrialSpec> = ledger.missing().cloned().collect();
    for spec in created {
        ledger.created(spec.index);
        trials.push(TrialRecord { spec, status: Default::default() });
    }
    assert_eq!(trials[3].spec.order, Some(2));
    assert_eq!(rebuild(&config, &[], &trials), Ok((ledger, vec![])));
}

/// Present versions create no trial after ten failures alone.
#[test]
fn failed_record_of_an_earlier_version_continues() {
    let config = config(Method::Random { max_trials: 40, max_concurrent: 1 });
    let failures: Vec<[(u64, Fact); 1]> =
        (0..12).map(|order| [(order, end(CloseCause::Failed))]).collect();
    let facts: Vec<&[(u64, Fact)]> = failures.iter().map(|facts| &facts[..]).collect();
    let (ledger, _) = rebuild(&config, &[], &old_records(&config, &facts)).unwrap();
    assert_eq!((ledger.book().next_index(), ledger.book().is_finished()), (13, false));
}

/// Returns an asynchronous halving of 3 trials, one at a time, with rungs at 3 and 9.
fn halving() -> SearchConfig {
    config(Method::AsyncHalving(AsyncHalvingSearch {
        max_trials: 3,
        num_rungs: 2,
        divisor: 3,
        max_concurrent_trials: 1,
        stop_once: false,
    }))
}

#[test]
fn turns_are_recorded_in_home_and_effects() {
    let config = halving();
    let (mut ledger, _) = rebuild(&config, &[], &[]).unwrap();
    assert!(!ledger.has_begun());
    let writes = ledger.begin("1.2.3", vec![], Timestamp(0));
    assert!(ledger.has_begun());
    let expected = json!({
        "order": 0,
        "at": "1970-01-01T00:00:00Z",
        "event": { "began": { "version": "1.2.3", "settings": {
            "maxTrials": 3, "maxConcurrentTrials": 1, "maxLength": 9, "limits": {},
            "releaseSeconds": 60,
        } } },
        "steps": [{ "create": { "trial": 0, "group": 0, "units": 3 } }],
    });
    let [Write::Log(entry)] = &writes[..] else { panic!("{writes:?}") };
    assert_eq!(json!(entry), expected);
    let entry = entry.clone();
    let mut trials: Vec<TrialRecord> = vec![];
    let mut last: Vec<Write> = vec![];
    for (order, metric) in (1..).zip(["0.5", "0.3", "0.4"]) {
        assert_eq!(ledger.next_order(), order);
        for write in last {
            if let Write::Grant { trial, grant } = write {
                trials[trial as usize].spec.grants.push(grant);
            }
        }
        let spec = ledger.missing().next().unwrap().clone();
        ledger.created(spec.index);
        assert_eq!(ledger.granted_in(spec.index), order - 1, "the turn that created it");
        trials.push(TrialRecord { spec, status: Default::default() });
        let trial = trials.last_mut().unwrap();
        trial.status.facts.push(result(3, metric));
        let pending = ledger.pending(&trials);
        last = ledger.advance(&pending[0]);
    }
    // The third result promotes the second trial, and stops the others.
    assert_eq!(ledger.granted_in(1), 3);
    let found: Vec<_> = last
        .iter()
        .map(|write| match write {
            Write::Grant { trial, grant } => json!([trial, grant]),
            Write::Log(entry) => json!(entry),
            Write::Pin { .. } => panic!("{write:?}"),
        })
        .collect();
    let expected = [
        json!([2, { "order": 3, "fact": 0, "units": 3, "steps": [
            { "continue": { "trial": 1, "units": 9 } },
            { "pause": { "trial": 2 } },
            { "stopPaused": { "group": 0, "units": 3 } },
        ] }]),
        json!([0, { "order": 3, "units": 3, "steps": [{ "stop": { "trial": 0 } }] }]),
        json!([1, { "order": 3, "units": 9, "steps": [
            { "continue": { "trial": 1, "units": 9 } },
        ] }]),
    ];
    assert_eq!(found, expected);
    // After a crash behind the first write, the others follow from it.
    let Write::Grant { grant, .. } = &last[0] else { panic!("{last:?}") };
    trials[2].spec.grants.push(grant.clone());
    assert_eq!(
        rebuild(&config, std::slice::from_ref(&entry), &trials),
        Ok((ledger, last[1..].to_vec()))
    );
}

#[test]
fn settings_of_an_earlier_version_are_recorded() {
    let config = config(RANDOM);
    let mut trials = old_records(&config, &[&[], &[]]);
    let edit = |trials: &[TrialRecord]| {
        let (mut ledger, _) = rebuild(&config, &[], trials).unwrap();
        let summary = crate::experiment::Summary::new(&config, trials);
        let writes = ledger.edit(&config, &summary, |_| None, Timestamp(5)).unwrap();
        assert_eq!(ledger.edit(&config, &summary, |_| None, Timestamp(6)), Some(vec![]));
        writes
    };
    let writes = edit(&trials);
    let [Write::Log(LogEntry { event: LogEvent::Edited(event), .. })] = &writes[..] else {
        panic!("{writes:?}")
    };
    assert_eq!(event.settings, config.settings());
    // An ended search continues only by an edit, which would not be noticed.
    let ended: [&[(u64, Fact)]; 3] =
        [&[(0, result(9, "1"))], &[(1, result(9, "1"))], &[(2, result(9, "1"))]];
    trials = old_records(&config, &ended);
    assert_eq!(edit(&trials), []);
}

#[test]
fn turns_without_effect_keep_their_positions() {
    let config = config(RANDOM);
    let ended = |order| [(order, result(9, "1")), (order + 1, end(CloseCause::Completed))];
    let (first, second) = (ended(0), ended(2));
    let trials = old_records(&config, &[&first, &second, &[]]);
    let (ledger, _) = rebuild(&config, &[], &trials).unwrap();
    assert_eq!(ledger.next_order(), 4);
}

#[test]
fn old_search_without_trials_has_begun() {
    let (trials, config) = (BTreeMap::new(), config(RANDOM));
    let record = Record { log: &[], trials: &trials, trials_created: 2 };
    let (ledger, _) = Ledger::rebuild(&config, record).unwrap();
    assert!(ledger.has_begun());
    assert_eq!(ledger.deleted(&trials), [0, 1]);
}

#[track_caller]
fn check_unreadable(log: &[LogEntry], trials: &[TrialRecord], expected: &str) {
    let error = rebuild(&config(RANDOM), log, trials).unwrap_err();
    assert_eq!(error.to_string(), expected);
}

#[test]
fn unreadable_record_names_object_field_and_reason() {
    let config = config(RANDOM);
    let (mut ledger, _) = rebuild(&config, &[], &[]).unwrap();
    let writes = ledger.begin("test", vec![], Timestamp(0));
    let [Write::Log(began)] = &writes[..] else { panic!("{writes:?}") };
    let began = [began.clone()];
    let mut trials: Vec<TrialRecord> = ledger
        .missing()
        .map(|spec| TrialRecord { spec: spec.clone(), status: Default::default() })
        .collect();
    assert!(rebuild(&config, &began, &trials).is_ok());
    check_unreadable(
        &[],
        &trials,
        "the experiment, status.log: is empty, but trial 0 refers to it; install the custom \
         resource definitions of this version, or restore the field",
    );
    let twice = [began[0].clone(), began[0].clone()];
    check_unreadable(&twice, &trials, "the experiment, status.log, order 0: is there twice");
    let turn = Grant { order: 1, fact: Some(0), units: 9, steps: Some(vec![]) };
    trials[1].spec.grants.push(turn.clone());
    check_unreadable(
        &began,
        &trials,
        "trial 1, spec.grants, order 1: refers to a fact that does not exist",
    );
    trials[1].status.facts.push(result(9, "1"));
    trials[0].spec.grants.push(turn);
    trials[0].status.facts.push(result(9, "1"));
    check_unreadable(&began, &trials, "trial 1, spec.grants, order 1: is there twice");
    trials[0].spec.grants.clear();
    trials[1].status.facts[0] = result(4, "1");
    check_unreadable(
        &began,
        &trials,
        "trial 1, spec.grants, order 1: its event is unknown, repeated or late",
    );
    let facts: [&[(u64, Fact)]; 3] = [&[], &[], &[(0, result(9, "1"))]];
    check_unreadable(
        &[],
        &old_records(&config, &facts),
        "trial 2, spec.grants, order 0: belongs to a trial that no turn created",
    );
}

#[test]
fn end_without_a_turn_is_explained() {
    let mut case = Case::new(RANDOM);
    close(case.trials.get_mut(&0).unwrap(), CloseCause::Cancelled, None);
    let trials = case.trials.iter().map(|(index, record)| (*index, record)).collect();
    let record = Record { log: &case.log, trials: &trials, trials_created: 2 };
    let explanation = Ledger::explain(&case.config, record).unwrap();
    let ends: Vec<_> = explanation.trials.iter().map(|trial| trial.end).collect();
    assert_eq!(ends, [Some(State::Cancelled), None]);
}

/// The search that is rebuilt after each turn equals the live one.
#[test]
fn failed_search_names_its_first_failure_and_continues() {
    let mut case = Case::new(Method::Random { max_trials: 20, max_concurrent: 1 });
    for trial in 0..10 {
        assert!(!case.ledger.has_given_up());
        case.end(trial, CloseCause::Failed);
        case.trials.get_mut(&trial).unwrap().status.message = Some(format!("exit code {trial}"));
    }
    assert!(case.ledger.book().is_finished());
    let summary = Summary::new(&case.config, case.trials.values());
    let status =
        summary.status(&case.ledger, false, "mnist -n ml", |trial| case.trials.get(&trial));
    let expected = "the search ended because 10 trials failed and none has a result: trial 0: exit \
                    code 0; fix the cause, then continue them (`stoker experiment continue mnist \
                    -n ml --failed`) or create a new experiment";
    assert_eq!((status.phase, status.message.as_deref()), (Phase::Failed, Some(expected)));
    case.request(ReopenedTrials::Failed);
    for trial in 0..10 {
        case.end(trial, CloseCause::Failed);
    }
    assert_eq!((case.ledger.book().next_index(), case.ledger.book().is_finished()), (11, false));
}

/// Each index below the greatest costs memory, although its trial is missing.
#[test]
fn absurd_index_in_a_record_is_refused() {
    let config = config(Method::Random { max_trials: 4, max_concurrent: 2 });
    let trials = BTreeMap::new();
    let counted = Record { log: &[], trials: &trials, trials_created: u32::MAX };
    let error = Ledger::rebuild(&config, counted).unwrap_err().to_string();
    assert!(error.contains("status.trialsCreated: implies 4294967295 trials"), "{error}");
    let mut trials = old_records(&config, &[&[]]);
    trials[0].spec.index = 200_000;
    let error = rebuild(&config, &[], &trials).unwrap_err().to_string();
    assert!(error.starts_with("trial 200000, spec.index: implies 200001 trials"), "{error}");
    let steps = json!([{ "pause": { "trial": 4_000_000_000_u32 } }]);
    trials[0].spec.index = 0;
    trials[0]
        .spec
        .grants
        .push(Grant { steps: Some(serde_json::from_value(steps).unwrap()), ..Grant::default() });
    let error = rebuild(&config, &[], &trials).unwrap_err().to_string();
    assert!(error.starts_with("trial 0, spec.grants: implies 4000000001 trials"), "{error}");
}
