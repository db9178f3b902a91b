//! Threads that share the loops of operators.
//!
//! The thread that starts a loop works on it, together with threads of rayon's pool that wait for
//! it without sleeping: waking a thread takes longer than many loops. Decision record 0046 has
//! figures.

#![expect(unsafe_code, reason = "threads of a pool borrow a loop from another thread's stack")]

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU8, AtomicU64, AtomicUsize, Ordering};
use std::sync::{LazyLock, Mutex, PoisonError};
use std::time::{Duration, Instant};

use rayon::Yield;
use rayon::prelude::*;

/// Time without a loop after which the threads sleep.
const PATIENCE: Duration = Duration::from_millis(1);
/// Longest time for which a thread waits without a pause: other work of the pool may need it.
const WAIT_MAX: Duration = Duration::from_millis(10);
/// Number of calls that threads have not completed from which loops use rayon instead. A thread of
/// the pool that is busy for long collects about 100 bytes with each call.
const CALLS_MAX: usize = 1 << 18;

/// Maximum number of ranges of a loop: a thread without work searches all of them. With more
/// threads, several begin with the same range. Measured with two threads only.
const RANGES_MAX: usize = 8;

/// State of a helper that neither waits for loops nor is called to do so.
const ABSENT: u8 = 0;
/// State of a helper that has not answered its call.
const CALLED: u8 = 1;
/// State of a helper that waits for loops.
const PRESENT: u8 = 2;

/// A loop that several threads work on. The index of a thread determines the range of the parts
/// with which it begins. Once none of them is left, the thread takes parts of the other ranges.
///
/// Consecutive loops with the same number of parts therefore mostly give a thread the same parts,
/// whose data may still be in its cache.
struct Loop<'a> {
    work: &'a (dyn Fn(usize) + Sync),
    ranges: [Range; RANGES_MAX],
    num_ranges: usize,
    panic: Mutex<Option<Box<dyn Any + Send>>>,
}

/// Parts from `next` up to, but not including, `end`, which no thread has taken. If none is left,
/// `next` may exceed `end`.
///
/// The alignment keeps threads that take parts of different ranges from writing to one cache line.
#[repr(align(128))]
struct Range {
    next: AtomicUsize,
    end: usize,
}

impl Range {
    /// Takes the next part, if there is one.
    fn take(&self) -> Option<usize> {
        // Waiting threads come back to ranges without parts. A read leaves the cache line shared.
        let is_left = self.next.load(Ordering::Relaxed) < self.end;
        let part = is_left.then(|| self.next.fetch_add(1, Ordering::Relaxed));
        part.filter(|part| *part < self.end)
    }
}

impl<'a> Loop<'a> {
    /// Returns a loop over the numbers below `num` for this number of threads.
    fn new(num: usize, num_threads: usize, work: &'a (dyn Fn(usize) + Sync)) -> Self {
        // If there are parts, no range is empty, so the thread that starts the loop has its own.
        let num_ranges = num_threads.min(num).clamp(1, RANGES_MAX);
        let begin = |range: usize| (num * range.min(num_ranges)).div_ceil(num_ranges);
        let ranges = std::array::from_fn(|range| Range {
            next: AtomicUsize::new(begin(range)),
            end: begin(range + 1),
        });
        Self { work, ranges, num_ranges, panic: Mutex::new(None) }
    }

    /// Works until no part is left, as thread `index`, which is less than `num_threads`. Keeps the
    /// first panic for the thread that started the loop. Returns `false` if there was nothing to
    /// do.
    fn help(&self, index: usize, num_threads: usize) -> bool {
        let own = index * self.num_ranges / num_threads;
        let (before, from_own) = self.ranges[..self.num_ranges].split_at(own);
        let mut has_helped = false;
        for range in from_own.iter().chain(before) {
            while let Some(part) = range.take() {
                has_helped = true;
                if let Err(panic) = catch_unwind(AssertUnwindSafe(|| (self.work)(part))) {
                    self.end_with(panic);
                }
            }
        }
        has_helped
    }

    /// Removes all parts that are left, and keeps the first panic.
    fn end_with(&self, panic: Box<dyn Any + Send>) {
        self.ranges.iter().for_each(|range| range.next.store(range.end, Ordering::Relaxed));
        let mut first = self.panic.lock().unwrap_or_else(PoisonError::into_inner);
        match *first {
            None => *first = Some(panic),
            // Dropping it could panic again.
            Some(_) => std::mem::forget(panic),
        }
    }
}

/// The threads that help with the loop of one thread at a time.
struct Team {
    clock: LazyLock<Instant>,
    /// Time of the start or end of the latest loop, in nanoseconds of the clock.
    latest: AtomicU64,
    /// States of all threads of the pool except thread 0. The thread that has the team changes
    /// `ABSENT` to `CALLED`, and then calls. The helper itself changes `CALLED` to `PRESENT`, and
    /// that to `ABSENT`. So no two threads change the same state, and a helper that is `CALLED` has
    /// a call. States only decide which threads are called: without a helper, a loop takes longer.
    helpers: LazyLock<Vec<AtomicU8>>,
    /// Number of calls that threads have not completed.
    num_calls: AtomicUsize,
    /// `true` while a thread has the team.
    is_taken: AtomicBool,
    /// Loop of that thread; null if it has none.
    current: AtomicPtr<Loop<'static>>,
    /// Number of threads that may use `current`.
    num_inside: AtomicUsize,
}

/// The loop that a team works on. Dropping it removes the loop and waits until no thread uses it.
struct Published<'a>(&'a Team);

impl Drop for Published<'_> {
    fn drop(&mut self) {
        self.0.current.store(std::ptr::null_mut(), Ordering::SeqCst);
        while self.0.num_inside.load(Ordering::SeqCst) != 0 {
            std::thread::yield_now();
        }
    }
}

impl Team {
    const fn new() -> Self {
        Self {
            clock: LazyLock::new(Instant::now),
            latest: AtomicU64::new(0),
            helpers: LazyLock::new(absent_helpers),
            num_calls: AtomicUsize::new(0),
            is_taken: AtomicBool::new(false),
            current: AtomicPtr::new(std::ptr::null_mut()),
            num_inside: AtomicUsize::new(0),
        }
    }

    /// Runs `work` for each number below `num`, with the help of the team. Returns `false`, and
    /// runs nothing, if another thread has the team, or if a thread of the pool has not completed
    /// too many calls.
    fn run(&'static self, num: usize, work: &(dyn Fn(usize) + Sync)) -> bool {
        if self.num_calls.load(Ordering::SeqCst) >= CALLS_MAX {
            return false;
        }
        if self.is_taken.swap(true, Ordering::Acquire) {
            return false;
        }
        self.wake();
        let shared = Loop::new(num, self.num_threads(), work);
        self.current.store((&raw const shared).cast_mut().cast(), Ordering::SeqCst);
        let published = Published(self);
        shared.help(0, self.num_threads());
        drop(published);
        self.note_loop();
        self.is_taken.store(false, Ordering::Release);
        let panic = shared.panic.into_inner().unwrap_or_else(PoisonError::into_inner);
        if let Some(panic) = panic {
            resume_unwind(panic);
        }
        true
    }

    /// Number of threads that work on a loop: all helpers, and the caller as thread 0.
    fn num_threads(&self) -> usize {
        self.helpers.len() + 1
    }

    /// Helps with the current loop as thread `index`. Returns `false` if there was nothing to do.
    fn help(&self, index: usize) -> bool {
        if self.current.load(Ordering::Relaxed).is_null() {
            return false;
        }
        self.num_inside.fetch_add(1, Ordering::SeqCst);
        let current = self.current.load(Ordering::SeqCst);
        // SAFETY: a pointer that is not null points to the loop on the stack of `run`. There,
        // `Published` removes the pointer and then waits until no thread is inside, also if `run`
        // panics. Raising and reading the counter, and removing and loading the pointer, are
        // sequentially consistent. This thread came inside before it loaded the pointer. If it got
        // the loop, the pointer was removed later, and the counter was read later still: `run`
        // waits for this thread, which leaves after its last use of the loop, and with a release
        // that `run` acquires. `Loop::help` does not panic: `index` is that of a helper.
        let current = unsafe { current.as_ref() };
        let has_helped = current.is_some_and(|current| current.help(index, self.num_threads()));
        self.num_inside.fetch_sub(1, Ordering::SeqCst);
        has_helped
    }

    fn now(&self) -> u64 {
        self.clock.elapsed().as_nanos() as u64
    }

    fn note_loop(&self) {
        self.latest.store(self.now(), Ordering::SeqCst);
    }

    /// Returns whether there was no loop for some time.
    fn is_idle(&self) -> bool {
        let since = self.now().saturating_sub(self.latest.load(Ordering::SeqCst));
        since > PATIENCE.as_nanos() as u64 && self.current.load(Ordering::SeqCst).is_null()
    }

    /// Lets threads of the pool wait for loops. Thread 0 does not: the caller has its processor.
    /// For the thread that has the team.
    fn wake(&'static self) {
        self.note_loop();
        let is_absent = |helper: &AtomicU8| helper.load(Ordering::SeqCst) == ABSENT;
        // Each thread counts for itself: one may be busy, and not answer for a long time.
        if !self.helpers.iter().any(is_absent) {
            return;
        }
        for helper in self.helpers.iter().filter(|helper| is_absent(helper)) {
            helper.store(CALLED, Ordering::SeqCst);
        }
        self.num_calls.fetch_add(self.helpers.len() + 1, Ordering::SeqCst);
        rayon::spawn_broadcast(move |context| {
            let index = context.index();
            let helper = index.checked_sub(1).and_then(|helper| self.helpers.get(helper));
            if let Some(helper) = helper {
                self.wait(index, helper);
            }
            self.num_calls.fetch_sub(1, Ordering::SeqCst);
        });
    }

    /// Answers a call of this thread, if it has one: helps with loops, and runs other work of the
    /// pool, until there was no loop for some time.
    fn wait(&self, index: usize, helper: &AtomicU8) {
        // A broadcast also reaches threads that were not called. A waiting thread receives it as
        // other work of the pool, and a thread that was busy receives several.
        if helper.load(Ordering::SeqCst) != CALLED {
            return;
        }
        helper.store(PRESENT, Ordering::SeqCst);
        let begin = Instant::now();
        while begin.elapsed() < WAIT_MAX && (self.help(index) || !self.is_idle()) {
            if rayon::yield_now() != Some(Yield::Executed) {
                // Threads of data loaders and other processes may need the processor.
                std::thread::yield_now();
            }
        }
        helper.store(ABSENT, Ordering::SeqCst);
        // A loop that began before this thread left has not called it. If its caller publishes it
        // only after this, the loop lacks this thread, which the next loop calls.
        self.help(index);
    }
}

/// Returns the states of the threads of the current pool, except thread 0.
fn absent_helpers() -> Vec<AtomicU8> {
    (1..rayon::current_num_threads()).map(|_| AtomicU8::new(ABSENT)).collect()
}

static TEAM: Team = Team::new();

/// Returns `work(item)` of each item, in their order. Several threads share the items.
pub(crate) fn map<T: Send, R: Send>(items: Vec<T>, work: impl Fn(T) -> R + Sync) -> Vec<R> {
    // rayon knows the waiting neighbors of a thread of the pool.
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
    if !TEAM.run(items.len(), &part) {
        (0..items.len()).into_par_iter().for_each(part);
    }
    let result =
        |result: Mutex<Option<R>>| result.into_inner().unwrap_or_else(PoisonError::into_inner);
    results.into_iter().filter_map(result).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_begin_with_their_own_range() {
        let check = |num: usize, num_threads: usize, index: usize, expected: &[usize]| {
            let order = Mutex::new(vec![]);
            let work = |part: usize| order.lock().unwrap().push(part);
            let has_helped = Loop::new(num, num_threads, &work).help(index, num_threads);
            let name = format!("{num} parts, thread {index} of {num_threads}");
            assert_eq!(order.into_inner().unwrap(), expected, "{name}");
            assert_eq!(has_helped, num > 0, "{name}");
        };
        check(4, 1, 0, &[0, 1, 2, 3]);
        check(5, 2, 0, &[0, 1, 2, 3, 4]);
        check(5, 2, 1, &[3, 4, 0, 1, 2]);
        check(8, 4, 2, &[4, 5, 6, 7, 0, 1, 2, 3]);
        // Fewer parts than threads, and more threads than ranges.
        check(3, 4, 0, &[0, 1, 2]);
        check(3, 4, 2, &[1, 2, 0]);
        check(3, 4, 3, &[2, 0, 1]);
        check(8, 9, 8, &[7, 0, 1, 2, 3, 4, 5, 6]);
        check(8, 64, 20, &[2, 3, 4, 5, 6, 7, 0, 1]);
        check(0, 2, 1, &[]);
    }

    #[test]
    fn each_part_runs_once_on_many_threads() {
        let num_threads = 20;
        for num in [0, 1, 7, 8, 9, 100] {
            // All threads, then some, then the last alone: helpers may be absent.
            for step in [1, 3, num_threads] {
                let counts: Vec<AtomicUsize> = (0..num).map(|_| AtomicUsize::new(0)).collect();
                let work = |part: usize| {
                    counts[part].fetch_add(1, Ordering::Relaxed);
                };
                let shared = Loop::new(num, num_threads, &work);
                std::thread::scope(|scope| {
                    for index in (0..num_threads).rev().step_by(step) {
                        let shared = &shared;
                        scope.spawn(move || shared.help(index, num_threads));
                    }
                });
                let counts: Vec<usize> = counts.into_iter().map(AtomicUsize::into_inner).collect();
                assert_eq!(counts, vec![1; num], "every {step}th of {num_threads} threads");
            }
        }
    }

    #[test]
    fn no_part_begins_after_a_panic() {
        let order = Mutex::new(vec![]);
        let work = |part: usize| {
            order.lock().unwrap_or_else(PoisonError::into_inner).push(part);
            assert_ne!(part, 5, "bad part");
        };
        let shared = Loop::new(8, 4, &work);
        assert!(shared.help(2, 4));
        assert!(shared.panic.lock().unwrap().is_some());
        assert!(!shared.help(0, 4));
        assert_eq!(*order.lock().unwrap_or_else(PoisonError::into_inner), [4, 5]);
    }

    /// Lets a team run `num` parts until another thread has helped, and returns how often each
    /// part ran in total.
    fn counts(team: &'static Team, num: usize) -> Vec<usize> {
        let caller = std::thread::current().id();
        let counts: Vec<AtomicUsize> = (0..num).map(|_| AtomicUsize::new(0)).collect();
        let has_helped = AtomicBool::new(false);
        let end = Instant::now() + Duration::from_secs(60);
        while !has_helped.load(Ordering::Relaxed) {
            assert!(Instant::now() < end, "no thread has helped");
            let work = |part: usize| {
                counts[part].fetch_add(1, Ordering::Relaxed);
                if std::thread::current().id() != caller {
                    has_helped.store(true, Ordering::Relaxed);
                }
                // Leave something for the others.
                std::thread::yield_now();
            };
            assert!(team.run(num, &work));
        }
        counts.into_iter().map(AtomicUsize::into_inner).collect()
    }

    #[track_caller]
    fn wait_until(name: &str, is_done: impl Fn() -> bool) {
        let end = Instant::now() + Duration::from_secs(60);
        while !is_done() {
            assert!(Instant::now() < end, "not within a minute: {name}");
            std::thread::yield_now();
        }
    }

    #[test]
    fn other_threads_help_and_each_part_runs_once() {
        static TEAM: Team = Team::new();
        // Of three threads, one calls, and thread 0 does not help.
        let pool = rayon::ThreadPoolBuilder::new().num_threads(3).build().unwrap();
        for num in [2, 7, 100] {
            let counts = pool.install(|| counts(&TEAM, num));
            assert!(counts.iter().all(|count| *count == counts[0]), "{counts:?}");
        }
        wait_until("no thread waits for loops", || TEAM.num_calls.load(Ordering::SeqCst) == 0);
        assert!(TEAM.helpers.iter().all(|helper| helper.load(Ordering::SeqCst) == ABSENT));
    }

    /// Thread 0 calls, thread 1 is busy, so only thread 2 can help. It leaves after each round.
    #[test]
    fn a_busy_thread_does_not_keep_others_away() {
        static TEAM: Team = Team::new();
        let pool = rayon::ThreadPoolBuilder::new().num_threads(3).build().unwrap();
        let rounds = || {
            for _ in 0..5 {
                counts(&TEAM, 7);
                let is_absent = || TEAM.helpers[1].load(Ordering::SeqCst) == ABSENT;
                wait_until("thread 2 has left", is_absent);
            }
            assert_eq!(TEAM.helpers[0].load(Ordering::SeqCst), CALLED);
        };
        let is_done = AtomicBool::new(false);
        pool.broadcast(|context| match context.index() {
            0 => {
                let outcome = catch_unwind(AssertUnwindSafe(&rounds));
                is_done.store(true, Ordering::Relaxed);
                if let Err(panic) = outcome {
                    resume_unwind(panic);
                }
            }
            1 => {
                while !is_done.load(Ordering::Relaxed) {
                    std::thread::yield_now();
                }
            }
            _ => {}
        });
        // The thread that was busy completes all its calls.
        wait_until("no call is left", || TEAM.num_calls.load(Ordering::SeqCst) == 0);
    }

    #[test]
    fn loops_use_rayon_after_too_many_calls() {
        static TEAM: Team = Team::new();
        TEAM.num_calls.store(CALLS_MAX, Ordering::SeqCst);
        assert!(!TEAM.run(1, &|_: usize| unreachable!()));
        TEAM.num_calls.store(CALLS_MAX - 1, Ordering::SeqCst);
        assert!(TEAM.run(1, &|_: usize| {}));
    }

    #[test]
    fn a_panic_ends_the_loop_and_reaches_its_caller() {
        static TEAM: Team = Team::new();
        for bad in [0, 5, 99] {
            let work = |part: usize| assert_ne!(part, bad, "bad part");
            let panic = catch_unwind(AssertUnwindSafe(|| TEAM.run(100, &work))).unwrap_err();
            assert!(panic.downcast_ref::<String>().unwrap().contains("bad part"));
        }
        // The team works again, also with loops of no and one part.
        for num in [0, 1, 2] {
            let count = AtomicUsize::new(0);
            let work = |_: usize| {
                count.fetch_add(1, Ordering::Relaxed);
            };
            assert!(TEAM.run(num, &work));
            assert_eq!(count.into_inner(), num);
        }
    }

    #[test]
    fn results_have_the_order_of_items() {
        let expected: Vec<usize> = (0..1000).map(|item| item * 2).collect();
        let double = || map((0..1000).collect(), |item: usize| item * 2);
        let is_right = || (0..50).all(|_| double() == expected);
        // Only one of them has the team at a time.
        std::thread::scope(|scope| {
            let threads: Vec<_> = (0..4).map(|_| scope.spawn(is_right)).collect();
            assert!(threads.into_iter().all(|thread| thread.join().unwrap()));
        });
        // A loop within a loop, and one on a thread of the pool.
        let nested = map(vec![0, 1], |_| double());
        assert_eq!(nested, [expected.clone(), expected.clone()]);
        let pool = rayon::ThreadPoolBuilder::new().num_threads(2).build().unwrap();
        assert_eq!(pool.install(double), expected);
    }
}
