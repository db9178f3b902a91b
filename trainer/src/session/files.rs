//! Uploads, restores, downloads and deletes checkpoints of arbitrary files.

use std::collections::BTreeMap;
use std::path::Path;

use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;
use stoker_api::contract::{CheckpointRef, FileEntry, Manifest, ReportEvent};
use stoker_api::names::checkpoint_name;
use stoker_storage::layout;
use tokio::runtime::Handle;

use super::Session;
use super::options::{Download, Saved, Upload};
use super::shards::{Share, merge};
use super::transfer::{Temporary, Transfer, entry_of, fetch, listed, settle, wait};
use crate::Result;
use crate::checkpoint::{CheckpointError, CheckpointSource, Place, Save, delete};
use crate::collective::{RankActivity, all_gather_json};
use crate::error::PeerFailed;

impl Session<'_> {
    /// Stores the files in `folder` and its subfolders as a checkpoint, and returns its name, the
    /// same on all ranks.
    ///
    /// The checkpoint is complete when this returns: its manifest is written last, after all
    /// metrics reported so far. The runner retains the latest and best checkpoints, as with `fit`.
    /// If the program has no storage, this prints a message and stores nothing. If the last
    /// checkpoint was at the same batch, this stores nothing and returns that checkpoint's name.
    ///
    /// Collective if [`sharded`](Upload::sharded). Otherwise, ranks other than 0 store nothing and
    /// do not wait.
    ///
    /// # Errors
    ///
    /// Fails in these cases:
    ///
    /// - The program trains with `fit` or `training`, which save their own checkpoints.
    /// - A file cannot be read, or is named `manifest.json`.
    /// - The ranks' shares conflict; the error lists every conflict.
    /// - The storage fails.
    pub fn upload(&self, folder: impl AsRef<Path>, upload: Upload) -> Result<String> {
        let (context, folder) = (self.context, folder.as_ref());
        if context.outlet().has_loop {
            let text = "cannot upload a checkpoint: `fit` and `training` save their own; add files \
                        to those with `Callback::on_checkpoint`";
            return Err(text.into());
        }
        let name = checkpoint_name(upload.batches, context.config.attempt);
        let Some((rt, place)) = context.outlet().place() else {
            let text = format!("checkpoint {name} is not stored: the program has no folder");
            context.outlet().terminal.print_line(&text);
            return Ok(name);
        };
        let ranks = context.distributed();
        if ranks.rank() > 0 && !upload.is_sharded {
            return Ok(name);
        }
        // On a stop right after a checkpoint, the program stores again; there is nothing to add.
        let stored = context.outlet().last_saved().filter(|saved| saved.name == name);
        let stored = match upload.is_sharded {
            true => all_gather_json(ranks.collective(), "upload", stored)?.swap_remove(0),
            false => stored,
        };
        if stored.is_some() {
            return Ok(name);
        }
        ranks.record_activity(RankActivity::Wait);
        let transfer = Transfer { name: &name, rt: &rt, place: &place };
        let done = match upload.is_sharded && ranks.size() > 1 {
            true => self.store_shares(&transfer, folder, upload),
            false => self.store_all(&transfer, folder, upload),
        };
        ranks.record_activity(RankActivity::Train);
        done.map(|()| name)
    }

    /// Calls `write` to fill an empty folder, and makes a checkpoint of it like
    /// [`upload`](Self::upload). Does not call `write` on ranks that contribute nothing.
    ///
    /// # Errors
    ///
    /// Same as [`upload`](Self::upload), plus errors of `write`.
    pub fn store_path(
        &self,
        upload: Upload,
        write: impl FnOnce(&Path) -> Result<()>,
    ) -> Result<String> {
        let folder = Temporary::new()?;
        if self.context.distributed().rank() == 0 || upload.is_sharded {
            write(&folder.0)?;
        }
        self.upload(&folder.0, upload)
    }

    /// Calls `read` with a temporary folder that holds the program's latest complete checkpoint.
    /// Returns `None` if there is none. All ranks get the same checkpoint, and ranks on the same
    /// machine share the folder.
    ///
    /// Call this once, before reporting anything. Metrics of later batches are then reported again.
    /// Collective.
    ///
    /// # Errors
    ///
    /// Fails if the storage, another rank or `read` fails.
    pub fn restore_path<T>(
        &self,
        read: impl FnOnce(&Path, &Saved) -> Result<T>,
    ) -> Result<Option<T>> {
        let (context, ranks) = (self.context, self.context.distributed());
        let Some((rt, place)) = context.outlet().place() else { return Ok(None) };
        ranks.record_activity(RankActivity::Wait);
        let mut folder = None;
        let mut chosen = Ok(None);
        if ranks.rank() == 0 {
            chosen = self.choose(&rt, &place, &mut folder);
        }
        let chosen = settle(ranks, "restore_path", chosen)?.swap_remove(0);
        let Some((name, sha256)) = chosen else {
            ranks.record_activity(RankActivity::Train);
            return Ok(None);
        };
        let wanted = CheckpointRef { name, manifest_sha256: sha256 };
        let mut manifest = Ok(None);
        if ranks.local_rank() == 0 {
            manifest = self.local_folder(&rt, &place, &wanted, &mut folder).map(Some);
        }
        let (path, manifest) = self.of_first(manifest)?;
        ranks.record_activity(RankActivity::Train);
        let state = read(Path::new(&path), &Saved::from(&manifest))?;
        // Keep the folder until all ranks of this machine have read it.
        ranks.gather_local(())?;
        let mut outlet = context.outlet();
        outlet.batches = manifest.batches;
        let metric = manifest.metric.as_ref().and_then(|metric| stoker_api::number::parse(metric));
        let searched = context.config.metric.clone();
        outlet.restored_validation =
            metric.map(|metric| (manifest.batches, [(searched, metric)].into()));
        drop(outlet);
        Ok(Some(state))
    }

    /// Returns the result of this machine's first rank on all of its ranks.
    fn of_first<T: Clone + Serialize + DeserializeOwned>(
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

    /// Downloads the first complete checkpoint and returns its name and the SHA-256 of its
    /// manifest.
    fn choose(
        &self,
        rt: &Handle,
        place: &Place,
        into: &mut Option<Temporary>,
    ) -> Result<Option<(String, String)>> {
        let refs = self.context.outlet().resume_from().to_vec();
        let (mut refused, mut chosen) = (BTreeMap::new(), None);
        for wanted in refs {
            let folder = Temporary::new()?;
            match fetch(rt, place, &wanted, &folder.0) {
                Ok(manifest) => {
                    chosen = Some((wanted, manifest));
                    *into = Some(folder);
                    break;
                }
                Err(CheckpointError::Broken { name, reason }) => {
                    refused.insert(name, reason);
                }
                Err(error) => return Err(error.into()),
            }
        }
        let mut outlet = self.context.outlet();
        for (name, why) in &refused {
            outlet.terminal.print_line(&format!("checkpoint {name} is not used: {why}"));
        }
        let resumed_from = chosen.as_ref().map(|(wanted, _)| wanted.name.clone());
        let batches = chosen.as_ref().map_or(0, |(_, manifest)| manifest.batches);
        let batches_total = outlet.length.batches;
        if let Some((wanted, manifest)) = &chosen {
            outlet.terminal.print_line(&format!("goes on from checkpoint {}", wanted.name));
            outlet.restore_unsent(manifest.unsent.clone());
        }
        outlet.restored = resumed_from.clone();
        outlet.post_at(batches, ReportEvent::Started { resumed_from, batches_total, refused });
        Ok(chosen.map(|(wanted, _)| (wanted.name, wanted.manifest_sha256)))
    }

    /// Returns the path of the local copy of a checkpoint, which it downloads if necessary.
    fn local_folder(
        &self,
        rt: &Handle,
        place: &Place,
        wanted: &CheckpointRef,
        into: &mut Option<Temporary>,
    ) -> Result<(String, Manifest)> {
        let has_folder = into.is_some();
        if !has_folder {
            *into = Some(Temporary::new()?);
        }
        let folder = into.as_ref().map(|temporary| temporary.0.clone()).unwrap_or_default();
        let manifest = match has_folder {
            true => self.manifest(rt, place, wanted)?,
            false => fetch(rt, place, wanted, &folder)?,
        };
        let path = folder.to_str().ok_or("the path of the temporary folder is not valid UTF-8")?;
        Ok((path.to_owned(), manifest))
    }

    fn manifest(&self, rt: &Handle, place: &Place, wanted: &CheckpointRef) -> Result<Manifest> {
        let (place, wanted) = (place.clone(), wanted.clone());
        Ok(wait(rt, &wanted.name.clone(), async move { place.manifest(&wanted).await })?)
    }

    /// Writes a checkpoint's files and its manifest into `folder`, which is created if missing. If
    /// no file was left out, [`CheckpointSource::folder`] accepts the result.
    ///
    /// # Errors
    ///
    /// Fails if the checkpoint is missing or incomplete, if the folder cannot be written, or if
    /// ranks that share a download name different folders.
    pub fn download(&self, from: impl Into<Download>, folder: impl AsRef<Path>) -> Result<Saved> {
        let (Download { from, is_shared, select }, folder) = (from.into(), folder.as_ref());
        let ranks = self.context.distributed();
        let fetch = || from.write_to(&self.context.config.storage, folder, &*select);
        if !is_shared || ranks.local_size() == 1 {
            return Ok(Saved::from(&fetch()?));
        }
        ranks.record_activity(RankActivity::Wait);
        let path = folder.to_string_lossy().into_owned();
        let folders = ranks.allgather_local(path)?;
        if let Some(other) = folders.iter().find(|folder| **folder != folders[0]) {
            let text = format!(
                "the ranks of this machine share a download, but name {} and {other}: use one \
                 folder or `Download::unshared`",
                folders[0]
            );
            return Err(text.into());
        }
        let mut manifest = Ok(None);
        if ranks.local_rank() == 0 {
            manifest = fetch().map(Some);
        }
        let manifest: Manifest = self.of_first(manifest)?;
        ranks.record_activity(RankActivity::Train);
        Ok(Saved::from(&manifest))
    }

    /// Returns a checkpoint's metadata without downloading its files.
    ///
    /// # Errors
    ///
    /// Fails if the checkpoint does not exist.
    pub fn metadata(&self, of: impl Into<CheckpointSource>) -> Result<Saved> {
        Ok(Saved::from(&of.into().read_manifest(&self.context.config.storage)?))
    }

    /// Returns a checkpoint of this program by the name that [`upload`](Self::upload) returned.
    pub fn checkpoint(&self, name: &str) -> CheckpointSource {
        let storage = &self.context.config.storage;
        let source = CheckpointSource::stored(&storage.url, &storage.trial_path).named(name);
        storage.endpoint.iter().fold(source, |source, endpoint| source.endpoint(endpoint))
    }

    /// Deletes a checkpoint of this program. The latest cannot be deleted, because a restart
    /// resumes from it. The runner's record lists a deleted checkpoint until the experiment's final
    /// cleanup. Ranks other than 0 do nothing.
    ///
    /// # Errors
    ///
    /// Fails if the checkpoint is the latest or does not exist, or if the storage fails.
    pub fn delete(&self, name: &str) -> Result<()> {
        let context = self.context;
        let Some((rt, place)) = context.outlet().place() else { return Ok(()) };
        if context.distributed().rank() > 0 {
            return Ok(());
        }
        let latest = context.outlet().latest();
        if latest.as_deref() == Some(name) {
            let text = format!(
                "cannot delete checkpoint {name}: it is the latest, from which a restart resumes"
            );
            return Err(text.into());
        }
        let (owned, named) = (place.clone(), name.to_owned());
        let deleted = wait(&rt, name, async move {
            let manifest = layout::manifest_path(&owned.trial_path, &named);
            let failed = |source| CheckpointError::Storage { name: named.clone(), source };
            if !owned.storage.exists(&manifest).await.map_err(failed)? {
                return Ok(false);
            }
            delete(&owned.storage, &owned.trial_path, &named).await.map_err(failed)?;
            Ok(true)
        })?;
        match deleted {
            true => Ok(()),
            false => Err(format!("checkpoint {name} not found in {}", place.trial_path).into()),
        }
    }

    /// Stores this rank's files and makes them a checkpoint.
    fn store_all(&self, transfer: &Transfer<'_>, folder: &Path, upload: Upload) -> Result<()> {
        transfer.check_new()?;
        let files = listed(folder, &upload.select)?;
        let stored = transfer.store(&files);
        let committed = stored.and_then(|files| self.commit(transfer, &upload, files, None));
        if committed.is_err() {
            transfer.forget(files.into_keys());
        }
        committed
    }

    /// Stores this rank's share. When all shares are stored, rank 0 writes the manifest.
    fn store_shares(&self, transfer: &Transfer<'_>, folder: &Path, upload: Upload) -> Result<()> {
        let ranks = self.context.distributed();
        let own = (|| -> Result<_> {
            if ranks.rank() == 0 {
                transfer.check_new()?;
            }
            let files = listed(folder, &upload.select)?;
            let mut entries = BTreeMap::new();
            for (name, path) in &files {
                entries.insert(name.clone(), entry_of(path)?);
            }
            Ok((files, Share { files: entries, metadata: upload.metadata.clone() }))
        })();
        let (files, share) = match own {
            Ok((files, share)) => (files, Ok(share)),
            Err(error) => (BTreeMap::new(), Err(error)),
        };
        let shares = settle(ranks, "upload", share)?;
        let merged = merge(&shares)
            .map_err(|why| format!("checkpoint {}: ranks disagree: {why}", transfer.name))?;
        let is_owned = |name: &String| merged.owners.get(name) == Some(&ranks.rank());
        let stored = transfer.store(files.iter().filter(|(name, _)| is_owned(name)));
        let stored = stored.and_then(|stored| {
            let is_same =
                |(name, entry): (&String, &FileEntry)| shares[ranks.rank()].files[name] == *entry;
            match stored.iter().all(is_same) {
                true => Ok(stored),
                false => Err("the files changed during the upload".into()),
            }
        });
        let stored = settle(ranks, "stored", stored);
        let is_lead = ranks.rank() == 0;
        if let Err(error) = stored {
            // All ranks get this error, so rank 0 cleans up for all.
            if is_lead {
                transfer.forget(merged.owners.into_keys());
            }
            return Err(error);
        }
        let mut committed = Ok(());
        if is_lead {
            let entry = |(name, owner): (&String, &usize)| {
                (name.clone(), shares[*owner].files[name].clone())
            };
            let files = merged.owners.iter().map(entry).collect();
            committed = self.commit(transfer, &upload, files, Some(merged.metadata.clone()));
        }
        if committed.is_err() {
            transfer.forget(merged.owners.into_keys());
        }
        settle(ranks, "committed", committed).map(drop)
    }

    fn commit(
        &self,
        transfer: &Transfer<'_>,
        upload: &Upload,
        files: BTreeMap<String, FileEntry>,
        metadata: Option<BTreeMap<String, Value>>,
    ) -> Result<()> {
        let context = self.context;
        let save = {
            let mut outlet = context.outlet();
            outlet.tell_validation();
            Save {
                batches: upload.batches,
                metric: outlet.metric_at(&context.config, upload.batches),
                unsent: outlet.unsent(),
                metadata: metadata.unwrap_or_else(|| upload.metadata.clone()),
                after: outlet.rows_stored(),
            }
        };
        let (place, name) = (transfer.place.clone(), transfer.name.to_owned());
        let saved =
            wait(
                transfer.rt,
                transfer.name,
                async move { place.commit(&name, save, files).await },
            )?;
        context.outlet().saved(saved);
        Ok(())
    }
}
