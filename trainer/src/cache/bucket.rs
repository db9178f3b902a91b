//! Data sets in a bucket: `PREFIX/ID/VERSION/SPLIT/{SHA256.seg, manifest.json}`, with the manifest
//! written last.
//!
//! Segments are named by their hash. Two machines that build the same set concurrently write the
//! same objects; if their samples differ, their segments do not get mixed.

use std::fs::{self, File};
use std::io::Write as _;
use std::path::Path;

use bytes::Bytes;
use stoker_storage::{Storage, StorageError, hash};
use tokio::runtime::Handle;
use tokio::task::JoinSet;

use super::dataset_dir::{DatasetDir, io_error};
use super::manifest::{MANIFEST_FILE, Manifest, SegmentEntry};
use super::quota::CacheQuota;
use crate::{Error, Result};

/// Maximum number of concurrent segment downloads.
const TRANSFERS_MAX: usize = 4;

/// Location of data sets in a bucket.
#[derive(Clone, Debug)]
pub(super) struct DatasetBucket {
    rt: Handle,
    storage: Storage,
    prefix: String,
}

impl DatasetBucket {
    /// Uses objects below `prefix`. Another thread must drive `rt`, because the methods block.
    pub(super) fn new(rt: Handle, storage: Storage, prefix: &str) -> Self {
        Self { rt, storage, prefix: prefix.into() }
    }

    fn path(&self, dir: &DatasetDir, name: &str) -> String {
        let DatasetDir { id, version, split, .. } = dir;
        format!("{}/{id}/{version}/{}/{name}", self.prefix, split.name())
    }

    /// Downloads a set to the staging directory; returns `false` if the bucket does not have it.
    pub(super) fn download(&self, dir: &DatasetDir, quota: &CacheQuota) -> Result<bool> {
        let text = match self.rt.block_on(self.storage.get(&self.path(dir, MANIFEST_FILE))) {
            Ok(text) => text,
            Err(StorageError::NotFound { .. }) => return Ok(false),
            Err(error) => return Err(error.into()),
        };
        let manifest = Manifest::parse(dir, &text)?;
        quota.check_size(manifest.bytes())?;
        quota.evict_for(manifest.bytes())?;
        let downloaded = self.rt.block_on(self.download_segments(dir, &manifest));
        if let Err(error) = downloaded {
            dir.prepare_staging()?;
            return Err(error);
        }
        manifest.write(&dir.staging_dir())?;
        Ok(true)
    }

    async fn download_segments(&self, dir: &DatasetDir, manifest: &Manifest) -> Result<()> {
        let folder = dir.staging_dir();
        let (mut waiting, mut downloads) = (manifest.segments.iter().cloned(), JoinSet::new());
        let mut first_error = None;
        loop {
            while first_error.is_none()
                && downloads.len() < TRANSFERS_MAX
                && let Some(entry) = waiting.next()
            {
                let (storage, folder) = (self.storage.clone(), folder.clone());
                let path = self.path(dir, &object_name(&entry));
                downloads.spawn_on(
                    async move {
                        let bytes = storage.get(&path).await?;
                        let stored = move || store_segment(&folder, &entry, &bytes);
                        tokio::task::spawn_blocking(stored).await?
                    },
                    &self.rt,
                );
            }
            // Wait for all downloads even after a failure. A blocking task that stores a segment
            // cannot be cancelled, and would write into the directory in which the set is built
            // next.
            match downloads.join_next().await {
                Some(downloaded) => {
                    if let Err(error) = downloaded.map_err(Error::from).flatten() {
                        first_error.get_or_insert(error);
                    }
                }
                None => return first_error.map_or(Ok(()), Err),
            }
        }
    }

    /// Uploads a complete set, unless the bucket has it. With `replace`, always uploads it, to
    /// replace a damaged one.
    pub(super) fn upload(&self, dir: &DatasetDir, replace: bool) -> Result<()> {
        let _reader = dir.lock_for_reading()?;
        let folder = dir.folder();
        let path = folder.join(MANIFEST_FILE);
        let text = fs::read(&path).map_err(|error| io_error("read", &path, &error))?;
        let manifest = Manifest::parse(dir, &text)?;
        let target = self.path(dir, MANIFEST_FILE);
        self.rt.block_on(async {
            if !replace && self.storage.exists(&target).await? {
                return Ok(());
            }
            for entry in &manifest.segments {
                let path = folder.join(&entry.file);
                let bytes = fs::read(&path).map_err(|error| io_error("read", &path, &error))?;
                self.storage.put(&self.path(dir, &object_name(entry)), bytes.into()).await?;
            }
            Ok(self.storage.put(&target, text.into()).await?)
        })
    }
}

/// Damaged segment in the bucket: its name, and its actual SHA-256.
#[derive(Debug, thiserror::Error)]
#[error("segment {0} is damaged: its SHA-256 is {1}; building the set again to replace it")]
struct Corrupt(String, String);

/// Returns `true` if a download failed because segments in the bucket are damaged or missing.
pub(super) fn is_corruption(error: &Error) -> bool {
    let is_missing = |error: &StorageError| matches!(error, StorageError::NotFound { .. });
    error.is::<Corrupt>() || error.downcast_ref::<StorageError>().is_some_and(is_missing)
}

/// Returns the name of a segment in the bucket.
fn object_name(entry: &SegmentEntry) -> String {
    format!("{}.seg", entry.sha256)
}

/// Verifies a downloaded segment and syncs it to disk.
fn store_segment(folder: &Path, entry: &SegmentEntry, bytes: &Bytes) -> Result<()> {
    let actual = hash::sha256_hex(bytes);
    if actual != entry.sha256 {
        return Err(Corrupt(object_name(entry), actual).into());
    }
    let path = folder.join(&entry.file);
    let written = File::create_new(&path)
        .and_then(|mut file| file.write_all(bytes).and_then(|()| file.sync_all()));
    written.map_err(|error| io_error("write", &path, &error))
}
