//! Edits of small searches, while they run and after their end.

use std::collections::BTreeMap;

use stoker_api::decisions::StepRecord;
use stoker_api::experiment::{AdaptiveAshaSearch, AsyncHalvingSearch, SearchLimits, SearchMode};
use stoker_api::trial::{Fact, ResultFact};
use stoker_api::validate::Method;

use super::*;
use crate::experiment::Record;
use crate::fixture::config;
use crate::trial::TrialRecord;

/// A runner without failures. All trials have the loss 0.5.
struct Case {
    config: SearchConfig,
    ledger: Ledger,
    trials: BTreeMap<u32, TrialRecord>,
}

impl Case {
    fn new(method: Method) -> Self {
        let config = config(method);
        let trials = BTreeMap::new();
        let record = Record { log: &[], trials: &trials, trials_created: 0 };
        let mut ledger = Ledger::rebuild(&config, record).unwrap().0;
        let writes = ledger.begin("test", vec![], Timestamp(0));
        let mut case = Self { config, ledger, trials: BTreeMap::new() };
        case.execute(writes);
        case
    }

    fn execute(&mut self, writes: Vec<Write>) {
        for write in writes {
            if let Write::Grant { trial, grant } = write {
                self.trials.get_mut(&trial).unwrap().spec.grants.push(grant);
            }
        }
        let missing: Vec<_> = self.ledger.missing().cloned().collect();
        for spec in missing {
            let index = spec.index;
            self.ledger.created(index);
            self.trials.insert(index, TrialRecord { spec, status: Default::default() });
        }
    }

    /// Reports the result of a trial at its granted length.
    fn result(&mut self, trial: u32) {
        let units = self.ledger.book().trial(trial).units;
        let result = ResultFact {
            units,
            metric: "0.5".to_owned(),
            values: vec![],
            checkpoint: None,
            at: None,
        };
        let record = self.trials.get_mut(&trial).unwrap();
        record.status.facts.push(Fact::Result(result));
        for fact in self.ledger.pending(self.trials.values()) {
            let writes = self.ledger.advance(&fact);
            self.execute(writes);
        }
    }

    /// Edits the search. Returns the steps of the turn, `None` without one.
    fn edit(&mut self, edit: impl FnOnce(&mut SearchSettings)) -> Option<Vec<StepRecord>> {
        let mut settings = self.config.settings();
        edit(&mut settings);
        self.config = self.config.with(&settings);
        let summary = Summary::new(&self.config, self.trials.values());
        let writes = self.ledger.edit(&self.config, &summary, Timestamp(50));
        let steps = writes.first().map(|write| match write {
            Write::Log(entry) => entry.steps.clone(),
            Write::Grant { .. } | Write::Pin { .. } => panic!("{write:?}"),
        });
        self.execute(writes);
        steps
    }

    /// Returns granted lengths by trial.
    fn lengths(&self) -> Vec<u64> {
        self.ledger.book().trials().iter().map(|entry| entry.units).collect()
    }
}

fn random(max_trials: u32) -> Method {
    Method::Random { max_trials, max_concurrent: 2 }
}

#[test]
fn raised_total_continues_an_ended_search() {
    let mut case = Case::new(random(2));
    assert_eq!(case.edit(|_| {}), None);
    case.result(0);
    case.result(1);
    assert!(case.ledger.book().is_finished());
    let steps = case.edit(|settings| settings.max_trials = Some(4)).unwrap();
    assert_eq!(steps.len(), 2, "{steps:?}");
    assert_eq!((case.trials.len(), case.ledger.book().num_open()), (4, 2));
    assert_eq!(case.edit(|_| {}), None);
    // A total below the trials that exist creates no more, and the others go on.
    assert_eq!(case.edit(|settings| settings.max_trials = Some(1)), Some(vec![]));
    case.result(2);
    assert_eq!(case.trials.len(), 4);
}

#[test]
fn more_places_are_used_at_once() {
    let mut case = Case::new(random(5));
    assert_eq!(case.trials.len(), 2);
    case.edit(|settings| settings.max_concurrent_trials = Some(4));
    assert_eq!((case.trials.len(), case.ledger.places()), (4, Some(4)));
}

#[test]
fn longer_trials_continue_from_their_result() {
    let mut case = Case::new(random(2));
    case.edit(|settings| settings.max_length = 12);
    case.result(0);
    assert_eq!(case.lengths(), [12, 9]);
    case.result(0);
    assert_eq!(case.ledger.book().num_open(), 1);
}

#[test]
fn longer_searches_get_rungs_above() {
    let search = AsyncHalvingSearch {
        max_trials: 30,
        num_rungs: 1,
        divisor: 3,
        max_concurrent_trials: 1,
        stop_once: false,
    };
    let mut case = Case::new(Method::AsyncHalving(search));
    case.edit(|settings| settings.max_length = 30);
    for trial in 0..3 {
        case.result(trial);
    }
    // The best of three is promoted to the rung above the old top, and then to the new top.
    assert_eq!(case.lengths(), [27, 9, 9]);
}

#[test]
fn brackets_share_the_new_total() {
    let search = AdaptiveAshaSearch {
        max_trials: 11,
        mode: SearchMode::Conservative,
        max_rungs: 3,
        bracket_rungs: vec![],
        divisor: 3,
        max_concurrent_trials: 3,
        stop_once: false,
    };
    let mut case = Case::new(Method::AdaptiveAsha(search));
    let total = |case: &Case| case.ledger.num_expected();
    assert_eq!(total(&case), 11);
    case.edit(|settings| settings.max_trials = Some(40));
    assert_eq!(total(&case), 40);
    case.edit(|settings| settings.max_trials = Some(3));
    assert_eq!(total(&case), 3);
}

#[test]
fn limit_that_is_still_reached_ends_the_search() {
    let mut case = Case::new(random(2));
    let limit = |seconds| SearchLimits { seconds, ..SearchLimits::default() };
    case.edit(|settings| settings.limits = limit(Some(50)));
    let summary = Summary::new(&case.config, case.trials.values());
    assert_ne!(case.ledger.reach_limit(&summary, Timestamp(50)), []);
    let steps = case.edit(|settings| settings.max_trials = Some(9)).unwrap();
    assert!(matches!(steps[..], [StepRecord::Finish(_)]), "{steps:?}");
    assert!(case.ledger.limit_reached().is_some());
    let steps = case.edit(|settings| settings.limits = limit(None)).unwrap();
    assert_eq!(steps.len(), 2, "{steps:?}");
    assert!(case.ledger.limit_reached().is_none());
    assert_eq!(case.trials.len(), 4);
}
