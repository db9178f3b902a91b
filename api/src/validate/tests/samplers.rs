//! Rules of samplers, choices of groups and median stopping.

use serde_json::{Value, json};

use super::{check, good, run};
use crate::hyperparameters::Space;

#[test]
fn choice_of_groups_rules_name_their_fields() {
    let root = "spec.hyperparameters";
    let check = |groups: Value, path: &str, words: &str| {
        check("hyperparameters", json!({ "net": { "oneOf": groups } }), path, words);
    };
    let path = |rest: &str| format!("{root}.net.oneOf{rest}");
    check(json!({}), &path(""), "at least one group");
    check(json!([]), &path(""), "at least one group");
    check(json!([{ "a": 1 }, 3]), &path("[1]"), "must be a group");
    check(json!([{ "int": { "min": 1, "max": 2 } }]), &path("[0]"), "must be a group");
    check(json!([{ "a": { "int": { "min": 2, "max": 1 } } }]), &path("[0].a.int.min"), "less");
    let int = |min: i64| json!({ "int": { "min": min, "max": 9 } });
    check(json!([{ "a": 1 }, {}, { "a": 1 }]), &path("[2]"), "told apart from group 0");
    check(json!([{ "a": int(1) }, { "a": int(2) }]), &path("[1]"), "told apart");
    check(json!([{ "a": int(1) }, { "a": 7 }]), &path("[1]"), "told apart");
    let vals = |values: Value| json!({ "categorical": values });
    check(json!([{ "a": vals(json!([1, "x"])) }, { "a": "x" }]), &path("[1]"), "told apart");
    let mixed = json!({ "net": { "oneOf": [{}], "b": 1 } });
    super::check("hyperparameters", mixed, &path(""), "reserved");
}

/// A choice of two groups, in every form that tells them apart, inside of another choice.
#[test]
fn groups_differ_by_names_constants_or_types() {
    let int = json!({ "int": { "min": 1, "max": 9 } });
    for (one, other) in [
        (json!({}), json!({ "a": 1 })),
        (json!({ "a": 1, "b": int }), json!({ "a": 2, "b": int })),
        (json!({ "a": { "categorical": ["x", "y"] } }), json!({ "a": "z" })),
        (json!({ "a": int }), json!({ "a": "none" })),
        (json!({ "a": { "b": int } }), json!({ "a": int })),
        (json!({ "a": { "oneOf": [{ "b": 1 }, { "b": 2 }] } }), json!({ "a": { "b": 3 } })),
    ] {
        let groups = json!({ "net": { "oneOf": [{ "in": { "oneOf": [one, other] } }] } });
        assert!(Space::parse(&groups).is_ok(), "{groups}");
    }
}

#[test]
fn grid_counts_the_points_of_all_groups() {
    let mut spec = good();
    let int = |count: u32| json!({ "int": { "min": 1, "max": 1_000_000, "count": count } });
    let groups = json!({ "oneOf": [{ "a": int(200) }, { "b": int(201) }] });
    spec["hyperparameters"] = json!({ "net": groups, "c": int(250) });
    spec["searcher"] = json!({ "metric": "loss", "maxLength": { "batches": 1 }, "grid": {} });
    let errors = run("x", spec.clone()).unwrap_err();
    assert!(errors[0].rule.contains("100250 points"), "{errors:?}");
    spec["hyperparameters"]["net"]["oneOf"][1]["b"]["int"] = json!({ "min": 1, "max": 2 });
    let errors = run("x", spec).unwrap_err();
    assert_eq!(errors[0].path, "spec.hyperparameters.net.oneOf[1].b.int.count");
    assert!(errors[0].rule.contains("number of grid points"), "{errors:?}");
}

#[test]
fn median_stopping_rules_name_their_fields() {
    let check = |method: &str, rule: Value, field: &str, words: &str| {
        let mut searcher = json!({ "metric": "loss", "maxLength": { "batches": 1000 } });
        searcher[method] = json!({ "maxTrials": 9 });
        searcher["medianStopping"] = rule;
        check("searcher", searcher, &format!("spec.searcher.medianStopping{field}"), words);
    };
    check("random", json!({ "everyUnits": 7 }), ".everyUnits", "at least 8");
    check("random", json!({ "everyUnits": 0 }), ".everyUnits", "at least 8");
    let rule = |field: &str, value: u64| {
        let mut rule = json!({ "everyUnits": 8 });
        rule[field] = json!(value);
        rule
    };
    check("random", rule("startUnits", 1000), ".startUnits", "less than searcher.maxLength");
    check("random", rule("minTrials", 0), ".minTrials", "at least 1");
    check("single", rule("minTrials", 1), "", "must be unset");
    let mut spec = good();
    spec["searcher"]["medianStopping"] = json!({ "everyUnits": 1 });
    let rule = run("x", spec).unwrap().spec.searcher.median_stopping.unwrap();
    assert_eq!((rule.start_units, rule.every_units, rule.min_trials), (0, 1, 5));
}

#[test]
fn sampler_rules_name_their_fields() {
    let check = |method: &str, sampler: Value, words: &str| {
        let mut searcher = json!({ "metric": "loss", "maxLength": { "batches": 1000 } });
        searcher[method] = json!({ "maxTrials": 9 });
        searcher["sampler"] = sampler;
        check("searcher", searcher, "spec.searcher.sampler", words);
    };
    for method in ["tpe", "sobol"] {
        check(method, json!({ "tpe": {} }), &format!("{method} samples in its own way"));
    }
    check("random", json!({}), "exactly one of tpe and sobol must be set, but none is");
    check("random", json!({ "tpe": {}, "sobol": {} }), "but tpe and sobol are");
    for sampler in [json!({ "tpe": { "multivariate": true } }), json!({ "sobol": {} })] {
        let mut spec = good();
        spec["searcher"]["sampler"] = sampler;
        assert!(run("x", spec).is_ok());
    }
}

#[test]
fn sobol_refuses_spaces_with_too_many_dimensions() {
    let mut spec = good();
    let searcher = json!({ "metric": "loss", "maxLength": { "batches": 1 } });
    let parameters = |num: u32| -> Value {
        let parameter = |i| (format!("p{i}"), json!({ "categorical": [1, 2] }));
        let mut all: serde_json::Map<_, _> = (0..num).map(parameter).collect();
        all.insert("fixed".to_owned(), json!(3));
        all.insert("net".to_owned(), json!({ "oneOf": [{}, { "a": { "categorical": [1] } }] }));
        Value::Object(all)
    };
    for search in [json!({ "sobol": { "maxTrials": 9 } }), json!({ "sampler": { "sobol": {} } })] {
        spec["searcher"] = searcher.clone();
        spec["searcher"].as_object_mut().unwrap().extend(search.as_object().unwrap().clone());
        if search["sampler"].is_object() {
            spec["searcher"]["random"] = json!({ "maxTrials": 9 });
        }
        spec["hyperparameters"] = parameters(62);
        assert!(run("x", spec.clone()).is_ok());
        spec["hyperparameters"] = parameters(63);
        let errors = run("x", spec.clone()).unwrap_err();
        assert_eq!(errors[0].path, "spec.hyperparameters");
        assert!(errors[0].rule.contains("65 dimensions, but sobol has 64"), "{errors:?}");
    }
}

#[test]
fn objective_rules_name_their_fields() {
    let check = |objectives: Value, field: &str, words: &str| {
        let searcher = json!({
            "metric": "loss", "maxLength": { "batches": 1 }, "random": { "maxTrials": 9 },
            "objectives": objectives,
        });
        check("searcher", searcher, &format!("spec.searcher.objectives{field}"), words);
    };
    let metric = |name: &str| json!({ "metric": name });
    check(json!([metric("loss")]), "", "from 2 to 4");
    let five: Vec<Value> = ["loss", "a", "b", "c", "d"].map(metric).into();
    check(json!(five), "", "from 2 to 4");
    check(json!([metric("a"), metric("loss")]), "[0]", "searcher.metric");
    let larger = json!({ "metric": "loss", "smallerIsBetter": false });
    check(json!([larger, metric("a")]), "[0]", "searcher.smallerIsBetter");
    check(json!([metric("loss"), metric(" ")]), "[1].metric", "must name");
    check(json!([metric("loss"), metric("a"), metric("a")]), "[2].metric", "twice");
    let mut spec = good();
    spec["searcher"]["objectives"] = json!([metric("loss"), metric("seconds")]);
    let searcher = run("x", spec).unwrap().spec.searcher;
    assert_eq!(searcher.other_objectives(), &searcher.objectives[1..]);
}

#[test]
fn prior_trials_rules_name_their_fields() {
    let check = |method: Value, prior: Value, path: &str, words: &str| {
        let mut searcher = json!({ "metric": "loss", "maxLength": { "batches": 1 } });
        for (name, value) in method.as_object().unwrap() {
            searcher[name] = value.clone();
        }
        searcher["priorTrials"] = prior;
        check("searcher", searcher, &format!("spec.searcher.priorTrials{path}"), words);
    };
    let random = json!({ "random": { "maxTrials": 1 } });
    let of = |names: &[&str]| json!({ "experiments": names });
    check(random.clone(), of(&[]), ".experiments", "from 1 to 16");
    let many: Vec<String> = (0..17).map(|i| format!("a{i}")).collect();
    check(random.clone(), json!({ "experiments": many }), ".experiments", "from 1 to 16");
    check(random.clone(), of(&["a", "b", "a"]), ".experiments[2]", "twice");
    check(random.clone(), of(&["a", "x"]), ".experiments[1]", "is this experiment");
    for trials in [0, 65] {
        let prior = json!({ "experiments": ["a"], "trials": trials });
        check(random.clone(), prior, ".trials", "from 1 to 64");
    }
    let objectives = json!([{ "metric": "loss" }, { "metric": "seconds" }]);
    let several = json!({ "random": { "maxTrials": 1 }, "objectives": objectives });
    check(several, of(&["a"]), "", "one metric");
    let mut spec = good();
    spec["hyperparameters"] = json!({ "rate": { "int": { "min": 1, "max": 3, "count": 3 } } });
    spec["searcher"] = json!({
        "metric": "loss", "maxLength": { "batches": 1 }, "grid": {}, "priorTrials": of(&["a"]),
    });
    let errors = run("x", spec).unwrap_err();
    assert_eq!((errors.len(), &errors[0].path[..]), (1, "spec.searcher.priorTrials"));
}
