//! The stock trainer alone, in processes of its own: resumed to the bit, and clear about what is wrong.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::{Command, Output};

use stoker_tests::{has_data, program, said, write_random_cifar10};

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
    assert!(output.status.success(), "{}", said(&output));
    output
}

/// The files of the only checkpoint at `batches`, but for the manifest, which names the attempt.
fn files(folder: &Path, name: &str) -> BTreeMap<String, Vec<u8>> {
    let folder = folder.join("trial/checkpoints").join(name);
    let entries = std::fs::read_dir(&folder).unwrap_or_else(|error| panic!("{folder:?}: {error}"));
    let all = entries.map(|it| it.unwrap().path()).map(|path| {
        (path.file_name().unwrap().to_str().unwrap().to_owned(), std::fs::read(path).unwrap())
    });
    all.filter(|(name, _)| name != "manifest.json").collect()
}

/// Compares without printing megabytes.
#[track_caller]
fn check_same(got: &BTreeMap<String, Vec<u8>>, want: &BTreeMap<String, Vec<u8>>) {
    assert!(got.keys().eq(want.keys()), "{:?} {:?}", got.keys(), want.keys());
    assert!(
        got.contains_key("model.bpk") && got.contains_key("optimizers.bpk"),
        "{:?}",
        got.keys()
    );
    for (name, bytes) in got {
        assert!(bytes == &want[name], "{name} differs");
    }
}

/// Rows of metrics without the time of day and the attempt, by batch and group.
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
fn ten_and_ten_batches_in_two_processes_are_twenty_in_one() {
    let (straight, stopped) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    train(straight.path(), 20, &[]);
    train(stopped.path(), 10, &[]);
    train(stopped.path(), 20, &[]);

    let want = files(straight.path(), "000000000020-0");
    check_same(&files(stopped.path(), "000000000020-1"), &want);
    let (mut got, want) = (rows(stopped.path()), rows(straight.path()));
    assert!(got.remove("\"validation\" 10").is_some(), "the end at batch 10 is validated: {got:?}");
    assert_eq!(got, want);
    assert_eq!(want.len(), 5, "four rows of training and one of validation: {want:?}");
}

#[test]
fn a_truncated_checkpoint_gives_way_to_the_one_before() {
    let (straight, broken) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    train(straight.path(), 20, &[]);
    train(broken.path(), 10, &["--save-batches=5", "--save-trial-latest=2"]);
    let model = broken.path().join("trial/checkpoints/000000000010-0/model.bpk");
    let file = std::fs::File::options().write(true).open(model).unwrap();
    file.set_len(100).unwrap();

    let output = train(broken.path(), 20, &[]);
    let text = said(&output);
    assert!(text.contains("checkpoint 000000000010-0 is not used: "), "{text}");
    assert!(text.contains("model.bpk"), "{text}");
    assert!(text.contains("goes on from checkpoint 000000000005-0"), "{text}");
    check_same(&files(broken.path(), "000000000020-1"), &files(straight.path(), "000000000020-0"));
}

/// Runs the iris example in some way that cannot work and compares exit code and a part of the error.
#[track_caller]
fn check_error(arguments: &[&str], cache: Option<&str>, code: i32, part: &str) {
    let mut command = Command::new(program("stoker-trainer"));
    command.arg("iris").args(arguments);
    command.envs(cache.map(|cache| ("STOKER_CACHE", cache)));
    let output = command.output().unwrap();
    assert_eq!(output.status.code(), Some(code), "{}", said(&output));
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(text.contains(part), "{text}");
}

#[test]
fn each_mistake_is_named_with_its_remedy() {
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
        "the folder /proc/none cannot be made",
    );
}
