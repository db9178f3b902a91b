//! Several brackets of asynchronous halving side by side.

use std::collections::BTreeMap;

use super::{AsyncHalving, AsyncHalvingConfig, SearchMethod, add_all};
use crate::search::book::{Before, Book};
use crate::search::layout;
use crate::search::turn::{Edit, Event, Step};
use crate::search::view::{BracketView, Rule, Standing};

/// Brackets with separate trials and separate places. The group of a trial is the index of its
/// bracket.
#[derive(Clone, Debug, PartialEq)]
pub struct Tournament {
    brackets: Vec<AsyncHalving>,
}

impl Tournament {
    /// Returns brackets without trials. Their group is their index.
    pub fn new(configs: impl IntoIterator<Item = AsyncHalvingConfig>) -> Self {
        Self { brackets: configs.into_iter().map(AsyncHalving::new).collect() }
    }

    fn bracket_of(&mut self, trial: u32, book: &Book) -> &mut AsyncHalving {
        &mut self.brackets[book.trial(trial).group as usize]
    }
}

impl SearchMethod for Tournament {
    fn observe(&mut self, event: &Event, before: Option<Before>, book: &Book) {
        if let Some(trial) = event.trial() {
            self.bracket_of(trial, book).observe(event, before, book);
        }
    }

    fn commit(&mut self, step: &Step, book: &Book) {
        if let Step::Reopen { trials } = step {
            for trial in trials {
                let step = Step::Reopen { trials: vec![*trial] };
                self.bracket_of(*trial, book).commit(&step, book);
            }
            return;
        }
        let bracket = match step {
            Step::Create { group, .. } | Step::StopPaused { group, .. } => {
                &mut self.brackets[*group as usize]
            }
            Step::Continue { trial, .. }
            | Step::PromoteClosed { trial, .. }
            | Step::Pause { trial }
            | Step::Stop { trial } => self.bracket_of(*trial, book),
            Step::Reopen { .. } | Step::StopAll | Step::Finish => return,
        };
        bracket.commit(step, book);
    }

    fn decide(&self, book: &Book) -> Option<Step> {
        self.brackets.iter().find_map(|bracket| bracket.decide(book))
    }

    fn edit(&mut self, edit: &Edit) {
        self.brackets.iter_mut().for_each(|bracket| bracket.extend(edit.units_max));
        let rungs: Vec<u32> =
            self.brackets.iter().map(|bracket| bracket.config().lengths.len() as u32).collect();
        let divisor = self.brackets[0].config().divisor;
        let trials = match edit.max_trials {
            Some(max_trials) => {
                let recorded = Some(&edit.bracket_trials).filter(|trials| !trials.is_empty());
                let made = recorded.map_or_else(|| self.bracket_trials(), Clone::clone);
                layout::split_trials_above(max_trials, divisor, &rungs, &made)
            }
            None => self.brackets.iter().map(|bracket| bracket.config().max_trials).collect(),
        };
        let places = match edit.max_concurrent {
            Some(concurrency) => layout::split_concurrency(concurrency, divisor, &trials),
            None => self.brackets.iter().map(|bracket| bracket.config().concurrency).collect(),
        };
        for (bracket, (max_trials, concurrency)) in
            self.brackets.iter_mut().zip(trials.into_iter().zip(places))
        {
            bracket.set_size(max_trials, concurrency);
        }
    }

    fn bracket_trials(&self) -> Vec<u32> {
        self.brackets.iter().map(AsyncHalving::num_made).collect()
    }

    fn places(&self) -> Option<u32> {
        self.brackets.iter().map(SearchMethod::places).sum()
    }

    fn num_groups(&self) -> u32 {
        self.brackets.len() as u32
    }

    fn first_units(&self, group: u32) -> u64 {
        self.brackets.get(group as usize).map_or(1, |bracket| bracket.first_units(0))
    }

    fn length_at(&self, group: u32, units: u64) -> u64 {
        self.brackets.get(group as usize).map_or(units, |bracket| bracket.length_at(0, units))
    }

    fn forecast(&self) -> BTreeMap<u64, u64> {
        add_all(self.brackets.iter().map(SearchMethod::forecast))
    }

    fn rule(&self) -> Rule {
        self.brackets.first().map_or(Rule::Promotion, SearchMethod::rule)
    }

    fn standing(&self, trial: u32, units: u64, book: &Book) -> Option<Standing> {
        self.brackets[book.trial(trial).group as usize].standing(trial, units, book)
    }

    fn views(&self, book: &Book) -> Vec<BracketView> {
        self.brackets.iter().flat_map(|bracket| bracket.views(book)).collect()
    }
}
