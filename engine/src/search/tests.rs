//! Tests of searches: the reference's draws bit for bit, the books, the ends.

use std::collections::BTreeMap;

use serde_json::json;
use stoker_api::hyperparameters::{DoubleRange, IntRange, LogRange, Parameter};

use super::*;
use crate::fixture::{BetterOfTwo, config};

const VECTORS: &str = include_str!("vectors.json");

/// Reads a space as the reference writes it.
fn space(value: &Value) -> Space {
    let Some(members) = value.as_object() else {
        return Space::Parameter(Parameter::Const(value.clone()));
    };
    let (min, max) = (&value["minval"], &value["maxval"]);
    let count = value["count"].as_u64().map(|it| it as u32);
    let floats = || (min.as_f64().unwrap(), max.as_f64().unwrap());
    let parameter = match value["type"].as_str() {
        None => {
            let group = members.iter().map(|(name, it)| (name.clone(), space(it)));
            return Space::Group(group.collect::<BTreeMap<_, _>>());
        }
        Some("const") => Parameter::Const(value["val"].clone()),
        Some("categorical") => Parameter::Categorical(value["vals"].as_array().unwrap().clone()),
        Some("int") => {
            let (min, max) = (min.as_i64().unwrap(), max.as_i64().unwrap());
            Parameter::Int(IntRange { min, max, count })
        }
        Some("double") => {
            let (min, max) = floats();
            Parameter::Double(DoubleRange { min, max, count })
        }
        Some("log") => {
            let ((min, max), base) = (floats(), value["base"].as_f64().unwrap());
            Parameter::Log(LogRange { base, min, max, count })
        }
        Some(other) => panic!("unknown type {other}"),
    };
    Space::Parameter(parameter)
}

fn draws(actions: &[Action]) -> Vec<Draw> {
    let draw = |it: &Action| match it {
        Action::Create(draw) => Some(draw.clone()),
        Action::Continue { .. } | Action::Stop { .. } | Action::Shutdown { .. } => None,
    };
    actions.iter().filter_map(draw).collect()
}

#[test]
fn random_draws_are_those_of_the_reference_to_the_bit() {
    let vectors: Value = serde_json::from_str(VECTORS).unwrap();
    for (seed, expected) in vectors["random"].as_object().unwrap() {
        let expected = expected.as_array().unwrap();
        let max_trials = expected.len() as u32;
        let method = Method::Random { max_trials, max_concurrent: 0 };
        let space = space(&vectors["random_space"]);
        let seed = seed.parse().unwrap();
        let draws = draws(&Search::new(SearchConfig { space, seed, ..config(method) }).start());
        assert_eq!(draws.len(), expected.len());
        for (draw, expected) in draws.iter().zip(expected) {
            assert_eq!(draw.hyperparameters, normalized(&expected["hparams"]), "seed {seed}");
            assert_eq!(draw.request_id, expected["request_id"], "seed {seed}");
            assert_eq!(draw.seed, expected["trial_seed"], "seed {seed}");
        }
    }
}

#[test]
fn grids_visit_the_points_of_the_reference_the_last_first() {
    let vectors: Value = serde_json::from_str(VECTORS).unwrap();
    for case in vectors["grid"].as_array().unwrap() {
        let method = Method::Grid { max_concurrent: 0 };
        let space = space(&case["space"]);
        let draws = draws(&Search::new(SearchConfig { space, ..config(method) }).start());
        let points: Vec<_> = draws.into_iter().rev().map(|it| it.hyperparameters).collect();
        assert_eq!(Value::Array(points), normalized(&case["points"]));
    }
}

#[test]
fn empty_groups_are_kept_and_constants_draw_nothing() {
    let space = space(&json!({ "a": {}, "b": [1.0], "c": { "d": {}, "e": null } }));
    let config = SearchConfig { space, seed: 42, ..config(Method::Single) };
    let draws = draws(&Search::new(config).start());
    let expected = json!({ "a": {}, "b": [1], "c": { "d": {}, "e": null } });
    assert_eq!(draws[0].hyperparameters, expected);
    let mut random = Random::new(42);
    assert_eq!((&draws[0].request_id, draws[0].seed), (&random.uuid(), random.seed()));
}

/// Closes trials in the order of `causes`, each followed by what it made: `+2` a trial with index
/// 2, `!` the shutdown.
fn check(method: Method, causes: &[(u32, CloseCause)], expected: &str) {
    let written = |actions: Vec<Action>| {
        let word = |it| match it {
            Action::Create(draw) => format!("+{}", draw.index),
            Action::Continue { trial, units } => format!("{trial}:{units}"),
            Action::Stop { trial } => format!("-{trial}"),
            Action::Shutdown { outcome } => format!("!{outcome:?}"),
        };
        actions.into_iter().map(word).collect::<Vec<_>>().join(" ")
    };
    let mut search = Search::new(config(method));
    let mut lines = vec![written(search.start())];
    for &(trial, cause) in causes {
        lines.push(written(search.handle(Event::Closed { trial, cause })));
    }
    assert_eq!(lines.join("; "), expected);
}

use CloseCause::{Cancelled, Completed, Deleted, Failed, InvalidHyperparameters, StoppedEarly};

#[test]
fn random_search_creates_one_for_one_and_replaces_invalid_hyperparameters() {
    let random = |max_trials, max_concurrent| Method::Random { max_trials, max_concurrent };
    check(
        random(3, 2),
        &[(1, Completed), (0, StoppedEarly), (2, Completed)],
        "+0 +1; +2; ; !Completed",
    );
    check(
        random(2, 2),
        &[(0, InvalidHyperparameters), (1, Completed), (2, Failed)],
        "+0 +1; +2; ; !Completed",
    );
    check(random(2, 0), &[(0, Failed), (1, Failed)], "+0 +1; ; !Failed");
    check(random(2, 9), &[(0, Cancelled), (1, Deleted)], "+0 +1; ; !Cancelled");
    check(random(2, 1), &[(0, Failed), (1, Cancelled)], "+0; +1; !Completed");
}

#[test]
fn single_and_grid_do_not_replace() {
    check(Method::Single, &[(0, InvalidHyperparameters)], "+0; !Failed");
    let causes = [
        (0, InvalidHyperparameters),
        (1, Failed),
        (2, Completed),
        (3, Completed),
        (4, Completed),
        (5, Completed),
    ];
    let expected = "+0 +1 +2 +3; +4; +5; ; ; ; !Completed";
    check(Method::Grid { max_concurrent: 4 }, &causes, expected);
}

#[test]
fn repeats_strangers_and_late_events_make_nothing() {
    let causes = [(9, Failed), (0, Completed), (0, Failed), (1, Failed), (2, Failed), (2, Failed)];
    let random = Method::Random { max_trials: 3, max_concurrent: 1 };
    check(random, &causes, "+0; ; +1; ; +2; !Completed; ");
}

#[test]
fn a_program_that_refuses_everything_is_not_asked_for_ever() {
    let mut search = Search::new(config(Method::Random { max_trials: 1, max_concurrent: 1 }));
    search.start();
    let cause = InvalidHyperparameters;
    let last = (0..1000).find(|&trial| {
        let actions = search.handle(Event::Closed { trial, cause });
        actions == [Action::Shutdown { outcome: Outcome::Failed }]
    });
    assert_eq!(last, Some(method::REPLACEMENTS_PER_TRIAL_MAX));
}

#[test]
fn a_result_at_the_longest_length_stops_the_trial_once() {
    let mut search = Search::new(config(Method::Single));
    search.start();
    let mut handle = |units| search.handle(Event::Result { trial: 0, units, metric: 0.5 });
    assert_eq!(handle(10), [], "never granted");
    assert_eq!(handle(3), [], "undecided");
    assert_eq!(handle(9), [Action::Stop { trial: 0 }]);
    assert_eq!(handle(9), [], "a repeat");
}

#[test]
fn progress_rises_from_0_to_1() {
    let mut search = Search::new(config(Method::Random { max_trials: 4, max_concurrent: 2 }));
    search.start();
    let mut seen = vec![search.progress()];
    search.handle(Event::Result { trial: 1, units: 3, metric: 0.5 });
    seen.push(search.progress());
    for trial in 0..4 {
        search.handle(Event::Closed { trial, cause: Completed });
        seen.push(search.progress());
    }
    assert_eq!(seen, [0.0, 1.0 / 12.0, 1.0 / 3.0, 0.5, 0.75, 1.0]);
}

#[test]
fn a_method_may_leave_a_trial_waiting_and_decide_by_another_ones_result() {
    for smaller_is_better in [true, false] {
        let config = SearchConfig { smaller_is_better, ..config(Method::Single) };
        let mut search = Search::with_method(&config, Box::new(BetterOfTwo::default()));
        search.start();
        let mut result =
            |trial, units, metric| search.handle(Event::Result { trial, units, metric });
        assert_eq!(result(0, 3, 0.1), [], "it waits");
        let (better, worse) = if smaller_is_better { (0, 1) } else { (1, 0) };
        let expected =
            [Action::Continue { trial: better, units: 9 }, Action::Stop { trial: worse }];
        assert_eq!(result(1, 3, 0.2), expected);
        assert_eq!(result(better, 9, f64::NAN), [Action::Stop { trial: better }]);
    }
}
