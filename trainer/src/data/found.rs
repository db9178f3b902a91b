//! What a lookup of an item by its index may give.

use crate::{Error, Result};

/// An item, where there is one: an `Option`, or a `Result` with any error.
pub trait Found<I> {
    /// The item; `None` where there is none of this index.
    ///
    /// # Errors
    ///
    /// What the lookup failed with.
    fn found(self) -> Result<Option<I>>;
}

impl<I> Found<I> for Option<I> {
    fn found(self) -> Result<Self> {
        Ok(self)
    }
}

impl<I, E: Into<Error>> Found<I> for Result<I, E> {
    fn found(self) -> Result<Option<I>> {
        self.map(Some).map_err(Into::into)
    }
}
