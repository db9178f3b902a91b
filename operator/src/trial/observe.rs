//! What is known of a trial.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use stoker_api::experiment::UsedStorage;
use stoker_api::time::Timestamp;
use stoker_api::validate::ValidExperiment;
use stoker_engine::gang::admission::{self, Candidate};
use stoker_engine::gang::{GangView, NodeState, Patience, PodSeen, plan};
use stoker_engine::trial::{BackOffLimits, Limits, SearchedMetric, live_attempt};

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
    /// The experiment's fixed storage: no pod is made before it is recorded.
    pub(super) storage: Option<UsedStorage>,
    pub(super) pods: Vec<PodSeen>,
    pub(super) patience: Patience,
}

/// What the caches say of a trial; `None` if it is no trial of an experiment that can run.
pub(super) fn observe(world: &World, key: &Key) -> Option<Observed> {
    let trial = world.trials.get(key)?;
    if trial.trial.metadata.deletion_timestamp.is_some() || trial.unreadable.is_some() {
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
    let storage = object.status.as_ref().and_then(|status| status.storage.clone());
    let storage = storage.filter(UsedStorage::is_fixed);
    let pods = world.pods.group(key);
    let pods = pods.iter().filter(|it| it.owner == trial.uid()).map(|it| seen(world, it)).collect();
    let patience = world.options.patience(valid.spec.preemption_timeout_seconds);
    let key = key.clone();
    Some(Observed { key, trial, valid, experiment_uid, storage, pods, patience })
}

/// A pod, with its node as it is known.
pub(crate) fn seen(world: &World, pod: &CachedPod) -> PodSeen {
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
        Limits::new(self.valid.spec.max_restarts, BackOffLimits::CLUSTER)
    }
}

/// How long the admitted are remembered: whoever was not among them waits a little longer.
const ADMITTED_KEPT: Duration = Duration::from_millis(500);

/// The trials that were admitted at one look at all of them.
#[derive(Debug, Default)]
pub struct Admitted(Mutex<Option<(Instant, BTreeSet<String>)>>);

/// Whether the trial may begin an attempt now, among all that want to. All are looked at together,
/// twice a second at most, however many ask; an admission is used once.
pub(super) fn is_admitted(world: &World, observed: &Observed) -> bool {
    let mut admitted = world.admitted.0.lock().unwrap_or_else(PoisonError::into_inner);
    if admitted.as_ref().is_none_or(|it| it.0.elapsed() >= ADMITTED_KEPT) {
        let now = crate::world::now();
        let open = world.trials.all();
        let open = open.iter().filter(|it| !it.record.status.phase.is_terminal());
        let candidates = open.filter_map(|it| candidate(world, it, now)).collect();
        *admitted = Some((Instant::now(), admission::admitted(candidates, world.options.caps())));
    }
    admitted.as_mut().is_some_and(|it| it.1.remove(&observed.key.to_string()))
}

/// A trial that starts or wants to; `None` for the others.
///
/// They go by how long they have waited, which begins anew with each try: gangs that never fit would
/// otherwise take turns with each other for ever.
fn candidate(world: &World, trial: &CachedTrial, now: Timestamp) -> Option<Candidate> {
    let key = trial.key();
    let last = trial.record.status.attempts.last();
    let waits_since = last.and_then(|it| it.ended_at).unwrap_or_else(|| trial.created_at());
    let live = live_attempt(&trial.record);
    let num_pods = || {
        let valid = world.experiments.get(&trial.experiment_key())?.valid()?;
        Some(valid.spec.resources.num_pods())
    };
    let candidate = |num_pods, is_starting| Candidate {
        created_at: waits_since,
        key: key.to_string(),
        num_pods,
        is_starting,
    };
    if live.is_some() {
        let pods = world.pods.group(&key);
        let pods = || pods.iter().filter(|it| Some(it.seen.attempt) == live);
        let num_pods = num_pods()?;
        let is_starting =
            (pods().count() as u32) < num_pods || pods().any(|it| it.seen.scheduled_at.is_none());
        return is_starting.then(|| candidate(num_pods, true));
    }
    if !trial.record.spec.wanted.is_run() {
        return None;
    }
    let observed = observe(world, &key)?;
    plan(&observed.view(now, false)).wants_start.then(|| candidate(num_pods().unwrap_or(1), false))
}

/// A node that one of these pods is on and that no cache has heard of: it may be new. `None` if there
/// is none.
pub(crate) fn unknown_node(world: &World, namespace: &str, pods: &[PodSeen]) -> Option<String> {
    let is_gone = |it: &&PodSeen| it.node == NodeState::Gone && !it.is_terminal();
    let pod = pods.iter().find(is_gone)?;
    let pod = world.pods.get(&Key::new(namespace, &pod.name))?;
    pod.node.as_ref().map(ToString::to_string)
}
