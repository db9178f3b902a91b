//! Restores and downloads checkpoints of arbitrary files, and reads their metadata.

use std::path::Path;

use serde::Serialize;
use serde::de::DeserializeOwned;
use stoker_api::contract::{CheckpointRef, Manifest, ReportEvent};
use stoker_api::number;
use tokio::runtime::Handle;

use super::Session;
use super::options::{CheckpointMetadata, Download};
use super::transfer::{TemporaryFolder, download_to};
use crate::Result;
use crate::callback::Logs;
use crate::checkpoint::{
    CheckpointError, CheckpointSource, CheckpointStore, Choice, check_source, load_first,
    run_blocking,
};
use crate::collective::RankActivity;
use crate::error::PeerFailed;

impl Session<'_> {
    /// Calls `read` with a temporary directory that holds the program's latest complete checkpoint.
    /// Returns `None` if there is none. All ranks get the same checkpoint, and ranks on the same
    /// machine share the directory.
    ///
    /// Call this once, before reporting anything. Metrics of later batches are then reported again.
    /// Collective.
    ///
    /// # Errors
    ///
    /// Fails if the storage, another rank or `read` fails. Without a runner, also fails if there
    /// are checkpoints but none can be read.
    pub fn restore_path<T>(
        &self,
        read: impl FnOnce(&Path, &CheckpointMetadata) -> Result<T>,
    ) -> Result<Option<T>> {
        let (context, ranks) = (self.context, self.context.distributed());
        let Some((rt, store)) = context.io().checkpoint_store() else { return Ok(None) };
        ranks.record_activity(RankActivity::Wait);
        let mut folder = None;
        let mut chosen = Ok(None);
        if ranks.rank() == 0 {
            chosen = self.download_first_complete(&rt, &store, &mut folder);
        }
        let chosen = ranks.gather_results("restore_path", chosen)?.swap_remove(0);
        let Some(wanted) = chosen else {
            ranks.record_activity(RankActivity::Train);
            return Ok(None);
        };
        let mut manifest = Ok(None);
        if ranks.local_rank() == 0 {
            manifest = self.local_folder(&rt, &store, &wanted, &mut folder).map(Some);
        }
        let (path, manifest) = self.first_local_result(manifest)?;
        ranks.record_activity(RankActivity::Train);
        let state = read(Path::new(&path), &CheckpointMetadata::from(&manifest))?;
        // Keep the directory until all ranks of this machine have read it.
        ranks.gather_local(())?;
        let mut io = context.io();
        io.batches = manifest.batches;
        io.restored = Some(wanted.name);
        let validation = validation_of(&manifest, &context.config.metric);
        io.restored_validation = validation.map(|metrics| (manifest.batches, metrics));
        drop(io);
        Ok(Some(state))
    }

    /// Writes a checkpoint's files and its manifest into `folder`, which is created if missing. If
    /// no file was left out, [`CheckpointSource::folder`] accepts the result.
    ///
    /// # Errors
    ///
    /// Fails if the checkpoint is missing or incomplete, if the directory cannot be written, or if
    /// ranks that share a download name different directories.
    pub fn download(
        &self,
        from: impl Into<Download>,
        folder: impl AsRef<Path>,
    ) -> Result<CheckpointMetadata> {
        let (Download { from, is_shared, select }, folder) = (from.into(), folder.as_ref());
        let ranks = self.context.distributed();
        let (own, progress) = (&self.context.config.storage, &ranks.progress);
        let write = || from.write_to(own, folder, &*select, progress);
        let fetch = || from.while_reading(progress, write);
        if !is_shared || ranks.local_size() == 1 {
            return Ok(CheckpointMetadata::from(&fetch()?));
        }
        let path = folder.to_string_lossy().into_owned();
        let folders = ranks.allgather_local(path)?;
        if let Some(other) = folders.iter().find(|folder| **folder != folders[0]) {
            let text = format!(
                "the ranks of this machine share a download, but name {} and {other}: use one \
                 directory or `Download::unshared`",
                folders[0]
            );
            return Err(text.into());
        }
        let mut manifest = Ok(None);
        if ranks.local_rank() == 0 {
            manifest = fetch().map(Some);
        }
        let manifest: Manifest = self.first_local_result(manifest)?;
        Ok(CheckpointMetadata::from(&manifest))
    }

    /// Returns a checkpoint's metadata without downloading its files.
    ///
    /// # Errors
    ///
    /// Fails if the checkpoint does not exist.
    pub fn metadata(&self, of: impl Into<CheckpointSource>) -> Result<CheckpointMetadata> {
        let (of, own) = (of.into(), &self.context.config.storage);
        let progress = &self.context.distributed().progress;
        let manifest = of.while_reading(progress, || of.read_manifest(own, progress))?;
        Ok(CheckpointMetadata::from(&manifest))
    }

    /// Returns a checkpoint of this program by the name that [`upload`](Self::upload) returned.
    pub fn checkpoint(&self, name: &str) -> CheckpointSource {
        let storage = &self.context.config.storage;
        let source = CheckpointSource::stored(&storage.url, &storage.trial_path).named(name);
        storage.endpoint.iter().fold(source, |source, endpoint| source.endpoint(endpoint))
    }

    /// Returns the result of this machine's first rank on all of its ranks.
    fn first_local_result<T: Clone + Serialize + DeserializeOwned>(
        &self,
        local: Result<Option<T>>,
    ) -> Result<T> {
        let shared = local.as_ref().map_err(ToString::to_string).cloned();
        let shared = self.context.distributed().broadcast_local(shared)?;
        local?;
        let first = "the first rank of this machine";
        let done = shared.map_err(|why| PeerFailed(format!("{first}: {why}")))?;
        Ok(done.ok_or_else(|| format!("{first} returned nothing"))?)
    }

    /// Downloads the first complete checkpoint and returns its reference.
    fn download_first_complete(
        &self,
        rt: &Handle,
        store: &CheckpointStore,
        into: &mut Option<TemporaryFolder>,
    ) -> Result<Option<CheckpointRef>> {
        self.context.io().find_unreported()?;
        let refs = self.context.io().resume_from().to_vec();
        let progress = &self.context.distributed().progress;
        let load =
            |store: &CheckpointStore, wanted: &CheckpointRef| -> Result<_, CheckpointError> {
                let folder = TemporaryFolder::new()?;
                Ok((download_to(rt, store, wanted, &folder.0, progress)?, folder))
            };
        let Choice { chosen, refused, unsupported } = load_first(rt, store, &refs, load)?;
        let chosen = chosen.map(|(wanted, (manifest, folder))| {
            *into = Some(folder);
            (wanted, manifest)
        });
        let mut io = self.context.io();
        for (name, why) in &refused {
            io.terminal.print_line(&format!("checkpoint {name} is not used: {why}"));
        }
        if chosen.is_none() {
            check_source(&refs, &refused)?;
            io.check_refused(&refused, unsupported)?;
        }
        let resumed_from = chosen.as_ref().map(|(wanted, _)| wanted.name.clone());
        let batches = chosen.as_ref().map_or(0, |(_, manifest)| manifest.batches);
        let batches_total = io.length.batches;
        if let Some((wanted, manifest)) = &chosen {
            io.terminal.print_line(&format!("resumed from checkpoint {}", wanted.name));
            // The reports of a copy's source are not about this trial.
            if wanted.trial_path.is_none() {
                io.restore_unsent(manifest.unsent.clone());
            }
        }
        io.report_unreported(&refused);
        io.record_resume(resumed_from.clone(), batches);
        io.post_at(batches, ReportEvent::Started { resumed_from, batches_total, refused });
        Ok(chosen.map(|(wanted, _)| wanted))
    }

    /// Returns the path of the local copy of a checkpoint, which it downloads if necessary.
    fn local_folder(
        &self,
        rt: &Handle,
        store: &CheckpointStore,
        wanted: &CheckpointRef,
        into: &mut Option<TemporaryFolder>,
    ) -> Result<(String, Manifest)> {
        let has_folder = into.is_some();
        if !has_folder {
            *into = Some(TemporaryFolder::new()?);
        }
        let folder = into.as_ref().map(|temporary| temporary.0.clone()).unwrap_or_default();
        let manifest = match has_folder {
            true => self.manifest(rt, store, wanted)?,
            false => {
                let progress = &self.context.distributed().progress;
                download_to(rt, store, wanted, &folder, progress)?
            }
        };
        let path =
            folder.to_str().ok_or("the path of the temporary directory is not valid UTF-8")?;
        Ok((path.to_owned(), manifest))
    }

    fn manifest(
        &self,
        rt: &Handle,
        store: &CheckpointStore,
        wanted: &CheckpointRef,
    ) -> Result<Manifest> {
        let (store, wanted) = (store.of(wanted), wanted.clone());
        Ok(run_blocking(rt, &wanted.name.clone(), async move { store.manifest(&wanted).await })?)
    }
}

/// Returns the validation in a manifest. Manifests of earlier versions contain only the searched
/// metric.
fn validation_of(manifest: &Manifest, searched: &str) -> Option<Logs> {
    let value = |(name, text): (&String, &String)| Some((name.clone(), number::parse(text)?));
    let metrics: Logs = manifest.validation.iter().filter_map(value).collect();
    if !metrics.is_empty() {
        return Some(metrics);
    }
    let metric = number::parse(manifest.metric.as_ref()?)?;
    Some([(searched.to_owned(), metric)].into())
}
