//! Checkpoints that are deleted while the search runs.

use std::collections::BTreeSet;

use stoker_api::experiment::CheckpointStorage;
use stoker_engine::retention;

use super::State;
use crate::failure::Failure;

impl State {
    /// Returns the checkpoints that may be deleted while the search runs, by trial.
    pub(crate) fn superfluous(
        &mut self,
        policy: &CheckpointStorage,
    ) -> Vec<(u32, BTreeSet<String>)> {
        let smaller_is_better = self.ledger.config().smaller_is_better;
        let mut superfluous = vec![];
        for index in std::mem::take(&mut self.prunable) {
            let Some(record) = self.trials.get(&index) else { continue };
            let checkpoints = &record.status.checkpoints;
            let names: BTreeSet<String> = retention::prunable(
                policy,
                smaller_is_better,
                checkpoints,
                &retention::pinned(record),
            )
            .into_iter()
            .collect();
            if !names.is_empty() {
                superfluous.push((index, names));
            }
        }
        superfluous
    }

    /// Keeps checkpoints of a trial from which copies will start.
    pub(super) fn pin(&mut self, index: u32, checkpoints: Vec<String>) -> Result<(), Failure> {
        let Some(mut record) = self.trials.get(&index).cloned() else { return Ok(()) };
        let pins = &record.spec.pins;
        let new: Vec<String> =
            checkpoints.into_iter().filter(|name| !pins.contains(name)).collect();
        if new.is_empty() {
            return Ok(());
        }
        record.spec.pins.extend(new);
        self.save(record)
    }

    /// Removes the pins that no copy needs any more.
    pub(super) fn unpin(&mut self) -> Result<(), Failure> {
        for (index, pins) in self.ledger.unpinned(self.trials.values()) {
            let Some(mut record) = self.trials.get(&index).cloned() else { continue };
            record.spec.pins = pins;
            self.save(record)?;
            self.enqueue(index);
            self.prunable.insert(index);
        }
        Ok(())
    }

    /// Lets [`superfluous`](Self::superfluous) return the checkpoints of this trial again.
    pub(crate) fn keep_prunable(&mut self, index: u32) {
        self.prunable.insert(index);
    }

    /// Removes deleted checkpoints from the record.
    pub(crate) fn forget(&mut self, index: u32, names: &BTreeSet<String>) -> Result<(), Failure> {
        self.recover()?;
        let Some(mut record) = self.trials.get(&index).cloned() else { return Ok(()) };
        record.status.checkpoints.retain(|checkpoint| !names.contains(&checkpoint.name));
        self.save(record)?;
        self.enqueue(index);
        Ok(())
    }
}
