//! Best weights: a copy of the model that a callback keeps and training ends with.

use burn::module::Module;

use super::run::Run;
use super::state::Validated;
use crate::callback::Logs;
use crate::checkpoint::CheckpointContents;
use crate::{Result, precision, record};

/// File of the kept model; absent if no callback keeps one.
pub(super) const BEST_WEIGHTS: &str = "kept.bpk";

impl<M: Module + 'static, B: Send + 'static> Run<'_, M, B> {
    /// Keeps a copy of the current model. Every rank keeps its own; all copies are equal.
    pub(super) fn keep_weights(&mut self) -> Result<()> {
        let precision = self.context.config.mixed_precision;
        self.broadcast_buffers()?;
        self.model.replace(|model| Ok(precision::to_single_statistics(model, precision)))?;
        self.best_weights = Some(record::snapshot(&*self.model).into_bytes()?);
        let batches = self.state.batches;
        let here = self.state.validated.clone().filter(|validated| validated.batches == batches);
        self.state.best_weights_validation =
            here.or_else(|| Some(Validated::new(batches, &Logs::new())));
        Ok(())
    }

    /// At the end of training, replaces the model by the kept copy, if there is one. The kept
    /// model's validation becomes the validation of this batch. Idempotent.
    pub(super) fn restore_best_weights(&mut self) -> Result<()> {
        let (Some(model), Some(validated)) =
            (self.best_weights.clone(), &self.state.best_weights_validation)
        else {
            return Ok(());
        };
        let metrics = validated.metrics();
        self.state.validated =
            (!metrics.is_empty()).then(|| Validated::new(self.state.batches, &metrics));
        let contents = CheckpointContents::from([(record::MODEL.into(), model)]);
        self.model.replace(|model| record::load_model(model, &contents))?;
        #[cfg(feature = "learner")]
        self.optimizers.set_model(&*self.model);
        Ok(())
    }
}
