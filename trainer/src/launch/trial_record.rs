//! Stores the records of the experiment and the trial next to their files, so that the bucket alone
//! identifies the models and tells how they were trained.

use serde_json::{Value, json};
use stoker_api::contract::{ExitCode, StartRecords, TrialConfig};
use stoker_api::exit::ExitClass;
use stoker_api::names::{ANNOTATION_RECORDED_AT, API_VERSION};
use stoker_api::packed;
use stoker_api::time::Timestamp;
use stoker_storage::{Storage, StorageError, layout};

use crate::Result;
use crate::error::Infrastructure;

/// Writes the records as they are at the start of an attempt. A record that is newer stays: the
/// attempt was replaced, or another trial has stored a later state of the experiment.
///
/// # Errors
///
/// Returns the error of the storage.
pub(super) async fn write(storage: &Storage, config: &TrialConfig) -> Result<()> {
    let trial_path = layout::record_path(&config.storage.trial_path);
    let Some(text) = &config.records else {
        // The operator is of an earlier version, or the records are too large.
        if !storage.exists(&trial_path).await? {
            put(storage, &trial_path, &of_config(config)).await?;
        }
        return Ok(());
    };
    let records = packed::unpack::<StartRecords>(text).map_err(Infrastructure)?;
    for StartRecords { experiment, trial } in records {
        put_if_newer(storage, &trial_path, &trial).await?;
        if let Some(experiment) = experiment {
            let path = experiment_record(&config.storage.trial_path);
            put_if_newer(storage, &path, &experiment).await?;
        }
    }
    Ok(())
}

/// Records the end of the attempt, as far as its exit code determines it. The operator decides on
/// other ends: it knows all pods, and why a pod was killed.
///
/// # Errors
///
/// Returns the error of the storage.
pub(super) async fn complete(
    storage: &Storage,
    config: &TrialConfig,
    code: u8,
    message: Option<&str>,
    now: Timestamp,
) -> Result<()> {
    let is_alone = config.gang.as_ref().is_none_or(|gang| gang.world_size == gang.ranks_per_pod);
    let path = layout::record_path(&config.storage.trial_path);
    if !is_alone || !is_decisive(code) {
        return Ok(());
    }
    let Some(mut record) = read(storage, &path).await? else { return Ok(()) };
    let attempts = record.pointer_mut("/status/attempts").and_then(Value::as_array_mut);
    let Some(latest) = attempts.and_then(|attempts| attempts.last_mut()) else { return Ok(()) };
    // A later attempt has stored its record, or the end is already known.
    if latest["number"] != config.attempt || !latest["end"].is_null() {
        return Ok(());
    }
    latest["end"] = json!(ExitClass::of_code(i32::from(code)).attempt_end());
    latest["endedAt"] = json!(now);
    if let (Some(message), true) = (message, latest["message"].is_null()) {
        latest["message"] = json!(message.chars().take(MESSAGE_CHARS_MAX).collect::<String>());
    }
    put(storage, &path, &record).await
}

/// Maximum length of a message in a record.
const MESSAGE_CHARS_MAX: usize = 1_000;

/// Returns whether an exit code alone determines the end of an attempt with one pod.
fn is_decisive(code: u8) -> bool {
    let class = ExitCode::from_code(i32::from(code));
    let decisive = [
        ExitCode::Completed,
        ExitCode::InvalidHyperparameters,
        ExitCode::Preempted,
        ExitCode::Infrastructure,
    ];
    class.is_some_and(|class| decisive.contains(&class))
}

/// Returns the path of the experiment's record, given the directory of one of its trials.
fn experiment_record(trial_path: &str) -> String {
    let folder = trial_path.rsplit_once("/trials/").map_or(trial_path, |(folder, _)| folder);
    layout::record_path(folder)
}

/// Returns a record without a status.
fn of_config(config: &TrialConfig) -> Value {
    json!({
        "apiVersion": API_VERSION,
        "kind": "Trial",
        "metadata": { "name": format!("{}-{}", config.experiment, config.trial) },
        "spec": {
            "experiment": config.experiment,
            "index": config.trial,
            "requestId": "",
            "seed": config.seed,
            "hyperparameters": config.hyperparameters,
            "unit": config.unit,
            "units": config.units,
        },
    })
}

/// Returns when a record was made. Records of earlier versions do not contain it.
fn recorded_at(record: &Value) -> Option<Timestamp> {
    record["metadata"]["annotations"][ANNOTATION_RECORDED_AT].as_str()?.parse().ok()
}

async fn put_if_newer(storage: &Storage, path: &str, record: &Value) -> Result<()> {
    let stored = read(storage, path).await?;
    if stored.is_some_and(|stored| recorded_at(&stored) > recorded_at(record)) {
        return Ok(());
    }
    put(storage, path, record).await
}

/// Reads a record; `None` if it is missing or not valid JSON.
async fn read(storage: &Storage, path: &str) -> Result<Option<Value>> {
    match storage.get(path).await {
        Ok(bytes) => Ok(serde_json::from_slice(&bytes).ok()),
        Err(StorageError::NotFound { .. }) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

async fn put(storage: &Storage, path: &str, record: &Value) -> Result<()> {
    Ok(storage.put(path, serde_json::to_vec_pretty(record)?.into()).await?)
}

#[cfg(test)]
mod tests {
    use super::*;

    const TRIAL: &str = "ml/mnist-0b3f9c1e/trials/4";

    fn config(attempt: u32, records: Option<StartRecords>) -> TrialConfig {
        let mut config: TrialConfig = serde_json::from_value(json!({
            "version": 1, "experiment": "mnist", "experimentId": "0b3f9c1e-77aa", "trial": 4,
            "attempt": attempt, "seed": 1, "experimentSeed": 1, "hyperparameters": {"lr": 0.1},
            "unit": "batches", "units": 10, "metric": "loss", "smallerIsBetter": true,
            "schedulingUnit": 1, "aggregationFrequency": 1,
            "storage": {"url": "memory://", "trialPath": TRIAL},
            "door": {"url": "http://127.0.0.1:1", "tokenFile": "/nowhere"},
        }))
        .unwrap();
        config.records = records.map(|records| packed::pack(&records).unwrap());
        config
    }

    fn trial(second: u32, attempts: &Value) -> Value {
        let at = format!("2026-11-24T10:00:{second:02}Z");
        json!({
            "kind": "Trial",
            "metadata": { "annotations": { ANNOTATION_RECORDED_AT: at } },
            "status": { "attempts": attempts },
        })
    }

    fn block_on<T>(future: impl Future<Output = T>) -> T {
        super::super::runtime().unwrap().block_on(future)
    }

    #[test]
    fn older_records_do_not_replace_newer_ones() {
        let storage = Storage::open("memory://", None).unwrap();
        let experiment_path = "ml/mnist-0b3f9c1e/record.json";
        let trial_path = format!("{TRIAL}/record.json");
        let check = |second: u32, stored: u32| {
            let experiment = Some(trial(second, &json!([])));
            let records = StartRecords { experiment, trial: trial(second, &json!([])) };
            block_on(write(&storage, &config(0, Some(records)))).unwrap();
            for path in [experiment_path, trial_path.as_str()] {
                let found = block_on(read(&storage, path)).unwrap().unwrap();
                assert_eq!(found, trial(stored, &json!([])), "{path} after second {second}");
            }
        };
        check(2, 2);
        check(1, 2);
        check(3, 3);
        // Without records, the stored one stays.
        block_on(write(&storage, &config(1, None))).unwrap();
        let found = block_on(read(&storage, &trial_path)).unwrap().unwrap();
        assert_eq!(found, trial(3, &json!([])));
    }

    #[test]
    fn hyperparameters_are_stored_without_records() {
        let storage = Storage::open("memory://", None).unwrap();
        block_on(write(&storage, &config(0, None))).unwrap();
        let path = format!("{TRIAL}/record.json");
        let record = block_on(read(&storage, &path)).unwrap().unwrap();
        assert_eq!(record["spec"]["hyperparameters"], json!({"lr": 0.1}));
    }

    #[test]
    fn only_decisive_exit_codes_end_the_attempt() {
        let path = format!("{TRIAL}/record.json");
        let check = |config: &TrialConfig, attempts: Value, code: u8, expected: Value| {
            let storage = Storage::open("memory://", None).unwrap();
            block_on(put(&storage, &path, &trial(0, &attempts))).unwrap();
            block_on(complete(&storage, config, code, Some("done"), Timestamp(0))).unwrap();
            let record = block_on(read(&storage, &path)).unwrap().unwrap();
            assert_eq!(record["status"]["attempts"], expected, "code {code}");
        };
        let alone = config(1, None);
        let (first, second) = (json!({"number": 0, "end": "Preempted"}), json!({"number": 1}));
        let both = json!([first, second]);
        let ended = |end: &str| {
            let at = "1970-01-01T00:00:00Z";
            json!([first, {"number": 1, "end": end, "endedAt": at, "message": "done"}])
        };
        check(&alone, both.clone(), 0, ended("Completed"));
        check(&alone, both.clone(), 79, ended("Preempted"));
        check(&alone, both.clone(), 80, ended("Infrastructure"));
        check(&alone, both.clone(), 78, ended("InvalidHyperparameters"));
        // An eviction or a signal may be the cause.
        check(&alone, both.clone(), 1, both.clone());
        check(&alone, both.clone(), 137, both.clone());
        // A later attempt has started, and an end is final.
        check(&config(0, None), both.clone(), 0, both.clone());
        check(&config(0, None), json!([first]), 0, json!([first]));
        // Another pod of the gang may have a more severe end.
        let mut gang = config(1, None);
        gang.gang = serde_json::from_value(json!({
            "worldSize": 2, "ranksPerPod": 1, "rendezvous": "x:1", "secret": "",
        }))
        .unwrap();
        check(&gang, both.clone(), 0, both.clone());
    }
}
