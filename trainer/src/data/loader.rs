//! Makes batches, ahead of time where there are workers, and hands them out in order.

use std::fmt;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;

use crate::Result;
use crate::error::caught;

/// Makes one batch; `None` where this rank has no sample in it.
pub(super) type Job<B> = Box<dyn FnOnce() -> Result<Option<B>> + Send>;
/// What makes the batches, in their order. What must be read in order is read by this iterator, and what
/// can be done for several batches at once is left to the jobs.
pub(super) type Jobs<B> = Box<dyn Iterator<Item = Job<B>> + Send>;

/// Batches in order; `None` where a batch has no samples for this rank.
pub struct Loader<B> {
    /// Where there are no workers.
    jobs: Option<Jobs<B>>,
    lanes: Vec<mpsc::Receiver<Result<Option<B>>>>,
    /// One for each batch that is made or waits; where it is full, no further one is begun.
    places: Option<mpsc::Receiver<()>>,
    threads: Vec<JoinHandle<()>>,
    /// Set when nobody wants any more batches.
    is_over: Arc<AtomicBool>,
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

impl<B> Loader<B> {
    /// Whether the thread that asks for a batch makes it: there are no workers.
    pub(crate) fn makes_batches_here(&self) -> bool {
        self.jobs.is_some()
    }
}

impl<B: Send + 'static> Loader<B> {
    /// A thread takes the jobs in order and gives worker `w` of `n` every `n`-th, which puts its batch
    /// into its own bounded lane: reading the lanes in turn keeps the order.
    pub(super) fn start(jobs: Jobs<B>, batches: Range<u64>, workers: usize, queue: usize) -> Self {
        let (first, is_over) = (batches.start, Arc::new(AtomicBool::new(false)));
        if workers == 0 {
            return Self {
                jobs: Some(jobs),
                lanes: vec![],
                places: None,
                threads: vec![],
                is_over,
                first,
                batches,
            };
        }
        let (mut lanes, mut threads, mut works) = (vec![], vec![], vec![]);
        for worker in 0..workers as u64 {
            let (send_work, work) = mpsc::sync_channel::<Job<B>>(1);
            let (send, receive) = mpsc::channel();
            let over = is_over.clone();
            threads.push(std::thread::spawn(move || {
                let mut numbers = (first + worker..).step_by(workers);
                while let (Ok(job), Some(batch)) = (work.recv(), numbers.next()) {
                    if over.load(Ordering::Relaxed) || send.send(made(batch, job)).is_err() {
                        return;
                    }
                }
            }));
            works.push(send_work);
            lanes.push(receive);
        }
        let (take, places) = mpsc::sync_channel(queue.max(1));
        let over = is_over.clone();
        threads.push(std::thread::spawn(move || hand_out(jobs, &works, &take, &over)));
        Self { jobs: None, lanes, places: Some(places), threads, is_over, first, batches }
    }
}

#[cfg(feature = "learner")]
impl<B: Send + 'static> Loader<B> {
    /// One thread reads ahead, as far as there is room.
    pub(super) fn read(
        tape: Arc<dyn super::Tape<B>>,
        plan: super::Plan,
        batches: Range<u64>,
        queue: usize,
    ) -> Self {
        let (send, receive) = mpsc::sync_channel(queue.max(1));
        let wanted = batches.clone();
        let thread = std::thread::spawn(move || {
            let num = usize::try_from(wanted.end - wanted.start).unwrap_or(usize::MAX);
            let read = || {
                tape.open(&plan, wanted).take(num).all(|batch| send.send(batch).is_ok());
            };
            if let Err(panic) = catch_unwind(AssertUnwindSafe(read)) {
                let error = caught(panic, |why| format!("a batch could not be read: {why}"));
                let _ = send.send(Err(error));
            }
        });
        let (first, is_over) = (batches.start, Arc::default());
        let (lanes, threads) = (vec![receive], vec![thread]);
        Self { jobs: None, lanes, places: None, threads, is_over, first, batches }
    }
}

/// Gives workers their jobs in turn, as places get free, until there are no more or nobody wants them.
fn hand_out<B: Send + 'static>(
    mut jobs: Jobs<B>,
    works: &[mpsc::SyncSender<Job<B>>],
    places: &mpsc::SyncSender<()>,
    is_over: &AtomicBool,
) {
    for work in works.iter().cycle().take_while(|_| !is_over.load(Ordering::Relaxed)) {
        if places.send(()).is_err() {
            return;
        }
        let Some(job) = next_job(&mut jobs) else { return };
        if work.send(job).is_err() {
            return;
        }
    }
}

/// A panic of the user's while a stream is read is an error of the batch that it was read for.
fn next_job<B: Send + 'static>(jobs: &mut Jobs<B>) -> Option<Job<B>> {
    let next = catch_unwind(AssertUnwindSafe(|| jobs.next()));
    next.unwrap_or_else(|panic| {
        let error = caught(panic, |why| format!("the data could not be read: {why}"));
        Some(Box::new(move || Err(error)))
    })
}

/// A panic of the user's in a worker is an error of the batch.
fn made<B>(batch: u64, job: Job<B>) -> Result<Option<B>> {
    catch_unwind(AssertUnwindSafe(job)).unwrap_or_else(|panic| {
        Err(caught(panic, |why| format!("batch {batch} could not be made: {why}")))
    })
}

impl<B: Send + 'static> Iterator for Loader<B> {
    type Item = Result<Option<B>>;

    fn next(&mut self) -> Option<Self::Item> {
        let batch = self.batches.next()?;
        if let Some(jobs) = &mut self.jobs {
            return next_job(jobs).map(|job| made(batch, job));
        }
        let lane = ((batch - self.first) % self.lanes.len() as u64) as usize;
        let made = self.lanes[lane].recv();
        self.places.as_ref().map(mpsc::Receiver::try_recv);
        Some(made.unwrap_or_else(|_| Err(format!("the worker of batch {batch} has ended").into())))
    }
}

impl<B> Drop for Loader<B> {
    fn drop(&mut self) {
        self.is_over.store(true, Ordering::Relaxed);
        // Senders fail, workers end, and whoever hands out.
        self.lanes.clear();
        self.places = None;
        self.threads.drain(..).for_each(|thread| drop(thread.join()));
    }
}
