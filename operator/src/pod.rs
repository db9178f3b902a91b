//! Builds the common parts of pods that run a user's program, for trials and jobs. Pure: errors in
//! the spec were reported when the object was validated.

mod devices;
mod merge;

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::Pod;
use serde_json::{Map, Value, json};
use stoker_api::experiment::{Entrypoint, EnvVar, StorageRecord};
use stoker_api::names::{
    ANNOTATION_TRIAL_CONFIG, ENV_CACHE, ENV_DEVICE, ENV_POD_INDEX, ENV_TERMINATION_FILE,
    ENV_TRIAL_CONFIG, TOKEN_AUDIENCE, pod_paths,
};
use stoker_api::pod::PodTemplate;
use stoker_api::quantity;
use stoker_api::validate::{ValidExperiment, ValidInferenceJob};
use stoker_engine::gang::POD_GRACE_SECONDS_MAX;

use self::devices::is_device;
pub(crate) use self::devices::remove_devices;
pub(crate) use self::merge::merge;
use crate::objects::{SETUP_CONTAINER, TRAINER_CONTAINER};
use crate::trial::config::OperatorConfig;

/// Prefix of NVIDIA's slot resources: whole GPUs and MIG partitions.
const NVIDIA: &str = "nvidia.com/";
/// User and group ID of the stock image.
const USER: i64 = 65_532;
/// Path of the launcher in the stock image. A bare name would be looked up in the `PATH` of the
/// container, which the user may have set for another image.
pub(crate) const LAUNCHER: &str = "/usr/local/bin/stoker-trainer";

/// Pod settings from the user's spec.
#[derive(Clone, Debug)]
pub(crate) struct PodSettings<'a> {
    pub(crate) template: &'a PodTemplate,
    pub(crate) overrides: Option<&'a Value>,
    pub(crate) entrypoint: &'a Entrypoint,
    pub(crate) env: &'a [EnvVar],
    pub(crate) slot_resource: Option<&'a String>,
    /// Slots per pod.
    pub(crate) slots: u32,
    pub(crate) requests: &'a BTreeMap<String, String>,
    pub(crate) limits: &'a BTreeMap<String, String>,
    pub(crate) shm_size: &'a str,
    pub(crate) preemption_timeout_seconds: u32,
    /// Secret with the storage credentials.
    pub(crate) storage_secret: Option<String>,
    /// Whether the user uploaded a context.
    pub(crate) has_context: bool,
}

impl<'a> PodSettings<'a> {
    /// Settings of an experiment for the pods of its trials.
    pub(crate) fn of_experiment(valid: &'a ValidExperiment, storage: &StorageRecord) -> Self {
        let spec = &valid.spec;
        let resources = &spec.resources;
        Self {
            template: &spec.pod,
            overrides: spec.pod_overrides.as_ref(),
            entrypoint: &spec.entrypoint,
            env: &spec.env,
            slot_resource: resources.slot_resource.as_ref(),
            slots: resources.slots_per_pod(),
            requests: &resources.requests,
            limits: &resources.limits,
            shm_size: &resources.shm_size,
            preemption_timeout_seconds: spec.preemption_timeout_seconds,
            storage_secret: storage.secret_name.clone(),
            has_context: spec.context.is_some(),
        }
    }

    /// Settings of a job for the pods of its processes.
    pub(crate) fn of_job(valid: &'a ValidInferenceJob, storage: &StorageRecord) -> Self {
        let spec = &valid.spec;
        let resources = &spec.resources;
        Self {
            template: &spec.pod,
            overrides: spec.pod_overrides.as_ref(),
            entrypoint: &spec.entrypoint,
            env: &spec.env,
            slot_resource: resources.slot_resource.as_ref(),
            slots: 1,
            requests: &resources.requests,
            limits: &resources.limits,
            shm_size: &resources.shm_size,
            preemption_timeout_seconds: spec.preemption_timeout_seconds,
            storage_secret: storage.secret_name.clone(),
            has_context: spec.context.is_some(),
        }
    }
}

/// Builds a pod as JSON and merges `podOverrides` last. Overrides cannot replace the entries of
/// `metadata`.
pub(crate) fn pod(metadata: Value, spec: Value, settings: &PodSettings<'_>) -> Value {
    let mut pod =
        json!({ "apiVersion": "v1", "kind": "Pod", "metadata": metadata.clone(), "spec": spec });
    if let Some(overrides) = settings.overrides {
        merge(&mut pod, overrides);
    }
    // Restore the metadata after `podOverrides`: without labels and owner references the pod would
    // be orphaned.
    if !pod["metadata"].is_object() {
        pod["metadata"] = json!({});
    }
    merge(&mut pod["metadata"], &metadata);
    pod
}

/// Builds the spec of a pod that runs the user's program. `index` is the pod's index in its gang,
/// and `more` are additional environment variables.
pub(crate) fn program_spec(
    operator_config: &OperatorConfig,
    settings: &PodSettings<'_>,
    index: u32,
    more: Vec<Value>,
) -> Value {
    let stock = settings
        .template
        .image
        .as_ref()
        .is_none_or(|image| *image == operator_config.trainer_image);
    let needs_setup = !stock || settings.has_context;
    let mut spec = common_spec(settings);
    spec["containers"] = json!([trainer(operator_config, settings, index, more, needs_setup)]);
    if needs_setup {
        spec["initContainers"] = json!([setup_container(operator_config, settings, index)]);
    }
    spec
}

/// Parts of a pod's spec that all pods share: scheduling, security context and volumes.
pub(crate) fn common_spec(settings: &PodSettings<'_>) -> Value {
    let template = settings.template;
    let mut spec = json!({
        "restartPolicy": "Never",
        "automountServiceAccountToken": false,
        "enableServiceLinks": false,
        "terminationGracePeriodSeconds":
            settings.preemption_timeout_seconds.min(POD_GRACE_SECONDS_MAX),
        "securityContext": {
            "runAsNonRoot": true, "runAsUser": USER, "runAsGroup": USER, "fsGroup": USER,
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": { "type": "RuntimeDefault" },
        },
        "volumes": volumes(settings),
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
    let secrets = template.image_pull_secrets.iter().map(|secret| json!({ "name": secret }));
    put("imagePullSecrets", secrets.collect());
    spec
}

fn volumes(settings: &PodSettings<'_>) -> Value {
    let config_path = format!("metadata.annotations['{ANNOTATION_TRIAL_CONFIG}']");
    let mut volumes = vec![
        json!({ "name": "stoker-config", "downwardAPI": { "items": [{
            "path": "trial.json", "fieldRef": { "fieldPath": config_path },
        }] } }),
        json!({ "name": "stoker-token", "projected": { "sources": [{ "serviceAccountToken": {
            "path": "token", "audience": TOKEN_AUDIENCE, "expirationSeconds": 3600,
        } }] } }),
        json!({ "name": "stoker-shared", "emptyDir": {} }),
        json!({ "name": "stoker-tmp", "emptyDir": {} }),
        json!({ "name": "stoker-shm", "emptyDir": {
            "medium": "Memory", "sizeLimit": settings.shm_size,
        } }),
    ];
    volumes.extend(settings.template.volumes.iter().cloned());
    volumes.into()
}

pub(crate) fn mounts() -> Vec<Value> {
    vec![
        mount("stoker-config", pod_paths::TRIAL_CONFIG_FOLDER, true),
        mount("stoker-token", pod_paths::TOKEN_FOLDER, true),
        mount("stoker-shared", pod_paths::SHARED, false),
        mount("stoker-tmp", "/tmp", false),
        mount("stoker-shm", "/dev/shm", false),
    ]
}

fn mount(name: &str, path: &str, read_only: bool) -> Value {
    json!({ "name": name, "mountPath": path, "readOnly": read_only })
}

pub(crate) fn security() -> Value {
    json!({
        "allowPrivilegeEscalation": false,
        "readOnlyRootFilesystem": true,
        "capabilities": { "drop": ["ALL"] },
    })
}

/// Returns the resources of a container that does little work, with these limits in place of its
/// own. A quota may require a limit of each container, and refuses a pod without them.
pub(crate) fn small_resources<'a>(limits: impl Iterator<Item = (&'a String, &'a String)>) -> Value {
    let mut resources = json!({
        "requests": { "cpu": "100m", "memory": "64Mi" },
        "limits": { "memory": "512Mi" },
    });
    // Extended resources, such as network cards, are only for programs.
    for (name, limit) in limits.filter(|(name, _)| !is_device(name)) {
        let request = resources["requests"][name].as_str().and_then(quantity::parse);
        // A request above its limit is invalid, and a missing request defaults to the limit.
        let limit_amount = quantity::parse(limit);
        if request.is_none_or(|request| limit_amount.is_none_or(|limit| limit < request)) {
            resources["requests"][name] = json!(limit);
        }
        resources["limits"][name] = json!(limit);
    }
    resources
}

/// Returns the environment variables of every container and its `envFrom` Secrets.
pub(crate) fn environment(settings: &PodSettings<'_>, index: u32) -> (Vec<Value>, Vec<Value>) {
    let var = |name: &str, value: &str| json!({ "name": name, "value": value });
    let mut env = vec![
        var(ENV_TRIAL_CONFIG, pod_paths::TRIAL_CONFIG),
        var(ENV_TERMINATION_FILE, pod_paths::TERMINATION),
        var(ENV_POD_INDEX, &index.to_string()),
    ];
    env.push(var(ENV_CACHE, &format!("{}/cache", pod_paths::SHARED)));
    let is_set = settings.env.iter().any(|variable| variable.name == ENV_DEVICE);
    if let (false, Some(device)) = (is_set, device(settings)) {
        env.push(var(ENV_DEVICE, device));
    }
    env.extend(settings.env.iter().map(|variable| var(&variable.name, &variable.value)));
    let secrets = settings.template.env_from_secrets.iter().chain(&settings.storage_secret);
    let from = secrets.map(|secret| json!({ "secretRef": { "name": secret } }));
    (env, from.collect())
}

/// Returns the device of a program if the pod's requests determine it. A program that requests GPUs
/// must not silently train on the CPU. A program without GPUs must not use those of other pods,
/// which some nodes show to every container of an image for CUDA.
fn device(settings: &PodSettings<'_>) -> Option<&'static str> {
    let containers = settings.overrides.and_then(|overrides| overrides.pointer("/spec/containers"));
    let mut containers = containers.and_then(Value::as_array).into_iter().flatten();
    let trainer = containers.find(|container| container["name"] == TRAINER_CONTAINER);
    let env = trainer.and_then(|container| container["env"].as_array());
    // A variable with both `value` and `valueFrom` is invalid.
    if env.into_iter().flatten().any(|variable| variable["name"] == ENV_DEVICE) {
        return None;
    }
    if let Some(resource) = settings.slot_resource {
        return resource.starts_with(NVIDIA).then_some("cuda");
    }
    let resources = trainer.map(|container| &container["resources"]);
    let limits = resources.and_then(|resources| resources["limits"].as_object());
    let mut limits = settings.limits.keys().chain(limits.into_iter().flat_map(Map::keys));
    // A claim may be for a GPU, and so may an extended resource of any vendor's plugin.
    let has_claims = resources.is_some_and(|resources| resources["claims"].is_array());
    let may_have_gpu = has_claims || limits.any(|name| is_device(name));
    (!may_have_gpu).then_some("cpu")
}

fn trainer(
    operator_config: &OperatorConfig,
    settings: &PodSettings<'_>,
    index: u32,
    more: Vec<Value>,
    needs_setup: bool,
) -> Value {
    let template = settings.template;
    let launcher = if needs_setup { pod_paths::LAUNCHER } else { LAUNCHER };
    let command = [launcher, "launch", "--"].map(str::to_owned).into_iter();
    let command: Vec<String> = command.chain(settings.entrypoint.command.iter().cloned()).collect();
    let (mut env, env_from) = environment(settings, index);
    env.extend(more);
    let mut all_mounts = mounts();
    all_mounts.extend(template.volume_mounts.iter().map(|mount| json!(mount)));
    let image_pull_policy =
        template.image_pull_policy.as_ref().unwrap_or(&operator_config.image_pull_policy);
    let mut container = json!({
        "name": TRAINER_CONTAINER,
        "image": template.image.as_ref().unwrap_or(&operator_config.trainer_image),
        "imagePullPolicy": image_pull_policy,
        "command": command,
        "args": settings.entrypoint.args,
        "env": env,
        "envFrom": env_from,
        "resources": resources(settings),
        "securityContext": security(),
        "terminationMessagePath": pod_paths::TERMINATION,
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": all_mounts,
    });
    if settings.entrypoint.args.is_empty()
        && let Some(fields) = container.as_object_mut()
    {
        fields.remove("args");
    }
    if settings.has_context {
        container["workingDir"] = json!(pod_paths::CONTEXT);
    }
    container
}

fn setup_container(
    operator_config: &OperatorConfig,
    settings: &PodSettings<'_>,
    index: u32,
) -> Value {
    let (env, env_from) = environment(settings, index);
    let mut all_mounts = mounts();
    if settings.has_context {
        // The storage of the files, or a certificate for it, may be on a volume.
        all_mounts.extend(settings.template.volume_mounts.iter().map(|mount| json!(mount)));
    }
    // The limits add nothing to the pod's, which are the larger of set-up and program. Memory keeps
    // its limit, because the files sent are unpacked in memory.
    let limits = settings.limits.iter().filter(|(name, _)| *name != "memory");
    json!({
        "name": SETUP_CONTAINER,
        "image": operator_config.trainer_image,
        "imagePullPolicy": operator_config.image_pull_policy,
        "command": [LAUNCHER, "setup"],
        "env": env,
        "envFrom": env_from,
        "resources": small_resources(limits),
        "securityContext": security(),
        "terminationMessagePath": pod_paths::TERMINATION,
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": all_mounts,
    })
}

fn resources(settings: &PodSettings<'_>) -> Value {
    let (mut requests, mut limits) = (settings.requests.clone(), settings.limits.clone());
    if let Some(slot) = settings.slot_resource {
        let slots = settings.slots.to_string();
        requests.insert(slot.clone(), slots.clone());
        limits.insert(slot.clone(), slots);
    }
    json!({ "requests": requests, "limits": limits })
}

/// Parses a pod as the API server does.
///
/// # Errors
///
/// `podOverrides` have made the pod malformed. Names the field and the expected type.
pub(crate) fn parse_pod(pod: Value) -> Result<Pod, String> {
    serde_json::from_value(pod).map_err(|error| format!("spec.podOverrides: {error}"))
}
