//! Tests of batches: sizes, and records after the clean-up.

use serde_json::json;
use stoker_api::trial::Trial;
use stoker_api::validate::validate;

use super::*;

const UID: &str = "0b3f9c1e-77aa";

fn experiment(trials: u32) -> Experiment {
    serde_json::from_value(json!({
        "apiVersion": "stoker.dev/v1alpha1", "kind": "Experiment",
        "metadata": { "name": "mnist", "namespace": "ml", "uid": UID },
        "spec": {
            "entrypoint": { "command": ["train"] },
            "searcher": { "metric": "loss", "maxLength": { "batches": 100 }, "single": {} },
            "checkpointStorage": { "saveTrialBest": 0, "saveTrialLatest": 1 },
        },
        "status": { "phase": "Completed", "trialsCreated": trials },
    }))
    .unwrap()
}

/// A trial with two checkpoints, of which the later one is kept.
fn trial(index: u32, message: &str) -> Arc<CachedTrial> {
    let checkpoint = |batches: u32| {
        let manifest = format!("{:064x}", u128::from(index) * 7_919_000 + u128::from(batches));
        let name = format!("{batches:012}-0");
        json!({
            "name": name, "manifestSha256": manifest, "bytes": 1_000, "batches": batches,
            "attempt": 0, "metric": format!("0.{index}"),
        })
    };
    let trial: Trial = serde_json::from_value(json!({
        "apiVersion": "stoker.dev/v1alpha1", "kind": "Trial",
        "metadata": { "name": format!("mnist-{index}"), "namespace": "ml" },
        "spec": {
            "experiment": "mnist", "index": index, "requestId": "r", "seed": index,
            "hyperparameters": { "rate": 0.1 }, "unit": "batches", "units": 100,
        },
        "status": {
            "phase": "Completed",
            "attempts": [{ "number": 0, "end": "Completed", "message": message }],
            "checkpoints": [checkpoint(50), checkpoint(100)],
            "facts": [{ "result": { "units": 100, "metric": format!("0.{index}") } }],
        },
    }))
    .unwrap();
    Arc::new(CachedTrial::new(trial))
}

/// Text that does not compress well.
fn noise(chars: usize) -> String {
    let mut state = 1_u64;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        char::from(b'0' + (state >> 33) as u8 % 64)
    };
    (0..chars).map(|_| next()).collect()
}

/// Returns all batches in order.
fn batches(trials: &[Arc<CachedTrial>]) -> Vec<CleanUpBatch> {
    let experiment = experiment(trials.len() as u32);
    let valid = validate("mnist", &experiment.spec).unwrap();
    let storage: StorageRecord =
        serde_json::from_value(json!({ "url": "s3://runs", "path": "ml/mnist-0b3f9c1e" })).unwrap();
    let mut status = experiment.status.clone().unwrap();
    let mut batches = vec![];
    while status.trials_cleaned <= status.trials_created {
        let context = BatchContext {
            namespace: "ml",
            experiment: &experiment,
            valid: &valid,
            status: &status,
            storage: &storage,
            trials,
        };
        let Some(batch) = context.next(Timestamp(0)) else { break };
        assert!(batch.end > status.trials_cleaned, "no progress at {}", batch.end);
        status.trials_cleaned = batch.end;
        batches.push(batch);
    }
    batches
}

fn stored(batch: &CleanUpBatch) -> Vec<StoredRecord> {
    packed::unpack(batch.cleanup.records.as_deref().unwrap()).unwrap()
}

#[test]
fn ten_thousand_trials_are_cleaned_by_tens_of_pods() {
    let trials: Vec<_> = (0..10_000).map(|index| trial(index, "")).collect();
    let batches = batches(&trials);
    assert!(batches.len() <= 40, "{} pods", batches.len());
    let mut paths = vec![];
    let mut deleted = 0;
    for batch in &batches {
        let len = serde_json::to_string(&batch.cleanup).unwrap().len();
        assert!(len <= 220_000, "{len} bytes exceed the limit of annotations");
        deleted += batch.cleanup.delete.len();
        paths.extend(stored(batch).into_iter().map(|record| record.path));
    }
    assert_eq!((deleted, paths.len()), (10_000, 10_001));
    assert_eq!(paths[9_999], "ml/mnist-0b3f9c1e/trials/9999/record.json");
    assert_eq!(paths[10_000], "ml/mnist-0b3f9c1e/record.json");
}

#[test]
fn records_show_the_state_after_the_clean_up() {
    let batch = batches(&[trial(0, "")]).remove(0);
    assert_eq!(batch.cleanup.delete[0].checkpoints, ["000000000050-0"]);
    let records = stored(&batch);
    let checkpoints = &records[0].record["status"]["checkpoints"];
    assert_eq!(checkpoints.as_array().map(Vec::len), Some(1), "{checkpoints}");
    let status = &records[1].record["status"];
    assert_eq!((&status["cleanedUp"], &status["trialsCleaned"]), (&json!(true), &json!(1)));
    assert_eq!(batch.end, 2);
}

#[test]
fn oversized_records_are_shortened() {
    let trials = [trial(0, ""), trial(1, &noise(300_000)), trial(2, "")];
    let batches = batches(&trials);
    let records: Vec<_> = batches.iter().flat_map(stored).collect();
    assert_eq!(records.len(), 4);
    let message = records[1].record.pointer("/status/attempts/0/message").unwrap();
    assert_eq!(message.as_str().map(str::len), Some(200));
}

#[test]
fn experiments_without_files_need_no_pod() {
    let mut without = trial(0, "").trial.clone();
    without.status.as_mut().unwrap().attempts.clear();
    assert!(batches(&[Arc::new(CachedTrial::new(without))]).is_empty());
}
