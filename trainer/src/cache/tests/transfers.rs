//! Tests of downloads and uploads that a stop request interrupts, or that fail.

use std::sync::Arc;

use bytes::Bytes;
use stoker_storage::Storage;

use super::bucket::uploaded_set;
use super::*;
use crate::cache::bucket::{TRANSFERS_MAX, store_segment};
use crate::cache::manifest::SegmentEntry;

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
fn set_is_not_built_while_the_bucket_is_unavailable() {
    let (shared, builds) = (Shared::new(), AtomicUsize::new(0));
    // A file has the name of a directory.
    std::fs::write(shared.bucket.path().join("ml"), "").unwrap();
    let error = open(&shared.cache(), "a", 20, &builds).unwrap_err();
    assert_eq!(crate::error::exit_code(&*error), ExitCode::Infrastructure, "{error}");
    assert!(error.to_string().contains("datasets/a/v1/training/manifest.json"), "{error}");
    assert_eq!(builds.load(Ordering::Relaxed), 0);
}
