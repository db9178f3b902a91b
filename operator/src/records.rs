//! Records of experiments and trials for the storage. The operator has no access to it, so it
//! hands the records to pods: to the first pod of an attempt, to rank 0 in the response to a
//! report, and to clean-up pods.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use serde_json::{Value, json};
use stoker_api::contract::{ReportEvent, StartRecords};
use stoker_api::experiment::{Experiment, ExperimentStatus};
use stoker_api::names::{ANNOTATION_RECORDED_AT, API_VERSION};
use stoker_api::packed;
use stoker_api::time::Timestamp;
use stoker_api::trial::{Trial, TrialStatus};

/// Maximum size in bytes of the records in the configuration of an attempt.
const START_BYTES_MAX: usize = 64 << 10;
/// Maximum size in bytes of the configuration with its records: Kubernetes limits the annotations
/// of a pod to 256 KiB, and users may add others.
const CONFIG_BYTES_MAX: usize = 200_000;
/// Maximum length in characters of the messages of attempts in a shortened record.
const MESSAGE_CHARS_MAX: usize = 200;

/// Returns the record of a trial with this status.
pub(crate) fn of_trial(trial: &Trial, status: &TrialStatus, now: Timestamp) -> Value {
    json!({
        "apiVersion": API_VERSION,
        "kind": "Trial",
        "metadata": metadata(&trial.metadata, now),
        "spec": trial.spec,
        "status": status,
    })
}

/// Returns the record of an experiment with this status.
pub(crate) fn of_experiment(
    experiment: &Experiment,
    status: &ExperimentStatus,
    now: Timestamp,
) -> Value {
    json!({
        "apiVersion": API_VERSION,
        "kind": "Experiment",
        "metadata": metadata(&experiment.metadata, now),
        "spec": experiment.spec,
        "status": status,
    })
}

/// Returns whether rank 0 stores the trial's record after this report. Of the others, heartbeats
/// and periodic validations are too frequent, and the storage has their metrics.
pub(crate) fn is_stored_after(event: &ReportEvent) -> bool {
    match event {
        ReportEvent::Started { .. }
        | ReportEvent::Checkpointed { .. }
        | ReportEvent::Exiting { .. } => true,
        ReportEvent::Validated { granted_units, .. } => granted_units.is_some(),
        ReportEvent::Progress { .. } => false,
    }
}

/// Returns the fields of the metadata that identify an object, and the time of the record. Other
/// fields, such as annotations of `kubectl`, are only of use in the cluster.
fn metadata(metadata: &ObjectMeta, now: Timestamp) -> Value {
    json!({
        "name": metadata.name,
        "namespace": metadata.namespace,
        "uid": metadata.uid,
        "generation": metadata.generation,
        "creationTimestamp": metadata.creation_timestamp,
        "annotations": { ANNOTATION_RECORDED_AT: now },
    })
}

/// Returns a trial's record that takes less space: without the steps of the search in its grants,
/// and with the beginning of the messages of its attempts.
pub(crate) fn shortened(mut record: Value) -> Value {
    let grants = record.pointer_mut("/spec/grants").and_then(Value::as_array_mut);
    for grant in grants.into_iter().flatten().filter_map(Value::as_object_mut) {
        grant.remove("steps");
    }
    let attempts = record.pointer_mut("/status/attempts").and_then(Value::as_array_mut);
    for attempt in attempts.into_iter().flatten() {
        if let Some(message) = attempt["message"].as_str() {
            let text: String = message.chars().take(MESSAGE_CHARS_MAX).collect();
            attempt["message"] = json!(text);
        }
    }
    record
}

/// Packs the records that an attempt stores at its start, next to a configuration of
/// `config_bytes`. Returns `None` if they are too large even without the experiment: the records in
/// the storage then stay as they are until a later attempt or the end of the experiment.
pub(crate) fn for_start(
    experiment: Option<Value>,
    trial: Value,
    config_bytes: usize,
) -> Option<String> {
    let bytes_max = START_BYTES_MAX.min(CONFIG_BYTES_MAX.saturating_sub(config_bytes));
    let short = shortened(trial.clone());
    let candidates = [(experiment, trial.clone()), (None, trial), (None, short)];
    let packed = candidates.into_iter().filter_map(|(experiment, trial)| {
        packed::pack(&StartRecords { experiment, trial })
            .ok()
            .filter(|text| text.len() <= bytes_max)
    });
    packed.into_iter().next()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Text that does not compress well.
    fn noise(chars: usize) -> String {
        let mut state = 1_u64;
        let mut next = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            char::from(b'0' + (state >> 33) as u8 % 64)
        };
        (0..chars).map(|_| next()).collect()
    }

    fn trial(message_chars: usize, step_chars: usize) -> Value {
        json!({
            "spec": { "grants": [{ "order": 1, "steps": [noise(step_chars)] }] },
            "status": { "attempts": [{ "number": 0, "message": noise(message_chars) }] },
        })
    }

    #[track_caller]
    fn check(
        experiment_chars: usize,
        trial: Value,
        config_bytes: usize,
        expected: Option<(bool, usize)>,
    ) {
        let experiment = json!({ "spec": noise(experiment_chars) });
        let packed = for_start(Some(experiment), trial, config_bytes);
        let packed = packed.inspect(|text| assert!(text.len() <= START_BYTES_MAX));
        let found = packed.map(|text| {
            let records: StartRecords = packed::unpack(&text).unwrap().remove(0);
            let message = records.trial.pointer("/status/attempts/0/message").unwrap();
            (records.experiment.is_some(), message.as_str().unwrap().chars().count())
        });
        assert_eq!(found, expected);
    }

    #[test]
    fn large_records_are_left_out_or_shortened() {
        check(100, trial(1_000, 10), 0, Some((true, 1_000)));
        check(100_000, trial(1_000, 10), 0, Some((false, 1_000)));
        check(100, trial(1_000, 100_000), 0, Some((false, MESSAGE_CHARS_MAX)));
        check(100, trial(100_000, 10), 0, Some((false, MESSAGE_CHARS_MAX)));
        // The configuration takes the space.
        check(5_000, trial(1_000, 10), CONFIG_BYTES_MAX - 3_000, Some((false, 1_000)));
        check(100, trial(1_000, 10), CONFIG_BYTES_MAX, None);
    }
}
