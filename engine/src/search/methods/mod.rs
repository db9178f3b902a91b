//! Search methods: they decide which trials are created, and how long each trains.

mod async_halving;
mod fixed_length;
mod pbt;
mod sync_halving;
mod tournament;

pub use async_halving::{AsyncHalving, AsyncHalvingConfig};
pub use fixed_length::FixedLength;
pub use pbt::{Pbt, PbtConfig};
pub use sync_halving::{BracketConfig, SyncHalving};
pub use tournament::Tournament;

use std::fmt::Debug;

use super::book::{Before, Book};
use super::turn::{Event, Step};

/// Rules by which a search creates, continues and stops trials.
///
/// The state of a method is a function of the events and steps that it was given. It reads nothing
/// else, so a search that is rebuilt from its record decides as the original would.
pub trait SearchMethod: Debug + Send {
    /// Takes in an event, after `book` did. Decides nothing. `before` is the event's
    /// trial as it was before it.
    fn observe(&mut self, event: &Event, before: Option<Before>, book: &Book);

    /// Takes in a step, before `book` does. An earlier version may have decided it by other rules.
    fn commit(&mut self, step: &Step, book: &Book);

    /// Returns the next step that follows from the state, if any. Changes nothing.
    fn decide(&self, book: &Book) -> Option<Step>;
}
