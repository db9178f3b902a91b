//! Tests of `stoker run` as a process.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use serde_json::{Value, json};
use stoker_api::time::Timestamp;

use crate::fixture::{
    RunFixture, check, deterministic_fields, files, last_line, output_text, random, signal, stoker,
    wait_until,
};

#[test]
fn grid_completes_and_reports_the_best_trial() {
    let fixture = RunFixture::new(json!({"grid": {}}), "");
    let output = fixture.run(&[]);
    check(&output, 0, "");
    let line = last_line(&output);
    assert_eq!((&line["phase"], &line["trials"]), (&json!("Completed"), &json!(3)), "{line}");
    assert_eq!(line["experiment"], "scripted");
    let trials = fixture.trials();
    let metric = |trial: &Value| {
        trial["status"]["facts"][0]["result"]["metric"].as_str().unwrap().to_owned()
    };
    let best = trials.iter().map(metric).min().unwrap();
    assert_eq!(line["best"]["metric"], json!(best.parse::<f64>().unwrap()));
    let index = line["best"]["trial"].as_u64().unwrap() as usize;
    assert_eq!(line["best"]["hyperparameters"], trials[index]["spec"]["hyperparameters"]);
    let checkpoint = PathBuf::from(line["best"]["checkpoint"].as_str().unwrap());
    assert!(checkpoint.join("manifest.json").is_file(), "{}", checkpoint.display());
    // Retention keeps the best and the latest checkpoint of each trial: here the same one.
    let trial = checkpoint.parent().unwrap().parent().unwrap();
    assert_eq!(files(&trial.join("checkpoints")), std::slice::from_ref(&checkpoint));
    let log = std::fs::read_to_string(trial.join("logs/0/0-00000000.log")).unwrap();
    assert!(log.contains("attempt 0 trains"), "{log}");
    assert!(trial.join("record.json").is_file());
    let record: Value =
        serde_json::from_slice(&std::fs::read(trial.join("record.json")).unwrap()).unwrap();
    assert_eq!(record, trials[index], "the copy next to the files equals the record");
    // At the end, files of killed attempts are deleted too: partial, unreported and staged ones.
    for file in ["3-0/model", "4-0/model", "4-0/manifest.json", "5-0/model#1"] {
        let path = trial.join("checkpoints").join(format!("00000000000{file}"));
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, "x").unwrap();
    }
    // A second run has nothing to train and reports the same outcome.
    let again = fixture.run(&[]);
    check(&again, 0, "");
    assert_eq!(last_line(&again), line);
    assert_eq!(fixture.trials(), trials);
    assert_eq!(files(&trial.join("checkpoints")), [checkpoint]);
}

#[test]
fn failing_program_is_restarted_up_to_max_restarts() {
    let fixture = RunFixture::new(json!({"single": {}}), "fail");
    let output = fixture.run(&[]);
    check(&output, 1, "boom: the data has no labels");
    check(&output, 1, "add `--test` to this command; it finds such errors within seconds");
    let trial = &fixture.trials()[0];
    assert_eq!(trial["status"]["attempts"].as_array().unwrap().len(), 2);
    assert_eq!(trial["status"]["phase"], "Failed");
}

/// The fault outlasts three attempts, which would take less than a second without waits.
#[test]
fn infrastructure_failures_are_retried_with_growing_waits() {
    let fixture = RunFixture::new(json!({"single": {}}), "fault");
    let fault = fixture.folder.path().join("fault");
    std::fs::write(&fault, "").unwrap();
    let log = fixture.folder.path().join("output");
    let file = std::fs::File::create(&log).unwrap();
    let mut command = fixture.command(&[]);
    let mut child = command.stdout(file.try_clone().unwrap()).stderr(file).spawn().unwrap();
    let has_third = |trial: &Value| trial["status"]["attempts"][2]["end"] == "Infrastructure";
    wait_until("the third attempt", || fixture.trials().iter().any(has_third));
    std::fs::remove_file(fault).unwrap();
    let status = child.wait().unwrap();
    let text = std::fs::read_to_string(&log).unwrap();
    assert!(status.success(), "{text}");
    let is_second_end = |line: &str| {
        serde_json::from_str::<Value>(line)
            .is_ok_and(|line| line["event"] == "ended" && line["attempt"] == 1)
    };
    // The message has the rest of the wait, which the load of the machine shortens.
    let next = text.lines().skip_while(|line| !is_second_end(line)).nth(1).unwrap_or_default();
    assert!(next.starts_with("trial 0: the next attempt starts in "), "{text}");
    let trial = &fixture.trials()[0];
    let attempts = trial["status"]["attempts"].as_array().unwrap();
    assert_eq!((attempts.len(), &trial["status"]["restarts"]), (4, &json!(0)), "{trial}");
    let time = |attempt: usize, name: &str| -> Timestamp {
        attempts[attempt][name].as_str().unwrap().parse().unwrap()
    };
    // Timestamps are rounded down to seconds.
    for (attempt, seconds) in [(2, 2), (3, 4)] {
        let wait = time(attempt, "startedAt").seconds_since(time(attempt - 1, "endedAt"));
        assert!(wait >= seconds, "attempt {attempt} waited {wait} s: {trial}");
    }
}

#[test]
fn restart_resumes_from_the_last_checkpoint() {
    let fixture = RunFixture::new(json!({"single": {}}), "crash-once");
    let output = fixture.run(&[]);
    check(&output, 0, "");
    assert!(!output_text(&output).contains("finds such"), "{}", output_text(&output));
    let attempts = &fixture.trials()[0]["status"]["attempts"];
    assert_eq!(attempts[0]["end"], "UserError");
    assert_eq!(attempts[1]["resumedFrom"], "000000000005-0");
}

#[test]
fn invalid_hyperparameters_are_replaced() {
    let fixture = RunFixture::new(random(2), "invalid-first");
    let output = fixture.run(&[]);
    check(&output, 0, "hint: add `--test` to this command");
    let phases: Vec<Value> =
        fixture.trials().iter().map(|trial| trial["status"]["phase"].clone()).collect();
    assert_eq!(phases, ["Failed", "Completed", "Completed"]);
    let file = fixture.folder.path().join("experiment.yaml");
    let text = fixture.check(&format!("run {}", file.display()), 0, "");
    let position = |part: &str| text.find(part).unwrap_or_else(|| panic!("{part}: {text}"));
    assert!(position("trial 0 failed: ") < position("experiment scripted completed"), "{text}");
}

#[test]
fn report_server_refuses_invalid_tokens_and_reports() {
    check(&RunFixture::new(json!({"single": {}}), "knock").run(&[]), 0, "");
}

#[test]
fn token_of_an_old_attempt_is_fenced() {
    let fixture = RunFixture::new(json!({"single": {}}), "old-token");
    check(&fixture.run(&[]), 0, "");
    let status = &fixture.trials()[0]["status"];
    assert_eq!(status["attempts"].as_array().unwrap().len(), 2);
    assert_ne!(status["bestMetric"], "-1.0", "a report of the old attempt was recorded");
}

#[test]
fn killed_runner_resumes_with_the_same_results() {
    // With eight checkpoints per trial, the search cannot end before the last kill.
    let long = || {
        let mut searcher = random(4);
        searcher["maxLength"] = json!({"batches": 40});
        RunFixture::new(searcher, "")
    };
    let undisturbed = long();
    check(&undisturbed.run(&[]), 0, "");
    for mut fixture in [long(), long().run_in_shell()] {
        fixture.spec["data"]["sleepMs"] = json!(30);
        kill_runners(&fixture, 3);
        check(&fixture.run(&[]), 0, "");
        assert_eq!(
            deterministic_fields(&fixture.trials()),
            deterministic_fields(&undisturbed.trials())
        );
        let attempts = |trial: &Value| trial["status"]["attempts"].as_array().unwrap().clone();
        let attempts: Vec<Value> = fixture.trials().iter().flat_map(attempts).collect();
        let resumed = attempts.iter().filter(|attempt| attempt["resumedFrom"].is_string()).count();
        assert!(resumed >= 3, "each kill interrupts a trial that had a checkpoint: {attempts:#?}");
    }
}

/// Starts and kills a runner several times. Each kill waits for a checkpoint that is newer than the
/// previous kill. No trainer may outlive the runner.
pub(crate) fn kill_runners(fixture: &RunFixture, times: u32) {
    let mut before = BTreeSet::new();
    for _ in 0..times {
        let mut child = fixture.start();
        fixture.wait_for_checkpoint_after(&before);
        assert!(child.try_wait().unwrap().is_none(), "the search ended before the kill");
        signal(&child, rustix::process::Signal::KILL);
        child.wait().unwrap();
        wait_until("the exit of all trainers", || !fixture.is_any_trainer_alive());
        before.extend(fixture.checkpoints());
    }
}

#[test]
fn trainer_in_a_shell_checkpoints_on_stop_request() {
    // Batch 7 is after the only checkpoint that the trainer saves without a request.
    let fixture = RunFixture::new(json!({"single": {}}), "").run_in_shell().pause_at(7);
    let child = fixture.start();
    fixture.wait_for_batch(7);
    signal(&child, rustix::process::Signal::HUP);
    check(&child.wait_with_output().unwrap(), 3, "");
    assert!(!fixture.is_any_trainer_alive());
    fixture.release();
    check(&fixture.run(&[]), 0, "");
    let attempts = &fixture.trials()[0]["status"]["attempts"];
    assert_eq!(attempts[0]["end"], "Preempted", "{attempts}");
    let from = attempts[1]["resumedFrom"].as_str().unwrap();
    assert!(from > "000000000005-0", "{attempts}");
}

/// `nohup`, or a shell without job control, starts a program with these signals ignored.
#[test]
fn inherited_ignored_signals_stay_ignored() {
    let mut fixture = RunFixture::new(json!({"single": {}}), "");
    fixture.spec["data"]["sleepMs"] = json!(50);
    let plain = fixture.command(&[]);
    let mut command = Command::new("env");
    command.arg("--ignore-signal=HUP,INT").args(plain.get_args().skip(1)).stdin(Stdio::null());
    let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    fixture.wait_for_checkpoint();
    let trainer = files(&fixture.folder.path().join("pids")).pop().unwrap();
    let trainer = trainer.file_name().unwrap().to_str().unwrap().to_owned();
    for pid in [child.id().to_string(), trainer] {
        let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
        let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:")).unwrap();
        let mask = u64::from_str_radix(mask.trim(), 16).unwrap();
        assert_eq!(mask & 3, 3, "process {pid} ignores neither SIGHUP nor SIGINT: {status}");
    }
    signal(&child, rustix::process::Signal::HUP);
    signal(&child, rustix::process::Signal::INT);
    check(&child.wait_with_output().unwrap(), 0, "");
    let trial = &fixture.trials()[0];
    assert_eq!(trial["status"]["attempts"].as_array().unwrap().len(), 1, "{trial}");
}

#[test]
fn trial_resumes_after_its_supervisor_is_killed() {
    let fixture = RunFixture::new(json!({"single": {}}), "").pause_at(7);
    let child = fixture.start();
    fixture.wait_for_batch(7);
    let pid = files(&fixture.folder.path().join("pids")).pop().unwrap();
    let stat = Path::new("/proc").join(pid.file_name().unwrap()).join("stat");
    let stat = std::fs::read_to_string(stat).unwrap();
    let parent = stat.rsplit_once(')').unwrap().1.split_whitespace().nth(1).unwrap().to_owned();
    let parent = rustix::process::Pid::from_raw(parent.parse().unwrap()).unwrap();
    rustix::process::kill_process(parent, rustix::process::Signal::KILL).unwrap();
    fixture.release();
    check(&child.wait_with_output().unwrap(), 0, "");
    let trial = &fixture.trials()[0];
    assert_eq!(trial["status"]["attempts"][0]["end"], "Infrastructure", "{trial}");
    assert_eq!(trial["status"]["restarts"], 0);
}

#[test]
fn completed_run_is_not_run_again() {
    let fixture = RunFixture::new(json!({"single": {}}), "");
    check(&fixture.run(&[]), 0, "new run");
    check(&fixture.run(&[]), 0, "has completed already; use --fresh to start over");
}

#[test]
fn stopped_run_resumes() {
    let fixture = RunFixture::new(random(2), "").pause_at(7);
    let child = fixture.start();
    fixture.wait_for_batch(7);
    signal(&child, rustix::process::Signal::TERM);
    let output = child.wait_with_output().unwrap();
    fixture.release();
    check(&output, 3, "stopped; run the same command again, without --fresh, to resume");
    assert_eq!(last_line(&output)["phase"], "Paused");
    assert!(!fixture.is_any_trainer_alive());
    let was_preempted = |trial: &Value| trial["status"]["attempts"][0]["end"] == "Preempted";
    assert!(fixture.trials().iter().any(was_preempted));
    // The counts in the record are those of the end, although they are written less often.
    let status = &fixture.experiment()["status"];
    assert_eq!((&status["trialsRunning"], &status["trialsClosed"]), (&json!(0), &json!(0)));
    check(&fixture.run(&[]), 0, "");
    assert_eq!(fixture.trials()[0]["status"]["restarts"], 0);
}

#[test]
fn trainer_is_killed_after_the_preemption_timeout() {
    let mut fixture = RunFixture::new(json!({"single": {}}), "deaf");
    fixture.spec["preemptionTimeoutSeconds"] = json!(1);
    let child = fixture.start();
    fixture.wait_for_checkpoint();
    signal(&child, rustix::process::Signal::TERM);
    let output = child.wait_with_output().unwrap();
    check(&output, 3, "killed: the program did not exit in time");
    assert!(!fixture.is_any_trainer_alive());
    assert_eq!(fixture.trials()[0]["status"]["restarts"], 0);
}

#[test]
fn long_trial_keeps_few_checkpoints() {
    let searcher = json!({"single": {}, "maxLength": {"batches": 400}});
    let fixture = RunFixture::new(searcher, "").pause_at(203);
    let child = fixture.start();
    fixture.wait_for_batch(203);
    let newest = (0, "000000000200-0".to_owned());
    wait_until("the newest checkpoint", || fixture.checkpoints().contains(&newest));
    let kept = fixture.checkpoints().len();
    signal(&child, rustix::process::Signal::TERM);
    check(&child.wait_with_output().unwrap(), 3, "");
    assert!(kept < 10, "{kept} checkpoints are kept of 40");
    fixture.release();
    check(&fixture.run(&[]), 0, "");
    let attempts = &fixture.trials()[0]["status"]["attempts"];
    assert_eq!(attempts[0]["end"], "Preempted");
    let last = attempts[1]["resumedFrom"].as_str().unwrap();
    assert!(last > "000000000200-0", "resumed from {last}");
}

#[test]
fn only_the_best_checkpoints_are_retained() {
    let mut fixture = RunFixture::new(random(5), "");
    fixture.spec["checkpointStorage"] =
        json!({"saveExperimentBest": 2, "saveTrialBest": 0, "saveTrialLatest": 0});
    check(&fixture.run(&[]), 0, "");
    let mut trials = fixture.trials();
    let metric = |trial: &Value| -> f64 {
        let metric = &trial["status"]["facts"][0]["result"]["metric"];
        metric.as_str().unwrap().parse().unwrap()
    };
    trials.sort_by(|a, b| metric(a).total_cmp(&metric(b)));
    assert!(metric(&trials[1]) < metric(&trials[2]), "the seed must give different results");
    let best = trials[..2].iter().map(|trial| trial["spec"]["index"].as_u64().unwrap());
    // Each trial saves a checkpoint without a metric at batch 5, and one with a metric at the end.
    let best = best.map(|trial| (trial, "000000000010-0".to_owned()));
    let best: BTreeSet<_> = best.collect();
    assert_eq!(fixture.checkpoints(), best, "the record");
    assert_eq!(fixture.stored_checkpoints(), best, "the storage");
}

#[test]
fn second_runner_is_refused_with_the_holder() {
    let fixture = RunFixture::new(random(2), "").pause_at(7);
    let mut child = fixture.start();
    fixture.wait_for_batch(7);
    check(&fixture.run(&[]), 1, &format!("process {}", child.id()));
    signal(&child, rustix::process::Signal::TERM);
    child.wait().unwrap();
}

#[test]
fn changed_file_is_refused_without_fresh() {
    let mut fixture = RunFixture::new(json!({"single": {}}), "");
    check(&fixture.run(&[]), 0, "");
    fixture.spec["maxRestarts"] = json!(3);
    let refused = fixture.run(&[]);
    check(&refused, 2, "spec.maxRestarts: was 1, now 3");
    check(&refused, 2, "--fresh");
    check(&fixture.run(&["--fresh"]), 0, "");
    assert_eq!(fixture.trials().len(), 2, "the record of the earlier run must be kept");
}

#[test]
fn unrunnable_experiment_is_refused_before_any_write() {
    let check_refused = |field: &str, value: Value, contains: &str| {
        let mut fixture = RunFixture::new(json!({"single": {}}), "");
        fixture.spec[field] = value;
        check(&fixture.run(&[]), 2, contains);
        assert!(!fixture.root().exists());
    };
    let mut fixture = RunFixture::new(json!({"single": {}}), "");
    fixture.spec["resources"] = json!({"slotsPerTrial": 2});
    check(&fixture.run(&["--slots", "1"]), 2, "slotsPerTrial is 2, but --slots is 1");
    assert!(!fixture.root().exists());
    check_refused("entrypoint", json!({"command": ["no-such-program"]}), "no-such-program");
    check_refused("maxRestart", json!(1), "maxRestart");
}

#[test]
fn local_runs_are_listed_and_described() {
    let fixture = RunFixture::new(random(2), "");
    check(&fixture.run(&[]), 0, "");
    let check_shown = |args: &[&str], contains: &str| {
        for output in ["json", "text"] {
            let mut command = stoker();
            command.args(args).args(["--output", output, "--root"]).arg(fixture.root());
            check(&command.output().unwrap(), 0, contains);
        }
    };
    check_shown(&["experiment", "list"], "scripted");
    check_shown(&["experiment", "describe", "scripted"], "Completed");
    let mut command = stoker();
    command.args(["experiment", "describe", "scripted", "--root"]).arg(fixture.root());
    let text = String::from_utf8(command.output().unwrap().stdout).unwrap();
    assert!(text.contains("completed all 10 batches with"), "{text}");
    assert!(text.contains("Importance: needs 10 results at one length, has 2"), "{text}");
    assert!(!text.contains("requestId"), "the text has the record: {text}");
    check_shown(&["trial", "list", "scripted"], "Completed");
    check_shown(&["trial", "describe", "scripted", "1"], "scripted-1");
    check_shown(&["trial", "logs", "scripted", "0"], "trial 0 attempt 0 trains");
    check_shown(&["checkpoint", "list", "scripted"], "000000000010-0");
    let mut command = stoker();
    command.args(["trial", "list", "nothing", "--root"]).arg(fixture.root());
    check(&command.output().unwrap(), 2, "no run of `nothing`");
}

#[test]
fn programs_keep_the_limit_of_open_files() {
    let parent = std::process::id().to_string();
    let mut command = stoker();
    command.args(["supervise", "--open-files", "99", "--parent", &parent, "--"]);
    check(&command.args(["sh", "-c", "ulimit -Sn"]).output().unwrap(), 0, "99\n");
}
