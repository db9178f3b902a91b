//! Background task that copies the records of the experiment and its trials next to their files in
//! the storage.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use futures::{StreamExt as _, stream};
use stoker_engine::trial::TrialRecord;
use stoker_storage::Storage;
use stoker_storage::hash::sha256_hex;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::task::JoinHandle;
use tokio::time::timeout;

use super::outcome::{self, RunPaths};
use super::record::trial_object;
use super::report_server::SharedState;

/// Maximum number of records that are written concurrently.
const WRITES_MAX: usize = 16;
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
    let mut copies = Copies { shared, storage, paths, notes, copied: BTreeMap::new() };
    while let Some(first_request) = inbox.recv().await {
        let mut requests = BTreeSet::from([first_request]);
        while let Ok(more) = inbox.try_recv() {
            requests.insert(more);
        }
        copies.update(requests).await;
    }
    // The search has closed trials that were not running, and the experiment has ended.
    let all = copies.shared.state().trials.keys().copied().collect();
    copies.update(all).await;
}

/// Records in the storage.
struct Copies {
    shared: SharedState,
    storage: Storage,
    paths: RunPaths,
    notes: UnboundedSender<String>,
    /// Hash of the copied record, by trial.
    copied: BTreeMap<u32, String>,
}

impl Copies {
    /// Copies the records of these trials that have changed, then that of the experiment.
    async fn update(&mut self, trials: BTreeSet<u32>) {
        let (storage, paths) = (&self.storage, &self.paths);
        let changed = trials.into_iter().filter_map(|index| {
            let trial = self.shared.state().trials.get(&index).cloned()?;
            let hash = sha256_hex(&serde_json::to_vec(&trial_object(&trial)).ok()?);
            (self.copied.get(&index) != Some(&hash)).then_some((index, trial, hash))
        });
        let changed: Vec<(u32, TrialRecord, String)> = changed.collect();
        let copy = |(index, trial, hash)| async move {
            (index, hash, outcome::copy_record(storage, paths, &trial).await)
        };
        let copies = stream::iter(changed).map(copy).buffer_unordered(WRITES_MAX);
        for (index, hash, written) in copies.collect::<Vec<_>>().await {
            match written {
                Ok(()) => drop(self.copied.insert(index, hash)),
                Err(error) => {
                    let note = "cannot copy the record to the storage";
                    let _ = self.notes.send(format!("trial {index}: {note}: {error}"));
                }
            }
        }
        let experiment = self.shared.state().experiment.clone();
        if let Err(error) = outcome::copy_experiment(storage, paths, &experiment).await {
            let note = "cannot copy the experiment's record to the storage";
            let _ = self.notes.send(format!("{note}: {error}"));
        }
    }
}
