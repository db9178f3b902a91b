//! The packages in `examples/`: each runs to its end, and the claims of its README hold.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use stoker_tests::{describe_output, files, program, repository, stoker};

use crate::interrupted::{trials, wait_until_no_trainers};
use crate::learner::checkpoints;
use crate::local_run::{last_line, run};

/// Packages with one idea each, in the order of examples/README.md.
const EXAMPLES: [&str; 7] =
    ["first-trial", "search", "gang", "resume", "custom-loop", "transformer", "inference"];

fn example(name: &str) -> PathBuf {
    repository().join("examples").join(name)
}

fn read(path: impl AsRef<Path>) -> String {
    std::fs::read_to_string(path).unwrap()
}

/// Runs a file of an example to completion, and returns the summary.
#[track_caller]
fn complete(name: &str, file: &str, root: &Path, more: &[&str]) -> Value {
    program(&format!("example-{name}"));
    let output = run(&example(name).join(file), root, more);
    assert!(output.status.success(), "{name}: {}", describe_output(&output));
    let line = last_line(&output);
    assert_eq!(line["phase"], "Completed", "{name}: {line}");
    line
}

/// Returns the best trial's metric from a summary.
fn metric(line: &Value) -> f64 {
    line["best"]["metric"].as_f64().unwrap()
}

/// Returns the output of all ranks of a trial.
fn logs(trial: &str, root: &Path) -> String {
    let output = stoker(["trial", "logs", trial, "--root"]).arg(root).output().unwrap();
    assert!(output.status.success(), "{}", describe_output(&output));
    String::from_utf8(output.stdout).unwrap()
}

/// Returns the rest of the only line with `start`.
#[track_caller]
fn rest<'a>(text: &'a str, start: &str) -> &'a str {
    let rests = text.lines().filter_map(|line| Some(line.split_once(start)?.1));
    let rests: Vec<&str> = rests.collect();
    assert_eq!(rests.len(), 1, "{start:?} is not once in:\n{text}");
    rests[0]
}

#[test]
fn every_example_is_numbered_described_and_listed() {
    let list = read(example("README.md"));
    for name in EXAMPLES {
        assert!(list.contains(&format!("[{name}]({name}/README.md)")), "{name} is not listed");
        let numbers: Vec<u32> = read(example(name).join("src/main.rs"))
            .lines()
            .filter_map(|line| line.trim_start().strip_prefix("// ")?.split_once(". "))
            .filter_map(|(number, _)| number.parse().ok())
            .collect();
        let expected: Vec<u32> = (1..=numbers.len() as u32).collect();
        assert!(numbers.len() >= 4 && numbers == expected, "{name}: {numbers:?}");
        let page = read(example(name).join("README.md"));
        for part in ["\n## Run\n", "```sh\nstoker ", "```text\n", "\n## Copy\n"] {
            assert!(page.contains(part), "{name}: {part:?} is not in the README");
        }
    }
}

/// Only the location of the trainer differs outside of the repository.
#[test]
fn copied_manifests_need_one_new_path() {
    let from_edition = |name: &str| {
        let text = read(example(name).join("Cargo.toml"));
        let shared = &text[text.find("version = ").unwrap()..];
        shared.replace(&format!("example-{name}"), "example")
    };
    for name in EXAMPLES {
        assert_eq!(from_edition(name), from_edition(EXAMPLES[0]), "{name}");
    }
    let folder = tempfile::tempdir().unwrap();
    let name = EXAMPLES[0];
    let manifest = read(example(name).join("Cargo.toml"));
    assert_eq!(manifest.matches("../../trainer").count(), 1, "{manifest}");
    let trainer = repository().join("trainer");
    let manifest = manifest.replace("../../trainer", trainer.to_str().unwrap());
    std::fs::create_dir(folder.path().join("src")).unwrap();
    for (file, text) in [
        ("Cargo.toml", manifest),
        ("Cargo.lock", read(repository().join("Cargo.lock"))),
        ("src/main.rs", read(example(name).join("src/main.rs"))),
    ] {
        std::fs::write(folder.path().join(file), text).unwrap();
    }
    let output = Command::new(env!("CARGO"))
        .args(["tree", "--offline", "--depth", "1", "--prefix", "none"])
        .current_dir(folder.path())
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", describe_output(&output));
    assert!(describe_output(&output).contains("stoker-trainer v"), "{}", describe_output(&output));
}

#[test]
fn first_trial_learns_the_circle() {
    let root = tempfile::tempdir().unwrap();
    let line = complete("first-trial", "experiment.yaml", root.path(), &[]);
    assert!(metric(&line) > 0.9, "{line}");

    let hyperparameters = ["hidden=16", "learning_rate=0.01", "global_batch_size=32"];
    let mut alone = Command::new(program("example-first-trial"));
    alone
        .args(["--epochs", "1"])
        .args(hyperparameters.iter().flat_map(|value| ["--hparam", value]));
    let output = alone.output().unwrap();
    assert!(output.status.success(), "{}", describe_output(&output));
}

#[test]
fn search_compares_six_trials() {
    let root = tempfile::tempdir().unwrap();
    let line = complete("search", "experiment.yaml", root.path(), &[]);
    let trials = trials(root.path());
    assert_eq!(trials.len(), 6, "{trials:#?}");
    assert!(trials.values().all(|trial| trial["phase"] == "Completed"), "{trials:#?}");
    assert!(metric(&line) < 0.1, "{line}");
}

#[test]
fn gang_example_matches_one_rank() {
    let root = tempfile::tempdir().unwrap();
    let train = |slots: u32| {
        let folder = root.path().join(slots.to_string());
        let slots = format!("resources.slotsPerTrial={slots}");
        let line = complete("gang", "experiment.yaml", &folder, &["--set", &slots]);
        (metric(&line), logs("gang-0", &folder))
    };
    let ((one, log_of_one), (two, log_of_two)) = (train(1), train(2));
    assert_eq!(rest(&log_of_one, "rank 0 of 1 "), "trains 50 samples of each batch");
    assert_eq!(rest(&log_of_two, "rank 0 of 2 "), "trains 25 samples of each batch");
    assert_eq!(rest(&log_of_two, "rank 1 of 2 "), "trains 25 samples of each batch");
    assert_eq!(rest(&log_of_two, "final loss of each rank: "), format!("[{two:?}, {two:?}]"));
    assert!((one - two).abs() < 1e-6 * one && one < 0.05, "{one} {two}");
}

#[test]
fn killed_example_ends_with_the_same_loss() {
    let root = tempfile::tempdir().unwrap();
    let [calm, killed] = ["calm", "killed"].map(|name| root.path().join(name));
    complete("resume", "experiment.yaml", &calm, &[]);

    let mut command = stoker(["run", "--root"]);
    command.arg(&killed).arg(example("resume").join("experiment.yaml"));
    let mut runner = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    let deadline = Instant::now() + stoker_test_cluster::PATIENCE;
    while checkpoints(&killed).is_empty() {
        assert!(Instant::now() < deadline, "no checkpoint in time");
        std::thread::sleep(Duration::from_millis(5));
    }
    runner.kill().unwrap();
    runner.wait().unwrap();
    wait_until_no_trainers(&killed, "after the runner was killed");
    complete("resume", "experiment.yaml", &killed, &[]);

    let (_, last) = checkpoints(&killed).pop().unwrap();
    assert!(last.to_str().unwrap().ends_with("-1"), "not resumed: {last:?}");
    let [calm, killed] = [calm, killed].map(|root| logs("resume-0", &root));
    assert_eq!(rest(&killed, "final loss "), rest(&calm, "final loss "));
}

#[test]
fn gan_example_reaches_most_centers() {
    let root = tempfile::tempdir().unwrap();
    let line = complete("custom-loop", "experiment.yaml", root.path(), &[]);
    // Half of the distance between two centers. Rounding changes the result on other processors.
    assert!(metric(&line) < 0.38, "{line}");
    let trial = &trials(root.path())[&0];
    let centers = trial["metrics"]["validation_centers"].to_string();
    let centers: f64 = centers.trim_matches('"').parse().unwrap();
    assert!(centers >= 6.0, "{trial}");
}

#[test]
fn transformer_learns_and_writes() {
    let root = tempfile::tempdir().unwrap();
    let line = complete("transformer", "experiment.yaml", root.path(), &[]);
    assert!(metric(&line) < 0.5, "{line}");
    let log = logs("transformer-0", root.path());
    let (_, sample) = log.split_once("--- a sample of the model:\n").unwrap();
    assert!(sample.len() >= 200 && sample.contains("The "), "{sample}");
}

/// A local file stands in for the text at the URL.
#[test]
fn shakespeare_needs_a_verified_text() {
    let root = tempfile::tempdir().unwrap();
    let file = root.path().join("input.txt");
    let text = "Now is the winter of our discontent.\n".repeat(100);
    std::fs::write(&file, &text).unwrap();
    let sha256 = Sha256::digest(&text).iter().map(|byte| format!("{byte:02x}")).collect::<String>();
    let url = format!("data.url={}", file.display());
    let short = ["--set", "searcher.maxLength.batches=2", "--set", "maxRestarts=0", "--set", &url];
    let run_with = |sha256: &str, name: &str| {
        let sha256 = format!("data.sha256={sha256}");
        let more = [&short[..], &["--set", &sha256]].concat();
        run(&example("transformer").join("shakespeare.yaml"), &root.path().join(name), &more)
    };
    let output = run_with(&sha256, "verified");
    assert!(output.status.success(), "{}", describe_output(&output));
    let output = run_with(&"a".repeat(64), "other");
    assert!(!output.status.success(), "{}", describe_output(&output));
    let log = logs("shakespeare-0", &root.path().join("other"));
    assert!(log.contains("SHA-256"), "{log}");
}

#[test]
fn inference_example_predicts_each_row() {
    let root = tempfile::tempdir().unwrap();
    complete("inference", "experiment.yaml", root.path(), &[]);
    let folder = example("inference");
    let mut job = stoker(["job", "run", "--output", "json", "--root"]);
    let output = job.arg(root.path()).arg(folder.join("job.yaml")).arg(&folder).output().unwrap();
    assert!(output.status.success(), "{}", describe_output(&output));
    let line = last_line(&output);
    assert_eq!((&line["rows"], &line["rejected"]), (&json!(8), &json!(0)), "{line}");

    let manifest = PathBuf::from(line["manifest"].as_str().unwrap());
    let parts: Value = serde_json::from_str(&read(&manifest)).unwrap();
    let mut predictions = vec![];
    for part in parts["parts"].as_array().unwrap() {
        let text = read(manifest.with_file_name(part["name"].as_str().unwrap()));
        let rows = text.lines().skip(1).map(|row| row.rsplit_once(',').unwrap().0.to_owned());
        predictions.extend(rows);
    }
    let expected = [
        "center,true",
        "right,false",
        "top,false",
        "corner,false",
        "near,true",
        "left,true",
        "outside,false",
        "inside,true",
    ];
    assert_eq!(predictions, expected);
}

#[test]
fn examples_have_no_other_packages() {
    let manifests = files(&["examples/*/Cargo.toml"]);
    let names = manifests.iter().filter_map(|path| path.split('/').nth(1));
    let unknown: Vec<_> =
        names.filter(|name| *name != "learner" && !EXAMPLES.contains(name)).collect();
    assert!(unknown.is_empty(), "add {unknown:?} to this file and to examples/README.md");
}
