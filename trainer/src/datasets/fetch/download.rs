//! Downloads, with patience for what may pass.

use std::fs::File;
use std::io::Write;
use std::path::Path;
use std::time::Duration;

use reqwest::StatusCode;
use stoker_storage::{Storage, StorageError};
use url::Url;

use super::super::DataError;
use super::shown;
use crate::error::chain;

/// Times a download is tried where the failure may pass.
const ATTEMPTS_MAX: u32 = 4;
/// The wait before the second attempt; each later one is twice as long.
const WAIT_FIRST: Duration = Duration::from_millis(250);
/// To find the server.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(20);
/// Without a byte from the server.
const READ_TIMEOUT: Duration = Duration::from_secs(60);

/// Bytes of an object that are in memory at a time.
const PIECE_BYTES: u64 = 64 << 20;

/// Writes what `url` names to `path`. Blocks; may be called from any thread.
pub(super) fn download(url: &Url, path: &Path) -> Result<(), DataError> {
    let run = || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        let runtime = runtime.map_err(|error| failed(url, &error))?;
        match url.scheme() {
            "http" | "https" => runtime.block_on(over_http(url, path)),
            _ => runtime.block_on(from_storage(url, path)),
        }
    };
    // A thread of its own, since the caller's may run another runtime.
    std::thread::scope(|scope| scope.spawn(run).join())
        .unwrap_or_else(|_| Err(failed(url, &"the download panicked")))
}

fn failed(url: &Url, reason: &dyn std::fmt::Display) -> DataError {
    DataError::Download { url: shown(url), reason: reason.to_string() }
}

/// Reads an object piece by piece: the store tries again by itself.
async fn from_storage(url: &Url, path: &Path) -> Result<(), DataError> {
    let store = |source| DataError::Storage { url: shown(url), source };
    let (root, name) = in_bucket(url).ok_or_else(|| failed(url, &"its path is not UTF-8"))?;
    let storage = Storage::open(&root, None).map_err(store)?;
    copy(&storage, &name, path).await.map_err(|error| match error {
        Copying::Storage(source) => store(source),
        Copying::File(source) => written(path, source),
    })
}

/// The bucket, and the object's name in it, in which a URL writes some characters as `%20`.
fn in_bucket(url: &Url) -> Option<(String, String)> {
    let mut file = Url::parse("file:///").ok()?;
    file.set_path(url.path());
    let name = file.to_file_path().ok()?.to_str()?.trim_start_matches('/').to_owned();
    Some((format!("{}://{}", url.scheme(), url.host_str()?), name))
}

/// Why an object was not copied.
enum Copying {
    Storage(StorageError),
    File(std::io::Error),
}

/// Writes an object to a file and brings it to the disk.
async fn copy(storage: &Storage, name: &str, path: &Path) -> Result<(), Copying> {
    let size = storage.size(name).await.map_err(Copying::Storage)?;
    let Some(size) = size else {
        // Says what a missing object is.
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
        .map_err(|error| failed(url, &chain(&error)))?;
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

/// Why an attempt failed.
enum Failure {
    /// Another attempt may succeed.
    MayPass(DataError),
    /// It would not.
    Final(DataError),
}

async fn once(client: &reqwest::Client, url: &Url, path: &Path) -> Result<(), Failure> {
    let answer = client.get(url.clone()).send().await;
    let mut answer =
        answer.map_err(|error| Failure::MayPass(failed(url, &chain(&error.without_url()))))?;
    let status = answer.status();
    if !status.is_success() {
        return Err(refused(url, status));
    }
    let expected = answer.content_length();
    let write = |source| Failure::Final(written(path, source));
    let mut file = File::create(path).map_err(write)?;
    let mut bytes = 0;
    loop {
        match answer.chunk().await {
            Ok(Some(chunk)) => {
                file.write_all(&chunk).map_err(write)?;
                bytes += chunk.len() as u64;
            }
            Ok(None) if expected.is_none_or(|expected| expected == bytes) => break,
            Ok(None) => return Err(cut_short(url, bytes, expected, "")),
            Err(error) => {
                let reason = format!(" ({})", chain(&error.without_url()));
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
    let of = expected.map(|it| format!(" of {it}")).unwrap_or_default();
    let reason = format!("the download was cut short after {bytes}{of} bytes{reason}");
    Failure::MayPass(failed(url, &reason))
}

fn written(path: &Path, source: std::io::Error) -> DataError {
    DataError::write(path.display().to_string(), source)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_object_is_named_as_it_is_in_its_bucket() {
        let check = |url: &str, root: &str, name: &str| {
            let found = in_bucket(&Url::parse(url).unwrap());
            assert_eq!(found, Some((root.to_owned(), name.to_owned())));
        };
        check("s3://b/a/my file.csv", "s3://b", "a/my file.csv");
        check("s3://b/a%20b/my%2Dfile+1.csv", "s3://b", "a b/my-file+1.csv");
        check("gs://b/\u{e4}.csv", "gs://b", "\u{e4}.csv");
    }

    #[tokio::test]
    async fn an_object_is_copied_piece_by_piece() {
        let folder = tempfile::tempdir().unwrap();
        let storage = Storage::open(folder.path().join("bucket").to_str().unwrap(), None).unwrap();
        let path = folder.path().join("copy");
        let bytes: Vec<u8> = (0..PIECE_BYTES + 3).map(|it| (it % 251) as u8).collect();
        for bytes in [bytes, vec![]] {
            storage.put("my file", bytes.clone().into()).await.unwrap();
            assert!(copy(&storage, "my file", &path).await.is_ok());
            assert!(std::fs::read(&path).unwrap() == bytes, "other bytes");
        }
        let missing = copy(&storage, "none", &path).await;
        assert!(matches!(missing, Err(Copying::Storage(StorageError::NotFound { .. }))));
    }
}
