//! `stoker checkpoint list|download` on a cluster, and what downloading is anywhere.

use std::path::{Path, PathBuf};

use serde_json::json;
use stoker_api::contract::Manifest;
use stoker_api::experiment::Experiment;
use stoker_api::names::MANIFEST;
use stoker_api::number;
use stoker_api::trial::{CheckpointRecord, Trial};
use stoker_storage::hash::sha256_hex;
use stoker_storage::{Storage, StorageError, layout};

use super::connect::Cluster;
use super::{experiment, storage};
use crate::failure::Failure;
use crate::print::{self, Output};

/// Which of a trial's checkpoints.
#[derive(Clone, Debug, Default, clap::Args)]
#[group(multiple = false)]
pub(crate) struct Choice {
    /// The one of this name, as `checkpoint list` prints it
    #[arg(long, value_name = "NAME")]
    checkpoint: Option<String>,
    /// The one with the best metric [default, where one has a metric]
    #[arg(long)]
    best: bool,
    /// The latest
    #[arg(long)]
    latest: bool,
}

impl Choice {
    /// The one that is meant.
    pub(crate) fn of<'a>(
        &self,
        trial: &str,
        checkpoints: &'a [CheckpointRecord],
        smaller_is_better: bool,
    ) -> Result<&'a CheckpointRecord, Failure> {
        if let Some(name) = &self.checkpoint {
            return checkpoints.iter().find(|it| it.name == *name).ok_or_else(|| {
                let names: Vec<&str> = checkpoints.iter().map(|it| it.name.as_str()).collect();
                let has = if names.is_empty() { "none".to_owned() } else { names.join(", ") };
                Failure::Input(format!("trial {trial} has no checkpoint `{name}`; it has {has}"))
            });
        }
        let none = || Failure::Input(format!("trial {trial} has no checkpoint"));
        let latest = checkpoints.last().ok_or_else(none)?;
        if self.latest {
            return Ok(latest);
        }
        let rank = |it: &CheckpointRecord| {
            let metric = number::parse(it.metric.as_deref()?).filter(|it| !it.is_nan())?;
            Some(if smaller_is_better { metric } else { -metric })
        };
        let ranked = checkpoints.iter().filter_map(|it| Some((rank(it)?, it)));
        // Of equals the earlier one.
        match ranked.min_by(|a, b| a.0.total_cmp(&b.0)) {
            Some((_, best)) => Ok(best),
            None if self.best => Err(Failure::Input(format!(
                "no checkpoint of trial {trial} has a metric; --latest takes the latest"
            ))),
            None => Ok(latest),
        }
    }
}

/// What a name means: an experiment with its trials, or one trial of it.
async fn find(
    cluster: &Cluster,
    name: &str,
) -> Result<(Experiment, Vec<Trial>, Option<u32>), Failure> {
    let asked = format!("experiment or trial `{name}`");
    let found = cluster.ask(&asked, cluster.api::<Experiment>().get_opt(name)).await?;
    if let Some(experiment) = found {
        let trials = experiment::trials(cluster, &experiment).await?;
        return Ok((experiment, trials.into_iter().map(|it| it.0).collect(), None));
    }
    let trial = cluster.ask(&asked, cluster.api::<Trial>().get(name)).await?;
    let index = trial.spec.index;
    let experiment = cluster.experiment(&trial.spec.experiment).await?;
    Ok((experiment, vec![trial], Some(index)))
}

/// Prints the checkpoints of an experiment or of one trial.
pub(crate) async fn list(
    cluster: &Cluster,
    name: &str,
    trial: Option<u32>,
    output: Output,
) -> Result<(), Failure> {
    let (experiment, mut trials, _) = find(cluster, name).await?;
    if let Some(index) = trial {
        trials.retain(|it| it.spec.index == index);
        if trials.is_empty() {
            return Err(Failure::Input(format!("experiment `{name}` has no trial {index}")));
        }
    }
    let mut lines = Lines::default();
    for trial in &trials {
        let index = trial.spec.index;
        for record in trial.status.iter().flat_map(|it| &it.checkpoints) {
            lines.add(index, record, storage::checkpoint_address(&experiment, index, &record.name));
        }
    }
    lines.print(&experiment.spec.searcher.metric, output);
    Ok(())
}

/// Checkpoints to be printed.
#[derive(Debug, Default)]
pub(crate) struct Lines {
    rows: Vec<Vec<String>>,
    values: Vec<serde_json::Value>,
}

impl Lines {
    /// Adds one, which lies at `address`.
    pub(crate) fn add(&mut self, trial: u32, record: &CheckpointRecord, address: String) {
        self.values.push(json!({
            "trial": trial, "name": record.name, "batches": record.batches,
            "metric": record.metric, "bytes": record.bytes,
            "manifestSha256": record.manifest_sha256, "checkpoint": address,
        }));
        self.rows.push(vec![
            trial.to_string(),
            record.batches.to_string(),
            record.metric.clone().unwrap_or_else(|| "-".to_owned()),
            record.bytes.to_string(),
            address,
        ]);
    }

    /// Prints them.
    pub(crate) fn print(self, metric: &str, output: Output) {
        let metric = metric.to_uppercase();
        match output {
            Output::Json => print::out(json!(self.values)),
            Output::Text => {
                let header = ["TRIAL", "BATCHES", &metric, "BYTES", "CHECKPOINT"];
                print::out(print::table(&header, &self.rows));
            }
        }
    }
}

/// Downloads a checkpoint of a trial, or of an experiment's best trial.
pub(crate) async fn download(
    cluster: &Cluster,
    name: &str,
    choice: &Choice,
    options: &storage::Options,
    folder: &Path,
    output: Output,
) -> Result<(), Failure> {
    let (experiment, trials, index) = find(cluster, name).await?;
    let best = || experiment.status.as_ref().and_then(|it| it.best.as_ref()).map(|it| it.index);
    let index = index.or_else(best).ok_or_else(|| {
        Failure::Input(format!(
            "experiment `{name}` has no best trial yet; name a trial of `stoker trial list {name}`"
        ))
    })?;
    let trial = trials.iter().find(|it| it.spec.index == index);
    let trial_name = format!("{}-{index}", experiment.metadata.name.as_deref().unwrap_or(name));
    let checkpoints = trial.and_then(|it| it.status.as_ref()).map(|it| it.checkpoints.as_slice());
    let smaller_is_better = experiment.spec.searcher.smaller_is_better;
    let record = choice.of(&trial_name, checkpoints.unwrap_or_default(), smaller_is_better)?;
    let spec = &storage::of(&experiment);
    let opened = options.open(spec)?;
    let path = storage::trial_path(&experiment, index);
    let download = Download { storage: &opened, trial: &trial_name, path: &path, record };
    download.write_into(folder, output).await.map_err(|error| match error {
        Failure::Storage(error) => storage::failure(error, spec),
        other => other,
    })
}

/// One checkpoint to be downloaded.
#[derive(Debug)]
pub(crate) struct Download<'a> {
    pub(crate) storage: &'a Storage,
    /// The trial's name, for people.
    pub(crate) trial: &'a str,
    /// The trial's folder in the storage.
    pub(crate) path: &'a str,
    pub(crate) record: &'a CheckpointRecord,
}

impl Download<'_> {
    /// Writes its files into `folder`, each checked, and its manifest last: a folder with a
    /// manifest is whole.
    pub(crate) async fn write_into(&self, folder: &Path, output: Output) -> Result<(), Failure> {
        let name = &self.record.name;
        if folder.join(MANIFEST).exists() {
            return Err(Failure::Input(format!(
                "{} holds a checkpoint already; name another folder",
                folder.display()
            )));
        }
        std::fs::create_dir_all(folder).map_err(|error| Failure::file("create", folder, error))?;
        let bytes = self.get(MANIFEST).await?;
        check(MANIFEST, &bytes, None, &self.record.manifest_sha256)?;
        let manifest: Manifest = serde_json::from_slice(&bytes).map_err(|error| {
            Failure::System(format!("the manifest of checkpoint {name} is none: {error}"))
        })?;
        for (file, entry) in &manifest.files {
            let target = target(folder, file)?;
            let bytes = self.get(file).await?;
            check(file, &bytes, Some(entry.bytes), &entry.sha256)?;
            write(&target, &bytes)?;
        }
        write(&folder.join(MANIFEST), &bytes)?;
        match output {
            Output::Json => print::out(json!({
                "trial": self.trial, "checkpoint": name, "files": manifest.files.len(),
                "bytes": self.record.bytes, "folder": folder,
            })),
            Output::Text => print::out(format!(
                "checkpoint {name} of trial {}: {} files, {} in {}",
                self.trial,
                manifest.files.len(),
                super::text::bytes(self.record.bytes),
                folder.display()
            )),
        }
        Ok(())
    }

    async fn get(
        &self,
        file: &str,
    ) -> Result<impl std::ops::Deref<Target = [u8]> + use<>, Failure> {
        let path = layout::checkpoint_file(self.path, &self.record.name, file);
        match self.storage.get(&path).await {
            Err(StorageError::NotFound { .. }) => Err(Failure::System(format!(
                "checkpoint {} of trial {} is not in {}: there is no {path}",
                self.record.name,
                self.trial,
                self.storage.url()
            ))),
            other => Ok(other?),
        }
    }
}

/// Where a file goes: a manifest that was tampered with leads nowhere else.
fn target(folder: &Path, file: &str) -> Result<PathBuf, Failure> {
    let is_plain = |it: std::path::Component<'_>| matches!(it, std::path::Component::Normal(_));
    match !file.is_empty() && Path::new(file).components().all(is_plain) {
        true => Ok(folder.join(file)),
        false => Err(Failure::System(format!("the manifest names a file {file:?}, which is none"))),
    }
}

fn write(path: &Path, bytes: &[u8]) -> Result<(), Failure> {
    let parent = path.parent().unwrap_or(path);
    std::fs::create_dir_all(parent).map_err(|error| Failure::file("create", parent, error))?;
    std::fs::write(path, bytes).map_err(|error| Failure::file("write", path, error))
}

fn check(file: &str, bytes: &[u8], len: Option<u64>, sha256: &str) -> Result<(), Failure> {
    let found = sha256_hex(bytes);
    if found == sha256 && len.is_none_or(|len| len == bytes.len() as u64) {
        return Ok(());
    }
    Err(Failure::System(format!(
        "{file} of the checkpoint is damaged: its SHA-256 is {found}, not {sha256}; take another \
         checkpoint"
    )))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    fn record(name: &str, metric: Option<&str>) -> CheckpointRecord {
        serde_json::from_value(json!({
            "name": name, "batches": 1, "metric": metric, "manifestSha256": "", "bytes": 3,
        }))
        .unwrap()
    }

    fn check_choice(choice: &Choice, metrics: &[Option<&str>], smaller: bool, expected: &str) {
        let records: Vec<CheckpointRecord> =
            metrics.iter().enumerate().map(|(i, it)| record(&i.to_string(), *it)).collect();
        let found = match choice.of("t-0", &records, smaller) {
            Ok(record) => record.name.clone(),
            Err(error) => error.to_string(),
        };
        assert!(found.contains(expected), "{choice:?} {metrics:?}: {found}");
    }

    #[test]
    fn the_best_the_latest_or_the_named_one_is_taken() {
        let default = Choice::default();
        let best = Choice { best: true, ..Choice::default() };
        let latest = Choice { latest: true, ..Choice::default() };
        let named = |name: &str| Choice { checkpoint: Some(name.to_owned()), ..Choice::default() };
        let metrics = [Some("0.5"), Some("0.25"), Some("NaN"), Some("0.75")];
        check_choice(&default, &metrics, true, "1");
        check_choice(&best, &metrics, false, "3");
        check_choice(&best, &[Some("0.5"), Some("0.5")], true, "0");
        check_choice(&latest, &metrics, true, "3");
        check_choice(&default, &[None, None], true, "1");
        check_choice(&best, &[None, None], true, "--latest");
        check_choice(&default, &[], true, "t-0 has no checkpoint");
        check_choice(&named("2"), &metrics, true, "2");
        check_choice(&named("7"), &metrics, true, "it has 0, 1, 2, 3");
    }

    /// A storage with one checkpoint, and its record.
    async fn stored(files: &[(&str, &str)]) -> (Storage, CheckpointRecord) {
        let storage = Storage::open("memory:///", None).unwrap();
        let entry =
            |text: &str| json!({"bytes": text.len(), "sha256": sha256_hex(text.as_bytes())});
        let entries: BTreeMap<&str, serde_json::Value> =
            files.iter().map(|(name, text)| (*name, entry(text))).collect();
        let manifest = json!({
            "format": 1, "experimentId": "x", "trial": 0, "attempt": 0, "batches": 1,
            "files": entries,
        })
        .to_string();
        for (name, text) in files {
            let path = layout::checkpoint_file("t", "c", name);
            let _ = storage.put(&path, text.to_string().into()).await;
        }
        let record = CheckpointRecord {
            manifest_sha256: sha256_hex(manifest.as_bytes()),
            ..record("c", None)
        };
        storage.put(&layout::manifest_path("t", "c"), manifest.into()).await.unwrap();
        (storage, record)
    }

    async fn fetch(
        storage: &Storage,
        record: &CheckpointRecord,
        folder: &Path,
    ) -> Result<(), String> {
        let download = Download { storage, trial: "t-0", path: "t", record };
        download.write_into(folder, Output::Json).await.map_err(|error| error.to_string())
    }

    #[tokio::test]
    async fn files_are_written_with_the_manifest_last_and_never_twice() {
        let (storage, record) = stored(&[("model.bpk", "m"), ("state/a", "s")]).await;
        let folder = tempfile::tempdir().unwrap();
        let target = folder.path().join("new/one");
        fetch(&storage, &record, &target).await.unwrap();
        assert_eq!(std::fs::read_to_string(target.join("state/a")).unwrap(), "s");
        assert!(target.join(MANIFEST).exists());
        let again = fetch(&storage, &record, &target).await.unwrap_err();
        assert!(again.contains("holds a checkpoint already"), "{again}");
    }

    #[tokio::test]
    async fn a_damaged_file_leaves_no_manifest() {
        let (storage, record) = stored(&[("model.bpk", "m")]).await;
        storage.put(&layout::checkpoint_file("t", "c", "model.bpk"), "x".into()).await.unwrap();
        let folder = tempfile::tempdir().unwrap();
        let error = fetch(&storage, &record, folder.path()).await.unwrap_err();
        assert!(error.contains("model.bpk of the checkpoint is damaged"), "{error}");
        assert!(!folder.path().join(MANIFEST).exists());
    }

    #[test]
    fn a_manifest_leads_out_of_no_folder() {
        let of = |file: &str| target(Path::new("/x"), file).is_ok();
        assert!(of("a") && of("a/b"));
        assert!(!of("../a") && !of("/a") && !of("a/../../b") && !of(""));
    }
}
