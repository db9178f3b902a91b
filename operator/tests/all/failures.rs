//! Every way in which a pod, an attempt or a trial goes wrong, from the pod's status to the trial's
//! record: whose fault it was, what it costs, what is said of it, and that it goes on.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use futures::StreamExt as _;
use kube::ResourceExt as _;
use kube::runtime::WatchStreamExt as _;
use serde_json::{Value, json};
use stoker_api::experiment::Phase;
use stoker_api::names::{LABEL_ATTEMPT, LABEL_EXPERIMENT};
use stoker_api::trial::{Attempt, AttemptEnd, Trial};

use crate::flow::grid;
use crate::kubelet::{Kubelet, Script, ended, now, unschedulable};
use crate::setup::{Place, free_ports, merge, runtime};
use AttemptEnd::{
    Completed, Infrastructure, InvalidHyperparameters, NotStarted, Preempted, UserError,
};

const NAMESPACE: &str = "failures";

/// What the test does while a case runs.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Hand {
    None,
    /// Deletes the first attempt's pod; with grace 0 if so.
    DeletePod {
        is_forced: bool,
    },
    /// Deletes the node that the first attempt is on.
    DeleteNode,
    /// Makes that node not ready.
    SilenceNode,
    /// The same, once its pod was deleted with a long grace.
    DrainThenSilenceNode,
    /// Waits until the trial waits, and takes away what is in its way.
    Mend(&'static [&'static str]),
}

/// A way to fail, and what must be recorded of it. Where there are more attempts than one, the last
/// goes well.
struct Case {
    name: &'static str,
    /// Merged into the experiment's spec.
    spec: Value,
    /// What becomes of the first attempt's pods.
    first: Script,
    hand: Hand,
    end: AttemptEnd,
    reason: &'static str,
    /// Part of the attempt's message and, where the trial waits or fails by it, of a condition's.
    says: &'static str,
    restarts: u32,
    attempts: usize,
    phase: Phase,
}

impl Case {
    fn new(name: &'static str, first: Script, end: AttemptEnd, reason: &'static str) -> Self {
        let restarts = u32::from(end == UserError);
        let (spec, hand, says) = (json!({}), Hand::None, "");
        let (attempts, phase) = (2, Phase::Completed);
        Self { name, spec, first, hand, end, reason, says, restarts, attempts, phase }
    }

    fn spec(self, spec: Value) -> Self {
        Self { spec, ..self }
    }

    fn hand(self, hand: Hand) -> Self {
        Self { hand, ..self }
    }

    fn says(self, says: &'static str) -> Self {
        Self { says, ..self }
    }

    /// The trial fails by it.
    fn fatal(self) -> Self {
        Self { attempts: 1, phase: Phase::Failed, ..self }
    }

    /// It would have been tried again, but for `maxRestarts: 0`.
    fn fatal_without_restarts(mut self) -> Self {
        self.spec["maxRestarts"] = json!(0);
        self.fatal()
    }
}

fn exit(code: i32) -> Script {
    Script::Exit { after_ms: 50, code }
}

/// A status of a container that ended so.
fn killed(code: i32, reason: &str, more: Value) -> Script {
    let mut status = ended(code);
    status["containerStatuses"][0]["state"]["terminated"]["reason"] = json!(reason);
    status.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    Script::Status(status)
}

fn disrupted(reason: &str) -> Value {
    json!({ "conditions": [{
        "type": "DisruptionTarget", "status": "True", "reason": reason, "lastTransitionTime": now(),
    }] })
}

fn waiting(reason: &str, message: &str) -> Script {
    Script::Status(json!({
        "phase": "Pending",
        "conditions": [{ "type": "PodScheduled", "status": "True", "lastTransitionTime": now() }],
        "containerStatuses": [{
            "name": "trainer", "image": "", "imageID": "", "ready": false, "restartCount": 0,
            "state": { "waiting": { "reason": reason, "message": message } },
        }],
    }))
}

fn on_node(case: &str) -> Script {
    Script::OnNode(format!("node-{case}"))
}

fn programs() -> Vec<Case> {
    let oom = || killed(137, "OOMKilled", json!({}));
    vec![
        Case::new("exit-0", exit(0), Completed, "Completed")
            .says("without having reported a validation")
            .fatal(),
        Case::new("exit-1", exit(1), UserError, "ProgramFailed").says("exit code 1"),
        Case::new("exit-42", exit(42), UserError, "ProgramFailed")
            .says("exit code 42")
            .fatal_without_restarts(),
        Case::new("signal", exit(139), UserError, "ProgramFailed").says("signal 11"),
        Case::new("exit-78", exit(78), InvalidHyperparameters, "InvalidHyperparameters")
            .says("exit code 78")
            .fatal(),
        Case::new("exit-79", exit(79), Preempted, "Preempted"),
        Case::new("exit-80", exit(80), Infrastructure, "InfrastructureError")
            .spec(json!({ "maxRestarts": 0 })),
        Case::new("exit-81", exit(81), Infrastructure, "PeerFailed"),
        Case::new("oom", oom(), UserError, "OOMKilled").says("raise spec.resources.limits.memory"),
        Case::new("oom-fatal", oom(), UserError, "OOMKilled")
            .says("raise spec.resources.limits.memory")
            .fatal_without_restarts(),
    ]
}

fn surroundings() -> Vec<Case> {
    let evicted = json!({ "reason": "Evicted", "message": "the node was low on memory" });
    let never_ran = json!({ "phase": "Failed", "reason": "Evicted", "message": "low on disk" });
    let pull = "back-off pulling image";
    vec![
        Case::new("evicted", killed(137, "Error", evicted), Infrastructure, "Evicted")
            .says("low on memory"),
        Case::new("evicted-early", Script::Status(never_ran), Infrastructure, "Evicted")
            .says("low on disk"),
        Case::new(
            "preempted",
            killed(143, "Error", disrupted("PreemptionByScheduler")),
            Infrastructure,
            "PreemptionByScheduler",
        )
        .spec(json!({ "maxRestarts": 0 })),
        Case::new(
            "tainted",
            killed(137, "Error", disrupted("DeletionByTaintManager")),
            Infrastructure,
            "DeletionByTaintManager",
        ),
        Case::new("pull", waiting("ImagePullBackOff", pull), Infrastructure, "ImagePullBackOff")
            .says(pull),
        Case::new("image", waiting("InvalidImageName", "no name"), UserError, "InvalidImageName")
            .says("no name")
            .fatal_without_restarts(),
        Case::new(
            "config",
            waiting("CreateContainerConfigError", "secret \"s\" not found"),
            UserError,
            "CreateContainerConfigError",
        )
        .says("secret \"s\" not found"),
        Case::new("deleted", Script::Hang, Infrastructure, "PodDeleted")
            .hand(Hand::DeletePod { is_forced: false }),
        Case::new("deleted-now", Script::Hang, Infrastructure, "PodDeleted")
            .hand(Hand::DeletePod { is_forced: true }),
        Case::new("node-deleted", on_node("node-deleted"), Infrastructure, "NodeLost")
            .hand(Hand::DeleteNode)
            .says("was deleted"),
        Case::new("node-silent", on_node("node-silent"), Infrastructure, "NodeLost")
            .hand(Hand::SilenceNode)
            .says("does not answer"),
        Case::new("node-drained", on_node("node-drained"), Infrastructure, "NodeLost")
            .hand(Hand::DrainThenSilenceNode)
            .says("does not answer"),
    ]
}

fn refusals() -> Vec<Case> {
    let full = json!({ "conditions": [unschedulable()] });
    let overrides = |it: Value| json!({ "podOverrides": it });
    let slots = json!({ "resources": { "slotResource": "test.stoker/slot" } });
    let quota = Hand::Mend(&["delete", "resourcequota", "slots", "-n", NAMESPACE]);
    let policy =
        Hand::Mend(&["label", "namespace", NAMESPACE, "pod-security.kubernetes.io/enforce-"]);
    let two_pods = json!({ "resources": { "slotsPerTrial": 2 } });
    let service = Hand::Mend(&["delete", "service", "service-0", "-n", NAMESPACE]);
    vec![
        Case::new("full", Script::Status(full), NotStarted, "Unschedulable")
            .spec(two_pods.clone())
            .says("2 Insufficient slots"),
        Case::new("unseen", Script::Status(json!({})), NotStarted, "Unschedulable")
            .spec(two_pods.clone())
            .says("not looked at by a scheduler yet"),
        Case::new("quota", exit(1), NotStarted, "QuotaExceeded")
            .spec(slots)
            .hand(quota)
            .says("exceeded quota"),
        Case::new("policy", exit(1), NotStarted, "AdmissionRefused")
            .spec(overrides(json!({ "spec": { "hostNetwork": true } })))
            .hand(policy)
            .says("violates PodSecurity"),
        Case::new("odd-pod", exit(1), UserError, "PodInvalid")
            .spec(overrides(json!({ "spec": { "dnsPolicy": "Sometimes" } })))
            .says("spec.dnsPolicy")
            .fatal(),
        Case::new("pod", exit(1), NotStarted, "NameTaken").says("has another owner"),
        Case::new("service", exit(1), NotStarted, "NameTaken")
            .spec(two_pods)
            .hand(service)
            .says("has another owner"),
    ]
}

/// What is in the way of some cases before they begin.
fn obstacles(place: &Place) {
    let apply = |it: Value| place.plane.apply(&it.to_string()).unwrap();
    apply(json!({
        "apiVersion": "v1", "kind": "ResourceQuota",
        "metadata": { "name": "slots", "namespace": NAMESPACE },
        "spec": { "hard": { "requests.test.stoker/slot": "0" } },
    }));
    apply(json!({
        "apiVersion": "v1", "kind": "Service",
        "metadata": { "name": "service-0", "namespace": NAMESPACE },
        "spec": { "clusterIP": "None", "selector": { "a": "b" } },
    }));
    apply(json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": { "name": "pod-0-a0-r0", "namespace": NAMESPACE },
        "spec": {
            "containers": [{
                "name": "foreign", "image": "foreign:1", "securityContext": {
                    "allowPrivilegeEscalation": false, "capabilities": { "drop": ["ALL"] },
                },
            }],
            "securityContext": {
                "runAsNonRoot": true, "runAsUser": 1,
                "seccompProfile": { "type": "RuntimeDefault" },
            },
        },
    }));
    for case in ["node-deleted", "node-silent", "node-drained"] {
        let name = format!("node-{case}");
        apply(json!({ "apiVersion": "v1", "kind": "Node", "metadata": { "name": name } }));
        node_ready(place, &name, "True");
    }
}

fn node_ready(place: &Place, node: &str, ready: &str) {
    let condition = json!({
        "type": "Ready", "status": ready, "reason": "Test", "message": "",
        "lastHeartbeatTime": now(), "lastTransitionTime": now(),
    });
    let patch = json!({ "status": { "conditions": [condition] } }).to_string();
    let arguments = ["patch", "node", node, "--subresource=status", "-p", &patch];
    place.plane.kubectl(&arguments).unwrap();
}

/// Conditions of trials as they were seen over time: type, reason, message.
type Said = BTreeMap<String, BTreeSet<(String, String, String)>>;

/// Watches a namespace's trials: it sees each status that is ever written, however short-lived.
struct Listener {
    seen: Arc<Mutex<SeenTrials>>,
    task: tokio::task::JoinHandle<()>,
}

#[derive(Default)]
struct SeenTrials {
    said: Said,
    latest: BTreeMap<String, Trial>,
}

impl Drop for Listener {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Listener {
    fn start(place: &Place) -> Self {
        let seen = Arc::<Mutex<SeenTrials>>::default();
        let trials = kube::runtime::watcher(place.trials(), Default::default());
        let collected = seen.clone();
        let task = tokio::spawn(async move {
            let mut trials = std::pin::pin!(trials.default_backoff().applied_objects());
            while let Some(trial) = trials.next().await {
                // The watch begins again by itself after an error.
                let Ok(trial) = trial else { continue };
                let all = trial.status.iter().flat_map(|status| &status.conditions);
                let all = all.map(|it| (it.type_.clone(), it.reason.clone(), it.message.clone()));
                let mut seen = collected.lock().unwrap();
                seen.said.entry(trial.name_any()).or_default().extend(all);
                seen.latest.insert(trial.name_any(), trial);
            }
        });
        Self { seen, task }
    }

    fn said(&self) -> Said {
        self.seen.lock().unwrap().said.clone()
    }

    /// The trials as last seen, by name. What [`said`](Self::said) returns after this includes their conditions.
    fn trials(&self) -> Vec<Trial> {
        self.seen.lock().unwrap().latest.values().cloned().collect()
    }
}

/// Does what a case asks for once its trial is so far; true when done.
fn lend_a_hand(place: &Place, case: &Case, said: &Said) -> bool {
    let kubectl = |arguments: &[&str]| {
        let arguments = [arguments, &["-n", NAMESPACE, "--wait=false"]].concat();
        place.plane.kubectl(&arguments).unwrap();
    };
    let trial = format!("{}-0", case.name);
    let said = said.get(&trial);
    let was = |type_: &str, reason: &str| {
        said.is_some_and(|it| it.iter().any(|it| it.0 == type_ && it.1 == reason))
    };
    let is_running = was("Running", "AllPodsRunning");
    let (pod, node) = (format!("{trial}-a0-r0"), format!("node-{}", case.name));
    match case.hand {
        Hand::Mend(_) if !was("Scheduled", "BackOff") => return false,
        Hand::Mend(arguments) => {
            place.plane.kubectl(arguments).unwrap();
        }
        Hand::None => {}
        _ if !is_running => return false,
        Hand::DeletePod { is_forced: false } => kubectl(&["delete", "pod", &pod]),
        Hand::DeletePod { is_forced: true } => {
            kubectl(&["delete", "pod", &pod, "--grace-period=0", "--force"]);
        }
        Hand::DeleteNode => {
            place.plane.kubectl(&["delete", "node", &node]).unwrap();
        }
        Hand::SilenceNode => node_ready(place, &node, "Unknown"),
        Hand::DrainThenSilenceNode => {
            kubectl(&["delete", "pod", &pod, "--grace-period=600"]);
            node_ready(place, &node, "Unknown");
        }
    }
    true
}

fn check(case: &Case, trial: &Trial, said: &Said) {
    let name = case.name;
    let status = trial.status.clone().unwrap();
    let first = &status.attempts[0];
    let message = match case.end {
        Completed => status.message.clone().unwrap_or_default(),
        _ => first.message.clone().unwrap_or_default(),
    };
    assert_eq!(first.end, Some(case.end), "{name}: {first:#?}");
    assert_eq!(first.reason.as_deref(), Some(case.reason), "{name}: {first:#?}");
    assert!(message.contains(case.says), "{name}: {first:#?}");
    assert_eq!(status.restarts, case.restarts, "{name}: {status:#?}");
    // The hand may come too late for the second attempt, which is then refused as the first.
    let is_again = |attempt: &&Attempt| {
        let is_late = matches!(case.hand, Hand::Mend(_)) && attempt.number > 0;
        is_late && attempt.reason == first.reason
    };
    let num_again = status.attempts.iter().filter(is_again).count();
    assert_eq!(status.attempts.len() - num_again, case.attempts, "{name}: {status:#?}");
    assert_eq!(status.phase, case.phase, "{name}: {status:#?}");
    let told = |type_: &str| {
        let said = said.get(&trial.name_any()).into_iter().flatten();
        said.into_iter().any(|it| it.0 == type_ && it.2.contains(case.says))
    };
    if case.phase == Phase::Failed {
        assert!(told("Failed"), "{name}: {said:#?}");
    } else if case.end == NotStarted {
        assert!(told("Scheduled"), "{name}: {said:#?}");
    }
}

#[test]
fn each_failure_has_its_class_its_cost_and_its_message() {
    if !stoker_test_cluster::wanted() {
        return;
    }
    runtime().block_on(async {
        let place = Place::new(NAMESPACE).await;
        // All pods but those that ask for more are admitted under the strictest policy.
        let label = "pod-security.kubernetes.io/enforce=restricted";
        place.plane.kubectl(&["label", "namespace", NAMESPACE, label]).unwrap();
        obstacles(&place);
        let patience = ["--start-deadline-seconds", "4", "--pull-deadline-seconds", "4"];
        let more = ["--node-lost-seconds", "3", "--starting-gangs-max", "8"];
        let more = [&patience[..], &more].concat();
        let mut operator = place.operator_with("a", free_ports(), &more);
        operator.wait_ready(&place);
        let cases: Vec<Case> =
            programs().into_iter().chain(surroundings()).chain(refusals()).collect();
        let firsts: BTreeMap<&str, Script> =
            cases.iter().map(|it| (it.name, it.first.clone())).collect();
        let _kubelet = Kubelet::start(&place.client, NAMESPACE, move |pod| {
            let label = |name: &str| pod.labels().get(name).map_or("", String::as_str);
            match firsts.get(label(LABEL_EXPERIMENT)) {
                Some(script) if label(LABEL_ATTEMPT) == "0" => script.clone(),
                _ => Script::Train { unit_ms: 10 },
            }
        });
        let listener = Listener::start(&place);
        for case in &cases {
            let mut spec = grid(1, 2, 1);
            merge(&mut spec, &case.spec);
            place.apply(case.name, spec);
        }
        let said = run(&place, &cases, &listener).await;
        for case in &cases {
            let trials = place.trials_of(case.name).await;
            check(case, &trials[0], &said);
        }
    });
}

#[test]
fn a_trial_of_another_owner_is_reported_and_never_adopted() {
    if !stoker_test_cluster::wanted() {
        return;
    }
    runtime().block_on(async {
        let place = Place::new("foreign").await;
        let foreign = json!({
            "apiVersion": "stoker.dev/v1alpha1", "kind": "Trial",
            "metadata": { "name": "grid-1", "namespace": "foreign" },
            "spec": {
                "experiment": "grid", "index": 1, "requestId": "1", "seed": 1,
                "hyperparameters": {}, "unit": "batches", "units": 1,
            },
        });
        place.plane.apply(&foreign.to_string()).unwrap();
        let mut operator = place.operator("a", free_ports());
        operator.wait_ready(&place);
        let kubelet = Kubelet::start(&place.client, "foreign", |_| Script::Train { unit_ms: 10 });
        place.apply("grid", grid(3, 2, 1));
        let end = Instant::now() + Duration::from_secs(20);
        loop {
            let status = place.experiment("grid").await.status.unwrap_or_default();
            let running = stoker_api::condition::find(&status.conditions, "Running");
            if running.is_some_and(|it| it.reason == "NameTaken") {
                assert!(status.message.unwrap().contains("foreign/grid-1"));
                break;
            }
            assert!(Instant::now() < end, "{status:#?}\n{}", place.logs());
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        place.plane.kubectl(&["delete", "trial", "grid-1", "-n", "foreign"]).unwrap();
        place.wait_for("grid", &[Phase::Completed], 30).await;
        assert_eq!(kubelet.started().len(), 3);
    });
}

#[test]
fn two_gangs_that_each_need_all_slots_run_one_after_the_other() {
    if !stoker_test_cluster::wanted() {
        return;
    }
    runtime().block_on(async {
        let place = Place::new("slots").await;
        let mut operator =
            place.operator_with("a", free_ports(), &["--start-deadline-seconds", "3"]);
        operator.wait_ready(&place);
        let kubelet =
            Kubelet::with_room(&place.client, "slots", 4, |_| Script::Train { unit_ms: 200 });
        let listener = Listener::start(&place);
        place.apply("one", grid(1, 30, 4));
        place.apply("two", grid(1, 30, 4));
        let end = Instant::now() + Duration::from_secs(180);
        loop {
            let trials = listener.trials();
            let is_over = |it: &Trial| it.status.as_ref().is_some_and(|it| it.phase.is_terminal());
            if trials.len() == 2 && trials.iter().all(is_over) {
                break;
            }
            assert!(Instant::now() < end, "{:#?}\n{}", listener.said(), place.logs());
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        // Whoever came second waited, said why, gave back what it had, and lost nothing by it.
        let said = listener.said();
        let mut num_waited = 0;
        for name in ["one", "two"] {
            let status = place.trials_of(name).await[0].status.clone().unwrap();
            assert_eq!((status.phase, status.restarts), (Phase::Completed, 0), "{status:#?}");
            let (last, waits) = status.attempts.split_last().unwrap();
            assert_eq!(last.end, Some(Completed));
            assert!(waits.iter().all(|it| it.end == Some(NotStarted)), "{status:#?}");
            num_waited += usize::from(!waits.is_empty());
            let reasons = &said[&format!("{name}-0")];
            let why = |it: &(String, String, String)| it.2.contains("Insufficient slots");
            assert_eq!(reasons.iter().any(why), !waits.is_empty(), "{reasons:#?}");
        }
        assert_eq!(num_waited, 1);
        assert!(kubelet.started().len() >= 8);
    });
}

/// Listens, and lends hands, until all trials have ended.
async fn run(place: &Place, cases: &[Case], listener: &Listener) -> Said {
    let mut to_do: Vec<&Case> = cases.iter().collect();
    let end = Instant::now() + Duration::from_secs(120);
    loop {
        let trials = listener.trials();
        let said = listener.said();
        to_do.retain(|it| !lend_a_hand(place, it, &said));
        let is_over = |it: &Trial| it.status.as_ref().is_some_and(|it| it.phase.is_terminal());
        let open = trials.iter().filter(|it| !is_over(it)).map(|it| it.name_any());
        let open: Vec<String> = open.collect();
        if trials.len() == cases.len() && open.is_empty() && to_do.is_empty() {
            return said;
        }
        assert!(Instant::now() < end, "{open:?} did not end: {said:#?}\n{}", place.logs());
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
}
