//! Cached form of trials and pods: only the fields that controllers need.

use std::collections::BTreeMap;
use std::sync::Arc;

use k8s_openapi::api::core::v1::{ContainerStatus, Pod, PodStatus};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::core::{DeserializeGuard, error_boundary::InvalidObject};
use kube::{Resource, ResourceExt as _};
use stoker_api::contract::Cleanup;
use stoker_api::experiment::Unit;
use stoker_api::names::{
    ANNOTATION_TRIAL_CONFIG, COMPONENT_CLEANUP, LABEL_ATTEMPT, LABEL_CLEANUP_END, LABEL_COMPONENT,
    LABEL_EXPERIMENT, LABEL_JOB, LABEL_POD_INDEX, LABEL_TRIAL,
};
use stoker_api::time::Timestamp;
use stoker_api::trial::{DesiredTrialState, Trial, TrialSpec};
use stoker_engine::gang::{Exit, ObservedPod, PodPhase, Waiting};
use stoker_engine::trial::TrialRecord;

use crate::cache::{Cached, Key};
use crate::context::now;

/// Name of the container that runs the user's program.
pub const TRAINER_CONTAINER: &str = "trainer";
/// Name of the init container that copies the launcher and downloads the context.
pub const SETUP_CONTAINER: &str = "setup";

/// Reason of the condition `PodScheduled` while a scheduling gate holds back the pod.
const SCHEDULING_GATED: &str = "SchedulingGated";

/// A trial as last observed.
#[derive(Debug)]
pub struct CachedTrial {
    /// The object. If it cannot be parsed: its metadata, with a placeholder spec.
    pub trial: Trial,
    /// Parse error, if any. Nothing is planned for such a trial, and its experiment waits.
    pub unreadable: Option<String>,
    /// Spec and status of the trial, as the engine reads them.
    pub record: TrialRecord,
    /// When this process first observed the desired state of the trial, or when the previous leader
    /// had observed it.
    pub desired_state_seen_at: Timestamp,
    key: Key,
    version: String,
}

impl CachedTrial {
    /// Caches a trial from a write response.
    pub fn new(trial: Trial) -> Self {
        let key = Key::of(&trial);
        let version = trial.resource_version().unwrap_or_default();
        let trial = without_managed_fields(trial);
        let status = trial.status.clone().unwrap_or_default();
        let record = TrialRecord { spec: trial.spec.clone(), status };
        Self { trial, unreadable: None, record, desired_state_seen_at: now(), key, version }
    }

    /// Caches a trial from a watch event.
    pub fn read(object: DeserializeGuard<Trial>) -> Self {
        let InvalidObject { metadata, error } = match object.0 {
            Ok(trial) => return Self::new(trial),
            Err(invalid) => invalid,
        };
        tracing::error!(error, trial = metadata.name, "cannot parse a trial; its experiment waits");
        let name = metadata.name.clone().unwrap_or_default();
        let labels = metadata.labels.clone().unwrap_or_default();
        let (experiment, index) = name.rsplit_once('-').unwrap_or((&name, "0"));
        let spec = TrialSpec {
            experiment: labels.get(LABEL_EXPERIMENT).map_or(experiment, |label| label).to_owned(),
            index: index.parse().unwrap_or(u32::MAX),
            request_id: String::new(),
            seed: 0,
            hyperparameters: serde_json::Value::Null,
            unit: Unit::Batches,
            units: 0,
            order: None,
            group: 0,
            random_words: None,
            source: None,
            pins: vec![],
            tag: None,
            grants: vec![],
            desired_state: DesiredTrialState::Run,
            desired_since: None,
        };
        let mut trial = Trial::new(&name, spec);
        trial.metadata = metadata;
        Self { unreadable: Some(error), ..Self::new(trial) }
    }

    /// UID of the trial.
    pub fn uid(&self) -> &str {
        self.trial.metadata.uid.as_deref().unwrap_or_default()
    }

    /// Key of the trial's experiment.
    pub fn experiment_key(&self) -> Key {
        Key::new(&self.key.namespace, &self.trial.spec.experiment)
    }

    /// Creation time of the trial.
    pub fn created_at(&self) -> Timestamp {
        self.trial.metadata.creation_timestamp.as_ref().map(timestamp).unwrap_or_default()
    }
}

impl Cached for CachedTrial {
    fn key(&self) -> Key {
        self.key.clone()
    }

    fn group(&self) -> Option<Key> {
        Some(self.experiment_key())
    }

    fn version(&self) -> &str {
        &self.version
    }

    fn is_same(&self, other: &Self) -> bool {
        self.version == other.version
    }

    fn inherit(&mut self, old: &Self) {
        let desired =
            |trial: &Self| (trial.record.spec.desired_state, trial.record.spec.desired_since);
        if self.uid() == old.uid() && desired(self) == desired(old) {
            let earlier = old.desired_state_seen_at.min(self.desired_state_seen_at);
            self.desired_state_seen_at = earlier;
        }
    }
}

/// A pod of a trial, of a job or of a clean-up.
#[derive(Debug)]
pub struct CachedPod {
    /// Fields that plans depend on. The node's state is filled in from the cache of nodes later.
    pub observed: ObservedPod,
    /// Name of the node that the pod is bound to.
    pub node: Option<Arc<str>>,
    /// UID of the controlling owner.
    pub owner: String,
    /// Experiment that a clean-up pod belongs to.
    pub cleaned_experiment: Option<Key>,
    /// Index of the first trial that a clean-up pod does not process.
    pub cleanup_end: Option<u32>,
    /// Names of the checkpoints that a clean-up pod deletes, by directory of the trial. `None` for
    /// other pods, and if the pod has no readable instructions.
    pub cleanup_deletions: Option<BTreeMap<String, Vec<String>>>,
    /// When the pod or its program failed, or was first observed as failed.
    pub failed_at: Option<Timestamp>,
    /// Job that the pod belongs to.
    pub job: Option<Key>,
    key: Key,
    trial: Option<Key>,
    version: String,
}

impl CachedPod {
    /// Caches the relevant fields of a pod.
    pub fn new(pod: Pod) -> Self {
        let key = Key::of(&pod);
        let label = |name: &str| pod.labels().get(name);
        let number =
            |name: &str| label(name).and_then(|value| value.parse().ok()).unwrap_or(u32::MAX);
        let trial = label(LABEL_TRIAL).map(|name| Key::new(&key.namespace, name));
        let job = label(LABEL_JOB).map(|name| Key::new(&key.namespace, name));
        let is_cleanup = label(LABEL_COMPONENT).is_some_and(|name| name == COMPONENT_CLEANUP);
        let experiment = label(LABEL_EXPERIMENT).filter(|_| is_cleanup);
        let cleaned_experiment = experiment.map(|name| Key::new(&key.namespace, name));
        let cleanup_end = label(LABEL_CLEANUP_END).and_then(|end| end.parse().ok());
        let cleanup_deletions = cleaned_experiment.as_ref().and_then(|_| deletions(&pod));
        let owner = pod.owner_references().iter().find(|owner| owner.controller == Some(true));
        let owner = owner.map(|owner| owner.uid.clone()).unwrap_or_default();
        let node = pod.spec.as_ref().and_then(|spec| spec.node_name.as_deref()).map(Arc::from);
        let observed = observe_pod(&pod, number(LABEL_ATTEMPT), number(LABEL_POD_INDEX));
        let version = pod.resource_version().unwrap_or_default();
        let finished_at = observed.exit.as_ref().and_then(|exit| exit.finished_at);
        // A sidecar may run on after a program that failed.
        let has_program_failed = observed.exit.as_ref().is_some_and(|exit| exit.code != 0);
        let has_failed = observed.phase == PodPhase::Failed || has_program_failed;
        Self {
            failed_at: has_failed.then(|| finished_at.unwrap_or_else(now)),
            observed,
            node,
            owner,
            cleaned_experiment,
            cleanup_end,
            cleanup_deletions,
            job,
            key,
            trial,
            version,
        }
    }
}

/// Returns the names of the checkpoints that a clean-up pod deletes, by directory of the trial.
fn deletions(pod: &Pod) -> Option<BTreeMap<String, Vec<String>>> {
    let cleanup: Cleanup =
        serde_json::from_str(pod.annotations().get(ANNOTATION_TRIAL_CONFIG)?).ok()?;
    Some(cleanup.delete.into_iter().map(|trial| (trial.trial_path, trial.checkpoints)).collect())
}

impl Cached for CachedPod {
    fn key(&self) -> Key {
        self.key.clone()
    }

    fn group(&self) -> Option<Key> {
        self.trial.clone().or_else(|| self.job.as_ref().map(group_of_job))
    }

    fn version(&self) -> &str {
        &self.version
    }

    fn is_same(&self, other: &Self) -> bool {
        self.observed == other.observed && self.node == other.node && self.owner == other.owner
    }

    fn inherit(&mut self, old: &Self) {
        if self.observed.uid != old.observed.uid {
            return;
        }
        if let (Some(waiting), Some(old)) = (&mut self.observed.waiting, &old.observed.waiting) {
            waiting.since = old.since;
        }
        if let (Some(exit), Some(old)) = (&mut self.observed.exit, &old.observed.exit) {
            exit.finished_at = exit.finished_at.min(old.finished_at).or(exit.finished_at);
        }
        if self.failed_at.is_some() {
            self.failed_at = old.failed_at.or(self.failed_at);
        }
    }
}

/// Group key of a job's pods. The prefix avoids collisions with a trial of the same name.
pub(crate) fn group_of_job(job: &Key) -> Key {
    Key::new(&job.namespace, &format!("job/{}", job.name))
}

/// Drops the managed fields, which take most of the memory of a small object.
pub(crate) fn without_managed_fields<K: Resource>(mut object: K) -> K {
    object.meta_mut().managed_fields = None;
    object
}

/// Converts a Kubernetes time, rounded down to the second.
pub fn timestamp(time: &Time) -> Timestamp {
    Timestamp(time.0.as_second())
}

fn observe_pod(pod: &Pod, attempt: u32, index: u32) -> ObservedPod {
    let nothing = PodStatus::default();
    let status = pod.status.as_ref().unwrap_or(&nothing);
    let condition = |type_: &str, status_: &str| {
        let mut conditions = status.conditions.iter().flatten();
        conditions.rfind(|condition| condition.type_ == type_ && condition.status == status_)
    };
    let scheduled = condition("PodScheduled", "True");
    // Removing a gate does not change the condition. The scheduler changes it after its first try.
    let unscheduled = condition("PodScheduled", "False")
        .filter(|condition| condition.reason.as_deref() != Some(SCHEDULING_GATED));
    let gates = pod.spec.iter().flat_map(|spec| spec.scheduling_gates.iter().flatten());
    let disruption = condition("DisruptionTarget", "True");
    let started = status.start_time.as_ref().map(timestamp);
    let bound = pod.spec.as_ref().is_some_and(|spec| spec.node_name.is_some());
    let scheduled_at = scheduled.and_then(|condition| condition.last_transition_time.as_ref());
    let scheduled_at = scheduled_at.map(timestamp).or(started);
    ObservedPod {
        name: pod.name_any(),
        uid: pod.uid().unwrap_or_default(),
        attempt,
        index,
        phase: phase(status),
        scheduled_at: scheduled_at.or(bound.then(Timestamp::default)),
        unschedulable: unscheduled.map(|condition| {
            condition.message.clone().or_else(|| condition.reason.clone()).unwrap_or_default()
        }),
        gates: gates.map(|gate| gate.name.clone()).collect(),
        waiting: waiting(status),
        creating_since: scheduled_at.and_then(|at| creating_since(pod, status, at)),
        exit: exit(pod, status),
        reason: status.reason.clone().filter(|reason| !reason.is_empty()),
        message: status.message.clone().filter(|message| !message.is_empty()),
        disruption: disruption.and_then(|condition| condition.reason.clone()),
        deletion: pod.metadata.deletion_timestamp.as_ref().map(timestamp),
        node: stoker_engine::gang::NodeState::Ready,
    }
}

fn phase(status: &PodStatus) -> PodPhase {
    match status.phase.as_deref() {
        Some("Running") => PodPhase::Running,
        Some("Succeeded") => PodPhase::Succeeded,
        Some("Failed") => PodPhase::Failed,
        Some("Unknown") => PodPhase::Unknown,
        _ => PodPhase::Pending,
    }
}

fn containers(status: &PodStatus) -> impl Iterator<Item = &ContainerStatus> {
    let setup = status.init_container_statuses.iter().flatten();
    setup.chain(status.container_statuses.iter().flatten())
}

fn program_status(status: &PodStatus) -> Option<&ContainerStatus> {
    let mut containers = status.container_statuses.iter().flatten();
    containers.find(|container| container.name == TRAINER_CONTAINER)
}

/// Waiting reasons of containers that are starting normally.
const STARTING_REASONS: [&str; 2] = ["ContainerCreating", "PodInitializing"];

/// The first container that cannot start. Once the program has started, it does not depend on
/// others, such as a sidecar that crashes and restarts.
fn waiting(status: &PodStatus) -> Option<Waiting> {
    let program = program_status(status).and_then(|program| program.state.as_ref());
    if program.is_some_and(|state| state.running.is_some() || state.terminated.is_some()) {
        return None;
    }
    let states =
        containers(status).filter_map(|container| container.state.as_ref()?.waiting.as_ref());
    let waiting = states.map(|state| Waiting {
        reason: state.reason.clone().unwrap_or_default(),
        message: state.message.clone().unwrap_or_default(),
        since: now(),
    });
    waiting.into_iter().find(|waiting| !STARTING_REASONS.contains(&waiting.reason.as_str()))
}

/// Since when the containers of a pod that was scheduled at this time wait to be created. An init
/// container that ended has postponed the creation of the others.
fn creating_since(pod: &Pod, status: &PodStatus, scheduled_at: Timestamp) -> Option<Timestamp> {
    let states = || containers(status).filter_map(|container| container.state.as_ref());
    let is_blocked = waiting(status).is_some() || exit(pod, status).is_some();
    let is_running = states().any(|state| state.running.is_some());
    if phase(status) != PodPhase::Pending || is_blocked || is_running {
        return None;
    }
    let ends = states().filter_map(|state| state.terminated.as_ref()?.finished_at.as_ref());
    Some(ends.map(timestamp).fold(scheduled_at, Timestamp::max))
}

/// Exit of the program, or of the first init container that failed. Sidecars do not count: they
/// restart, and end after the program.
fn exit(pod: &Pod, status: &PodStatus) -> Option<Exit> {
    let ended = |container: &ContainerStatus| {
        let end = container.state.as_ref()?.terminated.as_ref()?;
        Some(Exit {
            code: end.exit_code,
            reason: end.reason.clone().unwrap_or_default(),
            message: end.message.clone().unwrap_or_default(),
            // A node whose clock is ahead must not delay what follows from the exit.
            finished_at: end.finished_at.as_ref().map(|at| timestamp(at).min(now())),
            is_setup: container.name == SETUP_CONTAINER,
        })
    };
    let is_sidecar = |name: &str| {
        let mut all = pod.spec.iter().flat_map(|spec| spec.init_containers.iter().flatten());
        all.any(|init| init.name == name && init.restart_policy.as_deref() == Some("Always"))
    };
    let program = program_status(status);
    let setup = status.init_container_statuses.iter().flatten();
    let mut setup = setup.filter(|init| !is_sidecar(&init.name)).filter_map(ended);
    program.and_then(ended).or_else(|| setup.find(|exit| exit.code != 0))
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn pod(status: Value, more: Value) -> CachedPod {
        pod_with(json!({ "containers": [] }), status, more)
    }

    fn pod_with(spec: Value, status: Value, more: Value) -> CachedPod {
        let mut pod = json!({
            "metadata": {
                "name": "t-0-a2-r1", "namespace": "ns", "uid": "u", "resourceVersion": "7",
                "labels": {
                    "stoker.dev/trial": "t-0",
                    "stoker.dev/attempt": "2",
                    "stoker.dev/pod-index": "1",
                },
            },
            "spec": spec,
            "status": status,
        });
        if let (Some(pod), Value::Object(more)) = (pod["metadata"].as_object_mut(), more) {
            pod.extend(more);
        }
        CachedPod::new(serde_json::from_value(pod).unwrap())
    }

    #[test]
    fn pod_is_identified_by_its_labels() {
        let pod = pod(json!({"phase": "Running"}), json!({}));
        assert_eq!((pod.observed.attempt, pod.observed.index), (2, 1));
        assert_eq!(pod.group(), Some(Key::new("ns", "t-0")));
        assert_eq!((pod.observed.phase, pod.version()), (PodPhase::Running, "7"));
    }

    #[test]
    fn job_pod_is_distinct_from_trial_pod() {
        let labels = json!({ "labels": { "stoker.dev/job": "t-0", "stoker.dev/pod-index": "1" } });
        let pod = pod(json!({}), labels);
        assert_eq!(pod.job, Some(Key::new("ns", "t-0")));
        assert_eq!((pod.group(), pod.observed.index), (Some(Key::new("ns", "job/t-0")), 1));
    }

    #[test]
    fn unschedulable_pod_has_a_message() {
        let pod = pod(
            json!({"phase": "Pending", "conditions": [{
                "type": "PodScheduled", "status": "False", "reason": "Unschedulable",
                "message": "0/2",
            }]}),
            json!({}),
        );
        assert_eq!(pod.observed.unschedulable.as_deref(), Some("0/2"));
        assert_eq!(pod.observed.scheduled_at, None);
    }

    #[test]
    fn gated_pod_is_not_unschedulable() {
        let status = json!({"phase": "Pending", "conditions": [{
            "type": "PodScheduled", "status": "False", "reason": "SchedulingGated",
            "message": "Scheduling is blocked due to non-empty scheduling gates",
        }]});
        let spec = json!({ "containers": [], "schedulingGates": [{ "name": "queue.test/a" }] });
        let pod = json!({ "metadata": { "name": "t-0-a0-r0" }, "spec": spec, "status": status });
        let observed = CachedPod::new(serde_json::from_value(pod).unwrap()).observed;
        assert_eq!(
            (observed.gates, observed.unschedulable),
            (vec!["queue.test/a".to_owned()], None)
        );
    }

    #[test]
    fn exit_comes_from_program_or_failed_setup() {
        let ended = |name: &str, code: i32| {
            json!({"name": name, "image": "", "imageID": "", "ready": false, "restartCount": 0,
                "state": {"terminated": {"exitCode": code, "reason": "Error", "message": "why",
                    "finishedAt": "1970-01-01T00:00:09Z"}}})
        };
        let check = |init: Value, main: Value, expected: Option<(i32, bool)>| {
            let status = json!({"phase": "Failed", "initContainerStatuses": init,
                "containerStatuses": main});
            let exit = pod(status, json!({})).observed.exit;
            assert_eq!(exit.as_ref().map(|exit| (exit.code, exit.is_setup)), expected);
            let is_read =
                |exit: Exit| exit.finished_at == Some(Timestamp(9)) && exit.message == "why";
            assert!(exit.is_none_or(is_read));
        };
        check(json!([]), json!([ended("trainer", 3)]), Some((3, false)));
        check(json!([ended("setup", 0)]), json!([ended("trainer", 3)]), Some((3, false)));
        check(json!([ended("setup", 80)]), json!([]), Some((80, true)));
        check(json!([]), json!([ended("sidecar", 3)]), None);
    }

    /// An injected sidecar, such as a proxy, ends after the program, often with an error.
    #[test]
    fn sidecar_exits_are_not_the_programs() {
        let state = |name: &str, state: Value| {
            json!({"name": name, "image": "", "imageID": "", "ready": false, "restartCount": 0,
                "state": state})
        };
        let ended = |code: i32| json!({"terminated": {"exitCode": code}});
        let check = |trainer: Value, expected: Option<i32>| {
            let spec = json!({
                "containers": [],
                "initContainers": [{"name": "proxy", "restartPolicy": "Always"}],
            });
            let status = json!({
                "phase": "Running",
                "initContainerStatuses": [state("proxy", ended(143))],
                "containerStatuses": [state("trainer", trainer)],
            });
            let exit = pod_with(spec, status, json!({})).observed.exit;
            assert_eq!(exit.map(|exit| exit.code), expected);
        };
        check(json!({"running": {}}), None);
        check(ended(0), Some(0));
        check(ended(79), Some(79));
    }

    #[test]
    fn starting_container_is_not_waiting() {
        let check = |reason: &str, expected: Option<&str>| {
            let status = json!({"phase": "Pending", "containerStatuses": [
                {"name": "trainer", "image": "", "imageID": "", "ready": false, "restartCount": 0,
                    "state": {"waiting": {"reason": reason}}}
            ]});
            let waiting = pod(status, json!({})).observed.waiting;
            assert_eq!(waiting.as_ref().map(|waiting| waiting.reason.as_str()), expected);
        };
        check("ContainerCreating", None);
        check("ImagePullBackOff", Some("ImagePullBackOff"));
    }

    #[test]
    fn sidecars_do_not_matter_after_the_start() {
        let container = |name: &str, state: &Value| {
            json!({"name": name, "image": "", "imageID": "", "ready": false, "restartCount": 0,
                "state": state})
        };
        let waits = |reason: &str| json!({"waiting": {"reason": reason}});
        let check = |trainer: Value, expected: Option<&str>| {
            let status = json!({
                "phase": "Running",
                "initContainerStatuses": [container("proxy", &waits("CrashLoopBackOff"))],
                "containerStatuses": [
                    container("agent", &waits("ImagePullBackOff")), container("trainer", &trainer),
                ],
            });
            let waiting = pod(status, json!({})).observed.waiting;
            let reason = waiting.as_ref().map(|waiting| waiting.reason.as_str());
            assert_eq!(reason, expected, "{trainer}");
        };
        check(waits("PodInitializing"), Some("CrashLoopBackOff"));
        check(json!({}), Some("CrashLoopBackOff"));
        check(json!({"running": {}}), None);
        check(json!({"terminated": {"exitCode": 0}}), None);
    }

    #[test]
    fn first_observation_of_a_stop_is_inherited() {
        let trial = |uid: &str, state: &str, since: u32, version: &str| {
            let trial = json!({
                "apiVersion": "stoker.dev/v1alpha1", "kind": "Trial",
                "metadata": {
                    "name": "t-0", "namespace": "ns", "uid": uid, "resourceVersion": version,
                },
                "spec": {
                    "experiment": "t", "index": 0, "requestId": "r", "seed": 1,
                    "hyperparameters": {}, "unit": "batches", "units": 8,
                    "wanted": state,
                    "wantedSince": format!("1970-01-01T00:00:{since:02}Z"),
                },
            });
            CachedTrial::new(serde_json::from_value(trial).unwrap())
        };
        let check = |before: CachedTrial, expected: bool| {
            let (mut old, mut new) = (before, trial("u", "pause", 5, "8"));
            old.desired_state_seen_at = Timestamp(7);
            new.inherit(&old);
            assert_eq!(new.desired_state_seen_at == Timestamp(7), expected, "{old:?}");
        };
        check(trial("u", "pause", 5, "7"), true);
        check(trial("u", "run", 5, "7"), false);
        check(trial("u", "pause", 4, "7"), false);
        check(trial("another", "pause", 5, "7"), false);
    }

    #[test]
    fn first_observation_of_a_wait_is_inherited() {
        let waits = |reason: &str, uid: &str| {
            let status = json!({"phase": "Pending", "containerStatuses": [
                {"name": "trainer", "image": "", "imageID": "", "ready": false, "restartCount": 0,
                    "state": {"waiting": {"reason": reason}}}
            ]});
            pod(status, json!({ "uid": uid }))
        };
        let check = |(before, uid): (&str, &str), after: &str, expected: Option<bool>| {
            let (mut old, mut pod) = (waits(before, uid), waits(after, "u"));
            old.observed.waiting.iter_mut().for_each(|waiting| waiting.since = Timestamp(7));
            pod.inherit(&old);
            let since = pod.observed.waiting.map(|waiting| waiting.since);
            assert_eq!(since.map(|since| since == Timestamp(7)), expected, "{before} {after}");
        };
        check(("ErrImagePull", "u"), "ImagePullBackOff", Some(true));
        check(("ErrImagePull", "u"), "ContainerCreating", None);
        check(("ContainerCreating", "u"), "ErrImagePull", Some(false));
        check(("ErrImagePull", "another"), "ErrImagePull", Some(false));
    }

    #[test]
    fn exit_in_the_future_counts_as_observed_first() {
        let exited = |finished_at: &str, uid: &str| {
            let ended = json!({"terminated": {"exitCode": 79, "finishedAt": finished_at}});
            let status = json!({"phase": "Running", "containerStatuses": [
                {"name": "trainer", "image": "", "imageID": "", "ready": false, "restartCount": 0,
                    "state": ended}
            ]});
            pod(status, json!({ "uid": uid }))
        };
        let ended_at = |pod: &CachedPod| pod.observed.exit.as_ref().unwrap().finished_at.unwrap();
        let future = "2999-01-01T00:00:00Z";
        let before = now();
        let mut first = exited(future, "u");
        assert!((before..=now()).contains(&ended_at(&first)), "{:?}", first.observed.exit);
        // Later watch events contain the time in the future again.
        first.observed.exit.iter_mut().for_each(|exit| exit.finished_at = Some(Timestamp(50)));
        let inherited = |finished_at: &str, uid: &str| {
            let mut pod = exited(finished_at, uid);
            pod.inherit(&first);
            ended_at(&pod)
        };
        assert_eq!(inherited(future, "u"), Timestamp(50));
        assert_eq!(inherited("1970-01-01T00:00:09Z", "u"), Timestamp(9));
        assert!(inherited(future, "another") >= before);
    }

    /// A pod that was evicted or rejected by its node has no exit with a time.
    #[test]
    fn first_observation_of_a_failure_is_inherited() {
        let observed =
            |phase: &str, uid: &str| pod(json!({ "phase": phase }), json!({ "uid": uid }));
        let check = |(before, uid): (&str, &str), after: &str, expected: Option<bool>| {
            let (mut old, mut pod) = (observed(before, uid), observed(after, "u"));
            old.failed_at = old.failed_at.map(|_| Timestamp(7));
            pod.inherit(&old);
            assert_eq!(pod.failed_at.map(|at| at == Timestamp(7)), expected, "{before} {after}");
        };
        check(("Failed", "u"), "Failed", Some(true));
        check(("Running", "u"), "Failed", Some(false));
        check(("Running", "u"), "Succeeded", None);
        check(("Failed", "another"), "Failed", Some(false));
        let check = |phase: &str, code: i32, expected: Option<i64>| {
            let finished_at = "1970-01-01T00:00:09Z";
            let ended = json!({"terminated": {"exitCode": code, "finishedAt": finished_at}});
            let status = json!({"phase": phase, "containerStatuses": [
                {"name": "trainer", "image": "", "imageID": "", "ready": false, "restartCount": 0,
                    "state": ended}
            ]});
            let failed_at = pod(status, json!({})).failed_at;
            assert_eq!(failed_at, expected.map(Timestamp), "{phase} {code}");
        };
        check("Failed", 1, Some(9));
        // A sidecar still runs.
        check("Running", 1, Some(9));
        check("Running", 0, None);
    }

    #[test]
    fn creation_is_awaited_from_scheduling_or_setup_end() {
        let check = |phase: &str, setup: Value, trainer: Value, expected: Option<i64>| {
            let container = |name: &str, state: &Value| {
                json!([{"name": name, "image": "", "imageID": "", "ready": false,
                    "restartCount": 0, "state": state}])
            };
            let status = json!({
                "phase": phase,
                "conditions": [{"type": "PodScheduled", "status": "True",
                    "lastTransitionTime": "1970-01-01T00:00:07Z"}],
                "initContainerStatuses": container("setup", &setup),
                "containerStatuses": container("trainer", &trainer),
            });
            let since = pod(status, json!({})).observed.creating_since;
            assert_eq!(since, expected.map(Timestamp), "{phase} {setup} {trainer}");
        };
        let waits = |reason: &str| json!({"waiting": {"reason": reason}});
        let initializing = || waits("PodInitializing");
        let finished_at = "1970-01-01T00:00:09Z";
        let ended = |code| json!({"terminated": {"exitCode": code, "finishedAt": finished_at}});
        check("Pending", json!({}), json!({}), Some(7));
        check("Pending", json!({}), waits("ContainerCreating"), Some(7));
        check("Pending", initializing(), initializing(), Some(7));
        check("Pending", json!({"running": {}}), initializing(), None);
        check("Pending", ended(0), initializing(), Some(9));
        check("Pending", ended(1), initializing(), None);
        check("Pending", initializing(), waits("ImagePullBackOff"), None);
        check("Running", ended(0), json!({"running": {}}), None);
        let status = json!({"phase": "Pending"});
        assert_eq!(pod(status, json!({})).observed.creating_since, None, "not scheduled");
    }
}
