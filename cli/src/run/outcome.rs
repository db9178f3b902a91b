//! End of a run: deletes checkpoints that are not retained and prints the outcome.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Value, json};
use stoker_api::experiment::{
    BestTrial, CheckpointStorage, DesiredState, Experiment, ExperimentStatus, ParetoTrial, Phase,
    Searcher,
};
use stoker_api::names::experiment_path;
use stoker_api::trial::{CheckpointRecord, Fact, TrialStatus};
use stoker_engine::retention;
use stoker_engine::trial::TrialRecord;
use stoker_storage::{Storage, layout};
use stoker_ui::quoted;

use super::display::MetricRanking;
use super::record::trial_object;
use super::report_server::SharedState;
use super::state::State;
use super::table::{self, hyperparameters};
use crate::cluster::text;
use crate::explain::Explained;
use crate::failure::Failure;
use crate::json;
use crate::print;
use crate::run_root;

/// Maximum number of failed trials that a message names.
const FAILED_MAX: usize = 8;

/// Paths of a run's files in the storage.
#[derive(Clone, Debug)]
pub(crate) struct RunPaths {
    pub(crate) root: String,
    pub(crate) namespace: String,
    pub(crate) name: String,
    pub(crate) uid: String,
}

impl RunPaths {
    /// Returns the path of a trial, relative to the root.
    pub(crate) fn trial(&self, index: u32) -> String {
        layout::trial_path(&self.namespace, &self.name, &self.uid, index)
    }

    /// Returns the command that ends a pause.
    pub(crate) fn activate_command(&self) -> String {
        let id = run_root::run_id(&self.name, &self.uid);
        format!("stoker experiment activate {id} --root {}", quoted(&self.root))
    }

    /// Returns the full path or URL of the experiment's files.
    pub(crate) fn experiment(&self) -> String {
        let root = self.root.trim_end_matches('/');
        format!("{root}/{}", experiment_path(&self.namespace, &self.name, &self.uid))
    }

    /// Returns the full path or URL of a checkpoint.
    pub(crate) fn checkpoint(&self, index: u32, name: &str) -> String {
        let root = self.root.trim_end_matches('/');
        format!("{root}/{}", layout::checkpoint_path(&self.trial(index), name))
    }
}

/// Copies a trial's record next to its files, so that the storage is self-contained.
pub(crate) async fn copy_record(
    storage: &Storage,
    paths: &RunPaths,
    trial: &TrialRecord,
) -> Result<(), Failure> {
    let bytes = serde_json::to_vec_pretty(&trial_object(trial))
        .map_err(|error| Failure::System(format!("cannot serialize a trial's record: {error}")))?;
    let path = layout::record_path(&paths.trial(trial.spec.index));
    Ok(storage.put(&path, bytes.into()).await?)
}

/// Copies the experiment's record next to the files of its trials.
pub(crate) async fn copy_experiment(
    storage: &Storage,
    paths: &RunPaths,
    experiment: &Experiment,
) -> Result<(), Failure> {
    let bytes = serde_json::to_vec_pretty(experiment).map_err(|error| {
        Failure::System(format!("cannot serialize an experiment's record: {error}"))
    })?;
    let folder = experiment_path(&paths.namespace, &paths.name, &paths.uid);
    Ok(storage.put(&layout::record_path(&folder), bytes.into()).await?)
}

/// Deletes the checkpoints that `policy` does not retain, and those missing from the record.
///
/// The manifest is deleted first, so that no partial checkpoint looks complete. Then the files and
/// the entry in the record are deleted.
pub(crate) async fn retain(
    shared: &SharedState,
    storage: &Storage,
    paths: &RunPaths,
    policy: &CheckpointStorage,
    smaller_is_better: bool,
) -> Result<(), Failure> {
    let deletable = {
        let state = shared.state();
        let of = |trial: &TrialRecord| (trial.spec.index, trial.status.checkpoints.clone());
        let lists: Vec<(u32, Vec<CheckpointRecord>)> = state.trials.values().map(of).collect();
        let slices: Vec<(u32, &[CheckpointRecord])> =
            lists.iter().map(|(index, list)| (*index, list.as_slice())).collect();
        retention::deletable(policy, smaller_is_better, &slices)
    };
    let mut by_trial: BTreeMap<u32, BTreeSet<String>> = BTreeMap::new();
    for (index, name) in deletable {
        by_trial.entry(index).or_default().insert(name);
    }
    for (index, names) in by_trial {
        delete(shared, storage, paths, index, &names).await?;
        let trial = shared.state().trials.get(&index).cloned();
        if let Some(trial) = trial {
            copy_record(storage, paths, &trial).await?;
        }
    }
    let known: Vec<(u32, BTreeSet<String>)> = {
        let state = shared.state();
        let names = |trial: &TrialRecord| -> BTreeSet<String> {
            trial.status.checkpoints.iter().map(|checkpoint| checkpoint.name.clone()).collect()
        };
        state.trials.iter().map(|(index, trial)| (*index, names(trial))).collect()
    };
    for (index, known) in known {
        delete_unknown(storage, &paths.trial(index), &known).await?;
    }
    // The status may refer to a deleted checkpoint of the best trial.
    shared.state().settle()?;
    let experiment = shared.state().experiment.clone();
    copy_experiment(storage, paths, &experiment).await
}

/// Deletes the given checkpoints of a trial from the storage and the record.
pub(crate) async fn delete(
    shared: &SharedState,
    storage: &Storage,
    paths: &RunPaths,
    index: u32,
    names: &BTreeSet<String>,
) -> Result<(), Failure> {
    let trial_path = paths.trial(index);
    for name in names {
        delete_one(storage, &trial_path, name).await?;
    }
    shared.state().forget(index, names)
}

/// Deletes checkpoints that are not in the record: partial ones, and those of attempts that died
/// before reporting them. The trial must not be running.
async fn delete_unknown(
    storage: &Storage,
    trial_path: &str,
    known: &BTreeSet<String>,
) -> Result<(), Failure> {
    let checkpoints = layout::checkpoints_path(trial_path);
    for name in storage.folders(&checkpoints).await? {
        if !known.contains(&name) {
            delete_one(storage, trial_path, &name).await?;
        }
    }
    Ok(())
}

/// Deletes one checkpoint, the manifest first, so that no partial checkpoint looks complete.
async fn delete_one(storage: &Storage, trial_path: &str, name: &str) -> Result<(), Failure> {
    storage.delete(&layout::manifest_path(trial_path, name)).await?;
    Ok(storage.delete_folder(&layout::checkpoint_path(trial_path, name)).await?)
}

/// Returns the last line of `run --output json`.
pub(crate) fn json_line(state: &State, paths: &RunPaths) -> Value {
    let status = state.status();
    let best = status.best.as_ref().map(|best| {
        json!({
            "trial": best.index,
            "metric": json::metric(&best.metric),
            "hyperparameters":
                state.trials.get(&best.index).map(|trial| &trial.spec.hyperparameters),
            "checkpoint": best.checkpoint.as_ref().map(|name| paths.checkpoint(best.index, name)),
        })
    });
    let mut pareto = json!(status.pareto);
    json::metrics_to_numbers(&mut pareto);
    json!({
        "experiment": paths.name,
        "phase": status.phase,
        "message": status.message,
        "trials": state.trials.len(),
        "best": best,
        "pareto": pareto,
    })
}

/// Prints the table of trials, the failures, the outcome and the best trial.
pub(crate) fn print_text(
    state: &State,
    paths: &RunPaths,
    searcher: &Searcher,
    ranking: &MetricRanking<'_>,
) {
    let mut trials: Vec<&TrialRecord> = state.trials.values().collect();
    trials.sort_by(|a, b| ranking.compare(a, b));
    // The runner ends now, and all programs have ended.
    let explained = Explained::new(&state.experiment, state.trials.values()).with_runner(false);
    print::out("");
    print::out(table::of_trials(&trials, &explained, ranking, searcher));
    let rungs = explained.rungs_section();
    print::out(rungs.strip_prefix('\n').unwrap_or_default());
    if !rungs.is_empty() {
        print::out("");
    }
    failures(&trials).into_iter().for_each(print::out);
    // After the failures, which may fill the screen.
    print::out(summary(&state.status(), state.desired_state(), paths));
    if let Some(best) = state.status().best {
        let trial = state.trials.get(&best.index);
        let length = trial.map(|trial| length_of_best(&trial.status, &best, searcher));
        print::out(format!(
            "best: trial {} with {} {}{}",
            best.index,
            ranking.metric,
            best.metric,
            length.unwrap_or_default()
        ));
        if let Some(trial) = trial {
            print::out(format!(
                "  hyperparameters: {}",
                hyperparameters(&trial.spec.hyperparameters)
            ));
        }
        if let Some(name) = best.checkpoint {
            print::out(format!("  checkpoint: {}", paths.checkpoint(best.index, &name)));
        }
    }
    let front = pareto(searcher, &state.status().pareto);
    if !front.is_empty() {
        print::out("Pareto front:");
        front.iter().for_each(|line| print::out(format!("  {line}")));
    }
}

/// Returns the length of the best result, such as ` after 4 of 36 epochs`, or an empty text for the
/// full length.
pub(crate) fn length_of_best(
    status: &TrialStatus,
    best: &BestTrial,
    searcher: &Searcher,
) -> String {
    let Some((unit, units_max)) = searcher.max_length.get() else { return String::new() };
    let results = status.facts.iter().filter_map(|fact| match fact {
        Fact::Result(result) if result.metric == best.metric => Some(result.units),
        _ => None,
    });
    let of_checkpoint = || {
        let name = best.checkpoint.as_ref()?;
        status.checkpoints.iter().find(|checkpoint| checkpoint.name == *name)
    };
    // The newest checkpoint with this metric is named.
    match results.max() {
        Some(units) if units < units_max => {
            format!(" after {units} of {units_max} {}", unit.plural())
        }
        Some(_) => String::new(),
        // The best validation of a trial that stopped early.
        None => match of_checkpoint().map(|checkpoint| checkpoint.batches) {
            Some(1) => " after 1 batch".to_owned(),
            Some(batches) => format!(" after {batches} batches"),
            None => String::new(),
        },
    }
}

/// Returns one line for each message of failed trials: `trials 3, 5 failed: no data`.
fn failures(trials: &[&TrialRecord]) -> Vec<String> {
    let mut messages: Vec<(&str, Vec<u32>)> = Vec::new();
    for trial in trials.iter().filter(|trial| trial.status.phase == Phase::Failed) {
        let message = trial.status.message.as_deref().unwrap_or("no message");
        match messages.iter_mut().find(|(of, _)| *of == message) {
            Some((_, indexes)) => indexes.push(trial.spec.index),
            None => messages.push((message, vec![trial.spec.index])),
        }
    }
    let line = |(message, indexes): (&str, Vec<u32>)| {
        format!("{} failed: {message}", text::trials(&indexes, FAILED_MAX))
    };
    messages.into_iter().map(line).collect()
}

/// Returns one line for each trial of the Pareto front: `trial 3: loss 0.5, seconds 2`.
pub(crate) fn pareto(searcher: &Searcher, front: &[ParetoTrial]) -> Vec<String> {
    let line = |trial: &ParetoTrial| {
        let values = searcher.objectives.iter().zip(&trial.values);
        let values: Vec<String> =
            values.map(|(objective, value)| format!("{} {value}", objective.metric)).collect();
        format!("trial {}: {}", trial.index, values.join(", "))
    };
    front.iter().map(line).collect()
}

fn summary(status: &ExperimentStatus, desired: DesiredState, paths: &RunPaths) -> String {
    let what = match status.phase {
        Phase::Completed => "completed",
        Phase::Failed => "failed",
        Phase::Cancelled => "was cancelled",
        Phase::Paused if desired == DesiredState::Paused => "is paused",
        // A signal to the runner also pauses the trials.
        Phase::Paused | Phase::Pending | Phase::Running => "was interrupted",
    };
    let message =
        status.message.as_ref().map_or_else(String::new, |message| format!(": {message}"));
    format!("experiment {} {what}{message}", paths.name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn interrupted_and_paused_runs_have_different_words() {
        let text = || "a".to_owned();
        let paths = RunPaths { root: text(), namespace: text(), name: text(), uid: text() };
        let check = |phase: Phase, desired: DesiredState, expected: &str| {
            let status = ExperimentStatus { phase, ..ExperimentStatus::default() };
            assert_eq!(summary(&status, desired, &paths), expected);
        };
        check(Phase::Running, DesiredState::Active, "experiment a was interrupted");
        check(Phase::Paused, DesiredState::Active, "experiment a was interrupted");
        check(Phase::Paused, DesiredState::Paused, "experiment a is paused");
        check(Phase::Completed, DesiredState::Active, "experiment a completed");
    }

    #[test]
    fn equal_failures_are_one_line() {
        let (_, recorded) = crate::explain::tests::record();
        let failed = |index: u32, message: &str| {
            let mut trial = recorded[0].clone();
            trial.spec.index = index;
            trial.status.phase = Phase::Failed;
            trial.status.message = Some(message.to_owned());
            trial
        };
        let mut trials: Vec<TrialRecord> = (0..10).map(|index| failed(index, "no data")).collect();
        trials.push(failed(10, "no disk"));
        trials[3].status.phase = Phase::Completed;
        let trials: Vec<&TrialRecord> = trials.iter().collect();
        let expected = [
            "trials 0, 1, 2, 4, 5, 6, 7, 8 and 1 more failed: no data",
            "trial 10 failed: no disk",
        ];
        assert_eq!(failures(&trials), expected);
        assert_eq!(failures(&trials[1..3]), ["trials 1, 2 failed: no data"]);
    }

    #[test]
    fn command_that_ends_a_pause_names_the_run() {
        let [root, namespace, name, uid] =
            ["/data/my runs", "ml", "a", "0123456789"].map(str::to_owned);
        let paths = RunPaths { root, namespace, name, uid };
        let expected = "stoker experiment activate a-01234567 --root '/data/my runs'";
        assert_eq!(paths.activate_command(), expected);
    }

    #[test]
    fn best_result_at_a_shorter_length_names_it() {
        let searcher = json!({ "metric": "loss", "maxLength": { "epochs": 36 }, "single": {} });
        let searcher: Searcher = serde_json::from_value(searcher).unwrap();
        let result =
            |units: u64, metric: &str| json!({ "result": { "units": units, "metric": metric } });
        let checkpoint = json!({
            "name": "000000000016-0", "batches": 16, "manifestSha256": "", "bytes": 3,
        });
        let facts = [(4, "0.25"), (12, "0.5"), (24, "0.9"), (36, "0.75"), (36, "0.9")];
        let facts = json!(facts.map(|(units, metric)| result(units, metric)));
        let status = TrialStatus {
            facts: serde_json::from_value(facts).unwrap(),
            checkpoints: vec![serde_json::from_value(checkpoint).unwrap()],
            ..TrialStatus::default()
        };
        let length = |metric: &str, checkpoint: Option<&str>| {
            let checkpoint = checkpoint.map(str::to_owned);
            let best = BestTrial { index: 5, metric: metric.to_owned(), checkpoint };
            length_of_best(&status, &best, &searcher)
        };
        assert_eq!(length("0.25", Some("000000000032-0")), " after 4 of 36 epochs");
        assert_eq!(length("0.75", None), "");
        // The newest checkpoint with this metric is named, here of the full length.
        assert_eq!(length("0.9", Some("000000000032-0")), "");
        // The best validation of a trial that stopped early.
        assert_eq!(length("0.1", Some("000000000016-0")), " after 16 batches");
        assert_eq!(length("0.1", None), "");
    }

    #[test]
    fn pareto_front_names_all_objectives() {
        let searcher = json!({
            "metric": "loss", "maxLength": { "epochs": 1 }, "single": {},
            "objectives": [{ "metric": "loss" }, { "metric": "seconds" }],
        });
        let searcher: Searcher = serde_json::from_value(searcher).unwrap();
        let values = vec!["0.5".to_owned(), "2".to_owned()];
        let lines = pareto(&searcher, &[ParetoTrial { index: 3, values }]);
        assert_eq!(lines, ["trial 3: loss 0.5, seconds 2"]);
    }
}
