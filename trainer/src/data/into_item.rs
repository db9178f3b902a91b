//! Conversion of lookup results to items.

use crate::{Error, Result};

/// Result of looking up an item by index: an `Option`, or a `Result` with any error.
pub trait IntoItem<I> {
    /// Returns the item, or `None` if the index has no item.
    ///
    /// # Errors
    ///
    /// Returns the error of the lookup.
    fn into_item(self) -> Result<Option<I>>;
}

impl<I> IntoItem<I> for Option<I> {
    fn into_item(self) -> Result<Self> {
        Ok(self)
    }
}

impl<I, E: Into<Error>> IntoItem<I> for Result<I, E> {
    fn into_item(self) -> Result<Option<I>> {
        self.map(Some).map_err(Into::into)
    }
}
