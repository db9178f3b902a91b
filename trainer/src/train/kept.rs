//! Weights that a callback has kept, which training ends with.

use burn::module::Module;

use super::run::Run;
use super::state::Validated;
use crate::callback::Logs;
use crate::checkpoint::Parts;
use crate::{Result, precision, record};

/// The file of a model that a callback has kept; absent where none has.
pub(super) const KEPT: &str = "kept.bpk";

impl<M: Module + 'static, B: Send + 'static> Run<'_, M, B> {
    /// Keeps the model as it is now. Every rank keeps its own, which are equal.
    pub(super) fn keep_weights(&mut self) -> Result<()> {
        let precision = self.context.config.mixed_precision;
        self.share_buffers()?;
        self.model.replace(|model| Ok(precision::raised(model, precision)))?;
        self.kept = Some(record::snapshot(&*self.model).into_bytes()?);
        let batches = self.state.batches;
        let here = self.state.validated.clone().filter(|it| it.batches == batches);
        self.state.kept = here.or_else(|| Some(Validated::new(batches, &Logs::new())));
        Ok(())
    }

    /// Makes the model the one that was kept, if one was: training is over. Done once more it changes
    /// nothing. What the kept model's validation gave is that of this batch then.
    pub(super) fn take_kept(&mut self) -> Result<()> {
        let (Some(model), Some(validated)) = (self.kept.clone(), &self.state.kept) else {
            return Ok(());
        };
        let metrics = validated.metrics();
        self.state.validated =
            (!metrics.is_empty()).then(|| Validated::new(self.state.batches, &metrics));
        let parts = Parts::from([(record::MODEL.into(), model)]);
        self.model.replace(|model| record::load_model(model, &parts))?;
        #[cfg(feature = "learner")]
        self.optimizers.adopt(&*self.model);
        Ok(())
    }
}
