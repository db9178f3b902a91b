//! Properties of whole experiments: any interleaving, crash or deletion leads to an end, and the
//! search that is rebuilt from the record equals the live one.
//!
//! The simulated runner remembers the records as JSON. It applies a part of the writes and then
//! forgets everything else. Its trials report, fail and end in any order.

mod external;
mod reopened;
mod runner;

use std::collections::BTreeSet;

use proptest::prelude::*;
use stoker_api::experiment::{
    AdaptiveAshaSearch, AdaptiveSimpleSearch, AsyncHalvingSearch, DesiredState, ExternalSearch,
    HyperbandSearch, Length, MedianStopping, PbtSearch, Phase, SearchLimits, SearchMode,
    SobolSearch, SyncHalvingSearch, TpeSearch, Unit,
};
use stoker_api::trial::{CloseCause, Fact};
use stoker_api::validate::Method;

use self::runner::Runner;
use crate::trial::{TrialRecord, closed};

/// Outcome that must not depend on the order if trials are not compared: request ID,
/// hyperparameters, close cause, and lengths and metrics of the results of each trial.
type Outcome = Vec<(String, String, Option<CloseCause>, Vec<(u64, String)>)>;

fn outcome(runner: &Runner) -> Outcome {
    let results = |record: &TrialRecord| {
        let results = record.status.facts.iter().filter_map(|fact| match fact {
            Fact::Result(result) => Some((result.units, result.metric.clone())),
            Fact::Closed(_) | Fact::Reopened(_) => None,
        });
        results.collect()
    };
    let trial = |record: TrialRecord| {
        let request_id = record.spec.request_id.clone();
        let hyperparameters = record.spec.hyperparameters.to_string();
        (request_id, hyperparameters, closed(&record), results(&record))
    };
    runner.records().into_iter().map(trial).collect()
}

/// Methods that do not compare trials.
fn plain_method() -> impl Strategy<Value = Method> {
    let random = (1..6_u32, 0..4_u32)
        .prop_map(|(max_trials, max_concurrent)| Method::Random { max_trials, max_concurrent });
    let grid = (0..4_u32).prop_map(|max_concurrent| Method::Grid { max_concurrent });
    prop_oneof![1 => Just(Method::Single), 4 => random, 3 => grid]
}

fn method() -> impl Strategy<Value = Method> {
    (0..13_u8, 1..14_u32, 0..4_u32, any::<bool>()).prop_map(
        |(kind, max_trials, max_concurrent_trials, stop_once)| match kind {
            0 => Method::Random { max_trials, max_concurrent: max_concurrent_trials },
            1 => Method::Tpe(TpeSearch { max_trials, max_concurrent_trials, multivariate: false }),
            2 | 3 => Method::AsyncHalving(AsyncHalvingSearch {
                max_trials,
                num_rungs: 3,
                divisor: 3,
                max_concurrent_trials,
                stop_once,
            }),
            4 => Method::AdaptiveAsha(AdaptiveAshaSearch {
                max_trials,
                mode: SearchMode::Conservative,
                max_rungs: 3,
                bracket_rungs: vec![],
                divisor: 2,
                max_concurrent_trials,
                stop_once,
            }),
            5 => Method::SyncHalving {
                search: SyncHalvingSearch {
                    num_rungs: 3,
                    budget: Length::new(Unit::Epochs, 40),
                    divisor: 3,
                    max_concurrent_trials,
                },
                budget: 40,
            },
            6 => Method::AdaptiveSimple(AdaptiveSimpleSearch {
                max_trials,
                mode: SearchMode::Standard,
                max_rungs: 3,
                bracket_rungs: vec![],
                divisor: 2,
                max_concurrent_trials,
            }),
            7 => Method::Sobol(SobolSearch { max_trials, max_concurrent_trials }),
            8 | 9 => population(2 + max_concurrent_trials),
            10 | 11 => Method::External(ExternalSearch {
                url: None,
                command: vec!["searcher".to_owned()],
                max_trials,
                max_concurrent_trials,
            }),
            _ => Method::Hyperband(HyperbandSearch {
                num_brackets: 2,
                divisor: 3,
                max_concurrent_trials,
            }),
        },
    )
}

/// Three rounds of three epochs.
fn population(population_size: u32) -> Method {
    let search = PbtSearch {
        population_size,
        length_per_round: Length::new(Unit::Epochs, 3),
        num_rounds: 3,
        truncate_fraction: 0.4,
        resample_probability: 0.3,
        perturb_factor: 0.2,
    };
    Method::Pbt { search, units_per_round: 3 }
}

/// Limits that some of the searches reach.
fn limits() -> impl Strategy<Value = SearchLimits> {
    let limit = |most: u64| prop_oneof![2 => Just(None), 1 => (1..most).prop_map(Some)];
    (limit(80), limit(300), limit(60)).prop_map(|(seconds, slot_seconds, units)| SearchLimits {
        seconds,
        slot_seconds,
        units,
    })
}

/// Searches of all kinds, with and without median stopping and limits.
fn runner() -> impl Strategy<Value = Runner> {
    let rule = (0..5_u64, 1..5_u64, 1..4_u32).prop_map(|(start_units, every_units, min_trials)| {
        MedianStopping { start_units, every_units, min_trials }
    });
    let flags = any::<(bool, bool)>();
    (method(), 0..1000_u32, prop::option::weighted(0.3, rule), limits(), flags).prop_map(
        |(method, seed, rule, limits, (has_objective, is_slow))| {
            let rule = rule.filter(|_| !matches!(method, Method::External(_)));
            let runner = Runner::new(method, seed).with_median_stopping(rule).with_limits(limits);
            runner.with_objective(has_objective).with_slow_answers(is_slow)
        },
    )
}

/// Few cases for the continuous checks. `PROPTEST_CASES` sets more, see docs/testing.md.
fn cases() -> ProptestConfig {
    let config = ProptestConfig { failure_persistence: None, ..ProptestConfig::default() };
    let is_set = std::env::var_os("PROPTEST_CASES").is_some();
    ProptestConfig { cases: if is_set { config.cases } else { 96 }, ..config }
}

type Steps = Vec<(u8, usize, u8)>;

fn steps() -> impl Strategy<Value = Steps> {
    prop::collection::vec((0..8_u8, 0..16_usize, any::<u8>()), 0..120)
}

proptest! {
    #![proptest_config(cases())]

    #[test]
    fn plain_searches_give_the_same_trials_in_any_interleaving(
        method in plain_method(),
        seed in 0..1000_u32,
        steps in steps(),
    ) {
        let mut sequential = Runner::new(method.clone(), seed);
        sequential.finish();
        let mut interleaved = Runner::new(method, seed);
        for (kind, pick, die) in steps {
            match kind {
                0 => interleaved.settle(pick % 4),
                1 => interleaved.settle(usize::MAX),
                _ => interleaved.step(pick, die),
            }
            interleaved.check();
        }
        interleaved.finish();
        prop_assert_eq!(outcome(&interleaved), outcome(&sequential));
        prop_assert_eq!(interleaved.phase(), sequential.phase());
        prop_assert!(interleaved.num_closes.values().all(|closes| *closes == 1));
    }

    /// A runner that dies between any two writes, or before it has written the trials of its latest
    /// turns, continues as if it had not.
    #[test]
    fn a_crash_between_any_writes_changes_nothing(
        mut runner in runner(),
        steps in steps(),
    ) {
        for (kind, pick, die) in steps {
            if kind > 1 {
                runner.step(pick, die);
                continue;
            }
            let mut undisturbed = runner.clone();
            undisturbed.settle(usize::MAX);
            runner.settle(if kind == 0 { pick % 6 } else { usize::MAX });
            runner.check_explained();
            if kind == 1 {
                runner.lose_created(pick % 6);
            }
            runner.crash();
            runner.settle(usize::MAX);
            check_equal(&runner, &undisturbed, kind == 0);
            runner.check();
            runner.check_explained();
            runner.check_released();
        }
        runner.finish();
        runner.check_explained_at_each_turn();
        prop_assert!(runner.num_closes.values().all(|closes| *closes == 1));
    }

    /// The user pauses and deletes trials while the runner lives or is dead.
    #[test]
    fn searches_survive_deletions_without_reusing_indexes(
        mut runner in runner(),
        steps in steps(),
    ) {
        // A stored answer to a lost question may be impossible after a deletion.
        runner = runner.with_slow_answers(false);
        let mut deleted = BTreeSet::new();
        for (kind, pick, die) in steps {
            match kind {
                0 => {
                    runner.settle(usize::MAX);
                    let indices: Vec<_> = runner.trials.keys().copied().collect();
                    if let Some(index) = indices.get(pick) {
                        runner.trials.remove(index);
                        runner.num_closes.remove(index);
                        deleted.insert(*index);
                    }
                    if die > 128 {
                        runner.crash();
                    }
                }
                1 => {
                    let paused = [DesiredState::Active, DesiredState::Paused];
                    runner.state = paused[usize::from(die > 128)];
                    runner.settle(usize::MAX);
                }
                2 => {
                    runner.settle(usize::MAX);
                    runner.check_explained();
                }
                _ => runner.step(pick, die),
            }
            prop_assert!(deleted.iter().all(|index| !runner.trials.contains_key(index)));
            runner.check();
        }
        runner.state = DesiredState::Active;
        runner.finish();
        runner.check_explained();
        let ledger = runner.ledger();
        let created = ledger.book().next_index() - ledger.num_uncreated();
        prop_assert_eq!(runner.trials.len() + deleted.len(), created as usize);
    }

    #[test]
    fn a_cancelled_experiment_ends(
        mut runner in runner(),
        steps in steps(),
    ) {
        for (kind, pick, die) in steps {
            if kind == 0 { runner.settle(usize::MAX) } else { runner.step(pick, die) }
        }
        runner.settle(usize::MAX);
        runner.state = DesiredState::Cancelled;
        let created = runner.trials.len();
        runner.finish();
        prop_assert_eq!(runner.trials.len(), created);
    }

    /// A search ends by its limit as soon as the limit is reached, and not before.
    #[test]
    fn limits_end_searches_when_they_are_reached(
        method in method(),
        limits in limits(),
        seed in 0..1000_u32,
        steps in steps(),
    ) {
        let mut runner = Runner::new(method, seed).with_limits(limits);
        for (kind, pick, die) in steps {
            let before = runner.ledger();
            if kind == 0 { runner.settle(usize::MAX) } else { runner.step(pick, die) }
            let ledger = runner.ledger();
            if let Some(reached) = ledger.limit_reached() {
                prop_assert!(reached.spent >= reached.maximum, "{reached:?}");
                prop_assert!(ledger.book().is_finished());
                prop_assert_eq!(ledger.book().num_open(), 0);
                let num_created = before.book().next_index();
                prop_assert!(num_created == 0 || ledger.book().next_index() == num_created);
            }
        }
        runner.finish();
        if runner.ledger().limit_reached().is_some() {
            let phase = runner.phase();
            prop_assert!([Phase::Completed, Phase::Failed].contains(&phase), "{phase:?}");
        }
    }

    /// The user edits a search while it runs, after its end, and between crashes.
    #[test]
    fn edited_searches_continue_from_their_record(
        mut runner in runner(),
        steps in steps(),
    ) {
        for (kind, pick, die) in steps {
            match kind {
                0 => edit(&mut runner, pick, die),
                1 => {
                    let mut undisturbed = runner.clone();
                    undisturbed.settle(usize::MAX);
                    runner.settle(pick % 6);
                    runner.crash();
                    runner.settle(usize::MAX);
                    check_equal(&runner, &undisturbed, true);
                }
                2 => runner.settle(usize::MAX),
                _ => runner.step(pick, die),
            }
            runner.check();
        }
        runner.finish();
        let num_created = runner.trials.len() as u32;
        // A limit may have stopped trials before their creation. They count.
        let num_decided = runner.ledger().book().next_index();
        let max_trials = runner.settings().max_trials;
        runner.edit(|settings| {
            settings.max_trials = settings.max_trials.map(|_| num_decided + 5);
            settings.limits = SearchLimits::default();
        });
        runner.finish();
        let num_added = runner.trials.len() as u32 - num_created;
        let num_invalid = runner.ledger().book().num_invalid();
        prop_assert!(max_trials.is_none() || num_added + num_invalid >= 5, "{num_added} more");
        prop_assert!(runner.num_closes.values().all(|closes| *closes == 1));
    }
}

/// Checks that a crash has changed nothing. It may only delay an answer that takes long. If trials
/// were lost before they started, others may have their places.
fn check_equal(runner: &Runner, undisturbed: &Runner, are_places_equal: bool) {
    if !runner.has_slow_answers() {
        if are_places_equal {
            assert_eq!(&runner.trials, &undisturbed.trials);
        }
        assert_eq!(runner.decisions(), undisturbed.decisions());
        assert_eq!(&runner.log, &undisturbed.log);
        assert_eq!(&runner.live, &undisturbed.live);
    }
}

fn edit(runner: &mut Runner, pick: usize, die: u8) {
    let created = runner.trials.len() as u32;
    let can_grow = runner.can_grow();
    // An answer may already use the maximum, so it is only raised.
    let least = runner.is_external().then(|| runner.settings().max_trials).flatten();
    let created = least.map_or(created, |least| least.max(created));
    let number = u64::from(die);
    runner.edit(|settings| match pick % 4 {
        0 => settings.max_trials = settings.max_trials.map(|_| created + u32::from(die % 9)),
        1 => {
            let places = settings.max_concurrent_trials.map(|_| u32::from(die % 5));
            settings.max_concurrent_trials = places;
        }
        2 if can_grow => settings.max_length += number % 30,
        _ => settings.limits.units = (die > 100).then_some(number),
    });
}

/// A median stop in the bracket of a synchronous search counts as promoted in the same turn.
#[test]
fn median_stops_that_count_as_promoted_are_explained() {
    let method = Method::AdaptiveSimple(AdaptiveSimpleSearch {
        max_trials: 3,
        mode: SearchMode::Standard,
        max_rungs: 3,
        bracket_rungs: vec![],
        divisor: 2,
        max_concurrent_trials: 1,
    });
    let rule = MedianStopping { start_units: 0, every_units: 1, min_trials: 1 };
    for seed in 0..40 {
        Runner::new(method.clone(), seed).with_median_stopping(Some(rule)).finish();
    }
}
