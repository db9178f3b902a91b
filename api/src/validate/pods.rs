//! Validation rules of pod settings.

use std::collections::BTreeSet;

use serde_json::{Value, json};

use super::{FieldError, item, member};
use crate::experiment::{CodeContext, ExperimentSpec, Resources};
use crate::names::{ENV_RENDEZVOUS_PORT, pod_paths};
use crate::pod::PodTemplate;
use crate::quantity;

/// Maximum number of slots of a trial: all ranks connect to rank 0 for the rendezvous.
const SLOTS_MAX: u32 = 1024;
/// Paths in `podOverrides` of fields that only Stoker may set.
const RESERVED_PATHS: [&str; 10] = [
    "metadata.name",
    "metadata.namespace",
    "metadata.ownerReferences",
    "metadata.generateName",
    "spec.hostname",
    "spec.subdomain",
    "spec.restartPolicy",
    "spec.nodeName",
    "status",
    "kind",
];
/// Fields of the program's container that only Stoker may set.
const RESERVED_TRAINER_FIELDS: [&str; 4] =
    ["command", "args", "terminationMessagePath", "terminationMessagePolicy"];

/// Checks all rules of pod settings.
pub(super) fn check(spec: &ExperimentSpec, errors: &mut Vec<FieldError>) {
    check_resources(&spec.resources, errors);
    check_template(&spec.pod, errors);
    if let Some(overrides) = &spec.pod_overrides {
        check_overrides(overrides, errors);
    }
    check_context(spec.context.as_ref(), errors);
    check_secret("spec.checkpointStorage.secretName", &spec.checkpoint_storage.secret_name, errors);
    for (i, var) in spec.env.iter().enumerate() {
        let is_port = var.value.parse::<u16>().is_ok_and(|port| port > 0);
        if var.name == ENV_RENDEZVOUS_PORT && !is_port {
            let path = member(&item("spec.env", i), "value");
            let rule = "must be a port from 1 to 65535";
            errors.push(FieldError::new(&path, &json!(var.value), rule));
        }
    }
}

pub(super) fn check_context(context: Option<&CodeContext>, errors: &mut Vec<FieldError>) {
    let Some(context) = context else { return };
    let is_hash = context.sha256.len() == 64
        && context.sha256.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'));
    if !is_hash {
        let rule = "must be a SHA-256 in lowercase hex; let `stoker experiment create FILE DIR` \
                    set it";
        errors.push(FieldError::new("spec.context.sha256", &json!(context.sha256), rule));
    }
}

pub(super) fn check_secret(path: &str, name: &Option<String>, errors: &mut Vec<FieldError>) {
    if let Some(secret) = name.as_ref().filter(|name| !is_name(name)) {
        errors.push(FieldError::new(path, &json!(secret), "must be the name of a Secret"));
    }
}

pub(super) fn check_resources(resources: &Resources, errors: &mut Vec<FieldError>) {
    let slots = resources.slots_per_trial;
    if slots > SLOTS_MAX {
        let rule = format!("must be at most {SLOTS_MAX}");
        errors.push(FieldError::new("spec.resources.slotsPerTrial", &json!(slots), &rule));
    }
    let path = "spec.resources.slotsPerPod";
    match resources.slots_per_pod {
        Some(0) => errors.push(FieldError::new(path, &json!(0), "must be at least 1")),
        Some(per_pod) if !slots.is_multiple_of(per_pod) => {
            let rule = format!("must divide slotsPerTrial, which is {slots}");
            let error = FieldError::new(path, &json!(per_pod), &rule);
            errors.push(error.reading(&["spec.resources.slotsPerTrial"]));
        }
        _ => {}
    }
    if let Some(slot) = &resources.slot_resource {
        let slot_path = "spec.resources.slotResource";
        let is_extended =
            slot.split_once('/').is_some_and(|(domain, name)| is_name(domain) && !name.is_empty());
        if !is_extended {
            let rule = "must be an extended resource, such as nvidia.com/gpu";
            errors.push(FieldError::new(slot_path, &json!(slot), rule));
        }
        if slot.starts_with("nvidia.com/mig-") && resources.slots_per_pod() > 1 {
            let rule = "must be 1 if slots are parts of a GPU: a process sees only one of them";
            errors.push(match resources.slots_per_pod {
                Some(per_pod) => FieldError::new(path, &json!(per_pod), rule),
                None => {
                    let per_pod = resources.slots_per_pod();
                    let rule = format!("is {per_pod} by default, but {rule}; set it to 1");
                    FieldError::absent(path, &rule).reading(&["spec.resources.slotsPerTrial"])
                }
            });
        }
        for (list, map) in [("requests", &resources.requests), ("limits", &resources.limits)] {
            if let Some(value) = map.get(slot) {
                let path = member(&member("spec.resources", list), slot);
                let rule = "must not be the slot resource; set slotsPerPod instead";
                errors.push(FieldError::new(&path, &json!(value), rule));
            }
        }
    }
    let quantities = [("requests", &resources.requests), ("limits", &resources.limits)];
    let quantities = quantities.into_iter().flat_map(|(list, map)| {
        map.iter().map(move |(name, value)| (member(&member("spec.resources", list), name), value))
    });
    let shm = ("spec.resources.shmSize".to_owned(), &resources.shm_size);
    for (path, quantity) in
        quantities.chain([shm]).filter(|(_, value)| quantity::parse(value).is_none())
    {
        let rule = "must be a quantity, such as 4, 500m or 16Gi";
        errors.push(FieldError::new(&path, &json!(quantity), rule));
    }
}

pub(super) fn check_template(pod: &PodTemplate, errors: &mut Vec<FieldError>) {
    let mut refuse =
        |path: &str, value: Value, rule: &str| errors.push(FieldError::new(path, &value, rule));
    if let Some(image) = pod.image.as_ref().filter(|image| image.trim().is_empty()) {
        let rule = "must name an image; omit it to use the stock image";
        refuse("spec.pod.image", json!(image), rule);
    }
    let policies = ["Always", "IfNotPresent", "Never"];
    if let Some(policy) =
        pod.image_pull_policy.as_ref().filter(|policy| !policies.contains(&policy.as_str()))
    {
        let rule = "must be Always, IfNotPresent or Never";
        refuse("spec.pod.imagePullPolicy", json!(policy), rule);
    }
    for (list, names) in [
        ("spec.pod.imagePullSecrets", &pod.image_pull_secrets),
        ("spec.pod.envFromSecrets", &pod.env_from_secrets),
    ] {
        for (i, name) in names.iter().enumerate().filter(|(_, name)| !is_name(name)) {
            refuse(&item(list, i), json!(name), "must be the name of a Secret");
        }
    }
    let mut volumes = BTreeSet::new();
    for (i, volume) in pod.volumes.iter().enumerate() {
        let path = member(&item("spec.pod.volumes", i), "name");
        match volume["name"].as_str() {
            None => refuse(&path, volume["name"].clone(), "must name the volume"),
            Some(name) if name.starts_with("stoker-") => {
                let rule = "names that start with stoker- are Stoker's own; choose another";
                refuse(&path, json!(name), rule);
            }
            Some(name) if !volumes.insert(name) => {
                refuse(&path, json!(name), "is set twice; keep one");
            }
            Some(_) => {}
        }
    }
    let ours = [
        pod_paths::TRIAL_CONFIG_FOLDER,
        pod_paths::TOKEN_FOLDER,
        pod_paths::SHARED,
        "/dev/shm",
        "/tmp",
    ];
    let mut paths = BTreeSet::new();
    for (i, mount) in pod.volume_mounts.iter().enumerate() {
        let at = item("spec.pod.volumeMounts", i);
        if !volumes.contains(mount.name.as_str()) {
            let rule = "is not among spec.pod.volumes; add the volume";
            let error = FieldError::new(&member(&at, "name"), &json!(mount.name), rule);
            errors.push(error.reading(&["spec.pod.volumes"]));
        }
        let mut refuse = |rule: &str| {
            let path = member(&at, "mountPath");
            errors.push(FieldError::new(&path, &json!(mount.mount_path), rule));
        };
        if !mount.mount_path.starts_with('/') {
            refuse("must be an absolute path");
        } else if ours.contains(&mount.mount_path.trim_end_matches('/')) {
            refuse("is Stoker's own directory; choose another");
        } else if !paths.insert(mount.mount_path.as_str()) {
            refuse("is set twice; keep one");
        }
    }
}

pub(super) fn check_overrides(overrides: &Value, errors: &mut Vec<FieldError>) {
    let root = "spec.podOverrides";
    for reserved in RESERVED_PATHS {
        let value = reserved.split('.').try_fold(overrides, |value, name| value.get(name));
        if let Some(value) = value {
            let path = format!("{root}.{reserved}");
            errors.push(FieldError::new(&path, value, "is set by Stoker itself; remove it"));
        }
    }
    for list in ["containers", "initContainers", "volumes"] {
        let items = overrides.get("spec").and_then(|spec| spec.get(list));
        let Some(items) = items.and_then(Value::as_array) else { continue };
        for (i, value) in items.iter().enumerate() {
            let at = item(&format!("{root}.spec.{list}"), i);
            if !value["name"].is_string() {
                let rule = "must name the item that it is merged into";
                errors.push(FieldError::new(&member(&at, "name"), &value["name"], rule));
            }
            let is_trainer = list == "containers" && value["name"] == "trainer";
            for field in RESERVED_TRAINER_FIELDS.iter().filter(|_| is_trainer) {
                if let Some(value) = value.get(*field) {
                    let rule = "is set by Stoker itself; use spec.entrypoint";
                    errors.push(FieldError::new(&member(&at, field), value, rule));
                }
            }
        }
    }
    #[cfg(feature = "crd")]
    super::overrides::check(root, overrides, errors);
}

/// Returns `true` for a DNS subdomain, the form of most object names.
fn is_name(name: &str) -> bool {
    let is_label = |label: &str| {
        let bytes = label.as_bytes();
        bytes.first().is_some_and(u8::is_ascii_alphanumeric)
            && bytes.last().is_some_and(u8::is_ascii_alphanumeric)
            && bytes.iter().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || *b == b'-')
    };
    !name.is_empty() && name.len() <= 253 && name.split('.').all(is_label)
}
