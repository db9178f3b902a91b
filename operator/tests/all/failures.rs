//! Failures of pods, attempts and trials, from the pod's status to the trial's record: class, cost
//! and message of each, and that the trial continues.

mod cases;

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
use crate::kubelet::{Kubelet, Script, now};
use crate::setup::{Place, free_ports, merge, runtime};
use AttemptEnd::{Completed, NotStarted};
use cases::{Case, Hand, programs, refusals, surroundings};

const NAMESPACE: &str = "failures";

/// Creates obstacles that some cases need from the start.
fn obstacles(place: &Place) {
    let apply = |object: Value| place.plane.apply(&object.to_string()).unwrap();
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

/// Conditions of trials as observed over time: type, reason, message.
type Said = BTreeMap<String, BTreeSet<(String, String, String)>>;

/// Watches a namespace's trials, and observes each status that is written, however short-lived.
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
                // The watch restarts by itself after an error.
                let Ok(trial) = trial else { continue };
                let all = trial.status.iter().flat_map(|status| &status.conditions);
                let all = all.map(|condition| {
                    (condition.type_.clone(), condition.reason.clone(), condition.message.clone())
                });
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

    /// The trials as last observed, by name. A later call of [`said`](Self::said) includes their
    /// conditions.
    fn trials(&self) -> Vec<Trial> {
        self.seen.lock().unwrap().latest.values().cloned().collect()
    }
}

/// Performs the action of a case once its trial is ready for it. Returns whether the action is
/// done.
fn perform_action(place: &Place, case: &Case, said: &Said) -> bool {
    let kubectl = |arguments: &[&str]| {
        let arguments = [arguments, &["-n", NAMESPACE, "--wait=false"]].concat();
        place.plane.kubectl(&arguments).unwrap();
    };
    let trial = format!("{}-0", case.name);
    let conditions = said.get(&trial);
    let was = |type_: &str, reason: &str| {
        conditions.is_some_and(|conditions| {
            conditions.iter().any(|(kind, why, _)| kind == type_ && why == reason)
        })
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
    // The action may come too late for the second attempt, which then fails like the first.
    let is_again = |attempt: &&Attempt| {
        let is_late = matches!(case.hand, Hand::Mend(_)) && attempt.number > 0;
        is_late && attempt.reason == first.reason
    };
    let num_again = status.attempts.iter().filter(is_again).count();
    assert_eq!(status.attempts.len() - num_again, case.attempts, "{name}: {status:#?}");
    assert_eq!(status.phase, case.phase, "{name}: {status:#?}");
    let has_condition = |type_: &str| {
        let mut conditions = said.get(&trial.name_any()).into_iter().flatten();
        conditions.any(|(kind, _, message)| kind == type_ && message.contains(case.says))
    };
    if case.phase == Phase::Failed {
        assert!(has_condition("Failed"), "{name}: {said:#?}");
    } else if case.end == NotStarted {
        assert!(has_condition("Scheduled"), "{name}: {said:#?}");
    }
}

#[test]
fn failures_are_classified_and_reported() {
    if !stoker_test_cluster::clusters_enabled() {
        return;
    }
    runtime().block_on(async {
        let place = Place::new(NAMESPACE).await;
        // The strictest policy admits all pods except those that request more.
        let label = "pod-security.kubernetes.io/enforce=restricted";
        place.plane.kubectl(&["label", "namespace", NAMESPACE, label]).unwrap();
        obstacles(&place);
        let deadlines = ["--start-deadline-seconds", "4", "--pull-deadline-seconds", "4"];
        let more = ["--node-lost-seconds", "3", "--starting-gangs-max", "8"];
        let more = [&deadlines[..], &more].concat();
        let mut operator = place.operator_with("a", free_ports(), &more);
        operator.wait_ready(&place);
        let cases: Vec<Case> =
            programs().into_iter().chain(surroundings()).chain(refusals()).collect();
        let firsts: BTreeMap<&str, Script> =
            cases.iter().map(|case| (case.name, case.first.clone())).collect();
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
fn foreign_trial_is_reported_and_never_adopted() {
    if !stoker_test_cluster::clusters_enabled() {
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
            if running.is_some_and(|condition| condition.reason == "NameTaken") {
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
fn gangs_that_need_all_slots_take_turns() {
    if !stoker_test_cluster::clusters_enabled() {
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
            let is_over = |trial: &Trial| {
                trial.status.as_ref().is_some_and(|status| status.phase.is_terminal())
            };
            if trials.len() == 2 && trials.iter().all(is_over) {
                break;
            }
            assert!(Instant::now() < end, "{:#?}\n{}", listener.said(), place.logs());
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        // The second gang waited, showed the reason, released its pods, and used up no restarts.
        let said = listener.said();
        let mut num_waited = 0;
        for name in ["one", "two"] {
            let status = place.trials_of(name).await[0].status.clone().unwrap();
            assert_eq!((status.phase, status.restarts), (Phase::Completed, 0), "{status:#?}");
            let (last, waits) = status.attempts.split_last().unwrap();
            assert_eq!(last.end, Some(Completed));
            assert!(waits.iter().all(|attempt| attempt.end == Some(NotStarted)), "{status:#?}");
            num_waited += usize::from(!waits.is_empty());
            let reasons = &said[&format!("{name}-0")];
            let why =
                |(_, _, message): &(String, String, String)| message.contains("Insufficient slots");
            assert_eq!(reasons.iter().any(why), !waits.is_empty(), "{reasons:#?}");
        }
        assert_eq!(num_waited, 1);
        assert!(kubelet.started().len() >= 8);
    });
}

/// Performs the actions of all cases, and waits until all trials have ended.
async fn run(place: &Place, cases: &[Case], listener: &Listener) -> Said {
    let mut to_do: Vec<&Case> = cases.iter().collect();
    let end = Instant::now() + Duration::from_secs(120);
    loop {
        let trials = listener.trials();
        let said = listener.said();
        to_do.retain(|case| !perform_action(place, case, &said));
        let is_over =
            |trial: &Trial| trial.status.as_ref().is_some_and(|status| status.phase.is_terminal());
        let open = trials.iter().filter(|trial| !is_over(trial)).map(|trial| trial.name_any());
        let open: Vec<String> = open.collect();
        if trials.len() == cases.len() && open.is_empty() && to_do.is_empty() {
            return said;
        }
        assert!(Instant::now() < end, "{open:?} did not end: {said:#?}\n{}", place.logs());
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
}
