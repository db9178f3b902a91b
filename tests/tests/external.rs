//! The example `external-optuna`: Optuna decides a search.

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use serde_json::{Value, json};
use stoker_tests::{cache, describe_output, program, repository, stoker};

use crate::interrupted::trials;
use crate::local_run::last_line;

/// Returns the Python with Optuna, if it is installed.
fn python() -> Option<PathBuf> {
    let python = cache().join("tools/optuna-1/bin/python");
    if !python.exists() {
        stoker_test_cluster::record_skip("needs Optuna: run scripts/fetch-bench-tools search");
        return None;
    }
    Some(python)
}

fn searcher() -> PathBuf {
    repository().join("examples/external-optuna/searcher.py")
}

#[test]
fn optuna_decides_the_search_of_the_example() {
    let Some(python) = python() else { return };
    program("example-search");
    let (root, memory) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let example = repository().join("examples/external-optuna");
    let command = json!([python, searcher(), "--memory", memory.path()]);
    let output = stoker(["run", "--output", "json", "--root"])
        .arg(root.path())
        .arg(example.join("experiment.yaml"))
        .args(["--set", &format!("searcher.external.command={command}")])
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", describe_output(&output));
    let line = last_line(&output);
    assert_eq!((&line["phase"], &line["trials"]), (&"Completed".into(), &12.into()), "{line}");
    // The pruner has stopped at least one trial, and others have the full length.
    let trials = trials(root.path());
    let units = |trial: &Value| {
        let facts = trial["facts"].as_array().unwrap().iter();
        facts.filter_map(|fact| fact["result"]["units"].as_u64()).max().unwrap()
    };
    let mut lengths: Vec<u64> = trials.values().map(units).collect();
    lengths.sort_unstable();
    assert!(lengths[0] < 12 && lengths[11] == 12, "{lengths:?}");
    assert!(lengths.iter().all(|length| [3, 6, 12].contains(length)), "{lengths:?}");
    // The file has one line for each call.
    let files: Vec<_> = std::fs::read_dir(memory.path()).unwrap().collect();
    assert_eq!(files.len(), 1);
    let text = std::fs::read_to_string(files[0].as_ref().unwrap().path()).unwrap();
    let call = |line: &str| serde_json::from_str::<Value>(line).unwrap()["call"].clone();
    let calls: Vec<Value> = text.lines().map(call).collect();
    let expected: Vec<Value> = (0..calls.len()).map(Value::from).collect();
    assert_eq!(calls, expected);
}

/// Starts the searcher with a full length, and returns the actions of its answers.
fn answers(python: &Path, memory: &Path, epochs: u64, events: &[(u64, Value)]) -> Vec<Value> {
    let spec = json!({
        "hyperparameters": {"x": {"int": {"min": 1, "max": 9}}},
        "searcher": {
            "smallerIsBetter": true, "maxLength": {"epochs": epochs},
            "external": {"maxTrials": 2, "maxConcurrentTrials": 1},
        },
    });
    let mut command = Command::new(python);
    command.arg(searcher()).arg("--memory").arg(memory);
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    let mut stdin = child.stdin.take().unwrap();
    for (call, event) in events {
        let question = json!({"call": call, "experiment": "e", "spec": spec, "events": [event]});
        writeln!(stdin, "{question}").unwrap();
    }
    drop(stdin);
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success(), "{}", describe_output(&output));
    let text = String::from_utf8(output.stdout).unwrap();
    let answers = text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    answers.map(|answer| answer["actions"].clone()).collect()
}

/// A completed trial stays completed, and the incomplete line of a killed searcher is removed.
#[test]
fn optuna_continues_after_an_edit() {
    let Some(python) = python() else { return };
    let memory = tempfile::tempdir().unwrap();
    let result = json!({"trial": 0, "tag": "optuna-0", "units": 12, "metric": 0.5});
    let events =
        [(0, json!({"order": 0, "began": {}})), (1, json!({"order": 2, "result": result}))];
    let created = answers(&python, memory.path(), 12, &events);
    assert_eq!(created[1][0]["create"]["tag"], "optuna-1", "{created:?}");
    let file = memory.path().join("e.jsonl");
    let complete = std::fs::read_to_string(&file).unwrap();
    std::fs::write(&file, format!("{complete}{{\"call\": 2, \"ev")).unwrap();
    let edit = json!({"maxTrials": 2, "maxConcurrentTrials": 1, "maxLength": 16});
    let events = [(2, json!({"order": 4, "edited": edit}))];
    assert_eq!(answers(&python, memory.path(), 16, &events), [json!([])]);
    let text = std::fs::read_to_string(&file).unwrap();
    let rest = text.strip_prefix(&complete).unwrap();
    assert_eq!(serde_json::from_str::<Value>(rest).unwrap()["call"], 2);
}
