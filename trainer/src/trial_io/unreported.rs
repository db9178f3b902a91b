//! Checkpoints of earlier attempts that the runner does not know.

use std::collections::BTreeMap;
use std::sync::mpsc::sync_channel;

use stoker_storage::StorageError;

use super::TrialIo;
use crate::Result;
use crate::checkpoint::{CheckpointContents, Restored, UnreportedCheckpoint};
use crate::error::Infrastructure;

/// Checkpoints that earlier attempts may have stored without reporting them.
#[derive(Debug)]
pub(super) struct UnreportedCheckpoints {
    /// First attempt of which there may be some, until they are listed.
    since: Option<u32>,
    /// Newest first.
    found: Vec<UnreportedCheckpoint>,
}

impl UnreportedCheckpoints {
    pub(super) fn new(since: Option<u32>) -> Self {
        Self { since, found: vec![] }
    }
}

impl TrialIo {
    /// Restores the first complete checkpoint, if any. Rank 0 first looks for checkpoints that the
    /// runner does not know, and leaves out those for which `is_beyond` is true: they were trained
    /// beyond the granted length, because the runner's record was restored from a backup.
    ///
    /// # Errors
    ///
    /// Fails if the storage fails, or if training must not start from scratch: see
    /// [`check_refused`](Self::check_refused).
    pub(crate) fn restore(
        &mut self,
        is_beyond: impl Fn(&CheckpointContents) -> bool,
    ) -> Result<Restored> {
        self.find_unreported()?;
        let restored = loop {
            let restored = self.restore_from(&self.resume_from)?;
            match &restored.checkpoint {
                Some((name, _, contents)) if self.is_unreported(name) && is_beyond(contents) => {
                    let name = name.clone();
                    self.leave_out_unreported(&name);
                }
                _ => break restored,
            }
        };
        if restored.checkpoint.is_none() {
            self.check_refused(&restored.refused, restored.unsupported.clone())?;
        }
        Ok(restored)
    }

    /// Lists checkpoints that the runner does not know, and prefers them to the known ones.
    /// Does nothing when called again, and on ranks other than 0. If the storage permits no list,
    /// prints a message.
    ///
    /// # Errors
    ///
    /// Fails if the storage fails.
    pub(crate) fn find_unreported(&mut self) -> Result<()> {
        let (Some(since), Some(files)) = (self.unreported.since.take(), &self.files) else {
            return Ok(());
        };
        let store = files.checkpointer.store().clone();
        let newest = self.resume_from.iter().find(|checkpoint| checkpoint.trial_path.is_none());
        let newest = newest.map(|checkpoint| checkpoint.name.clone());
        let (sender, receiver) = sync_channel(1);
        // `block_on` would panic if the program itself runs on a runtime.
        self.runtime().spawn(async move {
            let attempts = since..store.attempt;
            // Ignore the error: a caller that exited needs no list.
            let _ = sender.send(store.unreported(attempts, newest.as_deref()).await);
        });
        let Ok(listed) = receiver.recv() else {
            let text = "the runtime was shut down while it listed the trial's checkpoints";
            return Err(Infrastructure(text.into()).into());
        };
        let found = match listed {
            Err(error @ StorageError::Refused { .. }) => {
                let text = format!("cannot look for checkpoints that were not reported: {error}");
                self.terminal.print_line(&text);
                return Ok(());
            }
            listed => listed?,
        };
        for unreported in &found {
            let name = &unreported.checkpoint.name;
            self.terminal.print_line(&format!("found checkpoint {name}, which was not reported"));
        }
        let refs = found.iter().map(|unreported| unreported.checkpoint.clone());
        self.resume_from.splice(0..0, refs);
        self.unreported.found = found;
        Ok(())
    }

    /// Returns whether [`find_unreported`](Self::find_unreported) has found this checkpoint.
    fn is_unreported(&self, name: &str) -> bool {
        self.unreported.found.iter().any(|unreported| unreported.checkpoint.name == name)
    }

    /// Neither restores nor reports this checkpoint, which was trained beyond the granted length.
    fn leave_out_unreported(&mut self, name: &str) {
        self.terminal.print_line(&format!(
            "checkpoint {name} is not used: it was trained beyond the granted length"
        ));
        self.unreported.found.retain(|unreported| unreported.checkpoint.name != name);
        self.resume_from
            .retain(|checkpoint| checkpoint.trial_path.is_some() || checkpoint.name != name);
    }

    /// Reports the checkpoints that were found, oldest first, except the refused ones. Call this
    /// before the start is reported, so that the runner knows the checkpoint of the start.
    pub(crate) fn report_unreported(&mut self, refused: &BTreeMap<String, String>) {
        let Some(reporter) = &self.reporter else { return };
        for unreported in std::mem::take(&mut self.unreported.found).into_iter().rev() {
            let UnreportedCheckpoint { checkpoint, report } = unreported;
            if let Some((batches, event)) = report
                && !refused.contains_key(&checkpoint.name)
            {
                reporter.post(batches, event);
            }
        }
    }
}
