//! Tests with whole files and their errors.

mod encoding;
mod jobs;
mod legacy;
mod sets;

use serde_json::json;

use super::*;

/// A valid experiment.
const GOOD: &str = "\
apiVersion: stoker.dev/v1alpha1
kind: Experiment
metadata:
  name: mnist
spec:
  entrypoint: {command: [train, mnist]}
  hyperparameters:
    rate: {log: {min: -4, max: -1}}
    batch: 64
  searcher:
    metric: val_loss
    maxLength: {epochs: 3}
    random: {maxTrials: 4}
";

fn load_text(text: &str, sets: &[&str]) -> Result<Loaded, FileError> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("My file.yaml");
    std::fs::write(&path, text).unwrap();
    let sets: Vec<_> = sets.iter().map(|set| (*set).to_owned()).collect();
    load_for_cluster(&path, &sets)
}

#[test]
fn labels_of_local_files_are_only_noted() {
    let text = GOOD.replacen("name: mnist", "name: a\n  labels: {team: data science}", 1);
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("experiment.yaml");
    std::fs::write(&path, text).unwrap();
    let loaded = load(&path, &[]).unwrap();
    assert_eq!(loaded.metadata.labels["team"], "data science");
    let [note] = &loaded.notes[..] else { panic!("{:?}", loaded.notes) };
    assert!(note.starts_with("note: a cluster refuses metadata.labels.team: must"), "{note}");
    let error = load_for_cluster(&path, &[]).unwrap_err();
    assert_eq!(error.problems[0].field, "metadata.labels.team");
}

#[test]
fn many_trials_at_once_of_local_files_are_noted() {
    let method = "random: {maxTrials: 20001, maxConcurrentTrials: 0}";
    let text = GOOD.replacen("random: {maxTrials: 4}", method, 1);
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("experiment.yaml");
    std::fs::write(&path, text).unwrap();
    let loaded = load(&path, &[]).unwrap();
    let field = "spec.searcher.random.maxConcurrentTrials";
    let start = format!("note: a cluster refuses {field}: lets the search create 20001");
    assert!(loaded.notes.iter().any(|note| note.starts_with(&start)), "{:?}", loaded.notes);
    let error = load_for_cluster(&path, &[]).unwrap_err();
    assert_eq!(error.problems[0].field, field);
}

/// Checks that each error starts with `LINE:COLUMN: FIELD` and contains the words of its row.
fn check_errors(text: &str, sets: &[&str], expected: &[(&str, &str)]) {
    let error = load_text(text, sets).expect_err(text);
    let problems: Vec<_> = error.problems.iter().map(ToString::to_string).collect();
    assert_eq!(problems.len(), expected.len(), "{text}\n{problems:#?}");
    for (problem, (start, words)) in problems.iter().zip(expected) {
        assert!(
            problem.starts_with(start) && problem.contains(words),
            "{problem}\n{start} {words}"
        );
    }
}

/// Checks the errors of the valid file with `from` replaced by `to`.
fn check_change(from: &str, to: &str, expected: &[(&str, &str)]) {
    assert!(GOOD.contains(from), "{from}");
    check_errors(&GOOD.replacen(from, to, 1), &[], expected);
}

/// A text of the file, its replacement, and the start and a part of each error.
type Case = (&'static str, &'static str, &'static [(&'static str, &'static str)]);

#[test]
fn valid_file_is_loaded_with_defaults() {
    let loaded = load_text(GOOD, &[]).unwrap();
    assert_eq!((loaded.name.as_str(), loaded.namespace.as_str()), ("mnist", "default"));
    assert_eq!(loaded.valid.units_max, 3);
    assert_eq!(loaded.spec_json["searcher"]["random"]["maxConcurrentTrials"], 16);
    assert!(loaded.notes.is_empty());
}

#[test]
fn comments_are_allowed_anywhere() {
    let text = GOOD.replace('\n', " # a word\n# a line\n");
    assert_eq!(load_text(&text, &[]).unwrap().name, "mnist");
}

/// Changes of the valid file, with their errors.
const INVALID_CHANGES: &[Case] = &[
    (
        "stoker.dev/v1alpha1",
        "stoker.dev/v2",
        &[("1:1: apiVersion:", "must be stoker.dev/v1alpha1 (found \"stoker.dev/v2\")")],
    ),
    ("kind: Experiment", "kind: Experimant", &[("2:1: kind:", "must be Experiment or Inference")]),
    ("kind: Experiment", "kind: InferenceJob", &[("2:1: kind:", "use `stoker job run`")]),
    ("kind: Experiment\n", "", &[("1:1: kind:", "required and missing")]),
    ("name: mnist", "name: 7", &[("4:3: metadata.name:", "must be a string")]),
    ("name: mnist", "name: MNIST", &[("4:3: metadata.name:", "letters")]),
    ("name: mnist", "name: a\n  namespace: A_b", &[("5:3: metadata.namespace:", "63")]),
    (
        "name: mnist",
        "name: a\n  labels: {a b: c, team: [x]}",
        &[
            ("5:12: metadata.labels[\"a b\"]:", "the key must be NAME"),
            ("5:20: metadata.labels.team:", "must be a string"),
        ],
    ),
    ("name: mnist", "name: a\n  generateName: b", &[("5:3: metadata.generateName:", "unknown")]),
    (
        "metric:",
        "metricc:",
        &[
            ("10:3: spec.searcher.metric:", "is required and missing"),
            ("11:5: spec.searcher.metricc:", "did you mean `metric`? (found \"val_loss\")"),
        ],
    ),
    (
        "epochs: 3",
        "epochs: 0",
        &[("12:17: spec.searcher.maxLength.epochs:", "at least 1 (found 0)")],
    ),
    ("epochs: 3", "epochs: three", &[("12:17: spec.searcher.maxLength.epochs:", "an integer")]),
    ("epochs: 3", "epochs: 3.5", &[("12:17: spec.searcher.maxLength.epochs:", "an integer")]),
    (
        "epochs: 3",
        "epochs: 3, batches: 1",
        &[("12:5: spec.searcher.maxLength:", "batches and epochs are")],
    ),
    (
        "epochs: 3",
        "epoch: 3",
        &[("12:17: spec.searcher.maxLength.epoch:", "did you mean `epochs`?")],
    ),
    // Not similar to `records`.
    (
        "  searcher:",
        "  minCheckpointPeriod: {seconds: 9}\n  searcher:",
        &[("10:25: spec.minCheckpointPeriod.seconds:", "records, batches or epochs, not a time")],
    ),
    ("random: {maxTrials: 4}", "random: 4", &[("13:5: spec.searcher.random:", "an object")]),
    ("random: {maxTrials: 4}", "random:", &[("13:5: spec.searcher.random:", "has no value; give")]),
    (
        "random: {maxTrials: 4}",
        "single:",
        &[("13:5: spec.searcher.single:", "has no value; write `single: {}`")],
    ),
    ("random:", "randm:", &[("13:5: spec.searcher.randm:", "did you mean `random`?")]),
    ("epochs: 3", "epochs: ", &[("12:17: spec.searcher.maxLength.epochs:", "has no value; give")]),
    (
        "maxTrials: 4",
        "maxTrials: 5000000000",
        &[("13:14: spec.searcher.random.maxTrials:", "at most")],
    ),
    (
        "random: {maxTrials: 4}",
        "grid: {}",
        &[("8:12: spec.hyperparameters.rate.log.count:", "rate")],
    ),
    (
        "random: {maxTrials: 4}",
        "grid: {}\n    single: {}",
        &[("10:3: spec.searcher:", "single and grid are")],
    ),
    // These would also break rules with the values that replace wrong ones.
    (
        "random: {maxTrials: 4}",
        "pbt: {populationSize: 4, numRounds: x, lengthPerRound: {epochs: 2}}",
        &[("13:30: spec.searcher.pbt.numRounds:", "an integer")],
    ),
    (
        "random: {maxTrials: 4}",
        "asyncHalving: {maxTrials: 4, divisor: x, numRungs: 9}",
        &[("13:34: spec.searcher.asyncHalving.divisor:", "an integer")],
    ),
    (
        "random: {maxTrials: 4}",
        "asyncHalving: {maxTrials: 4, divisor: 1, numRungs: 9}",
        &[("13:34: spec.searcher.asyncHalving.divisor:", "at least 2")],
    ),
    (
        "spec:\n",
        "spec:\n  resources: {slotsPerTrial: x, slotsPerPod: 3}\n",
        &[("6:15: spec.resources.slotsPerTrial:", "an integer")],
    ),
    (
        "spec:\n",
        "spec:\n  resources: {slotsPerTrial: 0, slotsPerPod: 3}\n",
        &[("6:15: spec.resources.slotsPerTrial:", "at least 1")],
    ),
    ("min: -4", "min: 4", &[("8:18: spec.hyperparameters.rate.log.min:", "less than max")]),
    (
        "min: -4",
        "minn: -4",
        &[
            ("8:12: spec.hyperparameters.rate.log.min:", "required"),
            ("8:18: spec.hyperparameters.rate.log.minn:", "unknown field"),
        ],
    ),
    ("batch: 64", "batch: 9223372036854775808", &[("9:12: spec.hyperparameters.batch:", "2^63")]),
    ("batch: 64", "batch: .nan", &[("9:12: spec.hyperparameters.batch:", "finite")]),
    ("batch: 64", "batch: yes", &[("9:12: spec.hyperparameters.batch:", "write true or false")]),
    (
        "batch: 64",
        "batch: 64\n    batch: 65",
        &[("10:5: spec.hyperparameters.batch:", "first in line 9")],
    ),
    ("batch: 64", "3: 64", &[("9:5: spec.hyperparameters:", "a key must be a string")]),
    ("batch: 64", "<<: {a: 1}", &[("9:5: spec.hyperparameters:", "merge keys")]),
    ("batch: 64", "batch: !odd 64", &[("9:17: spec.hyperparameters.batch:", "tags")]),
    ("batch: 64", "batch: !!int \"6\"", &[("9:", "remove the tag")]),
    ("batch: 64", "batch: 0_64", &[("9:12: spec.hyperparameters.batch:", "leading zeros")]),
    ("batch: 64", "y: 64", &[("9:5: spec.hyperparameters", "put it in quotes")]),
    ("[train, mnist]", "[]", &[("6:16: spec.entrypoint.command:", "must name the program to run")]),
    ("val_loss", "''", &[("11:5: spec.searcher.metric:", "metric that ranks trials (found \"\")")]),
    (
        "val_loss",
        "loss\n    limits: {seconds: 0}",
        &[("12:14: spec.searcher.limits.seconds:", "at least 1; remove the field for no limit")],
    ),
    (
        "[train, mnist]",
        "train",
        &[("6:16: spec.entrypoint.command:", "a list, such as [train] (found \"train\")")],
    ),
    (
        "[train, mnist]",
        "./train --x",
        &[("6:16: spec.entrypoint.command:", "must be a list, such as [./train, --x]")],
    ),
    (
        "spec:\n",
        "spec:\n  env: {A: b}\n",
        &[("6:3: spec.env:", "must be a list, such as [{name: A, value: b}]")],
    ),
    (
        "{epochs: 3}",
        "2",
        &[("12:5: spec.searcher.maxLength:", "must be a length, such as { epochs: 2 }")],
    ),
    (
        "epochs: 3",
        "epochs: \"3\"",
        &[("12:17: spec.searcher.maxLength.epochs:", "must be an integer; remove the quotes")],
    ),
    ("spec:\n", "spec:\n  description: [a]\n", &[("6:3: spec.description:", "a string (found")]),
    ("[train, mnist]", "[train, 7]", &[("6:33: spec.entrypoint.command[1]:", "put it in quotes")]),
    ("spec:\n", "spec:\n  maxRestarts: -1\n", &[("6:3: spec.maxRestarts:", "at least 0")]),
    ("spec:\n", "spec:\n  checkpointPolicy: bset\n", &[("6:3: spec.checkpointPolicy:", "`best`")]),
    (
        "spec:\n",
        "spec:\n  env: [{name: A, value: 1}]\n",
        &[("6:19: spec.env[0].value:", "a string")],
    ),
    (
        "spec:\n",
        "spec:\n  performInitialValidation: 1\n",
        &[("6:3: spec.perform", "true or false")],
    ),
    (
        "    random",
        "---\n    random",
        &[("10:3: spec.searcher:", "none is"), ("14:5: ", "a second document")],
    ),
];

#[test]
fn errors_have_position_field_value_and_rule() {
    for (from, to, expected) in INVALID_CHANGES {
        check_change(from, to, expected);
    }
}

#[test]
fn invalid_yaml_is_refused_with_its_position() {
    check_change("  name: mnist", "\tname: mnist", &[("4:", "; indent with spaces instead of")]);
    let unclosed = "bracket or a quote above may not be closed";
    check_change(
        "entrypoint: {command: [train, mnist]}",
        "entrypoint:\n    command: [train, mnist",
        &[("8:18:", unclosed)],
    );
    check_change("[train, mnist]", "[train, mnist", &[("", "invalid YAML")]);
    check_errors("# no object\n\n", &[], &[("1:1: ", "the file is empty")]);
    check_errors("- 1\n", &[], &[("1:1: ", "must be an object")]);
    check_change(
        "batch: 64",
        "batch: &a [*a]",
        &[("9:16: spec.hyperparameters.batch[0]:", "alias")],
    );
}

#[test]
fn aliases_are_expanded_within_limits() {
    let aliased = GOOD.replace("batch: 64", "batch: &b [1, 2]\n    again: *b");
    let loaded = load_text(&aliased, &[]).unwrap();
    assert_eq!(loaded.spec_json["hyperparameters"]["again"], json!([1, 2]));

    let mut bomb = String::from("l0: &l0 [x, x, x, x, x, x, x, x, x, x]\n");
    for level in 1..9 {
        let below = format!("*l{}, ", level - 1).repeat(10);
        bomb.push_str(&format!("l{level}: &l{level} [{below}]\n"));
    }
    check_errors(&bomb, &[], &[("", "more than 100000 values")]);
}

#[test]
fn all_errors_are_reported_sorted_by_line() {
    let text = GOOD
        .replace("name: mnist", "name: MNIST")
        .replace("min: -4", "min: 4")
        .replace("metric:", "metricc:")
        .replace("epochs: 3", "epochs: 0")
        .replace("maxTrials: 4", "maxTrials: 0");
    let expected = [
        ("4:3: metadata.name", ""),
        ("8:18: spec.hyperparameters.rate.log.min", ""),
        ("10:3: spec.searcher.metric", ""),
        ("11:5: spec.searcher.metricc", ""),
        ("12:17: spec.searcher.maxLength.epochs", ""),
        ("13:14: spec.searcher.random.maxTrials", ""),
    ];
    check_errors(&text, &[], &expected);
}

#[test]
fn errors_are_formatted_as_text_and_json() {
    let error = load_text(&GOOD.replace("epochs: 3", "epochs: 0"), &[]).unwrap_err();
    let text = error.to_string();
    let ending = "My file.yaml:12:17: spec.searcher.maxLength.epochs: must be at least 1 (found 0)";
    assert!(text.ends_with(ending), "{text}");
    let expected = json!([{
        "line": 12, "column": 17, "field": "spec.searcher.maxLength.epochs", "value": "0",
        "rule": "must be at least 1",
    }]);
    assert_eq!(json!(error), expected);
    let missing = load(Path::new("/nowhere/x.yaml"), &[]).unwrap_err().to_string();
    assert!(missing.starts_with("/nowhere/x.yaml: cannot be read"), "{missing}");
}

#[test]
fn long_texts_are_refused_like_on_a_cluster() {
    let url = |len: usize| format!("http://a/{}", "x".repeat(len - 9));
    let external = |len| GOOD.replace("random: {", &format!("external: {{url: {}, ", url(len)));
    load_text(&external(1024), &[]).unwrap();
    let expected = ("13:16: spec.searcher.external.url:", "must have at most 1024");
    check_errors(&external(1025), &[], &[expected]);
}

/// A file in Determined's format.
const LEGACY: &str = "\
description: My MNIST!
entrypoint: python3 train.py
hyperparameters:
  rate: {type: log, minval: -4, maxval: -1, base: 10}
  layers: {width: {type: int, minval: 8, maxval: 64}, act: relu}
  opt: {type: categorical, vals: [adam, sgd]}
  batch: {type: const, val: 64}
searcher:
  name: random
  metric: val_loss
  max_trials: 5
  max_length: {batches: 900}
min_validation_period: {batches: 100}
min_checkpoint_period: {batches: 0}
resources: {slots_per_trial: 0}
environment: {environment_variables: [A=1, B=2=3, A=4]}
checkpoint_storage: {type: s3, bucket: b, prefix: /p/q, save_trial_best: 2}
profiling: {enabled: false}
project: x
";

/// A valid inference job.
const GOOD_JOB: &str = "\
apiVersion: stoker.dev/v1alpha1
kind: InferenceJob
metadata:
  name: species
spec:
  entrypoint: {command: [infer]}
  checkpoint: {trial: iris-0}
  input: {url: rows.csv}
  shardRows: 10
";
