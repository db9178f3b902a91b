//! Stores the trial's record whenever the operator returns it with the response to a report.

use std::sync::mpsc::{RecvTimeoutError, SyncSender, sync_channel};
use std::time::Duration;

use serde_json::Value;
use stoker_storage::{Storage, layout};
use tokio::runtime::Handle;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

/// Maximum wait for the storage at the end of the process.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(10);

/// Message to the task that stores records.
#[derive(Debug)]
pub(crate) enum RecordMessage {
    /// The trial's record, which replaces earlier ones.
    Record(Value),
    /// Replies when all earlier records are stored.
    Flush(SyncSender<()>),
}

/// Writes the latest record in the background, one at a time.
#[derive(Debug)]
pub(super) struct RecordWriter {
    messages: UnboundedSender<RecordMessage>,
}

impl RecordWriter {
    pub(super) fn start(rt: &Handle, storage: Storage, trial_path: &str) -> Self {
        let (messages, inbox) = unbounded_channel();
        rt.spawn(write_records(storage.with_few_retries(), layout::record_path(trial_path), inbox));
        Self { messages }
    }

    /// Returns a sender of records.
    pub(super) fn sender(&self) -> UnboundedSender<RecordMessage> {
        self.messages.clone()
    }

    /// Blocks until the records so far are stored, at most ten seconds.
    pub(super) fn flush(&self) {
        let (reply_to, reply) = sync_channel(1);
        // Ignore the error: if the task has ended, the reply channel is closed.
        let _ = self.messages.send(RecordMessage::Flush(reply_to));
        if reply.recv_timeout(FLUSH_TIMEOUT) == Err(RecvTimeoutError::Timeout) {
            let seconds = FLUSH_TIMEOUT.as_secs();
            eprintln!("stoker: cannot store the trial's record within {seconds} s");
        }
    }
}

async fn write_records(
    storage: Storage,
    path: String,
    mut inbox: UnboundedReceiver<RecordMessage>,
) {
    let mut is_failed = false;
    while let Some(first) = inbox.recv().await {
        let (mut latest, mut waiting) = (None, vec![]);
        let mut next = Some(first);
        while let Some(message) = next {
            match message {
                RecordMessage::Record(record) => latest = Some(record),
                RecordMessage::Flush(reply_to) => waiting.push(reply_to),
            }
            next = inbox.try_recv().ok();
        }
        if let Some(bytes) = latest.and_then(|record| serde_json::to_vec_pretty(&record).ok()) {
            let written = storage.put(&path, bytes.into()).await;
            if let (Err(error), false) = (&written, is_failed) {
                eprintln!("stoker: cannot store the trial's record: {error}; training continues");
            }
            is_failed = written.is_err();
        }
        for reply_to in waiting {
            // Ignore the error: the caller no longer waits.
            let _ = reply_to.send(());
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn flush_waits_for_the_latest_record() {
        let rt = tokio::runtime::Runtime::new().unwrap();
        let storage = Storage::open("memory://", None).unwrap();
        let writer = RecordWriter::start(rt.handle(), storage.clone(), "t");
        for batches in 0..10 {
            writer.sender().send(RecordMessage::Record(json!({ "batches": batches }))).unwrap();
        }
        writer.flush();
        let stored = rt.block_on(storage.get("t/record.json")).unwrap();
        assert_eq!(serde_json::from_slice::<Value>(&stored).unwrap(), json!({ "batches": 9 }));
    }
}
