//! Samplers: they decide which hyperparameters a trial gets.

mod explore;
mod joe_kuo;
mod parzen;
mod sobol;
mod tpe;

pub use explore::Explore;
pub use sobol::Sobol;
pub use tpe::{Observation, Point, Tpe};

use serde_json::Value;
use stoker_api::hyperparameters::Space;

use super::book::{Book, TrialState};
use super::grid::Grid;
use super::rng::Random;
use super::rung::Loss;
use super::sample::sample;
use super::turn::Source;

/// Number of results at a length from which TPE learns from that length.
const RESULTS_MIN: usize = 10;

/// Source of hyperparameters.
#[derive(Clone, Debug, PartialEq)]
pub enum Sampler {
    /// Independent random samples.
    Random(Space),
    /// Points of a grid, the last one first.
    Grid {
        /// The grid.
        grid: Grid,
        /// Number of points.
        num_points: u64,
    },
    /// Samples that learn from results.
    Tpe {
        /// The estimator.
        tpe: Tpe,
        /// Coordinates by trial; `None` for deleted trials.
        points: Vec<Option<Point>>,
        /// Trials of earlier experiments.
        prior: Vec<Observation>,
    },
    /// Points of a Sobol sequence.
    Sobol(Sobol),
    /// Random samples, and changed copies.
    Explore {
        /// How copies are changed.
        explore: Explore,
        /// Hyperparameters by trial; `None` for deleted trials.
        drawn: Vec<Option<Value>>,
    },
    /// Given hyperparameters for the first trials, then those of another sampler.
    Given {
        /// Hyperparameters, by trial.
        given: Vec<Value>,
        /// Sampler of the other trials.
        rest: Box<Self>,
    },
}

impl Sampler {
    /// Returns a sampler of all points of a grid.
    pub fn grid(space: Space) -> Self {
        let grid = Grid::new(space);
        Self::Grid { num_points: grid.num_points(), grid }
    }

    /// Returns a sampler by TPE.
    pub fn tpe(space: Space, is_multivariate: bool) -> Self {
        Self::Tpe { tpe: Tpe::new(space, is_multivariate), points: vec![], prior: vec![] }
    }

    /// Returns a sampler by a Sobol sequence.
    pub fn sobol(space: Space, seed: u32) -> Self {
        Self::Sobol(Sobol::new(space, seed))
    }

    /// Returns a sampler for population based training.
    pub fn explore(explore: Explore) -> Self {
        Self::Explore { explore, drawn: vec![] }
    }

    /// Returns the same sampler with trials of earlier experiments, best first. TPE learns from
    /// them, and other samplers begin with their hyperparameters.
    pub(super) fn with_prior(self, prior: &[(Value, Loss)]) -> Self {
        match self {
            Self::Tpe { tpe, points, .. } => {
                let observation = |(hyperparameters, loss): &(Value, Loss)| {
                    let point = tpe.coordinates(hyperparameters)?;
                    Some(Observation { point, loss: Some(*loss), others: vec![] })
                };
                let prior = prior.iter().filter_map(observation).collect();
                Self::Tpe { tpe, points, prior }
            }
            rest if prior.is_empty() => rest,
            rest => {
                let given = prior.iter().map(|(hyperparameters, _)| hyperparameters.clone());
                Self::Given { given: given.collect(), rest: Box::new(rest) }
            }
        }
    }

    /// Returns the hyperparameters of the next trial; `None` if the space has no more points.
    pub(super) fn draw(
        &self,
        source: Option<&Source>,
        book: &Book,
        random: &mut Random,
    ) -> Option<Value> {
        match self {
            Self::Random(space) => Some(sample(space, random)),
            Self::Grid { grid, num_points } => {
                grid.point(num_points.checked_sub(u64::from(book.next_index()) + 1)?)
            }
            Self::Sobol(sobol) => Some(sobol.draw(book.next_index())),
            Self::Tpe { tpe, points, prior } => {
                let own = observations(points, book);
                Some(tpe.draw(&[&prior[..], &own].concat(), random))
            }
            Self::Given { given, rest } => match given.get(book.next_index() as usize) {
                Some(hyperparameters) if source.is_none() => Some(hyperparameters.clone()),
                Some(_) | None => rest.draw(source, book, random),
            },
            Self::Explore { explore, drawn } => {
                let copied = source.and_then(|source| drawn.get(source.trial as usize)?.as_ref());
                Some(explore.draw(copied, random))
            }
        }
    }

    /// Takes in the hyperparameters of the next trial; `None` if the trial was deleted.
    pub(super) fn record(&mut self, hyperparameters: Option<&Value>) {
        match self {
            Self::Random(_) | Self::Grid { .. } | Self::Sobol(_) => {}
            Self::Given { rest, .. } => rest.record(hyperparameters),
            Self::Tpe { tpe, points, .. } => {
                points.push(hyperparameters.and_then(|value| tpe.coordinates(value)));
            }
            Self::Explore { drawn, .. } => drawn.push(hyperparameters.cloned()),
        }
    }

    /// Forgets a deleted trial.
    pub(super) fn forget(&mut self, trial: u32) {
        match self {
            Self::Random(_) | Self::Grid { .. } | Self::Sobol(_) => {}
            Self::Given { rest, .. } => rest.forget(trial),
            Self::Tpe { points, .. } => points[trial as usize] = None,
            Self::Explore { drawn, .. } => drawn[trial as usize] = None,
        }
    }
}

/// Returns what TPE learns from: the results at the greatest length that has enough of them, or
/// else at that with the most. All other trials that may still reach it count as running.
fn observations(points: &[Option<Point>], book: &Book) -> Vec<Observation> {
    let mut counts = std::collections::BTreeMap::<u64, usize>::new();
    let results = book.trials().iter().flat_map(|entry| &entry.results);
    results.for_each(|(units, _)| *counts.entry(*units).or_default() += 1);
    let is_known = |(_, count): &(&u64, &usize)| **count >= RESULTS_MIN;
    // Without enough results at one length, TPE may still learn from them with prior trials.
    let most = || counts.iter().max_by_key(|(_, count)| **count);
    let length = counts.iter().rev().find(is_known).or_else(most).map(|(units, _)| *units);
    let observation = |(point, entry): (&Option<Point>, &super::book::TrialEntry)| {
        let result = entry.results.iter().position(|(units, _)| Some(*units) == length);
        let loss = result.map(|result| entry.results[result].1);
        let others = result.and_then(|result| entry.others.get(result)).cloned();
        let is_open = entry.state == TrialState::Active;
        let point = point.clone().filter(|_| loss.is_some() || is_open)?;
        Some(Observation { point, loss, others: others.unwrap_or_default() })
    };
    points.iter().zip(book.trials()).filter_map(observation).collect()
}

#[cfg(test)]
mod tests;
