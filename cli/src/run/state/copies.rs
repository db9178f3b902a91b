//! Trials whose records were not copied to the storage yet.

use std::collections::BTreeSet;

use stoker_engine::trial::TrialRecord;

use super::State;

impl State {
    /// Returns the trials that have changed since the last copy of their records.
    pub(crate) fn uncopied(&self) -> BTreeSet<u32> {
        self.uncopied.clone()
    }

    /// Returns the record of a trial for a copy, if it has changed since the last one.
    pub(crate) fn take_uncopied(&mut self, index: u32) -> Option<TrialRecord> {
        self.uncopied.remove(&index).then(|| self.trials.get(&index).cloned()).flatten()
    }

    /// Lets [`uncopied`](Self::uncopied) return this trial again.
    pub(crate) fn keep_uncopied(&mut self, index: u32) {
        self.uncopied.insert(index);
    }
}
