//! Limit of concurrent transfers, which falls if a link is too slow for them.

use std::collections::HashMap;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::Instant;

use super::Storage;
use crate::StorageError;

/// Requests with at least this many bytes are transfers. Smaller ones, such as metrics, never wait.
const TRANSFER_BYTES: u64 = 1 << 20;
/// A transfer that fails after this time has failed because of the link or the load of the store.
const SLOW: Duration = Duration::from_secs(30);
/// Rate of a transfer, in bytes per second, at which more transfers may run. The largest request,
/// of 16 MiB, then takes a third of the request timeout.
const RATE_FAST: u64 = 256 << 10;
/// Initial limit, which is larger than the number of transfers of any program.
const LIMIT_MAX: usize = 1024;

/// Transfers of this process by server and bucket. Those to one of them probably fail together,
/// because of the link or of the server.
static OF_BUCKETS: LazyLock<Mutex<HashMap<String, Weak<Transfers>>>> =
    LazyLock::new(Mutex::default);

/// Transfers in flight, and their limit.
///
/// A request has a timeout for all of its bytes. Transfers that share a slow link therefore time
/// out together, and again after a retry. After the first timeouts, fewer of them run at a time.
#[derive(Debug, Default)]
pub(crate) struct Transfers {
    state: Mutex<State>,
    ended: Notify,
    /// Whether this process has stored an object, so it had access.
    pub(super) has_stored: AtomicBool,
}

#[derive(Debug)]
struct State {
    in_flight: usize,
    limit: usize,
    /// When the limit fell.
    fell: Option<Instant>,
    /// When a transfer last succeeded.
    succeeded: Option<Instant>,
}

impl Default for State {
    fn default() -> Self {
        Self { in_flight: 0, limit: LIMIT_MAX, fell: None, succeeded: None }
    }
}

impl State {
    /// Adapts the limit after a transfer of `bytes` from `start` to `end`, which is still counted
    /// as in flight.
    fn record(&mut self, bytes: u64, start: Instant, end: Instant, is_done: bool) {
        let time = end - start;
        if is_done {
            self.succeeded = Some(end);
            if bytes as f64 >= RATE_FAST as f64 * time.as_secs_f64() {
                self.limit = LIMIT_MAX.min(self.limit + 1);
            }
        } else if time >= SLOW && self.fell.is_none_or(|fell| fell <= start) {
            // Transfers that were in flight at the same time fail together. The first one lowers
            // the limit for all.
            self.limit = (self.in_flight / 4).max(1);
            self.fell = Some(end);
        }
    }
}

impl Transfers {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until the limit permits another transfer.
    async fn start(&self) -> Transfer<'_> {
        loop {
            // Created before the check, so that it misses no end after the check.
            let ended = self.ended.notified();
            if let Some(transfer) = self.try_start() {
                return transfer;
            }
            ended.await;
        }
    }

    fn try_start(&self) -> Option<Transfer<'_>> {
        let mut state = self.state();
        if state.in_flight >= state.limit {
            return None;
        }
        state.in_flight += 1;
        Some(Transfer { of: self, start: Instant::now() })
    }

    /// Returns `start`, or when a transfer last succeeded, if this was later.
    fn last_progress(&self, start: Instant) -> Instant {
        self.state().succeeded.map_or(start, |succeeded| succeeded.max(start))
    }
}

/// A transfer in flight, until it is dropped.
struct Transfer<'a> {
    of: &'a Transfers,
    start: Instant,
}

impl Transfer<'_> {
    fn end(self, bytes: u64, is_done: bool) {
        self.of.state().record(bytes, self.start, Instant::now(), is_done);
    }
}

impl Drop for Transfer<'_> {
    fn drop(&mut self) {
        self.of.state().in_flight -= 1;
        self.of.ended.notify_waiters();
    }
}

impl Storage {
    /// Returns the same root, with the limit of all transfers of this process to a bucket.
    pub(crate) fn with_transfers_of(self, bucket: String) -> Self {
        let mut all = OF_BUCKETS.lock().unwrap_or_else(PoisonError::into_inner);
        let known = all.get(&bucket).and_then(Weak::upgrade);
        let transfers = known.unwrap_or_else(|| {
            let transfers = Arc::default();
            all.retain(|_, transfers| transfers.strong_count() > 0);
            all.insert(bucket, Arc::downgrade(&transfers));
            transfers
        });
        Self { transfers, ..self }
    }

    /// Same as [`retry`](Self::retry), for a request that sends or receives this many bytes. A
    /// large one may wait for others.
    pub(super) async fn transfer<T, F>(
        &self,
        path: &str,
        bytes: u64,
        operation: impl Fn() -> F,
    ) -> Result<T, StorageError>
    where
        F: Future<Output = object_store::Result<T>>,
    {
        if bytes < TRANSFER_BYTES {
            return self.retry_write(path, operation).await;
        }
        let start = Instant::now();
        let attempt = || async {
            let transfer = self.transfers.start().await;
            // The transfers before this one have failed for so long that it would fail too.
            if self.transfers.last_progress(start).elapsed() >= self.retry_policy.stalled_max {
                let source = "no transfer has succeeded for too long".into();
                return Err(object_store::Error::Generic { store: "transfers", source });
            }
            let done = operation().await;
            transfer.end(bytes, done.is_ok());
            done
        };
        self.retry_since(path, attempt, || self.transfers.last_progress(start)).await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PART: u64 = 8 << 20;

    /// Records transfers, each as `(start, end, bytes, is_done)` in seconds; returns the limit.
    fn limit_after(in_flight: usize, transfers: &[(u64, u64, u64, bool)]) -> usize {
        let (mut state, zero) = (State { in_flight, ..State::default() }, Instant::now());
        let at = |seconds| zero + Duration::from_secs(seconds);
        for (start, end, bytes, is_done) in transfers {
            state.record(*bytes, at(*start), at(*end), *is_done);
        }
        state.limit
    }

    #[test]
    fn limit_follows_the_rate_of_transfers() {
        let check = |in_flight, transfers: &[(u64, u64, u64, bool)], expected| {
            assert_eq!(limit_after(in_flight, transfers), expected, "{transfers:?}");
        };
        check(16, &[(0, 1, PART, true)], LIMIT_MAX);
        // Short failures, such as refused connections.
        check(16, &[(0, 29, PART, false)], LIMIT_MAX);
        check(16, &[(0, 180, PART, false)], 4);
        check(1, &[(0, 180, PART, false)], 1);
        // Failures of the same time count once, and later ones again.
        check(16, &[(0, 180, PART, false), (100, 181, PART, false)], 4);
        check(4, &[(0, 180, PART, false), (180, 360, PART, false)], 1);
        let failed = (0, 180, PART, false);
        check(16, &[failed, (180, 190, PART, true), (180, 212, PART, true)], 6);
        check(16, &[failed, (180, 213, PART, true), (180, 186, 1 << 20, true)], 4);
    }

    #[test]
    fn transfers_to_one_bucket_share_a_limit() {
        let storage = |bucket: &str| {
            let storage = Storage::open("memory://", None).unwrap();
            storage.with_transfers_of(bucket.to_owned())
        };
        let (one, same, other) = (storage("a"), storage("a"), storage("b"));
        assert!(Arc::ptr_eq(&one.transfers, &same.transfers));
        assert!(!Arc::ptr_eq(&one.transfers, &other.transfers));
    }

    #[tokio::test]
    async fn transfers_wait_at_the_limit() {
        let transfers = Transfers::default();
        transfers.state().limit = 2;
        let (one, two) = (transfers.start().await, transfers.start().await);
        assert!(transfers.try_start().is_none());
        let third = async {
            let third = transfers.start().await;
            third.end(PART, true);
        };
        let end = async { drop(one) };
        tokio::join!(third, end);
        drop(two);
        let state = transfers.state();
        assert_eq!((state.in_flight, state.limit), (0, 3));
    }
}
