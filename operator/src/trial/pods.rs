//! Builds the pods and the Service of a trial. Pure: errors in the spec were reported when the
//! experiment was validated.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::Service;
use serde_json::{Value, json};
use stoker_api::contract::{Cleanup, TrialConfig};
use stoker_api::experiment::{ExperimentSpec, StorageRecord};
use stoker_api::names::{
    ANNOTATION_TRIAL_CONFIG, API_VERSION, COMPONENT_CLEANUP, COMPONENT_TRIAL, ENV_RENDEZVOUS_PORT,
    ENV_RENDEZVOUS_SECONDS, LABEL_ATTEMPT, LABEL_CLEANUP_END, LABEL_COMPONENT, LABEL_EXPERIMENT,
    LABEL_POD_INDEX, LABEL_TRIAL, RENDEZVOUS_PORT, pod_paths,
};
use stoker_api::validate::ValidExperiment;
use stoker_engine::gang::POD_GRACE_SECONDS_MAX;

use super::config::{OperatorConfig, TrialNames};
use crate::objects::{SETUP_CONTAINER, TRAINER_CONTAINER};
use crate::pod::{
    LAUNCHER, PodSettings, common_spec, environment, mounts, program_spec, remove_devices,
    security, small_resources,
};

/// Seconds that the ranks of a gang wait for each other by default.
const RENDEZVOUS_SECONDS_DEFAULT: u64 = 600;

/// Name of a pod, which is also its host name.
pub fn pod_name(trial: &str, attempt: u32, index: u32) -> String {
    format!("{trial}-a{attempt}-r{index}")
}

/// Address of a pod in a gang.
pub fn host(trial: &str, namespace: &str, attempt: u32, index: u32, port: u16) -> String {
    format!("{}.{trial}.{namespace}.svc:{port}", pod_name(trial, attempt, index))
}

/// Rendezvous port of the ranks.
pub fn port(spec: &ExperimentSpec) -> u16 {
    let variable = spec.env.iter().find(|variable| variable.name == ENV_RENDEZVOUS_PORT);
    variable.and_then(|variable| variable.value.parse().ok()).unwrap_or(RENDEZVOUS_PORT)
}

/// Builds the headless Service that resolves a gang's pods before they are ready.
///
/// # Panics
///
/// Never: the manifest is constant except for names and the port.
pub fn service(valid: &ValidExperiment, names: TrialNames<'_>) -> Service {
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

/// Builds the pod with this index of an attempt as JSON. `podOverrides` are merged last.
///
/// # Panics
///
/// Never: a configuration serializes to plain JSON.
pub fn pod(
    operator_config: &OperatorConfig,
    valid: &ValidExperiment,
    storage: &StorageRecord,
    names: TrialNames<'_>,
    config: &TrialConfig,
    index: u32,
) -> Value {
    let attempt = config.attempt;
    let name = pod_name(names.trial, attempt, index);
    let mut labels = labels(valid, names);
    labels.insert(LABEL_ATTEMPT.to_owned(), attempt.to_string());
    labels.insert(LABEL_POD_INDEX.to_owned(), index.to_string());
    labels.insert(LABEL_COMPONENT.to_owned(), COMPONENT_TRIAL.to_owned());
    // Only the launcher of the first pod stores records.
    let records = config.records.clone().filter(|_| index == 0);
    let config = TrialConfig { records, ..config.clone() };
    let text = serde_json::to_string(&config).expect("a configuration is plain JSON");
    let metadata = json!({
        "name": name,
        "namespace": names.namespace,
        "labels": labels,
        "annotations": { ANNOTATION_TRIAL_CONFIG: text },
        "ownerReferences": [owner(names)],
    });
    let settings = PodSettings::of_experiment(valid, storage);
    let spec = spec(operator_config, valid, &settings, names, attempt, index);
    crate::pod::pod(metadata, spec, &settings)
}

fn labels(valid: &ValidExperiment, names: TrialNames<'_>) -> BTreeMap<String, String> {
    [
        ("app.kubernetes.io/managed-by", "stoker"),
        (LABEL_EXPERIMENT, &valid.name),
        (LABEL_TRIAL, names.trial),
    ]
    .map(|(name, value)| (name.to_owned(), value.to_owned()))
    .into()
}

fn owner(names: TrialNames<'_>) -> Value {
    json!({
        "apiVersion": API_VERSION, "kind": "Trial", "name": names.trial, "uid": names.uid,
        "controller": true, "blockOwnerDeletion": false,
    })
}

/// Builds a pod that cleans up an ended experiment according to `cleanup`. `end` is the index of
/// the first trial that the pod does not process.
///
/// # Panics
///
/// Never: a list of names serializes to plain JSON.
pub fn cleanup_pod(
    operator_config: &OperatorConfig,
    valid: &ValidExperiment,
    storage: &StorageRecord,
    namespace: &str,
    experiment_uid: &str,
    name: &str,
    (cleanup, end): (&Cleanup, u32),
) -> Value {
    let text = serde_json::to_string(cleanup).expect("a list of names is plain JSON");
    let settings = PodSettings::of_experiment(valid, storage);
    let (env, env_from) = environment(&settings, 0);
    let mut all_mounts = mounts();
    all_mounts.extend(valid.spec.pod.volume_mounts.iter().map(|mount| json!(mount)));
    let metadata = json!({
        "name": name,
        "namespace": namespace,
        "labels": {
            "app.kubernetes.io/managed-by": "stoker",
            LABEL_EXPERIMENT: valid.name,
            LABEL_COMPONENT: COMPONENT_CLEANUP,
            LABEL_CLEANUP_END: end.to_string(),
        },
        "annotations": { ANNOTATION_TRIAL_CONFIG: text },
        "ownerReferences": [{
            "apiVersion": API_VERSION, "kind": "Experiment", "name": valid.name,
            "uid": experiment_uid, "controller": true, "blockOwnerDeletion": false,
        }],
    });
    let mut spec = common_spec(&settings);
    let file = pod_paths::CLEANUP.rsplit('/').next().unwrap_or_default();
    spec["volumes"][0]["downwardAPI"]["items"][0]["path"] = json!(file);
    spec["terminationGracePeriodSeconds"] = json!(POD_GRACE_SECONDS_MAX);
    spec["containers"] = json!([{
        "name": TRAINER_CONTAINER,
        "image": operator_config.trainer_image,
        "imagePullPolicy": operator_config.image_pull_policy,
        "command": [LAUNCHER, "gc"],
        "env": env,
        "envFrom": env_from,
        "resources": small_resources(settings.limits.iter()),
        "securityContext": security(),
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": all_mounts,
    }]);
    // Overrides for trial pods may set another image, which lacks the launcher, and patch the
    // set-up container, which this pod lacks.
    let mut overrides = settings.overrides.cloned();
    for list in ["containers", "initContainers"] {
        let spec = overrides.as_mut().and_then(|overrides| overrides.get_mut("spec"));
        let items = spec.and_then(|spec| spec.get_mut(list)).and_then(Value::as_array_mut);
        let Some(items) = items else { continue };
        items.retain(|item| item["name"] != SETUP_CONTAINER);
        let trainers = items.iter_mut().filter(|item| item["name"] == TRAINER_CONTAINER);
        for fields in trainers.filter_map(Value::as_object_mut) {
            fields.retain(|field, _| !["image", "imagePullPolicy"].contains(&field.as_str()));
        }
    }
    let settings = PodSettings { overrides: overrides.as_ref(), ..settings };
    let mut pod = crate::pod::pod(metadata, spec, &settings);
    remove_devices(&mut pod, &settings);
    pod
}

fn spec(
    operator_config: &OperatorConfig,
    valid: &ValidExperiment,
    settings: &PodSettings<'_>,
    names: TrialNames<'_>,
    attempt: u32,
    index: u32,
) -> Value {
    let tf_config = tf_config(valid, names, attempt, index);
    let tf_config = tf_config.map(|config| json!({ "name": "TF_CONFIG", "value": config }));
    let more = tf_config.into_iter().chain(rendezvous_seconds(operator_config, valid)).collect();
    let mut spec = program_spec(operator_config, settings, index, more);
    spec["hostname"] = json!(pod_name(names.trial, attempt, index));
    spec["subdomain"] = json!(names.trial);
    spec
}

/// Returns the variable with which ranks wait until the start deadline, if it is later than their
/// default. The pods of a gang may be scheduled at any time before that deadline.
fn rendezvous_seconds(operator_config: &OperatorConfig, valid: &ValidExperiment) -> Option<Value> {
    let seconds = operator_config.start_deadline_seconds;
    let is_set = valid.spec.env.iter().any(|variable| variable.name == ENV_RENDEZVOUS_SECONDS);
    let is_gang = valid.spec.resources.num_pods() > 1;
    (is_gang && !is_set && seconds > RENDEZVOUS_SECONDS_DEFAULT)
        .then(|| json!({ "name": ENV_RENDEZVOUS_SECONDS, "value": seconds.to_string() }))
}

/// Returns TensorFlow's cluster configuration, `TF_CONFIG`; `None` for a gang of one pod.
fn tf_config(
    valid: &ValidExperiment,
    names: TrialNames<'_>,
    attempt: u32,
    index: u32,
) -> Option<String> {
    let num_pods = valid.spec.resources.num_pods();
    let port = port(&valid.spec);
    let worker = |pod_idx| host(names.trial, names.namespace, attempt, pod_idx, port);
    let workers: Vec<String> = (0..num_pods).map(worker).collect();
    let config = json!({
        "cluster": { "worker": workers },
        "task": { "type": "worker", "index": index },
    });
    (num_pods > 1).then(|| config.to_string())
}

#[cfg(test)]
mod tests;
