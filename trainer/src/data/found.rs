//! Conversion of lookup results to items.

use crate::{Error, Result};

/// Result of looking up an item by index: an `Option`, or a `Result` with any error.
pub trait Found<I> {
    /// Returns the item, or `None` if the index has no item.
    ///
    /// # Errors
    ///
    /// Returns the error of the lookup.
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
