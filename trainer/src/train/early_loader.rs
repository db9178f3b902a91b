//! Starts the workers of the training data before the checkpoint is restored.

use burn::module::Module;

use super::run::Run;
use crate::data::Loader;

impl<M: Module + 'static, B: Send + 'static> Run<'_, M, B> {
    /// Starts the workers at the batch of the checkpoint that will probably be restored, if the
    /// data has workers.
    pub(super) fn start_workers_early(&mut self) {
        let expected = self.io().expected_batches();
        self.start_workers_at(expected.unwrap_or(self.state.batches));
    }

    /// Starts the workers at the current batch, unless they already prepare that batch. Does
    /// nothing without workers.
    pub(super) fn start_workers(&mut self) {
        self.start_workers_at(self.state.batches);
    }

    fn start_workers_at(&mut self, batch: u64) {
        let is_started =
            self.early_loader.as_ref().is_some_and(|loader| loader.position() == batch);
        if self.train.has_workers() && !is_started {
            // The workers at another batch exit first, because they use the same source.
            self.early_loader = None;
            self.early_loader = Some(self.open_loader(batch));
        }
    }

    /// Returns batches from the current position on, without end: the granted length may grow.
    pub(super) fn loader(&mut self) -> Loader<B> {
        let early = self.early_loader.take();
        early.unwrap_or_else(|| self.open_loader(self.state.batches))
    }

    fn open_loader(&self, batch: u64) -> Loader<B> {
        let plan = self.context.loader_plan(self.batch_size, true);
        self.train.loader(plan, batch..u64::MAX)
    }
}
