//! Objects read together with their hashes.

use std::fs::File;

use bytes::Bytes;
use stoker_api::contract::{FileHash, HashAlgorithm};

use super::Storage;
use super::local::run_blocking;
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
        let local = self.local_file(path)?.filter(|_| algorithm != HashAlgorithm::Sha256);
        if let Some(file) = local {
            let read = || {
                let file = file.clone();
                run_blocking(move || hash::read_file(&File::open(file)?, algorithm))
            };
            let (bytes, hash) = self.retry(path, read).await?;
            return Ok((bytes, hash));
        }
        let bytes = self.get(path).await?;
        let hashed = bytes.clone();
        let hash = run_blocking(move || Ok(hash::file_hash(&[hashed], algorithm))).await;
        let failed = |source| classify(Subject { url: &self.url, path }, 1, &source).0;
        Ok((bytes, hash.map_err(failed)?))
    }
}
