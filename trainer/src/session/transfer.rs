//! Transfer of checkpoint files between this machine and the storage.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use bytes::Bytes;
use stoker_api::contract::{CheckpointRef, FileEntry, Manifest};
use stoker_api::names::MANIFEST;
use stoker_storage::{UploadError, hash, layout};
use tokio::runtime::Handle;

use super::options::Select;
use crate::Result;
use crate::checkpoint::{CheckpointError, CheckpointStore, NewContents, run_blocking};
use crate::collective::ProgressState;

/// Total bytes of files in memory at which an upload starts. The last file may exceed it, but is
/// shorter than this: longer files are uploaded alone, in parts.
const GROUP_BYTES_MAX: u64 = 64 << 20;
/// Maximum number of files that are uploaded concurrently.
const GROUP_FILES_MAX: usize = 16;

/// Upload of a checkpoint.
pub(super) struct CheckpointUpload<'a> {
    pub(super) name: &'a str,
    pub(super) rt: &'a Handle,
    pub(super) store: &'a CheckpointStore,
}

impl CheckpointUpload<'_> {
    /// Fails if the storage already contains the checkpoint.
    pub(super) fn check_new(&self) -> Result<()> {
        let (store, name) = (self.store.clone(), self.name.to_owned());
        let exists = run_blocking(self.rt, self.name, async move {
            let manifest = layout::manifest_path(&store.trial_path, &name);
            let failed = |source| CheckpointError::Storage { name, source };
            store.storage.exists(&manifest).await.map_err(failed)
        })?;
        match exists {
            false => Ok(()),
            true => Err(format!(
                "checkpoint {} already exists: an attempt makes one checkpoint per batch",
                self.name
            )
            .into()),
        }
    }

    /// Uploads short files in groups, and each long one alone, which limits the memory use.
    pub(super) fn upload_files<'f>(
        &self,
        files: impl IntoIterator<Item = (&'f String, &'f PathBuf)>,
    ) -> Result<BTreeMap<String, FileEntry>> {
        let mut stored = BTreeMap::new();
        let (mut group, mut bytes) = (NewContents::new(), 0);
        for (name, path) in files {
            if len(path)? >= GROUP_BYTES_MAX {
                stored.insert(name.clone(), self.upload_file(name, path)?);
                continue;
            }
            let content = read(path)?;
            bytes += content.len() as u64;
            group.insert(name.clone(), content.into());
            if bytes >= GROUP_BYTES_MAX || group.len() >= GROUP_FILES_MAX {
                stored.extend(self.upload_group(std::mem::take(&mut group))?);
                bytes = 0;
            }
        }
        stored.extend(self.upload_group(group)?);
        Ok(stored)
    }

    fn upload_file(&self, file: &str, from: &Path) -> Result<FileEntry> {
        let (store, name) = (self.store.clone(), self.name.to_owned());
        let path = layout::checkpoint_file(&store.trial_path, &name, file);
        let from = from.to_owned();
        let stored = run_blocking(self.rt, self.name, async move {
            match store.storage.put_file(&path, &from).await {
                Err(UploadError::Storage(source)) => Err(CheckpointError::Storage { name, source }),
                Err(error @ UploadError::File { .. }) => Ok(Err(error)),
                Ok(entry) => Ok(Ok(entry)),
            }
        });
        Ok(stored??)
    }

    fn upload_group(&self, contents: NewContents) -> Result<BTreeMap<String, FileEntry>> {
        let (store, name) = (self.store.clone(), self.name.to_owned());
        Ok(run_blocking(self.rt, self.name, async move { store.upload(&name, contents).await })?)
    }

    /// Tries to delete the files of a failed checkpoint, with few retries.
    pub(super) fn delete_files(&self, files: impl Iterator<Item = String>) {
        let (store, name) = (self.store.clone(), self.name.to_owned());
        let files: Vec<String> = files.collect();
        let storage = store.storage.clone().with_few_retries();
        let deleted = run_blocking(self.rt, self.name, async move {
            let manifest = layout::manifest_path(&store.trial_path, &name);
            // Delete the manifest first: it exists if its write succeeded but the response was
            // lost. A checkpoint with a manifest must have all its files.
            if storage.delete(&manifest).await.is_ok() {
                for file in files {
                    let _ = storage
                        .delete(&layout::checkpoint_file(&store.trial_path, &name, &file))
                        .await;
                }
            }
            Ok(())
        });
        // Ignore this error: the caller reports why the checkpoint failed.
        let _ = deleted;
    }
}

pub(super) fn download_to(
    rt: &Handle,
    store: &CheckpointStore,
    wanted: &CheckpointRef,
    folder: &Path,
    progress: &Arc<ProgressState>,
) -> Result<Manifest, CheckpointError> {
    let (store, folder, wanted) = (store.of(wanted), folder.to_owned(), wanted.clone());
    let progress = progress.clone();
    run_blocking(rt, &wanted.name.clone(), async move {
        let manifest = store.manifest(&wanted).await?;
        store.write_folder(&wanted.name, &manifest, &folder, |_| true, &progress).await?;
        Ok(manifest)
    })
}

/// Returns the files in a directory and its subdirectories, as a map from name to path.
pub(super) fn list_files(folder: &Path, select: &Select) -> Result<BTreeMap<String, PathBuf>> {
    let (mut files, mut folders) = (BTreeMap::new(), vec![(String::new(), folder.to_owned())]);
    while let Some((above, folder)) = folders.pop() {
        let unreadable = |error| format!("cannot read directory {}: {error}", folder.display());
        for entry in std::fs::read_dir(&folder).map_err(unreadable)? {
            let entry = entry.map_err(unreadable)?;
            let Some(name) = entry.file_name().to_str().map(|name| format!("{above}{name}")) else {
                let path = entry.path();
                return Err(format!("the name of {} is not valid UTF-8", path.display()).into());
            };
            if entry.file_type().map_err(unreadable)?.is_dir() {
                folders.push((format!("{name}/"), entry.path()));
            } else if name == MANIFEST {
                let path = entry.path();
                let text = format!("{}: {MANIFEST} is a reserved file name", path.display());
                return Err(text.into());
            } else if select(&name) {
                files.insert(name, entry.path());
            }
        }
    }
    Ok(files)
}

fn read(path: &Path) -> Result<Bytes> {
    Ok(std::fs::read(path).map_err(unreadable(path))?.into())
}

fn len(path: &Path) -> Result<u64> {
    Ok(std::fs::metadata(path).map_err(unreadable(path))?.len())
}

fn unreadable(path: &Path) -> impl FnOnce(std::io::Error) -> String {
    move |error| format!("cannot read {}: {error}", path.display())
}

/// Returns the manifest's entry of a file.
pub(super) fn file_entry(path: &Path) -> Result<FileEntry> {
    Ok(hash::entry_of_file(path).map_err(unreadable(path))?)
}

/// Temporary directory, deleted on drop.
pub(super) struct TemporaryFolder(pub(super) PathBuf);

impl TemporaryFolder {
    pub(super) fn new() -> Result<Self, CheckpointError> {
        use std::sync::atomic::{AtomicU64, Ordering};
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = format!("stoker-checkpoint-{}-{number}", std::process::id());
        let path = std::env::temp_dir().join(name);
        let failed = |error| CheckpointError::Local {
            name: "in transfer".to_owned(),
            reason: format!("cannot create directory {}: {error}", path.display()),
        };
        if path.exists() {
            // Left behind by an earlier process with the same process ID.
            std::fs::remove_dir_all(&path).map_err(failed)?;
        }
        std::fs::create_dir_all(&path).map_err(failed)?;
        Ok(Self(path))
    }
}

impl Drop for TemporaryFolder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}
