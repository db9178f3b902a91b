//! Tests of downloads and uploads that a stop request interrupts, or that fail.

use std::sync::{Arc, Mutex};

use bytes::Bytes;
use stoker_storage::Storage;

use super::bucket::uploaded_set;
use super::*;
use crate::cache::bucket::{TRANSFERS_MAX, store_segment};
use crate::cache::manifest::SegmentEntry;
use crate::cache::pending::PendingUpload;

/// A bucket in a directory, and a cache that uses it.
struct Shared {
    bucket: tempfile::TempDir,
    root: tempfile::TempDir,
    sets: DatasetBucket,
    /// Runs the transfers.
    _context: Context,
}

impl Shared {
    fn new() -> Self {
        let [bucket, root] = [(); 2].map(|()| tempfile::tempdir().unwrap());
        let context = standalone(None);
        let storage = Storage::open(bucket.path().to_str().unwrap(), None).unwrap();
        let sets = DatasetBucket::new(context.io().runtime().clone(), storage, "ml/datasets");
        Self { bucket, root, sets, _context: context }
    }

    fn cache(&self) -> DataCache {
        DataCache::new(self.root.path()).with_bucket(Some(self.sets.clone()))
    }

    /// Path of an object of the set `a`.
    fn object(&self, name: &str) -> PathBuf {
        self.bucket.path().join("ml/datasets/a/v1/training").join(name)
    }
}

fn check_preempted(error: &Error) {
    assert_eq!(crate::error::exit_code(&**error), ExitCode::Preempted, "{error}");
}

#[test]
fn stop_request_ends_a_download() {
    let (shared, stop) = (Shared::new(), StopSignal::default());
    let dir = DatasetDir::new(shared.root.path(), "a", "v1", Split::Training).unwrap();
    uploaded_set(&shared.sets, &dir, 3 * TRANSFERS_MAX);
    dir.prepare_staging().unwrap();
    let quota = quota::CacheQuota::new(shared.root.path(), None, &dir).unwrap();
    let stores = Arc::new(AtomicUsize::new(0));
    let store = {
        let (stores, stop) = (stores.clone(), stop.clone());
        move |folder: &Path, entry: &SegmentEntry, bytes: &Bytes| {
            stores.fetch_add(1, Ordering::Relaxed);
            stop.set();
            store_segment(folder, entry, bytes)
        }
    };
    check_preempted(&shared.sets.download_with(&dir, &quota, &stop, store).unwrap_err());
    assert!(stores.load(Ordering::Relaxed) <= TRANSFERS_MAX, "{stores:?}");
}

/// Downloads the set, and returns the names of the segments that it fetched, in order.
fn download(sets: &DatasetBucket, dir: &DatasetDir, quota: &quota::CacheQuota) -> Vec<String> {
    let fetched = Arc::new(Mutex::new(vec![]));
    let store = {
        let fetched = fetched.clone();
        move |folder: &Path, entry: &SegmentEntry, bytes: &Bytes| {
            fetched.lock().unwrap().push(entry.file.clone());
            store_segment(folder, entry, bytes)
        }
    };
    assert!(sets.download_with(dir, quota, &StopSignal::default(), store).unwrap());
    let mut fetched = std::mem::take(&mut *fetched.lock().unwrap());
    fetched.sort();
    fetched
}

#[test]
fn interrupted_download_keeps_verified_segments() {
    let shared = Shared::new();
    let dir = DatasetDir::new(shared.root.path(), "a", "v1", Split::Training).unwrap();
    let manifest = uploaded_set(&shared.sets, &dir, 4);
    let quota = quota::CacheQuota::new(shared.root.path(), None, &dir).unwrap();
    // The bucket fails after two segments, one of which is then damaged on the disk.
    let objects = [2, 3].map(|number: usize| {
        let object = shared.object(&format!("{}.seg", manifest.segments[number].sha256));
        let bytes = std::fs::read(&object).unwrap();
        std::fs::remove_file(&object).unwrap();
        std::fs::create_dir(&object).unwrap();
        (object, bytes)
    });
    shared.sets.download(&dir, &quota, &StopSignal::default()).unwrap_err();
    let staged = |name: &str| dir.staging_dir().join(name);
    assert!(staged("00000.seg").exists() && !staged("00002.seg").exists());
    std::fs::write(staged("00001.seg"), "damaged").unwrap();
    for (object, bytes) in objects {
        std::fs::remove_dir(&object).unwrap();
        std::fs::write(object, bytes).unwrap();
    }
    let fetched = download(&shared.sets, &dir, &quota);
    assert_eq!(fetched, ["00001.seg", "00002.seg", "00003.seg"]);
    dir.publish().unwrap();
    let opened = Dataset::open(&dir, &StopSignal::default()).unwrap();
    assert!(matches!(opened, CacheState::Complete(set) if set.len() == 4));
    assert!(!dir.folder().join("download.json").exists());
}

#[test]
fn partial_download_of_another_manifest_is_discarded() {
    let shared = Shared::new();
    let dir = DatasetDir::new(shared.root.path(), "a", "v1", Split::Training).unwrap();
    uploaded_set(&shared.sets, &dir, 2);
    let quota = quota::CacheQuota::new(shared.root.path(), None, &dir).unwrap();
    assert_eq!(download(&shared.sets, &dir, &quota).len(), 2);
    // The complete set is staged again, as a download of another build.
    std::fs::write(dir.staging_dir().join("download.json"), "{}").unwrap();
    assert_eq!(download(&shared.sets, &dir, &quota).len(), 2);
}

#[test]
fn partial_downloads_are_evicted_like_sets() {
    let (root, builds) = (tempfile::tempdir().unwrap(), AtomicUsize::new(0));
    let cache = DataCache::new(root.path()).bytes_max(build::SEGMENT_BYTES + 250_000);
    let dir = DatasetDir::new(root.path(), "a", "v1", Split::Training).unwrap();
    dir.prepare_staging().unwrap();
    std::fs::write(dir.staging_dir().join("download.json"), "{}").unwrap();
    std::fs::write(dir.staging_dir().join("00000.seg"), vec![0; 200_000]).unwrap();
    open(&cache, "b", 40, &builds).unwrap();
    assert!(dir.staging_dir().exists(), "the cache has space for it");
    let builder = dir.lock_for_building(|| Ok(())).unwrap();
    open(&cache, "c", 40, &builds).unwrap();
    assert!(dir.staging_dir().exists(), "another process downloads it");
    drop(builder);
    open(&cache, "d", 40, &builds).unwrap();
    assert!(!dir.staging_dir().exists(), "the cache exceeds its limit");
}

#[test]
fn staged_segments_do_not_lower_the_limit() {
    let root = tempfile::tempdir().unwrap();
    let dir = DatasetDir::new(root.path(), "a", "v1", Split::Training).unwrap();
    dir.prepare_staging().unwrap();
    // A sparse file, which is larger than the disk.
    let file = std::fs::File::create(dir.staging_dir().join("00000.seg")).unwrap();
    file.set_len(1 << 43).unwrap();
    let quota = quota::CacheQuota::new(root.path(), None, &dir).unwrap();
    quota.check_size(1 << 42).unwrap();
}

#[test]
fn stop_request_ends_an_upload() {
    let (shared, builds) = (Shared::new(), AtomicUsize::new(0));
    let cache = shared.cache();
    // The request comes after the last sample.
    let build = || {
        let stop = cache.stop.clone();
        let end = std::iter::from_fn(move || {
            stop.set();
            None
        });
        builds.fetch_add(1, Ordering::Relaxed);
        Ok((0..20).map(|index| Ok(sample(index))).chain(end))
    };
    let opened = cache.open::<Sample, _>("a", "v1", Split::Training, build);
    check_preempted(&opened.unwrap_err());
    assert!(!shared.object("manifest.json").exists());
    check_all(&open(&shared.cache(), "a", 20, &builds).unwrap(), 20);
    assert_eq!(builds.load(Ordering::Relaxed), 1);
    bucket::until_exists(&shared.object("manifest.json"));
}

#[test]
fn next_upload_skips_stored_segments() {
    let shared = Shared::new();
    let dir = DatasetDir::new(shared.root.path(), "a", "v1", Split::Training).unwrap();
    let manifest = uploaded_set(&shared.sets, &dir, 3);
    let objects: Vec<PathBuf> = (manifest.segments.iter())
        .map(|entry| shared.object(&format!("{}.seg", entry.sha256)))
        .collect();
    // Only the first two segments were stored, one of them not completely.
    std::fs::remove_file(shared.object("manifest.json")).unwrap();
    std::fs::write(&objects[1], "short").unwrap();
    std::fs::remove_file(&objects[2]).unwrap();
    let changed = |path: &Path| std::fs::metadata(path).unwrap().modified().unwrap();
    let before = std::time::SystemTime::UNIX_EPOCH;
    let object = std::fs::File::options().write(true).open(&objects[0]).unwrap();
    object.set_modified(before).unwrap();
    let upload = |replace: bool| {
        let pending = PendingUpload { bucket: shared.sets.location(), replace };
        pending.write(&dir.folder()).unwrap();
        let lock = DatasetDir::try_lock_exclusive(&dir.lock_file("upload")).unwrap();
        shared.sets.upload(&dir, lock, &StopSignal::default());
        assert!(!PendingUpload::path(&dir.folder()).exists());
        assert!(shared.object("manifest.json").exists());
        for (object, entry) in objects.iter().zip(&manifest.segments) {
            assert_eq!(std::fs::metadata(object).unwrap().len(), entry.bytes);
        }
    };
    upload(false);
    assert_eq!(changed(&objects[0]), before, "the segment was stored again");
    upload(true);
    assert_ne!(changed(&objects[0]), before, "a replacement stores all segments");
}

#[test]
fn set_is_not_built_while_the_bucket_is_unavailable() {
    let (shared, builds) = (Shared::new(), AtomicUsize::new(0));
    // A file has the name of a directory.
    std::fs::write(shared.bucket.path().join("ml"), "").unwrap();
    let error = open(&shared.cache(), "a", 20, &builds).unwrap_err();
    assert_eq!(crate::error::exit_code(&*error), ExitCode::Infrastructure, "{error}");
    assert!(error.to_string().contains("datasets/a/v1/training/manifest.json"), "{error}");
    assert_eq!(builds.load(Ordering::Relaxed), 0);
}
