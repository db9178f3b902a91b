//! Validations that decide nothing, delayed so that several share one write.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use stoker_api::contract::Report;

use crate::cache::Key;

/// Delayed validations of all trials.
#[derive(Debug, Default)]
pub(super) struct DelayedValidations(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    /// By trial UID. A trial has an entry while its last write of such a validation is recent.
    trials: HashMap<String, DelayedTrial>,
    /// Whether the replica stops, so that validations are no longer delayed.
    is_closed: bool,
}

#[derive(Debug)]
struct DelayedTrial {
    key: Key,
    report: Option<Report>,
}

impl DelayedValidations {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Delays a validation and returns `true`. Returns `false` if the caller should write it at
    /// once: the trial had no recent one, or the replica stops. A newer validation replaces a
    /// delayed one.
    pub(super) fn delay(&self, key: &Key, uid: &str, report: &Report) -> bool {
        let mut state = self.lock();
        if state.is_closed {
            return false;
        }
        let Some(DelayedTrial { report: delayed, .. }) = state.trials.get_mut(uid) else {
            let trial = DelayedTrial { key: key.clone(), report: None };
            state.trials.insert(uid.to_owned(), trial);
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
        self.lock().trials.get(uid)?.report.clone()
    }

    /// Drops a validation that was written or is obsolete. A newer one stays.
    pub(super) fn drop_written(&self, uid: &str, written: &Report) {
        if let Some(trial) = self.lock().trials.get_mut(uid) {
            trial.report.take_if(|delayed| delayed == written);
        }
    }

    /// Returns the delayed validation of a trial, or forgets the trial if there is none.
    pub(super) fn next(&self, uid: &str) -> Option<Report> {
        let mut state = self.lock();
        let delayed = state.trials.get(uid)?.report.clone();
        if delayed.is_none() {
            state.trials.remove(uid);
        }
        delayed
    }

    /// Returns key, UID and delayed validation of each trial that has one.
    pub(super) fn all(&self) -> Vec<(Key, String, Report)> {
        let state = self.lock();
        let delayed = state.trials.iter().filter_map(|(uid, trial)| {
            Some((trial.key.clone(), uid.clone(), trial.report.clone()?))
        });
        delayed.collect()
    }

    /// Delays no more validations. Those already delayed stay until they are written.
    pub(super) fn close(&self) {
        self.lock().is_closed = true;
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
        let delay = |uid: &str, report| delayed.delay(&Key::new("n", "t"), uid, &report);
        assert!(!delay("a", report(0, 1)), "the first is written at once");
        assert_eq!(delayed.get("a"), None);
        assert!(delay("a", report(0, 3)));
        assert!(delay("a", report(0, 2)));
        assert_eq!(delayed.get("a"), Some(report(0, 3)));
        assert!(delay("a", report(1, 1)));
        assert_eq!(delayed.next("a"), Some(report(1, 1)));
        delayed.drop_written("a", &report(0, 3));
        assert_eq!(delayed.get("a"), Some(report(1, 1)));
        delayed.drop_written("a", &report(1, 1));
        assert_eq!(delayed.next("a"), None);
        assert!(!delay("a", report(1, 2)), "the trial was forgotten");
        assert_eq!((delayed.get("b"), delayed.next("b")), (None, None));
    }
    #[test]
    fn closing_ends_the_delay() {
        let delayed = DelayedValidations::default();
        let delay = |name: &str, batches| {
            delayed.delay(&Key::new("n", name), &format!("uid-{name}"), &report(0, batches))
        };
        assert_eq!([delay("a", 1), delay("a", 2), delay("b", 1)], [false, true, false]);
        delayed.close();
        assert_eq!([delay("a", 3), delay("b", 2), delay("c", 1)], [false; 3]);
        assert_eq!(delayed.all(), [(Key::new("n", "a"), "uid-a".to_owned(), report(0, 2))]);
        delayed.drop_written("uid-a", &report(0, 2));
        assert_eq!(delayed.all(), []);
    }
}
