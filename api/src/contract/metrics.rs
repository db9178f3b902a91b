//! Names of a validation's metrics, and their selection for reports and records.

use std::collections::BTreeMap;

use serde_json::Value;

use super::TrialConfig;
use crate::{number, text};

/// Maximum number of metrics in the report of a validation, and in a trial's status.
pub const METRICS_MAX: usize = 64;
/// Maximum size of a metric's name in a status, in bytes of JSON.
pub const METRIC_NAME_BYTES_MAX: usize = 63;

/// Returns whether `name` is the metric of a validation that an experiment names `wanted`. The
/// prefix `val_` of `wanted` stands for `validation_`.
pub fn is_metric(name: &str, wanted: &str) -> bool {
    let long = |suffix| name.strip_prefix("validation_") == Some(suffix);
    name == wanted || wanted.strip_prefix("val_").is_some_and(long)
}

/// Returns the metric of a validation that an experiment names `wanted`, as [`is_metric`] does. The
/// exact name comes first: a program may report both.
pub fn find_metric<'m, V>(metrics: &'m BTreeMap<String, V>, wanted: &str) -> Option<&'m V> {
    let long = || metrics.get(&format!("validation_{}", wanted.strip_prefix("val_")?));
    metrics.get(wanted).or_else(long)
}

/// Returns the metric that measures the trained length. Its name `wanted` may also lack the prefix
/// of reports.
pub fn find_time_metric<'m, V>(metrics: &'m BTreeMap<String, V>, wanted: &str) -> Option<&'m V> {
    metrics.get(wanted).or_else(|| metrics.get(&long_time_metric(wanted)))
}

fn long_time_metric(name: &str) -> String {
    format!("validation_{}", name.strip_prefix("val_").unwrap_or(name))
}

/// Returns a metric's name without the prefix `validation_` or `val_`.
pub fn short_metric_name(name: &str) -> &str {
    name.strip_prefix("validation_").or_else(|| name.strip_prefix("val_")).unwrap_or(name)
}

/// Returns a validation's metrics in the order in which reports and records keep them: the metrics
/// named by `first`, in its order, then the others in name order.
pub fn metrics_in_order<'a, V>(
    metrics: &'a BTreeMap<String, V>,
    first: &[impl AsRef<str>],
) -> Vec<(&'a String, &'a V)> {
    let position = |name: &str| first.iter().position(|wanted| is_metric(name, wanted.as_ref()));
    let mut all: Vec<_> = metrics.iter().collect();
    // The sort is stable, so the others stay in name order.
    all.sort_by_key(|(name, _)| position(name).unwrap_or(first.len()));
    all
}

/// Returns the metrics of a validation for a report, as decimal strings. `first` are the names on
/// which decisions depend: [`TrialConfig::decisive_metrics`].
pub fn reported_metrics(
    metrics: &BTreeMap<String, f64>,
    first: &[String],
) -> BTreeMap<String, String> {
    let mut reported = BTreeMap::new();
    for (name, value) in metrics_in_order(metrics, first).into_iter().take(METRICS_MAX) {
        let mut name = name.clone();
        if !first.iter().any(|wanted| is_metric(&name, wanted)) {
            text::bound(&mut name, METRIC_NAME_BYTES_MAX);
        }
        reported.entry(name).or_insert_with(|| number::format(*value));
    }
    reported
}

impl TrialConfig {
    /// Returns the names of the validation metrics on which decisions depend: the searched metric,
    /// other objectives, and the metric that measures the trained length.
    pub fn decisive_metrics(&self) -> Vec<String> {
        let mut names = vec![self.metric.clone()];
        let objectives = self.spec.pointer("/searcher/objectives").and_then(Value::as_array);
        let metrics = objectives.into_iter().flatten().filter_map(|one| one["metric"].as_str());
        names.extend(metrics.map(str::to_owned));
        if let Some(name) = &self.time_metric {
            names.extend([name.clone(), long_time_metric(name)]);
        }
        names
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn metrics_may_have_the_short_prefix() {
        let names = ["loss", "steps", "validation_loss", "validation_steps", "validation_val_x"];
        let metrics: BTreeMap<String, &str> = names.map(|name| (name.to_owned(), name)).into();
        let check = |wanted, expected: Option<&str>, expected_of_time: Option<&str>| {
            assert_eq!(find_metric(&metrics, wanted).copied(), expected, "{wanted}");
            let named = names.into_iter().find(|name| is_metric(name, wanted));
            assert_eq!(named, expected, "{wanted}");
            assert_eq!(find_time_metric(&metrics, wanted).copied(), expected_of_time, "{wanted}");
        };
        check("loss", Some("loss"), Some("loss"));
        check("validation_loss", Some("validation_loss"), Some("validation_loss"));
        check("val_loss", Some("validation_loss"), Some("validation_loss"));
        check("val_accuracy", None, None);
        check("val_x", None, None);
        check("x", None, None);
        check("val_val_x", Some("validation_val_x"), Some("validation_val_x"));
        check("steps", Some("steps"), Some("steps"));
        // Only the name of the time metric may lack the prefix.
        let long = BTreeMap::from([("validation_size".to_owned(), 1)]);
        assert_eq!((find_metric(&long, "size"), find_time_metric(&long, "size")), (None, Some(&1)));
        let both = BTreeMap::from([("val_x".to_owned(), 1), ("validation_x".to_owned(), 2)]);
        assert_eq!(find_metric(&both, "val_x"), Some(&1), "the exact name comes first");
    }

    #[test]
    fn short_names_lack_one_prefix() {
        let short = ["validation_loss", "val_loss", "loss", "validation_val_x", "value"];
        let expected = ["loss", "loss", "loss", "val_x", "value"];
        assert_eq!(short.map(short_metric_name), expected);
    }

    #[test]
    fn objectives_and_time_metric_are_decisive() {
        let mut config = json!({
            "version": 1, "experiment": "x", "experimentId": "x", "trial": 0, "attempt": 0,
            "seed": 1, "experimentSeed": 1, "hyperparameters": {}, "unit": "units", "units": 10,
            "metric": "loss", "smallerIsBetter": true, "schedulingUnit": 1,
            "aggregationFrequency": 1, "storage": {"url": "memory://", "trialPath": "t"},
            "door": {"url": "http://127.0.0.1:1/", "tokenFile": "token"},
        });
        let decisive = |config: &Value| {
            let config: TrialConfig = serde_json::from_value(config.clone()).unwrap();
            config.decisive_metrics()
        };
        assert_eq!(decisive(&config), ["loss"]);
        config["timeMetric"] = json!("val_steps");
        config["spec"] =
            json!({"searcher": {"objectives": [{"metric": "loss"}, {"metric": "size"}]}});
        let expected = ["loss", "loss", "size", "val_steps", "validation_steps"];
        assert_eq!(decisive(&config), expected);
    }

    /// A report of 5,200 metrics would exceed the server's limit of 256 KiB.
    #[test]
    fn decisive_metrics_are_reported_first() {
        let first = ["val_loss", "size", "steps", "validation_steps"].map(str::to_owned);
        let mut metrics: BTreeMap<String, f64> =
            (0..5_200).map(|class| (format!("validation_iou_of_class_{class:04}"), 0.5)).collect();
        metrics.insert("a".repeat(500), 0.25);
        let decisive = [("validation_loss", 0.1), ("size", f64::NAN), ("validation_steps", 9.0)];
        metrics.extend(decisive.map(|(name, value)| (name.to_owned(), value)));
        let reported = reported_metrics(&metrics, &first);
        assert_eq!(reported.len(), METRICS_MAX);
        let values = ["validation_loss", "size", "validation_steps"].map(|name| &*reported[name]);
        assert_eq!(values, ["0.1", "NaN", "9.0"]);
        assert!(reported.contains_key("validation_iou_of_class_0059"), "{reported:?}");
        let longest = reported.keys().map(String::len).max();
        assert_eq!(longest, Some(METRIC_NAME_BYTES_MAX));
        // Few metrics are reported unchanged.
        let few = BTreeMap::from([("loss".to_owned(), 0.5), ("validation_x".to_owned(), -0.0)]);
        let expected = [("loss", "0.5"), ("validation_x", "-0.0")];
        let expected = expected.map(|(name, value)| (name.to_owned(), value.to_owned()));
        assert_eq!(reported_metrics(&few, &first), BTreeMap::from(expected));
    }
}
