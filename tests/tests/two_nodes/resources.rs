//! Cluster resources of pods: volumes for data and checkpoints, and healthy GPUs.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};
use stoker_test_cluster::{Cluster, PATIENCE};

use super::{NAMESPACE, cleaned_up, cluster, ended, get, mnist, state, wait_for};

const GPU: &str = "nvidia.com/gpu";

/// Creates a claim in the namespace `ml` on a volume that is the directory `folder` of each node.
fn claim(cluster: &Cluster, name: &str, folder: &Path) {
    let size = json!({ "storage": "1Gi" });
    let volume = json!({
        "apiVersion": "v1", "kind": "PersistentVolume", "metadata": { "name": name },
        "spec": {
            "capacity": size, "accessModes": ["ReadWriteMany"], "storageClassName": "",
            "persistentVolumeReclaimPolicy": "Retain", "hostPath": { "path": folder },
        },
    });
    let claim = json!({
        "apiVersion": "v1", "kind": "PersistentVolumeClaim",
        "metadata": { "name": name, "namespace": NAMESPACE },
        "spec": {
            "accessModes": ["ReadWriteMany"], "storageClassName": "", "volumeName": name,
            "resources": { "requests": size },
        },
    });
    let list = json!({ "apiVersion": "v1", "kind": "List", "items": [volume, claim] });
    cluster.apply(&list.to_string()).unwrap();
}

/// Returns the manifests below a directory, one for each checkpoint.
fn manifests(folder: &Path) -> Vec<PathBuf> {
    let mut paths = vec![];
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            paths.extend(manifests(&path));
        } else if path.ends_with("manifest.json") {
            paths.push(path);
        }
    }
    paths
}

#[test]
fn data_and_checkpoints_can_use_a_claimed_volume() {
    if !stoker_test_cluster::nodes_enabled() {
        return;
    }
    let (cluster, _turn) = cluster();
    let volume = tempfile::tempdir().unwrap();
    // Trials run as an unprivileged user, and Kubernetes does not change the owner of a node's
    // directory.
    fs::set_permissions(volume.path(), fs::Permissions::from_mode(0o777)).unwrap();
    fs::create_dir(volume.path().join("mnist")).unwrap();
    for entry in fs::read_dir(stoker_tests::cache().join("data/mnist")).unwrap() {
        let from = entry.unwrap().path();
        fs::copy(&from, volume.path().join("mnist").join(from.file_name().unwrap())).unwrap();
    }
    claim(cluster, "shared", volume.path());
    let change = json!({
        "data": { "root": "/mnt/shared/mnist" },
        "checkpointStorage": { "url": "file:///mnt/shared/runs", "saveTrialLatest": 1 },
        "minCheckpointPeriod": { "batches": 100 },
        "searcher": {
            "metric": "validation_accuracy", "smallerIsBetter": false,
            "maxLength": { "batches": 400 }, "single": {},
        },
        "pod": {
            "volumes": [{ "name": "shared", "persistentVolumeClaim": { "claimName": "shared" } }],
            "volumeMounts": [{ "name": "shared", "mountPath": "/mnt/shared" }],
        },
    });
    cluster.apply(&mnist("claimed", &change).to_string()).unwrap();
    let experiment = ended(cluster, "claimed");
    assert_eq!(experiment["status"]["phase"], "Completed", "{}", state(cluster));
    cleaned_up(cluster, "claimed");
    let kept = manifests(&volume.path().join("runs"));
    let is_latest = |path: &PathBuf| path.to_string_lossy().contains("000000000400-0");
    assert!(kept.len() == 1 && kept.iter().all(is_latest), "{kept:?}");
}

#[test]
fn trials_wait_for_healthy_gpus() {
    if !stoker_test_cluster::nodes_enabled() {
        return;
    }
    let (cluster, _turn) = cluster();
    cluster.gpus(1, 2).unwrap();
    cluster.gpus(2, 1).unwrap();
    cluster.set_unhealthy_gpus(1, &["gpu-0", "gpu-1"]).unwrap();
    let change = json!({
        "resources": { "slotsPerTrial": 2, "slotsPerPod": 2, "slotResource": GPU },
        // The GPUs of the nodes are fake, so train on the CPU.
        "env": [{ "name": "STOKER_DEVICE", "value": "cpu" }],
        "searcher": {
            "metric": "validation_accuracy", "smallerIsBetter": false,
            "maxLength": { "batches": 100 }, "single": {},
        },
    });
    cluster.apply(&mnist("sick", &change).to_string()).unwrap();
    wait_for(PATIENCE, cluster, "trial", "sick-0", "names the GPUs", |status| {
        let conditions = status["conditions"].as_array();
        let is_scheduled = |condition: &&Value| condition["type"] == "Scheduled";
        let scheduled = conditions.and_then(|conditions| conditions.iter().find(is_scheduled));
        let message = scheduled.and_then(|condition| condition["message"].as_str());
        message.is_some_and(|message| message.contains(GPU))
    });
    cluster.set_unhealthy_gpus(1, &[]).unwrap();
    let experiment = ended(cluster, "sick");
    assert_eq!(experiment["status"]["phase"], "Completed", "{}", state(cluster));
    let pods = cluster.get(&["-n", NAMESPACE, "pods", "-l", "stoker.dev/experiment=sick"]).unwrap();
    let pod = pods["items"].as_array().and_then(|pods| pods.first()).cloned();
    let pod = pod.unwrap_or(Value::Null);
    assert_eq!(pod["spec"]["containers"][0]["resources"]["limits"][GPU], "2", "{pods}");
    assert_eq!(get(cluster, "trial", "sick-0")["status"]["restarts"], 0);
    cluster.gpus(1, 0).unwrap();
    cluster.gpus(2, 0).unwrap();
}
