//! Adapters from burn's data loaders to data, and from data to burn's data loaders.

use std::iter::repeat_with;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use burn::data::dataloader::{DataLoader, DataLoaderIterator, Progress};
use burn::data::dataset::DatasetError;
use burn::tensor::Device;

use super::SharedLearnerState;
use crate::data::{Batches, Data, Loader, LoaderPlan, SequentialSource};
use crate::{Error, Result};

/// A training or validation batch, which may have different types.
pub(super) enum Input<T, V> {
    /// Training batch with its number of samples.
    Train(T, usize),
    Valid(V, usize),
}

/// Data as one of burn's loaders. Each iteration is an epoch of this rank's batches.
pub(super) struct ShardedLoader<B> {
    data: Data<B>,
    plan: LoaderPlan,
    batch_size: usize,
    epoch: AtomicU64,
}

impl<B: Send + 'static> ShardedLoader<B> {
    pub(super) fn new(data: Data<B>, plan: LoaderPlan, batch_size: usize) -> Self {
        Self { data, plan, batch_size, epoch: AtomicU64::new(0) }
    }
}

impl<B: Send + 'static> DataLoader<B> for ShardedLoader<B> {
    fn iter<'a>(&'a self) -> Box<dyn DataLoaderIterator<B> + 'a> {
        let steps = self.data.steps(&self.plan);
        let first = self.epoch.fetch_add(1, Ordering::Relaxed) * steps;
        let batches = self.data.loader(self.plan.clone(), first..first + steps);
        Box::new(Epoch { batches, steps, read: 0 })
    }

    fn num_items(&self) -> usize {
        self.data.samples()
    }

    fn to_device(&self, device: &Device) -> Arc<dyn DataLoader<B>> {
        let plan = LoaderPlan { device: device.clone(), ..self.plan.clone() };
        Arc::new(Self::new(self.data.clone(), plan, self.batch_size))
    }

    fn slice(&self, start: usize, end: usize) -> Arc<dyn DataLoader<B>> {
        let data = self.data.clone().part(start..end);
        Arc::new(Self::new(data, self.plan.clone(), self.batch_size))
    }
}

/// One pass over the data.
struct Epoch<B> {
    batches: Loader<B>,
    steps: u64,
    read: u64,
}

impl<B: Send + 'static> Iterator for Epoch<B> {
    type Item = Result<B, DatasetError>;

    fn next(&mut self) -> Option<Self::Item> {
        loop {
            let batch = self.batches.next()?;
            self.read += 1;
            // Skip batches without a sample for this rank.
            if let Some(batch) = batch.transpose() {
                let failed = |error: Error| DatasetError::new(std::io::Error::other(error));
                return Some(batch.map_err(failed));
            }
        }
    }
}

impl<B: Send + 'static> DataLoaderIterator<B> for Epoch<B> {
    fn progress(&self) -> Progress {
        Progress::new(self.read as usize, self.steps as usize, Some("batches".into()))
    }
}

/// Returns the data of a loader, and its number of samples per batch and rank.
pub(super) fn data_of_loader<B: Send + 'static, I: Send + 'static>(
    loader: &Arc<dyn DataLoader<B>>,
    learner_state: &SharedLearnerState,
    plan: &LoaderPlan,
    wrap: fn(B, usize) -> I,
) -> Result<(Data<I>, usize)> {
    if let Some(own) = learner_state.find_own(loader) {
        return Ok((own.data.clone().map_counted(wrap)?, own.batch_size));
    }
    let replayed = ReplayedLoader::new(loader, plan, wrap)?;
    let batch_size = replayed.batch_size;
    Ok((Data::sequential(replayed), batch_size))
}

/// Data from one of burn's own loaders, replayed from the start of the training.
struct ReplayedLoader<B, I> {
    /// Loader of this rank's items.
    loader: Arc<dyn DataLoader<B>>,
    samples: usize,
    /// Maximum number of items per rank.
    share_max: usize,
    batch_size: usize,
    wrap: fn(B, usize) -> I,
}

impl<B: Send + 'static, I> ReplayedLoader<B, I> {
    fn new(
        loader: &Arc<dyn DataLoader<B>>,
        plan: &LoaderPlan,
        wrap: fn(B, usize) -> I,
    ) -> Result<Self> {
        let (samples, world_size) = (loader.num_items(), plan.world_size);
        if samples < world_size {
            let text = format!(
                "the data loader has {samples} items for {world_size} ranks; use at least one per \
                 rank"
            );
            return Err(text.into());
        }
        let start = |rank: usize| samples * rank / world_size;
        // With one device, do exactly as burn does, so that the order is the same: `to_device`
        // consumes random numbers of the loader.
        let own = match world_size {
            1 => loader.to_device(&plan.device),
            _ => loader.slice(start(plan.rank), start(plan.rank + 1)).to_device(&plan.device),
        };
        let batch_size = batch_size(&*loader.slice(0, samples))?;
        let share_max = samples.div_ceil(world_size);
        Ok(Self { loader: own, samples, share_max, batch_size, wrap })
    }
}

/// Returns the number of items per batch. A loader does not expose it, so this reads the first
/// batch.
fn batch_size<B>(loader: &dyn DataLoader<B>) -> Result<usize> {
    let mut items = loader.iter();
    match items.next().transpose()? {
        Some(_) if items.progress().items_processed > 0 => Ok(items.progress().items_processed),
        _ => {
            let text = "cannot determine the batch size of the data loader; create it with \
                        `context.dataloader(data, batch_size)`";
            Err(text.into())
        }
    }
}

impl<B: Send + 'static, I: Send> SequentialSource<I> for ReplayedLoader<B, I> {
    fn samples(&self) -> usize {
        self.samples
    }

    fn steps(&self) -> u64 {
        self.share_max.div_ceil(self.batch_size) as u64
    }

    fn open<'a>(&'a self, _plan: &LoaderPlan, batches: Range<u64>) -> Batches<'a, I> {
        let steps = self.steps();
        // Each pass samples a new order, so start the skipped passes too.
        (0..batches.start / steps).for_each(|_| drop(self.loader.iter()));
        let skipped = usize::try_from(batches.start % steps).unwrap_or(usize::MAX);
        let epochs = repeat_with(move || LoaderPass::new(self, steps));
        Box::new(epochs.flatten().skip(skipped))
    }
}

/// One pass over a loader, with the same number of batches on every rank.
struct LoaderPass<'a, B, I> {
    items: Box<dyn DataLoaderIterator<B> + 'a>,
    steps: u64,
    read: u64,
    num_items: usize,
    wrap: fn(B, usize) -> I,
}

impl<'a, B: Send + 'static, I> LoaderPass<'a, B, I> {
    fn new(of: &'a ReplayedLoader<B, I>, steps: u64) -> Self {
        Self { items: of.loader.iter(), steps, read: 0, num_items: 0, wrap: of.wrap }
    }

    fn batch(&mut self) -> Result<Option<I>> {
        let Some(batch) = self.items.next().transpose()? else { return Ok(None) };
        let before = self.num_items;
        self.num_items = self.items.progress().items_processed;
        Ok(Some((self.wrap)(batch, self.num_items.saturating_sub(before).max(1))))
    }
}

impl<B: Send + 'static, I> Iterator for LoaderPass<'_, B, I> {
    type Item = Result<Option<I>>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.read == self.steps {
            return None;
        }
        self.read += 1;
        let batch = self.batch();
        if self.read < self.steps || batch.is_err() {
            return Some(batch);
        }
        // Remaining batches would be lost, and the next pass would start at a different position.
        // Read on now: a validation does not ask for more batches.
        match self.batch() {
            Ok(None) => Some(batch),
            Ok(Some(_)) => {
                let text = format!(
                    "the data loader has more than {} batches per epoch, as computed from its \
                     items and first batch; build it without `num_workers`, or with \
                     `context.dataloader(data, batch_size)`",
                    self.steps
                );
                Some(Err(text.into()))
            }
            Err(error) => Some(Err(error)),
        }
    }
}
