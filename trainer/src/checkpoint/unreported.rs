//! Checkpoints that earlier attempts have stored, but may not have reported.

use std::cmp::Reverse;
use std::ops::Range;

use stoker_api::contract::{CheckpointRef, Manifest, ReportEvent};
use stoker_api::names::MANIFEST;
use stoker_storage::{StorageError, hash, layout};

use super::{CheckpointStore, parse};

/// Maximum number of unreported checkpoints that an attempt uses: as many as a runner lists.
const UNREPORTED_MAX: usize = 16;

/// A checkpoint whose report the runner may not have received.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct UnreportedCheckpoint {
    pub(crate) checkpoint: CheckpointRef,
    /// Batch and event of its report. `None` if its manifest cannot be read: the restore then
    /// refuses the checkpoint.
    pub(crate) report: Option<(u64, ReportEvent)>,
}

impl CheckpointStore {
    /// Returns the checkpoints that these attempts of the trial have completed after the checkpoint
    /// `newest`, newest first. Their files are not verified. Prints a message for a checkpoint that
    /// is left out because its manifest cannot be read.
    ///
    /// # Errors
    ///
    /// Fails if the storage is unavailable: no manifest can be read.
    pub(crate) async fn unreported(
        &self,
        attempts: Range<u32>,
        newest: Option<&str>,
    ) -> Result<Vec<UnreportedCheckpoint>, StorageError> {
        // All checkpoints of an attempt are later than those of earlier attempts.
        let age = |name: &str| {
            layout::parse_checkpoint_name(name).map(|(batches, attempt)| (attempt, batches))
        };
        let newest_age = newest.and_then(age);
        let folder = format!("{}/", layout::checkpoints_path(&self.trial_path));
        let listed = self.storage.list(&folder).await?;
        let candidate = |path: &String| -> Option<((u32, u64), String)> {
            let (name, file) = path.strip_prefix(folder.as_str())?.split_once('/')?;
            let (attempt, batches) = age(name)?;
            let is_newer = attempts.contains(&attempt) && Some((attempt, batches)) > newest_age;
            (file == MANIFEST && is_newer).then(|| ((attempt, batches), name.to_owned()))
        };
        let mut candidates: Vec<_> = listed.iter().filter_map(candidate).collect();
        candidates.sort_unstable_by_key(|(age, _)| Reverse(*age));
        candidates.truncate(UNREPORTED_MAX);
        let names = candidates.into_iter().map(|(_, name)| name).collect();
        self.read_candidates(names, newest).await
    }

    pub(super) async fn read_candidates(
        &self,
        names: Vec<String>,
        newest: Option<&str>,
    ) -> Result<Vec<UnreportedCheckpoint>, StorageError> {
        let (mut store, mut unreported, mut unreadable) = (self.clone(), vec![], vec![]);
        for name in names {
            let read = store.read_unreported(name.clone()).await;
            match read {
                Ok(found) => unreported.extend(found),
                Err(error) => {
                    // All others fail too if the storage is unavailable.
                    store.storage = store.storage.with_few_retries();
                    unreadable.push((name, error));
                }
            }
        }
        if let Some((_, error)) = unreadable.first()
            && unreported.is_empty()
        {
            let manifest = newest.map(|name| layout::manifest_path(&self.trial_path, name));
            let Some(manifest) = manifest else { return Err(error.clone()) };
            if store.storage.get(&manifest).await.is_err() {
                return Err(error.clone());
            }
        }
        for (name, error) in unreadable {
            eprintln!("stoker: checkpoint {name}, which was not reported, is not used: {error}");
        }
        Ok(unreported)
    }

    /// Reads the manifest of a checkpoint. Returns `None` if it was deleted since it was listed, if
    /// it belongs to another checkpoint, or if the trial had another seed or other hyperparameters:
    /// after a record is restored from a backup, another trial may get the same index.
    async fn read_unreported(
        &self,
        name: String,
    ) -> Result<Option<UnreportedCheckpoint>, StorageError> {
        let text = match self.storage.get(&layout::manifest_path(&self.trial_path, &name)).await {
            Err(StorageError::NotFound { .. }) => return Ok(None),
            text => text?,
        };
        let manifest_sha256 = hash::sha256_hex(&text);
        let report = match parse(&text) {
            Ok(manifest) if !self.is_manifest_of(&name, &manifest) => return Ok(None),
            Ok(manifest) if !self.has_same_sample(&manifest) => {
                eprintln!(
                    "stoker: checkpoint {name}, which was not reported, is not used: it was \
                     trained with other hyperparameters or another seed"
                );
                return Ok(None);
            }
            Ok(manifest) => Some(report_of(name.clone(), manifest_sha256.clone(), manifest)),
            Err(_) => None,
        };
        let checkpoint = CheckpointRef { name, manifest_sha256, trial_path: None };
        Ok(Some(UnreportedCheckpoint { checkpoint, report }))
    }

    fn is_manifest_of(&self, name: &str, manifest: &Manifest) -> bool {
        let Manifest { experiment_id, trial, batches, attempt, .. } = manifest;
        (experiment_id, *trial) == (&self.experiment_id, self.trial)
            && layout::checkpoint_name(*batches, *attempt) == name
    }

    /// Returns whether the manifest has the seed and the hyperparameters of this trial. Manifests
    /// of earlier versions contain neither.
    fn has_same_sample(&self, manifest: &Manifest) -> bool {
        let sample = manifest.sample_sha256.as_ref();
        sample.is_none_or(|sample| *sample == self.sample_sha256)
    }
}

/// Returns the report that the attempt has queued after the save.
fn report_of(name: String, manifest_sha256: String, manifest: Manifest) -> (u64, ReportEvent) {
    let bytes = manifest.files.values().map(|entry| entry.bytes).sum();
    let metric = manifest.metric;
    (manifest.batches, ReportEvent::Checkpointed { name, manifest_sha256, bytes, metric })
}
