//! Table of trials: filter, order and rows.

use serde::Deserialize;
use serde_json::Value;
use stoker_engine::trial::{TrialRecord, granted_units};

use super::order::{Entry, STATE, TRIAL, matching, sort};
use crate::data::{best_value, trained};
use crate::filter::FilterError;
use crate::search::{category, results};
use crate::store::Run;
use crate::text;
use crate::views::{Column, Pair, TrialRow, TrialTable};

/// Number of rows of one page.
const PAGE: usize = 100;
/// Number of trials with an error in the overview.
const ERRORS: usize = 3;

/// Query of a page with a table of trials.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct TableQuery {
    pub(crate) metric: Option<String>,
    pub(crate) x: Option<String>,
    pub(crate) scale: Option<String>,
    /// Name of a column, with `-` in front for the descending order.
    pub(crate) sort: Option<String>,
    pub(crate) filter: Option<String>,
    /// Number of rows to skip.
    pub(crate) from: Option<usize>,
}

/// Returns the table of the overview: the best trials, and some that ended with an error.
pub(crate) fn overview(run: &Run, query: &TableQuery, max: usize) -> TrialTable {
    let (mut all, error) = matching(run, query.filter.as_deref());
    sort(&mut all, run, query.sort.as_deref());
    let matches = all.len();
    let is_error = |entry: &Entry<'_>| matches!(entry.badge.class, "failed" | "invalid");
    let mut note = String::new();
    if matches > max {
        let errors = all.iter().filter(|entry| is_error(entry)).count().min(ERRORS);
        let best = max - errors;
        let mut kept: Vec<Entry<'_>> = Vec::with_capacity(max);
        let (failed, others): (Vec<_>, Vec<_>) = all.into_iter().partition(is_error);
        kept.extend(others.into_iter().take(best));
        let shown = kept.len();
        kept.extend(failed.into_iter().take(errors));
        note = match errors {
            0 => format!("The first {shown}."),
            _ => format!("The first {shown}, and {errors} that ended with an error."),
        };
        all = kept;
    }
    let all_href = (matches > max).then(|| format!("{}/trials", run.base()));
    TrialTable { note, all_href, ..table(run, &all, matches, query, error, &run.base()) }
}

/// Returns one page of the table of all trials.
pub(crate) fn page(run: &Run, query: &TableQuery) -> TrialTable {
    let (mut all, error) = matching(run, query.filter.as_deref());
    sort(&mut all, run, query.sort.as_deref());
    let matches = all.len();
    let from = query.from.unwrap_or(0).min(matches);
    let shown: Vec<Entry<'_>> = all.into_iter().skip(from).take(PAGE).collect();
    let end = from + shown.len();
    let path = format!("{}/trials", run.base());
    let more_href = (end < matches).then(|| {
        let order = query.sort.as_deref().map(text::query);
        let filter = query.filter.as_deref().map(text::query);
        let part = |name: &str, value: Option<String>| {
            value.map(|value| format!("&{name}={value}")).unwrap_or_default()
        };
        format!("{path}?from={end}{}{}", part("sort", order), part("filter", filter))
    });
    TrialTable { more_href, ..table(run, &shown, matches, query, error, &path) }
}

fn table(
    run: &Run,
    shown: &[Entry<'_>],
    matches: usize,
    query: &TableQuery,
    error: Option<FilterError>,
    path: &str,
) -> TrialTable {
    let filter = query.filter.clone().unwrap_or_default();
    let export = |format: &str| {
        let filter = match filter.is_empty() {
            true => String::new(),
            false => format!("?filter={}", text::query(&filter)),
        };
        format!("{}/trials.{format}{filter}", run.base())
    };
    let status = run.experiment.status.as_ref();
    let best = status.and_then(|status| status.best.as_ref()).map(|best| best.index);
    TrialTable {
        columns: columns(run, query, path),
        rows: shown.iter().map(|entry| row(entry, best)).collect(),
        matches,
        total: run.trials.len(),
        note: String::new(),
        filter_error: error.map(|error| error.to_string()),
        all_href: None,
        more_href: None,
        csv_href: export("csv"),
        json_href: export("json"),
        action: path.to_owned(),
        sort: query.sort.clone().unwrap_or_default(),
        has_rungs: run.search().has_rungs(),
        filter,
    }
}

fn columns(run: &Run, query: &TableQuery, path: &str) -> Vec<Column> {
    let searcher = &run.experiment.spec.searcher;
    let (sorted, is_descending) = match query.sort.as_deref() {
        Some(order) => match order.strip_prefix('-') {
            Some(name) => (name.to_owned(), true),
            None => (order.to_owned(), false),
        },
        None => (searcher.metric.clone(), !searcher.smaller_is_better),
    };
    let filter = query.filter.as_deref().filter(|filter| !filter.is_empty());
    let filter = filter.map(|filter| format!("&filter={}", text::query(filter)));
    let filter = filter.unwrap_or_default();
    let column = |title: &str, name: &str, is_number: bool| {
        let is_sorted = name == sorted;
        let order = match is_sorted && !is_descending {
            true => format!("-{name}"),
            false => name.to_owned(),
        };
        Column {
            name: text::name(title),
            href: match name.is_empty() {
                true => String::new(),
                false => format!("{path}?sort={}{filter}", text::query(&order)),
            },
            sort: match (is_sorted, is_descending) {
                (false, _) => "none",
                (true, false) => "ascending",
                (true, true) => "descending",
            },
            is_number,
        }
    };
    let mut unit = run.search().unit.plural().to_owned();
    unit[..1].make_ascii_uppercase();
    let mut columns = vec![
        column("Trial", TRIAL, true),
        column("State", STATE, false),
        column("Rungs", "", false),
        column("Curve", "", false),
        column(&searcher.metric, &searcher.metric, true),
        column(&unit, "length", true),
    ];
    for one in &run.search().hyperparameters {
        columns.push(column(&one.name, &one.name, one.scale != "category"));
    }
    columns.push(column("Bracket", "bracket", true));
    columns.push(column("Attempts", "attempts", true));
    columns.push(column("Slot h", "hours", true));
    columns
}

fn row(entry: &Entry<'_>, best: Option<u32>) -> TrialRow {
    let (run, trial) = (entry.run, entry.trial);
    let index = trial.spec.index;
    let explained = run.search().trial(index);
    let why = explained.map(|explained| explained.reason());
    let missing = Value::Null;
    let hyperparameters = run
        .search()
        .hyperparameters
        .iter()
        .map(|one| {
            let value = entry.hyperparameters.get(&one.name).unwrap_or(&missing);
            let full = if value.is_null() { "not set".to_owned() } else { category(value) };
            Pair { name: text::hyperparameter(value), value: text::escape(&full) }
        })
        .collect();
    TrialRow {
        index,
        href: run.trial_base(index),
        badge: entry.badge.clone(),
        why: why.unwrap_or_else(|| trial.status.message.clone().unwrap_or_default()),
        rungs: rungs(run, trial),
        spark: spark(trial),
        is_best: best == Some(index),
        value: text::optional(best_value(trial)),
        value_title: trial.status.best_metric.clone().unwrap_or_default(),
        length: length(run, trial),
        hyperparameters,
        bracket: explained.map_or(trial.spec.group, |of| of.bracket).to_string(),
        attempts: trial.status.attempts.len(),
        hours: text::hours(entry.slot_seconds()),
    }
}

/// Returns trained and granted length, such as `30.2 / 64`.
pub(crate) fn length(run: &Run, trial: &TrialRecord) -> String {
    let trained = trained(trial);
    let trained = match run.search().unit {
        stoker_api::experiment::Unit::Epochs if trained.fract() != 0.0 => format!("{trained:.1}"),
        _ => text::count(trained as u64),
    };
    format!("{trained} / {}", text::count(granted_units(&trial.spec)))
}

/// Returns the rungs of a trial's bracket.
fn rungs(run: &Run, trial: &TrialRecord) -> Vec<&'static str> {
    let Some(explained) = run.search().trial(trial.spec.index) else { return Vec::new() };
    let Ok(explanation) = &run.search().explanation else { return Vec::new() };
    let brackets = &explanation.brackets;
    let bracket = match brackets.len() {
        1 => brackets.first(),
        _ => brackets.get(explained.bracket as usize),
    };
    let Some(bracket) = bracket else { return Vec::new() };
    if bracket.rungs.len() < 2 {
        return Vec::new();
    }
    let granted = granted_units(&trial.spec);
    let has_result = |units: u64| results(trial).any(|(of, _)| of == units);
    let mark = |units: u64| match has_result(units) {
        true => "done",
        false if units <= granted => "current",
        false => "open",
    };
    bracket.rungs.iter().map(|rung| mark(rung.units)).collect()
}

/// Returns the results of a trial as points of a polyline in a box of 64 x 18.
fn spark(trial: &TrialRecord) -> String {
    let points: Vec<(f64, f64)> =
        results(trial).filter_map(|(units, value)| Some((units as f64, value?))).collect();
    if points.len() < 2 {
        return String::new();
    }
    let bounds = |of: fn(&(f64, f64)) -> f64| {
        let values = points.iter().map(of);
        values.fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), value| {
            (low.min(value), high.max(value))
        })
    };
    let ((x_min, x_max), (y_min, y_max)) = (bounds(|point| point.0), bounds(|point| point.1));
    let scale = |value: f64, low: f64, high: f64| match high > low {
        true => (value - low) / (high - low),
        false => 0.5,
    };
    let point = |(x, y): &(f64, f64)| {
        let (x, y) = (scale(*x, x_min, x_max) * 62.0 + 1.0, scale(*y, y_min, y_max));
        format!("{x:.1},{:.1}", 17.0 - y * 16.0)
    };
    points.iter().map(point).collect::<Vec<_>>().join(" ")
}
