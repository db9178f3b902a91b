//! Each rule, tested by an experiment that violates only this rule.

mod names;
mod samplers;
mod sizes;

use serde_json::{Value, json};

use super::*;

fn good() -> Value {
    json!({
        "entrypoint": { "command": ["train"] },
        "hyperparameters": { "rate": { "log": { "min": -4, "max": -1 } }, "batch": 64 },
        "searcher": {
            "metric": "loss", "maxLength": { "epochs": 3 }, "random": { "maxTrials": 4 },
        },
    })
}

fn run(name: &str, value: Value) -> Result<ValidExperiment, Vec<FieldError>> {
    validate(name, &serde_json::from_value(value).unwrap())
}

/// Sets the value at `pointer` of a valid experiment. Validation must report exactly one error, at
/// `path`, that contains `words`.
fn check(pointer: &str, value: Value, path: &str, words: &str) {
    let mut spec = good();
    let mut target = &mut spec;
    for name in pointer.split('/') {
        target = &mut target[name];
    }
    *target = value;
    let errors = run("x", spec).expect_err(path);
    let paths: Vec<_> = errors.iter().map(|error| error.path.as_str()).collect();
    assert_eq!(paths, [path], "{errors:?}");
    assert!(errors[0].rule.contains(words), "{words}: {errors:?}");
}

#[test]
fn each_search_rule_names_its_field() {
    let check = |method: &str, fields: Value, field: &str, words: &str| {
        let mut searcher = json!({ "metric": "loss", "maxLength": { "epochs": 27 } });
        searcher[method] = fields;
        check("searcher", searcher, &format!("spec.searcher.{field}"), words);
    };
    let asha = |field: &str, value: Value| {
        let mut fields = json!({ "maxTrials": 9, "numRungs": 3, "divisor": 3 });
        fields[field] = value;
        fields
    };
    check("asyncHalving", asha("maxTrials", json!(0)), "asyncHalving.maxTrials", "at least 1");
    check("asyncHalving", asha("maxTrials", json!(100_001)), "asyncHalving.maxTrials", "100000");
    check("asyncHalving", asha("numRungs", json!(0)), "asyncHalving.numRungs", "at least 1");
    check("asyncHalving", asha("numRungs", json!(5)), "asyncHalving.numRungs", "at most 4");
    // The length of the trials does not matter.
    check("asyncHalving", asha("numRungs", json!(17)), "asyncHalving.numRungs", "at most 16; use");
    check("asyncHalving", asha("divisor", json!(1)), "asyncHalving.divisor", "at least 2");
    let adaptive = |field: &str, value: Value| {
        let mut fields = json!({ "maxTrials": 9 });
        fields[field] = value;
        fields
    };
    check("adaptiveAsha", adaptive("maxRungs", json!(17)), "adaptiveAsha.maxRungs", "1 to 16");
    let rungs = json!([2, 4]);
    check(
        "adaptiveAsha",
        adaptive("bracketRungs", rungs),
        "adaptiveAsha.bracketRungs[1]",
        "at most 3",
    );
    check("adaptiveSimple", adaptive("divisor", json!(0)), "adaptiveSimple.divisor", "at least 2");
    let budget = |budget: Value| json!({ "numRungs": 2, "budget": budget });
    check(
        "syncHalving",
        budget(json!({ "batches": 99 })),
        "syncHalving.budget",
        "unit of searcher.maxLength",
    );
    check(
        "syncHalving",
        budget(json!({ "epochs": 26 })),
        "syncHalving.budget",
        "at least searcher.maxLength",
    );
    check("adaptive", json!({ "budget": { "epochs": 0 } }), "adaptive.budget.epochs", "at least 1");
    check("hyperband", json!({ "divisor": 1 }), "hyperband.divisor", "at least 2");
    check("tpe", json!({ "maxTrials": 0 }), "tpe.maxTrials", "at least 1");
    let pbt = |field: &str, value: Value| {
        let mut search =
            json!({ "populationSize": 4, "lengthPerRound": { "epochs": 27 }, "numRounds": 1 });
        search[field] = value;
        search
    };
    check("pbt", pbt("populationSize", json!(1)), "pbt.populationSize", "from 2 to 1000");
    check("pbt", pbt("numRounds", json!(129)), "pbt.numRounds", "from 1 to 128");
    check("pbt", pbt("truncateFraction", json!(0.51)), "pbt.truncateFraction", "from 0 to 0.5");
    check("pbt", pbt("perturbFactor", json!(-1)), "pbt.perturbFactor", "from 0 to 1");
    check("pbt", pbt("resampleProbability", json!(2)), "pbt.resampleProbability", "from 0 to 1");
    check("pbt", pbt("numRounds", json!(2)), "maxLength", "lengthPerRound times numRounds");
    let length = json!({ "epochs": 0 });
    check("pbt", pbt("lengthPerRound", length), "pbt.lengthPerRound.epochs", "at least 1");
}

#[test]
fn each_rule_on_units_names_its_field() {
    check("searcher/maxLength/units", json!(3), "spec.searcher.maxLength", "epochs and units");
    check("searcher/timeMetric", json!("steps"), "spec.searcher.timeMetric", "maxLength.units");
    let counted = |name: &str| {
        let length = json!({ "units": 900 });
        json!({ "metric": "loss", "maxLength": length, "timeMetric": name, "single": {} })
    };
    check("searcher", counted(" "), "spec.searcher.timeMetric", "trained length");
    let (units, period) = (json!({ "units": 3 }), "spec.minValidationPeriod.units");
    check("minValidationPeriod", units, period, "saves by itself");
}

#[test]
fn lengths_may_be_in_the_programs_own_count() {
    let mut spec = good();
    spec["searcher"] = json!({
        "metric": "loss", "maxLength": { "units": 900 }, "timeMetric": "steps",
        "syncHalving": { "numRungs": 2, "budget": { "units": 9000 } },
    });
    let valid = run("x", spec).unwrap();
    assert_eq!((valid.unit, valid.units_max), (crate::experiment::Unit::Units, 900));
}

#[test]
fn each_pod_rule_names_its_field() {
    let resources = "spec.resources";
    check("resources", json!({"slotsPerTrial": 1025}), "spec.resources.slotsPerTrial", "1024");
    let slots = |per_pod: u32| json!({ "slotsPerTrial": 8, "slotsPerPod": per_pod });
    check("resources", slots(3), &format!("{resources}.slotsPerPod"), "divide slotsPerTrial");
    check("resources", slots(0), &format!("{resources}.slotsPerPod"), "at least 1");
    let slot = |name: &str| json!({ "slotResource": name });
    check("resources", slot("gpu"), &format!("{resources}.slotResource"), "nvidia.com/gpu");
    let parts = json!({ "slotResource": "nvidia.com/mig-1g.5gb", "slotsPerTrial": 4 });
    let per_pod = format!("{resources}.slotsPerPod");
    check("resources", parts.clone(), &per_pod, "is 4 by default, but must be 1 if slots are");
    let mut given = parts;
    given["slotsPerPod"] = json!(2);
    check("resources", given, &per_pod, "must be 1 if slots are parts of a GPU");
    let both = json!({ "slotResource": "nvidia.com/gpu", "limits": { "nvidia.com/gpu": "1" } });
    check("resources", both, r#"spec.resources.limits["nvidia.com/gpu"]"#, "slotsPerPod");
    check("resources/requests", json!({"cpu": "x"}), "spec.resources.requests.cpu", "quantity");
    check("resources/limits", json!({"memory": "1GB"}), "spec.resources.limits.memory", "16Gi");
    check("resources/shmSize", json!("big"), "spec.resources.shmSize", "quantity");
    check("context", json!({"sha256": "A"}), "spec.context.sha256", "SHA-256");
    let secret = "spec.checkpointStorage.secretName";
    check("checkpointStorage/secretName", json!("A b"), secret, "name of a Secret");
    check("env", json!([{ "name": "C10D_PORT", "value": "x" }]), "spec.env[0].value", "port");
    check("pod/image", json!(" "), "spec.pod.image", "stock");
    check("pod/imagePullPolicy", json!("Maybe"), "spec.pod.imagePullPolicy", "Always");
    check("pod/imagePullSecrets", json!([""]), "spec.pod.imagePullSecrets[0]", "Secret");
    check("pod/volumes", json!([{}]), "spec.pod.volumes[0].name", "must name");
    check("pod/volumes", json!([{"name": "stoker-x"}]), "spec.pod.volumes[0].name", "own");
    let twice = json!([{ "name": "a" }, { "name": "a" }]);
    check("pod/volumes", twice, "spec.pod.volumes[1].name", "twice");
    let mount = |name: &str, path: &str| {
        json!({
            "volumes": [{ "name": "a" }],
            "volumeMounts": [{ "name": name, "mountPath": path }],
        })
    };
    check("pod", mount("b", "/b"), "spec.pod.volumeMounts[0].name", "not among");
    check("pod", mount("a", "b"), "spec.pod.volumeMounts[0].mountPath", "absolute");
    check("pod", mount("a", "/tmp/"), "spec.pod.volumeMounts[0].mountPath", "own");
    let name = "spec.podOverrides.metadata.name";
    check("podOverrides", json!({"metadata": {"name": "x"}}), name, "Stoker itself");
    let container = |body: Value| json!({ "spec": { "containers": [body] } });
    let at = "spec.podOverrides.spec.containers[0]";
    check("podOverrides", container(json!({})), &format!("{at}.name"), "merged into");
    let command = json!({ "name": "trainer", "command": ["x"] });
    check("podOverrides", container(command), &format!("{at}.command"), "entrypoint");
}

#[test]
fn commands_are_programs_without_the_launcher() {
    check("entrypoint/command", json!([]), "spec.entrypoint.command", "program");
    check("entrypoint/command", json!([" "]), "spec.entrypoint.command[0]", "first word");
    let launcher = json!(["/bin/stoker-trainer", "launch", "--", "train"]);
    check("entrypoint/command", launcher, "spec.entrypoint.command", "the program alone");
    check("entrypoint/args", json!(["a\0"]), "spec.entrypoint.args[0]", "NUL");
}

#[test]
fn each_rule_names_its_field() {
    let log = |body: Value| json!({ "log": body });
    let hyperparameters = "hyperparameters/rate";
    let rate = |rest: &str| format!("spec.hyperparameters.rate{rest}");
    check("data", json!([1]), "spec.data", "object");
    check("searcher/metric", json!(" "), "spec.searcher.metric", "validation metric");
    check("searcher/random", Value::Null, "spec.searcher", "none is");
    check("searcher/single", json!({}), "spec.searcher", "single and random are");
    check("searcher/random/maxTrials", json!(0), "spec.searcher.random.maxTrials", "at least 1");
    let trials = "spec.searcher.random.maxTrials";
    check("searcher/random/maxTrials", json!(100_001), trials, "at most 100000");
    check("searcher/random/maxTrials", json!(4_000_000_000_u32), trials, "at most 100000");
    check("searcher/maxLength", json!({}), "spec.searcher.maxLength", "none is");
    check("searcher/maxLength/epochs", json!(0), "spec.searcher.maxLength.epochs", "at least 1");
    check("searcher/maxLength/batches", json!(3), "spec.searcher.maxLength", "batches and epochs");
    check("minValidationPeriod", json!({}), "spec.minValidationPeriod", "exactly one");
    check("minCheckpointPeriod", json!({}), "spec.minCheckpointPeriod", "exactly one");
    check("env", json!([{ "name": "1A" }]), "spec.env[0].name", "begin with a digit");
    check("env", json!([{ "name": "STOKER_A" }]), "spec.env[0].name", "STOKER_");
    let own = json!([{ "name": "STOKER_KERNELS", "value": "off" }, { "name": "STOKER_SILENCE" }]);
    check("env", own, "spec.env[1].name", "STOKER_SILENCE_SECONDS");
    check("env", json!([{ "name": "A" }, { "name": "A" }]), "spec.env[1].name", "twice");
    check("env", json!([{ "name": "A", "value": "\0" }]), "spec.env[0].value", "NUL");
    let storage = "spec.checkpointStorage";
    check("checkpointStorage/url", json!("ftp://x"), &format!("{storage}.url"), "s3://");
    check("checkpointStorage/url", json!("s3://"), &format!("{storage}.url"), "s3://");
    check("checkpointStorage/url", json!("x/y"), &format!("{storage}.url"), "absolute path");
    check("checkpointStorage/endpoint", json!("x"), &format!("{storage}.endpoint"), "http://");
    for field in ["saveExperimentBest", "saveTrialBest", "saveTrialLatest"] {
        let (path, at) = (format!("checkpointStorage/{field}"), format!("{storage}.{field}"));
        check(&path, json!(101), &at, "at most 100");
    }
    check("resources/slotsPerTrial", json!(0), "spec.resources.slotsPerTrial", "at least 1");
    check("schedulingUnit", json!(0), "spec.schedulingUnit", "at least 1");
    check("preemptionTimeoutSeconds", json!(0), "spec.preemptionTimeoutSeconds", "at least 1");
    let optimizations = "spec.optimizations.aggregationFrequency";
    check("optimizations/aggregationFrequency", json!(0), optimizations, "at least 1");
    let seed = "spec.reproducibility.experimentSeed";
    check("reproducibility/experimentSeed", json!(1_u32 << 31), seed, "2^31");
    check("hyperparameters", json!(3), "spec.hyperparameters", "object");
    check("hyperparameters", json!({ "log": {} }), "spec.hyperparameters.log", "reserved");
    let int = json!({ "int": { "min": 1, "max": 2 }, "b": 1 });
    check(hyperparameters, int, &rate(".int"), "no other key");
    let wrong = json!({ "min": 2, "max": 2 });
    check(hyperparameters, log(wrong.clone()), &rate(".log.min"), "less than max, which is 2");
    check(hyperparameters, json!({ "int": wrong }), &rate(".int.min"), "less than max");
    check(hyperparameters, log(json!({ "min": 2 })), &rate(".log.max"), "required");
    check(hyperparameters, log(json!({ "min": 1, "max": 2, "base": 0 })), &rate(".log.base"), "0");
    check(hyperparameters, log(json!({ "min": 1, "max": 400 })), &rate(".log.max"), "exponents");
    check(hyperparameters, log(json!({ "min": 1, "max": 2, "x": 0 })), &rate(".log.x"), "unknown");
    check(hyperparameters, log(json!([1])), &rate(".log"), "must be an object");
    check(hyperparameters, log(json!({ "min": "a", "max": 2 })), &rate(".log.min"), "finite");
    for count in [json!(0), json!(-1), json!(1.5), json!("2"), json!(1_u64 << 32)] {
        let range = json!({ "int": { "min": 1, "max": 2, "count": count } });
        check(hyperparameters, range, &rate(".int.count"), "at least 1");
    }
    let range = json!({ "int": { "min": 1.5, "max": 2 } });
    check(hyperparameters, range, &rate(".int.min"), "must be an integer");
    let wide = json!({ "double": { "min": -1.7e308, "max": 1.7e308 } });
    check(hyperparameters, wide, &rate(".double.max"), "too wide");
    check(hyperparameters, json!({ "categorical": [] }), &rate(".categorical"), "at least one");
    check(hyperparameters, json!({ "categorical": 3 }), &rate(".categorical"), "list");
    check(hyperparameters, json!(1_u64 << 63), &rate(""), "2^63");
    check(hyperparameters, json!(1e30), &rate(""), "even with a decimal point or an exponent");
    let nested = json!({ "categorical": [{ "a": [1_u64 << 63] }] });
    check(hyperparameters, nested, &rate(".categorical[0].a[0]"), "2^63");
}

#[test]
fn name_is_a_label_of_40_characters() {
    let long = "a".repeat(40);
    for name in ["a", "mnist-3", long.as_str()] {
        run(name, good()).unwrap();
    }
    let longer = "a".repeat(41);
    for name in ["", "3a", "a-", "-a", "A", "a.b", "a_b", "é", longer.as_str()] {
        let errors = run(name, good()).expect_err(name);
        assert_eq!(errors[0].path, "metadata.name", "{name}");
    }
}

#[test]
fn grid_search_reports_missing_counts_and_excess_points() {
    let mut spec = good();
    spec["searcher"] = json!({ "metric": "loss", "maxLength": { "batches": 1 }, "grid": {} });
    spec["hyperparameters"]["a"] = json!({ "b": { "int": { "min": 1, "max": 3 } } });
    let errors = run("x", spec.clone()).unwrap_err();
    let paths: Vec<_> = errors.iter().map(|error| error.path.as_str()).collect();
    let expected = ["spec.hyperparameters.a.b.int.count", "spec.hyperparameters.rate.log.count"];
    assert_eq!(paths, expected);
    for error in errors {
        assert!(error.rule.starts_with("is required by grid search"), "{error}");
    }
    spec["hyperparameters"]["a"]["b"]["int"]["count"] = json!(2);
    spec["hyperparameters"]["rate"]["log"]["count"] = json!(u32::MAX);
    let error = run("x", spec.clone()).unwrap_err().remove(0);
    let words = "the grid has 8589934590 points, more than 100000 trials; lower the counts";
    assert_eq!((error.path.as_str(), error.rule.as_str()), ("spec.hyperparameters", words));
    for (count, is_valid) in [(50_000, true), (50_001, false)] {
        spec["hyperparameters"]["rate"]["log"]["count"] = json!(count);
        assert_eq!(run("x", spec.clone()).is_ok(), is_valid, "{count}");
    }
    spec["hyperparameters"]["rate"]["log"]["count"] = json!(3);
    assert_eq!(run("x", spec).unwrap().method, Method::Grid { max_concurrent: 16 });
}

#[test]
fn limits_are_at_least_one() {
    let limits = json!({ "seconds": 0, "units": 5 });
    check("searcher/limits", limits, "spec.searcher.limits.seconds", "remove the field");
}

#[test]
fn all_errors_are_reported_at_once() {
    let mut spec = good();
    spec["entrypoint"]["command"] = json!([]);
    spec["hyperparameters"]["rate"]["log"]["min"] = json!(3);
    spec["schedulingUnit"] = json!(0);
    let errors = run("X", spec).unwrap_err();
    assert_eq!(errors.len(), 4, "{errors:?}");
}

#[test]
fn numbers_are_normalized_as_by_an_api_server() {
    let written = json!({ "a": 1.0, "b": [-0.0, 0.5], "c": { "const": { "d": 2e3 } },
        "e": { "int": { "min": 1.0, "max": 4, "count": 2.0 } } });
    let kept = json!({ "a": 1, "b": [0, 0.5], "c": { "const": { "d": 2000 } },
        "e": { "int": { "min": 1, "max": 4, "count": 2 } } });
    assert_eq!(Space::parse(&written).unwrap(), Space::parse(&kept).unwrap());
}

#[test]
fn derived_seeds_are_stable_31_bit_numbers() {
    assert!((0..1000).all(|id| derive_seed(&id.to_string()) < SEED_END));
    let seeds: std::collections::BTreeSet<_> =
        (0..1000).map(|id| derive_seed(&id.to_string())).collect();
    assert_eq!(seeds.len(), 1000);
    assert_eq!(derive_seed(""), SEED_OF_NOTHING);
}

/// Recorded value: existing experiments must sample the same trials again.
const SEED_OF_NOTHING: u32 = 2_056_588_020;

#[test]
fn long_values_are_shortened() {
    let error = FieldError::new("a", &json!("é".repeat(200)), "b");
    assert_eq!(error.value.chars().count(), 83);
}

#[test]
fn errors_are_formatted_with_their_value() {
    assert_eq!(FieldError::absent("a", "must be set").to_string(), "a: must be set");
    let error = FieldError::new("a", &json!("x"), "must be a number");
    assert_eq!(error.to_string(), "a: must be a number (found \"x\")");
}

#[test]
fn large_hyperparameters_are_refused_before_the_start() {
    let text = |len: usize| json!("x".repeat(len));
    let root = "spec.hyperparameters";
    // `{"rate":` and `}` or `,` of each member, and the quotes.
    let rest = r#"{"batch":"","rate":,}"#.len() + 24;
    check("hyperparameters/batch", text((16 << 10) - rest + 1), root, "16385 bytes");
    let choices = json!({ "categorical": [1, text(20_000)] });
    check("hyperparameters/batch", choices, root, "put large values into a file");

    let spec = |batch: Value| {
        let mut spec = good();
        spec["hyperparameters"]["batch"] = batch;
        serde_json::from_value(spec).unwrap()
    };
    assert!(validate("x", &spec(text((16 << 10) - rest))).is_ok());
    // A list of many values is short in each trial.
    let many: Vec<_> = (0..10_000).collect();
    assert!(validate("x", &spec(json!({ "categorical": many }))).is_ok());
    // An earlier version may have accepted more.
    assert!(validate_started("x", &spec(text(20_000))).is_ok());
}
