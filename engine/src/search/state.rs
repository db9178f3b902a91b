//! A search in progress: method, sampler and trials.

use super::Draw;
use super::book::Book;
use super::methods::{AsyncHalving, FixedLength, Pbt, SearchMethod, SyncHalving, Tournament};
use super::rng::Random;
use super::sample::normalized;
use super::samplers::Sampler;
use super::turn::{Event, Source, Step};
use serde_json::Value;

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
    /// 32-bit words taken from the random stream up to and with each of `created`.
    pub random_words: Vec<u64>,
}

/// Record of a trial that a turn created.
#[derive(Clone, Debug, PartialEq)]
pub struct RecordedDraw {
    /// Hyperparameters; `None` if the trial was deleted.
    pub hyperparameters: Option<Value>,
    /// 32-bit words taken from the experiment's random stream up to and with this trial.
    pub random_words: u64,
}

/// The record of a search does not fit its method.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unreadable {
    /// Order of the turn.
    pub order: u64,
    /// Mismatch between the turn and the turns before it.
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
        self.observe(order, &event);
        let (mut steps, mut created, mut random_words) = (vec![], vec![], vec![]);
        while let Some(step) = self.decide() {
            let is_last = step == Step::Finish;
            if let Step::Create { units, source, hyperparameters, .. } = &step {
                let given = hyperparameters.clone();
                let Some(draw) = self.draw(*units, source.as_ref(), given) else { break };
                self.sampler.record(Some(&draw.hyperparameters));
                created.push(draw);
                random_words.push(self.random.num_words());
            }
            self.method.as_dyn_mut().commit(&step, &self.book);
            self.book.commit(&step);
            steps.push(step);
            if is_last {
                break;
            }
        }
        Some(Turn { order, event, steps, created, random_words })
    }

    /// Takes in a recorded turn, without deciding or drawing anything. The event is `None` if its
    /// record was deleted, and only effects on other trials are left. `created` are the records of
    /// the `Create` steps' trials, in order.
    ///
    /// # Errors
    ///
    /// The turn does not follow from the turns before it.
    pub fn replay(
        &mut self,
        order: u64,
        event: Option<&Event>,
        steps: &[Step],
        created: &[RecordedDraw],
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
            self.observe(order, event);
        }
        let mut created = created.iter();
        for step in steps {
            if let Step::Create { .. } = step {
                let Some(draw) = created.next() else {
                    return unreadable("a trial that it created is missing");
                };
                self.random.skip_to(draw.random_words);
                self.sampler.record(draw.hyperparameters.as_ref());
            }
            self.method.as_dyn_mut().commit(step, &self.book);
            self.book.commit(step);
        }
        Ok(())
    }

    fn observe(&mut self, order: u64, event: &Event) {
        let before = self.book.observe(order, event);
        self.method.as_dyn_mut().observe(event, before, &self.book);
        if let Event::Deleted { trial } = event {
            self.sampler.forget(*trial);
        }
    }

    fn decide(&self) -> Option<Step> {
        let step = self.method.as_dyn().decide(&self.book);
        let is_over = self.book.num_open() == 0 && !self.book.is_finished();
        step.or_else(|| is_over.then_some(Step::Finish))
    }

    /// Draws hyperparameters, identity and seed, in this order.
    fn draw(&mut self, units: u64, source: Option<&Source>, given: Option<Value>) -> Option<Draw> {
        let index = self.book.next_index();
        let sampled = match given {
            Some(hyperparameters) => hyperparameters,
            None => self.sampler.draw(source, &self.book, &mut self.random)?,
        };
        let request_id = self.random.uuid();
        let seed = self.random.seed();
        Some(Draw { index, request_id, seed, hyperparameters: normalized(&sampled), units })
    }

    /// Returns the number of 32-bit words taken from the experiment's random stream.
    pub fn random_words(&self) -> u64 {
        self.random.num_words()
    }
}

#[cfg(test)]
mod tests;
