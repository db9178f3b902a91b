//! Logs of trials and jobs: from their pods while those exist, then from the storage.
//!
//! ```text
//!  pods of an attempt -- API server's logs --> [tag]: trial and rank --> lines
//!  storage: logs/ATTEMPT/RANK-SEQ.log ------------'
//! ```
//!
//! 1. [`tag`]: origin and prefix of a line.
//! 2. [`mod@line`]: time of a line, and the flags that select lines.
//! 3. [`cursor`] and [`pods`]: lines of one pod, across broken connections.
//! 4. [`follow`]: lines of all pods of a trial, an experiment or a job.
//! 5. [`bucket`]: lines in the storage, also of local runs.

pub(crate) mod bucket;
mod cursor;
mod follow;
pub(crate) mod line;
mod pods;
pub(crate) mod tag;
#[cfg(test)]
mod tests;

use k8s_openapi::api::core::v1::Pod;
use kube::api::ListParams;
use stoker_api::experiment::Experiment;
use stoker_api::inference::InferenceJob;
use stoker_api::names::{LABEL_ATTEMPT, LABEL_EXPERIMENT, LABEL_JOB, LABEL_TRIAL};
use stoker_api::trial::{Attempt, Trial};
use stoker_storage::layout;

use self::bucket::StoredLogs;
use self::cursor::LogRequest;
use self::follow::{LogFollower, LogTarget};
#[cfg(test)]
use self::line::LogLine;
use self::line::{LogArgs, LogPrinter};
use self::pods::PodLog;
use self::tag::{Gang, Tag};
use super::connect::Cluster;
use super::resource::ClusterResource as _;
use super::{experiment, job, storage};
use crate::failure::Failure;
use crate::print::{self, Output};

/// Selection of a trial's lines.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct LogSelection {
    /// Only lines of this rank; `None` for all ranks.
    pub(crate) rank: Option<u32>,
    /// Only lines of this attempt; `None` for the latest.
    pub(crate) attempt: Option<u32>,
    /// Whether to stream new lines.
    pub(crate) follow: bool,
    /// Which lines to print, and whether with their times.
    pub(crate) args: LogArgs,
}

/// Prints the logs of one trial.
pub(crate) async fn trial(
    cluster: &Cluster,
    name: &str,
    selection: LogSelection,
    options: &storage::Options,
    output: Output,
) -> Result<(), Failure> {
    let trial = cluster.trial(name).await?;
    let experiment = cluster.experiment(&trial.spec.experiment).await?;
    let gang = Gang::of(&experiment);
    if let Some(rank) = selection.rank
        && rank >= gang.world_size
    {
        return Err(Failure::Input(format!(
            "rank {rank} of trial `{name}` not found: it has {}",
            gang.numbered("rank")
        )));
    }
    let attempt = attempt(&trial, name, selection)?;
    let is_over = trial.status.as_ref().is_some_and(|status| status.phase.is_terminal())
        || selection.attempt.is_some() && attempt.is_some_and(|attempt| attempt.end.is_some());
    if selection.follow && !is_over {
        let target = LogTarget::Trial { name: name.to_owned(), attempt: selection.attempt };
        let mut printer = LogPrinter::new(selection.args, selection.rank, output).following();
        let request = LogRequest::new(&selection.args, gang, selection.rank);
        let follower = LogFollower::new(cluster, target, gang, selection.rank, request);
        return follower.run(|tag, line| printer.add(tag, line)).await;
    }
    let Some(attempt) = attempt else {
        return Err(Failure::Input(format!(
            "trial `{name}` has not started yet; use --follow to wait"
        )));
    };
    let LogSelection { rank, args, .. } = selection;
    let source = LogSource { cluster, experiment: &experiment, gang, options, rank, args, output };
    source.print(&trial, attempt, false).await
}

/// Returns the selected attempt; `None` if the trial has not started.
fn attempt<'a>(
    trial: &'a Trial,
    name: &str,
    selection: LogSelection,
) -> Result<Option<&'a Attempt>, Failure> {
    let attempts = trial.status.as_ref().map_or(&[][..], |status| status.attempts.as_slice());
    let Some(number) = selection.attempt else { return Ok(attempts.last()) };
    match attempts.iter().find(|attempt| attempt.number == number) {
        None if selection.follow && attempts.is_empty() => Ok(None),
        None => Err(Failure::Input(match attempts.last() {
            None => format!("trial `{name}` has not started yet"),
            Some(latest) => format!(
                "attempt {number} of trial `{name}` not found; the latest is {}",
                latest.number
            ),
        })),
        attempt => Ok(attempt),
    }
}

/// Prints the logs of all trials of an experiment. Returns the exit code: if the logs of a trial
/// cannot be read, prints the error and continues with the next trial.
pub(crate) async fn experiment(
    cluster: &Cluster,
    name: &str,
    options: &storage::Options,
    (follow, args): (bool, LogArgs),
    output: Output,
) -> Result<u8, Failure> {
    let experiment = cluster.experiment(name).await?;
    let gang = Gang::of(&experiment);
    let is_over = experiment.status.as_ref().is_some_and(|status| status.phase.is_terminal());
    if follow && !is_over {
        let target = LogTarget::Experiment { name: name.to_owned() };
        let mut printer = LogPrinter::new(args, None, output).following();
        let request = LogRequest::new(&args, gang, None);
        let follower = LogFollower::new(cluster, target, gang, None, request);
        return follower.run(|tag, line| printer.add(tag, line)).await.map(|()| 0);
    }
    let source =
        LogSource { cluster, experiment: &experiment, gang, options, rank: None, args, output };
    let (mut has_any, mut code) = (false, 0);
    for (trial, _) in experiment::trials(cluster, &experiment).await? {
        let attempts = trial.status.as_ref().map_or(&[][..], |status| status.attempts.as_slice());
        if let Some(attempt) = attempts.last() {
            has_any = true;
            if let Err(error) = source.print(&trial, attempt, true).await {
                error.print(trial.metadata.name.as_deref(), output);
                code = if code == 0 { error.code() } else { code };
            }
        }
    }
    if !has_any {
        print::err(format!("no trial of experiment {name} has started yet"));
    }
    Ok(code)
}

/// Prints the logs of a job: from its pods while all of them exist, else from the storage. If the
/// log of a pod cannot be opened, prints the stored logs, also while the job runs: the pod may have
/// ended long before the job.
pub(crate) async fn job(
    cluster: &Cluster,
    name: &str,
    slot: Option<u32>,
    (follow, args): (bool, LogArgs),
    options: &storage::Options,
    output: Output,
) -> Result<(), Failure> {
    let job: InferenceJob = cluster.read(name).await?;
    let gang = Gang::of_job(&job);
    if let Some(slot) = slot.filter(|slot| *slot >= gang.world_size) {
        return Err(Failure::Input(format!(
            "slot {slot} of job `{name}` not found: it has {}",
            gang.numbered("slot")
        )));
    }
    let mut printer = LogPrinter::new(args, None, output);
    let request = LogRequest::new(&args, gang, None);
    if follow && !job.phase().is_terminal() {
        let target = LogTarget::Job { name: name.to_owned() };
        let mut printer = printer.following();
        let follower = LogFollower::new(cluster, target, gang, slot, request);
        return follower.run(|tag, line| printer.add(tag, line)).await;
    }
    let params = ListParams::default().labels(&format!("{LABEL_JOB}={name}"));
    let listed = cluster.list::<Pod>("pods", &params, false).await?;
    let of = |(pod, _)| Tag::of_pod(&pod, gang, false).map(|tag| (pod, tag));
    let mut pods: Vec<(Pod, Tag)> = listed.into_iter().filter_map(of).collect();
    let num_attempts = job.status.as_ref().map_or(0, |status| status.attempts as usize);
    let is_complete = pods.len() >= num_attempts;
    pods.retain(|(_, tag)| tag.has(slot));
    if num_attempts == 0 {
        print::err(format!("no process of job {name} has started yet"));
        return Ok(());
    }
    if !is_complete {
        match print_stored_job(&job, slot, options, &mut printer).await {
            Ok(0) if pods.is_empty() => {
                print::err(format!("no logs found for job {name}"));
                return Ok(());
            }
            Ok(0) => {}
            Ok(_) => {
                printer.finish();
                return Ok(());
            }
            Err(error) if pods.is_empty() => return Err(error),
            Err(error) => {
                print::err(format!("stoker: {error}; showing the logs of the remaining pods"));
                printer = LogPrinter::new(args, None, output);
            }
        }
    }
    let logs = match pods::open(cluster, &pods, request).await {
        // Otherwise, the storage was read above.
        Err(error) if is_complete => {
            let stored = print_stored_job(&job, slot, options, &mut printer).await;
            printer.finish();
            return stored_instead(stored, error);
        }
        opened => opened?,
    };
    let shown = pods::show_merged(logs, |tag, line| printer.add(tag, line)).await;
    printer.finish();
    shown
}

/// Prints the stored logs of a job. Returns the number of processes that have stored logs.
async fn print_stored_job(
    job: &InferenceJob,
    slot: Option<u32>,
    options: &storage::Options,
    printer: &mut LogPrinter,
) -> Result<usize, Failure> {
    let spec = &job::storage_of(job);
    let opened = options.open(spec)?;
    let printed =
        bucket::print_job(&opened, &job::path(job), Gang::of_job(job), slot, printer).await;
    printed.map_err(|error| storage::failure(error, spec))
}

/// Reports that `stored` logs were printed because the logs of pods failed with `error`. Returns
/// this error if the storage has no logs.
fn stored_instead(stored: Result<usize, Failure>, error: Failure) -> Result<(), Failure> {
    match stored {
        Ok(0) => Err(error),
        Ok(_) => {
            print::err(format!("stoker: {error}; printed the stored logs instead"));
            Ok(())
        }
        Err(stored) => Err(Failure::System(format!("{error}; stored logs: {stored}"))),
    }
}

/// Source of an attempt's lines.
struct LogSource<'a> {
    cluster: &'a Cluster,
    experiment: &'a Experiment,
    gang: Gang,
    options: &'a storage::Options,
    rank: Option<u32>,
    args: LogArgs,
    output: Output,
}

impl LogSource<'_> {
    /// Prints the current logs of an attempt: from its pods if all of them exist, else from the
    /// storage. If the storage cannot be read, prints the logs of the remaining pods. If the log of
    /// a pod cannot be opened and the attempt has ended, prints the stored logs.
    async fn print(
        &self,
        trial: &Trial,
        attempt: &Attempt,
        with_trial: bool,
    ) -> Result<(), Failure> {
        let rank = self.rank;
        let name = trial.metadata.name.clone().unwrap_or_default();
        let number = attempt.number;
        let params =
            ListParams::default().labels(&format!("{LABEL_TRIAL}={name},{LABEL_ATTEMPT}={number}"));
        let listed = self.cluster.list::<Pod>("pods", &params, false).await?;
        let of = |(pod, _)| Tag::of_pod(&pod, self.gang, with_trial).map(|tag| (pod, tag));
        let mut pods: Vec<(Pod, Tag)> = listed.into_iter().filter_map(of).collect();
        let is_complete = pods.len() == self.gang.num_pods() as usize;
        pods.retain(|(_, tag)| tag.has(rank));
        let (index, gang) = (trial.spec.index, self.gang);
        let tag = Tag { trial: index, attempt: number, pod: 0, gang, with_trial, is_job: false };
        if is_complete || (attempt.end.is_none() && !pods.is_empty()) {
            return match self.open_pods(&pods).await {
                Ok(logs) => self.print_pods(logs).await,
                Err(error) if attempt.end.is_some() => {
                    stored_instead(self.print_stored(&tag).await, error)
                }
                Err(error) => Err(error),
            };
        }
        match self.print_stored(&tag).await {
            Ok(0) if attempt.end.is_none() => {
                print::err(format!("attempt {number} of trial {name} has no pods yet"));
                Ok(())
            }
            Ok(0) => {
                print::err(format!("no logs found for attempt {number} of trial {name}"));
                Ok(())
            }
            Ok(_) => Ok(()),
            Err(error) if pods.is_empty() => Err(error),
            Err(error) => {
                print::err(format!("stoker: {error}; showing the logs of the remaining pods"));
                self.print_pods(self.open_pods(&pods).await?).await
            }
        }
    }

    async fn open_pods(&self, pods: &[(Pod, Tag)]) -> Result<Vec<PodLog>, Failure> {
        let request = LogRequest::new(&self.args, self.gang, self.rank);
        pods::open(self.cluster, pods, request).await
    }

    async fn print_pods(&self, logs: Vec<PodLog>) -> Result<(), Failure> {
        let mut printer = LogPrinter::new(self.args, self.rank, self.output);
        let shown = pods::show_merged(logs, |tag, line| printer.add(tag, line)).await;
        printer.finish();
        shown
    }

    /// Prints the stored logs of an attempt. Returns the number of objects.
    async fn print_stored(&self, tag: &Tag) -> Result<usize, Failure> {
        let spec = &storage::of(self.experiment);
        let opened = self.options.open(spec)?;
        let trial_path = storage::trial_path(self.experiment, tag.trial);
        let folder = layout::logs_path(&trial_path, tag.attempt);
        let stored = StoredLogs { storage: &opened, folder: &folder, is_merged: false };
        let mut printer = LogPrinter::new(self.args, self.rank, self.output);
        let num_objects = stored.print(tag, self.rank, &mut printer).await;
        let num_objects = num_objects.map_err(|error| storage::failure(error, spec))?;
        printer.finish();
        Ok(num_objects)
    }
}

/// Returns the label selector for the pods of an experiment's trials.
fn pods_of_experiment(name: &str) -> String {
    format!("{LABEL_EXPERIMENT}={name},{LABEL_TRIAL}")
}
