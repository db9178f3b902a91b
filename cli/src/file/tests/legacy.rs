//! Tests of files in Determined's format: translated and refused fields.

use super::*;

#[test]
fn determined_file_is_translated() {
    let loaded = load_text(LEGACY, &["searcher.max_trials=6"]).unwrap();
    assert_eq!(loaded.name, "my-mnist");
    let spec = &loaded.spec_json;
    assert_eq!(spec["entrypoint"]["command"], json!(["sh", "-c", "python3 train.py"]));
    let hyperparameters = json!({
        "rate": { "log": { "base": 10, "min": -4, "max": -1 } },
        "layers": { "width": { "int": { "min": 8, "max": 64 } }, "act": "relu" },
        "opt": { "categorical": ["adam", "sgd"] },
        "batch": { "const": 64 },
    });
    assert_eq!(spec["hyperparameters"], hyperparameters);
    assert_eq!(spec["searcher"]["random"]["maxTrials"], 6);
    assert_eq!(spec["searcher"]["maxLength"], json!({ "batches": 900 }));
    assert_eq!(spec["minValidationPeriod"], json!({ "batches": 100 }));
    assert!(spec.get("minCheckpointPeriod").is_none());
    assert_eq!(spec["resources"]["slotsPerTrial"], 1);
    let env = json!([{ "name": "B", "value": "2=3" }, { "name": "A", "value": "4" }]);
    assert_eq!(spec["env"], env);
    assert_eq!(spec["checkpointStorage"]["url"], "s3://b/p/q");
    let notes = loaded.notes.join("\n");
    for words in ["description -> metadata.name: my-mnist", "project: ignored", "s3://b/p/q"] {
        assert!(notes.contains(words), "{words}\n{notes}");
    }
}

#[test]
fn sets_of_the_name_field_rename_the_object() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("e.yaml");
    for text in [GOOD, LEGACY] {
        std::fs::write(&path, text).unwrap();
        let set = format!("{}=other", name_field(&path));
        assert_eq!(load(&path, &[set]).unwrap().name, "other", "{text}");
    }
}

#[test]
fn determineds_launchers_are_left_out() {
    let check = |entrypoint: &str, expected: Value| {
        let text = LEGACY.replace("python3 train.py", entrypoint);
        let loaded = load_text(&text, &[]).unwrap();
        assert_eq!(loaded.spec_json["entrypoint"]["command"], expected, "{entrypoint}");
        let notes = loaded.notes.join("\n");
        assert!(notes.contains("without determined.launch.t"), "{notes}");
    };
    let launcher = "python3 -m determined.launch.tensorflow";
    check(&format!("{launcher} -- python3 train.py"), json!(["python3", "train.py"]));
    let shell = format!("{launcher} train  a | tee b");
    check(&shell, json!(["sh", "-c", "train  a | tee b"]));
    let words = "[python3, -m, determined.launch.torch_distributed, --nnodes=2, --, train, $x]";
    check(words, json!(["train", "$x"]));
}

/// Without `type`, the names of parameters are those of groups.
#[test]
fn groups_of_constants_stay_constant() {
    let check = |group: &str, expected: Value| {
        let text = LEGACY.replace("opt: {type: categorical, vals: [adam, sgd]}", group);
        let spec = load_text(&text, &[]).unwrap().spec_json;
        assert_eq!(spec["hyperparameters"]["opt"], expected, "{group}");
    };
    check("opt: {categorical: [1, 2]}", json!({ "const": { "categorical": [1, 2] } }));
    check("opt: {const: 7}", json!({ "const": { "const": 7 } }));
    let log = json!({ "log": { "base": 10, "min": -3, "max": -1 } });
    check("opt: {log: {base: 10, min: -3, max: -1}}", json!({ "const": log }));
    check(
        "opt: {a: {int: {b: 1}}, c: 2}",
        json!({ "a": { "const": { "int": { "b": 1 } } }, "c": 2 }),
    );
}

#[test]
fn optimizations_of_determined_are_translated() {
    let check = |fields: &str, expected: serde_json::Value| {
        let loaded = load_text(&format!("{LEGACY}optimizations: {fields}\n"), &[]).unwrap();
        for (name, expected) in expected.as_object().unwrap() {
            let translated = &loaded.spec_json["optimizations"][name];
            assert_eq!(translated, expected, "{fields}: {:?}", loaded.notes);
        }
    };
    check("{gradient_compression: true}", json!({ "gradientCompression": "f16" }));
    let none = json!({ "gradientCompression": "none", "mixedPrecision": "none" });
    check("{gradient_compression: false, mixed_precision: O0}", none);
    check("{mixed_precision: O2}", json!({ "mixedPrecision": "bf16" }));
    let summed = json!({ "aggregationFrequency": 2, "averageAggregatedGradients": false });
    check("{aggregation_frequency: 2, average_aggregated_gradients: false}", summed);
}

#[test]
fn optimizations_with_other_effects_are_noted() {
    let check = |fields: &str, note: &str| {
        let loaded = load_text(&format!("{LEGACY}optimizations: {fields}\n"), &[]).unwrap();
        let count = loaded.notes.iter().filter(|line| line.starts_with(note)).count();
        assert_eq!(count, 1, "{note}: {:?}", loaded.notes);
    };
    let path = "optimizations.average_training_metrics";
    let note = format!("{path}: ignored, metrics are always over all ranks");
    check("{average_training_metrics: false}", &note);
    check("{average_training_metrics: true}", &note);
    let path = "optimizations.gradient_compression";
    let note = format!("{path} -> spec.optimizations.gradientCompression: f16");
    check("{gradient_compression: true}", &note);
}

#[test]
fn fields_that_change_no_result_are_left_out() {
    let check = |line: &str, expected: &[&str]| {
        let text = LEGACY.replace("project: x", line);
        let loaded = load_text(&text, &[]).unwrap();
        for words in expected {
            let count = loaded.notes.iter().filter(|note| note.starts_with(words)).count();
            assert_eq!(count, 1, "{words}: {:?}", loaded.notes);
        }
        let notes = loaded.notes.join("\n");
        assert!(!notes.contains("hunter2"), "{notes}");
        assert!(!notes.contains("profiling"), "{notes}");
    };
    check("log_policies: [{pattern: hunter2}]", &["log_policies: ignored, lines of the log"]);
    check("retention_policy: {log_retention_days: 9}", &["retention_policy: ignored, logs are"]);
    check("integrations: {pachyderm: {token: hunter2}}", &["integrations: ignored, no other"]);
    check("data_layer: {type: s3, secret_key: hunter2}", &["data_layer: ignored, each machine"]);
    check("slurm: {slots_per_node: 2}", &["slurm: ignored, Slurm"]);
    let file = "optimizations.grad_updates_size_file: ignored, it tunes Horovod";
    check("optimizations: {grad_updates_size_file: a.json}", &[file]);
    let text = LEGACY.replace("profiling: {enabled: false}", "profiling: {enabled: true}");
    let text = text.replace("slots_per_trial: 0", "slots_per_trial: 1, max_slots: 4, weight: 2");
    let notes = load_text(&text, &[]).unwrap().notes.join("\n");
    for words in ["profiling: ignored, the program", "max_slots: ignored", "weight: ignored"] {
        assert!(notes.contains(words), "{words}\n{notes}");
    }
}

#[test]
fn steps_of_0_12_are_batches() {
    let text = "\
searcher: {name: single, metric: loss, max_steps: 20}
entrypoint: [train, x]
min_validation_period: 3
";
    let spec = load_text(text, &[]).unwrap().spec_json;
    assert_eq!(spec["searcher"]["maxLength"], json!({ "batches": 2000 }));
    assert_eq!(spec["minValidationPeriod"], json!({ "batches": 300 }));
    let loaded = load_text(&format!("{text}batches_per_step: 10\n"), &[]).unwrap();
    assert_eq!(loaded.name, "my-file");
    assert_eq!(loaded.spec_json["searcher"]["maxLength"], json!({ "batches": 200 }));
}

#[test]
fn searchers_that_stop_trials_early_keep_their_fields() {
    let check = |searcher: &str, expected: Value| {
        let text = format!(
            "entrypoint: [train]\n\
             searcher: {{metric: loss, max_length: {{epochs: 64}}, {searcher}}}\n"
        );
        let loaded = load_text(&text, &[]).unwrap();
        let (method, fields) = expected.as_object().unwrap().iter().next().unwrap();
        for (name, value) in fields.as_object().unwrap() {
            assert_eq!(loaded.spec_json["searcher"][method][name], *value, "{searcher}");
        }
    };
    check(
        "name: adaptive_asha, max_trials: 64, mode: aggressive, max_rungs: 3",
        json!({ "adaptiveAsha": { "maxTrials": 64, "mode": "aggressive", "maxRungs": 3 } }),
    );
    check(
        "name: async_halving, max_trials: 9, num_rungs: 2, divisor: 3, stop_once: true",
        json!({
            "asyncHalving": { "maxTrials": 9, "numRungs": 2, "divisor": 3, "stopOnce": true },
        }),
    );
    check(
        "name: sync_halving, num_rungs: 2, budget: {epochs: 640}, train_stragglers: true",
        json!({ "syncHalving": { "numRungs": 2, "budget": { "epochs": 640 } } }),
    );
    check(
        "name: adaptive_simple, max_trials: 20",
        json!({ "adaptiveSimple": { "maxTrials": 20 } }),
    );
}

/// A length without a unit is the program's own count, and a metric may measure it.
#[test]
fn lengths_without_a_unit_are_units() {
    let check = |searcher: &str, expected: Value| {
        let text = format!("entrypoint: [train]\nsearcher: {{metric: loss, {searcher}}}\n");
        let spec = load_text(&text, &[]).unwrap().spec_json;
        for (path, value) in expected.as_object().unwrap() {
            assert_eq!(spec["searcher"].pointer(path), Some(value), "{searcher}: {path}");
        }
    };
    check("name: single, max_length: 900", json!({ "/maxLength": { "units": 900 } }));
    check(
        "name: sync_halving, num_rungs: 2, max_length: 9, budget: 90",
        json!({ "/maxLength": { "units": 9 }, "/syncHalving/budget": { "units": 90 } }),
    );
    check(
        "name: adaptive_asha, max_trials: 9, time_metric: env_steps, max_time: 64",
        json!({
            "/maxLength": { "units": 64 }, "/timeMetric": "env_steps",
            "/adaptiveAsha/stopOnce": true,
        }),
    );
    check(
        "name: async_halving, max_trials: 9, num_rungs: 2, stop_once: false, time_metric: epochs, \
         max_time: 64",
        json!({ "/maxLength": { "epochs": 64 }, "/asyncHalving/stopOnce": false }),
    );
    check(
        "name: single, time_metric: batches, max_time: 64",
        json!({
            "/maxLength": { "batches": 64 },
        }),
    );
}

#[test]
fn population_is_translated_with_its_functions() {
    let text = |searcher: &str| {
        format!("entrypoint: [train]\nsearcher: {{metric: loss, name: pbt, {searcher}}}\n")
    };
    let functions = "replace_function: {truncate_fraction: 0.25}, \
                     explore_function: {resample_probability: 0.1, perturb_factor: 0.3}";
    let rounds = "population_size: 20, num_rounds: 8";
    let loaded =
        load_text(&text(&format!("{rounds}, length_per_round: {{epochs: 5}}, {functions}")), &[]);
    let expected = json!({
        "populationSize": 20, "numRounds": 8, "lengthPerRound": { "epochs": 5 },
        "truncateFraction": 0.25, "resampleProbability": 0.1, "perturbFactor": 0.3,
    });
    let spec = loaded.unwrap().spec_json;
    assert_eq!(spec["searcher"]["pbt"], expected);
    assert_eq!(spec["searcher"]["maxLength"], json!({ "epochs": 40 }));
    let steps = load_text(&text(&format!("{rounds}, steps_per_round: 3")), &[]).unwrap();
    let length = json!({ "batches": 300 });
    assert_eq!(steps.spec_json["searcher"]["pbt"]["lengthPerRound"], length);
    let length = "length_per_round: {epochs: 5}";
    for (fields, rule) in [
        (
            "replace_function: {truncate_fraction: 0.7}",
            "replace_function.truncate_fraction: must be from 0 to",
        ),
        ("explore_function: {perturb: 0.7}", "explore_function.perturb: is unknown"),
        ("max_length: {epochs: 5}", r#"searcher.max_length: must be {"epochs":40}"#),
    ] {
        let error = load_text(&text(&format!("{rounds}, {length}, {fields}")), &[]).unwrap_err();
        assert!(error.to_string().contains(rule), "{error}");
    }
}

/// Changes of [`LEGACY`] and their errors.
const REFUSED: &[Case] = &[
    ("name: random", "name: custom", &[("9:3: searcher.name:", "supported; use one of single")]),
    ("name: random", "name: rondom", &[("9:3: searcher.name:", "must be one of single")]),
    ("type: int", "type: itn", &[("5:20: hyperparameters.layers.width.type:", "one of const")]),
    ("minval: 8", "minval: 88", &[("5:31: hyperparameters.layers.width.minval:", "max")]),
    (
        "minval: 8",
        "minvall: 8",
        &[
            ("5:12: hyperparameters.layers.width.minval:", "is required"),
            ("5:31: hyperparameters.layers.width.minvall:", "did you mean `minval`?"),
        ],
    ),
    ("python3 train.py", "model_def:Trial", &[("2:1: entrypoint:", "Python class")]),
    (
        "python3 train.py",
        "python3 -m determined.launch.horovod --trial model_def:Trial",
        &[("2:1: entrypoint:", "Python class")],
    ),
    (
        "python3 train.py",
        "cd a && python3 -m determined.launch.tensorflow train",
        &[("2:1: entrypoint:", "set the program that the launcher starts")],
    ),
    (
        "max_length: {batches: 900}",
        "max_time: 900",
        &[("12:3: searcher.max_time:", "requires searcher.time_metric")],
    ),
    (
        "max_length: {batches: 900}",
        "time_metric: steps",
        &[("12:3: searcher.time_metric:", "requires searcher.max_time")],
    ),
    (
        "project: x",
        "bind_mounts: [{host_path: /a}]",
        &[("19:1: bind_mounts:", "spec.pod.volumeMounts in a Stoker file, or remove the field")],
    ),
    ("project: x", "projcet: x", &[("19:1: projcet:", "did you mean `project`?")]),
    ("project: x", "foo: false", &[("19:1: foo:", "unknown field")]),
    ("slots_per_trial: 0", "shm_size: 3", &[("15:13: resources.shm_size:", "resources.shmSize")]),
    (
        "bucket: b",
        "bucket: b, secret_key: xyz",
        &[("17:43: checkpoint_storage.secret_key:", "environment")],
    ),
    ("bucket: b, ", "", &[("17:22: checkpoint_storage.type:", "bucket")]),
    ("max_trials: 5", "max_trials: 0", &[("11:3: searcher.max_trials:", "at least 1")]),
    (
        "type: s3, bucket: b",
        "type: directory, container_path: /c",
        &[("17:59: checkpoint_storage.prefix:", "no counterpart")],
    ),
    (
        "opt: {type: categorical, vals: [adam, sgd]}",
        "opt: {int: {type: int, minval: 1, maxval: 3}}",
        &[("6:9: hyperparameters.opt.int:", "`int` is reserved")],
    ),
    (
        "max_trials: 5",
        "mode: x",
        &[("9:3: searcher.max_trials:", "is required"), ("11:3: searcher.mode:", "no counterpart")],
    ),
    ("project: x", "max_restarts: x", &[("19:1: max_restarts:", "an integer (found")]),
    ("A=4]", "1A=4]", &[("16:", "environment.environment_variables[2]: must consist of")]),
    (
        "max_length: {batches: 900}",
        "max_length: {batches: 0}",
        &[("12:16: searcher.max_length.batches:", "at least 1")],
    ),
];

#[test]
fn fields_without_counterpart_are_refused() {
    for (from, to, expected) in REFUSED {
        assert!(LEGACY.contains(from), "{from}");
        check_errors(&LEGACY.replacen(from, to, 1), &[], expected);
    }
    let secret = LEGACY.replace("bucket: b", "bucket: b, secret_key: xyz");
    assert!(!load_text(&secret, &[]).unwrap_err().to_string().contains("xyz"));
}

#[test]
fn errors_of_old_files_show_no_credential() {
    let lines = [
        "environment: {registry_auth: {username: me, password: hunter2}}",
        "environment: {registry_auth: {password: hunter2, password: hunter2}}",
        "environment: {registry_auth: {password: !odd hunter2}}",
        "environment: {registry_auth: hunter2}",
        "environment: {registry_authh: {auth: hunter2}}",
        "environment: {image: {cpu: a, password: hunter2}}",
        "environment: {environment_variables: [PASSWORD hunter2]}",
        "environment: {environment_variables: {cpu: [PASSWORD=hunter2]}}",
        "environment: {environment_variables: [{PASSWORD: hunter2}]}",
        "environment: {pod_spec: {spec: {containers: [{env: [{value: hunter2}]}]}}}",
        "checkpoint_storage: {type: s3, bucket: b, access_key: a, secret_key: hunter2}",
        "checkpoint_storage: {type: s3, bucket: b, acess_kye: hunter2}",
        "checkpoint_storage: {type: azure, container: c, connection_string: hunter2}",
        "checkpoint_storage: {type: {secret_key: hunter2}}",
        "checkpoint_storage: [hunter2]",
        "tensorboard_storage: {type: s3, secret_key: hunter2}",
        "integrations: {pachyderm: {token: hunter2}}",
        "security: {ssh: {rsa: hunter2}}",
        "bind_mounts: [{host_path: hunter2}]",
        "api_token: hunter2",
        "data: {secrets: {key: hunter2}}",
        "data: {secrets: hunter2}",
        "data: {secrets: {key: hunter2, key: hunter2}}",
        // The file cannot be parsed completely, so its format is unknown.
        "environment: {registry_auth: {password: !odd hunter2}, [",
    ];
    for line in lines {
        let text = format!("searcher: {{name: single, metric: m, max_steps: 1}}\n{line}\n");
        let error = load_text(&text, &[]).unwrap_err();
        let (text, json) = (error.to_string(), json!(error).to_string());
        assert!(!text.contains("hunter2") && !json.contains("hunter2"), "{line}\n{text}");
    }
    let sets = ["environment.registry_auth.password=[hunter2", "environment.a.token.b=hunter2"];
    for set in sets {
        let error = load_text(LEGACY, &[set]).unwrap_err().to_string();
        assert!(!error.contains("hunter2"), "{set}\n{error}");
    }
    // A credential on which YAML parsers disagree.
    let text = LEGACY.replace("bucket: b", "bucket: b, secret_key: 0123456");
    let error = load_text(&text, &[]).unwrap_err().to_string();
    assert!(error.contains("secret_key") && !error.contains("0123456"), "{error}");
}

#[test]
fn secrets_in_data_are_refused_with_a_remedy() {
    let remedy = &[("19:8: data.secrets:", "name a Secret in spec.pod.envFromSecrets")];
    check_errors(&LEGACY.replace("project: x", "data: {secrets: {key: x}}"), &[], remedy);
    let text = LEGACY.replace("project: x", "data: {secrets: {}, url: here}");
    let data = &load_text(&text, &[]).unwrap().spec_json["data"];
    assert_eq!(data, &json!({ "url": "here" }));
}
