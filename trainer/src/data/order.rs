//! Assignment of samples to batches and ranks.

use super::{LoaderPlan, Permutation};
use crate::rng::{ORDER, mix_seed};

/// Sample order over all epochs, and its distribution over ranks.
pub(super) struct Order {
    pub(super) plan: LoaderPlan,
    /// Number of samples in an epoch.
    pub(super) samples: usize,
    /// Number of samples in a batch, over all ranks.
    pub(super) global_batch: usize,
    /// Number of batches in an epoch.
    pub(super) steps: u64,
    pub(super) shuffle: bool,
    /// Whether each epoch is shuffled differently.
    pub(super) reshuffle: bool,
}

/// Range of positions of a batch in its epoch.
pub(super) struct EpochRange {
    pub(super) epoch: u64,
    pub(super) first: usize,
    pub(super) end: usize,
}

impl Order {
    pub(super) fn epoch_range(&self, batch: u64) -> EpochRange {
        let first = (batch % self.steps) as usize * self.global_batch;
        let end = (first + self.global_batch).min(self.samples);
        EpochRange { epoch: batch / self.steps, first, end }
    }

    /// Returns `true` if the position belongs to this rank. `rotation` shifts the assignment
    /// between epochs, so that uneven shares rotate over the ranks.
    pub(super) fn is_local(&self, epoch: u64, position: usize) -> bool {
        let LoaderPlan { rank, world_size, .. } = self.plan;
        let rotation = (epoch % world_size as u64) as usize * (self.samples % world_size);
        (position + rotation) % world_size == rank
    }

    /// Returns this rank's samples of a batch.
    pub(super) fn samples_of(&self, batch: u64) -> Vec<usize> {
        let EpochRange { epoch, first, end } = self.epoch_range(batch);
        let positions = (first..end).filter(|position| self.is_local(epoch, *position));
        if !self.shuffle {
            return positions.collect();
        }
        let epoch = if self.reshuffle { epoch } else { 0 };
        let order =
            Permutation::new(self.samples as u64, mix_seed(&[self.plan.seed, ORDER, epoch]));
        positions.map(|position| order.at(position as u64) as usize).collect()
    }
}
