//! Table of trials: filter, order and rows.

use serde::Deserialize;
use serde_json::Value;
use stoker_engine::trial::{TrialRecord, granted_units, trained_units};

use super::order::{
    Entry, LENGTH, Matching, STATE, TRIAL, built_in, column_name, matching, searched_metric, sort,
};
use crate::data::reported_best;
use crate::filter::FilterError;
use crate::search::{Hyperparameter, category, results};
use crate::store::Run;
use crate::text;
use crate::views::{Badge, Cell, Column, SelectOption, TrialRow, TrialTable};

/// Number of rows of one page.
const PAGE: usize = 100;
/// Maximum number of rows that one request returns.
const ROWS_MAX: usize = 2_000;
/// Number of trials with an error in the overview.
const ERRORS: usize = 3;
/// Names of columns that cannot be sorted.
const RUNGS: &str = "rungs";
const CURVE: &str = "curve";
/// Titles and names of the columns that can be left out, besides hyperparameters.
const OPTIONAL: [(&str, &str); 5] = [
    ("Rungs", RUNGS),
    ("Curve", CURVE),
    ("Bracket", "bracket"),
    ("Attempts", "attempts"),
    ("Slot h", "hours"),
];

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
    /// Class of the shown state, such as `running`; all if unset or empty.
    pub(crate) state: Option<String>,
    /// Names of the columns that are left out, separated by commas.
    pub(crate) hidden: Option<String>,
    /// Menu that is open: `columns`.
    pub(crate) menu: Option<String>,
    /// Number of rows to skip. Plots use `from` for their range.
    pub(crate) skip: Option<usize>,
    /// Number of rows that the page shows already, after loading more. Links leave it out.
    pub(crate) rows: Option<usize>,
}

impl TableQuery {
    pub(super) fn state(&self) -> Option<&str> {
        self.state.as_deref().filter(|state| !state.is_empty())
    }

    fn shows(&self, column: &str) -> bool {
        is_shown(self.hidden.as_deref(), column)
    }

    /// Returns a link with all parts of the query that the table shows.
    fn link(&self, path: &str) -> String {
        let skip = self.skip.map(|skip| skip.to_string());
        let parts = [
            ("skip", skip.as_deref()),
            ("sort", self.sort.as_deref()),
            ("filter", self.filter.as_deref()),
            ("state", self.state()),
            ("hidden", self.hidden.as_deref()),
            ("menu", self.menu.as_deref()),
        ];
        let parts: Vec<String> = parts
            .into_iter()
            .filter_map(|(name, value)| Some((name, value.filter(|value| !value.is_empty())?)))
            .map(|(name, value)| format!("{name}={}", text::query(value)))
            .collect();
        if parts.is_empty() { path.to_owned() } else { format!("{path}?{}", parts.join("&")) }
    }
}

fn columns_of(hidden: Option<&str>) -> impl Iterator<Item = &str> {
    hidden.unwrap_or_default().split(',').filter(|name| !name.is_empty())
}

/// Returns whether a column is shown, given the names of hidden columns, separated by commas.
pub(super) fn is_shown(hidden: Option<&str>, column: &str) -> bool {
    !columns_of(hidden).any(|name| name == column)
}

/// Returns the names of the hidden columns after this one was hidden or shown.
pub(super) fn toggled(hidden: Option<&str>, column: &str) -> String {
    let mut names: Vec<&str> = columns_of(hidden).filter(|name| *name != column).collect();
    names.extend(is_shown(hidden, column).then_some(column));
    names.join(",")
}

/// Returns the table of the overview: the best trials, and some that ended with an error.
pub(crate) fn overview(run: &Run, query: &TableQuery, max: usize) -> TrialTable {
    let Matching { entries: mut all, error, states } = matching(run, query);
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
    TrialTable { note, all_href, ..table(run, &all, matches, query, (error, &states), &run.base()) }
}

/// Returns one page of the table of all trials.
pub(crate) fn page(run: &Run, query: &TableQuery) -> TrialTable {
    let Matching { entries: mut all, error, states } = matching(run, query);
    sort(&mut all, run, query.sort.as_deref());
    let matches = all.len();
    let skip = query.skip.unwrap_or(0).min(matches);
    let num_rows = query.rows.unwrap_or(PAGE).clamp(PAGE, ROWS_MAX);
    let shown: Vec<Entry<'_>> = all.into_iter().skip(skip).take(num_rows).collect();
    let end = skip + shown.len();
    let path = format!("{}/trials", run.base());
    let more_href = (end < matches)
        .then(|| TableQuery { skip: Some(end), menu: None, ..query.clone() }.link(&path));
    TrialTable { more_href, ..table(run, &shown, matches, query, (error, &states), &path) }
}

fn table(
    run: &Run,
    shown: &[Entry<'_>],
    matches: usize,
    query: &TableQuery,
    (error, states): (Option<FilterError>, &[(Badge, usize)]),
    path: &str,
) -> TrialTable {
    let export = |format: &str| {
        let path = format!("{}/trials.{format}", run.base());
        let (sort, hidden, menu, skip) = (None, None, None, None);
        TableQuery { sort, hidden, menu, skip, ..query.clone() }.link(&path)
    };
    let status = run.experiment.status.as_ref();
    let best = status.and_then(|status| status.best.as_ref()).map(|best| best.index);
    TrialTable {
        columns: columns(run, query, path),
        rows: shown.iter().map(|entry| row(entry, best, query)).collect(),
        states: state_menu(query, states, path),
        optional_columns: column_menu(run, query, path),
        is_column_menu_open: query.menu.as_deref() == Some("columns"),
        shows: OPTIONAL.map(|(_, name)| shows(run, query, name)),
        matches,
        total: run.trials.len(),
        note: String::new(),
        filter_error: error.map(|error| error.to_string()),
        all_href: None,
        more_href: None,
        csv_href: export("csv"),
        json_href: export("json"),
        action: path.to_owned(),
        kept: [("sort", &query.sort), ("state", &query.state), ("hidden", &query.hidden)]
            .into_iter()
            .filter_map(|(name, value)| Some((name, value.clone().filter(|v| !v.is_empty())?)))
            .collect(),
        filter: query.filter.clone().unwrap_or_default(),
    }
}

fn columns(run: &Run, query: &TableQuery, path: &str) -> Vec<Column> {
    let searcher = &run.experiment.spec.searcher;
    let (sorted, is_descending) = match query.sort.as_deref() {
        Some(order) => match order.strip_prefix('-') {
            Some(name) => (column_name(run, name), true),
            None => (column_name(run, order), false),
        },
        None => (searched_metric(run), !searcher.smaller_is_better),
    };
    let unsortable = [RUNGS, CURVE].map(|name| built_in(run, name));
    let column = |title: &str, name: &str, is_number: bool| {
        let is_sorted = name == sorted;
        let order = match is_sorted && !is_descending {
            true => format!("-{name}"),
            false => name.to_owned(),
        };
        let is_sortable = unsortable.iter().all(|of| of != name);
        let by = TableQuery { sort: Some(order), menu: None, skip: None, ..query.clone() };
        Column {
            name: text::name(title),
            href: if is_sortable { by.link(path) } else { String::new() },
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
    let optional = |name: &str, is_number: bool| {
        let title = OPTIONAL.iter().find(|(_, of)| *of == name).map_or(name, |(title, _)| *title);
        shows(run, query, name).then(|| column(title, &built_in(run, name), is_number))
    };
    let always =
        |title: &str, name: &str, is_number: bool| column(title, &built_in(run, name), is_number);
    let mut columns = vec![always("Trial", TRIAL, true), always("State", STATE, false)];
    columns.extend([optional(RUNGS, false), optional(CURVE, false)].into_iter().flatten());
    columns.push(column(&searcher.metric, &searched_metric(run), true));
    columns.push(always(&unit, LENGTH, true));
    for one in shown_hyperparameters(run, query) {
        columns.push(column(&one.name, &one.name, one.scale != "category"));
    }
    columns.extend(["bracket", "attempts", "hours"].iter().filter_map(|name| optional(name, true)));
    columns
}

fn shown_hyperparameters<'a>(
    run: &'a Run,
    query: &'a TableQuery,
) -> impl Iterator<Item = &'a Hyperparameter> {
    run.search().hyperparameters.iter().filter(|one| query.shows(&one.name))
}

/// Returns whether the table has an optional column. Methods without rungs have no rungs and no
/// brackets to show.
fn shows(run: &Run, query: &TableQuery, name: &str) -> bool {
    let is_there = !matches!(name, RUNGS | "bracket") || run.search().has_rungs();
    is_there && query.shows(&built_in(run, name))
}

/// Returns the menu of states with the number of trials in each.
fn state_menu(query: &TableQuery, states: &[(Badge, usize)], path: &str) -> Vec<SelectOption> {
    let option = |class: &str, text: String| {
        let of =
            TableQuery { state: Some(class.to_owned()), menu: None, skip: None, ..query.clone() };
        let is_current = query.state().unwrap_or_default() == class;
        SelectOption { value: class.to_owned(), text, href: of.link(path), is_current }
    };
    let mut options = vec![option("", "all".to_owned())];
    options.extend(states.iter().map(|(badge, count)| {
        option(badge.class, format!("{} ({count})", badge.word.to_lowercase()))
    }));
    // The current state stays in the menu if no trial is in it anymore.
    if let Some(state) = query.state().filter(|state| options.iter().all(|of| of.value != *state)) {
        options.push(option(state, format!("{state} (0)")));
    }
    options
}

/// Returns the menu of columns that can be left out: a link shows or hides one.
fn column_menu(run: &Run, query: &TableQuery, path: &str) -> Vec<SelectOption> {
    let option = |title: &str, name: &str| {
        let toggled = TableQuery {
            hidden: Some(toggled(query.hidden.as_deref(), name)),
            menu: Some("columns".to_owned()),
            skip: None,
            ..query.clone()
        };
        let href = toggled.link(path);
        let is_current = query.shows(name);
        SelectOption { value: name.to_owned(), text: text::name(title), href, is_current }
    };
    let hyperparameters = run.search().hyperparameters.iter();
    let mut options: Vec<SelectOption> =
        hyperparameters.map(|one| option(&one.name, &one.name)).collect();
    let others = OPTIONAL.iter().filter(|(_, name)| shows(run, &TableQuery::default(), name));
    options.extend(others.map(|(title, name)| option(title, &built_in(run, name))));
    options
}

fn row(entry: &Entry<'_>, best: Option<u32>, query: &TableQuery) -> TrialRow {
    let (run, trial) = (entry.run, entry.trial);
    let index = trial.spec.index;
    let explained = run.search().trial(index);
    let why = explained.map(|explained| explained.reason());
    let missing = Value::Null;
    let hyperparameters = shown_hyperparameters(run, query)
        .map(|one| {
            let value = entry.hyperparameters.get(&one.name).unwrap_or(&missing);
            let full = if value.is_null() { "not set".to_owned() } else { category(value) };
            let is_number = one.scale != "category";
            Cell { text: text::hyperparameter(value), full: text::escape(&full), is_number }
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
        value: text::optional(reported_best(trial)),
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
    let trained = trained_units(trial);
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

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::fixture::run;

    fn trials() -> Run {
        let spec = json!({"hyperparameters": {
            "rate": {"double": {"min": 0.0, "max": 1.0}},
            "kind": {"categorical": ["b", "c"]},
        }});
        let failed = json!({"phase": "Failed", "facts": [{"closed": {"cause": "Failed"}}]});
        run(spec, json!({}), &[failed.clone(), json!({}), failed])
    }

    fn query(state: &str, hidden: &str) -> TableQuery {
        TableQuery {
            state: Some(state.to_owned()),
            hidden: Some(hidden.to_owned()),
            sort: Some("-rate".to_owned()),
            ..TableQuery::default()
        }
    }

    fn options(menu: &[SelectOption]) -> Vec<(&str, bool)> {
        menu.iter().map(|option| (option.text.as_str(), option.is_current)).collect()
    }

    #[test]
    fn state_menu_counts_and_filters() {
        let run = trials();
        let table = page(&run, &query("", ""));
        assert_eq!(table.rows.len(), 3);
        assert_eq!(options(&table.states)[0], ("all", true));
        let failed = table.states.iter().find(|option| option.value == "failed").unwrap();
        assert_eq!(failed.text, "failed (2)");
        assert!(failed.href.ends_with("?sort=-rate&state=failed"), "{}", failed.href);
        let table = page(&run, &query("failed", ""));
        assert_eq!((table.rows.len(), table.matches, table.total), (2, 2, 3));
        assert_eq!(table.states.len(), 3, "other states stay in the menu");
        assert!(table.csv_href.ends_with("/trials.csv?state=failed"), "{}", table.csv_href);
        let none = page(&run, &query("paused", ""));
        assert!(none.rows.is_empty());
        assert!(options(&none.states).contains(&("paused (0)", true)));
    }

    #[test]
    fn updates_keep_rows_that_were_loaded() {
        let trials = vec![json!({}); 3 * PAGE];
        let searcher = json!({"metric": "loss", "maxLength": {"batches": 4},
            "random": {"maxTrials": trials.len()}});
        let run = run(json!({"searcher": searcher}), json!({}), &trials);
        let check = |skip: Option<usize>, rows: Option<usize>, num_rows: usize, more: &str| {
            let table = page(&run, &TableQuery { skip, rows, ..TableQuery::default() });
            assert_eq!(table.rows.len(), num_rows);
            let href = table.more_href.unwrap_or_default();
            assert_eq!(href.split_once('?').map_or("", |(_, query)| query), more);
        };
        check(None, None, PAGE, "skip=100");
        check(None, Some(2 * PAGE), 2 * PAGE, "skip=200");
        check(None, Some(3 * PAGE), 3 * PAGE, "");
        // A table with few rows grows to a page.
        check(None, Some(2), PAGE, "skip=100");
        check(Some(PAGE), Some(2 * PAGE), 2 * PAGE, "");
    }

    #[test]
    fn rows_of_a_request_are_limited() {
        let trials = vec![json!({}); ROWS_MAX + 1];
        let searcher = json!({"metric": "loss", "maxLength": {"batches": 4},
            "random": {"maxTrials": trials.len()}});
        let run = run(json!({"searcher": searcher}), json!({}), &trials);
        let query = TableQuery { rows: Some(usize::MAX), ..TableQuery::default() };
        let table = page(&run, &query);
        assert_eq!((table.rows.len(), table.matches), (ROWS_MAX, ROWS_MAX + 1));
        assert!(table.more_href.unwrap().contains("skip=2000"));
    }

    #[test]
    fn hidden_columns_are_absent_and_kept_by_all_links() {
        let run = trials();
        let all = page(&run, &query("", ""));
        let names = |table: &TrialTable| -> Vec<String> {
            table.columns.iter().map(|column| column.name.clone()).collect()
        };
        let expected =
            ["Trial", "State", "Curve", "loss", "Batches", "kind", "rate", "Attempts", "Slot h"];
        assert_eq!(names(&all), expected, "a random search has no rungs");
        let table = page(&run, &query("", "kind,curve"));
        let expected = ["Trial", "State", "loss", "Batches", "rate", "Attempts", "Slot h"];
        assert_eq!(names(&table), expected);
        assert_eq!(table.rows[0].hyperparameters.len(), 1);
        assert_eq!(table.shows, [false, false, false, true, true]);
        for column in &table.columns {
            assert!(column.href.contains("hidden=kind%2Ccurve"), "{}", column.href);
        }
        let menu = options(&table.optional_columns);
        let expected = [
            ("kind", false),
            ("rate", true),
            ("Curve", false),
            ("Attempts", true),
            ("Slot h", true),
        ];
        assert_eq!(menu, expected);
        let kind = &table.optional_columns[0].href;
        assert!(kind.ends_with("hidden=curve&menu=columns"), "{kind}");
        assert!(!table.is_column_menu_open);
    }

    #[test]
    fn columns_of_one_name_are_hidden_and_sorted_alone() {
        let int = json!({"int": {"min": 1, "max": 8}});
        let spec = json!({"hyperparameters": {"attempts": int, "curve": int}});
        let run = run(spec, json!({}), &[json!({})]);
        let query = TableQuery {
            hidden: Some("attempts,@curve".to_owned()),
            sort: Some("-@attempts".to_owned()),
            ..TableQuery::default()
        };
        let table = page(&run, &query);
        let names: Vec<&str> = table.columns.iter().map(|column| column.name.as_str()).collect();
        assert_eq!(names, ["Trial", "State", "loss", "Batches", "curve", "Attempts", "Slot h"]);
        assert!(
            table.columns[4].href.starts_with("/experiments/ml/iris-01234567/trials?sort=curve&")
        );
        assert_eq!(table.columns[5].sort, "descending");
        assert!(table.columns[5].href.contains("?sort=%40attempts&"), "{}", table.columns[5].href);
        let menu = options(&table.optional_columns);
        let expected = [
            ("attempts", false),
            ("curve", true),
            ("Curve", false),
            ("Attempts", true),
            ("Slot h", true),
        ];
        assert_eq!(menu, expected);
    }
}
