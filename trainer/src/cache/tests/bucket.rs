//! Tests of sets that machines share through a bucket.

use stoker_storage::Storage;

use super::*;

/// The other segments are in flight when the first is found damaged.
#[test]
fn failed_download_leaves_the_staging_directory_empty() {
    let context = standalone(None);
    let rt = context.io().runtime().clone();
    let [bucket, here] = [(); 2].map(|()| tempfile::tempdir().unwrap());
    let storage = Storage::open(bucket.path().to_str().unwrap(), None).unwrap();
    let bucket_sets = DatasetBucket::new(rt, storage, "ml/datasets");
    let dir = DatasetDir::new(here.path(), "a", "v1", Split::Training).unwrap();
    dir.prepare_staging().unwrap();
    // Sizes chosen so that the damaged segment is done while the others are being hashed.
    let segments = [12_usize, 20, 20, 20].iter().enumerate().map(|(number, mega)| {
        let mut writer = segment::Writer::new(&dir.staging_dir(), number).unwrap();
        writer.record(&vec![number as u8; mega << 20]).unwrap();
        writer.finish().unwrap()
    });
    let manifest = manifest::Manifest::new(&dir, segments.collect());
    manifest.write(&dir.staging_dir()).unwrap();
    let lock = bucket_sets.prepare_upload(&dir, false).unwrap();
    dir.publish().unwrap();
    bucket_sets.upload(&dir, lock);
    let stored = bucket.path().join("ml/datasets/a/v1/training");
    let first = stored.join(format!("{}.seg", manifest.segments[0].sha256));
    std::fs::write(first, vec![0; 12 << 20]).unwrap();
    dir.prepare_staging().unwrap();
    let quota = quota::CacheQuota::new(here.path(), None, &dir).unwrap();
    let error = bucket_sets.download(&dir, &quota).unwrap_err().to_string();
    assert!(error.contains(".seg is damaged: its SHA-256 is"), "{error}");
    std::thread::sleep(std::time::Duration::from_secs(1));
    assert_eq!(std::fs::read_dir(dir.staging_dir()).unwrap().count(), 0);
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
    // The bucket is unavailable: a file has the name of a directory.
    std::fs::write(bucket.path().join("ml"), "").unwrap();
    check_all(&open(&of(one.path()), "a", 50, &builds).unwrap(), 50);
    assert!(mark.exists());
    std::fs::remove_file(bucket.path().join("ml")).unwrap();
    let set = open(&of(one.path()), "a", 50, &builds).unwrap();
    let start = std::time::Instant::now();
    while mark.exists() {
        assert!(start.elapsed() < std::time::Duration::from_secs(60), "the set is not uploaded");
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
    check_all(&set, 50);
    check_all(&open(&of(two.path()), "a", 50, &builds).unwrap(), 50);
    assert_eq!(builds.load(Ordering::Relaxed), 1);
    assert!(!two.path().join("a/v1/training/upload.json").exists());
}
