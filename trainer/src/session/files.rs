//! Checkpoints of any files.

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
use crate::collective::{Doing, exchange};
use crate::error::PeerFailed;

impl Session<'_> {
    /// Makes a checkpoint of the files in `folder` and below it, and gives its name, which is the same on
    /// all ranks. It is whole once this returns: its manifest is written last, after the metrics that were
    /// reported until now. The runner keeps the latest and the best, as those of `fit`. Where the program
    /// keeps no checkpoints, it says so and stores nothing; where the last checkpoint is of these batches, it
    /// is given again.
    ///
    /// Collective where it is [`sharded`](Upload::sharded); else ranks other than 0 store nothing and do
    /// not wait.
    ///
    /// # Errors
    ///
    /// The program trains by `fit` or `training`, whose checkpoints are their own; a file cannot be read, or is named `manifest.json`; ranks' shares do not fit together, with every conflict; the storage failed.
    pub fn upload(&self, folder: impl AsRef<Path>, upload: Upload) -> Result<String> {
        let (context, folder) = (self.context, folder.as_ref());
        if context.outlet().has_loop {
            let text = "checkpoints of a program that trains by `fit` or `training` are those of its loop, \
                        which a restart goes on from: add files to them by `Callback::on_checkpoint`";
            return Err(text.into());
        }
        let name = checkpoint_name(upload.batches, context.config.attempt);
        let Some((rt, place)) = context.outlet().place() else {
            let text = format!("checkpoint {name} is not kept: this program was given no folder");
            context.outlet().terminal.say(&text);
            return Ok(name);
        };
        let ranks = context.distributed();
        if ranks.rank() > 0 && !upload.is_sharded {
            return Ok(name);
        }
        // Asked to leave where a checkpoint has just been made: there is nothing to add.
        let stored = context.outlet().last_saved().filter(|it| it.name == name);
        let stored = match upload.is_sharded {
            true => exchange(ranks.collective(), "upload", stored)?.swap_remove(0),
            false => stored,
        };
        if stored.is_some() {
            return Ok(name);
        }
        ranks.tick(Doing::Wait);
        let transfer = Transfer { name: &name, rt: &rt, place: &place };
        let done = match upload.is_sharded && ranks.size() > 1 {
            true => self.store_shares(&transfer, folder, upload),
            false => self.store_all(&transfer, folder, upload),
        };
        ranks.tick(Doing::Train);
        done.map(|()| name)
    }

    /// Has `write` fill an empty folder, of which a checkpoint is made as by [`upload`](Self::upload).
    /// Ranks that give nothing do not write.
    ///
    /// # Errors
    ///
    /// As [`upload`](Self::upload), and what `write` fails with.
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

    /// Has `read` read the latest whole checkpoint of this program from a folder that is gone afterwards;
    /// `None` where there is none. The same checkpoint on all ranks; those of a machine share the folder.
    /// Call it once, before anything is reported: what was reported after that checkpoint is reported
    /// again. Collective.
    ///
    /// # Errors
    ///
    /// The storage failed; another rank fails; what `read` fails with.
    pub fn restore_path<T>(
        &self,
        read: impl FnOnce(&Path, &Saved) -> Result<T>,
    ) -> Result<Option<T>> {
        let (context, ranks) = (self.context, self.context.distributed());
        let Some((rt, place)) = context.outlet().place() else { return Ok(None) };
        ranks.tick(Doing::Wait);
        let mut folder = None;
        let mut chosen = Ok(None);
        if ranks.rank() == 0 {
            chosen = self.choose(&rt, &place, &mut folder);
        }
        let chosen = settle(ranks, "restore_path", chosen)?.swap_remove(0);
        let Some((name, sha256)) = chosen else {
            ranks.tick(Doing::Train);
            return Ok(None);
        };
        let wanted = CheckpointRef { name, manifest_sha256: sha256 };
        let mut told = Ok(None);
        if ranks.local_rank() == 0 {
            told = self.local_folder(&rt, &place, &wanted, &mut folder).map(Some);
        }
        let (path, manifest) = self.of_first(told)?;
        ranks.tick(Doing::Train);
        let state = read(Path::new(&path), &Saved::from(&manifest))?;
        // The folder goes when all have read it.
        ranks.gather_local(())?;
        let mut outlet = context.outlet();
        outlet.batches = manifest.batches;
        let metric = manifest.metric.as_ref().and_then(|it| stoker_api::number::parse(it));
        let searched = context.config.metric.clone();
        outlet.restored_validation =
            metric.map(|metric| (manifest.batches, [(searched, metric)].into()));
        drop(outlet);
        Ok(Some(state))
    }

    /// What the first rank of this machine did, on all of them.
    fn of_first<T: Clone + Serialize + DeserializeOwned>(
        &self,
        mine: Result<Option<T>>,
    ) -> Result<T> {
        let told = mine.as_ref().map_err(ToString::to_string).cloned();
        let told = self.context.distributed().broadcast_local(told)?;
        mine?;
        let first = "the first rank of this machine";
        let done = told.map_err(|why| PeerFailed(format!("{first}: {why}")))?;
        Ok(done.ok_or_else(|| format!("{first} did nothing"))?)
    }

    /// The first checkpoint that is whole, in a folder, by its name and the SHA-256 of its manifest.
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
            outlet.terminal.say(&format!("checkpoint {name} is not used: {why}"));
        }
        let resumed_from = chosen.as_ref().map(|(wanted, _)| wanted.name.clone());
        let batches = chosen.as_ref().map_or(0, |(_, manifest)| manifest.batches);
        let batches_total = outlet.length.batches;
        if let Some((wanted, manifest)) = &chosen {
            outlet.terminal.say(&format!("goes on from checkpoint {}", wanted.name));
            outlet.restore_unsent(manifest.unsent.clone());
        }
        outlet.restored = resumed_from.clone();
        outlet.post_at(batches, ReportEvent::Started { resumed_from, batches_total, refused });
        Ok(chosen.map(|(wanted, _)| (wanted.name, wanted.manifest_sha256)))
    }

    /// The checkpoint in a folder of this machine.
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
        let folder = into.as_ref().map(|it| it.0.clone()).unwrap_or_default();
        let manifest = match has_folder {
            true => self.manifest(rt, place, wanted)?,
            false => fetch(rt, place, wanted, &folder)?,
        };
        let path = folder.to_str().ok_or("the folder for temporary files has no name in UTF-8")?;
        Ok((path.to_owned(), manifest))
    }

    fn manifest(&self, rt: &Handle, place: &Place, wanted: &CheckpointRef) -> Result<Manifest> {
        let (place, wanted) = (place.clone(), wanted.clone());
        Ok(wait(rt, &wanted.name.clone(), async move { place.manifest(&wanted).await })?)
    }

    /// Writes a checkpoint's files, and its manifest, into `folder`, which is made if there is none: a
    /// folder as [`CheckpointSource::folder`] takes it, if nothing was left out.
    ///
    /// # Errors
    ///
    /// There is no such checkpoint, or it is not whole; the folder cannot be written. Where ranks share
    /// it: they name other folders.
    pub fn download(&self, from: impl Into<Download>, folder: impl AsRef<Path>) -> Result<Saved> {
        let (Download { from, is_shared, select }, folder) = (from.into(), folder.as_ref());
        let ranks = self.context.distributed();
        let fetch = || from.write_to(&self.context.config.storage, folder, &*select);
        if !is_shared || ranks.local_size() == 1 {
            return Ok(Saved::from(&fetch()?));
        }
        ranks.tick(Doing::Wait);
        let path = folder.to_string_lossy().into_owned();
        let folders = ranks.allgather_local(path)?;
        if let Some(other) = folders.iter().find(|it| **it != folders[0]) {
            let text = format!(
                "the ranks of this machine share a download, but name {} and {other}: name one folder, \
                 or let it be `unshared`",
                folders[0]
            );
            return Err(text.into());
        }
        let mut told = Ok(None);
        if ranks.local_rank() == 0 {
            told = fetch().map(Some);
        }
        let manifest: Manifest = self.of_first(told)?;
        ranks.tick(Doing::Train);
        Ok(Saved::from(&manifest))
    }

    /// What is known of a checkpoint, without its files.
    ///
    /// # Errors
    ///
    /// There is no such checkpoint.
    pub fn metadata(&self, of: impl Into<CheckpointSource>) -> Result<Saved> {
        Ok(Saved::from(&of.into().read_manifest(&self.context.config.storage)?))
    }

    /// A checkpoint of this program by its name, as [`upload`](Self::upload) gave it.
    pub fn checkpoint(&self, name: &str) -> CheckpointSource {
        let storage = &self.context.config.storage;
        let source = CheckpointSource::stored(&storage.url, &storage.trial_path).named(name);
        storage.endpoint.iter().fold(source, |source, endpoint| source.endpoint(endpoint))
    }

    /// Deletes a checkpoint of this program, which must not be its latest: that is what it goes on from.
    /// A runner's record names it until the experiment's own clean-up. Ranks other than 0 do nothing.
    ///
    /// # Errors
    ///
    /// It is the latest; there is none of this name; the storage failed.
    pub fn delete(&self, name: &str) -> Result<()> {
        let context = self.context;
        let Some((rt, place)) = context.outlet().place() else { return Ok(()) };
        if context.distributed().rank() > 0 {
            return Ok(());
        }
        let latest = context.outlet().latest();
        if latest.as_deref() == Some(name) {
            let text = format!("checkpoint {name} is the latest, which a restart goes on from");
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
            false => Err(format!("there is no checkpoint {name} in {}", place.trial_path).into()),
        }
    }

    /// Stores what this rank has, and makes it a checkpoint.
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

    /// Stores this rank's share; rank 0 makes all of them a checkpoint once all are stored.
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
        let mine = |name: &String| merged.owners.get(name) == Some(&ranks.rank());
        let stored = transfer.store(files.iter().filter(|(name, _)| mine(name)));
        let stored = stored.and_then(|stored| {
            let is_same =
                |(name, entry): (&String, &FileEntry)| shares[ranks.rank()].files[name] == *entry;
            match stored.iter().all(is_same) {
                true => Ok(stored),
                false => Err("its files change while they are stored".into()),
            }
        });
        let stored = settle(ranks, "stored", stored);
        let is_lead = ranks.rank() == 0;
        if let Err(error) = stored {
            // All ranks know of it.
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
