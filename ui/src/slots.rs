//! Slots of nodes: what can be allocated, and what pods request.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{Node, Pod};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use stoker_api::names::LABEL_EXPERIMENT;
use stoker_api::quantity;

/// Resource that CPU ranks request.
pub(crate) const CPU: &str = "cpu";

/// A node with what can be allocated on it.
#[derive(Debug)]
pub(crate) struct NodeSlots {
    pub(crate) name: String,
    /// Amount by resource.
    pub(crate) allocatable: BTreeMap<String, f64>,
    /// Such as `not ready`.
    pub(crate) notes: Vec<String>,
}

/// Use of a resource by the pods on a node.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Used {
    /// Sum of the requests.
    pub(crate) amount: f64,
    /// Number of CPU ranks.
    pub(crate) ranks: u32,
}

/// Returns what can be allocated on a node.
pub(crate) fn node(node: &Node) -> NodeSlots {
    let status = node.status.as_ref();
    let allocatable = status.and_then(|status| status.allocatable.as_ref());
    let conditions = status.and_then(|status| status.conditions.as_ref());
    let is_ready = conditions
        .is_some_and(|all| all.iter().any(|one| one.type_ == "Ready" && one.status == "True"));
    let is_cordoned = node.spec.as_ref().and_then(|spec| spec.unschedulable).unwrap_or(false);
    let mut notes = Vec::new();
    if !is_ready {
        notes.push("not ready".to_owned());
    }
    if is_cordoned {
        notes.push("cordoned".to_owned());
    }
    NodeSlots {
        name: node.metadata.name.clone().unwrap_or_default(),
        allocatable: allocatable.map(amounts).unwrap_or_default(),
        notes,
    }
}

/// Returns what pods use, by node and resource. Pods that have ended use nothing. `ranks` has the
/// CPU ranks of a pod, by namespace and experiment.
pub(crate) fn used(
    pods: &[Pod],
    ranks: &BTreeMap<(String, String), u32>,
) -> BTreeMap<(String, String), Used> {
    let mut all = BTreeMap::<(String, String), Used>::new();
    for pod in pods {
        let phase = pod.status.as_ref().and_then(|status| status.phase.as_deref());
        let spec = pod.spec.as_ref();
        let Some(node) = spec.and_then(|spec| spec.node_name.clone()) else { continue };
        if matches!(phase, Some("Succeeded" | "Failed")) {
            continue;
        }
        let containers = spec.iter().flat_map(|spec| &spec.containers);
        let requests = containers.filter_map(|container| container.resources.as_ref());
        for requests in requests.filter_map(|resources| resources.requests.as_ref()) {
            for (resource, amount) in amounts(requests) {
                all.entry((node.clone(), resource)).or_default().amount += amount;
            }
        }
        let label = pod.metadata.labels.as_ref().and_then(|labels| labels.get(LABEL_EXPERIMENT));
        let namespace = pod.metadata.namespace.clone().unwrap_or_default();
        if let Some(num) = label.and_then(|name| ranks.get(&(namespace, name.clone()))) {
            all.entry((node, CPU.to_owned())).or_default().ranks += num;
        }
    }
    all
}

fn amounts(quantities: &BTreeMap<String, Quantity>) -> BTreeMap<String, f64> {
    let of =
        |(name, amount): (&String, &Quantity)| Some((name.clone(), quantity::parse(&amount.0)?));
    quantities.iter().filter_map(of).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn pod(node: Option<&str>, phase: &str, experiment: &str, requests: serde_json::Value) -> Pod {
        serde_json::from_value(json!({
            "metadata": {"name": "p", "namespace": "ml",
                "labels": {LABEL_EXPERIMENT: experiment}},
            "spec": {"nodeName": node,
                "containers": [{"name": "trainer", "resources": {"requests": requests}}]},
            "status": {"phase": phase},
        }))
        .unwrap()
    }

    #[test]
    fn requests_of_live_pods_are_summed_by_node() {
        let gpus = |num: &str| json!({"nvidia.com/gpu": num, "cpu": "500m"});
        let pods = [
            pod(Some("a"), "Running", "gpu", gpus("4")),
            pod(Some("a"), "Pending", "gpu", gpus("2")),
            pod(Some("b"), "Running", "cpu", json!({"cpu": "2"})),
            // Neither an ended pod nor one without a node uses slots.
            pod(Some("a"), "Succeeded", "gpu", gpus("1")),
            pod(Some("a"), "Failed", "gpu", gpus("1")),
            pod(None, "Pending", "gpu", gpus("8")),
        ];
        let ranks = BTreeMap::from([(("ml".to_owned(), "cpu".to_owned()), 3)]);
        let used = used(&pods, &ranks);
        let of = |node: &str, resource: &str| {
            used.get(&(node.to_owned(), resource.to_owned())).copied().unwrap_or_default()
        };
        assert_eq!(of("a", "nvidia.com/gpu"), Used { amount: 6.0, ranks: 0 });
        assert_eq!(of("a", CPU), Used { amount: 1.0, ranks: 0 });
        assert_eq!(of("b", CPU), Used { amount: 2.0, ranks: 3 });
        assert_eq!(of("b", "nvidia.com/gpu"), Used::default());
    }

    #[test]
    fn nodes_that_take_no_pods_are_marked() {
        let check = |ready: &str, cordoned: bool, expected: &[&str]| {
            let object = serde_json::from_value(json!({
                "metadata": {"name": "a"}, "spec": {"unschedulable": cordoned},
                "status": {"allocatable": {"cpu": "8", "nvidia.com/gpu": "4"},
                    "conditions": [{"type": "Ready", "status": ready}]},
            }));
            let slots = node(&object.unwrap());
            assert_eq!(slots.notes, expected);
            assert_eq!(slots.allocatable["nvidia.com/gpu"], 4.0);
        };
        check("True", false, &[]);
        check("False", false, &["not ready"]);
        check("Unknown", true, &["not ready", "cordoned"]);
    }
}
