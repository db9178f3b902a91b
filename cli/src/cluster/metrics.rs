//! `stoker trial|experiment metrics` on a cluster: finds the files, which the storage contains.

use stoker_api::experiment::Experiment;
use stoker_api::trial::Trial;

use super::connect::Cluster;
use super::{experiment as experiments, storage};
use crate::failure::Failure;
use crate::metrics::{self, MetricsArgs, MetricsFiles, TrialFiles};

/// Prints the metrics of one trial.
pub(crate) async fn trial(
    cluster: &Cluster,
    name: &str,
    args: &MetricsArgs,
    options: &storage::Options,
) -> Result<(), Failure> {
    let trial = cluster.trial(name).await?;
    let experiment = cluster.experiment(&trial.spec.experiment).await?;
    let files = files(format!("trial {name}"), &experiment, &[trial], options)?;
    metrics::print_trial(&files, args).await.map_err(|error| with_remedy(error, &experiment))
}

/// Prints the metrics of all trials of an experiment.
pub(crate) async fn experiment(
    cluster: &Cluster,
    name: &str,
    args: &MetricsArgs,
    options: &storage::Options,
) -> Result<(), Failure> {
    let experiment = cluster.experiment(name).await?;
    let trials = experiments::trials(cluster, &experiment).await?;
    let trials: Vec<Trial> = trials.into_iter().map(|(trial, _)| trial).collect();
    let files = files(format!("experiment {name}"), &experiment, &trials, options)?;
    metrics::print_experiment(&files, args).await.map_err(|error| with_remedy(error, &experiment))
}

/// Returns the metrics files of these trials, which `name` describes in messages.
pub(crate) fn files(
    name: String,
    experiment: &Experiment,
    trials: &[Trial],
    options: &storage::Options,
) -> Result<MetricsFiles, Failure> {
    let of = |trial: &Trial| {
        let attempts = trial.status.as_ref().map_or(&[][..], |status| status.attempts.as_slice());
        let index = trial.spec.index;
        TrialFiles::new(index, storage::trial_path(experiment, index), attempts)
    };
    Ok(MetricsFiles {
        name,
        storage: options.open(&storage::of(experiment))?,
        trials: trials.iter().map(of).collect(),
        searcher: experiment.spec.searcher.clone(),
    })
}

/// Adds a remedy to an error of the storage.
pub(crate) fn with_remedy(error: Failure, experiment: &Experiment) -> Failure {
    match error {
        Failure::Storage(error) => storage::failure(error, &storage::of(experiment)),
        other => other,
    }
}
