//! Checkpoints as local directories.

use std::fs::File;
use std::io::{self, Write as _};
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;

use stoker_api::contract::{HashAlgorithm, Manifest, StorageConfig};
use stoker_api::names::MANIFEST;
use stoker_storage::hash;
use tokio::runtime::Builder;

use super::source::Location;
use super::{
    CheckpointContents, CheckpointError, CheckpointSource, CheckpointStore, parse, verify,
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
    if path.try_exists().is_ok_and(|exists| !exists) {
        return Err(CheckpointError::NotFound { path: path.display().to_string() });
    }
    let corrupt = |reason| CheckpointError::Corrupt { name: path.display().to_string(), reason };
    let read = |file: &str, algorithm: HashAlgorithm| {
        let file_path = path_in(path, file).map_err(&corrupt)?;
        File::open(file_path)
            .and_then(|opened| hash::read_file_with(&opened, algorithm, on_read))
            .map_err(|error| corrupt(format!("cannot read {file}: {error}")))
    };
    let (text, _) = read(MANIFEST, HashAlgorithm::Sha256)?;
    let manifest = parse(&text).map_err(corrupt)?;
    let mut contents = CheckpointContents::new();
    for (file, entry) in &manifest.files {
        let (bytes, hash) = read(file, entry.hash.algorithm())?;
        verify(file, entry, bytes.len(), &hash).map_err(corrupt)?;
        contents.insert(file.clone(), bytes);
    }
    Ok((manifest, contents))
}

/// Returns the path of a file from a manifest, refusing paths outside the directory.
fn path_in(folder: &Path, file: &str) -> Result<PathBuf, String> {
    match Path::new(file).components().all(|part| matches!(part, Component::Normal(_))) {
        true => Ok(folder.join(file)),
        false => Err(format!("{file} is not a valid file name in a checkpoint")),
    }
}

/// Writes a file, and creates its directory if missing.
fn write_file(path: &Path, bytes: &[u8], progress: &ProgressState) -> io::Result<()> {
    path.parent().map_or(Ok(()), std::fs::create_dir_all)?;
    let mut file = File::create(path)?;
    for part in bytes.chunks(WRITE_BYTES) {
        file.write_all(part)?;
        progress.record_transfer();
    }
    Ok(())
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
            let bytes = self.fetch_verified(name, file, entry).await?;
            let progress = progress.clone();
            let write = move || -> Result<(), String> {
                progress
                    .while_accessing_files(|| write_file(&path, &bytes, &progress))
                    .map_err(|error| format!("cannot write {}: {error}", path.display()))
            };
            let shut_down = |_| CheckpointError::ShutDown { name: name.to_owned() };
            let written = tokio::task::spawn_blocking(write).await.map_err(shut_down)?;
            let failed = |reason| CheckpointError::Local { name: name.to_owned(), reason };
            written.map_err(failed)?;
        }
        Ok(())
    }
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
        if let Location::Folder(_) = self.location() {
            return Ok(self.load(own, progress)?.0);
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
            let (manifest, contents) = self.load(own, progress)?;
            for (file, bytes) in contents.iter().filter(|(file, _)| wanted(file)) {
                write_file(&path_in(folder, file)?, bytes, progress).map_err(failed)?;
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
