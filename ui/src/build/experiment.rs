//! Pages of one experiment.

use stoker_api::number;
use stoker_api::validate::validate_started;
use stoker_engine::experiment::explain::{BracketExplanation, State, TrialExplanation, length};
use stoker_engine::experiment::importance::Importance;
use stoker_engine::trial::{TrialRecord, live_attempt};

use super::errors::{errors, first_error};
use super::head::{ExperimentTab, badges, head};
use super::{decisions, options, table};
use crate::curves::axis;
use crate::data::best_value;
use crate::site::Site;
use crate::store::Run;
use crate::text;
use crate::views::{
    CheckpointRow, CheckpointsPage, ConfigurationPage, CurvesCard, EventsPage, HyperparametersPage,
    ImportanceCard, ImportanceRow, LogsCard, LogsPage, NextRow, OverviewPage, SelectOption,
    TrialsPage,
};

/// Number of trials and decisions in the overview.
const TRIALS: usize = 12;
const DECISIONS: usize = 8;
/// Number of checkpoints on one page.
const CHECKPOINTS: usize = 100;
/// Maximum number of decisions on the page of events.
const EVENTS_MAX: usize = 1_000;

/// Returns the overview.
pub(crate) fn overview(site: &Site, run: &Run, query: &table::TableQuery) -> OverviewPage {
    let (latest, decisions_total) = decisions(run, None, DECISIONS);
    let has_rungs = run.search().has_rungs();
    let (errors, errors_total) = errors(run);
    OverviewPage {
        head: head(site, run, ExperimentTab::Overview),
        curves: curves_card(run, query),
        brackets: if has_rungs { super::rungs::brackets(run) } else { Vec::new() },
        ladder_label: super::rungs::label(run),
        parallel_label: parallel_label(run),
        has_hyperparameters: !run.search().hyperparameters.is_empty(),
        importance: importance_card(&run.search().importance),
        next: next(run),
        trials: table::overview(run, query, TRIALS),
        decisions: latest,
        decisions_total,
        errors,
        errors_total,
        first_error: first_error(run),
    }
}

fn curves_card(run: &Run, query: &table::TableQuery) -> CurvesCard {
    let base = run.base();
    let searched = &run.experiment.spec.searcher.metric;
    let metric = query.metric.as_deref().unwrap_or(searched);
    let mut names: Vec<&str> = vec![searched];
    for trial in run.trials.values() {
        for name in trial.status.metrics.keys() {
            if !names.contains(&name.as_str()) {
                names.push(name);
            }
        }
        if names.len() > 1 {
            break;
        }
    }
    let texts: Vec<String> = names.iter().map(|name| text::name(name)).collect();
    let texts = texts.iter().map(String::as_str);
    let metrics: Vec<(&str, &str)> = names.into_iter().zip(texts).collect();
    let num = run.trials.values().filter(|trial| best_value(trial).is_some()).count();
    let status = run.experiment.status.as_ref();
    let best = status.and_then(|status| status.best.as_ref());
    let best = best.map(|best| {
        format!(", best {}, trial {}", text::result_text(Some(&best.metric)), best.index)
    });
    let axes = [("batches", "batches"), ("epochs", "epochs"), ("time", "time")];
    let scale = query.scale.as_deref().unwrap_or("linear");
    CurvesCard {
        source: format!("{base}/curves.json"),
        label: format!("{}{}", text::num(num, "curve"), best.unwrap_or_default()),
        metrics: options(&base, "metric", metric, &metrics),
        axes: options(&base, "x", axis(run, query.x.as_deref()), &axes),
        scales: options(&base, "scale", scale, &[("linear", "linear"), ("log", "log x")]),
        empty: (run.trials.is_empty()).then(|| "No trial has started".to_owned()),
    }
}

fn parallel_label(run: &Run) -> String {
    let num = run.trials.values().filter(|trial| best_value(trial).is_some()).count();
    let names: Vec<String> =
        run.search().hyperparameters.iter().map(|one| text::name(&one.name)).collect();
    format!("Parallel coordinates of {}: {}", text::num(num, "trial"), names.join(", "))
}

/// Returns the card with the importance of hyperparameters, and a menu of lengths that links to
/// this page.
fn importance_by_length(run: &Run, units: Option<u64>) -> ImportanceCard {
    let search = run.search();
    let trials = || run.trials.values().map(AsRef::as_ref);
    let at = units.map(|units| search.importance_at(trials(), units));
    let card = importance_card(at.as_ref().unwrap_or(&search.importance));
    let current = units.or(search.importance_lengths.last().copied());
    let option = |units: &u64| SelectOption {
        value: units.to_string(),
        text: length(*units, search.unit),
        href: format!("{}/hyperparameters?importance={units}#importance", run.base()),
        is_current: current == Some(*units),
    };
    let lengths = search.importance_lengths.iter().map(option).collect::<Vec<_>>();
    let is_choice = lengths.iter().any(|length| !length.is_current);
    ImportanceCard { lengths: if is_choice { lengths } else { vec![] }, ..card }
}

/// Returns the card with the importance of hyperparameters.
fn importance_card(importance: &Result<Importance, String>) -> ImportanceCard {
    let lengths = vec![];
    let importance = match importance {
        Ok(importance) => importance,
        Err(reason) => {
            let (title, rows) = (String::new(), Vec::new());
            return ImportanceCard { title, lengths, rows, empty: Some(sentence(reason)) };
        }
    };
    let at = length(importance.units, importance.unit);
    let bar = |share: f64| format!("{:.1}", share.clamp(0.0, 1.0) * 1000.0);
    let mut rows: Vec<ImportanceRow> = importance
        .hyperparameters
        .iter()
        .map(|share| ImportanceRow {
            name: match &share.group {
                Some(group) => format!("{} ({group})", text::name(&share.name)),
                None => text::name(&share.name),
            },
            share: format!("{:.2}", share.importance),
            deviation: format!("{:.2}", share.deviation),
            width: bar(share.importance),
            low: bar(share.importance - share.deviation),
            high: bar(share.importance + share.deviation),
        })
        .collect();
    rows.push(ImportanceRow {
        name: "combinations".to_owned(),
        share: format!("{:.2}", importance.interactions),
        deviation: String::new(),
        width: bar(importance.interactions),
        low: bar(importance.interactions),
        high: bar(importance.interactions),
    });
    let title = format!("at {at}, from {}", text::num(importance.results as usize, "result"));
    ImportanceCard { title, lengths, rows, empty: None }
}

/// Returns a reason with a capital letter.
fn sentence(reason: &str) -> String {
    let mut chars = reason.chars();
    let first = chars.next().map(|first| first.to_uppercase().to_string()).unwrap_or_default();
    first + chars.as_str()
}

fn next(run: &Run) -> Vec<NextRow> {
    let Ok(explanation) = &run.search().explanation else { return Vec::new() };
    let rungs = |num: usize| if num > 1 { text::num(num, "rung") } else { String::new() };
    explanation
        .brackets
        .iter()
        .map(|bracket| NextRow {
            bracket: bracket.bracket,
            rungs: rungs(bracket.rungs.len()),
            places: match bracket.places {
                Some(places) => format!("{} / {places}", held_places(run, bracket)),
                None => text::NONE.to_owned(),
            },
            next: bracket.next.to_string(),
        })
        .collect()
}

/// Returns the number of places that trials of a bracket hold. A trial that waits for a decision
/// holds one only until it has released its slots. An external searcher may create more trials than
/// places, so its trials hold one only with slots.
fn held_places(run: &Run, bracket: &BracketExplanation) -> usize {
    let is_external = run.experiment.spec.searcher.external.is_some();
    let trials = run.search().explanation.iter().flat_map(|explanation| &explanation.trials);
    let needs_slots = |explained: &TrialExplanation| match explained.state() {
        State::Waiting => true,
        State::Training => is_external,
        _ => false,
    };
    let members = trials
        .filter(|explained| explained.bracket == bracket.bracket && needs_slots(explained))
        .filter_map(|explained| run.trials.get(&explained.trial));
    let with_slots = members.filter(|trial| live_attempt(trial).is_some()).count();
    let training = if is_external { 0 } else { bracket.training as usize };
    training + with_slots
}

/// Returns the page with all trials.
pub(crate) fn trials(site: &Site, run: &Run, query: &table::TableQuery) -> TrialsPage {
    let head = head(site, run, ExperimentTab::Trials);
    TrialsPage { head, trials: table::page(run, query) }
}

/// Returns the page with large plots. `units` is the length of the importance.
pub(crate) fn hyperparameters(site: &Site, run: &Run, units: Option<u64>) -> HyperparametersPage {
    let searcher = &run.experiment.spec.searcher;
    let others = searcher.other_objectives();
    let mut objectives = Vec::new();
    if !others.is_empty() {
        objectives.push(searcher.metric.clone());
        objectives.extend(others.iter().map(|other| other.metric.clone()));
    }
    HyperparametersPage {
        head: head(site, run, ExperimentTab::Hyperparameters),
        names: run.search().hyperparameters.iter().map(|one| one.name.clone()).collect(),
        parallel_label: parallel_label(run),
        importance: importance_by_length(run, units),
        objectives,
    }
}

/// Returns a page with the checkpoints of all trials, the latest trial last. `skip` is the number
/// of checkpoints on earlier pages.
pub(crate) fn checkpoints(site: &Site, run: &Run, skip: Option<usize>) -> CheckpointsPage {
    let all = || run.trials.values().flat_map(|trial| &trial.status.checkpoints);
    let total: u64 = all().map(|checkpoint| checkpoint.bytes).sum();
    let num = all().count();
    // Checkpoints may have been deleted since the link was made.
    let skip = skip.unwrap_or(0).min(num.saturating_sub(1) / CHECKPOINTS * CHECKPOINTS);
    let rows = run.trials.values().flat_map(|trial| checkpoint_rows(run, trial));
    let rows: Vec<CheckpointRow> = rows.skip(skip).take(CHECKPOINTS).collect();
    let end = skip + rows.len();
    let href = |skip: usize| format!("{}/checkpoints?skip={skip}", run.base());
    let place = |number: usize| text::count(number as u64);
    CheckpointsPage {
        num: place(num),
        shown: format!("{}–{}", place(skip + 1), place(end)),
        previous_href: (skip > 0).then(|| href(skip.saturating_sub(CHECKPOINTS))),
        next_href: (end < num).then(|| href(end)),
        head: head(site, run, ExperimentTab::Checkpoints),
        metric: text::name(&run.experiment.spec.searcher.metric),
        rows,
        total: text::bytes(total),
    }
}

/// Returns the checkpoints of a trial, newest first.
pub(crate) fn checkpoint_rows(run: &Run, trial: &TrialRecord) -> Vec<CheckpointRow> {
    let smaller = run.experiment.spec.searcher.smaller_is_better;
    let checkpoints = &trial.status.checkpoints;
    let value = |text: Option<&String>| text.and_then(|text| number::parse(text));
    let finite = |value: &f64| value.is_finite();
    let usable = checkpoints.iter().filter(|one| !one.refused);
    let latest = usable.clone().next_back().map(|one| &one.name);
    let values = usable.filter_map(|one| value(one.metric.as_ref())).filter(finite);
    let best = values.reduce(if smaller { f64::min } else { f64::max });
    let index = trial.spec.index;
    let row = |one: &stoker_api::trial::CheckpointRecord| {
        let mut kept = Vec::new();
        if latest == Some(&one.name) {
            kept.push("latest");
        }
        if best.is_some() && !one.refused && value(one.metric.as_ref()) == best {
            kept.push("best");
        }
        if trial.spec.pins.contains(&one.name) {
            kept.push("copied");
        }
        if one.refused {
            kept.push("refused");
        }
        CheckpointRow {
            trial: index,
            trial_href: run.trial_base(index),
            name: one.name.clone(),
            href: format!("{}/checkpoints/{}", run.trial_base(index), one.name),
            batches: text::count(one.batches),
            metric: text::result_text(one.metric.as_deref()),
            size: text::bytes(one.bytes),
            kept,
            address: run.checkpoint_address(index, &one.name),
        }
    };
    checkpoints.iter().rev().map(row).collect()
}

/// Returns the page with the configuration.
pub(crate) fn configuration(site: &Site, run: &Run) -> ConfigurationPage {
    let spec = &run.experiment.spec;
    let (valid, errors) = match validate_started(&run.name, spec) {
        Ok(valid) => (yaml(&valid.spec), Vec::new()),
        Err(errors) => {
            (String::new(), errors.iter().map(|error| text::escape(&error.to_string())).collect())
        }
    };
    ConfigurationPage {
        head: head(site, run, ExperimentTab::Configuration),
        given: yaml(spec),
        valid,
        errors,
    }
}

/// Returns a value as YAML. Hidden characters are shown as escapes.
pub(crate) fn yaml(value: &impl serde::Serialize) -> String {
    let value = serde_json::to_value(value).unwrap_or_default();
    let text = serde_saphyr::to_string(&value);
    text::escape(&text.unwrap_or_else(|error| format!("cannot write YAML: {error}")))
}

/// Returns the page with decisions and conditions.
pub(crate) fn events(site: &Site, run: &Run) -> EventsPage {
    let (decisions, total) = decisions(run, None, EVENTS_MAX);
    let left_out = total - decisions.len();
    let conditions = run.experiment.status.iter().flat_map(|status| &status.conditions);
    EventsPage {
        head: head(site, run, ExperimentTab::Events),
        decisions,
        left_out,
        conditions: conditions.map(super::condition).collect(),
    }
}

/// Returns the page with logs: those of one trial, with links to the others.
pub(crate) fn logs(site: &Site, run: &Run, index: Option<u32>) -> LogsPage {
    let failed = badges(run).into_iter().find(|(_, badge)| badge.class == "failed");
    let status = run.experiment.status.as_ref();
    let best = status.and_then(|status| status.best.as_ref()).map(|best| best.index);
    let first = run.trials.keys().next().copied();
    let chosen = index.or(failed.map(|(index, _)| index)).or(best).or(first);
    let logs = match chosen {
        Some(index) => super::trial::logs_card(run, index, &crate::logs::LogsQuery::default()),
        None => LogsCard::none("No trial has started"),
    };
    LogsPage { head: head(site, run, ExperimentTab::Logs), logs }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use serde_json::{Value, json};

    use super::*;
    use crate::fixture;

    /// Returns the links of the menu, and the title or reason of the card.
    fn menu(run: &Run, units: Option<u64>) -> (Vec<(String, bool)>, String) {
        let card = importance_by_length(run, units);
        let links = card.lengths.into_iter().map(|length| (length.href, length.is_current));
        (links.collect(), card.empty.unwrap_or(card.title))
    }

    #[test]
    fn metrics_of_curves_are_escaped() {
        let metric = "los\u{202e}s";
        let length = json!({"batches": 4});
        let searcher = json!({"metric": metric, "maxLength": length, "random": {"maxTrials": 8}});
        let run = fixture::run(json!({ "searcher": searcher }), json!({}), &[]);
        let card = curves_card(&run, &table::TableQuery::default());
        let options: Vec<_> = card.metrics.iter().map(|of| (&*of.value, &*of.text)).collect();
        assert_eq!(options, [(metric, r"los\u{202e}s")]);
    }

    #[test]
    fn checkpoints_have_pages() {
        let checkpoint = |number: u64| {
            json!({"name": format!("{number:012}-0"), "batches": number, "manifestSha256": "",
                "bytes": 1})
        };
        let trial =
            |num: u64| json!({"checkpoints": (1..=num).map(checkpoint).collect::<Vec<_>>()});
        let run = fixture::run(json!({}), json!({}), &[trial(150), json!({}), trial(80)]);
        let page = |skip: Option<usize>| {
            let page = checkpoints(&Site::default(), &run, skip);
            assert_eq!((page.num.as_str(), page.total.as_str()), ("230", "230 B"));
            let ends = [page.previous_href, page.next_href];
            let skips = ends.map(|href| Some(href?.split('=').next_back()?.to_owned()));
            (page.rows.len(), page.shown, skips)
        };
        let skip = |number: &str| Some(number.to_owned());
        assert_eq!(page(None), (100, "1–100".to_owned(), [None, skip("100")]));
        assert_eq!(page(Some(100)), (100, "101–200".to_owned(), [skip("0"), skip("200")]));
        let last = (30, "201–230".to_owned(), [skip("100"), None]);
        assert_eq!(page(Some(200)), last);
        assert_eq!(page(Some(9_999)), last);
    }

    #[test]
    fn importance_has_a_menu_of_lengths() {
        let results = |lengths: &[u64]| -> Value {
            let result = |units| json!({"result": {"units": units, "metric": "1"}});
            json!({"facts": lengths.iter().map(result).collect::<Vec<_>>()})
        };
        let spec = json!({"hyperparameters": {"x": {"double": {"min": 0.0, "max": 1.0}}}});
        let run = |lengths, num| {
            let mut run = fixture::run(spec.clone(), json!({}), &vec![results(lengths); num]);
            for trial in Arc::make_mut(&mut run.trials).values_mut() {
                Arc::make_mut(trial).spec.hyperparameters = json!({"x": 0.5});
            }
            run
        };
        let few = run(&[2], 9);
        let run = run(&[2, 4], 10);
        let link = |units| format!("{}/hyperparameters?importance={units}#importance", run.base());
        let at = |units| format!("All 10 results at {units} batches are equal");
        let both = |first, last| vec![(link(2), first), (link(4), last)];
        assert_eq!(menu(&run, None), (both(false, true), at(4)));
        assert_eq!(menu(&run, Some(2)), (both(true, false), at(2)));
        assert_eq!(menu(&run, Some(4)), (both(false, true), at(4)));
        let unknown = "Needs 10 results, has none".to_owned();
        assert_eq!(menu(&run, Some(3)), (both(false, false), unknown));
        assert_eq!(menu(&few, None).0, []);
    }
}
