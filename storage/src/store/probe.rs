//! Test of a root before it is used.

use std::time::SystemTime;

use bytes::Bytes;

use super::Storage;
use crate::StorageError;

impl Storage {
    /// Tests the storage: writes, reads and deletes a small object, and lists a missing
    /// directory.
    ///
    /// # Errors
    ///
    /// The first operation that failed.
    pub async fn probe(&self) -> Result<(), StorageError> {
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let path = format!("probe-{}-{:x}", std::process::id(), now.as_nanos());
        let written = Bytes::from(path.clone());
        self.put(&path, written.clone()).await?;
        let read = self.get(&path).await?;
        self.delete(&path).await?;
        if read != written {
            let num = written.len();
            let reason = format!("wrote {num} bytes, read back {} other bytes", read.len());
            let url = self.url.to_string();
            return Err(StorageError::Unavailable { url, path, attempts: 1, reason });
        }
        match self.folders(&path).await {
            Err(StorageError::Refused { url, path, reason, .. }) if self.folder.is_none() => {
                let remedy = "permit to list objects (`s3:ListBucket` on an S3 bucket)";
                Err(StorageError::Refused { url, path, reason, remedy })
            }
            listed => listed.map(drop),
        }
    }
}
