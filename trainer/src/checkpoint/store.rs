//! Files and manifests of one trial's checkpoints in the storage.

use std::collections::BTreeMap;
use std::sync::Arc;

use bytes::Bytes;
use stoker_api::contract::{CheckpointRef, FileEntry, MANIFEST_FORMAT, Manifest, ManifestError};
use stoker_api::names::MANIFEST;
use stoker_storage::{Storage, StorageError, hash, layout};
use tokio::task::JoinSet;

use super::{
    CheckpointContents, CheckpointError, NewContents, SaveOutcome, SaveRequest, SavedCheckpoint,
    verify,
};

/// Storage, path and identity of a trial's checkpoints.
#[derive(Clone, Debug)]
pub(crate) struct CheckpointStore {
    pub(crate) storage: Storage,
    pub(crate) trial_path: String,
    pub(super) experiment_id: String,
    pub(super) trial: u32,
    pub(crate) attempt: u32,
    /// [`Manifest::sample_sha256`] of this trial.
    pub(super) sample_sha256: String,
}

impl CheckpointStore {
    /// Saves, and cleans up after a failure as far as the storage allows. Otherwise a trial that
    /// retries repeatedly would fill the storage with partial checkpoints.
    pub(super) async fn save_or_clean_up(
        &self,
        name: &str,
        request: SaveRequest,
        contents: NewContents,
    ) -> SaveOutcome {
        let files: Vec<String> = contents.keys().cloned().collect();
        let outcome = self.save(name, request, contents).await;
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

    async fn save(&self, name: &str, request: SaveRequest, contents: NewContents) -> SaveOutcome {
        let files = self.upload(name, contents).await?;
        self.commit(name, request, files).await
    }

    /// Completes a checkpoint whose files are stored, by writing its manifest.
    pub(crate) async fn commit(
        &self,
        name: &str,
        request: SaveRequest,
        files: BTreeMap<String, FileEntry>,
    ) -> SaveOutcome {
        let failed = |source| CheckpointError::Storage { name: name.to_owned(), source };
        for stored in request.after {
            stored.wait().await.map_err(failed)?;
        }
        let bytes = files.values().map(|entry| entry.bytes).sum();
        let formats = files.values().map(|entry| entry.hash.algorithm().format());
        let manifest = Manifest {
            format: formats.max().unwrap_or(MANIFEST_FORMAT),
            experiment_id: self.experiment_id.clone(),
            trial: self.trial,
            attempt: self.attempt,
            sample_sha256: Some(self.sample_sha256.clone()),
            batches: request.batches,
            metric: request.metric.map(stoker_api::number::format),
            validation: request.validation,
            files,
            unsent: request.unsent,
            metadata: request.metadata,
        };
        let text = serde_json::to_vec_pretty(&manifest).map_err(|error| {
            CheckpointError::Contents { name: name.to_owned(), reason: error.to_string() }
        })?;
        let manifest_sha256 = hash::sha256_hex(&text);
        let path = layout::manifest_path(&self.trial_path, name);
        self.storage.put(&path, text.into()).await.map_err(failed)?;
        let (batches, metric) = (request.batches, request.metric);
        Ok(SavedCheckpoint { name: name.to_owned(), batches, manifest_sha256, bytes, metric })
    }

    /// Hashes and stores all files concurrently. If one fails, waits for the others before it
    /// returns.
    pub(crate) async fn upload(
        &self,
        name: &str,
        contents: NewContents,
    ) -> Result<BTreeMap<String, FileEntry>, CheckpointError> {
        let mut uploads = JoinSet::new();
        for (file, parts) in contents {
            let storage = self.storage.clone();
            let path = layout::checkpoint_file(&self.trial_path, name, &file);
            uploads.spawn(async move {
                let parts: Arc<[Bytes]> = parts.into_parts().into();
                let hashed = parts.clone();
                let entry = tokio::task::spawn_blocking(move || hash::file_entry(&hashed));
                let stored = storage.put_concat(&path, &parts).await;
                (file, entry.await, stored)
            });
        }
        let shut_down = || CheckpointError::ShutDown { name: name.to_owned() };
        let failed = |source| CheckpointError::Storage { name: name.to_owned(), source };
        let (mut files, mut first_error) = (BTreeMap::new(), None);
        // A cancelled upload would leave parts in the bucket, and its last request could write a
        // file after the clean-up.
        while let Some(upload) = uploads.join_next().await {
            let stored = upload.map_err(|_| shut_down()).and_then(|(file, entry, stored)| {
                stored.map_err(failed)?;
                Ok((file, entry.map_err(|_| shut_down())?))
            });
            match stored {
                Ok((file, entry)) => {
                    files.insert(file, entry);
                }
                Err(error) => {
                    first_error.get_or_insert(error);
                }
            }
        }
        first_error.map_or(Ok(files), Err)
    }

    pub(super) async fn load(
        &self,
        wanted: &CheckpointRef,
    ) -> Result<(Manifest, CheckpointContents), CheckpointError> {
        let store = self.of(wanted);
        let manifest = store.manifest(wanted).await?;
        let contents = store.contents(&wanted.name, &manifest).await?;
        Ok((manifest, contents))
    }

    /// Returns the location of a checkpoint, which may be that of the trial's source.
    pub(crate) fn of(&self, wanted: &CheckpointRef) -> Self {
        let trial_path = wanted.trial_path.as_ref().unwrap_or(&self.trial_path).clone();
        Self { trial_path, ..self.clone() }
    }

    /// Reads and verifies the manifest of a checkpoint of this trial or its source. Call this on
    /// the location that [`of`](Self::of) returns.
    pub(crate) async fn manifest(
        &self,
        wanted: &CheckpointRef,
    ) -> Result<Manifest, CheckpointError> {
        let name = &wanted.name;
        let corrupt = |reason| CheckpointError::Corrupt { name: name.clone(), reason };
        let text = self.fetch(name, MANIFEST).await?;
        let actual = hash::sha256_hex(&text);
        // A program without a runner may not know the hash: see `trial_io/resume.rs`.
        let is_unknown = wanted.manifest_sha256.is_empty() && wanted.trial_path.is_none();
        if !is_unknown && actual != wanted.manifest_sha256 {
            return Err(corrupt(format!(
                "{MANIFEST} has SHA-256 {actual}, but the record has {}",
                wanted.manifest_sha256
            )));
        }
        let manifest = Manifest::parse(&text).map_err(|error| {
            let reason = format!("cannot read {MANIFEST}: {error}");
            match error {
                ManifestError::Format(_) => CheckpointError::Format { name: name.clone(), reason },
                ManifestError::Json(_) => corrupt(reason),
            }
        })?;
        // The hash in the record identifies the checkpoint of a source.
        let trial = if wanted.trial_path.is_some() { manifest.trial } else { self.trial };
        if (&manifest.experiment_id, manifest.trial) != (&self.experiment_id, trial) {
            return Err(corrupt(format!(
                "{MANIFEST} is of experiment {} trial {}, expected experiment {} trial {}",
                manifest.experiment_id, manifest.trial, self.experiment_id, self.trial
            )));
        }
        Ok(manifest)
    }

    /// Reads and verifies the files listed in a manifest.
    pub(super) async fn contents(
        &self,
        name: &str,
        manifest: &Manifest,
    ) -> Result<CheckpointContents, CheckpointError> {
        let mut fetches = JoinSet::new();
        for (file, entry) in manifest.files.clone() {
            let (store, name) = (self.clone(), name.to_owned());
            fetches.spawn(async move {
                let bytes = store.fetch_verified(&name, &file, &entry).await?;
                Ok::<_, CheckpointError>((file, bytes))
            });
        }
        let mut contents = CheckpointContents::new();
        while let Some(fetched) = fetches.join_next().await {
            let shut_down = |_| CheckpointError::ShutDown { name: name.to_owned() };
            let (file, bytes) = fetched.map_err(shut_down)??;
            contents.insert(file, bytes);
        }
        Ok(contents)
    }

    /// Reads a file and verifies it against its entry in the manifest.
    pub(super) async fn fetch_verified(
        &self,
        name: &str,
        file: &str,
        entry: &FileEntry,
    ) -> Result<Bytes, CheckpointError> {
        let path = layout::checkpoint_file(&self.trial_path, name, file);
        let read = self.storage.get_hashed(&path, entry.hash.algorithm()).await;
        let (bytes, hash) = read.map_err(|source| unreadable(name, file, source))?;
        let corrupt = |reason| CheckpointError::Corrupt { name: name.to_owned(), reason };
        verify(file, entry, bytes.len(), &hash).map_err(corrupt)?;
        Ok(bytes)
    }

    pub(crate) async fn fetch(&self, name: &str, file: &str) -> Result<Bytes, CheckpointError> {
        let path = layout::checkpoint_file(&self.trial_path, name, file);
        self.storage.get(&path).await.map_err(|source| unreadable(name, file, source))
    }
}

/// Returns the error for a file that cannot be read.
pub(super) fn unreadable(name: &str, file: &str, source: StorageError) -> CheckpointError {
    let name = name.to_owned();
    match source {
        StorageError::NotFound { .. } => {
            CheckpointError::Corrupt { name, reason: format!("{file} is missing") }
        }
        source => CheckpointError::Storage { name, source },
    }
}
