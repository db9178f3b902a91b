//! Data sets in a bucket: `PREFIX/ID/VERSION/SPLIT/{SHA256.seg, manifest.json}`, with the manifest
//! written last.
//!
//! Segments are named by their hash. Two machines that build the same set concurrently write the
//! same objects; if their samples differ, their segments do not get mixed.

use std::fs::{self, File};
use std::io::Write as _;
use std::path::Path;
use std::time::Duration;

use bytes::Bytes;
use stoker_storage::{Storage, StorageError, hash};
use tokio::runtime::Handle;
use tokio::task::JoinSet;

use super::dataset_dir::{DatasetDir, io_error};
use super::disk_full::DiskFull;
use super::manifest::{MANIFEST_FILE, Manifest, SegmentEntry, has_other_format};
use super::partial::PartialDownload;
use super::pending::PendingUpload;
use super::quota::CacheQuota;
use crate::error::Interrupted;
use crate::stop::StopSignal;
use crate::{Error, Result};

/// Maximum number of concurrent segment downloads.
pub(super) const TRANSFERS_MAX: usize = 4;

/// Time that an upload of a segment has after a stop request. An upload that is cut off may leave
/// parts in the bucket.
const UPLOAD_GRACE: Duration = Duration::from_secs(10);

/// Stores a downloaded segment in a directory. Tests delay it.
pub(super) trait StoreSegment:
    Fn(&Path, &SegmentEntry, &Bytes) -> Result<()> + Clone + Send + 'static
{
}

impl<F: Fn(&Path, &SegmentEntry, &Bytes) -> Result<()> + Clone + Send + 'static> StoreSegment
    for F
{
}

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
        let DatasetDir { id, version, .. } = dir;
        format!("{}/{id}/{version}/{}/{name}", self.prefix, dir.name())
    }

    /// Downloads a set to the staging directory, where verified segments of an earlier download are
    /// reused; returns `false` if the bucket does not have the set. The process needs the lock of
    /// the set's builder.
    ///
    /// During an outage, retries for 15 minutes, because a failure uses up an attempt.
    pub(super) fn download(
        &self,
        dir: &DatasetDir,
        quota: &CacheQuota,
        stop: &StopSignal,
    ) -> Result<bool> {
        self.download_with(dir, quota, stop, store_segment)
    }

    /// Same as [`download`](Self::download), with a function that stores each segment.
    pub(super) fn download_with(
        &self,
        dir: &DatasetDir,
        quota: &CacheQuota,
        stop: &StopSignal,
        store: impl StoreSegment,
    ) -> Result<bool> {
        let storage = self.storage.clone().with_long_retries();
        let path = self.path(dir, MANIFEST_FILE);
        let text = match self.rt.block_on(unless_stopped(dir, stop, storage.get(&path)))? {
            Ok(text) => text,
            Err(StorageError::NotFound { .. }) => return Ok(false),
            Err(error) => return Err(error.into()),
        };
        let manifest = Manifest::parse(dir, &text).map_err(|why| -> Error {
            // Another version can read a manifest of another format, so it is not damaged.
            if has_other_format(&text) { OtherFormat(why).into() } else { Corrupt(why).into() }
        })?;
        quota.check_size(manifest.bytes())?;
        quota.evict_for(manifest.bytes())?;
        let downloaded = PartialDownload::open(dir, &manifest, &text).and_then(|partial| {
            let missing = partial.missing(stop)?;
            self.rt.block_on(self.download_segments(storage, dir, missing, stop, store))?;
            partial.finish()
        });
        downloaded.map(|()| true).or_else(|error| {
            // Free the disk for other programs.
            if error.is::<DiskFull>() {
                dir.prepare_staging()?;
            }
            let bytes = manifest.bytes();
            Err(DiskFull::with_size(error, || format!("{dir} needs {bytes} bytes")))
        })
    }

    async fn download_segments(
        &self,
        storage: Storage,
        dir: &DatasetDir,
        segments: Vec<SegmentEntry>,
        stop: &StopSignal,
        store: impl StoreSegment,
    ) -> Result<()> {
        let folder = dir.staging_dir();
        let (mut waiting, mut downloads) = (segments.into_iter(), JoinSet::new());
        let mut first_error = None;
        loop {
            while first_error.is_none()
                && downloads.len() < TRANSFERS_MAX
                && let Some(entry) = waiting.next()
            {
                let (storage, folder, store) = (storage.clone(), folder.clone(), store.clone());
                let (dir, stop) = (dir.clone(), stop.clone());
                let path = self.path(&dir, &object_name(&entry));
                downloads.spawn_on(
                    async move {
                        let bytes = unless_stopped(&dir, &stop, storage.get(&path)).await??;
                        let stored = move || store(&folder, &entry, &bytes);
                        tokio::task::spawn_blocking(stored).await?
                    },
                    &self.rt,
                );
            }
            // Wait for all downloads even after a failure. A blocking task that stores a segment
            // cannot be cancelled, and would write into the directory after this process has
            // released the lock of the set's builder, or has begun to build the set.
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

    /// Marks the staged set, so that its upload is resumed if this process is killed. Returns the
    /// lock of uploads; `None` if another process holds it, which uploads an earlier copy. With
    /// `replace`, the upload replaces a damaged copy in the bucket.
    pub(super) fn prepare_upload(&self, dir: &DatasetDir, replace: bool) -> Result<Option<File>> {
        PendingUpload { bucket: self.location(), replace }.write(&dir.staging_dir())?;
        DatasetDir::try_lock_exclusive(&dir.lock_file("upload"))
    }

    /// Uploads a marked set. Logs a failure or an interruption by a stop request; the mark stays
    /// then.
    pub(super) fn upload(&self, dir: &DatasetDir, lock: Option<File>, stop: &StopSignal) {
        if let Some(lock) = lock {
            self.rt.block_on(self.upload_pending(dir, lock, stop));
        }
    }

    /// Uploads a set in the background if it is marked and no other process uploads it.
    pub(super) fn resume_upload(&self, dir: &DatasetDir, stop: &StopSignal) {
        if !PendingUpload::path(&dir.folder()).exists() {
            return;
        }
        let Ok(Some(lock)) = DatasetDir::try_lock_exclusive(&dir.lock_file("upload")) else {
            return;
        };
        let (this, dir, stop) = (self.clone(), dir.clone(), stop.clone());
        self.rt.spawn(async move { this.upload_pending(&dir, lock, &stop).await });
    }

    async fn upload_pending(&self, dir: &DatasetDir, lock: File, stop: &StopSignal) {
        let folder = dir.folder();
        let pending = PendingUpload::read(&folder);
        let Some(pending) = pending.filter(|pending| pending.bucket == self.location()) else {
            return;
        };
        match self.upload_files(dir, pending.replace, stop).await {
            // Another process may have built the set again meanwhile, and marked it.
            Ok(text) if fs::read(folder.join(MANIFEST_FILE)).ok().as_ref() != Some(&text) => {}
            // Ignore the error: the next open finds the set in the bucket.
            Ok(_) => drop(fs::remove_file(PendingUpload::path(&folder))),
            Err(error) if error.is::<Interrupted>() => {
                eprintln!(
                    "stoker: stopped uploading {dir} to the bucket; the next open tries again"
                );
            }
            Err(error) => eprintln!(
                "stoker: cannot upload {dir} to the bucket, so other machines must build it: \
                 {error}; the next open tries again"
            ),
        }
        drop(lock);
    }

    /// Returns the location of data sets, which is unique among buckets.
    pub(super) fn location(&self) -> String {
        format!("{}/{}", self.storage.url(), self.prefix)
    }

    /// Uploads a complete set, unless the bucket has it. With `replace`, always uploads all of it;
    /// otherwise, skips segments that an interrupted upload has stored. Returns the manifest.
    async fn upload_files(
        &self,
        dir: &DatasetDir,
        replace: bool,
        stop: &StopSignal,
    ) -> Result<Vec<u8>> {
        let _reader = dir.lock_for_reading()?;
        let folder = dir.folder();
        let path = folder.join(MANIFEST_FILE);
        let text = fs::read(&path).map_err(|error| io_error("read", &path, &error))?;
        let manifest = Manifest::parse(dir, &text)?;
        let target = self.path(dir, MANIFEST_FILE);
        if !replace && unless_stopped(dir, stop, self.storage.exists(&target)).await?? {
            return Ok(text);
        }
        for entry in &manifest.segments {
            dir.check_interrupt(stop)?;
            let upload = self.upload_segment(dir, entry, replace);
            within_grace(dir, stop, upload).await??;
        }
        within_grace(dir, stop, self.storage.put(&target, text.clone().into())).await??;
        Ok(text)
    }

    async fn upload_segment(
        &self,
        dir: &DatasetDir,
        entry: &SegmentEntry,
        replace: bool,
    ) -> Result<()> {
        let target = self.path(dir, &object_name(entry));
        // The name contains the hash, and objects are stored atomically.
        if !replace && self.storage.size(&target).await? == Some(entry.bytes) {
            return Ok(());
        }
        let path = dir.folder().join(&entry.file);
        let bytes = tokio::fs::read(&path).await;
        let bytes = bytes.map_err(|error| io_error("read", &path, &error))?;
        Ok(self.storage.put(&target, bytes.into()).await?)
    }
}

/// Awaits `act`; fails at a stop request.
async fn unless_stopped<T>(
    dir: &DatasetDir,
    stop: &StopSignal,
    act: impl Future<Output = T>,
) -> Result<T> {
    tokio::select! {
        biased;
        () = stop.wait() => Err(dir.interrupted()),
        done = act => Ok(done),
    }
}

/// Awaits an upload; fails some time after a stop request.
async fn within_grace<T>(
    dir: &DatasetDir,
    stop: &StopSignal,
    upload: impl Future<Output = T>,
) -> Result<T> {
    let grace_is_over = async {
        stop.wait().await;
        tokio::time::sleep(UPLOAD_GRACE).await;
    };
    tokio::select! {
        done = upload => Ok(done),
        () = grace_is_over => Err(dir.interrupted()),
    }
}

/// Damaged object in the bucket.
#[derive(Debug, thiserror::Error)]
#[error("{0}; building the set again to replace it")]
struct Corrupt(String);

/// Set in the bucket that another version of Stoker has written.
#[derive(Debug, thiserror::Error)]
#[error("{0}; building the set on this machine only")]
struct OtherFormat(String);

/// Returns `true` if a download failed because this process cannot use the set in the bucket or has
/// no right to read it, so a retry would not help.
pub(super) fn is_unusable(error: &Error) -> bool {
    let is_refused = |error: &StorageError| matches!(error, StorageError::Refused { .. });
    is_corruption(error)
        || error.is::<OtherFormat>()
        || error.downcast_ref::<StorageError>().is_some_and(is_refused)
}

/// Returns `true` if a download failed because objects in the bucket are damaged or missing.
pub(super) fn is_corruption(error: &Error) -> bool {
    let is_missing = |error: &StorageError| matches!(error, StorageError::NotFound { .. });
    error.is::<Corrupt>() || error.downcast_ref::<StorageError>().is_some_and(is_missing)
}

/// Returns the name of a segment in the bucket.
fn object_name(entry: &SegmentEntry) -> String {
    format!("{}.seg", entry.sha256)
}

/// Verifies a downloaded segment and syncs it to disk.
pub(super) fn store_segment(folder: &Path, entry: &SegmentEntry, bytes: &Bytes) -> Result<()> {
    let actual = hash::sha256_hex(bytes);
    if actual != entry.sha256 {
        let name = object_name(entry);
        return Err(Corrupt(format!("segment {name} is damaged: its SHA-256 is {actual}")).into());
    }
    let path = folder.join(&entry.file);
    let written = File::create_new(&path)
        .and_then(|mut file| file.write_all(bytes).and_then(|()| file.sync_all()));
    written.map_err(|error| io_error("write", &path, &error))
}
