//! Options for uploading and downloading checkpoints, and checkpoint metadata.

use std::collections::BTreeMap;
use std::fmt;

use serde_json::Value;
use stoker_api::contract::{FileEntry, Manifest};

use crate::checkpoint::CheckpointSource;

/// Selects files by their names in the checkpoint.
pub(super) type Select = Box<dyn Fn(&str) -> bool>;

/// Options of a checkpoint upload.
pub struct Upload {
    pub(super) batches: u64,
    pub(super) metadata: BTreeMap<String, Value>,
    pub(super) is_sharded: bool,
    pub(super) select: Select,
}

impl fmt::Debug for Upload {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Upload")
            .field("batches", &self.batches)
            .field("metadata", &self.metadata)
            .field("is_sharded", &self.is_sharded)
            .finish_non_exhaustive()
    }
}

impl Upload {
    /// A checkpoint after `batches` global batches. Each attempt makes at most one checkpoint per
    /// batch.
    pub fn at(batches: u64) -> Self {
        Self { batches, metadata: BTreeMap::new(), is_sharded: false, select: Box::new(|_| true) }
    }

    /// Adds a metadata value, which [`Session::metadata`](super::Session::metadata) returns.
    #[must_use]
    pub fn metadata(mut self, key: &str, value: impl Into<Value>) -> Self {
        self.metadata.insert(key.into(), value.into());
        self
    }

    /// Makes every rank contribute files and metadata, not only rank 0. Files and values that
    /// several ranks contribute must be equal.
    #[must_use]
    pub fn sharded(self) -> Self {
        Self { is_sharded: true, ..self }
    }

    /// Uploads only files for which `select` returns true, given a name such as `layers/0.bin`.
    #[must_use]
    pub fn select(self, select: impl Fn(&str) -> bool + 'static) -> Self {
        Self { select: Box::new(select), ..self }
    }
}

/// Which checkpoint to download, and which of its files.
pub struct Download {
    pub(super) from: CheckpointSource,
    pub(super) is_shared: bool,
    pub(super) select: Select,
}

impl fmt::Debug for Download {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Download")
            .field("from", &self.from)
            .field("is_shared", &self.is_shared)
            .finish_non_exhaustive()
    }
}

impl<T: Into<CheckpointSource>> From<T> for Download {
    fn from(from: T) -> Self {
        Self::new(from)
    }
}

impl Download {
    /// Downloads all files, once for all ranks of a machine. These ranks must name the same
    /// directory; the call is collective over them.
    pub fn new(from: impl Into<CheckpointSource>) -> Self {
        Self { from: from.into(), is_shared: true, select: Box::new(|_| true) }
    }

    /// Makes each rank download independently.
    #[must_use]
    pub fn unshared(self) -> Self {
        Self { is_shared: false, ..self }
    }

    /// Downloads only files for which `select` returns true, given the file's name.
    #[must_use]
    pub fn select(self, select: impl Fn(&str) -> bool + 'static) -> Self {
        Self { select: Box::new(select), ..self }
    }
}

/// Metadata of a checkpoint.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct CheckpointMetadata {
    /// Global batches trained at the checkpoint.
    pub batches: u64,
    /// Values that the program added.
    pub metadata: BTreeMap<String, Value>,
    /// The checkpoint's files, with their sizes in bytes.
    pub files: BTreeMap<String, u64>,
}

impl From<&Manifest> for CheckpointMetadata {
    fn from(manifest: &Manifest) -> Self {
        let size = |(file, entry): (&String, &FileEntry)| (file.clone(), entry.bytes);
        Self {
            batches: manifest.batches,
            metadata: manifest.metadata.clone(),
            files: manifest.files.iter().map(size).collect(),
        }
    }
}
