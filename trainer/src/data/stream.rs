//! Sequential data: record files, queries, generators.

use std::collections::VecDeque;
use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use burn::tensor::Device;
use stoker_api::contract::ExitCode;

use super::{Data, Origin};
use crate::Result;
use crate::error::Interrupted;
use crate::rng::{STREAM, mix_seed};
use crate::stop::StopSignal;

mod batches;
mod items;

use batches::Batcher;
pub(super) use batches::{BatchStream, MappedStream};
use items::{Interleave, ShuffleBuffer};

/// Time between lines while items are counted. Nothing else shows that the process makes progress.
const COUNT_NOTICE_INTERVAL: Duration = Duration::from_secs(10);

/// One pass over a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pass {
    /// Number of epochs completed before this pass.
    pub epoch: u64,
    /// Seed of the data, the same on every rank.
    pub seed: u64,
}

/// An item whose computation may be deferred.
type Lazy<T> = Box<dyn FnOnce() -> Result<T> + Send>;
/// Items of a pass, in order.
type Items<T> = Box<dyn Iterator<Item = Result<Lazy<T>>> + Send>;
type Open<T> = dyn Fn(Pass) -> Result<Items<T>> + Send + Sync;

/// Sequential items, read again for each epoch; [`Data::stream`] groups them into batches.
///
/// Every rank reads the whole stream and keeps its share of the items. A global batch therefore
/// contains the same samples for any number of ranks. After a restart, the current epoch is read
/// again up to the saved position.
///
/// Put expensive work into the last [`map`](Self::map). It runs only for the rank's own items,
/// concurrently in [`Data::workers`] threads, and not for items that a restart skips. A
/// [`filter`](Self::filter) or [`interleave`](Self::interleave) needs the item values, so all
/// operations before it run for every item.
///
/// The functions that open, map or filter must depend only on their arguments. Then a resumed run
/// is bit-identical to an uninterrupted one, for any number of workers.
///
/// # Examples
///
/// ```
/// use stoker_trainer::{Data, Stream};
///
/// # fn main() -> stoker_trainer::Result<()> {
/// let lines = Stream::new(|_pass| Ok(["1", "2", "x", "4"].map(|line| Ok(line.to_owned()))));
/// let numbers = lines
///     .filter(|line: &String| line != "x")
///     .map(|line| Ok(line.parse::<f32>()?))
///     .shuffle(2);
/// let data = Data::stream(numbers, |items, _device| items)?;
/// assert_eq!(data.samples(), 3);
/// # Ok(())
/// # }
/// ```
pub struct Stream<T> {
    open: Arc<Open<T>>,
    samples: Option<usize>,
    /// Number of operations so far, which gives each operation a different seed.
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
    /// Creates a stream that calls `open` for each pass.
    pub fn new<I>(open: impl Fn(Pass) -> Result<I> + Send + Sync + 'static) -> Self
    where
        I: IntoIterator<Item = Result<T>>,
        I::IntoIter: Send + 'static,
    {
        let open = move |pass: Pass| -> Result<Items<T>> {
            Ok(Box::new(open(pass)?.into_iter().fuse().map(|item| item.map(ready))))
        };
        Self { open: Arc::new(open), samples: None, stage: 0 }
    }

    /// Creates a stream from a list, for example of files.
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

    /// Applies `with` to the items of every pass.
    fn then<U: Send + 'static>(
        self,
        samples: Option<usize>,
        with: impl Fn(Items<T>, Pass, u64) -> Items<U> + Send + Sync + 'static,
    ) -> Stream<U> {
        let Self { open, stage, .. } = self;
        let open = move |pass: Pass| Ok(with(open(pass)?, pass, stage));
        Stream { open: Arc::new(open), samples, stage: stage + 1 }
    }

    /// Converts each item.
    #[must_use]
    pub fn map<U: Send + 'static>(
        self,
        map: impl Fn(T) -> Result<U> + Send + Sync + 'static,
    ) -> Stream<U> {
        self.map_seeded(move |item, _| map(item))
    }

    /// Converts each item with a seed for its randomness. The seed is different in each epoch and
    /// does not depend on the number of ranks or workers.
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
                let seed = mix_seed(&[pass.seed, STREAM, pass.epoch, stage, index]);
                Ok(Box::new(move || map(item()?, seed)) as Lazy<U>)
            }))
        })
    }

    /// Keeps only the items for which `is_wanted` returns `true`. Their number is then unknown: set
    /// [`samples`](Self::samples) afterwards.
    #[must_use]
    pub fn filter(self, is_wanted: impl Fn(&T) -> bool + Send + Sync + 'static) -> Self {
        let is_wanted = Arc::new(is_wanted);
        self.then(None, move |items, _, _| {
            let is_wanted = is_wanted.clone();
            let made = items.map(|item| item?());
            let wanted =
                made.filter(move |item| item.as_ref().map_or(true, |item| is_wanted(item)));
            Box::new(wanted.map(|item| item.map(ready)))
        })
    }

    /// Shuffles items with a buffer of `buffer` items. Each output is sampled from the buffer and
    /// replaced by the next input. A size of 1 keeps the order; with all items in the buffer, every
    /// order is equally likely. The order differs between epochs.
    #[must_use]
    pub fn shuffle(self, buffer: usize) -> Self {
        let samples = self.samples;
        self.then(samples, move |items, pass, stage| {
            let seed = mix_seed(&[pass.seed, STREAM, pass.epoch, stage]);
            let capacity = buffer.max(1);
            Box::new(ShuffleBuffer { items, buffered: Vec::new(), capacity, seed, num_sampled: 0 })
        })
    }

    /// Opens a nested stream for each item and reads `cycle` of them round-robin, `block` items at
    /// a time; for example, the records of several files. When one ends, the next item takes its
    /// position. The number of items is then unknown: set [`samples`](Self::samples) afterwards.
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
            let interleaved =
                Interleave { opened, open: VecDeque::new(), cycle, block, left_in_block: block };
            Box::new(interleaved.map(|item| item.map(ready)))
        })
    }

    /// Keeps only the first `samples` items.
    #[must_use]
    pub fn take(self, samples: usize) -> Self {
        let known = self.samples.map(|count| count.min(samples));
        self.then(known, move |items, _, _| Box::new(items.take(samples)))
    }

    /// Skips the first `samples` items.
    #[must_use]
    pub fn skip(self, samples: usize) -> Self {
        let known = self.samples.map(|count| count.saturating_sub(samples));
        self.then(known, move |items, _, _| Box::new(items.skip(samples)))
    }

    /// Sets the number of items in an epoch. Further items are ignored; fewer are an error. If the
    /// number is neither set nor known, [`Data::stream`] reads the stream once to count them, which
    /// does not end for an endless stream. [`filter`](Self::filter) and
    /// [`interleave`](Self::interleave) discard the number.
    #[must_use]
    pub fn samples(self, samples: usize) -> Self {
        Self { samples: Some(samples), ..self }
    }

    /// Returns the number of samples, counting the items of the first pass if it is unknown. A stop
    /// request ends the count with an error.
    fn count(&self, stop: &StopSignal) -> Result<usize> {
        if let Some(samples) = self.samples {
            return Ok(samples);
        }
        let (mut count, mut printed_at) = (0, Instant::now());
        for item in (self.open)(Pass { epoch: 0, seed: 0 })? {
            drop(item?);
            if stop.is_set() {
                let why = "preempted before the items of a stream were counted".into();
                return Err(Interrupted { code: ExitCode::Preempted, fenced: false, why }.into());
            }
            count += 1;
            if let Some(text) = count_notice(count, printed_at.elapsed()) {
                eprintln!("stoker: {text}");
                printed_at = Instant::now();
            }
        }
        Ok(count)
    }
}

/// Returns the line to print while items are counted, given the time since the last line.
fn count_notice(count: usize, elapsed: Duration) -> Option<String> {
    let text = || {
        format!(
            "counting the items of a stream: {count} so far; call `Stream::samples` last, after \
             `filter` and `interleave`, to skip this"
        )
    };
    (elapsed >= COUNT_NOTICE_INTERVAL).then(text)
}

impl<B: Send + 'static> Data<B> {
    /// Creates data from a stream and a batcher. The stream determines the order: [`Data::shuffle`]
    /// has no effect, use [`Stream::shuffle`]. With [`Data::workers`], batches are read ahead.
    ///
    /// # Errors
    ///
    /// Returns the error of the stream while counting its items. Items are only counted if their
    /// number is unknown; see [`Stream::samples`]. Returns [`Interrupted`] if a signal stops the
    /// process meanwhile.
    pub fn stream<T: Send + 'static>(
        stream: Stream<T>,
        batcher: impl Fn(Vec<T>, &Device) -> B + Send + Sync + 'static,
    ) -> Result<Self> {
        let samples = stream.count(&StopSignal::of_process())?;
        let batcher = Arc::new(batcher);
        Ok(Self::from_origin(Origin::Streamed(Arc::new(Batcher { stream, samples, batcher }))))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::exit_code;

    #[test]
    fn stop_request_ends_the_count() {
        let stop = StopSignal::default();
        let endless = {
            let stop = stop.clone();
            move |_| {
                let stop = stop.clone();
                Ok((0_u64..).map(move |index| {
                    if index == 1_000 {
                        stop.set();
                    }
                    assert!(index < 1_010, "the count continues");
                    Ok(index)
                }))
            }
        };
        let error = Stream::new(endless).count(&stop).unwrap_err();
        assert_eq!(exit_code(&*error), ExitCode::Preempted, "{error}");
    }

    #[test]
    fn long_counts_print_a_remedy() {
        assert_eq!(count_notice(3, COUNT_NOTICE_INTERVAL - Duration::from_millis(1)), None);
        let text = count_notice(3, COUNT_NOTICE_INTERVAL).unwrap();
        assert!(text.contains("3 so far; call `Stream::samples` last"), "{text}");
    }
}
