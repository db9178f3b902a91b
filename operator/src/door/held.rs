//! Validations that decide nothing, delayed so that several share one write.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};

use stoker_api::contract::Report;

/// Delayed validations by trial UID. A trial has an entry while its last such write is recent.
#[derive(Debug, Default)]
pub(super) struct Held(Mutex<HashMap<String, Option<Report>>>);

impl Held {
    /// Delays a validation and returns `true`, or returns `false` if the trial had no recent one
    /// and the caller should write it at once. A newer validation replaces a delayed one.
    pub(super) fn hold(&self, uid: &str, report: &Report) -> bool {
        let mut trials = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(held) = trials.get_mut(uid) else {
            trials.insert(uid.to_owned(), None);
            return false;
        };
        let order = |report: &Report| (report.attempt, report.batches);
        if held.as_ref().is_none_or(|held| order(held) <= order(report)) {
            *held = Some(report.clone());
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
        if let Some(held) = trials.get_mut(uid) {
            held.take_if(|held| held == written);
        }
    }

    /// Returns the delayed validation of a trial, or forgets the trial if there is none.
    pub(super) fn next(&self, uid: &str) -> Option<Report> {
        let mut trials = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let held = trials.get(uid)?.clone();
        if held.is_none() {
            trials.remove(uid);
        }
        held
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
        let held = Held::default();
        assert!(!held.hold("a", &report(0, 1)), "the first is written at once");
        assert_eq!(held.get("a"), None);
        assert!(held.hold("a", &report(0, 3)));
        assert!(held.hold("a", &report(0, 2)));
        assert_eq!(held.get("a"), Some(report(0, 3)));
        assert!(held.hold("a", &report(1, 1)));
        assert_eq!(held.next("a"), Some(report(1, 1)));
        held.drop_written("a", &report(0, 3));
        assert_eq!(held.get("a"), Some(report(1, 1)));
        held.drop_written("a", &report(1, 1));
        assert_eq!(held.next("a"), None);
        assert!(!held.hold("a", &report(1, 2)), "the trial was forgotten");
        assert_eq!((held.get("b"), held.next("b")), (None, None));
    }
}
