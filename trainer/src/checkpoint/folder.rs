//! Checkpoints as local directories.

use std::fs::File;
use std::future::ready;
use std::io::{self, Read, Write as _};
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;

use bytes::Bytes;
use futures::{Stream, StreamExt as _, stream};
use stoker_api::contract::{FileEntry, HashAlgorithm, Manifest, StorageConfig};
use stoker_api::names::MANIFEST;
use stoker_storage::hash::{self, FileHasher};
use stoker_storage::{StorageError, layout};
use tokio::runtime::Builder;

use super::source::Location;
use super::store::unreadable;
use super::{
    CheckpointContents, CheckpointError, CheckpointSource, CheckpointStore, different_size, parse,
    verify,
};
use crate::Result as AnyResult;
use crate::collective::ProgressState;

/// Bytes of a file whose write counts as progress of the rank.
const WRITE_BYTES: usize = 16 << 20;

/// Reads a checkpoint from a local directory, for example a downloaded one.
///
/// # Errors
///
/// Fails if the directory does not exist, or does not contain a complete and intact checkpoint.
pub fn load_folder(path: &Path) -> Result<(Manifest, CheckpointContents), CheckpointError> {
    load_folder_with(path, &|| ())
}

/// Same as [`load_folder`]. Calls `on_read` after each part of a file.
pub(super) fn load_folder_with(
    path: &Path,
    on_read: &(dyn Fn() + Sync),
) -> Result<(Manifest, CheckpointContents), CheckpointError> {
    let manifest = manifest_of_folder(path)?;
    let corrupt = |reason| CheckpointError::Corrupt { name: path.display().to_string(), reason };
    let mut contents = CheckpointContents::new();
    for (file, entry) in &manifest.files {
        let file_path = path_in(path, file).map_err(corrupt)?;
        let (bytes, hash) = File::open(file_path)
            .and_then(|opened| hash::read_file_with(&opened, entry.hash.algorithm(), on_read))
            .map_err(|error| unreadable_file(path, file, &error))?;
        verify(file, entry, bytes.len(), &hash).map_err(corrupt)?;
        contents.insert(file.clone(), bytes);
    }
    Ok((manifest, contents))
}

/// Returns the error for a file of a checkpoint directory that cannot be read. The file may be
/// intact, for example while the server of a network file system is unavailable.
fn unreadable_file(folder: &Path, file: &str, error: &io::Error) -> CheckpointError {
    let (name, reason) = (folder.display().to_string(), format!("cannot read {file}: {error}"));
    match error.kind() {
        io::ErrorKind::NotFound => CheckpointError::Corrupt { name, reason },
        _ => CheckpointError::Local { name, reason },
    }
}

/// Reads the manifest of a checkpoint in a local directory.
fn manifest_of_folder(path: &Path) -> Result<Manifest, CheckpointError> {
    if path.try_exists().is_ok_and(|exists| !exists) {
        return Err(CheckpointError::NotFound { path: path.display().to_string() });
    }
    let corrupt = |reason| CheckpointError::Corrupt { name: path.display().to_string(), reason };
    let text = std::fs::read(path.join(MANIFEST))
        .map_err(|error| unreadable_file(path, MANIFEST, &error))?;
    parse(&text).map_err(corrupt)
}

/// Returns the path of a file from a manifest, refusing paths outside the directory.
fn path_in(folder: &Path, file: &str) -> Result<PathBuf, String> {
    match Path::new(file).components().all(|part| matches!(part, Component::Normal(_))) {
        true => Ok(folder.join(file)),
        false => Err(format!("{file} is not a valid file name in a checkpoint")),
    }
}

/// A file of a checkpoint that is written in parts, and has its name only after its hash was
/// verified. Dropping it earlier deletes it.
struct NewFile {
    path: PathBuf,
    partial: PathBuf,
    file: File,
    hasher: FileHasher,
    num_written: usize,
}

impl NewFile {
    /// Creates the file, and its directory if missing.
    fn create(path: &Path, algorithm: HashAlgorithm) -> io::Result<Self> {
        path.parent().map_or(Ok(()), std::fs::create_dir_all)?;
        let mut partial = path.as_os_str().to_owned();
        partial.push("#partial");
        let (path, partial) = (path.to_owned(), PathBuf::from(partial));
        let (file, hasher) = (File::create(&partial)?, FileHasher::new(algorithm));
        Ok(Self { path, partial, file, hasher, num_written: 0 })
    }

    fn write(&mut self, bytes: &[u8], progress: &ProgressState) -> io::Result<()> {
        for part in bytes.chunks(WRITE_BYTES) {
            self.hasher.update(part);
            self.file.write_all(part)?;
            self.num_written += part.len();
            progress.record_transfer();
        }
        Ok(())
    }

    /// Gives the file its name if it has the size and hash of `entry`; otherwise returns the
    /// difference.
    fn finish(mut self, name: &str, entry: &FileEntry) -> io::Result<Result<(), String>> {
        let hasher = FileHasher::new(entry.hash.algorithm());
        let hash = std::mem::replace(&mut self.hasher, hasher).finish();
        match verify(name, entry, self.num_written, &hash) {
            Ok(()) => std::fs::rename(&self.partial, &self.path).map(Ok),
            Err(reason) => Ok(Err(reason)),
        }
    }
}

impl Drop for NewFile {
    fn drop(&mut self) {
        // Ignore the error: the file may have its name.
        let _ = std::fs::remove_file(&self.partial);
    }
}

/// Copies a file of a checkpoint in a local directory, and verifies it.
fn copy_file(
    (from, to): (&Path, &Path),
    name: &str,
    entry: &FileEntry,
    progress: &ProgressState,
) -> AnyResult<()> {
    let (from, to) = (path_in(from, name)?, path_in(to, name)?);
    let unreadable = |error| format!("cannot read {}: {error}", from.display());
    let unwritable = |error| format!("cannot write {}: {error}", to.display());
    let mut source = File::open(&from).map_err(unreadable)?;
    let mut file = NewFile::create(&to, entry.hash.algorithm()).map_err(unwritable)?;
    let mut block = Vec::new();
    loop {
        block.clear();
        let next = Read::by_ref(&mut source).take(WRITE_BYTES as u64);
        if { next }.read_to_end(&mut block).map_err(unreadable)? == 0 {
            let is_same = file.finish(name, entry).map_err(unwritable)?;
            return Ok(is_same.map_err(|reason| format!("{}: {reason}", from.display()))?);
        }
        file.write(&block, progress).map_err(unwritable)?;
    }
}

impl CheckpointStore {
    /// Writes the `wanted` files of a checkpoint into a directory, one after the other, and
    /// verifies each. Does not write the manifest. The watchdog judges the writes, but not the
    /// reads.
    pub(crate) async fn write_folder(
        &self,
        name: &str,
        manifest: &Manifest,
        folder: &Path,
        wanted: impl Fn(&str) -> bool,
        progress: &Arc<ProgressState>,
    ) -> Result<(), CheckpointError> {
        let corrupt = |reason| CheckpointError::Corrupt { name: name.to_owned(), reason };
        for (file, entry) in manifest.files.iter().filter(|(file, _)| wanted(file)) {
            let path = path_in(folder, file).map_err(&corrupt)?;
            self.write_file(name, (file, entry), path, progress).await?;
        }
        Ok(())
    }

    /// Downloads a file and verifies it. Only some parts of a large one are in memory.
    async fn write_file(
        &self,
        name: &str,
        (file, entry): (&str, &FileEntry),
        path: PathBuf,
        progress: &Arc<ProgressState>,
    ) -> Result<(), CheckpointError> {
        let unwritable = |error| {
            let reason = format!("cannot write {}: {error}", path.display());
            CheckpointError::Local { name: name.to_owned(), reason }
        };
        let corrupt = |reason| CheckpointError::Corrupt { name: name.to_owned(), reason };
        let (algorithm, to) = (entry.hash.algorithm(), path.clone());
        let create = access_files(progress, move |_| NewFile::create(&to, algorithm));
        let mut new = create.await.map_err(unwritable)?;
        let object = layout::checkpoint_file(&self.trial_path, name, file);
        let mut parts = std::pin::pin!(self.parts_of(&object, name, (file, entry)).await?);
        while let Some(part) = parts.next().await {
            let part = part.map_err(|source| unreadable(name, file, source))?;
            let write = move |progress: &ProgressState| new.write(&part, progress).map(|()| new);
            new = access_files(progress, write).await.map_err(unwritable)?;
        }
        let (name, entry) = (file.to_owned(), entry.clone());
        let finish = access_files(progress, move |_| new.finish(&name, &entry));
        finish.await.map_err(unwritable)?.map_err(corrupt)
    }

    /// Returns the parts of a file whose object has this path, in order.
    async fn parts_of(
        &self,
        path: &str,
        name: &str,
        (file, entry): (&str, &FileEntry),
    ) -> Result<impl Stream<Item = Result<Bytes, StorageError>>, CheckpointError> {
        let failed = |source| unreadable(name, file, source);
        if entry.bytes <= hash::LARGE_BYTES {
            let bytes = self.storage.get(path).await.map_err(failed)?;
            return Ok(stream::once(ready(Ok(bytes))).left_stream());
        }
        let size = self.storage.size(path).await.map_err(failed)?;
        if size != Some(entry.bytes) {
            let reason = match size {
                None => format!("{file} is missing"),
                Some(size) => different_size(file, entry, size),
            };
            return Err(CheckpointError::Corrupt { name: name.to_owned(), reason });
        }
        Ok(self.storage.get_in_order(path, entry.bytes).right_stream())
    }
}

/// Calls `access` on another thread, under the watchdog.
async fn access_files<T: Send + 'static>(
    progress: &Arc<ProgressState>,
    access: impl FnOnce(&ProgressState) -> io::Result<T> + Send + 'static,
) -> io::Result<T> {
    let progress = progress.clone();
    let access = move || progress.while_accessing_files(|| access(&progress));
    tokio::task::spawn_blocking(access).await.map_err(io::Error::other)?
}

impl CheckpointSource {
    /// Calls `read`, which reads this checkpoint. The watchdog does not report this rank meanwhile,
    /// unless the checkpoint is a directory: a network file system may never respond.
    pub(crate) fn while_reading<T>(&self, progress: &ProgressState, read: impl FnOnce() -> T) -> T {
        match self.location() {
            Location::Folder(_) => read(),
            Location::Trial(_) | Location::Stored { .. } => progress.while_waiting(read),
        }
    }

    /// Reads the manifest. `own` is the storage of the calling session.
    pub(crate) fn read_manifest(
        &self,
        own: &StorageConfig,
        progress: &ProgressState,
    ) -> AnyResult<Manifest> {
        if let Location::Folder(folder) = self.location() {
            return Ok(progress.while_accessing_files(|| manifest_of_folder(folder))?);
        }
        Builder::new_current_thread().enable_all().build()?.block_on(async {
            let store = self.open_store(own).await?;
            Ok(self.select(&store).await?.1)
        })
    }

    /// Writes the manifest and the `wanted` files into a directory, after verification.
    pub(crate) fn write_to(
        &self,
        own: &StorageConfig,
        folder: &Path,
        wanted: &dyn Fn(&str) -> bool,
        progress: &Arc<ProgressState>,
    ) -> AnyResult<Manifest> {
        let failed = |error| format!("cannot write directory {}: {error}", folder.display());
        progress.while_accessing_files(|| std::fs::create_dir_all(folder)).map_err(failed)?;
        if let Location::Folder(from) = self.location() {
            let manifest = manifest_of_folder(from)?;
            for (file, entry) in manifest.files.iter().filter(|(file, _)| wanted(file)) {
                progress
                    .while_accessing_files(|| copy_file((from, folder), file, entry, progress))?;
            }
            std::fs::copy(from.join(MANIFEST), folder.join(MANIFEST)).map_err(failed)?;
            return Ok(manifest);
        }
        Builder::new_current_thread().enable_all().build()?.block_on(async {
            let store = self.open_store(own).await?;
            let (name, manifest, _) = self.select(&store).await?;
            store.write_folder(&name, &manifest, folder, wanted, progress).await?;
            let text = store.fetch(&name, MANIFEST).await?;
            let write = || std::fs::write(folder.join(MANIFEST), text);
            progress.while_accessing_files(write).map_err(failed)?;
            Ok(manifest)
        })
    }
}
