//! Builds the pods and the Service that a trial should have. Pure: whatever could be wrong with an
//! experiment was caught when it was validated.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{Pod, Service};
use serde_json::{Map, Value, json};
use stoker_api::contract::{Cleanup, TrialConfig};
use stoker_api::experiment::ExperimentSpec;
use stoker_api::names::{
    ANNOTATION_TRIAL_CONFIG, API_VERSION, COMPONENT_CLEANUP, COMPONENT_TRIAL, ENV_CACHE,
    ENV_DEVICE, ENV_POD_INDEX, ENV_RENDEZVOUS_PORT, ENV_TERMINATION_FILE, ENV_TRIAL_CONFIG,
    LABEL_ATTEMPT, LABEL_COMPONENT, LABEL_EXPERIMENT, LABEL_POD_INDEX, LABEL_TRIAL,
    RENDEZVOUS_PORT, TOKEN_AUDIENCE, pod_paths,
};
use stoker_api::validate::ValidExperiment;

use super::config::{Names, Setup};
use crate::objects::{SETUP_CONTAINER, TRAINER_CONTAINER};

/// What the names of slots of NVIDIA's begin with: whole GPUs, and parts of them.
const NVIDIA: &str = "nvidia.com/";
/// User and group of the stock image.
const USER: i64 = 65_532;
/// The longest grace of a pod that is deleted by others, such as by a drained node: time for a
/// checkpoint.
const GRACE_SECONDS_MAX: u32 = 600;
/// The launcher in the stock image.
const LAUNCHER: &str = "stoker-trainer";

/// The name of a pod, and its host name.
pub fn pod_name(trial: &str, attempt: u32, index: u32) -> String {
    format!("{trial}-a{attempt}-r{index}")
}

/// The address of a pod of a gang.
pub fn host(trial: &str, namespace: &str, attempt: u32, index: u32, port: u16) -> String {
    format!("{}.{trial}.{namespace}.svc:{port}", pod_name(trial, attempt, index))
}

/// The port on which ranks meet.
pub fn port(spec: &ExperimentSpec) -> u16 {
    let named = spec.env.iter().find(|it| it.name == ENV_RENDEZVOUS_PORT);
    named.and_then(|it| it.value.parse().ok()).unwrap_or(RENDEZVOUS_PORT)
}

/// The headless Service by which a gang's pods find each other, before they are ready.
///
/// # Panics
///
/// Never: its shape is fixed.
pub fn service(valid: &ValidExperiment, names: Names<'_>) -> Service {
    let value = json!({
        "metadata": {
            "name": names.trial,
            "namespace": names.namespace,
            "labels": labels(valid, names),
            "ownerReferences": [owner(names)],
        },
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": true,
            "selector": { LABEL_TRIAL: names.trial },
            "ports": [{ "name": "rendezvous", "port": port(&valid.spec) }],
        },
    });
    serde_json::from_value(value).expect("a service of fixed shape")
}

/// The pod of `index` of an attempt, as JSON: `podOverrides` are merged in last.
///
/// # Panics
///
/// Never: a configuration is plain JSON.
pub fn pod(
    setup: &Setup,
    valid: &ValidExperiment,
    names: Names<'_>,
    config: &TrialConfig,
    index: u32,
) -> Value {
    let attempt = config.attempt;
    let name = pod_name(names.trial, attempt, index);
    let mut labels = labels(valid, names);
    labels.insert(LABEL_ATTEMPT.to_owned(), attempt.to_string());
    labels.insert(LABEL_POD_INDEX.to_owned(), index.to_string());
    labels.insert(LABEL_COMPONENT.to_owned(), COMPONENT_TRIAL.to_owned());
    let text = serde_json::to_string(config).expect("a configuration is plain JSON");
    let mut pod = json!({
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name,
            "namespace": names.namespace,
            "labels": labels,
            "annotations": { ANNOTATION_TRIAL_CONFIG: text },
            "ownerReferences": [owner(names)],
        },
        "spec": spec(setup, valid, names, config, index),
    });
    let ours = pod["metadata"].clone();
    if let Some(overrides) = &valid.spec.pod_overrides {
        merge(&mut pod, overrides);
    }
    // A pod without these would be nobody's.
    if !pod["metadata"].is_object() {
        pod["metadata"] = json!({});
    }
    merge(&mut pod["metadata"], &ours);
    pod
}

fn labels(valid: &ValidExperiment, names: Names<'_>) -> BTreeMap<String, String> {
    [
        ("app.kubernetes.io/managed-by", "stoker"),
        (LABEL_EXPERIMENT, &valid.name),
        (LABEL_TRIAL, names.trial),
    ]
    .map(|(name, value)| (name.to_owned(), value.to_owned()))
    .into()
}

fn owner(names: Names<'_>) -> Value {
    json!({
        "apiVersion": API_VERSION, "kind": "Trial", "name": names.trial, "uid": names.uid,
        "controller": true, "blockOwnerDeletion": false,
    })
}

/// A pod that deletes checkpoints of an experiment that has ended, by what `cleanup` says.
///
/// # Panics
///
/// Never: a list of names is plain JSON.
pub fn cleanup_pod(
    setup: &Setup,
    valid: &ValidExperiment,
    namespace: &str,
    experiment_uid: &str,
    name: &str,
    cleanup: &Cleanup,
) -> Value {
    let text = serde_json::to_string(cleanup).expect("a list of names is plain JSON");
    let (env, env_from) = environment(setup, valid, 0);
    let mut all_mounts = mounts();
    all_mounts.extend(valid.spec.pod.volume_mounts.iter().map(|it| json!(it)));
    let mut pod = json!({
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name,
            "namespace": namespace,
            "labels": {
                "app.kubernetes.io/managed-by": "stoker",
                LABEL_EXPERIMENT: valid.name,
                LABEL_COMPONENT: COMPONENT_CLEANUP,
            },
            "annotations": { ANNOTATION_TRIAL_CONFIG: text },
            "ownerReferences": [{
                "apiVersion": API_VERSION, "kind": "Experiment", "name": valid.name,
                "uid": experiment_uid, "controller": true, "blockOwnerDeletion": false,
            }],
        },
        "spec": common_spec(valid),
    });
    let file = pod_paths::CLEANUP.rsplit('/').next().unwrap_or_default();
    pod["spec"]["volumes"][0]["downwardAPI"]["items"][0]["path"] = json!(file);
    pod["spec"]["terminationGracePeriodSeconds"] = json!(GRACE_SECONDS_MAX);
    pod["spec"]["containers"] = json!([{
        "name": TRAINER_CONTAINER,
        "image": setup.trainer_image,
        "imagePullPolicy": setup.image_pull_policy,
        "command": [LAUNCHER, "gc"],
        "env": env,
        "envFrom": env_from,
        "resources": small(),
        "securityContext": security(),
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": all_mounts,
    }]);
    pod
}

fn small() -> Value {
    json!({
        "requests": { "cpu": "100m", "memory": "64Mi" },
        "limits": { "memory": "512Mi" },
    })
}

fn spec(
    setup: &Setup,
    valid: &ValidExperiment,
    names: Names<'_>,
    config: &TrialConfig,
    index: u32,
) -> Value {
    let template = &valid.spec.pod;
    let stock = template.image.as_ref().is_none_or(|it| *it == setup.trainer_image);
    let needs_setup = !stock || config.context.is_some();
    let mut spec = common_spec(valid);
    spec["hostname"] = json!(pod_name(names.trial, config.attempt, index));
    spec["subdomain"] = json!(names.trial);
    spec["containers"] = json!([trainer(setup, valid, names, config, index, needs_setup)]);
    if needs_setup {
        spec["initContainers"] = json!([setup_container(setup, valid, index)]);
    }
    spec
}

/// What all pods of an experiment have: where they run, as whom, and with which volumes.
fn common_spec(valid: &ValidExperiment) -> Value {
    let template = &valid.spec.pod;
    let mut spec = json!({
        "restartPolicy": "Never",
        "automountServiceAccountToken": false,
        "enableServiceLinks": false,
        "terminationGracePeriodSeconds":
            valid.spec.preemption_timeout_seconds.min(GRACE_SECONDS_MAX),
        "securityContext": {
            "runAsNonRoot": true, "runAsUser": USER, "runAsGroup": USER, "fsGroup": USER,
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": { "type": "RuntimeDefault" },
        },
        "volumes": volumes(valid),
    });
    let mut put = |name: &str, value: Value| {
        if value != Value::Null && value != json!([]) && value != json!({}) {
            spec[name] = value;
        }
    };
    put("serviceAccountName", json!(template.service_account_name));
    put("priorityClassName", json!(template.priority_class_name));
    put("runtimeClassName", json!(template.runtime_class_name));
    put("schedulerName", json!(template.scheduler_name));
    put("nodeSelector", json!(template.node_selector));
    put("tolerations", json!(template.tolerations));
    put("affinity", json!(template.affinity));
    let secrets = template.image_pull_secrets.iter().map(|it| json!({ "name": it }));
    put("imagePullSecrets", secrets.collect());
    spec
}

fn volumes(valid: &ValidExperiment) -> Value {
    let mut volumes = vec![
        json!({ "name": "stoker-config", "downwardAPI": { "items": [{
            "path": "trial.json",
            "fieldRef": { "fieldPath": format!("metadata.annotations['{ANNOTATION_TRIAL_CONFIG}']") },
        }] } }),
        json!({ "name": "stoker-token", "projected": { "sources": [{ "serviceAccountToken": {
            "path": "token", "audience": TOKEN_AUDIENCE, "expirationSeconds": 3600,
        } }] } }),
        json!({ "name": "stoker-shared", "emptyDir": {} }),
        json!({ "name": "stoker-tmp", "emptyDir": {} }),
        json!({ "name": "stoker-shm", "emptyDir": {
            "medium": "Memory", "sizeLimit": valid.spec.resources.shm_size,
        } }),
    ];
    volumes.extend(valid.spec.pod.volumes.iter().cloned());
    volumes.into()
}

fn mounts() -> Vec<Value> {
    let mount = |name: &str, path: &str, read_only: bool| json!({ "name": name, "mountPath": path, "readOnly": read_only });
    vec![
        mount("stoker-config", pod_paths::TRIAL_CONFIG_FOLDER, true),
        mount("stoker-token", pod_paths::TOKEN_FOLDER, true),
        mount("stoker-shared", pod_paths::SHARED, false),
        mount("stoker-tmp", "/tmp", false),
        mount("stoker-shm", "/dev/shm", false),
    ]
}

fn security() -> Value {
    json!({
        "allowPrivilegeEscalation": false,
        "readOnlyRootFilesystem": true,
        "capabilities": { "drop": ["ALL"] },
    })
}

/// The variables of every container, and the Secrets whose keys are more of them.
fn environment(setup: &Setup, valid: &ValidExperiment, index: u32) -> (Vec<Value>, Vec<Value>) {
    let spec = &valid.spec;
    let var = |name: &str, value: &str| json!({ "name": name, "value": value });
    let mut env = vec![
        var(ENV_TRIAL_CONFIG, pod_paths::TRIAL_CONFIG),
        var(ENV_TERMINATION_FILE, pod_paths::TERMINATION),
        var(ENV_POD_INDEX, &index.to_string()),
    ];
    env.push(var(ENV_CACHE, &format!("{}/cache", pod_paths::SHARED)));
    let is_nvidia = spec.resources.slot_resource.as_ref().is_some_and(|it| it.starts_with(NVIDIA));
    if is_nvidia && !spec.env.iter().any(|it| it.name == ENV_DEVICE) {
        // Whoever asks for GPUs does not want to train beside them.
        env.push(var(ENV_DEVICE, "cuda"));
    }
    env.extend(spec.env.iter().map(|it| var(&it.name, &it.value)));
    let secrets = spec.pod.env_from_secrets.iter().cloned().chain(setup.storage_secret(valid));
    let from = secrets.map(|it| json!({ "secretRef": { "name": it } }));
    (env, from.collect())
}

fn trainer(
    setup: &Setup,
    valid: &ValidExperiment,
    names: Names<'_>,
    config: &TrialConfig,
    index: u32,
    needs_setup: bool,
) -> Value {
    let spec = &valid.spec;
    let template = &spec.pod;
    let launcher = if needs_setup { pod_paths::LAUNCHER } else { LAUNCHER };
    let command = [launcher, "launch", "--"].map(str::to_owned).into_iter();
    let command: Vec<String> = command.chain(spec.entrypoint.command.iter().cloned()).collect();
    let (mut env, env_from) = environment(setup, valid, index);
    if let Some(tf_config) = tf_config(valid, names, config.attempt, index) {
        env.push(json!({ "name": "TF_CONFIG", "value": tf_config }));
    }
    let mut all_mounts = mounts();
    all_mounts.extend(template.volume_mounts.iter().map(|it| json!(it)));
    let mut container = json!({
        "name": TRAINER_CONTAINER,
        "image": template.image.as_ref().unwrap_or(&setup.trainer_image),
        "imagePullPolicy": template.image_pull_policy.as_ref().unwrap_or(&setup.image_pull_policy),
        "command": command,
        "args": spec.entrypoint.args,
        "env": env,
        "envFrom": env_from,
        "resources": resources(spec),
        "securityContext": security(),
        "terminationMessagePath": pod_paths::TERMINATION,
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": all_mounts,
    });
    if spec.entrypoint.args.is_empty()
        && let Some(fields) = container.as_object_mut()
    {
        fields.remove("args");
    }
    if config.context.is_some() {
        container["workingDir"] = json!(pod_paths::CONTEXT);
    }
    container
}

fn setup_container(setup: &Setup, valid: &ValidExperiment, index: u32) -> Value {
    let (env, env_from) = environment(setup, valid, index);
    json!({
        "name": SETUP_CONTAINER,
        "image": setup.trainer_image,
        "imagePullPolicy": setup.image_pull_policy,
        "command": [LAUNCHER, "setup"],
        "env": env,
        "envFrom": env_from,
        "resources": small(),
        "securityContext": security(),
        "terminationMessagePath": pod_paths::TERMINATION,
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": mounts(),
    })
}

fn resources(spec: &ExperimentSpec) -> Value {
    let resources = &spec.resources;
    let (mut requests, mut limits) = (resources.requests.clone(), resources.limits.clone());
    if let Some(slot) = &resources.slot_resource {
        let slots = resources.slots_per_pod().to_string();
        requests.insert(slot.clone(), slots.clone());
        limits.insert(slot.clone(), slots);
    }
    json!({ "requests": requests, "limits": limits })
}

/// What TensorFlow's programs find their peers by; `None` for a gang of one pod.
fn tf_config(
    valid: &ValidExperiment,
    names: Names<'_>,
    attempt: u32,
    index: u32,
) -> Option<String> {
    let num_pods = valid.spec.resources.num_pods();
    let port = port(&valid.spec);
    let workers: Vec<String> =
        (0..num_pods).map(|it| host(names.trial, names.namespace, attempt, it, port)).collect();
    let config = json!({
        "cluster": { "worker": workers },
        "task": { "type": "worker", "index": index },
    });
    (num_pods > 1).then(|| config.to_string())
}

/// Merges `over` into `base` as a JSON merge patch, but that lists whose items have names are merged
/// by name.
pub(crate) fn merge(base: &mut Value, over: &Value) {
    match (base, over) {
        (Value::Object(base), Value::Object(over)) => merge_objects(base, over),
        (Value::Array(base), Value::Array(over)) if has_names(base) && has_names(over) => {
            for item in over {
                match base.iter_mut().find(|it| it["name"] == item["name"]) {
                    Some(old) => merge(old, item),
                    None => base.push(item.clone()),
                }
            }
        }
        (base, over) => base.clone_from(over),
    }
}

fn merge_objects(base: &mut Map<String, Value>, over: &Map<String, Value>) {
    for (name, value) in over {
        if value.is_null() {
            base.remove(name);
        } else if let Some(old) = base.get_mut(name) {
            merge(old, value);
        } else {
            base.insert(name.clone(), value.clone());
        }
    }
}

fn has_names(items: &[Value]) -> bool {
    items.iter().all(|it| it["name"].is_string())
}

/// A pod as the API server takes it.
///
/// # Errors
///
/// `podOverrides` have made it something else: the field and what was expected.
pub fn typed(pod: Value) -> Result<Pod, String> {
    serde_json::from_value(pod).map_err(|error| format!("spec.podOverrides: {error}"))
}

#[cfg(test)]
mod tests;
