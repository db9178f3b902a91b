//! Checkpoints as folders on this machine.

use std::path::{Component, Path, PathBuf};

use stoker_api::contract::{Manifest, StorageConfig};
use stoker_api::names::MANIFEST;

use tokio::runtime::Builder;

use super::source::Where;
use super::{CheckpointError, CheckpointSource, Parts, Place, parse, verify};
use crate::Result as AnyResult;

/// Reads a checkpoint from a folder on this machine, such as one that was downloaded.
///
/// # Errors
///
/// The folder holds no whole checkpoint.
pub fn load_folder(path: &Path) -> Result<(Manifest, Parts), CheckpointError> {
    let broken = |reason| CheckpointError::Broken { name: path.display().to_string(), reason };
    let read = |file: &str| {
        let file_path = below(path, file).map_err(&broken)?;
        std::fs::read(file_path).map_err(|error| broken(format!("{file} cannot be read: {error}")))
    };
    let manifest = parse(&read(MANIFEST)?).map_err(broken)?;
    let mut parts = Parts::new();
    for (file, entry) in &manifest.files {
        let bytes = read(file)?;
        verify(file, entry, &bytes).map_err(broken)?;
        parts.insert(file.clone(), bytes.into());
    }
    Ok((manifest, parts))
}

/// The path of a file that a manifest names.
fn below(folder: &Path, file: &str) -> Result<PathBuf, String> {
    match Path::new(file).components().all(|it| matches!(it, Component::Normal(_))) {
        true => Ok(folder.join(file)),
        false => Err(format!("{file} is no name of a file in the folder")),
    }
}

impl Place {
    /// Writes a checkpoint's files that are `wanted` into a folder, each checked, one after the other; its
    /// manifest is not among them.
    pub(crate) async fn write_folder(
        &self,
        name: &str,
        manifest: &Manifest,
        folder: &Path,
        wanted: impl Fn(&str) -> bool,
    ) -> Result<(), CheckpointError> {
        let broken = |reason| CheckpointError::Broken { name: name.to_owned(), reason };
        for (file, entry) in manifest.files.iter().filter(|(file, _)| wanted(file)) {
            let path = below(folder, file).map_err(&broken)?;
            let bytes = self.fetch(name, file).await?;
            let (file, entry) = (file.clone(), entry.clone());
            let write = move || -> Result<Result<(), String>, String> {
                if let Err(why) = verify(&file, &entry, &bytes) {
                    return Ok(Err(why));
                }
                let written = path
                    .parent()
                    .map_or(Ok(()), std::fs::create_dir_all)
                    .and_then(|()| std::fs::write(&path, &bytes));
                written
                    .map(Ok)
                    .map_err(|error| format!("{} cannot be written: {error}", path.display()))
            };
            let gone = |_| CheckpointError::ShutDown { name: name.to_owned() };
            match tokio::task::spawn_blocking(write).await.map_err(gone)? {
                Ok(checked) => checked.map_err(&broken)?,
                Err(reason) => {
                    return Err(CheckpointError::Local { name: name.to_owned(), reason });
                }
            }
        }
        Ok(())
    }
}

impl CheckpointSource {
    /// Its manifest; `own` is where the session that asks keeps its files.
    pub(crate) fn read_manifest(&self, own: &StorageConfig) -> AnyResult<Manifest> {
        if let Where::Folder(_) = self.location() {
            return Ok(self.load(own)?.0);
        }
        Builder::new_current_thread().enable_all().build()?.block_on(async {
            let place = self.place(own).await?;
            Ok(self.choose(&place).await?.1)
        })
    }

    /// Writes its files that are `wanted`, each checked, and its manifest into a folder.
    pub(crate) fn write_to(
        &self,
        own: &StorageConfig,
        folder: &Path,
        wanted: &dyn Fn(&str) -> bool,
    ) -> AnyResult<Manifest> {
        let failed = |error| format!("folder {} cannot be written: {error}", folder.display());
        std::fs::create_dir_all(folder).map_err(failed)?;
        if let Where::Folder(from) = self.location() {
            let (manifest, parts) = self.load(own)?;
            for (file, bytes) in parts.iter().filter(|(file, _)| wanted(file)) {
                let path = below(folder, file)?;
                path.parent().map_or(Ok(()), std::fs::create_dir_all).map_err(failed)?;
                std::fs::write(path, bytes).map_err(failed)?;
            }
            std::fs::copy(from.join(MANIFEST), folder.join(MANIFEST)).map_err(failed)?;
            return Ok(manifest);
        }
        Builder::new_current_thread().enable_all().build()?.block_on(async {
            let place = self.place(own).await?;
            let (name, manifest, _) = self.choose(&place).await?;
            place.write_folder(&name, &manifest, folder, wanted).await?;
            let text = place.fetch(&name, MANIFEST).await?;
            std::fs::write(folder.join(MANIFEST), text).map_err(failed)?;
            Ok(manifest)
        })
    }
}
