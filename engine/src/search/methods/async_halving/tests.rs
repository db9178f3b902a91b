//! Promotion against a literal transcription of the published algorithm, and stopping against
//! decisions of Optuna.

use std::collections::BTreeSet;

use proptest::prelude::*;
use stoker_api::hyperparameters::Space;
use stoker_api::trial::CloseCause;

use super::{AsyncHalving, AsyncHalvingConfig};
use crate::search::book::TrialState;
use crate::search::rung::Loss;
use crate::search::samplers::Sampler;
use crate::search::state::{AnyMethod, SearchState, Turn};
use crate::search::turn::{Event, Step};

const DIVISOR: usize = 3;
const LENGTHS: [u64; 4] = [1, 3, 9, 27];

/// Algorithm 2 of Li et al. (MLSys 2020): lists of results, sorted when a job is asked for.
#[derive(Default)]
struct Published {
    rungs: [Vec<(u32, f64)>; LENGTHS.len()],
    promoted: [BTreeSet<u32>; LENGTHS.len()],
    num_created: u32,
}

impl Published {
    /// Removes a trial that rejected its hyperparameters.
    fn remove(&mut self, trial: u32) {
        self.rungs.iter_mut().for_each(|rung| rung.retain(|(other, _)| *other != trial));
    }

    /// Returns the next job as trial and rung.
    fn job(&mut self) -> (u32, usize) {
        for rung in (0..LENGTHS.len() - 1).rev() {
            let mut results = self.rungs[rung].clone();
            // Stable: of equal losses, the first to come ranks first.
            results.sort_by(|one, other| one.1.total_cmp(&other.1));
            results.truncate(results.len() / DIVISOR);
            let promoted = &mut self.promoted[rung];
            if let Some((trial, _)) = results.iter().find(|(trial, _)| !promoted.contains(trial)) {
                promoted.insert(*trial);
                return (*trial, rung + 1);
            }
        }
        self.num_created += 1;
        (self.num_created - 1, 0)
    }
}

fn jobs(turn: &Turn) -> Vec<(u32, usize)> {
    let mut created = turn.created.iter();
    let rung = |units: &u64| LENGTHS.iter().position(|length| length == units).unwrap();
    let job = |step: &Step| match step {
        Step::Create { .. } => Some((created.next().unwrap().index, 0)),
        Step::Continue { trial, units } => Some((*trial, rung(units))),
        _ => None,
    };
    turn.steps.iter().filter_map(job).collect()
}

proptest! {
    #[test]
    fn promotion_follows_the_published_algorithm(
        // One of ten trials rejects its hyperparameters. Then several rungs may have a candidate.
        results in prop::collection::vec((0..10_u8, any::<usize>()), 0..400),
        num_workers in 1..12_u32,
    ) {
        let config = AsyncHalvingConfig {
            group: 0,
            lengths: LENGTHS.to_vec(),
            max_trials: 100_000,
            divisor: DIVISOR as u32,
            concurrency: num_workers,
            stop_once: false,
        };
        let method = AnyMethod::AsyncHalving(AsyncHalving::new(config));
        let sampler = Sampler::Random(Space::Group(Default::default()));
        let mut search = SearchState::new(method, sampler, 0);
        let mut published = Published::default();
        let first: Vec<_> = (0..num_workers).map(|_| published.job()).collect();
        prop_assert_eq!(jobs(&search.advance(Event::Began).unwrap()), first);
        for (loss, choice) in results {
            let active: Vec<u32> = (0..)
                .zip(search.book().trials())
                .filter(|(_, entry)| entry.state == TrialState::Active)
                .map(|(trial, _)| trial)
                .collect();
            let trial = active[choice % active.len()];
            let units = search.book().trial(trial).units;
            let rung = LENGTHS.iter().position(|length| *length == units).unwrap();
            let event = match loss {
                9 => {
                    published.remove(trial);
                    Event::Closed { trial, cause: CloseCause::InvalidHyperparameters }
                }
                loss => {
                    published.rungs[rung].push((trial, f64::from(loss)));
                    {
                        let loss = Loss::new(f64::from(loss));
                        Event::Result { trial, units, loss, others: vec![] }
                    }
                }
            };
            let expected = vec![published.job()];
            prop_assert_eq!(jobs(&search.advance(event).unwrap()), expected);
        }
    }
}

#[derive(serde::Deserialize)]
struct Study {
    divisor: u32,
    /// Trial, rung, loss, and 1 if Optuna prunes the trial.
    decisions: Vec<(u32, usize, f64, u8)>,
}

/// The decisions are those of Optuna's `SuccessiveHalvingPruner`, printed by `optuna_decisions.py`.
#[test]
fn stopping_rule_equals_optunas_pruner() {
    let studies: Vec<Study> = serde_json::from_str(include_str!("optuna_decisions.json")).unwrap();
    let num_decisions: usize = studies.iter().map(|study| study.decisions.len()).sum();
    assert_eq!(num_decisions, 4800);
    for (number, study) in studies.iter().enumerate() {
        let lengths: Vec<u64> = (0..4).map(|rung| u64::from(study.divisor).pow(rung)).collect();
        let config = AsyncHalvingConfig {
            group: 0,
            lengths: lengths.clone(),
            max_trials: 100_000,
            divisor: study.divisor,
            concurrency: 8,
            stop_once: true,
        };
        let method = AnyMethod::AsyncHalving(AsyncHalving::new(config));
        let sampler = Sampler::Random(Space::Group(Default::default()));
        let mut search = SearchState::new(method, sampler, 0);
        search.advance(Event::Began);
        for (index, &(trial, rung, loss, is_pruned)) in study.decisions.iter().enumerate() {
            let (units, loss) = (lengths[rung], Loss::new(loss));
            let turn =
                search.advance(Event::Result { trial, units, loss, others: vec![] }).unwrap();
            // The pruner also ranks trials with the full length, which have nothing to continue.
            if rung + 1 < lengths.len() {
                let is_stopped = turn.steps.contains(&Step::Stop { trial });
                assert_eq!(is_stopped, is_pruned == 1, "study {number}, decision {index}");
            }
        }
    }
}
