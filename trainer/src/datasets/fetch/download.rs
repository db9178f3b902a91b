//! Downloads with retries.

use std::fs::File;
use std::io::Write;
use std::path::Path;
use std::time::Duration;

use reqwest::StatusCode;
use stoker_storage::{Storage, StorageError};
use url::Url;

use super::super::DataError;
use super::shown;
use crate::error::with_sources;

/// Maximum number of attempts for transient failures.
const ATTEMPTS_MAX: u32 = 4;
/// Wait before the second attempt; doubles for each further attempt.
const WAIT_FIRST: Duration = Duration::from_millis(250);
/// Timeout for connecting to the server.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(20);
/// Timeout without receiving any byte.
const READ_TIMEOUT: Duration = Duration::from_secs(60);

/// Size of the range requests for objects, which bounds memory use.
const PIECE_BYTES: u64 = 64 << 20;

/// Downloads `url` to `path`. Blocks; may be called from any thread.
pub(super) fn download(url: &Url, path: &Path) -> Result<(), DataError> {
    let run = || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        let runtime = runtime.map_err(|error| failed(url, &error))?;
        match url.scheme() {
            "http" | "https" => runtime.block_on(over_http(url, path)),
            _ => runtime.block_on(from_storage(url, path)),
        }
    };
    // Use a separate thread: the caller's thread may already run a tokio runtime.
    std::thread::scope(|scope| scope.spawn(run).join())
        .unwrap_or_else(|_| Err(failed(url, &"the download panicked")))
}

fn failed(url: &Url, reason: &dyn std::fmt::Display) -> DataError {
    DataError::Download { url: shown(url), reason: reason.to_string() }
}

/// Downloads an object in ranges. The storage client retries by itself.
async fn from_storage(url: &Url, path: &Path) -> Result<(), DataError> {
    let store = |source| DataError::Storage { url: shown(url), source };
    let (root, name) = in_bucket(url).ok_or_else(|| failed(url, &"the path is not UTF-8"))?;
    let storage = Storage::open(&root, None).map_err(store)?;
    copy(&storage, &name, path).await.map_err(|error| match error {
        Copying::Storage(source) => store(source),
        Copying::File(source) => written(path, source),
    })
}

/// Returns the bucket URL and the object name, with percent-encoding such as `%20` decoded.
fn in_bucket(url: &Url) -> Option<(String, String)> {
    let mut file = Url::parse("file:///").ok()?;
    file.set_path(url.path());
    let name = file.to_file_path().ok()?.to_str()?.trim_start_matches('/').to_owned();
    Some((format!("{}://{}", url.scheme(), url.host_str()?), name))
}

/// Error while copying an object to a file.
enum Copying {
    Storage(StorageError),
    File(std::io::Error),
}

/// Copies an object to a file and syncs it to disk.
async fn copy(storage: &Storage, name: &str, path: &Path) -> Result<(), Copying> {
    let size = storage.size(name).await.map_err(Copying::Storage)?;
    let Some(size) = size else {
        // Request the object for the storage's own error about a missing object.
        return storage.get(name).await.map(drop).map_err(Copying::Storage);
    };
    let mut file = File::create(path).map_err(Copying::File)?;
    let mut start = 0;
    while start < size {
        let end = size.min(start + PIECE_BYTES);
        let piece = storage.get_range(name, start..end).await.map_err(Copying::Storage)?;
        file.write_all(&piece).map_err(Copying::File)?;
        start = end;
    }
    file.sync_all().map_err(Copying::File)
}

async fn over_http(url: &Url, path: &Path) -> Result<(), DataError> {
    let client = reqwest::Client::builder()
        .connect_timeout(CONNECT_TIMEOUT)
        .read_timeout(READ_TIMEOUT)
        .build()
        .map_err(|error| failed(url, &with_sources(&error)))?;
    let mut wait = WAIT_FIRST;
    for attempt in 1.. {
        match once(&client, url, path).await {
            Err(Failure::MayPass(_)) if attempt < ATTEMPTS_MAX => tokio::time::sleep(wait).await,
            Err(Failure::MayPass(error) | Failure::Final(error)) => return Err(error),
            Ok(()) => break,
        }
        wait *= 2;
    }
    Ok(())
}

/// Error of one attempt.
enum Failure {
    /// Transient: another attempt may succeed.
    MayPass(DataError),
    /// Permanent: another attempt would fail too.
    Final(DataError),
}

async fn once(client: &reqwest::Client, url: &Url, path: &Path) -> Result<(), Failure> {
    let response = client.get(url.clone()).send().await;
    let mut response = response
        .map_err(|error| Failure::MayPass(failed(url, &with_sources(&error.without_url()))))?;
    let status = response.status();
    if !status.is_success() {
        return Err(refused(url, status));
    }
    let expected = response.content_length();
    let write = |source| Failure::Final(written(path, source));
    let mut file = File::create(path).map_err(write)?;
    let mut bytes = 0;
    loop {
        match response.chunk().await {
            Ok(Some(chunk)) => {
                file.write_all(&chunk).map_err(write)?;
                bytes += chunk.len() as u64;
            }
            Ok(None) if expected.is_none_or(|expected| expected == bytes) => break,
            Ok(None) => return Err(cut_short(url, bytes, expected, "")),
            Err(error) => {
                let reason = format!(" ({})", with_sources(&error.without_url()));
                return Err(cut_short(url, bytes, expected, &reason));
            }
        }
    }
    file.sync_all().map_err(write)
}

fn refused(url: &Url, status: StatusCode) -> Failure {
    let remedy = match status.as_u16() {
        401 | 403 => "check that the address is public, or that its credentials are valid",
        404 | 410 => "check the address",
        _ => "try again later",
    };
    let error = DataError::Refused { url: shown(url), status: status.as_u16(), remedy };
    let passes = status.is_server_error()
        || matches!(status, StatusCode::TOO_MANY_REQUESTS | StatusCode::REQUEST_TIMEOUT);
    if passes { Failure::MayPass(error) } else { Failure::Final(error) }
}

fn cut_short(url: &Url, bytes: u64, expected: Option<u64>, reason: &str) -> Failure {
    let of = expected.map(|total| format!(" of {total}")).unwrap_or_default();
    let reason = format!("the download ended early, after {bytes}{of} bytes{reason}");
    Failure::MayPass(failed(url, &reason))
}

fn written(path: &Path, source: std::io::Error) -> DataError {
    DataError::write(path.display().to_string(), source)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn url_is_split_into_bucket_and_object() {
        let check = |url: &str, root: &str, name: &str| {
            let parts = in_bucket(&Url::parse(url).unwrap());
            assert_eq!(parts, Some((root.to_owned(), name.to_owned())));
        };
        check("s3://b/a/my file.csv", "s3://b", "a/my file.csv");
        check("s3://b/a%20b/my%2Dfile+1.csv", "s3://b", "a b/my-file+1.csv");
        check("gs://b/\u{e4}.csv", "gs://b", "\u{e4}.csv");
    }

    #[tokio::test]
    async fn objects_are_copied_in_ranges() {
        let folder = tempfile::tempdir().unwrap();
        let storage = Storage::open(folder.path().join("bucket").to_str().unwrap(), None).unwrap();
        let path = folder.path().join("copy");
        let bytes: Vec<u8> = (0..PIECE_BYTES + 3).map(|index| (index % 251) as u8).collect();
        for bytes in [bytes, vec![]] {
            storage.put("my file", bytes.clone().into()).await.unwrap();
            assert!(copy(&storage, "my file", &path).await.is_ok());
            assert!(std::fs::read(&path).unwrap() == bytes, "the copy differs");
        }
        let missing = copy(&storage, "none", &path).await;
        assert!(matches!(missing, Err(Copying::Storage(StorageError::NotFound { .. }))));
    }
}
