//! Lines appended to numbered objects, because object storage cannot append.
//!
//! Appending never blocks. A background task buffers appended lines. It writes them as the next
//! object when the buffer is large enough or old enough, or on a flush. If the write of an object
//! fails, the object is kept and retried before the next one.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use tokio::runtime::Handle;
use tokio::sync::{mpsc, oneshot};
use tokio::time::Instant;

use crate::{Storage, StorageError};

/// Maximum number of buffered bytes. While the store is unavailable, further appends are dropped.
const BUFFER_BYTES_MAX: usize = 64 << 20;

/// Paths and limits of segments.
#[derive(Clone, Debug)]
pub struct Segments {
    /// Path of an object before its number.
    pub prefix: String,
    /// Number of digits of the zero-padded number.
    pub digits: usize,
    /// Path of an object after its number.
    pub suffix: String,
    /// Bytes at the start of each object.
    pub header: Bytes,
    /// Size in bytes at which an object is written.
    pub bytes_max: usize,
    /// Age of an object's first line at which the object is written.
    pub age_max: Duration,
}

impl Segments {
    /// Creates segments `{prefix}{00000000}{suffix}` with limits of 1 MiB and 5 seconds.
    pub fn new(prefix: impl Into<String>, suffix: impl Into<String>) -> Self {
        Self {
            prefix: prefix.into(),
            digits: 8,
            suffix: suffix.into(),
            header: Bytes::new(),
            bytes_max: 1 << 20,
            age_max: Duration::from_secs(5),
        }
    }

    /// Returns the path of the object with number `seq`.
    pub fn path(&self, seq: u64) -> String {
        format!("{}{seq:0digits$}{}", self.prefix, self.suffix, digits = self.digits)
    }
}

/// Appends to numbered objects. Clones append to the same objects.
#[derive(Clone, Debug)]
pub struct SegmentWriter {
    messages: mpsc::UnboundedSender<WriterMessage>,
    /// Number of appended bytes that are not stored yet.
    unstored_bytes: Arc<AtomicUsize>,
    /// Error for waiters if the task has ended.
    shutdown_error: StorageError,
    url: String,
}

#[derive(Debug)]
enum WriterMessage {
    Append(Bytes),
    Flush(oneshot::Sender<Result<(), StorageError>>),
}

/// Handle that waits until all data appended before its creation is stored.
#[derive(Debug)]
pub struct PendingFlush {
    reply: oneshot::Receiver<Result<(), StorageError>>,
    shutdown_error: StorageError,
}

impl PendingFlush {
    /// Waits until the data is stored.
    ///
    /// # Errors
    ///
    /// The storage failed. The data is kept and the write is retried later.
    pub async fn wait(self) -> Result<(), StorageError> {
        self.reply.await.unwrap_or(Err(self.shutdown_error))
    }

    /// Blocks until the data is stored.
    ///
    /// # Errors
    ///
    /// Same as [`wait`](Self::wait).
    ///
    /// # Panics
    ///
    /// If called from an asynchronous task.
    pub fn wait_blocking(self) -> Result<(), StorageError> {
        self.reply.blocking_recv().unwrap_or(Err(self.shutdown_error))
    }
}

impl SegmentWriter {
    /// Starts a writer. Its task runs on `rt` until all clones are dropped, then writes the rest.
    pub fn new(rt: &Handle, storage: Storage, segments: Segments) -> Self {
        let (messages, inbox) = mpsc::unbounded_channel();
        let unstored_bytes = Arc::new(AtomicUsize::new(0));
        let url = storage.url().to_owned();
        let shutdown_error = StorageError::Unavailable {
            url: url.clone(),
            path: segments.path(0),
            attempts: 0,
            reason: "its writer was shut down".to_owned(),
        };
        let task = Task {
            storage,
            inbox,
            unstored_bytes: unstored_bytes.clone(),
            buffer: BytesMut::new(),
            deadline: None,
            unwritten: None,
            seq: 0,
            segments,
        };
        rt.spawn(task.run());
        Self { messages, unstored_bytes, shutdown_error, url }
    }

    /// Appends `bytes` unchanged, so lines must include their newline. The bytes of one call stay
    /// in one object. Never blocks. Returns `false` and drops the bytes if more than 64 MiB would
    /// wait to be written.
    pub fn append(&self, bytes: impl Into<Bytes>) -> bool {
        let bytes = bytes.into();
        let len = bytes.len();
        let has_capacity =
            self.unstored_bytes.fetch_add(len, Ordering::Relaxed) + len <= BUFFER_BYTES_MAX;
        let is_queued = has_capacity && self.messages.send(WriterMessage::Append(bytes)).is_ok();
        if !is_queued {
            self.unstored_bytes.fetch_sub(len, Ordering::Relaxed);
        }
        is_queued
    }

    /// Returns the error for an append that returned `false`.
    pub fn buffer_full_error(&self) -> StorageError {
        StorageError::BufferFull { url: self.url.clone(), bytes: BUFFER_BYTES_MAX }
    }

    /// Requests a flush of all data appended so far, and returns a handle to wait for it.
    pub fn request_flush(&self) -> PendingFlush {
        let (reply_to, reply) = oneshot::channel();
        // If the task has ended, the channel drops `reply_to`, and the waiter gets an error.
        let _ = self.messages.send(WriterMessage::Flush(reply_to));
        PendingFlush { reply, shutdown_error: self.shutdown_error.clone() }
    }

    /// Waits until all data appended so far is stored.
    ///
    /// # Errors
    ///
    /// The storage failed. The data is kept and the write is retried later.
    pub async fn flush(&self) -> Result<(), StorageError> {
        self.request_flush().wait().await
    }
}

/// The task behind a [`SegmentWriter`].
#[derive(Debug)]
struct Task {
    storage: Storage,
    segments: Segments,
    inbox: mpsc::UnboundedReceiver<WriterMessage>,
    unstored_bytes: Arc<AtomicUsize>,
    /// Content of the next object, without the header.
    buffer: BytesMut,
    /// Latest time of the next write.
    deadline: Option<Instant>,
    /// Object whose write failed. Its number and bytes stay the same until it is written.
    unwritten: Option<Bytes>,
    seq: u64,
}

impl Task {
    async fn run(mut self) {
        loop {
            let message = match self.deadline {
                None => self.inbox.recv().await,
                Some(due) => match tokio::time::timeout_at(due, self.inbox.recv()).await {
                    Ok(message) => message,
                    Err(_) => {
                        // Ignore the error: the write is retried, and the next flush reports it.
                        let _ = self.write().await;
                        continue;
                    }
                },
            };
            match message {
                Some(WriterMessage::Append(bytes)) => {
                    self.buffer.extend_from_slice(&bytes);
                    self.deadline.get_or_insert_with(|| Instant::now() + self.segments.age_max);
                    if self.unwritten.is_none() && self.buffer.len() >= self.segments.bytes_max {
                        let _ = self.write().await;
                    }
                }
                Some(WriterMessage::Flush(reply_to)) => {
                    // Ignore the error: the caller no longer waits.
                    let _ = reply_to.send(self.write().await);
                }
                None => {
                    // Ignore the error: all writers are dropped.
                    let _ = self.write().await;
                    return;
                }
            }
        }
    }

    /// Writes the object whose write failed before, then the buffer.
    async fn write(&mut self) -> Result<(), StorageError> {
        let done = self.write_all().await;
        let is_left = self.unwritten.is_some() || !self.buffer.is_empty();
        self.deadline = is_left.then(|| Instant::now() + self.segments.age_max);
        done
    }

    async fn write_all(&mut self) -> Result<(), StorageError> {
        while self.unwritten.is_some() || !self.buffer.is_empty() {
            let (buffer, header) = (&mut self.buffer, &self.segments.header);
            let object = self.unwritten.get_or_insert_with(|| {
                let mut object = BytesMut::from(header.as_ref());
                object.extend_from_slice(&buffer.split());
                object.freeze()
            });
            let (len, object) = (object.len() - header.len(), object.clone());
            self.storage.put(&self.segments.path(self.seq), object).await?;
            self.unstored_bytes.fetch_sub(len, Ordering::Relaxed);
            self.unwritten = None;
            self.seq += 1;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn segments(bytes_max: usize, age_max: Duration) -> Segments {
        Segments { bytes_max, age_max, header: "#".into(), ..Segments::new("m/0-", ".jsonl") }
    }

    async fn check(segments: Segments, lines: &[&str], wait: Duration, expected: &[&str]) {
        let storage = Storage::open("memory://", None).unwrap();
        let writer = SegmentWriter::new(&Handle::current(), storage.clone(), segments);
        for line in lines {
            assert!(writer.append(line.to_string()));
        }
        tokio::time::sleep(wait).await;
        let mut objects = vec![];
        for path in storage.list("m").await.unwrap() {
            let bytes = storage.get(&path).await.unwrap();
            objects.push(format!("{path} {}", String::from_utf8(bytes.to_vec()).unwrap()));
        }
        assert_eq!(objects, expected);
    }

    #[tokio::test(start_paused = true)]
    async fn objects_are_written_by_size_or_age() {
        let (second, minute) = (Duration::from_secs(1), Duration::from_secs(60));
        let both = ["m/0-00000000.jsonl #ab", "m/0-00000001.jsonl #cd"];
        check(segments(2, minute), &["a", "b", "cd"], second, &both).await;
        check(segments(99, minute), &["a", "b"], second, &[]).await;
        check(segments(99, second), &["a", "b"], minute, &["m/0-00000000.jsonl #ab"]).await;
    }

    #[tokio::test]
    async fn flush_waits_until_all_is_stored() {
        let storage = Storage::open("memory://", None).unwrap();
        let segments = segments(99, Duration::from_secs(60));
        let writer = SegmentWriter::new(&Handle::current(), storage.clone(), segments);
        writer.append("a");
        writer.flush().await.unwrap();
        assert_eq!(storage.get("m/0-00000000.jsonl").await.unwrap(), "#a");
        writer.flush().await.unwrap();
        assert_eq!(storage.list("m").await.unwrap().len(), 1, "flush wrote an empty object");
    }

    #[tokio::test]
    async fn failed_writes_are_retried() {
        let folder = tempfile::tempdir().unwrap();
        let url = folder.path().to_str().unwrap().to_owned();
        let storage = Storage::open(&url, None).unwrap();
        // A file at the path of the objects' directory makes writes fail.
        std::fs::write(folder.path().join("m"), "").unwrap();
        let segments = segments(99, Duration::from_secs(60));
        let writer = SegmentWriter::new(&Handle::current(), storage.clone(), segments);
        writer.append("a");
        let error = writer.flush().await.unwrap_err().to_string();
        assert!(error.contains("m/0-00000000.jsonl"), "{error}");
        writer.append("b");
        std::fs::remove_file(folder.path().join("m")).unwrap();
        writer.flush().await.unwrap();
        assert_eq!(storage.get("m/0-00000000.jsonl").await.unwrap(), "#a");
        assert_eq!(storage.get("m/0-00000001.jsonl").await.unwrap(), "#b");
    }

    #[tokio::test]
    async fn appends_beyond_the_buffer_limit_are_dropped() {
        let storage = Storage::open("memory://", None).unwrap();
        let segments = segments(usize::MAX, Duration::from_secs(60));
        let writer = SegmentWriter::new(&Handle::current(), storage.clone(), segments);
        assert!(writer.append("a"));
        assert!(!writer.append(vec![b'x'; BUFFER_BYTES_MAX]));
        let error = writer.buffer_full_error().to_string();
        assert!(error.contains("memory://") && error.contains("64 MiB"), "{error}");
        assert!(writer.append("b"), "the dropped append counts against the limit");
        writer.flush().await.unwrap();
        assert_eq!(storage.get("m/0-00000000.jsonl").await.unwrap(), "#ab");
        assert!(writer.append(vec![b'x'; BUFFER_BYTES_MAX]), "flushed bytes count");
    }

    #[tokio::test]
    async fn dropped_writers_store_their_buffer() {
        let storage = Storage::open("memory://", None).unwrap();
        let segments = segments(99, Duration::from_secs(60));
        let writer = SegmentWriter::new(&Handle::current(), storage.clone(), segments);
        writer.append("a");
        let flush = writer.request_flush();
        drop(writer);
        flush.wait().await.unwrap();
        assert_eq!(storage.list("").await.unwrap(), ["m/0-00000000.jsonl"]);
    }
}
