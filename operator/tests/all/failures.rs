//! Failures of pods, attempts and trials, from the pod's status to the trial's record: class, cost
//! and message of each, and that the trial continues.

mod cases;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use futures::StreamExt as _;
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt as _;
use kube::runtime::WatchStreamExt as _;
use serde_json::{Value, json};
use stoker_api::experiment::Phase;
use stoker_api::names::{LABEL_ATTEMPT, LABEL_EXPERIMENT};
use stoker_api::trial::{Attempt, AttemptEnd, Trial};
use tokio::sync::watch;

use crate::flow::grid;
use crate::kubelet::{Kubelet, Script, now};
use crate::setup::{TestNamespace, merge, operator_port, runtime};
use AttemptEnd::{Completed, NotStarted};
use cases::{Case, TestAction, infrastructure_failures, program_failures, refused_pods};

const NAMESPACE: &str = "failures";
/// Name of a node that sends heartbeats. Without a ready node, no pod is lost.
const READY: &str = "ready";
/// Interval of heartbeats. Without them, Kubernetes' controllers mark the node as not ready.
const HEARTBEAT: Duration = Duration::from_secs(2);

/// Creates obstacles that some cases need from the start.
fn create_obstacles(ns: &TestNamespace) {
    let apply = |object: Value| ns.plane.apply(&object.to_string()).unwrap();
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
    for case in ["node-deleted", "node-silent", "node-drained", READY] {
        let name = format!("node-{case}");
        apply(json!({ "apiVersion": "v1", "kind": "Node", "metadata": { "name": name } }));
        node_ready(ns, &name, "True");
    }
}

fn node_ready(ns: &TestNamespace, node: &str, ready: &str) {
    let condition = json!({
        "type": "Ready", "status": ready, "reason": "Test", "message": "",
        "lastHeartbeatTime": now(), "lastTransitionTime": now(),
    });
    let patch = json!({ "status": { "conditions": [condition] } }).to_string();
    let arguments = ["patch", "node", node, "--subresource=status", "-p", &patch];
    ns.plane.kubectl(&arguments).unwrap();
}

/// Conditions of trials as observed over time: type, reason, message.
type ObservedConditions = BTreeMap<String, BTreeSet<(String, String, String)>>;

/// Watches a namespace's trials, and observes each status that is written, however short-lived.
struct TrialWatcher {
    observed: Arc<Mutex<ObservedTrials>>,
    task: tokio::task::JoinHandle<()>,
}

#[derive(Default)]
struct ObservedTrials {
    conditions: ObservedConditions,
    latest: BTreeMap<String, Trial>,
}

impl Drop for TrialWatcher {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl TrialWatcher {
    fn start(ns: &TestNamespace) -> Self {
        let observed = Arc::<Mutex<ObservedTrials>>::default();
        let trials = kube::runtime::watcher(ns.trials(), Default::default());
        let collected = observed.clone();
        let task = tokio::spawn(async move {
            let mut trials = std::pin::pin!(trials.default_backoff().applied_objects());
            while let Some(trial) = trials.next().await {
                // The watch restarts by itself after an error.
                let Ok(trial) = trial else { continue };
                let all = trial.status.iter().flat_map(|status| &status.conditions);
                let all = all.map(|condition| {
                    (condition.type_.clone(), condition.reason.clone(), condition.message.clone())
                });
                let mut observed = collected.lock().unwrap();
                observed.conditions.entry(trial.name_any()).or_default().extend(all);
                observed.latest.insert(trial.name_any(), trial);
            }
        });
        Self { observed, task }
    }

    fn conditions(&self) -> ObservedConditions {
        self.observed.lock().unwrap().conditions.clone()
    }

    /// The trials as last observed, by name. A later call of [`conditions`](Self::conditions)
    /// includes their conditions.
    fn trials(&self) -> Vec<Trial> {
        self.observed.lock().unwrap().latest.values().cloned().collect()
    }
}

/// Performs the action of a case once its trial is ready for it. Returns whether the action is
/// done.
fn perform_action(ns: &TestNamespace, case: &Case, conditions: &ObservedConditions) -> bool {
    let kubectl = |arguments: &[&str]| {
        let arguments = [arguments, &["-n", NAMESPACE, "--wait=false"]].concat();
        ns.plane.kubectl(&arguments).unwrap();
    };
    let trial = format!("{}-0", case.name);
    let conditions = conditions.get(&trial);
    let was = |type_: &str, reason: &str| {
        conditions.is_some_and(|conditions| {
            conditions.iter().any(|(kind, why, _)| kind == type_ && why == reason)
        })
    };
    let is_running = was("Running", "AllPodsRunning");
    let (pod, node) = (format!("{trial}-a0-r0"), format!("node-{}", case.name));
    match case.action {
        TestAction::RemoveCause(_) if !was("Scheduled", "BackOff") => return false,
        TestAction::RemoveCause(arguments) => {
            ns.plane.kubectl(arguments).unwrap();
        }
        TestAction::None => {}
        _ if !is_running => return false,
        TestAction::DeletePod { is_forced: false } => kubectl(&["delete", "pod", &pod]),
        TestAction::DeletePod { is_forced: true } => {
            kubectl(&["delete", "pod", &pod, "--grace-period=0", "--force"]);
        }
        TestAction::DeleteNode => {
            ns.plane.kubectl(&["delete", "node", &node]).unwrap();
        }
        TestAction::NodeNotReady => node_ready(ns, &node, "Unknown"),
        TestAction::DrainThenNodeNotReady => {
            kubectl(&["delete", "pod", &pod, "--grace-period=600"]);
            node_ready(ns, &node, "Unknown");
        }
    }
    true
}

fn check(case: &Case, trial: &Trial, conditions: &ObservedConditions) {
    let name = case.name;
    let status = trial.status.clone().unwrap();
    let first = &status.attempts[0];
    let message = match case.end {
        Completed => status.message.clone().unwrap_or_default(),
        _ => first.message.clone().unwrap_or_default(),
    };
    assert_eq!(first.end, Some(case.end), "{name}: {first:#?}");
    assert_eq!(first.reason.as_deref(), Some(case.reason), "{name}: {first:#?}");
    assert!(message.contains(case.message), "{name}: {first:#?}");
    assert_eq!(status.restarts, case.restarts, "{name}: {status:#?}");
    // The action may come too late for the second attempt, which then fails like the first.
    let is_again = |attempt: &&Attempt| {
        let is_late = matches!(case.action, TestAction::RemoveCause(_)) && attempt.number > 0;
        is_late && attempt.reason == first.reason
    };
    let num_again = status.attempts.iter().filter(is_again).count();
    assert_eq!(status.attempts.len() - num_again, case.attempts, "{name}: {status:#?}");
    assert_eq!(status.phase, case.phase, "{name}: {status:#?}");
    let has_condition = |type_: &str| {
        let mut conditions = conditions.get(&trial.name_any()).into_iter().flatten();
        conditions.any(|(kind, _, message)| kind == type_ && message.contains(case.message))
    };
    if case.phase == Phase::Failed {
        assert!(has_condition("Failed"), "{name}: {conditions:#?}");
    } else if case.end == NotStarted {
        assert!(has_condition("Scheduled"), "{name}: {conditions:#?}");
    }
}

#[test]
fn failures_are_classified_and_reported() {
    if !stoker_test_cluster::clusters_enabled() {
        return;
    }
    runtime().block_on(async {
        let ns = TestNamespace::new(NAMESPACE).await;
        // The strictest policy admits all pods except those that request more.
        let label = "pod-security.kubernetes.io/enforce=restricted";
        ns.plane.kubectl(&["label", "namespace", NAMESPACE, label]).unwrap();
        create_obstacles(&ns);
        let deadlines = ["--start-deadline-seconds", "15", "--pull-deadline-seconds", "15"];
        let more = ["--node-lost-seconds", "3", "--starting-gangs-max", "8"];
        let more = [&deadlines[..], &more].concat();
        let mut operator = ns.operator_with("a", operator_port(), &more);
        operator.wait_ready(&ns);
        let cases: Vec<Case> = program_failures()
            .into_iter()
            .chain(infrastructure_failures())
            .chain(refused_pods())
            .collect();
        let firsts: BTreeMap<&str, Script> =
            cases.iter().map(|case| (case.name, case.first.clone())).collect();
        let _kubelet = Kubelet::start(&ns.client, NAMESPACE, move |pod| {
            let label = |name: &str| pod.labels().get(name).map_or("", String::as_str);
            match firsts.get(label(LABEL_EXPERIMENT)) {
                Some(script) if label(LABEL_ATTEMPT) == "0" => script.clone(),
                _ => Script::Train { unit_ms: 10 },
            }
        });
        let watcher = TrialWatcher::start(&ns);
        for case in &cases {
            let mut spec = grid(1, 2, 1);
            merge(&mut spec, &case.spec);
            ns.apply(case.name, spec);
        }
        let conditions = run(&ns, &cases, &watcher).await;
        for case in &cases {
            let trials = ns.trials_of(case.name).await;
            check(case, &trials[0], &conditions);
        }
    });
}

#[test]
fn foreign_trial_is_reported_and_never_adopted() {
    if !stoker_test_cluster::clusters_enabled() {
        return;
    }
    runtime().block_on(async {
        let ns = TestNamespace::new("foreign").await;
        let foreign = json!({
            "apiVersion": "stoker.dev/v1alpha1", "kind": "Trial",
            "metadata": { "name": "grid-1", "namespace": "foreign" },
            "spec": {
                "experiment": "grid", "index": 1, "requestId": "1", "seed": 1,
                "hyperparameters": {}, "unit": "batches", "units": 1,
            },
        });
        ns.plane.apply(&foreign.to_string()).unwrap();
        let mut operator = ns.operator("a", operator_port());
        operator.wait_ready(&ns);
        let kubelet = Kubelet::start(&ns.client, "foreign", |_| Script::Train { unit_ms: 10 });
        ns.apply("grid", grid(3, 2, 1));
        let end = Instant::now() + stoker_test_cluster::PATIENCE;
        loop {
            let status = ns.experiment("grid").await.status.unwrap_or_default();
            let running = stoker_api::condition::find(&status.conditions, "Running");
            if running.is_some_and(|condition| condition.reason == "NameTaken") {
                assert!(status.message.unwrap().contains("foreign/grid-1"));
                break;
            }
            assert!(Instant::now() < end, "{status:#?}\n{}", ns.logs());
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        ns.plane.kubectl(&["delete", "trial", "grid-1", "-n", "foreign"]).unwrap();
        ns.wait_for("grid", &[Phase::Completed]).await;
        assert_eq!(kubelet.started().len(), 3);
    });
}

#[test]
fn gangs_that_need_all_slots_take_turns() {
    if !stoker_test_cluster::clusters_enabled() {
        return;
    }
    runtime().block_on(async {
        let ns = TestNamespace::new("slots").await;
        // A gang that has its slots starts within the deadline, also on a busy machine.
        let mut operator =
            ns.operator_with("a", operator_port(), &["--start-deadline-seconds", "30"]);
        operator.wait_ready(&ns);
        // The first gang keeps its slots until the second one has waited for them.
        let (open, gate) = watch::channel(false);
        let script = move |_: &Pod| Script::TrainAfter { gate: gate.clone(), unit_ms: 20 };
        let kubelet = Kubelet::with_capacity(&ns.client, "slots", 4, script);
        let watcher = TrialWatcher::start(&ns);
        ns.apply("one", grid(1, 5, 4));
        ns.apply("two", grid(1, 5, 4));
        let end = Instant::now() + stoker_test_cluster::PATIENCE;
        loop {
            let trials = watcher.trials();
            let is_over = |trial: &Trial| {
                trial.status.as_ref().is_some_and(|status| status.phase.is_terminal())
            };
            if trials.len() == 2 && trials.iter().all(is_over) {
                break;
            }
            let statuses = trials.iter().flat_map(|trial| &trial.status);
            let mut attempts = statuses.flat_map(|status| &status.attempts);
            if attempts.any(|attempt| attempt.end == Some(NotStarted)) {
                open.send_replace(true);
            }
            assert!(Instant::now() < end, "{:#?}\n{}", watcher.conditions(), ns.logs());
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        // The second gang waited, showed the reason, released its pods, and used up no restarts.
        let conditions = watcher.conditions();
        let mut num_waited = 0;
        for name in ["one", "two"] {
            let status = ns.trials_of(name).await[0].status.clone().unwrap();
            assert_eq!((status.phase, status.restarts), (Phase::Completed, 0), "{status:#?}");
            let (last, waits) = status.attempts.split_last().unwrap();
            assert_eq!(last.end, Some(Completed));
            assert!(waits.iter().all(|attempt| attempt.end == Some(NotStarted)), "{status:#?}");
            num_waited += usize::from(!waits.is_empty());
            let reasons = &conditions[&format!("{name}-0")];
            let why =
                |(_, _, message): &(String, String, String)| message.contains("Insufficient slots");
            assert_eq!(reasons.iter().any(why), !waits.is_empty(), "{reasons:#?}");
        }
        assert_eq!(num_waited, 1);
        assert!(kubelet.started().len() >= 8);
    });
}

/// Performs the actions of all cases, and waits until all trials have ended.
async fn run(ns: &TestNamespace, cases: &[Case], watcher: &TrialWatcher) -> ObservedConditions {
    let mut to_do: Vec<&Case> = cases.iter().collect();
    let end = Instant::now() + stoker_test_cluster::PATIENCE;
    let mut last_heartbeat = Instant::now();
    loop {
        if last_heartbeat.elapsed() >= HEARTBEAT {
            node_ready(ns, &format!("node-{READY}"), "True");
            last_heartbeat = Instant::now();
        }
        let trials = watcher.trials();
        let conditions = watcher.conditions();
        to_do.retain(|case| !perform_action(ns, case, &conditions));
        let is_over =
            |trial: &Trial| trial.status.as_ref().is_some_and(|status| status.phase.is_terminal());
        let open = trials.iter().filter(|trial| !is_over(trial)).map(|trial| trial.name_any());
        let open: Vec<String> = open.collect();
        if trials.len() == cases.len() && open.is_empty() && to_do.is_empty() {
            return conditions;
        }
        assert!(Instant::now() < end, "{open:?} did not end: {conditions:#?}\n{}", ns.logs());
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
}
