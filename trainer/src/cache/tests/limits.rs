//! Tests of the size limit, eviction and the deletion of leftovers.

use super::*;

#[test]
fn least_recently_used_set_is_evicted() {
    let (root, builds) = (tempfile::tempdir().unwrap(), AtomicUsize::new(0));
    // Space for three sets of 100 kB, since the limit reserves whole segments.
    let cache = DataCache::new(root.path()).bytes_max(build::SEGMENT_BYTES + 250_000);
    let has = |id: &str| segment(root.path(), id).exists();
    let used = open(&cache, "a", 100, &builds).unwrap();
    for id in ["b", "c"] {
        open(&cache, id, 100, &builds).unwrap();
    }
    // File times may have a coarse resolution, so set them explicitly.
    for (id, seconds) in [("a", 10), ("b", 30), ("c", 20)] {
        let lock = root.path().join(id).join("v1/training.use");
        let time = std::time::SystemTime::UNIX_EPOCH + std::time::Duration::from_secs(seconds);
        std::fs::File::options().write(true).open(lock).unwrap().set_modified(time).unwrap();
    }
    open(&cache, "d", 100, &builds).unwrap();
    assert_eq!(["a", "b", "c", "d"].map(has), [true, true, false, true]);
    check_all(&used, 100);
    drop(used);
    open(&cache, "e", 100, &builds).unwrap();
    assert_eq!(["a", "b", "d", "e"].map(has), [false, true, true, true]);
    assert_eq!(builds.load(Ordering::Relaxed), 5);
}

#[test]
fn files_of_killed_processes_are_deleted() {
    let (root, builds) = (tempfile::tempdir().unwrap(), AtomicUsize::new(0));
    let version = root.path().join("a/v1");
    let [gone, staging_dir, building] =
        [".gone-1-.training.half", ".training.half", ".validation.half"]
            .map(|name| version.join(name));
    for folder in [&gone, &staging_dir, &building] {
        std::fs::create_dir_all(folder).unwrap();
        std::fs::write(folder.join("00000.seg"), "half").unwrap();
    }
    let dir = DatasetDir::new(root.path(), "a", "v1", Split::Validation).unwrap();
    let _builder = dir.lock_for_building(|| Ok(())).unwrap();
    open(&DataCache::new(root.path()), "b", 10, &builds).unwrap();
    assert_eq!([gone.exists(), staging_dir.exists(), building.exists()], [false, false, true]);
    assert!(!version.join("gone-1-.training.build").exists(), "lock file for a removed directory");
}

#[test]
fn sets_of_other_formats_count_toward_the_limit() {
    let (root, builds) = (tempfile::tempdir().unwrap(), AtomicUsize::new(0));
    let cache = DataCache::new(root.path()).bytes_max(build::SEGMENT_BYTES + 250_000);
    let version = root.path().join("a/v1");
    let folder = version.join("training.v2");
    std::fs::create_dir_all(&folder).unwrap();
    std::fs::write(folder.join("manifest.json"), "{\"format\": 2}").unwrap();
    std::fs::write(folder.join("00000.seg"), vec![0; 200_000]).unwrap();
    let reader = std::fs::File::create(version.join("training.v2.use")).unwrap();
    reader.lock_shared().unwrap();
    // The set of this version is separate.
    check_all(&open(&cache, "a", 10, &builds).unwrap(), 10);
    open(&cache, "b", 100, &builds).unwrap();
    assert!(folder.exists(), "another process reads it");
    drop(reader);
    open(&cache, "c", 100, &builds).unwrap();
    assert!(!folder.exists(), "the cache exceeds its limit");
}

#[test]
fn endless_set_is_refused_early() {
    let root = tempfile::tempdir().unwrap();
    let cache = DataCache::new(root.path()).bytes_max(70_000_000);
    let large = || Ok(std::iter::repeat_with(|| Ok(vec![1_u8; 1 << 20])));
    let error = cache.open::<Vec<u8>, _>("a", "v1", Split::Training, large).unwrap_err();
    assert!(error.to_string().contains("raise STOKER_DATA_CACHE_BYTES"), "{error}");
    assert!(!root.path().join("a/v1/.training.half/00000.seg").exists());
}

#[test]
fn size_limit_applies_to_the_actual_size() {
    let root = tempfile::tempdir().unwrap();
    let cache = DataCache::new(root.path()).bytes_max(90_000_000);
    let items =
        |mega: usize| move || Ok(std::iter::repeat_with(|| Ok(vec![1_u8; 1 << 20])).take(mega));
    cache.open::<Vec<u8>, _>("a", "v1", Split::Training, items(80)).unwrap();
    let error = cache.open::<Vec<u8>, _>("b", "v1", Split::Training, items(90)).unwrap_err();
    assert!(error.to_string().contains("exceeds the cache limit (90000000 bytes)"), "{error}");
}

#[test]
fn sets_being_built_count_toward_the_limit() {
    let (root, builds) = (tempfile::tempdir().unwrap(), AtomicUsize::new(0));
    let cache = DataCache::new(root.path()).bytes_max(build::SEGMENT_BYTES + 250_000);
    let first = open(&cache, "a", 100, &builds).unwrap();
    drop(first);
    let dir = DatasetDir::new(root.path(), "b", "v1", Split::Validation).unwrap();
    let _builder = dir.lock_for_building(|| Ok(())).unwrap();
    dir.prepare_staging().unwrap();
    std::fs::write(dir.staging_dir().join("00000.seg"), vec![0; 200_000]).unwrap();
    open(&cache, "c", 100, &builds).unwrap();
    assert!(!segment(root.path(), "a").exists(), "the cache exceeds its limit");
    assert!(dir.staging_dir().join("00000.seg").exists());
}
