//! A line of a log: its time, rank, level and text.

use crate::text;

/// Maximum number of characters of a line.
const LINE_CHARS_MAX: usize = 4_000;

/// A line, split into its parts.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Line {
    pub(super) time: Option<String>,
    pub(super) rank: Option<u32>,
    pub(super) level: Option<&'static str>,
    pub(super) text: String,
    /// Number of characters that the text lacks at its end.
    pub(super) num_cut: usize,
}

/// Splits a line into its parts. `rank` is that of the file.
pub(super) fn parse_line(line: &str, rank: Option<u32>) -> Line {
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
    // Escapes are several times as large as their characters: do not escape what is cut.
    let end = line.char_indices().nth(LINE_CHARS_MAX).map_or(line.len(), |(end, _)| end);
    let (begin, rest) = line.split_at(end);
    let whole = text::escape(begin);
    let mut chars = whole.chars();
    let text: String = chars.by_ref().take(LINE_CHARS_MAX).collect();
    let num_cut = chars.count() + rest.chars().count();
    Line { time, rank, level: level(&text), text, num_cut }
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

/// Returns whether a line names another rank than its own, such as `lost the connection to rank 1`.
pub(super) fn names_other_rank(line: &Line) -> bool {
    let number = |text: &str| text.split(|char: char| !char.is_ascii_digit()).next()?.parse().ok();
    let mut named = line.text.split("rank ").skip(1).filter_map(number);
    line.text.contains("another rank") || named.any(|rank: u32| line.rank != Some(rank))
}

#[cfg(test)]
mod tests {
    use super::*;

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
}
