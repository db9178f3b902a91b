//! Download of the whole text of an attempt's logs, in pieces.

use bytes::Bytes;

use super::parts::Part;

/// Maximum number of bytes of a piece. A download holds some pieces in memory, however large the
/// logs are.
pub(super) const PIECE_BYTES: u64 = 1 << 20;
/// Begin of a line that names its rank.
const RANK: &[u8] = b"[rank=";

/// Splits parts into pieces. Returns each with whether it is the last one of its part.
pub(super) fn pieces(parts: Vec<Part>) -> impl Iterator<Item = (Part, bool)> {
    parts.into_iter().flat_map(|part| {
        let begins = part.bytes.clone().step_by(PIECE_BYTES as usize);
        begins.map(move |begin| {
            let end = part.bytes.end.min(begin + PIECE_BYTES);
            (Part { bytes: begin..end, ..part.clone() }, end == part.bytes.end)
        })
    })
}

/// Completes the last line of each part. In a gang, also adds the rank to lines without one.
#[derive(Debug, Default)]
pub(super) struct Prefixes {
    is_gang: bool,
    /// Whether the pieces so far end within a line.
    is_in_line: bool,
    /// First bytes of a line, too few to know whether it names its rank.
    begin: Vec<u8>,
}

impl Prefixes {
    pub(super) fn new(is_gang: bool) -> Self {
        Self { is_gang, ..Self::default() }
    }

    /// Returns the text of the next piece.
    pub(super) fn text(&mut self, piece: &Part, is_last: bool, bytes: Bytes) -> Bytes {
        if !self.is_gang && (!is_last || bytes.ends_with(b"\n")) {
            return bytes;
        }
        let mut given = std::mem::take(&mut self.begin);
        given.extend_from_slice(&bytes);
        let mut text = Vec::with_capacity(given.len() + 64);
        for line in given.split_inclusive(|byte| *byte == b'\n') {
            if self.is_gang && !self.is_in_line {
                if !is_last && line.len() < RANK.len() && RANK.starts_with(line) {
                    self.begin = line.to_vec();
                    break;
                }
                if !line.starts_with(RANK) {
                    text.extend_from_slice(format!("[rank={}] ", piece.rank).as_bytes());
                }
            }
            text.extend_from_slice(line);
            self.is_in_line = !line.ends_with(b"\n");
        }
        if is_last && std::mem::take(&mut self.is_in_line) {
            text.push(b'\n');
        }
        text.into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn part(bytes: std::ops::Range<u64>) -> Part {
        Part { rank: 3, path: String::new(), bytes, is_cut: false }
    }

    #[test]
    fn pieces_cover_their_parts() {
        let size = 2 * PIECE_BYTES + 5;
        let found: Vec<_> = pieces(vec![part(0..7), part(7..7), part(0..size)])
            .map(|(p, l)| (p.bytes, l))
            .collect();
        let middle = PIECE_BYTES..2 * PIECE_BYTES;
        let last = (2 * PIECE_BYTES..size, true);
        assert_eq!(found, [(0..7, true), (0..PIECE_BYTES, false), (middle, false), last]);
    }

    #[test]
    fn lines_may_end_in_any_piece() {
        let text = "a\n[rank=1] b\n\n[rant\n[ra";
        let check = |is_gang: bool, expected: &str| {
            for size in 1..=text.len() {
                let mut prefixes = Prefixes::new(is_gang);
                let mut found = Vec::new();
                for _ in 0..2 {
                    let mut pieces = text.as_bytes().chunks(size).peekable();
                    while let Some(piece) = pieces.next() {
                        let is_last = pieces.peek().is_none();
                        let bytes = Bytes::copy_from_slice(piece);
                        found.extend_from_slice(&prefixes.text(&part(0..0), is_last, bytes));
                    }
                }
                assert_eq!(String::from_utf8(found).unwrap(), expected.repeat(2), "{size}");
            }
        };
        check(false, "a\n[rank=1] b\n\n[rant\n[ra\n");
        check(true, "[rank=3] a\n[rank=1] b\n[rank=3] \n[rank=3] [rant\n[rank=3] [ra\n");
    }
}
