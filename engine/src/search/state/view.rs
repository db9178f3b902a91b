//! Rungs and ranks of a search, to explain its decisions.

use super::SearchState;
use crate::search::view::{BracketView, MedianStanding, Rule, Standing};

impl SearchState {
    /// Returns the rule by which trials continue.
    pub fn rule(&self) -> Rule {
        self.method.as_dyn().rule()
    }

    /// Returns the rank of a trial in the highest rung whose length is at most `units`. `None` if
    /// it is not in that rung, or if the method does not compare trials.
    pub fn standing(&self, trial: u32, units: u64) -> Option<Standing> {
        self.method.as_dyn().standing(trial, units, &self.book)
    }

    /// Returns the length up to which a trial of a bracket trains before it is compared, if it was
    /// granted `units`.
    pub fn goal(&self, group: u32, units: u64) -> u64 {
        self.method.as_dyn().goal(group, units)
    }

    /// Returns the length of the longest rung of a bracket.
    pub fn greatest_units(&self, group: u32) -> u64 {
        self.method.as_dyn().goal(group, self.method.as_dyn().length_at(group, u64::MAX))
    }

    /// Returns the comparison by which median stopping stopped a trial.
    pub fn median_of(&self, trial: u32) -> Option<MedianStanding> {
        self.method.as_dyn().median_of(trial)
    }

    /// Returns the brackets. If there is only one, all trials belong to it.
    pub fn views(&self) -> Vec<BracketView> {
        self.method.as_dyn().views(&self.book)
    }
}
