//! Local runs and jobs: reads records again when their files change.

mod jobs;

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::fs::DirEntry;
use std::io::{self, ErrorKind};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use stoker_api::experiment::Experiment;
use stoker_api::trial::Trial;
use stoker_engine::trial::TrialRecord;
use stoker_storage::Storage;
use stoker_ui::{Run, Standing, Store, Unreadable};

use self::jobs::Jobs;
use super::stored::StoredRuns;
use crate::failure::Failure;
use crate::run::record::{is_locked, read_json};
use crate::run_root::RunRoot;

/// Time between two checks. A recorded result is on the page within a second.
const INTERVAL: Duration = Duration::from_millis(300);

/// Files are checked again for this time after a change. Two changes within one tick of the file
/// system's clock give a directory the same time.
const SETTLED: Duration = Duration::from_secs(1);

/// Time of the last change, and the inode: a replaced file has another one.
type Stamp = (SystemTime, u64);

/// A record as it was last read.
#[derive(Debug, Default)]
struct Known {
    experiment_changed: Option<Stamp>,
    trials_changed: Option<Stamp>,
    experiment: Option<Experiment>,
    trials: BTreeMap<PathBuf, (Option<Stamp>, Arc<TrialRecord>)>,
    /// Why a trial cannot be read, if its record is damaged.
    damaged: Option<String>,
    is_running: bool,
    standing: Standing,
    storage: Option<Result<Arc<Storage>, String>>,
}

/// Starts a task that puts all runs and jobs of `root` into the store. Runs in `stored` have
/// another source.
pub(super) fn start(root: RunRoot, store: Arc<Store>, stored: StoredRuns) {
    // Files are read on a separate thread: a slow disk must not delay requests.
    tokio::task::spawn_blocking(move || {
        let mut known = BTreeMap::<PathBuf, Known>::new();
        let mut jobs = Jobs::default();
        // The store has no other owner once the page has ended.
        while !stored.is_over(&store) {
            refresh_all(&root, &store, &mut known, &mut jobs, &stored);
            std::thread::sleep(INTERVAL);
        }
    });
}

/// Puts changed records into the store, and removes deleted ones. If the directory of the records
/// or one of them cannot be read, the store keeps what it has, and the page shows why.
fn refresh_all(
    root: &RunRoot,
    store: &Store,
    known: &mut BTreeMap<PathBuf, Known>,
    jobs: &mut Jobs,
    stored: &StoredRuns,
) {
    let folder = root.records_dir();
    let error = match entries(&folder) {
        Ok(entries) => {
            let mut unreadable = stored.unreadable();
            refresh(root, store, known, &entries, stored, &mut unreadable);
            jobs.refresh(root, store, &entries, &mut unreadable);
            store.set_unreadable(unreadable);
            None
        }
        Err(error) => {
            let why = Failure::file("read", &folder, error);
            Some(format!("{why}; check its file system and permissions"))
        }
    };
    store.set_watch_error(error.clone());
    store.set_jobs_error(error);
}

/// Returns the entries of a directory. A missing directory has none.
fn entries(folder: &Path) -> io::Result<Vec<DirEntry>> {
    match std::fs::read_dir(folder) {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(Vec::new()),
        entries => entries?.collect(),
    }
}

/// Returns whether `record` has this file. Locks and other files beside the records have none.
fn has_file(record: &Path, name: &str) -> Result<bool, Failure> {
    match std::fs::metadata(record.join(name)) {
        Ok(_) => Ok(true),
        Err(error) => match error.kind() {
            ErrorKind::NotFound | ErrorKind::NotADirectory => Ok(false),
            _ => Err(Failure::file("read", record, error)),
        },
    }
}

fn refresh(
    root: &RunRoot,
    store: &Store,
    known: &mut BTreeMap<PathBuf, Known>,
    entries: &[DirEntry],
    stored: &StoredRuns,
    unreadable: &mut Unreadable,
) {
    let mut there = HashSet::new();
    for entry in entries {
        let path = entry.path().join("record");
        let id = entry.file_name().to_string_lossy().into_owned();
        match has_file(&path, "experiment.json") {
            Ok(true) => {}
            Ok(false) => continue,
            Err(error) => {
                unreadable.insert((String::new(), id), error.to_string());
                there.insert(path);
                continue;
            }
        }
        let record = known.entry(path.clone()).or_default();
        match record.refresh(root, &path) {
            Ok(run) => {
                if let Some(run) = run {
                    store.replace(run);
                }
                if let Some(why) = &record.damaged {
                    let why = format!("{why}; restore the file, or delete the run");
                    unreadable.insert((String::new(), id), why);
                }
            }
            Err(error) => drop(unreadable.insert((String::new(), id), error.to_string())),
        }
        there.insert(path);
    }
    known.retain(|path, _| there.contains(path));
    store.retain(|run| {
        let path = root.record_dir(&run.name, &run.uid);
        there.contains(&path) || stored.contains(&run.uid)
    });
}

impl Known {
    /// Reads the files that have changed. Returns the run if any has.
    fn refresh(&mut self, root: &RunRoot, path: &Path) -> Result<Option<Run>, Failure> {
        let (file, folder) = (path.join("experiment.json"), path.join("trials"));
        // Files are replaced, which changes the directory. Read the times before the files: a
        // change between the two is seen in the next round.
        let (experiment_changed, trials_changed) = (changed(&file), changed(&folder));
        let mut is_changed = false;
        if experiment_changed != self.experiment_changed || self.experiment.is_none() {
            self.experiment = Some(read_json(&file)?);
            self.experiment_changed = experiment_changed;
            is_changed = true;
        }
        let is_recent = trials_changed
            .and_then(|(time, _)| time.elapsed().ok())
            .is_none_or(|elapsed| elapsed < SETTLED);
        if trials_changed != self.trials_changed || is_recent {
            let trials = self.read_trials(&folder);
            if trials.is_err() {
                // The caller gets no run with this experiment: read it again in the next round.
                self.experiment_changed = None;
            }
            is_changed |= trials?;
            // A file may be restored in place, which does not change the directory.
            self.trials_changed = trials_changed.filter(|_| self.damaged.is_none());
        }
        let Some(experiment) = &self.experiment else { return Ok(None) };
        let metadata = &experiment.metadata;
        let of = |text: &Option<String>| text.clone().unwrap_or_default();
        let lock = format!("{}.{}.lock", of(&metadata.namespace), of(&metadata.name));
        let is_current = self.is_current(root);
        let is_running = is_current && is_locked(&root.records_dir().join(lock));
        let standing = if is_current { Standing::Current } else { Standing::Replaced };
        is_changed |= (is_running, standing) != (self.is_running, self.standing);
        (self.is_running, self.standing) = (is_running, standing);
        if !is_changed {
            return Ok(None);
        }
        let storage = self.storage.get_or_insert_with(|| {
            let endpoint = experiment.spec.checkpoint_storage.endpoint.as_deref();
            let storage = Storage::open(&root.root, endpoint).map(Storage::with_few_retries);
            storage.map(Arc::new).map_err(|error| error.to_string())
        });
        let trials = self.trials.values();
        let trials = trials.map(|(_, trial)| (trial.spec.index, trial.clone())).collect();
        let run = Run::new(experiment.clone(), trials, is_running, storage.clone());
        Ok(Some(run.with_standing(standing)))
    }

    /// Returns whether the record is the latest of its name: the lock is that of the name.
    fn is_current(&self, root: &RunRoot) -> bool {
        let Some(experiment) = &self.experiment else { return false };
        let metadata = &experiment.metadata;
        let of = |text: &Option<String>| text.clone().unwrap_or_default();
        let key = format!("{}.{}.current", of(&metadata.namespace), of(&metadata.name));
        let current = crate::run::setup::current_uid(&root.records_dir().join(key)).ok().flatten();
        current.is_some_and(|uid| uid == of(&metadata.uid))
    }

    /// Reads trials whose files have changed. Returns whether any has. A damaged record hides
    /// neither the run nor its other trials.
    fn read_trials(&mut self, folder: &Path) -> Result<bool, Failure> {
        let mut there = BTreeSet::new();
        let mut is_changed = false;
        self.damaged = None;
        // The directory is missing if a deletion was interrupted after it deleted the trials.
        let entries = entries(folder).map_err(|error| Failure::file("read", folder, error))?;
        for entry in entries {
            let path = entry.path();
            if path.extension().is_none_or(|extension| extension != "json") {
                continue;
            }
            let stamp = changed(&path);
            if self.trials.get(&path).is_none_or(|(read, _)| *read != stamp) {
                match read_json::<Trial>(&path) {
                    Ok(trial) => {
                        let status = trial.status.unwrap_or_default();
                        let record = Arc::new(TrialRecord { spec: trial.spec, status });
                        self.trials.insert(path.clone(), (stamp, record));
                        is_changed = true;
                    }
                    Err(error) => self.damaged = Some(error.to_string()),
                }
            }
            there.insert(path);
        }
        let num_before = self.trials.len();
        self.trials.retain(|path, _| there.contains(path));
        Ok(is_changed || self.trials.len() != num_before)
    }
}

fn changed(path: &Path) -> Option<Stamp> {
    let metadata = std::fs::metadata(path).ok()?;
    Some((metadata.modified().ok()?, metadata.ino()))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::run::record::RecordDir;

    fn experiment(phase: &str) -> Experiment {
        serde_json::from_value(json!({
            "apiVersion": "stoker.dev/v1alpha1", "kind": "Experiment",
            "metadata": {"name": "a", "namespace": "local", "uid": "0123456789"},
            "spec": {
                "entrypoint": {"command": ["true"]},
                "searcher": {"metric": "loss", "maxLength": {"batches": 4}, "single": {}},
            },
            "status": {"phase": phase},
        }))
        .unwrap()
    }

    #[test]
    fn unreadable_directory_keeps_its_runs() {
        let folder = tempfile::tempdir().unwrap();
        let root = RunRoot::resolve(folder.path().to_str(), None).unwrap();
        let record = RecordDir::new(root.record_dir("a", "0123456789"));
        record.create().unwrap();
        record.save_experiment(&experiment("Running")).unwrap();
        let (store, mut known) = (Store::default(), BTreeMap::new());
        let (mut jobs, stored) = (Jobs::default(), StoredRuns::default());
        let mut num_after_refresh = || {
            refresh_all(&root, &store, &mut known, &mut jobs, &stored);
            known.len()
        };
        assert_eq!(num_after_refresh(), 1);
        let records = root.records_dir();
        std::fs::rename(&records, folder.path().join("moved")).unwrap();
        // A file at this path fails like an outage of the file system.
        std::fs::write(&records, "").unwrap();
        assert_eq!(num_after_refresh(), 1);
        std::fs::remove_file(&records).unwrap();
        assert_eq!(num_after_refresh(), 0);
    }

    #[test]
    fn unreadable_records_stay_on_the_page() {
        let folder = tempfile::tempdir().unwrap();
        let root = RunRoot::resolve(folder.path().to_str(), None).unwrap();
        let path = root.record_dir("a", "0123456789");
        let record = RecordDir::new(path.clone());
        record.create().unwrap();
        record.save_experiment(&experiment("Running")).unwrap();
        std::fs::write(root.records_dir().join("local.a.lock"), "").unwrap();
        let (store, mut known) = (Store::default(), BTreeMap::new());
        let mut refresh = || {
            let mut unreadable = Unreadable::default();
            let entries = entries(&root.records_dir()).unwrap();
            let stored = StoredRuns::default();
            refresh(&root, &store, &mut known, &entries, &stored, &mut unreadable);
            (known.len(), unreadable.into_values().collect::<Vec<_>>())
        };
        assert_eq!(refresh(), (1, vec![]));
        std::fs::remove_dir_all(&path).unwrap();
        // A loop fails with another error than a missing file.
        std::os::unix::fs::symlink(&path, &path).unwrap();
        let (num_runs, unreadable) = refresh();
        assert_eq!(num_runs, 1);
        assert!(unreadable[0].starts_with("cannot read") && unreadable.len() == 1);
        std::fs::remove_file(&path).unwrap();
        assert_eq!(refresh(), (0, vec![]));
    }

    #[test]
    fn changed_files_are_read_again() {
        let folder = tempfile::tempdir().unwrap();
        let root = RunRoot::resolve(folder.path().to_str(), None).unwrap();
        let record = RecordDir::new(root.record_dir("a", "0123456789"));
        record.create().unwrap();
        record.save_experiment(&experiment("Running")).unwrap();
        let mut known = Known::default();
        let mut refresh = || known.refresh(&root, record.path()).unwrap();
        assert_eq!(refresh().unwrap().trials.len(), 0);
        assert!(refresh().is_none());
        let trial: Trial = serde_json::from_value(json!({
            "apiVersion": "stoker.dev/v1alpha1", "kind": "Trial", "metadata": {"name": "a-0"},
            "spec": {
                "experiment": "a", "index": 0, "requestId": "", "seed": 1, "hyperparameters": {},
                "unit": "batches", "units": 4,
            },
            "status": {"phase": "Running", "batches": 1},
        }))
        .unwrap();
        let mut trial = TrialRecord { spec: trial.spec, status: trial.status.unwrap() };
        record.save_trial(&trial).unwrap();
        assert_eq!(refresh().unwrap().trials[&0].status.batches, 1);
        trial.status.batches = 2;
        record.save_trial(&trial).unwrap();
        assert_eq!(refresh().unwrap().trials[&0].status.batches, 2);
        assert!(refresh().is_none());
        // A damaged record does not hide the run.
        std::fs::write(record.path().join("trials/0.json"), "{").unwrap();
        let mut known = Known::default();
        assert_eq!(known.refresh(&root, record.path()).unwrap().unwrap().trials.len(), 0);
        assert!(known.damaged.as_ref().is_some_and(|why| why.contains("trials/0.json")));
        record.save_trial(&trial).unwrap();
        assert_eq!(known.refresh(&root, record.path()).unwrap().unwrap().trials.len(), 1);
        assert_eq!(known.damaged, None);
    }
}
