//! List of experiments.

use std::cmp::Reverse;
use std::collections::BTreeSet;
use std::sync::Arc;

use serde::Deserialize;
use serde_json::{Value, json};

use super::head::{bar, method, seconds};
use super::table::{is_shown, toggled};
use super::{bulk, plain_frame};
use crate::data::exported;
use crate::filter::{Filter, Row, is_same_metric};
use crate::site::Site;
use crate::store::{Run, created};
use crate::text;
use crate::views::{ExperimentRow, ExperimentsPage, Pair, SelectOption};
use crate::visible::Visible;

/// Number of rows of one page.
const PAGE: usize = 50;

/// Titles and names of the columns that can be left out.
const OPTIONAL: [(&str, &str); 8] = [
    ("Trials", "trials"),
    ("Best", "best"),
    ("Metric", "metric"),
    ("Search", "search"),
    ("Slots", "slots"),
    ("Slot hours", "hours"),
    ("Labels", "labels"),
    ("Age", "age"),
];

/// Query of the list.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct ListQuery {
    filter: Option<String>,
    phase: Option<String>,
    namespace: Option<String>,
    label: Option<String>,
    search: Option<String>,
    sort: Option<String>,
    /// Names of the columns that are left out, separated by commas.
    hidden: Option<String>,
    /// Menu that is open: `columns`.
    menu: Option<String>,
    rows: Option<usize>,
}

impl Row for &Run {
    fn field(&self, name: &str) -> Option<Option<String>> {
        let spec = &self.experiment.spec;
        let status = self.experiment.status.as_ref();
        let best = status.and_then(|status| status.best.as_ref());
        Some(match name {
            "name" => Some(self.name.clone()),
            "namespace" => Some(self.namespace.clone()),
            "phase" => Some(crate::state::of_run(self).word.to_owned()),
            "search" => Some(method(&self.experiment)),
            "metric" => Some(spec.searcher.metric.clone()),
            "trials" => Some(self.trials.len().to_string()),
            "hours" => Some((seconds(self).1 as f64 / 3600.0).to_string()),
            "label" => Some(spec.labels.join(" ")),
            "best" => best.map(|best| best.metric.clone()),
            name if is_same_metric(&spec.searcher.metric, name) => {
                best.map(|best| best.metric.clone())
            }
            _ => return None,
        })
    }

    fn words(&self) -> Vec<String> {
        let spec = &self.experiment.spec;
        let mut words = vec![self.id(), self.namespace.clone(), spec.searcher.metric.clone()];
        words.push(crate::state::of_run(self).word.to_owned());
        words.extend(spec.labels.iter().cloned());
        words
    }
}

/// Returns the page.
pub(crate) fn page(site: &Site, visible: &Visible, query: &ListQuery) -> ExperimentsPage {
    // Read first: a later change then only loads the page again.
    let version = visible.version();
    let all = visible.runs();
    let (mut runs, filter_error) = matching(&all, query);
    sort(&mut runs, query.sort.as_deref());
    let (matches, total) = (runs.len(), all.len());
    let shown = query.rows.unwrap_or(PAGE).max(1);
    let mut frame = plain_frame(site, "experiments", "Experiments · Stoker");
    // Experiments may start at any time.
    frame.live = Some(format!("/live?v={version}"));
    let unreadable = visible.unreadable();
    ExperimentsPage {
        frame,
        rows: runs.iter().take(shown).map(|run| row(run)).collect(),
        matches,
        total,
        filter: query.filter.clone().unwrap_or_default(),
        filter_error,
        phases: choices(query, "phase", all.iter().map(|run| phase(run))),
        namespaces: choices(query, "namespace", all.iter().map(|run| run.namespace.clone())),
        labels: choices(
            query,
            "label",
            all.iter().flat_map(|run| run.experiment.spec.labels.clone()),
        ),
        searches: choices(query, "search", all.iter().map(|run| method(&run.experiment))),
        sorts: choices(
            query,
            "sort",
            ["activity", "name", "age", "trials", "hours"].map(str::to_owned).into_iter(),
        ),
        hidden: query.hidden.clone().unwrap_or_default(),
        columns: columns(query),
        is_column_menu_open: query.menu.as_deref() == Some("columns"),
        shows: OPTIONAL.map(|(_, name)| is_shown(query.hidden.as_deref(), name)),
        more_href: (shown < matches).then(|| href(query, &[("rows", &(shown + PAGE).to_string())])),
        csv_href: href(query, &[]).replacen("/experiments", "/experiments.csv", 1),
        json_href: href(query, &[]).replacen("/experiments", "/experiments.json", 1),
        watch_error: visible.watch_error().map(|why| text::escape(&why)),
        unreadable: unreadable
            .into_iter()
            .map(|((namespace, name), value)| Pair {
                name: text::name(&match namespace.as_str() {
                    "" => name,
                    namespace => format!("{namespace}/{name}"),
                }),
                value: text::escape(&value),
            })
            .collect(),
        first_command: first_command(site),
        actions: bulk::buttons(site),
    }
}

fn first_command(site: &Site) -> String {
    match site.is_cluster {
        true => site.creation("kubectl apply -f examples/iris/random.yaml"),
        false => site.creation("stoker run examples/iris/random.yaml"),
    }
}

fn phase(run: &Run) -> String {
    crate::state::of_run(run).word.to_owned()
}

fn matching(all: &[Arc<Run>], query: &ListQuery) -> (Vec<Arc<Run>>, Option<String>) {
    let of = |value: &Option<String>| value.clone().filter(|text| !text.is_empty());
    let is_equal =
        |wanted: &Option<String>, actual: &str| of(wanted).is_none_or(|wanted| wanted == actual);
    let parsed = Filter::parse(query.filter.as_deref().unwrap_or_default()).and_then(|filter| {
        // Names of metrics depend on the experiments.
        let is_known = |field: &str| all.iter().any(|run| Row::field(&&**run, field).is_some());
        filter.check(|field| all.is_empty() || is_known(field)).map(|()| filter)
    });
    let (filter, error) = match parsed {
        Ok(filter) => (filter, None),
        Err(error) => (Filter::default(), Some(error.to_string())),
    };
    let runs = all.iter().filter(|run| {
        let labels = &run.experiment.spec.labels;
        is_equal(&query.phase, &phase(run))
            && is_equal(&query.namespace, &run.namespace)
            && is_equal(&query.search, &method(&run.experiment))
            && of(&query.label).is_none_or(|label| labels.contains(&label))
            && filter.matches(&&***run)
    });
    (runs.cloned().collect(), error)
}

fn sort(runs: &mut [Arc<Run>], order: Option<&str>) {
    match order {
        Some("name") => runs.sort_by_key(|run| run.name.clone()),
        Some("age") => runs.sort_by_key(|run| Reverse(created(run))),
        Some("trials") => runs.sort_by_key(|run| Reverse(run.trials.len())),
        Some("hours") => runs.sort_by_key(|run| Reverse(seconds(run).1)),
        // Activity: what runs comes first, then what ended last.
        _ => runs.sort_by_key(|run| (Reverse(run.is_live()), Reverse(last_activity(run)))),
    }
}

fn last_activity(run: &Run) -> i64 {
    let attempts = run.trials.values().filter_map(|trial| trial.status.attempts.last());
    let times = attempts.filter_map(|attempt| attempt.ended_at.or(attempt.started_at));
    times.map(|at| at.0).max().unwrap_or_else(|| created(run))
}

fn parts(query: &ListQuery) -> Vec<(&'static str, Option<String>)> {
    vec![
        ("filter", query.filter.clone()),
        ("phase", query.phase.clone()),
        ("namespace", query.namespace.clone()),
        ("label", query.label.clone()),
        ("search", query.search.clone()),
        ("sort", query.sort.clone()),
        ("hidden", query.hidden.clone()),
        // An open menu closes with the next link.
        ("menu", None),
    ]
}

/// Returns the link to the list with some parts of the query replaced. An empty value removes one.
fn href(query: &ListQuery, changed: &[(&str, &str)]) -> String {
    let mut all = parts(query);
    for (name, value) in &mut all {
        if let Some((_, new)) = changed.iter().find(|(changed, _)| changed == name) {
            *value = Some((*new).to_owned());
        }
    }
    let own = |(name, value): (&str, Option<String>)| {
        let value = value.filter(|value| !value.is_empty())?;
        Some(format!("{name}={}", text::query(&value)))
    };
    let mut texts: Vec<String> = all.into_iter().filter_map(own).collect();
    let rows = changed.iter().find(|(name, _)| *name == "rows");
    texts.extend(rows.map(|(_, value)| format!("rows={value}")));
    match texts.is_empty() {
        true => "/experiments".to_owned(),
        false => format!("/experiments?{}", texts.join("&")),
    }
}

/// Returns the values of a filter, each with its link. `any` removes the filter.
fn choices(
    query: &ListQuery,
    name: &'static str,
    values: impl Iterator<Item = String>,
) -> Vec<SelectOption> {
    let current = parts(query).into_iter().find(|(of, _)| *of == name).and_then(|(_, value)| value);
    let current = current.filter(|value| !value.is_empty());
    let mut options = Vec::new();
    let default = if name == "sort" { "activity" } else { "any" };
    if name != "sort" {
        options.push(SelectOption {
            value: String::new(),
            text: "any".to_owned(),
            href: href(query, &[(name, "")]),
            is_current: current.is_none(),
        });
    }
    let values: Vec<String> = match name {
        "sort" => values.collect(),
        _ => values.collect::<BTreeSet<String>>().into_iter().collect(),
    };
    for value in values {
        let is_current = current.as_deref().unwrap_or(default) == value;
        let text = text::name(&value);
        options.push(SelectOption {
            href: href(query, &[(name, &value)]),
            value,
            text,
            is_current,
        });
    }
    options
}

/// Returns the menu of columns that can be left out: a link shows or hides one.
fn columns(query: &ListQuery) -> Vec<SelectOption> {
    let hidden = query.hidden.as_deref();
    let option = |(title, name): (&str, &str)| SelectOption {
        value: name.to_owned(),
        text: title.to_owned(),
        href: href(query, &[("hidden", &toggled(hidden, name)), ("menu", "columns")]),
        is_current: is_shown(hidden, name),
    };
    OPTIONAL.into_iter().map(option).collect()
}

fn row(run: &Run) -> ExperimentRow {
    let spec = &run.experiment.spec;
    let status = run.experiment.status.clone().unwrap_or_default();
    let total = crate::state::trials_max(&run.experiment);
    let num = text::count(run.trials.len() as u64);
    let best = status.best.as_ref().map(|best| best.metric.clone());
    let slots = crate::state::num_training(run) * u64::from(spec.resources.slots_per_trial.max(1));
    let begin = created(run);
    let age = u64::try_from(text::now().0 - begin).unwrap_or(0);
    let reason = match run.is_running || run.phase().is_terminal() {
        true => status.message.clone().or_else(|| status.reason.clone()).unwrap_or_default(),
        false => "no runner trains it now".to_owned(),
    };
    ExperimentRow {
        namespace: run.namespace.clone(),
        name: text::name(&run.name),
        id: run.id(),
        href: run.base(),
        phase: crate::state::of_run(run),
        reason: text::escape(&reason),
        bar: bar(run),
        trials: match total {
            Some(total) => format!("{num} / {}", text::count(total.into())),
            None => num,
        },
        best: text::result_text(best.as_deref()),
        best_title: best.unwrap_or_default(),
        metric: text::name(&spec.searcher.metric),
        smaller_is_better: spec.searcher.smaller_is_better,
        search: method(&run.experiment),
        slots: if run.is_live() { text::count(slots) } else { "0".to_owned() },
        hours: text::hours(seconds(run).1),
        labels: spec.labels.iter().map(|label| text::name(label)).collect(),
        age: if begin > 0 { text::age(age) } else { text::NONE.to_owned() },
        created: if begin > 0 {
            stoker_api::time::Timestamp(begin).to_string()
        } else {
            String::new()
        },
    }
}

/// Returns the list for export.
///
/// # Errors
///
/// The reason why the filter cannot be read. A program must not take all experiments for the wanted
/// ones.
pub(crate) fn export(visible: &Visible, query: &ListQuery) -> Result<Vec<Value>, String> {
    let (mut runs, error) = matching(&visible.runs(), query);
    if let Some(error) = error {
        return Err(error);
    }
    sort(&mut runs, query.sort.as_deref());
    let of = |run: &Arc<Run>| {
        let status = run.experiment.status.clone().unwrap_or_default();
        let best = status.best.as_ref();
        json!({
            "namespace": run.namespace, "name": run.name, "id": run.id(), "phase": phase(run),
            "trials": run.trials.len(), "ended": status.trials_closed,
            "metric": run.experiment.spec.searcher.metric,
            "best": exported(best.and_then(|best| stoker_api::number::parse(&best.metric))),
            "bestTrial": best.map(|best| best.index), "search": method(&run.experiment),
            "slotHours": seconds(run).1 as f64 / 3600.0,
            "labels": run.experiment.spec.labels,
        })
    };
    Ok(runs.iter().map(of).collect())
}

#[cfg(test)]
mod tests {
    use askama::Template as _;

    use super::*;
    use crate::fixture;
    use crate::store::Store;

    #[test]
    fn failed_watches_are_not_an_empty_list() {
        let store = Arc::new(Store::default());
        let visible = Visible::all(store.clone());
        let check = |expected: [bool; 3]| {
            let page = page(&Site::default(), &visible, &ListQuery::default());
            let html = page.render().unwrap();
            let texts = ["No experiments yet", "no answer", "experiments-table"];
            assert_eq!(texts.map(|text| html.contains(text)), expected);
        };
        check([true, false, false]);
        store.set_watch_error(Some("no answer".to_owned()));
        check([false, true, false]);
        store.replace(fixture::run(json!({}), json!({}), &[]));
        check([false, true, true]);
        store.set_watch_error(None);
        check([false, false, true]);
    }

    #[test]
    fn exports_refuse_unknown_fields() {
        let store = Arc::new(Store::default());
        let status = json!({"best": {"index": 0, "metric": "0.5"}});
        let searcher = json!({"metric": "validation_loss", "maxLength": {"batches": 4},
            "random": {"maxTrials": 8}});
        store.replace(fixture::run(json!({ "searcher": searcher }), status, &[]));
        let num = |filter: &str| {
            let query = ListQuery { filter: Some(filter.to_owned()), ..ListQuery::default() };
            export(&Visible::all(store.clone()), &query).map(|rows| rows.len())
        };
        assert_eq!(num("val_loss < 1 and validation_loss < 1"), Ok(1));
        assert_eq!(num("val_loss > 1"), Ok(0));
        let searcher = json!({"metric": "accuracy", "maxLength": {"batches": 4},
            "random": {"maxTrials": 8}});
        let mut other = fixture::run(json!({ "searcher": searcher }), json!({}), &[]);
        other.uid = "22222222-0000".to_owned();
        store.replace(other);
        assert_eq!(num("val_loss < 1 and accuracy != 1"), Ok(1));
        assert!(num("nofield > 3").unwrap_err().starts_with("`nofield`: is not a field"));
    }

    #[test]
    fn links_keep_hidden_columns() {
        let query = ListQuery {
            phase: Some("Running".to_owned()),
            hidden: Some("labels,age".to_owned()),
            menu: Some("columns".to_owned()),
            ..ListQuery::default()
        };
        let kept = "/experiments?phase=Running&hidden=labels%2Cage";
        assert_eq!(href(&query, &[]), kept);
        assert_eq!(href(&query, &[("rows", "100")]), format!("{kept}&rows=100"));
        let menu = columns(&query);
        let shown = menu.iter().filter(|column| column.is_current).map(|column| &*column.text);
        let expected = ["Trials", "Best", "Metric", "Search", "Slots", "Slot hours"];
        assert_eq!(shown.collect::<Vec<_>>(), expected);
        let link = |name: &str| &menu.iter().find(|column| column.value == name).unwrap().href;
        let of = |hidden: &str| format!("/experiments?phase=Running&hidden={hidden}&menu=columns");
        assert_eq!(link("age"), &of("labels"));
        assert_eq!(link("best"), &of("labels%2Cage%2Cbest"));
    }
}
