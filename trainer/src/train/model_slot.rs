//! Slot that lends the model by value for a step.

use std::ops::Deref;

use crate::Result;

/// Slot for the model. Steps take the model by value: parameters that are not shared are updated in
/// place, while a step on a clone would allocate all of them again.
pub(super) struct ModelSlot<M>(Option<M>);

impl<M> ModelSlot<M> {
    pub(super) fn new(model: M) -> Self {
        Self(Some(model))
    }

    /// Replaces the model by the result of `with`. After an error, the slot is empty and the run
    /// must end.
    pub(super) fn replace(&mut self, with: impl FnOnce(M) -> Result<M>) -> Result<()> {
        let model = self.0.take().ok_or("no model: a previous step failed")?;
        self.0 = Some(with(model)?);
        Ok(())
    }

    pub(super) fn into_inner(self) -> Result<M> {
        Ok(self.0.ok_or("no model: a previous step failed")?)
    }
}

impl<M> Deref for ModelSlot<M> {
    type Target = M;

    fn deref(&self) -> &M {
        self.0.as_ref().expect("the run ends after a failed step")
    }
}
