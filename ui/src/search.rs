//! Contents of a record about its search: explanation, importance, hyperparameters and results.
//!
//! Decisions and their reasons are the engine's. This module only arranges them.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Mutex, PoisonError};

use serde::Serialize;
use serde_json::Value;
use stoker_api::experiment::{Experiment, Unit};
use stoker_api::hyperparameters::{Parameter, Space};
use stoker_api::number;
use stoker_api::trial::Fact;
use stoker_api::validate::ValidExperiment;
use stoker_engine::experiment::explain::{Explanation, TrialExplanation};
use stoker_engine::experiment::importance::{self, Importance, importance_at};
use stoker_engine::experiment::{Ledger, Record, validate_recorded};
use stoker_engine::search::SearchConfig;
use stoker_engine::trial::TrialRecord;
use stoker_engine::trial::config::experiment_seed;

/// Search of an experiment as its record tells it.
#[derive(Debug)]
pub(crate) struct Search {
    /// Explanation, or the reason why there is none.
    pub(crate) explanation: Result<Explanation, String>,
    /// Importance of the hyperparameters, or the reason why there is none.
    pub(crate) importance: Result<Importance, String>,
    /// Lengths with enough results for the importance, ascending.
    pub(crate) importance_lengths: Vec<u64>,
    /// Importance at other lengths than the greatest, once it was asked for.
    other_importance: Mutex<BTreeMap<u64, Result<Importance, String>>>,
    config: Result<SearchConfig, String>,
    /// Hyperparameters that vary, in the order of their names.
    pub(crate) hyperparameters: Vec<Hyperparameter>,
    /// Names of all hyperparameters, also of those with one value.
    pub(crate) names: BTreeSet<String>,
    /// Unit of all lengths.
    pub(crate) unit: Unit,
    /// Greatest length.
    pub(crate) length_max: Option<u64>,
    /// Lengths with results or rungs, ascending.
    pub(crate) lengths: Vec<u64>,
}

/// A hyperparameter that varies.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Hyperparameter {
    /// Path, such as `optimizer.rate`.
    pub(crate) name: String,
    /// `log`, `linear` or `category`.
    pub(crate) scale: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) min: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) max: Option<f64>,
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub(crate) is_integer: bool,
    /// Categories in the given order.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(crate) values: Vec<String>,
}

impl Search {
    /// Reads a search from its record.
    pub(crate) fn new<'a>(
        experiment: &Experiment,
        trials: impl Iterator<Item = &'a TrialRecord>,
    ) -> Self {
        let trials: BTreeMap<u32, &TrialRecord> =
            trials.map(|trial| (trial.spec.index, trial)).collect();
        let valid = valid(experiment);
        let config = valid.as_ref().map_err(Clone::clone).map(|valid| {
            let uid = experiment.metadata.uid.as_deref().unwrap_or_default();
            SearchConfig::new(valid, experiment_seed(valid, uid))
        });
        let explanation =
            config.as_ref().map_err(Clone::clone).and_then(|c| explain(experiment, c, &trials));
        let importance = importance_of(&config, trials.values().copied(), None);
        let lengths_of = |config| importance::lengths(config, trials.values().copied());
        let importance_lengths = config.as_ref().map(lengths_of).unwrap_or_default();
        let length = experiment.spec.searcher.length();
        let of_rungs = explanation.iter().flat_map(|explanation| &explanation.brackets);
        let of_rungs = of_rungs.flat_map(|bracket| &bracket.rungs).map(|rung| rung.units);
        let of_results = trials.values().flat_map(|trial| results(trial)).map(|(units, _)| units);
        let lengths: BTreeSet<u64> = of_rungs.chain(of_results).collect();
        let hyperparameters = hyperparameters(valid.as_ref().ok(), &trials);
        let of_trials = trials.values().flat_map(|trial| flat(&trial.spec.hyperparameters));
        let names = of_trials.map(|(name, _)| name);
        Self {
            lengths: lengths.into_iter().collect(),
            names: names.chain(hyperparameters.iter().map(|one| one.name.clone())).collect(),
            hyperparameters,
            unit: length.map_or(Unit::Batches, |(unit, _)| unit),
            length_max: length.map(|(_, units)| units),
            explanation,
            importance,
            importance_lengths,
            other_importance: Mutex::default(),
            config,
        }
    }

    /// Returns the importance of the hyperparameters at a length.
    pub(crate) fn importance_at<'a>(
        &self,
        trials: impl Iterator<Item = &'a TrialRecord>,
        units: u64,
    ) -> Result<Importance, String> {
        if self.importance_lengths.last() == Some(&units) {
            return self.importance.clone();
        }
        if !self.importance_lengths.contains(&units) {
            return importance_of(&self.config, trials, Some(units));
        }
        let mut others = self.other_importance.lock().unwrap_or_else(PoisonError::into_inner);
        let compute = || importance_of(&self.config, trials, Some(units));
        others.entry(units).or_insert_with(compute).clone()
    }

    /// Returns the explanation of a trial.
    pub(crate) fn trial(&self, index: u32) -> Option<&TrialExplanation> {
        self.explanation.as_ref().ok()?.trials.get(index as usize)
    }

    /// Returns whether the method has rungs.
    pub(crate) fn has_rungs(&self) -> bool {
        let brackets = self.explanation.iter().flat_map(|explanation| &explanation.brackets);
        brackets.into_iter().any(|bracket| bracket.rungs.len() > 1)
    }

    /// Returns the name of one length, such as `epoch`.
    pub(crate) fn unit_singular(&self) -> &'static str {
        match self.unit {
            Unit::Records => "record",
            Unit::Batches => "batch",
            Unit::Epochs => "epoch",
            Unit::Units => "unit",
        }
    }
}

fn importance_of<'a>(
    config: &Result<SearchConfig, String>,
    trials: impl Iterator<Item = &'a TrialRecord>,
    units: Option<u64>,
) -> Result<Importance, String> {
    let config = config.as_ref().map_err(Clone::clone)?;
    importance_at(config, trials, units).map_err(|unknown| unknown.to_string())
}

fn valid(experiment: &Experiment) -> Result<ValidExperiment, String> {
    let Experiment { metadata, spec, status, .. } = experiment;
    let name = metadata.name.as_deref().unwrap_or_default();
    validate_recorded(name, spec, status.as_ref()).map_err(|errors| {
        let errors: Vec<String> = errors.iter().map(ToString::to_string).collect();
        format!("cannot explain an invalid experiment: {}", errors.join("; "))
    })
}

fn explain(
    experiment: &Experiment,
    config: &SearchConfig,
    trials: &BTreeMap<u32, &TrialRecord>,
) -> Result<Explanation, String> {
    let status = experiment.status.clone().unwrap_or_default();
    let record = Record { log: &status.log, trials, trials_created: status.trials_created };
    let mut explanation = Ledger::explain(config, record)
        .map_err(|error| format!("cannot read the record: {error}"))?;
    if status.phase.is_terminal() {
        explanation.close();
    }
    Ok(explanation)
}

/// Returns the results of a trial: lengths with the searched metric.
pub(crate) fn results(trial: &TrialRecord) -> impl Iterator<Item = (u64, Option<f64>)> {
    trial.status.facts.iter().filter_map(|fact| match fact {
        Fact::Result(result) => {
            let value = number::parse(&result.metric).filter(|value| value.is_finite());
            Some((result.units, value))
        }
        _ => None,
    })
}

/// Returns the values of a trial's hyperparameters by path. Groups are joined by dots.
pub(crate) fn flat(value: &Value) -> BTreeMap<String, Value> {
    let mut values = BTreeMap::new();
    flatten("", value, &mut values);
    values
}

fn flatten(path: &str, value: &Value, values: &mut BTreeMap<String, Value>) {
    match value {
        Value::Object(members) => {
            for (name, member) in members {
                let path = if path.is_empty() { name.clone() } else { format!("{path}.{name}") };
                flatten(&path, member, values);
            }
        }
        other => drop(values.insert(path.to_owned(), other.clone())),
    }
}

/// Returns the text of a category.
pub(crate) fn category(value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        other => other.to_string(),
    }
}

/// Returns the hyperparameters that vary in the space, or between the trials if there is none.
fn hyperparameters(
    valid: Option<&ValidExperiment>,
    trials: &BTreeMap<u32, &TrialRecord>,
) -> Vec<Hyperparameter> {
    let mut found = BTreeMap::<String, Hyperparameter>::new();
    if let Some(valid) = valid {
        collect("", &valid.space, &mut found);
    }
    // Constants of a choice differ between trials, and prior or external trials may have others.
    let mut seen = BTreeMap::<String, Vec<Value>>::new();
    for trial in trials.values() {
        for (name, value) in flat(&trial.spec.hyperparameters) {
            let values = seen.entry(name).or_default();
            if !found.is_empty() && values.len() > 1 {
                continue;
            }
            if !values.contains(&value) {
                values.push(value);
            }
        }
    }
    for (name, values) in seen.into_iter().filter(|(_, values)| values.len() > 1) {
        found.entry(name.clone()).or_insert_with(|| of_values(name, &values));
    }
    for one in found.values_mut().filter(|one| one.scale == "category") {
        complete_categories(one, trials);
    }
    found.into_values().filter(|one| one.values.len() != 1).collect()
}

/// Adds categories that trials have and the space lacks.
fn complete_categories(one: &mut Hyperparameter, trials: &BTreeMap<u32, &TrialRecord>) {
    for trial in trials.values() {
        let values = flat(&trial.spec.hyperparameters);
        if let Some(value) = values.get(&one.name).map(category)
            && !one.values.contains(&value)
        {
            one.values.push(value);
        }
    }
}

fn of_values(name: String, values: &[Value]) -> Hyperparameter {
    let numbers: Option<Vec<f64>> = values.iter().map(Value::as_f64).collect();
    let bounds = numbers.as_ref().map(|numbers| {
        let least = numbers.iter().copied().fold(f64::INFINITY, f64::min);
        (least, numbers.iter().copied().fold(f64::NEG_INFINITY, f64::max))
    });
    match bounds {
        Some((least, most)) => Hyperparameter {
            name,
            scale: "linear",
            min: Some(least),
            max: Some(most),
            is_integer: values.iter().all(Value::is_i64),
            values: Vec::new(),
        },
        None => categories(name, values),
    }
}

fn categories(name: String, values: &[Value]) -> Hyperparameter {
    let mut texts = Vec::new();
    for text in values.iter().map(category) {
        if !texts.contains(&text) {
            texts.push(text);
        }
    }
    Hyperparameter {
        name,
        scale: "category",
        min: None,
        max: None,
        is_integer: false,
        values: texts,
    }
}

fn collect(path: &str, space: &Space, found: &mut BTreeMap<String, Hyperparameter>) {
    match space {
        Space::Parameter(parameter) => {
            if let Some(one) = of_parameter(path.to_owned(), parameter) {
                match found.get_mut(path) {
                    Some(before) => merge(before, one),
                    None => drop(found.insert(path.to_owned(), one)),
                }
            }
        }
        Space::Group(members) => {
            for (name, member) in members {
                let path = if path.is_empty() { name.clone() } else { format!("{path}.{name}") };
                collect(&path, member, found);
            }
        }
        Space::OneOf(groups) => groups.iter().for_each(|group| collect(path, group, found)),
    }
}

/// Joins the ranges of a hyperparameter that several groups of a choice have.
fn merge(before: &mut Hyperparameter, other: Hyperparameter) {
    let join = |one: Option<f64>, other: Option<f64>, pick: fn(f64, f64) -> f64| match (one, other)
    {
        (Some(one), Some(other)) => Some(pick(one, other)),
        (one, other) => one.or(other),
    };
    before.min = join(before.min, other.min, f64::min);
    before.max = join(before.max, other.max, f64::max);
    before.is_integer &= other.is_integer;
    if before.scale != other.scale && before.scale != "category" && other.scale != "category" {
        before.scale = "linear";
    }
    for value in other.values {
        if !before.values.contains(&value) {
            before.values.push(value);
        }
    }
}

fn of_parameter(name: String, parameter: &Parameter) -> Option<Hyperparameter> {
    let range = |scale, min: f64, max: f64, is_integer| Hyperparameter {
        name: name.clone(),
        scale,
        min: Some(min),
        max: Some(max),
        is_integer,
        values: Vec::new(),
    };
    Some(match parameter {
        Parameter::Const(_) => return None,
        Parameter::Int(of) => range("linear", of.min as f64, of.max as f64, true),
        Parameter::Double(of) => range("linear", of.min, of.max, false),
        Parameter::Log(of) => range("log", of.base.powf(of.min), of.base.powf(of.max), false),
        Parameter::Categorical(values) => categories(name, values),
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    /// Name, scale, bounds and categories of a hyperparameter.
    type Found = (String, &'static str, Option<f64>, Option<f64>, Vec<String>);

    fn space(tree: Value) -> Vec<Found> {
        let mut found = BTreeMap::new();
        collect("", &Space::parse(&tree).unwrap(), &mut found);
        let of = |one: Hyperparameter| (one.name, one.scale, one.min, one.max, one.values);
        found.into_values().map(of).collect()
    }

    #[test]
    fn parameters_have_their_scale_and_range() {
        let found = space(json!({
            "batch": 32,
            "optimizer": {
                "rate": {"log": {"min": -4, "max": -1}},
                "kind": {"categorical": ["sgd", "adam"]},
            },
            "units": {"int": {"min": 8, "max": 64}},
        }));
        let expected = [
            (
                "optimizer.kind".to_owned(),
                "category",
                None,
                None,
                vec!["sgd".into(), "adam".into()],
            ),
            ("optimizer.rate".to_owned(), "log", Some(1e-4), Some(0.1), vec![]),
            ("units".to_owned(), "linear", Some(8.0), Some(64.0), vec![]),
        ];
        assert_eq!(found, expected);
    }

    #[test]
    fn ranges_of_a_choice_are_joined() {
        let found = space(json!({"o": {"oneOf": [
            {"name": "a", "rate": {"double": {"min": 0.0, "max": 1.0}}},
            {"name": "b", "rate": {"double": {"min": 0.5, "max": 4.0}}},
        ]}}));
        assert_eq!(found, [("o.rate".to_owned(), "linear", Some(0.0), Some(4.0), vec![])]);
    }
}
