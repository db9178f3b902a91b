//! Checkpoints: written in the background, verified when restored.
//!
//! A checkpoint is a directory of files with a manifest that completes it. The manifest is written
//! last: after all files, and after the metrics up to the same batch. An interrupted save leaves
//! files without a manifest, which are ignored.

use std::collections::{BTreeMap, VecDeque};
use std::sync::mpsc::{Receiver, RecvTimeoutError, sync_channel};
use std::time::Duration;

use bytes::Bytes;
use serde_json::{Value, json};
use stoker_api::contract::{CheckpointRef, FileEntry, FileHash, Manifest, Report, TrialConfig};
use stoker_api::names::MANIFEST;
use stoker_storage::segments::PendingFlush;
use stoker_storage::{Storage, hash, layout};
use tokio::runtime::Handle;

mod choice;
mod deletion;
mod error;
mod file_parts;
mod folder;
mod pinned;
mod retention;
mod shared_files;
mod source;
mod store;
mod unreported;

pub(crate) use choice::{Choice, load_first, run_blocking};
pub(crate) use deletion::{delete, delete_each, delete_interrupted};
pub use error::CheckpointError;
pub(crate) use error::check_source;
pub use file_parts::FileParts;
pub use folder::load_folder;
pub(crate) use retention::{Retention, RetentionLimits, RetentionTask};
pub(crate) use shared_files::{SharedFiles, SharedIndex};
pub use source::CheckpointSource;
pub(crate) use store::CheckpointStore;
pub(crate) use unreported::UnreportedCheckpoint;

/// The files of a restored checkpoint, by name.
pub type CheckpointContents = BTreeMap<String, Bytes>;

/// The files of a checkpoint to save, by name.
pub type NewContents = BTreeMap<String, FileParts>;

/// Closure that produces the files of a checkpoint. Runs on a separate thread.
pub type ContentsFn = Box<dyn FnOnce() -> Result<NewContents, String> + Send>;

/// Contents of a new checkpoint, except its files.
#[derive(Debug, Default)]
pub struct SaveRequest {
    /// Number of global batches trained.
    pub batches: u64,
    /// Searched metric of a validation at the same batch, if there was one.
    pub metric: Option<f64>,
    /// Metrics of that validation, as in [`Manifest::validation`].
    pub validation: BTreeMap<String, String>,
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
pub struct SavedCheckpoint {
    /// Name of the checkpoint's directory.
    pub name: String,
    /// Number of global batches trained.
    pub batches: u64,
    /// SHA-256 of the manifest, in hex.
    pub manifest_sha256: String,
    /// Total size of the files, in bytes.
    pub bytes: u64,
    /// Metric from [`SaveRequest::metric`].
    pub metric: Option<f64>,
}

/// Result of [`Checkpointer::restore`].
#[derive(Clone, Debug, Default)]
pub struct Restored {
    /// First checkpoint that is complete and intact: its name, manifest and files.
    pub checkpoint: Option<(String, Manifest, CheckpointContents)>,
    /// Reference of this checkpoint.
    pub chosen: Option<CheckpointRef>,
    /// Checkpoints tried before it, with the reason why each was refused.
    pub refused: BTreeMap<String, String>,
    /// Error of the first of them that another version of Stoker wrote.
    pub unsupported: Option<CheckpointError>,
}

type SaveOutcome = Result<SavedCheckpoint, CheckpointError>;

/// Saves and restores the checkpoints of one trial. One save is in flight at a time.
#[derive(Debug)]
pub struct Checkpointer {
    rt: Handle,
    store: CheckpointStore,
    in_flight: Option<(String, Receiver<SaveOutcome>)>,
    done: VecDeque<SavedCheckpoint>,
}

impl Checkpointer {
    /// Creates access to the checkpoints of `config`'s trial. Another thread must drive `rt`, with
    /// I/O and time enabled.
    pub fn new(rt: Handle, storage: Storage, config: &TrialConfig) -> Self {
        let store = CheckpointStore {
            storage,
            trial_path: config.storage.trial_path.clone(),
            experiment_id: config.experiment_id.clone(),
            trial: config.trial,
            attempt: config.attempt,
            sample_sha256: sample_sha256(config),
        };
        Self { rt, store, in_flight: None, done: VecDeque::new() }
    }

    /// Returns the storage, path and identity of the checkpoints.
    pub(crate) fn store(&self) -> &CheckpointStore {
        &self.store
    }

    /// Starts a save in the background. If another save is in flight, waits for it first;
    /// [`poll`](Self::poll) still returns its outcome. `produce`, hashing and upload run on other
    /// threads.
    ///
    /// # Errors
    ///
    /// Returns the error of the previous save; the new one is then not started.
    pub fn begin(
        &mut self,
        request: SaveRequest,
        produce: ContentsFn,
    ) -> Result<(), CheckpointError> {
        self.begin_with(request, produce, |_| {})
    }

    /// Same as [`begin`](Self::begin). Calls `on_saved` on another thread as soon as the checkpoint
    /// is complete, because the caller of [`poll`](Self::poll) may be busy.
    pub(crate) fn begin_with(
        &mut self,
        request: SaveRequest,
        produce: ContentsFn,
        on_saved: impl FnOnce(&SavedCheckpoint) + Send + 'static,
    ) -> Result<(), CheckpointError> {
        self.wait()?;
        let name = layout::checkpoint_name(request.batches, self.store.attempt);
        let (sender, receiver) = sync_channel(1);
        self.in_flight = Some((name.clone(), receiver));
        let store = self.store.clone();
        self.rt.spawn(async move {
            let outcome = match produce_contents(&name, produce).await {
                Ok(contents) => store.save_or_clean_up(&name, request, contents).await,
                Err(error) => Err(error),
            };
            if let Ok(saved) = &outcome {
                on_saved(saved);
            }
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
    pub fn poll(&mut self) -> Result<Option<SavedCheckpoint>, CheckpointError> {
        self.poll_within(Duration::ZERO)
    }

    /// Same as [`poll`](Self::poll), but without a completed checkpoint, waits up to `wait` for the
    /// save in flight.
    ///
    /// # Errors
    ///
    /// Returns the error of a failed save, once.
    pub fn poll_within(
        &mut self,
        wait: Duration,
    ) -> Result<Option<SavedCheckpoint>, CheckpointError> {
        if let Some(saved) = self.done.pop_front() {
            return Ok(Some(saved));
        }
        let Some((name, receiver)) = &self.in_flight else { return Ok(None) };
        let outcome = match receiver.recv_timeout(wait) {
            Ok(outcome) => outcome,
            Err(RecvTimeoutError::Timeout) => return Ok(None),
            Err(RecvTimeoutError::Disconnected) => {
                Err(CheckpointError::ShutDown { name: name.clone() })
            }
        };
        self.in_flight = None;
        outcome.map(Some)
    }

    /// Returns the name of the checkpoint whose save is in flight.
    pub fn in_flight(&self) -> Option<&str> {
        self.in_flight.as_ref().map(|(name, _)| name.as_str())
    }

    /// Same as [`poll`](Self::poll), but without a completed checkpoint, waits for the save in
    /// flight. Call until it returns `None`.
    ///
    /// # Errors
    ///
    /// Returns the error of a failed save, once.
    pub fn finish(&mut self) -> Result<Option<SavedCheckpoint>, CheckpointError> {
        if self.done.is_empty() {
            self.wait()?;
        }
        Ok(self.done.pop_front())
    }

    /// Restores the first complete checkpoint of `refs` and reports why each one before it was
    /// refused. Verifies every file against its manifest, and the manifest against the reference.
    ///
    /// # Errors
    ///
    /// Fails if the storage is unavailable, which does not mean that a checkpoint is corrupt, and
    /// if a copy cannot start from its source's checkpoint. If the storage fails only on one
    /// checkpoint, it is refused; this fails if no other can be restored.
    pub fn restore(&self, refs: &[CheckpointRef]) -> Result<Restored, CheckpointError> {
        let load = |store: &CheckpointStore, wanted: &CheckpointRef| {
            let (store, wanted) = (store.clone(), wanted.clone());
            let name = wanted.name.clone();
            run_blocking(&self.rt, &name, async move { store.load(&wanted).await })
        };
        let Choice { chosen, refused, unsupported } =
            load_first(&self.rt, &self.store, refs, load)?;
        let Some((chosen, (manifest, contents))) = chosen else {
            check_source(refs, &refused)?;
            return Ok(Restored { refused, unsupported, ..Restored::default() });
        };
        let checkpoint = Some((chosen.name.clone(), manifest, contents));
        Ok(Restored { checkpoint, chosen: Some(chosen), refused, unsupported })
    }

    fn wait(&mut self) -> Result<(), CheckpointError> {
        if let Some((name, receiver)) = self.in_flight.take() {
            let outcome = receiver.recv().unwrap_or(Err(CheckpointError::ShutDown { name }));
            self.done.push_back(outcome?);
        }
        Ok(())
    }
}

async fn produce_contents(name: &str, produce: ContentsFn) -> Result<NewContents, CheckpointError> {
    let failed = |reason| CheckpointError::Contents { name: name.to_owned(), reason };
    let produced = tokio::task::spawn_blocking(produce).await;
    let contents = produced.map_err(|error| failed(error.to_string()))?.map_err(failed)?;
    match contents.contains_key(MANIFEST) {
        true => Err(failed(format!("the file name {MANIFEST} is reserved; use another name"))),
        false => Ok(contents),
    }
}

/// Returns the [`Manifest::sample_sha256`] of a trial.
fn sample_sha256(config: &TrialConfig) -> String {
    let TrialConfig { seed, hyperparameters, .. } = config;
    let sample = json!({"seed": seed, "hyperparameters": hyperparameters});
    hash::sha256_hex(sample.to_string().as_bytes())
}

fn parse(text: &[u8]) -> Result<Manifest, String> {
    Manifest::parse(text).map_err(|error| format!("cannot read {MANIFEST}: {error}"))
}

/// Compares the size and the hash of a file with its entry in the manifest.
fn verify(file: &str, entry: &FileEntry, bytes: usize, hash: &FileHash) -> Result<(), String> {
    if bytes as u64 != entry.bytes {
        return Err(different_size(file, entry, bytes as u64));
    }
    if *hash != entry.hash {
        return Err(format!("{file} has {hash}, but {MANIFEST} lists {}", entry.hash.hex()));
    }
    Ok(())
}

fn different_size(file: &str, entry: &FileEntry, bytes: u64) -> String {
    format!("{file} has {bytes} bytes, but {MANIFEST} lists {}", entry.bytes)
}

#[cfg(test)]
mod tests;
