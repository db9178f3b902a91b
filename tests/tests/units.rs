//! `stoker run` searches by the own count of a program with a custom training loop.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{ExitCode, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use stoker_tests::{describe_output, stoker};
use stoker_trainer::{Context, Result, Upload};

use crate::interrupted::{trials, wait_until_no_trainers};
use crate::local_run::{last_line, run};

/// Environment steps of an episode.
const EPISODE: u64 = 2;

/// Not a test: the program of a trial. Does nothing in the test process itself.
#[test]
fn counting_program() {
    if std::env::var_os("STOKER_TRIAL_CONFIG").is_none() {
        return;
    }
    let code = stoker_trainer::run(walk);
    // Exit here, because the test harness would set its own exit code.
    let code = (0..=u8::MAX).find(|number| ExitCode::from(*number) == code);
    std::process::exit(code.unwrap().into());
}

/// Counts steps. With `data.batches`, the positions of the session are batches of steps, and a
/// metric has the steps.
fn walk(context: &Context) -> Result<()> {
    let session = context.session();
    let rate = context.hparams::<Value>()?["rate"].as_f64().unwrap();
    let has_batches = context.data::<Value>()?["batches"] == true;
    let position = |steps: u64| if has_batches { steps / EPISODE } else { steps };
    let restored = session.restore_path(|folder, _| {
        Ok(std::fs::read_to_string(folder.join("steps"))?.parse::<u64>()?)
    })?;
    let mut steps = restored.unwrap_or(0);
    let save = |steps: u64| {
        let write = |folder: &Path| Ok(std::fs::write(folder.join("steps"), steps.to_string())?);
        session.store_path(Upload::at(position(steps)), write)
    };
    loop {
        while steps < session.units() {
            steps += EPISODE;
            session.report_progress(position(steps));
            std::thread::sleep(Duration::from_millis(2));
            if let Some(why) = session.should_preempt()? {
                save(steps)?;
                return Err(why.into());
            }
        }
        let loss = (rate - 0.3).powi(2) + 1.0 / steps as f64;
        let metrics = [("loss", loss), ("steps", steps as f64)];
        session.report_metrics("validation", position(steps), metrics)?;
        save(steps)?;
        if session.complete_length(position(steps))?.is_none() {
            return Ok(());
        }
    }
}

/// Writes an experiment with the rungs 20, 60 and 180, whose paused trials end their processes.
fn file(folder: &Path, time_metric: Option<&str>) -> PathBuf {
    let this = std::env::current_exe().unwrap();
    let mut searcher = json!({
        "metric": "validation_loss",
        "maxLength": { "units": 180 },
        "releaseSeconds": 0,
        "asyncHalving": {
            "maxTrials": 9, "numRungs": 3, "divisor": 3, "maxConcurrentTrials": 1,
        },
    });
    if let Some(name) = time_metric {
        searcher["timeMetric"] = json!(name);
    }
    let experiment = json!({
        "apiVersion": "stoker.dev/v1alpha1", "kind": "Experiment", "metadata": { "name": "units" },
        "spec": {
            "entrypoint": {
                "command": [this, "--exact", "units::counting_program", "--nocapture"],
            },
            "hyperparameters": { "rate": { "double": { "min": 0, "max": 1 } } },
            "data": { "batches": time_metric.is_some() },
            "searcher": searcher,
            "reproducibility": { "experimentSeed": 11 },
        },
    });
    let path = folder.join("units.yaml");
    std::fs::write(&path, experiment.to_string()).unwrap();
    path
}

/// Returns the number of results by length.
fn lengths(trials: &BTreeMap<u64, Value>) -> BTreeMap<u64, u32> {
    let mut lengths = BTreeMap::new();
    for fact in trials.values().flat_map(|trial| trial["facts"].as_array().unwrap()) {
        if let Some(units) = fact["result"]["units"].as_u64() {
            *lengths.entry(units).or_default() += 1;
        }
    }
    lengths
}

/// Returns the records of all trials.
fn records(root: &Path) -> Vec<Value> {
    let Ok(entries) = std::fs::read_dir(root.join("local")) else { return vec![] };
    let folders = entries.flatten().map(|entry| entry.path().join("record/trials"));
    let files = folders.filter_map(|folder| std::fs::read_dir(folder).ok()).flatten().flatten();
    let is_json = |path: &PathBuf| path.extension().is_some_and(|text| text == "json");
    files
        .map(|file| file.path())
        .filter(is_json)
        .map(|path| serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap())
        .collect()
}

/// Returns the progress of a trial that trains beyond its first rung.
fn promoted_batches(root: &Path) -> Option<u64> {
    let has_result = |trial: &&Value| {
        let facts = trial["status"]["facts"].as_array();
        let is_running = trial["status"]["phase"] == "Running";
        is_running && facts.is_some_and(|facts| facts.len() == 1)
    };
    records(root).iter().find(has_result)?["status"]["batches"].as_u64()
}

/// Ctrl-C while a promoted trial trains: it saves its count, and the same command resumes it.
#[test]
fn rungs_are_in_units_and_survive_a_pause() {
    let folder = tempfile::tempdir().unwrap();
    let file = file(folder.path(), None);
    let (calm, paused) = (folder.path().join("calm"), folder.path().join("paused"));
    let output = run(&file, &calm, &[]);
    assert!(output.status.success(), "{}", describe_output(&output));
    let expected = trials(&calm);
    let lengths = lengths(&expected);
    assert_eq!(lengths.keys().copied().collect::<Vec<_>>(), [20, 60, 180]);
    assert_eq!(lengths[&20], 9);
    let resumes = |trial: &Value| {
        let attempts = trial["status"]["attempts"].as_array().unwrap();
        attempts.iter().any(|attempt| attempt["resumedFrom"].is_string())
    };
    assert!(records(&calm).iter().any(resumes), "no promoted trial has resumed");
    let best = last_line(&output)["best"]["trial"].as_u64().unwrap();
    let best = &records(&calm).into_iter().find(|trial| trial["spec"]["index"] == best).unwrap();
    // The checkpoint at the end has the count 180.
    assert!(best["status"]["checkpoints"].to_string().contains("000000000180-"), "{best}");
    assert_eq!(best["status"]["batches"], 180, "{best}");
    assert_eq!(best["status"]["batchesTotal"], 180, "{best}");

    let mut command = stoker(["run", "--output", "json", "--root"]);
    command.arg(&paused).arg(&file).stdout(Stdio::null()).stderr(Stdio::null());
    let mut runner = command.spawn().unwrap();
    let end = Instant::now() + stoker_test_cluster::PATIENCE;
    while promoted_batches(&paused).is_none_or(|batches| batches <= 20) {
        assert!(Instant::now() < end, "no promoted trial trains");
        std::thread::sleep(Duration::from_millis(2));
    }
    kill_process(Pid::from_child(&runner), Signal::INT).unwrap();
    runner.wait().unwrap();
    wait_until_no_trainers(&paused, "Ctrl-C");
    let output = run(&file, &paused, &[]);
    assert!(output.status.success(), "{}", describe_output(&output));
    assert_eq!(trials(&paused), expected);
}

#[test]
fn time_metric_ends_a_rung() {
    let folder = tempfile::tempdir().unwrap();
    let file = file(folder.path(), Some("steps"));
    let output = run(&file, folder.path(), &[]);
    assert!(output.status.success(), "{}", describe_output(&output));
    let trials = trials(folder.path());
    assert_eq!(lengths(&trials).keys().copied().collect::<Vec<_>>(), [20, 60, 180]);
    // Checkpoints are named by the position of the session, which is in batches.
    let names: Vec<String> = records(folder.path())
        .iter()
        .flat_map(|trial| trial["status"]["checkpoints"].as_array().cloned().unwrap_or_default())
        .map(|checkpoint| checkpoint["name"].as_str().unwrap()[..12].to_owned())
        .collect();
    assert!(names.contains(&"000000000090".to_owned()), "{names:?}");
}

#[test]
fn training_loop_of_a_model_refuses_units() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("refused.yaml");
    let text = "\
apiVersion: stoker.dev/v1alpha1
kind: Experiment
metadata: { name: refused }
spec:
  entrypoint: { command: [stoker-trainer, iris] }
  hyperparameters: { learning_rate: 0.1, hidden: 8, global_batch_size: 16 }
  searcher: { metric: validation_loss, maxLength: { units: 9 }, single: {} }
  maxRestarts: 0
";
    std::fs::write(&path, text).unwrap();
    if !stoker_tests::has_data("iris") {
        return;
    }
    let output = run(&path, folder.path(), &[]);
    assert_eq!(output.status.code(), Some(1), "{}", describe_output(&output));
    let text = describe_output(&output);
    assert!(text.contains("set searcher.maxLength.epochs"), "{text}");
}
