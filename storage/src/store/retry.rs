//! Retries of operations after transient failures.

use std::sync::atomic::Ordering;
use std::time::{Duration, SystemTime};

use tokio::time::Instant;

use super::Storage;
use crate::StorageError;
use crate::error::{Subject, classify};

/// Limits of retries after transient failures.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RetryPolicy {
    attempts_max: u32,
    wait_first: Duration,
    wait_max: Duration,
    /// Time without progress after which a failed attempt is the last.
    pub(super) stalled_max: Duration,
    /// Time since the first attempt before which `attempts_max` does not apply.
    outage_min: Duration,
}

impl RetryPolicy {
    /// For local disks, whose transient failures are short.
    pub(crate) const LOCAL: Self = Self {
        attempts_max: 6,
        wait_first: Duration::from_millis(10),
        wait_max: Duration::from_millis(200),
        stalled_max: Duration::from_secs(15 * 60),
        outage_min: Duration::ZERO,
    };
    /// For storage behind a network: about two minutes, enough for a restart of the store. Attempts
    /// that time out may take longer.
    pub(crate) const NETWORK: Self = Self {
        attempts_max: 16,
        wait_first: Duration::from_millis(100),
        wait_max: Duration::from_secs(10),
        stalled_max: Duration::from_secs(15 * 60),
        outage_min: Duration::ZERO,
    };
    /// Maximum number of attempts if a user waits for the result.
    const FEW_ATTEMPTS_MAX: u32 = 4;
    /// Time after which a failed attempt is the last, if a user waits for the result.
    const FEW_ATTEMPTS_TIME: Duration = Duration::from_secs(60);

    /// Returns the same policy with at most [`FEW_ATTEMPTS_MAX`](Self::FEW_ATTEMPTS_MAX) attempts.
    pub(super) fn with_few_attempts(self) -> Self {
        let attempts_max = self.attempts_max.min(Self::FEW_ATTEMPTS_MAX);
        let (stalled_max, outage_min) = (Self::FEW_ATTEMPTS_TIME, Duration::ZERO);
        Self { attempts_max, stalled_max, outage_min, ..self }
    }

    /// Returns the wait after failed attempt number `attempt`, from 1. `jitter`, from 0
    /// to 1, separates the retries of callers that failed together.
    pub(super) fn wait(self, attempt: u32, jitter: f64) -> Duration {
        let wait = self.wait_first.saturating_mul(1 << attempt.min(16)).min(self.wait_max);
        wait.mul_f64(0.5 + jitter / 2.0)
    }
}

impl Storage {
    /// Returns the same root for operations whose failure loses work, such as saves, or uses up a
    /// trial's attempts. During an outage, requests that fail at once are retried as long as those
    /// that time out: for 15 minutes. So is a refused write or transfer, if this process has stored
    /// an object before: keys or permissions have changed, and the change may be corrected. Other
    /// errors that a retry cannot fix are returned at once. Local directories are unchanged,
    /// because their failures do not pass.
    pub fn with_long_retries(self) -> Self {
        let outage_min = match self.folder {
            Some(_) => Duration::ZERO,
            None => self.retry_policy.stalled_max,
        };
        let retry_policy = RetryPolicy { outage_min, ..self.retry_policy };
        self.with_retry_policy(retry_policy)
    }

    /// Retries `operation` until it succeeds, fails permanently, or the retry limit is reached.
    pub(super) async fn retry<T, F>(
        &self,
        path: &str,
        operation: impl Fn() -> F,
    ) -> Result<T, StorageError>
    where
        F: Future<Output = object_store::Result<T>>,
    {
        let start = Instant::now();
        self.retry_while(path, operation, || start, false).await
    }

    /// Same as [`retry`](Self::retry), for a write or a transfer. With long retries, it also waits
    /// for access that this process had.
    pub(super) async fn retry_write<T, F>(
        &self,
        path: &str,
        operation: impl Fn() -> F,
    ) -> Result<T, StorageError>
    where
        F: Future<Output = object_store::Result<T>>,
    {
        let start = Instant::now();
        self.retry_since(path, operation, || start).await
    }

    /// Same as [`retry_write`](Self::retry_write), for an operation whose last progress was at
    /// `progress()`.
    pub(super) async fn retry_since<T, F>(
        &self,
        path: &str,
        operation: impl Fn() -> F,
        progress: impl Fn() -> Instant,
    ) -> Result<T, StorageError>
    where
        F: Future<Output = object_store::Result<T>>,
    {
        self.retry_while(path, operation, progress, true).await
    }

    async fn retry_while<T, F>(
        &self,
        path: &str,
        operation: impl Fn() -> F,
        progress: impl Fn() -> Instant,
        waits_for_access: bool,
    ) -> Result<T, StorageError>
    where
        F: Future<Output = object_store::Result<T>>,
    {
        let (mut attempt, start) = (0, Instant::now());
        loop {
            attempt += 1;
            let source = match operation().await {
                Ok(done) => return Ok(done),
                Err(source) => source,
            };
            let (error, is_transient) =
                classify(Subject { url: &self.url, path }, attempt, &source);
            let policy = self.retry_policy;
            let is_patient = waits_for_access && policy.outage_min > Duration::ZERO;
            let is_revoked = matches!(error, StorageError::Refused { .. })
                && self.transfers.has_stored.load(Ordering::Relaxed);
            let is_transient = is_transient || (is_patient && is_revoked);
            let is_last = progress().elapsed() >= policy.stalled_max
                || (attempt >= policy.attempts_max && start.elapsed() >= policy.outage_min);
            if !is_transient || is_last {
                return Err(error);
            }
            tokio::time::sleep(policy.wait(attempt, jitter())).await;
        }
    }
}

/// Returns a jitter from 0 to 1 that differs between callers. Only wait times depend on it.
fn jitter() -> f64 {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    f64::from(now.subsec_nanos() % 1_000) / 1_000.0
}
