//! Saves checkpoints, stores rows of metrics, and deletes checkpoints that are no longer retained.

use std::collections::BTreeMap;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use stoker_api::contract::{CheckpointRef, ExitCode, ReportEvent};
use stoker_storage::segments::PendingFlush;
use tokio::runtime::Handle;

use super::TrialIo;
use crate::Result;
use crate::checkpoint::{CheckpointStore, ContentsFn, SaveRequest, SavedCheckpoint};
use crate::tensorboard::Display;
use crate::tensorboard::hparams::SessionStatus;

impl TrialIo {
    /// Writes a histogram, an image or a text for TensorBoard.
    pub(crate) fn display(&mut self, name: &str, batches: u64, display: &Display) {
        let batches = self.base + batches;
        if let Some(files) = self.writable_files() {
            files.metrics.display(name, batches, display);
        }
    }

    /// Records the checkpoint from which this process resumes, or that it starts from nothing.
    pub(crate) fn record_resume(&mut self, name: Option<String>, batches: u64) {
        let first_step = if name.is_some() { batches + 1 } else { 0 };
        if let Some(files) = self.writable_files() {
            files.metrics.set_first_step(first_step);
        }
        self.restored = name;
    }

    /// Starts a save. Blocks only while an earlier save is in progress. The checkpoint is reported
    /// as soon as it is complete, because a step or a validation may take long.
    pub(crate) fn save(
        &mut self,
        batches: u64,
        metric: Option<f64>,
        produce: ContentsFn,
    ) -> Result<()> {
        let (unsent, batches) = (self.unsent(), self.base + batches);
        let reporter = self.reporter.as_ref().map(Arc::downgrade);
        let Some(files) = self.writable_files() else { return Ok(()) };
        let after = files.metrics.stored();
        // The loop's state contains the validation.
        let (validation, metadata) = (BTreeMap::new(), BTreeMap::new());
        let request = SaveRequest { batches, metric, validation, unsent, metadata, after };
        let report = move |saved: &SavedCheckpoint| {
            if let Some(reporter) = reporter.as_ref().and_then(Weak::upgrade) {
                reporter.post(saved.batches, checkpoint_event(saved));
            }
        };
        Ok(files.checkpointer.begin_with(request, produce, report)?)
    }

    /// Returns the location of the checkpoints, and the runtime for their transfer.
    pub(crate) fn checkpoint_store(&self) -> Option<(Handle, CheckpointStore)> {
        let files = self.files.as_ref()?;
        Some((self.runtime().clone(), files.checkpointer.store().clone()))
    }

    /// Returns the checkpoints to resume from, in order of preference.
    pub(crate) fn resume_from(&self) -> &[CheckpointRef] {
        &self.resume_from
    }

    /// Returns the name of the trial's own checkpoint from which a restart would resume.
    pub(crate) fn latest_checkpoint(&self) -> Option<String> {
        let saved = self.last_saved.as_ref().map(|checkpoint| checkpoint.name.clone());
        let own = || {
            let own = self.resume_from.iter().filter(|checkpoint| checkpoint.trial_path.is_none());
            own.map(|checkpoint| &checkpoint.name)
        };
        let restored = || own().find(|name| Some(*name) == self.restored.as_ref()).cloned();
        saved.or_else(restored).or_else(|| own().next().cloned())
    }

    /// Fails if this trial is a copy that trains from scratch.
    pub(crate) fn check_is_copied(&self) -> Result<()> {
        let is_copy = self.resume_from.iter().any(|checkpoint| checkpoint.trial_path.is_some());
        if is_copy && self.restored.is_none() {
            let text = "this trial is a copy of another one, but the program has not restored its \
                        checkpoint; call `restore_path` before training";
            return Err(text.into());
        }
        Ok(())
    }

    /// Returns the writes of all metrics rows so far, for which a new checkpoint must wait.
    pub(crate) fn pending_row_writes(&mut self) -> Vec<PendingFlush> {
        self.writable_files().map(|files| files.metrics.stored()).unwrap_or_default()
    }

    /// Reports and records a new checkpoint.
    pub(crate) fn report_checkpoint(&mut self, saved: SavedCheckpoint) {
        self.post_at(saved.batches, checkpoint_event(&saved));
        self.record_saved(saved);
    }

    /// Records a new checkpoint, which is already reported.
    fn record_saved(&mut self, saved: SavedCheckpoint) {
        if let Some(retention) = &self.retention {
            retention.record_saved(&saved);
        }
        self.batches = self.batches.max(saved.batches);
        let SavedCheckpoint { name, manifest_sha256, .. } = saved;
        self.last_saved = Some(CheckpointRef { name, manifest_sha256, trial_path: None });
    }

    /// Records new checkpoints. With `wait`, waits for a save in progress.
    pub(crate) fn report_saved(&mut self, wait: bool) -> Result<()> {
        while let Some(files) = self.writable_files() {
            let checkpointer = &mut files.checkpointer;
            let saved = if wait { checkpointer.finish()? } else { checkpointer.poll()? };
            let Some(saved) = saved else { break };
            self.record_saved(saved);
        }
        Ok(())
    }

    /// Waits for a save in progress, before a stop saves a later state. If it failed, prints the
    /// error: the later checkpoint replaces it. Returns whether it failed.
    pub(crate) fn finish_earlier_save(&mut self) -> bool {
        let stored = self.report_saved(true);
        if let Err(error) = &stored {
            eprintln!("stoker: an earlier save failed: {error}; saving the latest state instead");
        }
        stored.is_err()
    }

    /// Returns the name of the checkpoint whose save is in progress.
    pub(crate) fn checkpoint_in_progress(&self) -> Option<&str> {
        self.files.as_ref()?.checkpointer.in_flight()
    }

    /// Records new checkpoints. Waits for a save in progress, but at most `wait`.
    pub(crate) fn report_saved_within(&mut self, wait: Duration) -> Result<()> {
        let deadline = Instant::now() + wait;
        while let Some(files) = self.writable_files() {
            let left = deadline.saturating_duration_since(Instant::now());
            let Some(saved) = files.checkpointer.poll_within(left)? else { break };
            self.record_saved(saved);
        }
        match self.checkpoint_in_progress() {
            Some(name) => {
                let seconds = wait.as_secs();
                Err(format!("checkpoint {name}: the storage took longer than {seconds} s").into())
            }
            None => Ok(()),
        }
    }

    /// Waits until all rows of metrics are stored, but at most `wait`.
    pub(crate) fn flush_within(&mut self, wait: Duration) -> Result<()> {
        let Some(files) = self.writable_files() else { return Ok(()) };
        let stored = files.metrics.flushing();
        let all = async {
            for stored in stored {
                stored.wait().await?;
            }
            Ok(())
        };
        let done = async { tokio::time::timeout(wait, all).await };
        match self._background.handle.block_on(done) {
            Ok(done) => done,
            Err(_) => Err(format!("the storage took longer than {} s", wait.as_secs()).into()),
        }
    }

    /// Records the end of the trial for TensorBoard, if this exit code is final. After other codes,
    /// a later attempt may continue the trial.
    pub(crate) fn end_session(&mut self, code: ExitCode) {
        let status = match code {
            ExitCode::Completed => SessionStatus::Success,
            ExitCode::InvalidHyperparameters => SessionStatus::Failure,
            _ => return,
        };
        if let Some(files) = self.writable_files() {
            files.metrics.end_session(status);
        }
    }

    /// Records a checkpoint that the program has deleted.
    pub(crate) fn record_deleted(&self, name: &str) {
        if let Some(retention) = &self.retention {
            retention.record_deleted(name);
        }
    }

    /// Deletes checkpoints that were retained only as fallbacks, because training is over.
    pub(crate) fn end_training(&self) {
        if let Some(retention) = &self.retention {
            retention.finish(true);
        }
    }

    /// Waits until all rows of metrics are stored and superfluous checkpoints are deleted.
    pub(crate) fn flush(&mut self) -> Result<()> {
        if let Some(retention) = &self.retention {
            retention.finish(false);
        }
        match self.writable_files() {
            Some(files) => Ok(files.metrics.flush()?),
            None => Ok(()),
        }
    }
}

fn checkpoint_event(saved: &SavedCheckpoint) -> ReportEvent {
    ReportEvent::Checkpointed {
        name: saved.name.clone(),
        manifest_sha256: saved.manifest_sha256.clone(),
        bytes: saved.bytes,
        metric: saved.metric.map(stoker_api::number::format),
    }
}
