//! Removes devices from a clean-up pod.

use std::collections::BTreeSet;

use serde_json::{Value, json};

use super::PodSettings;

/// Prefix of the runtime classes that NVIDIA's operator creates. Nodes without GPUs lack them.
const GPU_RUNTIME: &str = "nvidia";

/// Removes the requests for devices from a pod, and its runtime class for GPUs. The pod keeps its
/// placement, because only some nodes may reach the storage or run the image.
///
/// Nodes with devices usually have a taint of the same name. The admission plugin
/// `ExtendedResourceToleration` admits only pods that request the device, so this adds the same
/// tolerations.
pub(crate) fn remove_devices(pod: &mut Value, settings: &PodSettings<'_>) {
    let Some(spec) = pod.get_mut("spec").and_then(Value::as_object_mut) else { return };
    let requested = settings.requests.keys().chain(settings.limits.keys());
    let requested = requested.chain(settings.slot_resource);
    let mut devices: BTreeSet<String> = requested.filter(|name| is_device(name)).cloned().collect();
    spec.remove("resourceClaims");
    for list in ["initContainers", "containers"] {
        let containers = spec.get_mut(list).and_then(Value::as_array_mut);
        for container in containers.into_iter().flatten() {
            remove_from_container(container, &mut devices);
        }
    }
    let runtime = spec.get("runtimeClassName").and_then(Value::as_str);
    if runtime.is_some_and(|name| name.starts_with(GPU_RUNTIME)) {
        spec.remove("runtimeClassName");
    }
    if devices.is_empty() {
        return;
    }
    let tolerations = spec.entry("tolerations").or_insert_with(|| json!([]));
    // A malformed list in `podOverrides` is reported when the pod is parsed.
    let Some(tolerations) = tolerations.as_array_mut() else { return };
    for device in devices {
        let toleration = json!({ "key": device, "operator": "Exists", "effect": "NoSchedule" });
        if !tolerations.contains(&toleration) {
            tolerations.push(toleration);
        }
    }
}

/// Removes the devices of a container, and adds their names to `devices`.
fn remove_from_container(container: &mut Value, devices: &mut BTreeSet<String>) {
    let resources = container.get_mut("resources").and_then(Value::as_object_mut);
    let Some(resources) = resources else { return };
    resources.remove("claims");
    for list in ["requests", "limits"] {
        let amounts = resources.get_mut(list).and_then(Value::as_object_mut);
        let Some(amounts) = amounts else { continue };
        devices.extend(amounts.keys().filter(|name| is_device(name)).cloned());
        amounts.retain(|name, _| !is_device(name));
    }
}

/// Returns whether a resource is an extended resource, such as a GPU or a network card.
pub(super) fn is_device(name: &str) -> bool {
    name.contains('/')
}
