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

use super::manifest::{Entry, MANIFEST, Manifest};
use super::place::{Place, failed};
use super::room::Room;
use crate::{Error, Result};

/// Maximum number of concurrent segment downloads.
const TRANSFERS_MAX: usize = 4;

/// Location of data sets in a bucket.
#[derive(Clone, Debug)]
pub(super) struct Shared {
    rt: Handle,
    storage: Storage,
    prefix: String,
}

impl Shared {
    /// Uses objects below `prefix`. Another thread must drive `rt`.
    pub(super) fn new(rt: Handle, storage: Storage, prefix: &str) -> Self {
        Self { rt, storage, prefix: prefix.into() }
    }

    fn path(&self, place: &Place, name: &str) -> String {
        let Place { id, version, split, .. } = place;
        format!("{}/{id}/{version}/{}/{name}", self.prefix, split.name())
    }

    /// Downloads a set to the staging folder; returns `false` if the bucket does not have it.
    pub(super) fn download(&self, place: &Place, room: &Room) -> Result<bool> {
        let text = match self.rt.block_on(self.storage.get(&self.path(place, MANIFEST))) {
            Ok(text) => text,
            Err(StorageError::NotFound { .. }) => return Ok(false),
            Err(error) => return Err(error.into()),
        };
        let manifest = Manifest::parse(place, &text)?;
        room.admit(manifest.bytes())?;
        room.make(manifest.bytes())?;
        let downloaded = self.rt.block_on(self.fetch(place, &manifest));
        if let Err(error) = downloaded {
            place.clear()?;
            return Err(error);
        }
        manifest.write(&place.half())?;
        Ok(true)
    }

    async fn fetch(&self, place: &Place, manifest: &Manifest) -> Result<()> {
        let folder = place.half();
        let (mut waiting, mut fetches) = (manifest.segments.iter().cloned(), JoinSet::new());
        let mut failed = None;
        loop {
            while failed.is_none()
                && fetches.len() < TRANSFERS_MAX
                && let Some(entry) = waiting.next()
            {
                let (storage, folder) = (self.storage.clone(), folder.clone());
                let path = self.path(place, &object(&entry));
                fetches.spawn_on(
                    async move {
                        let bytes = storage.get(&path).await?;
                        let stored = move || store(&folder, &entry, &bytes);
                        tokio::task::spawn_blocking(stored).await?
                    },
                    &self.rt,
                );
            }
            // Wait for all downloads even after a failure. A blocking task that stores a segment
            // cannot be cancelled, and would write into the folder in which the set is built next.
            match fetches.join_next().await {
                Some(fetched) => {
                    if let Err(error) = fetched.map_err(Error::from).flatten() {
                        failed.get_or_insert(error);
                    }
                }
                None => return failed.map_or(Ok(()), Err),
            }
        }
    }

    /// Uploads a complete set, unless the bucket has it; with `anew`, replaces a damaged one.
    pub(super) fn upload(&self, place: &Place, anew: bool) -> Result<()> {
        let _reader = place.lock_for_use()?;
        let folder = place.folder();
        let path = folder.join(MANIFEST);
        let text = fs::read(&path).map_err(|error| failed("read", &path, &error))?;
        let manifest = Manifest::parse(place, &text)?;
        let target = self.path(place, MANIFEST);
        self.rt.block_on(async {
            if !anew && self.storage.exists(&target).await? {
                return Ok(());
            }
            for entry in &manifest.segments {
                let path = folder.join(&entry.file);
                let bytes = fs::read(&path).map_err(|error| failed("read", &path, &error))?;
                self.storage.put(&self.path(place, &object(entry)), bytes.into()).await?;
            }
            Ok(self.storage.put(&target, text.into()).await?)
        })
    }
}

/// A segment in the bucket, with its actual SHA-256.
#[derive(Debug, thiserror::Error)]
#[error("{0} has SHA-256 {1} in the bucket; the set will be built here and replace it")]
struct Damaged(String, String);

/// Returns `true` if a download failed because segments in the bucket are damaged or missing.
pub(super) fn is_damage(error: &Error) -> bool {
    let is_missing = |error: &StorageError| matches!(error, StorageError::NotFound { .. });
    error.is::<Damaged>() || error.downcast_ref::<StorageError>().is_some_and(is_missing)
}

/// Returns the name of a segment in the bucket.
fn object(entry: &Entry) -> String {
    format!("{}.seg", entry.sha256)
}

/// Verifies a downloaded segment and syncs it to disk.
fn store(folder: &Path, entry: &Entry, bytes: &Bytes) -> Result<()> {
    let actual = hash::sha256_hex(bytes);
    if actual != entry.sha256 {
        return Err(Damaged(object(entry), actual).into());
    }
    let path = folder.join(&entry.file);
    let written = File::create_new(&path)
        .and_then(|mut file| file.write_all(bytes).and_then(|()| file.sync_all()));
    written.map_err(|error| failed("write", &path, &error))
}
