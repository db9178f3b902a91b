//! `stoker run` pauses trials at their rungs, and promotes the best from their checkpoints.

use std::collections::BTreeMap;
use std::io::{BufRead as _, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;
use stoker_tests::{describe_output, has_data, repository, stoker};

use crate::interrupted::{trials, wait_until_no_trainers};
use crate::local_run::{last_line, run};

/// With one trial at a time, the order of results is always the same, and so are all decisions.
const SEARCH: &str = r#"
apiVersion: stoker.dev/v1alpha1
kind: Experiment
metadata:
  name: promotion
spec:
  entrypoint:
    command: [stoker-trainer, iris]
  hyperparameters:
    learning_rate: { log: { min: -4, max: 0 } }
    hidden: { int: { min: 4, max: 32 } }
    global_batch_size: 16
  searcher:
    metric: validation_loss
    maxLength: { batches: 180 }
    asyncHalving: { maxTrials: 9, numRungs: 3, divisor: 3, maxConcurrentTrials: 1 }
  minCheckpointPeriod: { batches: 5 }
  maxRestarts: 1000
  reproducibility: { experimentSeed: 11 }
"#;

fn num_facts(root: &Path) -> usize {
    let Ok(entries) = std::fs::read_dir(root.join("local")) else { return 0 };
    let mut num = 0;
    for record in entries.flatten() {
        let Ok(trials) = std::fs::read_dir(record.path().join("record/trials")) else { continue };
        for trial in
            trials.flatten().filter(|entry| entry.path().extension() == Some("json".as_ref()))
        {
            let trial: Value =
                serde_json::from_slice(&std::fs::read(trial.path()).unwrap()).unwrap();
            num += trial["status"]["facts"].as_array().map_or(0, Vec::len);
        }
    }
    num
}

fn start(file: &Path, root: &Path) -> Child {
    let mut command = stoker(["run", "--output", "json", "--root"]);
    command.arg(root).arg(file).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap()
}

fn file(folder: &Path) -> PathBuf {
    let path = folder.join("promotion.yaml");
    std::fs::write(&path, SEARCH).unwrap();
    path
}

#[test]
fn killed_runner_continues_with_the_same_decisions() {
    if !has_data("iris") {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let file = file(folder.path());
    let (calm, rough) = (folder.path().join("calm"), folder.path().join("rough"));
    let output = run(&file, &calm, &[]);
    assert!(output.status.success(), "{}", describe_output(&output));
    let expected = trials(&calm);
    // The first trial of every rung has another length: 9 trials at 20, at least one at 180.
    let mut lengths = BTreeMap::<u64, u32>::new();
    for fact in expected.values().flat_map(|trial| trial["facts"].as_array().unwrap()) {
        if let Some(units) = fact["result"]["units"].as_u64() {
            *lengths.entry(units).or_default() += 1;
        }
    }
    assert_eq!(lengths.keys().copied().collect::<Vec<_>>(), [20, 60, 180]);
    assert!(lengths[&20] == 9 && lengths[&60] >= 3, "{lengths:?}");

    for num in [3, 8, 13] {
        let mut runner = start(&file, &rough);
        let end = Instant::now() + stoker_test_cluster::PATIENCE;
        while num_facts(&rough) < num && runner.try_wait().unwrap().is_none() {
            assert!(Instant::now() < end, "no {num} facts");
            std::thread::sleep(Duration::from_millis(5));
        }
        runner.kill().unwrap();
        runner.wait().unwrap();
        wait_until_no_trainers(&rough, &format!("{num} facts"));
    }
    let output = run(&file, &rough, &[]);
    assert!(output.status.success(), "{}", describe_output(&output));
    assert_eq!(trials(&rough), expected);
}

/// Returns the directory of the trials' records.
fn records(root: &Path) -> PathBuf {
    let entries = std::fs::read_dir(root.join("local")).unwrap().map(|entry| entry.unwrap().path());
    entries.filter(|path| path.is_dir()).last().unwrap().join("record/trials")
}

#[test]
fn unwritable_record_delays_decisions_and_stops_no_trial() {
    if !has_data("iris") {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let file = file(folder.path());
    let (calm, rough) = (folder.path().join("calm"), folder.path().join("rough"));
    assert!(run(&file, &calm, &[]).status.success());

    let mut command = stoker(["run", "--output", "json", "--root"]);
    command.arg(&rough).arg(&file).stdout(Stdio::null()).stderr(Stdio::piped());
    let mut runner = command.spawn().unwrap();
    let end = Instant::now() + stoker_test_cluster::PATIENCE;
    while num_facts(&rough) < 3 {
        assert!(Instant::now() < end, "no facts");
        std::thread::sleep(Duration::from_millis(5));
    }
    // A directory in place of the temporary file makes every write of a trial fail.
    let records = records(&rough);
    let blocks = (0..9).map(|trial| records.join(format!("{trial}.json.new")));
    let blocks: Vec<PathBuf> = blocks.filter(|path| std::fs::create_dir(path).is_ok()).collect();
    let mut lines = BufReader::new(runner.stderr.take().unwrap()).lines();
    let is_reported = |line: &str| line.contains("running trials continue, trying again");
    assert!(lines.by_ref().any(|line| is_reported(&line.unwrap())), "no write has failed");
    blocks.iter().for_each(|path| std::fs::remove_dir(path).unwrap());
    let rest: Vec<String> = lines.map(|line| line.unwrap()).collect();
    assert!(runner.wait().unwrap().success(), "{rest:#?}");
    assert_eq!(trials(&rough), trials(&calm));
    for trial in std::fs::read_dir(records).unwrap().flatten() {
        let trial: Value = serde_json::from_slice(&std::fs::read(trial.path()).unwrap()).unwrap();
        assert_eq!(trial["status"]["restarts"], 0);
    }
}

#[test]
fn example_trains_longer_only_what_is_good() {
    if !has_data("iris") {
        return;
    }
    let root = tempfile::tempdir().unwrap();
    let output = run(&repository().join("examples/iris/asha.yaml"), root.path(), &["--slots", "4"]);
    assert!(output.status.success(), "{}", describe_output(&output));
    let line = last_line(&output);
    assert_eq!((&line["phase"], &line["trials"]), (&"Completed".into(), &12.into()));
    let results = |trial: &Value| {
        let facts = trial["facts"].as_array().unwrap();
        facts.iter().filter(|fact| fact["result"].is_object()).count()
    };
    let trials = trials(root.path());
    let best = line["best"]["trial"].as_u64().unwrap();
    assert!(results(&trials[&best]) >= 2, "{:?}", trials[&best]);
    let num_short = trials.values().filter(|trial| results(trial) == 1).count();
    assert!((6..=9).contains(&num_short), "{num_short}");
}
