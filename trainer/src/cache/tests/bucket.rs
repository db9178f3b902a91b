//! Tests of sets that machines share through a bucket.

use std::sync::mpsc::channel;
use std::sync::{Arc, Barrier, Mutex};
use std::time::{Duration, Instant};

use bytes::Bytes;
use stoker_storage::Storage;
use stoker_test_cluster::PATIENCE;

use super::*;
use crate::cache::bucket::{TRANSFERS_MAX, store_segment};
use crate::cache::manifest::{Manifest, SegmentEntry};

/// Waits for a file.
pub(super) fn until_exists(path: &Path) {
    let start = Instant::now();
    while !path.exists() {
        assert!(start.elapsed() < PATIENCE, "{} is missing", path.display());
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Builds a set of this many segments and uploads it.
pub(super) fn uploaded_set(sets: &DatasetBucket, dir: &DatasetDir, segments: usize) -> Manifest {
    dir.prepare_staging().unwrap();
    let segments = (0..segments).map(|number| {
        let mut writer = segment::Writer::new(&dir.staging_dir(), number).unwrap();
        writer.record(&[number as u8; 100]).unwrap();
        writer.finish().unwrap()
    });
    let manifest = Manifest::new(dir, segments.collect());
    manifest.write(&dir.staging_dir()).unwrap();
    let lock = sets.prepare_upload(dir, false).unwrap();
    dir.publish().unwrap();
    sets.upload(dir, lock, &StopSignal::default());
    manifest
}

/// The other segments are in flight when the first is found damaged.
#[test]
fn failed_download_waits_for_all_segments() {
    let context = standalone(None);
    let rt = context.io().runtime().clone();
    let [bucket, here] = [(); 2].map(|()| tempfile::tempdir().unwrap());
    let storage = Storage::open(bucket.path().to_str().unwrap(), None).unwrap();
    let bucket_sets = DatasetBucket::new(rt, storage, "ml/datasets");
    let dir = DatasetDir::new(here.path(), "a", "v1", Split::Training).unwrap();
    // As many segments as are downloaded concurrently.
    let manifest = uploaded_set(&bucket_sets, &dir, TRANSFERS_MAX);
    let stored = bucket.path().join("ml/datasets/a/v1/training");
    let first = stored.join(format!("{}.seg", manifest.segments[0].sha256));
    std::fs::write(first, "damaged").unwrap();
    dir.prepare_staging().unwrap();
    let quota = quota::CacheQuota::new(here.path(), None, &dir).unwrap();
    // All segments are in memory before the first is verified. The gate holds the others then.
    let (gate, all) = (Arc::new(Mutex::new(())), Arc::new(Barrier::new(TRANSFERS_MAX)));
    let ((end, ends), stop) = (channel(), StopSignal::default());
    let store = {
        let gate = gate.clone();
        move |folder: &Path, entry: &SegmentEntry, bytes: &Bytes| {
            all.wait();
            let is_first = entry.file == "00000.seg";
            if !is_first {
                drop(gate.lock().unwrap());
            }
            let stored = store_segment(folder, entry, bytes);
            end.send(is_first).unwrap();
            stored
        }
    };
    let error = std::thread::scope(|scope| {
        let closed = gate.lock().unwrap();
        let download = scope.spawn(|| bucket_sets.download_with(&dir, &quota, &stop, store));
        assert!(ends.recv_timeout(PATIENCE).unwrap(), "a segment passed the closed gate");
        // A download that does not wait for the other segments returns now.
        let start = Instant::now();
        while !download.is_finished() && start.elapsed() < Duration::from_millis(500) {
            std::thread::sleep(Duration::from_millis(5));
        }
        drop(closed);
        download.join().unwrap().unwrap_err().to_string()
    });
    assert!(error.contains(".seg is damaged: its SHA-256 is"), "{error}");
    for _ in 1..TRANSFERS_MAX {
        ends.recv_timeout(PATIENCE).unwrap();
    }
    // Only the intact segments stay, with the mark of the download.
    assert_eq!(std::fs::read_dir(dir.staging_dir()).unwrap().count(), TRANSFERS_MAX);
    assert!(!dir.staging_dir().join("00000.seg").exists());
}

#[test]
fn other_machines_download_instead_of_building() {
    let context = standalone(None);
    let rt = context.io().runtime().clone();
    let [bucket, one, two, three, four] = [(); 5].map(|()| tempfile::tempdir().unwrap());
    let storage = Storage::open(bucket.path().to_str().unwrap(), None).unwrap();
    let shared = || Some(DatasetBucket::new(rt.clone(), storage.clone(), "ml/datasets"));
    let (builds, of) =
        (AtomicUsize::new(0), |root: &Path| DataCache::new(root).with_bucket(shared()));
    check_all(&open(&of(one.path()), "a", 50, &builds).unwrap(), 50);
    assert!(bucket.path().join("ml/datasets/a/v1/training/manifest.json").exists());
    check_all(&open(&of(two.path()), "a", 50, &builds).unwrap(), 50);
    assert_eq!(builds.load(Ordering::Relaxed), 1);
    let read = |root: &Path| std::fs::read(segment(root, "a")).unwrap();
    assert!(read(one.path()) == read(two.path()));
    // A damaged copy in the bucket is not used.
    let stored = bucket.path().join("ml/datasets/a/v1/training");
    for entry in std::fs::read_dir(stored).unwrap() {
        let file = entry.unwrap().path();
        if file.extension().is_some_and(|extension| extension == "seg") {
            let mut bytes = std::fs::read(&file).unwrap();
            bytes[77] ^= 1;
            std::fs::write(&file, bytes).unwrap();
        }
    }
    check_all(&open(&of(three.path()), "a", 50, &builds).unwrap(), 50);
    assert_eq!(builds.load(Ordering::Relaxed), 2);
    // The machine that found the damage replaced the copy.
    check_all(&open(&of(four.path()), "a", 50, &builds).unwrap(), 50);
    assert_eq!(builds.load(Ordering::Relaxed), 2);
}

/// Without a replacement, every machine would build the set.
#[test]
fn damaged_manifest_in_the_bucket_is_replaced() {
    let context = standalone(None);
    let rt = context.io().runtime().clone();
    let [bucket, one, two, three, four] = [(); 5].map(|()| tempfile::tempdir().unwrap());
    let storage = Storage::open(bucket.path().to_str().unwrap(), None).unwrap();
    let of = |root: &Path| {
        let sets = DatasetBucket::new(rt.clone(), storage.clone(), "ml/datasets");
        DataCache::new(root).with_bucket(Some(sets))
    };
    let builds = AtomicUsize::new(0);
    check_all(&open(&of(one.path()), "a", 50, &builds).unwrap(), 50);
    let manifest = bucket.path().join("ml/datasets/a/v1/training/manifest.json");
    std::fs::write(&manifest, "{").unwrap();
    check_all(&open(&of(two.path()), "a", 50, &builds).unwrap(), 50);
    assert_eq!(builds.load(Ordering::Relaxed), 2);
    check_all(&open(&of(three.path()), "a", 50, &builds).unwrap(), 50);
    assert_eq!(builds.load(Ordering::Relaxed), 2);
    // Other versions read the manifest of a later format.
    std::fs::write(&manifest, "{\"format\": 2}").unwrap();
    check_all(&open(&of(four.path()), "a", 50, &builds).unwrap(), 50);
    assert_eq!(std::fs::read_to_string(&manifest).unwrap(), "{\"format\": 2}");
}

#[test]
fn interrupted_upload_is_resumed_by_the_next_open() {
    let context = standalone(None);
    let rt = context.io().runtime().clone();
    let [bucket, one, two] = [(); 3].map(|()| tempfile::tempdir().unwrap());
    let storage = Storage::open(bucket.path().to_str().unwrap(), None).unwrap();
    let of = |root: &Path| {
        let sets = DatasetBucket::new(rt.clone(), storage.clone(), "ml/datasets");
        DataCache::new(root).with_bucket(Some(sets))
    };
    let builds = AtomicUsize::new(0);
    let mark = one.path().join("a/v1/training/upload.json");
    // The bucket becomes unavailable during the build: a file has the name of a directory.
    let build = || {
        std::fs::write(bucket.path().join("ml"), "").unwrap();
        builds.fetch_add(1, Ordering::Relaxed);
        Ok((0..50).map(|index| Ok(sample(index))))
    };
    check_all(&of(one.path()).open("a", "v1", Split::Training, build).unwrap(), 50);
    assert!(mark.exists());
    std::fs::remove_file(bucket.path().join("ml")).unwrap();
    let set = open(&of(one.path()), "a", 50, &builds).unwrap();
    let start = Instant::now();
    while mark.exists() {
        assert!(start.elapsed() < PATIENCE, "the set is not uploaded");
        std::thread::sleep(Duration::from_millis(10));
    }
    check_all(&set, 50);
    check_all(&open(&of(two.path()), "a", 50, &builds).unwrap(), 50);
    assert_eq!(builds.load(Ordering::Relaxed), 1);
    assert!(!two.path().join("a/v1/training/upload.json").exists());
}
