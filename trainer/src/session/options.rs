//! What to put into a checkpoint, what to fetch of one, and what is known of it.

use std::collections::BTreeMap;
use std::fmt;

use serde_json::Value;
use stoker_api::contract::{FileEntry, Manifest};

use crate::checkpoint::CheckpointSource;

/// Whether a file belongs to it, by its name in the checkpoint.
pub(super) type Select = Box<dyn Fn(&str) -> bool>;

/// What a checkpoint is to hold, beside files.
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
    /// After so many global batches. An attempt makes one checkpoint at a batch.
    pub fn at(batches: u64) -> Self {
        Self { batches, metadata: BTreeMap::new(), is_sharded: false, select: Box::new(|_| true) }
    }

    /// Adds a value to what [`Session::metadata`](super::Session::metadata) gives.
    #[must_use]
    pub fn metadata(mut self, key: &str, value: impl Into<Value>) -> Self {
        self.metadata.insert(key.into(), value.into());
        self
    }

    /// Every rank gives a share, not rank 0 alone: the checkpoint has all their files and metadata. What
    /// several ranks give must be the same.
    #[must_use]
    pub fn sharded(self) -> Self {
        Self { is_sharded: true, ..self }
    }

    /// Only files for whose name, such as `layers/0.bin`, this is true.
    #[must_use]
    pub fn select(self, select: impl Fn(&str) -> bool + 'static) -> Self {
        Self { select: Box::new(select), ..self }
    }
}

/// Which checkpoint to fetch, and what of it.
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
    /// All of it, once for all ranks of a machine, which name the same folder: collective over them.
    pub fn new(from: impl Into<CheckpointSource>) -> Self {
        Self { from: from.into(), is_shared: true, select: Box::new(|_| true) }
    }

    /// Each rank fetches for itself, whatever others do.
    #[must_use]
    pub fn unshared(self) -> Self {
        Self { is_shared: false, ..self }
    }

    /// Only files for whose name this is true.
    #[must_use]
    pub fn select(self, select: impl Fn(&str) -> bool + 'static) -> Self {
        Self { select: Box::new(select), ..self }
    }
}

/// What is known of a checkpoint.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Saved {
    /// Global batches trained.
    pub batches: u64,
    /// What the program added.
    pub metadata: BTreeMap<String, Value>,
    /// Its files, with their sizes in bytes.
    pub files: BTreeMap<String, u64>,
}

impl From<&Manifest> for Saved {
    fn from(manifest: &Manifest) -> Self {
        let size = |(file, entry): (&String, &FileEntry)| (file.clone(), entry.bytes);
        Self {
            batches: manifest.batches,
            metadata: manifest.metadata.clone(),
            files: manifest.files.iter().map(size).collect(),
        }
    }
}
