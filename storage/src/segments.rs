//! Lines appended to numbered objects, since object storage cannot append.
//!
//! Appending never waits. A background task gathers what is appended and writes it as the next
//! object when it is large enough or old enough, or when somebody asks. An object that could not
//! be written is kept and tried again with the next.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use tokio::runtime::Handle;
use tokio::sync::{mpsc, oneshot};
use tokio::time::Instant;

use crate::{Storage, StorageError};

/// Bytes that wait for a store that is away; what is appended beyond them is dropped.
const WAITING_BYTES_MAX: usize = 64 << 20;

/// Where segments go and when one is written.
#[derive(Clone, Debug)]
pub struct Segments {
    /// What an object's path begins with; its number follows.
    pub prefix: String,
    /// Digits of the number, filled with zeros.
    pub digits: usize,
    /// What follows the number.
    pub suffix: String,
    /// What each object begins with.
    pub header: Bytes,
    /// An object is written when it has this size.
    pub bytes_max: usize,
    /// An object is written when its first line has this age.
    pub age_max: Duration,
}

impl Segments {
    /// Objects `{prefix}{00000000}{suffix}` of about 1 MiB or 5 seconds.
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

    /// The path of the object with this number.
    pub fn path(&self, seq: u64) -> String {
        format!("{}{seq:0digits$}{}", self.prefix, self.suffix, digits = self.digits)
    }
}

/// Appends to numbered objects. Clones append to the same ones.
#[derive(Clone, Debug)]
pub struct SegmentWriter {
    orders: mpsc::UnboundedSender<Order>,
    /// Bytes that were appended and are not stored.
    waiting: Arc<AtomicUsize>,
    /// What waiters are told if the task is no more.
    gone: StorageError,
    url: String,
}

#[derive(Debug)]
enum Order {
    Append(Bytes),
    Flush(oneshot::Sender<Result<(), StorageError>>),
}

/// Resolves once all that was appended before it was made is stored.
#[derive(Debug)]
pub struct Stored {
    answer: oneshot::Receiver<Result<(), StorageError>>,
    gone: StorageError,
}

impl Stored {
    /// Waits for it.
    ///
    /// # Errors
    ///
    /// The storage failed; what was appended is kept and tried again later.
    pub async fn wait(self) -> Result<(), StorageError> {
        self.answer.await.unwrap_or(Err(self.gone))
    }

    /// Waits for it, on a thread that runs no asynchronous task.
    ///
    /// # Errors
    ///
    /// As [`wait`](Self::wait).
    ///
    /// # Panics
    ///
    /// Called within an asynchronous task.
    pub fn wait_blocking(self) -> Result<(), StorageError> {
        self.answer.blocking_recv().unwrap_or(Err(self.gone))
    }
}

impl SegmentWriter {
    /// Starts a writer, whose task runs on `rt` until all clones are dropped and all is stored.
    pub fn new(rt: &Handle, storage: Storage, segments: Segments) -> Self {
        let (orders, inbox) = mpsc::unbounded_channel();
        let waiting = Arc::new(AtomicUsize::new(0));
        let url = storage.url().to_owned();
        let gone = StorageError::Unavailable {
            url: url.clone(),
            path: segments.path(0),
            attempts: 0,
            reason: "its writer was shut down".to_owned(),
        };
        let task = Task {
            storage,
            inbox,
            waiting: waiting.clone(),
            gathered: BytesMut::new(),
            due: None,
            unwritten: None,
            seq: 0,
            segments,
        };
        rt.spawn(task.run());
        Self { orders, waiting, gone, url }
    }

    /// Appends `bytes` as they are: give a line its end. What one call appends stays in one
    /// object. Never waits; says whether there was room. There is none while 64 MiB wait for a
    /// store that is away.
    pub fn append(&self, bytes: impl Into<Bytes>) -> bool {
        let bytes = bytes.into();
        let len = bytes.len();
        let has_room = self.waiting.fetch_add(len, Ordering::Relaxed) + len <= WAITING_BYTES_MAX;
        let is_taken = has_room && self.orders.send(Order::Append(bytes)).is_ok();
        if !is_taken {
            self.waiting.fetch_sub(len, Ordering::Relaxed);
        }
        is_taken
    }

    /// What an append that found no room failed with.
    pub fn no_room(&self) -> StorageError {
        StorageError::Behind { url: self.url.clone(), bytes: WAITING_BYTES_MAX }
    }

    /// Asks that all that was appended so far be stored; returns what to wait for.
    pub fn stored(&self) -> Stored {
        let (asker, answer) = oneshot::channel();
        // A task that is gone drops the asker, which the waiter sees.
        let _ = self.orders.send(Order::Flush(asker));
        Stored { answer, gone: self.gone.clone() }
    }

    /// Waits until all that was appended so far is stored.
    ///
    /// # Errors
    ///
    /// The storage failed; what was appended is kept and tried again later.
    pub async fn flush(&self) -> Result<(), StorageError> {
        self.stored().wait().await
    }
}

/// The task behind a [`SegmentWriter`].
#[derive(Debug)]
struct Task {
    storage: Storage,
    segments: Segments,
    inbox: mpsc::UnboundedReceiver<Order>,
    waiting: Arc<AtomicUsize>,
    /// What the next object will hold, without its header.
    gathered: BytesMut,
    /// When to write it at the latest.
    due: Option<Instant>,
    /// The object that could not be written yet. Its number and bytes stay the same.
    unwritten: Option<Bytes>,
    seq: u64,
}

impl Task {
    async fn run(mut self) {
        loop {
            let order = match self.due {
                None => self.inbox.recv().await,
                Some(due) => match tokio::time::timeout_at(due, self.inbox.recv()).await {
                    Ok(order) => order,
                    Err(_) => {
                        // Whoever asks next is told of a failure; until then it is tried again.
                        let _ = self.write().await;
                        continue;
                    }
                },
            };
            match order {
                Some(Order::Append(bytes)) => {
                    self.gathered.extend_from_slice(&bytes);
                    self.due.get_or_insert_with(|| Instant::now() + self.segments.age_max);
                    if self.unwritten.is_none() && self.gathered.len() >= self.segments.bytes_max {
                        let _ = self.write().await;
                    }
                }
                Some(Order::Flush(asker)) => {
                    // An asker that no longer waits needs no answer.
                    let _ = asker.send(self.write().await);
                }
                None => {
                    // Nobody is left to tell.
                    let _ = self.write().await;
                    return;
                }
            }
        }
    }

    /// Writes the object that failed before, then what was gathered since.
    async fn write(&mut self) -> Result<(), StorageError> {
        let done = self.write_all().await;
        let is_left = self.unwritten.is_some() || !self.gathered.is_empty();
        self.due = is_left.then(|| Instant::now() + self.segments.age_max);
        done
    }

    async fn write_all(&mut self) -> Result<(), StorageError> {
        while self.unwritten.is_some() || !self.gathered.is_empty() {
            let (gathered, header) = (&mut self.gathered, &self.segments.header);
            let object = self.unwritten.get_or_insert_with(|| {
                let mut object = BytesMut::from(header.as_ref());
                object.extend_from_slice(&gathered.split());
                object.freeze()
            });
            let (len, object) = (object.len() - header.len(), object.clone());
            self.storage.put(&self.segments.path(self.seq), object).await?;
            self.waiting.fetch_sub(len, Ordering::Relaxed);
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
        let mut found = vec![];
        for path in storage.list("m").await.unwrap() {
            let bytes = storage.get(&path).await.unwrap();
            found.push(format!("{path} {}", String::from_utf8(bytes.to_vec()).unwrap()));
        }
        assert_eq!(found, expected);
    }

    #[tokio::test(start_paused = true)]
    async fn lines_are_written_by_size_by_age_and_not_before() {
        let (second, minute) = (Duration::from_secs(1), Duration::from_secs(60));
        let both = ["m/0-00000000.jsonl #ab", "m/0-00000001.jsonl #cd"];
        check(segments(2, minute), &["a", "b", "cd"], second, &both).await;
        check(segments(99, minute), &["a", "b"], second, &[]).await;
        check(segments(99, second), &["a", "b"], minute, &["m/0-00000000.jsonl #ab"]).await;
    }

    #[tokio::test]
    async fn a_flush_waits_until_all_is_stored() {
        let storage = Storage::open("memory://", None).unwrap();
        let segments = segments(99, Duration::from_secs(60));
        let writer = SegmentWriter::new(&Handle::current(), storage.clone(), segments);
        writer.append("a");
        writer.flush().await.unwrap();
        assert_eq!(storage.get("m/0-00000000.jsonl").await.unwrap(), "#a");
        writer.flush().await.unwrap();
        assert_eq!(storage.list("m").await.unwrap().len(), 1, "an empty object was written");
    }

    #[tokio::test]
    async fn lines_that_could_not_be_written_are_written_later() {
        let folder = tempfile::tempdir().unwrap();
        let url = folder.path().to_str().unwrap().to_owned();
        let storage = Storage::open(&url, None).unwrap();
        // A file where the folder of the objects should be.
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
    async fn what_finds_no_room_is_refused_and_the_rest_is_kept() {
        let storage = Storage::open("memory://", None).unwrap();
        let segments = segments(usize::MAX, Duration::from_secs(60));
        let writer = SegmentWriter::new(&Handle::current(), storage.clone(), segments);
        assert!(writer.append("a"));
        assert!(!writer.append(vec![b'x'; WAITING_BYTES_MAX]));
        let error = writer.no_room().to_string();
        assert!(error.contains("memory://") && error.contains("64 MiB"), "{error}");
        assert!(writer.append("b"), "a refused append took room");
        writer.flush().await.unwrap();
        assert_eq!(storage.get("m/0-00000000.jsonl").await.unwrap(), "#ab");
        assert!(writer.append(vec![b'x'; WAITING_BYTES_MAX]), "a flush gave no room back");
    }

    #[tokio::test]
    async fn a_writer_that_is_dropped_stores_what_it_has() {
        let storage = Storage::open("memory://", None).unwrap();
        let segments = segments(99, Duration::from_secs(60));
        let writer = SegmentWriter::new(&Handle::current(), storage.clone(), segments);
        writer.append("a");
        let stored = writer.stored();
        drop(writer);
        stored.wait().await.unwrap();
        assert_eq!(storage.list("").await.unwrap(), ["m/0-00000000.jsonl"]);
    }
}
