//! Trials that may start, and trials that hold slots without training.

use std::collections::{BTreeMap, BTreeSet};

use stoker_engine::experiment::{Ledger, start_position};
use stoker_engine::search::book::TrialState;
use stoker_engine::trial::{self, TrialRecord};

/// Position among the trials that wait for room.
type Position = (std::cmp::Reverse<bool>, u64, u32);

/// Classes of open trials, kept up to date trial by trial.
#[derive(Debug, Default)]
pub(super) struct Queue {
    /// Trials without an attempt that have a length to train, in the order in which they start.
    startable: BTreeSet<Position>,
    positions: BTreeMap<u32, Position>,
    /// Trials with an attempt and nothing to train.
    idle: BTreeSet<u32>,
    /// Trials of `idle` that were told to end their attempt.
    released: BTreeSet<u32>,
    /// Trials that have changed since [`take_touched`](Self::take_touched).
    touched: BTreeSet<u32>,
}

impl Queue {
    /// Records that a trial has changed.
    pub(super) fn touch(&mut self, index: u32) {
        self.touched.insert(index);
    }

    /// Records that all trials may have changed.
    pub(super) fn touch_all<'a>(&mut self, indexes: impl Iterator<Item = &'a u32>) {
        self.touched.extend(indexes);
    }

    /// Returns the changed trials, if any.
    pub(super) fn take_touched(&mut self) -> Option<BTreeSet<u32>> {
        Some(std::mem::take(&mut self.touched)).filter(|touched| !touched.is_empty())
    }

    /// Classifies a trial.
    pub(super) fn update(&mut self, ledger: &Ledger, record: &TrialRecord) {
        let index = record.spec.index;
        if let Some(position) = self.positions.remove(&index) {
            self.startable.remove(&position);
        }
        let is_open = trial::closed(record).is_none();
        let is_live = trial::live_attempt(record).is_some();
        let state = ledger.state(index);
        if is_open && !is_live && state == Some(TrialState::Active) {
            let position = start_position(ledger, record);
            self.positions.insert(index, position);
            self.startable.insert(position);
        }
        let has_nothing = matches!(state, Some(TrialState::Waiting | TrialState::Paused));
        if is_open && is_live && has_nothing {
            self.idle.insert(index);
        } else {
            self.idle.remove(&index);
            self.released.remove(&index);
        }
    }

    /// Returns the first `num` trials that may start, in order.
    pub(super) fn startable(&self, num: usize) -> Vec<u32> {
        self.startable.iter().map(|position| position.2).take(num).collect()
    }

    /// Returns the idle trials that were not told to end their attempt.
    pub(super) fn idle(&self) -> Vec<u32> {
        self.idle.difference(&self.released).copied().collect()
    }

    /// Tells an idle trial to end its attempt.
    pub(super) fn release(&mut self, index: u32) {
        self.released.insert(index);
    }

    /// Returns whether a trial was told to end its attempt because it has nothing to train.
    pub(super) fn is_released(&self, index: u32) -> bool {
        self.released.contains(&index)
    }
}
