//! Data that is read from its beginning: files of records, queries, generators.

use std::collections::VecDeque;
use std::fmt;
use std::sync::Arc;

use burn::tensor::Device;

use super::{Data, Origin};
use crate::Result;
use crate::rng::{STREAM, key};

mod batches;
mod items;

use batches::Batcher;
pub(super) use batches::{Batched, MappedStream};
use items::{Mixed, Turns};

/// One reading of a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pass {
    /// Epochs finished before it.
    pub epoch: u64,
    /// The data's seed, the same on every rank.
    pub seed: u64,
}

/// An item that may not be made yet.
type Lazy<T> = Box<dyn FnOnce() -> Result<T> + Send>;
/// The items of a pass, in order.
type Items<T> = Box<dyn Iterator<Item = Result<Lazy<T>>> + Send>;
type Open<T> = dyn Fn(Pass) -> Result<Items<T>> + Send + Sync;

/// Items in an order of their own, read anew for each epoch; [`Data::stream`] makes batches of them.
///
/// Every rank reads the stream and takes its share of the items, so that a global batch holds the same
/// samples for any number of ranks. After a restart the epoch under way is read again up to where it was.
/// What costs much belongs into the last [`map`](Self::map): that is done for a rank's own items alone, by
/// [`Data::workers`] threads at once, and not for what a restart passes by. A [`filter`](Self::filter) or
/// [`interleave`](Self::interleave) needs its items, so that all before it is done for each.
///
/// Whatever opens, maps or filters must depend on nothing but its arguments: then a run that was stopped
/// goes on to the same bits, for any number of workers.
///
/// # Examples
///
/// ```
/// use stoker_trainer::{Data, Stream};
///
/// # fn main() -> stoker_trainer::Result<()> {
/// let lines = Stream::new(|_pass| Ok(["1", "2", "x", "4"].map(|it| Ok(it.to_owned()))));
/// let numbers = lines.filter(|it: &String| it != "x").map(|it| Ok(it.parse::<f32>()?)).shuffle(2);
/// let data = Data::stream(numbers, |items, _device| items)?;
/// assert_eq!(data.samples(), 3);
/// # Ok(())
/// # }
/// ```
pub struct Stream<T> {
    open: Arc<Open<T>>,
    samples: Option<usize>,
    /// Operations so far: each has a seed of its own.
    stage: u64,
}

impl<T> Clone for Stream<T> {
    fn clone(&self) -> Self {
        Self { open: self.open.clone(), ..*self }
    }
}

impl<T> fmt::Debug for Stream<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Stream").field("samples", &self.samples).finish_non_exhaustive()
    }
}

fn ready<T: Send + 'static>(item: T) -> Lazy<T> {
    Box::new(move || Ok(item))
}

impl<T: Send + 'static> Stream<T> {
    /// What `open` gives for each pass.
    pub fn new<I>(open: impl Fn(Pass) -> Result<I> + Send + Sync + 'static) -> Self
    where
        I: IntoIterator<Item = Result<T>>,
        I::IntoIter: Send + 'static,
    {
        let open = move |pass: Pass| -> Result<Items<T>> {
            Ok(Box::new(open(pass)?.into_iter().fuse().map(|it| it.map(ready))))
        };
        Self { open: Arc::new(open), samples: None, stage: 0 }
    }

    /// A list, such as of files.
    pub fn list(items: Vec<T>) -> Self
    where
        T: Clone + Sync,
    {
        let items = Arc::new(items);
        let samples = Some(items.len());
        let open = move |_| {
            let items = items.clone();
            Ok((0..items.len()).map(move |index| Ok(items[index].clone())))
        };
        Self { samples, ..Self::new(open) }
    }

    /// A stream of what `with` makes of a pass of this one.
    fn then<U: Send + 'static>(
        self,
        samples: Option<usize>,
        with: impl Fn(Items<T>, Pass, u64) -> Items<U> + Send + Sync + 'static,
    ) -> Stream<U> {
        let Self { open, stage, .. } = self;
        let open = move |pass: Pass| Ok(with(open(pass)?, pass, stage));
        Stream { open: Arc::new(open), samples, stage: stage + 1 }
    }

    /// Makes another item of each.
    #[must_use]
    pub fn map<U: Send + 'static>(
        self,
        map: impl Fn(T) -> Result<U> + Send + Sync + 'static,
    ) -> Stream<U> {
        self.map_seeded(move |item, _| map(item))
    }

    /// Makes another item of each, with a seed for all that is random about it: it is the same for any
    /// number of ranks and workers, and another in each epoch.
    #[must_use]
    pub fn map_seeded<U: Send + 'static>(
        self,
        map: impl Fn(T, u64) -> Result<U> + Send + Sync + 'static,
    ) -> Stream<U> {
        let (samples, map) = (self.samples, Arc::new(map));
        self.then(samples, move |items, pass, stage| {
            let map = map.clone();
            Box::new(items.zip(0..).map(move |(item, index): (Result<Lazy<T>>, u64)| {
                let (item, map) = (item?, map.clone());
                let seed = key(&[pass.seed, STREAM, pass.epoch, stage, index]);
                Ok(Box::new(move || map(item()?, seed)) as Lazy<U>)
            }))
        })
    }

    /// Leaves out items of which `is_wanted` says no.
    #[must_use]
    pub fn filter(self, is_wanted: impl Fn(&T) -> bool + Send + Sync + 'static) -> Self {
        let is_wanted = Arc::new(is_wanted);
        self.then(None, move |items, _, _| {
            let is_wanted = is_wanted.clone();
            let made = items.map(|item| item?());
            let wanted = made.filter(move |it| it.as_ref().map_or(true, |it| is_wanted(it)));
            Box::new(wanted.map(|it| it.map(ready)))
        })
    }

    /// Mixes items: of `buffer` that wait, one is drawn, and the next takes its place. With 1 the order
    /// stays; with as many as there are items, every order is equally likely. Each epoch has its own.
    #[must_use]
    pub fn shuffle(self, buffer: usize) -> Self {
        let samples = self.samples;
        self.then(samples, move |items, pass, stage| {
            let seed = key(&[pass.seed, STREAM, pass.epoch, stage]);
            let buffer = buffer.max(1);
            Box::new(Mixed { items, waiting: Vec::new(), buffer, seed, drawn: 0 })
        })
    }

    /// Reads what `open` makes of each item, `cycle` of them in turn, `block` items at a time: such as
    /// the records of several files. Where one ends, the next item takes its place.
    #[must_use]
    pub fn interleave<U, I>(
        self,
        cycle: usize,
        block: usize,
        open: impl Fn(T) -> Result<I> + Send + Sync + 'static,
    ) -> Stream<U>
    where
        U: Send + 'static,
        I: IntoIterator<Item = Result<U>>,
        I::IntoIter: Send + 'static,
    {
        let open = Arc::new(open);
        self.then(None, move |items, _, _| {
            let open = open.clone();
            let open = move |item: Result<Lazy<T>>| open(item?()?).map(IntoIterator::into_iter);
            let opened = items.map(open);
            let (cycle, block) = (cycle.max(1), block.max(1));
            let turns = Turns { opened, running: VecDeque::new(), cycle, block, left: block };
            Box::new(turns.map(|it| it.map(ready)))
        })
    }

    /// The first `samples` items.
    #[must_use]
    pub fn take(self, samples: usize) -> Self {
        let known = self.samples.map(|it| it.min(samples));
        self.then(known, move |items, _, _| Box::new(items.take(samples)))
    }

    /// All but the first `samples` items.
    #[must_use]
    pub fn skip(self, samples: usize) -> Self {
        let known = self.samples.map(|it| it.saturating_sub(samples));
        self.then(known, move |items, _, _| Box::new(items.skip(samples)))
    }

    /// How many items an epoch has: the rest is left out, and fewer are an error. Where it is not said
    /// and cannot be known, the stream is read once to count them.
    #[must_use]
    pub fn samples(self, samples: usize) -> Self {
        Self { samples: Some(samples), ..self }
    }

    /// Counts the items of the first pass, where it is not known.
    fn count(&self) -> Result<usize> {
        match self.samples {
            Some(samples) => Ok(samples),
            None => (self.open)(Pass { epoch: 0, seed: 0 })?
                .try_fold(0, |count, item| item.map(|_| count + 1)),
        }
    }
}

impl<B: Send + 'static> Data<B> {
    /// Items of a stream, and what makes a batch of them. Their order is the stream's own:
    /// [`Data::shuffle`] changes nothing, [`Stream::shuffle`] does. [`Data::workers`] read ahead.
    ///
    /// # Errors
    ///
    /// What the stream failed with as it was counted, which is only where the number of its items is
    /// not known: see [`Stream::samples`].
    pub fn stream<T: Send + 'static>(
        stream: Stream<T>,
        batcher: impl Fn(Vec<T>, &Device) -> B + Send + Sync + 'static,
    ) -> Result<Self> {
        let samples = stream.count()?;
        let batcher = Arc::new(batcher);
        Ok(Self::of(Origin::Streamed(Arc::new(Batcher { stream, samples, batcher }))))
    }
}
