//! Cached form of nodes, only whether they are ready, and outages of many nodes.

use std::sync::atomic::{AtomicI64, Ordering};

use k8s_openapi::api::core::v1::Node;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::runtime::events::EventType;
use kube::{Resource, ResourceExt as _};
use stoker_api::time::Timestamp;
use stoker_engine::gang::{NodeCounts, NodeState, ObservedPod, PodDeletion};

use crate::cache::{Cached, Key};
use crate::context::{Context, now};

/// A node as last observed.
#[derive(Debug)]
pub struct CachedNode {
    /// When this process first observed that the node is not ready; `None` if it is ready. The time
    /// in the node's condition comes from another clock, and a difference of a minute would remove
    /// pods at the first interruption.
    pub not_ready_since: Option<Timestamp>,
    /// Last change of the node's condition, if the node is not ready.
    changed_at: Option<Time>,
    key: Key,
    version: String,
}

impl CachedNode {
    /// Caches the relevant fields of a node.
    pub fn new(node: Node) -> Self {
        let key = Key::of(&node);
        let version = node.resource_version().unwrap_or_default();
        let conditions = node.status.unwrap_or_default().conditions.unwrap_or_default();
        let ready = conditions.into_iter().find(|condition| condition.type_ == "Ready");
        let not_ready = ready.filter(|condition| condition.status != "True");
        let not_ready_since = not_ready.is_some().then(now);
        let changed_at = not_ready.and_then(|condition| condition.last_transition_time);
        Self { not_ready_since, changed_at, key, version }
    }
}

impl Cached for CachedNode {
    fn key(&self) -> Key {
        self.key.clone()
    }

    fn group(&self) -> Option<Key> {
        None
    }

    fn version(&self) -> &str {
        &self.version
    }

    fn is_same(&self, other: &Self) -> bool {
        self.not_ready_since == other.not_ready_since
    }

    fn inherit(&mut self, old: &Self) {
        if self.not_ready_since.is_some() && self.changed_at == old.changed_at {
            self.not_ready_since = old.not_ready_since.or(self.not_ready_since);
        }
    }
}

/// Seconds between two log lines about an outage.
const LOG_SECONDS: u64 = 300;

/// The last outage of many nodes at once, if any. See [`NodeCounts::are_unreachable`].
#[derive(Debug, Default)]
pub struct NodeOutage {
    last_seen: AtomicI64,
    logged_at: AtomicI64,
}

impl NodeOutage {
    /// Returns the state of a node that is not ready since `since`. During an outage, it counts as
    /// not ready from now on, and after it from its end on: nodes come back one after the other.
    pub(crate) fn state_of(
        &self,
        since: Timestamp,
        counts: NodeCounts,
        now: Timestamp,
    ) -> NodeState {
        if counts.are_unreachable() {
            self.last_seen.fetch_max(now.0, Ordering::Relaxed);
            let logged_at = self.logged_at.load(Ordering::Relaxed);
            if now.seconds_since(Timestamp(logged_at)) >= LOG_SECONDS {
                self.logged_at.store(now.0, Ordering::Relaxed);
                tracing::warn!(
                    ready = counts.ready,
                    not_ready = counts.not_ready,
                    "most nodes are not ready, so their pods are kept: the nodes probably cannot \
                     reach the API server; delete a Node object whose machine has failed"
                );
            }
        }
        NodeState::NotReady(since.max(Timestamp(self.last_seen.load(Ordering::Relaxed))))
    }
}

/// Emits an event if a pod of a trial or job was deleted because its node does not respond. If the
/// node returns, the exit of the pod does not show that reason.
pub(crate) fn report_deletion<K>(
    context: &Context,
    owner: &K,
    pods: &[ObservedPod],
    deleted: &PodDeletion,
) where
    K: Resource<DynamicType = ()>,
{
    let pod = pods.iter().find(|pod| pod.uid == deleted.uid);
    let is_silent = pod.is_some_and(|pod| matches!(pod.node, NodeState::NotReady(_)));
    if is_silent && deleted.grace_seconds > 0 {
        let note = format!(
            "pod {} was deleted, because its node is not ready; if the node returns, the pod has \
             {} s to exit",
            deleted.name, deleted.grace_seconds
        );
        tracing::warn!(owner = owner.name_any(), "{note}");
        context.event(owner, EventType::Warning, "NodeNotReady", note);
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn node(status: &str, second: u32) -> CachedNode {
        let changed_at = format!("1970-01-01T00:00:{second:02}Z");
        let node = json!({"metadata": {"name": "n"}, "status": {"conditions": [
            {"type": "Ready", "status": status, "lastTransitionTime": changed_at}
        ]}});
        CachedNode::new(serde_json::from_value(node).unwrap())
    }

    #[test]
    fn not_ready_time_is_the_first_observation() {
        assert_eq!(node("True", 9).not_ready_since, None);
        assert!(node("False", 9).not_ready_since >= Some(Timestamp(1_000_000)), "the own clock");
        let check = |before: (&str, u32), after: (&str, u32), is_inherited: bool| {
            let (mut old, mut new) = (node(before.0, before.1), node(after.0, after.1));
            old.not_ready_since = old.not_ready_since.map(|_| Timestamp(7));
            new.inherit(&old);
            let since = new.not_ready_since;
            assert_eq!(since == Some(Timestamp(7)), is_inherited, "{before:?} {after:?}");
        };
        check(("Unknown", 9), ("Unknown", 9), true);
        // The node was ready in between.
        check(("Unknown", 9), ("Unknown", 20), false);
        check(("True", 9), ("Unknown", 20), false);
        check(("Unknown", 9), ("True", 20), false);
    }

    #[test]
    fn nodes_have_time_to_return_after_an_outage() {
        let outage = NodeOutage::default();
        let check = |ready, not_ready, now, since| {
            let counts = NodeCounts { ready, not_ready };
            let state = outage.state_of(Timestamp(100), counts, Timestamp(now));
            assert_eq!(state, NodeState::NotReady(Timestamp(since)), "{counts:?} at {now}");
        };
        check(9, 1, 190, 100);
        check(1, 9, 200, 200);
        check(1, 9, 250, 250);
        // Some nodes have returned.
        check(5, 5, 255, 250);
        check(5, 5, 400, 250);
    }
}
