//! RBAC rules of the chart: the operator uses every granted verb, or a table explains it. Each
//! test's [`TestNamespace`] also checks at its end that RBAC denied no request.

use std::collections::{BTreeMap, BTreeSet};

use kube::ResourceExt as _;
use serde_json::{Value, json};
use stoker_api::experiment::Phase;
use tokio::task::block_in_place;

use crate::flow::grid;
use crate::jobs::{apply_job, is_of_job, job, wait_for_job};
use crate::kubelet::{Kubelet, Script};
use crate::setup::{ACCOUNT, TestNamespace, operator_port, runtime};
use crate::standby::poll_until;
use crate::worker::Work;

/// Verbs that this test may not observe, with their purpose.
const UNOBSERVED_VERBS: [(&str, &str); 3] = [
    ("patch stoker.dev/experiments", "annotates experiments when a replica starts to lead"),
    (
        "get stoker.dev/experiments",
        "reads the version after a write that collided, and an object that cannot be parsed",
    ),
    (
        "get stoker.dev/inferencejobs",
        "same as for experiments; also reads a job that is not in the report server's cache yet",
    ),
];

/// Returns the verbs of a role, as `VERB GROUP/RESOURCE`.
fn verbs(ns: &TestNamespace, role: &[&str]) -> BTreeSet<String> {
    let role = ns.plane.get(role).unwrap();
    let list = |value: &Value| -> Vec<String> { serde_json::from_value(value.clone()).unwrap() };
    let mut verbs = BTreeSet::new();
    for rule in role["rules"].as_array().unwrap() {
        for group in list(&rule["apiGroups"]) {
            for resource in list(&rule["resources"]) {
                let name = |verb: String| format!("{verb} {group}/{resource}");
                verbs.extend(list(&rule["verbs"]).into_iter().map(name));
            }
        }
    }
    verbs
}

/// Creates a trial, a Service and a pod without an owner, under names that experiments need.
fn occupy_names(ns: &TestNamespace) {
    let spec = json!({
        "experiment": "trial", "index": 0, "requestId": "r", "seed": 1,
        "hyperparameters": {}, "unit": "batches", "units": 1,
    });
    let container = json!({ "name": "c", "image": "i" });
    for (version, kind, name, spec) in [
        ("stoker.dev/v1alpha1", "Trial", "trial-0", spec),
        ("v1", "Service", "service-0", json!({ "ports": [{ "port": 1 }] })),
        ("v1", "Pod", "pod-0-a0-r0", json!({ "containers": [container] })),
    ] {
        let object = json!({
            "apiVersion": version, "kind": kind, "spec": spec,
            "metadata": { "name": name, "namespace": ns.namespace },
        });
        block_in_place(|| ns.plane.apply(&object.to_string())).unwrap();
    }
}

/// Waits until an event on this object contains the reason.
async fn wait_for_event(ns: &TestNamespace, object: &str, reason: &str) {
    let selector = format!("--field-selector=involvedObject.name={object}");
    let arguments = ["events", "-n", ns.namespace.as_str(), &selector];
    poll_until(&format!("the event {reason} on {object}"), async || {
        let events = block_in_place(|| ns.plane.get(&arguments)).unwrap();
        let items = events["items"].as_array().unwrap();
        match items.iter().any(|event| event.to_string().contains(reason)) {
            true => Ok(()),
            false => Err(events.to_string()),
        }
    })
    .await;
}

#[test]
fn each_granted_verb_is_used_or_explained() {
    if !stoker_test_cluster::clusters_enabled() {
        return;
    }
    runtime().block_on(async {
        let ns = TestNamespace::new("audit").await;
        let mut operator = ns.operator("a", operator_port());
        operator.wait_ready(&ns);
        let _kubelet = Kubelet::start(&ns.client, "audit", |pod| {
            let name = pod.name_any();
            match name.rsplit_once("-0-").map_or("", |(experiment, _)| experiment) {
                _ if is_of_job(pod) => Script::Work(Work { shards: 2, shard_ms: 10 }),
                "pod" => Script::Hang,
                "node" => Script::OnNode("nowhere".to_owned()),
                "pause" => Script::Train { unit_ms: 100 },
                _ => Script::Train { unit_ms: 10 },
            }
        });
        ns.apply("grid", grid(2, 2, 2));
        apply_job(&ns, "job", job(2));
        ns.wait_for("grid", &[Phase::Completed]).await;
        wait_for_job(&ns, "job", &[Phase::Completed]).await;
        occupy_names(&ns);
        ns.apply("trial", grid(1, 2, 1));
        ns.apply("service", grid(1, 2, 2));
        ns.apply("pod", grid(1, 2, 1));
        ns.apply("node", grid(1, 2, 1));
        // The second event with the same reason on one object is written as a patch of the first.
        ns.apply("pause", grid(1, 1000, 1));
        for (state, phase) in [
            ("active", Phase::Running),
            ("paused", Phase::Paused),
            ("active", Phase::Running),
            ("paused", Phase::Paused),
        ] {
            ns.patch("pause", &json!({ "spec": { "state": state } })).unwrap();
            ns.wait_for("pause", &[phase]).await;
        }
        wait_for_event(&ns, "node-0", "NodeLost").await;
        wait_for_event(&ns, "trial", "NameTaken").await;
        wait_for_event(&ns, "service-0", "NameTaken").await;
        wait_for_event(&ns, "pod-0", "NameTaken").await;
        let own = "audit:stoker-operator";
        let mut granted = verbs(&ns, &["clusterrole", own]);
        granted.extend(verbs(&ns, &["role", "stoker-operator-lease", "-n", "audit"]));
        granted.extend(verbs(&ns, &["role", own, "-n", "audit"]));
        let user = format!("system:serviceaccount:audit:{ACCOUNT}");
        let mut used: BTreeMap<String, usize> = BTreeMap::new();
        for request in ns.plane.requests().unwrap() {
            if request.user == user {
                let verb = format!("{} {}/{}", request.verb, request.group, request.resource);
                *used.entry(verb).or_default() += 1;
            }
        }
        let explained: BTreeSet<String> = UNOBSERVED_VERBS.map(|(verb, _)| verb.to_owned()).into();
        assert!(explained.is_subset(&granted), "explained but not granted: {explained:#?}");
        let unused = granted.iter().filter(|verb| !used.contains_key(*verb));
        let unused: BTreeSet<String> = unused.cloned().collect();
        assert!(unused.is_subset(&explained), "unused: {unused:#?}; used: {used:#?}");
    });
}
