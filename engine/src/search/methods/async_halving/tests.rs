//! Promotion against a literal transcription of the published algorithm, and stopping against
//! decisions of Optuna.

use std::collections::BTreeSet;

use proptest::prelude::*;
use stoker_api::hyperparameters::Space;
use stoker_api::trial::CloseCause;

use super::{AsyncHalving, AsyncHalvingConfig};
use crate::search::book::TrialState;
use crate::search::layout;
use crate::search::rung::Loss;
use crate::search::samplers::Sampler;
use crate::search::state::{AnyMethod, SearchState, Turn};
use crate::search::turn::{Edit, Event, Step};
use crate::search::view::NextPromotion::{self, AtMost, AtResults, Below, Closed, Top, Trial};
use crate::search::view::Standing;

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

/// Returns a search with rungs at 1, 2 and 4 units, which has begun.
fn halving(max_trials: u32, concurrency: u32, stop_once: bool) -> SearchState {
    let config = layout::async_halving(4, 2, 3, max_trials, concurrency, stop_once);
    let method = AnyMethod::AsyncHalving(AsyncHalving::new(config));
    let mut search = SearchState::new(method, Sampler::Random(Space::Group(Default::default())), 7);
    search.advance(Event::Began);
    search
}

/// Reports a result at the granted length of a trial.
fn report(search: &mut SearchState, trial: u32, loss: u8) {
    let units = search.book().trial(trial).units;
    let loss = Loss::new(loss.into());
    search.advance(Event::Result { trial, units, loss, others: vec![] }).unwrap();
}

fn next_promotions(search: &SearchState) -> Vec<NextPromotion> {
    search.views()[0].rungs.iter().map(|rung| rung.next).collect()
}

#[test]
fn next_promotion_is_that_of_the_rule() {
    let loss = |loss: u8| Loss::new(loss.into());
    let mut search = halving(4, 1, false);
    let check = |search: &SearchState, expected: [NextPromotion; 3]| {
        assert_eq!(next_promotions(search), expected);
    };
    check(&search, [AtResults(2), AtResults(2), Top]);
    report(&mut search, 0, 3);
    check(&search, [Below(loss(3)), AtResults(2), Top]);
    // Trial 0 is promoted. Of three results, one is promoted.
    report(&mut search, 1, 5);
    check(&search, [Below(loss(3)), AtResults(2), Top]);
    report(&mut search, 0, 8);
    report(&mut search, 2, 6);
    // The last trial is worse than the others, so trial 1 is promoted, and the rung is closed.
    report(&mut search, 3, 7);
    check(&search, [Closed, Below(loss(8)), Top]);
    report(&mut search, 1, 9);
    check(&search, [Closed, Closed, Top]);
}

#[test]
fn candidates_without_a_place_keep_higher_rungs_open() {
    let mut search = halving(8, 8, false);
    (0..4).for_each(|trial| report(&mut search, trial, trial as u8));
    // Trial 0 trains to the top, and takes the only place that an edit leaves.
    report(&mut search, 0, 0);
    report(&mut search, 1, 1);
    search.advance(Event::Edited(Edit {
        max_trials: None,
        max_concurrent: Some(1),
        units_max: 4,
        is_limited: false,
        bracket_trials: vec![],
    }));
    (4..8).for_each(|trial| report(&mut search, trial, trial as u8));
    assert_eq!(search.book().trial(0).units, 4);
    assert_eq!(next_promotions(&search), [Trial(2), Below(Loss::new(0.0)), Top]);
    // Trials 2 and 3 follow into the rung of trial 1, and then half of its results continue.
    assert_eq!(search.book().trial(1).state, TrialState::Paused);
    [(0, 0), (2, 2), (3, 3)].into_iter().for_each(|(trial, loss)| report(&mut search, trial, loss));
    assert_eq!(search.book().trial(1).units, 4);
}

#[test]
fn stopping_names_the_loss_that_continues() {
    let mut search = halving(3, 1, true);
    assert_eq!(next_promotions(&search), [AtResults(1), AtResults(1), Top]);
    search.advance(Event::Closed { trial: 0, cause: CloseCause::Failed });
    // The failed trial is the best of its rung, but does not continue.
    assert_eq!(next_promotions(&search), [AtMost(Loss::INFINITE), AtResults(1), Top]);
    report(&mut search, 1, 3);
    assert_eq!(next_promotions(&search), [AtMost(Loss::new(3.0)), AtResults(1), Top]);
    search.advance(Event::Closed { trial: 1, cause: CloseCause::Failed });
    search.advance(Event::Closed { trial: 2, cause: CloseCause::Failed });
    assert_eq!(next_promotions(&search), [Closed, Closed, Top]);
}

#[test]
fn standings_have_the_numbers_of_the_rung() {
    let loss = |loss: u8| Loss::new(loss.into());
    let mut search = halving(4, 1, false);
    [(0, 3), (1, 5), (0, 8)].into_iter().for_each(|(trial, loss)| report(&mut search, trial, loss));
    let first = Standing {
        rung: 0,
        num_rungs: 3,
        units: 1,
        loss: loss(5),
        rank: 2,
        num_results: 2,
        num_continuing: 1,
        continues: false,
        cut: Some(loss(3)),
        num_required: 2,
        num_missing: 0,
        peers: vec![(0, loss(3))],
    };
    assert_eq!(search.standing(1, 1), Some(first.clone()));
    let second = Standing {
        rung: 1,
        units: 2,
        loss: loss(8),
        rank: 1,
        num_results: 1,
        num_continuing: 0,
        cut: None,
        peers: vec![],
        ..first
    };
    assert_eq!([0, 1].map(|trial| search.standing(trial, 3)), [Some(second), None]);
    // With `stop_once`, the best of any number of trials continues.
    let mut search = halving(4, 1, true);
    report(&mut search, 0, 3);
    let standing = search.standing(0, 1).unwrap();
    assert_eq!((standing.num_required, standing.continues), (1, true));
}
