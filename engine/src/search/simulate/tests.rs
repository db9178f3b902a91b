//! Worked cases of `stoker simulate`.

mod limits;
mod objectives;

use std::collections::HashMap;

use serde_json::{Value, json};
use stoker_api::experiment::ExperimentSpec;
use stoker_api::external::Answer;

use super::*;
use crate::search::methods::DueQuestion;

const CASES: &str = include_str!("../simulate.json");

fn curves(lines: &[Value]) -> HashMap<u32, Curve> {
    let mut curves: HashMap<u32, Curve> = HashMap::new();
    for line in lines {
        let curve = curves.entry(line["trial"].as_u64().unwrap() as u32).or_insert_with(|| Curve {
            metrics: BTreeMap::new(),
            others: BTreeMap::new(),
            exit: None,
            seconds_per_unit: 1.0,
        });
        let units = line["units"].as_u64().unwrap_or(0);
        if let Some(exit) = line.get("exit") {
            let exit = match exit.as_str().unwrap() {
                "failed" => Exit::Failed,
                "invalid" => Exit::Invalid,
                _ => Exit::Early,
            };
            curve.exit = Some((units, exit));
        } else if let Some(metric) = line.get("metric") {
            curve.metrics.insert(units, metric.as_f64().unwrap_or(f64::NAN));
        }
        for (name, value) in line["metrics"].as_object().into_iter().flatten() {
            let values = curve.others.entry(name.clone()).or_default();
            values.insert(units, value.as_f64().unwrap_or(f64::NAN));
        }
        if let Some(seconds) = line["seconds_per_unit"].as_f64() {
            curve.seconds_per_unit = seconds;
        }
    }
    curves
}

fn machine(flags: &Value) -> Machine {
    let flags: Vec<&str> =
        flags.as_array().unwrap().iter().map(|flag| flag.as_str().unwrap()).collect();
    let value = |name: &str| -> f64 {
        let at = flags.iter().position(|flag| *flag == name);
        at.map_or(0.0, |at| flags[at + 1].parse().unwrap())
    };
    Machine {
        workers: value("--workers") as u32,
        start_seconds: value("--start-seconds"),
        resume_seconds: value("--resume-seconds"),
        is_from_scratch: flags.contains(&"--from-scratch"),
    }
}

fn exit_name(exit: Exit) -> &'static str {
    match exit {
        Exit::Failed => "failed",
        Exit::Invalid => "invalid",
        Exit::Early => "early",
    }
}

fn to_json(simulation: &Simulation) -> Value {
    let number = |metric: f64| if metric.is_nan() { Value::Null } else { json!(metric) };
    let trials = (0_u32..).zip(&simulation.trials).map(|(index, trial)| {
        let outcome = match trial.outcome {
            Outcome::Completed => "completed",
            Outcome::Stopped => "stopped",
            Outcome::Exited(exit) => exit_name(exit),
        };
        json!({ "index": index, "units": trial.units, "outcome": outcome })
    });
    let events = simulation.events.iter().map(|event| {
        let decision = match event.decision {
            Decision::Continue => "continue",
            Decision::Complete => "complete",
            Decision::Stop => "stop",
            Decision::Pause => "pause",
            Decision::Exit(exit) => exit_name(exit),
        };
        json!({
            "time": event.time, "trial": event.trial, "units": event.units,
            "metric": event.metric.map_or(Value::Null, number), "decision": decision,
        })
    });
    let best = simulation.best.map(|(trial, units, metric)| {
        json!({ "trial": trial, "units": units, "metric": number(metric) })
    });
    json!({
        "units_total": simulation.units_total, "time_total": simulation.time_total,
        "trials": trials.collect::<Vec<_>>(), "events": events.collect::<Vec<_>>(), "best": best,
    })
}

/// Compares numbers within 1e-9, and everything else exactly.
fn assert_close(actual: &Value, expected: &Value, path: &str) {
    match (actual, expected) {
        (Value::Number(actual), Value::Number(expected)) => {
            let (actual, expected) = (actual.as_f64().unwrap(), expected.as_f64().unwrap());
            assert!((actual - expected).abs() < 1e-9, "{path}: {actual} {expected}");
        }
        (Value::Array(actual), Value::Array(expected)) => {
            for (index, (actual, expected)) in actual.iter().zip(expected).enumerate() {
                assert_close(actual, expected, &format!("{path}[{index}]"));
            }
            assert_eq!(actual.len(), expected.len(), "{path}");
        }
        (Value::Object(actual), Value::Object(expected)) => {
            for (name, expected) in expected {
                assert_close(&actual[name], expected, &format!("{path}.{name}"));
            }
        }
        _ => assert_eq!(actual, expected, "{path}"),
    }
}

fn run(experiment: &Value, lines: &[Value], flags: &Value) -> Simulation {
    let spec: ExperimentSpec = serde_json::from_value(experiment["spec"].clone()).unwrap();
    let valid = stoker_api::validate::validate("case", &spec).unwrap();
    let config = SearchConfig::new(&valid, 1);
    let curves = curves(lines);
    let curve_of = |trial: u32, _: &Value| curves.get(&trial);
    simulate(&config, machine(flags), &mut no_searcher, curve_of).unwrap()
}

#[test]
fn worked_cases_have_the_expected_output() {
    let cases: Value = serde_json::from_str(CASES).unwrap();
    let cases = cases["cases"].as_array().unwrap();
    assert_eq!(cases.len(), 12);
    for (index, case) in cases.iter().enumerate() {
        let lines = case["curves"].as_array().unwrap();
        let simulation = run(&case["experiment"], lines, &case["flags"]);
        assert_close(&to_json(&simulation), &case["output"], &format!("case {index}"));
    }
}

/// 81 + 27 * 2 + 9 * 6 + 3 * 18 + 54 = 297 units; without checkpoints 81 + 81 * 3 + 81 = 405.
#[test]
fn promotion_trains_297_units_instead_of_405() {
    let lines: Vec<Value> =
        (0..81).map(|trial| json!({ "trial": trial, "units": 1, "metric": trial })).collect();
    let searchers = [
        json!({ "asyncHalving": {
            "maxTrials": 81, "numRungs": 5, "divisor": 3, "maxConcurrentTrials": 1,
        } }),
        json!({ "hyperband": { "numBrackets": 1, "divisor": 3 } }),
    ];
    for mut searcher in searchers {
        searcher["metric"] = json!("loss");
        searcher["maxLength"] = json!({ "batches": 81 });
        let experiment = json!({ "spec": {
            "entrypoint": { "command": ["true"] },
            "hyperparameters": { "x": { "double": { "min": 0, "max": 1 } } },
            "searcher": searcher,
        } });
        assert_eq!(run(&experiment, &lines, &json!([])).units_total, 297);
        assert_eq!(run(&experiment, &lines, &json!(["--from-scratch"])).units_total, 405);
    }
}

/// Cases of Determined. A copy begins at the length of its source.
#[test]
fn population_trains_the_lengths_of_the_reference() {
    let check = |search: Value, expected: &[u64], total: u64| {
        let experiment = json!({ "spec": {
            "entrypoint": { "command": ["true"] },
            "hyperparameters": { "x": { "double": { "min": 0, "max": 1 } } },
            "searcher": { "metric": "score", "smallerIsBetter": false, "pbt": search },
        } });
        let lines: Vec<Value> =
            (0..8).map(|trial| json!({ "trial": trial, "units": 1, "metric": trial })).collect();
        let simulation = run(&experiment, &lines, &json!([]));
        let json = to_json(&simulation);
        let trials = json["trials"].as_array().unwrap();
        let lengths: Vec<u64> =
            trials.iter().map(|trial| trial["units"].as_u64().unwrap()).collect();
        assert_eq!((lengths.as_slice(), simulation.units_total), (expected, total), "{search}");
    };
    let length = json!({ "batches": 200 });
    let half = json!({
        "populationSize": 2, "numRounds": 2, "lengthPerRound": length, "truncateFraction": 0.5,
    });
    check(half, &[200, 400, 400], 800);
    let none = json!({
        "populationSize": 3, "numRounds": 4, "lengthPerRound": length, "truncateFraction": 0,
    });
    check(none, &[800, 800, 800], 2400);
}

/// Both trials train one round. Then the better one trains two from scratch, and the copy one.
#[test]
fn copies_train_from_their_source_first() {
    let half = json!({
        "populationSize": 2, "numRounds": 2, "lengthPerRound": { "batches": 1 },
        "truncateFraction": 0.5,
    });
    let experiment = json!({ "spec": {
        "entrypoint": { "command": ["true"] },
        "hyperparameters": { "x": { "double": { "min": 0, "max": 1 } } },
        "searcher": { "metric": "loss", "pbt": half },
    } });
    let lines: Vec<Value> =
        (0..3).map(|trial| json!({ "trial": trial, "units": 1, "metric": trial })).collect();
    assert_eq!(run(&experiment, &lines, &json!(["--from-scratch"])).units_total, 5);
}

/// Trial 2 is a copy of trial 0, which has trained 5 units. Its curve exits before.
#[test]
fn copies_exit_at_the_length_of_their_source() {
    let check = |at: u64, expected: u64, time: f64| {
        let half = json!({
            "populationSize": 2, "numRounds": 2, "lengthPerRound": { "batches": 5 },
            "truncateFraction": 0.5,
        });
        let experiment = json!({ "spec": {
            "entrypoint": { "command": ["true"] },
            "hyperparameters": { "x": { "double": { "min": 0, "max": 1 } } },
            "searcher": { "metric": "loss", "pbt": half },
        } });
        let lines = [0, 1].map(|trial| json!({ "trial": trial, "units": 1, "metric": trial }));
        let exit = json!({ "trial": 2, "units": at, "exit": "failed" });
        let simulation = run(&experiment, &[&lines[..], &[exit]].concat(), &json!([]));
        let failed = SimulatedTrial { units: expected, outcome: Outcome::Exited(Exit::Failed) };
        assert_eq!(simulation.trials[2], failed, "{at}");
        let event = simulation.events.iter().find(|event| event.trial == 2).unwrap();
        let decision = Decision::Exit(Exit::Failed);
        let ended = SimulatedEvent { time, trial: 2, units: expected, metric: None, decision };
        assert_eq!(*event, ended, "{at}");
        // Trials 0 and 1 train 10 and 5 units.
        assert_eq!(simulation.units_total, 15 + expected - 5, "{at}");
    };
    check(1, 5, 5.0);
    check(5, 5, 5.0);
    check(7, 7, 7.0);
}

#[test]
fn sums_of_very_large_lengths_are_limited() {
    let searcher = json!({
        "metric": "loss", "maxLength": { "batches": 9_000_000_000_000_000_000_u64 },
        "random": { "maxTrials": 3 },
    });
    let experiment = json!({ "spec": {
        "entrypoint": { "command": ["true"] },
        "hyperparameters": { "x": { "double": { "min": 0, "max": 1 } } },
        "searcher": searcher,
    } });
    let lines = [0, 1, 2].map(|trial| json!({ "trial": trial, "units": 1, "metric": 0.5 }));
    assert_eq!(run(&experiment, &lines, &json!([])).units_total, u64::MAX);
}

/// Simulates a search over three batches.
fn simulate_three(
    searcher: Value,
    lines: &[Value],
    ask: Ask<'_>,
) -> Result<Simulation, SimulateError> {
    simulate_three_on(searcher, lines, Machine::default(), ask)
}

/// Same as [`simulate_three`], on a machine. Trials have two slots.
fn simulate_three_on(
    mut searcher: Value,
    lines: &[Value],
    machine: Machine,
    ask: Ask<'_>,
) -> Result<Simulation, SimulateError> {
    searcher["metric"] = json!("loss");
    searcher["maxLength"] = json!({ "batches": 3 });
    let spec = json!({
        "entrypoint": { "command": ["true"] },
        "hyperparameters": { "x": { "double": { "min": 0, "max": 1 } } },
        "resources": { "slotsPerTrial": 2 },
        "searcher": searcher,
    });
    let spec: ExperimentSpec = serde_json::from_value(spec).unwrap();
    let valid = stoker_api::validate::validate("case", &spec).unwrap();
    let config = SearchConfig::new(&valid, 1);
    let curves = curves(lines);
    let curve_of = |trial: u32, _: &Value| curves.get(&trial);
    simulate(&config, machine, ask, curve_of)
}

#[test]
fn external_searcher_gets_the_tags_of_trials() {
    let mut seen = vec![];
    let mut ask = |_: &SearchState, question: DueQuestion, tags: &[Option<String>]| {
        seen.push(tags.to_vec());
        let actions = match question.call {
            0 => json!([{ "create": { "tag": "a" } }, { "create": {} }]),
            _ => json!([]),
        };
        Ok(Answer { call: question.call, actions: serde_json::from_value(actions).unwrap() })
    };
    let external = json!({ "external": { "command": ["searcher"], "maxTrials": 2 } });
    let lines = [0, 1].map(|trial| json!({ "trial": trial, "units": 1, "metric": 0.5 }));
    let simulation = simulate_three(external, &lines, &mut ask).unwrap();
    assert_eq!(simulation.units_total, 6);
    assert_eq!(seen[..2], [vec![], vec![Some("a".to_owned()), None]]);
}

#[test]
fn external_search_uses_only_its_places() {
    let mut ask = |_: &SearchState, question: DueQuestion, _: &[Option<String>]| {
        let actions = match question.call {
            0 => json!([{ "create": {} }, { "create": {} }, { "create": {} }, { "create": {} }]),
            _ => json!([]),
        };
        Ok(Answer { call: question.call, actions: serde_json::from_value(actions).unwrap() })
    };
    let external = json!({ "command": ["searcher"], "maxTrials": 4, "maxConcurrentTrials": 2 });
    let lines = [0, 1, 2, 3].map(|trial| json!({ "trial": trial, "units": 1, "metric": 0.5 }));
    for (workers, seconds) in [(0, 6.0), (1, 12.0), (3, 6.0)] {
        let machine = Machine { workers, ..Machine::default() };
        let searcher = json!({ "external": external });
        let simulation = simulate_three_on(searcher, &lines, machine, &mut ask).unwrap();
        assert_eq!((simulation.units_total, simulation.time_total), (12, seconds), "{workers}");
    }
}

/// When trial 0 completes after three seconds, trial 1 has trained one unit and half of the next.
#[test]
fn stopped_trials_end_at_once() {
    for stop in [json!({ "stop": { "trial": 1 } }), json!({ "finish": {} })] {
        let mut ask = |_: &SearchState, question: DueQuestion, _: &[Option<String>]| {
            let actions = match question.call {
                0 => json!([{ "create": {} }, { "create": {} }]),
                _ => json!([stop]),
            };
            Ok(Answer { call: question.call, actions: serde_json::from_value(actions).unwrap() })
        };
        let external = json!({ "external": { "command": ["searcher"], "maxTrials": 2 } });
        let lines = [
            json!({ "trial": 0, "units": 1, "metric": 0.5 }),
            json!({ "trial": 1, "units": 1, "metric": 0.1, "seconds_per_unit": 2 }),
        ];
        let simulation = simulate_three(external, &lines, &mut ask).unwrap();
        let total = (simulation.units_total, simulation.time_total);
        assert_eq!((total, simulation.best), ((4, 3.0), Some((0, 3, 0.5))), "{stop}");
        let stopped = SimulatedTrial { units: 1, outcome: Outcome::Stopped };
        assert_eq!((simulation.trials[1], simulation.events.len()), (stopped, 1), "{stop}");
    }
}

#[test]
fn impossible_simulations_name_what_is_missing() {
    let check = |searcher: Value, lines: &[Value], expected: &str| {
        let error = simulate_three(searcher, lines, &mut no_searcher).unwrap_err().to_string();
        assert!(error.starts_with(expected), "{error}");
    };
    check(json!({ "single": {} }), &[], "no curve for trial 0; add lines");
    let late = json!({ "trial": 0, "units": 4, "metric": 0.5 });
    let expected = "the curve of trial 0 has no metric at or below 3 units";
    check(json!({ "single": {} }), &[late], expected);
    let external = json!({ "external": { "command": ["searcher"], "maxTrials": 2 } });
    let expected = "the external searcher gave no valid answer to call 0: this simulation has";
    check(external, &[], expected);
}
