//! Stored logs of an attempt, line by line.

mod download;
mod lines;
mod parts;
mod texts;

use std::sync::Arc;

use bytes::Bytes;
use futures::{Stream, StreamExt as _, TryStreamExt as _, stream};
use serde::Deserialize;
use serde_json::{Value, json};
use stoker_storage::{Storage, StorageError, layout};

use self::download::{Prefixes, pieces};
use self::lines::Line;
use self::parts::{LogObject, Part, Position, select};
use self::texts::{Selected, Texts};
use crate::rows::MetricsCache;
use crate::store::Run;

/// Maximum number of lines in one answer: the latest ones of each rank.
const LINES_MAX: u64 = 5_000;
/// Maximum number of bytes that are read for one answer, from the end of each rank's logs.
const BYTES_MAX: u64 = 16 << 20;
/// Memory for an answer, as a multiple of the bytes that are read for it: the bytes, the selected
/// lines and the answer, which escapes characters.
const MEMORY_FACTOR: u64 = 4;
/// Maximum number of concurrent requests to the storage for one answer.
const READS_MAX: usize = 8;
/// Same for a download, which keeps what they return until the browser takes it.
const DOWNLOAD_READS_MAX: usize = 4;

/// Query of logs.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct LogsQuery {
    /// Number of the attempt; the latest if it is not set.
    pub(crate) attempt: Option<String>,
    /// Only lines of this rank.
    pub(crate) rank: Option<String>,
    /// `info`, `warn` or `error`.
    pub(crate) level: Option<String>,
    /// Only lines that contain this text, without regard to case.
    pub(crate) q: Option<String>,
    /// `error`: only the lines around the first error.
    around: Option<String>,
    /// Only lines after this position: `next` of an earlier answer.
    after: Option<String>,
}

impl LogsQuery {
    /// Returns whether only some lines match.
    fn has_condition(&self) -> bool {
        [&self.rank, &self.level, &self.q].into_iter().any(|text| condition(text).is_some())
    }
}

/// Returns the value of a menu or a field, unless it selects all lines.
fn condition(text: &Option<String>) -> Option<&str> {
    text.as_deref().filter(|text| !text.is_empty() && *text != "all")
}

/// Returns the attempt of a query: its number, or the latest of the trial.
pub(crate) fn attempt(run: &Run, index: u32, query: &LogsQuery) -> Option<u32> {
    let latest = run.trials.get(&index)?.status.attempts.last().map(|attempt| attempt.number);
    query.attempt.as_deref().and_then(|number| number.parse().ok()).or(latest)
}

/// Returns `logs.json` of a trial. Waits until the memory for it is available.
///
/// # Errors
///
/// The reason why the storage cannot be read.
pub(crate) async fn logs(
    run: &Run,
    cache: &MetricsCache,
    index: u32,
    query: &LogsQuery,
) -> Result<Value, String> {
    let Some(attempt) = attempt(run, index, query) else {
        return Ok(json!({
            "attempt": null, "lines": [], "next": "", "total": 0, "matches": 0, "beginning": true,
        }));
    };
    let storage = run.storage.clone()?;
    let mut objects = objects(run, &storage, index, attempt).await?;
    let rank: Option<u32> = query.rank.as_deref().and_then(|rank| rank.parse().ok());
    // After a local run, one object contains the lines of all ranks.
    if let Some(rank) = rank
        && objects.first().map(|object| object.rank) != objects.last().map(|object| object.rank)
    {
        objects.retain(|object| object.rank == rank);
    }
    let mut position = query.after.as_deref().map(Position::parse).unwrap_or_default();
    let (parts, is_cut) = select(&objects, &position, BYTES_MAX);
    position.advance(&objects);
    let size: u64 = parts.iter().map(|part| part.bytes.end - part.bytes.start).sum();
    // Most requests follow logs that have no new lines.
    let capacity = match size {
        0 => None,
        size => cache.reserve_logs((MEMORY_FACTOR * size).div_ceil(1 << 20)).await,
    };
    let reads = read_each(storage, parts.into_iter().map(|part| (part, ())), READS_MAX);
    let parts = reads.map_ok(|(part, (), bytes)| (part, bytes));
    let parts = parts.try_collect().await.map_err(|error: StorageError| error.to_string())?;
    let texts = Texts { parts, is_gang: is_gang(run) };
    let query = query.clone();
    // Long logs take seconds. The threads of this runtime answer all viewers.
    let built = tokio::task::spawn_blocking(move || {
        let _capacity = capacity;
        let mut answer = answer(&texts, &query);
        answer["attempt"] = json!(attempt);
        answer["next"] = json!(position.to_string());
        answer["beginning"] = json!(!is_cut);
        answer
    });
    built.await.map_err(|error| format!("cannot select the lines: {error}"))
}

/// Returns the part of `logs.json` that depends on the texts.
fn answer(texts: &Texts, query: &LogsQuery) -> Value {
    let is_match = |line: &Line| matches(line, query);
    let (selected, around) = match query.around.as_deref() {
        Some("error") => {
            let (mut lines, is_found) = texts.around_error();
            let total = lines.len() as u64;
            lines.retain(is_match);
            let num_matches = lines.len() as u64;
            let around = if is_found { json!("error") } else { json!("end") };
            (Selected { lines, total, num_matches }, around)
        }
        _ => (texts.latest(query.has_condition().then_some(is_match)), Value::Null),
    };
    let line = |line: &Line| {
        json!({
            "time": line.time, "rank": line.rank, "level": line.level, "text": line.text,
            "cut": line.num_cut,
        })
    };
    let lines: Vec<Value> = selected.lines.iter().map(line).collect();
    json!({
        "lines": lines, "total": selected.total, "matches": selected.num_matches, "around": around,
    })
}

/// Returns the whole text of an attempt's logs, as a stream.
///
/// # Errors
///
/// The reason why the storage cannot be listed.
pub(crate) async fn text(
    run: &Run,
    index: u32,
    attempt: u32,
) -> Result<impl Stream<Item = Result<Bytes, StorageError>> + use<>, String> {
    let storage = run.storage.clone()?;
    let objects = objects(run, &storage, index, attempt).await?;
    let (parts, _) = select(&objects, &Position::default(), u64::MAX);
    let mut prefixes = Prefixes::new(is_gang(run));
    let reads = read_each(storage, pieces(parts), DOWNLOAD_READS_MAX);
    Ok(reads.map_ok(move |(piece, is_last, bytes)| prefixes.text(&piece, is_last, bytes)))
}

/// Returns whether the trials of a run have several ranks.
fn is_gang(run: &Run) -> bool {
    run.experiment.spec.resources.slots_per_trial > 1
}

/// Returns the objects with an attempt's logs, sorted.
async fn objects(
    run: &Run,
    storage: &Storage,
    index: u32,
    attempt: u32,
) -> Result<Vec<LogObject>, String> {
    let folder = layout::logs_path(&run.trial_path(index), attempt);
    let listed = storage.list_sized(&folder).await.map_err(|error| error.to_string())?;
    let mut objects: Vec<LogObject> =
        listed.into_iter().filter_map(|(path, size)| LogObject::parse(path, size)).collect();
    objects.sort();
    Ok(objects)
}

/// Reads parts of objects, in their order. Each comes with what it was given with.
fn read_each<T: Send + 'static>(
    storage: Arc<Storage>,
    parts: impl Iterator<Item = (Part, T)> + Send + 'static,
    reads_max: usize,
) -> impl Stream<Item = Result<(Part, T, Bytes), StorageError>> + Send + 'static {
    let reads = parts.map(move |(part, with)| {
        let storage = storage.clone();
        async move {
            let bytes = storage.get_range(&part.path, part.bytes.clone()).await;
            bytes.map(|bytes| (part, with, bytes))
        }
    });
    stream::iter(reads).buffered(reads_max)
}

fn matches(line: &Line, query: &LogsQuery) -> bool {
    let has_rank = condition(&query.rank).is_none_or(|rank| rank.parse().ok() == line.rank);
    let has_level =
        condition(&query.level).is_none_or(|level| line.level.unwrap_or("info") == level);
    let has_text = condition(&query.q)
        .is_none_or(|text| line.text.to_lowercase().contains(&text.to_lowercase()));
    has_rank && has_level && has_text
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::lines::parse_line;
    use super::*;
    use crate::fixture;

    /// Returns a run of gangs with one attempt, and an empty storage.
    fn gang() -> Run {
        let spec = json!({"resources": {"slotsPerTrial": 2}});
        let trial = json!({"phase": "Running", "attempts": [{"number": 0}]});
        let storage = Storage::open("memory://", None).unwrap();
        let run = fixture::run(spec, json!({"phase": "Running"}), &[trial]);
        run.with_storage(Ok(Arc::new(storage)))
    }

    async fn store(run: &Run, name: &str, text: String) {
        let path = format!("{}/{name}.log", layout::logs_path(&run.trial_path(0), 0));
        run.storage.as_ref().unwrap().put(&path, text.into()).await.unwrap();
    }

    fn texts(answer: &Value) -> Vec<&str> {
        let lines = answer["lines"].as_array().unwrap().iter();
        lines.map(|line| line["text"].as_str().unwrap()).collect()
    }

    #[tokio::test]
    async fn new_lines_of_each_rank_are_followed() {
        let (run, cache) = (gang(), MetricsCache::default());
        let mut query = LogsQuery::default();
        let steps = [
            ("0-00000000", "a\n", "a"),
            ("1-00000000", "b\n", "b"),
            ("0-00000000", "a\nc\n", "c"),
            ("1-00000001", "d\n", "d"),
        ];
        for (name, text, expected) in steps {
            store(&run, name, text.to_owned()).await;
            let answer = logs(&run, &cache, 0, &query).await.unwrap();
            assert_eq!(texts(&answer), [expected], "{name} {text:?}");
            query.after = answer["next"].as_str().map(str::to_owned);
        }
        let answer = logs(&run, &cache, 0, &query).await.unwrap();
        assert_eq!((&answer["lines"], &answer["total"]), (&json!([]), &json!(0)));
        let texts: Vec<Bytes> = text(&run, 0, 0).await.unwrap().try_collect().await.unwrap();
        assert_eq!(texts.concat(), *b"[rank=0] a\n[rank=0] c\n[rank=1] b\n[rank=1] d\n");
    }

    #[tokio::test]
    async fn latest_lines_of_each_rank_are_shown() {
        let (run, cache) = (gang(), MetricsCache::default());
        for rank in 0..2 {
            let lines = format!("{}ERROR {rank}\n", "x\n".repeat(LINES_MAX as usize));
            store(&run, &format!("{rank}-00000000"), lines).await;
        }
        let of = |rank: &str, level: &str| LogsQuery {
            rank: Some(rank.to_owned()),
            level: Some(level.to_owned()),
            ..LogsQuery::default()
        };
        let all = logs(&run, &cache, 0, &of("all", "all")).await.unwrap();
        let shown = texts(&all);
        assert_eq!((shown.len(), shown[2_499], shown[4_999]), (5_000, "ERROR 0", "ERROR 1"));
        assert_eq!((&all["total"], &all["matches"]), (&json!(10_002), &json!(10_002)));
        let errors = logs(&run, &cache, 0, &of("1", "error")).await.unwrap();
        assert_eq!(texts(&errors), ["ERROR 1"]);
        assert_eq!((&errors["total"], &errors["matches"]), (&json!(5_001), &json!(1)));
    }

    #[tokio::test]
    async fn downloads_are_read_in_pieces() {
        let run = gang();
        store(&run, "0-00000000", "x\n".repeat(3 << 19)).await;
        let texts: Vec<Bytes> = text(&run, 0, 0).await.unwrap().try_collect().await.unwrap();
        assert_eq!(texts.len(), 3);
        assert_eq!(texts.concat(), "[rank=0] x\n".repeat(3 << 19).as_bytes());
    }

    #[tokio::test]
    async fn memory_of_concurrent_answers_is_limited() {
        let (run, cache) = (gang(), MetricsCache::default());
        store(&run, "0-00000000", "x\n".to_owned()).await;
        // Logs do not wait for metrics.
        let metrics = cache.reserve(u64::MAX).await;
        let query = LogsQuery::default();
        let first = logs(&run, &cache, 0, &query).await.unwrap();
        assert_eq!(texts(&first), ["x"]);
        let all = cache.reserve_logs(u64::MAX).await;
        let wait = Duration::from_millis(20);
        assert!(tokio::time::timeout(wait, logs(&run, &cache, 0, &query)).await.is_err());
        let after = first["next"].as_str().map(str::to_owned);
        let following = LogsQuery { after, ..LogsQuery::default() };
        assert!(texts(&logs(&run, &cache, 0, &following).await.unwrap()).is_empty());
        drop((all, metrics));
        assert_eq!(texts(&logs(&run, &cache, 0, &query).await.unwrap()), ["x"]);
    }

    #[test]
    fn query_selects_lines() {
        let query = |rank: &str, level: &str, q: &str| LogsQuery {
            rank: Some(rank.to_owned()),
            level: Some(level.to_owned()),
            q: Some(q.to_owned()),
            ..LogsQuery::default()
        };
        let line = parse_line("[rank=2] WARN Disk is slow", None);
        assert!(matches(&line, &query("", "", "")));
        assert!(matches(&line, &query("2", "warn", "disk")));
        assert!(!matches(&line, &query("1", "", "")));
        assert!(!matches(&line, &query("all", "error", "")));
        assert!(!matches(&line, &query("all", "all", "network")));
    }
}
