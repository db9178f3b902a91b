//! Admission of trials: which start, which wait, and what users see of waiting trials.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use k8s_openapi::api::core::v1::Pod;
use kube::{Api, ResourceExt as _};
use serde_json::{Value, json};
use stoker_api::experiment::Phase;
use stoker_api::names::{LABEL_EXPERIMENT, LABEL_TRIAL};
use stoker_api::time::Timestamp;
use stoker_api::trial::TrialStatus;

use crate::bench::metric;
use crate::flow::grid;
use crate::kubelet::{Kubelet, Script, now, unschedulable};
use crate::setup::{TestNamespace, merge, operator_port, runtime};

/// Start deadline of gangs, in seconds.
const DEADLINE: u64 = 3;

/// Waits until a trial's status satisfies `is_wanted`, and returns it.
async fn wait_for_trial(
    ns: &TestNamespace,
    name: &str,
    what: &str,
    is_wanted: impl Fn(&TrialStatus) -> bool,
) -> TrialStatus {
    let end = Instant::now() + stoker_test_cluster::PATIENCE;
    loop {
        let trial = ns.trials().get_opt(name).await.unwrap();
        let status = trial.and_then(|trial| trial.status).unwrap_or_default();
        if is_wanted(&status) {
            return status;
        }
        assert!(Instant::now() < end, "{name} is not {what}: {status:#?}\n{}", ns.logs());
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

fn is_pending(status: &TrialStatus, reason: &str) -> bool {
    status.phase == Phase::Pending && status.reason.as_deref() == Some(reason)
}

/// Waits until an experiment is pending for this reason.
async fn wait_for_pending(ns: &TestNamespace, name: &str, reason: &str) {
    let end = Instant::now() + stoker_test_cluster::PATIENCE;
    loop {
        let status = ns.experiment(name).await.status.unwrap_or_default();
        if status.phase == Phase::Pending && status.reason.as_deref() == Some(reason) {
            assert!(status.message.is_some(), "{status:#?}");
            return;
        }
        assert!(Instant::now() < end, "{name} is not pending: {status:#?}\n{}", ns.logs());
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// Returns the UIDs of the pods of these experiments' trials, by pod name.
async fn pods_of(ns: &TestNamespace, experiments: &[&str]) -> BTreeMap<String, Option<String>> {
    let pods: Api<Pod> = Api::namespaced(ns.client.clone(), &ns.namespace);
    let all = pods.list(&Default::default()).await.unwrap();
    let of = |pod: &Pod| pod.labels().get(LABEL_EXPERIMENT).cloned().unwrap_or_default();
    let trials = all.into_iter().filter(|pod| pod.labels().contains_key(LABEL_TRIAL));
    let pods = trials.filter(|pod| experiments.contains(&of(pod).as_str()));
    pods.map(|pod| (pod.name_any(), pod.uid())).collect()
}

fn gated(slots: u32) -> Value {
    let mut spec = grid(1, 2, slots);
    let gates = json!([{ "name": "queue.test/hold" }]);
    merge(&mut spec, &json!({ "podOverrides": { "spec": { "schedulingGates": gates } } }));
    spec
}

/// A queueing system holds pods for longer than the start deadline and then releases them.
#[test]
fn gated_pods_are_never_recreated() {
    if !stoker_test_cluster::clusters_enabled() {
        return;
    }
    runtime().block_on(async {
        let ns = TestNamespace::new("gates").await;
        let deadline = DEADLINE.to_string();
        let more = ["--start-deadline-seconds", &deadline, "--starting-pods-max", "1"];
        let port = operator_port();
        let mut operator = ns.operator_with("a", port, &more);
        operator.wait_ready(&ns);
        let kubelet = Kubelet::start(&ns.client, "gates", |_| Script::Train { unit_ms: 10 });
        ns.apply("gang", gated(2));
        ns.apply("one", gated(1));
        let mut since = Timestamp(0);
        for trial in ["gang-0", "one-0"] {
            let is_gated = |status: &TrialStatus| is_pending(status, "SchedulingGated");
            let status = wait_for_trial(&ns, trial, "gated", is_gated).await;
            since = since.max(status.attempts[0].started_at.unwrap());
        }
        for name in ["gang", "one"] {
            wait_for_pending(&ns, name, "SchedulingGated").await;
        }
        let columns = ns.plane.kubectl(&["get", "trials", "-n", "gates"]).unwrap();
        assert!(columns.contains("SchedulingGated"), "{columns}");
        let before = pods_of(&ns, &["gang", "one"]).await;
        assert_eq!(before.len(), 3);
        // Gated pods do not block others.
        ns.apply("free-gang", grid(1, 2, 2));
        ns.apply("free-one", grid(1, 2, 1));
        ns.wait_for("free-gang", &[Phase::Completed]).await;
        ns.wait_for("free-one", &[Phase::Completed]).await;
        while stoker_operator::context::now() < since.plus(4 * DEADLINE) {
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        assert_eq!(pods_of(&ns, &["gang", "one"]).await, before);
        // From here on no deadline applies, however long the scheduler takes.
        operator.kill();
        let more = ["--start-deadline-seconds", "3600", "--starting-pods-max", "1"];
        let mut operator = ns.operator_with("b", port, &more);
        operator.wait_ready(&ns);
        let patch = r#"{"spec":{"schedulingGates":null}}"#;
        for pod in before.keys() {
            let patch = ["patch", "pod", pod, "-n", "gates", "--type=merge", "-p", patch];
            ns.plane.kubectl(&patch).unwrap();
        }
        for name in ["gang", "one"] {
            ns.wait_for(name, &[Phase::Completed]).await;
            let status = ns.trials_of(name).await[0].status.clone().unwrap();
            assert_eq!(status.attempts.len(), 1, "{status:#?}");
        }
        assert_eq!(pods_of(&ns, &["gang", "one"]).await, before);
        assert_eq!(kubelet.started().iter().filter(|pod| before.contains_key(*pod)).count(), 3);
    });
}

/// The deadline is too long to help: others start only because unschedulable gangs give up the
/// slot.
#[test]
fn unschedulable_gangs_let_others_start() {
    if !stoker_test_cluster::clusters_enabled() {
        return;
    }
    runtime().block_on(async {
        let ns = TestNamespace::new("passed").await;
        let more = ["--start-deadline-seconds", "3600", "--starting-pods-max", "1"];
        let mut operator = ns.operator_with("a", operator_port(), &more);
        operator.wait_ready(&ns);
        let _kubelet = Kubelet::start(&ns.client, "passed", |pod| {
            match pod.labels()[LABEL_EXPERIMENT].starts_with("big") {
                true => Script::Status(json!({ "conditions": [unschedulable()] })),
                false => Script::Train { unit_ms: 10 },
            }
        });
        for (slots, big, small) in [(2, "big-gang", "small-gang"), (1, "big-one", "small-one")] {
            ns.apply(big, grid(1, 2, slots));
            wait_for_pending(&ns, big, "Unschedulable").await;
            ns.apply(small, grid(2, 2, slots));
            ns.wait_for(small, &[Phase::Completed]).await;
            let status = ns.trials_of(big).await[0].status.clone().unwrap();
            assert!(is_pending(&status, "Unschedulable"), "{status:#?}");
            assert_eq!(status.attempts.len(), 1, "{status:#?}");
        }
    });
}

#[test]
fn waiting_trials_are_not_polled() {
    if !stoker_test_cluster::clusters_enabled() {
        return;
    }
    runtime().block_on(async {
        let ns = TestNamespace::new("unpolled").await;
        let more = ["--start-deadline-seconds", "3600", "--starting-pods-max", "1"];
        let mut operator = ns.operator_with("a", operator_port(), &more);
        operator.wait_ready(&ns);
        let mut spec = grid(20, 2, 1);
        spec["searcher"]["grid"]["maxConcurrentTrials"] = json!(20);
        ns.apply("many", spec);
        let waits = |status: &TrialStatus| is_pending(status, "WaitingForAdmission");
        wait_for_trial(&ns, "many-19", "waiting", waits).await;
        let end = Instant::now() + stoker_test_cluster::PATIENCE;
        loop {
            let before = metric(&operator, "stoker_reconcile_seconds_count");
            // A poll every second would be counted here.
            tokio::time::sleep(Duration::from_secs(4)).await;
            let num = metric(&operator, "stoker_reconcile_seconds_count") - before;
            if num == 0.0 {
                return;
            }
            assert!(Instant::now() < end, "{num} reconciles in 4 s\n{}", ns.logs());
        }
    });
}

/// Waiting trials are not polled, so without a wake-up they would wait for minutes.
#[test]
fn every_end_of_a_start_wakes_another_trial() {
    if !stoker_test_cluster::clusters_enabled() {
        return;
    }
    runtime().block_on(async {
        let ns = TestNamespace::new("wakes").await;
        let more = ["--start-deadline-seconds", "3600", "--starting-pods-max", "1"];
        let mut operator = ns.operator_with("a", operator_port(), &more);
        operator.wait_ready(&ns);
        // Some pods, which no scheduler considers, hold the only slot.
        let _kubelet = Kubelet::start(&ns.client, "wakes", |pod| {
            match pod.labels()[LABEL_EXPERIMENT].starts_with("held") {
                true => Script::Status(json!({})),
                false => Script::Train { unit_ms: 10 },
            }
        });
        let ways = ["deleted", "paused", "killed", "gone", "scheduled"];
        for way in ways {
            let (held, next) = (format!("held-{way}"), format!("next-{way}"));
            let trial = format!("{held}-0");
            ns.apply(&held, grid(1, 2, 1));
            let has_pods = |status: &TrialStatus| {
                is_pending(status, "Unschedulable") && status.attempts[0].has_pods
            };
            wait_for_trial(&ns, &trial, "starting", has_pods).await;
            ns.apply(&next, grid(2, 2, 1));
            let waits = |status: &TrialStatus| is_pending(status, "WaitingForAdmission");
            wait_for_trial(&ns, &format!("{next}-0"), "waiting", waits).await;
            let kubectl = |arguments: &[&str]| {
                let arguments = [arguments, &["-n", "wakes", "--wait=false"]].concat();
                ns.plane.kubectl(&arguments).unwrap();
            };
            let state = |state: &str| {
                ns.patch(&held, &json!({ "spec": { "state": state } })).unwrap();
            };
            match way {
                "deleted" => kubectl(&["delete", "trial", &trial]),
                "paused" => state("paused"),
                "killed" => state("killed"),
                "gone" => kubectl(&["delete", "experiment", &held]),
                _ => {
                    let pods: Api<Pod> = Api::namespaced(ns.client.clone(), "wakes");
                    let condition = json!({
                        "type": "PodScheduled", "status": "True", "lastTransitionTime": now(),
                    });
                    let status = json!({ "phase": "Running", "conditions": [condition] });
                    let patch = kube::api::Patch::Merge(json!({ "status": status }));
                    let name = format!("{trial}-a0-r0");
                    pods.patch_status(&name, &Default::default(), &patch).await.unwrap();
                }
            }
            ns.wait_for(&next, &[Phase::Completed]).await;
        }
    });
}

/// A refused pod may be allowed later. Until then nothing runs, and users see the reason.
#[test]
fn refused_trials_are_pending_with_a_reason() {
    if !stoker_test_cluster::clusters_enabled() {
        return;
    }
    runtime().block_on(async {
        let ns = TestNamespace::new("refused").await;
        let quota = json!({
            "apiVersion": "v1", "kind": "ResourceQuota",
            "metadata": { "name": "slots", "namespace": "refused" },
            "spec": { "hard": { "requests.test.stoker/slot": "0" } },
        });
        ns.plane.apply(&quota.to_string()).unwrap();
        let mut operator = ns.operator("a", operator_port());
        operator.wait_ready(&ns);
        let _kubelet = Kubelet::start(&ns.client, "refused", |_| Script::Hang);
        let mut spec = grid(1, 2, 1);
        merge(&mut spec, &json!({ "resources": { "slotResource": "test.stoker/slot" } }));
        ns.apply("quota", spec);
        let is_refused = |status: &TrialStatus| {
            let message = status.message.as_deref().unwrap_or_default();
            is_pending(status, "BackOff") && message.contains("exceeded quota")
        };
        wait_for_trial(&ns, "quota-0", "refused", is_refused).await;
        wait_for_pending(&ns, "quota", "QuotaExceeded").await;
        let columns = ns.plane.kubectl(&["get", "experiments,trials", "-n", "refused"]).unwrap();
        assert!(columns.contains("QuotaExceeded") && columns.contains("BackOff"), "{columns}");
        ns.plane.kubectl(&["delete", "resourcequota", "slots", "-n", "refused"]).unwrap();
        let runs = ns.wait_for("quota", &[Phase::Running]).await.status.unwrap();
        assert_eq!((runs.trials_running, runs.reason, runs.message), (1, None, None));
        let status = ns.trials_of("quota").await[0].status.clone().unwrap();
        assert_eq!((status.phase, status.reason, status.message), (Phase::Running, None, None));
    });
}
