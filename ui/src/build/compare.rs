//! Experiments, or trials of one experiment, side by side.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use serde_json::{Value, json};
use stoker_api::experiment::Unit;
use stoker_api::number;
use stoker_api::time::Timestamp;
use stoker_engine::experiment::explain::length;
use stoker_engine::trial::{TrialRecord, ended_at, held_seconds_until, trained_units};

use super::head::{method, ran, seconds};
use super::{frame, plain_frame};
use crate::curves::axis;
use crate::data::{attempt_seconds, best_so_far, exported, reported_best, state};
use crate::live::Version;
use crate::search::{category, flat, results};
use crate::site::Site;
use crate::store::{Run, created};
use crate::text;
use crate::views::{
    CompareChip, ComparePage, CompareRow, CompareSection, Crumb, Notice, Pair, SelectOption,
};

/// Maximum number of things side by side.
pub(crate) const COMPARED_MAX: usize = 8;
/// Number of series colors.
const SERIES: usize = 6;

/// Rows with a value per column.
type Rows = Vec<(String, Vec<String>)>;

fn section(title: &str, rows: Rows, is_code: bool, show_all: bool) -> CompareSection {
    let total = rows.len();
    let is_equal = |cells: &[String]| cells.windows(2).all(|pair| pair[0] == pair[1]);
    let num_differ = rows.iter().filter(|(_, cells)| !is_equal(cells)).count();
    let rows = rows.into_iter().filter(|(_, cells)| show_all || !is_code || !is_equal(cells));
    let row = |(name, cells): (String, Vec<String>)| {
        let first = cells.first().cloned().unwrap_or_default();
        let cell = |text: String| {
            let differs = text != first;
            (text, differs)
        };
        CompareRow { name, cells: cells.into_iter().map(cell).collect() }
    };
    CompareSection {
        title: title.to_owned(),
        note: match is_code {
            true => format!("{num_differ} of {} differ.", text::num(total, "field")),
            false => String::new(),
        },
        is_code,
        rows: rows.map(row).collect(),
    }
}

/// Joins the fields of several things by name. A missing one is `not set`.
fn joined(all: &[BTreeMap<String, Value>]) -> Rows {
    let names: BTreeSet<&String> = all.iter().flat_map(BTreeMap::keys).collect();
    let cell = |fields: &BTreeMap<String, Value>, name: &String| match fields.get(name) {
        None => "not set".to_owned(),
        Some(value) => text::escape(&category(value)),
    };
    let row =
        |name: &String| (text::name(name), all.iter().map(|fields| cell(fields, name)).collect());
    names.into_iter().map(row).collect()
}

/// Returns the page that compares experiments. Live updates report changes after `version`.
pub(crate) fn experiments(
    site: &Site,
    runs: &[Arc<Run>],
    version: Version,
    show_all: bool,
) -> ComparePage {
    let query = |without: Option<usize>| {
        let parts = runs.iter().enumerate().filter(|(position, _)| Some(*position) != without);
        let part = |(_, run): (usize, &Arc<Run>)| {
            format!("e={}/{}", text::query(&run.namespace), text::query(&run.id()))
        };
        parts.map(part).collect::<Vec<_>>().join("&")
    };
    let chip = |(position, run): (usize, &Arc<Run>)| CompareChip {
        name: text::name(&run.name),
        href: run.base(),
        badge: crate::state::of_run(run),
        without_href: format!("/compare?{}", query(Some(position))),
        series: position % SERIES + 1,
    };
    let mut page = plain_frame(site, "experiments", "Compare · Stoker");
    page.has_plots = true;
    page.view = "compare";
    page.crumbs = vec![Crumb { text: "Experiments".to_owned(), href: "/experiments".to_owned() }];
    if runs.iter().any(|run| run.may_change()) {
        page.live = Some(format!("/live?v={version}"));
    }
    let toggle = |show_all: bool| match show_all {
        true => Pair {
            name: "Only what differs".to_owned(),
            value: format!("/compare?{}", query(None)),
        },
        false => {
            Pair { name: "Show all".to_owned(), value: format!("/compare?{}&all=1", query(None)) }
        }
    };
    let notice = difference(runs);
    let lengths = if notice.is_some() { BTreeSet::new() } else { common_lengths(runs) };
    let unit = runs.first().map_or(Unit::Batches, |run| run.search().unit);
    let length = |units: u64| SelectOption {
        value: units.to_string(),
        text: length(units, unit),
        href: format!("/compare?{}&at={units}", query(None)),
        is_current: false,
    };
    ComparePage {
        frame: page,
        title: format!("Compare {}", text::num(runs.len(), "experiment")),
        notice,
        chips: runs.iter().enumerate().map(chip).collect(),
        source: format!("/compare.json?{}", query(None)),
        is_trials: false,
        curves: String::new(),
        x: "",
        sections: experiment_sections(runs, show_all),
        toggle: Some(toggle(show_all)),
        lengths: lengths.into_iter().map(length).collect(),
        csv_href: format!("/compare.csv?{}", query(None)),
    }
}

/// Returns the lengths at which each run has at least one finite result.
fn common_lengths(runs: &[Arc<Run>]) -> BTreeSet<u64> {
    let of = |run: &Arc<Run>| -> BTreeSet<u64> {
        let all = run.trials.values().flat_map(|trial| results(trial));
        all.filter(|(_, value)| value.is_some()).map(|(units, _)| units).collect()
    };
    runs.iter().map(of).reduce(|one, other| &one & &other).unwrap_or_default()
}

/// Returns a notice if the results of experiments do not compare: their metrics, the directions or
/// the units of their lengths differ.
fn difference(runs: &[Arc<Run>]) -> Option<Notice> {
    let searchers = || runs.iter().map(|run| &run.experiment.spec.searcher);
    let metrics: BTreeSet<&str> = searchers().map(|of| of.metric.as_str()).collect();
    let directions: BTreeSet<bool> = searchers().map(|of| of.smaller_is_better).collect();
    let units: BTreeSet<&str> = runs.iter().map(|run| run.search().unit_singular()).collect();
    let (title, text) = if metrics.len() > 1 {
        let names = metrics.into_iter().map(text::name).collect::<Vec<_>>().join(", ");
        ("different metrics", format!("{names} do not compare. The plots show numbers only."))
    } else if directions.len() > 1 {
        let text = "The metric is minimized in one and maximized in another.";
        ("different directions", text.to_owned())
    } else if units.len() > 1 {
        let units = units.into_iter().collect::<Vec<_>>().join(", ");
        ("different units of length", format!("Lengths are in: {units}. They do not compare."))
    } else {
        return None;
    };
    let title = format!("These experiments have {title}");
    Some(Notice { class: "invalid", title, at: None, text, links: Vec::new() })
}

fn experiment_sections(runs: &[Arc<Run>], show_all: bool) -> Vec<CompareSection> {
    let row = |name: &str, of: &dyn Fn(&Run) -> String| {
        (name.to_owned(), runs.iter().map(|run| of(run)).collect::<Vec<_>>())
    };
    let status = |run: &Run| run.experiment.status.clone().unwrap_or_default();
    let best = |run: &Run| match status(run).best {
        Some(best) => format!("{} (trial {})", text::result_text(Some(&best.metric)), best.index),
        None => text::NONE.to_owned(),
    };
    let failed = |run: &Run| {
        let all = super::head::badges(run);
        all.values().filter(|badge| badge.class == "failed").count().to_string()
    };
    let facts = vec![
        row("Phase", &|run| crate::state::of_run(run).word.to_owned()),
        row("Metric", &|run| text::name(&run.experiment.spec.searcher.metric)),
        row("Best result", &best),
        row("Slot hours", &|run| text::hours(seconds(run).1)),
        row("Trials", &|run| text::count(run.trials.len() as u64)),
        row("Wall time", &|run| text::duration(ran(run))),
        row("Search", &|run| method(&run.experiment)),
        row("Failed trials", &failed),
    ];
    let of_best = |run: &Arc<Run>| {
        let best = status(run).best.map(|best| best.index);
        let trial = best.and_then(|best| run.trials.get(&best));
        let values = trial.map(|trial| flat(&trial.spec.hyperparameters)).unwrap_or_default();
        let short = |(name, value)| (name, Value::String(text::hyperparameter(&value)));
        values.into_iter().map(short).collect()
    };
    let hyperparameters: Vec<BTreeMap<String, Value>> = runs.iter().map(of_best).collect();
    let spec =
        |run: &Arc<Run>| flat(&serde_json::to_value(&run.experiment.spec).unwrap_or_default());
    let specs: Vec<BTreeMap<String, Value>> = runs.iter().map(spec).collect();
    vec![
        section("Result", facts, false, true),
        section("Hyperparameters of the best trial", joined(&hyperparameters), false, true),
        section("Configuration", joined(&specs), true, show_all),
    ]
}

/// Returns the page that compares trials of an experiment.
pub(crate) fn trials(site: &Site, run: &Run, indexes: &[u32], show_all: bool) -> ComparePage {
    let known: Vec<(u32, &Arc<TrialRecord>)> = indexes
        .iter()
        .filter_map(|index| Some((*index, run.trials.get(index)?)))
        .take(COMPARED_MAX)
        .collect();
    let list = |without: Option<u32>| {
        let kept = known.iter().map(|(index, _)| *index).filter(|index| Some(*index) != without);
        kept.map(|index| index.to_string()).collect::<Vec<_>>().join(",")
    };
    let base = format!("{}/compare", run.base());
    let chip = |(position, (index, trial)): (usize, &(u32, &Arc<TrialRecord>))| CompareChip {
        name: format!("Trial {index}"),
        href: run.trial_base(*index),
        badge: crate::state::of_trial(trial, state(run, *index), run.is_running),
        without_href: format!("{base}?t={}", list(Some(*index))),
        series: position % SERIES + 1,
    };
    let row = |name: &str, of: &dyn Fn(&TrialRecord) -> String| {
        (name.to_owned(), known.iter().map(|(_, trial)| of(trial)).collect::<Vec<_>>())
    };
    let why = |trial: &TrialRecord| {
        run.search().trial(trial.spec.index).map(|of| of.reason()).unwrap_or_default()
    };
    let facts = vec![
        row("State", &|trial| {
            let badge = crate::state::of_trial(trial, state(run, trial.spec.index), run.is_running);
            badge.word.to_owned()
        }),
        row(&text::name(&run.experiment.spec.searcher.metric), &|trial| {
            text::optional(reported_best(trial))
        }),
        row("Length", &|trial| super::table::length(run, trial)),
        row("Attempts", &|trial| trial.status.attempts.len().to_string()),
        row("Ran for", &|trial| text::duration(attempt_seconds(trial, run.is_live()))),
        row("Why", &why),
    ];
    let hyperparameters: Vec<BTreeMap<String, Value>> =
        known.iter().map(|(_, trial)| flat(&trial.spec.hyperparameters)).collect();
    let mut frame = frame(site, run, "compare", "Compare trials · Stoker");
    frame.crumbs.push(Crumb { text: text::name(&run.name), href: run.base() });
    ComparePage {
        frame,
        title: format!("Compare {}", text::num(known.len(), "trial")),
        notice: None,
        chips: known.iter().enumerate().map(chip).collect(),
        source: format!("{}/data.json", run.base()),
        is_trials: true,
        curves: format!("{}/curves.json?trials={}", run.base(), list(None)),
        x: axis(run, None),
        sections: vec![
            section("Result", facts, false, true),
            section("Hyperparameters", joined(&hyperparameters), true, show_all),
        ],
        toggle: Some(match show_all {
            true => Pair {
                name: "Only what differs".to_owned(),
                value: format!("{base}?t={}", list(None)),
            },
            false => Pair {
                name: "Show all".to_owned(),
                value: format!("{base}?t={}&all=1", list(None)),
            },
        }),
        lengths: Vec::new(),
        csv_href: format!("{}/trials.csv", run.base()),
    }
}

/// Returns `compare.json`.
pub(crate) fn data(runs: &[Arc<Run>]) -> Value {
    let first = runs.first().map(|run| &run.experiment.spec.searcher);
    let directions: BTreeSet<bool> =
        runs.iter().map(|run| run.experiment.spec.searcher.smaller_is_better).collect();
    let of = |run: &Arc<Run>| {
        let slots = f64::from(run.experiment.spec.resources.slots_per_trial.max(1));
        let begin = created(run);
        let mut by_length = BTreeMap::<String, Vec<(u32, f64)>>::new();
        for (index, trial) in &*run.trials {
            for (units, value) in results(trial) {
                if let Some(value) = value {
                    by_length.entry(units.to_string()).or_default().push((*index, value));
                }
            }
        }
        let best: Vec<Value> = best_so_far(run)
            .into_iter()
            .map(|(at, value, trial)| {
                let hours = slot_seconds_until(run, at) as f64 * slots / 3600.0;
                let ended = ended_until(run, at);
                json!([hours, at - begin, ended, value, trial])
            })
            .collect();
        json!({
            "id": run.id(), "namespace": run.namespace, "name": run.name,
            "phase": crate::state::of_run(run).word, "unit": run.search().unit_singular(),
            "metric": run.experiment.spec.searcher.metric,
            "slotHours": seconds(run).1 as f64 / 3600.0,
            "trained": run.trials.values().map(|trial| trained_units(trial)).sum::<f64>(),
            "bestSoFar": best, "results": by_length,
        })
    };
    json!({
        "metric": first.map(|searcher| &searcher.metric),
        "smallerIsBetter": directions.first().filter(|_| directions.len() == 1),
        "experiments": runs.iter().map(of).collect::<Vec<_>>(),
    })
}

/// Returns the seconds of all attempts up to a time.
fn slot_seconds_until(run: &Run, at: i64) -> u64 {
    run.trials.values().map(|trial| held_seconds_until(trial, Timestamp(at))).sum()
}

fn ended_until(run: &Run, at: i64) -> usize {
    let ended = run.trials.values().filter_map(|trial| ended_at(&trial.status));
    ended.filter(|ended| ended.0 <= at).count()
}

/// Returns the table of results of several experiments for export: a row per result.
pub(crate) fn csv(runs: &[Arc<Run>]) -> (Vec<String>, Vec<Vec<Value>>) {
    let header = ["experiment", "trial", "length", "metric", "value"].map(str::to_owned).into();
    let mut rows = Vec::new();
    for run in runs {
        for (index, trial) in &*run.trials {
            for fact in &trial.status.facts {
                if let stoker_api::trial::Fact::Result(result) = fact {
                    rows.push(vec![
                        run.id().into(),
                        (*index).into(),
                        result.units.into(),
                        run.experiment.spec.searcher.metric.clone().into(),
                        exported(number::parse(&result.metric)),
                    ]);
                }
            }
        }
    }
    (header, rows)
}

#[cfg(test)]
mod tests {
    use askama::Template as _;

    use super::*;
    use crate::fixture;

    #[test]
    fn results_compare_in_one_unit_and_direction() {
        let run = |metric: &str, unit: &str, smaller: bool| {
            let searcher = json!({
                "metric": metric, "smallerIsBetter": smaller, "maxLength": {unit: 4},
                "random": {"maxTrials": 8},
            });
            let result = json!({"result": {"units": 4, "metric": "0.5"}});
            let facts = json!({"facts": [result]});
            Arc::new(fixture::run(json!({"searcher": searcher}), json!({}), &[facts]))
        };
        let check = |other: Arc<Run>, lengths: &[&str], title: Option<&str>| {
            let runs = [run("loss", "batches", true), other];
            let page = experiments(&Site::default(), &runs, Version(0, 0), false);
            let texts: Vec<&str> = page.lengths.iter().map(|one| one.text.as_str()).collect();
            assert_eq!(texts, lengths);
            let actual = page.notice.map(|notice| notice.title);
            let expected = title.map(|title| format!("These experiments have {title}"));
            assert_eq!(actual, expected);
            data(&runs)["smallerIsBetter"].clone()
        };
        assert_eq!(check(run("loss", "batches", true), &["4 batches"], None), true);
        assert_eq!(check(run("error", "batches", true), &[], Some("different metrics")), true);
        let directions = Some("different directions");
        assert_eq!(check(run("loss", "batches", false), &[], directions), Value::Null);
        let units = Some("different units of length");
        assert_eq!(check(run("loss", "epochs", true), &[], units), true);
    }

    #[test]
    fn phases_and_differences_are_live_parts() {
        let runs = [0, 1].map(|_| Arc::new(fixture::run(json!({}), json!({}), &[])));
        let page = experiments(&Site::default(), &runs, Version(7, 2), false);
        // Without the version, the stream would not report changes from before it was open.
        assert_eq!(page.frame.live.as_deref(), Some("/live?v=7.2"));
        let html = page.render().unwrap();
        for part in ["compared", "differences"] {
            assert!(html.contains(&format!("id=\"{part}\" data-live-part")), "{part}: {html}");
        }
    }

    #[test]
    fn curves_begin_with_the_axis_of_the_search() {
        let check = |length: Value, expected: &str| {
            let searcher =
                json!({"metric": "loss", "maxLength": length, "random": {"maxTrials": 8}});
            let run = fixture::run(json!({"searcher": searcher}), json!({}), &[json!({})]);
            let text = trials(&Site::default(), &run, &[0], false).render().unwrap();
            assert!(text.contains(&format!("data-x=\"{expected}\"")), "{text}");
            let pressed = |axis: &str| format!("data-value=\"{axis}\" aria-pressed=\"true\"");
            for axis in ["batches", "epochs", "time"] {
                assert_eq!(text.contains(&pressed(axis)), axis == expected, "{axis} {text}");
            }
        };
        check(json!({"batches": 4}), "batches");
        check(json!({"epochs": 4}), "epochs");
        check(json!({"records": 4}), "batches");
    }
}
