//! Checks the rendered chart: installed objects, refused values, permissions of the operator.

mod install;
mod permissions;
mod ui;
mod values;

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use stoker_tests::{cache, describe_output, program, repository};

/// A non-default value for every setting that changes an object or its contents.
const ALL_VALUES: &str = r#"
image: { repository: example/operator, tag: "7" }
imagePullSecrets: [{ name: registry }]
trainer: { image: "example/trainer:7", pullPolicy: Always }
replicas: 3
watchNamespaces: [vision, "123"]
storage: { url: "s3://bucket/root", endpoint: "http://s3:8333", secretName: s3 }
limits:
  startDeadlineSeconds: 1
  nodeLostSeconds: 2
  finishedPodsSeconds: 3
  startingGangsMax: 4
  startingPodsMax: 5
  reportWritesPerSecond: 6
  pullDeadlineSeconds: 6
  pendingTrialsMax: 7
log: { format: text, level: "info,kube=debug" }
tls: { existingSecret: "0" }
gangKey: { existingSecret: "1e3" }
crds: { install: false }
rbac: { aggregateToDefaultRoles: false }
nodeSelector: { disk: ssd }
tolerations: [{ key: control-plane, operator: Exists, effect: NoSchedule }]
affinity:
  podAffinity: { requiredDuringSchedulingIgnoredDuringExecution: [{ topologyKey: zone }] }
priorityClassName: system-cluster-critical
podAnnotations: { a: b }
extraEnv: [{ name: TOKIO_WORKER_THREADS, value: "4" }]
networkPolicy:
  metricsFrom: [{ namespaceSelector: { matchLabels: { kubernetes.io/metadata.name: monitoring } } }]
  egress:
    enabled: true
    apiServerPorts: [6444]
    apiServerTo: [{ ipBlock: { cidr: 10.0.0.1/32 } }]
pdb: { enabled: false }
serviceMonitor: { enabled: true, labels: { release: prometheus } }
ui:
  enabled: true
  image:
    repository: example/stoker
    digest: "sha256:0000000000000000000000000000000000000000000000000000000000000000"
  signIn: header
  hosts: [stoker.example.com]
  namespaces: ["1e3", ml]
  allowActions: true
  from: [{ podSelector: { matchLabels: { app: proxy } } }]
  nodeSelector: { disk: ssd }
  tolerations: [{ key: control-plane, operator: Exists, effect: NoSchedule }]
  affinity: { nodeAffinity: {} }
  priorityClassName: shared
  podAnnotations: { a: b }
  extraEnv: [{ name: HTTPS_PROXY, value: "http://proxy:3128" }]
"#;

/// Returns the path of helm. Returns `None` and records the test as skipped if helm is missing and
/// cluster tests are off.
#[track_caller]
fn helm() -> Option<PathBuf> {
    let named = std::env::var_os("STOKER_HELM").map(PathBuf::from);
    let tools = std::fs::read_dir(cache().join("tools")).into_iter().flatten().flatten();
    let is_cluster = |name: &std::ffi::OsStr| name.to_string_lossy().starts_with("cluster-");
    let built = tools
        .map(|entry| entry.path())
        .filter(|path| path.file_name().is_some_and(is_cluster))
        .map(|path| path.join("helm"));
    let path = std::env::var_os("PATH").unwrap_or_default();
    let installed = std::env::split_paths(&path).map(|folder| folder.join("helm"));
    let helm = named.into_iter().chain(built).chain(installed).find(|path| path.is_file());
    assert!(
        helm.is_some() || !stoker_test_cluster::clusters_enabled(),
        "helm is missing; run scripts/fetch-cluster, set STOKER_HELM to its path, or turn cluster \
         tests off with STOKER_TEST_CLUSTER=off"
    );
    helm
}

/// Runs helm on the chart, for the release `stoker` unless `arguments` name another.
fn run(helm: &Path, arguments: &[&str], values: &str) -> Output {
    let home = tempfile::tempdir().unwrap();
    let file = home.path().join("values.yaml");
    std::fs::write(&file, values).unwrap();
    Command::new(helm)
        .args(arguments)
        .arg("--values")
        .arg(file)
        .current_dir(repository())
        .env("HELM_CACHE_HOME", home.path())
        .env("HELM_CONFIG_HOME", home.path())
        .env("HELM_DATA_HOME", home.path())
        .env("KUBECONFIG", home.path().join("none"))
        .output()
        .unwrap()
}

/// Returns the rendered chart for the release `stoker` in the namespace `123`.
fn rendered(values: &str) -> Option<String> {
    let helm = helm()?;
    let arguments = ["template", "stoker", "charts/stoker", "--namespace", "123"];
    let output = run(&helm, &arguments, values);
    assert!(output.status.success(), "{}", describe_output(&output));
    Some(String::from_utf8(output.stdout).unwrap())
}

/// Returns the objects of [`rendered`]; none if helm is missing and cluster tests are off.
fn objects(values: &str) -> Vec<Value> {
    let text = rendered(values).unwrap_or_default();
    let documents: Vec<Value> = serde_saphyr::from_multiple(&text).unwrap();
    documents.into_iter().filter(|document| !document.is_null()).collect()
}

fn of_kind<'a>(objects: &'a [Value], kind: &str) -> Vec<&'a Value> {
    objects.iter().filter(|object| object["kind"] == kind).collect()
}

/// Returns `KIND NAMESPACE/NAME` of each object, or `KIND NAME` without a namespace.
fn names(objects: &[Value]) -> BTreeSet<String> {
    let name = |object: &Value| {
        let kind = object["kind"].as_str().unwrap();
        let name = object["metadata"]["name"].as_str().unwrap();
        match object["metadata"]["namespace"].as_str() {
            Some(namespace) => format!("{kind} {namespace}/{name}"),
            None => format!("{kind} {name}"),
        }
    };
    objects.iter().map(name).collect()
}

fn role<'a>(objects: &'a [Value], kind: &str, name: &str) -> &'a Value {
    let mut candidates = of_kind(objects, kind).into_iter();
    let role = candidates.find(|object| object["metadata"]["name"] == name);
    role.unwrap_or_else(|| panic!("no {kind} {name} in {:?}", names(objects)))
}

/// Reads a file of the repository.
fn read(path: &str) -> String {
    std::fs::read_to_string(repository().join(path)).unwrap()
}

#[track_caller]
fn check_objects(values: &str, expected: &[&str]) {
    if helm().is_none() {
        return;
    }
    let expected = expected.iter().map(|name| (*name).to_owned()).collect();
    assert_eq!(names(&objects(values)), expected);
}

#[test]
fn defaults_install_one_cluster_wide_operator() {
    check_objects(
        "",
        &[
            "ClusterRole 123:stoker-operator",
            "ClusterRole 123:stoker-operator-edit",
            "ClusterRole 123:stoker-operator-view",
            "ClusterRoleBinding 123:stoker-operator",
            "CustomResourceDefinition experiments.stoker.dev",
            "CustomResourceDefinition inferencejobs.stoker.dev",
            "CustomResourceDefinition trials.stoker.dev",
            "Deployment 123/stoker-operator",
            "NetworkPolicy 123/stoker-operator",
            "PodDisruptionBudget 123/stoker-operator",
            "Role 123/stoker-operator-lease",
            "RoleBinding 123/stoker-operator-lease",
            "Secret 123/stoker-door",
            "Secret 123/stoker-gang",
            "Service 123/stoker-door",
            "Service 123/stoker-operator-metrics",
            "ServiceAccount 123/stoker-operator",
            "ValidatingAdmissionPolicy free-form-fields.stoker.dev",
            "ValidatingAdmissionPolicyBinding free-form-fields.stoker.dev",
        ],
    );
}

#[test]
fn values_add_and_remove_objects() {
    check_objects(
        ALL_VALUES,
        &[
            "ClusterRole 123:stoker-operator",
            "ClusterRoleBinding 123:stoker-operator",
            "Deployment 123/stoker-operator",
            "Deployment 123/stoker-ui",
            "NetworkPolicy 123/stoker-operator",
            "NetworkPolicy 123/stoker-ui",
            "Role 123/123:stoker-operator",
            "Role 123/stoker-operator-lease",
            "Role vision/123:stoker-operator",
            "RoleBinding 123/123:stoker-operator",
            "RoleBinding 123/stoker-operator-lease",
            "RoleBinding vision/123:stoker-operator",
            "Service 123/stoker-door",
            "Service 123/stoker-operator-metrics",
            "Service 123/stoker-ui",
            "ServiceAccount 123/stoker-operator",
            "ServiceAccount 123/stoker-ui",
            "ServiceMonitor 123/stoker-operator",
        ],
    );
}

#[test]
fn helm_lint_passes() {
    let Some(helm) = helm() else { return };
    for values in ["", ALL_VALUES] {
        let output = run(&helm, &["lint", "--strict", "charts/stoker"], values);
        assert!(output.status.success(), "{}", describe_output(&output));
    }
}

fn arguments(objects: &[Value]) -> Vec<String> {
    let deployment = role(objects, "Deployment", "stoker-operator");
    let container = &deployment["spec"]["template"]["spec"]["containers"][0];
    serde_json::from_value(container["args"].clone()).unwrap()
}

#[test]
fn every_value_reaches_the_operator() {
    if helm().is_none() {
        return;
    }
    let arguments_of_all = arguments(&objects(ALL_VALUES));
    let expected = [
        "run",
        "--lease-name=stoker-operator",
        "--watch-namespaces=vision,123",
        "--door-listen=[::]:8443",
        "--door-url=https://stoker-door.123.svc:8443",
        "--tls-cert=/etc/stoker/tls/tls.crt",
        "--tls-key=/etc/stoker/tls/tls.key",
        "--tls-ca=/etc/stoker/tls/ca.crt",
        "--gang-key-file=/etc/stoker/gang/key",
        "--observe-listen=[::]:9090",
        "--trainer-image=example/trainer:7",
        "--image-pull-policy=Always",
        "--storage-url=s3://bucket/root",
        "--storage-endpoint=http://s3:8333",
        "--storage-secret=s3",
        "--start-deadline-seconds=1",
        "--pull-deadline-seconds=6",
        "--node-lost-seconds=2",
        "--finished-pods-seconds=3",
        "--starting-gangs-max=4",
        "--starting-pods-max=5",
        "--report-writes-per-second=6",
        "--pending-trials-max=7",
        "--log-format=text",
        "--log-level=info,kube=debug",
    ];
    assert_eq!(arguments_of_all, expected);
    let defaults = arguments(&objects(""));
    let is_unset = |flag: &String| !flag.contains("storage") && !flag.contains("watch");
    assert!(defaults.iter().all(is_unset), "{defaults:?}");
}

#[test]
fn the_operator_accepts_its_arguments() {
    if helm().is_none() {
        return;
    }
    for values in ["", ALL_VALUES] {
        // The operator prints its help only if all arguments before `--help` are valid.
        let mut operator = Command::new(program("stoker-operator"));
        let output = operator.args(arguments(&objects(values))).arg("--help").output().unwrap();
        let text = describe_output(&output);
        assert!(output.status.success() && text.contains("--gang-key-file"), "{text}");
    }
}

#[test]
fn numeric_names_stay_strings() {
    let objects = objects(ALL_VALUES);
    for object in &objects {
        let namespace = &object["metadata"]["namespace"];
        assert!(namespace.is_null() || namespace.is_string(), "{object:#}");
        for subject in object["subjects"].as_array().into_iter().flatten() {
            assert_eq!(subject["namespace"], "123", "{object:#}");
        }
    }
    if helm().is_some() {
        let operator = role(&objects, "Deployment", "stoker-operator");
        let volumes = &operator["spec"]["template"]["spec"]["volumes"];
        assert_eq!(volumes[0]["secret"]["secretName"], "0");
        assert_eq!(volumes[1]["secret"]["secretName"], "1e3");
    }
}

/// Computes the checksum of a Secret's data, as in the annotations of the operator's pods.
fn checksum(secret: &Value) -> String {
    let data: BTreeMap<String, String> = serde_json::from_value(secret["data"].clone()).unwrap();
    let name = secret["metadata"]["name"].as_str().unwrap();
    let text = format!(r#"{{"data":{},"name":"{name}"}}"#, serde_json::to_string(&data).unwrap());
    Sha256::digest(text).iter().map(|byte| format!("{byte:02x}")).collect()
}

#[test]
fn pods_carry_checksums_of_their_secrets() {
    let objects = objects("");
    for deployment in of_kind(&objects, "Deployment") {
        let annotations = &deployment["spec"]["template"]["metadata"]["annotations"];
        let secret = |name| role(&objects, "Secret", name);
        assert_eq!(annotations["checksum/tls"], checksum(secret("stoker-door")));
        assert_eq!(annotations["checksum/gang-key"], checksum(secret("stoker-gang")));
    }
}

#[test]
fn uninstall_keeps_definitions_and_secrets() {
    for object in objects("") {
        let is_kept = object["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep";
        let kind = object["kind"].as_str().unwrap();
        // The policy protects the experiments that the definitions keep.
        let is_policy = kind.starts_with("ValidatingAdmissionPolicy");
        let holds_data = kind == "CustomResourceDefinition" || kind == "Secret";
        assert_eq!(
            is_kept,
            holds_data || is_policy,
            "{} {}",
            object["kind"],
            object["metadata"]["name"]
        );
    }
}

#[test]
fn chart_definitions_match_the_generated_ones() {
    let is_definition = |object: &Value| object["kind"] == "CustomResourceDefinition";
    for mut object in objects("").into_iter().filter(is_definition) {
        object["metadata"].as_object_mut().unwrap().remove("annotations");
        let plural = object["spec"]["names"]["plural"].as_str().unwrap();
        let expected: Value =
            serde_saphyr::from_str(&read(&format!("crds/stoker.dev_{plural}.yaml"))).unwrap();
        assert!(object == expected, "{plural} differ; run `cargo xtask codegen`");
    }
}

/// Returns the spec of the operator's NetworkPolicy. Returns `None` if helm is missing and cluster
/// tests are off.
fn network_policy(values: &str) -> Option<Value> {
    let objects = objects(values);
    let mut policies = of_kind(&objects, "NetworkPolicy").into_iter();
    let policy = policies.find(|policy| policy["metadata"]["name"] == "stoker-operator");
    policy.map(|policy| policy["spec"].clone())
}

#[test]
fn egress_is_limited_to_dns_and_the_api_server() {
    let Some(all) = network_policy("") else { return };
    assert_eq!(all["egress"], Value::Null);
    let api_server = json!({
        "ports": [{ "port": 6444, "protocol": "TCP" }],
        "to": [{ "ipBlock": { "cidr": "10.0.0.1/32" } }],
    });
    assert_eq!(network_policy(ALL_VALUES).unwrap()["egress"][1], api_server);
}

#[test]
fn only_trial_and_job_pods_may_report() {
    let from = |values: &str| network_policy(values).map(|spec| spec["ingress"][0].clone());
    let Some(all) = from("") else { return };
    assert_eq!(all["ports"], json!([{ "port": 8443, "protocol": "TCP" }]));
    let pods = json!({ "matchExpressions": [{
        "key": "stoker.dev/component", "operator": "In", "values": ["trial", "job"],
    }] });
    assert_eq!(all["from"], json!([{ "namespaceSelector": {}, "podSelector": pods }]));
    let some = from(ALL_VALUES).unwrap();
    let namespaces = &some["from"][0]["namespaceSelector"]["matchExpressions"][0];
    assert_eq!(namespaces["values"], json!(["vision", "123"]));
    assert_eq!(some["from"][0]["podSelector"], pods);
}

#[test]
fn notes_refer_to_an_existing_example() {
    let Some(helm) = helm() else { return };
    let arguments = ["install", "stoker", "charts/stoker", "--dry-run=client"];
    let output = run(&helm, &arguments, "");
    assert!(output.status.success(), "{}", describe_output(&output));
    let text = String::from_utf8(output.stdout).unwrap();
    let notes = text.split_once("\nNOTES:\n").expect("no notes").1;
    let after = |word: &str| notes.split(word).nth(1).unwrap().split_whitespace().next().unwrap();
    let file: Value = serde_saphyr::from_str(&read(after("--filename "))).unwrap();
    assert_eq!(file["metadata"]["name"], after(" experiment/"), "{notes}");
}
