//! A runner of a small search. Its trials report results and end as a test says.

use std::collections::BTreeMap;

use stoker_api::decisions::{LogEntry, SearchSettings, StepRecord};
use stoker_api::experiment::{ReopenRequest, ReopenedTrials};
use stoker_api::time::Timestamp;
use stoker_api::trial::{CheckpointRecord, CloseCause, Fact, ResultFact};
use stoker_api::validate::Method;

use super::super::{Ledger, PendingFact, Record, Write};
use crate::experiment::Summary;
use crate::experiment::explain::Decision;
use crate::fixture::config;
use crate::search::SearchConfig;
use crate::search::book::TrialState;
use crate::trial::{NextStep, TargetState, TrialRecord, close, next, reopen};

pub(in crate::experiment::ledger) struct Case {
    pub(in crate::experiment::ledger) config: SearchConfig,
    pub(in crate::experiment::ledger) ledger: Ledger,
    pub(in crate::experiment::ledger) trials: BTreeMap<u32, TrialRecord>,
    pub(in crate::experiment::ledger) log: Vec<LogEntry>,
    /// Whether stopped trials end only when the test says so.
    pub(in crate::experiment::ledger) ends_late: bool,
    num_requests: u32,
}

impl Case {
    pub(in crate::experiment::ledger) fn new(method: Method) -> Self {
        Self::of(config(method))
    }

    pub(in crate::experiment::ledger) fn of(config: SearchConfig) -> Self {
        let trials = BTreeMap::new();
        let record = Record { log: &[], trials: &trials, trials_created: 0 };
        let mut ledger = Ledger::rebuild(&config, record).unwrap().0;
        let writes = ledger.begin("test", vec![], Timestamp(0));
        let trials = BTreeMap::new();
        let mut case =
            Self { config, ledger, trials, log: vec![], ends_late: false, num_requests: 0 };
        case.execute(None, writes);
        case
    }

    fn execute(&mut self, fact: Option<&PendingFact>, writes: Vec<Write>) {
        let decided = self.ledger.decisions(fact, &writes);
        let order = writes.first().map(|home| match home {
            Write::Log(entry) => entry.order,
            Write::Grant { grant, .. } => grant.order,
            Write::Pin { .. } => panic!("{home:?}"),
        });
        for write in writes {
            match write {
                Write::Log(entry) => self.log.push(entry),
                Write::Grant { trial, grant } => {
                    if let Some(record) = self.trials.get_mut(&trial) {
                        record.spec.grants.push(grant);
                    }
                }
                Write::Pin { .. } => panic!("{write:?}"),
            }
        }
        let missing: Vec<_> = self.ledger.missing().cloned().collect();
        for spec in missing {
            let index = spec.index;
            self.ledger.created(index);
            self.trials.insert(index, TrialRecord { spec, status: Default::default() });
        }
        if let Some(order) = order {
            assert_eq!(by_trial(decided), by_trial(self.explained(order)));
        }
        if !self.ends_late {
            self.follow();
        }
        self.check_rebuilt();
    }

    /// Ends the trials that the search stopped, and reopens those that it continues.
    pub(in crate::experiment::ledger) fn follow(&mut self) {
        for (index, record) in &mut self.trials {
            let target = match self.ledger.state(*index) {
                Some(TrialState::Stopped) => TargetState::Stop,
                _ => TargetState::Pause,
            };
            match next(record, target) {
                NextStep::Close { cause } => close(record, cause, None),
                NextStep::Reopen => reopen(record),
                _ => {}
            }
        }
        self.take_facts();
    }

    /// Takes in the facts that wait for a decision.
    pub(in crate::experiment::ledger) fn take_facts(&mut self) {
        for fact in self.ledger.pending(self.trials.values()) {
            let writes = self.ledger.advance(&fact);
            self.execute(Some(&fact), writes);
        }
    }

    /// Returns the decisions of a turn as the record explains them.
    fn explained(&self, order: u64) -> Vec<Decision> {
        let trials = self.trials.iter().map(|(index, record)| (*index, record)).collect();
        let record = Record { log: &self.log, trials: &trials, trials_created: 0 };
        let explanation = Ledger::explain(&self.config, record).unwrap();
        let decisions = explanation.decisions().into_iter().cloned();
        decisions.filter(|decision| decision.order == order).collect()
    }

    /// The search that is rebuilt from the record equals this one.
    fn check_rebuilt(&self) {
        let trials = self.trials.iter().map(|(index, record)| (*index, record)).collect();
        let record = Record { log: &self.log, trials: &trials, trials_created: 0 };
        let (rebuilt, missing) = Ledger::rebuild(&self.config, record).unwrap();
        if self.ledger.pending(self.trials.values()).is_empty() {
            assert_eq!((&rebuilt, missing), (&self.ledger, vec![]));
        }
    }

    /// Reports the result of a trial at its granted length.
    pub(in crate::experiment::ledger) fn result(&mut self, trial: u32) {
        let units = self.ledger.book().trial(trial).units;
        let metric = "0.5".to_owned();
        let at = Some(Timestamp(30));
        let result = ResultFact { units, metric, values: vec![], checkpoint: None, at };
        let record = self.trials.get_mut(&trial).unwrap();
        record.status.facts.push(Fact::Result(result));
        self.checkpoint(trial);
        self.take_facts();
    }

    /// Adds a checkpoint of a trial.
    pub(in crate::experiment::ledger) fn checkpoint(&mut self, trial: u32) {
        let checkpoint = CheckpointRecord {
            name: "000000000001-0".to_owned(),
            batches: 1,
            metric: None,
            manifest_sha256: String::new(),
            bytes: 1,
            refused: false,
        };
        self.trials.get_mut(&trial).unwrap().status.checkpoints = vec![checkpoint];
    }

    /// Deletes a trial.
    pub(in crate::experiment::ledger) fn delete(&mut self, trial: u32) {
        self.trials.remove(&trial);
        let writes = self.ledger.delete(vec![trial], Timestamp(40));
        self.execute(None, writes);
    }

    /// Ends the search by a limit.
    pub(in crate::experiment::ledger) fn reach_limit(&mut self) {
        let summary = Summary::new(&self.config, self.trials.values());
        let writes = self.ledger.reach_limit(&summary, Timestamp(50));
        self.execute(None, writes);
        assert!(self.ledger.limit_reached().is_some());
    }

    /// Ends a trial by itself.
    pub(in crate::experiment::ledger) fn end(&mut self, trial: u32, cause: CloseCause) {
        close(self.trials.get_mut(&trial).unwrap(), cause, None);
        self.take_facts();
    }

    /// Ends a trial that rejects its hyperparameters.
    pub(in crate::experiment::ledger) fn reject(&mut self, trial: u32, message: &str) {
        let record = self.trials.get_mut(&trial).unwrap();
        close(record, CloseCause::InvalidHyperparameters, Some(message.to_owned()));
        self.take_facts();
    }

    /// Edits the search. Returns the steps of the turn, `None` without one.
    pub(in crate::experiment::ledger) fn edit(
        &mut self,
        edit: impl FnOnce(&mut SearchSettings),
    ) -> Option<Vec<StepRecord>> {
        let mut settings = self.config.settings();
        edit(&mut settings);
        self.config = self.config.with(&settings);
        let summary = Summary::new(&self.config, self.trials.values());
        let trials = &self.trials;
        let record_of = |index: u32| trials.get(&index);
        let writes = self.ledger.edit(&self.config, &summary, record_of, Timestamp(50));
        self.turn(writes.unwrap_or_default())
    }

    /// Asks to reopen trials. Returns the steps of the turn.
    pub(in crate::experiment::ledger) fn request(
        &mut self,
        trials: ReopenedTrials,
    ) -> Vec<StepRecord> {
        self.num_requests += 1;
        let request = Some(ReopenRequest { number: self.num_requests, trials });
        let writes = self.reopen(request, Timestamp(60));
        let steps = self.turn(writes).unwrap();
        assert_eq!(self.reopen(request, Timestamp(61)), []);
        steps
    }

    fn reopen(&mut self, request: Option<ReopenRequest>, now: Timestamp) -> Vec<Write> {
        let (trials, ledger) = (&self.trials, &mut self.ledger);
        let summary = Summary::new(ledger.config(), trials.values());
        ledger.reopen(request, &summary, |index| trials.get(&index), now)
    }

    fn turn(&mut self, writes: Vec<Write>) -> Option<Vec<StepRecord>> {
        let steps = writes.first().map(|write| match write {
            Write::Log(entry) => entry.steps.clone(),
            Write::Grant { .. } | Write::Pin { .. } => panic!("{write:?}"),
        });
        self.execute(None, writes);
        steps
    }

    /// Returns granted lengths by trial.
    pub(in crate::experiment::ledger) fn lengths(&self) -> Vec<u64> {
        self.ledger.book().trials().iter().map(|entry| entry.units).collect()
    }
}

/// Returns the decisions of a turn by trial. Their order depends on what the record has.
fn by_trial(mut decisions: Vec<Decision>) -> Vec<Decision> {
    decisions.sort_by_key(|decision| decision.trial);
    decisions.iter_mut().for_each(|decision| decision.position = 0);
    decisions
}

pub(in crate::experiment::ledger) fn random(max_trials: u32) -> Method {
    Method::Random { max_trials, max_concurrent: 2 }
}

/// Returns the trials that the steps reopen.
pub(in crate::experiment::ledger) fn reopened(steps: &[StepRecord]) -> Vec<u32> {
    let trials = steps.iter().filter_map(|step| match step {
        StepRecord::Reopen(step) => Some(step.trials.clone()),
        _ => None,
    });
    trials.flatten().collect()
}
