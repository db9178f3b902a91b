//! Groups the items of a stream into batches.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use burn::tensor::Device;

use super::{Items, Lazy, Open, Pass, Stream};
use crate::data::order::{EpochRange, Order};
use crate::data::{BatchJob, BatchJobs};
use crate::{Error, Result};

/// A stream of batches, independent of the item type.
pub(in crate::data) trait BatchStream<B>: Send + Sync {
    fn samples(&self) -> usize;

    /// Returns the jobs. Seeking the first batch ends with an error when `is_over` is set.
    fn jobs(&self, order: Order, batches: Range<u64>, is_over: Arc<AtomicBool>) -> BatchJobs<B>;
}

pub(super) struct Batcher<T, F> {
    pub(super) stream: Stream<T>,
    pub(super) samples: usize,
    pub(super) batcher: Arc<F>,
}

impl<T, B, F> BatchStream<B> for Batcher<T, F>
where
    T: Send + 'static,
    B: Send + 'static,
    F: Fn(Vec<T>, &Device) -> B + Send + Sync + 'static,
{
    fn samples(&self) -> usize {
        self.samples
    }

    fn jobs(&self, order: Order, batches: Range<u64>, is_over: Arc<AtomicBool>) -> BatchJobs<B> {
        let mut reader = Reader { open: self.stream.open.clone(), order, pass: None, is_over };
        let batcher = self.batcher.clone();
        // Do not read on after an error: the next read would restart the pass.
        let mut has_failed = false;
        Box::new(batches.map_while(move |batch| -> Option<BatchJob<B>> {
            if has_failed {
                return None;
            }
            let (items, batcher) = (reader.read(batch), batcher.clone());
            has_failed = items.is_err();
            let device = reader.order.plan.device.clone();
            Some(Box::new(move || {
                let items: Vec<T> = items?.into_iter().map(|item| item()).collect::<Result<_>>()?;
                Ok((!items.is_empty()).then(|| batcher(items, &device)))
            }))
        }))
    }
}

/// Reads a stream batch by batch.
struct Reader<T> {
    open: Arc<Open<T>>,
    order: Order,
    pass: Option<OpenPass<T>>,
    is_over: Arc<AtomicBool>,
}

/// The current pass.
struct OpenPass<T> {
    epoch: u64,
    position: usize,
    items: Items<T>,
}

impl<T: Send + 'static> Reader<T> {
    /// Returns this rank's items of a batch. The first batch may be any; further batches must
    /// follow in order.
    fn read(&mut self, batch: u64) -> Result<Vec<Lazy<T>>> {
        let EpochRange { epoch, first, end } = self.order.epoch_range(batch);
        let mut pass = match self.pass.take().filter(|pass| pass.epoch == epoch) {
            Some(pass) => pass,
            None => {
                let items = (self.open)(Pass { epoch, seed: self.order.plan.seed })?;
                OpenPass { epoch, position: 0, items }
            }
        };
        let mut local = vec![];
        while pass.position < end {
            if self.is_over.load(Ordering::Relaxed) {
                return Err("the loader was dropped".into());
            }
            let position = pass.position;
            let item =
                pass.items.next().unwrap_or_else(|| Err(self.unexpected_end(epoch, position)))?;
            if position >= first && self.order.is_local(epoch, position) {
                local.push(item);
            }
            pass.position += 1;
        }
        self.pass = Some(pass);
        Ok(local)
    }

    fn unexpected_end(&self, epoch: u64, position: usize) -> Error {
        let samples = self.order.samples;
        format!(
            "the stream returned {position} items in epoch {epoch}, but an epoch has {samples}; \
             set the number of items in an epoch with `Stream::samples`"
        )
        .into()
    }
}

/// A stream with converted batches.
pub(in crate::data) struct MappedStream<B, F> {
    pub(in crate::data) stream: Arc<dyn BatchStream<B>>,
    pub(in crate::data) map: Arc<F>,
}

impl<B, C, F> BatchStream<C> for MappedStream<B, F>
where
    B: 'static,
    C: Send + 'static,
    F: Fn(B) -> Result<C> + Send + Sync + 'static,
{
    fn samples(&self) -> usize {
        self.stream.samples()
    }

    fn jobs(&self, order: Order, batches: Range<u64>, is_over: Arc<AtomicBool>) -> BatchJobs<C> {
        let map = self.map.clone();
        Box::new(self.stream.jobs(order, batches, is_over).map(move |job| -> BatchJob<C> {
            let map = map.clone();
            Box::new(move || job()?.map(|batch| map(batch)).transpose())
        }))
    }
}
