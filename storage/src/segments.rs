//! Lines appended to numbered objects, because object storage cannot append.
//!
//! Appending never blocks. A background task buffers appended lines. It writes them when the buffer
//! is large enough or old enough, or on a flush. A write replaces the latest object by one that
//! also contains the new lines, until that object is full; then the next object begins. So the
//! number of objects depends on the number of bytes, and not on the number of writes, and each line
//! is in exactly one object at any time.
//!
//! A request that was sent twice may arrive again later, and would then replace an object by an
//! earlier state. An object is therefore not replaced any more after a write that was retried. If
//! the write of an object fails, the object is kept and retried before the next one.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use tokio::runtime::Handle;
use tokio::sync::{mpsc, oneshot};
use tokio::time::Instant;

use crate::{Storage, StorageError};

/// Default of [`Segments::buffer_bytes_max`].
pub const BUFFER_BYTES_MAX: usize = 64 << 20;

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
    /// Size in bytes at which an object is full.
    pub bytes_max: usize,
    /// Maximum number of buffered bytes. While the store is unavailable, further appends are
    /// dropped.
    pub buffer_bytes_max: usize,
    /// Age of the first unwritten line at which the lines are written. Each write sends the whole
    /// object again: up to `bytes_max` in this time.
    pub age_max: Duration,
    /// In a local directory, append to the latest file instead of replacing it, for readers that
    /// keep a file open. If the machine crashes, the file may end with a part of a line.
    pub appends_locally: bool,
}

impl Segments {
    /// Creates segments `{prefix}{00000000}{suffix}` with limits of 512 KiB and 4.5 seconds, and a
    /// buffer of 64 MiB.
    pub fn new(prefix: impl Into<String>, suffix: impl Into<String>) -> Self {
        Self {
            prefix: prefix.into(),
            digits: 8,
            suffix: suffix.into(),
            header: Bytes::new(),
            bytes_max: 512 << 10,
            buffer_bytes_max: BUFFER_BYTES_MAX,
            age_max: Duration::from_millis(4_500),
            appends_locally: false,
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
    buffer_bytes_max: usize,
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
        let (url, buffer_bytes_max) = (storage.url().to_owned(), segments.buffer_bytes_max);
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
            object: Bytes::new(),
            unwritten: None,
            seq: 0,
            segments,
        };
        rt.spawn(task.run());
        Self { messages, unstored_bytes, buffer_bytes_max, shutdown_error, url }
    }

    /// Appends `bytes` unchanged, so lines must include their newline. The bytes of one call stay
    /// in one object. Never blocks. Returns `false` and drops the bytes if more than
    /// [`Segments::buffer_bytes_max`] would wait to be written.
    pub fn append(&self, bytes: impl Into<Bytes>) -> bool {
        let bytes = bytes.into();
        let len = bytes.len();
        let has_capacity =
            self.unstored_bytes.fetch_add(len, Ordering::Relaxed) + len <= self.buffer_bytes_max;
        let is_queued = has_capacity && self.messages.send(WriterMessage::Append(bytes)).is_ok();
        if !is_queued {
            self.unstored_bytes.fetch_sub(len, Ordering::Relaxed);
        }
        is_queued
    }

    /// Returns the error for an append that returned `false`.
    pub fn buffer_full_error(&self) -> StorageError {
        StorageError::BufferFull { url: self.url.clone(), bytes: self.buffer_bytes_max }
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
    /// Lines that are not written yet.
    buffer: BytesMut,
    /// Latest time of the next write.
    deadline: Option<Instant>,
    /// Stored content of the latest object; empty if a new object begins.
    object: Bytes,
    /// Object whose write failed. Its number and bytes stay the same until it is written.
    unwritten: Option<Bytes>,
    /// Number of the latest object.
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
                    let num_bytes = self.object.len() + self.buffer.len();
                    let age_max = self.segments.age_max;
                    self.deadline.get_or_insert_with(|| Instant::now() + age_max);
                    if self.unwritten.is_none() && num_bytes >= self.segments.bytes_max {
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
            let is_retried = self.unwritten.is_some();
            let (buffer, before) = (&mut self.buffer, &self.object);
            let begin = if before.is_empty() { &self.segments.header } else { before };
            let object = self.unwritten.get_or_insert_with(|| {
                let mut object = BytesMut::with_capacity(begin.len() + buffer.len());
                object.extend_from_slice(begin);
                object.extend_from_slice(&buffer.split());
                object.freeze()
            });
            let (len, object) = (object.len() - begin.len(), object.clone());
            let is_unique = self.put(&object).await?;
            self.unstored_bytes.fetch_sub(len, Ordering::Relaxed);
            self.unwritten = None;
            if is_unique && !is_retried && object.len() < self.segments.bytes_max {
                self.object = object;
            } else {
                self.object = Bytes::new();
                self.seq += 1;
            }
        }
        Ok(())
    }

    /// Writes the latest object. Returns whether only one request was sent.
    async fn put(&self, object: &Bytes) -> Result<bool, StorageError> {
        let path = self.segments.path(self.seq);
        let num_stored = self.object.len();
        if self.segments.appends_locally
            && num_stored > 0
            && self.storage.append_locally(&path, num_stored as u64, &object[num_stored..])
        {
            return Ok(true);
        }
        self.storage.put_uniquely(&path, object.clone()).await
    }
}

#[cfg(test)]
mod tests;
