//! Hyperparameters are those of the reference, bit for bit; the ends of searches.

use std::collections::BTreeMap;

use serde_json::json;
use stoker_api::hyperparameters::{DoubleRange, IntRange, LogRange, Parameter};

use super::rng::Random;
use super::state::{SearchState, Turn};
use super::turn::{Event, Step};
use super::*;
use crate::fixture::config;

const VECTORS: &str = include_str!("vectors.json");

/// Reads a space in the reference's format.
fn space(value: &Value) -> Space {
    let Some(members) = value.as_object() else {
        return Space::Parameter(Parameter::Const(value.clone()));
    };
    let (min, max) = (&value["minval"], &value["maxval"]);
    let count = value["count"].as_u64().map(|count| count as u32);
    let floats = || (min.as_f64().unwrap(), max.as_f64().unwrap());
    let parameter = match value["type"].as_str() {
        None => {
            let group = members.iter().map(|(name, value)| (name.clone(), space(value)));
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

/// Returns the first trials of a search.
fn draws(config: &SearchConfig) -> Vec<Draw> {
    SearchState::of(config).advance(Event::Began).unwrap().created
}

#[test]
fn random_draws_equal_the_reference_bit_for_bit() {
    let vectors: Value = serde_json::from_str(VECTORS).unwrap();
    for (seed, expected) in vectors["random"].as_object().unwrap() {
        let expected = expected.as_array().unwrap();
        let max_trials = expected.len() as u32;
        let method = Method::Random { max_trials, max_concurrent: 0 };
        let space = space(&vectors["random_space"]);
        let seed = seed.parse().unwrap();
        let draws = draws(&SearchConfig { space, seed, ..config(method) });
        assert_eq!(draws.len(), expected.len());
        for (draw, expected) in draws.iter().zip(expected) {
            assert_eq!(draw.hyperparameters, normalized(&expected["hparams"]), "seed {seed}");
            assert_eq!(draw.request_id, expected["request_id"], "seed {seed}");
            assert_eq!(draw.seed, expected["trial_seed"], "seed {seed}");
        }
    }
}

#[test]
fn grids_visit_the_points_of_the_reference_in_reverse() {
    let vectors: Value = serde_json::from_str(VECTORS).unwrap();
    for case in vectors["grid"].as_array().unwrap() {
        let method = Method::Grid { max_concurrent: 0 };
        let space = space(&case["space"]);
        let draws = draws(&SearchConfig { space, ..config(method) });
        let points: Vec<_> = draws.into_iter().rev().map(|draw| draw.hyperparameters).collect();
        assert_eq!(Value::Array(points), normalized(&case["points"]));
    }
}

#[test]
fn empty_groups_are_kept_and_constants_draw_nothing() {
    let space = space(&json!({ "a": {}, "b": [1.0], "c": { "d": {}, "e": null } }));
    let config = SearchConfig { space, seed: 42, ..config(Method::Single) };
    let draws = draws(&config);
    let expected = json!({ "a": {}, "b": [1], "c": { "d": {}, "e": null } });
    assert_eq!(draws[0].hyperparameters, expected);
    let mut random = Random::new(42);
    assert_eq!((&draws[0].request_id, draws[0].seed), (&random.uuid(), random.seed()));
}

/// Closes trials in the order of `causes`. Expects for the start and for each event: `+2` for a new
/// trial, `!` for the end of the search.
fn check(method: Method, causes: &[(u32, CloseCause)], expected: &str) {
    let written = |turn: Option<Turn>| {
        let Some(turn) = turn else { return "-".to_owned() };
        let mut created = turn.created.iter().map(|draw| format!("+{}", draw.index));
        let words = turn.steps.iter().filter_map(|step| match step {
            Step::Create { .. } => created.next(),
            Step::Finish => Some("!".to_owned()),
            other => Some(format!("{other:?}")),
        });
        words.collect::<Vec<_>>().join(" ")
    };
    let mut search = SearchState::of(&config(method));
    let mut lines = vec![written(search.advance(Event::Began))];
    for &(trial, cause) in causes {
        lines.push(written(search.advance(Event::Closed { trial, cause })));
    }
    assert_eq!(lines.join("; "), expected);
}

use CloseCause::{Cancelled, Completed, Failed, InvalidHyperparameters, StoppedEarly};

#[test]
fn random_search_replaces_only_invalid_hyperparameters() {
    let random = |max_trials, max_concurrent| Method::Random { max_trials, max_concurrent };
    check(random(3, 2), &[(1, Completed), (0, StoppedEarly), (2, Completed)], "+0 +1; +2; ; !");
    check(
        random(2, 2),
        &[(0, InvalidHyperparameters), (1, Completed), (2, Failed)],
        "+0 +1; +2; ; !",
    );
    check(random(2, 0), &[(0, Failed), (1, Failed)], "+0 +1; ; !");
    check(random(2, 1), &[(0, Failed), (1, Cancelled)], "+0; +1; !");
}

#[test]
fn single_and_grid_do_not_replace_invalid_hyperparameters() {
    check(Method::Single, &[(0, InvalidHyperparameters)], "+0; !");
    let causes = [
        (0, InvalidHyperparameters),
        (1, Failed),
        (2, Completed),
        (3, Completed),
        (4, Completed),
        (5, Completed),
    ];
    let expected = "+0 +1 +2 +3; +4; +5; ; ; ; !";
    check(Method::Grid { max_concurrent: 4 }, &causes, expected);
}

#[test]
fn repeated_foreign_and_late_events_decide_nothing() {
    let causes = [(9, Failed), (0, Completed), (0, Failed), (1, Failed), (2, Failed), (2, Failed)];
    let random = Method::Random { max_trials: 3, max_concurrent: 1 };
    check(random, &causes, "+0; -; +1; -; +2; !; -");
}

#[test]
fn program_that_rejects_everything_ends_the_search() {
    let random = Method::Random { max_trials: 1, max_concurrent: 1 };
    let mut search = SearchState::of(&config(random));
    search.advance(Event::Began);
    let last = (0..1000).find(|&trial| {
        let turn = search.advance(Event::Closed { trial, cause: InvalidHyperparameters });
        turn.unwrap().steps == [Step::Finish]
    });
    assert_eq!(last, Some(100));
    assert!(!search.book().may_replace());
}

#[test]
fn outcome_depends_on_the_causes_of_all_ends() {
    let check = |causes: &[CloseCause], expected| {
        assert_eq!(outcome(causes.iter().copied()), expected, "{causes:?}");
    };
    check(&[Completed, Failed], Outcome::Completed);
    check(&[StoppedEarly, Cancelled], Outcome::Completed);
    check(&[Failed, InvalidHyperparameters], Outcome::Failed);
    check(&[InvalidHyperparameters], Outcome::Failed);
    check(&[Cancelled, CloseCause::Deleted], Outcome::Cancelled);
    check(&[Failed, Cancelled], Outcome::Completed);
}
