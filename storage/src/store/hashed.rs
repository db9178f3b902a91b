//! Objects read together with their hashes.

use std::fs::File;

use bytes::Bytes;
use stoker_api::contract::{FileHash, HashAlgorithm};

use super::Storage;
use crate::error::{Subject, classify};
use crate::{StorageError, hash};

impl Storage {
    /// Reads an object and returns it with its hash. Several threads hash a large object; on local
    /// roots, they also read it.
    ///
    /// # Errors
    ///
    /// Same as [`get`](Self::get).
    pub async fn get_hashed(
        &self,
        path: &str,
        algorithm: HashAlgorithm,
    ) -> Result<(Bytes, FileHash), StorageError> {
        let local = self.folder.as_ref().filter(|_| algorithm != HashAlgorithm::Sha256);
        if let Some(root) = local {
            self.location(path)?;
            let file = root.join(path);
            let read = || {
                let file = file.clone();
                run_blocking(move || hash::read_file(&File::open(file)?, algorithm))
            };
            let (bytes, hash) = self.retry(path, read).await?;
            return Ok((bytes.into(), hash));
        }
        let bytes = self.get(path).await?;
        let hashed = bytes.clone();
        let hash = run_blocking(move || Ok(hash::file_hash(&[hashed], algorithm))).await;
        let failed = |source| classify(Subject { url: &self.url, path }, 1, &source).0;
        Ok((bytes, hash.map_err(failed)?))
    }
}

/// Runs a function that reads a file or hashes on another thread.
async fn run_blocking<T: Send + 'static>(
    read: impl FnOnce() -> std::io::Result<T> + Send + 'static,
) -> object_store::Result<T> {
    let failed = |source| object_store::Error::Generic { store: "LocalFileSystem", source };
    match tokio::task::spawn_blocking(read).await {
        Ok(Ok(read)) => Ok(read),
        Ok(Err(source)) if source.kind() == std::io::ErrorKind::NotFound => {
            Err(object_store::Error::NotFound { path: String::new(), source: source.into() })
        }
        Ok(Err(source)) => Err(failed(source.into())),
        Err(source) => Err(object_store::Error::JoinError { source }),
    }
}
