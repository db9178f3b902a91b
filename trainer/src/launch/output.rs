//! Output of a rank: printed, stored, and the last lines kept for error messages.

use std::io::{Read, Write};
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use stoker_api::contract::TrialConfig;
use stoker_storage::lines::{LineBuffer, SILENCE, Tail};
use stoker_storage::segments::{BUFFER_BYTES_MAX, SegmentWriter, Segments};
use stoker_storage::{Storage, layout};
use tokio::runtime::Handle;
use tokio::sync::watch;

use crate::Result;
use crate::error::Infrastructure;

use super::layout::RankTopology;

/// Interval of checks whether the storage accepts the logs.
const STORAGE_CHECK_INTERVAL: Duration = Duration::from_secs(10);

/// One of the two output streams of a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stream {
    Out,
    Error,
}

/// Output of one rank. Clones share the same state.
#[derive(Clone, Debug)]
pub(super) struct Output(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    /// Prefix of each printed line.
    prefix: String,
    writer: Option<SegmentWriter>,
    /// Number of bytes dropped because the writer was full, and not yet noted in the log.
    num_missing: AtomicU64,
    tails: [Mutex<Tail>; 2],
    /// Number of streams that are still open.
    num_open: watch::Sender<usize>,
}

impl Output {
    /// Creates the output of a rank, stored in its trial's logs. Must be called within a runtime.
    pub(super) fn new(topology: RankTopology, store: Option<&(Storage, &TrialConfig)>) -> Self {
        let RankTopology { rank, world_size, local_world_size, .. } = topology;
        let prefix = if world_size > 1 { format!("[rank={rank}] ") } else { String::new() };
        let writer = store.map(|(storage, config)| {
            let folder = &config.storage.trial_path;
            let segments = Segments {
                buffer_bytes_max: buffer_bytes_max(local_world_size),
                ..layout::log_segments(folder, config.attempt, rank)
            };
            SegmentWriter::new(&Handle::current(), storage.clone(), segments)
        });
        let (num_missing, tails) = (AtomicU64::default(), Default::default());
        let num_open = watch::Sender::new(0);
        Self(Arc::new(Inner { prefix, writer, num_missing, tails, num_open }))
    }

    /// Returns the writer that stores the output, if any.
    pub(super) fn writer(&self) -> Option<SegmentWriter> {
        self.0.writer.clone()
    }

    /// Returns `true` if printed lines have the rank as a prefix.
    pub(super) fn has_prefix(&self) -> bool {
        !self.0.prefix.is_empty()
    }

    /// Reads a stream to its end on a separate thread.
    ///
    /// # Errors
    ///
    /// Fails if the thread cannot be started.
    pub(super) fn read(
        &self,
        from: impl Read + AsFd + Send + 'static,
        stream: Stream,
    ) -> Result<()> {
        let output = self.clone();
        self.0.num_open.send_modify(|num| *num += 1);
        let thread = std::thread::Builder::new().name("stoker-output".into());
        let started = thread.spawn(move || {
            for_each_line_block(from, SILENCE, |lines| output.handle_lines(lines, stream));
            output.0.num_open.send_modify(|num| *num -= 1);
        });
        Ok(started
            .map(drop)
            .map_err(|error| Infrastructure(format!("cannot start a thread: {error}")))?)
    }

    /// Waits until both streams are closed, but at most for `timeout`.
    pub(super) async fn drain(&self, timeout: Duration) {
        let mut num_open = self.0.num_open.subscribe();
        // Later output is missing from the termination message, but still reaches the log.
        let _ = tokio::time::timeout(timeout, num_open.wait_for(|num| *num == 0)).await;
    }

    /// Returns the last lines of standard error, or of standard output if there are none.
    pub(super) fn last_lines(&self) -> String {
        let of = |stream: Stream| self.tail(stream).text();
        Some(of(Stream::Error)).filter(|lines| !lines.is_empty()).unwrap_or_else(|| of(Stream::Out))
    }

    /// Prints, keeps and stores complete lines.
    fn handle_lines(&self, lines: Vec<u8>, stream: Stream) {
        self.print(&lines, stream);
        self.tail(stream).push(&lines);
        self.store(lines);
    }

    fn tail(&self, stream: Stream) -> MutexGuard<'_, Tail> {
        self.0.tails[stream as usize].lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn print(&self, lines: &[u8], stream: Stream) {
        let prefixed_lines = prefixed(&self.0.prefix, lines);
        // Ignore the error: a closed pipe must not end training.
        let _ = match stream {
            Stream::Out => std::io::stdout().lock().write_all(&prefixed_lines),
            Stream::Error => std::io::stderr().lock().write_all(&prefixed_lines),
        };
    }

    fn store(&self, mut lines: Vec<u8>) {
        let Some(writer) = &self.0.writer else { return };
        let num_missing = self.0.num_missing.swap(0, Ordering::Relaxed);
        if num_missing > 0 {
            let notice =
                format!("[{num_missing} bytes are missing here: the storage was unavailable]\n");
            lines.splice(0..0, notice.into_bytes());
        }
        let num_bytes = lines.len() as u64;
        if !writer.append(lines) {
            self.0.num_missing.fetch_add(num_missing + num_bytes, Ordering::Relaxed);
        }
    }
}

/// Returns the limit of a rank's log buffer. The ranks of a pod share one limit, because a failure
/// of the storage must not fill the memory of the pod.
fn buffer_bytes_max(ranks_per_pod: u32) -> usize {
    BUFFER_BYTES_MAX / ranks_per_pod.max(1) as usize
}

/// Reports once when the storage stops accepting the logs, and once when it recovers.
pub(super) async fn report_storage_outages(writers: Vec<SegmentWriter>) {
    let mut is_unavailable = false;
    loop {
        tokio::time::sleep(STORAGE_CHECK_INTERVAL).await;
        let mut error = None;
        for writer in &writers {
            error = writer.flush().await.err().or(error);
        }
        match (&error, is_unavailable) {
            (Some(error), false) => {
                eprintln!(
                    "stoker: cannot store logs: {error}; training continues, and logs will be \
                     retried"
                );
            }
            (None, true) => eprintln!("stoker: logs are stored again"),
            _ => {}
        }
        is_unavailable = error.is_some();
    }
}

/// Reads complete lines. An incomplete line gets a line break at the end of the stream, and if
/// nothing follows it within `silence`: a program that hangs has printed where it is.
fn for_each_line_block(
    mut from: impl Read + AsFd,
    silence: Duration,
    mut handle: impl FnMut(Vec<u8>),
) {
    let (mut pending, mut buffer) = (LineBuffer::default(), vec![0; 8 << 10]);
    loop {
        let lines = match is_silent(&from, silence) {
            true => pending.take_incomplete(),
            false => match from.read(&mut buffer) {
                Ok(num_read @ 1..) => pending.push(&buffer[..num_read]),
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => None,
                _ => break,
            },
        };
        if let Some(lines) = lines {
            handle(lines);
        }
    }
    if let Some(line) = pending.finish() {
        handle(line);
    }
}

/// Waits until the stream has bytes, has ended or has failed. Returns `true` after the timeout.
fn is_silent(stream: &impl AsFd, timeout: Duration) -> bool {
    let timeout = Timespec::try_from(timeout).ok();
    loop {
        let mut fds = [PollFd::new(stream, PollFlags::IN)];
        match poll(&mut fds, timeout.as_ref()) {
            Err(Errno::INTR) => {}
            // Reading reports other errors.
            result => return result == Ok(0),
        }
    }
}

fn prefixed(prefix: &str, lines: &[u8]) -> Vec<u8> {
    let mut prefixed_lines = Vec::with_capacity(lines.len() + prefix.len());
    for line in lines.split_inclusive(|byte| *byte == b'\n') {
        prefixed_lines.extend_from_slice(prefix.as_bytes());
        prefixed_lines.extend_from_slice(line);
    }
    prefixed_lines
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;
    use std::sync::mpsc::channel;

    use super::*;

    /// Writes each part and waits until its lines arrive, then ends the stream. Expects `last` at
    /// the end.
    fn check(silence: Duration, parts: &[(&str, &str)], last: Option<&str>) {
        let (mut program, from) = UnixStream::pair().unwrap();
        let (sender, received) = channel();
        let read = move || for_each_line_block(from, silence, |lines| sender.send(lines).unwrap());
        let reader = std::thread::spawn(read);
        for (part, expected) in parts {
            program.write_all(part.as_bytes()).unwrap();
            if !expected.is_empty() {
                let lines = received.recv_timeout(Duration::from_secs(60)).unwrap();
                assert_eq!(String::from_utf8(lines).unwrap(), *expected, "{part:?}");
            }
        }
        drop(program);
        reader.join().unwrap();
        let rest: Vec<_> = received.iter().map(|lines| String::from_utf8(lines).unwrap()).collect();
        assert_eq!(rest, Vec::from_iter(last));
    }

    #[test]
    fn incomplete_lines_arrive_after_a_silence() {
        let (short, long) = (Duration::from_millis(1), Duration::from_secs(3_600));
        check(short, &[("loading", "loading\n"), ("done", "done\n")], None);
        check(long, &[("load", ""), ("ing\ndone", "loading\n")], Some("done\n"));
    }

    #[test]
    fn ranks_of_a_pod_share_the_buffer() {
        assert_eq!([1, 2, 8].map(buffer_bytes_max), [64 << 20, 32 << 20, 8 << 20]);
    }

    #[test]
    fn each_line_has_the_prefix() {
        assert_eq!(prefixed("[rank=1] ", b"a\n\nb\n"), b"[rank=1] a\n[rank=1] \n[rank=1] b\n");
        assert_eq!(prefixed("", b"a\n"), b"a\n");
    }
}
