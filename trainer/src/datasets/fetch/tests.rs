//! Tests of addresses, downloads and the cache, with a server on loopback.

use std::io::Write;
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::time::Duration;

use super::*;
use crate::closed_port::ClosedPort;

const CONTENT: &[u8] = b"what the file holds";
const OK: &str = "HTTP/1.1 200 OK\r\nconnection: close\r\n";

/// Server that returns the next of `answers` for each request, then repeats the last. Counts
/// requests.
struct Server {
    address: String,
    requests: Arc<AtomicUsize>,
}

impl Server {
    fn new(answers: Vec<Vec<u8>>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = format!("http://{}/a/data.gz", listener.local_addr().unwrap());
        let requests = Arc::new(AtomicUsize::new(0));
        let count = requests.clone();
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let index = count.fetch_add(1, Ordering::SeqCst).min(answers.len() - 1);
                answer(stream.unwrap(), &answers[index]);
            }
        });
        Self { address, requests }
    }

    fn whole() -> Self {
        Self::new(vec![whole(CONTENT)])
    }

    fn requests(&self) -> usize {
        self.requests.load(Ordering::SeqCst)
    }
}

fn whole(content: &[u8]) -> Vec<u8> {
    [format!("{OK}content-length: {}\r\n\r\n", content.len()).as_bytes(), content].concat()
}

fn status(status: &str) -> Vec<u8> {
    format!("HTTP/1.1 {status}\r\nconnection: close\r\ncontent-length: 0\r\n\r\n").into()
}

fn answer(mut stream: TcpStream, answer: &[u8]) {
    stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    let (mut request, mut buffer) = (Vec::new(), [0; 1024]);
    while !request.ends_with(b"\r\n\r\n") {
        match stream.read(&mut buffer) {
            Ok(len) if len > 0 => request.extend_from_slice(&buffer[..len]),
            _ => return,
        }
    }
    let _ = stream.write_all(answer);
}

fn cache() -> (tempfile::TempDir, Cache) {
    let folder = tempfile::tempdir().unwrap();
    let cache = Cache::new(folder.path().join("data"));
    (folder, cache)
}

/// Returns all files in the cache, except locks.
fn files(folder: &Path) -> Vec<PathBuf> {
    let Ok(entries) = fs::read_dir(folder) else { return vec![] };
    let paths = entries.map(|entry| entry.unwrap().path());
    let all = paths.flat_map(|path| if path.is_dir() { files(&path) } else { vec![path] });
    all.filter(|path| !path.ends_with(".lock")).collect()
}

/// Checks that a fetch with these server responses fails with this text and leaves the cache empty.
#[track_caller]
fn check_refused(answers: Vec<Vec<u8>>, sha256: Option<&str>, expected: &str, requests: usize) {
    let server = Server::new(answers);
    let (_folder, cache) = cache();
    let error = cache.fetch(&server.address, sha256).unwrap_err().to_string();
    assert!(error.contains(expected) && error.contains(&server.address), "{error}");
    assert_eq!(files(cache.folder()), Vec::<PathBuf>::new());
    assert_eq!(server.requests(), requests);
}

#[test]
fn download_is_cached() {
    let (server, (_folder, cache)) = (Server::whole(), cache());
    let path = cache.fetch(&server.address, None).unwrap();
    assert_eq!(fs::read(&path).unwrap(), CONTENT);
    assert!(path.ends_with("data.gz"));
    assert_eq!(cache.fetch(&server.address, None).unwrap(), path);
    assert_eq!((server.requests(), files(cache.folder())), (1, vec![path]));
}

#[test]
fn cache_is_keyed_by_hash_too() {
    let (server, (_folder, cache)) = (Server::whole(), cache());
    let sum = sha256_hex(CONTENT);
    let with = cache.fetch(&server.address, Some(&sum.to_uppercase())).unwrap();
    let without = cache.fetch(&server.address, None).unwrap();
    assert_ne!(with, without);
    assert_eq!(server.requests(), 2);
}

#[test]
fn damaged_cached_file_is_downloaded_again() {
    let (server, (_folder, cache)) = (Server::whole(), cache());
    let sum = sha256_hex(CONTENT);
    let path = cache.fetch(&server.address, Some(&sum)).unwrap();
    fs::write(&path, b"damaged").unwrap();
    assert_eq!(cache.fetch(&server.address, Some(&sum)).unwrap(), path);
    assert_eq!((fs::read(&path).unwrap().as_slice(), server.requests()), (CONTENT, 2));
}

#[test]
fn failed_download_is_reported_and_removed() {
    let refused = "the server refused with status";
    check_refused(vec![status("403 Forbidden")], None, &format!("{refused} 403; check that"), 1);
    check_refused(vec![status("404 Not Found")], None, &format!("{refused} 404; check the"), 1);
    check_refused(vec![status("500 Oops")], None, &format!("{refused} 500; try again"), 4);
    let cut = [format!("{OK}content-length: 100\r\n\r\n").as_bytes(), CONTENT].concat();
    check_refused(vec![cut], None, "the download ended early, after 19 of 100 bytes", 4);
    let sum = sha256_hex(b"other");
    let text = format!("expected SHA-256 {sum}, found {} (19 bytes)", sha256_hex(CONTENT));
    check_refused(vec![whole(CONTENT)], Some(&sum), &text, 1);
}

#[test]
fn transient_failures_are_retried() {
    let cut = format!("{OK}content-length: 100\r\n\r\nabc").into_bytes();
    let server = Server::new(vec![status("503 Busy"), cut, whole(CONTENT)]);
    let (_folder, cache) = cache();
    let path = cache.fetch(&server.address, None).unwrap();
    assert_eq!((fs::read(path).unwrap().as_slice(), server.requests()), (CONTENT, 3));
}

#[test]
fn concurrent_fetches_download_once() {
    let (server, (_folder, cache)) = (Server::whole(), cache());
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                let path = cache.fetch(&server.address, None).unwrap();
                assert_eq!(fs::read(path).unwrap(), CONTENT);
            });
        }
    });
    assert_eq!((server.requests(), files(cache.folder()).len()), (1, 1));
}

#[test]
fn files_of_killed_downloads_are_deleted() {
    let (server, (_folder, cache)) = (Server::whole(), cache());
    let path = cache.fetch(&server.address, None).unwrap();
    let stale = path.with_file_name(".1700000000-1-0.part");
    fs::write(stale, "half").unwrap();
    cache.fetch(&server.address, None).unwrap();
    assert_eq!(files(cache.folder()), [path]);
}

#[test]
fn unreachable_server_is_named_without_secrets() {
    let port = ClosedPort::new();
    let address = port.address();
    let (_folder, cache) = cache();
    let secret = format!("http://user:pass@{address}/file?token=secret");
    let error = cache.fetch(&secret, None).unwrap_err().to_string();
    assert!(error.contains(&format!("http://{address}/file?...: ")), "{error}");
    assert!(error.contains("refused"), "{error}");
    assert!(!error.contains("secret") && !error.contains("pass"), "{error}");
}

#[test]
fn local_files_are_used_in_place() {
    let (folder, cache) = cache();
    let path = folder.path().join("a file");
    fs::write(&path, CONTENT).unwrap();
    let url = Url::from_file_path(&path).unwrap().to_string();
    for address in [path.to_str().unwrap(), &url] {
        assert_eq!(cache.fetch(address, None).unwrap(), path);
        assert_eq!(cache.fetch(address, Some(&sha256_hex(CONTENT))).unwrap(), path);
        let error = cache.fetch(address, Some(&sha256_hex(b"other"))).unwrap_err().to_string();
        assert!(error.contains("expected SHA-256"), "{error}");
    }
    assert!(!cache.folder().exists());
    let error = cache.fetch("no/such/file", None).unwrap_err().to_string();
    assert!(error.contains("cannot read no/such/file"), "{error}");
}

#[test]
fn object_urls_are_parsed_as_remote() {
    let url = |text: &str| Location::Remote(Url::parse(text).unwrap());
    for address in ["s3://bucket/a/b", "gs://bucket/b", "az://container/b", "https://h/x"] {
        assert_eq!(parse(address).unwrap(), url(address));
    }
}

#[test]
fn invalid_addresses_are_refused_with_a_remedy() {
    let check = |address: &str, expected: &str| {
        let error = parse(address).unwrap_err().to_string();
        assert!(error.contains(expected) && error.contains("use a path or a URL"), "{error}");
    };
    check("", "the address is empty");
    check("ftp://host/file", "unknown scheme ftp");
    check("s3://bucket", "contains a bucket but no object");
    check("file://host/path", "must have the form file:///path");
    check("http://", "empty host");
    let (_folder, cache) = cache();
    let error = cache.fetch("file", Some("abc")).unwrap_err().to_string();
    assert!(error.contains("SHA-256: expected 64 hex digits, found \"abc\""), "{error}");
}
