//! Storage of experiments after a change of the operator's settings.

use std::time::{Duration, Instant};

use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt as _;
use serde_json::{Value, json};
use stoker_api::experiment::{Phase, StorageRecord};
use stoker_api::names::{ANNOTATION_TRIAL_CONFIG, LABEL_ATTEMPT};

use crate::flow::grid;
use crate::kubelet::{Kubelet, Script};
use crate::proxy::{Fault, Proxy};
use crate::setup::{Place, client_of, free_ports, runtime};

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
async fn storage_of(place: &Place, kubelet: &Kubelet, name: &str) -> (String, String) {
    let end = Instant::now() + Duration::from_secs(60);
    loop {
        if let Some(pod) = kubelet.pod(name) {
            return used(&pod);
        }
        assert!(Instant::now() < end, "no pod {name}\n{}", place.logs());
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// Waits until an experiment's storage is fixed, and returns it.
async fn fixed(place: &Place, name: &str) -> StorageRecord {
    let end = Instant::now() + Duration::from_secs(60);
    loop {
        let storage = place.experiment(name).await.status.unwrap_or_default().storage;
        if let Some(storage) = storage.filter(StorageRecord::is_fixed) {
            return storage;
        }
        assert!(Instant::now() < end, "the storage of {name} is not fixed\n{}", place.logs());
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

fn delete_pod(place: &Place, name: &str) {
    let delete = ["delete", "pod", name, "-n", &place.namespace, "--wait=false"];
    place.plane.kubectl(&delete).unwrap();
}

#[test]
fn changed_settings_do_not_move_running_experiments() {
    if !stoker_test_cluster::wanted() {
        return;
    }
    runtime().block_on(async {
        let place = Place::new("storage").await;
        let mut operator = place.operator_with("a", free_ports(), &OLD);
        operator.wait_ready(&place);
        let kubelet = Kubelet::start(&place.client, "storage", script);
        place.apply("grid", grid(1, 2, 1));
        assert_eq!(storage_of(&place, &kubelet, "grid-0-a0-r0").await, old());
        let first = fixed(&place, "grid").await;
        assert_eq!(first.secret_name.as_deref(), Some("old"));
        operator.kill();
        let mut operator = place.operator_with("b", free_ports(), &NEW);
        operator.wait_ready(&place);
        delete_pod(&place, "grid-0-a0-r0");
        assert_eq!(storage_of(&place, &kubelet, "grid-0-a1-r0").await, old());
        place.wait_for("grid", &[Phase::Completed], 60).await;
        assert_eq!(storage_of(&place, &kubelet, "grid-cleanup-0").await, old());
        assert_eq!(fixed(&place, "grid").await, first);
        // An experiment that starts now uses the new settings.
        place.apply("later", grid(1, 1, 1));
        let new = ("memory:///new".to_owned(), "new".to_owned());
        assert_eq!(storage_of(&place, &kubelet, "later-0-a0-r0").await, new);
    });
}

/// Earlier versions recorded no storage, or one that followed the operator's settings.
#[test]
fn upgrade_records_the_storage_of_existing_pods() {
    if !stoker_test_cluster::wanted() {
        return;
    }
    runtime().block_on(async {
        let place = Place::new("upgraded").await;
        let mut operator = place.operator_with("a", free_ports(), &OLD);
        operator.wait_ready(&place);
        let kubelet = Kubelet::start(&place.client, "upgraded", script);
        for name in ["nothing", "moving"] {
            place.apply(name, grid(1, 2, 1));
            assert_eq!(storage_of(&place, &kubelet, &format!("{name}-0-a0-r0")).await, old());
            fixed(&place, name).await;
        }
        operator.kill();
        let moving = json!({
            "url": "memory:///moved", "path": "p", "secretName": null, "fixedAt": null,
        });
        for (name, storage) in [("nothing", Value::Null), ("moving", moving)] {
            let patch = json!({ "status": { "storage": storage } }).to_string();
            let of = ["patch", "experiment", name, "-n", "upgraded", "--subresource=status"];
            place.plane.kubectl(&[&of[..], &["--type=merge", "-p", &patch]].concat()).unwrap();
            let left = place.experiment(name).await.status.unwrap().storage;
            assert!(!left.is_some_and(|storage| storage.is_fixed()));
        }
        let mut operator = place.operator_with("b", free_ports(), &NEW);
        operator.wait_ready(&place);
        for name in ["nothing", "moving"] {
            let storage = fixed(&place, name).await;
            assert_eq!((storage.url, storage.secret_name.unwrap()), old(), "{name}");
            delete_pod(&place, &format!("{name}-0-a0-r0"));
            assert_eq!(storage_of(&place, &kubelet, &format!("{name}-0-a1-r0")).await, old());
        }
    });
}

/// A leader with other settings is killed while its record is in flight. The successor's record
/// counts: no pod has used the first one, and the late write changes nothing.
#[test]
fn pods_are_created_after_their_storage_record() {
    if !stoker_test_cluster::wanted() {
        return;
    }
    runtime().block_on(async {
        let place = Place::new("recorded").await;
        let proxy = Proxy::start(client_of(&place.kubeconfig).await, place.folder.path()).await;
        proxy.set_rule(|name| {
            let is_record = name.contains("/experiments/grid/status");
            is_record.then_some(Fault::Held)
        });
        let mut a = place.operator_by("a", free_ports(), &proxy.kubeconfig, &OLD);
        a.wait_ready(&place);
        let kubelet = Kubelet::start(&place.client, "recorded", |_| Script::Train { unit_ms: 10 });
        place.apply("grid", grid(1, 3, 1));
        proxy.wait_ruled(1).await;
        // The trial starts its attempt and waits for the record.
        let end = Instant::now() + Duration::from_secs(30);
        loop {
            let trials = place.trials_of("grid").await;
            let status = trials.first().and_then(|trial| trial.status.clone()).unwrap_or_default();
            if !status.attempts.is_empty() {
                break;
            }
            assert!(Instant::now() < end, "{}", place.logs());
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        a.kill();
        assert_eq!(kubelet.started(), Vec::<String>::new());
        let mut b = place.operator_with("b", free_ports(), &NEW);
        b.wait_ready(&place);
        let new = ("memory:///new".to_owned(), "new".to_owned());
        assert_eq!(storage_of(&place, &kubelet, "grid-0-a0-r0").await, new);
        let record = fixed(&place, "grid").await;
        proxy.clear_rule();
        proxy.wait_released(1).await;
        let ended = place.wait_for("grid", &[Phase::Completed], 60).await;
        assert_eq!(ended.status.unwrap().storage, Some(record));
    });
}
