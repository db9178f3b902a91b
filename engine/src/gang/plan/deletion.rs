//! Deletes pods of ended attempts.

use stoker_api::trial::DesiredTrialState;

use super::super::{ObservedPod, Removal};
use super::{Planner, PodDeletion};
use crate::trial::live_attempt;

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
            self.remove(pod, pod.stale_removal(ended_at, is_killed, &view.timeouts, view.now));
        }
    }

    /// Deletes a pod, unless an earlier deletion ends about as soon.
    pub(super) fn delete_within(&mut self, pod: &ObservedPod, grace_seconds: u32) {
        self.remove(pod, pod.removal_within(grace_seconds, self.view.now));
    }

    /// Deletes a pod whose node does not respond. If the node returns, the pod still has time to
    /// store a checkpoint.
    pub(super) fn delete_for_node(&mut self, pod: &ObservedPod) {
        let num_before = self.plan.delete.len();
        self.delete_within(pod, self.view.timeouts.drain_grace_seconds());
        self.plan.delete[num_before..].iter_mut().for_each(|deletion| deletion.is_for_node = true);
    }

    fn remove(&mut self, pod: &ObservedPod, removal: Removal) {
        match removal {
            Removal::Wait(until) => self.wake(until),
            Removal::Delete(grace_seconds) => self.delete(pod, grace_seconds),
        }
    }

    pub(super) fn delete(&mut self, pod: &ObservedPod, grace_seconds: u32) {
        let (name, uid) = (pod.name.clone(), pod.uid.clone());
        self.plan.delete.push(PodDeletion { name, uid, grace_seconds, is_for_node: false });
    }
}
