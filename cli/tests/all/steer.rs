//! Tests of commands that pause, end, follow and delete local runs.

use std::io::{BufRead as _, BufReader, Write as _};
use std::process::{ChildStderr, Command, Stdio};

use serde_json::{Value, json};

use crate::fixture::{
    Lines, RunFixture, check, deterministic_fields, files, last_line, random, signal, wait_until,
};

/// A search of two trials that are held at batch 7.
fn held() -> RunFixture {
    RunFixture::new(random(2), "").pause_at(7)
}

/// Returns a file of the only record.
fn record(fixture: &RunFixture, name: &str) -> std::path::PathBuf {
    let runs = files(&fixture.root().join("local"));
    runs.iter().find(|path| path.is_dir()).expect("no run").join("record").join(name)
}

fn lines(stderr: ChildStderr) -> impl Iterator<Item = String> {
    BufReader::new(stderr).lines().map(Result::unwrap)
}

fn wait_for_phase(fixture: &RunFixture, phase: &str) {
    wait_until(phase, || fixture.experiment()["status"]["phase"] == phase);
}

#[test]
fn paused_run_resumes_with_the_same_results() {
    let undisturbed = RunFixture::new(random(2), "");
    check(&undisturbed.run(&[]), 0, "");
    let fixture = held();
    let child = fixture.start();
    fixture.wait_for_batch(7);
    fixture.check("experiment pause scripted", 0, "its trials checkpoint and exit");
    wait_for_phase(&fixture, "Paused");
    assert!(!fixture.is_any_trainer_alive());
    assert_eq!(fixture.experiment()["spec"]["state"], "paused");
    assert!(fixture.checkpoints().contains(&(0, "000000000007-0".to_owned())));
    fixture.check("experiment list", 0, "Paused");
    fixture.check("experiment pause scripted", 0, "the desired state is already paused");
    fixture.release();
    fixture.check("experiment activate scripted", 0, "experiment scripted resumes");
    let output = child.wait_with_output().unwrap();
    check(&output, 0, "paused; waiting for");
    check(&output, 0, "activated: trials resume");
    assert_eq!(
        deterministic_fields(&fixture.trials()),
        deterministic_fields(&undisturbed.trials())
    );
    let trial = &fixture.trials()[0]["status"];
    assert_eq!(trial["attempts"][0]["end"], "Preempted");
    assert_eq!(trial["attempts"][1]["resumedFrom"], "000000000007-0");
    assert_eq!(trial["restarts"], 0);
}

/// The pause outlasts its runner, and each later one, until it is ended.
#[test]
fn run_without_runner_stays_paused_until_activated() {
    let fixture = held();
    let child = fixture.start();
    fixture.wait_for_batch(7);
    fixture.check("experiment pause scripted", 0, "");
    wait_for_phase(&fixture, "Paused");
    wait_until("cause of the pause", || {
        fixture.trials()[0]["status"]["attempts"][0]["message"] == "the experiment was paused"
    });
    signal(&child, rustix::process::Signal::TERM);
    let output = child.wait_with_output().unwrap();
    check(&output, 3, "the experiment stays paused until `stoker experiment activate scripted");
    fixture.release();
    let attempts = || fixture.trials()[0]["status"]["attempts"].as_array().unwrap().len();
    let mut waiting = fixture.command(&[]).stderr(Stdio::piped()).spawn().unwrap();
    let mut lines = lines(waiting.stderr.take().unwrap());
    assert!(lines.any(|line| line.starts_with("paused; `stoker experiment activate")));
    signal(&waiting, rustix::process::Signal::TERM);
    waiting.wait().unwrap();
    assert_eq!(attempts(), 1, "a paused run has started a trial");
    fixture.check("experiment activate scripted", 0, "`stoker run FILE` runs it");
    check(&fixture.run(&[]), 0, "");
    assert_eq!(fixture.experiment()["status"]["phase"], "Completed");
    fixture.check("experiment pause scripted", 2, "it has ended (Completed)");
}

#[test]
fn new_run_has_the_state_of_its_file() {
    let mut fixture = RunFixture::new(random(1), "");
    fixture.spec["state"] = json!("cancelled");
    let output = fixture.run(&[]);
    check(&output, 3, "cancelled");
    assert_eq!(last_line(&output)["phase"], "Cancelled");
    assert_eq!(fixture.trials(), Vec::<Value>::new());
    fixture.spec["state"] = json!("active");
    check(&fixture.run(&[]), 3, "was cancelled already; use --fresh to start over");
}

#[test]
fn cancelled_trials_checkpoint() {
    let fixture = held();
    let child = fixture.start();
    fixture.wait_for_batch(7);
    fixture.check("experiment cancel scripted", 0, "being cancelled");
    let output = child.wait_with_output().unwrap();
    check(&output, 3, "cancelled; waiting for");
    assert_eq!(last_line(&output)["phase"], "Cancelled");
    assert!(fixture.stored_checkpoints().contains(&(0, "000000000007-0".to_owned())));
    let phases: Vec<Value> =
        fixture.trials().iter().map(|trial| trial["status"]["phase"].clone()).collect();
    assert_eq!(phases, ["Cancelled", "Cancelled"]);
    check(&fixture.run(&[]), 3, "was cancelled already; use --fresh to start over");
    fixture.check("experiment activate scripted", 2, "it has ended (Cancelled)");
    fixture.check("experiment continue scripted", 2, "it was cancelled");
}

#[test]
fn stalled_reader_does_not_delay_a_cancellation() {
    let fixture = held();
    // The pipe is full before the run writes its first line.
    let (reader, mut writer) = std::io::pipe().unwrap();
    rustix::io::ioctl_fionbio(&writer, true).unwrap();
    while matches!(writer.write(&[b'\n'; 4096]), Ok(1..)) {}
    rustix::io::ioctl_fionbio(&writer, false).unwrap();
    let mut child = fixture.command(&[]).stdout(writer).spawn().unwrap();
    fixture.wait_for_batch(7);
    fixture.check("experiment cancel scripted", 0, "being cancelled");
    wait_for_phase(&fixture, "Cancelled");
    let text = std::io::read_to_string(reader).unwrap();
    assert!(text.contains(r#""event":"started""#), "{text}");
    assert_eq!(child.wait().unwrap().code(), Some(3));
}

/// The trainers ignore all requests, so nothing but a kill ends them.
#[test]
fn killed_run_ends_at_once() {
    let fixture = RunFixture::new(random(2), "deaf");
    let child = fixture.start();
    fixture.wait_for_checkpoint();
    fixture.check("experiment cancel scripted", 0, "being cancelled");
    fixture.check("experiment activate scripted", 2, "can only be killed");
    fixture.check("experiment kill scripted", 0, "being killed");
    let output = child.wait_with_output().unwrap();
    check(&output, 3, "killed: ending");
    assert_eq!(last_line(&output)["phase"], "Cancelled");
    assert!(!fixture.is_any_trainer_alive());
    let attempt = &fixture.trials()[0]["status"]["attempts"][0];
    let expected = (&json!("RunnerLost"), &json!("killed by request"));
    assert_eq!((&attempt["end"], &attempt["message"]), expected);
}

#[test]
fn killed_trial_ends_and_the_others_continue() {
    let fixture = held();
    let child = fixture.start();
    fixture.wait_for_batch(7);
    fixture.check("trial kill scripted-0", 0, "trial scripted-0 is being killed");
    let end = || fixture.trials()[0]["status"]["phase"].clone();
    wait_until("the end of the trial", || end() == "Cancelled");
    fixture.check("trial kill scripted-0", 2, "it has ended (Cancelled)");
    fixture.check("trial kill scripted-7", 2, "not found");
    fixture.release();
    check(&child.wait_with_output().unwrap(), 0, "");
    let trials = fixture.trials();
    assert_eq!(trials[0]["spec"]["wanted"], "kill");
    assert_eq!(trials[1]["status"]["phase"], "Completed");
}

#[test]
fn run_without_runner_is_cancelled_at_once() {
    let fixture = held();
    let child = fixture.start();
    fixture.wait_for_batch(7);
    signal(&child, rustix::process::Signal::TERM);
    check(&child.wait_with_output().unwrap(), 3, "");
    fixture.check("experiment wait scripted", 3, "has stopped: no runner is alive");
    fixture.check("trial kill scripted-0", 0, "ends when `stoker run FILE` runs again");
    fixture.check("experiment cancel scripted", 0, "is cancelled; no runner was alive");
    fixture.check("experiment wait scripted", 3, "experiment scripted was cancelled");
    let ended = |trial: &Value| trial["status"]["phase"] == "Cancelled";
    assert!(fixture.trials().iter().all(ended), "{:?}", fixture.trials());
    // The copy next to the files is up to date.
    let runs = files(&fixture.root().join("default"));
    let copy = std::fs::read_to_string(runs[0].join("record.json")).unwrap();
    assert!(copy.contains("\"phase\": \"Cancelled\""), "{copy}");
}

#[test]
fn damaged_request_is_named_and_loses_nothing() {
    let fixture = held();
    let mut child = fixture.start();
    fixture.wait_for_batch(7);
    let request = record(&fixture, "request.json");
    std::fs::write(&request, r#"{"version": 2, "state": "killed"}"#).unwrap();
    fixture.check("experiment pause scripted", 2, "request.json: its version is 2");
    std::fs::write(&request, "{").unwrap();
    fixture.check("experiment pause scripted", 2, "delete the file");
    let mut lines = lines(child.stderr.take().unwrap());
    assert!(lines.any(|line| line.contains("the run continues unchanged")));
    signal(&child, rustix::process::Signal::TERM);
    check(&child.wait_with_output().unwrap(), 3, "");
    fixture.release();
    // A new runner resumes the run.
    check(&fixture.run(&[]), 0, &request.display().to_string());
    std::fs::remove_file(&request).unwrap();
    check(&fixture.run(&[]), 0, "has completed already");
}

#[test]
fn wait_returns_the_code_of_the_outcome() {
    for (script, code, expected) in [("", 0, "completed"), ("fail", 1, "failed")] {
        let fixture = RunFixture::new(random(1), script);
        check(&fixture.run(&[]), code, "");
        let expected = format!("experiment scripted {expected}");
        fixture.check("experiment wait scripted", code, &expected);
    }
    let fixture = held();
    let child = fixture.start();
    fixture.wait_for_batch(7);
    let timed_out = "timed out after 1s: experiment scripted is still Running";
    fixture.check("experiment wait scripted --timeout 1s", 3, timed_out);
    let mut command = fixture.stoker("experiment wait scripted --output json");
    let wait = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    fixture.release();
    let output = child.wait_with_output().unwrap();
    let waited = wait.wait_with_output().unwrap();
    check(&waited, 0, "");
    assert_eq!(last_line(&waited), last_line(&output));
}

#[test]
fn wait_ends_with_a_killed_runner() {
    let fixture = held();
    let mut child = fixture.start();
    fixture.wait_for_batch(7);
    let mut command = fixture.stoker("experiment wait scripted");
    let mut wait = command.stderr(Stdio::piped()).spawn().unwrap();
    let mut lines = lines(wait.stderr.take().unwrap());
    assert!(lines.any(|line| line.contains("scripted: Running")));
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(lines.any(|line| line.contains("has stopped: no runner is alive")));
    assert_eq!(wait.wait().unwrap().code(), Some(3));
}

#[test]
fn delete_is_refused_while_a_runner_lives() {
    let fixture = held();
    let child = fixture.start();
    fixture.wait_for_batch(7);
    let holder = format!("`scripted`: process {} on", child.id());
    fixture.check("experiment delete scripted", 2, &holder);
    fixture.release();
    check(&child.wait_with_output().unwrap(), 0, "");
    check(&fixture.run(&["--fresh"]), 0, "");
    let deleted = fixture.check("experiment delete scripted", 0, "and its trials deleted");
    assert!(deleted.contains("checkpoints, metrics and logs deleted from"), "{deleted}");
    assert_eq!(fixture.trials().len(), 2, "the earlier run is gone, too");
    fixture.check("experiment delete scripted", 2, "name an earlier one by its run ID");
    let id =
        fixture.json("experiment list")[0]["metadata"]["uid"].as_str().unwrap()[..8].to_owned();
    fixture.check(&format!("experiment delete scripted-{id}"), 0, "");
    assert_eq!(fixture.stored_checkpoints(), [].into());
    assert!(files(&fixture.root().join("local")).iter().all(|path| path.is_file()));
    check(&fixture.run(&[]), 0, "new run");
}

#[test]
fn interrupted_delete_is_finished_by_the_next() {
    let fixture = RunFixture::new(random(2), "");
    check(&fixture.run(&[]), 0, "");
    interrupt_delete(&fixture);
    fixture.check("experiment list", 0, "Completed");
    fixture.check("experiment delete scripted", 0, "and its trials deleted");
    assert!(files(&fixture.root().join("local")).iter().all(|path| path.is_file()));
    assert!(files(&fixture.root().join("default")).is_empty());
    fixture.check("experiment delete scripted", 2, "no run of `scripted`");
}

#[test]
fn run_with_a_damaged_record_can_be_deleted() {
    let fixture = RunFixture::new(random(2), "");
    check(&fixture.run(&[]), 0, "");
    std::fs::remove_file(record(&fixture, "trials/0.json")).unwrap();
    let missing = "0.json: the file is missing, although later trials have one; restore the file";
    check(&fixture.run(&[]), 1, missing);
    std::fs::write(record(&fixture, "trials/0.json"), "").unwrap();
    check(&fixture.run(&[]), 1, "0.json: EOF while parsing a value at line 1 column 0; restore");
    fixture.check("experiment list", 0, "; restore the file, or delete the run scripted-");
    fixture.check("experiment delete scripted", 0, "and its trials deleted");
    assert!(files(&fixture.root().join("local")).iter().all(|path| path.is_file()));
    assert!(files(&fixture.root().join("default")).is_empty());
}

/// Leaves the state of a deletion that was killed after the manifests.
fn interrupt_delete(fixture: &RunFixture) {
    std::fs::write(record(fixture, "deleted"), "").unwrap();
    std::fs::remove_dir_all(record(fixture, "trials")).unwrap();
    let local = files(&fixture.root().join("local"));
    let is_pointer =
        |path: &&std::path::PathBuf| path.extension().is_some_and(|end| end == "current");
    std::fs::remove_file(local.iter().find(is_pointer).unwrap()).unwrap();
    for trial in files(&files(&fixture.root().join("default"))[0].join("trials")) {
        for checkpoint in files(&trial.join("checkpoints")) {
            std::fs::remove_file(checkpoint.join("manifest.json")).unwrap();
        }
    }
}

/// Both followers print each line once, across attempts, and end with their target.
#[test]
fn followed_logs_contain_each_line_once() {
    let fixture = RunFixture::new(json!({"single": {}}), "crash-once").pause_at(6);
    let child = fixture.start();
    fixture.wait_for_batch(6);
    let of_trial = Lines::start(&mut fixture.stoker("trial logs scripted-0 --follow"));
    let mut of_all = Lines::start(&mut fixture.stoker("experiment logs scripted --follow"));
    // The first line is printed before the trial continues.
    let first = of_all.find(|line| line.contains("attempt 0 trains")).unwrap();
    assert!(first.starts_with("[trial=0] "), "{first}");
    fixture.release();
    check(&child.wait_with_output().unwrap(), 0, "");
    let of_trial: Vec<String> = of_trial.collect();
    let attempt = |number: u32| {
        let logs = format!("trial logs scripted-0 --attempt {number}");
        fixture.check(&logs, 0, "").lines().map(str::to_owned).collect::<Vec<_>>()
    };
    let all = [attempt(0), attempt(1)].concat();
    assert_eq!(of_trial, all);
    assert!(all.iter().any(|line| line.contains("boom")), "{all:?}");
    let rest: Vec<String> = of_all.collect();
    let expected = all.iter().skip_while(|line| !line.contains("attempt 0 trains")).skip(1);
    assert_eq!(rest, expected.map(|line| format!("[trial=0] {line}")).collect::<Vec<_>>());
    // A run that has ended is printed like without --follow.
    let ended = fixture.check("trial logs scripted-0 --follow", 0, "");
    assert_eq!(ended.lines().collect::<Vec<_>>(), attempt(1));
}

#[test]
fn followed_logs_end_with_a_killed_runner() {
    let fixture = held();
    let mut child = fixture.start();
    fixture.wait_for_batch(7);
    let mut command: Command = fixture.stoker("trial logs scripted-0 --follow --tail 1");
    let follow = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    child.kill().unwrap();
    child.wait().unwrap();
    check(&follow.wait_with_output().unwrap(), 0, "has stopped: no runner is alive");
}

/// The trial is held, so the follower has no other reason to end.
#[test]
fn followed_logs_end_with_their_reader() {
    let fixture = held();
    let mut child = fixture.start();
    fixture.wait_for_batch(7);
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let mut follow: Command = fixture.stoker("experiment logs scripted --follow");
    let mut follow = follow.stdout(writer).spawn().unwrap();
    wait_until("the end of the follower", || follow.try_wait().unwrap().is_some());
    child.kill().unwrap();
    child.wait().unwrap();
}
