//! Experiments whose record is only in the storage: reads their records again at intervals.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use stoker_api::experiment::Experiment;
use stoker_storage::Storage;
use stoker_ui::{Run, Standing, Store, Unreadable};

use crate::failure::Failure;
use crate::run_root::RunRoot;
use crate::show::local_endpoint;
use crate::stored;

/// Time between two reads. Each one sends a request per experiment, and one per trial of
/// experiments that have not ended.
const INTERVAL: Duration = Duration::from_secs(15);
/// Number of reads after which an experiment that has ended is read again: it may be continued.
const ENDED_ROUNDS: u64 = 20;

/// Runs in the store whose record is only in the storage. Clones share the same state.
#[derive(Clone, Debug, Default)]
pub(super) struct StoredRuns(Arc<Mutex<Found>>);

#[derive(Debug, Default)]
struct Found {
    uids: BTreeSet<String>,
    unreadable: BTreeMap<String, String>,
    /// Whether a task holds the store.
    has_task: bool,
}

impl StoredRuns {
    fn lock(&self) -> std::sync::MutexGuard<'_, Found> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn contains(&self, uid: &str) -> bool {
        self.lock().uids.contains(uid)
    }

    /// Returns the records that cannot be read, with the reason.
    pub(super) fn unreadable(&self) -> Unreadable {
        let unreadable = self.lock().unreadable.clone().into_iter();
        unreadable.map(|(path, why)| ((String::new(), path), why)).collect()
    }

    /// Returns whether only the sources hold the store: the page has ended.
    pub(super) fn is_over(&self, store: &Arc<Store>) -> bool {
        Arc::strong_count(store) <= 1 + usize::from(self.lock().has_task)
    }
}

/// Starts a task that puts all runs of the storage into the store, except local ones.
pub(super) fn start(root: RunRoot, store: Arc<Store>) -> StoredRuns {
    let found = StoredRuns::default();
    found.lock().has_task = true;
    let runs = found.clone();
    let endpoint = local_endpoint(&root);
    tokio::spawn(async move {
        for round in 0.. {
            let read = refresh(&root, &store, &runs, endpoint.as_deref(), round).await;
            if let Err(error) = read {
                runs.lock().unreadable = BTreeMap::from([(root.root.clone(), error.to_string())]);
            }
            tokio::time::sleep(INTERVAL).await;
        }
    });
    found
}

async fn refresh(
    root: &RunRoot,
    store: &Store,
    runs: &StoredRuns,
    endpoint: Option<&str>,
    round: u64,
) -> Result<(), Failure> {
    let Some(storage) = stored::open(&root.root, endpoint)? else { return Ok(()) };
    let stored = stored::experiments(&storage).await?;
    let mut unreadable: BTreeMap<String, String> = stored
        .unreadable
        .into_iter()
        .filter(|(folder, _)| !is_local_folder(root, folder))
        .collect();
    let storage = Arc::new(storage);
    let mut uids = BTreeSet::new();
    for experiment in stored.experiments {
        let uid = experiment.metadata.uid.clone().unwrap_or_default();
        if stored::is_local(root, &experiment) {
            continue;
        }
        let is_due = round.is_multiple_of(ENDED_ROUNDS) || !runs.contains(&uid);
        let is_over = is_cleaned_up(&experiment);
        uids.insert(uid.clone());
        if is_over && !is_due {
            continue;
        }
        let is_running = !is_over && !stored::is_interrupted(&experiment);
        unreadable.extend(put(store, &storage, experiment, is_running).await?);
        runs.lock().uids.insert(uid);
    }
    let mut found = runs.lock();
    found.uids = uids;
    found.unreadable = unreadable;
    Ok(())
}

/// Returns whether the record does not change any more, unless the experiment is continued.
fn is_cleaned_up(experiment: &Experiment) -> bool {
    experiment.status.as_ref().is_some_and(|status| status.cleaned_up)
}

/// Returns whether a directory `NAMESPACE/EXPERIMENT-UID8` belongs to a local run.
fn is_local_folder(root: &RunRoot, folder: &str) -> bool {
    let id = folder.rsplit('/').next().unwrap_or_default();
    root.records_dir().join(id).join("record").exists()
}

/// Puts a run into the store. Returns the records of trials that cannot be read.
async fn put(
    store: &Store,
    storage: &Arc<Storage>,
    experiment: Experiment,
    is_running: bool,
) -> Result<BTreeMap<String, String>, Failure> {
    let (trials, unreadable) = stored::trials(storage, &experiment).await?;
    let trials = trials.into_iter().map(|(index, trial)| (index, Arc::new(trial))).collect();
    let run = Run::new(experiment, trials, is_running, Ok(storage.clone()));
    store.replace(run.with_standing(Standing::Stored));
    Ok(unreadable)
}
