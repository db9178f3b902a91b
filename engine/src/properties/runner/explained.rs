//! Checks of explanations.

use std::collections::BTreeSet;

use stoker_api::decisions::LogEntry;
use stoker_api::trial::CloseCause;

use super::Runner;
use crate::experiment::explain::{Decision, State};
use crate::experiment::{Ledger, Record};
use crate::search::book::TrialState;
use crate::trial::{TrialRecord, closed, is_reopening_due};

/// Returns the state in which a trial is explained.
fn explained(state: TrialState, is_complete: bool) -> State {
    match state {
        TrialState::Active => State::Training,
        TrialState::Waiting => State::Waiting,
        TrialState::Paused => State::Paused,
        TrialState::Stopped if is_complete => State::Completed,
        TrialState::Stopped => State::Stopped,
        TrialState::Closed(CloseCause::Completed) => State::Completed,
        TrialState::Closed(CloseCause::StoppedEarly) => State::EndedEarly,
        TrialState::Closed(CloseCause::InvalidHyperparameters) => State::Invalid,
        TrialState::Closed(CloseCause::Failed) => State::Failed,
        TrialState::Closed(CloseCause::Cancelled) => State::Cancelled,
        TrialState::Closed(CloseCause::Deleted) | TrialState::Deleted => State::Deleted,
    }
}

impl Runner {
    /// Explains the record. Each trial has the state of the rebuilt search, and a reason for it.
    pub(in crate::properties) fn check_explained(&self) {
        self.check_explanation(&self.log(), &self.records(), self.trials_created);
    }

    /// Decisions are explained in the same way while they are made and from the record.
    pub(super) fn check_decided(&self, decided: Vec<Decision>) {
        let (records, log) = (self.records(), self.log());
        let trials = records.iter().map(|record| (record.spec.index, record)).collect();
        let record = Record { log: &log, trials: &trials, trials_created: self.trials_created };
        let explanation = Ledger::explain(&self.config, record).unwrap();
        let orders: BTreeSet<u64> = decided.iter().map(|decision| decision.order).collect();
        let by_trial = |mut decisions: Vec<Decision>| {
            decisions.sort_by_key(|decision| (decision.order, decision.trial));
            decisions.iter_mut().for_each(|decision| decision.position = 0);
            decisions
        };
        let recorded = explanation.decisions().into_iter().cloned();
        let recorded = recorded.filter(|decision| orders.contains(&decision.order)).collect();
        assert_eq!(by_trial(decided), by_trial(recorded));
    }

    /// Explains the record as it was after each turn.
    pub(in crate::properties) fn check_explained_at_each_turn(&self) {
        for order in 0..self.ledger().next_order() {
            let mut log = self.log();
            log.retain(|entry| entry.order <= order);
            let mut records = self.records();
            records.retain(|record| record.spec.order <= Some(order));
            for record in &mut records {
                record.spec.grants.retain(|grant| grant.order <= order);
            }
            self.check_explanation(&log, &records, 0);
        }
    }

    fn check_explanation(&self, log: &[LogEntry], records: &[TrialRecord], trials_created: u32) {
        let trials = records.iter().map(|record| (record.spec.index, record)).collect();
        let record = Record { log, trials: &trials, trials_created };
        let explanation = Ledger::explain(&self.config, record).unwrap();
        let rebuilt = Ledger::rebuild(&self.config, record).unwrap().0;
        let entries = rebuilt.book().trials();
        assert_eq!(explanation.trials.len(), entries.len());
        for (trial, entry) in explanation.trials.iter().zip(entries) {
            // A trial that was complete before an edit stays complete. The results of a trial
            // without a record are not known.
            let is_known = trials.contains_key(&trial.trial);
            let was_complete = entry.trained() >= self.units_min || !is_known;
            let is_complete = entry.trained() == self.config.units_max
                || was_complete && trial.state == State::Completed;
            assert_eq!(trial.state, explained(entry.state, is_complete), "{trial:?}");
            let record = trials.get(&trial.trial).filter(|record| !is_reopening_due(record));
            let closed = record.and_then(|record| closed(record));
            assert!(trial.end.is_none() || closed.is_some(), "{trial:?}");
            assert!(closed.is_none() || trial.state() >= State::Stopped, "{trial:?}");
            // The turns of a trial without a record may have been deleted with it.
            assert!(trial.why.is_some() || !is_known, "{trial:?}");
            for decision in &trial.decisions {
                let sentence = decision.sentence();
                assert!(sentence.len() < 160 && !sentence.contains("  "), "{sentence}");
                let standing = decision.comparison.as_ref();
                assert!(
                    standing.is_none_or(|of| (1..=of.results).contains(&of.rank)),
                    "{of:?}",
                    of = standing
                );
            }
        }
        let num_members: u32 = explanation.brackets.iter().map(|bracket| bracket.created).sum();
        assert_eq!(num_members as usize, entries.len());
        assert!(explanation.to_json()["decisions"].is_array());
    }
}
