//! Golden test of a whole pod, and tests of how single fields of a job change it.

use stoker_api::inference::InferenceJobSpec;
use stoker_api::validate::validate_inference_on_cluster;
use stoker_engine::inference::config::trial_config;

use super::*;
use crate::pod::{merge, parse_pod};

fn operator_config() -> OperatorConfig {
    OperatorConfig {
        report_server_url: "https://stoker-door.stoker-system.svc:8443".to_owned(),
        report_server_ca: concat!(env!("CARGO_MANIFEST_DIR"), "/src/trial/pods/ca.txt").into(),
        gang_key: vec![1; 32],
        storage_url: "s3://runs/".to_owned(),
        storage_endpoint: Some("http://s3:8333".to_owned()),
        storage_secret: Some("storage".to_owned()),
        trainer_image: "stoker-trainer:1".to_owned(),
        image_pull_policy: "IfNotPresent".to_owned(),
        start_deadline_seconds: 600,
    }
}

fn pod_of(change: &Value, start: ProcessStart) -> Value {
    let mut spec = json!({
        "entrypoint": { "command": ["stoker-trainer", "iris-predict"] },
        "checkpoint": { "trial": "iris-0" },
        "input": { "url": "s3://data/flowers/*.csv" },
        "resources": { "slots": 4 },
    });
    merge(&mut spec, change);
    let spec: InferenceJobSpec = serde_json::from_value(spec).unwrap();
    let valid = validate_inference_on_cluster("species", &spec).unwrap();
    let job_context = job_context(&operator_config(), &valid, "ml", "0b3f9c1e-77aa");
    let storage = used_storage(&operator_config(), &valid, &job_context);
    let config = trial_config(&job_context, start);
    pod(&operator_config(), &valid, &storage, "ml", &config, start)
}

const START: ProcessStart = ProcessStart { role: Role::Work, slot: 3, attempt: 5 };

/// The only test that pins every field. Set `UPDATE_GOLDEN=1` to rewrite the file.
#[test]
fn pod_matches_the_golden_file() {
    let pod = serde_json::to_string_pretty(&pod_of(&json!({}), START)).unwrap() + "\n";
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/src/job/pods/golden.json");
    if std::env::var_os("UPDATE_GOLDEN").is_some() {
        std::fs::write(path, &pod).unwrap();
    }
    let expected = std::fs::read_to_string(path).unwrap();
    assert_eq!(pod, expected, "set UPDATE_GOLDEN=1 to rewrite the file");
}

#[test]
fn fields_of_a_job_reach_the_pod() {
    let check = |change: Value, pointer: &str, expected: Value| {
        let pod = pod_of(&change, START);
        let value = pod.pointer(pointer).cloned().unwrap_or_default();
        assert_eq!(value, expected, "{pointer} by {change}");
        parse_pod(pod).unwrap();
    };
    let main = "/spec/containers/0";
    let gpus = json!({ "resources": { "slotResource": "nvidia.com/gpu" } });
    check(gpus.clone(), &format!("{main}/resources/limits/nvidia.com~1gpu"), json!("1"));
    let cuda = json!({ "name": "STOKER_DEVICE", "value": "cuda" });
    check(gpus, &format!("{main}/env/4"), cuda);
    let sent = json!({ "context": { "sha256": "a".repeat(64) } });
    check(sent.clone(), &format!("{main}/workingDir"), json!("/stoker/context"));
    check(sent, "/spec/initContainers/0/command/1", json!("setup"));
    check(json!({ "pod": { "image": "mine:2" } }), &format!("{main}/image"), json!("mine:2"));
    let over = json!({
        "podOverrides": { "metadata": { "labels": null }, "spec": { "dnsPolicy": "None" } },
    });
    check(over.clone(), "/spec/dnsPolicy", json!("None"));
    check(over, "/metadata/labels/stoker.dev~1job", json!("species"));
    let own = json!({ "storage": { "secretName": "mine" } });
    check(own, &format!("{main}/envFrom/0/secretRef/name"), json!("mine"));
    let secret = format!("{main}/envFrom");
    check(json!({}), &secret, json!([{ "secretRef": { "name": "storage" } }]));
    // The default Secret is only for the default storage.
    check(json!({ "storage": { "url": "s3://own" } }), &secret, json!([]));
    let named = json!({ "storage": { "url": "s3://own", "secretName": "storage" } });
    check(named, &secret, json!([{ "secretRef": { "name": "storage" } }]));
}

#[test]
fn processes_have_distinct_pod_names() {
    let name = |role| pod_name("species", ProcessStart { role, ..START });
    let names = [Role::Plan, Role::Work, Role::Finish].map(name);
    assert_eq!(names, ["species-a5-plan", "species-a5-w3", "species-a5-finish"]);
}

#[test]
fn output_defaults_to_a_path_in_the_storage() {
    let output = |change: Value| {
        let pod = pod_of(&change, START);
        let text = &pod["metadata"]["annotations"][ANNOTATION_TRIAL_CONFIG];
        let config: TrialConfig = serde_json::from_str(text.as_str().unwrap()).unwrap();
        let output = config.inference.unwrap().output;
        (output.url.unwrap(), output.endpoint)
    };
    let s3 = Some("http://s3:8333".to_owned());
    let own = "s3://runs/ml/species-0b3f9c1e/output".to_owned();
    assert_eq!(output(json!({})), (own, s3));
    let custom = json!({ "output": { "url": "s3://mine/out" } });
    assert_eq!(output(custom), ("s3://mine/out".to_owned(), None));
}
