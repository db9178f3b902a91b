//! Decides when an attempt ends after some of its pods have ended.

use std::collections::BTreeMap;

use stoker_api::exit::ExitClass;
use stoker_api::time::Timestamp;
use stoker_api::trial::AttemptEnd;

use super::super::removal::CLOCK_SKEW_SECONDS_MAX;
use super::super::{DELETE_GRACE_SECONDS, ObservedPod, PodOutcome, PodPhase, pod_outcome};
use super::Planner;

/// Pod of rank 0, which stores the checkpoints of the gang.
const LEAD_POD: u32 = 0;

impl Planner<'_> {
    /// Returns the outcomes of the pods that have ended.
    pub(super) fn outcomes(&self, pods: &BTreeMap<u32, &ObservedPod>) -> Vec<PodOutcome> {
        let view = self.view;
        pods.values().filter_map(|pod| pod_outcome(pod, &view.timeouts, view.now)).collect()
    }

    /// Returns when the attempt ends although some of its pods still run; `None` if it ends now.
    ///
    /// After a clean exit of another pod, rank 0 may still store the checkpoint of a stop. It gets
    /// as much time as after a stop request.
    pub(super) fn exit_deadline(
        &self,
        pods: &BTreeMap<u32, &ObservedPod>,
        outcomes: &[PodOutcome],
    ) -> Option<Timestamp> {
        let timeouts = &self.view.timeouts;
        let may_store = self.storing_lead(pods).is_some();
        let deadline = |outcome: &PodOutcome| {
            let grace = match is_clean(outcome) && may_store {
                true => timeouts.end_grace_seconds.max(timeouts.preemption_timeout_seconds),
                false => timeouts.end_grace_seconds,
            };
            outcome.finished_at.map(|at| at.plus(grace))
        };
        // A pod without an end time may have ended long ago, so the others get no grace.
        let earliest = outcomes.iter().map(deadline).min().flatten();
        earliest.filter(|until| outcomes.len() < pods.len() && *until > self.view.now)
    }

    /// Returns the end, the reason and the message of an attempt whose programs exited with errors
    /// of the infrastructure before all pods were scheduled; `None` for other attempts. The gang
    /// has trained nothing: its programs waited for the last pod until their rendezvous timed out.
    ///
    /// A scheduled pod that does not start is a failure of the infrastructure. It holds its slots,
    /// and may never start.
    pub(super) fn missed_start(
        &self,
        pods: &BTreeMap<u32, &ObservedPod>,
        worst: &PodOutcome,
    ) -> Option<(AttemptEnd, String, String)> {
        let view = self.view;
        let rest = || pods.values().filter(|pod| !pod.has_program_exited());
        // A pod that failed without an exit of its program is the cause itself.
        let has_outcome = |pod: &&ObservedPod| pod_outcome(pod, &view.timeouts, view.now).is_some();
        if worst.class.attempt_end() != AttemptEnd::Infrastructure || rest().any(has_outcome) {
            return None;
        }
        let pod = rest().find(|pod| pod.scheduled_at.is_none())?;
        let (reason, why) = pod.unscheduled_reason();
        Some((AttemptEnd::NotStarted, reason.to_owned(), format!("{why}; {}", worst.message)))
    }

    /// Deletes pod 0 after the clean exit of another pod that is being deleted, as by a drain. That
    /// pod soon disappears together with its exit. The end of pod 0's grace period then shows how
    /// long rank 0 may store the checkpoint.
    pub(super) fn follow_drain(
        &mut self,
        pods: &BTreeMap<u32, &ObservedPod>,
        outcomes: &[PodOutcome],
    ) {
        let view = self.view;
        let Some(lead) = self.storing_lead(pods) else { return };
        let is_drained = |pod: &&ObservedPod| pod.has_program_exited() && pod.deletion.is_some();
        let is_orderly = outcomes.iter().all(is_clean) && pods.values().any(is_drained);
        let is_deletable =
            lead.deletion.is_none() && !lead.is_on_dead_node(&view.timeouts, view.now);
        if is_orderly && is_deletable {
            let grace_seconds = view.timeouts.drain_grace_seconds();
            self.delete(lead, grace_seconds);
        }
    }

    /// Plans an attempt of which the pod with this index no longer exists.
    ///
    /// The other pods are deleted, and the attempt ends with pod 0. Until then, the report server
    /// accepts the checkpoint that rank 0 may still store. The next attempt begins after the end of
    /// pod 0 in any case.
    pub(super) fn end_with_lead(&mut self, deleted: u32, pods: &BTreeMap<u32, &ObservedPod>) {
        let view = self.view;
        let outcomes = self.outcomes(pods);
        let are_clean = outcomes.iter().all(is_clean);
        if let Some(lead) = self.storing_lead(pods) {
            // The exit of a drained pod may never have been visible. If it was not clean, rank 0
            // loses its connection and exits by itself.
            let grace_seconds = match are_clean {
                true => view.timeouts.drain_grace_seconds(),
                false => DELETE_GRACE_SECONDS,
            };
            let grace_end = lead.deletion.unwrap_or(view.now.plus(grace_seconds.into()));
            let until = grace_end.plus(CLOCK_SKEW_SECONDS_MAX.into());
            if view.now < until {
                self.wake(until);
                self.check_nodes(pods);
                self.delete_running(pods, grace_seconds);
                return;
            }
        }
        let has_lead_exited = pods.get(&LEAD_POD).is_some_and(|pod| pod.has_program_exited());
        self.record_unsent_reports(pods);
        match worst(&outcomes).filter(|_| are_clean && has_lead_exited) {
            Some(worst) => {
                self.end(worst.class.attempt_end(), &worst.reason, worst.message.clone());
            }
            None => {
                let text = format!("the pod with index {deleted} was deleted");
                self.end(AttemptEnd::Infrastructure, "PodDeleted", text);
            }
        }
    }

    /// Deletes the pods that run and are not being deleted, except pods on dead nodes. Pod 0 gets
    /// this grace period.
    fn delete_running(&mut self, pods: &BTreeMap<u32, &ObservedPod>, lead_grace_seconds: u32) {
        let view = self.view;
        let is_running = |pod: &ObservedPod| {
            let has_ended = pod.is_terminal() || pod.has_program_exited();
            let is_on_dead_node = pod.is_on_dead_node(&view.timeouts, view.now);
            !has_ended && !is_on_dead_node && pod.deletion.is_none()
        };
        for (index, pod) in pods.iter().filter(|(_, pod)| is_running(pod)) {
            let is_lead = *index == LEAD_POD;
            self.delete(pod, if is_lead { lead_grace_seconds } else { DELETE_GRACE_SECONDS });
        }
    }

    /// Returns pod 0 while rank 0 may store a checkpoint. A gang with a pod that has not started
    /// has trained nothing, so it has nothing to store.
    fn storing_lead<'p>(&self, pods: &BTreeMap<u32, &'p ObservedPod>) -> Option<&'p ObservedPod> {
        let has_started = |pod: &&ObservedPod| pod.phase != PodPhase::Pending || pod.exit.is_some();
        let lead = *pods.get(&LEAD_POD)?;
        let runs = pod_outcome(lead, &self.view.timeouts, self.view.now).is_none();
        (runs && pods.values().all(has_started)).then_some(lead)
    }
}

fn is_clean(outcome: &PodOutcome) -> bool {
    outcome.class <= ExitClass::Preempted
}

/// Returns the pod outcome that determines the attempt's outcome: the worst, and among equals the
/// earliest.
pub(super) fn worst(outcomes: &[PodOutcome]) -> Option<&PodOutcome> {
    let earliest_first =
        |outcome: &PodOutcome| std::cmp::Reverse(outcome.finished_at.unwrap_or_default());
    outcomes.iter().max_by_key(|outcome| (outcome.class, earliest_first(outcome)))
}
