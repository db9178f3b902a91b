//! Checkpoints: written in the background, verified when restored.
//!
//! A checkpoint is a folder of files with a manifest that completes it. The manifest is written
//! last: after all files, and after the metrics up to the same batch. An interrupted save leaves
//! files without a manifest, which are ignored.

use std::collections::{BTreeMap, VecDeque};
use std::sync::mpsc::{Receiver, TryRecvError, sync_channel};

use bytes::Bytes;
use serde_json::Value;
use stoker_api::contract::{CheckpointRef, FileEntry, Manifest, Report, TrialConfig};
use stoker_api::names::MANIFEST;
use stoker_storage::segments::PendingFlush;
use stoker_storage::{Storage, StorageError, hash, layout};
use tokio::runtime::Handle;
use tokio::task::JoinSet;

mod deletion;
mod error;
mod folder;
mod pinned;
mod retention;
mod source;

pub(crate) use deletion::{delete, delete_each};
pub use error::CheckpointError;
pub use folder::load_folder;
pub(crate) use retention::{Keep, Retention, RetentionTask};
pub use source::CheckpointSource;

/// Version of the manifest format; does not cover the contents of the other files.
const FORMAT: u32 = 1;

/// The files of a checkpoint, by name.
pub type Parts = BTreeMap<String, Bytes>;

/// Closure that produces the files of a checkpoint. Runs on a separate thread.
pub type Make = Box<dyn FnOnce() -> Result<Parts, String> + Send>;

/// Contents of a new checkpoint, except its files.
#[derive(Debug, Default)]
pub struct Save {
    /// Number of global batches trained.
    pub batches: u64,
    /// Searched metric of a validation at the same batch, if there was one.
    pub metric: Option<f64>,
    /// Reports that the runner has not answered yet.
    pub unsent: Vec<Report>,
    /// Metadata from the user's program, stored in the manifest.
    pub metadata: BTreeMap<String, Value>,
    /// Writes that must complete before the manifest is written: the metrics so far
    /// ([`MetricsWriter::stored`]). If one fails, the save fails.
    ///
    /// [`MetricsWriter::stored`]: crate::metrics::MetricsWriter::stored
    pub after: Vec<PendingFlush>,
}

/// A complete checkpoint, whose manifest is written.
#[derive(Clone, Debug, PartialEq)]
pub struct Saved {
    /// Name of the checkpoint's folder.
    pub name: String,
    /// Number of global batches trained.
    pub batches: u64,
    /// SHA-256 of the manifest, in hex.
    pub manifest_sha256: String,
    /// Total size of the files, in bytes.
    pub bytes: u64,
    /// Metric from [`Save::metric`].
    pub metric: Option<f64>,
}

/// Result of [`Checkpoints::restore`].
#[derive(Clone, Debug, Default)]
pub struct Restored {
    /// First checkpoint that is complete and intact: its name, manifest and files.
    pub checkpoint: Option<(String, Manifest, Parts)>,
    /// Checkpoints tried before it, with the reason why each was refused.
    pub refused: BTreeMap<String, String>,
}

type Outcome = Result<Saved, CheckpointError>;

/// Saves and restores the checkpoints of one trial. One save is in flight at a time.
#[derive(Debug)]
pub struct Checkpoints {
    rt: Handle,
    place: Place,
    in_flight: Option<(String, Receiver<Outcome>)>,
    done: VecDeque<Saved>,
}

/// Storage, path and identity of a trial's checkpoints.
#[derive(Clone, Debug)]
pub(crate) struct Place {
    pub(crate) storage: Storage,
    pub(crate) trial_path: String,
    experiment_id: String,
    trial: u32,
    pub(crate) attempt: u32,
}

impl Checkpoints {
    /// Creates access to the checkpoints of `config`'s trial. Another thread must drive `rt`, with
    /// I/O and time enabled.
    pub fn new(rt: Handle, storage: Storage, config: &TrialConfig) -> Self {
        let place = Place {
            storage,
            trial_path: config.storage.trial_path.clone(),
            experiment_id: config.experiment_id.clone(),
            trial: config.trial,
            attempt: config.attempt,
        };
        Self { rt, place, in_flight: None, done: VecDeque::new() }
    }

    /// Returns the storage, path and identity of the checkpoints.
    pub(crate) fn place(&self) -> &Place {
        &self.place
    }

    /// Starts a save in the background. If another save is in flight, waits for it first;
    /// [`poll`](Self::poll) still returns its outcome. `make`, hashing and upload run on other
    /// threads.
    ///
    /// # Errors
    ///
    /// Returns the error of the previous save; the new one is then not started.
    pub fn begin(&mut self, save: Save, make: Make) -> Result<(), CheckpointError> {
        self.wait()?;
        let name = layout::checkpoint_name(save.batches, self.place.attempt);
        let (sender, receiver) = sync_channel(1);
        self.in_flight = Some((name.clone(), receiver));
        let place = self.place.clone();
        self.rt.spawn(async move {
            let outcome = match made(&name, make).await {
                Ok(parts) => place.save_or_leave_nothing(&name, save, parts).await,
                Err(error) => Err(error),
            };
            // Ignore the error: a caller that exited needs no outcome.
            let _ = sender.send(outcome);
        });
        Ok(())
    }

    /// Returns a checkpoint completed since the last call, oldest first. Never blocks.
    ///
    /// # Errors
    ///
    /// Returns the error of a failed save, once.
    pub fn poll(&mut self) -> Result<Option<Saved>, CheckpointError> {
        if let Some((name, receiver)) = &self.in_flight {
            let outcome = match receiver.try_recv() {
                Ok(outcome) => Some(outcome),
                Err(TryRecvError::Empty) => None,
                Err(TryRecvError::Disconnected) => {
                    Some(Err(CheckpointError::ShutDown { name: name.clone() }))
                }
            };
            if let Some(outcome) = outcome {
                self.in_flight = None;
                self.done.push_back(outcome?);
            }
        }
        Ok(self.done.pop_front())
    }

    /// Waits for the save in flight, then returns the same as [`poll`](Self::poll). Call until it
    /// returns `None`.
    ///
    /// # Errors
    ///
    /// Returns the error of a failed save, once.
    pub fn finish(&mut self) -> Result<Option<Saved>, CheckpointError> {
        self.wait()?;
        Ok(self.done.pop_front())
    }

    /// Restores the first complete checkpoint of `refs` and reports why each one before it was
    /// refused. Verifies every file against its manifest, and the manifest against the reference.
    ///
    /// # Errors
    ///
    /// Fails if the storage is unavailable, which does not mean that a checkpoint is corrupt.
    pub fn restore(&self, refs: &[CheckpointRef]) -> Result<Restored, CheckpointError> {
        let mut restored = Restored::default();
        for wanted in refs {
            let (sender, receiver) = sync_channel(1);
            let (place, task_wanted) = (self.place.clone(), wanted.clone());
            self.rt.spawn(async move {
                let _ = sender.send(place.load(&task_wanted).await);
            });
            let name = wanted.name.clone();
            match receiver.recv().unwrap_or(Err(CheckpointError::ShutDown { name: name.clone() })) {
                Ok((manifest, parts)) => {
                    restored.checkpoint = Some((name, manifest, parts));
                    break;
                }
                Err(CheckpointError::Broken { name, reason }) => {
                    restored.refused.insert(name, reason);
                }
                Err(error) => return Err(error),
            }
        }
        Ok(restored)
    }

    fn wait(&mut self) -> Result<(), CheckpointError> {
        if let Some((name, receiver)) = self.in_flight.take() {
            let outcome = receiver.recv().unwrap_or(Err(CheckpointError::ShutDown { name }));
            self.done.push_back(outcome?);
        }
        Ok(())
    }
}

async fn made(name: &str, make: Make) -> Result<Parts, CheckpointError> {
    let failed = |reason| CheckpointError::Make { name: name.to_owned(), reason };
    let made = tokio::task::spawn_blocking(make).await;
    let parts = made.map_err(|error| failed(error.to_string()))?.map_err(failed)?;
    match parts.contains_key(MANIFEST) {
        true => Err(failed(format!("the file name {MANIFEST} is reserved; use another name"))),
        false => Ok(parts),
    }
}

impl Place {
    /// Saves, and cleans up after a failure as far as the storage allows. Otherwise a trial that
    /// retries repeatedly would fill the storage with partial checkpoints.
    async fn save_or_leave_nothing(&self, name: &str, save: Save, parts: Parts) -> Outcome {
        let files: Vec<String> = parts.keys().cloned().collect();
        let outcome = self.save(name, save, parts).await;
        if outcome.is_err() {
            let storage = self.storage.clone().with_few_retries();
            // The manifest may exist although its write reported an error. Delete it first, so that
            // a manifest never remains without its files.
            let manifest = layout::manifest_path(&self.trial_path, name);
            if storage.delete(&manifest).await.is_ok() {
                for file in files {
                    let path = layout::checkpoint_file(&self.trial_path, name, &file);
                    // Ignore the error: the error of the save is the one to report.
                    let _ = storage.delete(&path).await;
                }
            }
        }
        outcome
    }

    async fn save(&self, name: &str, save: Save, parts: Parts) -> Outcome {
        let files = self.upload(name, parts).await?;
        self.commit(name, save, files).await
    }

    /// Completes a checkpoint whose files are stored, by writing its manifest.
    pub(crate) async fn commit(
        &self,
        name: &str,
        save: Save,
        files: BTreeMap<String, FileEntry>,
    ) -> Outcome {
        let failed = |source| CheckpointError::Storage { name: name.to_owned(), source };
        for stored in save.after {
            stored.wait().await.map_err(failed)?;
        }
        let bytes = files.values().map(|entry| entry.bytes).sum();
        let manifest = Manifest {
            format: FORMAT,
            experiment_id: self.experiment_id.clone(),
            trial: self.trial,
            attempt: self.attempt,
            batches: save.batches,
            metric: save.metric.map(stoker_api::number::format),
            files,
            unsent: save.unsent,
            metadata: save.metadata,
        };
        let text = serde_json::to_vec_pretty(&manifest).map_err(|error| CheckpointError::Make {
            name: name.to_owned(),
            reason: error.to_string(),
        })?;
        let manifest_sha256 = hash::sha256_hex(&text);
        let path = layout::manifest_path(&self.trial_path, name);
        self.storage.put(&path, text.into()).await.map_err(failed)?;
        let (batches, metric) = (save.batches, save.metric);
        Ok(Saved { name: name.to_owned(), batches, manifest_sha256, bytes, metric })
    }

    /// Hashes and stores all files concurrently.
    pub(crate) async fn upload(
        &self,
        name: &str,
        parts: Parts,
    ) -> Result<BTreeMap<String, FileEntry>, CheckpointError> {
        let mut uploads = JoinSet::new();
        for (file, bytes) in parts {
            let storage = self.storage.clone();
            let path = layout::checkpoint_file(&self.trial_path, name, &file);
            uploads.spawn(async move {
                let hashed = bytes.clone();
                let sha256 = tokio::task::spawn_blocking(move || hash::sha256_hex(&hashed));
                let size = bytes.len() as u64;
                let stored = storage.put(&path, bytes).await;
                (file, size, sha256.await, stored)
            });
        }
        let shut_down = || CheckpointError::ShutDown { name: name.to_owned() };
        let mut files = BTreeMap::new();
        while let Some(upload) = uploads.join_next().await {
            let (file, bytes, sha256, stored) = upload.map_err(|_| shut_down())?;
            stored.map_err(|source| CheckpointError::Storage { name: name.to_owned(), source })?;
            let sha256 = sha256.map_err(|_| shut_down())?;
            files.insert(file, FileEntry { bytes, sha256 });
        }
        Ok(files)
    }

    async fn load(&self, wanted: &CheckpointRef) -> Result<(Manifest, Parts), CheckpointError> {
        let manifest = self.manifest(wanted).await?;
        let parts = self.parts(&wanted.name, &manifest).await?;
        Ok((manifest, parts))
    }

    /// Reads and verifies the manifest of a checkpoint of this trial.
    pub(crate) async fn manifest(
        &self,
        wanted: &CheckpointRef,
    ) -> Result<Manifest, CheckpointError> {
        let name = &wanted.name;
        let broken = |reason| CheckpointError::Broken { name: name.clone(), reason };
        let text = self.fetch(name, MANIFEST).await?;
        let actual = hash::sha256_hex(&text);
        if actual != wanted.manifest_sha256 {
            return Err(broken(format!(
                "{MANIFEST} has SHA-256 {actual}, but the record has {}",
                wanted.manifest_sha256
            )));
        }
        let manifest = parse(&text).map_err(broken)?;
        if (&manifest.experiment_id, manifest.trial) != (&self.experiment_id, self.trial) {
            return Err(broken(format!(
                "{MANIFEST} is of experiment {} trial {}, expected experiment {} trial {}",
                manifest.experiment_id, manifest.trial, self.experiment_id, self.trial
            )));
        }
        Ok(manifest)
    }

    /// Reads and verifies the files listed in a manifest.
    async fn parts(&self, name: &str, manifest: &Manifest) -> Result<Parts, CheckpointError> {
        let mut fetches = JoinSet::new();
        for (file, entry) in manifest.files.clone() {
            let (place, name) = (self.clone(), name.to_owned());
            fetches.spawn(async move {
                let bytes = place.fetch(&name, &file).await?;
                let check = move || verify(&file, &entry, &bytes).map(|()| (file, bytes));
                match tokio::task::spawn_blocking(check).await {
                    Ok(checked) => {
                        checked.map_err(|reason| CheckpointError::Broken { name, reason })
                    }
                    Err(_) => Err(CheckpointError::ShutDown { name }),
                }
            });
        }
        let mut parts = Parts::new();
        while let Some(fetched) = fetches.join_next().await {
            let shut_down = |_| CheckpointError::ShutDown { name: name.to_owned() };
            let (file, bytes) = fetched.map_err(shut_down)??;
            parts.insert(file, bytes);
        }
        Ok(parts)
    }

    pub(crate) async fn fetch(&self, name: &str, file: &str) -> Result<Bytes, CheckpointError> {
        let path = layout::checkpoint_file(&self.trial_path, name, file);
        let name = name.to_owned();
        self.storage.get(&path).await.map_err(|source| match source {
            StorageError::NotFound { .. } => {
                CheckpointError::Broken { name, reason: format!("{file} is missing") }
            }
            source => CheckpointError::Storage { name, source },
        })
    }
}

fn parse(text: &[u8]) -> Result<Manifest, String> {
    let manifest: Manifest =
        serde_json::from_slice(text).map_err(|error| format!("cannot read {MANIFEST}: {error}"))?;
    match manifest.format {
        FORMAT => Ok(manifest),
        format => Err(format!(
            "{MANIFEST} has format {format}, but this version reads format {FORMAT}; use the \
             version that wrote it"
        )),
    }
}

fn verify(file: &str, entry: &FileEntry, bytes: &[u8]) -> Result<(), String> {
    if bytes.len() as u64 != entry.bytes {
        let actual = bytes.len();
        return Err(format!("{file} has {actual} bytes, but {MANIFEST} lists {}", entry.bytes));
    }
    let actual = hash::sha256_hex(bytes);
    if actual != entry.sha256 {
        return Err(format!("{file} has SHA-256 {actual}, but {MANIFEST} lists {}", entry.sha256));
    }
    Ok(())
}

#[cfg(test)]
mod tests;
