//! Validations that decide nothing, held back so that several become one write.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};

use stoker_api::contract::Report;

/// Held validations by the UIDs of their trials. A trial is here while its last such write is recent.
#[derive(Debug, Default)]
pub(super) struct Held(Mutex<HashMap<String, Option<Report>>>);

impl Held {
    /// Holds a validation unless the trial had none lately, in which case the caller writes it at once:
    /// returns whether it is held. A newer one replaces one that is held.
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

    /// The validation that is held for a trial.
    pub(super) fn get(&self, uid: &str) -> Option<Report> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).get(uid)?.clone()
    }

    /// Drops a validation that was written or has become obsolete; a newer one stays.
    pub(super) fn drop_written(&self, uid: &str, written: &Report) {
        let mut trials = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(held) = trials.get_mut(uid) {
            held.take_if(|held| held == written);
        }
    }

    /// Forgets a trial for which nothing is held; returns what is held otherwise.
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
    fn the_newest_validation_is_held_until_written() {
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
        assert!(!held.hold("a", &report(1, 2)), "it was forgotten");
        assert_eq!((held.get("b"), held.next("b")), (None, None));
    }
}
