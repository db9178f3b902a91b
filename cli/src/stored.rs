//! Records in a storage: experiments of a cluster, or of another machine, without either of them.
//!
//! ```text
//! NAMESPACE/EXPERIMENT-UID8/record.json                  Experiment: metadata, spec, status
//! NAMESPACE/EXPERIMENT-UID8/trials/INDEX/record.json     Trial: metadata, spec, status
//! ```

use std::collections::BTreeMap;
use std::path::Path;

use futures::{StreamExt as _, TryStreamExt as _, stream};
use serde_json::{Value, json};
use stoker_api::experiment::{DesiredState, Experiment, Phase};
use stoker_api::trial::Trial;
use stoker_engine::trial::TrialRecord;
use stoker_storage::{Storage, StorageError, layout};

use crate::endpoint;
use crate::failure::Failure;
use crate::run::setup::ANNOTATION_ROOT;
use crate::run_root::RunRoot;

/// Maximum number of concurrent requests.
const REQUESTS_MAX: usize = 32;

/// Experiments in a storage.
#[derive(Debug, Default)]
pub(crate) struct StoredExperiments {
    pub(crate) experiments: Vec<Experiment>,
    /// Records that cannot be read, by directory, with the reason.
    pub(crate) unreadable: BTreeMap<String, String>,
}

/// Opens the storage at `root`; `None` if it is a missing directory. The endpoint of an S3 server
/// comes from the environment, or else is that of a local run.
pub(crate) fn open(root: &str, of_run: Option<&str>) -> Result<Option<Storage>, Failure> {
    if root.starts_with('/') && !Path::new(root).exists() {
        return Ok(None);
    }
    let endpoint = endpoint::of_environment().or_else(|| of_run.map(str::to_owned));
    let endpoint = endpoint.filter(|_| root.starts_with("s3:"));
    Ok(Some(Storage::open(root, endpoint.as_deref())?.with_few_retries()))
}

/// Returns whether the record of a run is on this machine.
pub(crate) fn is_local(root: &RunRoot, experiment: &Experiment) -> bool {
    let of = |text: &Option<String>| text.clone().unwrap_or_default();
    let metadata = &experiment.metadata;
    root.record_dir(&of(&metadata.name), &of(&metadata.uid)).join("experiment.json").exists()
}

/// Returns whether a record in the storage is of a local run that was stopped before it ended. A
/// runner that stops pauses all trials, so the record has the phase `Paused` although the user has
/// not paused the run.
pub(crate) fn is_interrupted(experiment: &Experiment) -> bool {
    let annotations = experiment.metadata.annotations.as_ref();
    let is_of_local_run = annotations.is_some_and(|all| all.contains_key(ANNOTATION_ROOT));
    let phase = experiment.status.as_ref().map(|status| status.phase);
    let is_paused = experiment.spec.state == DesiredState::Paused;
    is_of_local_run && phase == Some(Phase::Paused) && !is_paused
}

/// Reads the records of all experiments.
pub(crate) async fn experiments(storage: &Storage) -> Result<StoredExperiments, Failure> {
    let namespaces = storage.folders("").await?;
    let list = |namespace: String| async move {
        let folders = storage.folders(&namespace).await?;
        let paths = folders.into_iter().map(|folder| format!("{namespace}/{folder}"));
        Ok::<_, StorageError>(paths.collect::<Vec<_>>())
    };
    let lists = stream::iter(namespaces).map(list).buffered(REQUESTS_MAX);
    let folders: Vec<Vec<String>> = lists.try_collect().await?;
    let read = |folder: String| async move {
        let read = experiment(storage, &folder).await;
        (folder, read)
    };
    let folders = folders.into_iter().flatten();
    let mut reads = stream::iter(folders).map(read).buffered(REQUESTS_MAX);
    let mut stored = StoredExperiments::default();
    while let Some((folder, read)) = reads.next().await {
        match read {
            Ok(Some(experiment)) => stored.experiments.push(experiment),
            Ok(None) => {}
            Err(why) => drop(stored.unreadable.insert(folder, why)),
        }
    }
    Ok(stored)
}

/// Reads the record of the experiment in a directory; `None` if the directory is of another kind.
async fn experiment(storage: &Storage, folder: &str) -> Result<Option<Experiment>, String> {
    let path = layout::record_path(folder);
    let bytes = match storage.get(&path).await {
        Ok(bytes) => bytes,
        Err(StorageError::NotFound { .. }) => {
            let folders = storage.folders(folder).await.map_err(|error| error.to_string())?;
            let has_trials = folders.iter().any(|name| name == "trials");
            return match has_trials {
                true => Err(format!(
                    "{path} is missing: the run was killed before it stored the record, or an \
                     earlier version wrote the trials"
                )),
                false => Ok(None),
            };
        }
        Err(error) => return Err(error.to_string()),
    };
    let parsed: Experiment =
        serde_json::from_slice(&bytes).map_err(|error| format!("{path}: {error}"))?;
    let expected = path_of(&parsed);
    match expected == folder {
        true => Ok(Some(parsed)),
        false => Err(format!("{path} is the record of {expected}; move the directory there")),
    }
}

fn path_of(experiment: &Experiment) -> String {
    let of = |text: &Option<String>| text.clone().unwrap_or_default();
    let metadata = &experiment.metadata;
    layout::experiment_path(&of(&metadata.namespace), &of(&metadata.name), &of(&metadata.uid))
}

/// Reads the records of an experiment's trials. Trials without a record are omitted: they have not
/// started. The second value contains records that cannot be read, with the reason.
pub(crate) async fn trials(
    storage: &Storage,
    experiment: &Experiment,
) -> Result<(BTreeMap<u32, TrialRecord>, BTreeMap<String, String>), Failure> {
    let folder = format!("{}/trials", path_of(experiment));
    let indexes = storage.folders(&folder).await?;
    let indexes = indexes.into_iter().filter_map(|name| name.parse::<u32>().ok());
    let read = |index: u32| {
        let path = layout::record_path(&format!("{folder}/{index}"));
        async move {
            match storage.get(&path).await {
                Ok(bytes) => {
                    let parsed = parse_trial(&bytes).map_err(|error| error.to_string());
                    Ok((index, path, Some(parsed)))
                }
                Err(StorageError::NotFound { .. }) => Ok((index, path, None)),
                Err(error) => Err(error),
            }
        }
    };
    let mut reads = stream::iter(indexes).map(read).buffered(REQUESTS_MAX);
    let (mut trials, mut unreadable) = (BTreeMap::new(), BTreeMap::new());
    while let Some((index, path, read)) = reads.try_next().await? {
        match read {
            Some(Ok(trial)) => drop(trials.insert(index, trial)),
            Some(Err(why)) => drop(unreadable.insert(path, why)),
            None => {}
        }
    }
    Ok((trials, unreadable))
}

/// Parses the record of a trial. Records of earlier versions contain fewer fields.
fn parse_trial(bytes: &[u8]) -> serde_json::Result<TrialRecord> {
    let mut value: Value = serde_json::from_slice(bytes)?;
    if let Some(spec) = value["spec"].as_object_mut() {
        spec.entry("requestId").or_insert_with(|| json!(""));
    }
    let trial: Trial = serde_json::from_value(value)?;
    let status = trial.status.unwrap_or_default();
    Ok(TrialRecord { spec: trial.spec, status })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn block_on<T>(future: impl Future<Output = T>) -> T {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(future)
    }

    fn record(name: &str, uid: &str) -> String {
        let value = json!({
            "apiVersion": "stoker.dev/v1alpha1", "kind": "Experiment",
            "metadata": {"name": name, "namespace": "ml", "uid": uid},
            "spec": {
                "entrypoint": {"command": ["true"]},
                "searcher": {"metric": "loss", "maxLength": {"batches": 4}, "single": {}},
            },
        });
        value.to_string()
    }

    #[test]
    fn all_experiments_of_a_name_are_listed() {
        let storage = Storage::open("memory://", None).unwrap();
        let put = |path: &str, text: String| block_on(storage.put(path, text.into())).unwrap();
        put("ml/a-00000001/record.json", record("a", "00000001-1"));
        put("ml/a-00000002/record.json", record("a", "00000002-1"));
        put("ml/contexts/abc.tar.gz", String::new());
        put("ml/moved-00000003/record.json", record("b", "00000003-1"));
        put("ml/old-00000004/trials/0/record.json", "{}".to_owned());
        put("ml/broken-00000005/record.json", "{".to_owned());
        let stored = block_on(experiments(&storage)).unwrap();
        let uids: Vec<_> =
            stored.experiments.iter().map(|stored| stored.metadata.uid.clone().unwrap()).collect();
        assert_eq!(uids, ["00000001-1", "00000002-1"]);
        let reasons: Vec<_> = stored.unreadable.values().collect();
        assert_eq!(reasons.len(), 3, "{reasons:?}");
        assert!(reasons[1].contains("is the record of ml/b-00000003"), "{reasons:?}");
        assert!(reasons[2].contains("is missing"), "{reasons:?}");
    }

    #[test]
    fn trial_records_of_earlier_versions_are_read() {
        let storage = Storage::open("memory://", None).unwrap();
        let experiment: Experiment = serde_json::from_str(&record("a", "00000001-1")).unwrap();
        let put = |index: &str, spec: Value| {
            let path = format!("ml/a-00000001/trials/{index}/record.json");
            let text = json!({"apiVersion": "stoker.dev/v1alpha1", "kind": "Trial",
                "metadata": {"name": format!("a-{index}")}, "spec": spec});
            block_on(storage.put(&path, text.to_string().into())).unwrap();
        };
        put(
            "3",
            json!({
                "experiment": "a", "index": 3, "seed": 1, "hyperparameters": {"lr": 0.1},
                "unit": "batches", "units": 4,
            }),
        );
        put("4", json!({}));
        block_on(storage.put("ml/a-00000001/trials/5/metrics/0-0.jsonl", "".into())).unwrap();
        let (trials, unreadable) = block_on(trials(&storage, &experiment)).unwrap();
        assert_eq!(trials.keys().collect::<Vec<_>>(), [&3]);
        assert_eq!(trials[&3].spec.hyperparameters, json!({"lr": 0.1}));
        assert_eq!(unreadable.len(), 1, "{unreadable:?}");
    }
}
