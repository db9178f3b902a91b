//! Trials in the order of a table: fields, filter and sort order.

use std::cmp::Ordering;
use std::collections::BTreeMap;
use std::sync::Arc;

use serde_json::Value;
use stoker_api::contract::find_metric;
use stoker_engine::trial::{TrialRecord, granted_units, trained_units};

use super::head::badges;
use super::table::TableQuery;
use crate::data::{attempt_seconds, best_value, exported, reported_best};
use crate::filter::{Filter, FilterError, Row, is_same_metric};
use crate::search::{category, flat, results};
use crate::state;
use crate::store::Run;
use crate::views::Badge;

/// A trial with what filters and orders need.
pub(super) struct Entry<'a> {
    pub(super) run: &'a Run,
    pub(super) trial: &'a Arc<TrialRecord>,
    pub(super) badge: Badge,
    pub(super) hyperparameters: BTreeMap<String, Value>,
}

/// Names of columns.
pub(super) const TRIAL: &str = "trial";
pub(super) const STATE: &str = "state";
pub(super) const LENGTH: &str = "length";
const METRIC: &str = "metric";
/// Sign before the name of a column that is neither a hyperparameter nor a metric.
const BUILT_IN: char = '@';

/// Returns the name of a built-in column in links, filters and exports. A hyperparameter or metric
/// of the same name precedes it, so the column then needs the sign.
pub(super) fn built_in(run: &Run, name: &str) -> String {
    let is_taken = name == run.experiment.spec.searcher.metric || run.search().names.contains(name);
    if is_taken { format!("{BUILT_IN}{name}") } else { name.to_owned() }
}

/// Same as [`built_in`] for the metric of the search.
pub(super) fn searched_metric(run: &Run) -> String {
    let metric = &run.experiment.spec.searcher.metric;
    match run.search().names.contains(metric) {
        true => format!("{BUILT_IN}{METRIC}"),
        false => metric.clone(),
    }
}

/// Returns the name that links use for a column of a query, which may have an unnecessary sign.
pub(super) fn column_name(run: &Run, wanted: &str) -> String {
    match wanted.strip_prefix(BUILT_IN) {
        Some(METRIC) => searched_metric(run),
        Some(name) => built_in(run, name),
        None => wanted.to_owned(),
    }
}

impl Entry<'_> {
    /// Returns the value of a column for filters and orders. Hyperparameters precede the metric of
    /// the search, which precedes built-in columns and other metrics.
    fn value(&self, name: &str) -> Option<Option<String>> {
        let with_sign = name.strip_prefix(BUILT_IN).and_then(|name| self.built_in(name));
        if with_sign.is_some() {
            return with_sign;
        }
        if self.run.search().names.contains(name) {
            return Some(self.hyperparameters.get(name).map(category));
        }
        let is_searched = is_same_metric(&self.run.experiment.spec.searcher.metric, name);
        let of_column = self.built_in(if is_searched { METRIC } else { name });
        of_column.or_else(|| Some(Some(find_metric(&self.trial.status.metrics, name)?.clone())))
    }

    fn built_in(&self, name: &str) -> Option<Option<String>> {
        let status = &self.trial.status;
        let explained = self.run.search().trial(self.trial.spec.index);
        let number = |value: Option<f64>| Some(value.map(|value| value.to_string()));
        match name {
            TRIAL | "index" => Some(Some(self.trial.spec.index.to_string())),
            STATE => Some(Some(self.badge.word.to_owned())),
            "bracket" => {
                let bracket = explained.map_or(self.trial.spec.group, |trial| trial.bracket);
                Some(Some(bracket.to_string()))
            }
            "rung" | "results" => Some(Some(results(self.trial).count().to_string())),
            "attempts" => Some(Some(status.attempts.len().to_string())),
            "hours" => number(Some(self.slot_seconds() as f64 / 3600.0)),
            LENGTH | "units" => number(Some(trained_units(self.trial))),
            METRIC => number(reported_best(self.trial)),
            name if name == self.run.search().unit.plural() => {
                number(Some(trained_units(self.trial)))
            }
            _ => None,
        }
    }

    pub(super) fn slot_seconds(&self) -> u64 {
        let slots = self.run.experiment.spec.resources.slots_per_trial.max(1);
        attempt_seconds(self.trial, self.run.is_live()) * u64::from(slots)
    }
}

impl Row for Entry<'_> {
    fn field(&self, name: &str) -> Option<Option<String>> {
        self.value(name)
    }

    fn words(&self) -> Vec<String> {
        let mut words = vec![self.badge.word.to_owned(), self.trial.spec.index.to_string()];
        words.extend(self.hyperparameters.values().map(category));
        words
    }
}

fn entries(run: &Run) -> Vec<Entry<'_>> {
    let mut badges = badges(run);
    run.trials
        .iter()
        .map(|(index, trial)| Entry {
            run,
            trial,
            badge: badges.remove(index).unwrap_or(crate::state::PENDING),
            hyperparameters: flat(&trial.spec.hyperparameters),
        })
        .collect()
}

/// Orders values: numbers by size, before other texts.
fn compare(one: &str, other: &str) -> Ordering {
    match (one.parse::<f64>(), other.parse::<f64>()) {
        (Ok(one), Ok(other)) => one.total_cmp(&other),
        (Ok(_), Err(_)) => Ordering::Less,
        (Err(_), Ok(_)) => Ordering::Greater,
        (Err(_), Err(_)) => one.cmp(other),
    }
}

/// Returns the class of a value in any order: NaN and infinities of metrics come after all other
/// values, and entries without a value last.
fn class(value: Option<&str>, is_metric: bool) -> u8 {
    match value {
        Some(text) if is_metric && text.parse::<f64>().is_ok_and(|num| !num.is_finite()) => 1,
        Some(_) => 0,
        None => 2,
    }
}

/// Sorts entries by a column. Without one: the best first.
pub(super) fn sort(entries: &mut [Entry<'_>], run: &Run, order: Option<&str>) {
    let metric = searched_metric(run);
    let (name, is_descending) = match order {
        Some(order) => match order.strip_prefix('-') {
            Some(name) => (name, true),
            None => (order, false),
        },
        None => (metric.as_str(), !run.experiment.spec.searcher.smaller_is_better),
    };
    let mut keyed: Vec<(Option<String>, usize)> = entries
        .iter()
        .enumerate()
        .map(|(position, entry)| (entry.value(name).flatten(), position))
        .collect();
    // Only hyperparameters may be texts such as `inf`.
    let is_metric = !run.search().names.contains(name);
    keyed.sort_by(|(one, position), (other, other_position)| {
        let order = match (one, other) {
            (Some(one), Some(other)) if is_descending => compare(other, one),
            (Some(one), Some(other)) => compare(one, other),
            _ => Ordering::Equal,
        };
        let class = |value: &Option<String>| class(value.as_deref(), is_metric);
        let classes = class(one).cmp(&class(other));
        classes.then(order).then(position.cmp(other_position))
    });
    // Applies the order in place.
    let mut target = vec![0; entries.len()];
    for (position, (_, from)) in keyed.iter().enumerate() {
        target[*from] = position;
    }
    for position in 0..entries.len() {
        while target[position] != position {
            let to = target[position];
            entries.swap(position, to);
            target.swap(position, to);
        }
    }
}

/// Trials that match a query.
pub(super) struct Matching<'a> {
    pub(super) entries: Vec<Entry<'a>>,
    /// Why the filter cannot be read. Pages ignore it then, and show this.
    pub(super) error: Option<FilterError>,
    /// Number of trials by state that match the filter, in any state.
    pub(super) states: Vec<(Badge, usize)>,
}

/// Returns the entries that match the filter and the state of a query.
pub(super) fn matching<'a>(run: &'a Run, query: &TableQuery) -> Matching<'a> {
    let (mut entries, error) = filtered(run, query.filter.as_deref());
    let count =
        |badge: &Badge| entries.iter().filter(|entry| entry.badge.class == badge.class).count();
    let states = state::all().into_iter().map(|badge| (badge.clone(), count(&badge)));
    let states = states.filter(|(_, count)| *count > 0).collect();
    if let Some(state) = query.state() {
        entries.retain(|entry| entry.badge.class == state);
    }
    Matching { entries, error, states }
}

fn filtered<'a>(run: &'a Run, filter: Option<&str>) -> (Vec<Entry<'a>>, Option<FilterError>) {
    let mut all = entries(run);
    let parsed = Filter::parse(filter.unwrap_or_default()).and_then(|filter| {
        // Names of metrics are known once a trial has reported some.
        let has_metrics = all.iter().any(|entry| !entry.trial.status.metrics.is_empty());
        let is_known = |field: &str| all.iter().any(|entry| entry.field(field).is_some());
        filter.check(|field| !has_metrics || is_known(field)).map(|()| filter)
    });
    match parsed {
        Ok(filter) => {
            all.retain(|entry| filter.matches(entry));
            (all, None)
        }
        Err(error) => (all, Some(error)),
    }
}

/// Returns the trials that match a filter, with all fields, for export.
///
/// # Errors
///
/// The filter cannot be read. A program must not take all trials for the wanted ones.
pub(crate) fn export(
    run: &Run,
    query: &TableQuery,
) -> Result<(Vec<String>, Vec<Vec<Value>>), FilterError> {
    let Matching { entries: mut all, error, .. } = matching(run, query);
    if let Some(error) = error {
        return Err(error);
    }
    let column = |name: &str| built_in(run, name);
    sort(&mut all, run, Some(query.sort.as_deref().unwrap_or(&column(TRIAL))));
    let names = &run.search().hyperparameters;
    let mut header = vec![column(TRIAL), column(STATE), searched_metric(run)];
    header.extend([LENGTH, "granted"].map(column));
    header.extend(names.iter().map(|one| one.name.clone()));
    header.extend(["bracket", "attempts", "slot_hours", "why"].map(column));
    let rows =
        all.iter()
            .map(|entry| {
                let trial = entry.trial;
                let explained = run.search().trial(trial.spec.index);
                let mut row = vec![
                    trial.spec.index.into(),
                    entry.badge.word.into(),
                    exported(reported_best(trial)),
                    trained_units(trial).into(),
                    granted_units(&trial.spec).into(),
                ];
                row.extend(names.iter().map(|one| {
                    entry.hyperparameters.get(&one.name).cloned().unwrap_or(Value::Null)
                }));
                row.push(explained.map_or(trial.spec.group, |of| of.bracket).into());
                row.push(trial.status.attempts.len().into());
                row.push((entry.slot_seconds() as f64 / 3600.0).into());
                row.push(explained.map(|of| of.reason()).unwrap_or_default().into());
                row
            })
            .collect();
    Ok((header, rows))
}

/// Returns the indexes before and after a trial in the order of the table.
pub(crate) fn neighbors(run: &Run, index: u32, order: Option<&str>) -> (Option<u32>, Option<u32>) {
    let mut all = entries(run);
    sort(&mut all, run, order);
    let order: Vec<u32> = all.iter().map(|entry| entry.trial.spec.index).collect();
    let Some(position) = order.iter().position(|of| *of == index) else { return (None, None) };
    let before = position.checked_sub(1).map(|before| order[before]);
    (before, order.get(position + 1).copied())
}

/// Returns the place of a trial by its result and the number of trials with one.
pub(crate) fn place(run: &Run, index: u32) -> Option<(usize, usize)> {
    let mut all = entries(run);
    all.retain(|entry| best_value(entry.trial).is_some());
    sort(&mut all, run, None);
    let position = all.iter().position(|entry| entry.trial.spec.index == index)?;
    Some((position + 1, all.len()))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::fixture;

    /// Compared as texts, 16 would precede 4bit, and 4bit 8.
    #[test]
    fn numbers_precede_other_values() {
        for mut values in [["4bit", "16", "8"], ["16", "8", "4bit"], ["8", "4bit", "16"]] {
            values.sort_by(|one, other| compare(one, other));
            assert_eq!(values, ["8", "16", "4bit"]);
        }
    }

    #[test]
    fn hyperparameters_precede_built_in_columns() {
        let spec = json!({"hyperparameters": {
            "state": {"categorical": ["on", "off"]},
            "units": {"int": {"min": 1, "max": 64}},
            "loss": "mse",
        }});
        let trial = |loss: &str| json!({"phase": "Running", "batches": 4, "bestMetric": loss});
        let mut run = fixture::run(spec, json!({}), &[trial("0.5"), trial("0.25"), json!({})]);
        for (trial, units) in Arc::make_mut(&mut run.trials).values_mut().zip([48, 8, 16]) {
            let values = json!({"state": "on", "units": units, "loss": "mse"});
            Arc::make_mut(trial).spec.hyperparameters = values;
        }
        let found = |filter: &str, order: Option<&str>| -> Vec<u32> {
            let query = TableQuery { filter: Some(filter.to_owned()), ..TableQuery::default() };
            let Matching { entries: mut found, error, .. } = matching(&run, &query);
            assert_eq!(error, None, "{filter}");
            sort(&mut found, &run, order);
            found.iter().map(|entry| entry.trial.spec.index).collect()
        };
        assert_eq!(found("units > 32", None), [0]);
        assert!(found("@units > 32", None).is_empty());
        assert_eq!(found("@length < 32 and state = on", Some("units")), [1, 2, 0]);
        assert!(found("state = off", None).is_empty());
        // The best first: the metric of the search, not the hyperparameter.
        assert_eq!(found("loss = mse", None), [1, 0, 2]);
        assert_eq!(found("@metric < 0.3", Some("-@trial")), [1]);
        let (header, rows) = export(&run, &TableQuery::default()).unwrap();
        let expected = ["trial", "@state", "@metric", "length", "granted", "state", "units"];
        assert_eq!(header[..7], expected);
        assert_eq!(rows[0][5..7], [json!("on"), json!(48)]);
    }

    #[test]
    fn diverged_trials_can_be_found() {
        let metrics = ["NaN", "0.5", "-inf", "", "0.25"];
        let trial = |metric: &str| match metric {
            "" => json!({"phase": "Running"}),
            metric => json!({"phase": "Completed", "bestMetric": metric}),
        };
        let run = fixture::run(json!({}), json!({}), &metrics.map(trial));
        let found = |filter: &str, order: &str| -> Vec<(Value, Value)> {
            let (filter, sort) = (Some(filter.to_owned()), Some(order.to_owned()));
            let query = TableQuery { filter, sort, ..TableQuery::default() };
            let (_, rows) = export(&run, &query).unwrap();
            rows.into_iter().map(|row| (row[0].clone(), row[2].clone())).collect()
        };
        assert_eq!(found("loss = nan", "trial"), [(json!(0), json!("NaN"))]);
        assert_eq!(found("loss < -1e300", "trial"), [(json!(2), json!("-inf"))]);
        assert_eq!(found("loss != NaN", "trial").len(), 4);
        let order = |order: &str| -> Vec<u64> {
            found("", order).iter().filter_map(|(trial, _)| trial.as_u64()).collect()
        };
        assert_eq!(order("loss"), [4, 1, 2, 0, 3]);
        assert_eq!(order("-loss"), [1, 4, 0, 2, 3]);
    }

    #[test]
    fn texts_of_hyperparameters_are_ordinary_values() {
        let norms = [json!("inf"), json!(1), json!("none"), json!(2)];
        let spec = json!({"hyperparameters": {"norm": {"categorical": norms}}});
        let mut run = fixture::run(spec, json!({}), &[json!({}), json!({}), json!({}), json!({})]);
        for (trial, norm) in Arc::make_mut(&mut run.trials).values_mut().zip(&norms) {
            Arc::make_mut(trial).spec.hyperparameters = json!({ "norm": norm });
        }
        let order = |order: &str| -> Vec<u32> {
            let mut all = entries(&run);
            sort(&mut all, &run, Some(order));
            all.iter().map(|entry| entry.trial.spec.index).collect()
        };
        assert_eq!(order("norm"), [1, 3, 0, 2]);
        assert_eq!(order("-norm"), [2, 0, 3, 1]);
    }

    #[test]
    fn metrics_have_both_names_of_validations() {
        let searcher = json!({"metric": "validation_accuracy", "smallerIsBetter": false,
            "maxLength": {"batches": 4}, "random": {"maxTrials": 8}});
        let trial = json!({"phase": "Completed", "bestMetric": "0.75",
            "metrics": {"validation_accuracy": "0.5", "validation_loss": "0.25"}});
        let run = fixture::run(json!({ "searcher": searcher }), json!({}), &[trial]);
        let num = |filter: &str| num_exported(&run, filter);
        assert_eq!(num("val_accuracy > 0.7 and validation_accuracy > 0.7"), Ok(1));
        assert_eq!(num("val_loss < 0.3 and validation_loss > 0.3"), Ok(0));
        assert!(num("accuracy > 0.7").unwrap_err().starts_with("`accuracy`: is not a field"));
    }

    fn num_exported(run: &Run, filter: &str) -> Result<usize, String> {
        let query = TableQuery { filter: Some(filter.to_owned()), ..TableQuery::default() };
        export(run, &query).map(|(_, rows)| rows.len()).map_err(|error| error.to_string())
    }

    #[test]
    fn metrics_are_known_after_the_first_validation() {
        let with = |name: &str| json!({"phase": "Running", "metrics": {name: "0.5"}});
        let num = |trials: &[Value], filter: &str| {
            num_exported(&fixture::run(json!({}), json!({}), trials), filter)
        };
        let filter = "accuracy > 0.4";
        assert_eq!(num(&[], filter), Ok(0));
        assert_eq!(num(&[json!({"phase": "Running"})], filter), Ok(0));
        assert_eq!(num(&[json!({}), with("accuracy")], filter), Ok(1));
        assert!(num(&[with("f1")], filter).is_err());
        // Different trials may report different metrics.
        let trials = [with("accuracy"), with("f1")];
        assert_eq!(num(&trials, "accuracy > 0.4 and f1 != 0.5"), Ok(1));
        assert_eq!(num(&trials, "accuracy > 0.4 and f1 > 0.4"), Ok(0));
    }
}
