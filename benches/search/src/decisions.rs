//! Time of a trial's decisions: its hyperparameters, and what follows from its result.

use std::collections::VecDeque;
use std::path::Path;
use std::time::Instant;

use serde_json::{Value, json};
use stoker_engine::search::rung::Loss;
use stoker_engine::search::state::{Change, SearchState};
use stoker_engine::search::turn::{Event, Step};

use crate::{BenchError, optuna, space};

/// Number of trials of a search.
const TRIALS: u32 = 1_000;

/// Prints the microseconds per trial of each method, with Optuna's beside.
pub(crate) fn run(python: &Path, rounds: u32) -> Result<(), BenchError> {
    let methods = [
        ("random", json!({"random": {"maxTrials": TRIALS}}), Some("random")),
        ("tpe", json!({"tpe": {"maxTrials": TRIALS}}), Some("multivariate")),
        ("asyncHalving", json!({"asyncHalving": {"maxTrials": TRIALS, "numRungs": 5}}), None),
        ("adaptiveAsha", json!({"adaptiveAsha": {"maxTrials": TRIALS}}), None),
    ];
    println!("decisions: microseconds per trial, {TRIALS} trials, median of {rounds} rounds");
    println!("{:<16} {:>10} {:>10} {:>8}", "method", "Stoker", "Optuna", "ratio");
    for (name, searcher, rival) in methods {
        let (mut ours, mut theirs) = (vec![], vec![]);
        for _ in 0..rounds {
            ours.push(time(&searcher)?);
            if let Some(rival) = rival {
                let trials = TRIALS.to_string();
                let time = optuna::call(python, &["decisions", rival, &trials])?;
                theirs.push(time.as_f64().unwrap_or(f64::NAN));
            }
        }
        let ours = median(ours);
        match theirs.is_empty() {
            true => println!("{name:<16} {ours:>10.2} {:>10} {:>8}", "-", "-"),
            false => {
                let theirs = median(theirs);
                println!("{name:<16} {ours:>10.2} {theirs:>10.2} {:>8.4}", ours / theirs);
            }
        }
    }
    Ok(())
}

/// Runs a search of each method that a line of stdin names.
///
/// # Errors
///
/// stdin cannot be read, or a line names no method.
pub(crate) fn side() -> Result<(), BenchError> {
    for method in std::io::stdin().lines() {
        time(&json!({method?: {"maxTrials": TRIALS, "numRungs": 5}}))?;
    }
    Ok(())
}

/// Runs a search to its end, one trial after the other, and returns the microseconds per trial.
fn time(searcher: &Value) -> Result<f64, BenchError> {
    let config = space::config(searcher, 1)?;
    let begin = Instant::now();
    let mut search = SearchState::of(&config);
    let mut granted = VecDeque::new();
    let mut event = Some(Event::Began);
    while let Some(next) = event.take() {
        if let Some(turn) = search.advance(next) {
            granted.extend(turn.created.iter().map(|draw| (draw.index, draw.units)));
            let is_continued = |change: &&Change| matches!(change.step, Step::Continue { .. });
            let continued = turn.changes.iter().filter(is_continued);
            granted.extend(continued.map(|change| (change.trial, change.units)));
        }
        event = granted.pop_front().map(|(trial, units)| {
            let loss = Loss::of_metric(space::metric(trial, units), true);
            Event::Result { trial, units, loss, others: vec![] }
        });
    }
    Ok(begin.elapsed().as_secs_f64() * 1e6 / f64::from(TRIALS))
}

/// Returns the middle value, NaN without values.
pub(crate) fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}
