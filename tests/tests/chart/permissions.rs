//! Permissions of the operator in the cluster and of its pods on a node.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Value, json};

use super::{ALL_VALUES, helm, objects, of_kind, rendered, role};

/// Returns the verbs that a role grants, by `GROUP/RESOURCE`.
fn granted(role: &Value) -> BTreeMap<String, BTreeSet<String>> {
    let list = |names: &Value| -> Vec<String> { serde_json::from_value(names.clone()).unwrap() };
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

/// Parses lines `GROUP/RESOURCE: VERBS` to compare them with [`granted`].
fn permissions(lines: &[&str]) -> BTreeMap<String, BTreeSet<String>> {
    let parse = |line: &&str| {
        let (resource, verbs) = line.split_once(": ").unwrap();
        (resource.to_owned(), verbs.split(' ').map(str::to_owned).collect())
    };
    lines.iter().map(parse).collect()
}

/// Permissions on cluster-scoped resources.
const CLUSTER: [&str; 2] = ["authentication.k8s.io/tokenreviews: create", "/nodes: get list watch"];

/// Permissions in all namespaces of experiments and jobs.
const NAMESPACED: [&str; 9] = [
    "stoker.dev/experiments: get list watch patch",
    "stoker.dev/experiments/status: patch",
    "stoker.dev/trials: get list watch create patch",
    "stoker.dev/trials/status: patch",
    "stoker.dev/inferencejobs: get list watch",
    "stoker.dev/inferencejobs/status: patch",
    "/pods: get list watch create delete",
    "/services: get create delete",
    "events.k8s.io/events: create patch",
];

#[test]
fn operator_permissions_are_exactly_these() {
    if helm().is_none() {
        return;
    }
    let all = objects("");
    let lease = permissions(&["coordination.k8s.io/leases: create get update"]);
    assert_eq!(
        granted(role(&all, "ClusterRole", "123:stoker-operator")),
        permissions(&[&CLUSTER[..], &NAMESPACED[..]].concat())
    );
    assert_eq!(granted(role(&all, "Role", "stoker-operator-lease")), lease);

    let some = objects(ALL_VALUES);
    assert_eq!(granted(role(&some, "ClusterRole", "123:stoker-operator")), permissions(&CLUSTER));
    assert_eq!(granted(role(&some, "Role", "123:stoker-operator")), permissions(&NAMESPACED));
    assert_eq!(granted(role(&some, "Role", "stoker-operator-lease")), lease);
}

#[test]
fn no_role_grants_secrets_or_wildcards() {
    for object in objects("").iter().chain(&objects(ALL_VALUES)) {
        if object["rules"].is_null() {
            continue;
        }
        for (resource, verbs) in granted(object) {
            let is_bad = |name: &str| name.contains("secrets") || name.contains('*');
            assert!(!is_bad(&resource) && !verbs.iter().any(|verb| is_bad(verb)), "{object:#}");
        }
    }
}

#[test]
fn every_rule_has_a_reason() {
    for values in ["", ALL_VALUES] {
        let Some(text) = rendered(values) else { return };
        let lines: Vec<_> = text.lines().collect();
        let rules = (0..lines.len()).filter(|at| lines[*at].starts_with("- apiGroups:"));
        for at in rules.clone() {
            let comment = lines[..at].iter().rev().take_while(|line| line.starts_with("# "));
            let has_reason = comment.last().is_some_and(|line| line.starts_with("# Why: "));
            let rule = lines[at..(at + 3).min(lines.len())].join("\n");
            assert!(has_reason, "no reason before\n{rule}");
        }
        assert!(rules.count() > 10);
    }
}

/// Checks the requirements of pod security `restricted`, and further restrictions.
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
    let containers = lists.iter().filter_map(|list| spec[*list].as_array()).flatten();
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
    for values in ["", ALL_VALUES] {
        let objects = objects(values);
        for object in objects.iter().filter(|object| !object["spec"]["template"].is_null()) {
            assert_restricted(&object["spec"]["template"]);
        }
    }
}

#[test]
fn only_the_operator_gets_a_token() {
    for object in of_kind(&objects(""), "ServiceAccount") {
        assert_eq!(object["automountServiceAccountToken"], false);
    }
    for object in of_kind(&objects(""), "Deployment") {
        assert_eq!(object["spec"]["template"]["spec"]["automountServiceAccountToken"], true);
    }
}
