//! Stored logs of an attempt, line by line.

use std::pin::pin;

use futures::TryStreamExt as _;
use serde::Deserialize;
use serde_json::{Value, json};
use stoker_storage::layout;

use crate::store::Run;
use crate::text;

/// Maximum number of lines in one answer: the latest ones.
const LINES_MAX: usize = 5_000;
/// Maximum number of bytes that are read for one answer, from the end of the logs.
const BYTES_MAX: u64 = 16 << 20;
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
    /// Only lines after this number of lines of the whole log.
    after: Option<String>,
}

/// A line with what it says about itself.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Line {
    pub(crate) time: Option<String>,
    pub(crate) rank: Option<u32>,
    pub(crate) level: Option<&'static str>,
    pub(crate) text: String,
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
        return Ok(json!({ "attempt": null, "lines": [], "next": 0, "total": 0, "omitted": 0 }));
    };
    let (mut lines, is_cut) = read(run, index, attempt).await?;
    let mut around = Value::Null;
    if query.around.as_deref() == Some("error") {
        let is_found;
        (lines, is_found) = around_error(lines);
        around = json!(if is_found { "error" } else { "end" });
    }
    let total = lines.len();
    let after: usize = query.after.as_deref().and_then(|after| after.parse().ok()).unwrap_or(0);
    let matching: Vec<&Line> =
        lines.iter().skip(after).filter(|line| matches(line, query)).collect();
    let omitted = matching.len().saturating_sub(LINES_MAX);
    let shown: Vec<Value> = matching[omitted..]
        .iter()
        .map(|line| {
            json!({ "time": line.time, "rank": line.rank, "level": line.level, "text": line.text })
        })
        .collect();
    Ok(json!({
        "attempt": attempt, "lines": shown, "next": total, "total": total, "omitted": omitted,
        "beginning": !is_cut, "around": around,
    }))
}

/// Returns the whole text of an attempt's logs.
///
/// # Errors
///
/// The reason why the storage cannot be read.
pub(crate) async fn text(run: &Run, index: u32, attempt: u32) -> Result<String, String> {
    let storage = run.storage.as_ref().map_err(Clone::clone)?;
    let mut all = String::new();
    let objects = objects(run, index, attempt).await?;
    let paths = objects.iter().map(|(_, _, path, _)| path.clone()).collect();
    let mut reads = pin!(storage.get_each(paths));
    for (rank, ..) in &objects {
        let Some(bytes) = reads.try_next().await.map_err(|error| error.to_string())? else { break };
        let is_gang = run.experiment.spec.resources.slots_per_trial > 1;
        for line in String::from_utf8_lossy(&bytes).lines() {
            if is_gang && !line.starts_with("[rank=") {
                all.push_str(&format!("[rank={rank}] "));
            }
            all.push_str(line);
            all.push('\n');
        }
    }
    Ok(all)
}

type Object = (u32, u64, String, u64);

/// Returns rank, number, path and size of the objects with an attempt's logs.
async fn objects(run: &Run, index: u32, attempt: u32) -> Result<Vec<Object>, String> {
    let storage = run.storage.as_ref().map_err(Clone::clone)?;
    let folder = layout::logs_path(&run.trial_path(index), attempt);
    let listed = storage.list_sized(&folder).await.map_err(|error| error.to_string())?;
    let mut objects: Vec<Object> = listed
        .into_iter()
        .filter_map(|(path, size)| parse(&path).map(|(rank, seq)| (rank, seq, path, size)))
        .collect();
    objects.sort();
    Ok(objects)
}

/// Returns the lines of an attempt, and whether older ones were left out.
async fn read(run: &Run, index: u32, attempt: u32) -> Result<(Vec<Line>, bool), String> {
    let storage = run.storage.as_ref().map_err(Clone::clone)?;
    let objects = objects(run, index, attempt).await?;
    let total: u64 = objects.iter().map(|(.., size)| size).sum();
    let mut skipped = total.saturating_sub(BYTES_MAX);
    let is_cut = skipped > 0;
    let is_gang = run.experiment.spec.resources.slots_per_trial > 1;
    // Old objects of a long log are left out.
    let is_read = |(.., size): &&Object| {
        let is_skipped = skipped >= *size;
        skipped -= if is_skipped { *size } else { 0 };
        !is_skipped
    };
    let objects: Vec<&Object> = objects.iter().filter(is_read).collect();
    let paths = objects.iter().map(|(_, _, path, _)| path.clone()).collect();
    let mut reads = pin!(storage.get_each(paths));
    let mut lines = Vec::new();
    for (rank, ..) in &objects {
        let Some(bytes) = reads.try_next().await.map_err(|error| error.to_string())? else { break };
        let text = String::from_utf8_lossy(&bytes);
        lines.extend(text.lines().map(|text| parse_line(text, is_gang.then_some(*rank))));
    }
    Ok((lines, is_cut))
}

/// Parses rank and sequence number from `.../RANK-SEQ.log`.
fn parse(path: &str) -> Option<(u32, u64)> {
    let name = path.rsplit_once('/')?.1.strip_suffix(".log")?;
    let (rank, seq) = name.split_once('-')?;
    Some((rank.parse().ok()?, seq.parse().ok()?))
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
    let text: String = text::escape(line).chars().take(LINE_CHARS_MAX).collect();
    Line { time, rank, level: level(&text), text }
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
    use super::*;

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
