//! Ranking of the results at one length.

use std::cmp::Ordering;
use std::collections::{BTreeMap, BTreeSet};

/// Which of several equal losses ranks first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ties {
    /// The result that came first.
    FirstIsBest,
    /// The result that came last.
    LastIsBest,
}

/// Searched metric with a sign such that less is better. Losses have a total order: NaN is
/// infinity, and both zeros are equal.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Loss(f64);

impl Loss {
    /// Worst possible loss, of a trial that ended before its result.
    pub const INFINITE: Self = Self(f64::INFINITY);

    /// Returns the loss of a metric whose sign makes less better.
    pub fn new(loss: f64) -> Self {
        Self(if loss.is_nan() { f64::INFINITY } else { loss + 0.0 })
    }

    /// Returns the loss as a number.
    pub fn value(self) -> f64 {
        self.0
    }

    /// Returns the loss of a metric.
    pub fn of_metric(metric: f64, smaller_is_better: bool) -> Self {
        Self::new(if smaller_is_better { metric } else { -metric })
    }

    /// Returns the metric with this loss. `None` for an infinite loss: of NaN, or without a result.
    pub fn to_metric(self, smaller_is_better: bool) -> Option<f64> {
        // Not `-loss`, which is -0 for 0.
        let metric = if smaller_is_better { self.0 } else { 0.0 - self.0 };
        (self.0 < f64::INFINITY).then_some(metric)
    }
}

impl Eq for Loss {}

impl PartialOrd for Loss {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Loss {
    fn cmp(&self, other: &Self) -> Ordering {
        self.0.total_cmp(&other.0)
    }
}

/// Position of an entry in the ranking: loss first, then arrival, negative if the last is best.
/// Arrival is the order of a turn, then 0 for the result of its event and 1 for a promotion in
/// name, which follow it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Key {
    loss: Loss,
    arrival: i64,
    trial: u32,
}

/// Returns the arrival of the result of a turn. Orders count turns, so they are far below 2^62.
fn arrival(order: u64) -> i64 {
    2 * order.min(1 << 61) as i64
}

/// Remaining options of an entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fate {
    /// May be promoted or stopped.
    Undecided,
    /// Is in a higher rung, or on the way there.
    Promoted,
    /// Can neither train nor be stopped, but may be promoted in name.
    Closed,
    /// Stopped by the search.
    Stopped,
}

/// Results of all trials that reached one length, split into the best ones and the rest. All
/// operations take O(log n).
#[derive(Clone, Debug, PartialEq)]
pub struct Rung {
    ties: Ties,
    entries: BTreeMap<u32, (Key, Fate)>,
    /// Best entries. Their number follows from [`set_num_best`](Self::set_num_best).
    best: BTreeSet<Key>,
    rest: BTreeSet<Key>,
    /// Entries of `best` that are neither promoted nor stopped.
    candidates: BTreeSet<Key>,
    /// Undecided entries of `rest`.
    losers: BTreeSet<Key>,
    num_best: usize,
}

impl Rung {
    /// Returns an empty rung.
    pub fn new(ties: Ties) -> Self {
        Self {
            ties,
            entries: BTreeMap::new(),
            best: BTreeSet::new(),
            rest: BTreeSet::new(),
            candidates: BTreeSet::new(),
            losers: BTreeSet::new(),
            num_best: 0,
        }
    }

    /// Returns which of equal losses ranks first.
    pub fn ties(&self) -> Ties {
        self.ties
    }

    /// Returns the number of entries.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Returns `true` if the rung has no entries.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Adds the result of a trial in the turn with this order.
    pub fn insert(&mut self, trial: u32, loss: Loss, order: u64) {
        self.add(trial, loss, arrival(order), Fate::Undecided);
    }

    /// Adds a trial that ended before it reached this length.
    pub fn insert_closed(&mut self, trial: u32, order: u64) {
        self.add(trial, Loss::INFINITE, arrival(order) + 1, Fate::Closed);
    }

    fn add(&mut self, trial: u32, loss: Loss, arrival: i64, fate: Fate) {
        self.remove(trial);
        let arrival = if self.ties == Ties::FirstIsBest { arrival } else { -arrival };
        let key = Key { loss, arrival, trial };
        self.entries.insert(trial, (key, fate));
        // The better part keeps its size: its worst entry moves if the new entry is better.
        if self.best.last().is_some_and(|worst| key < *worst) {
            self.link(key, fate, true);
            self.balance();
        } else {
            self.link(key, fate, false);
            self.balance();
        }
    }

    /// Removes a trial, if it is an entry.
    pub fn remove(&mut self, trial: u32) {
        let Some((key, _)) = self.entries.remove(&trial) else { return };
        for set in [&mut self.best, &mut self.rest, &mut self.candidates, &mut self.losers] {
            set.remove(&key);
        }
        self.balance();
    }

    /// Sets how many entries are among the best.
    pub fn set_num_best(&mut self, num_best: usize) {
        self.num_best = num_best;
        self.balance();
    }

    /// Returns `true` if a trial is among the best.
    pub fn is_among_best(&self, trial: u32) -> bool {
        self.entries.get(&trial).is_some_and(|(key, _)| self.best.contains(key))
    }

    /// Returns the best entry among the best that was not promoted yet.
    pub fn candidate(&self) -> Option<u32> {
        self.candidates.first().map(|key| key.trial)
    }

    /// Returns the trials among the best that were not promoted yet, best first.
    pub fn candidates(&self) -> impl Iterator<Item = u32> + '_ {
        self.candidates.iter().map(|key| key.trial)
    }

    /// Returns the number of [`candidates`](Self::candidates).
    pub fn num_candidates(&self) -> usize {
        self.candidates.len()
    }

    /// Returns the undecided trials that are not among the best, best first.
    pub fn losers(&self) -> impl Iterator<Item = u32> + '_ {
        self.losers.iter().map(|key| key.trial)
    }

    /// Returns all entries, best first.
    pub fn ranking(&self) -> impl Iterator<Item = (u32, Loss)> + '_ {
        self.best.iter().chain(&self.rest).map(|key| (key.trial, key.loss))
    }

    /// Returns the rank of a trial, from 1, and its loss. Takes O(n).
    pub fn rank(&self, trial: u32) -> Option<(usize, Loss)> {
        let (key, _) = self.entries.get(&trial)?;
        let num_better = match self.best.contains(key) {
            true => self.best.range(..key).count(),
            false => self.best.len() + self.rest.range(..key).count(),
        };
        Some((num_better + 1, key.loss))
    }

    /// Returns the number of entries among the best.
    pub fn num_best(&self) -> usize {
        self.best.len()
    }

    /// Returns the loss of the worst entry among the best.
    pub fn cut(&self) -> Option<Loss> {
        self.best.last().map(|key| key.loss)
    }

    /// Returns `true` if a trial was promoted.
    pub fn is_promoted(&self, trial: u32) -> bool {
        self.entries.get(&trial).is_some_and(|(_, fate)| *fate == Fate::Promoted)
    }

    /// Returns the trials that were promoted, by index.
    pub fn promoted(&self) -> impl Iterator<Item = u32> + '_ {
        let is_promoted = |(_, (_, fate)): &(&u32, &(Key, Fate))| *fate == Fate::Promoted;
        self.entries.iter().filter(is_promoted).map(|(trial, _)| *trial)
    }

    /// Records that a trial was promoted.
    pub fn promote(&mut self, trial: u32) {
        self.set_fate(trial, Fate::Promoted);
    }

    /// Records that a trial was stopped.
    pub fn stop(&mut self, trial: u32) {
        self.set_fate(trial, Fate::Stopped);
    }

    /// Records that all undecided trials were stopped, except some. Those among the best are
    /// included: the rank of a trial rises when another one is deleted.
    pub fn stop_undecided(&mut self, except: &[u32]) {
        let except: BTreeSet<u32> = except.iter().copied().collect();
        let is_undecided = |key: &&Key| self.entries[&key.trial].1 == Fate::Undecided;
        let undecided = self.losers.iter().chain(self.candidates.iter().filter(is_undecided));
        let trials: Vec<u32> = undecided.map(|key| key.trial).collect();
        trials
            .into_iter()
            .filter(|trial| !except.contains(trial))
            .for_each(|trial| self.stop(trial));
    }

    /// Records that a trial has ended by itself or by the user. It may still be promoted in name.
    pub fn close(&mut self, trial: u32) {
        let is_undecided = |(_, fate): &(Key, Fate)| *fate == Fate::Undecided;
        if self.entries.get(&trial).is_some_and(is_undecided) {
            self.set_fate(trial, Fate::Closed);
        }
    }

    /// Records that a trial continues after its end. It may be promoted or stopped again.
    pub fn reopen(&mut self, trial: u32) {
        let is_promoted = |(_, fate): &(Key, Fate)| *fate == Fate::Promoted;
        if !self.entries.get(&trial).is_some_and(is_promoted) {
            self.set_fate(trial, Fate::Undecided);
        }
    }

    fn set_fate(&mut self, trial: u32, fate: Fate) {
        let Some(entry) = self.entries.get_mut(&trial) else { return };
        entry.1 = fate;
        let key = entry.0;
        let is_best = self.best.contains(&key);
        self.link(key, fate, is_best);
    }

    /// Puts an entry into the sets that it belongs to, and removes it from the others.
    fn link(&mut self, key: Key, fate: Fate, is_best: bool) {
        let is_candidate = is_best && matches!(fate, Fate::Undecided | Fate::Closed);
        let is_loser = !is_best && fate == Fate::Undecided;
        for (set, is_member) in [
            (&mut self.best, is_best),
            (&mut self.rest, !is_best),
            (&mut self.candidates, is_candidate),
            (&mut self.losers, is_loser),
        ] {
            match is_member {
                true => set.insert(key),
                false => set.remove(&key),
            };
        }
    }

    /// Moves entries between both parts until the better one has its size.
    fn balance(&mut self) {
        while self.best.len() < self.num_best {
            let Some(key) = self.rest.first().copied() else { return };
            self.link(key, self.entries[&key.trial].1, true);
        }
        while self.best.len() > self.num_best {
            let Some(key) = self.best.last().copied() else { return };
            self.link(key, self.entries[&key.trial].1, false);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns a rung of trials 0 to 3, whose losses grow with the index. The first two are the
    /// best.
    fn rung() -> Rung {
        let mut rung = Rung::new(Ties::FirstIsBest);
        assert!(rung.is_empty());
        (0_u8..4).for_each(|trial| rung.insert(trial.into(), Loss::new(trial.into()), 7));
        rung.set_num_best(2);
        assert!(!rung.is_empty());
        rung
    }

    fn check(rung: &Rung, candidates: &[u32], losers: &[u32]) {
        assert_eq!(rung.candidates().collect::<Vec<_>>(), candidates);
        assert_eq!(rung.num_candidates(), candidates.len());
        assert_eq!(rung.losers().collect::<Vec<_>>(), losers);
    }

    #[test]
    fn trials_are_promoted_and_stopped_once() {
        let mut rung = rung();
        check(&rung, &[0, 1], &[2, 3]);
        rung.promote(0);
        check(&rung, &[1], &[2, 3]);
        assert_eq!([0, 1, 9].map(|trial| rung.is_promoted(trial)), [true, false, false]);
        rung.stop(2);
        check(&rung, &[1], &[3]);
        // Neither is decided again after the end of the trial, even if its rank rises.
        (0..3).for_each(|trial| rung.close(trial));
        rung.set_num_best(4);
        check(&rung, &[1, 3], &[]);
    }

    #[test]
    fn ended_trials_are_promoted_but_not_stopped() {
        let mut rung = rung();
        rung.close(1);
        rung.close(3);
        check(&rung, &[0, 1], &[2]);
        rung.reopen(3);
        check(&rung, &[0, 1], &[2, 3]);
    }

    #[test]
    fn equal_losses_rank_by_arrival() {
        let ranking = |ties: Ties| {
            let mut rung = Rung::new(ties);
            // In one turn, the result precedes the promotion in name. Indexes do not matter.
            rung.insert_closed(7, 1);
            rung.insert_closed(3, 2);
            rung.insert(8, Loss::INFINITE, 2);
            rung.insert(1, Loss::INFINITE, 3);
            rung.ranking().map(|(trial, _)| trial).collect::<Vec<_>>()
        };
        assert_eq!(ranking(Ties::FirstIsBest), [7, 8, 3, 1]);
        assert_eq!(ranking(Ties::LastIsBest), [1, 3, 8, 7]);
    }
}
