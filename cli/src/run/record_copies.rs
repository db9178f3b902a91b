//! Background task that copies trial records next to the trials' files in the storage.

use std::collections::BTreeSet;
use std::time::Duration;

use stoker_storage::Storage;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::task::JoinHandle;
use tokio::time::timeout;

use super::outcome::{self, RunPaths};
use super::report_server::SharedState;

/// Maximum wait for pending copies after all trials have ended.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(30);

/// Handle of the task, which copies one record at a time in its latest state.
#[derive(Debug)]
pub(crate) struct RecordCopier {
    requests: UnboundedSender<u32>,
    task: JoinHandle<()>,
}

impl RecordCopier {
    /// Starts the task. Sends error messages to `notes`.
    pub(crate) fn start(
        shared: SharedState,
        storage: Storage,
        paths: RunPaths,
        notes: UnboundedSender<String>,
    ) -> Self {
        let (requests, inbox) = unbounded_channel();
        Self { requests, task: tokio::spawn(copy(shared, storage, paths, inbox, notes)) }
    }

    /// Requests a copy of the trial's record; never blocks.
    pub(crate) fn request_copy(&self, trial: u32) {
        let _ = self.requests.send(trial);
    }

    /// Waits for pending copies, at most [`DRAIN_TIMEOUT`].
    pub(crate) async fn finish(self) {
        drop(self.requests);
        let task = self.task;
        let abort = task.abort_handle();
        if timeout(DRAIN_TIMEOUT, task).await.is_err() {
            abort.abort();
        }
    }
}

async fn copy(
    shared: SharedState,
    storage: Storage,
    paths: RunPaths,
    mut inbox: UnboundedReceiver<u32>,
    notes: UnboundedSender<String>,
) {
    while let Some(first_request) = inbox.recv().await {
        let mut requests = BTreeSet::from([first_request]);
        while let Ok(more) = inbox.try_recv() {
            requests.insert(more);
        }
        for index in requests {
            let trial = shared.state().trials.get(&index).cloned();
            let Some(trial) = trial else { continue };
            if let Err(error) = outcome::copy_record(&storage, &paths, &trial).await {
                let note = format!("trial {index}: cannot copy the record to the storage: {error}");
                let _ = notes.send(note);
            }
        }
    }
}
