//! Adapters for the `learner` feature: burn data sets as [`Data`], and derived data.

use std::ops::Range;
use std::sync::Arc;

use burn::data::dataloader::batcher::Batcher;
use burn::data::dataset::Dataset;
use burn::tensor::Device;

use super::indexed::Items;
use super::{BatchContext, Batches, Data, LoaderPlan, Origin, SequentialSource, Source};
use crate::Result;

impl<B> Clone for Data<B> {
    fn clone(&self) -> Self {
        Self { origin: self.origin.clone(), ..*self }
    }
}

impl<B: Send + 'static> Data<B> {
    /// Creates data from a burn data set and a batcher for its items.
    pub fn dataset<I: Send + 'static>(
        dataset: impl Dataset<I> + 'static,
        batcher: impl Batcher<I, B> + 'static,
    ) -> Self {
        let samples = dataset.len();
        let item = move |index: usize| Ok(Some(dataset.get(index)?));
        let batcher = move |items, device: &Device| batcher.batch(items, device);
        Self::new(Items { samples, item, batcher })
    }

    /// Creates data from batches that can only be read sequentially.
    pub(crate) fn sequential(source: impl SequentialSource<B> + 'static) -> Self {
        Self::from_origin(Origin::Sequential(Arc::new(source)))
    }

    /// Converts each batch, given its number of samples. Each batch of a sequential source counts
    /// as one sample. Fails for a stream, which does not report the number of samples of a batch.
    pub(crate) fn map_counted<C: Send + 'static>(self, map: fn(B, usize) -> C) -> Result<Data<C>> {
        let origin = match self.origin {
            Origin::Indexed(source) => {
                Origin::Indexed(Arc::new(Mapped { of: source, map }) as Arc<dyn Source<C>>)
            }
            Origin::Sequential(source) => Origin::Sequential(Arc::new(Mapped { of: source, map })),
            Origin::Streamed(_) => {
                return Err(
                    "burn's training loop does not support `Stream`; use `Data::dataset`, `items` \
                     or `arrays`"
                        .into(),
                );
            }
        };
        let Self { shuffle, reshuffle, drop_last, workers, queue, .. } = self;
        Ok(Data { origin, shuffle, reshuffle, drop_last, workers, queue })
    }

    /// Restricts the data to the samples in this range.
    pub(crate) fn part(self, range: Range<usize>) -> Self {
        Self {
            origin: Origin::Indexed(Arc::new(SampleRange { of: self.origin.clone(), range })),
            ..self
        }
    }
}

struct Mapped<S: ?Sized, F> {
    of: Arc<S>,
    map: F,
}

impl<B, C> Source<C> for Mapped<dyn Source<B>, fn(B, usize) -> C> {
    fn samples(&self) -> usize {
        self.of.samples()
    }

    fn batch(&self, samples: &[usize], context: &BatchContext) -> Result<C> {
        Ok((self.map)(self.of.batch(samples, context)?, samples.len()))
    }

    fn is_batched(&self) -> bool {
        self.of.is_batched()
    }

    fn fields(&self) -> Vec<String> {
        self.of.fields()
    }
}

impl<B, C> SequentialSource<C> for Mapped<dyn SequentialSource<B>, fn(B, usize) -> C> {
    fn samples(&self) -> usize {
        self.of.samples()
    }

    fn steps(&self) -> u64 {
        self.of.steps()
    }

    fn open<'a>(&'a self, plan: &LoaderPlan, batches: Range<u64>) -> Batches<'a, C> {
        let map = |batch: Option<B>| batch.map(|batch| (self.map)(batch, 1));
        Box::new(self.of.open(plan, batches).map(move |batch| batch.map(map)))
    }
}

struct SampleRange<B> {
    of: Origin<B>,
    range: Range<usize>,
}

impl<B> Source<B> for SampleRange<B> {
    fn samples(&self) -> usize {
        self.range.len()
    }

    fn batch(&self, samples: &[usize], context: &BatchContext) -> Result<B> {
        let Origin::Indexed(source) = &self.of else {
            return Err("cannot take a part of a stream: streams have no random access".into());
        };
        let samples: Vec<usize> = samples.iter().map(|sample| self.range.start + sample).collect();
        source.batch(&samples, context)
    }

    fn is_batched(&self) -> bool {
        self.of.is_batched()
    }

    fn fields(&self) -> Vec<String> {
        self.of.fields()
    }
}
