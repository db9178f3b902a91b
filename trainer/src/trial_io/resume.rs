//! Checkpoints and attempt number of a program without a runner.

use std::collections::BTreeMap;

use stoker_api::contract::{CheckpointRef, TrialConfig};
use stoker_storage::{Storage, hash, layout};
use tokio::runtime::Handle;

use super::TrialIo;
use crate::Result;

/// Number of checkpoints from which a program without a runner may resume: the newest, and others
/// in case it is corrupt. A runner names as many.
pub(super) const RESUME_FROM_MAX: usize = 16;

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
        let mut newest = vec![];
        for (_, name, path) in manifests.into_iter().take(RESUME_FROM_MAX) {
            let manifest_sha256 = hash::sha256_hex(&storage.get(&path).await?);
            newest.push(CheckpointRef { name, manifest_sha256, trial_path: None });
        }
        Ok(newest)
    });
    config.resume_from = listed?;
    config.attempt = attempts;
    Ok(())
}

impl TrialIo {
    /// Checks that a program without a runner may start from scratch, after it has refused these
    /// checkpoints and found no other. Under a runner, it may: the runner retains the refused ones.
    ///
    /// # Errors
    ///
    /// Fails if the directory contains checkpoints: they may be intact and only of another format,
    /// and a new training must not replace them.
    pub(crate) fn check_refused(&self, refused: &BTreeMap<String, String>) -> Result<()> {
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
