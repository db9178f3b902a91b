//! A search in progress: method, sampler and trials.

use serde_json::Value;
use stoker_api::hyperparameters::Space;

use super::Draw;
use super::book::Book;
use super::grid::Grid;
use super::methods::{AsyncHalving, FixedLength, Pbt, SearchMethod, SyncHalving, Tournament};
use super::rng::Random;
use super::sample::{normalized, sample};
use super::turn::{Event, Step};

/// A search method of any kind.
#[derive(Clone, Debug, PartialEq)]
pub enum AnyMethod {
    /// Single, random and grid search.
    FixedLength(FixedLength),
    /// One bracket of ASHA.
    AsyncHalving(AsyncHalving),
    /// Adaptive ASHA.
    Tournament(Tournament),
    /// Synchronous halving, adaptive search and Hyperband.
    SyncHalving(SyncHalving),
    /// Population based training.
    Pbt(Pbt),
}

impl AnyMethod {
    fn as_dyn(&self) -> &dyn SearchMethod {
        match self {
            Self::FixedLength(method) => method,
            Self::AsyncHalving(method) => method,
            Self::Tournament(method) => method,
            Self::SyncHalving(method) => method,
            Self::Pbt(method) => method,
        }
    }

    fn as_dyn_mut(&mut self) -> &mut dyn SearchMethod {
        match self {
            Self::FixedLength(method) => method,
            Self::AsyncHalving(method) => method,
            Self::Tournament(method) => method,
            Self::SyncHalving(method) => method,
            Self::Pbt(method) => method,
        }
    }
}

/// Source of hyperparameters.
#[derive(Clone, Debug, PartialEq)]
pub enum Sampler {
    /// Independent random samples.
    Random(Space),
    /// Points of a grid, the last one first.
    Grid {
        /// The grid.
        grid: Grid,
        /// Number of points left.
        num_left: u64,
    },
}

impl Sampler {
    /// Returns a sampler of all points of a grid.
    pub fn grid(space: Space) -> Self {
        let grid = Grid::new(space);
        Self::Grid { num_left: grid.num_points(), grid }
    }

    fn draw(&mut self, random: &mut Random) -> Option<Value> {
        match self {
            Self::Random(space) => Some(sample(space, random)),
            Self::Grid { grid, num_left } => {
                *num_left = num_left.checked_sub(1)?;
                grid.point(*num_left)
            }
        }
    }
}

/// An event with the steps that were decided on it.
#[derive(Clone, Debug, PartialEq)]
pub struct Turn {
    /// Position in the log, unique and increasing.
    pub order: u64,
    /// The event.
    pub event: Event,
    /// The decisions, in order.
    pub steps: Vec<Step>,
    /// The trials of the `Create` steps, in order.
    pub created: Vec<Draw>,
}

/// The record of a search does not fit its method.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unreadable {
    /// Order of the turn.
    pub order: u64,
    /// What does not fit.
    pub reason: &'static str,
}

/// A search in progress.
///
/// Invariant: replaying all recorded turns gives an equal state.
#[derive(Clone, Debug, PartialEq)]
pub struct SearchState {
    method: AnyMethod,
    sampler: Sampler,
    random: Random,
    book: Book,
    next_order: u64,
}

impl SearchState {
    /// Returns a search without trials. The first event is [`Event::Began`].
    pub fn new(method: AnyMethod, sampler: Sampler, seed: u32) -> Self {
        let random = Random::new(seed);
        Self { method, sampler, random, book: Book::default(), next_order: 0 }
    }

    /// Returns the trials.
    pub fn book(&self) -> &Book {
        &self.book
    }

    /// Takes in an event and decides what follows. Returns `None` for repeated, late and foreign
    /// events, which change nothing.
    pub fn advance(&mut self, event: Event) -> Option<Turn> {
        if self.book.is_finished() || !self.book.accepts(&event) {
            return None;
        }
        let order = self.next_order;
        self.next_order += 1;
        let before = self.book.observe(order, &event);
        self.method.as_dyn_mut().observe(&event, before, &self.book);
        let (mut steps, mut created) = (vec![], vec![]);
        while let Some(step) = self.decide() {
            let is_last = step == Step::Finish;
            if let Step::Create { units, hyperparameters, .. } = &step {
                let given = hyperparameters.clone();
                let Some(draw) = self.draw(*units, given) else { break };
                created.push(draw);
            }
            self.method.as_dyn_mut().commit(&step, &self.book);
            self.book.commit(&step);
            steps.push(step);
            if is_last {
                break;
            }
        }
        Some(Turn { order, event, steps, created })
    }

    /// Takes in a recorded turn, without deciding anything. The event is `None` if its record was
    /// deleted, and only effects on other trials are left.
    ///
    /// # Errors
    ///
    /// The turn does not follow from the turns before it.
    pub fn replay(
        &mut self,
        order: u64,
        event: Option<&Event>,
        steps: &[Step],
    ) -> Result<(), Unreadable> {
        let unreadable = |reason| Err(Unreadable { order, reason });
        if order < self.next_order {
            return unreadable("its order is not above that of the turn before it");
        }
        self.next_order = order + 1;
        self.book.set_order(order);
        if let Some(event) = event {
            if !self.book.accepts(event) {
                return unreadable("its event is unknown, repeated or late");
            }
            let before = self.book.observe(order, event);
            self.method.as_dyn_mut().observe(event, before, &self.book);
        }
        for step in steps {
            if let Step::Create { units, hyperparameters, .. } = step {
                if self.draw(*units, hyperparameters.clone()).is_none() {
                    return unreadable("it creates more trials than the space has points");
                }
            }
            self.method.as_dyn_mut().commit(step, &self.book);
            self.book.commit(step);
        }
        Ok(())
    }

    fn decide(&self) -> Option<Step> {
        let step = self.method.as_dyn().decide(&self.book);
        let is_over = self.book.num_open() == 0 && !self.book.is_finished();
        step.or_else(|| is_over.then_some(Step::Finish))
    }

    /// Draws hyperparameters, identity and seed, in this order.
    fn draw(&mut self, units: u64, given: Option<Value>) -> Option<Draw> {
        let index = self.book.next_index();
        let sampled = match given {
            Some(hyperparameters) => hyperparameters,
            None => self.sampler.draw(&mut self.random)?,
        };
        let request_id = self.random.uuid();
        let seed = self.random.seed();
        Some(Draw { index, request_id, seed, hyperparameters: normalized(&sampled), units })
    }
}

#[cfg(test)]
mod tests;
