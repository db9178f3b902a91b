//! Population based training: after each round, copies of the best trials replace the worst.
//!
//! Source: Jaderberg et al., "Population Based Training of Neural Networks" (2017).

use std::collections::{BTreeMap, BTreeSet};

use stoker_api::trial::CloseCause;

use super::SearchMethod;
use crate::search::book::{Before, Book, TrialEntry, TrialState};
use crate::search::rung::Loss;
use crate::search::turn::{Edit, Event, Source, Step};
use crate::search::view::{BracketView, NextPromotion, PEERS_MAX, Rule, RungView, Standing};

/// Size of a population and its rounds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PbtConfig {
    /// Number of trials that train at a time.
    pub population_size: u32,
    /// Length of a round.
    pub units_per_round: u64,
    /// Number of rounds, at least 1.
    pub num_rounds: u32,
    /// Number of trials that are replaced after each round, at most half of the population.
    pub num_truncated: u32,
}

/// Population based training. The group of a trial is its first round, from 0.
#[derive(Clone, Debug, PartialEq)]
pub struct Pbt {
    config: PbtConfig,
    num_created: u32,
    /// Trials with a result, by length.
    finished: BTreeMap<u64, BTreeSet<u32>>,
    /// Number of active trials, by granted length.
    on_way: BTreeMap<u64, u32>,
    /// Number of copies that were created after the round with this length.
    num_copies: BTreeMap<u64, u32>,
    /// Origin of the copies.
    sources: BTreeMap<u32, Source>,
    /// Trials with invalid hyperparameters, while their replacements may be created.
    invalid: BTreeSet<u32>,
    /// Whether replacements are delayed because all trials have failed.
    is_delayed: bool,
}

impl Pbt {
    /// Returns a search without trials.
    pub fn new(config: PbtConfig) -> Self {
        Self {
            config,
            num_created: 0,
            finished: BTreeMap::new(),
            on_way: BTreeMap::new(),
            num_copies: BTreeMap::new(),
            sources: BTreeMap::new(),
            invalid: BTreeSet::new(),
            is_delayed: false,
        }
    }

    fn leave_way(&mut self, units: u64) {
        if let Some(num) = self.on_way.get_mut(&units) {
            *num -= 1;
            if *num == 0 {
                self.on_way.remove(&units);
            }
        }
    }

    fn create(&self, units: u64, source: Option<Source>) -> Step {
        let group = (units / self.config.units_per_round - 1) as u32;
        Step::Create { group, units, source, hyperparameters: None }
    }

    /// Returns the trials with a result at this length, best first.
    fn ranking(&self, units: u64, book: &Book) -> Vec<(u32, Loss)> {
        let loss = |trial: u32| {
            let results = &book.trial(trial).results;
            let result = results.iter().find(|(length, _)| *length == units);
            result.map_or(Loss::INFINITE, |(_, loss)| *loss)
        };
        let finished = self.finished.get(&units).into_iter().flatten();
        let mut ranking: Vec<_> = finished.map(|trial| (*trial, loss(*trial))).collect();
        ranking.sort_by_key(|(trial, loss)| (*loss, *trial));
        ranking
    }

    /// Returns how many trials of a round continue. Trials that ended rank last, and their places
    /// are the first to be replaced.
    fn num_kept(&self, num_results: usize) -> usize {
        let num_ended = (self.config.population_size as usize).saturating_sub(num_results);
        let num_truncated = self.config.num_truncated as usize;
        num_results - num_truncated.saturating_sub(num_ended).min(num_results)
    }

    fn view(&self, round: u32, book: &Book) -> RungView {
        let units = u64::from(round + 1) * self.config.units_per_round;
        let ranking = self.ranking(units, book);
        let num_training = self.on_way.get(&units).map_or(0, |num| *num as usize);
        let is_latest = self.finished.keys().next_back().is_none_or(|latest| *latest <= units);
        let is_waiting = |trial: u32| {
            let entry = book.trial(trial);
            entry.units == units && waits(entry.state)
        };
        let num_paused = ranking.iter().filter(|(trial, _)| is_waiting(*trial)).count();
        let has_continued = |trial: u32| book.trial(trial).units > units;
        let num_promoted = ranking.iter().filter(|(trial, _)| has_continued(*trial)).count();
        let last = self.num_kept(ranking.len()).checked_sub(1);
        let cut = last.filter(|_| num_promoted > 0).and_then(|last| ranking.get(last));
        RungView {
            units,
            num_training,
            num_results: ranking.len(),
            num_promoted,
            num_paused,
            num_ended: ranking.len().saturating_sub(num_promoted + num_paused),
            cut: cut.map(|(_, loss)| *loss),
            best: ranking.first().map(|(_, loss)| *loss),
            next: match num_training {
                _ if round + 1 == self.config.num_rounds => NextPromotion::Top,
                0 if !is_latest || ranking.len() > num_paused => NextPromotion::Closed,
                // A later round, in which no trial trains yet.
                0 if ranking.is_empty() => {
                    NextPromotion::AfterResults(self.config.population_size as usize)
                }
                num => NextPromotion::AfterResults(num),
            },
        }
    }

    /// Returns the next step at the end of a round, in this order: stop the worst, copy the best,
    /// continue the others.
    fn end_round(&self, units: u64, book: &Book) -> Option<Step> {
        let waits = |trial: &u32| waits(book.trial(*trial).state);
        let finished = &self.finished[&units];
        let last = self.config.units_per_round * u64::from(self.config.num_rounds);
        if units >= last {
            return finished.iter().copied().find(waits).map(|trial| Step::Stop { trial });
        }
        let ranking: Vec<u32> = self.ranking(units, book).iter().map(|(trial, _)| *trial).collect();
        let num_kept = self.num_kept(ranking.len());
        if let Some(trial) = ranking[num_kept..].iter().copied().find(waits) {
            return Some(Step::Stop { trial });
        }
        let next = units + self.config.units_per_round;
        let num_copies = self.num_copies.get(&units).map_or(0, |num| *num as usize);
        // Trials continue after the last copy. An earlier version may have created one copy less.
        let has_ended = ranking.iter().any(|trial| book.trial(*trial).units > units);
        let num_truncated = self.config.num_truncated as usize;
        if !has_ended && num_copies < num_truncated.min(ranking.len()) {
            let source = Source { trial: ranking[num_copies], units };
            return Some(self.create(next, Some(source)));
        }
        let trial = finished.iter().copied().find(waits)?;
        Some(Step::Continue { trial, units: next })
    }
}

/// Returns whether a trial waits for the end of its round. It is paused if it was reopened.
fn waits(state: TrialState) -> bool {
    matches!(state, TrialState::Waiting | TrialState::Paused)
}

impl SearchMethod for Pbt {
    fn observe(&mut self, event: &Event, before: Option<Before>, book: &Book) {
        if !self.is_delayed {
            self.invalid.clear();
        }
        self.is_delayed = book.is_hopeless();
        let (Some(trial), Some(before)) = (event.trial(), before) else { return };
        if before.was_active() {
            self.leave_way(before.units);
        }
        match *event {
            Event::Result { units, .. } => {
                self.finished.entry(units).or_default().insert(trial);
            }
            Event::Closed { cause: CloseCause::InvalidHyperparameters, .. } => {
                self.invalid.insert(trial);
            }
            Event::Deleted { .. } => {
                self.finished.retain(|_, trials| {
                    trials.remove(&trial);
                    !trials.is_empty()
                });
            }
            Event::Began
            | Event::Closed { .. }
            | Event::Edited(_)
            | Event::LimitReached
            | Event::Answered(_)
            | Event::Reopened => {}
        }
    }

    fn commit(&mut self, step: &Step, book: &Book) {
        // A step finds its trial active if the trial's result was deleted from the record.
        if let Step::Continue { trial, .. } | Step::Stop { trial } = step
            && book.trial(*trial).state == TrialState::Active
        {
            let entry = book.trial(*trial);
            self.leave_way(self.length_at(entry.group, entry.units));
        }
        match step {
            Step::Create { units, source, .. } => {
                self.num_created += 1;
                self.invalid.pop_first();
                *self.on_way.entry(*units).or_default() += 1;
                if let Some(source) = source {
                    *self.num_copies.entry(source.units).or_default() += 1;
                    self.sources.insert(book.next_index(), *source);
                }
            }
            Step::Continue { units, .. } => *self.on_way.entry(*units).or_default() += 1,
            Step::Reopen { trials } => {
                for trial in trials.iter().filter(|trial| !book.trial(**trial).has_result()) {
                    let entry = book.trial(*trial);
                    let units = self.length_at(entry.group, entry.units);
                    // The trial is active if the record of its end was deleted.
                    if entry.state != TrialState::Active {
                        *self.on_way.entry(units).or_default() += 1;
                    }
                }
            }
            Step::Stop { .. }
            | Step::Pause { .. }
            | Step::PromoteClosed { .. }
            | Step::StopPaused { .. }
            | Step::StopAll
            | Step::Finish => {}
        }
    }

    fn decide(&self, book: &Book) -> Option<Step> {
        if self.num_created < self.config.population_size {
            return Some(self.create(self.config.units_per_round, None));
        }
        if let Some(trial) = self.invalid.first().filter(|_| book.may_replace()) {
            let source = self.sources.get(trial).copied();
            let entry = book.trial(*trial);
            return Some(self.create(self.length_at(entry.group, entry.units), source));
        }
        let units = *self.finished.keys().next_back()?;
        let is_over = !self.on_way.contains_key(&units);
        if is_over { self.end_round(units, book) } else { None }
    }

    /// The other trials of an earlier round have continued without this one.
    fn may_reopen(&self, trial: u32, book: &Book) -> bool {
        let round_of = |entry: &TrialEntry| self.length_at(entry.group, entry.units);
        // Of all trials, not only of those with a result: all trials of the latest round may have
        // ended before their first one.
        let others = book.trials().iter().filter(|other| other.state != TrialState::Deleted);
        let latest = others.map(round_of).max();
        latest.is_none_or(|latest| round_of(book.trial(trial)) >= latest)
    }

    fn edit(&mut self, _edit: &Edit) {}

    fn places(&self) -> Option<u32> {
        None
    }

    fn num_groups(&self) -> u32 {
        self.config.num_rounds
    }

    fn first_units(&self, group: u32) -> u64 {
        (u64::from(group) + 1) * self.config.units_per_round
    }

    fn length_at(&self, group: u32, units: u64) -> u64 {
        // No trial of a later group stops in an earlier round.
        let rounds = units.div_ceil(self.config.units_per_round).max(u64::from(group) + 1);
        rounds.min(self.config.num_rounds.into()) * self.config.units_per_round
    }

    fn forecast(&self) -> BTreeMap<u64, u64> {
        let PbtConfig { population_size, units_per_round, num_rounds, num_truncated } = self.config;
        let num_stopped = u64::from(num_truncated);
        let rounds = (1..u64::from(num_rounds)).map(|round| (round * units_per_round, num_stopped));
        let last = (u64::from(num_rounds) * units_per_round, u64::from(population_size));
        rounds.chain([last]).filter(|(_, num)| *num > 0).collect()
    }

    fn rule(&self) -> Rule {
        Rule::Population
    }

    fn standing(&self, trial: u32, units: u64, book: &Book) -> Option<Standing> {
        let round = (units / self.config.units_per_round).checked_sub(1)?;
        let units = (round + 1) * self.config.units_per_round;
        let ranking = self.ranking(units, book);
        let position = ranking.iter().position(|(other, _)| *other == trial)?;
        let num_kept = self.num_kept(ranking.len());
        let others = ranking.iter().filter(|(other, _)| *other != trial);
        Some(Standing {
            rung: round as usize,
            num_rungs: self.config.num_rounds as usize,
            units,
            loss: ranking[position].1,
            rank: position + 1,
            num_results: ranking.len(),
            num_continuing: num_kept,
            continues: position < num_kept,
            cut: num_kept.checked_sub(1).map(|last| ranking[last].1),
            num_required: 0,
            num_missing: self.on_way.get(&units).map_or(0, |num| *num as usize),
            peers: others.copied().take(PEERS_MAX).collect(),
        })
    }

    fn views(&self, book: &Book) -> Vec<BracketView> {
        let rungs = (0..self.config.num_rounds).map(|round| self.view(round, book)).collect();
        let num_missing = self.config.population_size.saturating_sub(self.num_created);
        vec![BracketView { rungs, num_missing, places: None }]
    }
}
