//! Rows of metrics as JSON lines, and which rows are in effect.
//!
//! Each attempt of a trial writes separate objects. An attempt that resumes from a checkpoint
//! repeats the batches after the checkpoint, so its rows supersede those of earlier attempts.

use std::cmp::Ordering;
use std::collections::BTreeMap;
use std::collections::btree_map::Entry;

use bytes::Bytes;
use futures::{StreamExt as _, stream};
use serde::{Deserialize, Serialize};
use stoker_api::number;
use tokio::sync::Semaphore;

use crate::segments::Segments;
use crate::{ObjectState, Storage, StorageError, layout};

/// Maximum number of concurrent requests of a [`Reader`]. One request takes tens of milliseconds
/// in a bucket, and a long trial has thousands of segments.
const REQUESTS_MAX: usize = 16;

/// Metrics of one group after a number of batches.
///
/// # Examples
///
/// JSON cannot express NaN and infinities. Such a metric is `null`, and `nonfinite` contains its
/// value: `NaN`, `inf` or `-inf`.
///
/// ```
/// let line = concat!(
///     r#"{"group":"training","batches":3,"epoch":0,"attempt":0,"#,
///     r#""metrics":{"loss":null},"nonfinite":{"loss":"NaN"}}"#,
/// );
/// let row: stoker_storage::metrics::Row = serde_json::from_str(line)?;
/// assert!(row.metrics["loss"].is_nan());
/// assert_eq!(serde_json::to_string(&row)?, line);
/// # Ok::<(), serde_json::Error>(())
/// ```
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
#[serde(try_from = "StoredRow", into = "StoredRow")]
pub struct Row {
    /// Name of the group: `training`, `validation`, or a custom name.
    pub group: String,
    /// Number of global batches trained.
    pub batches: u64,
    /// Epoch of the last batch, counted from 0. An epoch is a pass over the training data, or the
    /// experiment's `recordsPerEpoch`.
    pub epoch: u64,
    /// Number of the attempt that wrote the row.
    pub attempt: u32,
    /// Time of the row in seconds since 1970. The only field that differs between identical runs.
    pub time: Option<f64>,
    /// Metrics by name.
    pub metrics: BTreeMap<String, f64>,
}

/// A row as JSON. Metrics are numbers or null, because a text among the numbers would turn the
/// column into text in pandas, Polars and DuckDB.
#[derive(Deserialize, Serialize)]
struct StoredRow {
    group: String,
    batches: u64,
    epoch: u64,
    attempt: u32,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    time: Option<f64>,
    metrics: BTreeMap<String, Option<StoredValue>>,
    /// Values of the metrics that are null: `NaN`, `inf` or `-inf`.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    nonfinite: BTreeMap<String, String>,
}

#[derive(Deserialize, Serialize)]
#[serde(untagged)]
enum StoredValue {
    Number(f64),
    /// `NaN`, `inf` or `-inf` in files from before `nonfinite`.
    Text(String),
}

impl From<Row> for StoredRow {
    fn from(row: Row) -> Self {
        let Row { group, batches, epoch, attempt, time, metrics } = row;
        let other = metrics.iter().filter(|(_, value)| !value.is_finite());
        let nonfinite = other.map(|(name, value)| (name.clone(), number::format(*value))).collect();
        let stored = |value: f64| value.is_finite().then_some(StoredValue::Number(value));
        let metrics = metrics.into_iter().map(|(name, value)| (name, stored(value))).collect();
        Self { group, batches, epoch, attempt, time, metrics, nonfinite }
    }
}

impl TryFrom<StoredRow> for Row {
    type Error = String;

    fn try_from(row: StoredRow) -> Result<Self, String> {
        let StoredRow { group, batches, epoch, attempt, time, metrics, nonfinite } = row;
        let read = |(name, value): (String, Option<StoredValue>)| {
            let text = match &value {
                Some(StoredValue::Number(value)) => return Ok((name, *value)),
                Some(StoredValue::Text(text)) => text,
                // A null without a value is from other software, for which null is NaN.
                None => nonfinite.get(&name).map_or("NaN", String::as_str),
            };
            match number::parse(text) {
                Some(value) => Ok((name, value)),
                None => Err(format!("metric {name:?}: {text:?} is not a number")),
            }
        };
        let metrics = metrics.into_iter().map(read).collect::<Result<_, _>>()?;
        Ok(Self { group, batches, epoch, attempt, time, metrics })
    }
}

/// Returns the segments to which `attempt` writes its rows.
pub fn segments(trial_path: &str, attempt: u32) -> Segments {
    Segments::new(format!("{}/{attempt}-", layout::metrics_path(trial_path)), ".jsonl")
}

/// Reads the effective rows of a trial, sorted by batches; see [`effective`].
///
/// # Errors
///
/// The storage failed.
pub async fn read(
    storage: &Storage,
    trial_path: &str,
    attempts: &[(u32, u64)],
) -> Result<Vec<Row>, StorageError> {
    Ok(effective(Reader::new(storage).rows(trial_path).await?, attempts))
}

/// Reads rows of trials with at most 16 concurrent requests, also if several trials are read
/// concurrently.
#[derive(Debug)]
pub struct Reader<'a> {
    storage: &'a Storage,
    requests: Semaphore,
}

impl<'a> Reader<'a> {
    /// Creates a reader. Sends no request.
    pub fn new(storage: &'a Storage) -> Self {
        Self { storage, requests: Semaphore::new(REQUESTS_MAX) }
    }

    /// Reads the rows of all attempts of a trial, also superseded ones, sorted by attempt, batches
    /// and group. Several rows of an attempt with the same group and batches are merged. An
    /// incomplete last line is skipped. A missing directory has no rows.
    ///
    /// # Errors
    ///
    /// The storage failed.
    pub async fn rows(&self, trial_path: &str) -> Result<Vec<Row>, StorageError> {
        let mut rows = BTreeMap::<(u32, u64, String), Row>::new();
        let add =
            |_: usize, row: Row| match rows.entry((row.attempt, row.batches, row.group.clone())) {
                Entry::Vacant(free) => drop(free.insert(row)),
                Entry::Occupied(mut before) => before.get_mut().metrics.extend(row.metrics),
            };
        let objects = self.objects(trial_path).await?;
        self.each_row(objects.into_iter().map(|(path, _)| path).collect(), add).await?;
        Ok(rows.into_values().collect())
    }

    /// Lists the objects with the rows of a trial, attempt by attempt, so that new objects are
    /// usually the last ones. Of two values of one metric after the same batches of an attempt, the
    /// later one in this order is valid.
    ///
    /// # Errors
    ///
    /// The storage failed.
    pub async fn objects(
        &self,
        trial_path: &str,
    ) -> Result<Vec<(String, ObjectState)>, StorageError> {
        // Ignore the error: the semaphore is never closed.
        let _request = self.requests.acquire().await;
        let listed = self.storage.list_states(&layout::metrics_path(trial_path)).await?;
        let mut objects: Vec<(String, ObjectState)> =
            listed.into_iter().filter(|(path, _)| attempt_of(path).is_some()).collect();
        // The sort keeps the order of an attempt's objects, whose numbers have leading zeros.
        objects.sort_by_key(|(path, _)| attempt_of(path));
        Ok(objects)
    }

    /// Calls `add` with each row of the objects `paths`, in order, and the index of its object.
    /// Holds few objects in memory at a time. An incomplete last line is skipped.
    ///
    /// # Errors
    ///
    /// The storage failed.
    pub async fn each_row(
        &self,
        paths: Vec<String>,
        mut add: impl FnMut(usize, Row),
    ) -> Result<(), StorageError> {
        let gets = stream::iter(paths).map(|path| self.get(path));
        let mut gets = gets.buffered(REQUESTS_MAX).enumerate();
        while let Some((index, bytes)) = gets.next().await {
            let bytes = bytes?;
            let lines = bytes.split(|byte| *byte == b'\n');
            let rows = lines.filter_map(|line| serde_json::from_slice::<Row>(line).ok());
            rows.for_each(|row| add(index, row));
        }
        Ok(())
    }

    async fn get(&self, path: String) -> Result<Bytes, StorageError> {
        let _request = self.requests.acquire().await;
        self.storage.get(&path).await
    }
}

/// Parses the attempt from `.../ATTEMPT-SEQ.jsonl`.
fn attempt_of(path: &str) -> Option<u32> {
    let name = path.rsplit('/').next()?.strip_suffix(".jsonl")?;
    name.split_once('-')?.0.parse().ok()
}

/// Returns the attempts for [`effective`]: those of `rows`, and those of `recorded` with the
/// batches they resumed from. Another attempt started from scratch, or is so old that the record no
/// longer lists it: it counts from its first row. An attempt that is not recorded and has no rows
/// is left out, because it may have ended before it started to train.
pub fn starts(rows: &[Row], recorded: &[(u32, u64)]) -> Vec<(u32, u64)> {
    starts_of(rows.iter().map(|row| (row.attempt, row.batches)), recorded)
}

/// Same as [`starts`], for the attempts and batches of rows.
pub fn starts_of(
    rows: impl IntoIterator<Item = (u32, u64)>,
    recorded: &[(u32, u64)],
) -> Vec<(u32, u64)> {
    let mut starts = BTreeMap::<u32, u64>::new();
    for (attempt, batches) in rows {
        let start = starts.entry(attempt).or_insert(batches);
        *start = batches.min(*start);
    }
    starts.extend(recorded.iter().copied());
    starts.into_iter().collect()
}

/// Returns the effective rows, sorted by batches and group.
///
/// `attempts` lists the attempts to keep, in order, each with the batches it resumed from (0 for a
/// start from scratch). A row is superseded if a later attempt resumed before it, or has a row of
/// the same group at the same batches. Several rows of an attempt with the same group and batches
/// are merged.
pub fn effective(rows: Vec<Row>, attempts: &[(u32, u64)]) -> Vec<Row> {
    let position = |row: &Row| attempts.iter().position(|(number, _)| *number == row.attempt);
    let is_effective = |row: &Row| {
        let later = position(row).map(|idx| &attempts[idx + 1..]);
        later.is_some_and(|later| later.iter().all(|(_, start)| row.batches <= *start))
    };
    let mut kept = BTreeMap::<(u64, String), Row>::new();
    for row in rows.into_iter().filter(is_effective) {
        match kept.entry((row.batches, row.group.clone())) {
            Entry::Vacant(free) => drop(free.insert(row)),
            Entry::Occupied(mut before) => match position(before.get()).cmp(&position(&row)) {
                Ordering::Less => drop(before.insert(row)),
                Ordering::Equal => before.get_mut().metrics.extend(row.metrics),
                Ordering::Greater => {}
            },
        }
    }
    kept.into_values().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(attempt: u32, group: &str, batches: u64) -> Row {
        let metrics = BTreeMap::from([("loss".to_owned(), 0.1)]);
        Row { group: group.to_owned(), batches, epoch: 0, attempt, time: None, metrics }
    }

    fn check(rows: &[(u32, &str, u64)], attempts: &[(u32, u64)], expected: &[(u32, &str, u64)]) {
        let made = |rows: &[(u32, &str, u64)]| -> Vec<Row> {
            rows.iter().map(|(attempt, group, batches)| row(*attempt, group, *batches)).collect()
        };
        assert_eq!(effective(made(rows), attempts), made(expected), "{rows:?} {attempts:?}");
    }

    #[test]
    fn later_attempts_supersede_rows_after_their_start() {
        let (t, v) = ("training", "validation");
        check(&[(0, t, 10), (0, t, 20)], &[(0, 0)], &[(0, t, 10), (0, t, 20)]);
        // Attempt 1 resumed at batch 10.
        let rows = [(0, t, 10), (0, t, 20), (1, t, 20), (1, t, 30)];
        check(&rows, &[(0, 0), (1, 10)], &[(0, t, 10), (1, t, 20), (1, t, 30)]);
        // Attempt 1 has not written any rows yet.
        check(&[(0, t, 10), (0, t, 20)], &[(0, 0), (1, 10)], &[(0, t, 10)]);
        // Attempt 2 resumed at an earlier batch than attempt 1.
        let rows = [(0, t, 10), (0, t, 20), (1, t, 30), (2, t, 20)];
        check(&rows, &[(0, 0), (1, 20), (2, 10)], &[(0, t, 10), (2, t, 20)]);
        // Both attempts validated at the batch of the checkpoint.
        let rows = [(0, t, 10), (0, v, 10), (1, v, 10)];
        check(&rows, &[(0, 0), (1, 10)], &[(0, t, 10), (1, v, 10)]);
        // An attempt that is not listed.
        check(&[(7, t, 10)], &[(0, 0)], &[]);
    }

    #[test]
    fn unrecorded_attempts_count_from_their_first_row() {
        let check = |batches: &[(u32, u64)], recorded: &[(u32, u64)], expected: &[(u32, u64)]| {
            let rows: Vec<Row> =
                batches.iter().map(|(attempt, at)| row(*attempt, "training", *at)).collect();
            assert_eq!(starts(&rows, recorded), expected, "{batches:?} {recorded:?}");
        };
        check(&[(0, 10), (0, 20)], &[], &[(0, 10)]);
        // Attempt 1 was never started, so it has no rows and supersedes none.
        check(&[(0, 10), (0, 20), (2, 30)], &[(2, 20)], &[(0, 10), (2, 20)]);
        // Attempt 1 resumed and has no rows yet.
        check(&[(0, 10), (0, 20)], &[(1, 10)], &[(0, 10), (1, 10)]);
        // The record lists only the latest attempts.
        check(&[(0, 10), (1, 30), (9, 50)], &[(9, 40)], &[(0, 10), (1, 30), (9, 40)]);
    }

    #[test]
    fn rows_of_one_attempt_and_batch_are_merged() {
        let named = |attempt, name: &str, value| {
            let metrics = BTreeMap::from([(name.to_owned(), value)]);
            Row { metrics, ..row(attempt, "validation", 10) }
        };
        let both = [named(0, "loss", 0.5), named(0, "accuracy", 0.9)];
        let merged = effective(both.to_vec(), &[(0, 0)]).remove(0).metrics;
        assert_eq!(merged, BTreeMap::from([("accuracy".into(), 0.9), ("loss".into(), 0.5)]));
        let again = [both[0].clone(), both[1].clone(), named(1, "loss", 0.4)];
        let kept = effective(again.to_vec(), &[(0, 0), (1, 10)]).remove(0);
        assert_eq!((kept.attempt, kept.metrics), (1, BTreeMap::from([("loss".into(), 0.4)])));
    }

    #[tokio::test]
    async fn rows_are_read_from_all_objects() {
        let storage = Storage::open("memory://", None).unwrap();
        let line = |row: &Row| serde_json::to_string(row).unwrap();
        let (first, second) = (row(0, "training", 10), row(1, "training", 20));
        let cut = format!("{}\n{}", line(&first), &line(&second)[..20]);
        storage.put(&segments("t", 0).path(0), cut.into()).await.unwrap();
        storage.put(&segments("t", 1).path(0), line(&second).into()).await.unwrap();
        let rows = read(&storage, "t", &[(0, 0), (1, 10)]).await.unwrap();
        assert_eq!(rows, [first, second]);
        assert_eq!(read(&storage, "none", &[(0, 0)]).await.unwrap(), []);
    }

    #[tokio::test]
    async fn segments_are_read_in_order_of_their_numbers() {
        let storage = Storage::open("memory://", None).unwrap();
        let segments = segments("t", 0);
        // More segments than concurrent requests. All rows have the same batches.
        for seq in 0..3 * REQUESTS_MAX as u64 {
            let metrics = BTreeMap::from([("loss".to_owned(), seq as f64)]);
            let text = serde_json::to_string(&Row { metrics, ..row(0, "training", 1) }).unwrap();
            storage.put(&segments.path(seq), text.into()).await.unwrap();
        }
        let other = serde_json::to_string(&row(9, "training", 9)).unwrap();
        storage.put("t/metrics/notes.jsonl", other.into()).await.unwrap();
        let reader = Reader::new(&storage);
        let (rows, again) = futures::join!(reader.rows("t"), reader.rows("t"));
        let rows = rows.unwrap();
        assert_eq!((rows.len(), rows[0].metrics["loss"]), (1, 47.0));
        assert_eq!(rows, again.unwrap());
    }

    #[test]
    fn metrics_round_trip_bit_identically() {
        for value in [0.1, 1.0, 1e300, 5e-324, f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
            let metrics = BTreeMap::from([("loss".to_owned(), value)]);
            let row = Row { metrics, ..row(0, "training", 1) };
            let text = serde_json::to_string(&row).unwrap();
            assert_eq!(text.contains("nonfinite"), !value.is_finite(), "{text}");
            let back: Row = serde_json::from_str(&text).unwrap();
            assert_eq!(back.metrics["loss"].to_bits(), value.to_bits(), "{text}");
        }
    }

    #[test]
    fn nonfinite_metrics_are_read_in_all_forms() {
        let check = |metrics: &str, nonfinite: &str, expected: Result<&str, &str>| {
            let begin = r#"{"group":"g","batches":1,"epoch":0,"attempt":0"#;
            let line = format!(r#"{begin},"metrics":{metrics}{nonfinite}}}"#);
            let read = serde_json::from_str::<Row>(&line);
            let read = read.map(|row| format!("{:?}", row.metrics.values().collect::<Vec<_>>()));
            match (read, expected) {
                (Ok(read), Ok(expected)) => assert_eq!(read, expected, "{line}"),
                (Err(error), Err(part)) => assert!(error.to_string().contains(part), "{error}"),
                (read, _) => panic!("{read:?} is not {expected:?}"),
            }
        };
        let values = r#","nonfinite":{"a":"-inf","b":"NaN"}"#;
        check(r#"{"a":null,"b":null,"c":1}"#, values, Ok("[-inf, NaN, 1.0]"));
        // Files from before `nonfinite`, and from other software.
        check(r#"{"a":"inf","b":"NaN","c":0.5}"#, "", Ok("[inf, NaN, 0.5]"));
        check(r#"{"a":null}"#, "", Ok("[NaN]"));
        check(r#"{"a":"many"}"#, "", Err(r#"metric "a": "many" is not a number"#));
        check(r#"{"a":null}"#, r#","nonfinite":{"a":"many"}"#, Err("is not a number"));
        check(r#"{"a":true}"#, "", Err("did not match"));
    }
}
