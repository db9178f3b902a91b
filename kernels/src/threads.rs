//! Threads that share the loops of operators.
//!
//! The thread that starts a loop works on it, together with threads of rayon's pool that wait for
//! it without sleeping: waking a thread takes longer than many loops. Decision record 0046 has
//! figures.

#![expect(unsafe_code, reason = "threads of a pool borrow a loop from another thread's stack")]

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, AtomicUsize, Ordering};
use std::sync::{LazyLock, Mutex, PoisonError};
use std::time::{Duration, Instant};

use rayon::Yield;
use rayon::prelude::*;

/// Time without a loop after which the threads sleep.
const PATIENCE: Duration = Duration::from_millis(1);

/// A loop that several threads work on. Each takes the next part until none is left.
struct Loop<'a> {
    work: &'a (dyn Fn(usize) + Sync),
    next: AtomicUsize,
    num: usize,
    panic: Mutex<Option<Box<dyn Any + Send>>>,
}

impl<'a> Loop<'a> {
    fn new(num: usize, work: &'a (dyn Fn(usize) + Sync)) -> Self {
        Self { work, next: AtomicUsize::new(0), num, panic: Mutex::new(None) }
    }

    /// Works until no part is left. Keeps a panic for the thread that started the loop.
    fn help(&self) {
        loop {
            let part = self.next.fetch_add(1, Ordering::Relaxed);
            if part >= self.num {
                return;
            }
            if let Err(panic) = catch_unwind(AssertUnwindSafe(|| (self.work)(part))) {
                self.next.store(self.num, Ordering::Relaxed);
                *self.panic.lock().unwrap_or_else(PoisonError::into_inner) = Some(panic);
            }
        }
    }
}

/// The threads that help with the loop of one thread at a time.
struct Crew {
    clock: LazyLock<Instant>,
    /// Time of the latest loop, in nanoseconds of the clock.
    latest: AtomicU64,
    /// `true` while threads wait for loops.
    is_awake: AtomicBool,
    /// `true` while a thread has the crew.
    is_taken: AtomicBool,
    /// Loop of that thread; null if it has none.
    current: AtomicPtr<Loop<'static>>,
    /// Number of threads that may use `current`.
    num_inside: AtomicUsize,
}

impl Crew {
    const fn new() -> Self {
        Self {
            clock: LazyLock::new(Instant::now),
            latest: AtomicU64::new(0),
            is_awake: AtomicBool::new(false),
            is_taken: AtomicBool::new(false),
            current: AtomicPtr::new(std::ptr::null_mut()),
            num_inside: AtomicUsize::new(0),
        }
    }

    fn now(&self) -> u64 {
        self.clock.elapsed().as_nanos() as u64
    }

    /// Runs `work` for each number below `num`, with the help of the crew. Returns `false`, and
    /// runs nothing, if another thread has the crew.
    fn run(&'static self, num: usize, work: &(dyn Fn(usize) + Sync)) -> bool {
        if self.is_taken.swap(true, Ordering::Acquire) {
            return false;
        }
        self.wake();
        let shared = Loop::new(num, work);
        self.current.store((&raw const shared).cast_mut().cast(), Ordering::SeqCst);
        // From here to the end of the wait, nothing returns or panics: others use `shared`.
        shared.help();
        self.current.store(std::ptr::null_mut(), Ordering::SeqCst);
        while self.num_inside.load(Ordering::SeqCst) != 0 {
            std::thread::yield_now();
        }
        self.is_taken.store(false, Ordering::Release);
        let panic = shared.panic.into_inner().unwrap_or_else(PoisonError::into_inner);
        if let Some(panic) = panic {
            resume_unwind(panic);
        }
        true
    }

    /// Helps with the current loop. Returns `false` if there is none.
    fn help(&self) -> bool {
        if self.current.load(Ordering::Relaxed).is_null() {
            return false;
        }
        self.num_inside.fetch_add(1, Ordering::SeqCst);
        let current = self.current.load(Ordering::SeqCst);
        // SAFETY: a pointer that is not null points to the loop on the stack of `run`, which
        // removes the pointer and then waits until no thread is inside. All four accesses are
        // sequentially consistent. This thread came inside before it loaded the pointer. If it got
        // the loop, `run` removed the pointer later, and counted who is inside later still: it
        // waits for this thread, which leaves after its last use of the loop. `Loop::help` does
        // not panic.
        let has_loop = unsafe { current.as_ref() }.map(Loop::help).is_some();
        self.num_inside.fetch_sub(1, Ordering::SeqCst);
        has_loop
    }

    /// Lets all threads of the pool but one wait for loops: the calling thread works, too.
    fn wake(&'static self) {
        self.latest.store(self.now(), Ordering::Relaxed);
        if self.is_awake.swap(true, Ordering::Relaxed) {
            return;
        }
        let caller = rayon::current_thread_index().unwrap_or(0);
        rayon::spawn_broadcast(move |context| {
            if context.index() != caller {
                self.wait();
            }
        });
    }

    /// Helps with loops, and runs other work of the pool, until there was no loop for some time.
    fn wait(&self) {
        while self.now().saturating_sub(self.latest.load(Ordering::Relaxed))
            < PATIENCE.as_nanos() as u64
        {
            if !self.help() && rayon::yield_now() != Some(Yield::Executed) {
                // Threads of data loaders and other processes may need the processor.
                std::thread::yield_now();
            }
        }
        self.is_awake.store(false, Ordering::Relaxed);
    }
}

static CREW: Crew = Crew::new();

/// Returns `work(item)` of each item, in their order. Several threads share the items.
pub(crate) fn map<T: Send, R: Send>(items: Vec<T>, work: impl Fn(T) -> R + Sync) -> Vec<R> {
    // A thread of the pool has waiting neighbors that rayon knows.
    if rayon::current_thread_index().is_some() {
        return items.into_par_iter().map(&work).collect();
    }
    let items: Vec<Mutex<Option<T>>> =
        items.into_iter().map(|item| Mutex::new(Some(item))).collect();
    let results: Vec<Mutex<Option<R>>> = items.iter().map(|_| Mutex::new(None)).collect();
    let part = |at: usize| {
        let item = items[at].lock().unwrap_or_else(PoisonError::into_inner).take();
        // Each part is taken once.
        let result = item.map(&work);
        *results[at].lock().unwrap_or_else(PoisonError::into_inner) = result;
    };
    if !CREW.run(items.len(), &part) {
        (0..items.len()).into_par_iter().for_each(part);
    }
    let result =
        |result: Mutex<Option<R>>| result.into_inner().unwrap_or_else(PoisonError::into_inner);
    results.into_iter().filter_map(result).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Lets a crew run `num` parts until another thread has helped, and returns how often each
    /// part ran in total.
    fn counts(crew: &'static Crew, num: usize) -> Vec<usize> {
        let caller = std::thread::current().id();
        let counts: Vec<AtomicUsize> = (0..num).map(|_| AtomicUsize::new(0)).collect();
        let has_helped = AtomicBool::new(false);
        let end = Instant::now() + Duration::from_secs(60);
        while !has_helped.load(Ordering::Relaxed) && Instant::now() < end {
            let work = |part: usize| {
                counts[part].fetch_add(1, Ordering::Relaxed);
                if std::thread::current().id() != caller {
                    has_helped.store(true, Ordering::Relaxed);
                }
                // Leave something for the others.
                std::thread::yield_now();
            };
            assert!(crew.run(num, &work));
        }
        assert!(
            has_helped.into_inner() || rayon::current_num_threads() < 2,
            "no thread has helped"
        );
        counts.into_iter().map(AtomicUsize::into_inner).collect()
    }

    #[test]
    fn other_threads_help_and_each_part_runs_once() {
        static CREW: Crew = Crew::new();
        for num in [0, 1, 7, 100] {
            let counts = match num {
                0 | 1 => {
                    let count = AtomicUsize::new(0);
                    let work = |_: usize| {
                        count.fetch_add(1, Ordering::Relaxed);
                    };
                    assert!(CREW.run(num, &work));
                    vec![count.into_inner(); num]
                }
                num => counts(&CREW, num),
            };
            assert!(counts.windows(2).all(|pair| pair[0] == pair[1]), "{counts:?}");
            assert!(counts.iter().all(|count| *count > 0), "{counts:?}");
        }
        while CREW.is_awake.load(Ordering::Relaxed) {
            std::thread::yield_now();
        }
    }

    #[test]
    fn a_panic_ends_the_loop_and_reaches_its_caller() {
        static CREW: Crew = Crew::new();
        for bad in [0, 5, 99] {
            let work = |part: usize| assert_ne!(part, bad, "bad part");
            let panic = catch_unwind(AssertUnwindSafe(|| CREW.run(100, &work))).unwrap_err();
            assert!(panic.downcast_ref::<String>().unwrap().contains("bad part"));
        }
        // The crew works again.
        assert!(CREW.run(2, &|_| {}));
    }

    #[test]
    fn results_have_the_order_of_items() {
        let expected: Vec<usize> = (0..1000).map(|item| item * 2).collect();
        let double = || map((0..1000).collect(), |item: usize| item * 2);
        // Only one of them has the crew at a time.
        std::thread::scope(|scope| {
            let threads: Vec<_> = (0..4)
                .map(|_| scope.spawn(|| (0..50).map(|_| double()).collect::<Vec<_>>()))
                .collect();
            for thread in threads {
                assert!(thread.join().unwrap().iter().all(|results| *results == expected));
            }
        });
        // A loop within a loop, and one on a thread of the pool.
        let nested = map(vec![0, 1], |_| double());
        assert_eq!(nested, [expected.clone(), expected.clone()]);
        let pool = rayon::ThreadPoolBuilder::new().num_threads(2).build().unwrap();
        assert_eq!(pool.install(double), expected);
    }
}
