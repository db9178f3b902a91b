//! Cached form of nodes, which contains only whether they are ready, and outages of most nodes.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use k8s_openapi::api::core::v1::Node;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::runtime::events::EventType;
use kube::{Resource, ResourceExt as _};
use stoker_api::time::Timestamp;
use stoker_engine::gang::{NodeState, PodDeletion, are_nodes_unreachable};

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

    /// Returns when the node became not ready, by the clock of the cluster, or else `now`. `None`
    /// if it is ready.
    fn changed_at(&self, now: Timestamp) -> Option<Timestamp> {
        let changed_at = self.changed_at.as_ref().map(|time| Timestamp(time.0.as_second()));
        self.not_ready_since.map(|_| changed_at.unwrap_or(now))
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

/// The current or last outage of most nodes. See [`are_nodes_unreachable`].
#[derive(Debug, Default)]
pub struct NodeOutage(Mutex<OutageState>);

#[derive(Debug, Default)]
struct OutageState {
    is_current: bool,
    /// End of the last outage; the epoch if this process has observed none.
    ended_at: Timestamp,
}

impl NodeOutage {
    fn lock(&self) -> MutexGuard<'_, OutageState> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Observes all nodes. Returns whether there is an outage.
    fn observe(&self, nodes: impl FnOnce() -> Vec<Arc<CachedNode>>, now: Timestamp) -> bool {
        let mut state = self.lock();
        // Read in the lock, so that an older observation never replaces a newer one.
        let nodes = nodes();
        let not_ready: Vec<Timestamp> =
            nodes.iter().filter_map(|node| node.changed_at(now)).collect();
        let (ready, not_ready_num) = (nodes.len() - not_ready.len(), not_ready.len());
        let is_outage = are_nodes_unreachable(ready, not_ready);
        match (is_outage, state.is_current) {
            (true, false) => tracing::warn!(
                ready,
                not_ready = not_ready_num,
                "most nodes are not ready, so their pods are kept: the nodes probably cannot reach \
                 the API server; delete a Node object whose machine has failed"
            ),
            (false, true) => {
                state.ended_at = now;
                tracing::info!(ready, not_ready = not_ready_num, "most nodes are ready again");
            }
            (true, true) | (false, false) => {}
        }
        state.is_current = is_outage;
        is_outage
    }

    /// Returns the state of a node that is not ready since this time. During an outage, the
    /// returned time is now. Afterwards, it is the end of the outage or later, because nodes return
    /// one after the other.
    pub(crate) fn state_of(&self, since: Timestamp, now: Timestamp) -> NodeState {
        let state = self.lock();
        NodeState::NotReady(if state.is_current { now } else { since.max(state.ended_at) })
    }
}

/// Observes all nodes once they are listed, and then after each change. All replicas do so, because
/// a new leader must know about an outage that has just ended.
pub(crate) fn observe_outage(context: &Context) {
    // Before the first list is complete, the counts would be wrong.
    if context.nodes.is_ready() {
        let is_outage = context.node_outage.observe(|| context.nodes.all(), now());
        context.metrics.node_outage.set(i64::from(is_outage));
    }
}

/// Emits an event if a pod of a trial or job was deleted because its node does not respond. If the
/// node returns, the exit of the pod does not show that reason.
pub(crate) fn report_deletion<K>(context: &Context, owner: &K, deleted: &PodDeletion)
where
    K: Resource<DynamicType = ()>,
{
    if deleted.is_for_node {
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
        let node = |status: &str| Arc::new(node(status, 9));
        let observe = |ready: usize, not_ready: usize, now| {
            let ready = std::iter::repeat_n(node("True"), ready);
            let nodes: Vec<_> =
                ready.chain(std::iter::repeat_n(node("Unknown"), not_ready)).collect();
            outage.observe(|| nodes, Timestamp(now))
        };
        let check = |now, since| {
            let state = outage.state_of(Timestamp(100), Timestamp(now));
            assert_eq!(state, NodeState::NotReady(Timestamp(since)), "at {now}");
        };
        assert!(!observe(9, 1, 100));
        check(190, 100);
        assert!(observe(1, 9, 200));
        check(250, 250);
        // Some nodes have returned.
        assert!(!observe(5, 5, 300));
        check(301, 300);
        check(400, 300);
    }
}
