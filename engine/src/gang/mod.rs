//! Pods of a trial: what their exits mean, when an attempt begins and ends, and which pods are
//! created and deleted.
//!
//! ```text
//!   record + pods + now -> plan -> record to write, then pods to delete, then pods to create
//! ```
//!
//! # Invariants
//!
//! - **One live attempt.** Attempt k+1 begins when every pod of earlier attempts is terminal,
//!   deleted or lost.
//! - **Recorded first.** The record of a plan is written before its pods are touched. If the runner
//!   stops in between, it plans again.

pub mod admission;
mod clean_up;
mod conditions;
pub(crate) mod creation;
mod outage;
mod outcome;
mod plan;
mod removal;

use stoker_api::time::Timestamp;

pub use clean_up::{CleanUpStep, clean_up_step};
pub use outage::are_nodes_unreachable;
pub use outcome::{PodOutcome, pod_outcome};
pub use plan::{GangPlan, GangView, POD_GRACE_SECONDS_MAX, PodDeletion, plan, refuse};
pub(crate) use removal::Removal;
pub use removal::{DELETE_GRACE_SECONDS, pods_to_stop};

/// Timeouts of the runner of a gang, in seconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Timeouts {
    /// Seconds in which all pods of a gang must be created. Also the seconds in which all pods must
    /// be scheduled, counted from the moment when no pod has a scheduling gate.
    pub start_deadline_seconds: u64,
    /// Seconds that a container of a scheduled pod may fail to start, for example because its image
    /// cannot be pulled. Counted from [`Waiting::since`].
    pub pull_deadline_seconds: u64,
    /// Seconds that a node may be not ready before its pods are deleted. After another
    /// [`DELETE_GRACE_SECONDS`], they count as lost.
    pub node_lost_seconds: u64,
    /// Seconds that a finished pod is kept, for its logs.
    pub finished_pods_seconds: u64,
    /// Seconds that the other ranks have to exit by themselves after the first exit.
    pub end_grace_seconds: u64,
    /// Seconds that a trial has to exit after a stop request. Also the seconds that rank 0 has to
    /// exit after the first clean exit, because it may still store a checkpoint.
    pub preemption_timeout_seconds: u64,
}

/// Observed state of one pod.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ObservedPod {
    /// Name of the pod.
    pub name: String,
    /// UID of the pod.
    pub uid: String,
    /// Attempt that the pod belongs to.
    pub attempt: u32,
    /// Index of the pod in the gang.
    pub index: u32,
    /// Phase of the pod.
    pub phase: PodPhase,
    /// When the pod was scheduled to a node; unset before.
    pub scheduled_at: Option<Timestamp>,
    /// Message of the scheduler if it found no node.
    pub unschedulable: Option<String>,
    /// Names of the scheduling gates. Schedulers ignore the pod until all are removed.
    pub gates: Vec<String>,
    /// A container that cannot start, and why. Unset once the program's container has started.
    pub waiting: Option<Waiting>,
    /// Since when the containers of a scheduled pod wait to be created. Unset if one of them runs,
    /// cannot start or determines the outcome.
    pub creating_since: Option<Timestamp>,
    /// Exit of the container that determines the outcome: the program's container, or a failed
    /// container before it.
    pub exit: Option<Exit>,
    /// Reason of the pod itself, such as `Evicted`.
    pub reason: Option<String>,
    /// Message of the pod itself.
    pub message: Option<String>,
    /// Reason of the condition `DisruptionTarget`.
    pub disruption: Option<String>,
    /// End of the grace period if the pod is being deleted.
    pub deletion: Option<Timestamp>,
    /// State of the pod's node.
    pub node: NodeState,
}

/// Phase of a pod.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PodPhase {
    /// Not all containers have started.
    #[default]
    Pending,
    /// All containers have started.
    Running,
    /// All containers exited with code 0.
    Succeeded,
    /// All containers exited, at least one with another code.
    Failed,
    /// The node does not respond.
    Unknown,
}

/// State of a pod's node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum NodeState {
    /// The node is ready, or the pod has no node.
    #[default]
    Ready,
    /// The node is not ready. The runner observed this first at this time, by its own clock.
    NotReady(Timestamp),
    /// The node was deleted.
    Deleted,
}

/// A container that cannot start.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Waiting {
    /// Reason from Kubernetes, such as `ImagePullBackOff`.
    pub reason: String,
    /// Message from Kubernetes.
    pub message: String,
    /// When the operator first observed that a container of the pod cannot start. Resets when all
    /// its containers can start.
    pub since: Timestamp,
}

impl Waiting {
    /// Returns when the attempt ends if the container still cannot start.
    pub(crate) fn deadline(&self, timeouts: &Timeouts) -> Timestamp {
        self.since.plus(timeouts.pull_deadline_seconds)
    }
}

/// Exit of a container.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Exit {
    /// Exit code; 128 + N for signal N.
    pub code: i32,
    /// Reason from Kubernetes, such as `OOMKilled`.
    pub reason: String,
    /// Termination message of the container.
    pub message: String,
    /// When the container exited.
    pub finished_at: Option<Timestamp>,
    /// Whether the container runs before the program's container.
    pub is_setup: bool,
}

impl ObservedPod {
    /// Returns whether all containers of the pod have exited.
    pub fn is_terminal(&self) -> bool {
        matches!(self.phase, PodPhase::Succeeded | PodPhase::Failed)
    }

    /// Returns whether a scheduling gate keeps the pod from being scheduled.
    pub fn is_gated(&self) -> bool {
        self.scheduled_at.is_none() && !self.gates.is_empty()
    }

    /// Returns the reason and the message for a pod without a node.
    pub(crate) fn unscheduled_reason(&self) -> (&'static str, String) {
        let name = &self.name;
        if self.is_gated() {
            let gates = self.gates.join(", ");
            return ("SchedulingGated", format!("pod {name} is held by scheduling gates: {gates}"));
        }
        let why = self.unschedulable.as_deref().unwrap_or("no scheduler has processed it yet");
        ("Unschedulable", format!("pod {name} is not scheduled: {why}"))
    }

    /// Returns whether the program has exited. Other containers of the pod may still run.
    pub(crate) fn has_program_exited(&self) -> bool {
        self.exit.as_ref().is_some_and(|exit| !exit.is_setup)
    }

    /// Returns whether the pod's outcome cannot be observed. Its node was deleted, or was not ready
    /// for `node_lost_seconds` and the pod is being deleted. Such a pod is lost when its grace
    /// period is over, or after another [`DELETE_GRACE_SECONDS`]. A longer grace period matters
    /// only if the node returns.
    pub fn is_lost(&self, timeouts: &Timeouts, now: Timestamp) -> bool {
        !self.is_terminal()
            && match (self.node, self.deletion) {
                (NodeState::Deleted, _) => true,
                (NodeState::NotReady(since), Some(until)) => {
                    let dead_at = since.plus(timeouts.node_lost_seconds);
                    let is_over = until < now || dead_at.plus(DELETE_GRACE_SECONDS.into()) < now;
                    dead_at <= now && is_over
                }
                (NodeState::NotReady(_), None) | (NodeState::Ready, _) => false,
            }
    }

    /// Returns when a pod on a node that is not ready must be deleted, or may be lost.
    pub(crate) fn next_node_change(
        &self,
        timeouts: &Timeouts,
        now: Timestamp,
    ) -> Option<Timestamp> {
        let NodeState::NotReady(since) = self.node else { return None };
        let dead_at = since.plus(timeouts.node_lost_seconds);
        Some(if now < dead_at {
            dead_at
        } else {
            dead_at.plus(1 + u64::from(DELETE_GRACE_SECONDS))
        })
    }

    /// Returns whether the pod must be deleted because its node does not respond.
    pub(crate) fn is_on_dead_node(&self, timeouts: &Timeouts, now: Timestamp) -> bool {
        let is_long = |since: Timestamp| now.seconds_since(since) >= timeouts.node_lost_seconds;
        !self.is_terminal() && matches!(self.node, NodeState::NotReady(since) if is_long(since))
    }
}

#[cfg(test)]
mod tests;
