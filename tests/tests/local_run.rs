//! End-to-end runs of `stoker run` on real data: from an experiment file to the best trial.

use std::path::Path;
use std::process::Output;

use serde_json::Value;
use stoker_tests::{describe_output, has_data, program, repository, stoker};

/// Runs an experiment file to completion.
pub(crate) fn run(file: &Path, root: &Path, more: &[&str]) -> Output {
    stoker(["run", "--output", "json", "--root"]).arg(root).arg(file).args(more).output().unwrap()
}

/// Parses the last line that `stoker run --output json` printed.
pub(crate) fn last_line(output: &Output) -> Value {
    let text = String::from_utf8_lossy(&output.stdout);
    let line =
        text.lines().last().unwrap_or_else(|| panic!("no output: {}", describe_output(output)));
    serde_json::from_str(line)
        .unwrap_or_else(|error| panic!("{error}: {}", describe_output(output)))
}

/// Trains an example and checks that the best trial's searched metric is at least `accuracy`.
#[track_caller]
fn check(file: &str, accuracy: f64) {
    let data = file.split('/').next().unwrap();
    if !has_data(data) {
        return;
    }
    program("stoker-trainer");
    let root = tempfile::tempdir().unwrap();
    let output = run(&repository().join("examples").join(file), root.path(), &[]);
    assert!(output.status.success(), "{file}: {}", describe_output(&output));
    let line = last_line(&output);
    assert_eq!(line["phase"], "Completed", "{file}: {line}");
    let metric: f64 = line["best"]["metric"].as_f64().unwrap();
    assert!(metric >= accuracy, "{file}: {metric} < {accuracy}");
    assert!(line["best"]["checkpoint"].is_string(), "{file}: {line}");
}

#[test]
fn mnist_reaches_97_percent() {
    check("mnist/const.yaml", 0.97);
}

#[test]
fn fashion_mnist_reaches_88_percent() {
    check("fashion-mnist/const.yaml", 0.88);
}

#[test]
fn iris_reaches_95_percent() {
    check("iris/const.yaml", 0.95);
}

#[test]
fn cifar10_subset_reaches_50_percent() {
    check("cifar10/const.yaml", 0.50);
}

#[test]
fn four_local_ranks_match_one_rank() {
    if !has_data("mnist") {
        return;
    }
    program("stoker-trainer");
    let file = repository().join("examples/mnist/const.yaml");
    let accuracy = |ranks: u32| -> f64 {
        let root = tempfile::tempdir().unwrap();
        let ranks = format!("resources.slotsPerTrial={ranks}");
        let sets = [&*ranks, "hyperparameters.dropout=0", "searcher.maxLength.epochs=1"];
        let sets: Vec<&str> = sets.iter().flat_map(|set| ["--set", set]).collect();
        let output = run(&file, root.path(), &sets);
        assert!(output.status.success(), "{ranks}: {}", describe_output(&output));
        let line = last_line(&output);
        assert_eq!(line["phase"], "Completed", "{ranks}: {line}");
        line["best"]["metric"].as_f64().unwrap()
    };
    let (one, four) = (accuracy(1), accuracy(4));
    // Rounding may change the predictions of one or two of the 10,000 samples.
    assert!((one - four).abs() < 3e-4 && one > 0.9, "{one} {four}");
}

#[test]
fn test_mode_runs_all_stages_and_cleans_up() {
    if !has_data("mnist") {
        return;
    }
    program("stoker-trainer");
    let file = repository().join("examples/mnist/random.yaml");
    let root = tempfile::tempdir().unwrap();
    let run_test = |more: &[&str]| {
        let run =
            stoker(["run", "--test", "--root"]).arg(root.path()).arg(&file).args(more).output();
        run.unwrap()
    };
    let output = run_test(&["--set", "resources.slotsPerTrial=2"]);
    assert!(output.status.success(), "{}", describe_output(&output));
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(
        text.contains("works: one batch, a validation, a checkpoint and its restore"),
        "{text}"
    );
    let left = walk(root.path());
    assert!(left.is_empty(), "{left:?}");

    let output = run_test(&["--set", "hyperparameters.dropout=2"]);
    assert_eq!(output.status.code(), Some(1), "{}", describe_output(&output));
    let text = describe_output(&output);
    assert!(text.contains("trial 0 failed: test: "), "{text}");
}

/// Returns all files below a directory.
fn walk(folder: &Path) -> Vec<std::path::PathBuf> {
    let entries = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let (folders, mut files): (Vec<_>, Vec<_>) = entries.partition(|path| path.is_dir());
    files.extend(folders.iter().flat_map(|folder| walk(folder)));
    files
}
