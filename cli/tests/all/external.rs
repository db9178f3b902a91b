//! Tests of `stoker run` and `stoker simulate` with an external searcher, which is a Python script.

use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

use rustix::process::Signal;
use serde_json::{Value, json};

use crate::fixture::{RunFixture, check, last_line, output_text, signal, stoker, wait_until};

/// Returns an experiment that asks the script in its directory.
fn fixture() -> RunFixture {
    let mut fixture = RunFixture::new(json!({}), "");
    let script = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/all/searcher.py");
    let command = json!(["python3", script, fixture.folder.path()]);
    fixture.spec["searcher"]["external"] = json!({"command": command, "maxTrials": 3});
    fixture
}

fn write(fixture: &RunFixture, name: &str, text: &str) {
    std::fs::write(fixture.folder.path().join(name), text).unwrap();
}

fn remove(fixture: &RunFixture, name: &str) {
    std::fs::remove_file(fixture.folder.path().join(name)).unwrap();
}

fn exists(fixture: &RunFixture, name: &str) -> bool {
    fixture.folder.path().join(name).exists()
}

fn lines(fixture: &RunFixture, name: &str) -> Vec<Value> {
    let text = std::fs::read_to_string(fixture.folder.path().join(name)).unwrap_or_default();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// Checks that the answers had their effects once, and that each event was asked in one call.
fn check_search(fixture: &RunFixture) {
    let trials = fixture.trials();
    let of = |trial: &Value| {
        let units = |fact: &Value| fact["result"]["units"].as_u64();
        let facts = trial["status"]["facts"].as_array().unwrap();
        let units: Vec<u64> = facts.iter().filter_map(units).collect();
        (trial["spec"]["tag"].clone(), trial["spec"]["hyperparameters"]["x"].clone(), units)
    };
    let trials: Vec<_> = trials.iter().map(of).collect();
    let expected = [
        (json!("t0"), json!(0), vec![4, 10]),
        (json!("t1"), json!(0.25), vec![4]),
        (json!("t2"), json!(0.5), vec![4, 10]),
    ];
    assert_eq!(trials, expected);
    let mut events = std::collections::BTreeMap::new();
    for question in lines(fixture, "questions") {
        for event in question["events"].as_array().unwrap() {
            let (order, call) = (event["order"].as_u64().unwrap(), question["call"].clone());
            assert_eq!(events.entry(order).or_insert(call.clone()), &call, "{event}");
        }
    }
    // The beginning, five results, and nothing else.
    assert_eq!(events.len(), 6, "{events:?}");
}

fn experiment(fixture: &RunFixture) -> Value {
    let find = |folder: PathBuf| {
        let file = folder.join("record/experiment.json");
        Some(serde_json::from_slice(&std::fs::read(file).ok()?).unwrap())
    };
    let runs = crate::fixture::files(&fixture.root().join("local"));
    runs.into_iter().find_map(find).unwrap_or_default()
}

#[test]
fn program_decides_the_search() {
    let fixture = fixture();
    let output = fixture.run(&[]);
    check(&output, 0, "");
    assert_eq!(last_line(&output)["phase"], "Completed");
    check_search(&fixture);
    let questions = lines(&fixture, "questions");
    assert_eq!(questions[0]["version"], 1);
    assert_eq!(questions[0]["history"], json!([]));
    assert!(questions[1..].iter().all(|question| question.get("history").is_none()));
    assert_eq!(questions[0]["spec"]["hyperparameters"]["x"]["double"]["count"], 3);
    assert_eq!(questions[0]["spec"]["searcher"]["metric"], "loss");
    let id = questions[0]["experiment"].as_str().unwrap();
    assert!(id.starts_with("scripted-") && id.len() == 17, "{id}");
    // Only the last answer stays in the log.
    let log = experiment(&fixture)["status"]["log"].clone();
    let answers =
        log.as_array().unwrap().iter().filter(|entry| entry["event"].get("answered").is_some());
    assert_eq!(answers.count(), 1, "{log}");
    let describe = stoker()
        .args(["trial", "describe", "scripted-0", "--root"])
        .arg(fixture.root())
        .output()
        .unwrap();
    check(&describe, 0, "created by the external searcher; trains to 4 batches");
    check(&describe, 0, "continues to 10 batches: the external searcher decided so");
}

#[test]
fn answer_is_asked_again_after_the_runner_was_killed() {
    let fixture = fixture();
    write(&fixture, "hang", "");
    let child = fixture.start();
    wait_until("the second question", || exists(&fixture, "hung"));
    signal(&child, Signal::KILL);
    child.wait_with_output().unwrap();
    remove(&fixture, "hang");
    check(&fixture.run(&[]), 0, "");
    check_search(&fixture);
    let asked: Vec<Value> =
        lines(&fixture, "questions").into_iter().filter(|of| of["call"] == 1).collect();
    assert_eq!(asked.len(), 2);
    assert_eq!(asked[0]["events"], asked[1]["events"]);
    // The program was started again, so it got its first answer.
    let created = &asked[1]["history"][1]["actions"];
    assert_eq!(created.as_array().unwrap().len(), 3, "{}", asked[1]);
    assert_eq!(created[1]["create"]["tag"], "t1");
}

#[test]
fn program_that_ends_is_started_again() {
    let fixture = fixture();
    write(&fixture, "crash", "");
    let output = fixture.run(&[]);
    check(&output, 0, "ended without an answer (exit status: 3)");
    check_search(&fixture);
    let questions = lines(&fixture, "questions");
    assert_eq!((&questions[1]["call"], &questions[2]["call"]), (&json!(1), &json!(1)));
    assert_eq!(questions[2]["history"][0]["began"], json!({}));
}

#[test]
fn bad_answer_is_shown_until_it_is_repaired() {
    let fixture = fixture();
    for (answer, words) in [
        (
            r#"{"call": 0, "actions": [{"stop": {"trial": 9}}]}"#,
            "actions[0].stop.trial: 9: no such",
        ),
        ("Traceback: no data", "begins with `Traceback: no data`"),
    ] {
        write(&fixture, "bad", answer);
        let child = fixture.start();
        let refused = || {
            let conditions = experiment(&fixture)["status"]["conditions"].clone();
            let mut conditions = conditions.as_array().into_iter().flatten();
            conditions.any(|condition| {
                condition["type"] == "Refused"
                    && condition["status"] == "True"
                    && condition["reason"] == "AnswerRefused"
                    && condition["message"].as_str().unwrap().contains(words)
            })
        };
        wait_until("the refusal", refused);
        assert!(fixture.trials().is_empty());
        signal(&child, Signal::INT);
        check(&child.wait_with_output().unwrap(), 3, words);
    }
    remove(&fixture, "bad");
    check(&fixture.run(&[]), 0, "");
    check_search(&fixture);
    let conditions = experiment(&fixture)["status"]["conditions"].clone();
    assert_eq!(conditions[0]["status"], "False", "{conditions}");
}

/// Kills the server on drop.
struct Server(Child);

impl Drop for Server {
    fn drop(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

#[test]
fn service_on_this_machine_is_asked_by_http() {
    let mut fixture = fixture();
    let external = &mut fixture.spec["searcher"]["external"];
    let mut command = external["command"].as_array().unwrap().clone();
    external.as_object_mut().unwrap().remove("command");
    external["url"] = json!("http://optuna/");
    check(&fixture.run(&[]), 2, "spec.searcher.external.url is `http://optuna/`: only a cluster");

    command.push(json!("http"));
    let command: Vec<&str> = command.iter().map(|word| word.as_str().unwrap()).collect();
    let server = Command::new(command[0]).args(&command[1..]).stdin(Stdio::null()).spawn();
    let _server = Server(server.unwrap());
    wait_until("the server", || exists(&fixture, "port"));
    let port = std::fs::read_to_string(fixture.folder.path().join("port")).unwrap();
    let url = format!("searcher.external.url=http://127.0.0.1:{port}/ask");
    // A proxy of the environment is not used.
    let mut run = fixture.command(&["--set", &url]);
    let output = run.env("http_proxy", "http://127.0.0.1:1").output().unwrap();
    check(&output, 0, "");
    check_search(&fixture);
}

#[test]
fn simulation_asks_at_each_event() {
    let fixture = fixture();
    let curves = fixture.folder.path().join("curves.jsonl");
    let line = |trial: u32| json!({"trial": trial, "units": 1, "metric": trial}).to_string();
    let text: Vec<String> = (0..3).map(line).collect();
    std::fs::write(&curves, text.join("\n")).unwrap();
    fixture.command(&[]);
    let file = fixture.folder.path().join("experiment.yaml");
    let mut simulate = stoker();
    simulate.args(["simulate", "--output", "json", "--curves"]).arg(curves).arg(&file);
    let output = simulate.output().unwrap();
    check(&output, 0, "");
    assert_eq!(last_line(&output)["units_total"], 24, "{}", output_text(&output));
    let outcomes: Vec<Value> = last_line(&output)["trials"]
        .as_array()
        .unwrap()
        .iter()
        .map(|trial| trial["outcome"].clone())
        .collect();
    assert_eq!(outcomes, ["completed", "stopped", "completed"]);
    let calls: Vec<Value> =
        lines(&fixture, "questions").iter().map(|question| question["call"].clone()).collect();
    assert_eq!(calls, [0, 1, 2, 3, 4, 5]);
    let preview = stoker().arg("preview").arg(&file).output().unwrap();
    check(&preview, 0, "at most 3 trials of 10 batches");
}
