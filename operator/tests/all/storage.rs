//! Storage of experiments after a change of the operator's settings.

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt as _;
use serde_json::{Value, json};
use stoker_api::experiment::{Phase, StorageRecord};
use stoker_api::names::{ANNOTATION_TRIAL_CONFIG, LABEL_ATTEMPT};

use crate::flow::grid;
use crate::kubelet::{Kubelet, Script};
use crate::proxy::{Fault, Proxy};
use crate::setup::{TestNamespace, client_of, operator_port, runtime};

/// Settings before and after the change.
const OLD: [&str; 2] = ["--storage-url=memory:///old", "--storage-secret=old"];
const NEW: [&str; 2] = ["--storage-url=memory:///new", "--storage-secret=new"];

/// Behavior of pods: the first attempt runs until its pod is deleted, later ones train.
fn script(pod: &Pod) -> Script {
    match pod.labels()[LABEL_ATTEMPT].as_str() {
        "0" => Script::Hang,
        _ => Script::Train { unit_ms: 10 },
    }
}

/// Storage URL and Secret of a pod.
fn used(pod: &Pod) -> (String, String) {
    let config: Value = serde_json::from_str(&pod.annotations()[ANNOTATION_TRIAL_CONFIG]).unwrap();
    let container = &pod.spec.as_ref().unwrap().containers[0];
    let secrets = container.env_from.iter().flatten();
    let secrets: Vec<_> =
        secrets.map(|source| source.secret_ref.as_ref().unwrap().name.clone()).collect();
    (config["storage"]["url"].as_str().unwrap().to_owned(), secrets.join(","))
}

fn old() -> (String, String) {
    ("memory:///old".to_owned(), "old".to_owned())
}

/// Waits until a kubelet has observed a pod, and returns the pod's storage.
async fn storage_of(ns: &TestNamespace, kubelet: &Kubelet, name: &str) -> (String, String) {
    let end = Instant::now() + stoker_test_cluster::PATIENCE;
    loop {
        if let Some(pod) = kubelet.pod(name) {
            return used(&pod);
        }
        assert!(Instant::now() < end, "no pod {name}\n{}", ns.logs());
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// Waits until an experiment's storage is fixed, and returns it.
async fn fixed(ns: &TestNamespace, name: &str) -> StorageRecord {
    let end = Instant::now() + stoker_test_cluster::PATIENCE;
    loop {
        let storage = ns.experiment(name).await.status.unwrap_or_default().storage;
        if let Some(storage) = storage.filter(StorageRecord::is_fixed) {
            return storage;
        }
        assert!(Instant::now() < end, "the storage of {name} is not fixed\n{}", ns.logs());
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

fn delete_pod(ns: &TestNamespace, name: &str) {
    let delete = ["delete", "pod", name, "-n", &ns.namespace, "--wait=false"];
    ns.plane.kubectl(&delete).unwrap();
}

#[test]
fn changed_settings_do_not_move_running_experiments() {
    if !stoker_test_cluster::clusters_enabled() {
        return;
    }
    runtime().block_on(async {
        let ns = TestNamespace::new("storage").await;
        let mut operator = ns.operator_with("a", operator_port(), &OLD);
        operator.wait_ready(&ns);
        let kubelet = Kubelet::start(&ns.client, "storage", script);
        ns.apply("grid", grid(1, 2, 1));
        assert_eq!(storage_of(&ns, &kubelet, "grid-0-a0-r0").await, old());
        let first = fixed(&ns, "grid").await;
        assert_eq!(first.secret_name.as_deref(), Some("old"));
        operator.kill();
        let mut operator = ns.operator_with("b", operator_port(), &NEW);
        operator.wait_ready(&ns);
        delete_pod(&ns, "grid-0-a0-r0");
        assert_eq!(storage_of(&ns, &kubelet, "grid-0-a1-r0").await, old());
        ns.wait_for("grid", &[Phase::Completed]).await;
        assert_eq!(storage_of(&ns, &kubelet, "grid-cleanup-0").await, old());
        assert_eq!(fixed(&ns, "grid").await, first);
        // An experiment that starts now uses the new settings.
        ns.apply("later", grid(1, 1, 1));
        let new = ("memory:///new".to_owned(), "new".to_owned());
        assert_eq!(storage_of(&ns, &kubelet, "later-0-a0-r0").await, new);
    });
}

/// Earlier versions recorded no storage, or one that followed the operator's settings.
#[test]
fn upgrade_records_the_storage_of_existing_pods() {
    if !stoker_test_cluster::clusters_enabled() {
        return;
    }
    runtime().block_on(async {
        let ns = TestNamespace::new("upgraded").await;
        let mut operator = ns.operator_with("a", operator_port(), &OLD);
        operator.wait_ready(&ns);
        let kubelet = Kubelet::start(&ns.client, "upgraded", script);
        for name in ["nothing", "moving"] {
            ns.apply(name, grid(1, 2, 1));
            assert_eq!(storage_of(&ns, &kubelet, &format!("{name}-0-a0-r0")).await, old());
            fixed(&ns, name).await;
        }
        operator.kill();
        let moving = json!({
            "url": "memory:///moved", "path": "p", "secretName": null, "fixedAt": null,
        });
        for (name, storage) in [("nothing", Value::Null), ("moving", moving)] {
            let patch = json!({ "status": { "storage": storage } }).to_string();
            let of = ["patch", "experiment", name, "-n", "upgraded", "--subresource=status"];
            ns.plane.kubectl(&[&of[..], &["--type=merge", "-p", &patch]].concat()).unwrap();
            let left = ns.experiment(name).await.status.unwrap().storage;
            assert!(!left.is_some_and(|storage| storage.is_fixed()));
        }
        let mut operator = ns.operator_with("b", operator_port(), &NEW);
        operator.wait_ready(&ns);
        for name in ["nothing", "moving"] {
            let storage = fixed(&ns, name).await;
            assert_eq!((storage.url, storage.secret_name.unwrap()), old(), "{name}");
            delete_pod(&ns, &format!("{name}-0-a0-r0"));
            assert_eq!(storage_of(&ns, &kubelet, &format!("{name}-0-a1-r0")).await, old());
        }
    });
}

/// A leader with other settings is killed while its record is in flight. The successor's record
/// counts: no pod has used the first one, and the late write changes nothing.
#[test]
fn pods_are_created_after_their_storage_record() {
    if !stoker_test_cluster::clusters_enabled() {
        return;
    }
    runtime().block_on(async {
        let ns = TestNamespace::new("recorded").await;
        let proxy = Proxy::start(client_of(&ns.kubeconfig).await, ns.folder.path()).await;
        // The first write of the status records the first decision of the search.
        let num_writes = AtomicU32::new(0);
        proxy.set_rule(move |name| {
            let is_status = name.contains("/experiments/grid/status");
            let is_record = is_status && num_writes.fetch_add(1, Ordering::Relaxed) > 0;
            is_record.then_some(Fault::Held)
        });
        let mut a = ns.operator_by("a", operator_port(), &proxy.kubeconfig, &OLD);
        a.wait_ready(&ns);
        let kubelet = Kubelet::start(&ns.client, "recorded", |_| Script::Train { unit_ms: 10 });
        ns.apply("grid", grid(1, 3, 1));
        proxy.wait_faults(1).await;
        // The trial starts its attempt and waits for the record.
        let end = Instant::now() + stoker_test_cluster::PATIENCE;
        loop {
            let trials = ns.trials_of("grid").await;
            let status = trials.first().and_then(|trial| trial.status.clone()).unwrap_or_default();
            if !status.attempts.is_empty() {
                break;
            }
            assert!(Instant::now() < end, "{}", ns.logs());
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        a.kill();
        assert_eq!(kubelet.started(), Vec::<String>::new());
        let mut b = ns.operator_with("b", operator_port(), &NEW);
        b.wait_ready(&ns);
        let new = ("memory:///new".to_owned(), "new".to_owned());
        assert_eq!(storage_of(&ns, &kubelet, "grid-0-a0-r0").await, new);
        let record = fixed(&ns, "grid").await;
        proxy.clear_rule();
        proxy.wait_released(1).await;
        let ended = ns.wait_for("grid", &[Phase::Completed]).await;
        assert_eq!(ended.status.unwrap().storage, Some(record));
    });
}
