//! Commits the shards of a worker in the background, one at a time.

use bytes::Bytes;
use stoker_api::inference::Commit;
use tokio::task::JoinHandle;

use super::output_folder::OutputFolder;
use super::work::while_accessing;
use super::{infrastructure, progress};
use crate::Result;
use crate::context::Context;

/// Commits of a worker. At most one is in progress while the worker processes the next shard.
///
/// Dropping it waits for that commit, so that a panic of the program does not lose a shard.
pub(super) struct Commits<'a> {
    context: &'a Context,
    output: &'a OutputFolder,
    /// Rows of the shard that is being committed, and the write of its part and commit.
    in_progress: Option<(u32, JoinHandle<Result<()>>)>,
    /// Rows in committed shards of this slot.
    done: u64,
    total: u64,
}

impl<'a> Commits<'a> {
    /// Creates a writer for a slot with `done` committed rows of `total`, and reports these.
    pub(super) fn new(
        context: &'a Context,
        output: &'a OutputFolder,
        done: u64,
        total: u64,
    ) -> Self {
        progress(context, done, total);
        Self { context, output, in_progress: None, done, total }
    }

    /// Waits for the previous commit, and starts this one, of a shard with this many input rows.
    ///
    /// # Errors
    ///
    /// Returns the error of the previous commit.
    pub(super) fn start(&mut self, commit: Commit, part: Bytes, rows: u32) -> Result<()> {
        self.finish()?;
        let output = self.output.clone();
        let written = self.output.rt.spawn(async move { output.commit(&commit, part).await });
        self.in_progress = Some((rows, written));
        Ok(())
    }

    /// Reports the previous commit if it has ended. Does not wait.
    ///
    /// # Errors
    ///
    /// Returns the error of that commit.
    pub(super) fn poll(&mut self) -> Result<()> {
        match &self.in_progress {
            Some((_, written)) if written.is_finished() => self.finish(),
            _ => Ok(()),
        }
    }

    /// Waits for the previous commit.
    ///
    /// # Errors
    ///
    /// Returns the error of that commit.
    pub(super) fn finish(&mut self) -> Result<()> {
        let Some((rows, written)) = self.in_progress.take() else { return Ok(()) };
        let progress_state = &self.context.distributed().progress;
        let is_local = self.output.storage.folder().is_some();
        let wait = || self.output.rt.block_on(written);
        let written = while_accessing(progress_state, is_local, wait);
        written.map_err(|error| infrastructure(format!("cannot commit a shard: {error}")))??;
        self.done += u64::from(rows);
        progress(self.context, self.done, self.total);
        Ok(())
    }
}

impl Drop for Commits<'_> {
    fn drop(&mut self) {
        let _ = self.finish();
    }
}
