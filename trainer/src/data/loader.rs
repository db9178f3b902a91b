//! Makes batches, ahead of time where there are workers, and hands them out in order.

use std::any::Any;
use std::fmt;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;

use crate::Result;

/// Makes one batch of all epochs; `None` where this rank has no sample in it.
type Make<B> = dyn Fn(u64) -> Result<Option<B>> + Send + Sync;

/// Batches in order; `None` where a batch has no samples for this rank.
pub struct Loader<B> {
    make: Arc<Make<B>>,
    lanes: Vec<mpsc::Receiver<Result<Option<B>>>>,
    threads: Vec<JoinHandle<()>>,
    first: u64,
    batches: Range<u64>,
}

impl<B> fmt::Debug for Loader<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Loader")
            .field("workers", &self.lanes.len())
            .field("batches", &self.batches)
            .finish_non_exhaustive()
    }
}

impl<B: Send + 'static> Loader<B> {
    /// Worker `w` of `n` makes every `n`-th batch into its own bounded lane; reading the lanes in
    /// turn keeps the order.
    pub(super) fn start(
        make: Arc<Make<B>>,
        batches: Range<u64>,
        workers: usize,
        queue: usize,
    ) -> Self {
        let (mut lanes, mut threads) = (vec![], vec![]);
        for worker in 0..workers {
            let (send, receive) = mpsc::sync_channel(queue.div_ceil(workers).max(1));
            let (make, mut mine) = (make.clone(), batches.clone().skip(worker).step_by(workers));
            threads.push(std::thread::spawn(move || {
                while mine.next().is_some_and(|batch| send.send(made(&*make, batch)).is_ok()) {}
            }));
            lanes.push(receive);
        }
        Self { make, lanes, threads, first: batches.start, batches }
    }
}

/// A panic of the user's in a worker is an error of the batch.
fn made<B>(make: &Make<B>, batch: u64) -> Result<Option<B>> {
    catch_unwind(AssertUnwindSafe(|| make(batch))).unwrap_or_else(|panic| {
        Err(format!("batch {batch} could not be made: {}", panic_message(&*panic)).into())
    })
}

/// What a panic said.
pub(crate) fn panic_message(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(ToString::to_string);
    text.or_else(|| panic.downcast_ref::<String>().cloned())
        .unwrap_or_else(|| "a panic without a text".into())
}

impl<B> Iterator for Loader<B> {
    type Item = Result<Option<B>>;

    fn next(&mut self) -> Option<Self::Item> {
        let batch = self.batches.next()?;
        if self.lanes.is_empty() {
            return Some(made(&*self.make, batch));
        }
        let lane = ((batch - self.first) % self.lanes.len() as u64) as usize;
        Some(
            self.lanes[lane]
                .recv()
                .unwrap_or_else(|_| Err(format!("the worker of batch {batch} has ended").into())),
        )
    }
}

impl<B> Drop for Loader<B> {
    fn drop(&mut self) {
        self.lanes.clear(); // Senders fail, workers end.
        self.threads.drain(..).for_each(|thread| drop(thread.join()));
    }
}
