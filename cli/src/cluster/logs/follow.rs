//! Follows the logs of many pods that start and end.

use std::collections::BTreeSet;
use std::ops::RangeInclusive;
use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;
use kube::api::ListParams;
use stoker_api::experiment::Experiment;
use stoker_api::inference::InferenceJob;
use stoker_api::names::{LABEL_JOB, LABEL_TRIAL};
use stoker_api::trial::Trial;
use tokio::sync::mpsc::{Receiver, Sender, channel};
use tokio::task::JoinSet;

use super::cursor::LogRequest;
use super::line::LogLine;
use super::pods::{FOLLOW_LIMITS, FollowLimits, PodFollower};
use super::tag::{Gang, Tag};
use super::{pods, pods_of_experiment};
use crate::cluster::connect::Cluster;
use crate::cluster::resource::ClusterResource;
use crate::failure::Failure;
use crate::print;

/// Interval between checks for new pods.
const POLL_INTERVAL: Duration = Duration::from_secs(2);
/// Maximum number of consecutive failed checks.
const FAILURES_MAX: u32 = 60;
/// Maximum number of pods followed at the same time.
const STREAMS_MAX: usize = 200;
/// Capacity of the queue of lines to print.
const LINES_MAX: usize = 1024;

/// Target whose logs are followed.
#[derive(Clone, Debug)]
pub(super) enum LogTarget {
    /// A trial. `attempt` is the only attempt to follow; `None` means the latest and later ones.
    Trial { name: String, attempt: Option<u32> },
    /// All trials of an experiment.
    Experiment { name: String },
    /// All processes of a job.
    Job { name: String },
}

/// Follows the pods of a target until the target ends.
pub(super) struct LogFollower {
    cluster: Cluster,
    target: LogTarget,
    gang: Gang,
    rank: Option<u32>,
    request: LogRequest,
    pub(super) limits: FollowLimits,
    /// First attempt whose pods are followed, once known.
    first: Option<u32>,
    /// UIDs of pods that are or were followed.
    seen: BTreeSet<String>,
    /// One task per followed pod, as of [`PodFollower::run`].
    streams: JoinSet<Result<bool, Failure>>,
    /// Number of pods whose lines may be missing.
    num_incomplete: usize,
    sender: Sender<(Tag, LogLine)>,
    lines: Receiver<(Tag, LogLine)>,
    /// Whether the warning about waiting pods was printed.
    has_warned_about_limit: bool,
}

impl LogFollower {
    pub(super) fn new(
        cluster: &Cluster,
        target: LogTarget,
        gang: Gang,
        rank: Option<u32>,
        request: LogRequest,
    ) -> Self {
        let (sender, lines) = channel(LINES_MAX);
        Self {
            cluster: cluster.clone(),
            target,
            gang,
            rank,
            request,
            limits: FOLLOW_LIMITS,
            first: None,
            seen: BTreeSet::new(),
            streams: JoinSet::new(),
            num_incomplete: 0,
            sender,
            lines,
            has_warned_about_limit: false,
        }
    }

    /// Shows lines until the target has ended and all logs of its pods have been read.
    pub(super) async fn run(mut self, mut show: impl FnMut(&Tag, &LogLine)) -> Result<(), Failure> {
        let mut ticks = tokio::time::interval(POLL_INTERVAL);
        ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        let mut num_failures = 0;
        let ended = loop {
            tokio::select! {
                Some((tag, line)) = self.lines.recv() => show(&tag, &line),
                _ = ticks.tick() => {
                    if let Err(error) = self.join_ended() {
                        break Err(error);
                    }
                    match self.poll().await {
                        Ok(true) => break Ok(()),
                        Ok(false) => num_failures = 0,
                        Err(error) if num_failures >= FAILURES_MAX || is_final(&error) => {
                            break Err(error);
                        }
                        Err(error) => {
                            if num_failures == 0 {
                                print::err(format!("stoker: {error}; retrying"));
                            }
                            num_failures += 1;
                        }
                    }
                }
            }
        };
        while let Ok((tag, line)) = self.lines.try_recv() {
            show(&tag, &line);
        }
        ended?;
        match self.num_incomplete {
            0 => Ok(()),
            num => Err(Failure::System(format!(
                "the logs of {num} of {} pods are incomplete; see the errors above",
                self.seen.len()
            ))),
        }
    }

    /// Removes the streams that have ended. Fails if the API server denied access to a log.
    fn join_ended(&mut self) -> Result<(), Failure> {
        while let Some(ended) = self.streams.try_join_next() {
            match ended {
                Ok(Ok(true)) => {}
                Ok(Ok(false)) | Err(_) => self.num_incomplete += 1,
                Ok(Err(denied)) => return Err(denied),
            }
        }
        Ok(())
    }

    /// Starts a stream for each new pod. Returns `true` if the target has ended and no lines are
    /// left.
    async fn poll(&mut self) -> Result<bool, Failure> {
        // Check this before listing: if the target has ended, the list contains all its pods.
        let is_over = self.is_over().await?;
        let params = ListParams::default().labels(&match &self.target {
            LogTarget::Trial { name, .. } => format!("{LABEL_TRIAL}={name}"),
            LogTarget::Experiment { name } => pods_of_experiment(name),
            LogTarget::Job { name } => format!("{LABEL_JOB}={name}"),
        });
        let pods = self.cluster.list::<Pod>("pods", &params, false).await?;
        let mut pods: Vec<Pod> = pods.into_iter().map(|(pod, _)| pod).collect();
        pods.sort_by(|a, b| a.metadata.creation_timestamp.cmp(&b.metadata.creation_timestamp));
        self.begin(pods);
        Ok(is_over && self.streams.is_empty() && self.lines.is_empty())
    }

    fn begin(&mut self, pods: Vec<Pod>) {
        let with_trial = matches!(self.target, LogTarget::Experiment { .. });
        let tags: Vec<(Pod, Tag)> = pods
            .into_iter()
            .filter_map(|pod| Tag::of_pod(&pod, self.gang, with_trial).map(|tag| (pod, tag)))
            .filter(|(_, tag)| tag.has(self.rank))
            .collect();
        let attempts = self.attempts(&tags);
        for (pod, tag) in tags {
            let uid = pod.metadata.uid.clone().unwrap_or_default();
            if !attempts.contains(&tag.attempt) || self.seen.contains(&uid) {
                continue;
            }
            // Neither poll this pod nor count it as a stream before its program starts.
            if pods::is_waiting(&pod) {
                continue;
            }
            if self.streams.len() >= STREAMS_MAX {
                if !self.has_warned_about_limit {
                    print::err(format!(
                        "stoker: following {STREAMS_MAX} pods, the maximum; other pods wait"
                    ));
                    self.has_warned_about_limit = true;
                }
                break;
            }
            self.seen.insert(uid);
            let sender = self.sender.clone();
            let follower = PodFollower::new(&self.cluster, tag, self.request, self.limits, sender);
            self.streams.spawn(follower.run(pod));
        }
    }

    /// Returns the attempts to follow. If no attempt of a trial is selected, the first check that
    /// finds pods selects their latest attempt and all later attempts.
    fn attempts(&mut self, tags: &[(Pod, Tag)]) -> RangeInclusive<u32> {
        match &self.target {
            LogTarget::Trial { attempt: Some(attempt), .. } => *attempt..=*attempt,
            LogTarget::Trial { attempt: None, .. } => {
                self.first = self.first.or(tags.iter().map(|(_, tag)| tag.attempt).max());
                self.first.unwrap_or_default()..=u32::MAX
            }
            LogTarget::Experiment { .. } | LogTarget::Job { .. } => 0..=u32::MAX,
        }
    }

    /// Returns `true` if the target has ended or is deleted.
    async fn is_over(&self) -> Result<bool, Failure> {
        match &self.target {
            LogTarget::Experiment { name } => self.has_ended::<Experiment>(name).await,
            LogTarget::Job { name } => self.has_ended::<InferenceJob>(name).await,
            LogTarget::Trial { name, attempt } => {
                let target = format!("trial `{name}`");
                let api = self.cluster.api::<Trial>();
                let trial = self.cluster.request(&target, api.get_opt(name)).await?;
                let Some(trial) = trial else { return Ok(true) };
                let status = trial.status.unwrap_or_default();
                let has_ended = |number: &u32| {
                    let mut attempts = status.attempts.iter();
                    attempts.any(|attempt| attempt.number == *number && attempt.end.is_some())
                };
                Ok(status.phase.is_terminal() || attempt.as_ref().is_some_and(has_ended))
            }
        }
    }
}

impl LogFollower {
    async fn has_ended<K: ClusterResource>(&self, name: &str) -> Result<bool, Failure> {
        let target = format!("{} `{name}`", K::KIND_NAME);
        let object = self.cluster.request(&target, self.cluster.api::<K>().get_opt(name)).await?;
        Ok(object.is_none_or(|object| object.phase().is_terminal()))
    }
}

/// Returns `true` if a retry cannot succeed.
fn is_final(error: &Failure) -> bool {
    matches!(error, Failure::Input(_))
}
