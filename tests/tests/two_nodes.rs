//! End-to-end tests on a cluster of two nodes: chart installed with helm, imported images, an S3
//! server, real trainers.

mod experiments;
mod faults;
mod jobs;
mod page;
mod resources;
mod search;
mod soak;

use std::path::Path;
use std::process::Command;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use serde_json::{Value, json};
use stoker_test_cluster::{Cluster, PATIENCE};
use stoker_tests::{describe_output, facts_without_times, program, repository};

/// Namespace of the experiments. It requires pod security `restricted`.
const NAMESPACE: &str = "ml";

/// Label of the operator's pods. Those of the page have the same name, but another component.
const OPERATOR_PODS: &str = "app.kubernetes.io/name=stoker,app.kubernetes.io/component=operator";

/// Returns the cluster that these tests share, and a lock on it. The tests run one at a time,
/// because some of them kill a node.
fn cluster() -> (&'static Cluster, MutexGuard<'static, ()>) {
    static CLUSTER: OnceLock<Cluster> = OnceLock::new();
    static CLUSTER_LOCK: Mutex<()> = Mutex::new(());
    let turn = CLUSTER_LOCK.lock().unwrap_or_else(PoisonError::into_inner);
    (CLUSTER.get_or_init(|| install().unwrap_or_else(|error| panic!("{error}"))), turn)
}

/// Starts the cluster, imports the images and installs the chart.
fn install() -> Result<Cluster, stoker_test_cluster::Error> {
    let images = tempfile::tempdir().unwrap();
    let mut build = Command::new(repository().join("scripts/build-images"));
    build.arg("--operator").arg(program("stoker-operator"));
    build.arg("--trainer").arg(program("stoker-trainer"));
    build.arg("--stoker").arg(program("stoker"));
    build.args(["--data", "mnist", "--data", "iris"]);
    let built = build.arg(images.path()).output().unwrap();
    assert!(built.status.success(), "{}", describe_output(&built));
    let cluster = Cluster::two_nodes()?;
    for name in ["stoker-operator.tar", "stoker-trainer.tar", "stoker.tar"] {
        cluster.import_image(&images.path().join(name))?;
    }
    cluster.kubectl(&["create", "namespace", NAMESPACE])?;
    let level = "pod-security.kubernetes.io/enforce=restricted";
    cluster.kubectl(&["label", "namespace", NAMESPACE, level])?;
    let s3 = cluster.s3();
    let secret = [
        format!("--from-literal=AWS_ACCESS_KEY_ID={}", s3.access_key),
        format!("--from-literal=AWS_SECRET_ACCESS_KEY={}", s3.secret_key),
        "--from-literal=AWS_REGION=us-east-1".to_owned(),
    ];
    let mut create = vec!["-n", NAMESPACE, "create", "secret", "generic", "storage"];
    create.extend(secret.iter().map(String::as_str));
    cluster.kubectl(&create)?;
    helm_install(&cluster, "install", &[])?;
    Ok(cluster)
}

/// A killed node. Dropping it starts the node again, also after a failure, since later tests need
/// both nodes.
struct KilledNode<'a> {
    cluster: &'a Cluster,
    node: usize,
}

impl<'a> KilledNode<'a> {
    fn new(cluster: &'a Cluster, node: usize) -> Self {
        cluster.kill_node(node).unwrap();
        Self { cluster, node }
    }
}

impl Drop for KilledNode<'_> {
    fn drop(&mut self) {
        let result = self.cluster.restart_node(self.node);
        // A second panic would end the process.
        assert!(result.is_ok() || std::thread::panicking(), "{result:?}");
    }
}

fn helm_install(
    cluster: &Cluster,
    verb: &str,
    more: &[&str],
) -> Result<String, stoker_test_cluster::Error> {
    let version = env!("CARGO_PKG_VERSION");
    let chart = repository().join("charts/stoker");
    let s3 = cluster.s3();
    let values = [
        "image.repository=localhost/stoker-operator".to_owned(),
        format!("image.tag={version}"),
        "image.pullPolicy=Never".to_owned(),
        format!("trainer.image=localhost/stoker-trainer:{version}"),
        "trainer.pullPolicy=Never".to_owned(),
        format!("storage.url=s3://{}/e2e", s3.bucket),
        format!("storage.endpoint={}", s3.endpoint),
        "storage.secretName=storage".to_owned(),
        "limits.nodeLostSeconds=15".to_owned(),
    ];
    let chart = chart.display().to_string();
    let mut arguments = vec![verb, "stoker", &chart, "--namespace", "stoker-system"];
    arguments.extend(["--create-namespace", "--wait", "--timeout", "120s"]);
    values.iter().for_each(|value| arguments.extend(["--set", value]));
    arguments.extend(more);
    cluster.helm(&arguments)
}

/// Returns an experiment on MNIST. The fields of `change` replace those of its spec.
fn mnist(name: &str, change: &Value) -> Value {
    let mut spec = json!({
        "data": { "root": "/usr/local/share/stoker/data/mnist" },
        "entrypoint": { "command": ["stoker-trainer", "mnist"] },
        "hyperparameters": {
            "model": "mlp", "learning_rate": 0.001, "dropout": 0.2, "global_batch_size": 128,
        },
        "searcher": {
            "metric": "validation_accuracy", "smallerIsBetter": false,
            "maxLength": { "epochs": 2 }, "single": {},
        },
        "minValidationPeriod": { "epochs": 1 },
        "reproducibility": { "experimentSeed": 1 },
    });
    for (field, value) in change.as_object().unwrap() {
        spec[field] = value.clone();
    }
    json!({
        "apiVersion": "stoker.dev/v1alpha1", "kind": "Experiment",
        "metadata": { "name": name, "namespace": NAMESPACE }, "spec": spec,
    })
}

fn get(cluster: &Cluster, kind: &str, name: &str) -> Value {
    cluster.get(&["-n", NAMESPACE, kind, name]).unwrap()
}

/// Waits until an experiment has ended, and returns it.
fn ended(cluster: &Cluster, name: &str) -> Value {
    ended_within(PATIENCE, cluster, name)
}

/// Same as [`ended`], with another limit.
fn ended_within(limit: Duration, cluster: &Cluster, name: &str) -> Value {
    wait_for(limit, cluster, "experiment", name, "ends", |status| {
        matches!(status["phase"].as_str(), Some("Completed" | "Failed" | "Cancelled"))
    })
}

/// Waits until superfluous checkpoints of an experiment have been deleted, and returns it.
fn cleaned_up(cluster: &Cluster, name: &str) -> Value {
    wait_for(PATIENCE, cluster, "experiment", name, "is cleaned up", |status| {
        status["cleanedUp"] == json!(true)
    })
}

/// Waits until a trial has at least this number of checkpoints.
fn wait_for_checkpoints(cluster: &Cluster, name: &str, number: usize) {
    wait_for(PATIENCE, cluster, "trial", name, "has checkpoints", |status| {
        status["checkpoints"].as_array().map_or(0, Vec::len) >= number
    });
}

/// Waits until the status of an object meets a condition, and returns the object. `what` describes
/// the condition in error messages.
fn wait_for(
    limit: Duration,
    cluster: &Cluster,
    kind: &str,
    name: &str,
    what: &str,
    is_met: impl Fn(&Value) -> bool,
) -> Value {
    let what = format!("{name} {what}");
    let object = cluster.watch_within(limit, &what, &["-n", NAMESPACE, kind, name], |object| {
        if is_met(&object["status"]) {
            Ok(object.clone())
        } else {
            Err(object["status"].to_string())
        }
    });
    object.unwrap_or_else(|error| panic!("{error}\n{}", state(cluster)))
}

/// Describes the state of the cluster, for failure messages.
fn state(cluster: &Cluster) -> String {
    let mut text = String::new();
    for arguments in [
        &["get", "stoker,pods,services", "-A", "-o", "wide"][..],
        &["get", "nodes"],
        &["get", "events", "-n", NAMESPACE, "--sort-by=.lastTimestamp"],
        &["logs", "-n", "stoker-system", "-l", "app.kubernetes.io/name=stoker", "--tail=40"],
    ] {
        let output = cluster.kubectl(arguments).unwrap_or_else(|error| error.to_string());
        text += &format!("--- kubectl {arguments:?}\n{output}\n");
    }
    text
}

/// Runs `stoker` on the cluster, and returns its standard output.
fn stoker_on(cluster: &Cluster, arguments: &[&str]) -> String {
    let on_cluster = ["-n", NAMESPACE];
    stoker_with_credentials(cluster, &[arguments, &on_cluster].concat())
}

/// Runs `stoker` on the cluster's bucket without access to the cluster, and returns its standard
/// output.
fn stoker_on_bucket(cluster: &Cluster, arguments: &[&str]) -> String {
    let root = format!("s3://{}/e2e", cluster.s3().bucket);
    stoker_with_credentials(cluster, &[arguments, &["--root", &root]].concat())
}

fn stoker_with_credentials(cluster: &Cluster, arguments: &[&str]) -> String {
    let s3 = cluster.s3();
    let output = stoker_tests::stoker(arguments)
        .env("KUBECONFIG", cluster.kubeconfig())
        .env("STOKER_STORAGE_ENDPOINT", &s3.local_endpoint)
        .env("AWS_ACCESS_KEY_ID", &s3.access_key)
        .env("AWS_SECRET_ACCESS_KEY", &s3.secret_key)
        .env("AWS_REGION", "us-east-1")
        .output()
        .unwrap();
    assert!(output.status.success(), "stoker {arguments:?}: {}", describe_output(&output));
    String::from_utf8(output.stdout).unwrap()
}

/// Returns the latest metrics and the facts of a trial.
fn outcome(cluster: &Cluster, trial: &str) -> (Value, Value) {
    let status = get(cluster, "trial", trial)["status"].clone();
    (status["metrics"].clone(), facts_without_times(&status["facts"]))
}

/// Returns the file names and hashes of a trial's latest checkpoint.
fn weights(cluster: &Cluster, trial: &str, folder: &Path) -> Value {
    let endpoint = cluster.s3().local_endpoint.clone();
    let to = folder.join(trial);
    let arguments = ["checkpoint", "download", trial, "--to", to.to_str().unwrap(), "--latest"];
    stoker_on(cluster, &[&arguments[..], &["--storage-endpoint", &endpoint]].concat());
    let manifest = std::fs::read(to.join("manifest.json")).unwrap();
    let manifest: Value = serde_json::from_slice(&manifest).unwrap();
    manifest["files"].clone()
}
