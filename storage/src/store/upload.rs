//! Uploads of local files, of which only some parts are in memory.

use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use bytes::Bytes;
use futures::{TryStreamExt as _, stream};
use object_store::PutPayload;
use stoker_api::contract::FileEntry;

use super::multipart::part_bytes;
use super::{PART_THRESHOLD_BYTES, Storage, local};
use crate::StorageError;
use crate::hash::{self, FileHasher};

/// Failure of [`Storage::put_file`].
#[derive(Debug, thiserror::Error)]
pub enum UploadError {
    /// The local file cannot be read.
    #[error("cannot read {}: {source}", path.display())]
    File {
        /// Path of the file.
        path: PathBuf,
        /// Cause.
        source: io::Error,
    },
    /// The storage failed.
    #[error(transparent)]
    Storage(#[from] StorageError),
}

impl Storage {
    /// Writes an object with the contents of a local file, like [`put`](Self::put), and returns the
    /// object's entry in a manifest. At most nine parts of the file are in memory at a time. Parts
    /// have 8 MiB, or 1/9,000 of a file above 70 GiB. Stores without parts, which only tests have,
    /// need memory for the complete file.
    ///
    /// The entry describes the bytes that were stored, even if the file changes meanwhile.
    ///
    /// # Errors
    ///
    /// See [`UploadError`]. If the storage failed, the object may be written or not.
    pub async fn put_file(&self, path: &str, file: &Path) -> Result<FileEntry, UploadError> {
        let location = self.location(path)?;
        let target = self.local_file(path)?;
        let source = file.to_owned();
        let unreadable = |source| UploadError::File { path: file.to_owned(), source };
        let reader = in_background(move || PartReader::open(&source)).await.map_err(unreadable)?;
        if reader.len >= PART_THRESHOLD_BYTES as u64 {
            if let Some(store) = &self.parts {
                let done: Arc<Mutex<Option<FileEntry>>> = Arc::default();
                let next = |reader: PartReader| {
                    let done = done.clone();
                    async move {
                        let (reader, part) = reader.next_in_background().await?;
                        if part.is_none() {
                            *lock(&done) = Some(reader.finish());
                            return Ok(None);
                        }
                        Ok(part.map(|part| (PutPayload::from(part), reader)))
                    }
                };
                let parts = stream::try_unfold(reader, next).map_err(unreadable);
                self.put_stream(store.as_ref(), path, &location, parts).await?;
                let entry = lock(&done).take();
                return entry.ok_or_else(|| unreadable(io::ErrorKind::UnexpectedEof.into()));
            }
            if let Some(target) = target {
                return self.copy_file(path, file, target).await;
            }
        }
        let source = file.to_owned();
        let bytes = in_background(move || std::fs::read(source)).await.map_err(unreadable)?;
        let bytes = Bytes::from(bytes);
        let entry = hash::file_entry(&[&bytes]);
        self.put(path, bytes).await?;
        Ok(entry)
    }

    /// Copies a file to a file of a local root.
    async fn copy_file(
        &self,
        path: &str,
        file: &Path,
        target: PathBuf,
    ) -> Result<FileEntry, UploadError> {
        let failure: Arc<Mutex<Option<io::Error>>> = Arc::default();
        let copy = || {
            let (file, target, failure) = (file.to_owned(), target.clone(), failure.clone());
            local::run_blocking(move || {
                // The error of a read is returned separately: it is not one of the storage.
                let separate = |error| {
                    *lock(&failure) = Some(error);
                    io::Error::other("the file to store cannot be read")
                };
                let mut reader = PartReader::open(&file).map_err(separate)?;
                let next = || reader.next().map_err(separate).transpose();
                local::write_file(&target, std::iter::from_fn(next))?;
                Ok(reader.finish())
            })
        };
        let copied = self.retry(path, copy).await;
        let failure = lock(&failure).take();
        match (copied, failure) {
            (Err(_), Some(source)) => Err(UploadError::File { path: file.to_owned(), source }),
            (copied, _) => Ok(copied?),
        }
    }
}

/// Reads a file in parts, and hashes it meanwhile.
struct PartReader {
    file: File,
    /// Length of the file when it was opened.
    len: u64,
    hasher: FileHasher,
    num_read: u64,
}

impl PartReader {
    fn open(path: &Path) -> io::Result<Self> {
        let file = File::open(path)?;
        let len = file.metadata()?.len();
        let hasher = FileHasher::new(hash::algorithm_of(len));
        Ok(Self { file, len, hasher, num_read: 0 })
    }

    /// Returns the next part; `None` after the last one.
    fn next(&mut self) -> io::Result<Option<Bytes>> {
        let part_bytes = part_bytes(usize::try_from(self.len).map_err(io::Error::other)?);
        let mut part = Vec::with_capacity(part_bytes);
        Read::by_ref(&mut self.file).take(part_bytes as u64).read_to_end(&mut part)?;
        self.hasher.update(&part);
        self.num_read += part.len() as u64;
        Ok((!part.is_empty()).then(|| part.into()))
    }

    async fn next_in_background(mut self) -> io::Result<(Self, Option<Bytes>)> {
        in_background(move || self.next().map(|part| (self, part))).await
    }

    /// Returns the manifest's entry of the bytes that were read.
    fn finish(self) -> FileEntry {
        FileEntry { bytes: self.num_read, hash: self.hasher.finish() }
    }
}

/// Calls a function that accesses a file on another thread.
async fn in_background<T: Send + 'static>(
    act: impl FnOnce() -> io::Result<T> + Send + 'static,
) -> io::Result<T> {
    tokio::task::spawn_blocking(act).await.map_err(io::Error::other)?
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use object_store::memory::InMemory;

    use super::*;

    /// Stores files of these lengths, and checks objects and entries.
    async fn check(storage: &Storage, folder: &Path) {
        for len in [0, 5, PART_THRESHOLD_BYTES, PART_THRESHOLD_BYTES + 9, 40_000_003] {
            let bytes: Vec<u8> = (0..len).map(|at| (at % 251) as u8).collect();
            let file = folder.join("source");
            std::fs::write(&file, &bytes).unwrap();
            let entry = storage.put_file("a/b", &file).await.unwrap();
            assert_eq!(entry, hash::file_entry(&[&bytes]), "{len}");
            assert_eq!(entry, hash::entry_of_file(&file).unwrap(), "{len}");
            assert!(storage.get("a/b").await.unwrap() == bytes, "{len}");
        }
        let missing = folder.join("missing");
        let error = storage.put_file("a/c", &missing).await.unwrap_err();
        assert!(matches!(&error, UploadError::File { path, .. } if *path == missing), "{error}");
    }

    #[tokio::test]
    async fn files_are_stored_in_parts_with_their_hash() {
        let folder = tempfile::tempdir().unwrap();
        let store = Arc::new(InMemory::new());
        let in_parts = Storage::from_store(store.clone(), "memory://x").with_parts(store);
        check(&in_parts, folder.path()).await;
        check(&Storage::from_store(Arc::new(InMemory::new()), "memory://y"), folder.path()).await;
        let root = folder.path().join("root");
        check(&Storage::open(root.to_str().unwrap(), None).unwrap(), folder.path()).await;
    }

    #[tokio::test]
    async fn unreadable_files_are_not_errors_of_the_storage() {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path().join("root");
        let storage = Storage::open(root.to_str().unwrap(), None).unwrap();
        // A directory can be opened, but not read.
        let copied = storage.copy_file("a", folder.path(), root.join("a")).await;
        assert!(matches!(copied, Err(UploadError::File { .. })), "{copied:?}");
        assert!(!storage.exists("a").await.unwrap());
        let file = folder.path().join("file");
        std::fs::write(&file, "x").unwrap();
        let failed = storage.copy_file("a", &file, file.join("b")).await;
        assert!(matches!(failed, Err(UploadError::Storage(_))), "{failed:?}");
    }
}
