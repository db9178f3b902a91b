//! Threads of rayon's pool that wait for the next parallel loop without sleeping.
//!
//! Between two loops of a training step, rayon's threads would fall asleep, and waking them takes
//! longer than many loops. Decision record 0046 has figures.

use std::sync::LazyLock;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use rayon::Yield;

/// Time without a parallel loop after which the threads sleep.
const PATIENCE: Duration = Duration::from_micros(300);

/// Threads that wait for work without sleeping.
#[derive(Debug)]
struct Waiting {
    clock: LazyLock<Instant>,
    /// Time of the latest parallel loop, in nanoseconds of the clock.
    latest: AtomicU64,
    /// `true` while threads wait.
    is_active: AtomicBool,
}

impl Waiting {
    const fn new() -> Self {
        Self {
            clock: LazyLock::new(Instant::now),
            latest: AtomicU64::new(0),
            is_active: AtomicBool::new(false),
        }
    }

    fn now(&self) -> u64 {
        self.clock.elapsed().as_nanos() as u64
    }

    fn keep_awake(&'static self) {
        self.latest.store(self.now(), Ordering::Relaxed);
        if self.is_active.swap(true, Ordering::Relaxed) {
            return;
        }
        let caller = rayon::current_thread_index();
        rayon::spawn_broadcast(move |context| {
            // The calling thread runs a part of the loop itself.
            if Some(context.index()) != caller {
                self.wait();
            }
        });
    }

    /// Runs the work of other threads until there was no loop for some time.
    fn wait(&self) {
        while self.now().saturating_sub(self.latest.load(Ordering::Relaxed))
            < PATIENCE.as_nanos() as u64
        {
            if rayon::yield_now() != Some(Yield::Executed) {
                // Threads of data loaders and other processes may need the processor.
                std::thread::yield_now();
            }
        }
        self.is_active.store(false, Ordering::Relaxed);
    }
}

/// Keeps the threads of the pool awake for the parallel loop that the calling thread starts now,
/// and shortly after it.
pub(crate) fn keep_awake() {
    static WAITING: Waiting = Waiting::new();
    WAITING.keep_awake();
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waiting_threads_work_and_fall_asleep() {
        static WAITING: Waiting = Waiting::new();
        let pool = rayon::ThreadPoolBuilder::new().num_threads(2).build().unwrap();
        pool.install(|| {
            WAITING.keep_awake();
            let (left, right) = rayon::join(rayon::current_thread_index, || 2);
            assert!(left.is_some());
            assert_eq!(right, 2);
        });
        // From outside of a pool, all threads of the global one wait, and run the work.
        WAITING.keep_awake();
        assert_eq!(rayon::join(|| 3, || 4), (3, 4));
        while WAITING.is_active.load(Ordering::Relaxed) {
            std::thread::yield_now();
        }
    }
}
