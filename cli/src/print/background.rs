//! Thread that writes the output of a runner. A reader that stops reading, such as a pager or a
//! terminal after Ctrl-S, blocks this thread only: trials, requests and signals are not delayed.

use std::cell::Cell;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{self, SendError, Sender};

type Task = Box<dyn FnOnce() + Send>;

/// Tasks of the thread, once it runs.
static QUEUE: OnceLock<Sender<Task>> = OnceLock::new();
/// Number of tasks that the thread has not completed.
static NUM_PENDING: AtomicUsize = AtomicUsize::new(0);

thread_local! {
    static IS_WRITER: Cell<bool> = const { Cell::new(false) };
}

/// Starts the thread. Without it, tasks run at once.
pub(crate) fn start() {
    let (sender, tasks) = mpsc::channel::<Task>();
    let work = move || {
        IS_WRITER.set(true);
        for task in tasks {
            task();
            NUM_PENDING.fetch_sub(1, Ordering::Relaxed);
        }
    };
    if std::thread::Builder::new().name("output".to_owned()).spawn(work).is_ok() {
        let _ = QUEUE.set(sender);
    }
}

/// Runs a task that writes output, in the order of the calls. Does not block if the thread was
/// started. Tasks of the thread itself run at once.
pub(crate) fn run(task: impl FnOnce() + Send + 'static) {
    let Some(queue) = QUEUE.get().filter(|_| !IS_WRITER.get()) else { return task() };
    NUM_PENDING.fetch_add(1, Ordering::Relaxed);
    // This fails only if a task has panicked.
    if let Err(SendError(task)) = queue.send(Box::new(task)) {
        task();
    }
}

/// Returns whether the thread has not completed all tasks. Output that only shows the current state
/// can be left out then.
pub(crate) fn is_behind() -> bool {
    NUM_PENDING.load(Ordering::Relaxed) > 0
}

/// Waits until all tasks are complete.
pub(crate) fn drain() {
    let (sender, done) = mpsc::channel();
    run(move || {
        let _ = sender.send(());
    });
    // Ignore the error: a task has panicked.
    let _ = done.recv();
}
