//! A storage root and the operations on it.

mod hashed;
mod list;
mod local;
mod multipart;
mod probe;
mod retry;
mod transfers;
mod upload;

use std::fmt;
use std::io::Write as _;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use bytes::Bytes;
use futures::{Stream, StreamExt, stream};
use object_store::local::LocalFileSystem;
use object_store::multipart::MultipartStore;
use object_store::path::Path;
use object_store::{ObjectStore, ObjectStoreExt, PutPayload};
use tokio::time::Instant;

pub use self::list::ObjectState;
pub(crate) use self::retry::RetryPolicy;
use self::transfers::Transfers;
pub use self::upload::UploadError;
use crate::StorageError;
use crate::credentials::Credentials;
use crate::open;

/// Objects of at least this size are uploaded and downloaded in parts.
const PART_THRESHOLD_BYTES: usize = 16 << 20;

/// Maximum number of concurrent requests of [`Storage::get_each`].
const GETS_MAX: usize = 16;

/// A storage root. Clones share it.
///
/// Paths are relative to the root, with `/` between names.
///
/// # Examples
///
/// ```
/// # tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(async {
/// let storage = stoker_storage::Storage::open("memory://", None)?;
/// storage.put("a/b", "text".into()).await?;
/// assert_eq!(storage.list("a").await?, ["a/b"]);
/// assert_eq!(storage.get("a/b").await?, "text");
/// # Ok::<(), stoker_storage::StorageError>(())
/// # }).unwrap();
/// ```
#[derive(Clone)]
pub struct Storage {
    url: Arc<str>,
    prefix: Path,
    store: Arc<dyn ObjectStore>,
    /// The same store, if it supports multipart uploads.
    parts: Option<Arc<dyn MultipartStore>>,
    retry_policy: RetryPolicy,
    transfers: Arc<Transfers>,
    /// Local directory of the root, if the root is one.
    folder: Option<PathBuf>,
    /// The same store, if the root is a local directory.
    files: Option<Arc<LocalFileSystem>>,
}

impl fmt::Debug for Storage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Storage").field("url", &self.url).finish_non_exhaustive()
    }
}

impl Storage {
    /// Opens a root: `file:///path`, an absolute path, `s3://bucket/prefix`,
    /// `gs://bucket/prefix`, `az://container/prefix`, or `memory://` (initially empty, and dropped
    /// with its last clone). `endpoint` is the URL of an S3-compatible server other than AWS.
    /// Credentials come from the environment. A missing local directory is created. Otherwise, the
    /// storage is not accessed; see [`probe`](Self::probe).
    ///
    /// # Errors
    ///
    /// The URL is invalid, a local directory cannot be created, or the environment contains no
    /// usable credentials.
    pub fn open(url: &str, endpoint: Option<&str>) -> Result<Self, StorageError> {
        open::open(url, endpoint, None)
    }

    /// Opens a root with these credentials only, for a server that opens the addresses of others:
    /// neither the environment, nor files, nor an identity of the machine is used. Local
    /// directories and link-local endpoints are refused.
    ///
    /// # Errors
    ///
    /// The address is invalid or refused, or the credentials are incomplete.
    pub fn open_with(
        url: &str,
        endpoint: Option<&str>,
        credentials: &Credentials,
    ) -> Result<Self, StorageError> {
        open::open(url, endpoint, Some(credentials))
    }

    /// Creates a root in an existing store, such as a test double; `url` names the root in errors.
    pub fn from_store(store: Arc<dyn ObjectStore>, url: &str) -> Self {
        Self {
            url: url.into(),
            prefix: Path::default(),
            store,
            parts: None,
            retry_policy: RetryPolicy::LOCAL,
            transfers: Arc::default(),
            folder: None,
            files: None,
        }
    }

    pub(crate) fn in_folder(self, folder: PathBuf, files: Arc<LocalFileSystem>) -> Self {
        Self { folder: Some(folder), files: Some(files), ..self }
    }

    /// Returns the same root with multipart uploads of large objects through `parts`.
    pub fn with_parts(self, parts: Arc<dyn MultipartStore>) -> Self {
        Self { parts: Some(parts), ..self }
    }

    pub(crate) fn with_prefix(self, prefix: Path) -> Self {
        Self { prefix, ..self }
    }

    pub(crate) fn with_retry_policy(self, retry_policy: RetryPolicy) -> Self {
        Self { retry_policy, ..self }
    }

    /// Returns the same root with fewer retries, for operations that should fail within seconds.
    pub fn with_few_retries(self) -> Self {
        let retry_policy = self.retry_policy.with_few_attempts();
        self.with_retry_policy(retry_policy)
    }

    /// Returns the local directory of the root; `None` for other storage.
    pub fn folder(&self) -> Option<&std::path::Path> {
        self.folder.as_deref()
    }

    /// Returns the URL of the root.
    pub fn url(&self) -> &str {
        &self.url
    }

    /// Writes an object atomically and replaces an existing one.
    ///
    /// # Errors
    ///
    /// The storage failed. The object may be written or not.
    pub async fn put(&self, path: &str, bytes: Bytes) -> Result<(), StorageError> {
        self.put_concat(path, &[bytes]).await
    }

    /// Same as [`put`](Self::put), for an object that consists of the concatenated `parts`. Does
    /// not copy them into one buffer.
    ///
    /// # Errors
    ///
    /// Same as [`put`](Self::put).
    pub async fn put_concat(&self, path: &str, parts: &[Bytes]) -> Result<(), StorageError> {
        let location = self.location(path)?;
        let len: usize = parts.iter().map(Bytes::len).sum();
        match (&self.parts, self.local_file(path)?) {
            (Some(store), _) if len >= PART_THRESHOLD_BYTES => {
                self.put_parts(store.as_ref(), path, &location, parts).await
            }
            (None, Some(file)) if len >= PART_THRESHOLD_BYTES => {
                let write = || {
                    let (file, parts) = (file.clone(), parts.to_vec());
                    local::run_blocking(move || local::write_file(&file, parts.into_iter().map(Ok)))
                };
                self.retry(path, write).await
            }
            _ => {
                let payload: PutPayload = parts.iter().cloned().collect();
                let put = || self.store.put(&location, payload.clone());
                self.transfer(path, len as u64, put).await?;
                self.transfers.has_stored.store(true, Ordering::Relaxed);
                Ok(())
            }
        }
    }

    /// Same as [`put`](Self::put). Returns whether only one request was sent. Otherwise, an earlier
    /// request may arrive later and write the same bytes again.
    ///
    /// # Errors
    ///
    /// Same as [`put`](Self::put).
    pub async fn put_uniquely(&self, path: &str, bytes: Bytes) -> Result<bool, StorageError> {
        if bytes.len() >= PART_THRESHOLD_BYTES {
            return self.put(path, bytes).await.map(|()| false);
        }
        let location = self.location(path)?;
        let (num_requests, start) = (AtomicU32::new(0), Instant::now());
        let put = || {
            num_requests.fetch_add(1, Ordering::Relaxed);
            self.store.put(&location, PutPayload::from(bytes.clone()))
        };
        self.retry_write(path, put).await?;
        self.transfers.has_stored.store(true, Ordering::Relaxed);
        // A bucket's client retries within a request, but not earlier. A local disk may be slow.
        let is_unique = self.folder.is_some() || start.elapsed() < open::RETRY_WAIT_FIRST;
        Ok(num_requests.into_inner() == 1 && is_unique)
    }

    /// Appends to a file of a local root, if the file has this length. Returns `false` if nothing
    /// or only a part was appended; [`put`](Self::put) then replaces the file.
    pub fn append_locally(&self, path: &str, len: u64, bytes: &[u8]) -> bool {
        let Ok(Some(file)) = self.local_file(path) else { return false };
        let append = || -> std::io::Result<bool> {
            let mut file = std::fs::OpenOptions::new().append(true).open(file)?;
            if file.metadata()?.len() != len {
                return Ok(false);
            }
            file.write_all(bytes).map(|()| true)
        };
        append().unwrap_or(false)
    }

    /// Reads objects with at most 16 concurrent requests, in the order of `paths`.
    pub fn get_each(&self, paths: Vec<String>) -> impl Stream<Item = Result<Bytes, StorageError>> {
        let gets = paths.into_iter().map(move |path| async move { self.get(&path).await });
        stream::iter(gets).buffered(GETS_MAX)
    }

    /// Reads an object.
    ///
    /// # Errors
    ///
    /// [`StorageError::NotFound`] if the object does not exist; otherwise, the storage failed.
    pub async fn get(&self, path: &str) -> Result<Bytes, StorageError> {
        let location = self.location(path)?;
        let head = || self.store.head(&location);
        let size = if self.parts.is_some() { self.retry(path, head).await?.size } else { 0 };
        if size >= PART_THRESHOLD_BYTES as u64 {
            return self.get_parts(path, &location, 0..size).await;
        }
        let get = || async { self.store.get(&location).await?.bytes().await };
        self.transfer(path, size, get).await
    }

    /// Reads a byte range of an object.
    ///
    /// # Errors
    ///
    /// [`StorageError::NotFound`] if the object does not exist; [`StorageError::Unavailable`] if
    /// it ends before the range does; otherwise, the storage failed.
    pub async fn get_range(
        &self,
        path: &str,
        range: std::ops::Range<u64>,
    ) -> Result<Bytes, StorageError> {
        if range.is_empty() {
            return Ok(Bytes::new());
        }
        let location = self.location(path)?;
        // One request for a large range could exceed the request timeout on every retry.
        let is_large =
            self.parts.is_some() && range.end - range.start >= PART_THRESHOLD_BYTES as u64;
        let bytes = match is_large {
            true => self.get_parts(path, &location, range.clone()).await?,
            false => {
                let get = || self.store.get_range(&location, range.clone());
                self.transfer(path, range.end - range.start, get).await?
            }
        };
        if bytes.len() as u64 == range.end - range.start {
            return Ok(bytes);
        }
        let reason = format!("it has fewer than {} bytes", range.end);
        Err(StorageError::Unavailable {
            url: self.url.to_string(),
            path: path.to_owned(),
            attempts: 1,
            reason,
        })
    }

    /// Deletes an object. A missing object is not an error.
    ///
    /// # Errors
    ///
    /// The storage failed. The object may be deleted or not.
    pub async fn delete(&self, path: &str) -> Result<(), StorageError> {
        let location = self.location(path)?;
        match self.retry(path, || self.store.delete(&location)).await {
            Err(StorageError::NotFound { .. }) => Ok(()),
            other => other,
        }
    }

    /// Deletes all objects below `prefix`. On local roots, it also deletes the directory and the
    /// files that killed writers left in it. A missing directory is not an error.
    ///
    /// # Errors
    ///
    /// The storage failed. Some objects may remain.
    pub async fn delete_folder(&self, prefix: &str) -> Result<(), StorageError> {
        for path in self.list(prefix).await? {
            self.delete(&path).await?;
        }
        let Some(root) = &self.folder else { return Ok(()) };
        match std::fs::remove_dir_all(root.join(prefix)) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                let (url, path) = (self.url.to_string(), prefix.to_owned());
                let reason = error.to_string();
                Err(StorageError::Unavailable { url, path, attempts: 1, reason })
            }
            _ => Ok(()),
        }
    }

    /// Deletes partial files that killed writers left directly below `prefix`, if `matches` accepts
    /// the name of the object. No process may be writing these objects. Only local roots have such
    /// files, and lists omit them.
    ///
    /// # Errors
    ///
    /// The file system failed. Some files may remain.
    pub fn delete_staged(
        &self,
        prefix: &str,
        matches: impl Fn(&str) -> bool,
    ) -> Result<(), StorageError> {
        let Some(root) = &self.folder else { return Ok(()) };
        let failed = |error: std::io::Error| {
            let (url, path) = (self.url.to_string(), prefix.to_owned());
            StorageError::Unavailable { url, path, attempts: 1, reason: error.to_string() }
        };
        let entries = match std::fs::read_dir(root.join(prefix)) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(()),
            entries => entries.map_err(failed)?,
        };
        for entry in entries {
            let entry = entry.map_err(failed)?;
            let name = entry.file_name();
            let staged = name.to_str().and_then(|name| name.rsplit_once('#'));
            if staged.is_some_and(|(name, number)| matches(name) && number.parse::<u64>().is_ok()) {
                std::fs::remove_file(entry.path()).map_err(failed)?;
            }
        }
        Ok(())
    }

    /// Returns whether an object exists at `path`.
    ///
    /// # Errors
    ///
    /// The storage failed. The object may exist or not.
    pub async fn exists(&self, path: &str) -> Result<bool, StorageError> {
        Ok(self.size(path).await?.is_some())
    }

    /// Returns the size in bytes of the object at `path`; `None` if it does not exist.
    ///
    /// # Errors
    ///
    /// The storage failed. The object may exist or not.
    pub async fn size(&self, path: &str) -> Result<Option<u64>, StorageError> {
        let location = self.location(path)?;
        match self.retry(path, || self.store.head(&location)).await {
            Ok(object) => Ok(Some(object.size)),
            Err(StorageError::NotFound { .. }) => Ok(None),
            Err(error) => Err(error),
        }
    }

    fn location(&self, path: &str) -> Result<Path, StorageError> {
        let parsed = Path::parse(path).map_err(|error| StorageError::BadUrl {
            url: self.url.to_string(),
            reason: format!("path {path:?}: {error}; use names with single `/` between them"),
        })?;
        Ok(self.prefix.parts().chain(parsed.parts()).collect())
    }
}

#[cfg(test)]
mod tests;
