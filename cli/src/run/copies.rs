//! Copies of trials' records beside their files, written beside the runner's loop.

use std::collections::BTreeSet;
use std::time::Duration;

use stoker_storage::Storage;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::task::JoinHandle;
use tokio::time::timeout;

use super::door::Desk;
use super::outcome::{self, Paths};

/// How long the last copies may take once nothing runs any more.
const LAST_COPIES: Duration = Duration::from_secs(30);

/// Writes copies, one at a time, of the record as it then is.
#[derive(Debug)]
pub(crate) struct Copies {
    wanted: UnboundedSender<u32>,
    task: JoinHandle<()>,
}

impl Copies {
    /// A task that copies into `storage`, and tells `notes` what it could not.
    pub(crate) fn start(
        desk: Desk,
        storage: Storage,
        paths: Paths,
        notes: UnboundedSender<String>,
    ) -> Self {
        let (wanted, inbox) = unbounded_channel();
        Self { wanted, task: tokio::spawn(copy(desk, storage, paths, inbox, notes)) }
    }

    /// Asks for a copy of the trial's record; never waits.
    pub(crate) fn want(&self, trial: u32) {
        let _ = self.wanted.send(trial);
    }

    /// Waits for the last copies, within reason.
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
                let note = format!("trial {index}: its record could not be copied: {error}");
                let _ = notes.send(note);
            }
        }
    }
}
