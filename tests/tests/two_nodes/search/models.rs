//! Comparison of models: each trial's legs, trained again on this machine without a cluster.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;

use serde_json::Value;
use sha2::{Digest as _, Sha256};
use stoker_api::trial::Trial;
use stoker_test_cluster::Cluster;
use stoker_tests::{cache, describe_output, program};

use super::RUNGS;
use crate::two_nodes::weights;

/// Checks that the latest model of each trial has the same bits as the model of the same legs on
/// this machine. Returns the number of trials.
pub(super) fn check(cluster: &Cluster, experiment: &str, trials: &BTreeMap<u32, Trial>) -> usize {
    let directory = tempfile::tempdir().unwrap();
    for (index, trial) in trials {
        let name = format!("{experiment}-{index}");
        let length = trial.status.as_ref().unwrap().batches;
        let files = weights(cluster, &name, directory.path());
        let rerun = directory.path().join(format!("{name}-rerun"));
        RUNGS.iter().filter(|rung| **rung <= length).for_each(|rung| train(trial, *rung, &rerun));
        for file in ["model.bpk", "optimizers.bpk"] {
            let expected = sha256(&checkpoint(&rerun, length).join(file));
            assert_eq!(files[file]["sha256"], Value::from(expected), "{name}: {file} at {length}");
        }
        std::fs::remove_dir_all(rerun).unwrap();
    }
    trials.len()
}

/// Trains a trial up to a length, from its previous checkpoint in the directory.
fn train(trial: &Trial, length: u64, directory: &Path) {
    let mut command = Command::new(program("stoker-trainer"));
    command.arg("mnist").arg(format!("--seed={}", trial.spec.seed));
    for (name, value) in trial.spec.hyperparameters.as_object().unwrap() {
        let value = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
        command.arg(format!("--hparam={name}={value}"));
    }
    let data = serde_json::json!({ "root": cache().join("data/mnist") });
    command.args(["--data", &data.to_string()]);
    command.arg(format!("--batches={length}")).arg("--folder").arg(directory);
    let output = command.output().unwrap();
    assert!(output.status.success(), "{}", describe_output(&output));
}

/// Returns the directory of the checkpoint at a length.
fn checkpoint(directory: &Path, length: u64) -> std::path::PathBuf {
    let checkpoints = directory.join("trial/checkpoints");
    let mut paths = std::fs::read_dir(&checkpoints).unwrap().map(|entry| entry.unwrap().path());
    let prefix = format!("{length:012}-");
    let is_at_length = |path: &std::path::PathBuf| {
        path.file_name().is_some_and(|name| name.to_string_lossy().starts_with(&prefix))
    };
    paths.find(is_at_length).unwrap_or_else(|| panic!("no checkpoint {prefix} in {checkpoints:?}"))
}

fn sha256(path: &Path) -> String {
    let digest = Sha256::digest(std::fs::read(path).unwrap());
    digest.iter().map(|byte| format!("{byte:02x}")).collect()
}
