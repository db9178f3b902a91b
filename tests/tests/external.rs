//! The example `external-optuna`: Optuna decides a search.

use serde_json::Value;
use stoker_tests::{cache, describe_output, program, repository, stoker};

use crate::interrupted::trials;
use crate::local_run::last_line;

#[test]
fn optuna_decides_the_search_of_the_example() {
    let folder = cache().join("tools/optuna-1/bin");
    if !folder.join("python").exists() {
        stoker_test_cluster::record_skip("needs Optuna: run scripts/fetch-bench-tools search");
        return;
    }
    program("example-search");
    let (root, memory) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let example = repository().join("examples/external-optuna");
    let command = serde_json::json!([
        folder.join("python"),
        example.join("searcher.py"),
        "--memory",
        memory.path()
    ]);
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
