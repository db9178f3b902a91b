//! Background task that copies the records of the experiment and its trials next to their files in
//! the storage.

use std::collections::BTreeSet;
use std::time::Duration;

use futures::{StreamExt as _, stream};
use stoker_engine::trial::TrialRecord;
use stoker_storage::Storage;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::task::JoinHandle;
use tokio::time::{Instant, timeout, timeout_at};

use super::outcome::{self, RunPaths};
use super::report_server::SharedState;

/// Maximum number of records that are written concurrently.
const WRITES_MAX: usize = 16;
/// Maximum time between a copy of a trial and the next copy of the experiment. Many trials may end
/// in this time.
const EXPERIMENT_INTERVAL: Duration = Duration::from_secs(1);
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
    let copies = Copies { shared, storage, paths, notes };
    // Time of the next copy of the experiment, after a copy of a trial.
    let mut due: Option<Instant> = None;
    loop {
        let received = match due {
            None => Ok(inbox.recv().await),
            Some(due) => timeout_at(due, inbox.recv()).await,
        };
        match received {
            Ok(Some(first_request)) => {
                let mut requests = BTreeSet::from([first_request]);
                while let Ok(more) = inbox.try_recv() {
                    requests.insert(more);
                }
                copies.copy_trials(requests).await;
                due.get_or_insert_with(|| Instant::now() + EXPERIMENT_INTERVAL);
            }
            Ok(None) => break,
            Err(_) => {
                due = None;
                copies.copy_experiment().await;
            }
        }
    }
    // The search has closed trials that were not running, and the experiment has ended.
    let all = copies.shared.state().uncopied();
    copies.copy_trials(all).await;
    copies.copy_experiment().await;
}

/// Records in the storage.
struct Copies {
    shared: SharedState,
    storage: Storage,
    paths: RunPaths,
    notes: UnboundedSender<String>,
}

impl Copies {
    /// Copies the records of these trials, unless they have not changed since the last copy.
    async fn copy_trials(&self, trials: BTreeSet<u32>) {
        let (storage, paths) = (&self.storage, &self.paths);
        let changed: Vec<TrialRecord> = {
            let mut state = self.shared.state();
            trials.into_iter().filter_map(|index| state.take_uncopied(index)).collect()
        };
        let copy = |trial: TrialRecord| async move {
            (trial.spec.index, outcome::copy_record(storage, paths, &trial).await)
        };
        let copies = stream::iter(changed).map(copy).buffer_unordered(WRITES_MAX);
        for (index, written) in copies.collect::<Vec<_>>().await {
            if let Err(error) = written {
                self.shared.state().keep_uncopied(index);
                let note = "cannot copy the record to the storage";
                let _ = self.notes.send(format!("trial {index}: {note}: {error}"));
            }
        }
    }

    async fn copy_experiment(&self) {
        let experiment = self.shared.state().experiment.clone();
        let copied = outcome::copy_experiment(&self.storage, &self.paths, &experiment).await;
        if let Err(error) = copied {
            let note = "cannot copy the experiment's record to the storage";
            let _ = self.notes.send(format!("{note}: {error}"));
        }
    }
}
