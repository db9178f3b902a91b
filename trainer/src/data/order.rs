//! Which samples a batch holds on a rank.

use super::{Permutation, Plan};
use crate::rng::{ORDER, key};

/// The order of samples over all epochs, and who takes which.
pub(super) struct Order {
    pub(super) plan: Plan,
    /// Samples of an epoch.
    pub(super) samples: usize,
    /// Samples of a batch over all ranks.
    pub(super) global_batch: usize,
    /// Batches of an epoch.
    pub(super) steps: u64,
    pub(super) shuffle: bool,
    /// Whether each epoch has an order of its own.
    pub(super) reshuffle: bool,
}

/// The places in an epoch that a batch takes.
pub(super) struct Places {
    pub(super) epoch: u64,
    pub(super) first: usize,
    pub(super) end: usize,
}

impl Order {
    pub(super) fn places(&self, batch: u64) -> Places {
        let first = (batch % self.steps) as usize * self.global_batch;
        let end = (first + self.global_batch).min(self.samples);
        Places { epoch: batch / self.steps, first, end }
    }

    /// Whether a place of the epoch is this rank's: `(place + turn) % world == rank`, where `turn` rolls
    /// on between epochs.
    pub(super) fn is_mine(&self, epoch: u64, place: usize) -> bool {
        let Plan { rank, world, .. } = self.plan;
        let turn = (epoch % world as u64) as usize * (self.samples % world);
        (place + turn) % world == rank
    }

    /// This rank's share of batch `batch`.
    pub(super) fn samples_of(&self, batch: u64) -> Vec<usize> {
        let Places { epoch, first, end } = self.places(batch);
        let mine = (first..end).filter(|place| self.is_mine(epoch, *place));
        if !self.shuffle {
            return mine.collect();
        }
        let epoch = if self.reshuffle { epoch } else { 0 };
        let order = Permutation::new(self.samples as u64, key(&[self.plan.seed, ORDER, epoch]));
        mine.map(|place| order.at(place as u64) as usize).collect()
    }
}
