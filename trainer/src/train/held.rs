//! A model that is given away for a step and taken back.

use std::ops::Deref;

use crate::Result;

/// A model. Held alone, its parameters are updated in place; a step on a clone would make all of them
/// anew.
pub(super) struct Held<M>(Option<M>);

impl<M> Held<M> {
    pub(super) fn new(model: M) -> Self {
        Self(Some(model))
    }

    /// Puts what `with` makes of the model in its place. After an error there is none, and the run
    /// must end.
    pub(super) fn replace(&mut self, with: impl FnOnce(M) -> Result<M>) -> Result<()> {
        let model = self.0.take().ok_or("the model was lost in a step")?;
        self.0 = Some(with(model)?);
        Ok(())
    }

    pub(super) fn into_inner(self) -> Result<M> {
        Ok(self.0.ok_or("the model was lost in a step")?)
    }
}

impl<M> Deref for Held<M> {
    type Target = M;

    fn deref(&self) -> &M {
        self.0.as_ref().expect("nobody looks at a model after a step that failed")
    }
}
