//! Tests with corrupt and interrupted checkpoints, and those of other trials.

mod formats;
mod unreported;

use std::sync::mpsc::channel;

use stoker_storage::StorageError;
use stoker_storage::segments::{SegmentWriter, Segments};
use tokio::runtime::Runtime;

use super::*;

struct Fixture {
    rt: Runtime,
    folder: tempfile::TempDir,
    storage: Storage,
    config: TrialConfig,
}

impl Fixture {
    fn new() -> Self {
        let rt = tokio::runtime::Runtime::new().unwrap();
        let folder = tempfile::tempdir().unwrap();
        let storage = Storage::open(folder.path().to_str().unwrap(), None).unwrap();
        Self { rt, storage, config: config(folder.path().to_str().unwrap()), folder }
    }

    fn checkpoints(&self) -> Checkpointer {
        Checkpointer::new(self.rt.handle().clone(), self.storage.clone(), &self.config)
    }

    fn save(&self, batches: u64) -> CheckpointRef {
        let mut checkpoints = self.checkpoints();
        checkpoints.begin(save(batches), Box::new(|| Ok(new_contents()))).unwrap();
        let saved = checkpoints.finish().unwrap().unwrap();
        CheckpointRef { name: saved.name, manifest_sha256: saved.manifest_sha256, trial_path: None }
    }

    fn path(&self, file: &str) -> std::path::PathBuf {
        self.folder.path().join("t/checkpoints").join(file)
    }
}

/// A configuration with the fields that checkpoints and their callees read.
fn config(url: &str) -> TrialConfig {
    serde_json::from_value(serde_json::json!({
        "version": 1, "experiment": "mnist", "experimentId": "id-1", "trial": 4, "attempt": 2,
        "seed": 1, "experimentSeed": 1, "hyperparameters": {}, "unit": "batches", "units": 10,
        "metric": "loss", "smallerIsBetter": true, "schedulingUnit": 1,
        "aggregationFrequency": 1, "storage": {"url": url, "trialPath": "t"},
        "door": {"url": "http://127.0.0.1:1", "tokenFile": "/nowhere"},
    }))
    .unwrap()
}

fn save(batches: u64) -> SaveRequest {
    SaveRequest { batches, ..SaveRequest::default() }
}

fn contents() -> CheckpointContents {
    BTreeMap::from([
        ("model".to_owned(), Bytes::from_static(b"weights")),
        ("optimizers/0".to_owned(), Bytes::from_static(b"moments")),
    ])
}

fn new_contents() -> NewContents {
    contents().into_iter().map(|(name, bytes)| (name, bytes.into())).collect()
}

#[test]
fn saved_checkpoint_is_restored_with_its_metadata() {
    let fixture = Fixture::new();
    let mut checkpoints = fixture.checkpoints();
    let metadata = BTreeMap::from([("note".to_owned(), Value::from("x"))]);
    let request = SaveRequest { metric: Some(0.5), metadata: metadata.clone(), ..save(100) };
    checkpoints.begin(request, Box::new(|| Ok(new_contents()))).unwrap();
    let saved = checkpoints.finish().unwrap().unwrap();
    assert_eq!((saved.name.as_str(), saved.bytes, saved.metric), ("000000000100-2", 14, Some(0.5)));
    assert_eq!(checkpoints.finish().unwrap(), None);
    let wanted = CheckpointRef {
        name: saved.name,
        manifest_sha256: saved.manifest_sha256,
        trial_path: None,
    };
    let restored = checkpoints.restore(&[wanted]).unwrap();
    let (name, manifest, files) = restored.checkpoint.unwrap();
    assert_eq!((name.as_str(), files), ("000000000100-2", contents()));
    assert_eq!((manifest.batches, manifest.attempt, manifest.metadata), (100, 2, metadata));
    assert_eq!(restored.refused, BTreeMap::new());
    let (folder, files) = load_folder(&fixture.path("000000000100-2")).unwrap();
    assert_eq!((folder.batches, files), (100, contents()));
}

/// Damages the newer of two checkpoints; expects the older one, and the reason.
fn check(damage: impl FnOnce(&mut Fixture), reason: &str) {
    let mut fixture = Fixture::new();
    let (older, newer) = (fixture.save(100), fixture.save(200));
    damage(&mut fixture);
    let restored = fixture.checkpoints().restore(&[newer.clone(), older.clone()]).unwrap();
    let name = restored.checkpoint.map(|(name, ..)| name);
    assert_eq!(name.as_ref(), Some(&older.name), "{reason}");
    let actual = &restored.refused[&newer.name];
    assert!(actual.contains(reason), "{actual:?} does not contain {reason:?}");
}

#[test]
fn damaged_checkpoint_falls_back_to_the_previous() {
    let write = |fixture: &Fixture, file: &str, text: &str| {
        std::fs::write(fixture.path("000000000200-2").join(file), text).unwrap();
    };
    let remove = |fixture: &Fixture, file: &str| {
        std::fs::remove_file(fixture.path("000000000200-2").join(file)).unwrap();
    };
    check(|fixture| remove(fixture, "manifest.json"), "manifest.json is missing");
    check(|fixture| write(fixture, "manifest.json", "{"), "manifest.json has SHA-256");
    check(|fixture| remove(fixture, "model"), "model is missing");
    check(
        |fixture| write(fixture, "model", "weigh"),
        "model has 5 bytes, but manifest.json lists 7",
    );
    check(|fixture| write(fixture, "model", "WEIGHTS"), "model has SHA-256");
    check(|fixture| write(fixture, "optimizers/0", "momentS"), "optimizers/0 has SHA-256");
    check(|fixture| std::fs::remove_dir_all(fixture.path("000000000200-2")).unwrap(), "is missing");
}

/// Replaces a file by a link to itself, so that reading it fails.
fn make_unreadable(fixture: &Fixture, file: &str) {
    let path = fixture.path(file);
    std::fs::remove_file(&path).unwrap();
    std::os::unix::fs::symlink(&path, &path).unwrap();
}

#[test]
fn unreadable_checkpoint_falls_back_to_the_previous() {
    for file in ["model", "manifest.json"] {
        let path = format!("000000000200-2/{file}");
        check(|fixture| make_unreadable(fixture, &path), file);
    }
    let fixture = Fixture::new();
    let all = [fixture.save(200), fixture.save(100)];
    make_unreadable(&fixture, "000000000200-2/model");
    std::fs::write(fixture.path("000000000100-2/model"), "WEIGHTS").unwrap();
    // Not from scratch: the checkpoint may be intact.
    let error = fixture.checkpoints().restore(&all).unwrap_err();
    let is_unreadable =
        matches!(&error, CheckpointError::Storage { name, .. } if *name == all[0].name);
    assert!(is_unreadable, "{error}");
}

/// A program without a runner could not read the manifest at its start.
#[test]
fn manifest_with_an_unknown_hash_is_accepted() {
    let fixture = Fixture::new();
    let newest = CheckpointRef { manifest_sha256: String::new(), ..fixture.save(200) };
    let restored = fixture.checkpoints().restore(&[newest.clone(), fixture.save(100)]).unwrap();
    assert_eq!(restored.chosen, Some(newest));
}

/// Manifests may be readable over a link that is too slow for large files, so only a loaded
/// checkpoint shows that the storage is available.
#[test]
fn two_unreadable_checkpoints_fall_back_to_a_loaded_one() {
    let fixture = Fixture::new();
    let all = [300, 200, 100].map(|batches| fixture.save(batches));
    make_unreadable(&fixture, "000000000300-2/model");
    make_unreadable(&fixture, "000000000200-2/model");
    let restored = fixture.checkpoints().restore(&all).unwrap();
    assert_eq!(restored.chosen.as_ref(), Some(&all[2]));
    let refused: Vec<&String> = restored.refused.keys().collect();
    assert_eq!(refused, [&all[1].name, &all[0].name]);
    make_unreadable(&fixture, "000000000100-2/model");
    let error = fixture.checkpoints().restore(&all).unwrap_err();
    let is_first = matches!(&error, CheckpointError::Storage { name, .. } if *name == all[0].name);
    assert!(is_first, "{error}");
}

#[test]
fn newest_checkpoint_is_used_if_an_outage_ends() {
    let fixture = Fixture::new();
    let all = [300, 200, 100].map(|batches| fixture.save(batches));
    let checkpoints = fixture.checkpoints();
    let (num_loads, rt) = (std::cell::Cell::new(0), fixture.rt.handle());
    // The outage lasts for three loads: the newest checkpoint, again, and the one before.
    let load = |_: &CheckpointStore, wanted: &CheckpointRef| {
        num_loads.set(num_loads.get() + 1);
        let source = || StorageError::Unavailable {
            url: String::new(),
            path: "model".to_owned(),
            attempts: 1,
            reason: "timeout".to_owned(),
        };
        let error = || CheckpointError::Storage { name: wanted.name.clone(), source: source() };
        if num_loads.get() > 3 { Ok(wanted.name.clone()) } else { Err(error()) }
    };
    let choice = load_first(rt, checkpoints.store(), &all, load).unwrap();
    assert_eq!(choice.chosen, Some((all[0].clone(), all[0].name.clone())));
    assert_eq!((choice.refused, num_loads.get()), (BTreeMap::new(), 5));
}

#[test]
fn failed_upload_waits_for_the_other_files() {
    let fixture = Fixture::new();
    let large = Bytes::from(vec![7; 64 << 20]);
    let invalid = ("../x".to_owned(), Bytes::from("x").into());
    let contents = NewContents::from([invalid, ("model".to_owned(), large.clone().into())]);
    let checkpoints = fixture.checkpoints();
    let uploaded = fixture.rt.block_on(checkpoints.store().upload("000000000100-2", contents));
    let error = uploaded.unwrap_err().to_string();
    assert!(error.contains("../x"), "{error}");
    let stored = std::fs::metadata(fixture.path("000000000100-2/model")).unwrap();
    assert_eq!(stored.len(), large.len() as u64);
}

#[test]
fn another_trials_checkpoint_is_refused() {
    let mut fixture = Fixture::new();
    let one = fixture.save(100);
    fixture.config.trial = 5;
    let refused = fixture.checkpoints().restore(std::slice::from_ref(&one)).unwrap().refused;
    assert!(refused[&one.name].contains("trial 4, expected experiment id-1 trial 5"));
    (fixture.config.trial, fixture.config.experiment_id) = (4, "id-2".to_owned());
    let restored = fixture.checkpoints().restore(std::slice::from_ref(&one)).unwrap();
    assert!(restored.checkpoint.is_none());
    assert!(restored.refused[&one.name].contains("is of experiment id-1"));
}

#[test]
fn corrupt_directory_is_refused() {
    let fixture = Fixture::new();
    fixture.save(100);
    let folder = fixture.path("000000000100-2");
    std::fs::write(folder.join("model"), "WEIGHTS").unwrap();
    let error = load_folder(&folder).unwrap_err().to_string();
    assert!(error.contains("model has SHA-256"), "{error}");
    let error = load_folder(fixture.folder.path()).unwrap_err().to_string();
    assert!(error.contains("cannot read manifest.json"), "{error}");
    let error = load_folder(std::path::Path::new("/nowhere")).unwrap_err().to_string();
    assert!(error.starts_with("checkpoint directory /nowhere not found"), "{error}");
}

#[test]
fn next_save_waits_for_the_previous() {
    let fixture = Fixture::new();
    let mut checkpoints = fixture.checkpoints();
    let (go, wait) = channel();
    let slow = move || wait.recv().map_err(|error| error.to_string()).map(|()| new_contents());
    checkpoints.begin(save(1), Box::new(slow)).unwrap();
    assert_eq!(checkpoints.poll().unwrap(), None);
    go.send(()).unwrap();
    checkpoints.begin(save(2), Box::new(|| Ok(new_contents()))).unwrap();
    assert_eq!(checkpoints.poll().unwrap().map(|saved| saved.batches), Some(1));
    assert_eq!(checkpoints.finish().unwrap().map(|saved| saved.batches), Some(2));
    assert_eq!(checkpoints.finish().unwrap(), None);
}

/// The process may be killed during the second save.
#[test]
fn complete_checkpoint_does_not_wait_for_the_next() {
    let fixture = Fixture::new();
    let mut checkpoints = fixture.checkpoints();
    checkpoints.begin(save(1), Box::new(|| Ok(new_contents()))).unwrap();
    let (go, wait) = channel();
    let slow = move || match wait.recv_timeout(Duration::from_secs(30)) {
        Ok(()) => Ok(new_contents()),
        Err(error) => Err(error.to_string()),
    };
    checkpoints.begin(save(2), Box::new(slow)).unwrap();
    assert_eq!(checkpoints.finish().unwrap().map(|saved| saved.batches), Some(1));
    go.send(()).unwrap();
    assert_eq!(checkpoints.finish().unwrap().map(|saved| saved.batches), Some(2));
    assert_eq!(checkpoints.finish().unwrap(), None);
}

#[test]
fn manifest_is_written_after_the_metrics() {
    let fixture = Fixture::new();
    // A file where the directory of the metrics should be, so that writing metrics fails.
    std::fs::write(fixture.folder.path().join("m"), "").unwrap();
    let segments = Segments::new("m/0-", ".jsonl");
    let metrics = SegmentWriter::new(fixture.rt.handle(), fixture.storage.clone(), segments);
    metrics.append("row\n");
    let mut checkpoints = fixture.checkpoints();
    let request = SaveRequest { after: vec![metrics.request_flush()], ..save(1) };
    checkpoints.begin(request, Box::new(|| Ok(new_contents()))).unwrap();
    let error = checkpoints.finish().unwrap_err();
    assert!(matches!(error, CheckpointError::Storage { .. }), "{error}");
    let left = fixture.rt.block_on(fixture.storage.list("t/checkpoints")).unwrap();
    assert!(left.is_empty(), "files of the failed save remain: {left:?}");
    std::fs::remove_file(fixture.folder.path().join("m")).unwrap();
    let request = SaveRequest { after: vec![metrics.request_flush()], ..save(1) };
    checkpoints.begin(request, Box::new(|| Ok(new_contents()))).unwrap();
    assert!(checkpoints.finish().unwrap().is_some());
    assert!(fixture.path("000000000001-2/manifest.json").exists());
    assert!(fixture.folder.path().join("m/0-00000000.jsonl").exists());
}

#[test]
fn failure_to_produce_state_is_reported_once() {
    let fixture = Fixture::new();
    let mut checkpoints = fixture.checkpoints();
    checkpoints.begin(save(1), Box::new(|| Err("no memory".to_owned()))).unwrap();
    let error = checkpoints.finish().unwrap_err();
    let text = "cannot produce the state for checkpoint 000000000001-2: no memory";
    assert_eq!(error.to_string(), text);
    checkpoints.begin(save(2), Box::new(|| panic!("boom"))).unwrap();
    let error = checkpoints.finish().unwrap_err();
    assert!(matches!(error, CheckpointError::Contents { .. }), "{error}");
    assert_eq!(checkpoints.finish().unwrap(), None);
}

#[test]
fn storage_failure_does_not_condemn_checkpoints() {
    let fixture = Fixture::new();
    let one = fixture.save(100);
    // A file where the directory of the checkpoints should be, so that reading fails.
    std::fs::remove_dir_all(fixture.path("")).unwrap();
    std::fs::write(fixture.folder.path().join("t/checkpoints"), "").unwrap();
    let error = fixture.checkpoints().restore(&[one]).unwrap_err();
    assert!(matches!(error, CheckpointError::Storage { .. }), "{error}");
}
