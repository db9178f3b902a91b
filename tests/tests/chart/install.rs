//! Installs, upgrades, uninstalls and reinstalls the chart with helm on a real API server.

use serde_json::Value;
use stoker_test_cluster::{ControlPlane, clusters_enabled};
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

/// Starts a cluster whose operator namespace requires pod security `restricted`. Returns `None` if
/// cluster tests are off.
fn cluster() -> Option<ControlPlane> {
    if !clusters_enabled() {
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

/// Returns the data of the Secrets that the chart creates.
fn secrets(cluster: &ControlPlane) -> [Value; 2] {
    ["stoker-door", "stoker-gang"].map(|name| get(cluster, &["secret", name])["data"].clone())
}

/// Returns the pod template of the operator.
fn template(cluster: &ControlPlane) -> Value {
    get(cluster, &["deployment", "stoker-operator"])["spec"]["template"].clone()
}

#[test]
fn upgrade_and_uninstall_keep_secrets_and_experiments() {
    let Some(cluster) = cluster() else { return };
    helm(&cluster, "install", &[]);
    let (created, pods) = (secrets(&cluster), template(&cluster));
    cluster.apply(EXPERIMENT).unwrap();

    helm(&cluster, "upgrade", &["replicas=3"]);
    assert_eq!(secrets(&cluster), created);
    assert_eq!(template(&cluster), pods, "a change of replicas must not roll the pods");

    cluster.helm(&["uninstall", "stoker", "--namespace", NAMESPACE]).unwrap();
    assert_eq!(secrets(&cluster), created);
    let experiment = cluster.get(&["experiment", "kept"]).unwrap();
    assert_eq!(experiment["metadata"]["name"], "kept");

    helm(&cluster, "install", &[]);
    assert_eq!(secrets(&cluster), created);
    assert_eq!(template(&cluster), pods);
}

#[test]
fn changing_an_existing_secret_rolls_the_pods() {
    let Some(cluster) = cluster() else { return };
    let apply_secret = |key: &str| {
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
    apply_secret("one");
    helm(&cluster, "install", &["gangKey.existingSecret=own"]);
    let first = checksum();
    helm(&cluster, "upgrade", &["gangKey.existingSecret=own"]);
    assert_eq!(checksum(), first);
    apply_secret("two");
    helm(&cluster, "upgrade", &["gangKey.existingSecret=own"]);
    assert_ne!(checksum(), first);
    let secrets = get(&cluster, &["secrets"]);
    let is_gang = |secret: &Value| secret["metadata"]["name"] == "stoker-gang";
    let has_gang = secrets["items"].as_array().unwrap().iter().any(is_gang);
    assert!(!has_gang, "the chart created a Secret although one exists");
}

#[test]
fn operator_pods_are_admitted_with_least_privilege() {
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
        arguments.extend(Some(part.as_str()).filter(|flag| !flag.ends_with("=-")));
        cluster.kubectl(&arguments).is_ok_and(|answer| answer.trim() == "yes")
    };
    // VERB RESOURCE[/NAME] SUBRESOURCE, with `-` for no subresource.
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
