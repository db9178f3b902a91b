//! The stock trainer as a standalone process: bit-identical resumption and clear errors.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::{Command, Output};

use stoker_tests::{describe_output, has_data, program, write_random_cifar10};

/// Convolutions with batch norm and dropout, Adam, shuffling and augmentation.
const CIFAR10: &[&str] = &[
    "cifar10",
    "--hparam=learning_rate=0.002",
    "--hparam=dropout=0.3",
    "--hparam=filters=4",
    "--hparam=shift=2",
    "--hparam=global_batch_size=64",
    "--seed=3",
    "--row-batches=5",
];

/// Trains in `folder` on random images, and returns what the process printed.
fn train(folder: &Path, batches: u32, more: &[&str]) -> Output {
    let data = folder.join("data");
    write_random_cifar10(&data);
    let output = Command::new(program("stoker-trainer"))
        .args(CIFAR10)
        .args(["--data", &serde_json::json!({ "root": data }).to_string()])
        .arg(format!("--batches={batches}"))
        .arg("--folder")
        .arg(folder)
        .args(more)
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", describe_output(&output));
    output
}

/// Returns the files of a checkpoint, except the manifest, which contains the attempt.
fn files(folder: &Path, name: &str) -> BTreeMap<String, Vec<u8>> {
    let folder = folder.join("trial/checkpoints").join(name);
    let entries = std::fs::read_dir(&folder).unwrap_or_else(|error| panic!("{folder:?}: {error}"));
    let all = entries.map(|entry| entry.unwrap().path()).map(|path| {
        (path.file_name().unwrap().to_str().unwrap().to_owned(), std::fs::read(path).unwrap())
    });
    all.filter(|(name, _)| name != "manifest.json").collect()
}

/// Compares the files of two checkpoints. On failure, prints names instead of megabytes.
#[track_caller]
fn check_same(actual: &BTreeMap<String, Vec<u8>>, expected: &BTreeMap<String, Vec<u8>>) {
    assert!(actual.keys().eq(expected.keys()), "{:?} {:?}", actual.keys(), expected.keys());
    assert!(
        actual.contains_key("model.bpk") && actual.contains_key("optimizers.bpk"),
        "{:?}",
        actual.keys()
    );
    for (name, bytes) in actual {
        assert!(bytes == &expected[name], "{name} differs");
    }
}

/// Returns the metric rows without time and attempt, by group and batch.
fn rows(folder: &Path) -> BTreeMap<String, String> {
    let mut rows = BTreeMap::new();
    for entry in std::fs::read_dir(folder.join("trial/metrics")).unwrap() {
        for line in std::fs::read_to_string(entry.unwrap().path()).unwrap().lines() {
            let row: serde_json::Value = serde_json::from_str(line).unwrap();
            let key = format!("{} {}", row["group"], row["batches"]);
            rows.insert(key, row["metrics"].to_string());
        }
    }
    rows
}

#[test]
fn resume_in_a_new_process_is_bit_identical() {
    let (straight, stopped) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    train(straight.path(), 20, &[]);
    train(stopped.path(), 10, &[]);
    train(stopped.path(), 20, &[]);

    let expected = files(straight.path(), "000000000020-0");
    check_same(&files(stopped.path(), "000000000020-1"), &expected);
    let (mut actual, expected) = (rows(stopped.path()), rows(straight.path()));
    assert!(actual.remove("\"validation\" 10").is_some(), "no validation at batch 10: {actual:?}");
    assert_eq!(actual, expected);
    assert_eq!(expected.len(), 5, "four training rows and one validation row: {expected:?}");
}

#[test]
fn truncated_checkpoints_are_skipped() {
    let (straight, resumed) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    train(straight.path(), 20, &[]);
    train(resumed.path(), 10, &["--save-batches=5", "--save-trial-latest=2"]);
    let model = resumed.path().join("trial/checkpoints/000000000010-0/model.bpk");
    let file = std::fs::File::options().write(true).open(model).unwrap();
    file.set_len(100).unwrap();

    let output = train(resumed.path(), 20, &[]);
    let text = describe_output(&output);
    assert!(text.contains("checkpoint 000000000010-0 is not used: "), "{text}");
    assert!(text.contains("model.bpk"), "{text}");
    assert!(text.contains("resumed from checkpoint 000000000005-0"), "{text}");
    check_same(&files(resumed.path(), "000000000020-1"), &files(straight.path(), "000000000020-0"));
}

/// Runs the iris example with invalid settings and checks the exit code and a part of the error.
#[track_caller]
fn check_error(arguments: &[&str], cache: Option<&str>, code: i32, part: &str) {
    let mut command = Command::new(program("stoker-trainer"));
    command.arg("iris").args(arguments);
    command.envs(cache.map(|cache| ("STOKER_CACHE", cache)));
    let output = command.output().unwrap();
    assert_eq!(output.status.code(), Some(code), "{}", describe_output(&output));
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(text.contains(part), "{text}");
}

#[test]
fn user_errors_name_the_cause() {
    if !has_data("iris") {
        return;
    }
    let (rate, hidden) = ("--hparam=learning_rate=0.01", "--hparam=hidden=8");
    let batch = "--hparam=global_batch_size=8";
    check_error(&[rate, hidden], None, 78, "global_batch_size is missing");
    check_error(&[hidden, batch], None, 78, "missing field `learning_rate`");
    check_error(
        &[rate, hidden, "--hparam=global_batch_size=1000"],
        None,
        78,
        "global_batch_size is 1000, but must be between 1 and 120, the number of training samples",
    );
    check_error(
        &[rate, hidden, batch],
        Some("/nonexistent"),
        1,
        "cannot read /nonexistent/data/iris/iris.csv.gz: No such file or directory",
    );
    check_error(
        &[rate, hidden, batch, "--folder=/proc/none"],
        None,
        80,
        "cannot create directory /proc/none",
    );
}
