//! An S3 server for tests: the files of a directory as one bucket, for one access key.

use std::io::{BufRead as _, BufReader, Write as _};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// A server that ends with its process.
pub(crate) struct ObjectServer {
    /// Endpoint URL.
    pub(crate) endpoint: String,
    num_requests: Arc<AtomicUsize>,
}

impl ObjectServer {
    /// Serves the files of a directory to requests that `access_key` has signed.
    pub(crate) fn start(folder: PathBuf, access_key: &'static str) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let endpoint = format!("http://{}", listener.local_addr().unwrap());
        let num_requests = Arc::new(AtomicUsize::new(0));
        let counter = num_requests.clone();
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let (folder, counter) = (folder.clone(), counter.clone());
                std::thread::spawn(move || answer(&stream, &folder, access_key, &counter));
            }
        });
        Self { endpoint, num_requests }
    }

    /// Number of requests so far.
    pub(crate) fn num_requests(&self) -> usize {
        self.num_requests.load(Ordering::SeqCst)
    }
}

/// Answers one request, and closes the connection.
fn answer(stream: &TcpStream, folder: &Path, access_key: &str, counter: &AtomicUsize) {
    let mut lines = BufReader::new(stream).lines().map_while(Result::ok);
    let Some(request) = lines.next() else { return };
    let headers: Vec<String> = lines.take_while(|line| !line.is_empty()).collect();
    counter.fetch_add(1, Ordering::SeqCst);
    let is_signed = headers.iter().any(|line| line.contains(&format!("Credential={access_key}/")));
    let target = request.split(' ').nth(1).unwrap_or_default();
    let (path, query) = target.split_once('?').unwrap_or((target, ""));
    // The first part of the path is the bucket.
    let key = path.trim_start_matches('/').split_once('/').map_or("", |(_, key)| key);
    let (status, body) = match (is_signed, key) {
        (false, _) => ("403 Forbidden", "<Error><Code>AccessDenied</Code></Error>".into()),
        (true, "") => ("200 OK", list(folder, query).into_bytes()),
        (true, key) => match std::fs::read(folder.join(key)) {
            Ok(bytes) => ("200 OK", bytes),
            Err(_) => ("404 Not Found", "<Error><Code>NoSuchKey</Code></Error>".into()),
        },
    };
    let range = headers.iter().find_map(|line| line.strip_prefix("range: bytes=")?.split_once('-'));
    let (status, body, content_range) = match (status, range) {
        ("200 OK", Some((first, last))) => {
            let (first, last): (usize, usize) = (first.parse().unwrap(), last.parse().unwrap());
            let content_range = format!("Content-Range: bytes {first}-{last}/{}\r\n", body.len());
            ("206 Partial Content", body[first..=last].to_vec(), content_range)
        }
        _ => (status, body, String::new()),
    };
    let head = format!(
        "HTTP/1.1 {status}\r\nContent-Length: {}\r\n{content_range}ETag: \"1\"\r\n\
         Last-Modified: Thu, 01 Jan 2026 00:00:00 GMT\r\nConnection: close\r\n\r\n",
        body.len()
    );
    let mut stream = stream;
    // Ignore errors: the client may have gone.
    let _ = stream.write_all(head.as_bytes()).and_then(|()| stream.write_all(&body));
}

fn list(folder: &Path, query: &str) -> String {
    let prefix = query.split('&').find_map(|part| part.strip_prefix("prefix=")).unwrap_or_default();
    let prefix = prefix.replace("%2F", "/");
    let mut keys = Vec::new();
    collect(folder, folder, &mut keys);
    keys.sort();
    let contents = keys.iter().filter(|(key, _)| key.starts_with(&prefix)).map(|(key, size)| {
        format!(
            "<Contents><Key>{key}</Key><LastModified>2026-01-01T00:00:00.000Z</LastModified>\
             <ETag>\"1\"</ETag><Size>{size}</Size></Contents>"
        )
    });
    format!(
        "<ListBucketResult><IsTruncated>false</IsTruncated>{}</ListBucketResult>",
        contents.collect::<String>()
    )
}

fn collect(root: &Path, folder: &Path, keys: &mut Vec<(String, u64)>) {
    for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
        let path = entry.path();
        match path.is_dir() {
            true => collect(root, &path, keys),
            false => {
                let key = path.strip_prefix(root).unwrap().to_string_lossy().into_owned();
                keys.push((key, entry.metadata().map_or(0, |metadata| metadata.len())));
            }
        }
    }
}
