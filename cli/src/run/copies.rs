//! Background task that copies trial records next to the trials' files in the storage.

use std::collections::BTreeSet;
use std::time::Duration;

use stoker_storage::Storage;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::task::JoinHandle;
use tokio::time::timeout;

use super::door::Desk;
use super::outcome::{self, Paths};

/// Maximum wait for pending copies after all trials have ended.
const LAST_COPIES: Duration = Duration::from_secs(30);

/// Handle of the task, which copies one record at a time in its latest state.
#[derive(Debug)]
pub(crate) struct Copies {
    wanted: UnboundedSender<u32>,
    task: JoinHandle<()>,
}

impl Copies {
    /// Starts the task. Sends error messages to `notes`.
    pub(crate) fn start(
        desk: Desk,
        storage: Storage,
        paths: Paths,
        notes: UnboundedSender<String>,
    ) -> Self {
        let (wanted, inbox) = unbounded_channel();
        Self { wanted, task: tokio::spawn(copy(desk, storage, paths, inbox, notes)) }
    }

    /// Requests a copy of the trial's record; never blocks.
    pub(crate) fn want(&self, trial: u32) {
        let _ = self.wanted.send(trial);
    }

    /// Waits for pending copies, at most [`LAST_COPIES`].
    pub(crate) async fn finish(self) {
        drop(self.wanted);
        let task = self.task;
        let abort = task.abort_handle();
        if timeout(LAST_COPIES, task).await.is_err() {
            abort.abort();
        }
    }
}

async fn copy(
    desk: Desk,
    storage: Storage,
    paths: Paths,
    mut inbox: UnboundedReceiver<u32>,
    notes: UnboundedSender<String>,
) {
    while let Some(first) = inbox.recv().await {
        let mut wanted = BTreeSet::from([first]);
        while let Ok(more) = inbox.try_recv() {
            wanted.insert(more);
        }
        for index in wanted {
            let trial = desk.state().trials.get(&index).cloned();
            let Some(trial) = trial else { continue };
            if let Err(error) = outcome::copy_record(&storage, &paths, &trial).await {
                let note = format!("trial {index}: cannot copy the record to the storage: {error}");
                let _ = notes.send(note);
            }
        }
    }
}
