//! Observes a trial: reads it, its experiment and its pods from the caches.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use stoker_api::experiment::{DesiredState, StorageRecord};
use stoker_api::time::Timestamp;
use stoker_api::validate::ValidExperiment;
use stoker_engine::gang::admission::{Admission, Candidate, StartStage, TrialKey};
use stoker_engine::gang::{GangView, NodeState, ObservedPod, Timeouts, plan};
use stoker_engine::trial::{self, BackOffLimits, RestartLimits, SearchedMetric, TrialRecord};

use crate::cache::{Cached as _, Key};
use crate::context::{Context, now};
use crate::experiment::apply::trials_of;
use crate::objects::{CachedPod, CachedTrial};

/// A trial with its experiment and its pods.
#[derive(Debug)]
pub(super) struct ObservedTrial {
    pub(super) key: Key,
    pub(super) trial: Arc<CachedTrial>,
    pub(super) valid: Arc<ValidExperiment>,
    pub(super) experiment_uid: String,
    /// Fixed storage of the experiment. No pod is created before it is recorded.
    pub(super) storage: Option<StorageRecord>,
    pub(super) pods: Vec<ObservedPod>,
    pub(super) timeouts: Timeouts,
    /// Whether a trial of the experiment has trained.
    pub(super) has_trained: bool,
}

/// Observes a trial; `None` if the trial is missing, unparsable or being deleted, or if its
/// experiment is missing, invalid or not its owner.
pub(super) fn observe(context: &Context, key: &Key) -> Option<ObservedTrial> {
    let trial = context.trials.get(key)?;
    if trial.trial.metadata.deletion_timestamp.is_some() || trial.unreadable.is_some() {
        return None;
    }
    let experiment = context.experiments.get(&trial.experiment_key())?;
    let object = experiment.experiment()?;
    let experiment_uid = object.metadata.uid.clone().unwrap_or_default();
    let owners = trial.trial.metadata.owner_references.iter().flatten();
    if !owners.into_iter().any(|owner| owner.uid == experiment_uid) {
        return None;
    }
    let valid = experiment.valid()?;
    let storage = object.status.as_ref().and_then(|status| status.storage.clone());
    let storage = storage.filter(StorageRecord::is_fixed);
    let pods = context.pods.group(key);
    let pods = pods.iter().filter(|pod| pod.owner == trial.uid());
    let pods = pods.map(|pod| with_node_state(context, pod)).collect();
    let timeouts = context.options.timeouts(valid.spec.preemption_timeout_seconds);
    let has_trained = has_trained(context, &trial, &experiment_uid);
    let key = key.clone();
    Some(ObservedTrial { key, trial, valid, experiment_uid, storage, pods, timeouts, has_trained })
}

/// Returns whether a trial of the experiment has trained. Only matters once an attempt has begun.
fn has_trained(context: &Context, trial: &CachedTrial, experiment_uid: &str) -> bool {
    let has_trained = |trial: &CachedTrial| trial::has_trained(&trial.record);
    let others = || trials_of(context, &trial.experiment_key(), experiment_uid);
    let has_attempt = !trial.record.status.attempts.is_empty();
    has_trained(trial) || (has_attempt && others().iter().any(|other| has_trained(other)))
}

/// A pod with the state of its node.
pub(crate) fn with_node_state(context: &Context, pod: &CachedPod) -> ObservedPod {
    let node = match &pod.node {
        None => NodeState::Ready,
        Some(name) => match context.nodes.get(&Key::new("", name)) {
            None => NodeState::Deleted,
            Some(node) => match node.not_ready_since {
                None => NodeState::Ready,
                Some(since) => context.node_outage.state_of(since, now()),
            },
        },
    };
    ObservedPod { node, ..pod.observed.clone() }
}

impl ObservedTrial {
    /// Input of the engine's plan.
    pub(super) fn view(&self, now: Timestamp, is_admitted: bool) -> GangView<'_> {
        let searcher = &self.valid.spec.searcher;
        GangView {
            record: &self.trial.record,
            generation: self.trial.trial.metadata.generation.unwrap_or_default(),
            pods: &self.pods,
            desired_state_seen_at: self.trial.desired_state_seen_at,
            num_pods: self.valid.spec.resources.num_pods(),
            is_admitted,
            is_paused_by_user: self.valid.spec.state == DesiredState::Paused,
            searched: SearchedMetric {
                name: &searcher.metric,
                smaller_is_better: searcher.smaller_is_better,
                others: searcher.other_objectives(),
                is_copied: searcher.pbt.is_some(),
            },
            timeouts: self.timeouts,
            limits: self.limits(),
            now,
        }
    }

    pub(super) fn limits(&self) -> RestartLimits {
        RestartLimits::new(self.valid.spec.max_restarts, BackOffLimits::CLUSTER, self.has_trained)
    }

    /// Input of admission; `None` without a start stage.
    pub(super) fn candidate(&self, start_stage: Option<StartStage>) -> Option<Candidate> {
        let TrialRecord { spec, status } = &self.trial.record;
        Some(Candidate {
            experiment: spec.experiment.as_str().into(),
            index: spec.index,
            has_trained: status.batches > 0 || !status.checkpoints.is_empty(),
            created_at: self.trial.created_at(),
            is_gang: self.valid.spec.resources.num_pods() > 1,
            stage: start_stage?,
        })
    }
}

/// Trials that start or wait to start, and which of them may begin. Empty until the first reconcile
/// of a new leader.
#[derive(Debug, Default)]
pub struct SharedAdmission(Mutex<Option<Admission>>);

impl SharedAdmission {
    fn lock(&self) -> MutexGuard<'_, Option<Admission>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Removes all trials. A replica that stops leading no longer sees starts and ends.
    pub fn clear(&self) {
        *self.lock() = None;
    }
}

/// Records the start stage of a trial; `None` if it neither starts nor waits to start. Returns
/// whether it may begin an attempt now, and queues other trials that may begin because of this.
pub(super) fn update_admission(context: &Context, key: &Key, candidate: Option<Candidate>) -> bool {
    let mut shared = context.admission.lock();
    let admission = shared.get_or_insert_with(|| admission_of_all(context));
    let trial = trial_key(key);
    admission.set(&trial, candidate);
    let admitted = admission.admit();
    let is_admitted = admission.is_admitted(&trial);
    drop(shared);
    for (namespace, name) in admitted.into_iter().filter(|other| *other != trial) {
        context.trial_queue.add(Key { namespace, name });
    }
    is_admitted
}

/// Admission state of all cached trials, so that none is admitted before those that start are
/// known.
fn admission_of_all(context: &Context) -> Admission {
    let mut admission = Admission::new(context.options.admission_limits());
    let mut open = context.trials.all();
    open.retain(|trial| !trial.record.status.phase.is_terminal());
    let observed = open.iter().filter_map(|trial| observe(context, &trial.key()));
    let now = crate::context::now();
    for trial in observed {
        let start_stage = plan(&trial.view(now, false)).start_stage;
        admission.set(&trial_key(&trial.key), trial.candidate(start_stage));
    }
    admission
}

fn trial_key(key: &Key) -> TrialKey {
    (key.namespace.clone(), key.name.clone())
}

/// Names of the nodes that these pods are bound to and that the cache lacks, since they may be new.
pub(crate) fn unknown_nodes(
    context: &Context,
    namespace: &str,
    pods: &[ObservedPod],
) -> BTreeSet<Arc<str>> {
    nodes_to_look_up(pods, |pod| context.pods.get(&Key::new(namespace, pod))?.node.clone())
}

fn nodes_to_look_up(
    pods: &[ObservedPod],
    node_of: impl Fn(&str) -> Option<Arc<str>>,
) -> BTreeSet<Arc<str>> {
    let is_gone = |pod: &&ObservedPod| pod.node == NodeState::Deleted && !pod.is_terminal();
    pods.iter().filter(is_gone).filter_map(|pod| node_of(&pod.name)).collect()
}

#[cfg(test)]
mod tests {
    use stoker_engine::gang::PodPhase;

    use super::*;

    #[test]
    fn every_unknown_node_is_looked_up() {
        let pod = |name: &str, node: NodeState, phase: PodPhase| ObservedPod {
            name: name.to_owned(),
            node,
            phase,
            ..ObservedPod::default()
        };
        let pods = [
            pod("n1-a", NodeState::Deleted, PodPhase::Pending),
            pod("n2-a", NodeState::Deleted, PodPhase::Running),
            pod("n2-b", NodeState::Deleted, PodPhase::Running),
            pod("n3-a", NodeState::Deleted, PodPhase::Failed),
            pod("n4-a", NodeState::Ready, PodPhase::Running),
            pod("unbound", NodeState::Deleted, PodPhase::Pending),
        ];
        let node_of = |name: &str| name.split_once('-').map(|(node, _)| Arc::from(node));
        let found = nodes_to_look_up(&pods, node_of);
        assert_eq!(found.iter().map(|node| &**node).collect::<Vec<_>>(), ["n1", "n2"]);
    }
}
