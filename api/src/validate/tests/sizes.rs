//! Limits of the number of trials, and of the size of fields.

use serde_json::{Value, json};

use super::{check, good, run};
use crate::validate::{validate_local, validate_started};

/// Checks that an experiment is valid on one machine, but has an error of `maxConcurrentTrials` on
/// a cluster, which contains `words`.
fn check_at_once(method: &str, spec: Value, words: &str) {
    validate_local("x", &serde_json::from_value(spec.clone()).unwrap()).unwrap();
    let errors = run("x", spec).expect_err(method);
    assert_eq!(errors.len(), 1, "{errors:?}");
    assert_eq!(errors[0].path, format!("spec.searcher.{method}.maxConcurrentTrials"));
    assert!(errors[0].rule.contains(words), "{words}: {errors:?}");
}

/// Some methods have no `maxTrials`: their number of trials follows from lengths.
#[test]
fn searches_have_at_most_100000_trials() {
    let check = |units: u64, method: &str, fields: Value, expected: Result<(), (&str, &str)>| {
        let mut spec = good();
        spec["searcher"] = json!({ "metric": "loss", "maxLength": { "batches": units } });
        spec["searcher"][method] = fields;
        validate_started("x", &serde_json::from_value(spec.clone()).unwrap()).unwrap();
        let actual = run("x", spec);
        let errors = actual.as_ref().err().map_or(&[][..], Vec::as_slice);
        let errors: Vec<_> = errors.iter().map(|e| (e.path.as_str(), e.rule.as_str())).collect();
        match expected {
            Ok(()) => assert_eq!(errors, [], "{method} of {units}"),
            Err((field, words)) => {
                let path = format!("spec.searcher.{field}");
                assert!(
                    matches!(errors[..], [(at, rule)] if at == path && rule.contains(words)),
                    "{errors:?}"
                );
            }
        }
    };
    // Brackets of 81, 34, 15, 8 and 5 trials.
    check(81, "hyperband", json!({ "divisor": 3 }), Ok(()));
    let too_many = Err(("hyperband.divisor", "leads to 279292 trials, more than 100000; raise"));
    check(200_000, "hyperband", json!({ "divisor": 3 }), too_many);
    check(200_000, "hyperband", json!({ "divisor": 4 }), Ok(()));
    check(u64::MAX, "hyperband", json!({ "divisor": 2 }), Err(("hyperband.divisor", "leads to")));
    let halving =
        |batches: u64| json!({ "numRungs": 3, "divisor": 2, "budget": { "batches": batches } });
    // 4 trials of 25 units, 2 of them for 25 more and 1 for 50 more train 200 units.
    check(100, "syncHalving", halving(5_000_000), Ok(()));
    let too_many = Err(("syncHalving.budget", "leads to 100004 trials, more than 100000; lower"));
    check(100, "syncHalving", halving(5_000_200), too_many);
    check(100, "syncHalving", halving(u64::MAX), Err(("syncHalving.budget", "leads to")));
    let adaptive = |batches: u64| {
        let budget = json!({ "batches": batches });
        json!({ "bracketRungs": [3, 1], "divisor": 2, "budget": budget })
    };
    // One half of the budget is for trials of full length.
    check(100, "adaptive", adaptive(6_660_000), Ok(()));
    check(100, "adaptive", adaptive(6_700_000), Err(("adaptive.budget", "leads to 100500")));
}

/// The experiment records all of them in one entry of its log.
#[test]
fn searches_create_at_most_20000_trials_at_once() {
    let spec = |method: &str, max_trials: u32, concurrency: u32| {
        let mut spec = good();
        spec["searcher"] = json!({ "metric": "loss", "maxLength": { "batches": 9 } });
        spec["searcher"][method] =
            json!({ "maxTrials": max_trials, "maxConcurrentTrials": concurrency });
        spec
    };
    for method in ["random", "tpe", "adaptiveSimple"] {
        check_at_once(method, spec(method, 20_001, 0), "20001 trials at once");
        check_at_once(method, spec(method, 90_000, 20_001), "from 1 to 20000");
        for (max_trials, concurrency) in [(20_000, 0), (90_000, 20_000), (20_000, 30_000)] {
            run("x", spec(method, max_trials, concurrency)).unwrap();
        }
        let started = serde_json::from_value(spec(method, 90_000, 0)).unwrap();
        validate_started("x", &started).unwrap();
    }
}

#[test]
fn trials_at_once_follow_from_rungs() {
    let spec = |method: &str, fields: &Value, concurrency: u32| {
        let mut searcher = json!({ "metric": "loss", "maxLength": { "batches": 200_000 } });
        searcher[method] = fields.clone();
        searcher[method]["maxConcurrentTrials"] = json!(concurrency);
        let mut spec = good();
        spec["searcher"] = searcher;
        spec
    };
    let halving = |rungs: u32| json!({ "maxTrials": 100_000, "numRungs": rungs, "divisor": 4 });
    let asha = |mode: &str| json!({ "maxTrials": 100_000, "mode": mode, "divisor": 4 });
    let sync = json!({ "numRungs": 1, "divisor": 4, "budget": { "batches": 4_000_200_000_u64 } });
    let budget = json!({ "batches": 10_000_000_000_u64 });
    let adaptive = json!({ "bracketRungs": [1, 1], "divisor": 4, "budget": budget });
    for (method, fields, num_at_once) in [
        ("asyncHalving", halving(9), Some(65_536)),
        ("asyncHalving", halving(8), None),
        ("adaptiveAsha", asha("aggressive"), Some(100_000)),
        ("adaptiveAsha", asha("conservative"), None),
        ("syncHalving", sync, Some(20_001)),
        ("adaptive", adaptive, Some(50_000)),
        ("hyperband", json!({ "divisor": 4 }), Some(91_451)),
    ] {
        run("x", spec(method, &fields, 16)).unwrap();
        let unlimited = spec(method, &fields, 0);
        match num_at_once {
            Some(num) => check_at_once(method, unlimited, &format!("{num} trials at once")),
            None => drop(run("x", unlimited).unwrap()),
        }
    }
}

/// Programs get these fields in an annotation of their pod.
#[test]
fn large_fields_are_refused_before_the_start() {
    let text = |bytes: usize| "x".repeat(bytes);
    let data = json!({ "list": text(170_000) });
    check("data", data, "spec.data", "takes 170011 of");
    let values: Vec<String> = (0..170).map(|value| format!("{value}{}", text(1000))).collect();
    let net = json!({ "categorical": values });
    check("hyperparameters/net", net, "spec.hyperparameters", "at most 163840: put");
    check("description", json!(text(170_000)), "spec", "at most 163840");
    let mut spec = good();
    spec["data"] = json!({ "list": text(150_000) });
    run("x", spec.clone()).unwrap();
    spec["data"] = json!({ "list": text(170_000) });
    validate_started("x", &serde_json::from_value(spec).unwrap()).unwrap();
}

#[test]
fn base_of_a_logarithm_is_more_than_1() {
    let log = |base: f64| json!({ "log": { "min": 1, "max": 2, "base": base } });
    let path = "spec.hyperparameters.rate.log.base";
    for base in [0.1, 1.0] {
        check("hyperparameters/rate", log(base), path, "more than 1");
        let mut spec = good();
        spec["hyperparameters"]["rate"] = log(base);
        validate_started("x", &serde_json::from_value(spec).unwrap()).unwrap();
    }
    let mut spec = good();
    spec["hyperparameters"]["rate"] = log(1.0);
    spec["schedulingUnit"] = json!(0);
    let errors = run("x", spec).unwrap_err();
    let paths: Vec<_> = errors.iter().map(|error| error.path.as_str()).collect();
    assert_eq!(paths, ["spec.schedulingUnit", path], "{errors:?}");
    let choice = json!({ "oneOf": [{ "a": 1 }, { "rate": log(0.5) }] });
    let path = "spec.hyperparameters.net.oneOf[1].rate.log.base";
    check("hyperparameters/net", choice, path, "more than 1");
}

#[test]
fn powers_of_a_logarithm_do_not_round_to_0() {
    let log =
        |base: f64, min: i32, max: i32| json!({ "log": { "min": min, "max": max, "base": base } });
    let path = |bound: &str| format!("spec.hyperparameters.rate.log.{bound}");
    let rule = "10 to this power is 0; raise it";
    check("hyperparameters/rate", log(10.0, -400, -1), &path("min"), rule);
    check("hyperparameters/rate", log(2.0, -1080, -1), &path("min"), "2 to this power is 0");
    let mut spec = good();
    spec["hyperparameters"]["rate"] = log(10.0, -400, -330);
    let errors = run("x", spec.clone()).unwrap_err();
    let paths: Vec<_> = errors.iter().map(|error| error.path.clone()).collect();
    assert_eq!(paths, [path("min"), path("max")], "{errors:?}");
    validate_started("x", &serde_json::from_value(spec.clone()).unwrap()).unwrap();
    spec["hyperparameters"]["rate"] = log(10.0, -323, -1);
    run("x", spec).unwrap();
}

#[test]
fn searches_have_at_most_16_brackets() {
    let rungs = [1].repeat(17);
    for (method, mut fields) in [
        ("adaptiveAsha", json!({ "maxTrials": 100 })),
        ("adaptiveSimple", json!({ "maxTrials": 100 })),
        ("adaptive", json!({ "budget": { "epochs": 100 } })),
    ] {
        fields["bracketRungs"] = json!(rungs);
        let mut searcher = json!({ "metric": "loss", "maxLength": { "epochs": 3 } });
        searcher[method] = fields;
        let path = format!("spec.searcher.{method}.bracketRungs");
        check("searcher", searcher, &path, "at most 16 brackets");
    }
}
