//! Batches that can only be read sequentially.

use std::ops::Range;
use std::sync::Arc;

use super::LoaderPlan;
use crate::Result;

/// Batches of this rank; `None` if this rank has no sample in a batch.
pub(crate) type Batches<'a, B> = Box<dyn Iterator<Item = Result<Option<B>>> + 'a>;

/// Sequential batches. Their order must be the same in every pass and every process. Seeking reads
/// all batches before the position again, so prefer a [`Source`](super::Source) where possible.
///
/// The ordering options of [`Data`](super::Data) have no effect, and one thread reads ahead.
pub(crate) trait SequentialSource<B>: Send + Sync {
    /// Returns the number of samples in an epoch, over all ranks.
    fn samples(&self) -> usize;

    /// Returns the number of batches in an epoch, which is the same on every rank.
    fn steps(&self) -> u64;

    /// Returns batches from `batches.start` on, counted over all epochs. Implementations may ignore
    /// the end of the range.
    fn open<'a>(&'a self, plan: &LoaderPlan, batches: Range<u64>) -> Batches<'a, B>;
}

/// A sequential source with converted batches.
struct Mapped<B, F> {
    of: Arc<dyn SequentialSource<B>>,
    map: Arc<F>,
}

/// Returns a sequential source that converts each batch with `map`.
pub(super) fn mapped<B: 'static, C: 'static>(
    of: Arc<dyn SequentialSource<B>>,
    map: Arc<impl Fn(B) -> Result<C> + Send + Sync + 'static>,
) -> Arc<dyn SequentialSource<C>> {
    Arc::new(Mapped { of, map })
}

impl<B, C, F: Fn(B) -> Result<C> + Send + Sync> SequentialSource<C> for Mapped<B, F> {
    fn samples(&self) -> usize {
        self.of.samples()
    }

    fn steps(&self) -> u64 {
        self.of.steps()
    }

    fn open<'a>(&'a self, plan: &LoaderPlan, batches: Range<u64>) -> Batches<'a, C> {
        let map = |batch: Option<B>| batch.map(|batch| (self.map)(batch)).transpose();
        Box::new(self.of.open(plan, batches).map(move |batch| batch.and_then(map)))
    }
}
