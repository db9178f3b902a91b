//! What ranks do together.

use crate::Result;

/// Sums over ranks. Every rank calls the same methods in the same order and gets the same bits; a
/// failure is final for the process.
pub trait Collective: Send + Sync + std::fmt::Debug {
    /// This rank.
    fn rank(&self) -> usize;

    /// The number of ranks.
    fn size(&self) -> usize;

    /// Replaces `values` by their sums over all ranks.
    ///
    /// # Errors
    ///
    /// Another rank is gone.
    fn sum_f32(&self, values: &mut [f32]) -> Result<()>;

    /// Replaces `values` by their sums over all ranks.
    ///
    /// # Errors
    ///
    /// Another rank is gone.
    fn sum_f64(&self, values: &mut [f64]) -> Result<()>;

    /// This rank's share of a batch size.
    ///
    /// # Errors
    ///
    /// The batch has no sample for each rank.
    fn shard_batch_size(&self, global: usize) -> Result<usize> {
        let size = self.size();
        if global < size {
            let text = format!("global_batch_size is {global}, but there are {size} ranks");
            return Err(crate::InvalidHyperparameters(text).into());
        }
        Ok(global / size)
    }
}

/// One rank: it has every sum already.
#[derive(Debug)]
pub(crate) struct Alone;

impl Collective for Alone {
    fn rank(&self) -> usize {
        0
    }

    fn size(&self) -> usize {
        1
    }

    fn sum_f32(&self, _values: &mut [f32]) -> Result<()> {
        Ok(())
    }

    fn sum_f64(&self, _values: &mut [f64]) -> Result<()> {
        Ok(())
    }
}
