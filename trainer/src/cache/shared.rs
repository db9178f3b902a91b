//! Data sets in a bucket: `PREFIX/ID/VERSION/SPLIT/{SHA256.seg, manifest.json}`, the manifest last.
//!
//! A segment's name is its hash: two machines that build the same set at once write the same objects,
//! and if their samples differ, none of them is mixed up.

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

/// Segments on the way at once.
const TRANSFERS_MAX: usize = 4;

/// Where a bucket has data sets.
#[derive(Clone, Debug)]
pub(super) struct Shared {
    rt: Handle,
    storage: Storage,
    prefix: String,
}

impl Shared {
    /// Below `prefix`. `rt` must be driven by a thread of its own.
    pub(super) fn new(rt: Handle, storage: Storage, prefix: &str) -> Self {
        Self { rt, storage, prefix: prefix.into() }
    }

    fn path(&self, place: &Place, name: &str) -> String {
        let Place { id, version, split, .. } = place;
        format!("{}/{id}/{version}/{}/{name}", self.prefix, split.name())
    }

    /// Brings a set beside where it will be; says whether there is one.
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
            // After a failure too: a thread that stores a segment cannot be stopped, and would write into the folder
            // that the set is built in next.
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

    /// Stores a set that is whole on this machine, unless it is there; `anew`, in place of a damaged one.
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

/// A segment, and the SHA-256 that it has in place of its own.
#[derive(Debug, thiserror::Error)]
#[error("{0} has SHA-256 {1} in the bucket; what is built here is stored in its place")]
struct Damaged(String, String);

/// Whether a set could not be downloaded because segments in the bucket are damaged or gone.
pub(super) fn is_damage(error: &Error) -> bool {
    let is_gone = |it: &StorageError| matches!(it, StorageError::NotFound { .. });
    error.is::<Damaged>() || error.downcast_ref::<StorageError>().is_some_and(is_gone)
}

/// The name of a segment in the bucket.
fn object(entry: &Entry) -> String {
    format!("{}.seg", entry.sha256)
}

/// Checks what was downloaded and brings it to the disk.
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
