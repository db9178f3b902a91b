//! `examples/learner`: a program with burn's training loop, without and with Stoker, on MNIST.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Signal, kill_process};
use stoker_tests::{cache, describe_output, has_data, program, repository, stoker};

use crate::interrupted::{trainers, wait_until_no_trainers};
use crate::local_run::last_line;

/// Directory where burn writes its files in both programs.
const FOLDER: &str = "target/learner-mnist";

fn example(name: &str) -> String {
    std::fs::read_to_string(repository().join("examples/learner").join(name)).unwrap()
}

/// Returns the lines of a program without the module comment.
fn code(name: &str) -> String {
    let text = example(name);
    let lines = text.lines().filter(|line| !line.starts_with("//!"));
    lines.map(|line| format!("{line}\n")).collect()
}

#[test]
fn the_page_shows_the_complete_diff() {
    let page = std::fs::read_to_string(repository().join("docs/learner.md")).unwrap();
    let (_, block) = page.split_once("```diff\n").expect("the page has a block of differences");
    let (block, _) = block.split_once("```").unwrap();
    let (mut program, mut counts) = (code("before.rs"), (0, 0));
    for hunk in block.split("@@\n") {
        let side = |other: char| -> String {
            let lines = hunk.lines().filter(|line| !line.starts_with(other));
            lines.map(|line| format!("{}\n", line.get(1..).unwrap_or_default())).collect()
        };
        let (old, new) = (side('+'), side('-'));
        assert_eq!(program.matches(&old).count(), 1, "not exactly once in before.rs:\n{old}");
        program = program.replace(&old, &new);
        let is_change = |line: &&str, sign: char| line.starts_with(sign) && line.len() > 1;
        let count = |sign| hunk.lines().filter(|line| is_change(line, sign)).count();
        counts = (counts.0 + count('-'), counts.1 + count('+'));
    }
    assert_eq!(program, code("after.rs"));
    assert_eq!(counts, (1, 5), "the page, the README and examples/learner claim 1 and 5 lines");
    for name in ["before.rs", "mnist.rs"] {
        assert!(!example(name).contains("stoker_trainer"), "{name} uses stoker_trainer");
    }
}

fn digits() -> (&'static str, PathBuf) {
    ("MNIST", cache().join("data/mnist"))
}

/// Runs a program without Stoker in a new directory.
fn run_standalone(name: &str, folder: &Path) {
    std::fs::create_dir(folder).unwrap();
    let (variable, value) = digits();
    let mut command = Command::new(program(name));
    let output = command.current_dir(folder).env(variable, value).output().unwrap();
    assert!(output.status.success(), "{name}: {}", describe_output(&output));
}

/// Returns a command that runs the example's experiment in `folder`, or resumes it there.
fn experiment(folder: &Path, slots: u32) -> Command {
    std::fs::create_dir_all(folder).unwrap();
    let (variable, value) = digits();
    let mut command = stoker(["run", "--output", "json", "--root"]);
    command.arg(folder.join("root")).arg(repository().join("examples/learner/experiment.yaml"));
    command.arg("--set").arg(format!("resources.slotsPerTrial={slots}"));
    command.args(["--set", "minCheckpointPeriod.batches=50"]);
    command.current_dir(folder).env(variable, value);
    command
}

/// Collects files below a directory by name or extension.
fn find(folder: &Path, end: &str, files: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
        let path = entry.path();
        if path.is_dir() {
            find(&path, end, files);
        } else if path.ends_with(end) || path.extension().is_some_and(|extension| extension == end)
        {
            files.push(path);
        }
    }
}

/// Returns batches and directories of complete checkpoints, in order of batches.
pub(crate) fn checkpoints(folder: &Path) -> Vec<(u64, PathBuf)> {
    let mut manifests = vec![];
    find(folder, "manifest.json", &mut manifests);
    let mut all: Vec<_> = manifests
        .into_iter()
        .filter_map(|path| {
            let folder = path.parent()?;
            let batches = folder.file_name()?.to_str()?.get(..12)?.parse().ok()?;
            Some((batches, folder.to_owned()))
        })
        .collect();
    all.sort();
    all
}

/// Returns the tensors of a weights file, by name.
fn weights(file: &Path) -> BTreeMap<String, Vec<u8>> {
    let tensors = burn_pack::Reader::from_file(file).unwrap().into_tensors().unwrap();
    let tensors = tensors.into_iter().map(|tensor| tensor.into_parts().unwrap());
    let weights: BTreeMap<_, _> =
        tensors.map(|(name, _, _, _, bytes)| (name, bytes.to_vec())).collect();
    assert!(weights.values().map(Vec::len).sum::<usize>() > 784 * 128 * 4, "{weights:?}");
    weights
}

/// Returns the weights of the last checkpoint of a run under Stoker, which must be at `batches`.
fn checkpoint_weights(folder: &Path, batches: u64) -> BTreeMap<String, Vec<u8>> {
    let (last, folder) = checkpoints(folder).pop().expect("a checkpoint");
    assert_eq!(last, batches);
    weights(&folder.join("model.bpk"))
}

/// Reads a metric of an epoch from burn's log, whose last line has the final value.
fn burn_metric(folder: &Path, split: &str, epoch: u32, metric: &str) -> f64 {
    let file = folder.join(FOLDER).join(format!("{split}/epoch-{epoch}/{metric}.log"));
    let text = std::fs::read_to_string(file).unwrap();
    text.lines().last().unwrap().strip_suffix(",final").unwrap().parse().unwrap()
}

/// Returns a metric from the rows of a run under Stoker, in order of batches.
fn stoker_metric(folder: &Path, group: &str, metric: &str) -> Vec<f64> {
    let mut files = vec![];
    find(folder, "jsonl", &mut files);
    let mut rows = BTreeMap::new();
    for file in files {
        for line in std::fs::read_to_string(file).unwrap().lines() {
            let row: serde_json::Value = serde_json::from_str(line).unwrap();
            if row["group"] == group {
                rows.insert(row["batches"].as_u64(), row["metrics"][metric].as_f64().unwrap());
            }
        }
    }
    rows.into_values().collect()
}

#[test]
fn training_is_bit_identical_without_and_with_stoker() {
    if !has_data("mnist") {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let [plain, after, run] = ["plain", "after", "run"].map(|name| folder.path().join(name));
    run_standalone("learner-before", &plain);
    run_standalone("learner-after", &after);
    let output = experiment(&run, 1).output().unwrap();
    assert!(output.status.success(), "{}", describe_output(&output));

    // Two epochs of 60,000 digits in batches of 64.
    let expected = weights(&plain.join(FOLDER).join("checkpoint/model-2.bpk"));
    for folder in [&after, &run] {
        assert!(
            checkpoint_weights(folder, 1876) == expected,
            "{}: weights differ",
            folder.display()
        );
        let theirs = weights(&folder.join(FOLDER).join("checkpoint/model-2.bpk"));
        assert!(theirs == expected, "{}: burn's checkpoint differs", folder.display());
        for (group, split) in [("epoch", "train"), ("validation", "valid")] {
            for (name, metric) in [("loss", "Loss"), ("accuracy", "Accuracy")] {
                let prefix = if group == "epoch" { "" } else { "validation_" };
                let stoker_metric = stoker_metric(folder, group, &format!("{prefix}{name}"));
                let burn_metric = [1, 2].map(|epoch| burn_metric(&plain, split, epoch, metric));
                assert_eq!(stoker_metric, burn_metric, "{split} {metric}");
            }
        }
    }
    let accuracy = burn_metric(&plain, "valid", 2, "Accuracy");
    assert!(accuracy > 95.0, "{accuracy}");
    assert_eq!(last_line(&output)["phase"], "Completed");
}

/// Kills a trainer once a checkpoint of `after[0]` batches exists, then the runner once one of
/// `after[1]` exists. Then resumes the run and returns its output.
fn run_with_kills(folder: &Path, slots: u32, after: [u64; 2]) -> Output {
    let start = || {
        let mut command = experiment(folder, slots);
        command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap()
    };
    let (root, mut runner) = (folder.join("root"), start());
    for (kill, batches) in after.into_iter().enumerate() {
        let deadline = Instant::now() + stoker_test_cluster::PATIENCE;
        while checkpoints(&root).last().is_none_or(|(saved, _)| *saved < batches) {
            assert!(runner.try_wait().unwrap().is_none(), "the run ended before batch {batches}");
            assert!(Instant::now() < deadline, "no checkpoint of batch {batches}");
            std::thread::sleep(Duration::from_millis(5));
        }
        if kill == 0 {
            let victim = *trainers(&root).last().expect("a trainer");
            kill_process(victim, Signal::KILL).unwrap();
        } else {
            runner.kill().unwrap();
            runner.wait().unwrap();
            wait_until_no_trainers(&root, "after the runner was killed");
        }
    }
    experiment(folder, slots).output().unwrap()
}

#[test]
fn killed_learner_runs_resume_bit_identical() {
    if !has_data("mnist") {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    // Each rank trains batches of 64.
    for (slots, batches) in [(1, 1876), (2, 938)] {
        let [calm, rough] =
            ["calm", "rough"].map(|name| folder.path().join(format!("{name}-{slots}")));
        let output = experiment(&calm, slots).output().unwrap();
        assert!(output.status.success(), "{}", describe_output(&output));
        let output = run_with_kills(&rough, slots, [batches / 5, batches / 2]);
        assert!(output.status.success(), "{}", describe_output(&output));
        let (_, last) = checkpoints(&rough).pop().unwrap();
        assert!(!last.to_str().unwrap().ends_with("-0"), "the trainer was not killed: {last:?}");
        assert!(
            checkpoint_weights(&rough, batches) == checkpoint_weights(&calm, batches),
            "{slots} slots: weights differ"
        );
        for (group, metric) in [("epoch", "loss"), ("validation", "validation_accuracy")] {
            let [calm, rough] = [&calm, &rough].map(|folder| stoker_metric(folder, group, metric));
            assert!(calm.len() == 2 && calm == rough, "{slots}, {metric}: {calm:?} {rough:?}");
        }
        let accuracy = stoker_metric(&calm, "validation", "validation_accuracy")[1];
        assert!(accuracy > 94.0, "{slots} slots: {accuracy}");
    }
}
