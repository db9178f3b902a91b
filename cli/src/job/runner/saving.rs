//! Writes of a job's record while it runs. A failed write, for example on a full disk, is repeated.
//! Until it succeeds, running processes continue, and no other starts.

use std::path::PathBuf;
use std::time::Duration;

use stoker_api::contract::TrialConfig;
use stoker_engine::inference::{self, ProcessStart};
use tokio::time::Instant;

use super::{Runner, View};
use crate::failure::Failure;
use crate::run::record as files;

/// A failed write. The record in memory is complete, and newer than its file.
#[derive(Debug)]
pub(super) struct Unsaved {
    wait: Duration,
    retry_at: Instant,
}

impl Runner<'_> {
    /// Writes the record. If this fails, [`retry_save`](Self::retry_save) repeats it.
    pub(super) fn save(&mut self, view: &View) {
        match self.job.record.save() {
            Ok(()) => self.unsaved = None,
            Err(error) => self.repeat_save(&error, view),
        }
    }

    /// Repeats a failed write if it is due.
    pub(super) fn retry_save(&mut self, view: &View) {
        if self.unsaved.as_ref().is_some_and(|unsaved| unsaved.retry_at <= Instant::now()) {
            self.save(view);
        }
    }

    fn repeat_save(&mut self, error: &Failure, view: &View) {
        let before = self.unsaved.as_ref().map(|unsaved| unsaved.wait);
        if before.is_none() {
            view.print_message(&format!("{error}; the job continues, trying again"));
        }
        let wait = files::wait_to_write(before);
        self.unsaved = Some(Unsaved { wait, retry_at: Instant::now() + wait });
    }

    /// Records that a process starts. Returns its directory and configuration, or `None` if they
    /// could not be written: the process then starts after a later write.
    pub(super) fn record_start(
        &mut self,
        start: ProcessStart,
        view: &View,
    ) -> Option<(PathBuf, TrialConfig)> {
        let before = self.job.record.status().clone();
        match self.write_start(start) {
            Ok(written) => Some(written),
            Err(error) => {
                *self.job.record.status() = before;
                self.repeat_save(&error, view);
                None
            }
        }
    }

    fn write_start(&mut self, start: ProcessStart) -> Result<(PathBuf, TrialConfig), Failure> {
        let folder = self.job.record.attempt(start.slot, start.attempt)?;
        let config = self.config(start);
        files::write_json(&folder.join("trial.json"), &config)?;
        inference::begin(self.job.record.status(), start);
        self.job.record.save()?;
        Ok((folder, config))
    }
}
