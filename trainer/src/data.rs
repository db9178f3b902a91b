//! Data: which samples a batch holds, and who makes it.
//!
//! The order is a pure function of (seed, epoch, batch, rank, world): a position is one number, a
//! seek costs nothing, and neither workers nor queues can change a result.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use burn::tensor::{DType, Device};

use crate::rng::key;
use crate::train::ReadOrder;
use crate::{InvalidHyperparameters, Result};

#[cfg(feature = "learner")]
mod adapt;
mod found;
mod indexed;
mod loader;
mod order;
mod permutation;
mod rows;
mod sequence;
mod stream;
#[cfg(feature = "learner")]
mod tape;
mod weights;

pub use found::Found;
pub use loader::Loader;
use loader::{Job, Jobs};
use order::Order;
pub use permutation::Permutation;
pub use rows::{Field, Rows};
pub use sequence::Sequence;
pub use stream::{Pass, Stream};
#[cfg(feature = "learner")]
pub(crate) use tape::{Batches, Tape};

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

    /// Whether what is counted as a sample is a whole batch of one rank, as of a [`Sequence`].
    fn is_batched(&self) -> bool {
        false
    }

    /// What it holds, for error messages: such as `data.0 [60000, 784] F32`.
    fn fields(&self) -> Vec<String> {
        vec![]
    }
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
    origin: Origin<B>,
    shuffle: bool,
    /// Whether each epoch has an order of its own.
    reshuffle: bool,
    drop_last: bool,
    workers: usize,
    queue: usize,
}

/// Where batches come from.
enum Origin<B> {
    Indexed(Arc<dyn Source<B>>),
    Streamed(Arc<dyn stream::Batched<B>>),
    #[cfg(feature = "learner")]
    Taped(Arc<dyn Tape<B>>),
}

impl<B> Clone for Origin<B> {
    fn clone(&self) -> Self {
        match self {
            Self::Indexed(source) => Self::Indexed(source.clone()),
            Self::Streamed(stream) => Self::Streamed(stream.clone()),
            #[cfg(feature = "learner")]
            Self::Taped(tape) => Self::Taped(tape.clone()),
        }
    }
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

impl<B> Origin<B> {
    fn samples(&self) -> usize {
        match self {
            Self::Indexed(source) => source.samples(),
            Self::Streamed(stream) => stream.samples(),
            #[cfg(feature = "learner")]
            Self::Taped(tape) => tape.samples(),
        }
    }

    fn is_batched(&self) -> bool {
        matches!(self, Self::Indexed(source) if source.is_batched())
    }

    fn fields(&self) -> Vec<String> {
        match self {
            Self::Indexed(source) => source.fields(),
            _ => vec![],
        }
    }
}

impl<B: Send + 'static> Data<B> {
    fn of(origin: Origin<B>) -> Self {
        let (shuffle, reshuffle, drop_last) = (true, true, false);
        Self { origin, shuffle, reshuffle, drop_last, workers: 0, queue: QUEUE_BATCHES }
    }

    /// Any [`Source`].
    pub fn new(source: impl Source<B> + 'static) -> Self {
        Self::of(Origin::Indexed(Arc::new(source)))
    }

    /// Batches that a program makes itself, by their number: in a step, each rank takes one. They are
    /// to be of the rank's batch size, [`Context::batch_size`](crate::Context::batch_size): training in
    /// a gang of another size is another training.
    pub fn sequence(sequence: impl Sequence<B> + 'static) -> Self {
        Self::new(sequence::Batches(sequence))
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
    /// `item` must give one for every index below `samples`, as an `Option` or a `Result`, whose error ends the
    /// training.
    pub fn items<I: 'static, F: Found<I>>(
        samples: usize,
        item: impl Fn(usize) -> F + Send + Sync + 'static,
        batcher: impl Fn(Vec<I>, &Device) -> B + Send + Sync + 'static,
    ) -> Self {
        Self::new(indexed::Items { samples, item: move |sample| item(sample).found(), batcher })
    }

    /// Whether training visits the samples in a new order each epoch (default: yes).
    #[must_use]
    pub fn shuffle(self, shuffle: bool) -> Self {
        Self { shuffle, ..self }
    }

    /// Keeps the first epoch's shuffled order in all of them.
    #[must_use]
    pub fn skip_shuffle_at_epoch_end(self) -> Self {
        Self { reshuffle: false, ..self }
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

    /// Batches that may be made or wait at a time (default: 10), where there are workers: of more workers than that,
    /// some have nothing to do.
    #[must_use]
    pub fn queue(self, batches: usize) -> Self {
        Self { queue: batches, ..self }
    }

    /// Makes other batches of these, where they are made: by the workers.
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
            Origin::Taped(tape) => Origin::Taped(tape::mapped(tape, map)),
        };
        let Self { shuffle, reshuffle, drop_last, workers, queue, .. } = self;
        Data { origin, shuffle, reshuffle, drop_last, workers, queue }
    }

    /// Training and validation data: the last `fraction` of the samples, rounded up, as they are before
    /// any shuffling, is for validation. Both keep these options, but for
    /// [`drop_last`](Self::drop_last), which is for training.
    ///
    /// # Errors
    ///
    /// One of both would have no samples; the data is a stream, which has [`Stream::take`] and
    /// [`Stream::skip`] for this.
    pub fn validation_split(self, fraction: f64) -> Result<(Self, Self)> {
        let Origin::Indexed(source) = self.origin else {
            return Err(
                "a stream cannot be split: make one of its first items by `Stream::take` and one \
                        of the rest by `Stream::skip`"
                    .into(),
            );
        };
        let samples = source.samples();
        // As Keras rounds.
        let training = (samples as f64 * (1.0 - fraction)) as usize;
        let validation = samples.saturating_sub(training);
        if !(0.0..1.0).contains(&fraction) || validation == 0 || validation == samples {
            return Err(format!(
                "validation_split is {fraction}: of {samples} samples it leaves {validation} for \
                 validation, but both parts need some"
            )
            .into());
        }
        let part = |range: Range<usize>| Self {
            origin: Origin::Indexed(Arc::new(indexed::Part { source: source.clone(), range })),
            ..self
        };
        let validated = Self { drop_last: false, ..part(training..samples) };
        Ok((part(0..training), validated))
    }

    /// The number of samples in an epoch; of a [`Sequence`], of its batches.
    pub fn samples(&self) -> usize {
        self.origin.samples()
    }

    /// What the order of the samples follows from, with this seed.
    pub(crate) fn read_order(&self, seed: u32) -> ReadOrder {
        let Self { shuffle, reshuffle, drop_last, .. } = *self;
        ReadOrder { seed, shuffle, reshuffle, drop_last }
    }

    /// What one step takes over all ranks, in [`samples`](Self::samples).
    pub(crate) fn global_batch(&self, plan: &Plan) -> usize {
        if self.origin.is_batched() { plan.world } else { plan.global_batch }
    }

    /// The batches of an epoch, equal on every rank.
    pub fn steps(&self, plan: &Plan) -> u64 {
        #[cfg(feature = "learner")]
        if let Origin::Taped(tape) = &self.origin {
            return tape.steps();
        }
        let (samples, global_batch) = (self.samples(), self.global_batch(plan));
        let steps =
            if self.drop_last { samples / global_batch } else { samples.div_ceil(global_batch) };
        steps as u64
    }

    /// Refuses what cannot be trained on by this plan.
    pub(crate) fn check(&self, plan: &Plan) -> Result<()> {
        let Plan { global_batch, world, .. } = *plan;
        let samples = self.samples();
        let what = if self.origin.is_batched() { "batches" } else { "samples" };
        if samples == 0 {
            return Err(format!("the training data has no {what}").into());
        }
        if samples < world {
            return Err(format!(
                "the training data has {samples} {what} for {world} ranks, of which each needs one: \
                 use fewer slots for a trial, or more data"
            )
            .into());
        }
        if !self.origin.is_batched() && (global_batch == 0 || global_batch > samples) {
            return Err(InvalidHyperparameters(format!(
                "global_batch_size is {global_batch}, but must be between 1 and {samples}, the \
                 number of training samples"
            ))
            .into());
        }
        Ok(())
    }

    /// Refuses what cannot be validated on.
    pub(crate) fn check_validation(&self, plan: &Plan) -> Result<()> {
        match (self.samples(), self.steps(plan)) {
            (0, _) => Err("the validation data has no samples".into()),
            (samples, 0) => Err(format!(
                "the validation data has {samples} samples, which fill no batch of {}: leave out its \
                 `drop_last`",
                self.global_batch(plan)
            )
            .into()),
            _ => Ok(()),
        }
    }

    /// What it holds, for error messages.
    pub(crate) fn fields(&self) -> Vec<String> {
        self.origin.fields()
    }

    /// Batches `batches.start..batches.end`, counted over all epochs, in order.
    pub fn loader(&self, plan: Plan, batches: Range<u64>) -> Loader<B> {
        let order = Order {
            samples: self.samples(),
            global_batch: self.global_batch(&plan),
            steps: self.steps(&plan),
            shuffle: self.shuffle && plan.shuffle,
            reshuffle: self.reshuffle,
            plan,
        };
        let jobs = match &self.origin {
            Origin::Indexed(source) => indexed::jobs(source.clone(), order, batches.clone()),
            Origin::Streamed(stream) => stream.jobs(order, batches.clone()),
            #[cfg(feature = "learner")]
            Origin::Taped(tape) => {
                return Loader::read(tape.clone(), order.plan, batches, self.queue);
            }
        };
        Loader::start(jobs, batches, self.workers, self.queue)
    }
}

#[cfg(test)]
mod tests;
