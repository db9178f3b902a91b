//! Uploads and deletes checkpoints of arbitrary files.

use std::collections::BTreeMap;
use std::path::Path;

use serde_json::Value;
use stoker_api::contract::FileEntry;
use stoker_api::names::checkpoint_name;
use stoker_storage::layout;

use super::Session;
use super::options::Upload;
use super::shards::{Shard, merge};
use super::transfer::{CheckpointUpload, TemporaryFolder, file_entry, list_files};
use crate::Result;
use crate::checkpoint::{CheckpointError, SaveRequest, delete, run_blocking};
use crate::collective::all_gather_cbor;

impl Session<'_> {
    /// Stores the files in `folder` and its subdirectories as a checkpoint, and returns its name,
    /// the same on all ranks.
    ///
    /// The checkpoint is complete when this returns: its manifest is written last, after all
    /// metrics reported so far. The runner retains the latest and best checkpoints, as with `fit`.
    /// If the program has no storage, this prints a message and stores nothing. If the last
    /// checkpoint was at the same batch, this stores nothing and returns that checkpoint's name.
    ///
    /// Needs up to 150 MiB of memory for files of at most 70 GiB.
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
    /// - The ranks' shards conflict; the error lists every conflict.
    /// - The storage fails.
    pub fn upload(&self, folder: impl AsRef<Path>, upload: Upload) -> Result<String> {
        let (context, folder) = (self.context, folder.as_ref());
        if context.io().has_loop {
            let text = "cannot upload a checkpoint: `fit` and `training` save their own; add files \
                        to those with `Callback::on_checkpoint`";
            return Err(text.into());
        }
        let name = checkpoint_name(upload.batches, context.config.attempt);
        let Some((rt, store)) = context.io().checkpoint_store() else {
            let text = format!("checkpoint {name} is not stored: the program has no directory");
            context.io().terminal.print_line(&text);
            return Ok(name);
        };
        let ranks = context.distributed();
        if ranks.rank() > 0 && !upload.is_sharded {
            return Ok(name);
        }
        // On a stop right after a checkpoint, the program stores again; there is nothing to add.
        let stored = context.io().last_saved().filter(|saved| saved.name == name);
        let stored = match upload.is_sharded {
            true => all_gather_cbor(ranks.collective(), "upload", stored)?.swap_remove(0),
            false => stored,
        };
        if stored.is_some() {
            return Ok(name);
        }
        let transfer = CheckpointUpload { name: &name, rt: &rt, store: &store };
        let transfer_files = || match upload.is_sharded && ranks.size() > 1 {
            true => self.store_shards(&transfer, folder, upload),
            false => self.store_all(&transfer, folder, upload),
        };
        ranks.progress.while_waiting(transfer_files)?;
        Ok(name)
    }

    /// Calls `write` to fill an empty directory, and makes a checkpoint of it like
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
        let folder = TemporaryFolder::new()?;
        if self.context.distributed().rank() == 0 || upload.is_sharded {
            write(&folder.0)?;
        }
        self.upload(&folder.0, upload)
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
        let Some((rt, store)) = context.io().checkpoint_store() else { return Ok(()) };
        if context.distributed().rank() > 0 {
            return Ok(());
        }
        let latest = context.io().latest_checkpoint();
        if latest.as_deref() == Some(name) {
            let text = format!(
                "cannot delete checkpoint {name}: it is the latest, from which a restart resumes"
            );
            return Err(text.into());
        }
        let (owned, named) = (store.clone(), name.to_owned());
        let deleted = run_blocking(&rt, name, async move {
            let manifest = layout::manifest_path(&owned.trial_path, &named);
            let failed = |source| CheckpointError::Storage { name: named.clone(), source };
            if !owned.storage.exists(&manifest).await.map_err(failed)? {
                return Ok(false);
            }
            delete(&owned.storage, &owned.trial_path, &named).await.map_err(failed)?;
            Ok(true)
        })?;
        match deleted {
            true => {
                context.io().record_deleted(name);
                Ok(())
            }
            false => Err(format!("checkpoint {name} not found in {}", store.trial_path).into()),
        }
    }

    /// Stores this rank's files and makes them a checkpoint.
    fn store_all(
        &self,
        transfer: &CheckpointUpload<'_>,
        folder: &Path,
        upload: Upload,
    ) -> Result<()> {
        transfer.check_new()?;
        let files = list_files(folder, &upload.select)?;
        let stored = transfer.upload_files(&files);
        let committed = stored.and_then(|files| self.commit(transfer, &upload, files, None));
        if committed.is_err() {
            transfer.delete_files(files.into_keys());
        }
        committed
    }

    /// Stores this rank's shard. When all shards are stored, rank 0 writes the manifest.
    fn store_shards(
        &self,
        transfer: &CheckpointUpload<'_>,
        folder: &Path,
        upload: Upload,
    ) -> Result<()> {
        let ranks = self.context.distributed();
        let local = (|| -> Result<_> {
            if ranks.rank() == 0 {
                transfer.check_new()?;
            }
            let files = list_files(folder, &upload.select)?;
            let mut entries = BTreeMap::new();
            for (name, path) in &files {
                entries.insert(name.clone(), file_entry(path)?);
            }
            Ok((files, Shard { files: entries, metadata: upload.metadata.clone() }))
        })();
        let (files, shard) = match local {
            Ok((files, shard)) => (files, Ok(shard)),
            Err(error) => (BTreeMap::new(), Err(error)),
        };
        let shards = ranks.gather_results("upload", shard)?;
        let merged = merge(&shards)
            .map_err(|why| format!("checkpoint {}: ranks disagree: {why}", transfer.name))?;
        let is_owned = |name: &String| merged.owners.get(name) == Some(&ranks.rank());
        let stored = transfer.upload_files(files.iter().filter(|(name, _)| is_owned(name)));
        let stored = stored.and_then(|stored| {
            let is_same =
                |(name, entry): (&String, &FileEntry)| shards[ranks.rank()].files[name] == *entry;
            match stored.iter().all(is_same) {
                true => Ok(stored),
                false => Err("the files changed during the upload".into()),
            }
        });
        let stored = ranks.gather_results("stored", stored);
        let is_lead = ranks.rank() == 0;
        if let Err(error) = stored {
            // All ranks get this error, so rank 0 cleans up for all.
            if is_lead {
                transfer.delete_files(merged.owners.into_keys());
            }
            return Err(error);
        }
        let mut committed = Ok(());
        if is_lead {
            let entry = |(name, owner): (&String, &usize)| {
                (name.clone(), shards[*owner].files[name].clone())
            };
            let files = merged.owners.iter().map(entry).collect();
            committed = self.commit(transfer, &upload, files, Some(merged.metadata.clone()));
        }
        if committed.is_err() {
            transfer.delete_files(merged.owners.into_keys());
        }
        ranks.gather_results("committed", committed).map(drop)
    }

    fn commit(
        &self,
        transfer: &CheckpointUpload<'_>,
        upload: &Upload,
        files: BTreeMap<String, FileEntry>,
        metadata: Option<BTreeMap<String, Value>>,
    ) -> Result<()> {
        let context = self.context;
        let save = {
            let mut io = context.io();
            io.report_last_validation();
            SaveRequest {
                batches: upload.batches,
                metric: io.metric_at(&context.config, upload.batches),
                validation: io.reported_validation_at(upload.batches),
                unsent: io.unsent(),
                metadata: metadata.unwrap_or_else(|| upload.metadata.clone()),
                after: io.pending_row_writes(),
            }
        };
        let (store, name) = (transfer.store.clone(), transfer.name.to_owned());
        let saved = run_blocking(transfer.rt, transfer.name, async move {
            store.commit(&name, save, files).await
        })?;
        context.io().report_checkpoint(saved);
        Ok(())
    }
}
