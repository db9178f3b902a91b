//! Lines of a program's output, for its log.

use std::collections::VecDeque;
use std::time::Duration;

/// Time without output after which a reader takes the incomplete line from its [`LineBuffer`].
pub const SILENCE: Duration = Duration::from_secs(3);

/// Lines longer than this are split.
const LINE_BYTES_MAX: usize = 64 << 10;
/// Number of lines in a [`Tail`].
const TAIL_LINES: usize = 8;
/// Maximum length of each of these lines, in characters, without the ellipsis.
const TAIL_CHARS_MAX: usize = 400;

/// Collects the output of a program until its lines are complete, so that lines of two streams are
/// never mixed.
///
/// A line ends with `\n`, or with `\r` before another byte, as progress bars print it. That `\r` is
/// replaced by `\n`, or dropped at the start of a line.
#[derive(Debug, Default)]
pub struct LineBuffer {
    pending: Vec<u8>,
    /// Whether an incomplete line was returned, and nothing but `\r` was added since.
    is_cut: bool,
}

impl LineBuffer {
    /// Adds output. Returns the lines that are complete now, if any.
    pub fn push(&mut self, bytes: &[u8]) -> Option<Vec<u8>> {
        let Self { pending, is_cut } = self;
        for byte in bytes {
            if *is_cut && *byte == b'\n' && matches!(pending.as_slice(), [] | [b'\r']) {
                // The line has a line break already.
                pending.clear();
                *is_cut = false;
                continue;
            }
            *is_cut &= *byte == b'\r';
            if pending.last() == Some(&b'\r') && *byte != b'\n' {
                pending.pop();
                let is_at_start = matches!(pending.last(), None | Some(b'\n'));
                if !is_at_start && *byte != b'\r' {
                    pending.push(b'\n');
                }
            }
            pending.push(*byte);
        }
        let end = match pending.iter().rposition(|byte| *byte == b'\n') {
            Some(last) => last + 1,
            None if pending.len() > LINE_BYTES_MAX => return self.take_incomplete(),
            None => return None,
        };
        let rest = pending.split_off(end);
        Some(std::mem::replace(pending, rest))
    }

    /// Returns the incomplete line with a line break, if there is one. Keeps the bytes of an
    /// incomplete character at its end. Drops the line break of the program, if it comes next.
    pub fn take_incomplete(&mut self) -> Option<Vec<u8>> {
        let rest = self.pending.split_off(self.pending.len() - partial_char_len(&self.pending));
        let line = self.finish();
        self.pending = rest;
        line
    }

    /// Same as [`take_incomplete`](Self::take_incomplete) at the end of the output: with all bytes.
    pub fn finish(&mut self) -> Option<Vec<u8>> {
        let mut line = std::mem::take(&mut self.pending);
        if line.last() == Some(&b'\r') {
            line.pop();
        }
        if line.is_empty() {
            return None;
        }
        line.push(b'\n');
        self.is_cut = true;
        Some(line)
    }
}

/// Returns the number of bytes at the end that begin a UTF-8 character but do not complete it.
fn partial_char_len(bytes: &[u8]) -> usize {
    let Some(start) = bytes.iter().rposition(|byte| byte & 0xc0 != 0x80) else { return 0 };
    let (len, complete_len) = (bytes.len() - start, bytes[start].leading_ones() as usize);
    if (2..=4).contains(&complete_len) && len < complete_len { len } else { 0 }
}

/// Last lines of a program's output, for the message of its failure.
#[derive(Debug, Default)]
pub struct Tail(VecDeque<String>);

impl Tail {
    /// Adds lines that are not blank. Long lines are truncated, and control characters escaped.
    pub fn push(&mut self, lines: &[u8]) {
        let Self(tail) = self;
        for line in String::from_utf8_lossy(lines).lines().filter(|line| !line.trim().is_empty()) {
            if tail.len() == TAIL_LINES {
                tail.pop_front();
            }
            tail.push_back(truncated(escape_controls(line)));
        }
    }

    /// Returns the lines, with a line break between two of them.
    pub fn text(&self) -> String {
        self.0.iter().map(String::as_str).collect::<Vec<_>>().join("\n")
    }
}

/// Shortens a long line, and marks the end with an ellipsis.
fn truncated(mut line: String) -> String {
    if let Some((end, _)) = line.char_indices().nth(TAIL_CHARS_MAX) {
        line.truncate(end);
        line.push_str("...");
    }
    line
}

/// Escapes control characters, so that a line cannot affect a terminal.
fn escape_controls(line: &str) -> String {
    let mut text = String::new();
    for c in line.chars() {
        match c {
            '\t' => text.push(' '),
            c if c.is_control() => text.extend(c.escape_default()),
            c => text.push(c),
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Pushes each part, and compares the lines that are complete after it.
    fn check(parts: &[(&str, &str)], incomplete: &str) {
        let mut lines = LineBuffer::default();
        let text = |lines: Option<Vec<u8>>| String::from_utf8(lines.unwrap_or_default()).unwrap();
        for (part, expected) in parts {
            assert_eq!(text(lines.push(part.as_bytes())), *expected, "{part:?} of {parts:?}");
        }
        assert_eq!(text(lines.take_incomplete()), incomplete, "{parts:?}");
        assert_eq!(lines.take_incomplete(), None);
    }

    #[test]
    fn lines_are_returned_when_complete() {
        check(&[], "");
        check(&[("a\nbc\n", "a\nbc\n")], "");
        check(&[("a\nb", "a\n"), ("c", ""), ("d\n\n", "bcd\n\n")], "");
        check(&[("a\nbc", "a\n")], "bc\n");
    }

    #[test]
    fn progress_bars_are_lines() {
        check(
            &[("\rstep 1", ""), ("\rstep 2", "step 1\n"), ("\rstep 3\n", "step 2\nstep 3\n")],
            "",
        );
        check(&[("step 1\r", ""), ("step 2\r", "step 1\n")], "step 2\n");
        check(&[("a\n\rb\r\rc", "a\nb\n")], "c\n");
        check(&[("\r", "")], "");
    }

    #[test]
    fn carriage_returns_before_line_breaks_stay() {
        check(&[("a\r\nb\r", "a\r\n"), ("\n", "b\r\n")], "");
        check(&[("a\r\r\n\r\n", "a\r\n\r\n")], "");
    }

    /// Pushes each part, with a silence after it, and compares the log.
    fn check_with_silences(parts: &[&[u8]], expected: &str) {
        let (mut lines, mut log) = (LineBuffer::default(), vec![]);
        for part in parts {
            log.extend(lines.push(part).unwrap_or_default());
            log.extend(lines.take_incomplete().unwrap_or_default());
        }
        log.extend(lines.finish().unwrap_or_default());
        assert_eq!(String::from_utf8_lossy(&log), expected, "{parts:?}");
    }

    #[test]
    fn line_break_after_a_silence_adds_no_line() {
        check_with_silences(&[b"loading ...", b"\n", b"\n"], "loading ...\n\n");
        check_with_silences(&[b"loading ...", b"\ndone\n"], "loading ...\ndone\n");
        check_with_silences(&[b"\rstep 1\r", b"\n"], "step 1\n");
        check_with_silences(&[b"a", b"\r\nb"], "a\nb\n");
        check_with_silences(&[b"a", b"\r", b"\n"], "a\n");
        check_with_silences(&[b"a", b"b\n\n"], "a\nb\n\n");
        check_with_silences(&[b"a\n", b"\n"], "a\n\n");
    }

    #[test]
    fn silence_does_not_cut_characters() {
        check_with_silences(&[b"caf\xc3", b"\xa9\n"], "caf\n\u{e9}\n");
        check_with_silences(&[b"\xf0\x9f\x98", b"\x80"], "\u{1f600}\n");
        check_with_silences(&[b"caf\xc3"], "caf\n\u{fffd}\n");
        check_with_silences(&[b"\x80\x80"], "\u{fffd}\u{fffd}\n");
    }

    #[test]
    fn tail_has_the_last_lines() {
        let mut tail = Tail::default();
        assert_eq!(tail.text(), "");
        tail.push(b"0\n1\n \n2\n\n3\n4\n5\n");
        tail.push(b"6\n7\n8\n");
        assert_eq!(tail.text(), "1\n2\n3\n4\n5\n6\n7\n8");
    }

    #[test]
    fn long_lines_of_the_tail_end_with_an_ellipsis() {
        for (num, expected) in [(399, "é".repeat(399)), (400, "é".repeat(400))] {
            let mut tail = Tail::default();
            tail.push("é".repeat(num).as_bytes());
            assert_eq!(tail.text(), expected);
        }
        let mut tail = Tail::default();
        tail.push("é".repeat(401).as_bytes());
        assert_eq!(tail.text(), "é".repeat(400) + "...");
    }

    #[test]
    fn control_characters_are_escaped() {
        assert_eq!(escape_controls("a\tb \u{1b}[2J\u{7}\r"), "a b \\u{1b}[2J\\u{7}\\r");
    }

    #[test]
    fn long_lines_are_split() {
        let check = |num_bytes: usize, expected: &[usize]| {
            let (mut lines, mut lengths) = (LineBuffer::default(), vec![]);
            for part in vec![b'x'; num_bytes].chunks(8 << 10) {
                lengths.extend(lines.push(part).map(|line| line.len()));
            }
            lengths.extend(lines.take_incomplete().map(|line| line.len()));
            assert_eq!(lengths, expected);
        };
        check(LINE_BYTES_MAX, &[LINE_BYTES_MAX + 1]);
        check(LINE_BYTES_MAX + 1, &[LINE_BYTES_MAX + 2]);
        check(LINE_BYTES_MAX + (8 << 10) + 5, &[LINE_BYTES_MAX + (8 << 10) + 1, 6]);
    }
}
