//! Objects of the Kubernetes API as values of `--output json`.

use serde::Serialize;
use serde_json::{Map, Value, json};
use stoker_api::number;

/// Fields of a record with a metric as a decimal string.
const METRIC_FIELDS: [&str; 2] = ["metric", "bestMetric"];
/// Fields with a list of metrics, or with metrics by name.
const METRICS_FIELDS: [&str; 2] = ["values", "metrics"];

/// Returns an object for `--output json`: metrics are numbers, and `managedFields` is omitted, as
/// kubectl does.
pub(crate) fn object(object: &impl Serialize) -> Value {
    let mut value = json!(object);
    if let Some(metadata) = value["metadata"].as_object_mut() {
        metadata.remove("managedFields");
    }
    if let Some(status) = value.get_mut("status") {
        metrics_to_numbers(status);
    }
    value
}

/// Converts a metric in a record to a number. Metrics that are not finite become `null`.
pub(crate) fn metric(text: &str) -> Value {
    match number::parse(text) {
        Some(value) if value.is_finite() => json!(value),
        Some(_) => Value::Null,
        None => json!(text),
    }
}

/// Converts all metrics in the status of a record to numbers.
pub(crate) fn metrics_to_numbers(value: &mut Value) {
    match value {
        Value::Object(fields) => fields_to_numbers(fields),
        Value::Array(items) => items.iter_mut().for_each(metrics_to_numbers),
        _ => {}
    }
}

fn fields_to_numbers(fields: &mut Map<String, Value>) {
    // A hyperparameter may have any name and value.
    for (name, value) in fields.iter_mut().filter(|(name, _)| *name != "hyperparameters") {
        match value {
            Value::String(text) if METRIC_FIELDS.contains(&name.as_str()) => *value = metric(text),
            Value::Array(items) if METRICS_FIELDS.contains(&name.as_str()) => {
                items.iter_mut().for_each(to_number);
            }
            Value::Object(metrics) if METRICS_FIELDS.contains(&name.as_str()) => {
                metrics.values_mut().for_each(to_number);
            }
            other => metrics_to_numbers(other),
        }
    }
}

fn to_number(value: &mut Value) {
    match value {
        Value::String(text) => *value = metric(text),
        other => metrics_to_numbers(other),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn metrics_of_a_status_become_numbers() {
        let given = json!({
            "metadata": {"name": "1", "managedFields": []},
            "spec": {"searcher": {"metric": "nan"}},
            "status": {
                "bestMetric": "0.5", "metrics": {"loss": "0.25", "other": "NaN"},
                "facts": [{"result": {"units": 3, "metric": "1.0", "values": ["2.5", "inf"]}}],
                "message": "7", "log": [{"hyperparameters": {"metric": "1"}}],
            },
        });
        let expected = json!({
            "metadata": {"name": "1"},
            "spec": {"searcher": {"metric": "nan"}},
            "status": {
                "bestMetric": 0.5, "metrics": {"loss": 0.25, "other": null},
                "facts": [{"result": {"units": 3, "metric": 1.0, "values": [2.5, null]}}],
                "message": "7", "log": [{"hyperparameters": {"metric": "1"}}],
            },
        });
        assert_eq!(object(&given), expected);
    }
}
