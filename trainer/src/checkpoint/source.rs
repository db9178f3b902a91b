//! Selects checkpoints of other trials by trial name, directory or storage path.

use std::cmp::Reverse;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use serde_json::Value;
use stoker_api::contract::{Manifest, StorageConfig};
use stoker_api::names::MANIFEST;
use stoker_api::time::Timestamp;
use stoker_storage::{Storage, StorageError, hash, layout};

use super::folder::load_folder_with;
use super::{CheckpointContents, CheckpointError, CheckpointStore, parse};
use crate::collective::ProgressState;
use crate::{Error, Result};

/// Remedy if a trial's name does not select the wanted run.
const OTHER_RUN: &str = "to use a trial of another run, set `checkpoint.stored: {url, trialPath}` \
                         in the job's file, or use CheckpointSource::stored in a program";

/// Maximum number of earlier runs that an error names.
const EARLIER_RUNS_MAX: usize = 3;

/// A checkpoint to take a model's weights from.
#[derive(Clone, Debug, PartialEq)]
pub struct CheckpointSource {
    location: Location,
    selector: Selector,
    /// Required SHA-256 of the manifest.
    sha256: Option<String>,
}

#[derive(Clone, Debug, PartialEq)]
pub(super) enum Location {
    Folder(PathBuf),
    Trial(String),
    Stored { url: String, endpoint: Option<String>, trial_path: String },
}

#[derive(Clone, Debug, PartialEq)]
enum Selector {
    Latest,
    Smallest,
    Largest,
    Named(String),
}

impl From<&Path> for CheckpointSource {
    fn from(folder: &Path) -> Self {
        Self::folder(folder)
    }
}

impl From<&PathBuf> for CheckpointSource {
    fn from(folder: &PathBuf) -> Self {
        Self::folder(folder)
    }
}

impl From<PathBuf> for CheckpointSource {
    fn from(folder: PathBuf) -> Self {
        Self::folder(folder)
    }
}

impl CheckpointSource {
    fn new(location: Location) -> Self {
        Self { location, selector: Selector::Latest, sha256: None }
    }

    /// Selects a checkpoint directory on the local machine, for example a downloaded one.
    pub fn folder(path: impl Into<PathBuf>) -> Self {
        Self::new(Location::Folder(path.into()))
    }

    /// Selects the latest checkpoint of the trial with this name, for example `mnist-3`. The trial
    /// is looked up in the storage and namespace of the current session, in the latest run of its
    /// experiment.
    pub fn trial(name: &str) -> Self {
        Self::new(Location::Trial(name.into()))
    }

    /// Selects the latest checkpoint of a trial in any storage. `root` is the storage's root, as in
    /// `checkpointStorage.url`. `trial_path` is the trial's directory below it, for example
    /// `default/mnist-0b3f9c1e/trials/3`.
    pub fn stored(root: &str, trial_path: &str) -> Self {
        let (url, trial_path) = (root.to_owned(), trial_path.trim_matches('/').to_owned());
        Self::new(Location::Stored { url, endpoint: None, trial_path })
    }

    /// Sets the address of an S3 server other than Amazon's, for [`stored`](Self::stored).
    #[must_use]
    pub fn endpoint(mut self, address: &str) -> Self {
        if let Location::Stored { endpoint, .. } = &mut self.location {
            *endpoint = Some(address.into());
        }
        self
    }

    /// Selects the checkpoint with the smallest searched metric instead of the latest. Only
    /// checkpoints saved at a validation have a metric. Among equal metrics, selects the one with
    /// the fewest batches, then that of the latest attempt.
    #[must_use]
    pub fn smallest_metric(self) -> Self {
        Self { selector: Selector::Smallest, ..self }
    }

    /// Selects the checkpoint with the largest searched metric; see
    /// [`smallest_metric`](Self::smallest_metric).
    #[must_use]
    pub fn largest_metric(self) -> Self {
        Self { selector: Selector::Largest, ..self }
    }

    /// Selects the checkpoint with this name, for example `000000000400-0`, instead of the latest.
    #[must_use]
    pub fn named(self, checkpoint: &str) -> Self {
        Self { selector: Selector::Named(checkpoint.into()), ..self }
    }

    /// Requires a manifest with this SHA-256.
    pub(super) fn with_manifest(self, sha256: &str) -> Self {
        Self { sha256: Some(sha256.to_owned()), ..self }
    }

    pub(super) fn location(&self) -> &Location {
        &self.location
    }

    /// Reads the checkpoint. `own` is the storage of the calling session. Reads from a directory
    /// count as progress of the rank.
    ///
    /// # Errors
    ///
    /// Fails if the trial does not exist, or has no complete checkpoint that matches.
    pub(crate) fn load(
        &self,
        own: &StorageConfig,
        progress: &ProgressState,
    ) -> Result<(Manifest, CheckpointContents)> {
        if let Location::Folder(folder) = &self.location {
            self.check_folder(folder)?;
            return load_folder_with(folder, &|| progress.record_transfer()).map_err(unusable);
        }
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        runtime.block_on(async {
            let store = self.open_store(own).await?;
            let (name, manifest, _) = self.select(&store).await?;
            match store.contents(&name, &manifest).await {
                Ok(contents) => Ok((manifest, contents)),
                // A trial that trains may have deleted it to save a newer one.
                Err(CheckpointError::NotFound { .. } | CheckpointError::Corrupt { .. }) => {
                    let (name, manifest, _) = self.select(&store).await?;
                    let contents = store.contents(&name, &manifest).await.map_err(unusable)?;
                    Ok((manifest, contents))
                }
                Err(error) => Err(error.into()),
            }
        })
    }

    /// Checks that a pinned directory still has the same manifest.
    fn check_folder(&self, folder: &Path) -> Result<()> {
        let Some(expected) = &self.sha256 else { return Ok(()) };
        let path = folder.join(MANIFEST);
        let actual = std::fs::read(&path).map(|manifest| hash::sha256_hex(&manifest));
        if actual.ok().as_ref() == Some(expected) {
            return Ok(());
        }
        Err(format!("{} has changed since the job selected it", path.display()).into())
    }

    pub(super) async fn open_store(&self, own: &StorageConfig) -> Result<CheckpointStore> {
        let (storage, trial_path) = match &self.location {
            Location::Stored { url, endpoint, trial_path } => {
                (Storage::open(url, endpoint.as_deref())?, trial_path.clone())
            }
            Location::Trial(name) => {
                if own.url.is_empty() {
                    let text = format!(
                        "cannot look up trial {name}: this program has no storage; use \
                         CheckpointSource::folder or CheckpointSource::stored"
                    );
                    return Err(text.into());
                }
                let storage = Storage::open(&own.url, own.endpoint.as_deref())?;
                let path = find_trial(&storage, &own.trial_path, name).await?;
                (storage, path)
            }
            Location::Folder(_) => return Err("a local directory has no storage path".into()),
        };
        Ok(CheckpointStore {
            storage,
            trial_path,
            experiment_id: String::new(),
            trial: 0,
            attempt: 0,
            sample_sha256: String::new(),
        })
    }

    /// Returns name, manifest and manifest hash of the selected checkpoint.
    pub(super) async fn select(
        &self,
        store: &CheckpointStore,
    ) -> Result<(String, Manifest, String)> {
        let trial = &store.trial_path;
        let mut names = store.storage.folders(&layout::checkpoints_path(trial)).await?;
        names.retain(|name| layout::parse_checkpoint_name(name).is_some());
        let mut refused = BTreeSet::new();
        match &self.selector {
            Selector::Named(wanted) => names.retain(|name| name == wanted),
            _ => refused = refused_checkpoints(store).await?,
        }
        names.sort_by_key(|name| (refused.contains(name), Reverse(age(name))));
        let mut best: Option<(f64, String, Manifest, String)> = None;
        for name in names {
            if best.is_some() && refused.contains(&name) {
                break;
            }
            let path = layout::manifest_path(trial, &name);
            // Without a manifest, the files are from an interrupted save.
            if !store.storage.exists(&path).await? {
                continue;
            }
            let text = store.storage.get(&path).await?;
            let sha256 = hash::sha256_hex(&text);
            let manifest =
                parse(&text).map_err(|why| format!("checkpoint {name} of {trial}: {why}"))?;
            if self.sha256.as_ref().is_some_and(|expected| *expected != sha256) {
                return Err(format!(
                    "checkpoint {name} of {trial} has changed since the job selected it"
                )
                .into());
            }
            let sign = match self.selector {
                Selector::Latest | Selector::Named(_) => return Ok((name, manifest, sha256)),
                Selector::Smallest => 1.0,
                Selector::Largest => -1.0,
            };
            let metric = manifest.metric.as_ref().and_then(|text| text.parse::<f64>().ok());
            let metric = metric.filter(|metric| !metric.is_nan()).map(|metric| sign * metric);
            // Ties go to fewer batches, then to the latest attempt: names are sorted newest first.
            if let Some(metric) = metric
                && best.as_ref().is_none_or(|(best_metric, best_name, ..)| {
                    (metric, batches(&name)) < (*best_metric, batches(best_name))
                })
            {
                best = Some((metric, name, manifest, sha256));
            }
        }
        match (best, &self.selector) {
            (Some((_, name, manifest, sha256)), _) => Ok((name, manifest, sha256)),
            (None, Selector::Named(name)) if self.sha256.is_some() => Err(format!(
                "checkpoint {name} of {trial} was deleted after the job selected it, for example \
                 because the trial saved newer ones; create the job again, or run it with \
                 --fresh, when the trial's experiment has ended"
            )
            .into()),
            (None, Selector::Named(name)) => {
                Err(format!("complete checkpoint {name} not found in {trial}").into())
            }
            (None, Selector::Latest) => {
                Err(format!("no complete checkpoint found in {trial}").into())
            }
            (None, _) => {
                Err(format!("no complete checkpoint with a metric found in {trial}").into())
            }
        }
    }
}

/// Returns the error for a selected checkpoint that cannot be read. If it is missing or corrupt,
/// the storage has answered, so this is not an outage, whose end a trial would wait for.
fn unusable(error: CheckpointError) -> Error {
    match error {
        CheckpointError::Corrupt { .. } | CheckpointError::NotFound { .. } => {
            error.to_string().into()
        }
        other => other.into(),
    }
}

/// Returns attempt and batches. Checkpoints of a later attempt are later: it may have trained its
/// batches again, because it could not use those of an earlier attempt.
fn age(name: &str) -> Option<(u32, u64)> {
    layout::parse_checkpoint_name(name).map(|(batches, attempt)| (attempt, batches))
}

fn batches(name: &str) -> Option<u64> {
    layout::parse_checkpoint_name(name).map(|(batches, _)| batches)
}

/// Returns the names of checkpoints that an attempt of the trial refused, as its stored record
/// lists them. The record may be missing or older, if the trial runs.
async fn refused_checkpoints(store: &CheckpointStore) -> Result<BTreeSet<String>> {
    let record = read_record(&store.storage, &store.trial_path).await?;
    let checkpoints = record["status"]["checkpoints"].as_array().into_iter().flatten();
    let refused = checkpoints.filter(|checkpoint| checkpoint["refused"] == true);
    Ok(refused.filter_map(|checkpoint| Some(checkpoint["name"].as_str()?.to_owned())).collect())
}

/// Reads the record in the directory of a run or trial; null if it is missing or unreadable. An
/// unreadable record is harmless: every file of a checkpoint is verified anyway.
async fn read_record(storage: &Storage, folder: &str) -> Result<Value> {
    match storage.get(&layout::record_path(folder)).await {
        Ok(text) => Ok(serde_json::from_slice(&text).unwrap_or_default()),
        Err(StorageError::NotFound { .. }) => Ok(Value::Null),
        Err(error) => Err(error.into()),
    }
}

/// Returns the directory of the trial with this name, for example `mnist-3`, in the namespace of
/// `own`. If the experiment has several runs, the name means the latest one, as in commands.
async fn find_trial(storage: &Storage, own: &str, name: &str) -> Result<String> {
    let refused = || format!("{name:?} is not a trial name; expected one such as mnist-3");
    let (experiment, index) = name.rsplit_once('-').ok_or_else(refused)?;
    index.parse::<u32>().map_err(|_| refused())?;
    let namespace = own.split('/').next().unwrap_or_default();
    let is_named = |folder: &String| {
        folder.rsplit_once('-').is_some_and(|(prefix, uid)| prefix == experiment && uid.len() == 8)
    };
    let mut runs = vec![];
    for folder in storage.folders(namespace).await?.into_iter().filter(is_named) {
        let run = format!("{namespace}/{folder}");
        // The directory of a job with this name has neither trials nor a record.
        let has_trials = !storage.folders(&format!("{run}/trials")).await?.is_empty();
        if has_trials || storage.exists(&layout::record_path(&run)).await? {
            runs.push(run);
        }
    }
    let (mut runs, url) = (sorted_by_start(storage, runs).await?, storage.url());
    let Some(latest) = runs.pop() else {
        return Err(format!("trial {name} not found in {namespace}/ of {url}; {OTHER_RUN}").into());
    };
    let trial = format!("{latest}/trials/{index}");
    if !storage.folders(&layout::checkpoints_path(&trial)).await?.is_empty() {
        return Ok(trial);
    }
    let num_runs = runs.len();
    let shown = runs.split_off(num_runs.saturating_sub(EARLIER_RUNS_MAX)).join(", ");
    let earlier = match num_runs {
        0 => String::new(),
        1..=EARLIER_RUNS_MAX => format!(" (earlier runs: {shown})"),
        _ => format!(" (the latest of {num_runs} earlier runs: {shown})"),
    };
    Err(format!(
        "no checkpoint of trial {name} found in {latest}, the latest run of {experiment} in \
         {url}{earlier}; {OTHER_RUN}"
    )
    .into())
}

/// Sorts the directories of runs by the time at which each run began. A runner gives each run of a
/// name a later time. Equal times, of runs on several machines, are sorted by run ID.
async fn sorted_by_start(storage: &Storage, runs: Vec<String>) -> Result<Vec<String>> {
    let mut dated = vec![];
    for run in runs {
        dated.push((began_at(storage, &run).await?, run));
    }
    dated.sort();
    Ok(dated.into_iter().map(|(_, run)| run).collect())
}

/// Returns when a run began, in seconds since 1970: the creation time in its record, or the time of
/// its earliest file if the record was not stored yet.
async fn began_at(storage: &Storage, run: &str) -> Result<Option<i64>> {
    let record = read_record(storage, run).await?;
    let created = record["metadata"]["creationTimestamp"].as_str();
    match created.and_then(|text| text.parse::<Timestamp>().ok()) {
        Some(created) => Ok(Some(created.0)),
        None => Ok(storage.list_timed(run).await?.into_iter().map(|(_, time)| time).min()),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use serde_json::json;
    use stoker_api::contract::ExitCode;

    use super::*;
    use crate::error::exit_code;

    /// Writes checkpoints of a trial: name, metric, and whether each is complete.
    fn write(root: &Path, trial: &str, checkpoints: &[(&str, Option<&str>, bool)]) {
        for (name, metric, is_complete) in checkpoints {
            let folder = root.join(trial).join("checkpoints").join(name);
            std::fs::create_dir_all(&folder).unwrap();
            std::fs::write(folder.join("x"), name).unwrap();
            let entry = hash::file_entry(&[name]);
            let manifest = Manifest {
                format: 1,
                experiment_id: "e".into(),
                trial: 3,
                attempt: 0,
                batches: 1,
                sample_sha256: None,
                metric: metric.map(str::to_owned),
                validation: BTreeMap::new(),
                files: BTreeMap::from([("x".to_owned(), entry)]),
                unsent: vec![],
                metadata: BTreeMap::new(),
            };
            if *is_complete {
                let text = serde_json::to_vec(&manifest).unwrap();
                std::fs::write(folder.join(MANIFEST), text).unwrap();
            }
        }
    }

    #[test]
    fn equal_metrics_go_to_fewer_batches_then_later_attempts() {
        let root = tempfile::tempdir().unwrap();
        let trial = "ml/mnist-0b3f9c1e/trials/3";
        // Attempt 1 could not use the checkpoints of attempt 0, and trained its batches again.
        let checkpoints = [
            ("000000000100-0", Some("0.5"), true),
            ("000000000300-0", Some("0.5"), true),
            ("000000000100-1", Some("0.5"), true),
            ("000000000200-1", Some("0.5"), true),
        ];
        write(root.path(), trial, &checkpoints);
        let url = root.path().display().to_string();
        let own = StorageConfig { url: url.clone(), endpoint: None, trial_path: String::new() };
        let check = |source: CheckpointSource, expected: &str| {
            let (_, contents) = source.load(&own, &ProgressState::default()).unwrap();
            assert_eq!(contents["x"].clone(), expected.as_bytes(), "{source:?}");
        };
        let source = || CheckpointSource::stored(&url, trial);
        check(source().smallest_metric(), "000000000100-1");
        check(source().largest_metric(), "000000000100-1");
        check(source(), "000000000200-1");
    }

    #[test]
    fn missing_weights_are_no_outage() {
        let root = tempfile::tempdir().unwrap();
        let trial = "ml/mnist-0b3f9c1e/trials/3";
        write(root.path(), trial, &[("000000000100-0", None, true)]);
        let checkpoint = root.path().join(trial).join("checkpoints/000000000100-0");
        std::fs::remove_file(checkpoint.join("x")).unwrap();
        let url = root.path().display().to_string();
        let own = StorageConfig { url: url.clone(), endpoint: None, trial_path: String::new() };
        let check = |source: CheckpointSource, expected: ExitCode| {
            let error = source.load(&own, &ProgressState::default()).unwrap_err();
            assert_eq!(exit_code(&*error), expected, "{error}");
        };
        check(CheckpointSource::stored(&url, trial), ExitCode::UserError);
        check(CheckpointSource::folder(&checkpoint), ExitCode::UserError);
        check(CheckpointSource::folder(root.path().join("missing")), ExitCode::UserError);
        // A file that exists and cannot be read.
        std::fs::create_dir(checkpoint.join("x")).unwrap();
        check(CheckpointSource::folder(&checkpoint), ExitCode::Infrastructure);
    }

    #[test]
    fn checkpoint_sources_select_the_right_checkpoint() {
        let root = tempfile::tempdir().unwrap();
        let mnist = "ml/mnist-0b3f9c1e/trials/3";
        let checkpoints = [
            ("000000000100-0", Some("0.5"), true),
            ("000000000200-0", Some("0.25"), true),
            ("000000000300-1", None, true),
            ("000000000400-1", Some("0.1"), false),
        ];
        write(root.path(), mnist, &checkpoints);
        write(root.path(), "ml/mnist-large-0b3f9c1e/trials/3", &[]);
        let url = root.path().display().to_string();
        let own = StorageConfig {
            url: url.clone(),
            endpoint: None,
            trial_path: "ml/other-12345678/trials/0".into(),
        };
        let check = |source: CheckpointSource, expected: Result<&str, &str>| {
            let actual = source
                .load(&own, &ProgressState::default())
                .map(|(_, contents)| contents["x"].clone());
            match (actual, expected) {
                (Ok(actual), Ok(expected)) => assert_eq!(actual, expected.as_bytes(), "{source:?}"),
                (Err(error), Err(expected)) => {
                    assert!(error.to_string().contains(expected), "{error}, not {expected}");
                }
                (actual, expected) => panic!("{source:?}: {actual:?}, not {expected:?}"),
            }
        };
        let trial = || CheckpointSource::trial("mnist-3");
        check(trial(), Ok("000000000300-1"));
        check(trial().smallest_metric(), Ok("000000000200-0"));
        check(trial().largest_metric(), Ok("000000000100-0"));
        check(trial().named("000000000100-0"), Ok("000000000100-0"));
        let missing = "complete checkpoint 000000000400-1 not found in ml/mnist-0b3f9c1e/trials/3";
        check(trial().named("000000000400-1"), Err(missing));
        let pinned = trial().named("000000000400-1").with_manifest("0");
        check(pinned, Err("was deleted after the job selected it, for example because the trial"));
        check(CheckpointSource::stored(&url, mnist), Ok("000000000300-1"));
        let folder = root.path().join(mnist).join("checkpoints/000000000200-0");
        check(CheckpointSource::folder(folder), Ok("000000000200-0"));
        let unsaved = "no checkpoint of trial mnist-4 found in ml/mnist-0b3f9c1e, the latest run";
        check(CheckpointSource::trial("mnist-4"), Err(unsaved));
        check(CheckpointSource::trial("other-0"), Err("trial other-0 not found in ml/"));
        check(CheckpointSource::trial("mnist"), Err("is not a trial name"));
        // An attempt refused two checkpoints.
        let refuse = |names: &[&str]| {
            let checkpoints: Vec<Value> =
                names.iter().map(|name| json!({ "name": name, "refused": true })).collect();
            let record = json!({ "status": { "checkpoints": checkpoints } });
            std::fs::write(root.path().join(mnist).join("record.json"), record.to_string())
        };
        refuse(&["000000000200-0", "000000000300-1"]).unwrap();
        check(trial(), Ok("000000000100-0"));
        check(trial().smallest_metric(), Ok("000000000100-0"));
        check(trial().named("000000000300-1"), Ok("000000000300-1"));
        refuse(&["000000000100-0", "000000000200-0"]).unwrap();
        check(trial().smallest_metric(), Ok("000000000200-0"));
        check(trial(), Ok("000000000300-1"));
        let large = root.path().join(mnist).join("checkpoints/000000000300-1/x");
        std::fs::write(large, "changed").unwrap();
        check(trial(), Err("x has 7 bytes"));
    }

    #[test]
    fn trial_name_means_the_latest_run() {
        let root = tempfile::tempdir().unwrap();
        let url = root.path().display().to_string();
        let trial_path = "ml/other-12345678/trials/0".into();
        let own = StorageConfig { url, endpoint: None, trial_path };
        let check = |expected: Result<&str, &str>| {
            let loaded = CheckpointSource::trial("iris-0").load(&own, &ProgressState::default());
            let actual = loaded.map(|(_, contents)| contents["x"].clone());
            match (actual, expected) {
                (Ok(actual), Ok(expected)) => assert_eq!(actual, expected.as_bytes()),
                (Err(error), Err(expected)) => {
                    assert!(error.to_string().contains(expected), "{error}, not {expected}");
                }
                (actual, expected) => panic!("{actual:?}, not {expected:?}"),
            }
        };
        let record = |run: &str, hour: u32| {
            let created = format!("2001-01-01T{hour:02}:00:00Z");
            let record = json!({ "metadata": { "creationTimestamp": created } });
            std::fs::create_dir_all(root.path().join(run)).unwrap();
            std::fs::write(root.path().join(run).join("record.json"), record.to_string()).unwrap();
        };
        // The job and the runs have the same name. The IDs of the runs do not have their order.
        std::fs::create_dir_all(root.path().join("ml/iris-00000009/output")).unwrap();
        record("ml/iris-00000002", 1);
        write(root.path(), "ml/iris-00000002/trials/0", &[("000000000100-0", None, true)]);
        record("ml/iris-00000001", 2);
        write(root.path(), "ml/iris-00000001/trials/0", &[("000000000200-0", None, true)]);
        check(Ok("000000000200-0"));
        // A runner stores the record after the first attempt.
        write(root.path(), "ml/iris-00000000/trials/0", &[("000000000300-0", None, true)]);
        check(Ok("000000000300-0"));
        record("ml/iris-00000000", 3);
        record("ml/iris-00000003", 4);
        let earlier = "ml/iris-00000002, ml/iris-00000001, ml/iris-00000000";
        check(Err(&format!("found in ml/iris-00000003, the latest run of iris in {}", own.url)));
        check(Err(&format!(" (earlier runs: {earlier}); to use a trial of another run")));
        check(Err("checkpoint.stored: {url, trialPath}"));
        // Two machines began runs in the same second.
        write(root.path(), "ml/iris-00000004/trials/0", &[("000000000400-0", None, true)]);
        record("ml/iris-00000004", 4);
        check(Ok("000000000400-0"));
        record("ml/iris-00000005", 5);
        let latest = "ml/iris-00000000, ml/iris-00000003, ml/iris-00000004";
        check(Err(&format!(" (the latest of 5 earlier runs: {latest}); to use")));
    }
}
