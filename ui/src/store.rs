//! Experiments and jobs that the page shows, as last read from their records.
//!
//! A source (local records, or a watch of a cluster) replaces runs and jobs in the store. All
//! viewers share the store, so their number does not matter to the source.

use std::collections::BTreeMap;
use std::sync::{Arc, OnceLock, RwLock};

use stoker_api::experiment::{DesiredState, Experiment, Phase};
use stoker_engine::experiment::is_requested;
use stoker_engine::trial::TrialRecord;
use stoker_storage::{Storage, layout};
use tokio::sync::watch;

use crate::job::Job;
use crate::search::Search;

/// Relation of a run to its name and its record, which limits the actions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Standing {
    /// An experiment of a cluster, or the latest local run of its name.
    #[default]
    Current,
    /// A later run has the name, or a deletion was interrupted. It can be deleted.
    Replaced,
    /// The record is only in the storage.
    Stored,
}

/// An experiment with its trials.
#[derive(Debug)]
pub struct Run {
    /// Namespace of the experiment.
    pub namespace: String,
    /// Name of the experiment.
    pub name: String,
    /// UID of the experiment.
    pub uid: String,
    /// The experiment.
    pub experiment: Arc<Experiment>,
    /// Trials by index.
    pub trials: Arc<BTreeMap<u32, Arc<TrialRecord>>>,
    /// Whether a runner or the operator works on the experiment.
    pub is_running: bool,
    /// Which actions are possible.
    pub standing: Standing,
    /// Storage with the files, or the reason why it cannot be read.
    pub storage: Result<Arc<Storage>, String>,
    /// Why this state may be out of date; `None` while its source works.
    pub(crate) watch_error: Option<String>,
    /// Number of the change that this state contains; assigned by the store.
    pub version: u64,
    /// Search in the record; derived when it is first needed.
    search: Arc<OnceLock<Search>>,
}

impl Run {
    /// Creates a run from its record.
    pub fn new(
        experiment: Experiment,
        trials: BTreeMap<u32, Arc<TrialRecord>>,
        is_running: bool,
        storage: Result<Arc<Storage>, String>,
    ) -> Self {
        let metadata = experiment.metadata.clone();
        Self {
            namespace: metadata.namespace.unwrap_or_default(),
            name: metadata.name.unwrap_or_default(),
            uid: metadata.uid.unwrap_or_default(),
            experiment: Arc::new(experiment),
            trials: Arc::new(trials),
            is_running,
            standing: Standing::Current,
            storage,
            watch_error: None,
            version: 0,
            search: Arc::default(),
        }
    }

    /// Returns the same run with another standing.
    #[must_use]
    pub fn with_standing(self, standing: Standing) -> Self {
        Self { standing, ..self }
    }

    /// Returns the same run with another storage, such as that of one viewer.
    pub(crate) fn with_storage(&self, storage: Result<Arc<Storage>, String>) -> Self {
        Self {
            namespace: self.namespace.clone(),
            name: self.name.clone(),
            uid: self.uid.clone(),
            experiment: self.experiment.clone(),
            trials: self.trials.clone(),
            is_running: self.is_running,
            standing: self.standing,
            storage,
            watch_error: self.watch_error.clone(),
            version: self.version,
            search: self.search.clone(),
        }
    }

    /// Returns the same run with the reason why it may be out of date.
    pub(crate) fn with_watch_error(&self, (change, why): Reason) -> Self {
        let version = self.version.max(change);
        Self { watch_error: Some(why), version, ..self.with_storage(self.storage.clone()) }
    }

    /// Returns the name and the first 8 characters of the UID.
    pub fn id(&self) -> String {
        format!("{}-{}", self.name, self.uid.get(..8).unwrap_or(&self.uid))
    }

    /// Returns the path of the experiment's page.
    pub(crate) fn base(&self) -> String {
        format!("/experiments/{}/{}", self.namespace, self.id())
    }

    /// Returns the path of a trial's page.
    pub(crate) fn trial_base(&self, index: u32) -> String {
        format!("{}/trials/{index}", self.base())
    }

    /// Returns the path of a trial's files in the storage.
    pub(crate) fn trial_path(&self, index: u32) -> String {
        layout::trial_path(&self.namespace, &self.name, &self.uid, index)
    }

    /// Returns the URL or path of a checkpoint, or its path below the root if that is unknown.
    pub(crate) fn checkpoint_address(&self, index: u32, name: &str) -> String {
        let path = layout::checkpoint_path(&self.trial_path(index), name);
        match &self.storage {
            Ok(storage) => format!("{}/{path}", storage.url().trim_end_matches('/')),
            Err(_) => path,
        }
    }

    /// Returns the phase.
    pub(crate) fn phase(&self) -> Phase {
        self.experiment.status.as_ref().map(|status| status.phase).unwrap_or_default()
    }

    /// Returns whether trials may run now.
    pub(crate) fn is_live(&self) -> bool {
        self.is_running && !self.phase().is_terminal()
    }

    /// Returns whether the record may change without a further request: the experiment has not
    /// ended, or a request to continue it has not taken effect. The runner of a local run may start
    /// at any time.
    pub(crate) fn may_change(&self) -> bool {
        if self.standing == Standing::Replaced {
            return false;
        }
        let spec = &self.experiment.spec;
        let log = self.experiment.status.as_ref().map_or(&[][..], |status| &status.log);
        let is_over = matches!(spec.state, DesiredState::Cancelled | DesiredState::Killed);
        !self.phase().is_terminal() || (!is_over && is_requested(spec.reopen, log))
    }

    /// Returns what the record says about the search.
    pub(crate) fn search(&self) -> &Search {
        self.search.get_or_init(|| {
            Search::new(&self.experiment, self.trials.values().map(|trial| &**trial))
        })
    }
}

/// Key of a run or a job: namespace and ID.
type Key = (String, String);

/// Records that cannot be read, each with the reason, by namespace and name. Records of a directory
/// have no namespace.
pub type Unreadable = BTreeMap<(String, String), String>;

/// Number of the latest change. Stores with the same counter never use a number twice.
#[derive(Clone, Debug)]
pub struct Changes(Arc<watch::Sender<u64>>);

impl Default for Changes {
    fn default() -> Self {
        Self(Arc::new(watch::Sender::new(0)))
    }
}

impl Changes {
    /// Returns a receiver of the number.
    pub(crate) fn subscribe(&self) -> watch::Receiver<u64> {
        self.0.subscribe()
    }
}

/// Why records cannot be read, with the number of the change that set it.
pub(crate) type Reason = (u64, String);

/// Experiments and jobs by namespace and ID. Pages read them through [`Visible`](crate::Visible).
#[derive(Debug, Default)]
pub struct Store {
    runs: RwLock<BTreeMap<Key, Arc<Run>>>,
    jobs: RwLock<BTreeMap<Key, Arc<Job>>>,
    unreadable: RwLock<Unreadable>,
    /// Why experiments and trials may be missing or out of date.
    watch_error: RwLock<Option<Reason>>,
    /// Why jobs cannot be read.
    jobs_error: RwLock<Option<Reason>>,
    changes: Changes,
}

impl Store {
    /// Creates a store that numbers its changes together with others.
    pub fn with_changes(changes: Changes) -> Self {
        Self { changes, ..Self::default() }
    }

    /// Adds a run, or replaces the one with the same namespace and ID.
    pub fn replace(&self, mut run: Run) {
        let key = (run.namespace.clone(), run.id());
        self.changes.0.send_modify(|version| {
            *version += 1;
            run.version = *version;
            write(&self.runs).insert(key, Arc::new(run));
        });
    }

    /// Removes all runs for which `is_there` returns `false`.
    pub fn retain(&self, is_there: impl Fn(&Run) -> bool) {
        self.changes.0.send_if_modified(|version| {
            let mut runs = write(&self.runs);
            let before = runs.len();
            runs.retain(|_, run| is_there(run));
            let is_changed = runs.len() != before;
            *version += u64::from(is_changed);
            is_changed
        });
    }

    /// Adds a job, or replaces the one with the same namespace and ID.
    pub fn replace_job(&self, mut job: Job) {
        let key = (job.namespace.clone(), job.id());
        self.changes.0.send_modify(|version| {
            *version += 1;
            job.version = *version;
            write(&self.jobs).insert(key, Arc::new(job));
        });
    }

    /// Removes all jobs for which `is_there` returns `false`.
    pub fn retain_jobs(&self, is_there: impl Fn(&Job) -> bool) {
        self.changes.0.send_if_modified(|version| {
            let mut jobs = write(&self.jobs);
            let before = jobs.len();
            jobs.retain(|_, job| is_there(job));
            let is_changed = jobs.len() != before;
            *version += u64::from(is_changed);
            is_changed
        });
    }

    /// Replaces the list of records that cannot be read.
    pub fn set_unreadable(&self, unreadable: Unreadable) {
        self.changes.0.send_if_modified(|version| {
            let mut before = write(&self.unreadable);
            let is_changed = *before != unreadable;
            *before = unreadable;
            *version += u64::from(is_changed);
            is_changed
        });
    }

    /// Replaces the reason why experiments and trials may be missing or out of date.
    pub fn set_watch_error(&self, error: Option<String>) {
        self.set_error(&self.watch_error, error);
    }

    /// Replaces the reason why jobs cannot be read.
    pub fn set_jobs_error(&self, error: Option<String>) {
        self.set_error(&self.jobs_error, error);
    }

    fn set_error(&self, of: &RwLock<Option<Reason>>, error: Option<String>) {
        self.changes.0.send_if_modified(|version| {
            let mut before = write(of);
            let is_changed = before.as_ref().map(|(_, why)| why) != error.as_ref();
            if is_changed {
                *version += 1;
                *before = error.map(|why| (*version, why));
            }
            is_changed
        });
    }

    /// Removes everything.
    pub fn clear(&self) {
        self.retain(|_| false);
        self.retain_jobs(|_| false);
        self.set_unreadable(Unreadable::new());
        self.set_watch_error(None);
        self.set_jobs_error(None);
    }

    pub(crate) fn watch_error(&self) -> Option<Reason> {
        read(&self.watch_error).clone()
    }

    pub(crate) fn jobs_error(&self) -> Option<Reason> {
        read(&self.jobs_error).clone()
    }

    pub(crate) fn unreadable(&self) -> Unreadable {
        read(&self.unreadable).clone()
    }

    /// Returns the runs of these namespaces.
    pub(crate) fn runs(&self, is_shown: impl Fn(&str) -> bool) -> Vec<Arc<Run>> {
        read(&self.runs).values().filter(|run| is_shown(&run.namespace)).cloned().collect()
    }

    /// Returns the run with this ID, or the newest with this name.
    pub(crate) fn run(&self, namespace: &str, name: &str) -> Option<Arc<Run>> {
        let runs = read(&self.runs);
        if let Some(run) = runs.get(&(namespace.to_owned(), name.to_owned())) {
            return Some(run.clone());
        }
        let named = runs.values().filter(|run| run.namespace == namespace && run.name == name);
        named.max_by_key(|run| (run.is_running, created(run))).cloned()
    }

    /// Returns the jobs of these namespaces.
    pub(crate) fn jobs(&self, is_shown: impl Fn(&str) -> bool) -> Vec<Arc<Job>> {
        read(&self.jobs).values().filter(|job| is_shown(&job.namespace)).cloned().collect()
    }

    /// Returns the job with this ID, or the newest with this name.
    pub(crate) fn job(&self, namespace: &str, name: &str) -> Option<Arc<Job>> {
        let jobs = read(&self.jobs);
        if let Some(job) = jobs.get(&(namespace.to_owned(), name.to_owned())) {
            return Some(job.clone());
        }
        let named = jobs.values().filter(|job| job.namespace == namespace && job.name == name);
        named.max_by_key(|job| (job.is_running, job.created)).cloned()
    }

    pub(crate) fn changes(&self) -> Changes {
        self.changes.clone()
    }
}

/// Returns the time of creation in seconds since 1970.
pub(crate) fn created(run: &Run) -> i64 {
    let starts = run.trials.values().take(1).filter_map(|trial| trial.status.attempts.first());
    let first = starts.filter_map(|attempt| attempt.started_at).map(|at| at.0).next();
    let created = run.experiment.metadata.creation_timestamp.as_ref();
    created.and_then(crate::text::seconds_of).or(first).unwrap_or_default()
}

fn read<T>(lock: &RwLock<T>) -> std::sync::RwLockReadGuard<'_, T> {
    lock.read().unwrap_or_else(std::sync::PoisonError::into_inner)
}

fn write<T>(lock: &RwLock<T>) -> std::sync::RwLockWriteGuard<'_, T> {
    lock.write().unwrap_or_else(std::sync::PoisonError::into_inner)
}
