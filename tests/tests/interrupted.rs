//! A search whose trainers and runner are killed at random times ends like an undisturbed one.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use stoker_tests::{describe_output, facts_without_times, has_data, stoker};

use crate::learner::checkpoints;
use crate::local_run::{last_line, run};

/// Four trials with dropout, Adam, shuffling and frequent checkpoints: seconds of work with many
/// different states in which a process can be killed.
const SEARCH: &str = r#"
apiVersion: stoker.dev/v1alpha1
kind: Experiment
metadata:
  name: interrupted
spec:
  entrypoint:
    command: [stoker-trainer, mnist]
  hyperparameters:
    model: mlp
    global_batch_size: 64
    learning_rate: { log: { base: 10, min: -4, max: -2 } }
    dropout: { double: { min: 0.1, max: 0.5 } }
  searcher:
    metric: validation_loss
    maxLength: { batches: 3000 }
    random: { maxTrials: 4 }
  minValidationPeriod: { batches: 1000 }
  minCheckpointPeriod: { batches: 25 }
  schedulingUnit: 10
  maxRestarts: 1000
  reproducibility: { experimentSeed: 7 }
"#;

const NUM_KILLS: u32 = 20;
/// Maximum number of batches between two kills. The 12,000 batches outlast all kills.
const BATCHES_PER_KILL: u64 = 300;

fn file(folder: &Path) -> PathBuf {
    let path = folder.join("interrupted.yaml");
    std::fs::write(&path, SEARCH).unwrap();
    path
}

/// Returns each trial's hyperparameters, phase, facts and last metrics, by index. They must not
/// depend on kills.
pub(crate) fn trials(root: &Path) -> BTreeMap<u64, Value> {
    let entries = std::fs::read_dir(root.join("local")).unwrap().map(|entry| entry.unwrap().path());
    let local: Vec<_> = entries.filter(|path| path.is_dir()).collect();
    assert_eq!(local.len(), 1, "not one record: {local:?}");
    let folder = local[0].join("record/trials");
    let mut all = BTreeMap::new();
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_none_or(|extension| extension != "json") {
            continue;
        }
        let trial: Value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
        let facts = facts_without_times(&trial["status"]["facts"]);
        let spec = &trial["spec"];
        let kept = serde_json::json!({
            "draw": [spec["requestId"], spec["seed"], spec["hyperparameters"]],
            "phase": trial["status"]["phase"],
            "facts": facts,
            "metrics": trial["status"]["metrics"],
        });
        all.insert(spec["index"].as_u64().unwrap(), kept);
    }
    all
}

/// Returns the processes whose environment names a trial configuration under `root`: the trainers
/// of that run and their supervisors.
pub(crate) fn trainers(root: &Path) -> Vec<Pid> {
    let needle = format!("STOKER_TRIAL_CONFIG={}", root.display()).into_bytes();
    let mut pids = Vec::new();
    for entry in std::fs::read_dir("/proc").unwrap().flatten() {
        let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse::<i32>().ok()) else {
            continue;
        };
        let environment = std::fs::read(entry.path().join("environ")).unwrap_or_default();
        if environment.split(|byte| *byte == 0).any(|variable| variable.starts_with(&needle)) {
            pids.extend(Pid::from_raw(pid));
        }
    }
    pids
}

fn start(file: &Path, root: &Path) -> Child {
    stoker(["run", "--slots", "2", "--output", "json", "--root"])
        .arg(root)
        .arg(file)
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap()
}

/// Returns the seed of random kills: a constant, or `STOKER_TEST_SEED` if set.
pub(crate) fn seed() -> u64 {
    let seed = std::env::var("STOKER_TEST_SEED").map_or(7_919, |seed| seed.parse().unwrap());
    // `SeededRng` never leaves 0.
    seed.max(1)
}

/// Xorshift generator. Failures print its seed.
pub(crate) struct SeededRng(pub(crate) u64);

impl SeededRng {
    pub(crate) fn below(&mut self, bound: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % bound
    }
}

/// Waits until no trainer under `root` is left after its runner has died.
#[track_caller]
pub(crate) fn wait_until_no_trainers(root: &Path, context: &str) {
    let deadline = Instant::now() + stoker_test_cluster::PATIENCE;
    while !trainers(root).is_empty() {
        assert!(Instant::now() < deadline, "{context}: trainers outlive their runner");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Returns the sum of the batches of each trial's newest checkpoint under `root`. Retention deletes
/// only older checkpoints.
fn checkpointed_batches(root: &Path) -> u64 {
    let mut newest = BTreeMap::new();
    for (batches, folder) in checkpoints(root) {
        newest.insert(folder.parent().unwrap().to_owned(), batches);
    }
    newest.values().sum()
}

/// Waits until the trials' checkpoints have `more` batches than `before`, or `runner` has ended.
fn wait_for_batches(root: &Path, runner: &mut Child, before: u64, more: u64, context: &str) {
    let deadline = Instant::now() + stoker_test_cluster::PATIENCE;
    while checkpointed_batches(root) < before + more && runner.try_wait().unwrap().is_none() {
        assert!(Instant::now() < deadline, "{context}: no {more} batches since {before}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn twenty_kills_change_nothing() {
    if !has_data("mnist") {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let file = file(folder.path());
    let (calm, rough) = (folder.path().join("calm"), folder.path().join("rough"));

    let output = run(&file, &calm, &["--slots", "2"]);
    assert!(output.status.success(), "{}", describe_output(&output));

    let seed = seed();
    let context = format!("seed {seed}");
    let mut rng = SeededRng(seed);
    let mut runner = start(&file, &rough);
    let mut killed = (0, 0);
    while killed.0 + killed.1 < NUM_KILLS {
        let before = checkpointed_batches(&rough);
        wait_for_batches(&rough, &mut runner, before, rng.below(BATCHES_PER_KILL), &context);
        // Kill at a random time between two checkpoints.
        std::thread::sleep(Duration::from_millis(rng.below(30)));
        if runner.try_wait().unwrap().is_some() {
            panic!("{context}: the run ended after {killed:?} kills; increase maxLength");
        }
        if rng.below(3) == 0 {
            runner.kill().unwrap();
            runner.wait().unwrap();
            wait_until_no_trainers(&rough, &context);
            runner = start(&file, &rough);
            killed.0 += 1;
            continue;
        }
        // The victim is a program or its supervisor.
        let all = trainers(&rough);
        if let Some(victim) = all.get(rng.below(all.len().max(1) as u64) as usize) {
            let _ = kill_process(*victim, Signal::KILL);
            killed.1 += 1;
        }
    }
    println!("{context}: killed the runner {} and trainers {} times", killed.0, killed.1);
    runner.wait().unwrap();
    wait_until_no_trainers(&rough, &context);

    let output = run(&file, &rough, &["--slots", "2"]);
    assert!(output.status.success(), "{context}: {}", describe_output(&output));
    assert_eq!(last_line(&output)["phase"], "Completed", "{context}");
    assert_eq!(trials(&rough), trials(&calm), "{context}");
}

#[test]
fn stopped_runs_resume_with_the_same_results() {
    if !has_data("mnist") {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let file = file(folder.path());
    let (calm, stopped) = (folder.path().join("calm"), folder.path().join("stopped"));
    assert!(run(&file, &calm, &["--slots", "2"]).status.success());

    let mut runner = start(&file, &stopped);
    wait_for_batches(&stopped, &mut runner, 0, 500, "before Ctrl-C");
    kill_process(Pid::from_child(&runner), Signal::INT).unwrap();
    let status = runner.wait().unwrap();
    assert_eq!(status.code(), Some(3), "not stopped before the end: {status}");
    wait_until_no_trainers(&stopped, "after Ctrl-C");

    let output = run(&file, &stopped, &["--slots", "2"]);
    assert!(output.status.success(), "{}", describe_output(&output));
    assert_eq!(trials(&stopped), trials(&calm));
}
