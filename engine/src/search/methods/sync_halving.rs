//! Synchronous brackets: a trial is promoted once it is sure to be among the best of its rung.
//!
//! Sources: Jamieson and Talwalkar, "Non-stochastic Best Arm Identification and Hyperparameter
//! Optimization" (2016); Li et al., "Hyperband" (2018), for its layout of brackets.

use std::collections::BTreeMap;

use stoker_api::trial::CloseCause;

use super::{SearchMethod, add_all, standing_in, stops};
use crate::search::book::{Before, Book, TrialState};
use crate::search::rung::{Rung, Ties};
use crate::search::turn::{Edit, Event, Step};
use crate::search::view::{BracketView, NextPromotion, Rule, RungView, Standing};

/// One synchronous bracket.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BracketConfig {
    /// Lengths of the rungs, strictly increasing.
    pub lengths: Vec<u64>,
    /// Number of trials that reach each rung, never increasing, at least 1.
    pub sizes: Vec<u32>,
}

#[derive(Clone, Debug, PartialEq)]
struct Bracket {
    config: BracketConfig,
    rungs: Vec<Rung>,
    /// Number of active trials that train to each rung.
    on_way: Vec<u32>,
    /// Number of results that a rung below the top waits for.
    num_awaited: Vec<usize>,
    num_created: u32,
    num_invalid: u32,
}

impl Bracket {
    fn top(&self) -> usize {
        self.rungs.len() - 1
    }

    fn rung_of(&self, units: u64) -> usize {
        self.config.lengths.partition_point(|length| *length < units).min(self.top())
    }

    /// Marks the entries that are sure to be promoted: they stay among the best even if all missing
    /// results are better. Deleted trials leave gaps, so a rung is also complete if no trial can
    /// reach it any more.
    fn resize(&mut self, book: &Book) {
        let mut num_arriving = self.num_missing(book) as usize;
        for rung in 0..self.top() {
            num_arriving += self.on_way[rung] as usize;
            let missing = match num_arriving {
                0 => 0,
                _ => (self.config.sizes[rung] as usize).saturating_sub(self.rungs[rung].len()),
            };
            let next = self.config.sizes[rung + 1] as usize;
            self.rungs[rung].set_num_best(next.saturating_sub(missing));
            num_arriving += self.rungs[rung].num_candidates();
            self.num_awaited[rung] = missing;
        }
    }

    fn leave_all_rungs(&mut self, trial: u32) {
        for rung in 0..self.rungs.len() {
            self.rungs[rung].remove(trial);
        }
    }

    fn num_missing(&self, book: &Book) -> u32 {
        let replaced = if book.may_replace() { self.num_invalid } else { 0 };
        (self.config.sizes[0] + replaced).saturating_sub(self.num_created)
    }

    fn promotion(&self, book: &Book) -> Option<Step> {
        let rung = (0..self.top()).rev().find(|rung| self.rungs[*rung].candidate().is_some())?;
        let (trial, units) = (self.rungs[rung].candidate()?, self.config.lengths[rung + 1]);
        Some(match book.trial(trial).state.is_open() {
            true => Step::Continue { trial, units },
            false => Step::PromoteClosed { trial, units },
        })
    }

    fn creation(&self, group: u32, book: &Book) -> Option<Step> {
        let units = self.config.lengths[0];
        let create = Step::Create { group, units, source: None, hyperparameters: None };
        (self.num_missing(book) > 0).then_some(create)
    }

    fn views(&self, book: &Book) -> Vec<RungView> {
        let next = |rung: usize| match (self.rungs[rung].candidate(), self.num_awaited[rung]) {
            _ if rung == self.top() => NextPromotion::Top,
            (Some(trial), _) => NextPromotion::Trial(trial),
            (None, 0) => NextPromotion::Closed,
            (None, awaited) => NextPromotion::AfterResults(awaited),
        };
        let view = |rung: usize| {
            let (units, num_training) = (self.config.lengths[rung], self.on_way[rung] as usize);
            RungView::new(units, num_training, &self.rungs[rung], next(rung), book)
        };
        (0..self.rungs.len()).map(view).collect()
    }

    /// Ends the paused trials of complete rungs that are not sure to be promoted.
    fn close_out(&self, group: u32) -> Option<Step> {
        (0..self.top()).find_map(|rung| {
            if self.num_awaited[rung] > 0 {
                return None;
            }
            let mut losers = self.rungs[rung].losers();
            match (losers.next(), losers.next()) {
                (None, _) => None,
                (Some(trial), None) => Some(Step::Stop { trial }),
                (Some(_), Some(_)) => Some(Step::StopPaused {
                    group,
                    units: self.config.lengths[rung],
                    except: self.rungs[rung].candidates().collect(),
                }),
            }
        })
    }
}

/// Synchronous brackets that share their places. The group of a trial is the index of its bracket.
#[derive(Clone, Debug, PartialEq)]
pub struct SyncHalving {
    brackets: Vec<Bracket>,
    concurrency: u32,
    num_active: u32,
    undecided: Option<u32>,
}

impl SyncHalving {
    /// Returns brackets without trials. At most `concurrency` trials are active; 0 means no limit.
    pub fn new(brackets: Vec<BracketConfig>, concurrency: u32) -> Self {
        let new = |config: BracketConfig| {
            let num_rungs = config.lengths.len();
            Bracket {
                num_awaited: config.sizes.iter().map(|size| *size as usize).collect(),
                config,
                rungs: vec![Rung::new(Ties::FirstIsBest); num_rungs],
                on_way: vec![0; num_rungs],
                num_created: 0,
                num_invalid: 0,
            }
        };
        Self {
            brackets: brackets.into_iter().map(new).collect(),
            concurrency: if concurrency == 0 { u32::MAX } else { concurrency },
            num_active: 0,
            undecided: None,
        }
    }

    fn bracket_of(&mut self, trial: u32, book: &Book) -> &mut Bracket {
        &mut self.brackets[book.trial(trial).group as usize]
    }

    /// Takes in that a trial continues after its end. Without a result, it counted as the worst of
    /// the rung that it trained to.
    fn reopen(&mut self, trial: u32, book: &Book) {
        let entry = book.trial(trial);
        // The trial is active if the record of its end was deleted.
        let was_active = u32::from(entry.state == TrialState::Active);
        let is_active = u32::from(!entry.has_result());
        self.num_active = self.num_active + is_active - was_active;
        let bracket = &mut self.brackets[entry.group as usize];
        let rung = bracket.rung_of(entry.units);
        bracket.on_way[rung] = bracket.on_way[rung] + is_active - was_active;
        if entry.has_result() {
            bracket.rungs[rung].reopen(trial);
        } else {
            bracket.rungs[rung].remove(trial);
        }
        bracket.resize(book);
    }
}

impl SearchMethod for SyncHalving {
    fn observe(&mut self, event: &Event, before: Option<Before>, book: &Book) {
        let (Some(trial), Some(before)) = (event.trial(), before) else { return };
        let was_active = before.was_active();
        self.num_active -= u32::from(was_active);
        if matches!(event, Event::Result { .. }) {
            self.undecided = Some(trial);
        }
        let bracket = self.bracket_of(trial, book);
        let rung = bracket.rung_of(before.units);
        bracket.on_way[rung] -= u32::from(was_active);
        match *event {
            Event::Began
            | Event::Edited(_)
            | Event::LimitReached
            | Event::Answered(_)
            | Event::Reopened => {}
            Event::Result { loss, .. } => {
                bracket.rungs[rung].insert(trial, loss, book.order());
            }
            Event::Closed { cause: CloseCause::InvalidHyperparameters, .. } => {
                bracket.leave_all_rungs(trial);
                bracket.num_invalid += 1;
            }
            Event::Closed { .. } if was_active => {
                bracket.rungs[rung].insert_closed(trial, book.order());
            }
            Event::Closed { .. } => bracket.rungs[rung].close(trial),
            Event::Deleted { .. } => {
                bracket.leave_all_rungs(trial);
                bracket.num_invalid -= u32::from(before.was_invalid());
            }
        }
        // Whether invalid trials are replaced depends on all brackets.
        self.brackets.iter_mut().for_each(|bracket| bracket.resize(book));
    }

    fn commit(&mut self, step: &Step, book: &Book) {
        let group = match step {
            Step::Create { group, .. } | Step::StopPaused { group, .. } => *group,
            Step::Continue { trial, .. }
            | Step::PromoteClosed { trial, .. }
            | Step::Pause { trial }
            | Step::Stop { trial } => {
                self.undecided.take_if(|undecided| undecided == trial);
                book.trial(*trial).group
            }
            Step::Reopen { trials } => {
                return trials.iter().for_each(|trial| self.reopen(*trial, book));
            }
            Step::StopAll | Step::Finish => return,
        };
        let bracket = &mut self.brackets[group as usize];
        let rung_of = |trial: u32| bracket.rung_of(book.trial(trial).units);
        // A step finds its trial active if the trial's result was deleted from the record.
        if let Step::Continue { trial, .. }
        | Step::PromoteClosed { trial, .. }
        | Step::Pause { trial }
        | Step::Stop { trial } = step
            && book.trial(*trial).state == TrialState::Active
        {
            let rung = rung_of(*trial);
            self.num_active -= 1;
            bracket.on_way[rung] -= 1;
        }
        let rung_of = |trial: u32| bracket.rung_of(book.trial(trial).units);
        match step {
            Step::Create { .. } => {
                self.num_active += 1;
                bracket.on_way[0] += 1;
                bracket.num_created += 1;
            }
            Step::Continue { trial, units } => {
                self.num_active += 1;
                let (from, to) = (rung_of(*trial), bracket.rung_of(*units));
                bracket.on_way[to] += 1;
                bracket.rungs[from].promote(*trial);
            }
            Step::PromoteClosed { trial, units } => {
                let (from, to) = (rung_of(*trial), bracket.rung_of(*units));
                bracket.rungs[from].promote(*trial);
                bracket.rungs[to].insert_closed(*trial, book.order());
            }
            Step::Stop { trial } => {
                let rung = rung_of(*trial);
                bracket.rungs[rung].stop(*trial);
            }
            Step::StopPaused { units, except, .. } => {
                let rung = bracket.rung_of(*units);
                bracket.rungs[rung].stop_undecided(except);
            }
            Step::Pause { .. } | Step::Reopen { .. } | Step::StopAll | Step::Finish => {}
        }
        bracket.resize(book);
    }

    fn decide(&self, book: &Book) -> Option<Step> {
        let groups = || (0_u32..).zip(&self.brackets);
        if self.num_active < self.concurrency {
            let promotion = groups().find_map(|(_, bracket)| bracket.promotion(book));
            let create = || groups().find_map(|(group, bracket)| bracket.creation(group, book));
            if let Some(job) = promotion.or_else(create) {
                return Some(job);
            }
        }
        if let Some(trial) = self.undecided {
            let bracket = &self.brackets[book.trial(trial).group as usize];
            let is_at_top = bracket.rung_of(book.trial(trial).units) == bracket.top();
            return Some(if is_at_top { Step::Stop { trial } } else { Step::Pause { trial } });
        }
        groups().find_map(|(group, bracket)| bracket.close_out(group))
    }

    fn edit(&mut self, edit: &Edit) {
        if let Some(concurrency) = edit.max_concurrent {
            self.concurrency = if concurrency == 0 { u32::MAX } else { concurrency };
        }
    }

    fn places(&self) -> Option<u32> {
        (self.concurrency < u32::MAX).then_some(self.concurrency)
    }

    fn num_groups(&self) -> u32 {
        self.brackets.len() as u32
    }

    fn first_units(&self, group: u32) -> u64 {
        self.brackets.get(group as usize).map_or(1, |bracket| bracket.config.lengths[0])
    }

    fn length_at(&self, group: u32, units: u64) -> u64 {
        let bracket = self.brackets.get(group as usize);
        bracket.map_or(units, |bracket| bracket.config.lengths[bracket.rung_of(units)])
    }

    fn forecast(&self) -> BTreeMap<u64, u64> {
        let configs = self.brackets.iter().map(|bracket| &bracket.config);
        add_all(configs.map(|config| {
            let sizes: Vec<u64> = config.sizes.iter().map(|size| u64::from(*size)).collect();
            stops(&config.lengths, &sizes)
        }))
    }

    fn rule(&self) -> Rule {
        Rule::Synchronous
    }

    fn standing(&self, trial: u32, units: u64, book: &Book) -> Option<Standing> {
        let Bracket { config, rungs, num_awaited, .. } =
            &self.brackets[book.trial(trial).group as usize];
        let rung = config.lengths.partition_point(|length| *length <= units).checked_sub(1)?;
        let standing = standing_in(&rungs[rung], trial)?;
        let is_top = rung + 1 == rungs.len();
        Some(Standing {
            rung,
            num_rungs: rungs.len(),
            units: config.lengths[rung],
            num_continuing: config.sizes.get(rung + 1).map_or(0, |size| *size as usize),
            num_missing: if is_top { 0 } else { num_awaited[rung] },
            ..standing
        })
    }

    fn views(&self, book: &Book) -> Vec<BracketView> {
        let places = self.places();
        let view = |bracket: &Bracket| {
            let num_missing = bracket.num_missing(book);
            BracketView { rungs: bracket.views(book), num_missing, places }
        };
        self.brackets.iter().map(view).collect()
    }
}

#[cfg(test)]
mod tests {
    use stoker_api::hyperparameters::Space;

    use super::*;
    use crate::search::rung::Loss;
    use crate::search::samplers::Sampler;
    use crate::search::state::{AnyMethod, SearchState};
    use crate::search::view::NextPromotion::{AfterResults, Closed, Top};

    /// Returns a search of 3 trials that train 1 unit, and some of them 3, which has begun.
    fn search(num_promoted: u32) -> SearchState {
        let bracket = BracketConfig { lengths: vec![1, 3], sizes: vec![3, num_promoted] };
        let method = AnyMethod::SyncHalving(SyncHalving::new(vec![bracket], 0));
        let sampler = Sampler::Random(Space::Group(Default::default()));
        let mut search = SearchState::new(method, sampler, 7);
        search.advance(Event::Began);
        search
    }

    /// Reports a result at the granted length. Returns the steps.
    fn report(search: &mut SearchState, trial: u32, loss: u8) -> Vec<Step> {
        let units = search.book().trial(trial).units;
        let loss = Loss::new(loss.into());
        search.advance(Event::Result { trial, units, loss, others: vec![] }).unwrap().steps
    }

    fn fail(search: &mut SearchState, trial: u32) -> Vec<Step> {
        search.advance(Event::Closed { trial, cause: CloseCause::Failed }).unwrap().steps
    }

    #[test]
    fn failed_trials_are_the_worst_of_their_rung() {
        let mut search = search(2);
        assert_eq!(fail(&mut search, 2), []);
        // At most one missing result is better, and two trials are promoted.
        assert_eq!(report(&mut search, 0, 5), [Step::Continue { trial: 0, units: 3 }]);
        assert_eq!(report(&mut search, 1, 7), [Step::Continue { trial: 1, units: 3 }]);
    }

    #[test]
    fn paused_trials_keep_their_rank_when_they_end() {
        let mut search = search(1);
        assert_eq!(report(&mut search, 0, 1), [Step::Pause { trial: 0 }]);
        assert_eq!(fail(&mut search, 0), []);
        assert_eq!(report(&mut search, 1, 5), [Step::Pause { trial: 1 }]);
        let steps = report(&mut search, 2, 6);
        assert_eq!(steps[0], Step::PromoteClosed { trial: 0, units: 3 });
    }

    #[test]
    fn rungs_wait_for_all_results() {
        let next = |search: &SearchState| {
            search.views()[0].rungs.iter().map(|rung| rung.next).collect::<Vec<_>>()
        };
        let mut search = search(1);
        assert_eq!(next(&search), [AfterResults(3), Top]);
        report(&mut search, 0, 1);
        assert_eq!(next(&search), [AfterResults(2), Top]);
        report(&mut search, 1, 2);
        report(&mut search, 2, 3);
        assert_eq!(next(&search), [Closed, Top]);
    }

    #[test]
    fn standings_have_the_numbers_of_the_rung() {
        let loss = |loss: u8| Loss::new(loss.into());
        let mut search = search(1);
        report(&mut search, 0, 1);
        let first = Standing {
            rung: 0,
            num_rungs: 2,
            units: 1,
            loss: loss(1),
            rank: 1,
            num_results: 1,
            num_continuing: 1,
            continues: false,
            cut: None,
            num_required: 0,
            num_missing: 2,
            peers: vec![],
        };
        assert_eq!(search.standing(0, 2), Some(first.clone()));
        report(&mut search, 1, 2);
        report(&mut search, 2, 3);
        let second = Standing {
            loss: loss(2),
            rank: 2,
            num_results: 3,
            cut: Some(loss(1)),
            num_missing: 0,
            peers: vec![(0, loss(1)), (2, loss(3))],
            ..first.clone()
        };
        assert_eq!(search.standing(1, 1), Some(second));
        // No trial continues from the top, and none is missing there.
        report(&mut search, 0, 4);
        let top = Standing {
            rung: 1,
            units: 3,
            loss: loss(4),
            num_continuing: 0,
            num_missing: 0,
            ..first
        };
        assert_eq!([0, 1].map(|trial| search.standing(trial, 3)), [Some(top), None]);
        assert_eq!(search.standing(0, 0), None);
    }

    #[test]
    fn edits_change_the_places() {
        let mut search = search(1);
        for (edited, expected) in [(Some(2), Some(2)), (None, Some(2)), (Some(0), None)] {
            let edit = Edit {
                max_trials: None,
                max_concurrent: edited,
                units_max: 3,
                is_limited: false,
                bracket_trials: vec![],
            };
            search.advance(Event::Edited(edit)).unwrap();
            assert_eq!(search.places(), expected, "{edited:?}");
        }
    }
}
