//! Test of a root before it is used.

use std::time::SystemTime;

use bytes::Bytes;

use super::Storage;
use crate::StorageError;

impl Storage {
    /// Tests the storage: writes, reads and deletes a small object.
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
        if read == written {
            return Ok(());
        }
        let reason = format!("wrote {} bytes, read back {} other bytes", written.len(), read.len());
        Err(StorageError::Unavailable { url: self.url.to_string(), path, attempts: 1, reason })
    }
}
