//! Parts of the stored logs that an answer contains: of each rank, what is new, and its end.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;

use stoker_storage::layout;

/// An object with lines. A list sorts by rank, then by position.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct LogObject {
    pub(super) rank: u32,
    pub(super) seq: u64,
    pub(super) path: String,
    /// Size in bytes.
    pub(super) size: u64,
}

impl LogObject {
    /// Returns the object of a path; `None` for other files.
    pub(super) fn parse(path: String, size: u64) -> Option<Self> {
        let (rank, seq) = layout::parse_log_segment(&path)?;
        Some(Self { rank, seq, path, size })
    }
}

/// Position in the logs of an attempt: for each rank, its latest object and the number of bytes of
/// that object. Displayed as `RANK:SEQ:BYTES`, separated by commas.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Position(BTreeMap<u32, (u64, u64)>);

impl Position {
    /// Parses a position. Ranks that it lacks start at their beginning.
    pub(super) fn parse(text: &str) -> Self {
        let of_rank = |text: &str| -> Option<(u32, (u64, u64))> {
            let mut numbers = text.splitn(3, ':');
            let rank = numbers.next()?.parse().ok()?;
            let seq = numbers.next()?.parse().ok()?;
            let num_bytes = numbers.next()?.parse().ok()?;
            Some((rank, (seq, num_bytes)))
        };
        Self(text.split(',').filter_map(of_rank).collect())
    }

    /// Moves to the end of all objects.
    pub(super) fn advance(&mut self, objects: &[LogObject]) {
        for object in objects {
            let latest = self.0.entry(object.rank).or_default();
            *latest = (*latest).max((object.seq, object.size));
        }
    }

    /// Returns the number of bytes of an object before this position.
    fn bytes_before(&self, object: &LogObject) -> u64 {
        match self.0.get(&object.rank) {
            Some((seq, _)) if object.seq < *seq => object.size,
            Some((seq, num_bytes)) if object.seq == *seq => *num_bytes,
            _ => 0,
        }
    }
}

impl fmt::Display for Position {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, (rank, (seq, num_bytes))) in self.0.iter().enumerate() {
            let comma = if i > 0 { "," } else { "" };
            write!(f, "{comma}{rank}:{seq}:{num_bytes}")?;
        }
        Ok(())
    }
}

/// Part of an object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Part {
    pub(super) rank: u32,
    pub(super) path: String,
    pub(super) bytes: Range<u64>,
    /// Whether the part begins within a line, which is left out.
    pub(super) is_cut: bool,
}

impl Part {
    /// Returns the lines of the part with this text.
    pub(super) fn lines<'a>(&self, text: &'a [u8]) -> impl DoubleEndedIterator<Item = &'a [u8]> {
        let first_break = text.iter().position(|byte| *byte == b'\n');
        let text = match first_break {
            Some(end) if self.is_cut => &text[end + 1..],
            _ => text,
        };
        let is_empty = text.is_empty();
        let lines = text.strip_suffix(b"\n").unwrap_or(text).split(|byte| *byte == b'\n');
        lines.filter(move |_| !is_empty).map(|line| line.strip_suffix(b"\r").unwrap_or(line))
    }
}

/// Returns the parts of sorted objects after a position, and whether some of them were left out.
/// Together they have about `bytes_max` bytes: if there are more, each rank has the same share, and
/// only the end of its logs is returned.
pub(super) fn select(objects: &[LogObject], from: &Position, bytes_max: u64) -> (Vec<Part>, bool) {
    let num_new = |object: &LogObject| object.size.saturating_sub(from.bytes_before(object));
    let mut sizes: BTreeMap<u32, u64> = BTreeMap::new();
    for object in objects {
        *sizes.entry(object.rank).or_default() += num_new(object);
    }
    let limit = share(sizes.values().copied(), bytes_max);
    let is_cut = sizes.values().any(|size| *size > limit);
    let mut left: BTreeMap<u32, u64> = sizes.into_keys().map(|rank| (rank, limit)).collect();
    let mut parts = Vec::new();
    for object in objects.iter().rev() {
        let left = left.entry(object.rank).or_default();
        let num_bytes = num_new(object).min(*left);
        if num_bytes == 0 {
            continue;
        }
        *left -= num_bytes;
        let is_cut = num_bytes < num_new(object);
        // The byte before a cut part may be a line break: then the part begins with a line.
        let begin = object.size - num_bytes - u64::from(is_cut);
        let (rank, path) = (object.rank, object.path.clone());
        parts.push(Part { rank, path, bytes: begin..object.size, is_cut });
    }
    parts.reverse();
    (parts, is_cut)
}

/// Returns the limit of each size with which their sum is at most `total`. Small sizes leave more
/// to the others.
pub(super) fn share(sizes: impl Iterator<Item = u64>, total: u64) -> u64 {
    let mut sizes: Vec<u64> = sizes.collect();
    sizes.sort_unstable();
    let mut left = total;
    for (i, size) in sizes.iter().enumerate() {
        let limit = left / (sizes.len() - i) as u64;
        if *size > limit {
            return limit;
        }
        left -= size;
    }
    u64::MAX
}

#[cfg(test)]
mod tests {
    use super::*;

    fn objects(all: &[(u32, u64, u64)]) -> Vec<LogObject> {
        let object = |&(rank, seq, size): &(u32, u64, u64)| LogObject {
            rank,
            seq,
            path: format!("{rank}-{seq}"),
            size,
        };
        all.iter().map(object).collect()
    }

    #[test]
    fn end_of_each_rank_is_selected() {
        let check = |all: &[(u32, u64, u64)], max: u64, expected: &[(&str, Range<u64>, bool)]| {
            let (parts, is_cut) = select(&objects(all), &Position::default(), max);
            let parts: Vec<(&str, Range<u64>, bool)> = parts
                .iter()
                .map(|part| (part.path.as_str(), part.bytes.clone(), part.is_cut))
                .collect();
            assert_eq!(parts, expected, "{all:?} {max}");
            assert_eq!(is_cut, all.iter().map(|(.., size)| size).sum::<u64>() > max, "{all:?}");
        };
        check(&[], 4, &[]);
        check(&[(0, 0, 4), (0, 1, 2)], 6, &[("0-0", 0..4, false), ("0-1", 0..2, false)]);
        // A small latest object follows a large one.
        check(&[(0, 0, 8), (0, 1, 3)], 6, &[("0-0", 4..8, true), ("0-1", 0..3, false)]);
        check(&[(0, 0, 8), (0, 1, 3)], 3, &[("0-1", 0..3, false)]);
        check(&[(0, 0, 8), (0, 1, 3)], 2, &[("0-1", 0..3, true)]);
        // No rank takes the bytes of another one.
        check(&[(0, 0, 8), (1, 0, 8)], 8, &[("0-0", 3..8, true), ("1-0", 3..8, true)]);
        check(&[(0, 0, 8), (1, 0, 1)], 6, &[("0-0", 2..8, true), ("1-0", 0..1, false)]);
    }

    #[test]
    fn parts_are_split_into_lines() {
        let check = |text: &str, is_cut: bool, expected: &[&str]| {
            let part = Part { rank: 0, path: String::new(), bytes: 0..0, is_cut };
            let lines = part.lines(text.as_bytes()).map(|line| String::from_utf8_lossy(line));
            assert_eq!(lines.collect::<Vec<_>>(), expected, "{text:?}");
        };
        check("a\nb\n", false, &["a", "b"]);
        check("a\nb\n", true, &["b"]);
        check("\nb\n", true, &["b"]);
        check("progress", true, &["progress"]);
        check("a\n", true, &[]);
        check("", false, &[]);
        check("\n\r\na", false, &["", "", "a"]);
    }

    #[test]
    fn position_selects_new_bytes_of_each_rank() {
        let old = objects(&[(0, 0, 4), (0, 1, 2), (1, 0, 4)]);
        let mut position = Position::default();
        position.advance(&old);
        assert_eq!(position.to_string(), "0:1:2,1:0:4");
        let check = |position: &str, new: &[(u32, u64, u64)], expected: &[(&str, Range<u64>)]| {
            let (parts, is_cut) = select(&objects(new), &Position::parse(position), 100);
            let parts: Vec<(&str, Range<u64>)> =
                parts.iter().map(|part| (part.path.as_str(), part.bytes.clone())).collect();
            assert_eq!((parts.as_slice(), is_cut), (expected, false), "{position} {new:?}");
        };
        let text = position.to_string();
        check(&text, &[(0, 0, 4), (0, 1, 2), (1, 0, 4)], &[]);
        check(&text, &[(0, 0, 4), (0, 1, 5), (1, 0, 4)], &[("0-1", 2..5)]);
        let all = [(0, 0, 4), (0, 1, 2), (0, 2, 1), (1, 0, 6), (2, 0, 3)];
        check(&text, &all, &[("0-2", 0..1), ("1-0", 4..6), ("2-0", 0..3)]);
        // An earlier state of an object has no new bytes.
        check(&text, &[(0, 0, 4), (0, 1, 1), (1, 0, 4)], &[]);
        check("20", &[(0, 0, 4)], &[("0-0", 0..4)]);
        check("", &[(0, 0, 4)], &[("0-0", 0..4)]);
    }
}
