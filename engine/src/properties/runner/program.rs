//! Programs of simulated trials, and trials of an earlier experiment.

use serde_json::json;
use stoker_api::decisions::PriorTrial;
use stoker_api::validate::Method;

use crate::trial::{TrialRecord, num_reopenings};

/// Behavior of a trial's program. It depends only on the trial's seed, so it is the same in every
/// interleaving. A program that was continued after its end trains: its error was removed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Program {
    Trains,
    StopsItself,
    EndsUntrained,
    RefusesHyperparameters,
    Fails,
}

pub(super) fn program(record: &TrialRecord) -> Program {
    if num_reopenings(record) > 0 {
        return Program::Trains;
    }
    match record.spec.seed % 16 {
        0 => Program::StopsItself,
        1 => Program::RefusesHyperparameters,
        2 => Program::Fails,
        3 => Program::EndsUntrained,
        _ => Program::Trains,
    }
}

/// Returns trials of an earlier experiment, best first. A grid has none.
pub(super) fn prior(method: &Method) -> Vec<PriorTrial> {
    let is_grid = matches!(method, Method::Grid { .. });
    let trial = |index: u32| PriorTrial {
        name: format!("earlier-{index}"),
        hyperparameters: json!({ "depth": 1 + index, "net": { "rate": 0.5 } }),
        metric: index.to_string(),
    };
    (0..if is_grid { 0 } else { 2 }).map(trial).collect()
}
