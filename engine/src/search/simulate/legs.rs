//! Begin of a leg, and its end by a stop.

use std::cmp::Ordering;
use std::collections::BTreeSet;

use super::{Exit, Outcome, Run};
use crate::search::state::Turn;
use crate::search::turn::Step;

/// End of a leg in the queue. The earliest one is the greatest, as the heap returns the greatest.
#[derive(Clone, Copy, Debug)]
pub(super) struct Leg {
    pub(super) end: f64,
    pub(super) trial: u32,
}

impl PartialEq for Leg {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl Eq for Leg {}

impl PartialOrd for Leg {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Leg {
    fn cmp(&self, other: &Self) -> Ordering {
        other.end.total_cmp(&self.end).then(other.trial.cmp(&self.trial))
    }
}

/// A leg from its begin.
#[derive(Clone, Copy, Debug)]
pub(super) struct Training {
    /// Time from which the trial trains.
    since: f64,
    /// Length from which it trains.
    from: u64,
    /// Length trained before.
    before: u64,
}

impl Run<'_> {
    pub(super) fn exit(&self, trial: u32) -> Option<(u64, Exit)> {
        let granted = self.search.book().trial(trial).units;
        self.curves[trial as usize].exit.filter(|(units, _)| *units <= granted)
    }

    /// Begins the next leg of a trial on a worker that is already counted as busy. The first leg of
    /// a copy continues from its source in any case.
    pub(super) fn begin_leg(&mut self, trial: u32, now: f64, cost: f64, is_first: bool) {
        let granted = self.search.book().trial(trial).units;
        let before = self.trials[trial as usize].units;
        // A copy that exits below the length of its source exits at the beginning of its first leg.
        let end = self.exit(trial).map_or(granted, |(units, _)| units.max(before));
        let from = if self.machine.is_from_scratch && !is_first { 0 } else { before };
        let units = end.saturating_sub(from);
        self.units_total += u128::from(units);
        self.trials[trial as usize].units = end;
        let seconds = units as f64 * self.curves[trial as usize].seconds_per_unit;
        let since = now + cost;
        self.training.insert(trial, Training { since, from, before });
        self.legs.push(Leg { end: since + seconds, trial });
    }

    /// Ends the legs of trials that a turn has stopped while they trained. Their complete units
    /// count.
    pub(super) fn drop_legs(&mut self, turns: &[Turn], now: f64) {
        let changes = turns.iter().flat_map(|turn| &turn.changes);
        let stopped = changes.filter(|change| matches!(change.step, Step::Stop { .. }));
        let mut dropped = BTreeSet::new();
        for trial in stopped.map(|change| change.trial) {
            let Some(Training { since, from, before }) = self.training.remove(&trial) else {
                continue;
            };
            let entry = &mut self.trials[trial as usize];
            let planned = entry.units.saturating_sub(from);
            // Negative until the trial trains, and not a number if units take no time: 0 units.
            let elapsed = (now - since) / self.curves[trial as usize].seconds_per_unit;
            let trained = planned.min(elapsed as u64);
            entry.units = before.max(from + trained);
            entry.outcome = Outcome::Stopped;
            self.units_total -= u128::from(planned - trained);
            self.num_busy -= 1;
            dropped.insert(trial);
        }
        if !dropped.is_empty() {
            self.legs.retain(|leg| !dropped.contains(&leg.trial));
        }
    }
}
