//! Makes batches, in advance if there are workers, and returns them in order.

use std::fmt;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;

use crate::Result;
use crate::error::error_from_unwind;

/// Makes one batch; `None` if this rank has no sample in the batch.
pub(super) type BatchJob<B> = Box<dyn FnOnce() -> Result<Option<B>> + Send>;
/// Iterator over the jobs, in batch order. The iterator itself reads what must be read
/// sequentially. Work that can run for several batches concurrently is left to the jobs.
pub(super) type BatchJobs<B> = Box<dyn Iterator<Item = BatchJob<B>> + Send>;

/// Iterator over batches in order. An item is `None` if this rank has no samples in the batch.
pub struct Loader<B> {
    /// Only set without workers.
    jobs: Option<BatchJobs<B>>,
    queues: Vec<mpsc::Receiver<Result<Option<B>>>>,
    /// Holds one token for each batch in preparation or queued. No further batch starts while it is
    /// full.
    tokens: Option<mpsc::Receiver<()>>,
    threads: Vec<JoinHandle<()>>,
    /// Set when the loader is dropped, so that threads stop.
    is_over: Arc<AtomicBool>,
    first: u64,
    batches: Range<u64>,
}

impl<B> fmt::Debug for Loader<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Loader")
            .field("workers", &self.queues.len())
            .field("batches", &self.batches)
            .finish_non_exhaustive()
    }
}

impl<B> Loader<B> {
    /// Returns `true` without workers: the thread that requests a batch makes it.
    pub(crate) fn makes_batches_itself(&self) -> bool {
        self.jobs.is_some()
    }

    /// Returns the index of the next batch.
    pub(crate) fn position(&self) -> u64 {
        self.batches.start
    }
}

impl<B: Send + 'static> Loader<B> {
    /// Starts the workers. One thread takes the jobs in order and sends every `n`-th job to worker
    /// `w` of `n`, which puts its batch into a separate queue. Reading the queues in turn preserves
    /// the order. `is_over` is set when the loader is dropped.
    pub(super) fn start(
        jobs: BatchJobs<B>,
        batches: Range<u64>,
        (workers, queue): (usize, usize),
        is_over: Arc<AtomicBool>,
    ) -> Self {
        let first = batches.start;
        if workers == 0 {
            return Self {
                jobs: Some(jobs),
                queues: vec![],
                tokens: None,
                threads: vec![],
                is_over,
                first,
                batches,
            };
        }
        let (mut queues, mut threads, mut job_senders) = (vec![], vec![], vec![]);
        for worker in 0..workers as u64 {
            let (job_sender, receiver) = mpsc::sync_channel::<BatchJob<B>>(1);
            let (send, receive) = mpsc::channel();
            let over = is_over.clone();
            threads.push(std::thread::spawn(move || {
                let mut numbers = (first + worker..).step_by(workers);
                while let (Ok(job), Some(batch)) = (receiver.recv(), numbers.next()) {
                    if over.load(Ordering::Relaxed) || send.send(run_job(batch, job)).is_err() {
                        return;
                    }
                }
            }));
            job_senders.push(job_sender);
            queues.push(receive);
        }
        let (token_sender, tokens) = mpsc::sync_channel(queue.max(1));
        let over = is_over.clone();
        threads
            .push(std::thread::spawn(move || dispatch(jobs, &job_senders, &token_sender, &over)));
        Self { jobs: None, queues, tokens: Some(tokens), threads, is_over, first, batches }
    }
}

#[cfg(feature = "learner")]
impl<B: Send + 'static> Loader<B> {
    /// Starts one thread that reads up to `queue` batches ahead.
    pub(super) fn read_sequentially(
        source: Arc<dyn super::SequentialSource<B>>,
        plan: super::LoaderPlan,
        batches: Range<u64>,
        queue: usize,
    ) -> Self {
        let (send, receive) = mpsc::sync_channel(queue.max(1));
        let range = batches.clone();
        let thread = std::thread::spawn(move || {
            let num = usize::try_from(range.end - range.start).unwrap_or(usize::MAX);
            let read = || {
                source.open(&plan, range).take(num).all(|batch| send.send(batch).is_ok());
            };
            if let Err(panic) = catch_unwind(AssertUnwindSafe(read)) {
                let error = error_from_unwind(panic, |why| format!("cannot read a batch: {why}"));
                let _ = send.send(Err(error));
            }
        });
        let (first, is_over) = (batches.start, Arc::default());
        let (queues, threads) = (vec![receive], vec![thread]);
        Self { jobs: None, queues, tokens: None, threads, is_over, first, batches }
    }
}

/// Sends jobs to the workers in turn whenever a queue slot is free, until no jobs remain or the
/// loader is dropped.
fn dispatch<B: Send + 'static>(
    mut jobs: BatchJobs<B>,
    job_senders: &[mpsc::SyncSender<BatchJob<B>>],
    tokens: &mpsc::SyncSender<()>,
    is_over: &AtomicBool,
) {
    for job_sender in job_senders.iter().cycle().take_while(|_| !is_over.load(Ordering::Relaxed)) {
        if tokens.send(()).is_err() {
            return;
        }
        let Some(job) = next_job(&mut jobs) else { return };
        if job_sender.send(job).is_err() {
            return;
        }
    }
}

/// Returns the next job. A panic in user code while reading a stream becomes the error of the
/// batch.
fn next_job<B: Send + 'static>(jobs: &mut BatchJobs<B>) -> Option<BatchJob<B>> {
    let next = catch_unwind(AssertUnwindSafe(|| jobs.next()));
    next.unwrap_or_else(|panic| {
        let error = error_from_unwind(panic, |why| format!("cannot read the data: {why}"));
        Some(Box::new(move || Err(error)))
    })
}

/// Runs the job. A panic in user code becomes the error of the batch.
fn run_job<B>(batch: u64, job: BatchJob<B>) -> Result<Option<B>> {
    catch_unwind(AssertUnwindSafe(job)).unwrap_or_else(|panic| {
        Err(error_from_unwind(panic, |why| format!("cannot make batch {batch}: {why}")))
    })
}

impl<B: Send + 'static> Iterator for Loader<B> {
    type Item = Result<Option<B>>;

    fn next(&mut self) -> Option<Self::Item> {
        let batch = self.batches.next()?;
        if let Some(jobs) = &mut self.jobs {
            return next_job(jobs).map(|job| run_job(batch, job));
        }
        let queue_idx = ((batch - self.first) % self.queues.len() as u64) as usize;
        let batch_result = self.queues[queue_idx].recv();
        self.tokens.as_ref().map(mpsc::Receiver::try_recv);
        Some(
            batch_result
                .unwrap_or_else(|_| Err(format!("the worker of batch {batch} has exited").into())),
        )
    }
}

impl<B> Drop for Loader<B> {
    fn drop(&mut self) {
        self.is_over.store(true, Ordering::Relaxed);
        // Closing the channels makes the senders fail, so that all threads exit.
        self.queues.clear();
        self.tokens = None;
        self.threads.drain(..).for_each(|thread| drop(thread.join()));
    }
}
