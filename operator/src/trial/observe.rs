//! What is known of a trial.

use std::sync::Arc;

use stoker_api::time::Timestamp;
use stoker_api::validate::ValidExperiment;
use stoker_engine::gang::admission::{Candidate, admitted};
use stoker_engine::gang::{GangView, NodeState, Patience, PodSeen, plan};
use stoker_engine::trial::{Limits, SearchedMetric, live_attempt};

use crate::cache::{Cached as _, Key};
use crate::objects::{CachedPod, CachedTrial};
use crate::world::World;

/// A trial with its experiment and its pods.
#[derive(Debug)]
pub(super) struct Observed {
    pub(super) key: Key,
    pub(super) trial: Arc<CachedTrial>,
    pub(super) valid: Arc<ValidExperiment>,
    pub(super) experiment_uid: String,
    pub(super) pods: Vec<PodSeen>,
    pub(super) patience: Patience,
}

/// What the caches say of a trial; `None` if it is no trial of an experiment that can run.
pub(super) fn observe(world: &World, key: &Key) -> Option<Observed> {
    let trial = world.trials.get(key)?;
    if trial.trial.metadata.deletion_timestamp.is_some() {
        return None;
    }
    let experiment = world.experiments.get(&trial.experiment_key())?;
    let object = experiment.experiment()?;
    let experiment_uid = object.metadata.uid.clone().unwrap_or_default();
    let owners = trial.trial.metadata.owner_references.iter().flatten();
    if !owners.into_iter().any(|it| it.uid == experiment_uid) {
        return None;
    }
    let valid = experiment.valid()?;
    let pods = world.pods.group(key);
    let pods = pods.iter().filter(|it| it.owner == trial.uid()).map(|it| seen(world, it)).collect();
    let patience = world.options.patience(valid.spec.preemption_timeout_seconds);
    Some(Observed { key: key.clone(), trial, valid, experiment_uid, pods, patience })
}

fn seen(world: &World, pod: &CachedPod) -> PodSeen {
    let node = match &pod.node {
        None => NodeState::Fine,
        Some(name) => match world.nodes.get(&Key::new("", name)) {
            None => NodeState::Gone,
            Some(node) => node.not_ready_since.map_or(NodeState::Fine, NodeState::NotReady),
        },
    };
    PodSeen { node, ..pod.seen.clone() }
}

impl Observed {
    /// What the engine plans by.
    pub(super) fn view(&self, now: Timestamp, is_admitted: bool) -> GangView<'_> {
        let searcher = &self.valid.spec.searcher;
        GangView {
            record: &self.trial.record,
            generation: self.trial.trial.metadata.generation.unwrap_or_default(),
            pods: &self.pods,
            num_pods: self.valid.spec.resources.num_pods(),
            is_admitted,
            searched: SearchedMetric {
                name: &searcher.metric,
                smaller_is_better: searcher.smaller_is_better,
            },
            patience: self.patience,
            limits: self.limits(),
            now,
        }
    }

    pub(super) fn limits(&self) -> Limits {
        Limits::new(self.valid.spec.max_restarts)
    }
}

/// Whether the trial may begin an attempt now, among all that want to.
pub(super) fn is_admitted(world: &World, observed: &Observed) -> bool {
    let now = crate::world::now();
    let open = world.trials.all();
    let open = open.iter().filter(|it| !it.record.status.phase.is_terminal());
    let candidates = open.filter_map(|it| candidate(world, it, &observed.key, now)).collect();
    admitted(candidates, world.options.caps()).contains(&observed.key.to_string())
}

/// A trial that starts or wants to; `None` for the others.
fn candidate(
    world: &World,
    trial: &CachedTrial,
    asking: &Key,
    now: Timestamp,
) -> Option<Candidate> {
    let key = trial.key();
    let is_asking = key == *asking;
    let live = live_attempt(&trial.record);
    if live.is_some() {
        let pods = world.pods.group(&key);
        let pods = || pods.iter().filter(|it| Some(it.seen.attempt) == live);
        let num_pods = world.experiments.get(&trial.experiment_key())?.valid()?;
        let num_pods = num_pods.spec.resources.num_pods();
        let is_starting =
            (pods().count() as u32) < num_pods || pods().any(|it| it.seen.scheduled_at.is_none());
        let key = key.to_string();
        let created_at = trial.created_at();
        return is_starting.then_some(Candidate { created_at, key, num_pods, is_starting: true });
    }
    if !trial.record.spec.wanted.is_run() {
        return None;
    }
    let observed = observe(world, &key)?;
    let wants_start = is_asking || plan(&observed.view(now, false)).wants_start;
    let num_pods = observed.valid.spec.resources.num_pods();
    let created_at = trial.created_at();
    let key = key.to_string();
    wants_start.then_some(Candidate { created_at, key, num_pods, is_starting: false })
}
