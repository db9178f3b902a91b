//! `stoker checkpoint list|download` on a cluster. Local runs use the same download.

use std::fs::Permissions;
use std::io::{self, Write as _};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Component, Path, PathBuf};

use futures::StreamExt as _;
use serde_json::json;
use stoker_api::contract::{FileEntry, FileHash, HashAlgorithm, Manifest};
use stoker_api::experiment::Experiment;
use stoker_api::names::MANIFEST;
use stoker_api::number;
use stoker_api::trial::{CheckpointRecord, Trial};
use stoker_storage::hash::{FileHasher, file_hash};
use stoker_storage::{Storage, StorageError, layout};
use tempfile::NamedTempFile;

use super::best_trial::{best_trial, no_best_trial};
use super::connect::Cluster;
use super::{experiment, storage};
use crate::commands::names::TrialRef;
use crate::failure::Failure;
use crate::list::{List, checkpoints};
use crate::print::{self, Output};

/// Start of the names of temporary files.
const PARTIAL_PREFIX: &str = ".stoker-partial-";

/// Flags that select one of a trial's checkpoints.
#[derive(Clone, Debug, Default, clap::Args)]
#[group(multiple = false)]
pub(crate) struct Choice {
    /// Download the checkpoint of this name: the last path segment in `checkpoint list`
    #[arg(long, value_name = "NAME")]
    checkpoint: Option<String>,
    /// Download the checkpoint with the best metric [default if a checkpoint has a metric]
    #[arg(long)]
    best: bool,
    /// Download the latest checkpoint
    #[arg(long)]
    latest: bool,
}

impl Choice {
    /// Adds the checkpoint that the argument names.
    pub(crate) fn with_name(&self, name: Option<&str>) -> Result<Self, Failure> {
        let is_chosen = self.checkpoint.is_some() || self.best || self.latest;
        match name {
            None => Ok(self.clone()),
            Some(name) if is_chosen => Err(Failure::Input(format!(
                "the argument already names the checkpoint `{name}`; remove --checkpoint, --best \
                 or --latest"
            ))),
            Some(name) => Ok(Self { checkpoint: Some(name.to_owned()), ..Self::default() }),
        }
    }

    /// Returns the selected checkpoint. Without a flag, this is the best checkpoint, or the latest
    /// one if none has a metric.
    pub(crate) fn of<'a>(
        &self,
        trial: &str,
        checkpoints: &'a [CheckpointRecord],
        smaller_is_better: bool,
    ) -> Result<&'a CheckpointRecord, Failure> {
        if let Some(name) = &self.checkpoint {
            let matches = |checkpoint: &&CheckpointRecord| checkpoint.name == *name;
            return checkpoints.iter().find(matches).ok_or_else(|| {
                let names: Vec<&str> =
                    checkpoints.iter().map(|checkpoint| checkpoint.name.as_str()).collect();
                let all = if names.is_empty() { "none".to_owned() } else { names.join(", ") };
                Failure::Input(format!(
                    "checkpoint `{name}` of trial {trial} not found; available: {all}"
                ))
            });
        }
        // An attempt may have refused a checkpoint that is in fact intact, so such a checkpoint is
        // still a last resort.
        let is_usable = |checkpoint: &&CheckpointRecord| !checkpoint.refused;
        let has_usable = checkpoints.iter().any(|checkpoint| is_usable(&checkpoint));
        let newest_first =
            checkpoints.iter().rev().filter(|checkpoint| !has_usable || is_usable(checkpoint));
        let none = || Failure::Input(format!("trial {trial} has no checkpoints"));
        let latest = newest_first.clone().next().ok_or_else(none)?;
        if self.latest {
            return Ok(latest);
        }
        let rank = |checkpoint: &CheckpointRecord| {
            let metric = number::parse(checkpoint.metric.as_deref()?);
            let metric = metric.filter(|metric| !metric.is_nan())?;
            Some(if smaller_is_better { metric } else { -metric })
        };
        let ranked = newest_first.filter_map(|checkpoint| Some((rank(checkpoint)?, checkpoint)));
        // Ties go to fewer batches, then to the newest: `min_by` returns the first.
        let best = ranked
            .min_by(|(a, of_a), (b, of_b)| a.total_cmp(b).then(of_a.batches.cmp(&of_b.batches)));
        match best {
            Some((_, best)) => Ok(best),
            None if self.best => Err(Failure::Input(format!(
                "no usable checkpoint of trial {trial} has a metric; use --latest"
            ))),
            None => Ok(latest),
        }
    }
}

/// Splits `NAME/CHECKPOINT`. Names of checkpoints are `BATCHES-ATTEMPT`.
pub(crate) fn split_name(name: &str) -> (&str, Option<&str>) {
    let is_number = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    let is_checkpoint = |text: &str| {
        text.split_once('-')
            .is_some_and(|(batches, attempt)| is_number(batches) && is_number(attempt))
    };
    match name.rsplit_once('/') {
        Some((name, checkpoint)) if is_checkpoint(checkpoint) => (name, Some(checkpoint)),
        _ => (name, None),
    }
}

/// Finds the experiment `name` and all its trials, or the trial `name` and its experiment. Returns
/// the index only for a trial.
async fn find(
    cluster: &Cluster,
    name: &str,
) -> Result<(Experiment, Vec<Trial>, Option<u32>), Failure> {
    let target = format!("experiment or trial `{name}`");
    let name = match name.contains('/') {
        true => TrialRef::split(name).map_or_else(|| name.to_owned(), |trial| trial.to_string()),
        false => {
            let api = cluster.api::<Experiment>();
            if let Some(experiment) = cluster.request(&target, api.get_opt(name)).await? {
                let trials = experiment::trials(cluster, &experiment).await?;
                let trials = trials.into_iter().map(|(trial, _)| trial).collect();
                return Ok((experiment, trials, None));
            }
            name.to_owned()
        }
    };
    let trial = cluster.request(&target, cluster.api::<Trial>().get(&name)).await?;
    let index = trial.spec.index;
    let experiment = cluster.experiment(&trial.spec.experiment).await?;
    Ok((experiment, vec![trial], Some(index)))
}

/// Lists the checkpoints of the experiment or trial `name`. If `trial` is set, lists only the
/// checkpoints of the trial with this index.
pub(crate) async fn list(
    cluster: &Cluster,
    name: &str,
    trial: Option<u32>,
) -> Result<List, Failure> {
    let (experiment, mut trials, _) = find(cluster, name).await?;
    if let Some(index) = trial {
        trials.retain(|trial| trial.spec.index == index);
        if trials.is_empty() {
            return Err(Failure::Input(format!(
                "trial {index} of experiment `{name}` not found; `stoker trial list {name}` lists \
                 the trials"
            )));
        }
    }
    let searcher = &experiment.spec.searcher;
    let mut list = checkpoints::list(&searcher.metric);
    for trial in &trials {
        let of = (trial.spec.experiment.as_str(), trial.spec.index);
        for record in trial.status.iter().flat_map(|status| &status.checkpoints) {
            let address = storage::checkpoint_address(&experiment, of.1, &record.name);
            checkpoints::add(&mut list, of, record, searcher.smaller_is_better, address);
        }
    }
    Ok(list)
}

/// Downloads a checkpoint of the trial `name`, or of the best trial of the experiment `name`. The
/// name may end with `/CHECKPOINT`.
pub(crate) async fn download(
    cluster: &Cluster,
    name: &str,
    choice: &Choice,
    options: &storage::Options,
    folder: &Path,
    output: Output,
) -> Result<(), Failure> {
    let (name, checkpoint) = split_name(name);
    let choice = choice.with_name(checkpoint)?;
    let (experiment, trials, index) = find(cluster, name).await?;
    let statuses = trials.iter().filter_map(|of| Some((of.spec.index, of.status.as_ref()?)));
    let own_name = experiment.metadata.name.as_deref().unwrap_or(name);
    let namespace = experiment.metadata.namespace.as_deref().unwrap_or_default();
    let flags = format!(" -n {namespace}");
    let none = || no_best_trial(&experiment, own_name, statuses, &flags);
    let index = index.or_else(|| best_trial(&experiment)).ok_or_else(none)?;
    let trial = trials.iter().find(|trial| trial.spec.index == index);
    let trial_name = format!("{}-{index}", experiment.metadata.name.as_deref().unwrap_or(name));
    let status = trial.and_then(|trial| trial.status.as_ref());
    let checkpoints = status.map(|status| status.checkpoints.as_slice());
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

/// Download of one checkpoint.
#[derive(Debug)]
pub(crate) struct Download<'a> {
    pub(crate) storage: &'a Storage,
    /// Name of the trial in messages.
    pub(crate) trial: &'a str,
    /// Path of the trial in the storage.
    pub(crate) path: &'a str,
    pub(crate) record: &'a CheckpointRecord,
}

impl Download<'_> {
    /// Downloads and verifies all files into `folder`. Writes the manifest last, so a directory
    /// with a manifest is complete and verified.
    pub(crate) async fn write_into(&self, folder: &Path, output: Output) -> Result<(), Failure> {
        let name = &self.record.name;
        if folder.join(MANIFEST).exists() {
            return Err(Failure::Input(format!(
                "cannot download into {}: it already contains a checkpoint; choose another \
                 directory",
                folder.display()
            )));
        }
        std::fs::create_dir_all(folder).map_err(|error| Failure::file("create", folder, error))?;
        let path = layout::manifest_path(self.path, name);
        let bytes = self.storage.get(&path).await.map_err(|error| self.unreadable(error))?;
        let hash = file_hash(&[&bytes], HashAlgorithm::Sha256);
        check(MANIFEST, &hash, &self.record.manifest_sha256)?;
        let manifest = Manifest::parse(&bytes).map_err(|error| {
            Failure::System(format!("cannot read the manifest of checkpoint {name}: {error}"))
        })?;
        refuse_other_files(folder, &manifest)?;
        for (file, entry) in &manifest.files {
            self.fetch(file, entry, &target(folder, file)?).await?;
        }
        write(&folder.join(MANIFEST), &bytes)?;
        match output {
            Output::Json => print::out(json!({
                "trial": self.trial, "checkpoint": name, "files": manifest.files.len(),
                "bytes": self.record.bytes, "folder": folder,
            })),
            Output::Text => print::out(format!(
                "checkpoint {name} of trial {}: {} files and the manifest, {} in {}",
                self.trial,
                manifest.files.len(),
                super::text::bytes(self.record.bytes),
                folder.display()
            )),
        }
        Ok(())
    }

    /// Downloads and verifies a file, of which only some parts are in memory.
    async fn fetch(&self, file: &str, entry: &FileEntry, target: &Path) -> Result<(), Failure> {
        let path = layout::checkpoint_file(self.path, &self.record.name, file);
        let size = self.storage.size(&path).await?.ok_or_else(|| self.missing(&path))?;
        if size != entry.bytes {
            return Err(Failure::System(format!(
                "{file} of the checkpoint is corrupt: it has {size} bytes, not {}; choose another \
                 checkpoint",
                entry.bytes
            )));
        }
        let mut partial = create_partial(target)?;
        let mut hasher = FileHasher::new(entry.hash.algorithm());
        let mut parts = std::pin::pin!(self.storage.get_in_order(&path, size));
        while let Some(part) = parts.next().await {
            let part = part.map_err(|error| self.unreadable(error))?;
            hasher.update(&part);
            partial.write_all(&part).map_err(|error| Failure::file("write", target, error))?;
        }
        check(file, &hasher.finish(), entry.hash.hex())?;
        set_name(partial, target)
    }

    fn unreadable(&self, error: StorageError) -> Failure {
        match error {
            StorageError::NotFound { path, .. } => self.missing(&path),
            error => error.into(),
        }
    }

    fn missing(&self, path: &str) -> Failure {
        Failure::System(format!(
            "cannot read checkpoint {} of trial {}: {path} is missing in {}; choose another \
             checkpoint; if the storage has another address here, set --storage-url and \
             --storage-endpoint",
            self.record.name,
            self.trial,
            self.storage.url()
        ))
    }
}

/// Fails if a directory contains files of something else. It may contain those of an interrupted
/// download.
fn refuse_other_files(folder: &Path, manifest: &Manifest) -> Result<(), Failure> {
    let failed = |error| Failure::file("read", folder, error);
    for entry in std::fs::read_dir(folder).map_err(failed)? {
        let name = entry.map_err(failed)?.file_name();
        // The root of a volume has a directory for repairs.
        let is_expected = name == "lost+found"
            || name.as_encoded_bytes().starts_with(PARTIAL_PREFIX.as_bytes())
            || manifest.files.keys().any(|file| Path::new(file).iter().next() == Some(&name));
        if !is_expected {
            return Err(Failure::Input(format!(
                "cannot download into {}: it contains {}, which is not a file of the checkpoint; \
                 choose an empty or a new directory",
                folder.display(),
                name.display()
            )));
        }
    }
    Ok(())
}

/// Returns the path of a file in `folder`. Refuses paths outside of `folder`, because the manifest
/// may have been tampered with.
fn target(folder: &Path, file: &str) -> Result<PathBuf, Failure> {
    let is_plain = |component: Component<'_>| matches!(component, Component::Normal(_));
    match !file.is_empty() && Path::new(file).components().all(is_plain) {
        true => Ok(folder.join(file)),
        false => Err(Failure::System(format!(
            "invalid file name in the manifest ({file:?}); choose another checkpoint"
        ))),
    }
}

/// Writes a file that is durable on return. An incomplete file never has this name.
fn write(path: &Path, bytes: &[u8]) -> Result<(), Failure> {
    let mut file = create_partial(path)?;
    file.write_all(bytes).map_err(|error| Failure::file("write", path, error))?;
    set_name(file, path)
}

/// Creates a temporary file in the directory of `path`. It is deleted if it is dropped. If the
/// process is killed, the next download into the directory deletes it.
fn create_partial(path: &Path) -> Result<NamedTempFile, Failure> {
    let parent = path.parent().unwrap_or(path);
    std::fs::create_dir_all(parent).map_err(|error| Failure::file("create", parent, error))?;
    delete_partial(parent).map_err(|error| Failure::file("delete files in", parent, error))?;
    // Temporary files are private by default. The umask applies.
    let permissions = Permissions::from_mode(0o666);
    tempfile::Builder::new()
        .prefix(PARTIAL_PREFIX)
        .permissions(permissions)
        .tempfile_in(parent)
        .map_err(|error| Failure::file("create", path, error))
}

/// Deletes the temporary files of interrupted downloads. A download that is still in progress then
/// fails: no other file can get the name of its file.
fn delete_partial(folder: &Path) -> io::Result<()> {
    for entry in std::fs::read_dir(folder)? {
        let entry = entry?;
        if entry.file_name().as_encoded_bytes().starts_with(PARTIAL_PREFIX.as_bytes()) {
            std::fs::remove_file(entry.path())?;
        }
    }
    Ok(())
}

/// Gives a complete file its name.
fn set_name(file: NamedTempFile, path: &Path) -> Result<(), Failure> {
    let synced = file.as_file().sync_all();
    let named = synced.and_then(|()| file.persist(path).map_err(|error| error.error));
    named.map(drop).map_err(|error| Failure::file("write", path, error))
}

fn check(file: &str, actual: &FileHash, expected: &str) -> Result<(), Failure> {
    if actual.hex() == expected {
        return Ok(());
    }
    Err(Failure::System(format!(
        "{file} of the checkpoint is corrupt: it has {actual}, not {expected}; choose another \
         checkpoint"
    )))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use stoker_storage::hash::sha256_hex;

    use super::*;

    fn record(name: &str, metric: Option<&str>) -> CheckpointRecord {
        serde_json::from_value(json!({
            "name": name, "batches": 1, "metric": metric, "manifestSha256": "", "bytes": 3,
        }))
        .unwrap()
    }

    fn numbered(number: usize, metric: Option<&str>) -> CheckpointRecord {
        let batches = number as u64;
        CheckpointRecord { batches, ..record(&number.to_string(), metric) }
    }

    fn check_choice(choice: &Choice, metrics: &[Option<&str>], smaller: bool, expected: &str) {
        let records: Vec<CheckpointRecord> =
            metrics.iter().enumerate().map(|(i, metric)| numbered(i, *metric)).collect();
        let text = match choice.of("t-0", &records, smaller) {
            Ok(record) => record.name.clone(),
            Err(error) => error.to_string(),
        };
        assert!(text.contains(expected), "{choice:?} {metrics:?}: {text}");
    }

    #[test]
    fn checkpoint_is_split_off_the_name() {
        let check = |name: &str, expected: (&str, Option<&str>)| {
            assert_eq!(split_name(name), expected);
        };
        check("mnist", ("mnist", None));
        check("mnist-0", ("mnist-0", None));
        check("mnist/0", ("mnist/0", None));
        check("mnist-0/000000000010-1", ("mnist-0", Some("000000000010-1")));
        check("mnist/0/000000000010-1", ("mnist/0", Some("000000000010-1")));
        let both = Choice { latest: true, ..Choice::default() }.with_name(Some("10-0"));
        assert!(both.unwrap_err().to_string().contains("remove --checkpoint"));
    }

    #[test]
    fn choice_is_best_latest_or_named() {
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
        check_choice(&named("7"), &metrics, true, "available: 0, 1, 2, 3");
    }

    #[test]
    fn refused_checkpoints_are_a_last_resort() {
        // Attempt 1 refused checkpoint 0, and trained its batches again.
        let old = CheckpointRecord { refused: true, ..numbered(0, Some("0.25")) };
        let new = CheckpointRecord { name: "new".to_owned(), ..numbered(0, Some("0.5")) };
        let check = |choice: Choice, records: &[&CheckpointRecord], expected: &str| {
            let records: Vec<CheckpointRecord> = records.iter().copied().cloned().collect();
            assert_eq!(choice.of("t-0", &records, true).unwrap().name, expected, "{choice:?}");
        };
        let best = || Choice { best: true, ..Choice::default() };
        let latest = || Choice { latest: true, ..Choice::default() };
        for choice in [Choice::default, best, latest] {
            check(choice(), &[&old, &new], "new");
            check(choice(), &[&new, &old], "new");
            check(choice(), &[&old], "0");
        }
        let named = Choice { checkpoint: Some("0".to_owned()), ..Choice::default() };
        check(named, &[&old, &new], "0");
        // Without a recorded refusal, the newer one of the same batch is the best.
        let same = CheckpointRecord { metric: old.metric.clone(), ..new.clone() };
        let unmarked = CheckpointRecord { refused: false, ..old.clone() };
        check(best(), &[&unmarked, &same], "new");
    }

    /// Returns a storage with one checkpoint, and its record.
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
    async fn download_refuses_a_directory_with_a_checkpoint() {
        let (storage, record) = stored(&[("model.bpk", "m"), ("state/a", "s")]).await;
        let folder = tempfile::tempdir().unwrap();
        let target = folder.path().join("new/one");
        fetch(&storage, &record, &target).await.unwrap();
        assert_eq!(std::fs::read_to_string(target.join("state/a")).unwrap(), "s");
        assert!(target.join(MANIFEST).exists());
        let again = fetch(&storage, &record, &target).await.unwrap_err();
        assert!(again.contains("already contains a checkpoint"), "{again}");
    }

    #[tokio::test]
    async fn download_refuses_a_directory_with_other_files() {
        let (storage, record) = stored(&[("model.bpk", "m"), ("state/a", "s")]).await;
        let folder = tempfile::tempdir().unwrap();
        let other = folder.path().join("default");
        std::fs::create_dir(&other).unwrap();
        let error = fetch(&storage, &record, folder.path()).await.unwrap_err();
        assert!(error.contains("it contains default, which is not a file of"), "{error}");
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);
        std::fs::remove_dir(&other).unwrap();
        // The root of a volume, and an interrupted download, which is repeated.
        std::fs::create_dir(folder.path().join("lost+found")).unwrap();
        std::fs::create_dir(folder.path().join("state")).unwrap();
        std::fs::write(folder.path().join("model.bpk"), "x").unwrap();
        std::fs::write(folder.path().join(format!("{PARTIAL_PREFIX}1")), "m").unwrap();
        fetch(&storage, &record, folder.path()).await.unwrap();
        assert_eq!(std::fs::read_to_string(folder.path().join("model.bpk")).unwrap(), "m");
    }

    #[tokio::test]
    async fn corrupt_file_leaves_no_manifest() {
        let (storage, record) = stored(&[("model.bpk", "m")]).await;
        storage.put(&layout::checkpoint_file("t", "c", "model.bpk"), "x".into()).await.unwrap();
        let folder = tempfile::tempdir().unwrap();
        let error = fetch(&storage, &record, folder.path()).await.unwrap_err();
        assert!(error.contains("model.bpk of the checkpoint is corrupt"), "{error}");
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
    }

    /// Stores a manifest as that of the only checkpoint.
    async fn replace_manifest(
        storage: &Storage,
        record: &CheckpointRecord,
        manifest: &serde_json::Value,
    ) -> CheckpointRecord {
        let manifest = manifest.to_string();
        let manifest_sha256 = sha256_hex(manifest.as_bytes());
        storage.put(&layout::manifest_path("t", "c"), manifest.into()).await.unwrap();
        CheckpointRecord { manifest_sha256, ..record.clone() }
    }

    #[tokio::test]
    async fn files_of_all_formats_are_verified() {
        use HashAlgorithm::{Blake3, Sha256, Sha256Chunks};
        for (format, algorithm) in [(1, Sha256), (2, Sha256Chunks(4096)), (3, Blake3)] {
            verify_files(format, algorithm).await;
        }
    }

    async fn verify_files(good_format: u32, algorithm: HashAlgorithm) {
        let text = "0123456789".repeat(1000);
        let (storage, record) = stored(&[("model.bpk", &text)]).await;
        let manifest = |format: u32, bytes: u64| {
            let hash = stoker_storage::hash::file_hash(&[&text], algorithm);
            json!({
                "format": format, "experimentId": "x", "trial": 0, "attempt": 0, "batches": 1,
                "files": {"model.bpk": FileEntry { bytes, hash }},
            })
        };
        let folder = tempfile::tempdir().unwrap();
        let check = async |manifest: serde_json::Value, expected: &str| {
            let record = replace_manifest(&storage, &record, &manifest).await;
            let error = fetch(&storage, &record, folder.path()).await.unwrap_err();
            assert!(error.contains(expected), "{error}");
            assert!(!folder.path().join(MANIFEST).exists());
        };
        let len = text.len() as u64;
        check(manifest(4, len), "it has format 4, but this version reads formats 1 to 3").await;
        check(manifest(good_format, 9), "it has 10000 bytes, not 9").await;
        let good = replace_manifest(&storage, &record, &manifest(good_format, len)).await;
        fetch(&storage, &good, folder.path()).await.unwrap();
        assert_eq!(std::fs::read_to_string(folder.path().join("model.bpk")).unwrap(), text);
        let path = layout::checkpoint_file("t", "c", "model.bpk");
        storage.put(&path, text.replace("0123", "0124").into()).await.unwrap();
        let other = tempfile::tempdir().unwrap();
        let error = fetch(&storage, &good, other.path()).await.unwrap_err();
        assert!(error.contains("model.bpk of the checkpoint is corrupt"), "{error}");
    }

    /// A full disk, for example, interrupts a write.
    #[test]
    fn incomplete_files_have_no_name() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("new").join(MANIFEST);
        let mut file = create_partial(&path).unwrap();
        file.write_all(b"{").unwrap();
        assert!(!path.exists());
        drop(file);
        assert_eq!(std::fs::read_dir(path.parent().unwrap()).unwrap().count(), 0);
        // A killed process does not delete its file.
        let (_, left) = create_partial(&path).unwrap().keep().unwrap();
        assert!(left.exists());
        write(&path, b"{}").unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), b"{}");
        assert!(!left.exists());
        let other = folder.path().join("other");
        std::fs::write(&other, "").unwrap();
        let mode = |path: &Path| path.metadata().unwrap().permissions().mode();
        assert_eq!(mode(&path), mode(&other));
    }

    #[test]
    fn manifest_paths_outside_the_directory_are_refused() {
        let of = |file: &str| target(Path::new("/x"), file).is_ok();
        assert!(of("a") && of("a/b"));
        assert!(!of("../a") && !of("/a") && !of("a/../../b") && !of(""));
    }
}
