//! Asynchronous successive halving (ASHA): trials are compared at rungs of growing length, as soon
//! as their results come.
//!
//! Source: Li et al., "A System for Massively Parallel Hyperparameter Tuning" (MLSys 2020),
//! Algorithm 2, for promotion; the variant that stops is the one of Determined's last release.

use std::collections::{BTreeMap, BTreeSet};

use stoker_api::trial::CloseCause;

use super::{SearchMethod, standing_in, stops};
use crate::search::book::{Before, Book, TrialState};
use crate::search::layout;
use crate::search::rung::{Rung, Ties};
use crate::search::turn::{Edit, Event, Step};
use crate::search::view::{BracketView, NextPromotion, Rule, RungView, Standing};

/// Size of an asynchronous halving.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AsyncHalvingConfig {
    /// Bracket of the trials.
    pub group: u32,
    /// Lengths of the rungs, strictly increasing.
    pub lengths: Vec<u64>,
    /// Trials with valid hyperparameters.
    pub max_trials: u32,
    /// Ratio between the sizes of neighboring rungs, at least 2.
    pub divisor: u32,
    /// Maximum number of active trials, at least 1.
    pub concurrency: u32,
    /// Stop a trial at the first rung where it is not among the best, instead of pausing it.
    pub stop_once: bool,
}

/// One bracket of asynchronous halving.
#[derive(Clone, Debug, PartialEq)]
pub struct AsyncHalving {
    config: AsyncHalvingConfig,
    rungs: Vec<Rung>,
    /// Number of active trials that train to each rung.
    on_way: Vec<u32>,
    num_created: u32,
    num_invalid: u32,
    /// Trial of the current result. Its place is free.
    undecided: Option<u32>,
    /// Trials with a result that continue after their end, with `stop_once`. The others may be
    /// promoted like all paused trials.
    reopened: BTreeSet<u32>,
}

impl AsyncHalving {
    /// Returns a bracket without trials.
    pub fn new(config: AsyncHalvingConfig) -> Self {
        let ties = if config.stop_once { Ties::LastIsBest } else { Ties::FirstIsBest };
        let num_rungs = config.lengths.len();
        Self {
            config,
            rungs: vec![Rung::new(ties); num_rungs],
            on_way: vec![0; num_rungs],
            num_created: 0,
            num_invalid: 0,
            undecided: None,
            reopened: BTreeSet::new(),
        }
    }

    /// Adds rungs above the top one, up to this length.
    pub(super) fn extend(&mut self, units: u64) {
        let old_top = self.top();
        let longest = self.config.lengths[old_top];
        for length in layout::lengths_above(longest, units, self.config.divisor) {
            self.config.lengths.push(length);
            self.rungs.push(Rung::new(self.rungs[old_top].ties()));
            self.on_way.push(0);
        }
        // Trials may be promoted from a rung that was the top one.
        self.resize(old_top);
    }

    /// Sets the numbers of trials and places.
    pub(super) fn set_size(&mut self, max_trials: u32, concurrency: u32) {
        (self.config.max_trials, self.config.concurrency) = (max_trials, concurrency);
    }

    /// Returns the size.
    pub(super) fn config(&self) -> &AsyncHalvingConfig {
        &self.config
    }

    /// Returns the number of created trials whose hyperparameters were not rejected.
    pub(super) fn num_made(&self) -> u32 {
        self.num_created - self.num_invalid
    }

    fn top(&self) -> usize {
        self.rungs.len() - 1
    }

    /// Returns the rung with this length. Lengths are those of our steps.
    fn rung_of(&self, units: u64) -> usize {
        self.config.lengths.partition_point(|length| *length < units).min(self.top())
    }

    fn has_free_place(&self) -> bool {
        self.on_way.iter().sum::<u32>() < self.config.concurrency
    }

    /// Number of trials still to be created.
    fn num_missing(&self, book: &Book) -> u32 {
        let replaced = if book.may_replace() { self.num_invalid } else { 0 };
        (self.config.max_trials + replaced).saturating_sub(self.num_created)
    }

    fn resize(&mut self, rung: usize) {
        let num_best = self.rungs[rung].len() / self.config.divisor as usize;
        // With `stop_once`, the best trial of a rung continues even if the rung is small.
        let num_best = if self.config.stop_once { num_best.max(1) } else { num_best };
        // No trial is promoted from the top.
        let num_best = if rung == self.top() { 0 } else { num_best };
        self.rungs[rung].set_num_best(num_best);
    }

    fn leave_all_rungs(&mut self, trial: u32) {
        for rung in 0..self.rungs.len() {
            self.rungs[rung].remove(trial);
            self.resize(rung);
        }
    }

    /// Frees the place of an active trial. A step finds its trial active if the trial's result was
    /// deleted from the record.
    fn leave_way(&mut self, trial: u32, book: &Book) {
        let rung = self.rung_of(book.trial(trial).units);
        self.on_way[rung] -= u32::from(book.trial(trial).state == TrialState::Active);
    }

    /// Takes in that a trial continues after its end. Without a result, it counted as the worst of
    /// the rung that it trained to.
    fn reopen(&mut self, trial: u32, book: &Book) {
        self.leave_way(trial, book);
        let entry = book.trial(trial);
        let rung = self.rung_of(entry.units);
        if entry.has_result() {
            self.rungs[rung].reopen(trial);
            self.reopened.extend(self.config.stop_once.then_some(trial));
        } else {
            self.rungs[rung].remove(trial);
            self.resize(rung);
            self.on_way[rung] += 1;
        }
    }

    fn decided(&mut self, trial: u32) {
        self.undecided.take_if(|undecided| *undecided == trial);
        self.reopened.remove(&trial);
    }

    fn decide_undecided(&self, trial: u32, book: &Book) -> Step {
        let rung = self.rung_of(book.trial(trial).units);
        if rung == self.top() {
            return Step::Stop { trial };
        }
        match (self.config.stop_once, self.rungs[rung].is_among_best(trial)) {
            (true, true) => Step::Continue { trial, units: self.config.lengths[rung + 1] },
            (true, false) => Step::Stop { trial },
            (false, _) => Step::Pause { trial },
        }
    }

    /// Returns the best promotion, from the highest rung down, or a new trial.
    fn job(&self, book: &Book) -> Option<Step> {
        if !self.has_free_place() {
            return None;
        }
        let promotion = || {
            let rung =
                (0..self.top()).rev().find(|rung| self.rungs[*rung].candidate().is_some())?;
            let trial = self.rungs[rung].candidate()?;
            let units = self.config.lengths[rung + 1];
            Some(match book.trial(trial).state.is_open() {
                true => Step::Continue { trial, units },
                false => Step::PromoteClosed { trial, units },
            })
        };
        let create = || {
            let (group, units) = (self.config.group, self.config.lengths[0]);
            let create = Step::Create { group, units, source: None, hyperparameters: None };
            (self.num_missing(book) > 0).then_some(create)
        };
        match self.config.stop_once {
            true => create(),
            false => promotion().or_else(create),
        }
    }

    /// Returns the consequence of the next result of a rung.
    fn next_promotion(&self, rung: usize, book: &Book) -> NextPromotion {
        let Self { rungs, on_way, config, .. } = self;
        if rung == self.top() {
            return NextPromotion::Top;
        }
        if let Some(trial) = rungs[rung].candidate().filter(|_| !config.stop_once) {
            return NextPromotion::Trial(trial);
        }
        let is_below_open = |below: usize| !config.stop_once && rungs[below].num_candidates() > 0;
        let is_open = self.num_missing(book) > 0
            || on_way[..=rung].iter().any(|num| *num > 0)
            || (0..rung).any(is_below_open);
        if !is_open {
            return NextPromotion::Closed;
        }
        let num_results = rungs[rung].len() + 1;
        let num_best = num_results / config.divisor as usize;
        let num_best = if config.stop_once { num_best.max(1) } else { num_best };
        let Some(last) = num_best.checked_sub(1) else {
            return NextPromotion::AtResults(config.divisor as usize);
        };
        match rungs[rung].ranking().nth(last) {
            Some((_, loss)) if config.stop_once => NextPromotion::AtMost(loss),
            Some((_, loss)) => NextPromotion::Below(loss),
            None => NextPromotion::AtResults(num_results),
        }
    }

    /// Stops paused trials after the last creation, if no later result can promote them. A rung is
    /// not final while a trial trains to it, nor while a trial below waits for a place to be
    /// promoted.
    fn close_out(&self, book: &Book) -> Option<Step> {
        if self.config.stop_once || self.num_missing(book) > 0 {
            return None;
        }
        for rung in 0..self.top() {
            if self.on_way[rung] > 0 {
                return None;
            }
            let mut losers = self.rungs[rung].losers();
            match (losers.next(), losers.next()) {
                (None, _) => {}
                (Some(trial), None) => return Some(Step::Stop { trial }),
                (Some(_), Some(_)) => {
                    let units = self.config.lengths[rung];
                    let except = self.rungs[rung].candidates().collect();
                    return Some(Step::StopPaused { group: self.config.group, units, except });
                }
            }
            if self.rungs[rung].num_candidates() > 0 {
                return None;
            }
        }
        None
    }
}

impl SearchMethod for AsyncHalving {
    fn observe(&mut self, event: &Event, before: Option<Before>, book: &Book) {
        let (Some(trial), Some(before)) = (event.trial(), before) else { return };
        self.reopened.remove(&trial);
        let rung = self.rung_of(before.units);
        let was_active = before.was_active();
        self.on_way[rung] -= u32::from(was_active);
        match *event {
            Event::Began
            | Event::Edited(_)
            | Event::LimitReached
            | Event::Answered(_)
            | Event::Reopened => {}
            Event::Result { loss, .. } => {
                self.rungs[rung].insert(trial, loss, book.order());
                self.resize(rung);
                self.undecided = Some(trial);
            }
            Event::Closed { cause: CloseCause::InvalidHyperparameters, .. } => {
                self.leave_all_rungs(trial);
                self.num_invalid += 1;
            }
            Event::Closed { .. } if was_active => {
                self.rungs[rung].insert_closed(trial, book.order());
                self.resize(rung);
            }
            Event::Closed { .. } => self.rungs[rung].close(trial),
            Event::Deleted { .. } => {
                self.leave_all_rungs(trial);
                self.num_invalid -= u32::from(before.was_invalid());
            }
        }
    }

    fn commit(&mut self, step: &Step, book: &Book) {
        match step {
            Step::Create { units, .. } => {
                self.num_created += 1;
                let rung = self.rung_of(*units);
                self.on_way[rung] += 1;
            }
            Step::Continue { trial, units } => {
                self.decided(*trial);
                let (from, to) = (self.rung_of(book.trial(*trial).units), self.rung_of(*units));
                self.leave_way(*trial, book);
                self.rungs[from].promote(*trial);
                self.on_way[to] += 1;
            }
            Step::PromoteClosed { trial, units } => {
                let (from, to) = (self.rung_of(book.trial(*trial).units), self.rung_of(*units));
                self.leave_way(*trial, book);
                self.rungs[from].promote(*trial);
                self.rungs[to].insert_closed(*trial, book.order());
                self.resize(to);
            }
            Step::Pause { trial } => {
                self.decided(*trial);
                self.leave_way(*trial, book);
            }
            Step::Stop { trial } => {
                self.decided(*trial);
                self.leave_way(*trial, book);
                let rung = self.rung_of(book.trial(*trial).units);
                self.rungs[rung].stop(*trial);
            }
            Step::StopPaused { units, except, .. } => {
                let rung = self.rung_of(*units);
                self.rungs[rung].stop_undecided(except);
            }
            Step::Reopen { trials } => trials.iter().for_each(|trial| self.reopen(*trial, book)),
            Step::StopAll | Step::Finish => {}
        }
    }

    fn decide(&self, book: &Book) -> Option<Step> {
        let reopened = self.reopened.first().copied().filter(|_| self.has_free_place());
        let undecided = self.undecided.or(reopened);
        let rule = || undecided.map(|trial| self.decide_undecided(trial, book));
        // The rule that stops precedes all jobs. A paused trial may be the one that a job promotes.
        let first = match self.config.stop_once {
            true => rule().or_else(|| self.job(book)),
            false => self.job(book).or_else(rule),
        };
        first.or_else(|| self.close_out(book))
    }

    fn edit(&mut self, edit: &Edit) {
        self.extend(edit.units_max);
        self.config.max_trials = edit.max_trials.unwrap_or(self.config.max_trials);
        if let Some(concurrency) = edit.max_concurrent {
            let (divisor, num_rungs) = (self.config.divisor, self.rungs.len() as u32);
            self.config.concurrency =
                layout::places(concurrency, divisor, num_rungs, self.config.max_trials);
        }
    }

    fn places(&self) -> Option<u32> {
        Some(self.config.concurrency)
    }

    fn num_groups(&self) -> u32 {
        1
    }

    fn first_units(&self, _group: u32) -> u64 {
        self.config.lengths[0]
    }

    fn length_at(&self, _group: u32, units: u64) -> u64 {
        self.config.lengths[self.rung_of(units)]
    }

    fn forecast(&self) -> BTreeMap<u64, u64> {
        let divisor = u64::from(self.config.divisor);
        let next = |size: &u64| Some((size / divisor).max(1));
        let first = Some(u64::from(self.config.max_trials));
        let sizes = std::iter::successors(first, next).take(self.config.lengths.len());
        stops(&self.config.lengths, &sizes.collect::<Vec<_>>())
    }

    fn rule(&self) -> Rule {
        if self.config.stop_once { Rule::StopOnce } else { Rule::Promotion }
    }

    fn standing(&self, trial: u32, units: u64, _book: &Book) -> Option<Standing> {
        let rung = self.config.lengths.partition_point(|length| *length <= units).checked_sub(1)?;
        let standing = standing_in(&self.rungs[rung], trial)?;
        let num_required = if self.config.stop_once { 1 } else { self.config.divisor as usize };
        let (units, num_rungs) = (self.config.lengths[rung], self.rungs.len());
        Some(Standing { rung, num_rungs, units, num_required, ..standing })
    }

    fn views(&self, book: &Book) -> Vec<BracketView> {
        let view = |rung: usize| {
            let (units, num_training) = (self.config.lengths[rung], self.on_way[rung] as usize);
            let next = self.next_promotion(rung, book);
            RungView::new(units, num_training, &self.rungs[rung], next, book)
        };
        let rungs = (0..self.rungs.len()).map(view).collect();
        vec![BracketView { rungs, num_missing: self.num_missing(book), places: self.places() }]
    }
}

#[cfg(test)]
mod tests;
