//! Tests of `stoker run` whose search or disk reaches a limit, or whose file is edited.

use std::path::PathBuf;
use std::process::Command;

use serde_json::{Value, json};

use crate::fixture::{RunFixture, check, files, last_line, random, signal, stoker};

#[test]
fn limit_stops_trials_with_a_checkpoint() {
    let mut fixture = RunFixture::new(json!({"single": {}}), "").pause_at(7);
    fixture.spec["searcher"]["limits"] = json!({"seconds": 2});
    let output = fixture.run(&[]);
    check(&output, 0, "the search reached spec.searcher.limits.seconds, 2, with ");
    assert_eq!(last_line(&output)["phase"], "Completed");
    let trial = &fixture.trials()[0];
    assert_eq!(trial["status"]["attempts"][0]["end"], "Preempted", "{trial}");
    assert_eq!(trial["status"]["facts"][0]["closed"]["cause"], "Cancelled");
    // Nothing follows when the same command runs again.
    let again = fixture.run(&[]);
    check(&again, 0, "has completed already");
    assert_eq!(fixture.trials()[0], *trial);
    check(&fixture.continue_(&[]), 2, "raise or remove the limit");
    // Without the limit, the trial continues from its checkpoint.
    fixture.spec["searcher"].as_object_mut().unwrap().remove("limits");
    fixture.release();
    let edit = r#"changed numbers (spec.searcher.limits: was {"seconds":2}, now unset); files"#;
    check(&fixture.run(&[]), 0, edit);
    let trial = &fixture.trials()[0];
    assert_eq!(trial["status"]["attempts"][1]["resumedFrom"], "000000000007-0", "{trial}");
    assert_eq!(trial["status"]["phase"], "Completed");
    assert_eq!(facts(trial), ["closed", "reopened", "result", "closed"]);
}

/// Returns the directory of the only record.
fn record(fixture: &RunFixture) -> PathBuf {
    let runs = files(&fixture.root().join("local"));
    runs.iter().find(|path| path.is_dir()).expect("no run").join("record")
}

/// Returns the kinds of a trial's facts.
fn facts(trial: &Value) -> Vec<String> {
    let facts = trial["status"]["facts"].as_array().unwrap().iter();
    facts.map(|fact| fact.as_object().unwrap().keys().next().unwrap().clone()).collect()
}

#[test]
fn failed_trials_continue_from_their_checkpoints() {
    let fixture = RunFixture::new(random(2), "fault-at-7");
    let fault = fixture.folder.path().join("fault");
    std::fs::write(&fault, "").unwrap();
    check(&fixture.run(&[]), 1, "boom: the data has no labels");
    std::fs::remove_file(&fault).unwrap();
    check(&fixture.run(&[]), 1, "has failed already");
    check(&fixture.continue_(&[]), 2, "add --failed to continue the 2 that failed");
    check(&fixture.continue_(&["--failed"]), 0, "trials 0, 1 reopened; run `stoker run FILE`");
    // A repeated request has the same effect.
    check(&fixture.continue_(&["--failed"]), 0, "trials 0, 1 reopened");
    // A kill that met the end of trial 0 does not end its continuation, also if the runner was
    // killed before it recorded the end of the experiment.
    let mut experiment = fixture.experiment();
    experiment["status"]["phase"] = json!("Running");
    let record = record(&fixture);
    std::fs::write(record.join("experiment.json"), experiment.to_string()).unwrap();
    let request = json!({"version": 1, "killedTrials": [0]});
    std::fs::write(record.join("request.json"), request.to_string()).unwrap();
    check(&fixture.run(&[]), 0, "with reopened trials");
    let trials = fixture.trials();
    for trial in &trials {
        let status = &trial["status"];
        assert_eq!(status["attempts"][2]["number"], 2, "{status}");
        assert_eq!(status["attempts"][2]["resumedFrom"], "000000000005-0", "{status}");
        assert_eq!((&status["restarts"], &status["phase"]), (&json!(0), &json!("Completed")));
        assert_eq!(facts(trial), ["closed", "reopened", "result", "closed"]);
    }
    // The results are those of a run that nothing disturbed.
    let undisturbed = RunFixture::new(random(2), "");
    check(&undisturbed.run(&[]), 0, "");
    let result = |trial: &Value| {
        let facts = trial["status"]["facts"].as_array().unwrap();
        let result = facts.iter().find_map(|fact| fact.get("result")).unwrap();
        json!([result["units"], result["metric"], trial["spec"]["hyperparameters"]])
    };
    let expected: Vec<Value> = undisturbed.trials().iter().map(result).collect();
    assert_eq!(trials.iter().map(result).collect::<Vec<_>>(), expected);
    let best = |fixture: &RunFixture| last_line(&fixture.run(&[]))["best"]["metric"].clone();
    assert_eq!(best(&fixture), best(&undisturbed));
    check(&fixture.continue_(&["--failed"]), 2, "no trial has failed");
    let mut describe = stoker();
    describe.args(["trial", "describe", "scripted-0", "--root"]).arg(fixture.root());
    check(&describe.output().unwrap(), 0, "reopened by the user; it may train to 10 batches");
}

#[test]
fn trial_without_checkpoint_starts_from_scratch() {
    let mut fixture = RunFixture::new(json!({"single": {}}), "fault-at-7");
    fixture.spec["checkpointStorage"] = json!({"saveTrialBest": 0, "saveTrialLatest": 0});
    let fault = fixture.folder.path().join("fault");
    std::fs::write(&fault, "").unwrap();
    check(&fixture.run(&[]), 1, "");
    assert!(fixture.checkpoints().is_empty());
    std::fs::remove_file(&fault).unwrap();
    check(&fixture.continue_(&["--failed"]), 0, "without a checkpoint: trial 0");
    check(&fixture.run(&[]), 0, "");
    let attempts = &fixture.trials()[0]["status"]["attempts"];
    assert_eq!(attempts[2].get("resumedFrom"), None, "{attempts}");
}

#[test]
fn edited_file_continues_an_ended_run() {
    let mut fixture = RunFixture::new(random(2), "");
    check(&fixture.run(&[]), 0, "");
    let before = fixture.trials();
    // The requests of commands that met the end do not apply to what follows.
    let record = record(&fixture);
    let request = json!({"version": 1, "state": "cancelled", "killedTrials": [0]});
    std::fs::write(record.join("request.json"), request.to_string()).unwrap();
    // Neither does a deletion that was killed before it deleted anything.
    std::fs::write(record.join("deleted"), "").unwrap();
    fixture.spec["searcher"]["random"]["maxTrials"] = json!(4);
    fixture.spec["searcher"]["maxLength"] = json!({"batches": 12});
    check(&fixture.run(&[]), 0, "with changed numbers");
    fixture.check("trial list scripted", 0, "scripted-3");
    let after = fixture.trials();
    let units = |trial: &Value| {
        let facts = trial["status"]["facts"].as_array().unwrap().iter();
        facts.filter_map(|fact| fact["result"]["units"].as_u64()).collect::<Vec<_>>()
    };
    let expected = [vec![10, 12], vec![10, 12], vec![12], vec![12]];
    assert_eq!(after.iter().map(units).collect::<Vec<_>>(), expected);
    // Completed trials continue from their last checkpoints.
    for (before, after) in before.iter().zip(&after) {
        assert_eq!(facts(after), ["result", "closed", "reopened", "result", "closed"]);
        assert_eq!(after["status"]["facts"][0], before["status"]["facts"][0]);
        assert_eq!(after["status"]["attempts"][1]["resumedFrom"], "000000000010-0");
    }
    fixture.spec["searcher"]["random"]["maxTrials"] = json!(3);
    let output = fixture.run(&[]);
    check(&output, 2, "spec.searcher.random.maxTrials: must be at least 4");
    check(&output, 2, "repeat the --set of the earlier command; --fresh starts over");
    fixture.spec["searcher"]["random"]["maxTrials"] = json!(4);
    fixture.spec["searcher"]["metric"] = json!("accuracy");
    check(&fixture.run(&[]), 2, r#"spec.searcher.metric: was \"loss\", now \"accuracy\""#);
    assert_eq!(fixture.trials(), after);
}

#[test]
fn search_begins_with_trials_of_an_earlier_run() {
    let mut fixture = RunFixture::new(random(3), "");
    fixture.name = "second";
    fixture.spec["searcher"]["priorTrials"] = json!({"experiments": ["first"], "trials": 2});
    check(&fixture.run(&[]), 2, "priorTrials.experiments[0] is `first`: no such run in ");
    assert!(fixture.trials().is_empty());

    let prior = fixture.spec["searcher"].as_object_mut().unwrap().remove("priorTrials").unwrap();
    fixture.name = "first";
    check(&fixture.run(&[]), 0, "");
    let first = fixture.trials();
    let best = last_line(&fixture.run(&[]))["best"].clone();

    fixture.name = "second";
    fixture.spec["searcher"]["priorTrials"] = prior;
    fixture.spec["reproducibility"]["experimentSeed"] = json!(8);
    let output = fixture.run(&[]);
    check(&output, 0, "prior trials: 2 of first are in the space of this experiment; the best is ");
    check(&output, 0, &format!("first-{} ({})", best["trial"], best["metric"]));
    let second = |fixture: &RunFixture| {
        let all = fixture.trials().into_iter().filter(|trial| !first.contains(trial));
        all.map(|trial| trial["spec"]["hyperparameters"].clone()).collect::<Vec<_>>()
    };
    let is_of_first = |hyperparameters: &Value| {
        first.iter().any(|trial| trial["spec"]["hyperparameters"] == *hyperparameters)
    };
    let before = second(&fixture);
    assert_eq!(before[0], best["hyperparameters"]);
    assert_eq!(before.iter().map(is_of_first).collect::<Vec<_>>(), [true, true, false]);
    // The record has these trials, so the earlier run is not read again.
    let records = fixture.root().join("local");
    std::fs::remove_file(records.join("default.first.current")).unwrap();
    fixture.spec["searcher"]["random"]["maxTrials"] = json!(4);
    let edit = "with changed numbers (spec.searcher.random.maxTrials: was 3, now 4); files in ";
    check(&fixture.run(&[]), 0, edit);
    assert_eq!(second(&fixture)[..3], before);
}

/// The file that names the latest run was deleted.
#[test]
fn new_run_names_the_unfinished_run() {
    let fixture = RunFixture::new(json!({"single": {}}), "").pause_at(7);
    let child = fixture.start();
    fixture.wait_for_batch(7);
    signal(&child, rustix::process::Signal::TERM);
    check(&child.wait_with_output().unwrap(), 3, "stopped; run the same command again");
    fixture.release();
    let uid = fixture.experiment()["metadata"]["uid"].as_str().unwrap().to_owned();
    let id = format!("scripted-{}", &uid[..8]);
    let pointer = fixture.root().join("local/default.scripted.current");
    std::fs::remove_file(&pointer).unwrap();
    let command = format!("echo {uid} >{}", pointer.display());
    check(
        &fixture.run(&[]),
        0,
        &format!("to resume {id} instead, stop this run, then use `{command}`"),
    );
    std::fs::write(pointer, format!("{uid}\n")).unwrap();
    check(&fixture.run(&[]), 0, &format!("resuming {id}"));
}

#[test]
fn limit_of_file_sizes_is_reported() {
    let fixture = RunFixture::new(json!({"single": {}}), "");
    let command = fixture.command(&[]);
    let mut limited = Command::new("sh");
    limited.args(["-c", r#"ulimit -f 1; exec "$0" "$@""#]).arg(command.get_program());
    let output = limited.args(command.get_args()).output().unwrap();
    check(&output, 1, "File too large (os error 27); raise the limit of file sizes with `ulimit");
    check(&fixture.run(&[]), 0, "");
}
