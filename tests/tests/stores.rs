//! Checks the store operations that Stoker relies on: S3 with SeaweedFS, Azure with Azurite, Google
//! with a fake of its XML API. Each store runs undisturbed and behind a proxy that fails requests.

mod azure;
mod google;

use std::process::{Command, Output};

use stoker_storage::{Storage, StorageError, hash};
use stoker_tests::describe_output;

use crate::proxy::Proxy;
use crate::readers::s3_server;

/// URL of the root, for the process that checks a store.
const URL: &str = "STOKER_TEST_STORE_URL";
/// Endpoint, for S3 stores.
const ENDPOINT: &str = "STOKER_TEST_STORE_ENDPOINT";

/// URL of a store, and the environment that users would set.
struct Access {
    url: String,
    environment: Vec<(&'static str, String)>,
}

/// Not a test: the process that checks a store. Its environment has the credentials.
#[test]
fn program() {
    let Ok(url) = std::env::var(URL) else { return };
    let endpoint = std::env::var(ENDPOINT).ok();
    let storage = Storage::open(&url, endpoint.as_deref()).unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    if let Err(error) = runtime.block_on(storage.clone().with_few_retries().probe()) {
        println!("probe: {error}");
        std::process::exit(9);
    }
    runtime.block_on(async {
        objects_come_back_as_written(&storage).await;
        missing_objects_are_reported(&storage).await;
        ranges_are_exact(&storage).await;
        lists_are_complete_and_sorted(&storage).await;
        large_objects_go_in_parts(&storage).await;
        deleted_objects_are_gone(&storage).await;
    });
}

async fn objects_come_back_as_written(storage: &Storage) {
    for (path, bytes) in [
        ("plain", &b"text"[..]),
        ("a/b/c.json", b"{}"),
        ("empty", b""),
        ("odd/a b+c=d%e&f?g#h.txt", b"odd"),
        ("odd/\u{e4}\u{65e5}\u{672c}", &[0, 255, 10, 13]),
    ] {
        storage.put(path, bytes.to_vec().into()).await.unwrap();
        assert_eq!(storage.get(path).await.unwrap(), bytes, "{path}");
        assert_eq!(storage.size(path).await.unwrap(), Some(bytes.len() as u64), "{path}");
    }
    storage.put("plain", "shorter".into()).await.unwrap();
    storage.put("plain", "new".into()).await.unwrap();
    assert_eq!(storage.get("plain").await.unwrap(), "new");
}

async fn missing_objects_are_reported(storage: &Storage) {
    let error = storage.get("none").await.unwrap_err();
    assert!(matches!(error, StorageError::NotFound { .. }), "{error:?}");
    // A prefix of object names is not an object.
    assert!(!storage.exists("a/b").await.unwrap());
    assert_eq!(storage.size("none").await.unwrap(), None);
    assert!(storage.list("none").await.unwrap().is_empty());
    assert!(storage.folders("none").await.unwrap().is_empty());
}

async fn ranges_are_exact(storage: &Storage) {
    storage.put("range", "0123456789".into()).await.unwrap();
    for (range, expected) in [(0..1, "0"), (3..7, "3456"), (9..10, "9"), (4..4, "")] {
        assert_eq!(storage.get_range("range", range.clone()).await.unwrap(), expected, "{range:?}");
    }
    let error = storage.get_range("range", 5..11).await.unwrap_err();
    assert!(error.to_string().contains("fewer than 11 bytes"), "{error}");
    let error = storage.get_range("none", 0..1).await.unwrap_err();
    assert!(matches!(error, StorageError::NotFound { .. }), "{error:?}");
}

async fn lists_are_complete_and_sorted(storage: &Storage) {
    let mut expected = vec![];
    for number in 0..12 {
        let path = format!("list/{}/{number:02}", number % 3);
        storage.put(&path, vec![b'x'; number].into()).await.unwrap();
        expected.push((path, number as u64));
    }
    storage.put("list2/other", "x".into()).await.unwrap();
    expected.sort();
    assert_eq!(storage.list_sized("list").await.unwrap(), expected);
    assert_eq!(storage.list("list/1").await.unwrap().len(), 4);
    assert_eq!(storage.folders("list").await.unwrap(), ["0", "1", "2"]);
    let folders = storage.folders("").await.unwrap();
    let has = |name: &str| folders.iter().any(|folder| folder == name);
    assert!(["a", "list", "list2", "odd"].into_iter().all(has), "{folders:?}");
    let odd = storage.list("odd").await.unwrap();
    assert_eq!(odd, ["odd/a b+c=d%e&f?g#h.txt", "odd/\u{e4}\u{65e5}\u{672c}"]);
}

async fn large_objects_go_in_parts(storage: &Storage) {
    // Two parts and a remainder.
    let bytes: Vec<u8> = (0..(17 << 20) + 5).map(|at: u32| (at % 251) as u8).collect();
    storage.put("large", bytes.clone().into()).await.unwrap();
    assert!(storage.get("large").await.unwrap() == bytes, "the bytes differ");
    assert_eq!(storage.size("large").await.unwrap(), Some(bytes.len() as u64));
    let range = (8 << 20) - 2..(8 << 20) + 2;
    let part = storage.get_range("large", range.clone()).await.unwrap();
    assert_eq!(part, bytes[range.start as usize..range.end as usize]);
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("file");
    std::fs::write(&file, &bytes).unwrap();
    let entry = storage.put_file("of-file", &file).await.unwrap();
    assert_eq!(entry, hash::file_entry(&[&bytes]));
    assert!(storage.get("of-file").await.unwrap() == bytes, "the bytes of the file differ");
}

async fn deleted_objects_are_gone(storage: &Storage) {
    storage.delete("plain").await.unwrap();
    storage.delete("plain").await.unwrap();
    assert!(!storage.exists("plain").await.unwrap());
    storage.delete_folder("list").await.unwrap();
    assert!(storage.list("list").await.unwrap().is_empty());
    assert_eq!(storage.list("list2").await.unwrap(), ["list2/other"]);
    storage.delete_folder("").await.unwrap();
    assert!(storage.list("").await.unwrap().is_empty());
}

/// Runs [`program`] with the given access.
fn try_store(access: &Access) -> Output {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "stores::program", "--nocapture"]).env(URL, &access.url);
    command.envs(access.environment.iter().map(|(name, value)| (*name, value)));
    command.output().unwrap()
}

/// Checks a store at a port, undisturbed and with every seventh request failing.
fn check(port: u16, access: impl Fn(u16, &str) -> Access) {
    let output = try_store(&access(port, "calm"));
    assert!(output.status.success(), "{}", describe_output(&output));
    let proxy = Proxy::start(port, 7);
    let output = try_store(&access(proxy.port, "rough"));
    assert!(output.status.success(), "with failing requests: {}", describe_output(&output));
    let (requests, failed) = proxy.counts();
    assert!(failed >= 10, "only {failed} of {requests} requests failed");
}

/// Checks that the first request is refused with this error.
fn check_refused(access: &Access, part: &str) {
    let output = try_store(access);
    assert_eq!(output.status.code(), Some(9), "{}", describe_output(&output));
    assert!(describe_output(&output).contains(part), "{}", describe_output(&output));
}

#[test]
fn s3_works_with_seaweedfs() {
    let folder = tempfile::tempdir().unwrap();
    let server = s3_server(folder.path());
    let access = |port: u16, prefix: &str| Access {
        url: format!("s3://runs/{prefix}/deep"),
        environment: vec![
            (ENDPOINT, format!("http://127.0.0.1:{port}")),
            ("AWS_ACCESS_KEY_ID", "test".to_owned()),
            ("AWS_SECRET_ACCESS_KEY", "secret".to_owned()),
        ],
    };
    check(server.port, access);
    let mut wrong = access(server.port, "wrong");
    wrong.environment[2].1 = "wrong".to_owned();
    check_refused(&wrong, "refused access");
}

#[test]
fn azure_works_with_azurite() {
    let folder = tempfile::tempdir().unwrap();
    let server = azure::Azurite::start(folder.path(), "runs");
    let access = |port: u16, prefix: &str| Access {
        url: format!("az://runs/{prefix}/deep"),
        environment: vec![
            ("AZURE_STORAGE_USE_EMULATOR", "true".to_owned()),
            ("AZURITE_BLOB_STORAGE_URL", format!("http://127.0.0.1:{port}")),
        ],
    };
    check(server.port, access);
    let mut wrong = access(server.port, "wrong");
    wrong.environment.push(("AZURE_STORAGE_ACCOUNT_KEY", "d3Jvbmc=".to_owned()));
    check_refused(&wrong, "refused access");
    let missing = Access { url: "az://missing/x".to_owned(), ..access(server.port, "") };
    check_refused(&missing, "no such bucket");
}

#[test]
fn google_works_with_a_fake_server() {
    let server = google::FakeGcs::start("runs");
    let access = |port: u16, prefix: &str| Access {
        url: format!("gs://runs/{prefix}/deep"),
        environment: vec![
            ("GOOGLE_BASE_URL", format!("http://127.0.0.1:{port}")),
            ("GOOGLE_SERVICE_ACCOUNT_KEY", google::KEY.to_owned()),
        ],
    };
    check(server.port, access);
    let missing = Access { url: "gs://missing/x".to_owned(), ..access(server.port, "") };
    check_refused(&missing, "no such bucket");
    let forbidden = Access { url: "gs://forbidden/x".to_owned(), ..access(server.port, "") };
    check_refused(&forbidden, "refused access");
}
