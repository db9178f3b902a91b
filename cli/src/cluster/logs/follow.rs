//! The lines of many pods, as they come and go.

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

use super::tag::{Gang, Tag};
use super::{of_experiment, pods};
use crate::cluster::connect::Cluster;
use crate::cluster::kind::Kind;
use crate::failure::Failure;
use crate::print;

/// How often is looked for new pods.
const LOOK: Duration = Duration::from_secs(2);
/// Looks in a row that may fail before it is given up.
const FAILURES_MAX: u32 = 60;
/// Pods that are followed at a time.
const STREAMS_MAX: usize = 200;
/// Lines that wait to be printed.
const LINES_MAX: usize = 1024;

/// Whose lines.
#[derive(Clone, Debug)]
pub(super) enum Of {
    /// Those of a trial: all attempts from the latest, or one.
    Trial { name: String, attempt: Option<u32> },
    /// Those of all trials of an experiment.
    Experiment { name: String },
    /// Those of all processes of a job.
    Job { name: String },
}

/// Follows pods until the end.
pub(super) struct Follow {
    cluster: Cluster,
    of: Of,
    gang: Gang,
    rank: Option<u32>,
    /// The first attempt whose pods are followed, once it is known.
    first: Option<u32>,
    /// The pods that are or were followed, by unique id.
    seen: BTreeSet<String>,
    streams: JoinSet<()>,
    sender: Sender<(Tag, String)>,
    lines: Receiver<(Tag, String)>,
    /// Whether it was said that some pods have to wait.
    has_said_full: bool,
}

impl Follow {
    pub(super) fn new(cluster: &Cluster, of: Of, gang: Gang, rank: Option<u32>) -> Self {
        let (sender, lines) = channel(LINES_MAX);
        Self {
            cluster: cluster.clone(),
            of,
            gang,
            rank,
            first: None,
            seen: BTreeSet::new(),
            streams: JoinSet::new(),
            sender,
            lines,
            has_said_full: false,
        }
    }

    /// Shows lines until what is followed has ended and all of its pods have been read.
    pub(super) async fn run(mut self, mut show: impl FnMut(&Tag, &str)) -> Result<(), Failure> {
        let mut look = tokio::time::interval(LOOK);
        look.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        let mut num_failures = 0;
        loop {
            tokio::select! {
                Some((tag, line)) = self.lines.recv() => show(&tag, &line),
                _ = look.tick() => match self.look().await {
                    Ok(true) => break,
                    Ok(false) => num_failures = 0,
                    Err(error) if num_failures >= FAILURES_MAX || is_final(&error) => {
                        return Err(error);
                    }
                    Err(error) => {
                        if num_failures == 0 {
                            print::err(format!("stoker: {error}; trying again"));
                        }
                        num_failures += 1;
                    }
                },
            }
        }
        while let Ok((tag, line)) = self.lines.try_recv() {
            show(&tag, &line);
        }
        Ok(())
    }

    /// Begins to follow new pods; says whether nothing more will come.
    async fn look(&mut self) -> Result<bool, Failure> {
        // Asked first: pods of what had ended by then are all in the list.
        let is_over = self.is_over().await?;
        let params = ListParams::default().labels(&match &self.of {
            Of::Trial { name, .. } => format!("{LABEL_TRIAL}={name}"),
            Of::Experiment { name } => of_experiment(name),
            Of::Job { name } => format!("{LABEL_JOB}={name}"),
        });
        while self.streams.try_join_next().is_some() {}
        let mut found = self.cluster.list::<Pod>("pods", &params, false).await?;
        found.sort_by(|a, b| a.0.metadata.creation_timestamp.cmp(&b.0.metadata.creation_timestamp));
        self.begin(found.into_iter().map(|it| it.0).collect());
        Ok(is_over && self.streams.is_empty() && self.lines.is_empty())
    }

    fn begin(&mut self, found: Vec<Pod>) {
        let with_trial = matches!(self.of, Of::Experiment { .. });
        let tags: Vec<(Pod, Tag)> = found
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
            if self.streams.len() >= STREAMS_MAX {
                if !self.has_said_full {
                    print::err(format!("stoker: {STREAMS_MAX} pods are followed; others wait"));
                    self.has_said_full = true;
                }
                break;
            }
            self.seen.insert(uid);
            self.streams.spawn(pods::follow(self.cluster.clone(), pod, tag, self.sender.clone()));
        }
    }

    /// The attempts whose pods are followed: of a trial the latest that has any, and later ones.
    fn attempts(&mut self, tags: &[(Pod, Tag)]) -> RangeInclusive<u32> {
        match &self.of {
            Of::Trial { attempt: Some(attempt), .. } => *attempt..=*attempt,
            Of::Trial { attempt: None, .. } => {
                self.first = self.first.or(tags.iter().map(|it| it.1.attempt).max());
                self.first.unwrap_or_default()..=u32::MAX
            }
            Of::Experiment { .. } | Of::Job { .. } => 0..=u32::MAX,
        }
    }

    /// Whether what is followed has ended, or is gone.
    async fn is_over(&self) -> Result<bool, Failure> {
        match &self.of {
            Of::Experiment { name } => self.has_ended::<Experiment>(name).await,
            Of::Job { name } => self.has_ended::<InferenceJob>(name).await,
            Of::Trial { name, attempt } => {
                let asked = format!("trial `{name}`");
                let api = self.cluster.api::<Trial>();
                let found = self.cluster.ask(&asked, api.get_opt(name)).await?;
                let Some(trial) = found else { return Ok(true) };
                let status = trial.status.unwrap_or_default();
                let has_ended = |number: &u32| {
                    status.attempts.iter().any(|it| it.number == *number && it.end.is_some())
                };
                Ok(status.phase.is_terminal() || attempt.as_ref().is_some_and(has_ended))
            }
        }
    }
}

impl Follow {
    async fn has_ended<K: Kind>(&self, name: &str) -> Result<bool, Failure> {
        let asked = format!("{} `{name}`", K::WORD);
        let found = self.cluster.ask(&asked, self.cluster.api::<K>().get_opt(name)).await?;
        Ok(found.is_none_or(|it| it.phase().is_terminal()))
    }
}

/// Whether trying again cannot help.
fn is_final(error: &Failure) -> bool {
    matches!(error, Failure::Input(_))
}
