//! Importance of hyperparameters of known functions, with Optuna beside, and its time.

use std::path::Path;

use serde_json::{Map, Value, json};
use stoker_api::experiment::Unit;
use stoker_api::hyperparameters::{DoubleRange, LogRange, Parameter};
use stoker_api::trial::{Fact, ResultFact};
use stoker_engine::experiment::importance::importance;
use stoker_engine::preview::preview;
use stoker_engine::search::{Draw, SearchConfig};
use stoker_engine::trial::TrialRecord;

use crate::space::{self, UNITS_MAX};
use crate::{BenchError, clock, optuna};

/// Number of results that are compared.
const RESULTS: u32 = 200;
/// Number of results and hyperparameters that are timed.
const TIMED: (u32, usize) = (10_000, 10);

/// A function of hyperparameters.
type Function = fn(&Value) -> f64;

/// Prints the shares of each function, then the time.
pub(crate) fn run(python: &Path) -> Result<(), BenchError> {
    println!("importance: shares of {RESULTS} results");
    println!("{:<10} {:<10} {:>8} {:>8}", "function", "parameter", "Stoker", "Optuna");
    for (name, hyperparameters, function) in functions() {
        let config = config(&hyperparameters)?;
        let trials = trials(&config, RESULTS, function);
        let theirs = optuna::call(python, &["importance", &table(&config, &trials).to_string()])?;
        let ours = importance(&config, &trials).map_err(|unknown| unknown.to_string())?;
        for share in &ours.hyperparameters {
            let theirs = theirs[&share.name].as_f64().ok_or("a share is missing")?;
            println!("{name:<10} {:<10} {:>8.4} {theirs:>8.4}", share.name, share.importance);
        }
    }
    let (results, num) = TIMED;
    let range = json!({"double": {"min": 0.0, "max": 1.0}});
    let parameters = (0..num).map(|i| (format!("x{i}"), range.clone()));
    let config = config(&Value::Object(parameters.collect::<Map<_, _>>()))?;
    let trials = trials(&config, results, |point| number(point, "x3") * number(point, "x5"));
    let before = clock::processor_time()?;
    importance(&config, &trials).map_err(|unknown| unknown.to_string())?;
    let seconds = clock::processor_time()? - before;
    println!("{results} results, {num} hyperparameters: {seconds:.2} s");
    Ok(())
}

fn config(hyperparameters: &Value) -> Result<SearchConfig, BenchError> {
    let searcher = json!({"random": {"maxTrials": TIMED.0, "maxConcurrentTrials": 0}});
    space::config_of(hyperparameters, &searcher, 7)
}

fn number(point: &Value, name: &str) -> f64 {
    point[name].as_f64().unwrap_or(f64::NAN)
}

/// The functions and spaces of the engine's tests.
fn functions() -> [(&'static str, Value, Function); 4] {
    let pi = std::f64::consts::PI;
    let doubles = |min: f64, max: f64| {
        let range = json!({"double": {"min": min, "max": max}});
        json!({"a": range, "b": range, "c": range})
    };
    let kinds = json!({
        "choice": {"categorical": ["first", "second", "third"]},
        "depth": {"int": {"min": 1, "max": 8}},
        "fixed": 3,
        "rate": {"log": {"min": -5, "max": -1}},
    });
    [
        ("additive", doubles(0.0, 1.0), |point| {
            3.0 * number(point, "a") + 2.0 * number(point, "b") + number(point, "c")
        }),
        ("product", doubles(0.0, 1.0), |point| number(point, "a") * number(point, "b")),
        ("ishigami", doubles(-pi, pi), |point| {
            let [a, b, c] = ["a", "b", "c"].map(|name| number(point, name));
            a.sin() + 7.0 * b.sin().powi(2) + 0.1 * c.powi(4) * a.sin()
        }),
        ("kinds", kinds, |point| {
            let is_second = if point["choice"] == "second" { 1.0 } else { 0.0 };
            let exponent = number(point, "rate").log10() + 3.0;
            exponent * exponent + number(point, "depth") / 4.0 + 3.0 * is_second
        }),
    ]
}

/// Returns trials at the first points of a search with the values of a function.
fn trials(config: &SearchConfig, num: u32, function: Function) -> Vec<TrialRecord> {
    let samples = preview(config, num).samples.into_iter();
    samples
        .map(|sample| {
            let value = function(&sample.hyperparameters);
            let draw = Draw {
                index: sample.index,
                request_id: String::new(),
                seed: sample.seed,
                hyperparameters: sample.hyperparameters,
                units: UNITS_MAX,
            };
            let result = ResultFact {
                units: UNITS_MAX,
                metric: stoker_api::number::format(value),
                values: vec![],
                checkpoint: None,
                at: None,
            };
            let mut record = TrialRecord {
                spec: draw.into_spec("bench", Unit::Batches),
                status: Default::default(),
            };
            record.status.facts.push(Fact::Result(result));
            record
        })
        .collect()
}

/// Returns the space, points and values for Optuna. It integrates over numbers, so it gets the
/// exponents of `log`.
fn table(config: &SearchConfig, trials: &[TrialRecord]) -> Value {
    let mut space = Map::new();
    config.space.for_each_parameter(&mut |path, parameter| {
        let of = match parameter {
            Parameter::Const(_) => return,
            Parameter::Int(range) => json!(["int", [range.min, range.max]]),
            Parameter::Double(DoubleRange { min, max, .. }) => json!(["double", [min, max]]),
            Parameter::Log(LogRange { min, max, .. }) => json!(["double", [min, max]]),
            Parameter::Categorical(values) => json!(["categorical", values]),
        };
        space.insert(path.rsplit('.').next().unwrap_or(path).to_owned(), of);
    });
    let row = |trial: &TrialRecord| {
        let mut point = trial.spec.hyperparameters.clone();
        if let Some(rate) = point["rate"].as_f64() {
            point["rate"] = rate.log10().into();
        }
        let value = match trial.status.facts.first() {
            Some(Fact::Result(result)) => stoker_api::number::parse(&result.metric),
            _ => None,
        };
        json!({"point": point, "value": value})
    };
    json!({"space": space, "rows": trials.iter().map(row).collect::<Vec<_>>()})
}
