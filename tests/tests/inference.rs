//! Batch inference processes each of 20,000 rows exactly once, although its workers and its runner
//! are killed at random times.
//!
//! `stoker job run` starts this test program as the worker: the test [`program`] doubles numbers.

use std::path::{Path, PathBuf};
use std::process::{Child, ExitCode, Output, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use stoker_tests::{said, stoker};
use stoker_trainer::{Context, Inference, Result};

use crate::interrupted::{Dice, no_orphans, seed, trainers};

#[derive(Deserialize, Serialize)]
struct Row {
    id: u64,
    text: String,
}

#[derive(Deserialize, Serialize)]
struct Doubled {
    id: u64,
    twice: u64,
    text: String,
}

/// Faults of the program, from the job's `data`.
#[derive(Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct Script {
    /// Duration of a batch in milliseconds.
    sleep_ms: u64,
    /// Number of missing outputs per batch.
    lacks: usize,
    /// ID of a row that `check` refuses.
    refuse: Option<u64>,
    /// ID of a row whose batch fails.
    crash: Option<u64>,
}

struct Doubler(Script);

impl Inference for Doubler {
    type Input = Row;
    type Output = Doubled;

    fn new(context: &Context) -> Result<Self> {
        Ok(Self(context.data()?))
    }

    fn check(&self, row: &Row) -> Result<()> {
        match self.0.refuse {
            Some(id) if id == row.id => Err("it is not wanted".into()),
            _ => Ok(()),
        }
    }

    fn batch(&mut self, rows: Vec<Row>) -> Result<Vec<Doubled>> {
        std::thread::sleep(Duration::from_millis(self.0.sleep_ms));
        if rows.iter().any(|row| Some(row.id) == self.0.crash) {
            return Err("boom: the model does not like it".into());
        }
        let kept = rows.len() - self.0.lacks;
        let doubled = |row: Row| Doubled { id: row.id, twice: 2 * row.id, text: row.text };
        Ok(rows.into_iter().take(kept).map(doubled).collect())
    }
}

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

/// A directory with a job file, its input and a storage root.
struct Bench {
    folder: tempfile::TempDir,
    spec: Value,
}

impl Bench {
    /// Creates a job of two slots. `files` has the number of rows of each input file; IDs are
    /// consecutive over all files.
    fn new(files: &[u64], extra: Value) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let input = folder.path().join("in");
        std::fs::create_dir(&input).unwrap();
        let mut id = 0;
        for (index, rows) in files.iter().enumerate() {
            let mut text = String::new();
            for _ in 0..*rows {
                let row = Row { id, text: format!("Zeile {id}: \"ä\", 日本\n") };
                text.push_str(&serde_json::to_string(&row).unwrap());
                text.push('\n');
                id += 1;
            }
            std::fs::write(input.join(format!("{index}.jsonl")), text).unwrap();
        }
        let this = std::env::current_exe().unwrap();
        let mut spec = json!({
            "entrypoint": {"command": [this, "--exact", "inference::program", "--nocapture"]},
            "input": {"url": "in/*.jsonl"},
            "output": {"url": "out"},
            "shardRows": 100,
            "batchRows": 32,
            "resources": {"slots": 2},
            "maxRestarts": 1,
        });
        spec.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
        Self { folder, spec }
    }

    fn root(&self) -> PathBuf {
        self.folder.path().join("root")
    }

    fn out(&self) -> PathBuf {
        self.folder.path().join("out")
    }

    fn command(&self, more: &[&str]) -> std::process::Command {
        let file = self.folder.path().join("job.yaml");
        let object = json!({
            "apiVersion": "stoker.dev/v1alpha1", "kind": "InferenceJob",
            "metadata": {"name": "double"}, "spec": self.spec,
        });
        std::fs::write(&file, object.to_string()).unwrap();
        let mut command = stoker(["job", "run", "--output", "json"]);
        command.arg(file).arg(self.folder.path()).arg("--root").arg(self.root()).args(more);
        command.stdin(Stdio::null());
        command
    }

    fn run(&self, more: &[&str]) -> Output {
        self.command(more).output().unwrap()
    }

    fn start(&self) -> Child {
        let log = self.folder.path().join("log");
        let log = std::fs::File::options().create(true).append(true).open(log).unwrap();
        let errors = log.try_clone().unwrap();
        self.command(&[]).stdout(log).stderr(errors).spawn().unwrap()
    }

    fn commits(&self) -> usize {
        let state = std::fs::read_dir(self.out().join("_stoker")).into_iter().flatten().flatten();
        let commits = |job: std::fs::DirEntry| std::fs::read_dir(job.path().join("commits")).ok();
        // A process that is killed while it writes leaves `NAME#NUMBER`.
        let is_complete =
            |file: &std::fs::DirEntry| !file.file_name().to_string_lossy().contains('#');
        state.filter_map(commits).flatten().flatten().filter(is_complete).count()
    }

    fn wait_for_commits(&self, num: usize) {
        let end = Instant::now() + Duration::from_secs(60);
        while self.commits() < num {
            assert!(Instant::now() < end, "no {num} commits within a minute");
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    fn manifest(&self) -> Value {
        let text = std::fs::read(self.out().join("manifest.json")).unwrap();
        serde_json::from_slice(&text).unwrap()
    }

    /// Returns the rows of all parts in manifest order, and checks size and hash of each part.
    fn rows(&self) -> Vec<Doubled> {
        let mut rows = vec![];
        for part in self.manifest()["parts"].as_array().unwrap() {
            let bytes = std::fs::read(self.out().join(part["name"].as_str().unwrap())).unwrap();
            let sha256: String =
                Sha256::digest(&bytes).iter().map(|byte| format!("{byte:02x}")).collect();
            assert_eq!(
                (part["bytes"].as_u64(), &part["sha256"]),
                (Some(bytes.len() as u64), &json!(sha256))
            );
            let before = rows.len();
            for line in String::from_utf8(bytes).unwrap().lines() {
                rows.push(serde_json::from_str::<Doubled>(line).unwrap());
            }
            assert_eq!(part["rows"], json!(rows.len() - before));
        }
        rows
    }

    /// Returns the files in the output directory, except the job's state.
    fn files(&self) -> Vec<String> {
        let entries = std::fs::read_dir(self.out()).unwrap().map(|entry| entry.unwrap());
        let names = entries.map(|entry| entry.file_name().into_string().unwrap());
        let mut names: Vec<_> = names.filter(|name| name != "_stoker").collect();
        names.sort();
        names
    }

    #[track_caller]
    fn check_each_once(&self, num: u64, context: &str) {
        let rows = self.rows();
        let ids: Vec<u64> = rows.iter().map(|row| row.id).collect();
        assert_eq!(ids, (0..num).collect::<Vec<_>>(), "{context}");
        for row in &rows {
            assert_eq!(row.twice, 2 * row.id);
            assert_eq!(row.text, format!("Zeile {}: \"ä\", 日本\n", row.id), "{context}");
        }
        let manifest = self.manifest();
        assert_eq!((&manifest["rows"], &manifest["inputRows"]), (&json!(num), &json!(num)));
        // Files of killed workers are deleted: only the manifest and the parts that it names are
        // left.
        let mut named: Vec<String> = manifest["parts"]
            .as_array()
            .unwrap()
            .iter()
            .map(|part| part["name"].as_str().unwrap().to_owned())
            .collect();
        named.push("manifest.json".to_owned());
        named.sort();
        assert_eq!(self.files(), named, "{context}");
    }
}

#[track_caller]
fn check(output: &Output, code: i32, contains: &str) {
    assert_eq!(output.status.code(), Some(code), "{}", said(output));
    assert!(said(output).contains(contains), "{contains:?} is not in: {}", said(output));
}

fn last_line(output: &Output) -> Value {
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    serde_json::from_str(text.lines().last().unwrap_or_else(|| panic!("{}", said(output)))).unwrap()
}

#[test]
fn kills_neither_lose_nor_duplicate_rows() {
    let extra = json!({"data": {"sleepMs": 25}, "maxRestarts": 1000});
    let bench = Bench::new(&[7_050, 1, 0, 12_949], extra);
    let seed = seed();
    let context = format!("seed {seed}");
    let mut dice = Dice(seed);
    let mut runner = bench.start();
    let mut killed = (0, 0);
    let end = Instant::now() + Duration::from_secs(300);
    let status = loop {
        let due = bench.commits() + 1 + dice.below(COMMITS_PER_KILL) as usize;
        while bench.commits() < due && runner.try_wait().unwrap().is_none() {
            assert!(Instant::now() < end, "{context}: not done in five minutes, {killed:?} kills");
            std::thread::sleep(Duration::from_millis(10));
        }
        // Kill at a random time within a shard.
        std::thread::sleep(Duration::from_millis(dice.below(100)));
        if let Some(status) = runner.try_wait().unwrap() {
            break status;
        }
        if killed.0 + killed.1 == KILLS_MAX {
            continue;
        }
        if dice.below(5) == 0 {
            runner.kill().unwrap();
            runner.wait().unwrap();
            no_orphans(&bench.root(), &context);
            runner = bench.start();
            killed.0 += 1;
            continue;
        }
        // The victim is a program or its supervisor.
        let all = trainers(&bench.root());
        if let Some(victim) = all.get(dice.below(all.len().max(1) as u64) as usize) {
            let _ = kill_process(*victim, Signal::KILL);
            killed.1 += 1;
        }
    };
    println!("{context}: killed the runner {} and workers {} times", killed.0, killed.1);
    let log = std::fs::read_to_string(bench.folder.path().join("log")).unwrap();
    let last: Vec<&str> = log.lines().rev().take(20).collect();
    assert_eq!(status.code(), Some(0), "{context}: {last:#?}");
    assert!(killed.0 + killed.1 >= 10, "{context}: only {killed:?} kills; increase sleepMs");
    bench.check_each_once(20_000, &context);
}

#[test]
fn completed_jobs_report_their_output_and_never_rerun() {
    let bench = Bench::new(&[250, 40], json!({}));
    let output = bench.run(&[]);
    check(&output, 0, "");
    let line = last_line(&output);
    assert_eq!(
        (&line["phase"], &line["rows"], &line["rejected"]),
        (&json!("Completed"), &json!(290), &json!(0))
    );
    assert_eq!(line["manifest"], json!(bench.out().canonicalize().unwrap().join("manifest.json")));
    assert_eq!(line["attempts"], 4, "not one planner, two workers and one finisher: {line}");
    bench.check_each_once(290, "calm");
    check(&bench.run(&[]), 0, "has completed already");
    // Another job must not replace the output, unless `--fresh` allows it.
    let first = bench.manifest();
    check(&bench.run(&["--fresh"]), 0, "new job");
    assert_ne!(bench.manifest()["jobId"], first["jobId"]);
    bench.check_each_once(290, "fresh");
    std::fs::remove_dir_all(bench.root()).unwrap();
    check(&bench.run(&[]), 1, "holds the output of job double");
    bench.check_each_once(290, "refused");
}

#[test]
fn a_killed_job_resumes_with_uncommitted_shards() {
    let bench = Bench::new(&[3_000], json!({"data": {"sleepMs": 80}}));
    let mut runner = bench.start();
    bench.wait_for_commits(4);
    runner.kill().unwrap();
    runner.wait().unwrap();
    no_orphans(&bench.root(), "after the kill");
    let before = bench.commits();
    let output = bench.command(&["--slots", "3"]).output().unwrap();
    check(&output, 0, "going on with");
    let attempts = last_line(&output)["attempts"].as_u64();
    assert_eq!(attempts, Some(8), "attempt numbers of both runs must be unique");
    assert!((4..30).contains(&before), "{before}");
    bench.check_each_once(3_000, "killed");
    // The second run did not process shards that the first run had committed. Attempts 1 and 2 are
    // the workers of the first run.
    let by_second_run = bench.manifest()["parts"]
        .as_array()
        .unwrap()
        .iter()
        .map(|part| part["name"].as_str().unwrap())
        .filter(|name| !name.ends_with("-1.jsonl") && !name.ends_with("-2.jsonl"))
        .count();
    assert_eq!(by_second_run, 30 - before);
}

#[test]
fn a_stopped_job_resumes() {
    let bench = Bench::new(&[2_000], json!({"data": {"sleepMs": 40}}));
    let runner = bench.command(&[]).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    bench.wait_for_commits(2);
    kill_process(Pid::from_child(&runner), Signal::INT).unwrap();
    let output = runner.wait_with_output().unwrap();
    check(&output, 3, "leave after the batch");
    assert_eq!(last_line(&output)["phase"], "Running");
    assert!(!bench.out().join("manifest.json").exists());
    no_orphans(&bench.root(), "after Ctrl-C");
    check(&bench.run(&[]), 0, "going on with");
    bench.check_each_once(2_000, "stopped");
}

#[test]
fn unreadable_rows_are_reported_or_skipped() {
    let mut bench = Bench::new(&[250], json!({"data": {"refuse": 7}}));
    let file = bench.folder.path().join("in/0.jsonl");
    let text = std::fs::read_to_string(&file).unwrap();
    std::fs::write(&file, text.replace("\"id\":120,", "\"id\":\"x\",")).unwrap();
    bench.spec["resources"] = json!({"slots": 1});
    let output = bench.run(&[]);
    check(&output, 1, "0.jsonl: row 8: it is not wanted; correct it, or set onError: skip");
    assert_eq!(last_line(&output)["attempts"], 2, "a bad row must not be retried");
    bench.spec["onError"] = json!("skip");
    check(&bench.run(&[]), 2, "spec.onError: was \"fail\", now \"skip\"");
    let output = bench.run(&["--fresh"]);
    check(&output, 0, "");
    assert_eq!(
        (&last_line(&output)["rows"], &last_line(&output)["rejected"]),
        (&json!(248), &json!(2))
    );
    let ids: Vec<u64> = bench.rows().iter().map(|row| row.id).collect();
    assert_eq!(ids, (0..250).filter(|id| ![7, 120].contains(id)).collect::<Vec<_>>());
    let errors = bench.manifest()["errors"].clone();
    let listed =
        std::fs::read_to_string(bench.out().join(errors["name"].as_str().unwrap())).unwrap();
    let listed = listed.lines().map(|line| serde_json::from_str(line).unwrap());
    let listed: Vec<Value> = listed.collect();
    assert_eq!((listed[0]["row"].as_u64(), listed[1]["row"].as_u64()), (Some(7), Some(120)));
    assert!(listed[1]["reason"].as_str().unwrap().contains("id: invalid type"), "{listed:?}");
}

#[test]
fn program_failures_are_retried_and_reported() {
    let bench = Bench::new(&[250], json!({"data": {"crash": 150}}));
    let output = bench.run(&[]);
    check(&output, 1, "worker 1 failed 2 times: boom: the model does not like it");
    // Another run keeps committed shards and resets the failure count.
    check(&bench.run(&[]), 1, "trying again with what is committed");
    let bench = Bench::new(&[250], json!({"data": {"lacks": 1}}));
    check(&bench.run(&[]), 1, "31 outputs for 32 inputs");
}

#[test]
fn changed_inputs_are_refused() {
    let change = |what: &dyn Fn(&Path), expected: &str| {
        let bench = Bench::new(&[1_000, 1_000], json!({"data": {"sleepMs": 40}}));
        let mut runner = bench.start();
        bench.wait_for_commits(2);
        runner.kill().unwrap();
        runner.wait().unwrap();
        no_orphans(&bench.root(), expected);
        what(&bench.folder.path().join("in"));
        check(&bench.run(&[]), 1, expected);
        assert!(!bench.out().join("manifest.json").exists());
    };
    let longer = |folder: &Path| {
        let text = std::fs::read_to_string(folder.join("1.jsonl")).unwrap();
        std::fs::write(folder.join("1.jsonl"), text + "{}\n").unwrap();
    };
    change(&longer, "there was 1.jsonl with");
    let more = |folder: &Path| std::fs::write(folder.join("2.jsonl"), "").unwrap();
    change(&more, "there was nothing, and is 2.jsonl with 0 bytes");
    let same_size = |folder: &Path| {
        let text = std::fs::read_to_string(folder.join("1.jsonl")).unwrap();
        std::fs::write(folder.join("1.jsonl"), text.replace("Zeile", "Seite")).unwrap();
    };
    change(&same_size, "are not what they were when the job began");
}

#[test]
fn invalid_jobs_are_refused_with_their_location() {
    let refused = |field: &str, value: Value, expected: &str| {
        let mut bench = Bench::new(&[1], json!({}));
        bench.spec[field] = value;
        check(&bench.run(&[]), 2, expected);
        assert!(!bench.root().exists());
    };
    refused("shardRow", json!(1), "did you mean `shardRows`?");
    refused("shardRows", json!(0), "must be at least 1");
    refused(
        "checkpoint",
        json!({}),
        "exactly one of trial, folder and stored must be set, but none is",
    );
    refused("entrypoint", json!({"command": ["./nothing"]}), "`./nothing`: no such program in");
    let mut bench = Bench::new(&[1], json!({}));
    bench.spec["input"] = json!({"url": "in/*.csv"});
    check(&bench.run(&[]), 1, "there is no such file");
    bench.spec["checkpoint"] = json!({"trial": "double-0"});
    bench.spec["input"] = json!({"url": "in"});
    check(&bench.run(&["--fresh"]), 1, "has no trial double-0");
}

#[test]
fn empty_inputs_give_an_output_without_rows() {
    let bench = Bench::new(&[0, 0], json!({}));
    check(&bench.run(&[]), 0, "");
    assert_eq!(bench.manifest()["parts"], json!([]));
    bench.check_each_once(0, "empty");
}
