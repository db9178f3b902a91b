//! Downloads with retries.

use std::fs::File;
use std::io::Write;
use std::path::Path;
use std::time::Duration;

use reqwest::StatusCode;
use stoker_storage::{Storage, StorageError};
use url::Url;

use super::super::DataError;
use super::redact;
use crate::error::with_sources;

/// Maximum number of attempts for transient failures.
const ATTEMPTS_MAX: u32 = 4;
/// Wait before the second attempt; doubles for each further attempt.
const BACKOFF_FIRST: Duration = Duration::from_millis(250);
/// Timeout for connecting to the server.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(20);
/// Timeout without receiving any byte.
const READ_TIMEOUT: Duration = Duration::from_secs(60);

/// Size of the range requests for objects, which bounds memory use.
const RANGE_BYTES: u64 = 64 << 20;

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
    DataError::Download { url: redact(url), reason: reason.to_string() }
}

/// Downloads an object in ranges. The storage client retries by itself.
async fn from_storage(url: &Url, path: &Path) -> Result<(), DataError> {
    let store = |source| DataError::Storage { url: redact(url), source };
    let (root, name) =
        bucket_and_object(url).ok_or_else(|| failed(url, &"the path is not UTF-8"))?;
    let storage = Storage::open(&root, None).map_err(store)?;
    copy(&storage, &name, path).await.map_err(|error| match error {
        CopyError::Storage(source) => store(source),
        CopyError::File(source) => write_error(path, source),
    })
}

/// Returns the bucket URL and the object name, with percent-encoding such as `%20` decoded.
fn bucket_and_object(url: &Url) -> Option<(String, String)> {
    let mut file = Url::parse("file:///").ok()?;
    file.set_path(url.path());
    let name = file.to_file_path().ok()?.to_str()?.trim_start_matches('/').to_owned();
    Some((format!("{}://{}", url.scheme(), url.host_str()?), name))
}

/// Error while copying an object to a file.
enum CopyError {
    Storage(StorageError),
    File(std::io::Error),
}

/// Copies an object to a file and syncs it to disk.
async fn copy(storage: &Storage, name: &str, path: &Path) -> Result<(), CopyError> {
    let size = storage.size(name).await.map_err(CopyError::Storage)?;
    let Some(size) = size else {
        // Request the object for the storage's own error about a missing object.
        return storage.get(name).await.map(drop).map_err(CopyError::Storage);
    };
    let mut file = File::create(path).map_err(CopyError::File)?;
    let mut start = 0;
    while start < size {
        let end = size.min(start + RANGE_BYTES);
        let range = storage.get_range(name, start..end).await.map_err(CopyError::Storage)?;
        file.write_all(&range).map_err(CopyError::File)?;
        start = end;
    }
    file.sync_all().map_err(CopyError::File)
}

async fn over_http(url: &Url, path: &Path) -> Result<(), DataError> {
    let client = reqwest::Client::builder()
        .connect_timeout(CONNECT_TIMEOUT)
        .read_timeout(READ_TIMEOUT)
        .build()
        .map_err(|error| failed(url, &with_sources(&error)))?;
    let mut wait = BACKOFF_FIRST;
    for attempt in 1.. {
        match try_download(&client, url, path).await {
            Err(AttemptError::Transient(_)) if attempt < ATTEMPTS_MAX => {
                tokio::time::sleep(wait).await;
            }
            Err(AttemptError::Transient(error) | AttemptError::Permanent(error)) => {
                return Err(error);
            }
            Ok(()) => break,
        }
        wait *= 2;
    }
    Ok(())
}

/// Error of one attempt.
enum AttemptError {
    /// Transient: another attempt may succeed.
    Transient(DataError),
    /// Permanent: another attempt would fail too.
    Permanent(DataError),
}

async fn try_download(
    client: &reqwest::Client,
    url: &Url,
    path: &Path,
) -> Result<(), AttemptError> {
    let response = client.get(url.clone()).send().await;
    let mut response = response.map_err(|error| {
        AttemptError::Transient(failed(url, &with_sources(&error.without_url())))
    })?;
    let status = response.status();
    if !status.is_success() {
        return Err(refused(url, status));
    }
    let expected = response.content_length();
    let write = |source| AttemptError::Permanent(write_error(path, source));
    let mut file = File::create(path).map_err(write)?;
    let mut bytes = 0;
    loop {
        match response.chunk().await {
            Ok(Some(chunk)) => {
                file.write_all(&chunk).map_err(write)?;
                bytes += chunk.len() as u64;
            }
            Ok(None) if expected.is_none_or(|expected| expected == bytes) => break,
            Ok(None) => return Err(incomplete(url, bytes, expected, "")),
            Err(error) => {
                let reason = format!(" ({})", with_sources(&error.without_url()));
                return Err(incomplete(url, bytes, expected, &reason));
            }
        }
    }
    file.sync_all().map_err(write)
}

fn refused(url: &Url, status: StatusCode) -> AttemptError {
    let remedy = match status.as_u16() {
        401 | 403 => "check that the address is public, or that its credentials are valid",
        404 | 410 => "check the address",
        _ => "try again later",
    };
    let error = DataError::Refused { url: redact(url), status: status.as_u16(), remedy };
    let is_transient = status.is_server_error()
        || matches!(status, StatusCode::TOO_MANY_REQUESTS | StatusCode::REQUEST_TIMEOUT);
    if is_transient { AttemptError::Transient(error) } else { AttemptError::Permanent(error) }
}

fn incomplete(url: &Url, bytes: u64, expected: Option<u64>, reason: &str) -> AttemptError {
    let of = expected.map(|total| format!(" of {total}")).unwrap_or_default();
    let reason = format!("the download ended early, after {bytes}{of} bytes{reason}");
    AttemptError::Transient(failed(url, &reason))
}

fn write_error(path: &Path, source: std::io::Error) -> DataError {
    DataError::write(path.display().to_string(), source)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn url_is_split_into_bucket_and_object() {
        let check = |url: &str, root: &str, name: &str| {
            let parts = bucket_and_object(&Url::parse(url).unwrap());
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
        let bytes: Vec<u8> = (0..RANGE_BYTES + 3).map(|index| (index % 251) as u8).collect();
        for bytes in [bytes, vec![]] {
            storage.put("my file", bytes.clone().into()).await.unwrap();
            assert!(copy(&storage, "my file", &path).await.is_ok());
            assert!(std::fs::read(&path).unwrap() == bytes, "the copy differs");
        }
        let missing = copy(&storage, "none", &path).await;
        assert!(matches!(missing, Err(CopyError::Storage(StorageError::NotFound { .. }))));
    }
}
