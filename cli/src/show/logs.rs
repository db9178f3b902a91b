//! Logs of local runs.

use stoker_api::trial::Attempt;
use stoker_engine::trial::closed;
use stoker_storage::{Storage, layout};

use super::RecordedRun;
use super::follow::{FollowTarget, follow};
use crate::cluster::logs::LogSelection;
use crate::cluster::logs::bucket::StoredLogs;
use crate::cluster::logs::line::{LogArgs, LogPrinter};
use crate::cluster::logs::tag::{Gang, Tag};
use crate::cluster::resource::ClusterResource as _;
use crate::commands::names::TrialRef;
use crate::failure::Failure;
use crate::print::{self, Output};

/// Prints the logs of one attempt of a trial.
pub(crate) async fn trial_logs(
    root: Option<&str>,
    trial: &TrialRef,
    selection: LogSelection,
    output: Output,
) -> Result<(), Failure> {
    let run = RecordedRun::open(root, &trial.experiment).await?;
    let LogSelection { rank, args, .. } = selection;
    if let Some(rank) = rank.filter(|rank| *rank >= run.gang().world_size) {
        return Err(Failure::Input(format!(
            "rank {rank} of trial `{trial}` not found: it has {}",
            run.gang().numbered("rank")
        )));
    }
    let record = run.trial(trial.index)?;
    let attempts = &record.status.attempts;
    let has_started = !attempts.is_empty();
    if selection.follow && !(has_started && closed(record).is_some()) {
        if has_started {
            attempt(trial, attempts, selection.attempt)?;
        }
        let target = FollowTarget { trial: Some(trial.index), selection };
        return follow(root, &run, target, output).await;
    }
    let attempt = attempt(trial, attempts, selection.attempt)?;
    let printer = LogPrinter::new(args, rank, output);
    run.print_logs(&run.storage()?, trial.index, (attempt, rank), false, printer).await
}

/// Returns the selected attempt, or the latest.
fn attempt(trial: &TrialRef, attempts: &[Attempt], number: Option<u32>) -> Result<u32, Failure> {
    let Some(latest) = attempts.last().map(|attempt| attempt.number) else {
        return Err(Failure::Input(format!("trial `{trial}` has not started yet")));
    };
    let number = number.unwrap_or(latest);
    match attempts.iter().any(|attempt| attempt.number == number) {
        true => Ok(number),
        false => Err(Failure::Input(format!(
            "attempt {number} of trial `{trial}` not found; the latest is {latest}"
        ))),
    }
}

/// Prints the logs of the latest attempts of all trials of a run.
pub(crate) async fn experiment_logs(
    root: Option<&str>,
    name: &str,
    (is_following, args): (bool, LogArgs),
    output: Output,
) -> Result<(), Failure> {
    let run = RecordedRun::open(root, name).await?;
    if is_following && !run.experiment.phase().is_terminal() {
        let selection = LogSelection { args, ..LogSelection::default() };
        let target = FollowTarget { trial: None, selection };
        return follow(root, &run, target, output).await;
    }
    let storage = run.storage()?;
    let mut has_any = false;
    for (index, trial) in &run.trials {
        if let Some(attempt) = trial.status.attempts.last() {
            has_any = true;
            let printer = LogPrinter::new(args, None, output);
            run.print_logs(&storage, *index, (attempt.number, None), true, printer).await?;
        }
    }
    if !has_any {
        print::err(format!("no trial of experiment {} has started yet", run.name()));
    }
    Ok(())
}

impl RecordedRun {
    /// Returns the gang of each trial. Ranks of a local run are processes on one machine, like in
    /// one pod.
    pub(super) fn gang(&self) -> Gang {
        let resources = &self.experiment.spec.resources;
        let world_size = resources.slots_per_trial;
        let ranks_per_pod = resources.slots_per_pod.filter(|_| self.is_of_cluster());
        Gang { world_size, ranks_per_pod: ranks_per_pod.unwrap_or(world_size) }
    }

    async fn print_logs(
        &self,
        storage: &Storage,
        trial: u32,
        (attempt, rank): (u32, Option<u32>),
        with_trial: bool,
        mut printer: LogPrinter,
    ) -> Result<(), Failure> {
        let folder = layout::logs_path(&self.paths.trial(trial), attempt);
        let stored = StoredLogs { storage, folder: &folder, is_merged: !self.is_of_cluster() };
        let tag = Tag { trial, attempt, pod: 0, gang: self.gang(), with_trial, is_job: false };
        if stored.print(&tag, rank, &mut printer).await? == 0 {
            print::err(format!("no logs found for attempt {attempt} of trial {trial}"));
        }
        printer.finish();
        Ok(())
    }
}
