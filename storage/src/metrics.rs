//! Rows of metrics as JSON lines, and which rows are in effect.
//!
//! Each attempt of a trial writes separate objects. An attempt that resumes from a checkpoint
//! repeats the batches after the checkpoint, so its rows supersede those of earlier attempts.

use std::cmp::Ordering;
use std::collections::BTreeMap;
use std::collections::btree_map::Entry;

use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use stoker_api::number;

use crate::segments::Segments;
use crate::{Storage, StorageError, layout};

/// Metrics of one group after a number of batches.
///
/// # Examples
///
/// ```
/// let line = r#"{"group":"training","batches":3,"epoch":0,"attempt":0,"metrics":{"loss":"NaN"}}"#;
/// let row: stoker_storage::metrics::Row = serde_json::from_str(line)?;
/// assert!(row.metrics["loss"].is_nan());
/// assert_eq!(serde_json::to_string(&row)?, line);
/// # Ok::<(), serde_json::Error>(())
/// ```
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub struct Row {
    /// Name of the group: `training`, `validation`, or a custom name.
    pub group: String,
    /// Number of global batches trained.
    pub batches: u64,
    /// Number of completed epochs: passes over the training data, or multiples of the experiment's
    /// `recordsPerEpoch`.
    pub epoch: u64,
    /// Number of the attempt that wrote the row.
    pub attempt: u32,
    /// Time of the row in seconds since 1970. The only field that differs between identical runs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub time: Option<f64>,
    /// Metrics by name: JSON numbers, or `"NaN"`, `"inf"` and `"-inf"`, which JSON cannot express.
    #[serde(serialize_with = "write_metrics", deserialize_with = "read_metrics")]
    pub metrics: BTreeMap<String, f64>,
}

#[derive(Deserialize, Serialize)]
#[serde(untagged)]
enum Number {
    Finite(f64),
    Other(String),
}

fn write_metrics<S: Serializer>(metrics: &BTreeMap<String, f64>, to: S) -> Result<S::Ok, S::Error> {
    to.collect_map(metrics.iter().map(|(name, value)| match value.is_finite() {
        true => (name, Number::Finite(*value)),
        false => (name, Number::Other(number::format(*value))),
    }))
}

fn read_metrics<'de, D: Deserializer<'de>>(from: D) -> Result<BTreeMap<String, f64>, D::Error> {
    let read = |(name, value)| match value {
        Number::Finite(value) => Ok((name, value)),
        Number::Other(text) => match number::parse(&text) {
            Some(value) => Ok((name, value)),
            None => Err(D::Error::custom(format!("metric {name:?}: {text:?} is not a number"))),
        },
    };
    BTreeMap::<String, Number>::deserialize(from)?.into_iter().map(read).collect()
}

/// Returns the segments to which `attempt` writes its rows.
pub fn segments(trial_path: &str, attempt: u32) -> Segments {
    Segments::new(format!("{}/{attempt}-", layout::metrics_path(trial_path)), ".jsonl")
}

/// Reads the effective rows of a trial, sorted by batches.
///
/// `attempts` lists the attempts to read, in order, each with the batches it resumed from (0 for a
/// start from scratch). A row is superseded if a later attempt resumed before it, or has a row of
/// the same group at the same batches. Several rows of an attempt with the same group and batches
/// are merged. An incomplete last line is skipped.
///
/// # Errors
///
/// The storage failed.
pub async fn read(
    storage: &Storage,
    trial_path: &str,
    attempts: &[(u32, u64)],
) -> Result<Vec<Row>, StorageError> {
    let mut rows = vec![];
    for path in storage.list(&layout::metrics_path(trial_path)).await? {
        let Some(attempt) = attempt_of(&path) else { continue };
        if attempts.iter().any(|(number, _)| *number == attempt) {
            let bytes = storage.get(&path).await?;
            let lines = bytes.split(|byte| *byte == b'\n');
            rows.extend(lines.filter_map(|line| serde_json::from_slice::<Row>(line).ok()));
        }
    }
    Ok(effective(rows, attempts))
}

/// Returns the attempt in `.../ATTEMPT-SEQ.jsonl`.
fn attempt_of(path: &str) -> Option<u32> {
    let name = path.rsplit('/').next()?.strip_suffix(".jsonl")?;
    name.split_once('-')?.0.parse().ok()
}

/// Returns the effective rows; see [`read`].
fn effective(rows: Vec<Row>, attempts: &[(u32, u64)]) -> Vec<Row> {
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

    #[test]
    fn metrics_round_trip_bit_identically() {
        for value in [0.1, 1.0, 1e300, 5e-324, f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
            let metrics = BTreeMap::from([("loss".to_owned(), value)]);
            let row = Row { metrics, ..row(0, "training", 1) };
            let text = serde_json::to_string(&row).unwrap();
            let back: Row = serde_json::from_str(&text).unwrap();
            assert_eq!(back.metrics["loss"].to_bits(), value.to_bits(), "{text}");
        }
    }
}
