//! Data: which samples a batch holds, and who makes it.
//!
//! The order is a pure function of (seed, epoch, batch, rank, world): a position is one number, a
//! seek costs nothing, and neither workers nor queues can change a result.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use burn::tensor::{DType, Device};

use crate::rng::{ORDER, key};
use crate::{InvalidHyperparameters, Result};

mod loader;
mod permutation;
mod rows;

pub use loader::Loader;
pub(crate) use loader::panic_message;
pub use permutation::Permutation;
pub use rows::Rows;

/// Batches that wait in the queue, unless [`Data::queue`] says otherwise.
const QUEUE_BATCHES: usize = 10;

/// What a batch may depend on besides its samples. burn's own random numbers are one stream for the
/// whole process: a source that wants some takes them from [`At::sample_seed`].
#[derive(Debug)]
pub struct At<'a> {
    /// Where the tensors go: with autodiff for training, without for validation.
    pub device: &'a Device,
    /// What inputs are to be of: see [`Context::dtype`](crate::Context::dtype).
    pub dtype: DType,
    /// Epochs finished before this batch.
    pub epoch: u64,
    /// The data's seed, the same on every rank.
    pub seed: u64,
}

impl At<'_> {
    /// The seed for all that is random about one sample in this epoch: the same for any number of
    /// ranks or workers.
    pub fn sample_seed(&self, sample: usize) -> u64 {
        key(&[self.seed, self.epoch, sample as u64])
    }
}

/// Samples by index. All that can be read in any order is one of these.
#[diagnostic::on_unimplemented(
    message = "`{Self}` cannot make batches of type `{B}`",
    note = "implement `Source<{B}>`, or use `Data::arrays` or `Data::items`"
)]
pub trait Source<B>: Send + Sync {
    /// The number of samples in an epoch.
    fn samples(&self) -> usize;

    /// Makes one batch. Called by several threads at once; must depend on nothing but its arguments.
    ///
    /// # Errors
    ///
    /// Whatever should end the trial.
    fn batch(&self, samples: &[usize], at: &At) -> Result<B>;
}

/// Who reads which samples, in which order. A global batch holds the same samples for any number of
/// ranks.
#[derive(Clone, Debug)]
pub struct Plan {
    /// Samples in a batch over all ranks.
    pub global_batch: usize,
    /// This rank.
    pub rank: usize,
    /// The number of ranks.
    pub world: usize,
    /// The seed of the order.
    pub seed: u64,
    /// Whether samples may be shuffled; not for validation.
    pub shuffle: bool,
    /// Where batches go.
    pub device: Device,
    /// What inputs are to be of: see [`Context::dtype`](crate::Context::dtype).
    pub dtype: DType,
}

/// Batches of type `B`, of any origin. Nothing is read before training starts.
pub struct Data<B> {
    source: Arc<dyn Source<B>>,
    shuffle: bool,
    drop_last: bool,
    workers: usize,
    queue: usize,
}

impl<B> fmt::Debug for Data<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Data")
            .field("samples", &self.source.samples())
            .field("shuffle", &self.shuffle)
            .field("drop_last", &self.drop_last)
            .field("workers", &self.workers)
            .field("queue", &self.queue)
            .finish()
    }
}

impl<B: Send + 'static> Data<B> {
    /// Any [`Source`].
    pub fn new(source: impl Source<B> + 'static) -> Self {
        let source = Arc::new(source);
        Self { source, shuffle: true, drop_last: false, workers: 0, queue: QUEUE_BATCHES }
    }

    /// Arrays in memory, first dimension the samples: `(x, y)`, `(x, y, weights)`, lists or named
    /// maps of such.
    ///
    /// # Errors
    ///
    /// There are no samples, or two fields have different numbers of them.
    pub fn arrays<R: Rows<Batch = B> + 'static>(rows: R) -> Result<Self> {
        Ok(Self::new(rows::Arrays::new(rows)?))
    }

    /// Items by index, and what makes a batch of them: burn's `Dataset::get` and `Batcher::batch`
    /// fit as they are.
    ///
    /// `item` must give one for every index below `samples`.
    pub fn items<I: 'static>(
        samples: usize,
        item: impl Fn(usize) -> Option<I> + Send + Sync + 'static,
        batcher: impl Fn(Vec<I>, &Device) -> B + Send + Sync + 'static,
    ) -> Self {
        Self::new(Items { samples, item, batcher })
    }

    /// Whether training visits the samples in a new order each epoch (default: yes).
    #[must_use]
    pub fn shuffle(self, shuffle: bool) -> Self {
        Self { shuffle, ..self }
    }

    /// Leaves out the last batch of an epoch where it is not full.
    #[must_use]
    pub fn drop_last(self) -> Self {
        Self { drop_last: true, ..self }
    }

    /// Threads that make batches ahead of time (default: none). Changes no result.
    #[must_use]
    pub fn workers(self, workers: usize) -> Self {
        Self { workers, ..self }
    }

    /// Batches that may wait (default: 10), where there are workers.
    #[must_use]
    pub fn queue(self, batches: usize) -> Self {
        Self { queue: batches, ..self }
    }

    /// The number of samples in an epoch.
    pub fn samples(&self) -> usize {
        self.source.samples()
    }

    /// The batches of an epoch, equal on every rank.
    pub fn steps(&self, global_batch: usize) -> u64 {
        let samples = self.source.samples();
        let steps =
            if self.drop_last { samples / global_batch } else { samples.div_ceil(global_batch) };
        steps as u64
    }

    /// Refuses what cannot be trained on with this batch size.
    pub(crate) fn check(&self, global_batch: usize) -> Result<()> {
        let samples = self.source.samples();
        if samples == 0 {
            return Err("the training data has no samples".into());
        }
        if global_batch == 0 || global_batch > samples {
            return Err(InvalidHyperparameters(format!(
                "global_batch_size is {global_batch}, but must be between 1 and {samples}, the \
                 number of training samples"
            ))
            .into());
        }
        Ok(())
    }

    /// Batches `batches.start..batches.end`, counted over all epochs, in order.
    pub fn loader(&self, plan: Plan, batches: Range<u64>) -> Loader<B> {
        let source = self.source.clone();
        let order = Order {
            samples: source.samples(),
            steps: self.steps(plan.global_batch),
            shuffle: self.shuffle && plan.shuffle,
            plan,
        };
        let make = move |batch: u64| {
            let samples = order.samples_of(batch);
            let plan = &order.plan;
            let (device, dtype, seed) = (&plan.device, plan.dtype, plan.seed);
            let at = At { device, dtype, epoch: batch / order.steps, seed };
            if samples.is_empty() { Ok(None) } else { source.batch(&samples, &at).map(Some) }
        };
        Loader::start(Arc::new(make), batches, self.workers, self.queue)
    }
}

/// Which samples a batch holds on a rank.
struct Order {
    plan: Plan,
    samples: usize,
    steps: u64,
    shuffle: bool,
}

impl Order {
    /// This rank's share of batch `batch`: of the global batch, the places `p` of the epoch with
    /// `(p + turn) % world == rank`, where `turn` rolls on between epochs.
    fn samples_of(&self, batch: u64) -> Vec<usize> {
        let Plan { global_batch, rank, world, seed, .. } = self.plan;
        let (epoch, first) = (batch / self.steps, (batch % self.steps) as usize * global_batch);
        let turn = (epoch % world as u64) as usize * (self.samples % world);
        let mine = (first..(first + global_batch).min(self.samples))
            .filter(|place| (place + turn) % world == rank);
        if !self.shuffle {
            return mine.collect();
        }
        let order = Permutation::new(self.samples as u64, key(&[seed, ORDER, epoch]));
        mine.map(|place| order.at(place as u64) as usize).collect()
    }
}

/// Items, and what makes a batch of them.
struct Items<G, T> {
    samples: usize,
    item: G,
    batcher: T,
}

impl<I, B, G, T> Source<B> for Items<G, T>
where
    G: Fn(usize) -> Option<I> + Send + Sync,
    T: Fn(Vec<I>, &Device) -> B + Send + Sync,
{
    fn samples(&self) -> usize {
        self.samples
    }

    fn batch(&self, samples: &[usize], at: &At) -> Result<B> {
        let item = |sample: &usize| {
            (self.item)(*sample).ok_or_else(|| {
                format!("the data set has no item {sample}, but {} samples", self.samples).into()
            })
        };
        let items = samples.iter().map(item).collect::<Result<Vec<_>>>()?;
        Ok((self.batcher)(items, at.device))
    }
}

#[cfg(test)]
mod tests;
