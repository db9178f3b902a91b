//! Tests of objects by size and age, failures, and crashes after any write.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Mutex, PoisonError};

use futures::StreamExt as _;
use futures::stream::BoxStream;
use object_store::memory::InMemory;
use object_store::path::Path;
use object_store::{
    CopyOptions, Error, GetOptions, GetResult, ListResult, MultipartUpload, ObjectMeta,
    ObjectStore, PutMultipartOptions, PutOptions, PutPayload, PutResult, Result as StoreResult,
};
use proptest::prelude::*;

use super::*;

fn segments(bytes_max: usize, age_max: Duration) -> Segments {
    Segments { bytes_max, age_max, header: "#".into(), ..Segments::new("m/0-", ".jsonl") }
}

async fn check(segments: Segments, lines: &[&str], wait: Duration, expected: &[&str]) {
    let storage = Storage::open("memory://", None).unwrap();
    let writer = SegmentWriter::new(&Handle::current(), storage.clone(), segments);
    for line in lines {
        assert!(writer.append(line.to_string()));
    }
    tokio::time::sleep(wait).await;
    let mut objects = vec![];
    for path in storage.list("m").await.unwrap() {
        let bytes = storage.get(&path).await.unwrap();
        objects.push(format!("{path} {}", String::from_utf8(bytes.to_vec()).unwrap()));
    }
    assert_eq!(objects, expected);
}

#[tokio::test(start_paused = true)]
async fn objects_are_written_by_size_or_age() {
    let (second, minute) = (Duration::from_secs(1), Duration::from_secs(60));
    let both = ["m/0-00000000.jsonl #ab", "m/0-00000001.jsonl #cd"];
    check(segments(2, minute), &["a", "b", "cd"], second, &both).await;
    check(segments(99, minute), &["a", "b"], second, &[]).await;
    check(segments(99, second), &["a", "b"], minute, &["m/0-00000000.jsonl #ab"]).await;
}

#[tokio::test]
async fn flush_waits_until_all_is_stored() {
    let storage = Storage::open("memory://", None).unwrap();
    let segments = segments(99, Duration::from_secs(60));
    let writer = SegmentWriter::new(&Handle::current(), storage.clone(), segments);
    writer.append("a");
    writer.flush().await.unwrap();
    assert_eq!(storage.get("m/0-00000000.jsonl").await.unwrap(), "#a");
    writer.flush().await.unwrap();
    assert_eq!(storage.list("m").await.unwrap().len(), 1, "flush wrote an empty object");
}

#[tokio::test]
async fn failed_writes_are_retried() {
    let folder = tempfile::tempdir().unwrap();
    let url = folder.path().to_str().unwrap().to_owned();
    let storage = Storage::open(&url, None).unwrap();
    // A file at the path of the objects' directory makes writes fail.
    std::fs::write(folder.path().join("m"), "").unwrap();
    let segments = segments(99, Duration::from_secs(60));
    let writer = SegmentWriter::new(&Handle::current(), storage.clone(), segments);
    writer.append("a");
    let error = writer.flush().await.unwrap_err().to_string();
    assert!(error.contains("m/0-00000000.jsonl"), "{error}");
    writer.append("b");
    std::fs::remove_file(folder.path().join("m")).unwrap();
    writer.flush().await.unwrap();
    // An object is not replaced after a failed write, which may still arrive.
    assert_eq!(storage.get("m/0-00000000.jsonl").await.unwrap(), "#a");
    assert_eq!(storage.get("m/0-00000001.jsonl").await.unwrap(), "#b");
}

#[tokio::test]
async fn appends_beyond_the_buffer_limit_are_dropped() {
    let storage = Storage::open("memory://", None).unwrap();
    let segments = segments(usize::MAX, Duration::from_secs(60));
    let writer = SegmentWriter::new(&Handle::current(), storage.clone(), segments);
    assert!(writer.append("a"));
    assert!(!writer.append(vec![b'x'; BUFFER_BYTES_MAX]));
    let error = writer.buffer_full_error().to_string();
    assert!(error.contains("memory://") && error.contains("64 MiB"), "{error}");
    assert!(writer.append("b"), "the dropped append counts against the limit");
    writer.flush().await.unwrap();
    assert_eq!(storage.get("m/0-00000000.jsonl").await.unwrap(), "#ab");
    assert!(writer.append(vec![b'x'; BUFFER_BYTES_MAX]), "flushed bytes count");
}

#[tokio::test]
async fn buffer_limit_depends_on_the_segments() {
    let storage = Storage::open("memory://", None).unwrap();
    let segments = Segments { buffer_bytes_max: 2 << 20, ..Segments::new("m/0-", ".jsonl") };
    let writer = SegmentWriter::new(&Handle::current(), storage, segments);
    assert!(!writer.append(vec![b'x'; (2 << 20) + 1]));
    let error = writer.buffer_full_error().to_string();
    assert!(error.contains(" 2 MiB"), "{error}");
    assert!(writer.append(vec![b'x'; 2 << 20]));
}

#[tokio::test]
async fn dropped_writers_store_their_buffer() {
    let storage = Storage::open("memory://", None).unwrap();
    let segments = segments(99, Duration::from_secs(60));
    let writer = SegmentWriter::new(&Handle::current(), storage.clone(), segments);
    writer.append("a");
    let flush = writer.request_flush();
    drop(writer);
    flush.wait().await.unwrap();
    assert_eq!(storage.list("").await.unwrap(), ["m/0-00000000.jsonl"]);
}

#[tokio::test]
async fn writes_replace_the_latest_object_until_it_is_full() {
    let storage = Storage::open("memory://", None).unwrap();
    let segments = segments(4, Duration::from_secs(60));
    let writer = SegmentWriter::new(&Handle::current(), storage.clone(), segments);
    for (line, expected) in
        [("a", vec!["#a"]), ("b", vec!["#ab"]), ("c", vec!["#abc"]), ("d", vec!["#abc", "#d"])]
    {
        writer.append(line);
        writer.flush().await.unwrap();
        let mut objects = vec![];
        for path in storage.list("m").await.unwrap() {
            objects.push(storage.get(&path).await.unwrap());
        }
        assert_eq!(objects, expected);
    }
}

#[tokio::test]
async fn local_files_are_appended_to_if_they_are_unchanged() {
    let folder = tempfile::tempdir().unwrap();
    let storage = Storage::open(folder.path().to_str().unwrap(), None).unwrap();
    let age_max = Duration::from_secs(60);
    let segments = Segments { appends_locally: true, ..segments(99, age_max) };
    let writer = SegmentWriter::new(&Handle::current(), storage.clone(), segments);
    let path = folder.path().join("m/0-00000000.jsonl");
    let inode = || std::os::unix::fs::MetadataExt::ino(&std::fs::metadata(&path).unwrap());
    writer.append("a");
    writer.flush().await.unwrap();
    let first = inode();
    writer.append("b");
    writer.flush().await.unwrap();
    assert_eq!(std::fs::read_to_string(&path).unwrap(), "#ab");
    assert_eq!(inode(), first, "the file was replaced");
    // Another process has changed the file, or a write was incomplete.
    std::fs::write(&path, "#ab?").unwrap();
    writer.append("c");
    writer.flush().await.unwrap();
    assert_eq!(std::fs::read_to_string(&path).unwrap(), "#abc");
}

/// Effect of a request to write an object.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Fault {
    None,
    /// The request fails and has no effect.
    Lost,
    /// The request fails, but the object is written.
    Ambiguous,
    /// The request fails, and the object is written after so many further requests.
    Late(usize),
}

/// Objects by path.
type Snapshot = BTreeMap<String, Bytes>;

/// Store in memory that applies faults to writes, and keeps its content after each of them.
#[derive(Debug, Default)]
struct FaultyStore {
    inner: InMemory,
    state: Mutex<FaultyState>,
}

#[derive(Debug, Default)]
struct FaultyState {
    faults: Vec<Fault>,
    num_requests: usize,
    num_bytes: usize,
    late: Vec<(usize, Path, Bytes)>,
    /// Contents after each change.
    snapshots: Vec<Snapshot>,
    keeps_snapshots: bool,
}

impl FaultyState {
    fn write(&mut self, path: &Path, bytes: &Bytes) {
        if self.keeps_snapshots {
            let mut snapshot = self.snapshots.last().cloned().unwrap_or_default();
            snapshot.insert(path.to_string(), bytes.clone());
            self.snapshots.push(snapshot);
        }
    }
}

impl fmt::Display for FaultyStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("FaultyStore")
    }
}

#[async_trait::async_trait]
impl ObjectStore for FaultyStore {
    async fn put_opts(
        &self,
        at: &Path,
        payload: PutPayload,
        how: PutOptions,
    ) -> StoreResult<PutResult> {
        let bytes = Bytes::from(payload.clone());
        let fault = {
            let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
            let number = state.num_requests;
            state.num_requests += 1;
            state.num_bytes += bytes.len();
            let due = state.late.extract_if(.., |(due, ..)| *due <= number).collect::<Vec<_>>();
            for (_, path, bytes) in due {
                state.write(&path, &bytes);
            }
            let fault = state.faults.get(number).copied().unwrap_or(Fault::None);
            match fault {
                Fault::None | Fault::Ambiguous => state.write(at, &bytes),
                Fault::Lost => {}
                Fault::Late(num) => state.late.push((number + num, at.clone(), bytes)),
            }
            fault
        };
        let source = Box::new(std::io::Error::from(std::io::ErrorKind::ConnectionReset));
        match fault {
            Fault::None => self.inner.put_opts(at, payload, how).await,
            _ => Err(Error::Generic { store: "FaultyStore", source }),
        }
    }

    async fn put_multipart_opts(
        &self,
        at: &Path,
        how: PutMultipartOptions,
    ) -> StoreResult<Box<dyn MultipartUpload>> {
        self.inner.put_multipart_opts(at, how).await
    }

    async fn get_opts(&self, at: &Path, how: GetOptions) -> StoreResult<GetResult> {
        self.inner.get_opts(at, how).await
    }

    fn delete_stream(
        &self,
        paths: BoxStream<'static, StoreResult<Path>>,
    ) -> BoxStream<'static, StoreResult<Path>> {
        self.inner.delete_stream(paths).boxed()
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, StoreResult<ObjectMeta>> {
        self.inner.list(prefix)
    }

    async fn list_with_delimiter(&self, prefix: Option<&Path>) -> StoreResult<ListResult> {
        self.inner.list_with_delimiter(prefix).await
    }

    async fn copy_opts(&self, from: &Path, to: &Path, how: CopyOptions) -> StoreResult<()> {
        self.inner.copy_opts(from, to, how).await
    }
}

/// Action of a program that writes lines.
#[derive(Clone, Copy, Debug)]
enum Action {
    Append,
    Flush,
    /// Waits for this number of seconds.
    Wait(u64),
}

/// Appends numbered lines, and returns the number of lines that were stored at each number of
/// snapshots.
async fn run(store: Arc<FaultyStore>, actions: &[Action]) -> Vec<(usize, usize)> {
    let storage = Storage::from_store(store.clone(), "test://");
    let segments = Segments { bytes_max: 40, ..Segments::new("m/0-", ".jsonl") };
    let writer = SegmentWriter::new(&Handle::current(), storage, segments);
    let (mut num_lines, mut stored) = (0, vec![]);
    for action in actions {
        match action {
            Action::Append => {
                assert!(writer.append(format!("{num_lines}\n")));
                num_lines += 1;
            }
            Action::Wait(seconds) => tokio::time::sleep(Duration::from_secs(*seconds)).await,
            Action::Flush => {
                if writer.flush().await.is_ok() {
                    let num = store.state.lock().unwrap().snapshots.len();
                    stored.push((num, num_lines));
                }
            }
        }
    }
    stored
}

/// Returns the lines of the objects that `listed` contains, as they are in `read`.
fn lines(listed: &Snapshot, read: &Snapshot) -> Vec<usize> {
    let objects = listed.keys().filter_map(|path| read.get(path));
    let texts = objects.map(|bytes| String::from_utf8(bytes.to_vec()).unwrap());
    let lines = texts.flat_map(|text| text.lines().map(str::to_owned).collect::<Vec<_>>());
    lines.map(|line| line.parse().unwrap()).collect()
}

fn action() -> impl Strategy<Value = Action> {
    prop_oneof![
        6 => Just(Action::Append),
        2 => Just(Action::Flush),
        1 => (1..20_u64).prop_map(Action::Wait),
    ]
}

fn fault() -> impl Strategy<Value = Fault> {
    prop_oneof![
        6 => Just(Fault::None),
        1 => Just(Fault::Lost),
        1 => Just(Fault::Ambiguous),
        2 => (1..12_usize).prop_map(Fault::Late),
    ]
}

proptest! {
    /// The writer may die after any request, a request may arrive late, and a reader may list the
    /// objects at any time and read them at any later time.
    #[test]
    fn each_line_is_read_once_after_any_crash(
        actions in prop::collection::vec(action(), 1..120),
        faults in prop::collection::vec(fault(), 0..60),
    ) {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .start_paused(true)
            .build()
            .unwrap();
        let state = FaultyState { faults, keeps_snapshots: true, ..FaultyState::default() };
        let store = Arc::new(FaultyStore { state: Mutex::new(state), ..FaultyStore::default() });
        let stored = runtime.block_on(run(store.clone(), &actions));
        let state = store.state.lock().unwrap();
        let none = Snapshot::new();
        let snapshots: Vec<&Snapshot> = std::iter::once(&none).chain(&state.snapshots).collect();
        for (number, listed) in snapshots.iter().enumerate() {
            let num_stored = stored.iter().filter(|(num, _)| *num <= number).map(|(_, num)| *num);
            let num_stored = num_stored.max().unwrap_or(0);
            // Later reads of the same listing see the objects as they are then.
            for read in snapshots[number..].iter().take(20) {
                let lines = lines(listed, read);
                prop_assert_eq!(&lines, &(0..lines.len()).collect::<Vec<_>>());
                prop_assert!(lines.len() >= num_stored, "{} < {}", lines.len(), num_stored);
            }
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_day_of_metrics_is_tens_of_objects() {
    // Bytes of a row, seconds between rows, and the expected number of objects.
    for (row_bytes, seconds, expected) in [(200, 5, 7), (400, 1, 66)] {
        let store = Arc::new(FaultyStore::default());
        let storage = Storage::from_store(store.clone(), "test://");
        let segments = Segments::new("m/0-", ".jsonl");
        let writer = SegmentWriter::new(&Handle::current(), storage.clone(), segments);
        for _ in 0..86_400 / seconds {
            assert!(writer.append(vec![b'x'; row_bytes]));
            tokio::time::sleep(Duration::from_secs(seconds)).await;
        }
        writer.flush().await.unwrap();
        let objects = storage.list("m").await.unwrap();
        assert_eq!(objects.len(), expected, "{row_bytes} bytes every {seconds} s");
        let state = store.state.lock().unwrap();
        // One each 5 seconds, and one that fills each object.
        assert!(state.num_requests <= 17_280 + expected, "{} requests", state.num_requests);
        let bytes_per_second = state.num_bytes / 86_400;
        assert!(bytes_per_second <= 70_000, "{bytes_per_second} bytes per second");
    }
}

#[tokio::test(start_paused = true)]
async fn lines_wait_as_long_for_a_large_object() {
    let store = Arc::new(FaultyStore::default());
    let storage = Storage::from_store(store, "test://");
    let segments = Segments::new("m/0-", ".jsonl");
    let (path, age_max) = (segments.path(0), segments.age_max);
    let writer = SegmentWriter::new(&Handle::current(), storage.clone(), segments.clone());
    let large = segments.bytes_max - 10;
    writer.append(vec![b'x'; large]);
    writer.flush().await.unwrap();
    writer.append("line\n");
    tokio::time::sleep(age_max + Duration::from_millis(1)).await;
    assert_eq!(storage.get(&path).await.unwrap().len(), large + 5);
}
