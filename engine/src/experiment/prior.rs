//! Trials of earlier experiments from which a search learns.

use stoker_api::decisions::PriorTrial;
use stoker_api::experiment::Searcher;
use stoker_api::hyperparameters::Space;
use stoker_api::number;
use stoker_api::validate::ValidExperiment;

use super::summary::best_metric;
use crate::search::is_in_space;
use crate::trial::{TrialRecord, compare};

/// Maximum size of the recorded trials as JSON, in bytes: half of an experiment's log.
const BYTES_MAX: usize = 32 * 1024;

/// An experiment that `spec.searcher.priorTrials` names.
#[derive(Clone, Debug)]
pub struct PriorExperiment<'a> {
    /// Name of the experiment.
    pub name: &'a str,
    /// Its search.
    pub searcher: &'a Searcher,
    /// Its trials.
    pub trials: Vec<&'a TrialRecord>,
}

/// Returns the best trials of earlier experiments, best first: those with a finite metric and
/// hyperparameters in the space of `valid`. Of equal hyperparameters, only the best trial stays.
/// `experiments` are those that `spec.searcher.priorTrials` names, in this order.
///
/// # Errors
///
/// The message for the user, if an experiment has another metric.
pub fn prior_trials(
    valid: &ValidExperiment,
    experiments: &[PriorExperiment<'_>],
) -> Result<Vec<PriorTrial>, String> {
    let searcher = &valid.spec.searcher;
    let num_max = searcher.prior_trials.as_ref().map_or(0, |prior| prior.trials as usize);
    let mut all = vec![];
    for (i, experiment) in experiments.iter().enumerate() {
        let Searcher { metric, smaller_is_better, .. } = experiment.searcher;
        if (metric, *smaller_is_better) != (&searcher.metric, searcher.smaller_is_better) {
            return Err(format!(
                "spec.searcher.priorTrials.experiments[{i}] is `{}`, which has the metric \
                 `{metric}` (smallerIsBetter: {smaller_is_better}), but this experiment has `{}` \
                 (smallerIsBetter: {}); name experiments with the same metric",
                experiment.name, searcher.metric, searcher.smaller_is_better
            ));
        }
        let usable = |trial: &&TrialRecord| {
            usable(&valid.space, searcher.smaller_is_better, experiment.name, trial)
        };
        all.extend(experiment.trials.iter().filter_map(usable));
    }
    // Stable: of equal metrics, the trial of the experiment that is named first is better.
    all.sort_by(|a, b| compare(&a.metric, &b.metric, searcher.smaller_is_better));
    let mut chosen: Vec<PriorTrial> = vec![];
    let mut bytes = 0;
    for trial in all {
        if chosen.len() == num_max {
            break;
        }
        let is_known = |other: &PriorTrial| other.hyperparameters == trial.hyperparameters;
        let size = serde_json::to_vec(&trial).map_or(usize::MAX, |json| json.len());
        if !chosen.iter().any(is_known) && size <= BYTES_MAX - bytes {
            bytes += size;
            chosen.push(trial);
        }
    }
    Ok(chosen)
}

/// Returns a trial of an experiment as a prior trial, if it is usable.
fn usable(
    space: &Space,
    smaller_is_better: bool,
    experiment: &str,
    trial: &TrialRecord,
) -> Option<PriorTrial> {
    let hyperparameters = &trial.spec.hyperparameters;
    let metric = best_metric(trial, smaller_is_better)?;
    let is_finite = number::parse(&metric).is_some_and(f64::is_finite);
    (is_finite && is_in_space(space, hyperparameters)).then(|| PriorTrial {
        name: format!("{experiment}-{}", trial.spec.index),
        hyperparameters: hyperparameters.clone(),
        metric,
    })
}

#[cfg(test)]
mod tests;
