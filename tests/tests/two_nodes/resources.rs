//! What pods get of the cluster: volumes that hold the data and the checkpoints, GPUs that are well.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};
use stoker_test_cluster::{Cluster, wait_until};

use super::{NAMESPACE, cluster, ended, get, mnist, state};

const GPU: &str = "nvidia.com/gpu";

/// A claim of namespace `ml` on a volume that is `folder` of whatever node a pod is on.
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

/// The manifests under a folder: one for each checkpoint that exists.
fn manifests(folder: &Path) -> Vec<PathBuf> {
    let mut found = vec![];
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            found.extend(manifests(&path));
        } else if path.ends_with("manifest.json") {
            found.push(path);
        }
    }
    found
}

#[test]
fn data_and_checkpoints_may_lie_on_a_claimed_volume() {
    if !stoker_test_cluster::nodes_wanted() {
        return;
    }
    let (cluster, _turn) = cluster();
    let volume = tempfile::tempdir().unwrap();
    // Trials run as a user of no name, and a node's folder is not made to be theirs.
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
    let found = ended(cluster, "claimed", 180);
    assert_eq!(found["status"]["phase"], "Completed", "{}", state(cluster));
    wait_until("what nobody keeps is deleted", 90, || {
        let status = get(cluster, "experiment", "claimed")["status"].clone();
        if status["cleanedUp"] == json!(true) { Ok(()) } else { Err(status.to_string()) }
    })
    .unwrap_or_else(|error| panic!("{error}\n{}", state(cluster)));
    let kept = manifests(&volume.path().join("runs"));
    let named = |it: &PathBuf| it.to_string_lossy().contains("000000000400-0");
    assert!(kept.len() == 1 && kept.iter().all(named), "{kept:?}");
}

#[test]
fn a_trial_waits_for_gpus_that_are_well_and_says_so() {
    if !stoker_test_cluster::nodes_wanted() {
        return;
    }
    let (cluster, _turn) = cluster();
    cluster.gpus(1, 2).unwrap();
    cluster.gpus(2, 1).unwrap();
    cluster.set_sick(1, &["gpu-0", "gpu-1"]).unwrap();
    let change = json!({
        "resources": { "slotsPerTrial": 2, "slotsPerPod": 2, "slotResource": GPU },
        // These are GPUs by name alone.
        "env": [{ "name": "STOKER_DEVICE", "value": "cpu" }],
        "searcher": {
            "metric": "validation_accuracy", "smallerIsBetter": false,
            "maxLength": { "batches": 100 }, "single": {},
        },
    });
    cluster.apply(&mnist("sick", &change).to_string()).unwrap();
    wait_until("the trial says what it waits for", 60, || {
        let trial =
            cluster.get(&["-n", NAMESPACE, "trial", "sick-0"]).map_err(|it| it.to_string())?;
        let conditions = trial["status"]["conditions"].as_array().cloned().unwrap_or_default();
        let scheduled = conditions.iter().find(|it| it["type"] == "Scheduled");
        let message = scheduled.and_then(|it| it["message"].as_str()).unwrap_or_default();
        if message.contains(GPU) { Ok(()) } else { Err(trial["status"].to_string()) }
    })
    .unwrap_or_else(|error| panic!("{error}\n{}", state(cluster)));
    cluster.set_sick(1, &[]).unwrap();
    let found = ended(cluster, "sick", 180);
    assert_eq!(found["status"]["phase"], "Completed", "{}", state(cluster));
    let pods = cluster.get(&["-n", NAMESPACE, "pods", "-l", "stoker.dev/experiment=sick"]).unwrap();
    let pod = pods["items"].as_array().and_then(|it| it.first()).cloned().unwrap_or(Value::Null);
    assert_eq!(pod["spec"]["containers"][0]["resources"]["limits"][GPU], "2", "{pods}");
    assert_eq!(get(cluster, "trial", "sick-0")["status"]["restarts"], 0);
    cluster.gpus(1, 0).unwrap();
    cluster.gpus(2, 0).unwrap();
}
