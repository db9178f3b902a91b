//! Validations that decide nothing, delayed so that several share one write.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};

use stoker_api::contract::Report;

/// Delayed validations by trial UID. A trial has an entry while its last such write is recent.
#[derive(Debug, Default)]
pub(super) struct DelayedValidations(Mutex<HashMap<String, Option<Report>>>);

impl DelayedValidations {
    /// Delays a validation and returns `true`, or returns `false` if the trial had no recent one
    /// and the caller should write it at once. A newer validation replaces a delayed one.
    pub(super) fn delay(&self, uid: &str, report: &Report) -> bool {
        let mut trials = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(delayed) = trials.get_mut(uid) else {
            trials.insert(uid.to_owned(), None);
            return false;
        };
        let order = |report: &Report| (report.attempt, report.batches);
        if delayed.as_ref().is_none_or(|delayed| order(delayed) <= order(report)) {
            *delayed = Some(report.clone());
        }
        true
    }

    /// Returns the delayed validation of a trial.
    pub(super) fn get(&self, uid: &str) -> Option<Report> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).get(uid)?.clone()
    }

    /// Drops a validation that was written or is obsolete. A newer one stays.
    pub(super) fn drop_written(&self, uid: &str, written: &Report) {
        let mut trials = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(delayed) = trials.get_mut(uid) {
            delayed.take_if(|delayed| delayed == written);
        }
    }

    /// Returns the delayed validation of a trial, or forgets the trial if there is none.
    pub(super) fn next(&self, uid: &str) -> Option<Report> {
        let mut trials = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let delayed = trials.get(uid)?.clone();
        if delayed.is_none() {
            trials.remove(uid);
        }
        delayed
    }
}

#[cfg(test)]
mod tests {
    use stoker_api::contract::ReportEvent;

    use super::*;

    fn report(attempt: u32, batches: u64) -> Report {
        let event = ReportEvent::Validated { metrics: Default::default(), granted_units: None };
        Report { version: 1, attempt, batches, event }
    }

    #[test]
    fn newest_validation_is_held_until_written() {
        let delayed = DelayedValidations::default();
        assert!(!delayed.delay("a", &report(0, 1)), "the first is written at once");
        assert_eq!(delayed.get("a"), None);
        assert!(delayed.delay("a", &report(0, 3)));
        assert!(delayed.delay("a", &report(0, 2)));
        assert_eq!(delayed.get("a"), Some(report(0, 3)));
        assert!(delayed.delay("a", &report(1, 1)));
        assert_eq!(delayed.next("a"), Some(report(1, 1)));
        delayed.drop_written("a", &report(0, 3));
        assert_eq!(delayed.get("a"), Some(report(1, 1)));
        delayed.drop_written("a", &report(1, 1));
        assert_eq!(delayed.next("a"), None);
        assert!(!delayed.delay("a", &report(1, 2)), "the trial was forgotten");
        assert_eq!((delayed.get("b"), delayed.next("b")), (None, None));
    }
}
