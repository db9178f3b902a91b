//! Lists of objects and directories.

use futures::TryStreamExt as _;
use object_store::{ObjectMeta, ObjectStore as _};

use super::Storage;
use crate::StorageError;

/// State of an object in a list. It differs after each write with other contents.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ObjectState {
    /// Size in bytes.
    pub size: u64,
    /// Time of the last write, in microseconds since 1970.
    modified: i64,
    /// Tag that the store gives to the contents, if any. Some stores round times to seconds.
    tag: Option<String>,
}

impl Storage {
    /// Lists all objects in the directory `prefix` and its subdirectories, as sorted paths relative
    /// to the root. A missing directory is empty. The empty prefix is the root.
    ///
    /// # Errors
    ///
    /// The storage failed.
    pub async fn list(&self, prefix: &str) -> Result<Vec<String>, StorageError> {
        Ok(self.list_sized(prefix).await?.into_iter().map(|(path, _)| path).collect())
    }

    /// Same as [`list`](Self::list), with the size of each object in bytes. Some stores also list
    /// directories, as objects of 0 bytes.
    ///
    /// # Errors
    ///
    /// The storage failed.
    pub async fn list_sized(&self, prefix: &str) -> Result<Vec<(String, u64)>, StorageError> {
        self.list_with(prefix, |object| object.size).await
    }

    /// Same as [`list`](Self::list), with the time at which each object was written, in seconds
    /// since 1970.
    ///
    /// # Errors
    ///
    /// The storage failed.
    pub async fn list_timed(&self, prefix: &str) -> Result<Vec<(String, i64)>, StorageError> {
        self.list_with(prefix, |object| object.last_modified.timestamp()).await
    }

    /// Same as [`list`](Self::list), with the state of each object.
    ///
    /// # Errors
    ///
    /// The storage failed.
    pub async fn list_states(
        &self,
        prefix: &str,
    ) -> Result<Vec<(String, ObjectState)>, StorageError> {
        let state = |object: &ObjectMeta| ObjectState {
            size: object.size,
            modified: object.last_modified.timestamp_micros(),
            tag: object.e_tag.clone(),
        };
        self.list_with(prefix, state).await
    }

    async fn list_with<T: Ord>(
        &self,
        prefix: &str,
        of: impl Fn(&ObjectMeta) -> T,
    ) -> Result<Vec<(String, T)>, StorageError> {
        let location = self.location(prefix)?;
        let listing = self.retry(prefix, || async {
            self.store.list(Some(&location)).try_collect::<Vec<_>>().await
        });
        let relative = |object: &ObjectMeta| -> Option<(String, T)> {
            let parts = object.location.prefix_match(&self.prefix)?;
            let names: Vec<String> = parts.map(|part| part.as_ref().to_owned()).collect();
            Some((names.join("/"), of(object)))
        };
        let mut objects: Vec<_> = listing.await?.iter().filter_map(relative).collect();
        objects.sort();
        Ok(objects)
    }

    /// Lists the directories directly below `prefix`, sorted by name. A missing directory is empty.
    /// Local roots may contain empty directories.
    ///
    /// # Errors
    ///
    /// The storage failed.
    pub async fn folders(&self, prefix: &str) -> Result<Vec<String>, StorageError> {
        let location = self.location(prefix)?;
        let list = || self.store.list_with_delimiter(Some(&location));
        let folders = self.retry(prefix, list).await?.common_prefixes;
        let mut names: Vec<String> =
            folders.iter().filter_map(|path| Some(path.filename()?.to_owned())).collect();
        names.sort();
        Ok(names)
    }
}
