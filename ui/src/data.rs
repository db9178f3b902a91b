//! `data.json` of an experiment: a column per field, an entry per trial.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use serde_json::{Value, json};
use stoker_api::experiment::Searcher;
use stoker_api::number;
use stoker_api::trial::Fact;
use stoker_engine::experiment::explain::{Decision, Explanation, Kind, State};
use stoker_engine::trial::{TrialRecord, granted_units, held_seconds, trained_units};

use crate::search::{Hyperparameter, category, flat, results};
use crate::state;
use crate::store::Run;

/// Returns the state of a trial in the search.
pub(crate) fn state(run: &Run, index: u32) -> Option<State> {
    run.search().trial(index).map(|trial| trial.state())
}

/// Returns the best searched metric of a trial as it was reported. NaN and infinities mean that the
/// trial has diverged.
pub(crate) fn reported_best(trial: &TrialRecord) -> Option<f64> {
    trial.status.best_metric.as_deref().and_then(number::parse)
}

/// Returns a result for exports: a number, or the text of NaN and infinities, which JSON lacks.
pub(crate) fn exported(value: Option<f64>) -> Value {
    match value {
        Some(value) if !value.is_finite() => number::format(value).into(),
        value => value.into(),
    }
}

/// Returns the best searched metric of a trial; `None` without one, and for NaN.
pub(crate) fn best_value(trial: &TrialRecord) -> Option<f64> {
    reported_best(trial).filter(|value| value.is_finite())
}

/// Returns the seconds for which attempts of a trial held slots. Those of a running one count up
/// to now.
pub(crate) fn attempt_seconds(trial: &TrialRecord, is_running: bool) -> u64 {
    held_seconds(trial, is_running.then(crate::text::now))
}

/// Returns `data.json`.
pub(crate) fn data(run: &Run) -> Value {
    let (search, searcher) = (run.search(), &run.experiment.spec.searcher);
    let explanation = search.explanation.as_ref().ok();
    let status = run.experiment.status.as_ref();
    let importance = match &search.importance {
        Ok(importance) => json!(importance),
        Err(reason) => json!({ "error": reason }),
    };
    json!({
        "name": run.name, "id": run.id(), "namespace": run.namespace,
        "phase": state::of_run(run).word, "isLive": run.is_live(),
        "metric": searcher.metric, "smallerIsBetter": searcher.smaller_is_better,
        "unit": search.unit_singular(), "units": search.unit.plural(),
        "maxLength": search.length_max, "lengths": search.lengths,
        "hyperparameters": search.hyperparameters,
        "trials": trials(run),
        "best": status.and_then(|status| status.best.as_ref()).map(|best| best.index),
        "pareto": pareto(run), "objectives": objectives(searcher),
        "brackets": explanation.map_or_else(Vec::new, brackets),
        "promoted": explanation.map_or_else(Vec::new, promoted),
        "importance": importance,
        "times": times(run),
        "bestSoFar": best_so_far(run),
    })
}

fn trials(run: &Run) -> Value {
    let mut columns: BTreeMap<&str, Vec<Value>> = BTreeMap::new();
    let mut hyperparameters: BTreeMap<&str, Vec<Value>> = BTreeMap::new();
    for (index, trial) in &*run.trials {
        let explained = run.search().trial(*index);
        let badge = state::of_trial(trial, state(run, *index), run.is_running);
        let all: Vec<(u64, Option<f64>)> = results(trial).collect();
        let mut push = |name, value| columns.entry(name).or_default().push(value);
        push("index", json!(index));
        push("state", json!(badge.word));
        push("bracket", json!(explained.map_or(trial.spec.group, |trial| trial.bracket)));
        push("rung", json!(all.len()));
        push("units", json!(trained_units(trial)));
        push("granted", json!(granted_units(&trial.spec)));
        push("value", json!(best_value(trial)));
        push("latest", json!(all.last().and_then(|(_, value)| *value)));
        push("seconds", json!(attempt_seconds(trial, run.is_live())));
        push("attempts", json!(trial.status.attempts.len()));
        push("results", json!(all));
        let values = flat(&trial.spec.hyperparameters);
        for one in &run.search().hyperparameters {
            let value = column_value(one, values.get(&one.name));
            hyperparameters.entry(&one.name).or_default().push(value);
        }
    }
    let mut fields = json!(columns);
    if run.trials.is_empty() {
        fields = json!({ "index": [], "state": [], "bracket": [], "rung": [], "units": [],
            "granted": [], "value": [], "latest": [], "seconds": [], "attempts": [],
            "results": [] });
    }
    fields["hp"] = json!(hyperparameters);
    fields
}

/// Returns a value as plots need it: a number, the text of a category, or null if it is not set.
fn column_value(one: &Hyperparameter, value: Option<&Value>) -> Value {
    match value {
        None => Value::Null,
        Some(value) if one.scale == "category" => json!(category(value)),
        Some(value) if value.is_number() => value.clone(),
        Some(_) => Value::Null,
    }
}

fn objectives(searcher: &Searcher) -> Vec<Value> {
    let of = |metric: &str, smaller| json!({ "metric": metric, "smallerIsBetter": smaller });
    let others = searcher.other_objectives();
    let first = (!others.is_empty()).then(|| of(&searcher.metric, searcher.smaller_is_better));
    let others = others.iter().map(|other| of(&other.metric, other.smaller_is_better));
    first.into_iter().chain(others).collect()
}

/// Returns the latest result of each trial in all objectives, if there are several.
fn pareto(run: &Run) -> Vec<Value> {
    if run.experiment.spec.searcher.other_objectives().is_empty() {
        return Vec::new();
    }
    let front = run.experiment.status.iter().flat_map(|status| &status.pareto);
    let front: BTreeSet<u32> = front.map(|trial| trial.index).collect();
    let value = |text: &String| number::parse(text).filter(|value| value.is_finite());
    let of = |(index, trial): (&u32, &Arc<TrialRecord>)| {
        let facts = trial.status.facts.iter().rev();
        let result = facts.filter_map(|fact| match fact {
            Fact::Result(result) => Some(result),
            _ => None,
        });
        let result = result.into_iter().next()?;
        let texts = std::iter::once(&result.metric).chain(&result.values);
        let values: Option<Vec<f64>> = texts.map(value).collect();
        Some(json!({ "trial": index, "values": values?, "isFront": front.contains(index) }))
    };
    run.trials.iter().filter_map(of).collect()
}

fn brackets(explanation: &Explanation) -> Vec<Value> {
    let of = |bracket: &stoker_engine::experiment::explain::BracketExplanation| {
        let rungs: Vec<Value> = bracket
            .rungs
            .iter()
            .map(|rung| {
                json!({
                    "units": rung.units, "results": rung.results, "training": rung.training,
                    "promoted": rung.promoted, "cut": rung.cut_metric, "best": rung.best_metric,
                })
            })
            .collect();
        json!({ "bracket": bracket.bracket, "rungs": rungs })
    };
    explanation.brackets.iter().filter(|bracket| bracket.rungs.len() > 1).map(of).collect()
}

/// Returns the promotions: trial, and length from which it was promoted.
fn promoted(explanation: &Explanation) -> Vec<(u32, u64)> {
    let is_promotion = |decision: &&&Decision| decision.decision == Kind::Promoted;
    let of = |decision: &&Decision| {
        Some((decision.trial, decision.comparison.as_ref().map(|comparison| comparison.units)?))
    };
    explanation.decisions().iter().filter(is_promotion).filter_map(of).collect()
}

fn times(run: &Run) -> Value {
    let first = |trial: &TrialRecord| {
        trial.status.attempts.iter().find_map(|attempt| attempt.started_at).map(|at| at.0)
    };
    let last = |trial: &TrialRecord| {
        let attempts = trial.status.attempts.last();
        attempts.and_then(|attempt| attempt.ended_at).map(|at| at.0)
    };
    let trials = || run.trials.values();
    json!({
        "start": trials().map(|trial| first(trial)).collect::<Vec<_>>(),
        "end": trials().map(|trial| last(trial)).collect::<Vec<_>>(),
    })
}

/// Returns the improvements of the best result: time, value and trial.
pub(crate) fn best_so_far(run: &Run) -> Vec<(i64, f64, u32)> {
    let smaller = run.experiment.spec.searcher.smaller_is_better;
    let mut results: Vec<(i64, f64, u32)> = Vec::new();
    for (index, trial) in &*run.trials {
        for fact in &trial.status.facts {
            if let Fact::Result(result) = fact
                && let (Some(at), Some(value)) = (result.at, number::parse(&result.metric))
                && value.is_finite()
            {
                results.push((at.0, value, *index));
            }
        }
    }
    results.sort_by_key(|(at, _, index)| (*at, *index));
    let mut best: Option<f64> = None;
    results.retain(|(_, value, _)| {
        let is_better = best.is_none_or(|best| if smaller { *value < best } else { *value > best });
        if is_better {
            best = Some(*value);
        }
        is_better
    });
    results
}
