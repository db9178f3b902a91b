//! Texts of an attempt's logs in memory: counts their lines, and selects those of an answer.

use std::collections::{BTreeMap, VecDeque};

use bytes::Bytes;

use super::LINES_MAX;
use super::lines::{Line, names_other_rank, parse_line};
use super::parts::{Part, share};

/// Number of lines that are shown before the first error.
const BEFORE_ERROR: usize = 4;
/// Number of lines that are shown around the first error, with the error.
const AROUND_ERROR: usize = 12;

/// Parts of the logs with their texts. Parsed lines are many times as large as short ones in the
/// text, so they are parsed again instead of kept.
#[derive(Debug)]
pub(super) struct Texts {
    pub(super) parts: Vec<(Part, Bytes)>,
    pub(super) is_gang: bool,
}

/// Lines of an answer.
#[derive(Debug, Default)]
pub(super) struct Selected {
    pub(super) lines: Vec<Line>,
    pub(super) total: u64,
    pub(super) num_matches: u64,
}

impl Texts {
    /// Returns all lines, each with the rank of its object.
    fn lines(&self) -> impl DoubleEndedIterator<Item = (u32, &[u8])> {
        self.parts
            .iter()
            .flat_map(|(part, bytes)| part.lines(bytes).map(move |line| (part.rank, line)))
    }

    fn parse(&self, (rank, line): (u32, &[u8])) -> Line {
        parse_line(&String::from_utf8_lossy(line), self.is_gang.then_some(rank))
    }

    /// Returns the latest matching lines of each rank; without a condition, the latest lines.
    pub(super) fn latest(&self, is_match: Option<impl Fn(&Line) -> bool>) -> Selected {
        let is_match_all = is_match.is_none();
        let is_match = |line: &Line| is_match.as_ref().is_none_or(|is_match| is_match(line));
        let (mut total, mut num_by_rank) = (0, BTreeMap::<u32, u64>::new());
        for line in self.lines() {
            total += 1;
            // Most requests have no condition: do not parse all lines to count them.
            if is_match_all || is_match(&self.parse(line)) {
                *num_by_rank.entry(line.0).or_default() += 1;
            }
        }
        let num_matches = num_by_rank.values().sum();
        let limit = share(num_by_rank.values().copied(), LINES_MAX);
        num_by_rank.values_mut().for_each(|num| *num = limit.min(*num));
        let mut num_left: u64 = num_by_rank.values().sum();
        let mut lines = VecDeque::new();
        for line in self.lines().rev() {
            if num_left == 0 {
                break;
            }
            let Some(left) = num_by_rank.get_mut(&line.0).filter(|left| **left > 0) else {
                continue;
            };
            let parsed = self.parse(line);
            if is_match(&parsed) {
                (*left, num_left) = (*left - 1, num_left - 1);
                lines.push_front(parsed);
            }
        }
        Selected { lines: lines.into(), total, num_matches }
    }

    /// Returns the lines around the first error, of its rank alone, and whether there is an error.
    /// Without one, returns the last lines.
    ///
    /// The first error of a gang names no other rank: when a rank fails, the others report that
    /// they lost it. Among several, the earliest one counts, and lines without a time come last.
    pub(super) fn around_error(&self) -> (Vec<Line>, bool) {
        let lines = || self.lines().map(|line| self.parse(line)).enumerate();
        let errors = lines().filter(|(_, line)| line.level == Some("error"));
        let first = errors.min_by_key(|(_, line)| {
            (names_other_rank(line), line.time.is_none(), line.time.clone())
        });
        let Some((at, first)) = first else {
            let mut last: Vec<Line> =
                self.lines().rev().take(AROUND_ERROR).map(|line| self.parse(line)).collect();
            last.reverse();
            return (last, false);
        };
        let mut around = VecDeque::new();
        for (position, line) in lines().filter(|(_, line)| line.rank == first.rank) {
            if position < at && around.len() == BEFORE_ERROR {
                around.pop_front();
            }
            around.push_back(line);
            if position >= at && around.len() == AROUND_ERROR {
                break;
            }
        }
        (around.into(), true)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn around(lines: &[&str], is_gang: bool) -> (Vec<String>, bool) {
        let part = Part { rank: 0, path: String::new(), bytes: 0..0, is_cut: false };
        let texts = Texts { parts: vec![(part, lines.join("\n").into())], is_gang };
        let (lines, is_found) = texts.around_error();
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
