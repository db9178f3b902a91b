//! Tests with stores that fail sporadically, are slow, full or missing.

mod flaky;
mod keys;

use std::sync::atomic::Ordering;
use std::time::Duration;

use futures::TryStreamExt as _;
use object_store::memory::InMemory;

use self::flaky::{Completions, Flaky};
use super::*;

/// Runs all operations on a root.
async fn check(storage: Storage) {
    storage.probe().await.unwrap();
    for idx in 0..30u8 {
        let path = format!("a/b/{idx:02}");
        storage.put(&path, vec![idx; 3].into()).await.unwrap();
        assert_eq!(storage.get(&path).await.unwrap(), vec![idx; 3]);
        assert!(storage.exists(&path).await.unwrap());
    }
    storage.put("a/bc", "x".into()).await.unwrap();
    storage.put("a/bc", "y".into()).await.unwrap();
    assert_eq!(storage.get("a/bc").await.unwrap(), "y");
    assert_eq!(storage.get_range("a/b/07", 1..3).await.unwrap(), vec![7; 2]);
    assert_eq!(storage.get_range("a/b/07", 3..3).await.unwrap(), "");
    assert!(storage.get_range("a/b/07", 1..9).await.is_err(), "range beyond the end");
    let parts: Vec<Bytes> = storage.get_in_order("a/b/07", 3).try_collect().await.unwrap();
    assert_eq!(parts, [vec![7; 3]]);
    let none: Vec<Bytes> = storage.get_in_order("a/b/07", 0).try_collect().await.unwrap();
    assert!(none.is_empty());
    let missing = storage.get_range("a/none", 0..1).await.unwrap_err();
    assert!(matches!(missing, StorageError::NotFound { .. }), "{missing}");
    assert_eq!(storage.list("a/b").await.unwrap().len(), 30);
    assert_eq!(storage.list("").await.unwrap().len(), 31);
    assert_eq!(storage.list("nowhere").await.unwrap(), Vec::<String>::new());
    assert_eq!(storage.list_sized("a/b").await.unwrap()[4], ("a/b/04".to_owned(), 3));
    let (path, written) = storage.list_timed("a/b").await.unwrap().swap_remove(4);
    let now = std::time::SystemTime::UNIX_EPOCH.elapsed().unwrap().as_secs().cast_signed();
    assert_eq!(path, "a/b/04");
    assert!((now - 3600..=now + 3600).contains(&written), "{written}");
    let before = storage.list_states("a/b").await.unwrap();
    assert_eq!(storage.list_states("a/b").await.unwrap(), before);
    storage.put("a/b/04", vec![9; 3].into()).await.unwrap();
    let after = storage.list_states("a/b").await.unwrap();
    let changed = after.iter().zip(&before).filter(|(after, before)| after != before);
    assert_eq!(changed.map(|((path, _), _)| path).collect::<Vec<_>>(), ["a/b/04"]);
    storage.put("a/c/d/e", "zz".into()).await.unwrap();
    assert_eq!(storage.size("a/c/d/e").await.unwrap(), Some(2));
    assert_eq!(storage.size("a/c/d").await.unwrap(), None);
    assert_eq!(storage.folders("a").await.unwrap(), ["b", "c"]);
    assert_eq!(storage.folders("nowhere").await.unwrap(), Vec::<String>::new());
    storage.delete_folder("a/c").await.unwrap();
    storage.delete_folder("a/c").await.unwrap();
    assert_eq!(storage.folders("a").await.unwrap(), ["b"]);
    assert_eq!(storage.list("a").await.unwrap().len(), 31);
    assert!(storage.delete_folder("a/../b").await.is_err());
    storage.delete("a/bc").await.unwrap();
    storage.delete("a/bc").await.unwrap();
    assert!(!storage.exists("a/bc").await.unwrap());
    let missing = storage.get("a/bc").await.unwrap_err();
    assert!(matches!(missing, StorageError::NotFound { .. }), "{missing}");
    let bad = storage.put("a/../b", "x".into()).await.unwrap_err();
    assert!(matches!(bad, StorageError::BadUrl { .. }), "{bad}");
}

#[tokio::test]
async fn all_kinds_of_roots_behave_alike() {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path().join("not/yet there");
    check(Storage::open(root.to_str().unwrap(), None).unwrap()).await;
    let url = url::Url::from_file_path(folder.path().join("another")).unwrap();
    check(Storage::open(url.as_str(), None).unwrap()).await;
    check(Storage::open("memory://", None).unwrap()).await;
    let inner = Arc::new(InMemory::new());
    let below = Storage::from_store(inner, "memory").with_prefix(Path::from("deep/er"));
    check(below).await;
}

#[tokio::test]
async fn staged_files_are_deleted_by_object_name() {
    let folder = tempfile::tempdir().unwrap();
    let storage = Storage::open(folder.path().to_str().unwrap(), None).unwrap();
    storage.put("a/part-1", "x".into()).await.unwrap();
    for name in ["part-1#1", "part-2#17", "part-3#x", "other#1", "part-4"] {
        std::fs::write(folder.path().join("a").join(name), "half").unwrap();
    }
    storage.delete_staged("a", |name| name.starts_with("part-")).unwrap();
    storage.delete_staged("nowhere", |_| true).unwrap();
    let names = std::fs::read_dir(folder.path().join("a")).unwrap();
    let mut rest: Vec<_> =
        names.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    rest.sort();
    assert_eq!(rest, ["other#1", "part-1", "part-3#x", "part-4"]);
}

#[tokio::test(start_paused = true)]
async fn sporadic_failures_are_retried() {
    for every in [2, 3, 20] {
        let store = Flaky::new(every, std::io::ErrorKind::ConnectionReset);
        check(Storage::from_store(store, "flaky://root")).await;
    }
}

#[tokio::test(start_paused = true)]
async fn failed_parts_of_large_objects_are_retried() {
    for every in [3, 20] {
        let store = Flaky::new(every, std::io::ErrorKind::ConnectionReset);
        let storage = Storage::from_store(store.clone(), "flaky://root").with_parts(store);
        let bytes: Vec<u8> = (0..20_000_003u32).map(|idx| (idx % 251) as u8).collect();
        let bytes = Bytes::from(bytes);
        storage.put("large", bytes.clone()).await.unwrap();
        assert!(storage.get("large").await.unwrap() == bytes, "the object differs");
        let range = storage.get_range("large", 1_000_001..19_999_999).await.unwrap();
        assert!(range == bytes.slice(1_000_001..19_999_999), "the range differs");
        let parts: Vec<Bytes> =
            storage.get_in_order("large", 20_000_003).try_collect().await.unwrap();
        assert_eq!(parts.len(), 3);
        assert!(parts.concat() == bytes, "the parts differ");
    }
}

#[tokio::test(start_paused = true)]
async fn completed_upload_is_accepted_if_its_response_is_lost() {
    // Each with the size of an earlier object.
    let cases = [
        (Completions::LostAfter, 3, true),
        (Completions::LostBefore, 3, false),
        (Completions::Unknown, PART_THRESHOLD_BYTES, false),
    ];
    for (completions, earlier, is_stored) in cases {
        let store = Flaky::completing(completions);
        let bytes = vec![1u8; earlier].into();
        store.inner.put(&Path::from("large"), bytes).await.unwrap();
        let storage = Storage::from_store(store.clone(), "flaky://root").with_parts(store);
        let put = storage.put("large", vec![7; PART_THRESHOLD_BYTES].into()).await;
        match is_stored {
            true => assert_eq!(put, Ok(()), "{completions:?}"),
            false => assert!(matches!(put, Err(StorageError::NotFound { .. })), "{put:?}"),
        }
    }
}

/// Eight parts of 8 MiB do not pass a link of 1 Mbit/s within the timeout, but two do.
#[tokio::test(start_paused = true)]
async fn slow_links_carry_fewer_parts_at_a_time() {
    let store = Flaky::behind(128 << 10);
    let storage = Storage::from_store(store.clone(), "slow://root")
        .with_parts(store.clone())
        .with_retry_policy(RetryPolicy::NETWORK);
    let timeouts = || store.link.as_ref().unwrap().timeouts.load(Ordering::Relaxed);
    let bytes = Bytes::from(vec![7; 64 << 20]);
    storage.put("large", bytes.clone()).await.unwrap();
    assert_eq!(timeouts(), 8);
    assert!(storage.get("large").await.unwrap() == bytes, "the object differs");
    assert_eq!(timeouts(), 8, "the limit stays");
}

/// All requests of twelve objects time out. Otherwise, 16 attempts of each part could take a day.
#[tokio::test(start_paused = true)]
async fn stalled_uploads_fail_within_half_an_hour() {
    let store = Flaky::behind(8);
    let storage = Storage::from_store(store.clone(), "slow://root")
        .with_parts(store)
        .with_retry_policy(RetryPolicy::NETWORK);
    let start = Instant::now();
    let bytes = Bytes::from(vec![7; 64 << 20]);
    let put = |name: usize| {
        let (storage, bytes) = (storage.clone(), bytes.clone());
        async move { storage.put(&name.to_string(), bytes).await }
    };
    for put in futures::future::join_all((0..12).map(put)).await {
        let error = put.unwrap_err().to_string();
        assert!(error.contains("timed out") || error.contains("for too long"), "{error}");
    }
    assert!(start.elapsed() < Duration::from_secs(1800), "{:?}", start.elapsed());
}

/// A save consists of large and small objects and of rows of metrics.
#[tokio::test(start_paused = true)]
async fn saves_outlast_ten_minutes_of_refused_connections() {
    let put = async |seconds, bytes: usize, long: bool| {
        let store = Flaky::down_for(seconds);
        let storage = Storage::from_store(store.clone(), "down://root")
            .with_parts(store)
            .with_retry_policy(RetryPolicy::NETWORK);
        let storage = if long { storage.with_long_retries() } else { storage };
        let start = Instant::now();
        let stored = storage.put("a", vec![7; bytes].into()).await.is_ok();
        let rows = storage.put_uniquely("b", "row".into()).await.is_ok();
        (stored, rows, start.elapsed().as_secs() / 60)
    };
    for bytes in [3, 2 << 20, PART_THRESHOLD_BYTES] {
        assert_eq!(put(600, bytes, true).await, (true, true, 10), "{bytes} bytes");
        // For others, an early error is more useful.
        let (stored, _, minutes) = put(600, bytes, false).await;
        assert!(!stored && minutes < 5, "{bytes} bytes: {stored}, {minutes} minutes");
    }
    assert_eq!(put(1_500, 3, true).await, (false, true, 25));
}

/// The keys were rotated, or a policy was changed.
#[tokio::test(start_paused = true)]
async fn saves_wait_for_access_that_they_had() {
    let store = Flaky::new(2, std::io::ErrorKind::PermissionDenied);
    let storage = Storage::from_store(store.clone(), "flaky://root");
    let saves = storage.clone().with_long_retries();
    storage.put("a", "x".into()).await.unwrap();
    saves.put("b", "x".into()).await.unwrap();
    assert_eq!(store.count.load(Ordering::Relaxed), 3, "one write was refused");
    // Others report the refusal at once, and so do deletions, which lose no work.
    storage.put("c", "x".into()).await.unwrap_err();
    saves.delete("a").await.unwrap();
    saves.delete("b").await.unwrap_err();
}

/// The client of a bucket may have repeated a slow request. A slow disk repeats nothing.
#[tokio::test(start_paused = true)]
async fn slow_writes_are_unique_on_local_roots() {
    let bucket = Storage::from_store(Flaky::behind(1), "slow://root");
    assert_eq!(bucket.put_uniquely("a", "x".into()).await, Ok(false));
    let local = bucket.in_folder(PathBuf::new(), Arc::new(LocalFileSystem::new()));
    assert_eq!(local.put_uniquely("a", "x".into()).await, Ok(true));
}

/// The right to list objects is separate on S3. Without it, the clean-up would fail later.
#[tokio::test]
async fn probe_tests_the_right_to_list() {
    // The fourth operation fails, after a write, a read and a deletion.
    let store = Flaky::new(4, std::io::ErrorKind::PermissionDenied);
    let error = Storage::from_store(store, "flaky://root").probe().await.unwrap_err();
    assert!(error.to_string().contains("permit to list objects"), "{error}");
}

/// An attempt of a trial that has a checkpoint waits for the storage. A new trial fails early.
#[tokio::test(start_paused = true)]
async fn probes_wait_as_long_as_their_retries() {
    let storage = || Storage::from_store(Flaky::down_for(600), "down://root");
    storage().with_long_retries().probe().await.unwrap();
    let start = Instant::now();
    assert!(storage().with_few_retries().probe().await.is_err());
    assert!(start.elapsed() < Duration::from_secs(60), "{:?}", start.elapsed());
}

/// Small and large files are written in different ways.
#[tokio::test]
async fn large_files_have_the_names_of_small_ones() {
    let root = tempfile::tempdir().unwrap();
    let folder = root.path().join("root");
    let storage = Storage::open(folder.to_str().unwrap(), None).unwrap();
    let large = Bytes::from(vec![7; PART_THRESHOLD_BYTES]);
    for path in ["a/b c%20\u{e4}", "/begins/with/a/slash"] {
        for bytes in [Bytes::from("small"), large.clone(), Bytes::from("small again")] {
            storage.put(path, bytes.clone()).await.unwrap();
            assert!(storage.get(path).await.unwrap() == bytes, "{path}");
            assert_eq!(storage.size(path).await.unwrap(), Some(bytes.len() as u64), "{path}");
        }
    }
    assert_eq!(storage.list("").await.unwrap(), ["a/b c%20\u{e4}", "begins/with/a/slash"]);
    // Such names are those of files that are being written.
    for bytes in [Bytes::from("small"), large] {
        let error = storage.put("a/model#1", bytes).await.unwrap_err().to_string();
        assert!(error.contains("are not supported: a/model#1"), "{error}");
    }
    assert_eq!(std::fs::read_dir(root.path()).unwrap().count(), 1);
}

/// One request for a large range could exceed the request timeout.
#[tokio::test(start_paused = true)]
async fn large_ranges_are_read_in_parts() {
    let store = Flaky::new(u64::MAX, std::io::ErrorKind::ConnectionReset);
    let storage = Storage::from_store(store.clone(), "slow://root").with_parts(store.clone());
    storage.put("large", vec![7; 40 << 20].into()).await.unwrap();
    let before = store.count.load(Ordering::Relaxed);
    let range = storage.get_range("large", 3..36 << 20).await.unwrap();
    assert_eq!(range.len(), (36 << 20) - 3);
    assert_eq!(store.count.load(Ordering::Relaxed) - before, 5, "requests");
    let error = storage.get_range("large", 0..41 << 20).await.unwrap_err().to_string();
    assert!(error.contains("\"large\""), "{error}");
}

#[tokio::test(start_paused = true)]
async fn permanent_failures_report_the_last_error() {
    let check = async |kind, attempts, text: &str| {
        let store = Flaky::new(1, kind);
        let storage = Storage::from_store(store.clone(), "flaky://root");
        let error = storage.put("a/b", "x".into()).await.unwrap_err().to_string();
        assert!(error.contains(text) && error.contains("flaky://root"), "{error}");
        assert!(error.contains("a/b"), "{error}");
        assert_eq!(store.count.load(Ordering::Relaxed), attempts, "{error}");
    };
    check(std::io::ErrorKind::ConnectionReset, 6, "failed on \"a/b\" 6 times").await;
    check(std::io::ErrorKind::StorageFull, 1, "is full").await;
    check(std::io::ErrorKind::PermissionDenied, 1, "refused access").await;
    let store = Flaky::new(1, std::io::ErrorKind::PermissionDenied);
    let storage = Storage::from_store(store.clone(), "flaky://root").with_long_retries();
    storage.put("a/b", "x".into()).await.unwrap_err();
    assert_eq!(store.count.load(Ordering::Relaxed), 1);
    let store = Flaky::down_for(600);
    let few = Storage::from_store(store, "flaky://root").with_long_retries().with_few_retries();
    assert!(few.put("a/b", "x".into()).await.is_err());
}

#[test]
fn invalid_urls_are_refused_with_a_remedy() {
    let check = |url: &str, endpoint: Option<&str>, text: &str| {
        let error = Storage::open(url, endpoint).unwrap_err().to_string();
        assert!(error.contains(text) && error.contains(url), "{error}");
    };
    check("bucket/x", None, "s3://bucket/prefix");
    check("ftp://x/y", None, "unknown scheme \"ftp\"");
    check("s3:///x", None, "no bucket");
    check("s3://b/x", Some("127.0.0.1:8333"), "http://host:port");
    check("gs://b/x", Some("http://x"), "endpoint is for s3:// only");
    check("/proc/version/x", None, "cannot create directory");
    check("/proc/version", None, "/proc/version is a file; choose another directory");
}

#[test]
fn waits_grow_and_are_bounded() {
    let check = |attempt, expected: (u64, u64)| {
        let wait = |jitter| RetryPolicy::NETWORK.wait(attempt, jitter).as_millis() as u64;
        assert_eq!((wait(0.0), wait(1.0)), expected, "{attempt}");
    };
    check(1, (100, 200));
    check(2, (200, 400));
    check(60, (5_000, 10_000));
}
