//! Batch inference processes each of 20,000 rows exactly once, although its workers and its runner
//! are killed at random times.
//!
//! `stoker job run` starts this test program as the worker: the test [`program`] doubles numbers.

mod fixture;

use std::path::Path;
use std::process::{ExitCode, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};

use self::fixture::{Doubler, JobFixture, check, last_line};
use crate::interrupted::{SeededRng, seed, trainers, wait_until_no_trainers};

/// Not a test: the program of a worker. Does nothing in the test process itself.
#[test]
fn program() {
    if std::env::var_os("STOKER_TRIAL_CONFIG").is_some() {
        let code = stoker_trainer::infer::<Doubler>();
        // Exit here, because the test harness would replace the exit code.
        let code = (0..=u8::MAX).find(|number| ExitCode::from(*number) == code);
        std::process::exit(code.unwrap().into());
    }
}

/// Maximum number of kills. The job then completes undisturbed.
const KILLS_MAX: u32 = 60;
/// Maximum number of commits between two kills, out of 202 commits.
const COMMITS_PER_KILL: u64 = 12;

#[test]
fn kills_neither_lose_nor_duplicate_rows() {
    let extra = json!({"data": {"sleepMs": 25}, "maxRestarts": 1000});
    let fixture = JobFixture::new(&[7_050, 1, 0, 12_949], extra);
    let seed = seed();
    let context = format!("seed {seed}");
    let mut rng = SeededRng(seed);
    let mut runner = fixture.start();
    let mut killed = (0, 0);
    let end = Instant::now() + stoker_test_cluster::PATIENCE;
    let status = loop {
        let due = fixture.commits() + 1 + rng.below(COMMITS_PER_KILL) as usize;
        while fixture.commits() < due && runner.try_wait().unwrap().is_none() {
            assert!(Instant::now() < end, "{context}: not done in time, {killed:?} kills");
            std::thread::sleep(Duration::from_millis(10));
        }
        // Kill at a random time within a shard.
        std::thread::sleep(Duration::from_millis(rng.below(100)));
        if let Some(status) = runner.try_wait().unwrap() {
            break status;
        }
        if killed.0 + killed.1 == KILLS_MAX {
            continue;
        }
        if rng.below(5) == 0 {
            runner.kill().unwrap();
            runner.wait().unwrap();
            wait_until_no_trainers(&fixture.root(), &context);
            runner = fixture.start();
            killed.0 += 1;
            continue;
        }
        // The victim is a program or its supervisor.
        let all = trainers(&fixture.root());
        if let Some(victim) = all.get(rng.below(all.len().max(1) as u64) as usize) {
            let _ = kill_process(*victim, Signal::KILL);
            killed.1 += 1;
        }
    };
    println!("{context}: killed the runner {} and workers {} times", killed.0, killed.1);
    let log = std::fs::read_to_string(fixture.folder.path().join("log")).unwrap();
    let last: Vec<&str> = log.lines().rev().take(20).collect();
    assert_eq!(status.code(), Some(0), "{context}: {last:#?}");
    assert!(killed.0 + killed.1 >= 10, "{context}: only {killed:?} kills; increase sleepMs");
    fixture.check_each_once(20_000, &context);
}

#[test]
fn completed_jobs_report_their_output_and_never_rerun() {
    let fixture = JobFixture::new(&[250, 40], json!({}));
    let output = fixture.run(&[]);
    check(&output, 0, "");
    let line = last_line(&output);
    assert_eq!(
        (&line["phase"], &line["rows"], &line["rejected"]),
        (&json!("Completed"), &json!(290), &json!(0))
    );
    assert_eq!(
        line["manifest"],
        json!(fixture.out().canonicalize().unwrap().join("manifest.json"))
    );
    assert_eq!(line["attempts"], 4, "not one planner, two workers and one finisher: {line}");
    fixture.check_each_once(290, "calm");
    check(&fixture.run(&[]), 0, "has completed already");
    // Another job must not replace the output, unless `--fresh` allows it.
    let first = fixture.manifest();
    check(&fixture.run(&["--fresh"]), 0, "new job");
    assert_ne!(fixture.manifest()["jobId"], first["jobId"]);
    fixture.check_each_once(290, "fresh");
    std::fs::remove_dir_all(fixture.root()).unwrap();
    check(&fixture.run(&[]), 1, "holds the output of job double");
    fixture.check_each_once(290, "refused");
}

#[test]
fn completed_jobs_refuse_changed_input_and_missing_output() {
    let fixture = JobFixture::new(&[250], json!({}));
    check(&fixture.run(&[]), 0, "");
    let refused = |expected: &str| {
        check(&fixture.run(&[]), 2, expected);
        let description = fixture.describe();
        assert!(description.contains("Completed"), "{description}");
    };
    let file = fixture.folder.path().join("in/0.jsonl");
    let text = std::fs::read_to_string(&file).unwrap();
    std::fs::write(&file, format!("{text}{{}}\n")).unwrap();
    refused("its input in/*.jsonl has changed: expected 0.jsonl with");
    std::fs::write(&file, text).unwrap();
    check(&fixture.run(&[]), 0, "has completed already");
    std::fs::remove_dir_all(fixture.out()).unwrap();
    refused("its output is missing");
    check(&fixture.run(&["--fresh"]), 0, "new job");
    fixture.check_each_once(250, "fresh");
}

#[test]
fn a_killed_job_resumes_with_uncommitted_shards() {
    let fixture = JobFixture::new(&[3_000], json!({"data": {"sleepMs": 80}}));
    let mut runner = fixture.start();
    fixture.wait_for_commits(4);
    runner.kill().unwrap();
    runner.wait().unwrap();
    wait_until_no_trainers(&fixture.root(), "after the kill");
    let before = fixture.commits();
    let output = fixture.command(&["--slots", "3"]).output().unwrap();
    check(&output, 0, "resuming double-");
    let attempts = last_line(&output)["attempts"].as_u64();
    assert_eq!(attempts, Some(8), "attempt numbers of both runs must be unique");
    assert!((4..30).contains(&before), "{before}");
    fixture.check_each_once(3_000, "killed");
    // The second run did not process shards that the first run had committed. Attempts 1 and 2 are
    // the workers of the first run.
    let by_second_run = fixture.manifest()["parts"]
        .as_array()
        .unwrap()
        .iter()
        .map(|part| part["name"].as_str().unwrap())
        .filter(|name| !name.ends_with("-1.jsonl") && !name.ends_with("-2.jsonl"))
        .count();
    assert_eq!(by_second_run, 30 - before);
}

#[test]
fn descriptions_show_the_progress_of_running_jobs() {
    let fixture = JobFixture::new(&[3_000], json!({"data": {"sleepMs": 80}}));
    let mut runner = fixture.start();
    fixture.wait_for_commits(1);
    loop {
        let description = fixture.describe();
        let is_counted =
            description.contains(" of 3000 rows") && !description.contains(" 0 of 3000 rows");
        if is_counted && description.contains(", 2 running") {
            break;
        }
        assert!(runner.try_wait().unwrap().is_none(), "the job has ended: {description}");
        std::thread::sleep(Duration::from_millis(50));
    }
    runner.kill().unwrap();
    runner.wait().unwrap();
    wait_until_no_trainers(&fixture.root(), "after the kill");
    let description = fixture.describe();
    assert!(description.contains(", 0 running"), "{description}");
}

#[test]
fn a_stopped_job_resumes() {
    let fixture = JobFixture::new(&[2_000], json!({"data": {"sleepMs": 40}}));
    let runner =
        fixture.command(&[]).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    fixture.wait_for_commits(2);
    kill_process(Pid::from_child(&runner), Signal::INT).unwrap();
    let output = runner.wait_with_output().unwrap();
    check(&output, 3, "exit after their current batch");
    assert_eq!(last_line(&output)["phase"], "Running");
    assert!(!fixture.out().join("manifest.json").exists());
    wait_until_no_trainers(&fixture.root(), "after Ctrl-C");
    check(&fixture.run(&[]), 0, "resuming double-");
    fixture.check_each_once(2_000, "stopped");
}

#[test]
fn unreadable_rows_are_reported_or_skipped() {
    let mut fixture = JobFixture::new(&[250], json!({"data": {"refuse": 7}}));
    let file = fixture.folder.path().join("in/0.jsonl");
    let text = std::fs::read_to_string(&file).unwrap();
    std::fs::write(&file, text.replace("\"id\":120,", "\"id\":\"x\",")).unwrap();
    fixture.spec["resources"] = json!({"slots": 1});
    let output = fixture.run(&[]);
    check(&output, 1, "0.jsonl: row 8: it is not wanted; set onError: skip to resume without");
    assert_eq!(last_line(&output)["attempts"], 2, "a bad row must not be retried");
    fixture.spec["onError"] = json!("skip");
    let output = fixture.run(&[]);
    check(&output, 0, r#"changed: spec.onError: was "fail", now "skip""#);
    assert_eq!(
        (&last_line(&output)["rows"], &last_line(&output)["rejected"]),
        (&json!(248), &json!(2))
    );
    let description = fixture.describe();
    let progress = "100%, 250 of 250 rows, 2 of them rejected";
    assert!(description.contains(progress), "{description}");
    fixture.spec["onError"] = json!("fail");
    check(&fixture.run(&[]), 2, r#"spec.onError: was \"skip\", now \"fail\""#);
    let ids: Vec<u64> = fixture.rows().iter().map(|row| row.id).collect();
    assert_eq!(ids, (0..250).filter(|id| ![7, 120].contains(id)).collect::<Vec<_>>());
    let errors = fixture.manifest()["errors"].clone();
    let listed =
        std::fs::read_to_string(fixture.out().join(errors["name"].as_str().unwrap())).unwrap();
    let listed = listed.lines().map(|line| serde_json::from_str(line).unwrap());
    let listed: Vec<Value> = listed.collect();
    assert_eq!((listed[0]["row"].as_u64(), listed[1]["row"].as_u64()), (Some(7), Some(120)));
    assert!(listed[1]["reason"].as_str().unwrap().contains("id: invalid type"), "{listed:?}");
}

#[test]
fn program_failures_are_retried_and_reported() {
    let fixture = JobFixture::new(&[250], json!({"data": {"crash": 150}}));
    let output = fixture.run(&[]);
    check(&output, 1, "worker 1 failed 2 times: boom: the model does not like it");
    let description = fixture.describe();
    for part in [", 2 restarts", "Latest failures", "UserError", "ProgramFailed", "boom: "] {
        assert!(description.contains(part), "{part} is not in {description}");
    }
    // Another run keeps committed shards and resets the failure count.
    check(&fixture.run(&[]), 1, "retrying its uncommitted shards");
    let fixture = JobFixture::new(&[250], json!({"data": {"lacks": 1}}));
    check(&fixture.run(&[]), 1, "31 outputs for 32 inputs");
}

#[test]
fn changed_inputs_are_refused() {
    let change = |what: &dyn Fn(&Path), expected: &str| {
        let fixture = JobFixture::new(&[1_000, 1_000], json!({"data": {"sleepMs": 40}}));
        let mut runner = fixture.start();
        fixture.wait_for_commits(2);
        runner.kill().unwrap();
        runner.wait().unwrap();
        wait_until_no_trainers(&fixture.root(), expected);
        what(&fixture.folder.path().join("in"));
        check(&fixture.run(&[]), 1, expected);
        assert!(!fixture.out().join("manifest.json").exists());
    };
    let longer = |folder: &Path| {
        let text = std::fs::read_to_string(folder.join("1.jsonl")).unwrap();
        std::fs::write(folder.join("1.jsonl"), text + "{}\n").unwrap();
    };
    change(&longer, "expected 1.jsonl with");
    let more = |folder: &Path| std::fs::write(folder.join("2.jsonl"), "").unwrap();
    change(&more, "expected nothing, found 2.jsonl with 0 bytes");
    let same_size = |folder: &Path| {
        let text = std::fs::read_to_string(folder.join("1.jsonl")).unwrap();
        std::fs::write(folder.join("1.jsonl"), text.replace("Zeile", "Seite")).unwrap();
    };
    change(&same_size, "are not what they were when the job began");
}

#[test]
fn invalid_jobs_are_refused_with_their_location() {
    let refused = |field: &str, value: Value, expected: &str| {
        let mut fixture = JobFixture::new(&[1], json!({}));
        fixture.spec[field] = value;
        check(&fixture.run(&[]), 2, expected);
        assert!(!fixture.root().exists());
    };
    refused("shardRow", json!(1), "did you mean `shardRows`?");
    refused("shardRows", json!(0), "must be at least 1");
    refused(
        "checkpoint",
        json!({}),
        "exactly one of trial, folder and stored must be set, but none is",
    );
    refused("entrypoint", json!({"command": ["./nothing"]}), "`./nothing`: no such program in");
    let mut fixture = JobFixture::new(&[1], json!({}));
    fixture.spec["input"] = json!({"url": "in/*.csv"});
    check(&fixture.run(&[]), 1, "file not found");
    fixture.spec["checkpoint"] = json!({"trial": "double-0"});
    fixture.spec["input"] = json!({"url": "in"});
    check(&fixture.run(&["--fresh"]), 1, "trial double-0 not found in");
}

#[test]
fn empty_inputs_give_an_output_without_rows() {
    let fixture = JobFixture::new(&[0, 0], json!({}));
    check(&fixture.run(&[]), 0, "warning: the input has no rows");
    assert_eq!(fixture.manifest()["parts"], json!([]));
    fixture.check_each_once(0, "empty");
}
