//! Data with random access.

use std::ops::Range;
use std::sync::Arc;

use burn::tensor::Device;

use super::order::Order;
use super::{BatchContext, BatchJob, BatchJobs, Source};
use crate::Result;

/// Returns one independent job for each batch of the source.
pub(super) fn jobs<B: Send + 'static>(
    source: Arc<dyn Source<B>>,
    order: Order,
    batches: Range<u64>,
) -> BatchJobs<B> {
    let order = Arc::new(order);
    Box::new(batches.map(move |batch| -> BatchJob<B> {
        let (source, order) = (source.clone(), order.clone());
        Box::new(move || {
            let samples = order.samples_of(batch);
            let plan = &order.plan;
            let (device, dtype, seed) = (&plan.device, plan.dtype, plan.seed);
            let context = BatchContext { device, dtype, epoch: batch / order.steps, seed };
            if samples.is_empty() { Ok(None) } else { source.batch(&samples, &context).map(Some) }
        })
    }))
}

/// Lookup by index with a batcher.
pub(super) struct Items<G, T> {
    pub(super) samples: usize,
    pub(super) item: G,
    pub(super) batcher: T,
}

impl<I, B, G, T> Source<B> for Items<G, T>
where
    G: Fn(usize) -> Result<Option<I>> + Send + Sync,
    T: Fn(Vec<I>, &Device) -> B + Send + Sync,
{
    fn samples(&self) -> usize {
        self.samples
    }

    fn batch(&self, samples: &[usize], context: &BatchContext) -> Result<B> {
        let item = |sample: &usize| {
            (self.item)(*sample)?.ok_or_else(|| {
                let samples = self.samples;
                format!("item {sample} not found in the data set, which declares {samples} samples")
                    .into()
            })
        };
        let items = samples.iter().map(item).collect::<Result<Vec<_>>>()?;
        Ok((self.batcher)(items, context.device))
    }
}

/// A contiguous range of a source's samples.
pub(super) struct SampleRange<B> {
    pub(super) source: Arc<dyn Source<B>>,
    pub(super) range: Range<usize>,
}

impl<B> Source<B> for SampleRange<B> {
    fn samples(&self) -> usize {
        self.range.len()
    }

    fn batch(&self, samples: &[usize], context: &BatchContext) -> Result<B> {
        let samples: Vec<usize> = samples.iter().map(|sample| sample + self.range.start).collect();
        self.source.batch(&samples, context)
    }

    fn is_batched(&self) -> bool {
        self.source.is_batched()
    }

    fn fields(&self) -> Vec<String> {
        self.source.fields()
    }
}

/// A source with converted batches.
pub(super) struct Mapped<B, F> {
    pub(super) source: Arc<dyn Source<B>>,
    pub(super) map: Arc<F>,
}

impl<B, C, F: Fn(B) -> Result<C> + Send + Sync> Source<C> for Mapped<B, F> {
    fn samples(&self) -> usize {
        self.source.samples()
    }

    fn batch(&self, samples: &[usize], context: &BatchContext) -> Result<C> {
        (self.map)(self.source.batch(samples, context)?)
    }

    fn is_batched(&self) -> bool {
        self.source.is_batched()
    }

    fn fields(&self) -> Vec<String> {
        self.source.fields()
    }
}
