//! Lines of a program's output, for its log.

use std::time::Duration;

/// Time without output after which a reader takes the incomplete line from its [`LineBuffer`].
pub const SILENCE: Duration = Duration::from_secs(3);

/// Lines longer than this are split.
const LINE_BYTES_MAX: usize = 64 << 10;

/// Collects the output of a program until its lines are complete, so that lines of two streams are
/// never mixed.
///
/// A line ends with `\n`, or with `\r` before another byte, as progress bars print it. That `\r` is
/// replaced by `\n`, or dropped at the start of a line.
#[derive(Debug, Default)]
pub struct LineBuffer(Vec<u8>);

impl LineBuffer {
    /// Adds output. Returns the lines that are complete now, if any.
    pub fn push(&mut self, bytes: &[u8]) -> Option<Vec<u8>> {
        let Self(pending) = self;
        for byte in bytes {
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

    /// Returns the incomplete line with a line break, if there is one.
    pub fn take_incomplete(&mut self) -> Option<Vec<u8>> {
        let mut line = std::mem::take(&mut self.0);
        if line.last() == Some(&b'\r') {
            line.pop();
        }
        if line.is_empty() {
            return None;
        }
        line.push(b'\n');
        Some(line)
    }
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
