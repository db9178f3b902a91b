//! Importance of known functions, against exact shares and those of Optuna.

use serde_json::{Value, json};
use stoker_api::experiment::Unit;
use stoker_api::hyperparameters::Space;
use stoker_api::trial::{ClosedFact, ResultFact};
use stoker_api::validate::Method;

use super::*;
use crate::fixture;
use crate::preview::{Sample, preview};
use crate::search::{Draw, normalized as normalized_value};

/// A function of hyperparameters.
type Function = fn(&Value) -> f64;

fn config(space: &Value) -> SearchConfig {
    let method = Method::Random { max_trials: 1000, max_concurrent: 0 };
    SearchConfig { space: Space::parse(space).unwrap(), seed: 7, ..fixture::config(method) }
}

/// Returns a trial with a result at this length.
fn trial(index: u32, hyperparameters: &Value, units: u64, value: f64) -> TrialRecord {
    let hyperparameters = normalized_value(hyperparameters);
    let request_id = String::new();
    let mut record =
        fixture::record(&Draw { index, request_id, seed: 0, hyperparameters, units: 9 });
    add_result(&mut record, units, value);
    record
}

fn add_result(record: &mut TrialRecord, units: u64, value: f64) {
    let metric = number::format(value);
    let result = ResultFact { units, metric, values: vec![], checkpoint: None, at: None };
    record.status.facts.push(Fact::Result(result));
}

/// Returns trials at random points with the values of a function.
fn sampled(config: &SearchConfig, num: u32, function: Function) -> Vec<TrialRecord> {
    let samples = preview(config, num).samples.into_iter();
    let trial = |sample: Sample| {
        trial(sample.index, &sample.hyperparameters, 9, function(&sample.hyperparameters))
    };
    samples.map(trial).collect()
}

fn number_at(point: &Value, name: &str) -> f64 {
    point[name].as_f64().unwrap()
}

fn doubles(names: &[&str], min: f64, max: f64) -> Value {
    let range = json!({ "double": { "min": min, "max": max } });
    names
        .iter()
        .map(|name| ((*name).to_owned(), range.clone()))
        .collect::<serde_json::Map<_, _>>()
        .into()
}

fn additive(point: &Value) -> f64 {
    3.0 * number_at(point, "a") + 2.0 * number_at(point, "b") + number_at(point, "c")
}

fn product(point: &Value) -> f64 {
    number_at(point, "a") * number_at(point, "b")
}

/// Ishigami and Homma (1990), with the constants 7 and 0.1.
fn ishigami(point: &Value) -> f64 {
    let [a, b, c] = ["a", "b", "c"].map(|name| number_at(point, name));
    a.sin() + 7.0 * b.sin().powi(2) + 0.1 * c.powi(4) * a.sin()
}

fn kinds(point: &Value) -> f64 {
    let is_second = if point["choice"] == "second" { 1.0 } else { 0.0 };
    let exponent = number_at(point, "rate").log10() + 3.0;
    exponent * exponent + number_at(point, "depth") / 4.0 + 3.0 * is_second
}

/// Returns the spaces and functions of `cargo xtask bench search importance`.
fn functions() -> [(&'static str, Value, Function); 4] {
    let pi = std::f64::consts::PI;
    let kinds_space = json!({
        "choice": { "categorical": ["first", "second", "third"] },
        "depth": { "int": { "min": 1, "max": 8 } },
        "fixed": 3,
        "rate": { "log": { "min": -5, "max": -1 } },
    });
    [
        ("additive", doubles(&["a", "b", "c"], 0.0, 1.0), additive),
        ("product", doubles(&["a", "b", "c"], 0.0, 1.0), product),
        ("ishigami", doubles(&["a", "b", "c"], -pi, pi), ishigami),
        ("kinds", kinds_space, kinds),
    ]
}

/// Shares by name, and the share of combinations as an empty name.
fn shares(importance: &Importance) -> BTreeMap<String, f64> {
    let shares = importance.hyperparameters.iter();
    let mut shares: BTreeMap<String, f64> =
        shares.map(|share| (share.name.clone(), share.importance)).collect();
    shares.insert(String::new(), importance.interactions);
    shares
}

#[track_caller]
fn check(name: &str, num: u32, expected: &[(&str, f64)], tolerance: f64) {
    let functions = functions();
    let (_, space, function) = functions.iter().find(|(of, ..)| *of == name).unwrap();
    let config = config(space);
    let shares = shares(&importance(&config, &sampled(&config, num, *function)).unwrap());
    assert_eq!(shares.len(), expected.len(), "{name}: {shares:?}");
    for (parameter, expected) in expected {
        let share = shares[*parameter];
        assert!((share - expected).abs() < tolerance, "{name} {parameter}: {share} {expected}");
    }
}

/// Exact shares follow from the variances: 1/12 for a uniform number from 0 to 1, and those of the
/// Ishigami function as in Saltelli et al., "Global Sensitivity Analysis" (2008). Trees that split
/// along one axis at a time need many more results for that function; Optuna's have the same bias.
#[test]
fn shares_approach_the_exact_ones() {
    let additive = [("a", 9.0 / 14.0), ("b", 4.0 / 14.0), ("c", 1.0 / 14.0), ("", 0.0)];
    check("additive", 1000, &additive, 0.05);
    let product = [("a", 3.0 / 7.0), ("b", 3.0 / 7.0), ("c", 0.0), ("", 1.0 / 7.0)];
    check("product", 1000, &product, 0.05);
    let ishigami = [("a", 0.3139), ("b", 0.4424), ("c", 0.0), ("", 0.2437)];
    check("ishigami", 1000, &ishigami, 0.15);
    // Variances: a square of an exponent from -2 to 2 has 64/45, a quarter of 1 to 8 has 21/64,
    // and 3 with a probability of 1/3 has 2.
    let total = 64.0 / 45.0 + 21.0 / 64.0 + 2.0;
    let kinds = [
        ("rate", 64.0 / 45.0 / total),
        ("depth", 21.0 / 64.0 / total),
        ("choice", 2.0 / total),
        ("", 0.0),
    ];
    check("kinds", 1000, &kinds, 0.05);
}

/// Shares by Optuna 5.0.0 with scikit-learn 1.9.1, its means over 64 trees, for the same results:
/// printed by `cargo xtask bench search importance`. Optuna codes the values of `choice` as three
/// numbers, and integrates `depth` from 1 to 8 instead of over eight integers.
#[test]
fn shares_match_those_of_optuna() {
    let check = |name: &str, expected: [(&str, f64); 3], tolerance: f64| {
        let functions = functions();
        let (_, space, function) = functions.iter().find(|(of, ..)| *of == name).unwrap();
        let config = config(space);
        let shares = shares(&importance(&config, &sampled(&config, 200, *function)).unwrap());
        for (parameter, expected) in expected {
            let share = shares[parameter];
            assert!((share - expected).abs() < tolerance, "{name} {parameter}: {share} {expected}");
        }
    };
    check("additive", [("a", 0.6220), ("b", 0.2760), ("c", 0.0251)], 0.01);
    check("product", [("a", 0.4102), ("b", 0.4214), ("c", 0.0004)], 0.01);
    check("ishigami", [("a", 0.3390), ("b", 0.1703), ("c", 0.0381)], 0.02);
    check("kinds", [("choice", 0.5621), ("rate", 0.3528), ("depth", 0.0470)], 0.04);
}

#[test]
fn order_of_trials_does_not_matter() {
    let (_, space, function) = functions()[3].clone();
    let config = config(&space);
    let mut trials = sampled(&config, 40, function);
    let expected = importance(&config, &trials).unwrap();
    assert_eq!(importance(&config, &trials).unwrap(), expected);
    trials.reverse();
    assert_eq!(importance(&config, &trials).unwrap(), expected);
    let names = |importance: &Importance| {
        let shares = importance.hyperparameters.iter();
        shares.map(|share| share.name.clone()).collect::<Vec<_>>()
    };
    assert_eq!(names(&expected), ["choice", "rate", "depth"]);
    // Shares are relative, so neither the scale nor the sign of the metric matters.
    // Of equal splits, rounding may choose another one.
    for (scale, offset) in [(1e300, 0.0), (-2.0, 1.0), (1e-9, 1.0)] {
        let mut scaled = trials.clone();
        for record in &mut scaled {
            let Fact::Result(result) = &mut record.status.facts[0] else { panic!() };
            let value = number::parse(&result.metric).unwrap();
            result.metric = number::format(scale * value + offset);
        }
        let shares = shares(&importance(&config, &scaled).unwrap());
        for (name, share) in super::tests::shares(&expected) {
            assert!((shares[&name] - share).abs() < 0.02, "{name} {share} {shares:?}");
        }
    }
}

fn choice_space() -> Value {
    json!({
        "optimizer": { "oneOf": [
            { "name": "sgd", "rate": { "double": { "min": 0, "max": 1 } } },
            { "name": "adam", "rate": { "double": { "min": 0, "max": 1 } } },
        ] },
        "width": { "double": { "min": 0, "max": 1 } },
    })
}

/// The rate of one group varies the loss where the group is active: half of its variance is the
/// share; the values of the other group do not matter.
#[test]
fn conditional_hyperparameters_count_where_they_are_active() {
    let config = config(&choice_space());
    let function = |point: &Value| {
        let optimizer = &point["optimizer"];
        let rate = optimizer["rate"].as_f64().unwrap();
        match optimizer["name"] == "adam" {
            true => 2.0 * rate,
            false => 0.0,
        }
    };
    let found = importance(&config, &sampled(&config, 1000, function)).unwrap();
    let shares: Vec<(String, Option<&str>)> = found
        .hyperparameters
        .iter()
        .map(|share| {
            let name = format!("{} {:.1}", share.name, share.importance);
            (name, share.group.as_deref())
        })
        .collect();
    // Means are 0 and 1, so the choice has the variance 1/4. The rate has 4/12 in half of the
    // space.
    let expected = [
        ("optimizer 0.6".to_owned(), None),
        ("optimizer.rate 0.4".to_owned(), Some("name=adam")),
        ("width 0.0".to_owned(), None),
        ("optimizer.rate 0.0".to_owned(), Some("name=sgd")),
    ];
    assert_eq!(shares, expected, "{found:?}");
    assert!(found.interactions < 0.01, "{found:?}");
}

#[test]
fn groups_without_a_constant_are_numbered() {
    let space = json!({ "net": { "oneOf": [
        { "depth": { "int": { "min": 1, "max": 3 } }, "kind": "x" },
        { "kind": "x", "width": { "int": { "min": 1, "max": 3 } } },
        {},
    ] } });
    let axes = Axes::new(&Space::parse(&space).unwrap());
    let names: Vec<_> = axes.all.iter().map(|axis| (axis.name.as_str(), axis.group())).collect();
    let group = |number: u32| Some(format!("group {number} of 3"));
    assert_eq!(names, [("net", None), ("net.depth", group(1)), ("net.width", group(2))]);
    let point = |net: Value| axes.point(&json!({ "net": net }));
    let third = 2.5 / 3.0;
    assert_eq!(point(json!({ "depth": 3, "kind": "x" })), Some(vec![Some(0.0), Some(third), None]));
    assert_eq!(point(json!({})), Some(vec![Some(2.0), None, None]));
    assert_eq!(point(json!({ "height": 1 })), None);
}

/// A length counts from ten finite results of trials that did not reject their hyperparameters.
#[test]
fn greatest_length_with_enough_results_counts() {
    let config = config(&doubles(&["a"], 0.0, 1.0));
    let point = |index: u32| json!({ "a": f64::from(index) / 20.0 });
    let mut trials: Vec<TrialRecord> =
        (0..20).map(|index| trial(index, &point(index), 3, f64::from(index))).collect();
    let check = |trials: &[TrialRecord], expected: Result<(u64, u32, u32), &str>| {
        let found = importance(&config, trials);
        let found = found.map(|of| (of.units, of.results, of.not_finite));
        assert_eq!(found.map_err(|unknown| unknown.to_string()), expected.map_err(str::to_owned));
    };
    check(&trials[..9], Err("needs 10 results at one length, has 9 at 3 epochs"));
    check(&trials, Ok((3, 20, 0)));
    // The length with most results is named; of equal numbers, the greatest length.
    for (num_longer, expected) in [(4, "5 at 3 epochs"), (5, "5 at 9 epochs")] {
        let mut few = trials[..5].to_vec();
        few[..num_longer].iter_mut().for_each(|record| add_result(record, 9, 0.5));
        check(&few, Err(&format!("needs 10 results at one length, has {expected}")));
    }
    let longest: Vec<_> = (0..2).map(|index| trial(index, &point(index), 9, 0.5)).collect();
    let few = [&longest[..], &[trial(2, &point(2), 3, 0.5)]].concat();
    check(&few, Err("needs 10 results at one length, has 2 at 9 epochs"));
    for (index, record) in trials.iter_mut().enumerate().take(11) {
        add_result(record, 9, if index == 10 { f64::NAN } else { index as f64 });
    }
    check(&trials, Ok((9, 10, 1)));
    assert_eq!(lengths(&config, &trials), [3, 9]);
    let at = |units| importance_at(&config, &trials, Some(units)).map(|of| of.results);
    assert_eq!((at(3), at(9)), (Ok(20), Ok(10)));
    assert_eq!(at(4), Err(Unknown::TooFewResults { results: 0, length: None }));
    assert_eq!(lengths(&config, &trials[1..]), [3]);
    check(&trials[1..], Ok((3, 19, 0)));
    let invalid = ClosedFact { cause: CloseCause::InvalidHyperparameters, at: None };
    trials[0].status.facts.push(Fact::Closed(invalid));
    check(&trials, Ok((3, 19, 0)));
    check(&[], Err("needs 10 results, has none"));
    let equal: Vec<TrialRecord> =
        (0..12).map(|index| trial(index, &point(index), 9, 0.3)).collect();
    check(&equal, Err("all 12 results at 9 epochs are equal"));
    let same: Vec<TrialRecord> =
        (0..12).map(|index| trial(index, &point(3), 9, f64::from(index))).collect();
    check(&same, Err("all 12 results at 9 epochs have the same hyperparameters"));
    let constant =
        SearchConfig { space: Space::parse(&json!({ "a": 1 })).unwrap(), ..config.clone() };
    assert_eq!(importance(&constant, &trials), Err(Unknown::NothingVaries));
}

#[test]
fn deviation_is_that_of_the_population() {
    // The worked example of the article "Standard deviation" in Wikipedia.
    let values = [2.0, 4.0, 4.0, 4.0, 5.0, 5.0, 7.0, 9.0];
    assert_eq!(mean(values.into_iter()), (5.0, 2.0));
    assert_eq!(mean(std::iter::empty()), (0.0, 0.0));
}

/// The middle of these neighbors is rounded to the greater one.
#[test]
fn neighboring_doubles_are_split() {
    let low = 0.5_f64.next_up();
    let config = config(&doubles(&["a", "b"], 0.0, 1.0));
    let trials: Vec<TrialRecord> = (0..40)
        .map(|index| {
            let a = if index % 2 == 0 { low } else { low.next_up() };
            trial(index, &json!({ "a": a, "b": f64::from(index) / 40.0 }), 9, f64::from(index % 2))
        })
        .collect();
    let shares = shares(&importance(&config, &trials).unwrap());
    assert!(shares["a"] > 0.99, "{shares:?}");
}

/// Values that are too close for a boundary, integers beyond the precision of a double, points
/// outside of the space, and hyperparameters with one value.
#[test]
fn unusual_values_are_harmless() {
    let space = json!({
        "close": { "double": { "min": 0, "max": 1 } },
        "narrow": { "double": { "min": 1.0, "max": 1.0000000000000004 } },
        "one": { "categorical": ["x"] },
        "wide": { "int": { "min": i64::MIN, "max": i64::MAX } },
    });
    let config = config(&space);
    let trials: Vec<TrialRecord> = preview(&config, 60)
        .samples
        .into_iter()
        .map(|Sample { index, hyperparameters: mut point, .. }| {
            if index % 7 == 0 {
                point["wide"] = json!(i64::MAX);
            }
            if index % 11 == 0 {
                point["narrow"] = json!(2.5);
            }
            point["close"] = json!(if index % 2 == 0 { 0.5 } else { 0.5_f64.next_up() });
            trial(index, &point, 9, f64::from(index % 2) + f64::from(index % 13) / 100.0)
        })
        .collect();
    let found = importance(&config, &trials).unwrap();
    let names: Vec<&str> = found.hyperparameters.iter().map(|share| &*share.name).collect();
    assert!(["wide", "narrow", "close"].iter().all(|name| names.contains(name)), "{names:?}");
    assert_eq!(names.len(), 3);
    let sum: f64 = found.hyperparameters.iter().map(|share| share.importance).sum();
    // Without a boundary, `close` explains nothing, although the results depend on it.
    assert!(sum > 0.1 && (sum + found.interactions - 1.0).abs() < 1e-9, "{found:?}");
    assert_eq!(found.unit, Unit::Epochs);
}
