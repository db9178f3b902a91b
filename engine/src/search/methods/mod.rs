//! Search methods: they decide which trials are created, and how long each trains.

mod any;
mod async_halving;
mod external;
mod fixed_length;
mod median;
mod pbt;
mod sync_halving;
mod tournament;

pub use any::AnyMethod;
pub use async_halving::{AsyncHalving, AsyncHalvingConfig};
pub use external::{DueQuestion, External};
pub use fixed_length::FixedLength;
pub use median::Median;
pub use pbt::{Pbt, PbtConfig};
pub use sync_halving::{BracketConfig, SyncHalving};
pub use tournament::Tournament;

use std::collections::BTreeMap;
use std::fmt::Debug;

use super::book::{Before, Book};
use super::rung::Rung;
use super::turn::{Edit, Event, Step};
use super::view::{BracketView, MedianStanding, PEERS_MAX, Rule, Standing};

/// Rules by which a search creates, continues and stops trials.
///
/// The state of a method is a function of the events and steps that it was given. It reads nothing
/// else, so a search that is rebuilt from its record decides as the original would.
pub trait SearchMethod: Debug + Send {
    /// Takes in an event, after `book` did. Decides nothing. `before` is the event's
    /// trial as it was before it.
    fn observe(&mut self, event: &Event, before: Option<Before>, book: &Book);

    /// Takes in a step, before `book` does. An earlier version may have decided it by other rules.
    /// [`Step::StopAll`] arrives as a [`Step::Stop`] for each open trial.
    fn commit(&mut self, step: &Step, book: &Book);

    /// Returns the next step that follows from the state, if any. Changes nothing.
    fn decide(&self, book: &Book) -> Option<Step>;

    /// Returns whether the search has use for a trial that continues after its end, at its granted
    /// length.
    fn may_reopen(&self, _trial: u32, _book: &Book) -> bool {
        true
    }

    /// Takes in new numbers. Trials that were created stay.
    fn edit(&mut self, edit: &Edit);

    /// Returns the number of trials of each bracket, without those with invalid hyperparameters;
    /// empty if no edit depends on it.
    fn bracket_trials(&self) -> Vec<u32> {
        vec![]
    }

    /// Returns the maximum number of active trials; `None` means no limit.
    fn places(&self) -> Option<u32>;

    /// Returns the number of brackets.
    fn num_groups(&self) -> u32;

    /// Returns the length with which the trials of a bracket begin.
    fn first_units(&self, group: u32) -> u64;

    /// Returns the shortest length of a bracket at or above this one, at most the greatest length.
    /// The search decides about trials at these lengths.
    fn length_at(&self, group: u32, units: u64) -> u64;

    /// Returns the length up to which a trial of a bracket trains before it is compared, if it was
    /// granted `units`. Greater than `units` if trials train in steps.
    fn goal(&self, _group: u32, units: u64) -> u64 {
        units
    }

    /// Returns the comparison by which a trial was stopped between the lengths of the method.
    fn median_of(&self, _trial: u32) -> Option<MedianStanding> {
        None
    }

    /// Returns the question that an external searcher must answer now, if any. Until then, the
    /// search is not over.
    fn question(&self) -> Option<DueQuestion> {
        None
    }

    /// Returns the number of trials by the length that they train to if none of them fails.
    fn forecast(&self) -> BTreeMap<u64, u64>;

    /// Returns the rule by which trials continue.
    fn rule(&self) -> Rule;

    /// Returns the rank of a trial in the highest rung whose length is at most `units`. `None` if
    /// it is not in that rung, or if the method does not compare trials.
    fn standing(&self, trial: u32, units: u64, book: &Book) -> Option<Standing>;

    /// Returns the brackets. If there is only one, all trials belong to it.
    fn views(&self, book: &Book) -> Vec<BracketView>;
}

/// Returns the rank of a trial in a rung, with the numbers of a rule that continues the best ones.
fn standing_in(rung: &Rung, trial: u32) -> Option<Standing> {
    let (rank, loss) = rung.rank(trial)?;
    let others = rung.ranking().filter(|(other, _)| *other != trial);
    Some(Standing {
        rung: 0,
        num_rungs: 1,
        units: 0,
        loss,
        rank,
        num_results: rung.len(),
        num_continuing: rung.num_best(),
        continues: rung.is_among_best(trial),
        cut: rung.cut(),
        num_required: 0,
        num_missing: 0,
        peers: others.take(PEERS_MAX).collect(),
    })
}

/// Counts trials by the length at which they stop, given how many reach each length. The numbers
/// never increase.
fn stops(lengths: &[u64], sizes: &[u64]) -> BTreeMap<u64, u64> {
    let next = sizes.iter().skip(1).chain([&0]);
    let stops = lengths.iter().zip(sizes.iter().zip(next));
    stops.map(|(length, (size, next))| (*length, size - next)).filter(|(_, num)| *num > 0).collect()
}

/// Adds counts of trials by length.
fn add_all(counts: impl Iterator<Item = BTreeMap<u64, u64>>) -> BTreeMap<u64, u64> {
    let mut sum = BTreeMap::new();
    for (units, num) in counts.flatten() {
        *sum.entry(units).or_default() += num;
    }
    sum
}
