//! The pod that cleans up after an experiment: when it is deleted, and when another one follows.

use stoker_api::time::Timestamp;

use super::{
    DELETE_GRACE_SECONDS, NodeState, ObservedPod, PodOutcome, PodPhase, Removal, Timeouts,
    pod_outcome,
};

/// Seconds between the failure of a pod and the creation of the next one.
const RETRY_SECONDS: u64 = 60;

/// Next step for a clean-up pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CleanUpStep {
    /// Record what the pod has deleted.
    Finish,
    /// Report this message and delete the pod, so that another one is created.
    Retry(String),
    /// Delete the pod with this grace period in seconds. With 0, its node does not confirm the end.
    Delete(u32),
    /// Wait for a change, at most for these seconds.
    Wait(Option<u64>),
    /// Report why the pod does not start, and wait for a change: the scheduler and the kubelet
    /// retry.
    Report {
        /// Machine-readable reason, one word.
        reason: String,
        /// Human-readable reason.
        message: String,
    },
}

/// Returns the next step for a clean-up pod. `failed_at` is the time of its failure, if it failed.
/// A pod that is not wanted is deleted, unless it has finished. The exit of the program decides,
/// because sidecars may run forever, or fail.
pub fn clean_up_step(
    pod: &ObservedPod,
    failed_at: Option<Timestamp>,
    is_wanted: bool,
    timeouts: &Timeouts,
    now: Timestamp,
) -> CleanUpStep {
    let wait_until = |until: Timestamp| CleanUpStep::Wait(Some(until.seconds_since(now).max(1)));
    // A sidecar may delay the deletion of a pod until the next clean-up creates one of the same
    // name. That clean-up must not take the old pod for its own.
    let is_old = is_wanted && pod.deletion.is_some() && !pod.is_terminal();
    match (has_succeeded(pod), failed_at) {
        (Some(true), _) if !is_old => return CleanUpStep::Finish,
        (Some(false), Some(failed_at)) if is_wanted && !is_old => {
            let until = failed_at.plus(RETRY_SECONDS);
            if now < until {
                return wait_until(until);
            }
            let outcome = pod_outcome(pod, timeouts, now);
            return CleanUpStep::Retry(outcome.map_or(String::new(), |outcome| outcome.message));
        }
        _ => {}
    }
    if pod.is_lost(timeouts, now) {
        return CleanUpStep::Delete(0);
    }
    if !is_wanted || pod.is_on_dead_node(timeouts, now) {
        return match pod.removal_within(DELETE_GRACE_SECONDS, now) {
            Removal::Wait(until) => wait_until(until),
            Removal::Delete(grace_seconds) => CleanUpStep::Delete(grace_seconds),
        };
    }
    match pod.node {
        NodeState::NotReady(since) => wait_until(since.plus(timeouts.node_lost_seconds)),
        NodeState::Ready | NodeState::Deleted => start_step(pod, timeouts, now),
    }
}

/// Returns the next step for a pod whose program has not ended.
fn start_step(pod: &ObservedPod, timeouts: &Timeouts, now: Timestamp) -> CleanUpStep {
    if pod.deletion.is_some() {
        return CleanUpStep::Wait(None);
    }
    // Gates hold the pod back on purpose, often only for a moment.
    if pod.scheduled_at.is_none() && pod.unschedulable.is_some() && !pod.is_gated() {
        let (reason, message) = pod.unscheduled_reason();
        return CleanUpStep::Report { reason: reason.to_owned(), message };
    }
    match (pod_outcome(pod, timeouts, now), &pod.waiting) {
        (Some(PodOutcome { reason, message, .. }), _) => CleanUpStep::Report { reason, message },
        (None, Some(waiting)) => {
            CleanUpStep::Wait(Some(waiting.deadline(timeouts).seconds_since(now).max(1)))
        }
        (None, None) => CleanUpStep::Wait(None),
    }
}

/// Returns whether the program has succeeded; `None` if it has not ended.
fn has_succeeded(pod: &ObservedPod) -> Option<bool> {
    let exit = pod.exit.as_ref().filter(|_| pod.has_program_exited());
    match (exit, pod.phase) {
        (Some(exit), _) => Some(exit.code == 0),
        (None, PodPhase::Succeeded) => Some(true),
        (None, PodPhase::Failed) => Some(false),
        (None, _) => None,
    }
}
