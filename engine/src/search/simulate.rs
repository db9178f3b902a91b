//! Simulation of a search on recorded learning curves, with a number of workers.
//!
//! A *leg* is training from the length that a trial has to the length that it is granted, or to its
//! exit. Legs end in the order of (time, trial), and the search decides after each of them. A leg
//! whose trial is stopped meanwhile ends without a result. A limit ends the search and all legs.

use std::collections::{BTreeMap, BinaryHeap, VecDeque};

use serde_json::Value;
use stoker_api::decisions::SearchLimit;
use stoker_api::trial::CloseCause;

mod answers;
mod error;
mod legs;
mod limits;
mod objectives;

pub use answers::{Ask, no_searcher};
pub use error::SimulateError;

use self::legs::{Leg, Training};
use self::limits::Spent;
use super::SearchConfig;
use super::book::TrialState;
use super::rung::Loss;
use super::state::{SearchState, Turn};
use super::turn::{Event, Step};

/// How a simulated program ends by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exit {
    /// The program fails.
    Failed,
    /// The program rejects its hyperparameters.
    Invalid,
    /// The program ends cleanly before its granted length.
    Early,
}

impl Exit {
    fn cause(self) -> CloseCause {
        match self {
            Self::Failed => CloseCause::Failed,
            Self::Invalid => CloseCause::InvalidHyperparameters,
            Self::Early => CloseCause::StoppedEarly,
        }
    }
}

/// Learning curve of a trial.
#[derive(Clone, Debug, PartialEq)]
pub struct Curve {
    /// Searched metric by length. A metric holds until the next listed length.
    pub metrics: BTreeMap<u64, f64>,
    /// Other metrics by name, then by length. A value holds until the next length of its metric.
    pub others: BTreeMap<String, BTreeMap<u64, f64>>,
    /// Length at which the program ends by itself, and how.
    pub exit: Option<(u64, Exit)>,
    /// Duration of one unit, in seconds.
    pub seconds_per_unit: f64,
}

/// Workers and their costs.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Machine {
    /// Number of workers; 0 means as many as are needed.
    pub workers: u32,
    /// Seconds before the first leg of a trial.
    pub start_seconds: f64,
    /// Seconds before a leg of a trial that had released its worker.
    pub resume_seconds: f64,
    /// Whether each leg of a trial but the first trains from 0 instead of from a checkpoint.
    pub is_from_scratch: bool,
}

/// Final state of a trial.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The trial has the full length.
    Completed,
    /// The search stopped the trial, or never continued it.
    Stopped,
    /// The program ended by itself.
    Exited(Exit),
}

/// Consequence of the end of a leg for its trial.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Decision {
    /// The next leg begins at once.
    Continue,
    /// The trial has the full length.
    Complete,
    /// The search ended the trial.
    Stop,
    /// The trial waits for a promotion.
    Pause,
    /// The program ended by itself.
    Exit(Exit),
}

/// End of a leg.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SimulatedEvent {
    /// Seconds since the search began.
    pub time: f64,
    /// Index of the trial.
    pub trial: u32,
    /// Length trained.
    pub units: u64,
    /// Metric of the curve; `None` for a program that failed or rejected its hyperparameters.
    pub metric: Option<f64>,
    /// Consequence for the trial.
    pub decision: Decision,
}

/// A trial at the end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SimulatedTrial {
    /// Length trained.
    pub units: u64,
    /// Final state.
    pub outcome: Outcome,
}

/// A trial of the Pareto front.
#[derive(Clone, Debug, PartialEq)]
pub struct ParetoPoint {
    /// Index of the trial.
    pub trial: u32,
    /// Length of its latest result.
    pub units: u64,
    /// Values of all objectives there, in the order of the searcher. NaN if a value is missing.
    pub values: Vec<f64>,
}

/// Result of a simulation.
#[derive(Clone, Debug, PartialEq)]
pub struct Simulation {
    /// Units of all legs; of a leg that a stop has ended, the complete ones.
    pub units_total: u64,
    /// Time of the last event, or of the limit that ended the search, in seconds.
    pub time_total: f64,
    /// Limit that ended the search, and the time when it was reached, in seconds.
    pub limit_reached: Option<(SearchLimit, f64)>,
    /// Trials by index.
    pub trials: Vec<SimulatedTrial>,
    /// Ends of legs, in order, without legs that a stop has ended.
    pub events: Vec<SimulatedEvent>,
    /// Trial, length and metric of the least loss: of equals the lowest trial, then the shortest
    /// length.
    pub best: Option<(u32, u64, f64)>,
    /// Trials by index that no other trial surpasses, by their latest results. `None` with one
    /// objective.
    pub pareto: Option<Vec<ParetoPoint>>,
}

struct Run<'a> {
    config: &'a SearchConfig,
    search: SearchState,
    ask: Ask<'a>,
    /// Tags of the trials, by index.
    tags: Vec<Option<String>>,
    machine: Machine,
    curves: Vec<&'a Curve>,
    trials: Vec<SimulatedTrial>,
    legs: BinaryHeap<Leg>,
    /// Trials with a leg in the queue.
    training: BTreeMap<u32, Training>,
    /// Trials that wait for a worker and have trained before.
    resuming: VecDeque<u32>,
    /// Trials that wait for a worker for their first leg.
    starting: VecDeque<u32>,
    num_busy: u32,
    spent: Spent,
    limit_reached: Option<(SearchLimit, f64)>,
    units_total: u128,
    events: Vec<SimulatedEvent>,
    best: Option<(Loss, u32, u64, f64)>,
}

/// Simulates a search. `ask` asks its external searcher, and `curve_of` returns the curve of a
/// trial, given its index and hyperparameters.
///
/// # Errors
///
/// A curve, a metric or an answer is missing.
pub fn simulate<'a>(
    config: &'a SearchConfig,
    machine: Machine,
    ask: Ask<'a>,
    mut curve_of: impl FnMut(u32, &Value) -> Option<&'a Curve>,
) -> Result<Simulation, SimulateError> {
    let mut run = Run {
        config,
        search: SearchState::of(config),
        ask,
        tags: vec![],
        machine,
        curves: vec![],
        trials: vec![],
        legs: BinaryHeap::new(),
        training: BTreeMap::new(),
        resuming: VecDeque::new(),
        starting: VecDeque::new(),
        num_busy: 0,
        spent: Spent::default(),
        limit_reached: None,
        units_total: 0,
        events: vec![],
        best: None,
    };
    run.decide(vec![Event::Began], None, 0.0, &mut curve_of)?;
    while run.limit_reached.is_none() {
        let leg_end = run.legs.peek().map(|leg| leg.end);
        // A leg that ends at the time of the limit counts.
        let is_next = |(_, time): &(SearchLimit, f64)| leg_end.is_none_or(|end| *time < end);
        if let Some((limit, time)) = run.next_limit().filter(is_next) {
            run.pass_to(time);
            run.limit_reached = Some((limit, time));
            run.decide(vec![Event::LimitReached], None, time, &mut curve_of)?;
        } else if let Some(leg) = run.legs.pop() {
            run.end_leg(leg, &mut curve_of)?;
        } else {
            break;
        }
    }
    let pareto = run.pareto();
    Ok(Simulation {
        units_total: u64::try_from(run.units_total).unwrap_or(u64::MAX),
        time_total: run.spent.time,
        limit_reached: run.limit_reached,
        trials: run.trials,
        events: run.events,
        best: run.best.map(|(_, trial, units, metric)| (trial, units, metric)),
        pareto,
    })
}

impl<'a> Run<'a> {
    fn end_leg(
        &mut self,
        leg: Leg,
        curve_of: &mut impl FnMut(u32, &Value) -> Option<&'a Curve>,
    ) -> Result<(), SimulateError> {
        let Leg { end: time, trial } = leg;
        self.training.remove(&trial);
        self.pass_to(time);
        let units = self.trials[trial as usize].units;
        let exit = self.exit(trial).filter(|(at, _)| *at <= units).map(|(_, exit)| exit);
        let metric = match exit {
            Some(Exit::Failed | Exit::Invalid) => None,
            Some(Exit::Early) | None => Some(self.metric(trial, units)?),
        };
        let loss = metric.map(|metric| Loss::of_metric(metric, self.config.smaller_is_better));
        if let (Some(metric), Some(loss)) = (metric, loss) {
            self.rank(trial, units, metric, loss);
        }
        let events = match exit {
            Some(exit) => vec![Event::Closed { trial, cause: exit.cause() }],
            None => {
                let loss = loss.unwrap_or(Loss::INFINITE);
                let others = self.others(trial, units);
                let result = Event::Result { trial, units, loss, others };
                self.limit_reached = self.add_result(trial, units).map(|limit| (limit, time));
                // In one turn with the limit, no trial follows from the result, and no question.
                let limit = self.limit_reached.map(|_| Event::LimitReached);
                std::iter::once(result).chain(limit).collect()
            }
        };
        let index = self.events.len();
        let decision = exit.map_or(Decision::Pause, Decision::Exit);
        self.events.push(SimulatedEvent { time, trial, units, metric, decision });
        let turns = self.decide(events, Some(trial), time, curve_of)?;
        if exit.is_none() && !turns.is_empty() {
            self.events[index].decision = self.decision(trial, units, &turns);
        }
        self.set_outcome(trial, exit);
        Ok(())
    }

    fn metric(&self, trial: u32, units: u64) -> Result<f64, SimulateError> {
        let metrics = &self.curves[trial as usize].metrics;
        let (_, metric) =
            metrics.range(..=units).next_back().ok_or(SimulateError::NoMetric { trial, units })?;
        Ok(*metric)
    }

    fn rank(&mut self, trial: u32, units: u64, metric: f64, loss: Loss) {
        // An infinite metric is better than none.
        let key = |loss: Loss, metric: f64, trial, units| (loss, metric.is_nan(), trial, units);
        let is_better = self.best.is_none_or(|(best, best_trial, best_units, best_metric)| {
            key(loss, metric, trial, units) < key(best, best_metric, best_trial, best_units)
        });
        if is_better {
            self.best = Some((loss, trial, units, metric));
        }
    }

    fn decision(&self, trial: u32, units: u64, turns: &[Turn]) -> Decision {
        let is_continued =
            |step: &Step| matches!(step, Step::Continue { trial: of, .. } if *of == trial);
        if turns.iter().flat_map(|turn| &turn.steps).any(is_continued) {
            return Decision::Continue;
        }
        match self.search.book().trial(trial).state {
            _ if units >= self.config.units_max => Decision::Complete,
            TrialState::Stopped => Decision::Stop,
            _ => Decision::Pause,
        }
    }

    fn set_outcome(&mut self, trial: u32, exit: Option<Exit>) {
        let entry = &mut self.trials[trial as usize];
        entry.outcome = match exit {
            Some(exit) => Outcome::Exited(exit),
            None if entry.units >= self.config.units_max => Outcome::Completed,
            None => Outcome::Stopped,
        };
    }

    /// Lets the search react to events in one turn, and gives free workers to waiting trials.
    /// `ended` is the trial whose leg ended now.
    fn decide(
        &mut self,
        events: Vec<Event>,
        ended: Option<u32>,
        now: f64,
        curve_of: &mut impl FnMut(u32, &Value) -> Option<&'a Curve>,
    ) -> Result<Vec<Turn>, SimulateError> {
        let turns = self.turns(events)?;
        let mut is_busy = false;
        for turn in &turns {
            let sources = turn.steps.iter().filter_map(|step| match step {
                Step::Create { source, .. } => Some(*source),
                _ => None,
            });
            for (draw, source) in turn.created.iter().zip(sources) {
                let curve = curve_of(draw.index, &draw.hyperparameters)
                    .ok_or(SimulateError::NoCurve { trial: draw.index })?;
                self.curves.push(curve);
                // A copy has trained as long as the trial that it copies.
                let units = source.map_or(0, |source| source.units);
                self.trials.push(SimulatedTrial { units, outcome: Outcome::Stopped });
                self.spent.lengths.push(units);
                self.starting.push_back(draw.index);
            }
        }
        for step in turns.iter().flat_map(|turn| &turn.steps) {
            if let Step::Continue { trial, .. } = *step {
                if Some(trial) == ended {
                    is_busy = true;
                    self.begin_leg(trial, now, 0.0, false);
                } else {
                    self.resuming.push_back(trial);
                }
            }
        }
        if ended.is_some() && !is_busy {
            self.num_busy -= 1;
        }
        self.drop_legs(&turns, now);
        while self.num_busy < self.max_busy() {
            let (trial, cost, is_first) = match (self.resuming.pop_front(), &mut self.starting) {
                (Some(trial), _) => (trial, self.machine.resume_seconds, false),
                (None, starting) => match starting.pop_front() {
                    Some(trial) => (trial, self.machine.start_seconds, true),
                    None => break,
                },
            };
            if self.search.book().trial(trial).state == TrialState::Active {
                self.num_busy += 1;
                self.begin_leg(trial, now, cost, is_first);
            }
        }
        Ok(turns)
    }

    /// Returns the number of trials that may train at the same time.
    fn max_busy(&self) -> u32 {
        let workers = Some(self.machine.workers).filter(|workers| *workers > 0);
        workers.into_iter().chain(self.search.places()).min().unwrap_or(u32::MAX)
    }
}

#[cfg(test)]
mod tests;
