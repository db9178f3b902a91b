//! Metrics of trials, read from the storage and kept in memory up to a limit.

mod answers;
mod columns;
mod read;

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::{Duration, Instant};

use stoker_api::trial::Attempt;
use stoker_engine::trial::{TrialRecord, live_attempt};
use stoker_storage::metrics::Reader;
use stoker_storage::{StorageError, layout};
use tokio::sync::{Mutex as AsyncMutex, OwnedSemaphorePermit, Semaphore};

use self::answers::Answers;
pub(crate) use self::columns::{Position, TrialMetrics};
use self::read::{Listed, ReadRows};
use crate::store::Run;

/// Maximum size of all curves in memory, and of the rows from which reads continue.
const BYTES_MAX: usize = 64 << 20;
/// Maximum size in MiB of the files that are read at the same time, for all requests, except that
/// a larger trial is read alone. In memory, rows with few metrics are about as large as in the
/// files.
const READ_MIB_MAX: u32 = 256;
/// Maximum memory in MiB of all answers with logs at the same time. It is separate, so that logs do
/// not wait for curves.
const LOGS_MIB_MAX: u32 = 128;
/// Maximum size in MiB of the files of one trial. They are read alone if they are larger than
/// [`READ_MIB_MAX`].
const TRIAL_MIB_MAX: u64 = 512;
/// Rows of a trial that trains are read again after this time: with each announcement of
/// [`live`](crate::live). The trainer writes every 4.5 seconds.
const AGE_MIN: Duration = Duration::from_millis(900);
/// They are also kept for this multiple of the time that reading them took.
const AGE_FACTOR: u32 = 4;

#[derive(Debug)]
struct Entry {
    metrics: Arc<TrialMetrics>,
    /// Rows of a trial that trains, from which the next read continues.
    rows: Option<ReadRows>,
    /// State of the trial when the rows were read. They are read again if it has changed.
    key: Key,
    /// Time from which on the rows of a trial that trains are read again.
    stale_at: Instant,
    used_at: u64,
}

impl Entry {
    fn bytes(&self) -> usize {
        self.metrics.bytes() + self.rows.as_ref().map_or(0, ReadRows::bytes)
    }
}

/// State of a trial that determines its rows, except while it trains.
#[derive(Clone, Debug, Default, PartialEq)]
struct Key {
    /// Trained batches; `None` while the trial trains, because each record would have others.
    batches: Option<u64>,
    attempts: usize,
    /// Attempts that resumed from a checkpoint, each with its batches.
    resumed: Vec<(u32, u64)>,
    is_training: bool,
}

/// Why the metrics of a trial cannot be drawn.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Undrawn {
    /// The files are too large.
    TooLarge(String),
    /// The storage cannot be read.
    Unread(String),
}

impl Undrawn {
    /// Returns the reason.
    pub(crate) fn into_reason(self) -> String {
        match self {
            Self::TooLarge(why) | Self::Unread(why) => why,
        }
    }
}

/// Cache of metrics, shared by all viewers.
#[derive(Debug)]
pub(crate) struct MetricsCache {
    entries: Mutex<Entries>,
    answers: Mutex<Answers>,
    /// Locks of the trials that are being read: each is read once for concurrent requests.
    locks: Mutex<HashMap<String, Weak<AsyncMutex<()>>>>,
    /// MiB that may be read now.
    capacity: Arc<Semaphore>,
    /// MiB that answers with logs may use now.
    logs_capacity: Arc<Semaphore>,
    /// Maximum size in MiB of the files of one trial.
    pub(crate) trial_mib_max: u64,
}

impl Default for MetricsCache {
    fn default() -> Self {
        Self {
            entries: Mutex::default(),
            answers: Mutex::default(),
            locks: Mutex::default(),
            capacity: Arc::new(Semaphore::new(READ_MIB_MAX as usize)),
            logs_capacity: Arc::new(Semaphore::new(LOGS_MIB_MAX as usize)),
            trial_mib_max: TRIAL_MIB_MAX,
        }
    }
}

#[derive(Debug, Default)]
struct Entries {
    by_path: HashMap<String, Entry>,
    bytes: usize,
    uses: u64,
}

impl MetricsCache {
    /// Returns the metrics of a trial. Drop them before the next `await`: while a request holds
    /// them, their size is not limited.
    ///
    /// # Errors
    ///
    /// The reason why the storage cannot be read, or that the files are too large.
    pub(crate) async fn trial(
        &self,
        run: &Run,
        reader: &Reader<'_>,
        index: u32,
    ) -> Result<Arc<TrialMetrics>, Undrawn> {
        let Some(trial) = run.trials.get(&index) else { return Ok(Arc::default()) };
        let path = run.trial_path(index);
        let key = key(trial, run.is_live());
        if let Some(metrics) = self.cached(&path, &key) {
            return Ok(metrics);
        }
        let lock = self.lock(&path);
        let _reading = lock.lock().await;
        // Another request may have read the rows meanwhile.
        if let Some(metrics) = self.cached(&path, &key) {
            return Ok(metrics);
        }
        let unread = |error: StorageError| Undrawn::Unread(error.to_string());
        let objects = reader.objects(&path).await.map_err(unread)?;
        let mib = objects.iter().map(|(_, state)| state.size).sum::<u64>().div_ceil(1 << 20);
        check_size(index, mib, self.trial_mib_max).map_err(Undrawn::TooLarge)?;
        if let Some(metrics) = self.unchanged(&path, &key, &objects) {
            return Ok(metrics);
        }
        let _capacity = self.reserve(mib).await;
        let began = Instant::now();
        let mut rows = self.take_rows(&path);
        rows.update(reader, objects).await.map_err(unread)?;
        // With more rows, this trial alone would exceed the limit.
        let is_kept = key.is_training && 2 * rows.bytes() <= BYTES_MAX;
        let (columns, rows) = match is_kept {
            true => (rows.columns.clone(), Some(rows)),
            false => (rows.columns, None),
        };
        let metrics = Arc::new(columns.effective(&key.resumed));
        self.keep(path, key, (&metrics, rows), began.elapsed());
        Ok(metrics)
    }

    /// Waits until files of this size may be read, which they are while the result lives.
    pub(crate) async fn reserve(&self, mib: u64) -> Option<OwnedSemaphorePermit> {
        acquire(&self.capacity, mib, READ_MIB_MAX).await
    }

    /// Waits until an answer with logs may use this memory, which it does while the result lives.
    pub(crate) async fn reserve_logs(&self, mib: u64) -> Option<OwnedSemaphorePermit> {
        acquire(&self.logs_capacity, mib, LOGS_MIB_MAX).await
    }

    /// Returns the lock of a trial, or of other files that are being read.
    pub(crate) fn lock(&self, path: &str) -> Arc<AsyncMutex<()>> {
        let mut locks = self.locks.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(lock) = locks.get(path).and_then(Weak::upgrade) {
            return lock;
        }
        locks.retain(|_, lock| lock.strong_count() > 0);
        let lock = Arc::new(AsyncMutex::new(()));
        locks.insert(path.to_owned(), Arc::downgrade(&lock));
        lock
    }

    fn cached(&self, path: &str, key: &Key) -> Option<Arc<TrialMetrics>> {
        let mut entries = self.entries.lock().unwrap_or_else(PoisonError::into_inner);
        entries.uses += 1;
        let uses = entries.uses;
        let entry = entries.by_path.get_mut(path)?;
        let is_fresh = !key.is_training || Instant::now() < entry.stale_at;
        if entry.key != *key || !is_fresh {
            return None;
        }
        entry.used_at = uses;
        Some(entry.metrics.clone())
    }

    /// Returns the metrics of a trial that trains, if its objects have not changed.
    fn unchanged(&self, path: &str, key: &Key, objects: &[Listed]) -> Option<Arc<TrialMetrics>> {
        let mut entries = self.entries.lock().unwrap_or_else(PoisonError::into_inner);
        let used_at = entries.uses;
        let entry = entries.by_path.get_mut(path)?;
        let is_current = entry.rows.as_ref().is_some_and(|rows| rows.are_of(objects));
        if entry.key != *key || !is_current {
            return None;
        }
        entry.stale_at = Instant::now() + AGE_MIN;
        entry.used_at = used_at;
        Some(entry.metrics.clone())
    }

    /// Takes the rows from which the next read of a trial continues; none if it reads all.
    fn take_rows(&self, path: &str) -> ReadRows {
        let mut entries = self.entries.lock().unwrap_or_else(PoisonError::into_inner);
        let rows = entries.by_path.get_mut(path).and_then(|entry| entry.rows.take());
        let rows = rows.unwrap_or_default();
        entries.bytes -= rows.bytes();
        rows
    }

    fn keep(
        &self,
        path: String,
        key: Key,
        (metrics, rows): (&Arc<TrialMetrics>, Option<ReadRows>),
        took: Duration,
    ) {
        let mut entries = self.entries.lock().unwrap_or_else(PoisonError::into_inner);
        let used_at = entries.uses;
        let stale_at = Instant::now() + AGE_MIN.max(took * AGE_FACTOR);
        let entry = Entry { metrics: metrics.clone(), rows, key, stale_at, used_at };
        entries.bytes += entry.bytes();
        if let Some(before) = entries.by_path.insert(path, entry) {
            entries.bytes -= before.bytes();
        }
        entries.evict();
    }
}

impl Entries {
    /// Removes what was used least recently until the rest is within the limit. Rows come first,
    /// because they only make the next read faster.
    fn evict(&mut self) {
        while self.bytes > BYTES_MAX {
            let with_rows = self.by_path.values_mut().filter(|entry| entry.rows.is_some());
            let oldest = with_rows.min_by_key(|entry| entry.used_at);
            if let Some(rows) = oldest.and_then(|entry| entry.rows.take()) {
                self.bytes -= rows.bytes();
                continue;
            }
            if self.by_path.len() <= 1 {
                return;
            }
            let oldest = self.by_path.iter().min_by_key(|(_, entry)| entry.used_at);
            let Some(path) = oldest.map(|(path, _)| path.clone()) else { return };
            if let Some(entry) = self.by_path.remove(&path) {
                self.bytes -= entry.bytes();
            }
        }
    }
}

/// Waits for a share of a capacity, at most all of it.
async fn acquire(
    capacity: &Arc<Semaphore>,
    mib: u64,
    mib_max: u32,
) -> Option<OwnedSemaphorePermit> {
    let share = u32::try_from(mib).unwrap_or(u32::MAX).clamp(1, mib_max);
    // Ignore the error: the semaphore is never closed.
    capacity.clone().acquire_many_owned(share).await.ok()
}

fn key(trial: &TrialRecord, is_live: bool) -> Key {
    let is_training = is_live && live_attempt(trial).is_some();
    Key {
        batches: (!is_training).then_some(trial.status.batches),
        attempts: trial.status.attempts.len(),
        resumed: resumed(&trial.status.attempts),
        is_training,
    }
}

/// Refuses files whose reading would delay other requests for long.
fn check_size(index: u32, mib: u64, mib_max: u64) -> Result<(), String> {
    if mib <= mib_max {
        return Ok(());
    }
    Err(format!(
        "cannot draw the metrics of trial {index}: they have {mib} MiB, more than {mib_max}; \
         read them with `stoker trial metrics`"
    ))
}

/// Returns the attempts that resumed from a checkpoint, each with the batches of the checkpoint.
pub(crate) fn resumed(attempts: &[Attempt]) -> Vec<(u32, u64)> {
    let batches = |attempt: &Attempt| {
        let (batches, _) = layout::parse_checkpoint_name(attempt.resumed_from.as_deref()?)?;
        Some((attempt.number, batches))
    };
    attempts.iter().filter_map(batches).collect()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use serde_json::json;
    use stoker_storage::Storage;
    use stoker_storage::metrics::{Row, segments};

    use super::columns::Columns;
    use super::*;
    use crate::fixture;

    fn row(batches: u64) -> Row {
        let metrics = BTreeMap::from([("loss".to_owned(), 0.5)]);
        let (group, time) = ("training".to_owned(), Some(batches as f64));
        Row { group, batches, epoch: 0, attempt: 0, time, metrics }
    }

    fn metrics(num: u64) -> Arc<TrialMetrics> {
        let mut columns = Columns::default();
        (0..num).for_each(|batches| columns.add(row(batches)));
        Arc::new(columns.effective(&[]))
    }

    #[test]
    fn cache_keeps_the_latest_used_within_its_limit() {
        let cache = MetricsCache::default();
        let metrics = metrics(200_000);
        let key = Key { batches: Some(1), attempts: 1, ..Key::default() };
        let num = BYTES_MAX / metrics.bytes() + 3;
        for trial in 0..num {
            cache.keep(format!("t/{trial}"), key.clone(), (&metrics, None), Duration::ZERO);
            assert!(cache.cached("t/0", &key).is_some(), "{trial}");
        }
        assert!(cache.cached("t/1", &key).is_none());
        assert!(cache.entries.lock().unwrap().bytes <= BYTES_MAX);
        assert!(cache.cached("t/0", &Key { batches: Some(2), ..key }).is_none());
    }

    #[test]
    fn rows_are_removed_before_metrics() {
        let (cache, metrics) = (MetricsCache::default(), metrics(200_000));
        let key = Key { is_training: true, ..Key::default() };
        let num = BYTES_MAX / metrics.bytes();
        let total = || {
            let entries = cache.entries.lock().unwrap();
            entries.by_path.values().map(Entry::bytes).sum::<usize>()
        };
        let mut columns = Columns::default();
        (0..200_000).for_each(|batches| columns.add(row(batches)));
        for trial in 0..num {
            let mut rows = ReadRows::default();
            rows.columns.clone_from(&columns);
            let kept = (&metrics, Some(rows));
            cache.keep(format!("t/{trial}"), key.clone(), kept, Duration::from_secs(60));
            let bytes = cache.entries.lock().unwrap().bytes;
            assert!(bytes <= BYTES_MAX && bytes == total(), "{bytes} {}", total());
        }
        assert!((0..num).all(|trial| cache.cached(&format!("t/{trial}"), &key).is_some()));
    }

    #[tokio::test]
    async fn training_trial_is_read_again_if_it_changed() {
        let run_in = |phase: &str| {
            let trial = json!({"phase": phase, "attempts": [{"number": 0}], "batches": 2});
            fixture::run(json!({}), json!({ "phase": phase }), &[trial])
        };
        let run = run_in("Running");
        let storage = Storage::open("memory://", None).unwrap();
        let (cache, reader) = (MetricsCache::default(), Reader::new(&storage));
        let path = run.trial_path(0);
        let write = async |num: u64| {
            let line = |batches| serde_json::to_string(&row(batches)).unwrap() + "\n";
            let text: String = (0..num).map(line).collect();
            storage.put(&segments(&path, 0).path(0), text.into()).await.unwrap();
        };
        let read = async |run: &Run| {
            for entry in cache.entries.lock().unwrap().by_path.values_mut() {
                entry.stale_at = Instant::now();
            }
            cache.trial(run, &reader, 0).await.unwrap()
        };
        write(1).await;
        let first = read(&run).await;
        assert!(Arc::ptr_eq(&first, &read(&run).await));
        write(3).await;
        assert_eq!(read(&run).await.at.len(), 3);
        write(2).await;
        assert_eq!(read(&run).await.at.len(), 2);
        write(4).await;
        assert_eq!(read(&run_in("Completed")).await.at.len(), 4);
        let entries = cache.entries.lock().unwrap();
        assert!(entries.by_path[&path].rows.is_none());
        assert_eq!(entries.bytes, entries.by_path[&path].bytes());
    }

    #[tokio::test]
    async fn concurrent_requests_read_a_trial_once() {
        let run = fixture::run(json!({}), json!({}), &[json!({})]);
        let storage = Storage::open("memory://", None).unwrap();
        let line = serde_json::to_string(&row(1)).unwrap();
        let path = segments(&run.trial_path(0), 0).path(0);
        storage.put(&path, line.into()).await.unwrap();
        let (cache, reader) = (MetricsCache::default(), Reader::new(&storage));
        let held = cache.capacity.acquire_many(READ_MIB_MAX).await.unwrap();
        let release = async {
            // Both requests wait by now.
            tokio::task::yield_now().await;
            drop(held);
        };
        let (one, other) = (cache.trial(&run, &reader, 0), cache.trial(&run, &reader, 0));
        let (one, other, ()) = tokio::join!(one, other, release);
        let (one, other) = (one.unwrap(), other.unwrap());
        assert_eq!(one.at.len(), 1);
        assert!(Arc::ptr_eq(&one, &other));
    }

    #[test]
    fn rows_that_take_long_to_read_are_kept_longer() {
        let (cache, metrics) = (MetricsCache::default(), metrics(1));
        let key = Key { attempts: 1, is_training: true, ..Key::default() };
        cache.keep("t".to_owned(), key, (&metrics, None), Duration::from_secs(60));
        let entries = cache.entries.lock().unwrap();
        assert!(entries.by_path["t"].stale_at > Instant::now() + Duration::from_secs(200));
    }

    /// The points that an attempt repeats vanish with its start, before it has stored any.
    #[tokio::test]
    async fn resumed_attempt_replaces_points_of_unchanged_files() {
        let attempts = |resumed: bool| {
            let second = json!({"number": 1, "resumedFrom": "000000000001-0"});
            let attempts =
                if resumed { json!([{"number": 0}, second]) } else { json!([{"number": 0}]) };
            let trial = json!({"phase": "Running", "attempts": attempts});
            fixture::run(json!({}), json!({ "phase": "Running" }), &[trial])
        };
        let run = attempts(false);
        let storage = Storage::open("memory://", None).unwrap();
        let line = |batches| serde_json::to_string(&row(batches)).unwrap() + "\n";
        let text: String = (1..=3).map(line).collect();
        storage.put(&segments(&run.trial_path(0), 0).path(0), text.into()).await.unwrap();
        let (cache, reader) = (MetricsCache::default(), Reader::new(&storage));
        let num_points = async |run: &Run| cache.trial(run, &reader, 0).await.unwrap().at.len();
        assert_eq!(num_points(&run).await, 3);
        assert_eq!(num_points(&attempts(true)).await, 1);
    }

    #[test]
    fn progress_of_a_training_trial_keeps_its_rows() {
        let keys = |status: [serde_json::Value; 2], is_live: bool| {
            let run = fixture::run(json!({}), json!({}), &status);
            [0, 1].map(|index| key(&run.trials[&index], is_live))
        };
        let status = |batches: u64| {
            let attempt = json!({ "number": 0, "startedAt": "2026-11-24T10:00:00Z" });
            json!({ "attempts": [attempt], "batches": batches })
        };
        let [before, after] = keys([status(1), status(2)], true);
        assert_eq!(before, after);
        let [before, after] = keys([status(1), status(2)], false);
        assert_ne!(before, after);
    }

    #[test]
    fn files_above_the_limit_are_refused() {
        assert_eq!(check_size(3, TRIAL_MIB_MAX, TRIAL_MIB_MAX), Ok(()));
        let error = check_size(3, 900, TRIAL_MIB_MAX).unwrap_err();
        assert!(error.contains("metrics of trial 3: they have 900 MiB, more than 512;"), "{error}");
    }
}
