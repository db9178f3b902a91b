//! The chart on a real API server, by the real helm: installed, upgraded, uninstalled, and installed
//! again.

use serde_json::Value;
use stoker_test_cluster::{ControlPlane, wanted};
use stoker_tests::repository;

const NAMESPACE: &str = "stoker-system";

const EXPERIMENT: &str = r#"
apiVersion: stoker.dev/v1alpha1
kind: Experiment
metadata: { name: kept }
spec:
  entrypoint: { command: [program] }
  searcher: { metric: loss, smallerIsBetter: true, maxLength: { batches: 1 }, single: {} }
"#;

/// A cluster that refuses pods that are not restricted; `None` if clusters were switched off.
fn cluster() -> Option<ControlPlane> {
    if !wanted() {
        return None;
    }
    let cluster = ControlPlane::start().unwrap();
    cluster.make_namespace(NAMESPACE).unwrap();
    let enforce = "pod-security.kubernetes.io/enforce=restricted";
    cluster.kubectl(&["label", "namespace", NAMESPACE, enforce]).unwrap();
    Some(cluster)
}

fn helm(cluster: &ControlPlane, verb: &str, values: &[&str]) -> String {
    let chart = repository().join("charts/stoker");
    let mut arguments = vec![verb, "stoker", chart.to_str().unwrap(), "--namespace", NAMESPACE];
    for value in values {
        arguments.extend(["--set", value]);
    }
    cluster.helm(&arguments).unwrap()
}

fn get(cluster: &ControlPlane, what: &[&str]) -> Value {
    cluster.get(&[what, &["--namespace", NAMESPACE]].concat()).unwrap()
}

/// The data of the chart's own Secrets.
fn secrets(cluster: &ControlPlane) -> [Value; 2] {
    ["stoker-door", "stoker-gang"].map(|it| get(cluster, &["secret", it])["data"].clone())
}

/// What the operator's pods are made of.
fn template(cluster: &ControlPlane) -> Value {
    get(cluster, &["deployment", "stoker-operator"])["spec"]["template"].clone()
}

#[test]
fn certificate_key_and_data_outlive_upgrade_and_removal() {
    let Some(cluster) = cluster() else { return };
    helm(&cluster, "install", &[]);
    let (made, pods) = (secrets(&cluster), template(&cluster));
    cluster.apply(EXPERIMENT).unwrap();

    helm(&cluster, "upgrade", &["replicas=3"]);
    assert_eq!(secrets(&cluster), made);
    assert_eq!(template(&cluster), pods, "an upgrade that changes nothing of a pod rolls none");

    cluster.helm(&["uninstall", "stoker", "--namespace", NAMESPACE]).unwrap();
    assert_eq!(secrets(&cluster), made);
    let experiment = cluster.get(&["experiment", "kept"]).unwrap();
    assert_eq!(experiment["metadata"]["name"], "kept");

    helm(&cluster, "install", &[]);
    assert_eq!(secrets(&cluster), made);
    assert_eq!(template(&cluster), pods);
}

#[test]
fn a_secret_of_ones_own_is_taken_and_its_change_rolls_the_pods() {
    let Some(cluster) = cluster() else { return };
    let own = |key: &str| {
        let text = format!(
            r#"{{"apiVersion":"v1","kind":"Secret","metadata":{{"name":"own",
                "namespace":"{NAMESPACE}"}},"stringData":{{"key":"{key}"}}}}"#
        );
        cluster.apply(&text).unwrap();
    };
    let checksum = || {
        let annotations = &template(&cluster)["metadata"]["annotations"];
        annotations["checksum/gang-key"].as_str().unwrap().to_owned()
    };
    own("one");
    helm(&cluster, "install", &["gangKey.existingSecret=own"]);
    let first = checksum();
    helm(&cluster, "upgrade", &["gangKey.existingSecret=own"]);
    assert_eq!(checksum(), first);
    own("two");
    helm(&cluster, "upgrade", &["gangKey.existingSecret=own"]);
    assert_ne!(checksum(), first);
    let others = get(&cluster, &["secrets"]);
    let is_gang = |it: &Value| it["metadata"]["name"] == "stoker-gang";
    assert!(!others["items"].as_array().unwrap().iter().any(is_gang), "one too many was made");
}

#[test]
fn the_api_server_takes_the_operators_pods_and_gives_them_no_more_than_they_need() {
    let Some(cluster) = cluster() else { return };
    cluster.make_namespace("vision").unwrap();
    helm(&cluster, "install", &["watchNamespaces={vision}", "networkPolicy.egress.enabled=true"]);
    let template = template(&cluster);
    let pod = serde_json::json!({
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": { "name": "operator", "namespace": NAMESPACE },
        "spec": template["spec"],
    });
    let create = ["create", "--dry-run=server", "--filename", "-"];
    cluster.kubectl_with_input(&create, &pod.to_string()).unwrap();

    let account = format!("--as=system:serviceaccount:{NAMESPACE}:stoker-operator");
    let may = |right: &str, namespace: &str| {
        let [verb, what, part] = right.split(' ').collect::<Vec<_>>().try_into().unwrap();
        let part = format!("--subresource={part}");
        let mut arguments = vec!["auth", "can-i", verb, what, "--namespace", namespace, &account];
        arguments.extend(Some(part.as_str()).filter(|it| !it.ends_with("=-")));
        cluster.kubectl(&arguments).is_ok_and(|it| it.trim() == "yes")
    };
    // Verb, resource or one object of it, subresource.
    assert!(may("create pods -", "vision"));
    assert!(may("patch trials.stoker.dev status", "vision"));
    assert!(may("get leases.coordination.k8s.io/stoker-operator -", NAMESPACE));
    assert!(may("create tokenreviews.authentication.k8s.io -", NAMESPACE));
    assert!(!may("create pods -", "default"));
    assert!(!may("get secrets -", NAMESPACE));
    assert!(!may("get pods log", "vision"));
    assert!(!may("create pods exec", "vision"));
    assert!(!may("get leases.coordination.k8s.io/another -", NAMESPACE));
}
