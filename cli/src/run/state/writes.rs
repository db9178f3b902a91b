//! Writes of trials, and those that wait for another write.
//!
//! A durable write costs several requests to the disk, so two kinds of changes wait. A crash loses
//! nothing that anything has followed from:
//!
//! - A new fact is written together with the turn that takes it in, before the answer to its
//!   report.
//! - A new trial is written with its first change, or with the next write of the experiment. The
//!   turn that created it is written before, and a rebuilt search creates the trial again.
//!
//! Files are written in the order of the changes, except for new trials. These are written by
//! index and before the number of trials in the experiment's status: the search takes gaps for
//! deleted trials.

use std::collections::BTreeSet;

use stoker_engine::trial::TrialRecord;

use super::State;
use crate::failure::Failure;

/// Trials whose records in memory are newer than their files.
#[derive(Debug, Default)]
pub(super) struct Waiting {
    /// Trial with a new fact.
    changed: Option<u32>,
    /// New trials, which have no files.
    created: BTreeSet<u32>,
}

impl Waiting {
    pub(super) fn is_empty(&self) -> bool {
        self.changed.is_none() && self.created.is_empty()
    }
}

impl State {
    /// Writes a changed trial, then replaces it in memory.
    pub(super) fn save(&mut self, record: TrialRecord) -> Result<(), Failure> {
        let index = record.spec.index;
        self.write_waiting_before(&record)?;
        self.folder.save_trial(&record)?;
        self.waiting.changed = None;
        self.waiting.created.remove(&index);
        self.replace(record);
        Ok(())
    }

    /// Replaces a trial that has a new fact. The next write includes the fact.
    pub(super) fn save_with_turn(&mut self, record: TrialRecord) -> Result<(), Failure> {
        self.write_waiting_before(&record)?;
        self.waiting.changed = Some(record.spec.index);
        self.replace(record);
        Ok(())
    }

    /// Adds a trial that the search has created. The next write of the trial or of the experiment
    /// includes it.
    pub(super) fn add(&mut self, record: TrialRecord) {
        self.waiting.created.insert(record.spec.index);
        self.replace(record);
    }

    /// Replaces a trial in memory.
    pub(super) fn replace(&mut self, record: TrialRecord) {
        let index = record.spec.index;
        self.summary.update(self.ledger.config(), &record);
        self.trials.insert(index, record);
        self.queue.touch(index);
        self.uncopied.insert(index);
    }

    /// Returns whether the file of a trial lacks its latest fact.
    pub(super) fn is_fact_waiting(&self, index: u32) -> bool {
        self.waiting.changed == Some(index)
    }

    /// Writes the fact that waits for a turn.
    pub(super) fn write_fact(&mut self) -> Result<(), Failure> {
        if let Some(record) = self.waiting.changed.and_then(|index| self.trials.get(&index)) {
            self.folder.save_trial(record)?;
        }
        self.waiting.changed = None;
        Ok(())
    }

    /// Writes all trials that wait.
    pub(super) fn write_waiting(&mut self) -> Result<(), Failure> {
        self.write_fact()?;
        self.write_created(u32::MAX)
    }

    /// Writes the trials that must be in the record before this one.
    fn write_waiting_before(&mut self, record: &TrialRecord) -> Result<(), Failure> {
        let index = record.spec.index;
        if !self.is_fact_waiting(index) {
            self.write_fact()?;
        }
        match self.waiting.created.contains(&index) {
            true => self.write_created(index),
            false => Ok(()),
        }
    }

    /// Writes the new trials with a lower index than `end`.
    fn write_created(&mut self, end: u32) -> Result<(), Failure> {
        while let Some(index) = self.waiting.created.first().copied().filter(|index| *index < end) {
            if let Some(record) = self.trials.get(&index) {
                self.folder.save_trial(record)?;
            }
            self.waiting.created.remove(&index);
        }
        Ok(())
    }
}
