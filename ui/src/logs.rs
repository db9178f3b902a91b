//! Stored logs of an attempt, line by line.

mod parts;

use std::collections::BTreeMap;
use std::pin::pin;
use std::sync::Arc;

use axum::body::Body;
use bytes::Bytes;
use futures::{Stream, StreamExt as _, TryStreamExt as _, stream};
use serde::Deserialize;
use serde_json::{Value, json};
use stoker_storage::{Storage, StorageError, layout};

use self::parts::{LogObject, Part, Position, select, share};
use crate::store::Run;
use crate::text;

/// Maximum number of lines in one answer: the latest ones of each rank.
const LINES_MAX: u64 = 5_000;
/// Maximum number of bytes that are read for one answer, from the end of each rank's logs.
const BYTES_MAX: u64 = 16 << 20;
/// Maximum number of concurrent requests to the storage for one answer.
const READS_MAX: usize = 8;
/// Maximum number of characters of a line.
const LINE_CHARS_MAX: usize = 4_000;
/// Number of lines that are shown before the first error.
const BEFORE_ERROR: usize = 4;
/// Number of lines that are shown around the first error, with the error.
const AROUND_ERROR: usize = 12;

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

/// A line with what it says about itself.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Line {
    pub(crate) time: Option<String>,
    pub(crate) rank: Option<u32>,
    pub(crate) level: Option<&'static str>,
    pub(crate) text: String,
    /// Number of characters that the text lacks at its end.
    pub(crate) num_cut: usize,
}

/// Returns the attempt of a query: its number, or the latest of the trial.
pub(crate) fn attempt(run: &Run, index: u32, query: &LogsQuery) -> Option<u32> {
    let latest = run.trials.get(&index)?.status.attempts.last().map(|attempt| attempt.number);
    query.attempt.as_deref().and_then(|number| number.parse().ok()).or(latest)
}

/// Returns `logs.json` of a trial.
///
/// # Errors
///
/// The reason why the storage cannot be read.
pub(crate) async fn logs(run: &Run, index: u32, query: &LogsQuery) -> Result<Value, String> {
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
    let mut ranks = read(storage, parts, is_gang(run)).await?;
    let mut around = Value::Null;
    if query.around.as_deref() == Some("error") {
        let (lines, is_found) = around_error(ranks.into_iter().flatten().collect());
        ranks = vec![lines];
        around = json!(if is_found { "error" } else { "end" });
    }
    let num = |ranks: &[Vec<Line>]| ranks.iter().map(Vec::len).sum::<usize>();
    let total = num(&ranks);
    for lines in &mut ranks {
        lines.retain(|line| matches(line, query));
    }
    let num_matches = num(&ranks);
    let limit = share(ranks.iter().map(|lines| lines.len() as u64), LINES_MAX);
    let limit = usize::try_from(limit).unwrap_or(usize::MAX);
    let latest = ranks.iter().flat_map(|lines| &lines[lines.len().saturating_sub(limit)..]);
    let shown: Vec<Value> = latest
        .map(|line| {
            json!({
                "time": line.time, "rank": line.rank, "level": line.level, "text": line.text,
                "cut": line.num_cut,
            })
        })
        .collect();
    Ok(json!({
        "attempt": attempt, "lines": shown, "next": position.to_string(), "total": total,
        "matches": num_matches, "beginning": !is_cut, "around": around,
    }))
}

/// Returns the whole text of an attempt's logs, as a stream.
///
/// # Errors
///
/// The reason why the storage cannot be listed. If a later read fails, the stream ends early.
pub(crate) async fn text(run: &Run, index: u32, attempt: u32) -> Result<Body, String> {
    let storage = run.storage.clone()?;
    let objects = objects(run, &storage, index, attempt).await?;
    let (parts, _) = select(&objects, &Position::default(), u64::MAX);
    let is_gang = is_gang(run);
    let texts = read_each(storage, parts)
        .map_ok(move |(part, bytes)| plain(&bytes, is_gang.then_some(part.rank)));
    Ok(Body::from_stream(texts))
}

/// Returns the lines of an object, with a rank as prefix unless they have one.
fn plain(bytes: &[u8], rank: Option<u32>) -> String {
    let mut text = String::with_capacity(bytes.len());
    for line in String::from_utf8_lossy(bytes).lines() {
        if let Some(rank) = rank
            && !line.starts_with("[rank=")
        {
            text.push_str(&format!("[rank={rank}] "));
        }
        text.push_str(line);
        text.push('\n');
    }
    text
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

/// Reads parts of objects, in their order.
fn read_each(
    storage: Arc<Storage>,
    parts: Vec<Part>,
) -> impl Stream<Item = Result<(Part, Bytes), StorageError>> + Send + 'static {
    let reads = parts.into_iter().map(move |part| {
        let storage = storage.clone();
        async move {
            let bytes = storage.get_range(&part.path, part.bytes.clone()).await;
            bytes.map(|bytes| (part, bytes))
        }
    });
    stream::iter(reads).buffered(READS_MAX)
}

/// Returns the lines of parts, for each rank.
async fn read(
    storage: Arc<Storage>,
    parts: Vec<Part>,
    is_gang: bool,
) -> Result<Vec<Vec<Line>>, String> {
    let mut ranks: BTreeMap<u32, Vec<Line>> = BTreeMap::new();
    let mut reads = pin!(read_each(storage, parts));
    while let Some((part, bytes)) = reads.try_next().await.map_err(|error| error.to_string())? {
        let text = String::from_utf8_lossy(&bytes);
        let lines = part.lines(&text).map(|line| parse_line(line, is_gang.then_some(part.rank)));
        ranks.entry(part.rank).or_default().extend(lines);
    }
    Ok(ranks.into_values().collect())
}

/// Splits a line into its parts. `rank` is that of the file.
pub(crate) fn parse_line(line: &str, rank: Option<u32>) -> Line {
    let own = line.strip_prefix("[rank=").and_then(|rest| {
        let (number, rest) = rest.split_once(']')?;
        Some((number.parse::<u32>().ok()?, rest.strip_prefix(' ').unwrap_or(rest)))
    });
    let (rank, line) = match own {
        Some((own, rest)) => (Some(own), rest),
        None => (rank, line),
    };
    let (time, line) = match line.split_once(' ') {
        Some((first, rest)) if is_time(first) => (Some(first.to_owned()), rest),
        _ => (None, line),
    };
    let whole = text::escape(line);
    let mut chars = whole.chars();
    let text: String = chars.by_ref().take(LINE_CHARS_MAX).collect();
    Line { time, rank, level: level(&text), text, num_cut: chars.count() }
}

/// Returns whether a word is a time such as `2026-11-24T14:04:51.204Z`.
fn is_time(word: &str) -> bool {
    let bytes = word.as_bytes();
    bytes.len() >= 20
        && bytes[4] == b'-'
        && bytes[7] == b'-'
        && bytes[10] == b'T'
        && bytes[..4].iter().all(u8::is_ascii_digit)
}

/// Returns the level that the first words of a line name.
fn level(text: &str) -> Option<&'static str> {
    let is_end = |char: char| char.is_whitespace() || matches!(char, ':' | '[' | ']' | '(');
    let mut words = text.split(is_end).filter(|word| !word.is_empty()).take(3).enumerate();
    if text.starts_with("thread '") && text.contains("panicked at") {
        return Some("error");
    }
    // Words in lower case count at the beginning only: `the error rate` is no error.
    words.find_map(|(position, word)| match (word, position) {
        ("ERROR" | "FATAL", _) | ("error" | "Error" | "fatal", 0) => Some("error"),
        ("WARN" | "WARNING", _) | ("warning" | "warn" | "Warning", 0) => Some("warn"),
        ("INFO" | "DEBUG" | "TRACE", _) | ("info" | "debug", 0) => Some("info"),
        _ => None,
    })
}

/// Returns the lines around the first error, of its rank alone, and whether there is an error.
/// Without one, returns the last lines.
///
/// The first error of a gang is one that names no other rank: when a rank fails, the others report
/// that they lost it. Among these, the earliest one counts, and lines without a time come last.
fn around_error(mut lines: Vec<Line>) -> (Vec<Line>, bool) {
    let errors = lines.iter().filter(|line| line.level == Some("error"));
    let first =
        errors.min_by_key(|line| (names_other_rank(line), line.time.is_none(), line.time.clone()));
    let first = first.cloned();
    let at = match &first {
        Some(first) => {
            lines.retain(|line| line.rank == first.rank);
            lines.iter().position(|line| line == first).unwrap_or(0)
        }
        None => lines.len().saturating_sub(AROUND_ERROR) + BEFORE_ERROR,
    };
    lines.drain(..at.saturating_sub(BEFORE_ERROR).min(lines.len()));
    lines.truncate(AROUND_ERROR);
    (lines, first.is_some())
}

/// Returns whether a line names another rank than its own, such as `lost the connection to rank 1`.
fn names_other_rank(line: &Line) -> bool {
    let number = |text: &str| text.split(|char: char| !char.is_ascii_digit()).next()?.parse().ok();
    let mut named = line.text.split("rank ").skip(1).filter_map(number);
    line.text.contains("another rank") || named.any(|rank: u32| line.rank != Some(rank))
}

fn matches(line: &Line, query: &LogsQuery) -> bool {
    let of = |text: &Option<String>| text.clone().filter(|text| !text.is_empty() && text != "all");
    let has_rank = of(&query.rank).is_none_or(|rank| rank.parse().ok() == line.rank);
    let has_level =
        of(&query.level).is_none_or(|level| line.level.unwrap_or("info") == level.as_str());
    let has_text =
        of(&query.q).is_none_or(|text| line.text.to_lowercase().contains(&text.to_lowercase()));
    has_rank && has_level && has_text
}

#[cfg(test)]
mod tests {
    use axum::body::to_bytes;

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
        let run = gang();
        let mut query = LogsQuery::default();
        let steps = [
            ("0-00000000", "a\n", "a"),
            ("1-00000000", "b\n", "b"),
            ("0-00000000", "a\nc\n", "c"),
            ("1-00000001", "d\n", "d"),
        ];
        for (name, text, expected) in steps {
            store(&run, name, text.to_owned()).await;
            let answer = logs(&run, 0, &query).await.unwrap();
            assert_eq!(texts(&answer), [expected], "{name} {text:?}");
            query.after = answer["next"].as_str().map(str::to_owned);
        }
        let answer = logs(&run, 0, &query).await.unwrap();
        assert_eq!((&answer["lines"], &answer["total"]), (&json!([]), &json!(0)));
        let body = text(&run, 0, 0).await.unwrap();
        let all = to_bytes(body, usize::MAX).await.unwrap();
        assert_eq!(all, "[rank=0] a\n[rank=0] c\n[rank=1] b\n[rank=1] d\n");
    }

    #[tokio::test]
    async fn latest_lines_of_each_rank_are_shown() {
        let run = gang();
        for rank in 0..2 {
            let lines = format!("{}ERROR {rank}\n", "x\n".repeat(LINES_MAX as usize));
            store(&run, &format!("{rank}-00000000"), lines).await;
        }
        let of = |rank: &str, level: &str| LogsQuery {
            rank: Some(rank.to_owned()),
            level: Some(level.to_owned()),
            ..LogsQuery::default()
        };
        let all = logs(&run, 0, &of("all", "all")).await.unwrap();
        let shown = texts(&all);
        assert_eq!((shown.len(), shown[2_499], shown[4_999]), (5_000, "ERROR 0", "ERROR 1"));
        assert_eq!((&all["total"], &all["matches"]), (&json!(10_002), &json!(10_002)));
        let errors = logs(&run, 0, &of("1", "error")).await.unwrap();
        assert_eq!(texts(&errors), ["ERROR 1"]);
        assert_eq!((&errors["total"], &errors["matches"]), (&json!(5_001), &json!(1)));
    }

    #[test]
    fn cut_characters_are_counted() {
        let check = |num_chars: usize, expected: (usize, usize)| {
            let line = parse_line(&"é".repeat(num_chars), None);
            assert_eq!((line.text.chars().count(), line.num_cut), expected);
        };
        check(LINE_CHARS_MAX, (LINE_CHARS_MAX, 0));
        check(LINE_CHARS_MAX + 3, (LINE_CHARS_MAX, 3));
    }

    #[test]
    fn lines_are_split_into_their_parts() {
        let check = |line: &str, rank: Option<u32>, expected: (Option<u32>, Option<&str>, &str)| {
            let Line { rank, level, text, .. } = parse_line(line, rank);
            assert_eq!((rank, level, text.as_str()), expected, "{line}");
        };
        check("training batches=8", None, (None, None, "training batches=8"));
        check("[rank=3] WARN slow", Some(1), (Some(3), Some("warn"), "WARN slow"));
        check("error: no space", Some(1), (Some(1), Some("error"), "error: no space"));
        check("the error rate is 0.1", None, (None, None, "the error rate is 0.1"));
        check("loss 0.1 with no error", None, (None, None, "loss 0.1 with no error"));
        let line = parse_line("2026-11-24T14:04:51.204Z INFO begins", None);
        assert_eq!(line.time.as_deref(), Some("2026-11-24T14:04:51.204Z"));
        assert_eq!(line.level, Some("info"));
        let panic = "thread 'main' panicked at src/main.rs:3:5:";
        assert_eq!(parse_line(panic, None).level, Some("error"));
    }

    #[test]
    fn hidden_characters_are_escaped() {
        assert_eq!(parse_line("a\u{1b}[31mb\u{202e}c", None).text, "a\\u{1b}[31mb\\u{202e}c");
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

    fn around(lines: &[&str], is_gang: bool) -> (Vec<String>, bool) {
        let lines = lines.iter().map(|line| parse_line(line, is_gang.then_some(0))).collect();
        let (lines, is_found) = around_error(lines);
        (lines.into_iter().map(|line| line.text).collect(), is_found)
    }

    #[test]
    fn first_error_is_shown_with_lines_around_it() {
        let info: Vec<String> = (0..20).map(|number| format!("info {number}")).collect();
        let mut lines: Vec<&str> = info.iter().map(String::as_str).collect();
        let texts = |lines: &[&str]| lines.iter().map(|line| (*line).to_owned()).collect();
        assert_eq!(around(&lines, false), (texts(&lines[8..]), false));
        assert_eq!(around(&lines[..3], false), (texts(&lines[..3]), false));
        assert_eq!(around(&[], false), (vec![], false));
        lines[9] = "error: out of memory";
        lines[10] = "error: the gang ends";
        assert_eq!(around(&lines, false), (texts(&lines[5..17]), true));
        assert_eq!(around(&lines[8..], false), (texts(&lines[8..]), true));
    }

    #[test]
    fn first_error_of_a_gang_is_its_cause() {
        // Lines of ranks follow each other, and have no times.
        let gang = [
            "[rank=0] info begins",
            "[rank=0] error: lost the connection to rank 1: end of file",
            "[rank=1] info begins",
            "[rank=1] thread 'main' panicked at src/main.rs:3:5:",
            "[rank=2] error: another rank failed",
        ];
        let cause = |error: &str| (vec!["info begins".to_owned(), error.to_owned()], true);
        assert_eq!(around(&gang, true), cause("thread 'main' panicked at src/main.rs:3:5:"));
        let own = ["[rank=0] info begins", "[rank=0] error: rank 0 has no GPU"];
        assert_eq!(around(&own, true), cause("error: rank 0 has no GPU"));
        let timed = [
            "[rank=0] 2026-11-24T14:04:09.000Z ERROR disk is full",
            "[rank=1] 2026-11-24T14:04:08.000Z ERROR out of memory",
        ];
        assert_eq!(around(&timed, true).0, ["ERROR out of memory"]);
        let only_peers = ["[rank=0] info begins", "[rank=0] error: another rank failed"];
        assert_eq!(around(&only_peers, true), cause("error: another rank failed"));
    }
}
