//! Golden test of a whole pod, and tests of how single fields of an experiment change it.

use serde_json::{Value, json};
use stoker_api::experiment::ExperimentSpec;
use stoker_api::trial::{TrialSpec, TrialStatus};
use stoker_api::validate::validate;
use stoker_engine::trial::TrialRecord;

use super::*;
use crate::pod::{merge, parse_pod};
use crate::trial::config::trial_config;

fn operator_config() -> OperatorConfig {
    OperatorConfig {
        report_server_url: "https://stoker-door.stoker-system.svc:8443".to_owned(),
        report_server_ca: concat!(env!("CARGO_MANIFEST_DIR"), "/src/trial/pods/ca.txt").into(),
        gang_key: vec![1; 32],
        storage_url: "s3://runs".to_owned(),
        storage_endpoint: None,
        storage_secret: Some("storage".to_owned()),
        trainer_image: "stoker-trainer:1".to_owned(),
        image_pull_policy: "IfNotPresent".to_owned(),
        start_deadline_seconds: 600,
    }
}

const NAMES: TrialNames<'_> = TrialNames {
    namespace: "ml",
    trial: "mnist-3",
    uid: "trial-uid",
    experiment_uid: "0b3f9c1e-77aa",
};

fn valid(change: &Value) -> ValidExperiment {
    let mut spec = json!({
        "entrypoint": { "command": ["stoker-trainer", "mnist"] },
        "searcher": { "metric": "loss", "maxLength": { "epochs": 3 }, "single": {} },
        "resources": { "slotsPerTrial": 4, "slotsPerPod": 2 },
    });
    merge(&mut spec, change);
    let spec: ExperimentSpec = serde_json::from_value(spec).unwrap();
    validate("mnist", &spec).unwrap()
}

fn pod_of(change: &Value, index: u32) -> Value {
    let valid = valid(change);
    let draw: TrialSpec = serde_json::from_value(json!({
        "experiment": "mnist", "index": 3, "requestId": "r", "seed": 7,
        "hyperparameters": { "rate": 0.1 }, "unit": "epochs", "units": 3,
    }))
    .unwrap();
    let record = TrialRecord { spec: draw, status: TrialStatus::default() };
    let storage = operator_config().storage(&valid.spec.checkpoint_storage, String::new());
    let config = trial_config(&operator_config(), &valid, &storage, &record, NAMES, 2);
    pod(&operator_config(), &valid, &storage, NAMES, &config, index)
}

/// The only test that pins every field. Set `UPDATE_GOLDEN=1` to rewrite the file.
#[test]
fn pod_matches_the_golden_file() {
    let pod = serde_json::to_string_pretty(&pod_of(&json!({}), 1)).unwrap() + "\n";
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/src/trial/pods/golden.json");
    if std::env::var_os("UPDATE_GOLDEN").is_some() {
        std::fs::write(path, &pod).unwrap();
    }
    let expected = std::fs::read_to_string(path).unwrap();
    assert_eq!(pod, expected, "set UPDATE_GOLDEN=1 to rewrite the file");
}

#[track_caller]
fn check(change: Value, pointer: &str, expected: Value) {
    let pod = pod_of(&change, 0);
    let value = pod.pointer(pointer).cloned().unwrap_or_default();
    assert_eq!(value, expected, "{pointer} by {change}");
    parse_pod(pod).unwrap();
}

#[test]
fn device_in_overrides_is_the_only_one() {
    let source = json!({ "secretKeyRef": { "name": "s", "key": "device" } });
    let variable = json!({ "name": "STOKER_DEVICE", "valueFrom": source });
    let trainer = json!({ "name": "trainer", "env": [variable.clone()] });
    let change = json!({ "podOverrides": { "spec": { "containers": [trainer] } } });
    let pod = pod_of(&change, 0);
    let env = pod.pointer("/spec/containers/0/env").unwrap().as_array().unwrap();
    let devices: Vec<_> = env.iter().filter(|other| other["name"] == "STOKER_DEVICE").collect();
    assert_eq!(devices, [&variable]);
}

#[test]
fn fields_of_an_experiment_reach_the_pod() {
    let main = "/spec/containers/0";
    let at = |field: &str| format!("{main}/{field}");
    let alone = json!({ "resources": { "slotsPerTrial": 1, "slotsPerPod": null } });
    let names = |pod: Value| {
        let env = pod.pointer("/spec/containers/0/env").unwrap().as_array().unwrap().clone();
        env.iter().map(|variable| variable["name"].as_str().unwrap().to_owned()).collect::<Vec<_>>()
    };
    assert!(!names(pod_of(&alone, 0)).contains(&"TF_CONFIG".to_owned()));
    assert!(names(pod_of(&json!({}), 0)).contains(&"TF_CONFIG".to_owned()));
    let gpus = json!({ "resources": { "slotResource": "nvidia.com/gpu" } });
    check(gpus.clone(), &at("resources/limits/nvidia.com~1gpu"), json!("2"));
    check(gpus, &at("env/4"), json!({ "name": "STOKER_DEVICE", "value": "cuda" }));
    let overridden = json!({
        "resources": { "slotResource": "nvidia.com/gpu" },
        "env": [{ "name": "STOKER_DEVICE", "value": "cpu" }],
    });
    check(overridden, &at("env/4"), json!({ "name": "STOKER_DEVICE", "value": "cpu" }));
    let others = json!({ "resources": { "slotResource": "amd.com/gpu" } });
    assert!(!names(pod_of(&others, 0)).contains(&"STOKER_DEVICE".to_owned()));
    check(json!({}), &at("env/4"), json!({ "name": "STOKER_DEVICE", "value": "cpu" }));
    let trainer = |resources: Value| {
        let trainer = json!({ "name": "trainer", "resources": resources });
        json!({ "podOverrides": { "spec": { "containers": [trainer] } } })
    };
    for gpus in [
        json!({ "resources": { "limits": { "nvidia.com/gpu": "1" } } }),
        json!({ "resources": { "limits": { "volcano.sh/vgpu-number": "1" } } }),
        trainer(json!({ "limits": { "nvidia.com/gpu": "1" } })),
        trainer(json!({ "claims": [{ "name": "gpu" }] })),
    ] {
        assert!(!names(pod_of(&gpus, 0)).contains(&"STOKER_DEVICE".to_owned()), "{gpus}");
    }
    let overridden = json!({ "pod": { "image": "mine:2", "imagePullSecrets": ["r"] } });
    check(overridden.clone(), &at("image"), json!("mine:2"));
    check(overridden.clone(), &at("command/0"), json!("/stoker/bin/stoker-trainer"));
    check(overridden.clone(), "/spec/initContainers/0/image", json!("stoker-trainer:1"));
    let launcher = json!("/usr/local/bin/stoker-trainer");
    check(overridden.clone(), "/spec/initContainers/0/command/0", launcher);
    check(overridden, "/spec/imagePullSecrets", json!([{ "name": "r" }]));
    check(json!({}), "/spec/initContainers", Value::Null);
    let sent = json!({ "context": { "sha256": "a".repeat(64) } });
    check(sent.clone(), &at("workingDir"), json!("/stoker/context"));
    check(sent, "/spec/initContainers/0/command/1", json!("setup"));
    for field in ["priorityClassName", "runtimeClassName", "schedulerName"] {
        check(json!({ "pod": { field: "p" } }), &format!("/spec/{field}"), json!("p"));
    }
    let disk = json!({ "context": { "sha256": "a".repeat(64) }, "pod": {
        "volumes": [{ "name": "d", "persistentVolumeClaim": { "claimName": "c" } }],
        "volumeMounts": [{ "name": "d", "mountPath": "/data" }],
    } });
    check(disk.clone(), "/spec/volumes/5/name", json!("d"));
    check(disk.clone(), &at("volumeMounts/5/mountPath"), json!("/data"));
    check(disk, "/spec/initContainers/0/volumeMounts/5/mountPath", json!("/data"));
}

/// A quota on `limits.cpu` refuses a pod if one of its containers has no such limit.
#[test]
fn setup_container_has_the_programs_limits() {
    let resources = "/spec/initContainers/0/resources";
    let check = |limits: Value, expected: Value| {
        let change = json!({ "pod": { "image": "mine:2" }, "resources": { "limits": limits } });
        check(change, resources, expected);
    };
    let small = json!({ "cpu": "100m", "memory": "64Mi" });
    check(json!({}), json!({ "requests": small, "limits": { "memory": "512Mi" } }));
    check(
        json!({ "cpu": "8", "memory": "128Mi", "rdma/hca": "1" }),
        json!({ "requests": small, "limits": { "cpu": "8", "memory": "512Mi" } }),
    );
    check(
        json!({ "cpu": "50m", "ephemeral-storage": "1Gi" }),
        json!({
            "requests": { "cpu": "50m", "memory": "64Mi", "ephemeral-storage": "1Gi" },
            "limits": { "cpu": "50m", "memory": "512Mi", "ephemeral-storage": "1Gi" },
        }),
    );
}

#[test]
fn default_secret_requires_the_default_storage() {
    let secrets = |storage: Value, expected: Value| {
        check(json!({ "checkpointStorage": storage }), "/spec/containers/0/envFrom", expected);
    };
    let secret = |name: &str| json!([{ "secretRef": { "name": name } }]);
    secrets(json!({}), secret("storage"));
    secrets(json!({ "secretName": "mine" }), secret("mine"));
    secrets(json!({ "url": "file:///data" }), json!([]));
    secrets(json!({ "url": "s3://own", "secretName": "storage" }), secret("storage"));
}

#[test]
fn overrides_are_merged_last_and_by_name() {
    let over = |body: Value| json!({ "podOverrides": body });
    let container = json!({ "spec": { "containers": [
        { "name": "trainer", "env": [{ "name": "A", "value": "1" }], "stdin": true },
        { "name": "side", "image": "s" },
    ] } });
    let main = "/spec/containers/0";
    check(over(container.clone()), &format!("{main}/stdin"), json!(true));
    check(over(container.clone()), "/spec/containers/1/name", json!("side"));
    check(over(container.clone()), &format!("{main}/image"), json!("stoker-trainer:1"));
    let env = pod_of(&over(container), 0);
    let env = env.pointer("/spec/containers/0/env").unwrap().as_array().unwrap().clone();
    assert!(env.contains(&json!({ "name": "A", "value": "1" })) && env.len() > 4);
    let mounts = over(json!({ "spec": { "containers": [{ "name": "trainer", "volumeMounts": [
        { "name": "d", "mountPath": "/in", "subPath": "in" },
        { "name": "d", "mountPath": "/out", "subPath": "out" },
        { "name": "mine", "mountPath": "/tmp" },
        { "name": "stoker-shared", "subPath": "s" },
    ] }] } }));
    check(mounts.clone(), &format!("{main}/volumeMounts/5/mountPath"), json!("/in"));
    check(mounts.clone(), &format!("{main}/volumeMounts/6/subPath"), json!("out"));
    check(mounts.clone(), &format!("{main}/volumeMounts/3/name"), json!("mine"));
    check(mounts, &format!("{main}/volumeMounts/2/subPath"), json!("s"));
    let user =
        over(json!({ "spec": { "securityContext": { "runAsUser": 1000, "fsGroup": null } } }));
    check(user.clone(), "/spec/securityContext/runAsUser", json!(1000));
    check(user.clone(), "/spec/securityContext/fsGroup", Value::Null);
    check(user, "/spec/securityContext/runAsNonRoot", json!(true));
    let bare = over(json!({ "metadata": { "labels": null, "annotations": { "a": "b" } } }));
    check(bare.clone(), "/metadata/labels/stoker.dev~1trial", json!("mnist-3"));
    check(bare, "/metadata/annotations/a", json!("b"));
    check(over(json!({ "metadata": null })), "/metadata/name", json!("mnist-3-a2-r0"));
    let no_pod = json!({ "spec": { "containers": "x" } });
    assert!(parse_pod(no_pod).unwrap_err().starts_with("spec.podOverrides: "));
}

#[test]
fn ranks_wait_until_a_late_start_deadline() {
    let seconds = |change: &Value, start_deadline_seconds: u64| {
        let config = OperatorConfig { start_deadline_seconds, ..operator_config() };
        let variable = rendezvous_seconds(&config, &valid(change))?;
        assert_eq!(variable["name"], "STOKER_RENDEZVOUS_SECONDS");
        variable["value"].as_str().map(str::to_owned)
    };
    let plain = json!({});
    assert_eq!(seconds(&plain, 600), None);
    assert_eq!(seconds(&plain, 3600).as_deref(), Some("3600"));
    assert_eq!(seconds(&json!({ "resources": { "slotsPerPod": 4 } }), 3600), None);
    let own = json!({ "env": [{ "name": "STOKER_RENDEZVOUS_SECONDS", "value": "9" }] });
    assert_eq!(seconds(&own, 3600), None);
}

#[test]
fn gang_secret_is_unique_per_attempt() {
    let gang = |pod: Value| {
        let text = pod.pointer("/metadata/annotations/stoker.dev~1trial-config").unwrap().clone();
        let config: TrialConfig = serde_json::from_str(text.as_str().unwrap()).unwrap();
        config.gang.unwrap()
    };
    let (first, second) = (gang(pod_of(&json!({}), 0)), gang(pod_of(&json!({}), 1)));
    assert_eq!(first, second);
    assert_eq!(first.rendezvous, "mnist-3-a2-r0.mnist-3.ml.svc:29400");
    assert_eq!((first.world_size, first.ranks_per_pod, first.secret.len()), (4, 2, 64));
    let alone = gang(pod_of(&json!({ "resources": { "slotsPerPod": 4 } }), 0));
    assert_eq!(alone.rendezvous, "127.0.0.1:29400", "a single pod has no Service");
}

fn cleanup_of(change: &Value) -> Value {
    let mut spec = json!({
        "entrypoint": { "command": ["train"] },
        "searcher": { "metric": "loss", "maxLength": { "epochs": 3 }, "single": {} },
    });
    merge(&mut spec, change);
    let spec: ExperimentSpec = serde_json::from_value(spec).unwrap();
    let valid = validate("mnist", &spec).unwrap();
    let storage = operator_config().storage(&valid.spec.checkpoint_storage, String::new());
    let cleanup: Cleanup = serde_json::from_value(json!({
        "storage": { "url": storage.url }, "delete": [],
    }))
    .unwrap();
    let pod = cleanup_pod(
        &operator_config(),
        &valid,
        &storage,
        "ml",
        "uid",
        "mnist-cleanup-0",
        (&cleanup, 7),
    );
    parse_pod(pod.clone()).unwrap();
    pod
}

#[test]
fn clean_up_pods_take_overrides_and_limits() {
    let check = |change: Value, pointer: &str, expected: Value| {
        let pod = cleanup_of(&change);
        let value = pod.pointer(pointer).cloned().unwrap_or_default();
        assert_eq!(value, expected, "{pointer} by {change}");
    };
    let main = "/spec/containers/0";
    let resources = format!("{main}/resources");
    check(
        json!({}),
        &resources,
        json!({ "requests": { "cpu": "100m", "memory": "64Mi" }, "limits": { "memory": "512Mi" } }),
    );
    let large = json!({ "cpu": "8", "memory": "64Gi", "rdma/hca": "1" });
    check(
        json!({ "resources": { "limits": large } }),
        &resources,
        json!({
            "requests": { "cpu": "100m", "memory": "64Mi" },
            "limits": { "cpu": "8", "memory": "64Gi" },
        }),
    );
    check(
        json!({ "resources": { "limits": { "cpu": "50m" } } }),
        &resources,
        json!({
            "requests": { "cpu": "50m", "memory": "64Mi" },
            "limits": { "cpu": "50m", "memory": "512Mi" },
        }),
    );
    let overrides = json!({ "podOverrides": {
        "metadata": { "labels": { "team": "a", "stoker.dev/component": "other" } },
        "spec": {
            "priorityClassName": "low",
            "initContainers": [{ "name": "setup", "resources": { "limits": { "cpu": "1" } } }],
            "containers": [{
                "name": "trainer", "image": "mine:1", "env": [{ "name": "A", "value": "1" }],
                "resources": { "limits": { "ephemeral-storage": "1Gi" } },
            }],
        },
    } });
    check(overrides.clone(), "/metadata/labels/team", json!("a"));
    check(overrides.clone(), "/metadata/labels/stoker.dev~1component", json!("cleanup"));
    check(overrides.clone(), "/spec/priorityClassName", json!("low"));
    check(overrides.clone(), "/spec/initContainers", json!([]));
    check(overrides.clone(), &format!("{main}/image"), json!("stoker-trainer:1"));
    // Independent of a `PATH` for the image of the user.
    let command = json!(["/usr/local/bin/stoker-trainer", "gc"]);
    check(overrides.clone(), &format!("{main}/command"), command);
    check(overrides.clone(), &format!("{resources}/limits/ephemeral-storage"), json!("1Gi"));
    let env = cleanup_of(&overrides);
    let env = env.pointer("/spec/containers/0/env").unwrap().as_array().unwrap().clone();
    assert!(env.contains(&json!({ "name": "A", "value": "1" })));
}

#[test]
fn clean_up_pods_request_no_devices() {
    let toleration =
        |key: &str| json!({ "key": key, "operator": "Exists", "effect": "NoSchedule" });
    let own = json!({ "key": "team", "operator": "Exists" });
    let place = json!({ "cloud.google.com/gke-accelerator": "nvidia-h100-80gb" });
    let limits = json!({ "rdma/hca": "1", "memory": "1Gi", "example.com/fpga": 1 });
    let pod = cleanup_of(&json!({
        "resources": { "slotResource": "nvidia.com/gpu", "limits": { "example.com/nic": "1" } },
        "pod": {
            "nodeSelector": place, "runtimeClassName": "nvidia-cdi",
            "tolerations": [own.clone(), toleration("rdma/hca")],
        },
        "podOverrides": { "spec": {
            "resourceClaims": [{ "name": "nic", "resourceClaimTemplateName": "nic" }],
            "initContainers": [{ "name": "first", "resources": { "claims": [{ "name": "nic" }] } }],
            "containers": [
                { "name": "trainer", "resources": {
                    "limits": limits, "requests": limits, "claims": [{ "name": "nic" }],
                } },
                { "name": "side", "resources": { "limits": { "nvidia.com/gpu": "1" } } },
            ],
        } },
    }));
    let spec = &pod["spec"];
    assert_eq!(spec["resourceClaims"], Value::Null);
    assert_eq!(spec["initContainers"][0]["resources"], json!({}));
    let requests = json!({ "cpu": "100m", "memory": "1Gi" });
    let resources = json!({ "requests": requests, "limits": { "memory": "1Gi" } });
    assert_eq!(spec["containers"][0]["resources"], resources);
    assert_eq!(spec["containers"][1]["resources"], json!({ "limits": {} }));
    // Only these nodes may reach the storage.
    assert_eq!(spec["nodeSelector"], place);
    assert_eq!(spec["runtimeClassName"], Value::Null);
    let added = ["example.com/fpga", "example.com/nic", "nvidia.com/gpu"].map(toleration);
    let tolerations = [&[own, toleration("rdma/hca")][..], &added].concat();
    assert_eq!(spec["tolerations"], json!(tolerations));
}

#[test]
fn clean_up_pods_keep_other_settings() {
    let spec = |change: Value| cleanup_of(&change)["spec"].clone();
    assert_eq!(spec(json!({}))["tolerations"], Value::Null);
    let sandbox = spec(json!({ "pod": { "runtimeClassName": "gvisor" } }));
    assert_eq!(sandbox["runtimeClassName"], "gvisor");
    let gpus = json!({ "slotResource": "nvidia.com/gpu" });
    let overridden = spec(json!({
        "resources": gpus, "podOverrides": { "spec": { "tolerations": null } },
    }));
    assert_eq!(overridden["tolerations"][0]["key"], "nvidia.com/gpu");
}
