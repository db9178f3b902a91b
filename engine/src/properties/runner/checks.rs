//! Checks of what holds after every step.

use stoker_api::time::Timestamp;
use stoker_api::trial::Fact;

use super::{RELEASE_SECONDS, Runner};
use crate::experiment::Ledger;
use crate::search::book::TrialState;
use crate::trial::live_attempt;

impl Runner {
    /// Checks that the search equals the one rebuilt from the record, unless it `is_over`.
    pub(super) fn check_rebuilt(&self, ledger: &Ledger, is_over: bool) {
        let (rebuilt, missing) = self.rebuilt();
        assert_eq!(missing, []);
        self.check_service(ledger);
        let records = self.records();
        let trials = records.iter().map(|record| (record.spec.index, record)).collect();
        // The deletion of a trial after the end of the search is not recorded.
        let is_unknown = ledger.book().is_finished() && !ledger.deleted(&trials).is_empty();
        if !is_over && !is_unknown {
            assert!(rebuilt == *ledger, "{rebuilt:?}\n\n{ledger:?}");
        }
    }

    fn num_live(&self) -> u32 {
        self.records().iter().filter(|record| live_attempt(record).is_some()).count() as u32
    }

    /// Checks what holds after every step.
    pub(in crate::properties) fn check(&self) {
        // Fewer places after an edit leave the gangs that run.
        let places = self.ledger().places().unwrap_or(u32::MAX).max(self.places_max);
        assert!(self.num_live() <= places, "{} gangs in {places} places", self.num_live());
        let num_closes = &self.num_closes;
        assert!(num_closes.values().all(|closes| *closes <= 1), "{num_closes:?}");
    }

    /// No GPUs are held by trials that have had nothing to train for too long.
    pub(in crate::properties) fn check_released(&self) {
        let ledger = self.ledger();
        for record in self.records() {
            let state = ledger.state(record.spec.index);
            let is_idle = matches!(state, Some(TrialState::Paused | TrialState::Waiting));
            let since = record.status.facts.iter().rev().find_map(|fact| match fact {
                Fact::Result(result) => result.at,
                Fact::Closed(_) | Fact::Reopened(_) => None,
            });
            let Some(since) = since.filter(|_| is_idle && live_attempt(&record).is_some()) else {
                continue;
            };
            let is_late = Timestamp(self.now).seconds_since(since) >= RELEASE_SECONDS.into();
            assert!(!is_late || !record.spec.desired_state.is_run(), "{record:?}");
        }
    }
}
