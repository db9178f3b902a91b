//! Hyperparameters are those of the reference, bit for bit; the ends of searches.

use std::collections::BTreeMap;

use serde_json::json;
use stoker_api::hyperparameters::{DoubleRange, IntRange, LogRange, Parameter};

use super::rng::Random;
use super::rung::Loss;
use super::state::{SearchState, Turn};
use super::turn::{Edit, Event, Step};
use super::*;
use crate::fixture::config;

mod failures;

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
fn sync_halving_replaces_invalid_hyperparameters() {
    let sync = json!({
        "numRungs": 3, "divisor": 3, "budget": { "batches": 60 }, "maxConcurrentTrials": 2,
    });
    let mut search = search_of(json!({ "syncHalving": sync }));
    search.advance(Event::Began);
    search.advance(Event::Closed { trial: 0, cause: InvalidHyperparameters });
    // With a result, failures do not end the search.
    search.advance(Event::Result { trial: 1, units: 1, loss: Loss::new(0.5), others: vec![] });
    for trial in 1..40 {
        search.advance(Event::Closed { trial, cause: Failed });
    }
    // The lowest rung has 25 trials, of which 8 would continue.
    assert_eq!(search.book().next_index(), 26);
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
    assert_eq!(search.book().num_invalid(), 101);
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

/// Returns the search of an experiment with at most nine batches and six values.
fn search_of(searcher: Value) -> SearchState {
    search_over(6, searcher)
}

/// Returns the same search over another number of values.
fn search_over(num_values: u32, mut searcher: Value) -> SearchState {
    searcher["metric"] = json!("loss");
    if searcher.get("pbt").is_none() {
        searcher["maxLength"] = json!({ "batches": 9 });
    }
    let spec = json!({
        "entrypoint": { "command": ["true"] },
        "hyperparameters": { "x": { "categorical": (1..=num_values).collect::<Vec<_>>() } },
        "searcher": searcher,
    });
    let spec = serde_json::from_value(spec).unwrap();
    let valid = stoker_api::validate::validate("case", &spec).unwrap();
    SearchState::of(&SearchConfig::new(&valid, 1))
}

/// Forecasts are numbers of trials by length.
#[test]
fn sizes_of_searches_follow_from_the_method() {
    let check = |searcher: Value, places: Option<u32>, first: &[u64], forecast: &[(u64, u64)]| {
        let search = search_of(searcher.clone());
        assert_eq!(search.places(), places, "{searcher}");
        let groups = 0..search.num_groups();
        let units: Vec<u64> = groups.clone().map(|group| search.first_units(group)).collect();
        assert_eq!(units, first, "{searcher}");
        assert_eq!(search.forecast(), forecast.iter().copied().collect(), "{searcher}");
        groups.for_each(|group| assert_eq!(search.greatest_units(group), 9, "{searcher}"));
    };
    let all = json!({ "maxTrials": 5, "maxConcurrentTrials": 0 });
    check(json!({ "single": {} }), Some(1), &[9], &[(9, 1)]);
    check(json!({ "random": all }), None, &[9], &[(9, 5)]);
    check(json!({ "grid": { "maxConcurrentTrials": 4 } }), Some(4), &[9], &[(9, 6)]);
    let halving = json!({
        "maxTrials": 10, "numRungs": 3, "divisor": 3, "maxConcurrentTrials": 4,
    });
    check(json!({ "asyncHalving": halving }), Some(4), &[1], &[(1, 7), (3, 2), (9, 1)]);
    // One trial is promoted to the top.
    let one = json!({ "maxTrials": 1, "numRungs": 3, "divisor": 3, "maxConcurrentTrials": 4 });
    check(json!({ "asyncHalving": one }), Some(4), &[1], &[(9, 1)]);
    // Weights 3 / 2 and 1 give brackets of 6 and 4 trials.
    let asha = json!({
        "maxTrials": 10, "mode": "conservative", "maxRungs": 2, "divisor": 3,
        "maxConcurrentTrials": 5,
    });
    check(json!({ "adaptiveAsha": asha }), Some(5), &[3, 9], &[(3, 4), (9, 6)]);
    let sync = json!({
        "numRungs": 3, "divisor": 3, "budget": { "batches": 60 }, "maxConcurrentTrials": 2,
    });
    check(json!({ "syncHalving": sync }), Some(2), &[1], &[(1, 17), (3, 6), (9, 2)]);
    // Each of 3 brackets has a budget of 20: sizes 8, 2, 1 of 21 units; 4, 1 of 15; 2 of 9.
    let adaptive = json!({
        "mode": "conservative", "divisor": 3, "budget": { "batches": 60 },
        "maxConcurrentTrials": 0,
    });
    let forecast = [(1, 6), (3, 4), (9, 4)];
    check(json!({ "adaptive": adaptive }), None, &[1, 3, 9], &forecast);
    let given = json!({
        "bracketRungs": [1, 3], "divisor": 3, "maxTrials": 19, "maxConcurrentTrials": 0,
    });
    check(json!({ "adaptiveSimple": given }), None, &[1, 9], &[(1, 7), (3, 2), (9, 10)]);
    // 9, 5 and 3 trials.
    let hyperband = json!({ "divisor": 3, "maxConcurrentTrials": 7 });
    let forecast = [(1, 6), (3, 2 + 4), (9, 1 + 1 + 3)];
    check(json!({ "hyperband": hyperband }), Some(7), &[1, 3, 9], &forecast);
    let pbt = json!({
        "populationSize": 5, "numRounds": 3, "lengthPerRound": { "batches": 3 },
        "truncateFraction": 0.4,
    });
    check(json!({ "pbt": pbt }), None, &[3, 6, 9], &[(3, 2), (6, 2), (9, 5)]);
    let pbt = json!({
        "populationSize": 5, "numRounds": 3, "lengthPerRound": { "batches": 3 },
        "truncateFraction": 0,
    });
    check(json!({ "pbt": pbt }), None, &[3, 6, 9], &[(9, 5)]);
    let median = json!({ "everyUnits": 4 });
    let random = json!({ "random": all, "medianStopping": median });
    check(random, None, &[4], &[(9, 5)]);
    let halving = json!({ "asyncHalving": halving, "medianStopping": median });
    check(halving, Some(4), &[1], &[(1, 7), (3, 2), (9, 1)]);
}

#[test]
fn median_stopping_shows_the_brackets_of_its_method() {
    let random = json!({ "random": { "maxTrials": 5, "maxConcurrentTrials": 2 } });
    let halving = json!({ "asyncHalving": {
        "maxTrials": 5, "numRungs": 2, "divisor": 3, "maxConcurrentTrials": 2,
    } });
    for (plain, num_rungs) in [(random, 0), (halving, 2)] {
        let mut stopping = plain.clone();
        stopping["medianStopping"] = json!({ "everyUnits": 3 });
        for searcher in [plain, stopping] {
            let mut search = search_of(searcher.clone());
            search.advance(Event::Began);
            let views = search.views();
            let numbers =
                views.iter().map(|view| (view.rungs.len(), view.num_missing, view.places));
            assert_eq!(numbers.collect::<Vec<_>>(), [(num_rungs, 3, Some(2))], "{searcher}");
            let loss = Loss::new(0.5);
            search.advance(Event::Result { trial: 0, units: 3, loss, others: vec![] });
            assert_eq!(search.standing(0, 3).is_some(), num_rungs > 0, "{searcher}");
        }
    }
}

#[test]
fn only_adaptive_asha_records_its_brackets() {
    let random = json!({ "random": { "maxTrials": 5 } });
    assert!(search_of(random).bracket_trials().is_empty());
    let asha = json!({
        "maxTrials": 10, "mode": "conservative", "maxRungs": 2, "divisor": 3,
        "maxConcurrentTrials": 5,
    });
    let median = json!({ "adaptiveAsha": asha, "medianStopping": { "everyUnits": 4 } });
    assert_eq!(search_of(median).bracket_trials(), [0, 0]);
    let mut search = search_of(json!({ "adaptiveAsha": asha }));
    assert_eq!(search.bracket_trials(), [0, 0]);
    search.advance(Event::Began);
    assert_eq!(search.bracket_trials(), [3, 2]);
    // Failed trials count, and invalid ones are replaced.
    search.advance(Event::Closed { trial: 0, cause: Failed });
    assert_eq!(search.bracket_trials(), [4, 2]);
    search.advance(Event::Closed { trial: 1, cause: InvalidHyperparameters });
    assert_eq!(search.bracket_trials(), [4, 2]);
    assert_eq!(search.book().next_index(), 7);
}
