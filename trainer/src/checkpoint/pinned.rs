//! Pins a checkpoint, so that all processes of a job use the same one.

use stoker_api::contract::StorageConfig;
use stoker_api::inference::{CheckpointChoice, PinnedCheckpoint, WhichCheckpoint};
use stoker_api::names::MANIFEST;
use stoker_storage::{hash, layout};

use super::source::{CheckpointSource, Location};
use super::{CheckpointError, load_folder};
use crate::{InvalidInput, Result};

impl CheckpointSource {
    /// Creates the source from a job's spec.
    pub(crate) fn from_choice(choice: &CheckpointChoice) -> Result<Self> {
        let source = match choice {
            CheckpointChoice { trial: Some(name), .. } => Self::trial(name),
            CheckpointChoice { folder: Some(folder), .. } => Self::folder(folder),
            CheckpointChoice { stored: Some(stored), .. } => {
                let source = Self::stored(&stored.url, &stored.trial_path);
                stored.endpoint.iter().fold(source, |source, endpoint| source.endpoint(endpoint))
            }
            _ => {
                let text = "the job's checkpoint is empty; set trial, folder or stored";
                return Err(InvalidInput(text.into()).into());
            }
        };
        Ok(match (&choice.name, choice.which) {
            (Some(name), _) => source.named(name),
            (None, WhichCheckpoint::Latest) => source,
            (None, WhichCheckpoint::SmallestMetric) => source.smallest_metric(),
            (None, WhichCheckpoint::LargestMetric) => source.largest_metric(),
        })
    }

    /// Creates a source for exactly this checkpoint, identified by the hash of its manifest.
    pub(crate) fn pinned(pinned: &PinnedCheckpoint) -> Self {
        let source = match &pinned.trial_path {
            None => Self::folder(&pinned.url),
            Some(trial_path) => {
                let source = Self::stored(&pinned.url, trial_path).named(&pinned.name);
                pinned.endpoint.iter().fold(source, |source, endpoint| source.endpoint(endpoint))
            }
        };
        source.with_manifest(&pinned.manifest_sha256)
    }

    /// Selects the checkpoint. `own` is the storage of the calling session.
    ///
    /// # Errors
    ///
    /// Fails if no complete checkpoint exists.
    pub(crate) async fn pin(&self, own: &StorageConfig) -> Result<PinnedCheckpoint> {
        if let Location::Folder(folder) = self.location() {
            load_folder(folder)?;
            let read = |path: &std::path::Path| {
                std::fs::read(path).map_err(|error| CheckpointError::Corrupt {
                    name: folder.display().to_string(),
                    reason: error.to_string(),
                })
            };
            let absolute = std::path::absolute(folder)?;
            let name = absolute.file_name().unwrap_or_default().to_string_lossy().into_owned();
            return Ok(PinnedCheckpoint {
                url: absolute.display().to_string(),
                endpoint: None,
                trial_path: None,
                name,
                manifest_sha256: hash::sha256_hex(&read(&folder.join(MANIFEST))?),
                hyperparameters: serde_json::Value::Null,
            });
        }
        let store = self.open_store(own).await?;
        let (name, _, manifest_sha256) = self.select(&store).await?;
        let (url, endpoint) = match self.location() {
            Location::Stored { url, endpoint, .. } => (url.clone(), endpoint.clone()),
            _ => (own.url.clone(), own.endpoint.clone()),
        };
        let record = layout::record_path(&store.trial_path);
        let mut hyperparameters = serde_json::Value::Null;
        if store.storage.exists(&record).await? {
            let record = store.storage.get(&record).await?;
            let record: serde_json::Value = serde_json::from_slice(&record).map_err(|error| {
                format!("cannot read the record of {}: {error}", store.trial_path)
            })?;
            hyperparameters = record["spec"]["hyperparameters"].clone();
        }
        let trial_path = Some(store.trial_path);
        Ok(PinnedCheckpoint { url, endpoint, trial_path, name, manifest_sha256, hyperparameters })
    }
}
