//! Decides when an attempt ends after some of its pods have ended.

use std::collections::BTreeMap;

use stoker_api::exit::ExitClass;
use stoker_api::time::Timestamp;

use super::super::{ObservedPod, PodOutcome, PodPhase};
use super::Planner;

/// Pod of rank 0, which stores the checkpoints of the gang.
const LEAD_POD: u32 = 0;

impl Planner<'_> {
    /// Returns when the attempt ends although some of its pods still run; `None` if it ends now.
    ///
    /// After a clean exit of another pod, rank 0 may still store the checkpoint of a stop. It gets
    /// as much time as after a stop request. A gang with a pod that has not started has trained
    /// nothing, so it has nothing to store.
    pub(super) fn exit_deadline(
        &self,
        pods: &BTreeMap<u32, &ObservedPod>,
        outcomes: &[PodOutcome],
    ) -> Option<Timestamp> {
        let timeouts = &self.view.timeouts;
        let has_started = |pod: &&ObservedPod| pod.phase != PodPhase::Pending || pod.exit.is_some();
        let lead_runs = pods.get(&LEAD_POD).is_some_and(|pod| !pod.has_program_exited());
        let may_store = lead_runs && pods.values().all(has_started);
        let deadline = |outcome: &PodOutcome| {
            let grace = match outcome.class <= ExitClass::Preempted && may_store {
                true => timeouts.end_grace_seconds.max(timeouts.preemption_timeout_seconds),
                false => timeouts.end_grace_seconds,
            };
            outcome.finished_at.map(|at| at.plus(grace))
        };
        // A pod without an end time may have ended long ago, so the others get no grace.
        let earliest = outcomes.iter().map(deadline).min().flatten();
        earliest.filter(|until| outcomes.len() < pods.len() && *until > self.view.now)
    }
}

/// Returns the pod outcome that determines the attempt's outcome: the worst, and among equals the
/// earliest.
pub(super) fn worst(outcomes: &[PodOutcome]) -> Option<&PodOutcome> {
    let earliest_first =
        |outcome: &PodOutcome| std::cmp::Reverse(outcome.finished_at.unwrap_or_default());
    outcomes.iter().max_by_key(|outcome| (outcome.class, earliest_first(outcome)))
}
