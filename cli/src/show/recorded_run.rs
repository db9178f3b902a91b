//! Runs with a record on this machine or in the storage.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::jiff;
use stoker_api::experiment::Experiment;
use stoker_api::names::{LABEL_EXPERIMENT, LABEL_TRIAL};
use stoker_api::time::Timestamp;
use stoker_api::trial::Trial;
use stoker_engine::trial::TrialRecord;
use stoker_storage::{Storage, layout};

use crate::cluster::text;
use crate::commands::names::TrialRef;
use crate::explain::Explained;
use crate::failure::Failure;
use crate::metrics::{MetricsFiles, TrialFiles};
use crate::print;
use crate::run::record::{DELETED, RecordDir, is_locked, trial_object};
use crate::run::{MetricRanking, RunPaths, setup};
use crate::run_root::{self, RunRoot};
use crate::stored::{self, StoredExperiments};

/// A local run, or an experiment whose record is in the storage only.
#[derive(Debug)]
pub(crate) struct RecordedRun {
    pub(crate) experiment: Experiment,
    /// Trials by index. Those of a record in the storage are read when the run is opened.
    pub(crate) trials: BTreeMap<u32, TrialRecord>,
    pub(crate) paths: RunPaths,
    pub(crate) runner: Runner,
    /// Whether this is the latest run of its name in its namespace.
    pub(crate) is_current: bool,
    /// Whether runs in other namespaces have the same name.
    has_shared_name: bool,
}

/// Runner of an experiment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Runner {
    /// A runner on this machine holds the experiment's lock.
    Running,
    /// No runner on this machine holds the lock.
    Stopped,
    /// A cluster or another machine runs the experiment. The record shows the phase, which may be
    /// older.
    Elsewhere,
}

impl RecordedRun {
    /// Opens the run with this name or ID. Of several runs with the name, the latest is used.
    pub(crate) async fn open(root: Option<&str>, name: &str) -> Result<Self, Failure> {
        let run_root = RunRoot::resolve(root, None)?;
        Self::find(&run_root, name, true).await?.ok_or_else(|| not_found(&run_root, name))
    }

    /// Same as [`open`](Self::open), but without the trials of a local run: their records may be
    /// damaged.
    pub(super) async fn open_to_delete(root: Option<&str>, name: &str) -> Result<Self, Failure> {
        let run_root = RunRoot::resolve(root, None)?;
        Self::find(&run_root, name, false).await?.ok_or_else(|| not_found(&run_root, name))
    }

    async fn find(
        run_root: &RunRoot,
        name: &str,
        with_trials: bool,
    ) -> Result<Option<Self>, Failure> {
        // Local records are complete without the storage, which may be unavailable.
        let mut local = read_local_runs(run_root, with_trials)?;
        mark_shared_names(&mut local);
        let (mut matches, others): (Vec<Self>, Vec<Self>) =
            local.into_iter().partition(|run| run.is_named(name));
        if matches.is_empty() {
            let stored = read_stored_runs(run_root, &others).await?;
            matches = others;
            matches.extend(stored);
            mark_shared_names(&mut matches);
            matches.retain(|run| run.is_named(name));
        }
        refuse_shared_name(&matches, name)?;
        // Of several runs with the same name, use the latest. A run ID is unique.
        let Some(mut run) = matches.into_iter().max_by_key(Self::order) else { return Ok(None) };
        run.read_stored_trials().await?;
        Ok(Some(run))
    }

    /// Opens the local run with this name and UID, with its `trials` if they are needed.
    pub(crate) fn open_local(root: &RunRoot, id: [&str; 2], trials: bool) -> Result<Self, Failure> {
        let [name, uid] = id;
        read(root, &root.record_dir(name, uid), trials)?.ok_or_else(|| {
            let id = run_root::run_id(name, uid);
            Failure::Input(format!("no local run {id} in {}; load the page again", root.root))
        })
    }

    /// Opens the run of an experiment, or of one of its trials.
    pub(crate) async fn open_with_trial(
        root: Option<&str>,
        name: &str,
    ) -> Result<(Self, Option<u32>), Failure> {
        let run_root = RunRoot::resolve(root, None)?;
        match (Self::find(&run_root, name, true).await, TrialRef::split(name)) {
            (Ok(Some(run)), _) => Ok((run, None)),
            (Err(error @ Failure::Input(_)), _) | (Err(error), None) => Err(error),
            // The record of the experiment may be local although the storage is unavailable.
            (Ok(None) | Err(_), Some(trial)) => {
                let run = Self::open(root, &trial.experiment).await?;
                run.trial(trial.index)?;
                Ok((run, Some(trial.index)))
            }
            (Ok(None), None) => Err(not_found(&run_root, name)),
        }
    }

    async fn read_stored_trials(&mut self) -> Result<(), Failure> {
        if self.runner != Runner::Elsewhere {
            return Ok(());
        }
        let Some(storage) = stored::open(&self.paths.root, None)? else { return Ok(()) };
        let (trials, unreadable) = stored::trials(&storage, &self.experiment).await?;
        for (path, why) in unreadable {
            print::err(format!("stoker: skipped {path}: {why}"));
        }
        self.trials = trials;
        Ok(())
    }

    /// Returns a key by which the latest run of a name is the greatest.
    fn order(&self) -> (bool, Option<Timestamp>) {
        (self.is_current, text::created(&self.experiment.metadata))
    }

    fn is_named(&self, name: &str) -> bool {
        self.paths.name == name || self.id() == name
    }

    /// Returns the run ID.
    pub(crate) fn id(&self) -> String {
        run_root::run_id(&self.paths.name, &self.paths.uid)
    }

    /// Returns the name in commands: the experiment's, or the run ID if it names another run too.
    pub(crate) fn name(&self) -> String {
        match self.is_current && !self.has_shared_name {
            true => self.paths.name.clone(),
            false => self.id(),
        }
    }

    /// Returns a trial as the object that a cluster would hold. It is as old as its first recorded
    /// attempt.
    pub(crate) fn object(&self, trial: &TrialRecord) -> Trial {
        let mut object = trial_object(trial);
        let name = object.metadata.name.clone().unwrap_or_default();
        object.metadata.namespace = Some(self.paths.namespace.clone());
        // A record has no creation time.
        let first = trial.status.attempts.iter().filter_map(|attempt| attempt.started_at).min();
        object.metadata.creation_timestamp =
            first.and_then(|first| jiff::Timestamp::from_second(first.0).ok()).map(Time);
        object.metadata.labels = Some(BTreeMap::from([
            (LABEL_EXPERIMENT.to_owned(), self.paths.name.clone()),
            (LABEL_TRIAL.to_owned(), name),
        ]));
        object
    }

    /// Returns whether a cluster runs the experiment: only the operator records the storage.
    pub(crate) fn is_of_cluster(&self) -> bool {
        self.experiment.status.as_ref().is_some_and(|status| status.storage.is_some())
    }

    /// Returns the directory of the run's files below the root.
    pub(crate) fn path(&self) -> String {
        layout::experiment_path(&self.paths.namespace, &self.paths.name, &self.paths.uid)
    }

    /// Returns the searched metric.
    pub(crate) fn ranking(&self) -> MetricRanking<'_> {
        let searcher = &self.experiment.spec.searcher;
        MetricRanking { metric: &searcher.metric, smaller_is_better: searcher.smaller_is_better }
    }

    /// Returns the explanation of the search.
    pub(crate) fn explained(&self) -> Explained {
        Explained::new(&self.experiment, self.trials.values()).with_runner(!self.lacks_runner())
    }

    /// Opens the storage of the run's files.
    pub(crate) fn storage(&self) -> Result<Storage, Failure> {
        if self.runner == Runner::Elsewhere
            && let Some(storage) = stored::open(&self.paths.root, None)?
        {
            return Ok(storage);
        }
        let endpoint = self.experiment.spec.checkpoint_storage.endpoint.as_deref();
        Ok(Storage::open(&self.paths.root, endpoint)?)
    }

    /// Returns the metrics files of all trials, or of one trial.
    pub(crate) fn metrics_files(&self, index: Option<u32>) -> Result<MetricsFiles, Failure> {
        let name = match index {
            Some(index) => format!("trial {} of {}", self.trial(index)?.spec.index, self.id()),
            None => format!("experiment {}", self.id()),
        };
        let trials = self.trials.iter().filter(|(number, _)| index.is_none_or(|of| of == **number));
        let files = |(number, trial): (&u32, &TrialRecord)| {
            TrialFiles::new(*number, self.paths.trial(*number), &trial.status.attempts)
        };
        Ok(MetricsFiles {
            name,
            storage: self.storage()?,
            trials: trials.map(files).collect(),
            searcher: self.experiment.spec.searcher.clone(),
        })
    }

    /// Returns the trial with this index.
    pub(crate) fn trial(&self, index: u32) -> Result<&TrialRecord, Failure> {
        self.trials.get(&index).ok_or_else(|| {
            let (name, mut indices) = (self.name(), self.trials.keys());
            let (first, last) = (indices.next().unwrap_or(&0), indices.next_back());
            let (num, last) = (self.trials.len(), last.unwrap_or(first));
            let trials =
                text::numbered(num, "trial", format!("{name}-{first}"), format!("{name}-{last}"));
            Failure::Input(format!("trial `{name}-{index}` not found: the experiment has {trials}"))
        })
    }
}

/// Reads local runs, and experiments whose record is in the storage only.
pub(super) async fn read_runs(run_root: &RunRoot) -> Result<Vec<RecordedRun>, Failure> {
    let mut runs = read_local_runs(run_root, true)?;
    match read_stored_runs(run_root, &runs).await {
        Ok(stored) => runs.extend(stored),
        Err(error) if runs.is_empty() => return Err(error),
        Err(error) => print::err(format!("stoker: only local runs are listed: {error}")),
    }
    // The latest run of a name is its last one.
    runs.sort_by_cached_key(|run| (run.paths.name.clone(), run.order(), run.id()));
    mark_shared_names(&mut runs);
    Ok(runs)
}

/// Marks runs whose name runs in other namespaces have too.
fn mark_shared_names(runs: &mut [RecordedRun]) {
    let mut namespaces: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for run in runs.iter() {
        let of_name = namespaces.entry(run.paths.name.clone()).or_default();
        of_name.insert(run.paths.namespace.clone());
    }
    for run in runs {
        run.has_shared_name = namespaces.get(&run.paths.name).is_some_and(|all| all.len() > 1);
    }
}

/// Fails if runs in several namespaces have this name. The error lists the latest run in each.
fn refuse_shared_name(runs: &[RecordedRun], name: &str) -> Result<(), Failure> {
    let mut latest: BTreeMap<&str, &RecordedRun> = BTreeMap::new();
    for run in runs.iter().filter(|run| run.paths.name == name) {
        let of_namespace = latest.entry(&run.paths.namespace).or_insert(run);
        if run.order() > of_namespace.order() {
            *of_namespace = run;
        }
    }
    if latest.len() < 2 {
        return Ok(());
    }
    let ids = latest.iter().map(|(namespace, run)| format!("{} in {namespace}", run.id()));
    Err(Failure::Input(format!(
        "runs in several namespaces have the name `{name}`: {}; use a run ID",
        ids.collect::<Vec<_>>().join(", ")
    )))
}

fn not_found(run_root: &RunRoot, name: &str) -> Failure {
    Failure::Input(format!(
        "no run of `{name}` in {}; `stoker experiment list --root URL` lists the runs",
        run_root.searched()
    ))
}

/// Reads experiments whose record is in the storage only: not those of `local`.
async fn read_stored_runs(
    run_root: &RunRoot,
    local: &[RecordedRun],
) -> Result<Vec<RecordedRun>, Failure> {
    let local_paths: BTreeSet<String> = local.iter().map(RecordedRun::path).collect();
    let stored = match stored::open(&run_root.root, endpoint(local))? {
        None => StoredExperiments::default(),
        Some(storage) => stored::experiments(&storage).await?,
    };
    for (folder, why) in stored.unreadable {
        if !local_paths.contains(&folder) {
            print::err(format!("stoker: skipped {folder}: {why}"));
        }
    }
    let elsewhere = stored.experiments.into_iter().map(|experiment| RecordedRun {
        paths: paths(run_root, &experiment),
        experiment,
        trials: BTreeMap::new(),
        runner: Runner::Elsewhere,
        is_current: false,
        has_shared_name: false,
    });
    let mut elsewhere: Vec<RecordedRun> =
        elsewhere.filter(|run| !local_paths.contains(&run.path())).collect();
    mark_current(&mut elsewhere, local);
    Ok(elsewhere)
}

/// Marks the latest run of each name that has no local run.
fn mark_current(stored: &mut [RecordedRun], local: &[RecordedRun]) {
    let name = |run: &RecordedRun| (run.paths.namespace.clone(), run.paths.name.clone());
    let local: BTreeSet<(String, String)> = local.iter().map(name).collect();
    stored.sort_by_key(|run| text::created(&run.experiment.metadata));
    let mut seen = BTreeSet::new();
    for run in stored.iter_mut().rev() {
        run.is_current = !local.contains(&name(run)) && seen.insert(name(run));
    }
}

fn endpoint(runs: &[RecordedRun]) -> Option<&str> {
    let mut specs = runs.iter().map(|run| &run.experiment.spec.checkpoint_storage);
    specs.find_map(|spec| spec.endpoint.as_deref())
}

/// Returns the S3 endpoint of local runs, if they have one.
pub(crate) fn local_endpoint(run_root: &RunRoot) -> Option<String> {
    let runs = read_local_runs(run_root, true).ok()?;
    endpoint(&runs).map(str::to_owned)
}

fn read_local_runs(run_root: &RunRoot, with_trials: bool) -> Result<Vec<RecordedRun>, Failure> {
    let local = run_root.records_dir();
    let mut runs = Vec::new();
    let entries = match std::fs::read_dir(&local) {
        Ok(entries) => entries,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(runs),
        Err(error) => return Err(Failure::file("read", &local, error)),
    };
    for entry in entries {
        let path = entry.map_err(|error| Failure::file("read", &local, error))?.path();
        match read(run_root, &path.join("record"), with_trials) {
            Ok(run) => runs.extend(run),
            // One unreadable record does not hide the other runs.
            Err(error) => print::err(format!("stoker: skipped a run: {error}")),
        }
    }
    Ok(runs)
}

fn paths(run_root: &RunRoot, experiment: &Experiment) -> RunPaths {
    let metadata = experiment.metadata.clone();
    RunPaths {
        root: run_root.root.clone(),
        namespace: metadata.namespace.unwrap_or_default(),
        name: metadata.name.unwrap_or_default(),
        uid: metadata.uid.unwrap_or_default(),
    }
}

fn read(
    run_root: &RunRoot,
    path: &Path,
    with_trials: bool,
) -> Result<Option<RecordedRun>, Failure> {
    let folder = RecordDir::new(path.to_owned());
    let Some(experiment) = folder.experiment()? else { return Ok(None) };
    let paths = paths(run_root, &experiment);
    let lock = run_root.records_dir().join(format!("{}.{}.lock", paths.namespace, paths.name));
    let key = format!("{}.{}.current", paths.namespace, paths.name);
    let current = setup::current_uid(&run_root.records_dir().join(key)).ok().flatten();
    let is_current = current.is_some_and(|uid| uid == paths.uid);
    // The lock is that of the latest run.
    let has_runner = is_current && is_locked(&lock);
    let runner = if has_runner { Runner::Running } else { Runner::Stopped };
    let trials = match with_trials && !path.join(DELETED).exists() {
        false => BTreeMap::new(),
        true => folder.trials().map_err(|error| {
            let id = run_root::run_id(&paths.name, &paths.uid);
            Failure::System(format!("{error}; restore the file, or delete the run {id}"))
        })?,
    };
    let has_shared_name = false;
    Ok(Some(RecordedRun { trials, experiment, paths, runner, is_current, has_shared_name }))
}

#[cfg(test)]
mod tests {
    use serde_json::json;
    use stoker_api::experiment::Phase;
    use stoker_api::trial::Attempt;
    use stoker_engine::experiment::explain::DisplayState;

    use super::*;

    fn store(root: &Path, namespace: &str, uid: &str, day: u32) {
        let folder = root.join(namespace).join(run_root::run_id("search", uid));
        std::fs::create_dir_all(folder.join("trials")).unwrap();
        let record = json!({
            "apiVersion": "stoker.dev/v1alpha1", "kind": "Experiment",
            "metadata": {
                "name": "search", "namespace": namespace, "uid": uid,
                "creationTimestamp": format!("2026-01-0{day}T00:00:00Z"),
            },
            "spec": {
                "entrypoint": {"command": ["true"]},
                "searcher": {"metric": "loss", "maxLength": {"batches": 4}, "single": {}},
            },
        });
        std::fs::write(folder.join("record.json"), record.to_string()).unwrap();
    }

    #[tokio::test]
    async fn name_in_two_namespaces_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path().to_str();
        store(folder.path(), "default", "00000001-1", 1);
        assert_eq!(RecordedRun::open(root, "search").await.unwrap().name(), "search");
        store(folder.path(), "other", "00000002-1", 2);
        for name in ["search", "search-0"] {
            let error = RecordedRun::open_with_trial(root, name).await.unwrap_err().to_string();
            let ids = "search-00000001 in default, search-00000002 in other";
            assert!(error.contains(ids), "{error}");
        }
        let run = RecordedRun::open(root, "search-00000002").await.unwrap();
        assert_eq!((run.paths.namespace.as_str(), run.name()), ("other", run.id()));
        let list = crate::show::experiments(root).await.unwrap();
        assert_eq!(list.columns[0], crate::list::Column::new("NAMESPACE"));
        let names: Vec<&str> = list.rows.iter().map(|row| row.name.as_str()).collect();
        let expected = ["search-00000001", "search-00000002"];
        assert_eq!(names, expected.map(|id| format!("experiment.stoker.dev/{id}")));
    }

    #[tokio::test]
    async fn latest_run_of_a_name_is_listed_last() {
        let folder = tempfile::tempdir().unwrap();
        store(folder.path(), "default", "00000001-1", 2);
        store(folder.path(), "default", "00000002-1", 1);
        let list = crate::show::experiments(folder.path().to_str()).await.unwrap();
        let names: Vec<&str> = list.rows.iter().map(|row| row.name.as_str()).collect();
        let expected = ["search-00000002", "search"];
        assert_eq!(names, expected.map(|id| format!("experiment.stoker.dev/{id}")));
    }

    /// The runner was killed while a trial trained.
    #[tokio::test]
    async fn trials_without_a_runner_are_queued() {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path().to_str();
        let (experiment, mut trials) = crate::explain::tests::record();
        let uid = experiment.metadata.uid.clone().unwrap();
        let run_root = RunRoot::resolve(root, None).unwrap();
        let record = RecordDir::new(run_root.record_dir("mnist", &uid));
        record.create().unwrap();
        record.save_experiment(&experiment).unwrap();
        trials[1].status.phase = Phase::Running;
        trials[1].status.attempts.push(Attempt::default());
        for trial in &trials {
            record.save_trial(trial).unwrap();
        }
        let mut run = RecordedRun::open(root, "mnist").await.unwrap();
        assert_eq!(run.explained().state(&run.trials[&1]), DisplayState::Queued);
        run.runner = Runner::Running;
        assert_eq!(run.explained().state(&run.trials[&1]), DisplayState::Running);
    }
}
