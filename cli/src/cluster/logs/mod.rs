//! What trials print: from their pods while those are there, later from the storage.
//!
//! ```text
//!  pods of an attempt -- API server's logs --> [tag]: which trial and rank --> lines
//!  storage: logs/ATTEMPT/RANK-SEQ.log ------------'
//! ```
//!
//! 1. [`tag`]: what a line begins with.
//! 2. [`pods`]: one pod's lines, over every interruption.
//! 3. [`follow`]: all pods of a trial or an experiment, as they come and go.
//! 4. [`bucket`]: what the storage has.

mod bucket;
mod follow;
mod pods;
mod tag;
#[cfg(test)]
mod tests;

use k8s_openapi::api::core::v1::Pod;
use kube::api::ListParams;
use stoker_api::experiment::Experiment;
use stoker_api::inference::InferenceJob;
use stoker_api::names::{LABEL_ATTEMPT, LABEL_EXPERIMENT, LABEL_JOB, LABEL_TRIAL};
use stoker_api::trial::{Attempt, Trial};
use stoker_storage::layout;

use self::follow::{Follow, Of};
use self::tag::{Gang, Tag};
use super::connect::Cluster;
use super::kind::Kind as _;
use super::{experiment, storage};
use crate::failure::Failure;
use crate::print::{self, Output};

/// Which lines of a trial.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Wanted {
    /// Those of this rank alone.
    pub(crate) rank: Option<u32>,
    /// Those of this attempt; unset: of the latest.
    pub(crate) attempt: Option<u32>,
    /// Whether those that are still to come are wanted too.
    pub(crate) follow: bool,
}

/// Prints the logs of one trial.
pub(crate) async fn trial(
    cluster: &Cluster,
    name: &str,
    wanted: Wanted,
    options: &storage::Options,
    output: Output,
) -> Result<(), Failure> {
    let trial = cluster.trial(name).await?;
    let experiment = cluster.experiment(&trial.spec.experiment).await?;
    let gang = Gang::of(&experiment);
    if let Some(rank) = wanted.rank
        && rank >= gang.world_size
    {
        return Err(Failure::Input(format!(
            "--rank {rank}: trial `{name}` has {} ranks, from 0",
            gang.world_size
        )));
    }
    let attempt = attempt(&trial, name, wanted)?;
    let is_over = trial.status.as_ref().is_some_and(|it| it.phase.is_terminal())
        || wanted.attempt.is_some() && attempt.is_some_and(|it| it.end.is_some());
    if wanted.follow && !is_over {
        let of = Of::Trial { name: name.to_owned(), attempt: wanted.attempt };
        let show = |tag: &Tag, line: &str| tag.print(line, wanted.rank, output);
        return Follow::new(cluster, of, gang, wanted.rank).run(show).await;
    }
    let Some(attempt) = attempt else {
        return Err(Failure::Input(format!("trial `{name}` has not started yet; --follow waits")));
    };
    let source = Source { cluster, experiment: &experiment, gang, options, output };
    source.print(&trial, attempt, wanted.rank, false).await
}

/// The attempt that is meant; none if the trial has not started.
fn attempt<'a>(
    trial: &'a Trial,
    name: &str,
    wanted: Wanted,
) -> Result<Option<&'a Attempt>, Failure> {
    let attempts = trial.status.as_ref().map_or(&[][..], |it| it.attempts.as_slice());
    let Some(number) = wanted.attempt else { return Ok(attempts.last()) };
    match attempts.iter().find(|it| it.number == number) {
        None if wanted.follow && attempts.is_empty() => Ok(None),
        None => Err(Failure::Input(match attempts.len() {
            0 => format!("trial `{name}` has not started yet"),
            num => format!("trial `{name}` has no attempt {number}; it has {num} from 0"),
        })),
        found => Ok(found),
    }
}

/// Prints the logs of all trials of an experiment.
pub(crate) async fn experiment(
    cluster: &Cluster,
    name: &str,
    options: &storage::Options,
    follow: bool,
    output: Output,
) -> Result<(), Failure> {
    let experiment = cluster.experiment(name).await?;
    let gang = Gang::of(&experiment);
    let is_over = experiment.status.as_ref().is_some_and(|it| it.phase.is_terminal());
    if follow && !is_over {
        let of = Of::Experiment { name: name.to_owned() };
        let show = |tag: &Tag, line: &str| tag.print(line, None, output);
        return Follow::new(cluster, of, gang, None).run(show).await;
    }
    let source = Source { cluster, experiment: &experiment, gang, options, output };
    let mut has_any = false;
    for (trial, _) in experiment::trials(cluster, &experiment).await? {
        let attempts = trial.status.as_ref().map_or(&[][..], |it| it.attempts.as_slice());
        if let Some(attempt) = attempts.last() {
            has_any = true;
            source.print(&trial, attempt, None, true).await?;
        }
    }
    if !has_any {
        print::err(format!("no trial of experiment {name} has started yet"));
    }
    Ok(())
}

/// Prints the logs of a job: from its pods while those are all there, else from the storage.
pub(crate) async fn job(
    cluster: &Cluster,
    name: &str,
    slot: Option<u32>,
    follow: bool,
    options: &storage::Options,
    output: Output,
) -> Result<(), Failure> {
    let job: InferenceJob = cluster.read(name).await?;
    let gang = Gang::of_job(&job);
    if let Some(slot) = slot.filter(|it| *it >= gang.world_size) {
        let text = format!("--slot {slot}: job `{name}` has {} slots, from 0", gang.world_size);
        return Err(Failure::Input(text));
    }
    let show = |tag: &Tag, line: &str| tag.print(line, None, output);
    if follow && !job.phase().is_terminal() {
        let of = Of::Job { name: name.to_owned() };
        return Follow::new(cluster, of, gang, slot).run(show).await;
    }
    let params = ListParams::default().labels(&format!("{LABEL_JOB}={name}"));
    let found = cluster.list::<Pod>("pods", &params, false).await?;
    let of = |(pod, _)| Tag::of_pod(&pod, gang, false).map(|tag| (pod, tag));
    let mut pods: Vec<(Pod, Tag)> = found.into_iter().filter_map(of).collect();
    let num_attempts = job.status.as_ref().map_or(0, |it| it.attempts as usize);
    let is_whole = pods.len() >= num_attempts;
    pods.retain(|it| it.1.has(slot));
    if num_attempts == 0 {
        print::err(format!("no process of job {name} has started yet"));
        return Ok(());
    }
    if is_whole {
        return pods::print(cluster, &pods, show).await;
    }
    match bucket::print_job(&job, options, gang, slot, output).await {
        Ok(0) if pods.is_empty() => print::err(format!("job {name} left no logs")),
        Ok(0) => pods::print(cluster, &pods, show).await?,
        Ok(_) => {}
        Err(error) if pods.is_empty() => return Err(error),
        Err(error) => {
            print::err(format!("stoker: {error}; here is what the pods that are left printed"));
            pods::print(cluster, &pods, show).await?;
        }
    }
    Ok(())
}

/// Where the lines of an attempt are had from.
struct Source<'a> {
    cluster: &'a Cluster,
    experiment: &'a Experiment,
    gang: Gang,
    options: &'a storage::Options,
    output: Output,
}

impl Source<'_> {
    /// Prints what an attempt has printed so far: from its pods if all are there, else from the
    /// storage, and from the pods that are left if that cannot be read.
    async fn print(
        &self,
        trial: &Trial,
        attempt: &Attempt,
        rank: Option<u32>,
        with_trial: bool,
    ) -> Result<(), Failure> {
        let name = trial.metadata.name.clone().unwrap_or_default();
        let number = attempt.number;
        let params =
            ListParams::default().labels(&format!("{LABEL_TRIAL}={name},{LABEL_ATTEMPT}={number}"));
        let found = self.cluster.list::<Pod>("pods", &params, false).await?;
        let of = |(pod, _)| Tag::of_pod(&pod, self.gang, with_trial).map(|tag| (pod, tag));
        let mut pods: Vec<(Pod, Tag)> = found.into_iter().filter_map(of).collect();
        let is_whole = pods.len() == self.gang.num_pods() as usize;
        pods.retain(|it| it.1.has(rank));
        let show = |tag: &Tag, line: &str| tag.print(line, rank, self.output);
        let of_pods = async || pods::print(self.cluster, &pods, show).await;
        if is_whole || (attempt.end.is_none() && !pods.is_empty()) {
            return of_pods().await;
        }
        let (index, gang) = (trial.spec.index, self.gang);
        let tag = Tag { trial: index, attempt: number, pod: 0, gang, with_trial, is_job: false };
        let spec = &storage::of(self.experiment);
        let folder = layout::logs_path(&storage::trial_path(self.experiment, index), number);
        let from_storage = bucket::print(spec, &folder, self.options, &tag, rank, self.output);
        match from_storage.await {
            Ok(0) if attempt.end.is_none() => {
                print::err(format!("attempt {number} of trial {name} has no pods yet"));
                Ok(())
            }
            Ok(0) => {
                print::err(format!("attempt {number} of trial {name} left no logs"));
                Ok(())
            }
            Ok(_) => Ok(()),
            Err(error) if pods.is_empty() => Err(error),
            Err(error) => {
                print::err(format!("stoker: {error}; here is what the pods that are left printed"));
                of_pods().await
            }
        }
    }
}

/// The selector of an experiment's pods.
fn of_experiment(name: &str) -> String {
    format!("{LABEL_EXPERIMENT}={name},{LABEL_TRIAL}")
}
