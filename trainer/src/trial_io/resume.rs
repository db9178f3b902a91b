//! Checkpoints and attempt number of a program without a runner.

use std::collections::BTreeMap;

use stoker_api::contract::{CheckpointRef, RESUME_FROM_MAX, TrialConfig};
use stoker_storage::{Storage, StorageError, hash, layout};
use tokio::runtime::Handle;

use super::TrialIo;
use crate::Result;
use crate::checkpoint::CheckpointError;

/// Sets the checkpoints and the attempt number of a program without a runner. Checkpoints are in
/// order from newest to oldest. Attempts are counted by everything they wrote, because a killed
/// attempt may have left rows but no checkpoint. Reads only the newest manifests: a directory may
/// contain thousands.
pub(super) fn resume_latest(
    rt: &Handle,
    storage: &Storage,
    config: &mut TrialConfig,
) -> Result<()> {
    let folder = format!("{}/", config.storage.trial_path);
    let (mut manifests, mut attempts) = (vec![], 0);
    let listed: Result<Vec<CheckpointRef>> = rt.block_on(async {
        for path in storage.list(&folder).await? {
            let below = path.strip_prefix(&folder).unwrap_or(&path).to_owned();
            attempts =
                layout::attempt_of(&below).map_or(attempts, |attempt| attempts.max(attempt + 1));
            let mut names = path.rsplit('/');
            let (file, name) = (names.next(), names.next().unwrap_or_default());
            let position = layout::parse_checkpoint_name(name);
            if let (Some(stoker_api::names::MANIFEST), Some(position)) = (file, position) {
                manifests.push((position, name.to_owned(), path));
            }
        }
        // A later attempt may have trained the same batches again.
        manifests.sort_by_key(|((batches, attempt), ..)| std::cmp::Reverse((*attempt, *batches)));
        let newest = manifests.into_iter().take(RESUME_FROM_MAX);
        Ok(read_manifests(storage, newest.map(|(_, name, path)| (name, path))).await?)
    });
    config.resume_from = listed?;
    config.attempt = attempts;
    Ok(())
}

/// Returns references of checkpoints with these names and paths of manifests. The hash of an
/// unreadable manifest is empty: the restore reads it again, and refuses the checkpoint if that
/// fails too.
///
/// # Errors
///
/// Fails if the storage is unavailable: no manifest can be read.
pub(super) async fn read_manifests(
    storage: &Storage,
    manifests: impl IntoIterator<Item = (String, String)>,
) -> Result<Vec<CheckpointRef>, StorageError> {
    let (mut storage, mut refs, mut is_any_read) = (storage.clone(), vec![], false);
    let mut first_error = None;
    for (name, path) in manifests {
        let read = storage.get(&path).await;
        let manifest_sha256 = match read {
            Ok(text) => {
                is_any_read = true;
                hash::sha256_hex(&text)
            }
            Err(error) => {
                // All others fail too if the storage is unavailable.
                storage = storage.with_few_retries();
                first_error.get_or_insert(error);
                String::new()
            }
        };
        refs.push(CheckpointRef { name, manifest_sha256, trial_path: None });
    }
    first_error.filter(|_| !is_any_read).map_or(Ok(refs), Err)
}

impl TrialIo {
    /// Checks that training may start from scratch, after these checkpoints were refused and no
    /// other was found. `unsupported` is the error of one that another version wrote.
    ///
    /// # Errors
    ///
    /// Fails under a runner if there is an unsupported checkpoint, because it may be intact: the
    /// version that wrote it can resume from it. Fails without a runner if the directory contains
    /// checkpoints, because a new training would replace them.
    pub(crate) fn check_refused(
        &self,
        refused: &BTreeMap<String, String>,
        unsupported: Option<CheckpointError>,
    ) -> Result<()> {
        if let (true, Some(error)) = (self.has_runner, unsupported) {
            return Err(error.into());
        }
        let newest = self.resume_from.iter().find_map(|newest| refused.get_key_value(&newest.name));
        let (Some((name, why)), Some(files), false) = (newest, &self.files, self.has_runner) else {
            return Ok(());
        };
        let store = files.checkpointer.store();
        let folder = layout::checkpoints_path(&store.trial_path);
        let text = format!(
            "cannot resume from {}/{folder}: all its checkpoints are refused; the newest is \
             {name}: {why}; run a program that can read them, use another directory, or move them \
             away to start from scratch",
            store.storage.url()
        );
        Err(text.into())
    }
}
