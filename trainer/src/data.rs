//! Data loading: the order of samples, their distribution over ranks, and the construction of
//! batches.
//!
//! The order is a pure function of (seed, epoch, batch, rank, world size). A position is therefore
//! one number, and seeking is free for data with random access. Neither workers nor queues can
//! change a result.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use burn::tensor::{DType, Device};

use crate::rng::mix_seed;
use crate::train::ReadOrder;
use crate::{InvalidHyperparameters, Result};

#[cfg(feature = "learner")]
mod burn_dataset;
mod indexed;
mod into_item;
mod loader;
mod order;
mod origin;
mod permutation;
mod rows;
mod sequence;
#[cfg(feature = "learner")]
mod sequential;
mod stream;
mod weights;

pub use into_item::IntoItem;
pub use loader::Loader;
use loader::{BatchJob, BatchJobs};
use order::Order;
use origin::Origin;
pub use permutation::Permutation;
pub use rows::{Field, Rows};
pub use sequence::Sequence;
#[cfg(feature = "learner")]
pub(crate) use sequential::{Batches, SequentialSource};
pub use stream::{Pass, Stream};

/// Default queue length of a loader, in batches; see [`Data::queue`].
const QUEUE_BATCHES: usize = 10;

/// Device, dtype, epoch and seed of a batch.
///
/// burn's random number generator is one stream for the whole process. A source that needs random
/// numbers derives them from [`BatchContext::sample_seed`] instead.
#[derive(Debug)]
pub struct BatchContext<'a> {
    /// Device of the tensors, with autodiff for training and without for validation.
    pub device: &'a Device,
    /// Floating-point type of the inputs; see [`Context::dtype`](crate::Context::dtype).
    pub dtype: DType,
    /// Number of epochs completed before this batch.
    pub epoch: u64,
    /// Seed of the data, the same on every rank.
    pub seed: u64,
}

impl BatchContext<'_> {
    /// Returns the seed for all randomness of one sample in this epoch. It does not depend on the
    /// number of ranks or workers.
    pub fn sample_seed(&self, sample: usize) -> u64 {
        mix_seed(&[self.seed, self.epoch, sample as u64])
    }
}

/// A data source with random access by sample index.
#[diagnostic::on_unimplemented(
    message = "`{Self}` cannot make batches of type `{B}`",
    note = "implement `Source<{B}>`, or use `Data::arrays` or `Data::items`"
)]
pub trait Source<B>: Send + Sync {
    /// Returns the number of samples in an epoch.
    fn samples(&self) -> usize;

    /// Makes one batch. Several threads call this concurrently; the result must depend only on the
    /// arguments.
    ///
    /// # Errors
    ///
    /// Any error; it ends the trial.
    fn batch(&self, samples: &[usize], context: &BatchContext) -> Result<B>;

    /// Returns `true` if each "sample" is a complete batch for one rank, as for a [`Sequence`].
    fn is_batched(&self) -> bool {
        false
    }

    /// Describes the arrays of this source for error messages, for example `data.0 [60000, 784]
    /// F32`.
    fn fields(&self) -> Vec<String> {
        vec![]
    }
}

/// Shard, order and device of a [`Loader`]. A global batch contains the same samples for any number
/// of ranks.
#[derive(Clone, Debug)]
pub struct LoaderPlan {
    /// Number of samples in a batch, over all ranks.
    pub global_batch: usize,
    /// Rank of this process.
    pub rank: usize,
    /// Number of ranks.
    pub world_size: usize,
    /// Seed of the sample order.
    pub seed: u64,
    /// Whether samples may be shuffled; `false` for validation.
    pub shuffle: bool,
    /// Device of the batches.
    pub device: Device,
    /// Floating-point type of the inputs; see [`Context::dtype`](crate::Context::dtype).
    pub dtype: DType,
}

/// Batches of type `B` from any kind of source. No sample is read before training starts.
pub struct Data<B> {
    origin: Origin<B>,
    shuffle: bool,
    /// Whether each epoch is shuffled differently.
    reshuffle: bool,
    drop_last: bool,
    workers: usize,
    queue: usize,
}

impl<B> fmt::Debug for Data<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Data")
            .field("samples", &self.origin.samples())
            .field("shuffle", &self.shuffle)
            .field("reshuffle", &self.reshuffle)
            .field("drop_last", &self.drop_last)
            .field("workers", &self.workers)
            .field("queue", &self.queue)
            .finish()
    }
}

impl<B: Send + 'static> Data<B> {
    fn from_origin(origin: Origin<B>) -> Self {
        let (shuffle, reshuffle, drop_last) = (true, true, false);
        Self { origin, shuffle, reshuffle, drop_last, workers: 0, queue: QUEUE_BATCHES }
    }

    /// Creates data from any [`Source`].
    pub fn new(source: impl Source<B> + 'static) -> Self {
        Self::from_origin(Origin::Indexed(Arc::new(source)))
    }

    /// Creates data from complete batches that the program makes by index. In each step, every rank
    /// takes one batch.
    ///
    /// Each batch must have the size of one rank's share,
    /// [`Context::batch_size`](crate::Context::batch_size). Results therefore depend on the world
    /// size.
    pub fn sequence(sequence: impl Sequence<B> + 'static) -> Self {
        Self::new(sequence::SequenceBatches(sequence))
    }

    /// Creates data from arrays in memory. The first dimension is the sample index. Accepts tuples
    /// such as `(x, y)` or `(x, y, weights)`, lists and named maps.
    ///
    /// # Errors
    ///
    /// Fails without samples, or if two fields differ in their number of samples.
    pub fn arrays<R: Rows<Batch = B> + 'static>(rows: R) -> Result<Self> {
        Ok(Self::new(rows::Arrays::new(rows)?))
    }

    /// Creates data from a lookup by index and a batcher. burn's `Dataset::get` and
    /// `Batcher::batch` can be passed unchanged.
    ///
    /// `item` must return an item for every index below `samples`, as an `Option` or a `Result`. An
    /// error or a missing item ends the training.
    pub fn items<I: 'static, F: IntoItem<I>>(
        samples: usize,
        item: impl Fn(usize) -> F + Send + Sync + 'static,
        batcher: impl Fn(Vec<I>, &Device) -> B + Send + Sync + 'static,
    ) -> Self {
        Self::new(indexed::Items { samples, item: move |sample| item(sample).into_item(), batcher })
    }

    /// Sets whether training visits the samples in a new order each epoch (default: `true`).
    #[must_use]
    pub fn shuffle(self, shuffle: bool) -> Self {
        Self { shuffle, ..self }
    }

    /// Uses the shuffled order of the first epoch in all epochs.
    #[must_use]
    pub fn skip_shuffle_at_epoch_end(self) -> Self {
        Self { reshuffle: false, ..self }
    }

    /// Drops the last batch of an epoch if it is not full.
    #[must_use]
    pub fn drop_last(self) -> Self {
        Self { drop_last: true, ..self }
    }

    /// Sets the number of threads that prepare batches in advance (default: 0). Does not change
    /// results.
    ///
    /// The threads of training data start after
    /// [`Callback::on_train_begin`](crate::Callback::on_train_begin), before a checkpoint is
    /// restored.
    #[must_use]
    pub fn workers(self, workers: usize) -> Self {
        Self { workers, ..self }
    }

    /// Sets how many batches may be in preparation or queued at a time (default: 10). Has no effect
    /// without workers. Workers beyond this number stay idle.
    #[must_use]
    pub fn queue(self, batches: usize) -> Self {
        Self { queue: batches, ..self }
    }

    /// Converts each batch. The conversion runs in the workers, if there are any. The result must
    /// depend only on the batch.
    pub fn map<C: Send + 'static>(
        self,
        map: impl Fn(B) -> Result<C> + Send + Sync + 'static,
    ) -> Data<C> {
        let map = Arc::new(map);
        let origin = match self.origin {
            Origin::Indexed(source) => {
                Origin::Indexed(Arc::new(indexed::Mapped { source, map }) as Arc<dyn Source<C>>)
            }
            Origin::Streamed(stream) => {
                Origin::Streamed(Arc::new(stream::MappedStream { stream, map }))
            }
            #[cfg(feature = "learner")]
            Origin::Sequential(source) => Origin::Sequential(sequential::mapped(source, map)),
        };
        let Self { shuffle, reshuffle, drop_last, workers, queue, .. } = self;
        Data { origin, shuffle, reshuffle, drop_last, workers, queue }
    }

    /// Splits the data into training and validation data.
    ///
    /// The last `fraction` of the samples in their original order, rounded up, is for validation.
    /// Both parts keep the options of this data, except that only the training part keeps
    /// [`drop_last`](Self::drop_last).
    ///
    /// # Errors
    ///
    /// Fails if either part would be empty, or if the data is a stream; for streams, use
    /// [`Stream::take`] and [`Stream::skip`].
    pub fn validation_split(self, fraction: f64) -> Result<(Self, Self)> {
        let Origin::Indexed(source) = self.origin else {
            return Err(
                "cannot split a stream for validation: use `Stream::take` for one part and \
                 `Stream::skip` for the other"
                    .into(),
            );
        };
        let samples = source.samples();
        // Same rounding as Keras.
        let training = (samples as f64 * (1.0 - fraction)) as usize;
        let validation = samples.saturating_sub(training);
        if !(0.0..1.0).contains(&fraction) || validation == 0 || validation == samples {
            return Err(format!(
                "validation_split is {fraction}: this assigns {validation} of {samples} samples to \
                 validation, but both parts need at least one"
            )
            .into());
        }
        let part = |range: Range<usize>| Self {
            origin: Origin::Indexed(Arc::new(indexed::SampleRange {
                source: source.clone(),
                range,
            })),
            ..self
        };
        let validated = Self { drop_last: false, ..part(training..samples) };
        Ok((part(0..training), validated))
    }

    /// Returns the number of samples in an epoch; for a [`Sequence`], the number of its batches.
    pub fn samples(&self) -> usize {
        self.origin.samples()
    }

    /// Returns whether threads prepare batches in advance, from any batch on.
    pub(crate) fn has_workers(&self) -> bool {
        // Opening one of burn's loaders changes the order of its next pass.
        !self.origin.is_sequential() && self.workers > 0
    }

    /// Returns the settings that, with this seed, determine the order of the samples.
    pub(crate) fn read_order(&self, seed: u32) -> ReadOrder {
        let Self { shuffle, reshuffle, drop_last, .. } = *self;
        ReadOrder { seed, shuffle, reshuffle, drop_last }
    }

    /// Returns the size of one step over all ranks, in units of [`samples`](Self::samples).
    pub(crate) fn global_batch(&self, plan: &LoaderPlan) -> usize {
        if self.origin.is_batched() { plan.world_size } else { plan.global_batch }
    }

    /// Returns whether the source determines the size of the batches.
    pub(crate) fn has_own_batches(&self) -> bool {
        self.origin.is_batched() || self.origin.is_sequential()
    }

    /// Returns the number of batches in an epoch, which is the same on every rank.
    pub fn steps(&self, plan: &LoaderPlan) -> u64 {
        #[cfg(feature = "learner")]
        if let Origin::Sequential(source) = &self.origin {
            return source.steps();
        }
        let (samples, global_batch) = (self.samples(), self.global_batch(plan));
        let steps =
            if self.drop_last { samples / global_batch } else { samples.div_ceil(global_batch) };
        steps as u64
    }

    /// Fails if this plan cannot train on the data.
    pub(crate) fn check(&self, plan: &LoaderPlan) -> Result<()> {
        let LoaderPlan { global_batch, world_size, .. } = *plan;
        let samples = self.samples();
        let what = if self.origin.is_batched() { "batches" } else { "samples" };
        if samples == 0 {
            return Err(format!("the training data has no {what}").into());
        }
        if samples < world_size {
            return Err(format!(
                "the training data has {samples} {what} for {world_size} ranks, but each rank \
                 needs at least one; use fewer slots per trial or more data"
            )
            .into());
        }
        // The batches of a loader are smaller than its batch size if a rank has fewer items.
        let is_divided = !self.origin.is_batched() && !self.origin.is_sequential();
        if is_divided && (global_batch == 0 || global_batch > samples) {
            return Err(InvalidHyperparameters(format!(
                "global_batch_size is {global_batch}, but must be between 1 and {samples}, the \
                 number of training samples"
            ))
            .into());
        }
        Ok(())
    }

    /// Fails if this plan cannot validate on the data.
    pub(crate) fn check_validation(&self, plan: &LoaderPlan) -> Result<()> {
        match (self.samples(), self.steps(plan)) {
            (0, _) => Err("the validation data has no samples".into()),
            (samples, 0) => Err(format!(
                "the validation data has {samples} samples, which fill no batch of {}; remove \
                 `drop_last`",
                self.global_batch(plan)
            )
            .into()),
            _ => Ok(()),
        }
    }

    /// Describes the arrays of the data for error messages.
    pub(crate) fn fields(&self) -> Vec<String> {
        self.origin.fields()
    }

    /// Returns an iterator over batches `batches.start..batches.end`, in order and counted over all
    /// epochs.
    pub fn loader(&self, plan: LoaderPlan, batches: Range<u64>) -> Loader<B> {
        let order = Order {
            samples: self.samples(),
            global_batch: self.global_batch(&plan),
            steps: self.steps(&plan),
            shuffle: self.shuffle && plan.shuffle,
            reshuffle: self.reshuffle,
            plan,
        };
        let is_over = Arc::<AtomicBool>::default();
        let jobs = match &self.origin {
            Origin::Indexed(source) => indexed::jobs(source.clone(), order, batches.clone()),
            Origin::Streamed(stream) => stream.jobs(order, batches.clone(), is_over.clone()),
            #[cfg(feature = "learner")]
            Origin::Sequential(source) => {
                return Loader::read_sequentially(source.clone(), order.plan, batches, self.queue);
            }
        };
        Loader::start(jobs, batches, (self.workers, self.queue), is_over)
    }
}

#[cfg(test)]
mod tests;
