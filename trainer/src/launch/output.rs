//! What a rank prints: shown, stored, and its last lines kept.

use std::collections::VecDeque;
use std::io::{Read, Write};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use stoker_api::contract::TrialConfig;
use stoker_storage::segments::{SegmentWriter, Segments};
use stoker_storage::{Storage, layout};
use tokio::runtime::Handle;
use tokio::sync::watch;

use crate::Result;
use crate::error::Infrastructure;

/// Last lines that are kept to say why a program failed.
const TAIL_LINES: usize = 8;
/// Characters kept of each of them.
const TAIL_CHARS_MAX: usize = 400;
/// A line longer than this is cut in two.
const LINE_BYTES_MAX: usize = 64 << 10;
/// How often the storage is asked whether it takes the logs.
const LOOK: Duration = Duration::from_secs(10);

/// Which of a process's two streams.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stream {
    Out,
    Error,
}

/// The output of one rank. Clones share it.
#[derive(Clone, Debug)]
pub(super) struct Output(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    /// What each shown line begins with.
    prefix: String,
    writer: Option<SegmentWriter>,
    /// Bytes that found no room in the writer, and that no line of the log tells of yet.
    num_missing: AtomicU64,
    tails: [Mutex<VecDeque<String>>; 2],
    /// Streams that are not at their end.
    num_open: watch::Sender<usize>,
}

impl Output {
    /// The output of `rank`, stored in its trial's logs. Must be called within a runtime.
    pub(super) fn new(rank: u32, world_size: u32, store: Option<&(Storage, &TrialConfig)>) -> Self {
        let prefix = if world_size > 1 { format!("[rank={rank}] ") } else { String::new() };
        let writer = store.map(|(storage, config)| {
            let logs = layout::logs_path(&config.storage.trial_path, config.attempt);
            let segments = Segments::new(format!("{logs}/{rank}-"), ".log");
            SegmentWriter::new(&Handle::current(), storage.clone(), segments)
        });
        let (num_missing, tails) = (AtomicU64::default(), Default::default());
        let num_open = watch::Sender::new(0);
        Self(Arc::new(Inner { prefix, writer, num_missing, tails, num_open }))
    }

    /// What stores it, if anything does.
    pub(super) fn writer(&self) -> Option<SegmentWriter> {
        self.0.writer.clone()
    }

    /// Whether shown lines begin with the rank.
    pub(super) fn has_prefix(&self) -> bool {
        !self.0.prefix.is_empty()
    }

    /// Takes all that comes from `from`, on a thread of its own.
    ///
    /// # Errors
    ///
    /// There is no thread.
    pub(super) fn read(&self, from: impl Read + Send + 'static, stream: Stream) -> Result<()> {
        let output = self.clone();
        self.0.num_open.send_modify(|num| *num += 1);
        let thread = std::thread::Builder::new().name("stoker-output".into());
        let started = thread.spawn(move || {
            each_lines(from, |lines| output.take(lines, stream));
            output.0.num_open.send_modify(|num| *num -= 1);
        });
        Ok(started.map(drop).map_err(|error| Infrastructure(format!("no thread: {error}")))?)
    }

    /// Waits until both streams are at their end, but not for longer than `wait`.
    pub(super) async fn drain(&self, wait: Duration) {
        let mut num_open = self.0.num_open.subscribe();
        // What comes later is lost to the message, not to the log.
        let _ = tokio::time::timeout(wait, num_open.wait_for(|num| *num == 0)).await;
    }

    /// The last lines of its errors, or else of its output.
    pub(super) fn last_lines(&self) -> String {
        let of = |stream: Stream| {
            let tail = self.0.tails[stream as usize].lock().unwrap_or_else(PoisonError::into_inner);
            tail.iter().map(String::as_str).collect::<Vec<_>>().join("\n")
        };
        Some(of(Stream::Error)).filter(|it| !it.is_empty()).unwrap_or_else(|| of(Stream::Out))
    }

    /// Shows, keeps and stores whole lines.
    fn take(&self, lines: Vec<u8>, stream: Stream) {
        self.show(&lines, stream);
        let mut tail = self.0.tails[stream as usize].lock().unwrap_or_else(PoisonError::into_inner);
        for line in String::from_utf8_lossy(&lines).lines().filter(|it| !it.trim().is_empty()) {
            if tail.len() == TAIL_LINES {
                tail.pop_front();
            }
            tail.push_back(plain(line).chars().take(TAIL_CHARS_MAX).collect());
        }
        drop(tail);
        self.store(lines);
    }

    fn show(&self, lines: &[u8], stream: Stream) {
        let shown = prefixed(&self.0.prefix, lines);
        // A reader that has gone away ends no training.
        let _ = match stream {
            Stream::Out => std::io::stdout().lock().write_all(&shown),
            Stream::Error => std::io::stderr().lock().write_all(&shown),
        };
    }

    fn store(&self, mut lines: Vec<u8>) {
        let Some(writer) = &self.0.writer else { return };
        let num_missing = self.0.num_missing.swap(0, Ordering::Relaxed);
        if num_missing > 0 {
            let note = format!("[here {num_missing} bytes are missing: the storage was away]\n");
            lines.splice(0..0, note.into_bytes());
        }
        let num_bytes = lines.len() as u64;
        if !writer.append(lines) {
            self.0.num_missing.fetch_add(num_missing + num_bytes, Ordering::Relaxed);
        }
    }
}

/// Says once when the storage does not take the logs, and when it does again.
pub(super) async fn watch_storage(writers: Vec<SegmentWriter>) {
    let mut is_away = false;
    loop {
        tokio::time::sleep(LOOK).await;
        let mut error = None;
        for writer in &writers {
            error = writer.flush().await.err().or(error);
        }
        match (&error, is_away) {
            (Some(error), false) => {
                eprintln!(
                    "stoker: logs are not stored: {error}; training goes on, it is tried again"
                );
            }
            (None, true) => eprintln!("stoker: logs are stored again"),
            _ => {}
        }
        is_away = error.is_some();
    }
}

/// Gives whole lines, so that those of two streams never mix within one; the last has its end too.
fn each_lines(mut from: impl Read, mut each: impl FnMut(Vec<u8>)) {
    let mut pending = Vec::new();
    let mut buffer = vec![0; 8 << 10];
    loop {
        let num_read = match from.read(&mut buffer) {
            Ok(num_read @ 1..) => num_read,
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => continue,
            _ => break,
        };
        pending.extend_from_slice(&buffer[..num_read]);
        let whole = match pending.iter().rposition(|byte| *byte == b'\n') {
            Some(last) => last + 1,
            None if pending.len() > LINE_BYTES_MAX => {
                pending.push(b'\n');
                pending.len()
            }
            None => continue,
        };
        let rest = pending.split_off(whole);
        each(std::mem::replace(&mut pending, rest));
    }
    if !pending.is_empty() {
        pending.push(b'\n');
        each(pending);
    }
}

fn prefixed(prefix: &str, lines: &[u8]) -> Vec<u8> {
    let mut shown = Vec::with_capacity(lines.len() + prefix.len());
    for line in lines.split_inclusive(|byte| *byte == b'\n') {
        shown.extend_from_slice(prefix.as_bytes());
        shown.extend_from_slice(line);
    }
    shown
}

/// A line that does nothing to a terminal.
fn plain(line: &str) -> String {
    let mut text = String::new();
    for it in line.chars() {
        match it {
            '\t' => text.push(' '),
            it if it.is_control() => text.extend(it.escape_default()),
            it => text.push(it),
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_come_whole_and_long_ones_in_pieces() {
        let check = |text: &[u8], expected: &[usize]| {
            let mut found = vec![];
            each_lines(text, |lines| {
                assert_eq!(lines.last(), Some(&b'\n'));
                found.push(lines.len());
            });
            assert_eq!(found, expected);
        };
        check(b"", &[]);
        check(b"a\nbc\n", &[5]);
        check(b"a\nbc", &[2, 3]);
        // In reads of 8 KiB.
        check(&vec![b'x'; LINE_BYTES_MAX + 1], &[LINE_BYTES_MAX + 2]);
        check(&vec![b'x'; LINE_BYTES_MAX + (8 << 10) + 5], &[LINE_BYTES_MAX + (8 << 10) + 1, 6]);
    }

    #[test]
    fn each_line_has_the_prefix() {
        assert_eq!(prefixed("[rank=1] ", b"a\n\nb\n"), b"[rank=1] a\n[rank=1] \n[rank=1] b\n");
        assert_eq!(prefixed("", b"a\n"), b"a\n");
    }

    #[test]
    fn control_characters_of_a_program_are_kept_not_done() {
        assert_eq!(plain("a\tb \u{1b}[2J\u{7}\r"), "a b \\u{1b}[2J\\u{7}\\r");
    }
}
