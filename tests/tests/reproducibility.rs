//! Two runs of an experiment file with the same seed give the same results.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};
use stoker_tests::{describe_output, has_data};

use crate::local_run::{last_line, run};

/// A search with dropout, shuffled data that a worker reads, and training rows between validations.
const SEARCH: &str = "
apiVersion: stoker.dev/v1alpha1
kind: Experiment
metadata:
  name: repeated
spec:
  entrypoint:
    command: [stoker-trainer, mnist]
  hyperparameters:
    model: mlp
    global_batch_size: 64
    learning_rate: { log: { min: -4, max: -2 } }
    dropout: { double: { min: 0.1, max: 0.5 } }
  searcher:
    metric: validation_loss
    maxLength: { batches: 200 }
    random: { maxTrials: 2 }
  minValidationPeriod: { batches: 100 }
  schedulingUnit: 20
  reproducibility: { experimentSeed: SEED }
";

/// Returns the directories of the trials below a root, by index.
fn trials(root: &Path) -> BTreeMap<u64, PathBuf> {
    let folders = |of: &Path| -> Vec<PathBuf> {
        std::fs::read_dir(of).unwrap().map(|entry| entry.unwrap().path()).collect()
    };
    let mut experiments = folders(&root.join("default"));
    experiments.retain(|folder| folder.join("trials").is_dir());
    let [experiment] = &experiments[..] else { panic!("not one experiment: {experiments:?}") };
    let index = |folder: &PathBuf| folder.file_name().unwrap().to_str().unwrap().parse().unwrap();
    let trials = folders(&experiment.join("trials")).into_iter();
    trials.map(|folder| (index(&folder), folder)).collect()
}

/// Returns the results of a trial: its rows without the time, with the digits of each number as
/// written, and the hash of the weights in each checkpoint.
fn results(trial: &Path) -> Value {
    let sorted = |folder: &str| -> Vec<PathBuf> {
        let entries = std::fs::read_dir(trial.join(folder)).unwrap();
        let mut all: Vec<_> = entries.map(|entry| entry.unwrap().path()).collect();
        all.sort();
        all
    };
    let text: String =
        sorted("metrics").iter().map(|path| std::fs::read_to_string(path).unwrap()).collect();
    let rows = text.lines().map(|line| {
        let row: Value = serde_json::from_str(line).unwrap();
        json!([row["group"], row["batches"], row["metrics"].to_string()])
    });
    let weights = sorted("checkpoints").into_iter().map(|checkpoint| {
        let bytes = std::fs::read(checkpoint.join("model.bpk")).unwrap();
        let digest = Sha256::digest(bytes);
        let hash: String = digest.iter().map(|byte| format!("{byte:02x}")).collect();
        json!([checkpoint.file_name().unwrap().to_str(), hash])
    });
    json!({"rows": rows.collect::<Vec<_>>(), "weights": weights.collect::<Vec<_>>()})
}

#[test]
fn same_seed_gives_same_metrics_and_weights() {
    if !has_data("mnist") {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let outcome = |name: &str, seed: &str| -> Vec<Value> {
        let root = folder.path().join(name);
        std::fs::create_dir(&root).unwrap();
        let file = root.join("repeated.yaml");
        std::fs::write(&file, SEARCH.replace("SEED", seed)).unwrap();
        let output = run(&file, &root, &[]);
        assert!(output.status.success(), "{}", describe_output(&output));
        assert_eq!(last_line(&output)["trials"], 2);
        trials(&root).values().map(|trial| results(trial)).collect()
    };
    let (first, second) = (outcome("first", "5"), outcome("second", "5"));
    for (trial, (first, second)) in first.iter().zip(&second).enumerate() {
        let (rows, weights) = (&first["rows"], &first["weights"]);
        let num_rows = rows.as_array().unwrap().len();
        assert!(num_rows >= 12, "fewer than 10 training and 2 validation rows: {rows}");
        assert!(!weights.as_array().unwrap().is_empty());
        assert_eq!(first, second, "trial {trial}");
    }
    assert_eq!((first.len(), second.len()), (2, 2));
    assert_ne!(first[0], first[1], "trials must differ in hyperparameters and seed");
    let other = outcome("other", "6");
    assert_ne!(first[0]["rows"], other[0]["rows"], "another seed gives the same rows");
    assert_ne!(first[0]["weights"], other[0]["weights"], "another seed gives the same weights");
}
