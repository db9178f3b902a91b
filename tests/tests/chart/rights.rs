//! What the operator may do on the cluster, and what its pods may do on a node.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Value, json};

use super::{EVERYTHING, helm, objects, of_kind, rendered, role};

/// `GROUP/RESOURCE` to verbs, of a role's rules.
fn granted(role: &Value) -> BTreeMap<String, BTreeSet<String>> {
    let list = |it: &Value| -> Vec<String> { serde_json::from_value(it.clone()).unwrap() };
    let mut granted: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for rule in role["rules"].as_array().unwrap() {
        for group in list(&rule["apiGroups"]) {
            for resource in list(&rule["resources"]) {
                granted
                    .entry(format!("{group}/{resource}"))
                    .or_default()
                    .extend(list(&rule["verbs"]));
            }
        }
    }
    granted
}

/// What [`granted`] should be, from `GROUP/RESOURCE: VERBS`.
fn rights(lines: &[&str]) -> BTreeMap<String, BTreeSet<String>> {
    let parse = |line: &&str| {
        let (resource, verbs) = line.split_once(": ").unwrap();
        (resource.to_owned(), verbs.split(' ').map(str::to_owned).collect())
    };
    lines.iter().map(parse).collect()
}

/// Rights over what has no namespace.
const CLUSTER: [&str; 2] = ["authentication.k8s.io/tokenreviews: create", "/nodes: get list watch"];

/// Rights wherever experiments are run.
const NAMESPACED: [&str; 9] = [
    "stoker.dev/experiments: get list watch patch",
    "stoker.dev/experiments/status: patch update",
    "stoker.dev/trials: get list watch create patch update",
    "stoker.dev/trials/status: patch update",
    "stoker.dev/inferencejobs: get list watch",
    "stoker.dev/inferencejobs/status: patch update",
    "/pods: get list watch create delete",
    "/services: get create",
    "events.k8s.io/events: create patch",
];

#[test]
fn the_operator_may_do_this_and_nothing_else() {
    if helm().is_none() {
        return;
    }
    let all = objects("");
    let lease = rights(&["coordination.k8s.io/leases: create get update"]);
    assert_eq!(
        granted(role(&all, "ClusterRole", "123:stoker-operator")),
        rights(&[&CLUSTER[..], &NAMESPACED[..]].concat())
    );
    assert_eq!(granted(role(&all, "Role", "stoker-operator-lease")), lease);

    let some = objects(EVERYTHING);
    assert_eq!(granted(role(&some, "ClusterRole", "123:stoker-operator")), rights(&CLUSTER));
    assert_eq!(granted(role(&some, "Role", "123:stoker-operator")), rights(&NAMESPACED));
    assert_eq!(granted(role(&some, "Role", "stoker-operator-lease")), lease);
}

#[test]
fn nobody_is_given_secrets_or_a_wildcard() {
    for object in objects("").iter().chain(&objects(EVERYTHING)) {
        if object["rules"].is_null() {
            continue;
        }
        for (resource, verbs) in granted(object) {
            let is_bad = |it: &str| it.contains("secrets") || it.contains('*');
            assert!(!is_bad(&resource) && !verbs.iter().any(|it| is_bad(it)), "{object:#}");
        }
    }
}

#[test]
fn every_rule_says_why() {
    for values in ["", EVERYTHING] {
        let Some(text) = rendered(values) else { return };
        let lines: Vec<_> = text.lines().collect();
        let rules = (0..lines.len()).filter(|at| lines[*at].starts_with("- apiGroups:"));
        for at in rules.clone() {
            let before = lines[..at].iter().rev().take_while(|it| it.starts_with("# ")).last();
            let says = before.is_some_and(|it| it.starts_with("# Why: "));
            assert!(says, "no reason before\n{}", lines[at..(at + 3).min(lines.len())].join("\n"));
        }
        assert!(rules.count() > 10);
    }
}

/// What pod security `restricted` asks of a pod, and what it could do besides.
fn assert_restricted(template: &Value) {
    let spec = &template["spec"];
    assert_eq!(spec["securityContext"]["runAsUser"], 65532);
    assert_eq!(spec["securityContext"]["seccompProfile"]["type"], "RuntimeDefault");
    for field in ["hostNetwork", "hostPID", "hostIPC", "shareProcessNamespace"] {
        assert!(spec[field].is_null(), "{field}");
    }
    for volume in spec["volumes"].as_array().unwrap() {
        assert!(volume["hostPath"].is_null(), "{volume}");
    }
    let lists = ["initContainers", "containers", "ephemeralContainers"];
    let containers = lists.iter().filter_map(|it| spec[*it].as_array()).flatten();
    for container in containers {
        let expected = json!({
            "allowPrivilegeEscalation": false,
            "capabilities": { "drop": ["ALL"] },
            "readOnlyRootFilesystem": true,
            "runAsNonRoot": true,
            "seccompProfile": { "type": "RuntimeDefault" },
        });
        assert_eq!(container["securityContext"], expected, "{}", container["name"]);
    }
}

#[test]
fn every_container_is_restricted() {
    for values in ["", EVERYTHING] {
        let objects = objects(values);
        for object in objects.iter().filter(|it| !it["spec"]["template"].is_null()) {
            assert_restricted(&object["spec"]["template"]);
        }
    }
}

#[test]
fn only_the_operator_is_given_a_token() {
    for object in of_kind(&objects(""), "ServiceAccount") {
        assert_eq!(object["automountServiceAccountToken"], false);
    }
    for object in of_kind(&objects(""), "Deployment") {
        assert_eq!(object["spec"]["template"]["spec"]["automountServiceAccountToken"], true);
    }
}
