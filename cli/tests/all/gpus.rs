//! Tests of the GPUs that trainers and workers see.

use std::io::{BufRead as _, BufReader};
use std::process::Stdio;
use std::time::{Duration, Instant};

use serde_json::json;

use crate::fixture::{RunFixture, check, files, output_text, random, stoker};

#[test]
fn concurrent_trials_see_different_gpus() {
    let run = |gpus: &str, trials: u32, trainers: u32, more: &[&str]| {
        let mut fixture = RunFixture::new(random(trials), "hold-gpu");
        fixture.spec["data"]["trainers"] = json!(trainers);
        fixture.spec["maxRestarts"] = json!(0);
        let output = fixture.command(more).env("CUDA_VISIBLE_DEVICES", gpus).output().unwrap();
        let mut held: Vec<_> = files(&fixture.folder.path().join("gpus"))
            .iter()
            .map(|file| file.file_name().unwrap().to_str().unwrap().to_owned())
            .collect();
        held.sort();
        (output, held)
    };
    let (output, held) = run("GPU-b,GPU-a", 2, 2, &[]);
    check(&output, 0, "using 2 of 2 GPUs");
    assert_eq!(held, ["GPU-a", "GPU-b"]);
    // On one GPU, trials run one after another for any number of slots.
    check(&run("GPU-a", 3, 1, &["--slots", "3"]).0, 0, "using 1 of 1 GPUs");
}

#[test]
fn failed_start_frees_its_gpus() {
    let fixture = RunFixture::new(json!({"single": {}}), "block-next-start");
    let mut command = fixture.command(&[]);
    command.env("CUDA_VISIBLE_DEVICES", "GPU-a").stdout(Stdio::null()).stderr(Stdio::piped());
    let mut runner = command.spawn().unwrap();
    let mut lines = BufReader::new(runner.stderr.take().unwrap()).lines();
    let is_reported = |line: &str| line.contains("running trials continue, trying again");
    assert!(lines.by_ref().any(|line| is_reported(&line.unwrap())), "the start has not failed");
    let runs = files(&fixture.root().join("local"));
    let run = runs.iter().find(|path| path.is_dir()).unwrap();
    std::fs::remove_dir(run.join("record/attempts/0-1/trial.json")).unwrap();
    // A trial that waits for its own GPU never ends.
    let end = Instant::now() + stoker_test_cluster::PATIENCE;
    while runner.try_wait().unwrap().is_none() && Instant::now() < end {
        std::thread::sleep(Duration::from_millis(10));
    }
    let _ = runner.kill();
    assert!(runner.wait().unwrap().success(), "{:#?}", lines.collect::<Vec<_>>());
    assert_eq!(fixture.trials()[0]["status"]["restarts"], 1);
}

#[test]
fn gang_larger_than_the_gpus_is_refused() {
    let mut fixture = RunFixture::new(json!({"single": {}}), "");
    fixture.spec["resources"] = json!({"slotsPerTrial": 3});
    let run = |fixture: &RunFixture| {
        fixture.command(&[]).env("CUDA_VISIBLE_DEVICES", "0,1").output().unwrap()
    };
    check(&run(&fixture), 2, "slotsPerTrial is 3, but 2 GPUs are visible");
    fixture.spec["resources"] = json!({"slotsPerTrial": 1});
    fixture.spec["env"] = json!([{"name": "STOKER_DEVICE", "value": "cpu"}]);
    let output = run(&fixture);
    check(&output, 0, "");
    assert!(!output_text(&output).contains("GPUs"), "{}", output_text(&output));
}

#[test]
fn processes_of_a_job_see_one_gpu_each() {
    let folder = tempfile::tempdir().unwrap();
    let script = "printf %s \"$CUDA_VISIBLE_DEVICES\" >seen; exit 78";
    let job = json!({
        "apiVersion": "stoker.dev/v1alpha1", "kind": "InferenceJob", "metadata": {"name": "job"},
        "spec": {
            "entrypoint": {"command": ["sh", "-c", script]}, "checkpoint": {"trial": "iris-0"},
            "input": {"url": "rows.csv"},
        },
    });
    let file = folder.path().join("job.yaml");
    std::fs::write(&file, job.to_string()).unwrap();
    let mut command = stoker();
    command.args(["job", "run"]).arg(file).arg(folder.path());
    command.arg("--root").arg(folder.path().join("root"));
    let output = command.env("CUDA_VISIBLE_DEVICES", "GPU-a,GPU-b").output().unwrap();
    check(&output, 1, "");
    assert_eq!(std::fs::read_to_string(folder.path().join("seen")).unwrap(), "GPU-a");
}
