//! Metrics of trials, read from the storage and kept in memory up to a limit.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use stoker_api::trial::Attempt;
use stoker_engine::trial::{TrialRecord, live_attempt};
use stoker_storage::metrics::{Reader, Row, effective, starts};
use stoker_storage::{StorageError, layout};

use crate::store::Run;

/// Maximum size of all curves in memory.
const BYTES_MAX: usize = 64 << 20;
/// Rows of a trial that trains are read again after this time: with each announcement of
/// [`live`](crate::live). The trainer writes every 4.5 seconds.
const AGE_MAX: Duration = Duration::from_millis(900);

/// Effective rows of a trial in compact form.
#[derive(Debug, Default)]
pub(crate) struct TrialMetrics {
    /// Batches, completed epochs, training seconds and attempt of each row, in order.
    pub(crate) at: Vec<Position>,
    /// Values by group and metric, each with the position of its row.
    pub(crate) curves: BTreeMap<(String, String), Vec<(u32, f64)>>,
}

/// Position of a row.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Position {
    pub(crate) batches: u64,
    pub(crate) epoch: u64,
    /// Seconds of training before the row, without the time between attempts.
    pub(crate) seconds: f64,
    pub(crate) attempt: u32,
}

impl TrialMetrics {
    /// Arranges rows, sorted by batches.
    pub(crate) fn new(rows: Vec<Row>) -> Self {
        let mut metrics = Self::default();
        let mut last: Option<(u32, f64)> = None;
        let mut seconds = 0.0;
        for (position, row) in (0u32..).zip(rows) {
            if let Some(time) = row.time {
                // The pause between two attempts does not count.
                if let Some((attempt, before)) = last
                    && attempt == row.attempt
                {
                    seconds += (time - before).max(0.0);
                }
                last = Some((row.attempt, time));
            }
            let Row { batches, epoch, attempt, .. } = row;
            metrics.at.push(Position { batches, epoch, seconds, attempt });
            for (name, value) in row.metrics {
                metrics
                    .curves
                    .entry((row.group.clone(), name))
                    .or_default()
                    .push((position, value));
            }
        }
        metrics
    }

    fn bytes(&self) -> usize {
        let curves = self.curves.values().map(|curve| 200 + curve.capacity() * 16).sum::<usize>();
        self.at.capacity() * size_of::<Position>() + curves
    }
}

#[derive(Debug)]
struct Entry {
    metrics: Arc<TrialMetrics>,
    /// State of the trial when the rows were read. They are read again if it has changed.
    key: Key,
    read_at: Instant,
    used_at: u64,
}

/// State of a trial that determines its rows, except while it trains.
#[derive(Clone, Debug, PartialEq)]
struct Key {
    batches: u64,
    attempts: usize,
    is_training: bool,
}

/// Cache of metrics, shared by all viewers.
#[derive(Debug, Default)]
pub(crate) struct MetricsCache {
    entries: Mutex<Entries>,
}

#[derive(Debug, Default)]
struct Entries {
    by_path: HashMap<String, Entry>,
    bytes: usize,
    uses: u64,
}

impl MetricsCache {
    /// Returns the metrics of a trial.
    ///
    /// # Errors
    ///
    /// The reason why the storage cannot be read.
    pub(crate) async fn trial(
        &self,
        run: &Run,
        reader: &Reader<'_>,
        index: u32,
    ) -> Result<Arc<TrialMetrics>, StorageError> {
        let Some(trial) = run.trials.get(&index) else { return Ok(Arc::default()) };
        let path = run.trial_path(index);
        let key = key(trial, run.is_live());
        if let Some(metrics) = self.cached(&path, &key) {
            return Ok(metrics);
        }
        let rows = reader.rows(&path).await?;
        let attempts = starts(&rows, &resumed(&trial.status.attempts));
        let metrics = Arc::new(TrialMetrics::new(effective(rows, &attempts)));
        self.keep(path, key, &metrics);
        Ok(metrics)
    }

    fn cached(&self, path: &str, key: &Key) -> Option<Arc<TrialMetrics>> {
        let mut entries = self.entries.lock().unwrap_or_else(PoisonError::into_inner);
        entries.uses += 1;
        let uses = entries.uses;
        let entry = entries.by_path.get_mut(path)?;
        let is_fresh = !key.is_training || entry.read_at.elapsed() < AGE_MAX;
        if entry.key != *key || !is_fresh {
            return None;
        }
        entry.used_at = uses;
        Some(entry.metrics.clone())
    }

    fn keep(&self, path: String, key: Key, metrics: &Arc<TrialMetrics>) {
        let mut entries = self.entries.lock().unwrap_or_else(PoisonError::into_inner);
        let used_at = entries.uses;
        let entry = Entry { metrics: metrics.clone(), key, read_at: Instant::now(), used_at };
        entries.bytes += metrics.bytes();
        if let Some(before) = entries.by_path.insert(path, entry) {
            entries.bytes -= before.metrics.bytes();
        }
        while entries.bytes > BYTES_MAX && entries.by_path.len() > 1 {
            let oldest = entries.by_path.iter().min_by_key(|(_, entry)| entry.used_at);
            let Some(path) = oldest.map(|(path, _)| path.clone()) else { break };
            if let Some(entry) = entries.by_path.remove(&path) {
                entries.bytes -= entry.metrics.bytes();
            }
        }
    }
}

fn key(trial: &TrialRecord, is_live: bool) -> Key {
    Key {
        batches: trial.status.batches,
        attempts: trial.status.attempts.len(),
        is_training: is_live && live_attempt(trial).is_some(),
    }
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
    use super::*;

    fn row(attempt: u32, batches: u64, time: f64) -> Row {
        let metrics = BTreeMap::from([("loss".to_owned(), 0.5)]);
        let (group, time) = ("training".to_owned(), Some(time));
        Row { group, batches, epoch: 0, attempt, time, metrics }
    }

    #[test]
    fn time_between_attempts_does_not_count() {
        let rows = vec![row(0, 1, 100.0), row(0, 2, 103.0), row(1, 3, 900.0), row(1, 4, 902.0)];
        let metrics = TrialMetrics::new(rows);
        let seconds: Vec<f64> = metrics.at.iter().map(|at| at.seconds).collect();
        assert_eq!(seconds, [0.0, 3.0, 3.0, 5.0]);
        assert_eq!(metrics.curves[&("training".to_owned(), "loss".to_owned())].len(), 4);
    }

    #[test]
    fn cache_keeps_the_latest_used_within_its_limit() {
        let cache = MetricsCache::default();
        let rows: Vec<Row> = (0..200_000).map(|at| row(0, at, at as f64)).collect();
        let metrics = Arc::new(TrialMetrics::new(rows));
        let key = Key { batches: 1, attempts: 1, is_training: false };
        let num = BYTES_MAX / metrics.bytes() + 3;
        for trial in 0..num {
            cache.keep(format!("t/{trial}"), key.clone(), &metrics);
            assert!(cache.cached("t/0", &key).is_some(), "{trial}");
        }
        assert!(cache.cached("t/1", &key).is_none());
        assert!(cache.entries.lock().unwrap().bytes <= BYTES_MAX);
        assert!(cache.cached("t/0", &Key { batches: 2, ..key }).is_none());
    }
}
