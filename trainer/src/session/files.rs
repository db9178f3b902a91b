//! Checkpoints of any files.

use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::mpsc::sync_channel;

use bytes::Bytes;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;
use stoker_api::contract::{CheckpointRef, FileEntry, Manifest, ReportEvent};
use stoker_api::names::{MANIFEST, checkpoint_name};
use stoker_storage::{hash, layout};
use tokio::runtime::Handle;

use super::Session;
use super::shards::{Share, merge};
use crate::Result;
use crate::checkpoint::{CheckpointError, CheckpointSource, Parts, Place, Save};
use crate::collective::{Collective, Doing, exchange};
use crate::error::PeerFailed;

/// Bytes of files that are held in memory at once, beside the first of them.
const TOGETHER_BYTES_MAX: u64 = 64 << 20;
/// Files that are stored at once.
const TOGETHER_MAX: usize = 16;

/// Whether a file belongs to it, by its name in the checkpoint.
type Select = Box<dyn Fn(&str) -> bool>;

/// What a checkpoint is to hold, beside files.
pub struct Upload {
    batches: u64,
    metadata: BTreeMap<String, Value>,
    is_sharded: bool,
    select: Select,
}

impl fmt::Debug for Upload {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Upload")
            .field("batches", &self.batches)
            .field("metadata", &self.metadata)
            .field("is_sharded", &self.is_sharded)
            .finish_non_exhaustive()
    }
}

impl Upload {
    /// After so many global batches. An attempt makes one checkpoint at a batch.
    pub fn at(batches: u64) -> Self {
        Self { batches, metadata: BTreeMap::new(), is_sharded: false, select: Box::new(|_| true) }
    }

    /// Adds a value to what [`Session::metadata`] gives.
    #[must_use]
    pub fn metadata(mut self, key: &str, value: impl Into<Value>) -> Self {
        self.metadata.insert(key.into(), value.into());
        self
    }

    /// Every rank gives a share, not rank 0 alone: the checkpoint has all their files and metadata. What
    /// several ranks give must be the same.
    #[must_use]
    pub fn sharded(self) -> Self {
        Self { is_sharded: true, ..self }
    }

    /// Only files for whose name, such as `layers/0.bin`, this is true.
    #[must_use]
    pub fn select(self, select: impl Fn(&str) -> bool + 'static) -> Self {
        Self { select: Box::new(select), ..self }
    }
}

/// Which checkpoint to fetch, and what of it.
pub struct Download {
    from: CheckpointSource,
    is_shared: bool,
    select: Select,
}

impl fmt::Debug for Download {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Download")
            .field("from", &self.from)
            .field("is_shared", &self.is_shared)
            .finish_non_exhaustive()
    }
}

impl<T: Into<CheckpointSource>> From<T> for Download {
    fn from(from: T) -> Self {
        Self::new(from)
    }
}

impl Download {
    /// All of it, once for all ranks of a machine, which name the same folder: collective over them.
    pub fn new(from: impl Into<CheckpointSource>) -> Self {
        Self { from: from.into(), is_shared: true, select: Box::new(|_| true) }
    }

    /// Each rank fetches for itself, whatever others do.
    #[must_use]
    pub fn unshared(self) -> Self {
        Self { is_shared: false, ..self }
    }

    /// Only files for whose name this is true.
    #[must_use]
    pub fn select(self, select: impl Fn(&str) -> bool + 'static) -> Self {
        Self { select: Box::new(select), ..self }
    }
}

/// What is known of a checkpoint.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Saved {
    /// Global batches trained.
    pub batches: u64,
    /// What the program added.
    pub metadata: BTreeMap<String, Value>,
    /// Its files, with their sizes in bytes.
    pub files: BTreeMap<String, u64>,
}

impl From<&Manifest> for Saved {
    fn from(manifest: &Manifest) -> Self {
        let size = |(file, entry): (&String, &FileEntry)| (file.clone(), entry.bytes);
        Self {
            batches: manifest.batches,
            metadata: manifest.metadata.clone(),
            files: manifest.files.iter().map(size).collect(),
        }
    }
}

impl Session<'_> {
    /// Makes a checkpoint of the files in `folder` and below it, and gives its name, which is the same on
    /// all ranks. It is whole once this returns: its manifest is written last, after the metrics that were
    /// reported until now. The runner keeps the latest and the best, as those of `fit`. Where the program
    /// keeps no checkpoints, it says so and stores nothing.
    ///
    /// Collective where it is [`sharded`](Upload::sharded); else ranks other than 0 store nothing and do
    /// not wait.
    ///
    /// # Errors
    ///
    /// A file cannot be read, or is named `manifest.json`; this attempt has a checkpoint at these batches;
    /// ranks' shares do not fit together, with every conflict; the storage failed.
    pub fn upload(&self, folder: impl AsRef<Path>, upload: Upload) -> Result<String> {
        let (context, folder) = (self.context, folder.as_ref());
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
        let chosen = settle(ranks.collective(), "restore_path", chosen)?.swap_remove(0);
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
        context.outlet().batches = manifest.batches;
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
    /// A runner that keeps a record of it learns of it when it next looks. Ranks other than 0 do nothing.
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
            // Without its manifest it is no checkpoint any more.
            owned.storage.delete(&manifest).await.map_err(failed)?;
            let folder = layout::checkpoint_path(&owned.trial_path, &named);
            owned.storage.delete_folder(&folder).await.map_err(failed)?;
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
        let (ranks, all) = (self.context.distributed(), self.context.distributed().collective());
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
        let shares = settle(all, "upload", share)?;
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
        let stored = settle(all, "stored", stored);
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
        settle(all, "committed", committed).map(drop)
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

/// What each rank did. Where one could not, its own error there, and on the others that it could not.
fn settle<T: Clone + Serialize + DeserializeOwned>(
    ranks: &dyn Collective,
    place: &str,
    mine: Result<T>,
) -> Result<Vec<T>> {
    let told = mine.as_ref().map_err(ToString::to_string).cloned();
    let all = exchange(ranks, place, told)?;
    mine?;
    let mut done = vec![];
    for (rank, outcome) in all.into_iter().enumerate() {
        done.push(outcome.map_err(|why| PeerFailed(format!("rank {rank}: {why}")))?);
    }
    Ok(done)
}

/// A checkpoint that is being stored.
struct Transfer<'a> {
    name: &'a str,
    rt: &'a Handle,
    place: &'a Place,
}

impl Transfer<'_> {
    fn check_new(&self) -> Result<()> {
        let (place, name) = (self.place.clone(), self.name.to_owned());
        let is_there = wait(self.rt, self.name, async move {
            let manifest = layout::manifest_path(&place.trial_path, &name);
            let failed = |source| CheckpointError::Storage { name, source };
            place.storage.exists(&manifest).await.map_err(failed)
        })?;
        match is_there {
            false => Ok(()),
            true => Err(format!(
                "checkpoint {} is there already: an attempt makes one at a batch",
                self.name
            )
            .into()),
        }
    }

    /// Stores files, a few at a time.
    fn store<'f>(
        &self,
        files: impl IntoIterator<Item = (&'f String, &'f PathBuf)>,
    ) -> Result<BTreeMap<String, FileEntry>> {
        let mut stored = BTreeMap::new();
        let (mut together, mut bytes) = (Parts::new(), 0);
        for (name, path) in files {
            let content = read(path)?;
            bytes += content.len() as u64;
            together.insert(name.clone(), content);
            if bytes >= TOGETHER_BYTES_MAX || together.len() >= TOGETHER_MAX {
                stored.extend(self.store_together(std::mem::take(&mut together))?);
                bytes = 0;
            }
        }
        stored.extend(self.store_together(together)?);
        Ok(stored)
    }

    fn store_together(&self, parts: Parts) -> Result<BTreeMap<String, FileEntry>> {
        let (place, name) = (self.place.clone(), self.name.to_owned());
        Ok(wait(self.rt, self.name, async move { place.upload(&name, parts).await })?)
    }

    /// Deletes what a checkpoint that came to nothing has left, as far as the storage lets.
    fn forget(&self, files: impl Iterator<Item = String>) {
        let (place, name) = (self.place.clone(), self.name.to_owned());
        let files: Vec<String> = files.collect();
        let storage = place.storage.clone().impatient();
        let forgotten = wait(self.rt, self.name, async move {
            let manifest = layout::manifest_path(&place.trial_path, &name);
            // The manifest's answer may have been lost: nothing of a whole checkpoint may go before it.
            if storage.delete(&manifest).await.is_ok() {
                for file in files {
                    let _ = storage
                        .delete(&layout::checkpoint_file(&place.trial_path, &name, &file))
                        .await;
                }
            }
            Ok(())
        });
        // What it came to nothing for is the error to tell.
        let _ = forgotten;
    }
}

/// Waits for what the background does.
fn wait<T: Send + 'static>(
    rt: &Handle,
    name: &str,
    act: impl Future<Output = Result<T, CheckpointError>> + Send + 'static,
) -> Result<T, CheckpointError> {
    let (sender, receiver) = sync_channel(1);
    rt.spawn(async move {
        let _ = sender.send(act.await);
    });
    receiver.recv().unwrap_or(Err(CheckpointError::ShutDown { name: name.to_owned() }))
}

fn fetch(
    rt: &Handle,
    place: &Place,
    wanted: &CheckpointRef,
    folder: &Path,
) -> Result<Manifest, CheckpointError> {
    let (place, folder, wanted) = (place.clone(), folder.to_owned(), wanted.clone());
    wait(rt, &wanted.name.clone(), async move {
        let manifest = place.manifest(&wanted).await?;
        place.write_folder(&wanted.name, &manifest, &folder, |_| true).await?;
        Ok(manifest)
    })
}

/// The files in and below a folder: by name, with their paths.
fn listed(folder: &Path, select: &Select) -> Result<BTreeMap<String, PathBuf>> {
    let (mut found, mut folders) = (BTreeMap::new(), vec![(String::new(), folder.to_owned())]);
    while let Some((above, folder)) = folders.pop() {
        let unreadable = |error| format!("folder {} cannot be read: {error}", folder.display());
        for entry in std::fs::read_dir(&folder).map_err(unreadable)? {
            let entry = entry.map_err(unreadable)?;
            let Some(name) = entry.file_name().to_str().map(|it| format!("{above}{it}")) else {
                let path = entry.path();
                return Err(format!("{} has no name in UTF-8", path.display()).into());
            };
            if entry.file_type().map_err(unreadable)?.is_dir() {
                folders.push((format!("{name}/"), entry.path()));
            } else if name == MANIFEST {
                let path = entry.path();
                let text =
                    format!("{}: no file of a checkpoint may be named {MANIFEST}", path.display());
                return Err(text.into());
            } else if select(&name) {
                found.insert(name, entry.path());
            }
        }
    }
    Ok(found)
}

fn read(path: &Path) -> Result<Bytes> {
    let read = std::fs::read(path);
    Ok(read.map_err(|error| format!("{} cannot be read: {error}", path.display()))?.into())
}

fn entry_of(path: &Path) -> Result<FileEntry> {
    let content = read(path)?;
    Ok(FileEntry { bytes: content.len() as u64, sha256: hash::sha256_hex(&content) })
}

/// A folder that is gone when this is.
struct Temporary(PathBuf);

impl Temporary {
    fn new() -> Result<Self> {
        use std::sync::atomic::{AtomicU64, Ordering};
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = format!("stoker-checkpoint-{}-{number}", std::process::id());
        let path = std::env::temp_dir().join(name);
        let failed = |error| format!("folder {} cannot be made: {error}", path.display());
        if path.exists() {
            // Of a process that is gone and had this one's number.
            std::fs::remove_dir_all(&path).map_err(failed)?;
        }
        std::fs::create_dir_all(&path).map_err(failed)?;
        Ok(Self(path))
    }
}

impl Drop for Temporary {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}
