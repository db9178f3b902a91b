//! File of learning curves.

use std::collections::{BTreeMap, HashMap};
use std::path::Path;

use serde::Deserialize;
use serde_json::Value;
use stoker_engine::search::normalized;
use stoker_engine::search::simulate::{Curve, Exit};

use crate::failure::Failure;

/// A line of the file.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Line {
    trial: Option<u32>,
    hyperparameters: Option<Value>,
    units: Option<u64>,
    /// Absent or present; `null` is NaN.
    #[serde(default, deserialize_with = "present")]
    metric: Option<Option<f64>>,
    /// Other metrics by name; `null` is NaN.
    metrics: Option<BTreeMap<String, Option<f64>>>,
    exit: Option<ExitKind>,
    seconds_per_unit: Option<f64>,
    #[serde(default)]
    seed: u32,
}

fn present<'de, D: serde::Deserializer<'de>>(value: D) -> Result<Option<Option<f64>>, D::Error> {
    Option::deserialize(value).map(Some)
}

#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(rename_all = "lowercase")]
enum ExitKind {
    Failed,
    Invalid,
    Early,
}

/// Returns the rule for the first field of a line with a value of another type.
fn wrong_field(line: &str) -> Option<String> {
    let line: Value = serde_json::from_str(line).ok()?;
    let is_count = |value: &Value| value.as_u64().is_some();
    let is_index = |value: &Value| value.as_u64().is_some_and(|index| index <= u64::from(u32::MAX));
    let exits = ["failed", "invalid", "early"];
    let is_metric = |value: &Value| value.is_number() || value.is_null();
    let are_metrics = |value: &Value| {
        let metrics = value.as_object();
        metrics.map_or(value.is_null(), |metrics| metrics.values().all(is_metric))
    };
    let is_exit = |value: &Value| value.as_str().is_some_and(|exit| exits.contains(&exit));
    line.as_object()?.iter().find_map(|(name, value)| {
        let (is_valid, rule) = match name.as_str() {
            "trial" | "seed" => (is_index(value), "a whole number of at most 32 bits"),
            "units" => (is_count(value), "a whole number"),
            "metric" => (is_metric(value), "a number or null"),
            "metrics" => (are_metrics(value), "an object of numbers or null by metric"),
            "seconds_per_unit" => (value.is_number(), "a number"),
            "exit" => (is_exit(value), "failed, invalid or early"),
            _ => (true, ""),
        };
        // A field with null is absent.
        let is_absent = value.is_null() && name != "seed";
        (!is_valid && !is_absent).then(|| format!("{name} must be {rule} (found {value})"))
    })
}

/// Trial that a curve belongs to.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Owner {
    Trial(u32),
    /// Hyperparameters as JSON with sorted keys.
    Hyperparameters(String),
}

/// Learning curves by seed and trial.
#[derive(Debug, Default)]
pub(super) struct Curves {
    curves: HashMap<(u32, Owner), Curve>,
}

impl Curves {
    /// Reads a file with one JSON object per line.
    pub(super) fn read(path: &Path) -> Result<Self, Failure> {
        let text = std::fs::read_to_string(path)
            .map_err(|error| Failure::Input(format!("cannot read {}: {error}", path.display())))?;
        Self::parse(&text).map_err(|error| Failure::Input(format!("{}:{error}", path.display())))
    }

    fn parse(text: &str) -> Result<Self, String> {
        let mut curves = Self::default();
        for (number, line) in (1..).zip(text.lines()) {
            if !line.trim().is_empty() {
                let parsed = serde_json::from_str(line)
                    .map_err(|error| wrong_field(line).unwrap_or_else(|| error.to_string()));
                parsed
                    .and_then(|line| curves.add(line))
                    .map_err(|error| format!("{number}: {error}"))?;
            }
        }
        Ok(curves)
    }

    fn add(&mut self, line: Line) -> Result<(), String> {
        let owner = match (line.trial, line.hyperparameters) {
            (Some(trial), None) => Owner::Trial(trial),
            (None, Some(values)) => Owner::Hyperparameters(normalized(&values).to_string()),
            _ => return Err("set exactly one of trial and hyperparameters".to_owned()),
        };
        if line.metrics.is_some() && line.metric.is_none() {
            return Err("metrics is set without metric; add metric, the first objective".to_owned());
        }
        let new = || Curve {
            metrics: BTreeMap::new(),
            others: BTreeMap::new(),
            exit: None,
            seconds_per_unit: 1.0,
        };
        let curve = self.curves.entry((line.seed, owner)).or_insert_with(new);
        match (line.units, line.metric, line.exit) {
            (Some(units), Some(metric), None) => {
                if curve.metrics.insert(units, metric.unwrap_or(f64::NAN)).is_some() {
                    return Err(format!("there are two metrics at {units} units; remove one"));
                }
                for (name, value) in line.metrics.unwrap_or_default() {
                    let values = curve.others.entry(name).or_default();
                    values.insert(units, value.unwrap_or(f64::NAN));
                }
            }
            (Some(units), None, Some(exit)) => {
                let exit = match exit {
                    ExitKind::Failed => Exit::Failed,
                    ExitKind::Invalid => Exit::Invalid,
                    ExitKind::Early => Exit::Early,
                };
                if curve.exit.replace((units, exit)).is_some() {
                    return Err("there are two exits of this trial; remove one".to_owned());
                }
            }
            (None, None, None) if line.seconds_per_unit.is_some() => {}
            _ => return Err("set units, and exactly one of metric and exit".to_owned()),
        }
        if let Some(seconds) = line.seconds_per_unit {
            if !(seconds.is_finite() && seconds > 0.0) {
                return Err(format!("seconds_per_unit is {seconds}; it must be above 0"));
            }
            curve.seconds_per_unit = seconds;
        }
        Ok(())
    }

    /// Returns whether a curve has a metric beside the first objective.
    pub(super) fn has_other(&self, metric: &str) -> bool {
        self.curves.values().any(|curve| curve.others.contains_key(metric))
    }

    /// Returns the curve of a trial.
    pub(super) fn find(&self, seed: u32, trial: u32, hyperparameters: &Value) -> Option<&Curve> {
        let by_trial = self.curves.get(&(seed, Owner::Trial(trial)));
        let values = || Owner::Hyperparameters(normalized(hyperparameters).to_string());
        by_trial.or_else(|| self.curves.get(&(seed, values())))
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn lines_of_a_trial_form_one_curve() {
        let text = r#"
            {"trial": 1, "units": 2, "metric": null, "seconds_per_unit": 0.5}
            {"trial": 1, "units": 1, "metric": 0.25, "metrics": {"speed": 2, "memory": null}}
            {"trial": 1, "units": 3, "exit": "early"}
            {"hyperparameters": {"b": 1, "a": 2.0}, "units": 1, "metric": 7, "seed": 4}
        "#;
        let curves = Curves::parse(text).unwrap();
        let curve = curves.find(0, 1, &json!({})).unwrap();
        assert_eq!(curve.metrics[&1], 0.25);
        assert!(curve.metrics[&2].is_nan());
        assert_eq!((curve.exit, curve.seconds_per_unit), (Some((3, Exit::Early)), 0.5));
        assert_eq!(curve.others["speed"], BTreeMap::from([(1, 2.0)]));
        assert!(curve.others["memory"][&1].is_nan());
        assert_eq!(["speed", "size"].map(|metric| curves.has_other(metric)), [true, false]);
        assert!(curves.find(4, 0, &json!({ "a": 2, "b": 1 })).is_some());
        assert!(curves.find(0, 0, &json!({ "a": 2, "b": 1 })).is_none());
    }

    #[test]
    fn wrong_lines_are_refused_with_their_number() {
        let check = |text: &str, expected: &str| {
            let error = Curves::parse(text).unwrap_err();
            assert!(error.starts_with(expected), "{error}");
        };
        check(r#"{"units": 1, "metric": 1}"#, "1: set exactly one of trial and hyperparameters");
        check(r#"{"trial": 0, "metric": 1}"#, "1: set units, and exactly one of metric and exit");
        check(r#"{"trial": 0, "units": 1}"#, "1: set units");
        check(
            "\n{\"trial\": 0, \"units\": 1, \"metric\": 1}\n\
             {\"trial\": 0, \"units\": 1, \"metric\": 2}",
            "3: there are two metrics at 1 units",
        );
        check(r#"{"trial": 0, "seconds_per_unit": 0}"#, "1: seconds_per_unit is 0");
        check(r#"{"trial": 0, "units": 1, "loss": 1}"#, "1: unknown field `loss`");
        check(
            r#"{"trial": 0, "units": 1, "metric": 1, "exit": null, "loss": 1}"#,
            "1: unknown field `loss`",
        );
        check(r#"{"trial": 0, "units": 1.5}"#, "1: units must be a whole number (found 1.5)");
        check(
            r#"{"trial": 0, "units": 1, "metric": "a"}"#,
            "1: metric must be a number or null (found \"a\")",
        );
        check(r#"{"trial": 0, "units": 1, "exit": "x"}"#, "1: exit must be failed, invalid or");
        check(
            r#"{"trial": 0, "units": 1, "metric": 1, "metrics": {"speed": "a"}}"#,
            r#"1: metrics must be an object of numbers or null by metric (found {"speed":"a"})"#,
        );
        check(
            r#"{"trial": 0, "units": 1, "exit": "early", "metrics": {}}"#,
            "1: metrics is set without metric; add metric",
        );
    }
}
