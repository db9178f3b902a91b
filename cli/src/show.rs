//! `stoker experiment|trial|checkpoint` without a cluster: reads the records of `stoker run`, and
//! those of a cluster in its storage.

mod delete;
mod follow;
mod logs;
mod recorded_run;
mod shown;
mod steer;
mod wait;

use std::collections::BTreeSet;
use std::path::Path;

use stoker_api::experiment::ReopenedTrials;
use stoker_api::trial::Trial;
use stoker_ui::quoted;

pub(crate) use self::delete::{delete, delete_record, delete_run, mark_deleted};
pub(crate) use self::follow::StoredFollower;
pub(crate) use self::logs::{experiment_logs, trial_logs};
use self::recorded_run::read_runs;
pub(crate) use self::recorded_run::{RecordedRun, Runner, local_endpoint};
pub(crate) use self::steer::{RequestedState, RunFiles, kill_trial, set_state, set_state_of};
pub(crate) use self::wait::{Waited, stop_message, wait, wait_for_end};
use crate::cluster::best_trial::{best_trial, no_best_trial};
use crate::cluster::checkpoint::{Choice, Download, split_name};
use crate::cluster::{text, trial};
use crate::commands::names::TrialRef;
use crate::describe::{self, Description};
use crate::failure::Failure;
use crate::json;
use crate::list::experiments::Listed;
use crate::list::{self, List};
use crate::metrics::MetricsFiles;
use crate::print::{self, Format, Output};
use crate::reopen;
use crate::run_root::RunRoot;

/// Lists all runs.
pub(crate) async fn experiments(root: Option<&str>) -> Result<List, Failure> {
    let run_root = RunRoot::resolve(root, None)?;
    let runs = read_runs(&run_root).await?;
    let namespaces = runs.iter().map(|run| &run.paths.namespace);
    let with_namespace = namespaces.collect::<BTreeSet<_>>().len() > 1;
    let experiments = runs.into_iter().map(|run| {
        let (name, phase) = (run.name(), run.phase());
        Listed { experiment: run.into_shown(), name, phase }
    });
    let empty = format!("no experiments in {}", run_root.searched());
    Ok(list::experiments::list(experiments.collect(), with_namespace, empty))
}

/// Prints one run and its trials.
pub(crate) async fn describe_experiment(
    root: Option<&str>,
    name: &str,
    format: Format,
) -> Result<(), Failure> {
    let run = RecordedRun::open(root, name).await?;
    let explained = run.explained();
    let importance = describe::importance(&run.experiment, run.trials.values());
    if format != Format::Text {
        let object = explained.add_to_experiment(json::object(&run.experiment));
        return print::object(&importance.add_to(run.ranking().metric, object), format);
    }
    let (id, paths) = (run.id(), &run.paths);
    print::out(Description {
        experiment: &run.experiment,
        trials: &run.trials.values().collect::<Vec<_>>(),
        explained: &explained,
        importance: &importance,
        phase: run.phase(),
        storage: paths.experiment(),
        checkpoint: &|index, name| paths.checkpoint(index, name),
        id: &id,
        is_local: !run.is_of_cluster(),
        now: text::now(),
    });
    Ok(())
}

/// Continues trials of a run that have ended.
pub(crate) async fn continue_experiment(
    root: Option<&str>,
    name: &str,
    trials: ReopenedTrials,
    output: Output,
) -> Result<(), Failure> {
    let run = RecordedRun::open(root, name).await?;
    reopen::continue_locally(root, &run, trials, output)
}

/// Lists the trials of a run.
pub(crate) async fn trials(root: Option<&str>, name: &str) -> Result<List, Failure> {
    let run = RecordedRun::open(root, name).await?;
    let explained = run.explained();
    let trials = run.trials.values().map(|trial| run.shown(trial, &explained));
    let trials: Vec<Trial> = trials.collect();
    Ok(list::trials::list(&run.experiment.spec.searcher, &run.name(), &trials))
}

/// Prints one trial of a run.
pub(crate) async fn describe_trial(
    root: Option<&str>,
    trial: &TrialRef,
    format: Format,
) -> Result<(), Failure> {
    let run = RecordedRun::open(root, &trial.experiment).await?;
    let explained = run.explained();
    let object = run.shown(run.trial(trial.index)?, &explained);
    if format != Format::Text {
        let object = explained.add_to_trial(trial.index, json::object(&object));
        return print::object(&object, format);
    }
    print::out(trial::render(&object, Some(&run.experiment), &explained, text::now()));
    Ok(())
}

/// Returns the metrics files of a run's trials, or of one trial.
pub(crate) async fn metrics_files(
    root: Option<&str>,
    name: &str,
    index: Option<u32>,
) -> Result<MetricsFiles, Failure> {
    RecordedRun::open(root, name).await?.metrics_files(index)
}

/// Lists the checkpoints of a run or of one trial.
pub(crate) async fn checkpoints(
    root: Option<&str>,
    name: &str,
    trial: Option<u32>,
) -> Result<List, Failure> {
    let (run, named) = RecordedRun::open_with_trial(root, name).await?;
    if let Some(index) = trial {
        run.trial(index)?;
    }
    let is_selected =
        |index: u32| [trial, named].into_iter().flatten().all(|selected| selected == index);
    let searcher = &run.experiment.spec.searcher;
    let (name, mut list) = (run.name(), list::checkpoints::list(&searcher.metric));
    for (index, record) in run.trials.iter().filter(|(index, _)| is_selected(**index)) {
        for checkpoint in &record.status.checkpoints {
            let address = run.paths.checkpoint(*index, &checkpoint.name);
            let (of, smaller_is_better) = ((name.as_str(), *index), searcher.smaller_is_better);
            list::checkpoints::add(&mut list, of, checkpoint, smaller_is_better, address);
        }
    }
    Ok(list)
}

/// Downloads a checkpoint of a run.
pub(crate) async fn download(
    root: Option<&str>,
    name: &str,
    choice: &Choice,
    folder: &Path,
    output: Output,
) -> Result<(), Failure> {
    let (name, checkpoint) = split_name(name);
    let choice = choice.with_name(checkpoint)?;
    let (run, index) = RecordedRun::open_with_trial(root, name).await?;
    let index = index.or_else(|| best_trial(&run.experiment));
    let index = index.ok_or_else(|| {
        let trials = run.trials.iter().map(|(index, trial)| (*index, &trial.status));
        let flags = root.map_or_else(String::new, |root| format!(" --root {}", quoted(root)));
        no_best_trial(&run.experiment, &run.name(), trials, &flags)
    })?;
    let trial = TrialRef { experiment: run.name(), index }.to_string();
    let checkpoints = &run.trial(index)?.status.checkpoints;
    let record = choice.of(&trial, checkpoints, run.ranking().smaller_is_better)?;
    let (storage, path) = (run.storage()?, run.paths.trial(index));
    Download { storage: &storage, trial: &trial, path: &path, record }
        .write_into(folder, output)
        .await
}
