//! Checkpoints of earlier attempts that the runner does not know.

use std::collections::BTreeMap;
use std::sync::mpsc::sync_channel;

use stoker_storage::StorageError;

use super::TrialIo;
use crate::Result;
use crate::checkpoint::UnreportedCheckpoint;
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
