//! Trials in the order of a table: fields, filter and sort order.

use std::collections::BTreeMap;
use std::sync::Arc;

use serde_json::Value;
use stoker_engine::trial::{TrialRecord, granted_units};

use super::head::badges;
use super::table::TableQuery;
use crate::data::{attempt_seconds, best_value, trained};
use crate::filter::{Filter, FilterError, Row};
use crate::search::{category, flat, results};
use crate::state::ORDER;
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

impl Entry<'_> {
    /// Returns the value of a column for filters and orders.
    fn value(&self, name: &str) -> Option<Option<String>> {
        let spec = &self.run.experiment.spec.searcher;
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
            "length" | "units" => number(Some(trained(self.trial))),
            name if name == self.run.search().unit.plural() => number(Some(trained(self.trial))),
            name if name == spec.metric => number(best_value(self.trial)),
            name => match self.hyperparameters.get(name) {
                Some(value) => Some(Some(category(value))),
                None if self.is_known(name) => Some(None),
                None => {
                    let value = status.metrics.get(name)?;
                    Some(Some(value.clone()))
                }
            },
        }
    }

    fn is_known(&self, name: &str) -> bool {
        self.run.search().hyperparameters.iter().any(|one| one.name == name)
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

/// Sorts entries by a column. Without one: the best first. Entries without a value come last.
pub(super) fn sort(entries: &mut [Entry<'_>], run: &Run, order: Option<&str>) {
    let searcher = &run.experiment.spec.searcher;
    let (name, is_descending) = match order {
        Some(order) => match order.strip_prefix('-') {
            Some(name) => (name, true),
            None => (order, false),
        },
        None => (searcher.metric.as_str(), !searcher.smaller_is_better),
    };
    let mut keyed: Vec<(Option<String>, usize)> = entries
        .iter()
        .enumerate()
        .map(|(position, entry)| (entry.value(name).flatten(), position))
        .collect();
    keyed.sort_by(|(one, position), (other, other_position)| {
        let order = match (one, other) {
            (Some(one), Some(other)) => {
                let order = match (one.parse::<f64>(), other.parse::<f64>()) {
                    (Ok(one), Ok(other)) => one.total_cmp(&other),
                    _ => one.cmp(other),
                };
                if is_descending { order.reverse() } else { order }
            }
            (one, other) => other.is_some().cmp(&one.is_some()),
        };
        order.then(position.cmp(other_position))
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
    /// Why the filter cannot be read. It is ignored then.
    pub(super) error: Option<FilterError>,
    /// Number of trials by state that match the filter, in any state.
    pub(super) states: Vec<(Badge, usize)>,
}

/// Returns the entries that match the filter and the state of a query.
pub(super) fn matching<'a>(run: &'a Run, query: &TableQuery) -> Matching<'a> {
    let (mut entries, error) = filtered(run, query.filter.as_deref());
    let count =
        |badge: &Badge| entries.iter().filter(|entry| entry.badge.class == badge.class).count();
    let states = ORDER.iter().map(|badge| (badge.clone(), count(badge)));
    let states = states.filter(|(_, count)| *count > 0).collect();
    if let Some(state) = query.state() {
        entries.retain(|entry| entry.badge.class == state);
    }
    Matching { entries, error, states }
}

fn filtered<'a>(run: &'a Run, filter: Option<&str>) -> (Vec<Entry<'a>>, Option<FilterError>) {
    let mut all = entries(run);
    let parsed = Filter::parse(filter.unwrap_or_default()).and_then(|filter| {
        // A field is known if at least one trial knows it.
        match all.iter().map(|entry| filter.check(entry)).find(Result::is_ok) {
            None if !all.is_empty() => filter.check(&all[0]).map(|()| filter),
            _ => Ok(filter),
        }
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
pub(crate) fn export(run: &Run, query: &TableQuery) -> (Vec<String>, Vec<Vec<Value>>) {
    let Matching { entries: mut all, .. } = matching(run, query);
    sort(&mut all, run, query.sort.as_deref().or(Some(TRIAL)));
    let searcher = &run.experiment.spec.searcher;
    let names = &run.search().hyperparameters;
    let mut header: Vec<String> =
        ["trial", "state", searcher.metric.as_str(), "length", "granted"].map(str::to_owned).into();
    header.extend(names.iter().map(|one| one.name.clone()));
    header.extend(["bracket", "attempts", "slot_hours", "why"].map(str::to_owned));
    let rows =
        all.iter()
            .map(|entry| {
                let trial = entry.trial;
                let explained = run.search().trial(trial.spec.index);
                let mut row = vec![
                    trial.spec.index.into(),
                    entry.badge.word.into(),
                    best_value(trial).into(),
                    trained(trial).into(),
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
    (header, rows)
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
