//! Tests of prior trials.

use serde_json::{Value, json};
use stoker_api::decisions::LogEntry;
use stoker_api::experiment::ExperimentSpec;
use stoker_api::time::Timestamp;
use stoker_api::trial::{Fact, ResultFact};

use super::*;
use crate::experiment::{Ledger, Record, Write};
use crate::fixture::plain_record;
use crate::search::SearchConfig;

/// Returns an experiment with this searcher and the prior trials of experiments `a` and `b`.
fn valid(searcher: Value, num_trials: u32) -> ValidExperiment {
    let prior = json!({ "experiments": ["a", "b"], "trials": num_trials });
    let mut spec = json!({
        "entrypoint": { "command": ["x"] },
        "hyperparameters": {
            "kind": "mlp",
            "rate": { "log": { "min": -4, "max": 0 } },
            "width": { "int": { "min": 8, "max": 64 } },
        },
        "searcher": { "metric": "loss", "maxLength": { "epochs": 9 }, "priorTrials": prior },
    });
    for (name, value) in searcher.as_object().unwrap() {
        spec["searcher"][name] = value.clone();
    }
    let spec: ExperimentSpec = serde_json::from_value(spec).unwrap();
    stoker_api::validate::validate("new", &spec).unwrap()
}

fn point(rate: f64, width: u32) -> Value {
    json!({ "kind": "mlp", "rate": rate, "width": width })
}

/// Returns a trial with a result. The metric is the index.
fn trial(index: u32, hyperparameters: Value) -> TrialRecord {
    let mut record = plain_record(index);
    record.spec.hyperparameters = hyperparameters;
    let metric = index.to_string();
    record.status.facts = vec![Fact::Result(ResultFact {
        units: 9,
        metric,
        values: vec![],
        checkpoint: None,
        at: None,
    })];
    record
}

fn random() -> Value {
    json!({ "random": { "maxTrials": 4, "maxConcurrentTrials": 4 } })
}

fn names(
    valid: &ValidExperiment,
    a: &[TrialRecord],
    b: &[TrialRecord],
) -> Result<Vec<String>, String> {
    let searcher = &valid.spec.searcher;
    let experiment = |name, trials: &'_ [TrialRecord]| {
        let trials = trials.to_vec();
        (name, trials)
    };
    let experiments = [experiment("a", a), experiment("b", b)];
    let experiments: Vec<_> = experiments
        .iter()
        .map(|(name, trials)| PriorExperiment { name, searcher, trials: trials.iter().collect() })
        .collect();
    Ok(prior_trials(valid, &experiments)?.into_iter().map(|trial| trial.name).collect())
}

#[test]
fn best_trials_come_first_without_repeats() {
    let a = [trial(0, point(0.1, 8)), trial(3, point(0.01, 8)), trial(2, point(0.1, 9))];
    let b = [trial(1, point(0.001, 8)), trial(4, point(0.1, 8)), trial(5, point(0.5, 64))];
    assert_eq!(names(&valid(random(), 64), &a, &b).unwrap(), ["a-0", "b-1", "a-2", "a-3", "b-5"]);
    assert_eq!(names(&valid(random(), 2), &a, &b).unwrap(), ["a-0", "b-1"]);
    let larger = json!({ "smallerIsBetter": false, "random": { "maxTrials": 4 } });
    assert_eq!(names(&valid(larger, 2), &a, &b).unwrap(), ["b-5", "b-4"]);
}

#[test]
fn unusable_trials_are_left_out() {
    let with_metric = |metric: &str| {
        let mut record = trial(0, point(0.1, 8));
        let metric = metric.to_owned();
        record.status.facts = vec![Fact::Result(ResultFact {
            units: 9,
            metric,
            values: vec![],
            checkpoint: None,
            at: None,
        })];
        record
    };
    let mut without_result = trial(0, point(0.1, 8));
    without_result.status.facts.clear();
    let unusable = [
        with_metric("NaN"),
        with_metric("-Infinity"),
        without_result,
        trial(0, point(1.5, 8)),
        trial(0, point(0.1, 7)),
        trial(0, point(0.1, 65)),
        trial(0, json!({ "kind": "cnn", "rate": 0.1, "width": 8 })),
        trial(0, json!({ "rate": 0.1, "width": 8 })),
        trial(0, json!({ "kind": "mlp", "rate": 0.1, "width": 8, "more": 1 })),
        trial(0, json!({ "kind": "mlp", "rate": "0.1", "width": 8 })),
        trial(0, json!({ "kind": "mlp", "rate": 0.1, "width": 8.5 })),
    ];
    let valid = valid(random(), 64);
    for record in unusable {
        let hyperparameters = record.spec.hyperparameters.clone();
        assert_eq!(names(&valid, &[record], &[]).unwrap(), [""; 0], "{hyperparameters}");
    }
    // The bounds belong to the space.
    let bounds = [trial(0, point(0.0001, 8)), trial(1, point(1.0, 64))];
    assert_eq!(names(&valid, &bounds, &[]).unwrap(), ["a-0", "a-1"]);
}

#[test]
fn record_of_prior_trials_is_bounded() {
    let long = "x".repeat(10_000);
    let mut valid = valid(random(), 64);
    let space = json!({ "kind": long, "rate": { "double": { "min": 0, "max": 1 } } });
    valid.space = Space::parse(&space).unwrap();
    let value = |rate: f64| json!({ "kind": long, "rate": rate });
    let trials: Vec<_> = (0..9).map(|index| trial(index, value(f64::from(index) / 9.0))).collect();
    assert_eq!(names(&valid, &trials, &[]).unwrap(), ["a-0", "a-1", "a-2"]);
}

#[test]
fn other_metric_is_an_error_with_both() {
    let new = valid(random(), 64);
    let accuracy =
        json!({ "metric": "accuracy", "smallerIsBetter": false, "random": { "maxTrials": 4 } });
    let old = valid(accuracy, 1).spec.searcher;
    let same = PriorExperiment { name: "a", searcher: &new.spec.searcher, trials: vec![] };
    let other = PriorExperiment { name: "b", searcher: &old, trials: vec![] };
    let error = prior_trials(&new, &[same, other]).unwrap_err();
    for words in ["experiments[1] is `b`", "`accuracy`", "`loss`", "false", "same metric"] {
        assert!(error.contains(words), "{words}: {error}");
    }
}

/// Returns the hyperparameters of the first trials of a search, which its record rebuilds.
fn first_trials(valid: &ValidExperiment, prior: Vec<PriorTrial>) -> Vec<Value> {
    let config = SearchConfig::new(valid, 1);
    let trials = std::collections::BTreeMap::new();
    let record = |log: &'_ [LogEntry]| {
        let record = Record { log, trials: &trials, trials_created: 0 };
        Ledger::rebuild(&config, record).unwrap().0
    };
    let mut ledger = record(&[]);
    let writes = ledger.begin("test", prior, Timestamp(0));
    let [Write::Log(entry)] = &writes[..] else { panic!("{writes:?}") };
    assert_eq!(record(std::slice::from_ref(entry)), ledger);
    ledger.missing().map(|spec| spec.hyperparameters.clone()).collect()
}

fn prior(index: u32, hyperparameters: Value) -> PriorTrial {
    PriorTrial { name: format!("a-{index}"), hyperparameters, metric: index.to_string() }
}

#[test]
fn samplers_begin_with_the_best_prior_trials() {
    let best = vec![prior(0, point(0.1, 8)), prior(1, point(0.01, 9))];
    let sobol = json!({ "sobol": { "maxTrials": 4, "maxConcurrentTrials": 4 } });
    let asha = json!({ "asyncHalving": { "maxTrials": 4, "numRungs": 2, "divisor": 3 } });
    for searcher in [random(), sobol, asha] {
        let valid = valid(searcher, 64);
        let trials = first_trials(&valid, best.clone());
        assert_eq!(trials[..2], [point(0.1, 8), point(0.01, 9)]);
        let others = first_trials(&valid, vec![]);
        assert_eq!(others.len(), trials.len());
        assert_ne!(trials[2], trials[3]);
        assert_ne!(others[..2], trials[..2]);
    }
    let single = valid(json!({ "single": {} }), 64);
    assert_eq!(first_trials(&single, best), [point(0.1, 8)]);
}

#[test]
fn tpe_samples_near_good_prior_trials_at_once() {
    // Ten trials near a rate of 0.001 are good, and 54 elsewhere are bad.
    let rates = |index: u32| match index {
        0..10 => 0.001 * (1.0 + f64::from(index) / 100.0),
        _ => 0.1 * (1.0 + f64::from(index) / 100.0),
    };
    let known = (0..64).map(|index| prior(index, point(rates(index), 8 + index % 50))).collect();
    let tpe = json!({ "tpe": { "maxTrials": 8, "maxConcurrentTrials": 8 } });
    let near = |trials: &[Value]| {
        let is_near = |trial: &&Value| (0.0003..0.003).contains(&trial["rate"].as_f64().unwrap());
        trials.iter().filter(is_near).count()
    };
    let valid = valid(tpe, 64);
    let (with, without) = (first_trials(&valid, known), first_trials(&valid, vec![]));
    assert!(near(&with) >= 6 && near(&without) <= 4, "{with:?} {without:?}");
}
