//! Deletes pods of ended attempts.

use stoker_api::trial::DesiredTrialState;

use super::super::ObservedPod;
use super::{DELETE_GRACE_SECONDS, Planner, PodDeletion};
use crate::trial::live_attempt;

/// Least grace with which the node still confirms the end of a killed pod. With 0, the API server
/// would remove the pod at once.
const KILL_GRACE_SECONDS: u32 = 1;
/// Seconds that the API server's clock may be ahead of the operator's.
pub(super) const CLOCK_SKEW_SECONDS_MAX: u32 = 10;

impl Planner<'_> {
    /// Deletes pods of ended attempts once their time is over.
    pub(super) fn delete_stale_pods(&mut self) {
        let view = self.view;
        let live = live_attempt(&self.plan.record);
        let is_killed = view.record.spec.desired_state == DesiredTrialState::Kill;
        for pod in view.pods.iter().filter(|pod| Some(pod.attempt) != live) {
            let attempts = &self.plan.record.status.attempts;
            let attempt = attempts.iter().find(|attempt| attempt.number == pod.attempt);
            let ended_at = attempt.and_then(|attempt| attempt.ended_at).unwrap_or(view.now);
            let until = ended_at.plus(view.timeouts.finished_pods_seconds);
            let report_deadline = ended_at.plus(DELETE_GRACE_SECONDS.into());
            if pod.is_lost(&view.timeouts, view.now) {
                self.delete(pod, 0);
            } else if pod.is_terminal() && view.now < until {
                self.wake(until);
            } else if !pod.is_terminal()
                && pod.deletion.is_none()
                && pod.has_program_exited()
                && view.now < report_deadline
            {
                // The program has exited. Wait for the node to report the pod as finished, so that
                // the pod is kept for its logs.
                self.wake(report_deadline);
            } else {
                let grace = if is_killed { KILL_GRACE_SECONDS } else { DELETE_GRACE_SECONDS };
                self.delete_within(pod, grace);
            }
        }
    }

    /// Deletes a pod, unless an earlier deletion ends about as soon. An earlier deletion, such as a
    /// node drain, may have a grace period of minutes. It is cut short, because nothing waits for
    /// what the pod saves.
    pub(super) fn delete_within(&mut self, pod: &ObservedPod, grace_seconds: u32) {
        let soon = self.view.now.plus((grace_seconds + CLOCK_SKEW_SECONDS_MAX).into());
        match pod.deletion {
            Some(until) if until <= soon => self.wake(until.plus(1)),
            Some(_) | None => self.delete(pod, grace_seconds),
        }
    }

    pub(super) fn delete(&mut self, pod: &ObservedPod, grace_seconds: u32) {
        let (name, uid) = (pod.name.clone(), pod.uid.clone());
        self.plan.delete.push(PodDeletion { name, uid, grace_seconds });
    }
}
