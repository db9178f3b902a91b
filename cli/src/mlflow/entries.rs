//! Entries of a run in MLflow: parameters, tags and metric values of a trial.
//!
//! The limits are those of MLflow's [REST API] and of its server (`mlflow/utils/validation.py`).
//!
//! [REST API]: https://mlflow.org/docs/latest/api_reference/rest-api.html#log-batch

use std::collections::BTreeMap;

use serde::{Serialize, Serializer};
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};
use stoker_api::experiment::{Experiment, Phase};
use stoker_api::trial::{Trial, TrialStatus};
use stoker_engine::trial::ended_at;
use stoker_storage::hash::hex;
use stoker_storage::metrics::Row;

use crate::run::flatten;

/// Maximum number of entries per request.
pub(super) const ENTRIES_MAX: usize = 1_000;
/// Maximum number of parameters per request.
pub(super) const PARAMS_MAX: usize = 100;
/// Maximum number of characters of a name.
const KEY_CHARS_MAX: usize = 250;
/// Maximum number of characters of a parameter.
const PARAM_CHARS_MAX: usize = 6_000;
/// Maximum number of characters of a tag.
const TAG_CHARS_MAX: usize = 8_000;

/// Tag with the UID of the experiment, which finds the runs of earlier copies.
pub(super) const TAG_UID: &str = "stoker.uid";
/// Tag with the index of the trial.
pub(super) const TAG_TRIAL: &str = "stoker.trial";
/// Tag with the state of the trial that the run contains completely.
pub(super) const TAG_EXPORTED: &str = "stoker.exported";

/// A parameter or a tag.
#[derive(Debug, PartialEq, Serialize)]
pub(super) struct Text {
    key: String,
    value: String,
}

/// A value of a metric.
#[derive(Debug, PartialEq, Serialize)]
pub(super) struct MetricValue {
    key: String,
    #[serde(serialize_with = "number")]
    value: f64,
    /// Milliseconds since 1970.
    timestamp: i64,
    step: u64,
}

/// Serializes a number as in the JSON of protocol buffers, in which NaN and infinities are texts.
fn number<S: Serializer>(value: &f64, serializer: S) -> Result<S::Ok, S::Error> {
    match value {
        value if value.is_nan() => serializer.serialize_str("NaN"),
        value if value.is_infinite() && *value > 0.0 => serializer.serialize_str("Infinity"),
        value if value.is_infinite() => serializer.serialize_str("-Infinity"),
        value => serializer.serialize_f64(*value),
    }
}

/// Returns the hyperparameters as parameters, such as `net.width`.
pub(super) fn params(hyperparameters: &Value) -> Vec<Text> {
    let mut params = BTreeMap::new();
    for (path, value) in flatten(hyperparameters) {
        let text = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
        let mut key = key(&path);
        // The hyperparameters `a: {b: 1}` and `a.b: 2` have the same path.
        while params.contains_key(&key) {
            key.push('_');
        }
        params.insert(key, text.chars().take(PARAM_CHARS_MAX).collect());
    }
    params.into_iter().map(|(key, value)| Text { key, value }).collect()
}

/// Returns the tags of a trial whose files are at `location`.
pub(super) fn tags(experiment: &Experiment, trial: &Trial, location: &str) -> Vec<Text> {
    let metadata = &experiment.metadata;
    let of = |text: &Option<String>| text.clone().unwrap_or_default();
    let tags = [
        ("stoker.experiment", of(&metadata.name)),
        ("stoker.namespace", of(&metadata.namespace)),
        (TAG_UID, of(&metadata.uid)),
        (TAG_TRIAL, trial.spec.index.to_string()),
        ("stoker.seed", trial.spec.seed.to_string()),
        ("stoker.location", location.to_owned()),
    ];
    let tags = tags.into_iter().filter(|(_, value)| !value.is_empty());
    tags.map(|(key, value)| Text {
        key: key.to_owned(),
        value: value.chars().take(TAG_CHARS_MAX).collect(),
    })
    .collect()
}

/// Returns the values of a trial's rows: metrics named `GROUP/METRIC`, with the trained batches as
/// step. Rows of early versions have no time; their values get `started`.
pub(super) fn values(rows: &[Row], started: i64) -> Vec<MetricValue> {
    let mut values = Vec::new();
    for row in rows {
        let timestamp = row.time.map_or(started, milliseconds);
        for (name, value) in &row.metrics {
            let key = key(&format!("{}/{name}", row.group));
            values.push(MetricValue { key, value: *value, timestamp, step: row.batches });
        }
    }
    values
}

/// Returns the time of the first row, in milliseconds since 1970.
pub(super) fn first_time(rows: &[Row]) -> Option<i64> {
    rows.iter().filter_map(|row| row.time).map(milliseconds).min()
}

fn milliseconds(seconds: f64) -> i64 {
    // The conversion saturates.
    (seconds * 1000.0).round() as i64
}

/// Returns the fields of a run that change: its status, and its end if it has ended.
pub(super) fn state(status: &TrialStatus) -> Value {
    let name = match status.phase {
        Phase::Pending | Phase::Paused => "SCHEDULED",
        Phase::Running => "RUNNING",
        Phase::Completed => "FINISHED",
        Phase::Failed => "FAILED",
        Phase::Cancelled => "KILLED",
    };
    let mut state = json!({ "status": name });
    if let Some(ended) = ended_at(status) {
        state["end_time"] = (ended.0 * 1000).into();
    }
    state
}

/// Returns a description of an ended trial that changes if the trial is continued, or `None` if it
/// has not ended.
pub(super) fn exported(status: &TrialStatus) -> Option<String> {
    let attempts = status.attempts.last().map_or(0, |attempt| attempt.number + 1);
    let TrialStatus { phase, batches, .. } = status;
    let ended = ended_at(status).map(|ended| format!(" at {ended}")).unwrap_or_default();
    phase
        .is_terminal()
        .then(|| format!("{phase:?}{ended} after {batches} batches in {attempts} attempts"))
}

/// Returns a name that MLflow accepts. Each character that it may refuse becomes its code point in
/// hexadecimal between underscores. The end of a long name becomes a hash.
///
/// MLflow accepts `[/\w.\- :]`, where `\w` includes letters outside ASCII. They are replaced too,
/// because Rust and Python differ in which characters are letters. It refuses names that are not
/// normalized paths or that begin with `..`.
fn key(name: &str) -> String {
    let part = |part: &str| match part {
        "" => "_".to_owned(),
        part if part == "." || part.starts_with("..") => {
            part.replace('.', "_2e_").chars().map(allowed).collect()
        }
        part => part.chars().map(allowed).collect(),
    };
    let key = name.split('/').map(part).collect::<Vec<_>>().join("/");
    if key.len() <= KEY_CHARS_MAX {
        return key;
    }
    let hash = hex(&Sha256::digest(&key)[..4]);
    format!("{}_{hash}", &key[..KEY_CHARS_MAX - 9])
}

fn allowed(char: char) -> String {
    match char.is_ascii_alphanumeric() || "_.- :".contains(char) {
        true => char.to_string(),
        false => format!("_{:x}_", char as u32),
    }
}

#[cfg(test)]
mod tests {
    use stoker_api::time::Timestamp;
    use stoker_api::trial::{CloseCause, ClosedFact, Fact};

    use super::*;

    #[test]
    fn names_are_accepted_by_mlflow() {
        let check = |name: &str, expected: &str| assert_eq!(key(name), expected);
        check("validation/top-5 accuracy", "validation/top-5 accuracy");
        check("training/loss (log)", "training/loss _28_log_29_");
        check("training/größe", "training/gr_f6__df_e");
        check("..x", "_2e__2e_x");
        check("a..x", "a..x");
        check("a//b/", "a/_/b/_");
        check("../x/.", "_2e__2e_/x/_2e_");
        check("a\nb", "a_a_b");
        let long = "x".repeat(KEY_CHARS_MAX);
        check(&long, &long);
        let [one, other] = ["y", "z"].map(|end| key(&format!("{long}{end}")));
        assert_eq!((one.len(), other.len()), (KEY_CHARS_MAX, KEY_CHARS_MAX));
        assert_ne!(one, other);
    }

    #[test]
    fn hyperparameters_become_parameters() {
        let long = "x".repeat(PARAM_CHARS_MAX + 1);
        let value = json!({
            "net": { "width": 32, "act": "relu" }, "lr": 0.1, "list": [1, 2], "long": long,
            "net.width": 64,
        });
        let text = |param: Text| format!("{}={}", param.key, param.value);
        let params: Vec<String> = params(&value).into_iter().map(text).collect();
        let long = format!("long={}", &long[1..]);
        let net = ["net.act=relu", "net.width=32", "net.width_=64"];
        assert_eq!(params[..3], ["list=[1,2]", &long, "lr=0.1"]);
        assert_eq!(params[3..], net);
    }

    #[test]
    fn values_have_step_time_and_group() {
        let row = |time, metrics: &[(&str, f64)]| Row {
            group: "training".to_owned(),
            batches: 20,
            epoch: 1,
            attempt: 0,
            time,
            metrics: metrics.iter().map(|(name, value)| ((*name).to_owned(), *value)).collect(),
        };
        let rows = [
            row(Some(1.5004), &[("a", 0.1), ("b", f64::NAN)]),
            row(None, &[("a", f64::INFINITY), ("b", f64::NEG_INFINITY)]),
        ];
        let text = |value| serde_json::to_string(value).unwrap();
        let lines: Vec<String> = values(&rows, 7).iter().map(text).collect();
        assert_eq!(
            lines,
            [
                r#"{"key":"training/a","value":0.1,"timestamp":1500,"step":20}"#,
                r#"{"key":"training/b","value":"NaN","timestamp":1500,"step":20}"#,
                r#"{"key":"training/a","value":"Infinity","timestamp":7,"step":20}"#,
                r#"{"key":"training/b","value":"-Infinity","timestamp":7,"step":20}"#,
            ]
        );
        assert_eq!(first_time(&rows), Some(1500));
    }

    #[test]
    fn only_ended_trials_are_complete() {
        let check = |phase, state_expected: Value, exported_expected: Option<&str>| {
            let at = Some(Timestamp(5));
            let fact = Fact::Closed(ClosedFact { cause: CloseCause::Completed, at });
            let local = TrialStatus { facts: vec![fact], ..TrialStatus::default() };
            let cluster = TrialStatus { ended_at: at, ..TrialStatus::default() };
            for status in [local, cluster] {
                let status = TrialStatus { phase, batches: 9, ..status };
                assert_eq!(state(&status), state_expected);
                assert_eq!(exported(&status).as_deref(), exported_expected);
            }
        };
        check(Phase::Running, json!({ "status": "RUNNING" }), None);
        check(Phase::Paused, json!({ "status": "SCHEDULED" }), None);
        check(
            Phase::Completed,
            json!({ "status": "FINISHED", "end_time": 5000 }),
            Some("Completed at 1970-01-01T00:00:05Z after 9 batches in 0 attempts"),
        );
        check(
            Phase::Cancelled,
            json!({ "status": "KILLED", "end_time": 5000 }),
            Some("Cancelled at 1970-01-01T00:00:05Z after 9 batches in 0 attempts"),
        );
    }
}
