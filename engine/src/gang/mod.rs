//! The pods of a trial: what their ends mean, when an attempt begins and is over, and which pods are
//! made and deleted for it.
//!
//! ```text
//!   record + pods + now -> plan -> the record to write, then pods to delete, then pods to make
//! ```
//!
//! # Invariants
//!
//! - **One live attempt.** Attempt k+1 begins when every pod of the attempts before it is terminal,
//!   gone or lost.
//! - **Recorded first.** A plan's record is written before its pods are touched; a plan that was cut
//!   there is made again.

pub mod admission;
mod conditions;
mod end;
mod plan;

use stoker_api::time::Timestamp;

pub use end::{Ended, ended};
pub use plan::{Delete, GangPlan, GangView, plan, refuse};

/// How patient a gang's runner is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Patience {
    /// Seconds in which all pods of a gang must be created, and then, from the moment all are without
    /// scheduling gates, scheduled.
    pub start_deadline_seconds: u64,
    /// Seconds that a container of a scheduled pod may be unable to start, for example because its
    /// image cannot be pulled.
    pub pull_deadline_seconds: u64,
    /// Seconds that a node may be not ready before its pods are taken for lost.
    pub node_lost_seconds: u64,
    /// Seconds that a finished pod stays, for its logs.
    pub finished_pods_seconds: u64,
    /// Seconds that the other ranks have to end by themselves once one has.
    pub end_grace_seconds: u64,
    /// Seconds that a trial has to exit when asked to.
    pub preemption_timeout_seconds: u64,
}

/// What is known of one pod.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PodSeen {
    /// Its name.
    pub name: String,
    /// Its UID.
    pub uid: String,
    /// The attempt it is of.
    pub attempt: u32,
    /// Its index in the gang.
    pub index: u32,
    /// Where it stands.
    pub phase: PodPhase,
    /// When it was scheduled to a node, if it was.
    pub scheduled_at: Option<Timestamp>,
    /// What its scheduler said when it found no node.
    pub unschedulable: Option<String>,
    /// Names of its scheduling gates: no scheduler looks at it before they are removed.
    pub gates: Vec<String>,
    /// A container that cannot start, and why.
    pub waiting: Option<Waiting>,
    /// How the container ended that decides: the program's, or one before it that failed.
    pub exit: Option<Exit>,
    /// The pod's own reason, such as `Evicted`.
    pub reason: Option<String>,
    /// The pod's own message.
    pub message: Option<String>,
    /// The reason of its condition `DisruptionTarget`.
    pub disruption: Option<String>,
    /// If it is being deleted: when its grace ends.
    pub deletion: Option<Timestamp>,
    /// Its node, if it is not as it should be.
    pub node: NodeState,
}

/// Where a pod stands.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PodPhase {
    /// Not all containers have been started.
    #[default]
    Pending,
    /// They have.
    Running,
    /// All ended with code 0.
    Succeeded,
    /// All ended, not all with code 0.
    Failed,
    /// Its node does not answer.
    Unknown,
}

/// The node of a pod.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum NodeState {
    /// Nothing is wrong with it, or the pod has none.
    #[default]
    Fine,
    /// It is not ready since then.
    NotReady(Timestamp),
    /// It was deleted.
    Gone,
}

/// A container that waits.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Waiting {
    /// Kubernetes' reason, such as `ImagePullBackOff`.
    pub reason: String,
    /// Kubernetes' message.
    pub message: String,
}

/// A container that has ended.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Exit {
    /// Its exit code; 128 + N for signal N.
    pub code: i32,
    /// Kubernetes' reason, such as `OOMKilled`.
    pub reason: String,
    /// Its termination message.
    pub message: String,
    /// When it ended.
    pub finished_at: Option<Timestamp>,
    /// Whether it is a container before the program's.
    pub is_setup: bool,
}

impl PodSeen {
    /// Whether nothing of it runs any more.
    pub fn is_terminal(&self) -> bool {
        matches!(self.phase, PodPhase::Succeeded | PodPhase::Failed)
    }

    /// Whether a scheduling gate holds it back.
    pub fn is_gated(&self) -> bool {
        self.scheduled_at.is_none() && !self.gates.is_empty()
    }

    /// Reason and message of a pod that has no node.
    pub(crate) fn without_node(&self) -> (&'static str, String) {
        let name = &self.name;
        if self.is_gated() {
            let gates = self.gates.join(", ");
            return ("SchedulingGated", format!("pod {name} is held by scheduling gates: {gates}"));
        }
        let why = self.unschedulable.as_deref().unwrap_or("not looked at by a scheduler yet");
        ("Unschedulable", format!("pod {name} has no node: {why}"))
    }

    /// Whether its program has ended, whatever else of it runs.
    pub(crate) fn has_left(&self) -> bool {
        self.exit.as_ref().is_some_and(|it| !it.is_setup)
    }

    /// Whether nobody can say what became of it: its node is gone, or has not answered for so long
    /// that its deletion is over by its own terms.
    pub fn is_lost(&self, patience: &Patience, now: Timestamp) -> bool {
        let is_over = self.deletion.is_some_and(|it| it < now);
        !self.is_terminal()
            && match self.node {
                NodeState::Fine => false,
                NodeState::Gone => true,
                NodeState::NotReady(since) => {
                    is_over && now.seconds_since(since) >= patience.node_lost_seconds
                }
            }
    }

    /// Whether it must be deleted because its node does not answer.
    pub(crate) fn is_on_dead_node(&self, patience: &Patience, now: Timestamp) -> bool {
        let is_long = |it: Timestamp| now.seconds_since(it) >= patience.node_lost_seconds;
        !self.is_terminal() && matches!(self.node, NodeState::NotReady(since) if is_long(since))
    }
}

#[cfg(test)]
mod tests;
