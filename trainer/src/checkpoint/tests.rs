//! Checkpoints that are damaged, cut short or another's.

use std::sync::mpsc::channel;

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

    fn checkpoints(&self) -> Checkpoints {
        Checkpoints::new(self.rt.handle().clone(), self.storage.clone(), &self.config)
    }

    fn save(&self, batches: u64) -> CheckpointRef {
        let mut checkpoints = self.checkpoints();
        checkpoints.begin(save(batches), Box::new(|| Ok(parts()))).unwrap();
        let saved = checkpoints.finish().unwrap().unwrap();
        CheckpointRef { name: saved.name, manifest_sha256: saved.manifest_sha256 }
    }

    fn path(&self, file: &str) -> std::path::PathBuf {
        self.folder.path().join("t/checkpoints").join(file)
    }
}

/// A config with what this module and its neighbours read.
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

fn save(batches: u64) -> Save {
    Save { batches, ..Save::default() }
}

fn parts() -> Parts {
    BTreeMap::from([
        ("model".to_owned(), Bytes::from_static(b"weights")),
        ("optimizers/0".to_owned(), Bytes::from_static(b"moments")),
    ])
}

#[test]
fn what_was_saved_is_restored_with_all_that_its_manifest_says() {
    let it = Fixture::new();
    let mut checkpoints = it.checkpoints();
    let metadata = BTreeMap::from([("note".to_owned(), Value::from("x"))]);
    let wish = Save { metric: Some(0.5), metadata: metadata.clone(), ..save(100) };
    checkpoints.begin(wish, Box::new(|| Ok(parts()))).unwrap();
    let saved = checkpoints.finish().unwrap().unwrap();
    assert_eq!((saved.name.as_str(), saved.bytes, saved.metric), ("000000000100-2", 14, Some(0.5)));
    assert_eq!(checkpoints.finish().unwrap(), None);
    let wanted = CheckpointRef { name: saved.name, manifest_sha256: saved.manifest_sha256 };
    let restored = checkpoints.restore(&[wanted]).unwrap();
    let (name, manifest, files) = restored.checkpoint.unwrap();
    assert_eq!((name.as_str(), files), ("000000000100-2", parts()));
    assert_eq!((manifest.batches, manifest.attempt, manifest.metadata), (100, 2, metadata));
    assert_eq!(restored.refused, BTreeMap::new());
    let (folder, files) = load_folder(&it.path("000000000100-2")).unwrap();
    assert_eq!((folder.batches, files), (100, parts()));
}

/// Damages the newer of two checkpoints and expects the older one, with the reason.
fn check(damage: impl FnOnce(&mut Fixture), reason: &str) {
    let mut it = Fixture::new();
    let (older, newer) = (it.save(100), it.save(200));
    damage(&mut it);
    let restored = it.checkpoints().restore(&[newer.clone(), older.clone()]).unwrap();
    let found = restored.checkpoint.map(|it| it.0);
    assert_eq!(found.as_ref(), Some(&older.name), "{reason}");
    let actual = &restored.refused[&newer.name];
    assert!(actual.contains(reason), "{actual:?} does not say {reason:?}");
}

#[test]
fn a_checkpoint_that_is_not_whole_gives_way_to_the_one_before() {
    let write = |it: &Fixture, file: &str, text: &str| {
        std::fs::write(it.path("000000000200-2").join(file), text).unwrap();
    };
    let remove = |it: &Fixture, file: &str| {
        std::fs::remove_file(it.path("000000000200-2").join(file)).unwrap();
    };
    check(|it| remove(it, "manifest.json"), "manifest.json is missing");
    check(|it| write(it, "manifest.json", "{"), "manifest.json has SHA-256");
    check(|it| remove(it, "model"), "model is missing");
    check(|it| write(it, "model", "weigh"), "model has 5 bytes, manifest.json says 7");
    check(|it| write(it, "model", "WEIGHTS"), "model has SHA-256");
    check(|it| write(it, "optimizers/0", "momentS"), "optimizers/0 has SHA-256");
    check(|it| std::fs::remove_dir_all(it.path("000000000200-2")).unwrap(), "is missing");
}

#[test]
fn another_trials_checkpoint_is_refused() {
    let mut it = Fixture::new();
    let one = it.save(100);
    it.config.trial = 5;
    let refused = it.checkpoints().restore(std::slice::from_ref(&one)).unwrap().refused;
    assert!(refused[&one.name].contains("trial 4, wanted is experiment id-1 trial 5"));
    (it.config.trial, it.config.experiment_id) = (4, "id-2".to_owned());
    let restored = it.checkpoints().restore(std::slice::from_ref(&one)).unwrap();
    assert!(restored.checkpoint.is_none());
    assert!(restored.refused[&one.name].contains("is of experiment id-1"));
}

#[test]
fn a_folder_is_read_only_if_it_is_whole() {
    let it = Fixture::new();
    it.save(100);
    let folder = it.path("000000000100-2");
    std::fs::write(folder.join("model"), "WEIGHTS").unwrap();
    let error = load_folder(&folder).unwrap_err().to_string();
    assert!(error.contains("model has SHA-256"), "{error}");
    let error = load_folder(std::path::Path::new("/nowhere")).unwrap_err().to_string();
    assert!(error.contains("manifest.json cannot be read"), "{error}");
}

#[test]
fn a_save_runs_beside_the_loop_and_the_next_one_waits_for_it() {
    let it = Fixture::new();
    let mut checkpoints = it.checkpoints();
    let (go, wait) = channel();
    let slow = move || wait.recv().map_err(|it| it.to_string()).map(|()| parts());
    checkpoints.begin(save(1), Box::new(slow)).unwrap();
    assert_eq!(checkpoints.poll().unwrap(), None);
    go.send(()).unwrap();
    checkpoints.begin(save(2), Box::new(|| Ok(parts()))).unwrap();
    assert_eq!(checkpoints.poll().unwrap().map(|it| it.batches), Some(1));
    assert_eq!(checkpoints.finish().unwrap().map(|it| it.batches), Some(2));
    assert_eq!(checkpoints.finish().unwrap(), None);
}

#[test]
fn the_manifest_waits_for_the_metrics_and_is_not_written_if_they_fail() {
    let it = Fixture::new();
    // A file where the folder of the metrics should be.
    std::fs::write(it.folder.path().join("m"), "").unwrap();
    let segments = Segments::new("m/0-", ".jsonl");
    let metrics = SegmentWriter::new(it.rt.handle(), it.storage.clone(), segments);
    metrics.append("row\n");
    let mut checkpoints = it.checkpoints();
    let wish = Save { after: vec![metrics.stored()], ..save(1) };
    checkpoints.begin(wish, Box::new(|| Ok(parts()))).unwrap();
    let error = checkpoints.finish().unwrap_err();
    assert!(matches!(error, CheckpointError::Storage { .. }), "{error}");
    let left = it.rt.block_on(it.storage.list("t/checkpoints")).unwrap();
    assert!(left.is_empty(), "half a checkpoint is left: {left:?}");
    std::fs::remove_file(it.folder.path().join("m")).unwrap();
    let wish = Save { after: vec![metrics.stored()], ..save(1) };
    checkpoints.begin(wish, Box::new(|| Ok(parts()))).unwrap();
    assert!(checkpoints.finish().unwrap().is_some());
    assert!(it.path("000000000001-2/manifest.json").exists());
    assert!(it.folder.path().join("m/0-00000000.jsonl").exists());
}

#[test]
fn a_program_that_cannot_say_its_state_is_told_so_once() {
    let it = Fixture::new();
    let mut checkpoints = it.checkpoints();
    checkpoints.begin(save(1), Box::new(|| Err("no memory".to_owned()))).unwrap();
    let error = checkpoints.finish().unwrap_err();
    let text = "the state for checkpoint 000000000001-2 could not be written: no memory";
    assert_eq!(error.to_string(), text);
    checkpoints.begin(save(2), Box::new(|| panic!("boom"))).unwrap();
    let error = checkpoints.finish().unwrap_err();
    assert!(matches!(error, CheckpointError::Make { .. }), "{error}");
    assert_eq!(checkpoints.finish().unwrap(), None);
}

#[test]
fn a_storage_that_is_away_says_nothing_of_its_checkpoints() {
    let it = Fixture::new();
    let one = it.save(100);
    // A file where the folder of the checkpoints should be.
    std::fs::remove_dir_all(it.path("")).unwrap();
    std::fs::write(it.folder.path().join("t/checkpoints"), "").unwrap();
    let error = it.checkpoints().restore(&[one]).unwrap_err();
    assert!(matches!(error, CheckpointError::Storage { .. }), "{error}");
}
