//! Trials that the user has deleted.

use std::collections::BTreeMap;

use stoker_api::decisions::{DeletedEvent, DeletedTrial, LogEvent};
use stoker_api::time::Timestamp;

use super::{Ledger, Write};
use crate::search::book::TrialState;
use crate::search::turn::Event;
use crate::trial::TrialRecord;

impl Ledger {
    /// Returns the trials that were created and have no record any more.
    pub fn deleted(&self, trials: &BTreeMap<u32, &TrialRecord>) -> Vec<u32> {
        let is_deleted = |index: &u32| {
            !trials.contains_key(index)
                && !self.missing.contains_key(index)
                && self.book().trial(*index).state != TrialState::Deleted
        };
        (0..self.book().next_index()).filter(is_deleted).collect()
    }

    /// Takes in the deletion of trials.
    pub fn delete(&mut self, trials: Vec<u32>, now: Timestamp) -> Vec<Write> {
        let events = trials.iter().map(|trial| Event::Deleted { trial: *trial }).collect();
        let Some(turn) = self.search.advance_all(events) else { return vec![] };
        let deleted = |index: &u32| DeletedTrial {
            index: *index,
            group: self.book().trial(*index).group,
            random_words: self.random_words[*index as usize],
            source: self.sources.of(*index).cloned(),
        };
        let event =
            LogEvent::Deleted(DeletedEvent { trials: trials.iter().map(deleted).collect() });
        self.forget(&trials);
        self.log(turn, event, now)
    }

    /// Forgets what is known of deleted trials from their records.
    pub(super) fn forget(&mut self, trials: &[u32]) {
        for trial in trials {
            self.num_placed[*trial as usize] = 0;
            self.granted_in[*trial as usize] = 0;
            if let Some(reopening) = self.reopenings.get_mut(trial) {
                reopening.num_facts = 0;
            }
        }
        self.sources.forget(trials);
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::case::{Case, random};
    use stoker_api::trial::CloseCause;

    use super::*;
    use crate::experiment::Record;

    #[test]
    fn trials_without_record_are_deleted_once() {
        let mut case = Case::new(random(3));
        let deleted = |case: &Case| {
            let trials = case.trials.iter().map(|(index, record)| (*index, record)).collect();
            case.ledger.deleted(&trials)
        };
        assert!(deleted(&case).is_empty());
        let record = case.trials.remove(&1).unwrap();
        assert_eq!(deleted(&case), [1]);
        case.trials.insert(1, record);
        case.delete(1);
        assert!(deleted(&case).is_empty());
    }

    /// The operator rebuilds the search without the record of the deleted trial, which has the
    /// rejection.
    #[test]
    fn deleted_rejection_counts_as_a_trial() {
        let mut case = Case::new(random(3));
        case.end(0, CloseCause::InvalidHyperparameters);
        let trials = case.trials.iter().filter(|(index, _)| **index > 0);
        let trials = trials.map(|(index, record)| (*index, record)).collect();
        let record = Record { log: &case.log, trials: &trials, trials_created: 3 };
        let mut rebuilt = Ledger::rebuild(&case.config, record).unwrap().0;
        assert_eq!(rebuilt.deleted(&trials), [0]);
        assert_eq!(rebuilt.state(0), Some(TrialState::Active), "its end is unknown");
        rebuilt.delete(vec![0], Timestamp(40));
        case.delete(0);
        assert_eq!(rebuilt, case.ledger);
        case.end(1, CloseCause::InvalidHyperparameters);
        case.result(2);
        case.result(3);
        assert!(case.ledger.book().is_finished());
        assert_eq!(case.ledger.book().next_index(), 4);
    }

    #[test]
    fn trials_that_were_not_created_are_not_deleted() {
        let trials = BTreeMap::new();
        let record = Record { log: &[], trials: &trials, trials_created: 0 };
        let config = crate::fixture::config(random(3));
        let mut ledger = Ledger::rebuild(&config, record).unwrap().0;
        ledger.begin("test", vec![], Timestamp(0));
        assert_eq!(ledger.missing().len(), 2);
        assert!(ledger.deleted(&trials).is_empty());
    }
}
