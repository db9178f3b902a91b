//! One experiment file, run twice: a seed says all that comes out.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};
use stoker_tests::{has_data, said};

use crate::first_light::{last_line, run};

/// A search, with dropout, shuffled data read by a worker, and rows of training between validations.
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

/// The folders of the trials below a root, by index.
fn trials(root: &Path) -> BTreeMap<u64, PathBuf> {
    let folders = |of: &Path| -> Vec<PathBuf> {
        std::fs::read_dir(of).unwrap().map(|it| it.unwrap().path()).collect()
    };
    let mut experiments = folders(&root.join("default"));
    experiments.retain(|it| it.join("trials").is_dir());
    let [experiment] = &experiments[..] else { panic!("one experiment: {experiments:?}") };
    let index = |it: &PathBuf| it.file_name().unwrap().to_str().unwrap().parse().unwrap();
    folders(&experiment.join("trials")).into_iter().map(|it| (index(&it), it)).collect()
}

/// What a trial has said and made: its rows but for the time of day, the digits of each number as they were
/// written, and the hash of the weights in each checkpoint.
fn came_out(trial: &Path) -> Value {
    let sorted = |folder: &str| -> Vec<PathBuf> {
        let entries = std::fs::read_dir(trial.join(folder)).unwrap();
        let mut all: Vec<_> = entries.map(|it| it.unwrap().path()).collect();
        all.sort();
        all
    };
    let text: String =
        sorted("metrics").iter().map(|it| std::fs::read_to_string(it).unwrap()).collect();
    let rows = text.lines().map(|line| {
        let row: Value = serde_json::from_str(line).unwrap();
        json!([row["group"], row["batches"], row["metrics"].to_string()])
    });
    let weights = sorted("checkpoints").into_iter().map(|it| {
        let bytes = std::fs::read(it.join("model.bpk")).unwrap();
        let hash: String = Sha256::digest(bytes).iter().map(|it| format!("{it:02x}")).collect();
        json!([it.file_name().unwrap().to_str(), hash])
    });
    json!({"rows": rows.collect::<Vec<_>>(), "weights": weights.collect::<Vec<_>>()})
}

#[test]
fn two_runs_of_one_file_and_seed_give_the_same_metrics_and_weights() {
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
        assert!(output.status.success(), "{}", said(&output));
        assert_eq!(last_line(&output)["trials"], 2);
        trials(&root).values().map(|it| came_out(it)).collect()
    };
    let (first, second) = (outcome("first", "5"), outcome("second", "5"));
    for (trial, (first, second)) in first.iter().zip(&second).enumerate() {
        let (rows, weights) = (&first["rows"], &first["weights"]);
        assert!(rows.as_array().unwrap().len() >= 12, "ten of training, two of validation: {rows}");
        assert!(!weights.as_array().unwrap().is_empty());
        assert_eq!(first, second, "trial {trial}");
    }
    assert_eq!((first.len(), second.len()), (2, 2));
    assert_ne!(first[0], first[1], "trials have draws and seeds of their own");
    let other = outcome("other", "6");
    assert_ne!(first[0]["rows"], other[0]["rows"], "of another seed");
    assert_ne!(first[0]["weights"], other[0]["weights"], "of another seed");
}
