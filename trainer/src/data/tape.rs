//! Batches that can only be read in the order in which they come.

use std::ops::Range;
use std::sync::Arc;

use super::Plan;
use crate::Result;

/// Batches of this rank on their way; `None` where this rank has no sample in one.
pub(crate) type Batches<'a, B> = Box<dyn Iterator<Item = Result<Option<B>>> + 'a>;

/// Batches in an order of their own, which must be the same each time and in each process. To get to
/// a place, all before it is read again: a [`Source`](super::Source) is better where there can be one.
///
/// [`Data`](super::Data)'s options of order change nothing here, and one thread reads ahead.
pub(crate) trait Tape<B>: Send + Sync {
    /// The number of samples in an epoch, over all ranks.
    fn samples(&self) -> usize;

    /// The batches of an epoch, equal on every rank.
    fn steps(&self) -> u64;

    /// Batches from `batches.start` on, counted over all epochs; the end need not be looked at.
    fn open<'a>(&'a self, plan: &Plan, batches: Range<u64>) -> Batches<'a, B>;
}

/// A tape whose batches are made into others.
struct Mapped<B, F> {
    of: Arc<dyn Tape<B>>,
    map: Arc<F>,
}

/// A tape of what `map` makes of each batch.
pub(super) fn mapped<B: 'static, C: 'static>(
    of: Arc<dyn Tape<B>>,
    map: Arc<impl Fn(B) -> Result<C> + Send + Sync + 'static>,
) -> Arc<dyn Tape<C>> {
    Arc::new(Mapped { of, map })
}

impl<B, C, F: Fn(B) -> Result<C> + Send + Sync> Tape<C> for Mapped<B, F> {
    fn samples(&self) -> usize {
        self.of.samples()
    }

    fn steps(&self) -> u64 {
        self.of.steps()
    }

    fn open<'a>(&'a self, plan: &Plan, batches: Range<u64>) -> Batches<'a, C> {
        let map = |batch: Option<B>| batch.map(|it| (self.map)(it)).transpose();
        Box::new(self.of.open(plan, batches).map(move |batch| batch.and_then(map)))
    }
}
