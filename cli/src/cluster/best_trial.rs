//! Best trial of an experiment, or the error if it has none.

use std::cmp::Reverse;

use stoker_api::experiment::Experiment;
use stoker_api::trial::TrialStatus;

use crate::failure::Failure;

/// Returns the index of the best trial.
pub(crate) fn best_trial(experiment: &Experiment) -> Option<u32> {
    Some(experiment.status.as_ref()?.best.as_ref()?.index)
}

/// Returns the error of an experiment without a result. `name` is its name in commands, which need
/// `flags`. `trials` are its trials by index.
pub(crate) fn no_best_trial<'a>(
    experiment: &Experiment,
    name: &str,
    trials: impl Iterator<Item = (u32, &'a TrialStatus)>,
    flags: &str,
) -> Failure {
    let has_ended = experiment.status.as_ref().is_some_and(|status| status.phase.is_terminal());
    let yet = if has_ended { "" } else { " yet" };
    let latest = trials
        .filter_map(|(index, status)| Some((status.checkpoints.last()?.batches, Reverse(index))));
    let remedy = match latest.max() {
        Some((_, Reverse(index))) => format!(
            "download the latest checkpoint of a trial: `stoker checkpoint download {name}-{index} \
             --latest --to DIR{flags}`"
        ),
        None => "its trials have no checkpoints".to_owned(),
    };
    Failure::Input(format!("no trial of experiment `{name}` has a result{yet}; {remedy}"))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn experiment_without_results_names_its_latest_checkpoint() {
        let experiment = |phase: &str| -> Experiment {
            serde_json::from_value(json!({
                "apiVersion": "stoker.dev/v1alpha1", "kind": "Experiment", "metadata": {},
                "spec": {
                    "entrypoint": {"command": ["x"]},
                    "searcher": {"metric": "loss", "maxLength": {"epochs": 2}, "single": {}},
                },
                "status": {"phase": phase},
            }))
            .unwrap()
        };
        let trial = |number: u64| {
            let checkpoint = json!({
                "name": "c", "batches": number, "manifestSha256": "", "bytes": 3,
            });
            let checkpoints = vec![serde_json::from_value(checkpoint).unwrap()];
            TrialStatus { checkpoints, ..TrialStatus::default() }
        };
        let trials = [TrialStatus::default(), trial(4), trial(9), trial(9)];
        let error = |phase: &str, num: usize| {
            let trials = trials.iter().take(num).enumerate();
            let trials = trials.map(|(index, trial)| (index as u32, trial));
            no_best_trial(&experiment(phase), "s", trials, " --root r4").to_string()
        };
        assert_eq!(
            error("Cancelled", 4),
            "no trial of experiment `s` has a result; download the latest checkpoint of a trial: \
             `stoker checkpoint download s-2 --latest --to DIR --root r4`"
        );
        assert_eq!(
            error("Running", 1),
            "no trial of experiment `s` has a result yet; its trials have no checkpoints"
        );
    }
}
