//! Waits until all pods of an attempt are created and scheduled, with deadlines.

use std::collections::BTreeMap;

use stoker_api::time::Timestamp;
use stoker_api::trial::AttemptEnd;

use super::super::admission::StartStage;
use super::super::{ObservedPod, creation};
use super::Planner;

/// Seconds that a start blocks other starts while no scheduler has processed its pods. A pod may
/// name a scheduler that does not exist.
const SCHEDULER_RESPONSE_SECONDS: u64 = 60;
/// Seconds that a start blocks other starts while its pods cannot be created. A webhook of one
/// namespace may be unavailable for hours.
const CREATION_SECONDS: u64 = 60;

impl Planner<'_> {
    /// Creates the missing pods of an attempt, or ends the attempt at the start deadline.
    pub(super) fn create_missing(&mut self, missing: Vec<u32>, started_at: Timestamp) {
        let view = self.view;
        let deadline = view.timeouts.start_deadline_seconds;
        let until = started_at.plus(deadline);
        if until <= view.now {
            let text = format!("not all pods were created within {deadline} s");
            self.end(AttemptEnd::NotStarted, "PodsNotMade", text);
            return;
        }
        self.wake(until);
        let creation_deadline = started_at.plus(CREATION_SECONDS);
        self.plan.start_stage = match creation_deadline <= view.now {
            true => Some(StartStage::Unschedulable),
            false => {
                self.wake(creation_deadline);
                Some(StartStage::Scheduling)
            }
        };
        self.plan.create = missing;
    }

    /// Records since when all pods have no scheduling gates: the slots of the attempt count from
    /// then.
    ///
    /// A pod that is not scheduled does not have the time at which its last gate was removed:
    /// while its condition `PodScheduled` stays false, the condition keeps the transition time of
    /// the gate. So the operator records when it first observed all pods without gates. If all are
    /// scheduled by then, as after an outage of the operator, the last one was ungated when it was
    /// scheduled, or before. The record survives a restart of the operator.
    pub(super) fn record_ungated(&mut self, pods: &BTreeMap<u32, &ObservedPod>) {
        let now = self.view.now;
        let Some(attempt) = self.plan.record.status.attempts.last_mut() else { return };
        if pods.values().any(|pod| pod.is_gated()) {
            return;
        }
        let at = pods.values().map(|pod| pod.scheduled_at.unwrap_or(now)).max().unwrap_or(now);
        let at = at.max(attempt.started_at.unwrap_or(at)).min(now);
        attempt.ungated_at.get_or_insert(at);
    }

    /// Checks the pods that are not scheduled, and ends the attempt at the start deadline.
    pub(super) fn wait_for_start(&mut self, pods: &BTreeMap<u32, &ObservedPod>) {
        let view = self.view;
        for waiting in pods.values().filter_map(|pod| pod.waiting.as_ref()) {
            self.wake(waiting.deadline(&view.timeouts));
        }
        for change in pods.values().filter_map(|pod| creation::next_change(pod, view.now)) {
            self.wake(change);
        }
        let unscheduled = || pods.values().filter(|pod| pod.scheduled_at.is_none());
        let is_rejected = |pod: &&&ObservedPod| pod.unschedulable.is_some();
        let Some(first) = unscheduled().next() else { return };
        if let Some(pod) = unscheduled().find(|pod| pod.is_gated()) {
            // The controller that set the gate decides how long it stays, so no deadline applies.
            self.plan.start_stage = Some(StartStage::Gated);
            self.pending_reason = Some(pod.unscheduled_reason());
            return;
        }
        let last = self.plan.record.status.attempts.last();
        let Some(since) = last.and_then(|attempt| attempt.ungated_at) else { return };
        let deadline = view.timeouts.start_deadline_seconds;
        let until = since.plus(deadline);
        let (reason, text) = unscheduled().find(is_rejected).unwrap_or(first).unscheduled_reason();
        // A single pod holds no resources while it is unscheduled, so it waits for a new node
        // without a deadline.
        if until <= view.now && view.num_pods > 1 {
            let text = format!("not all pods were scheduled within {deadline} s: {text}");
            self.end(AttemptEnd::NotStarted, reason, text);
            return;
        }
        let response_deadline = since.plus(SCHEDULER_RESPONSE_SECONDS);
        let has_responded =
            response_deadline <= view.now || unscheduled().any(|pod| is_rejected(&pod));
        self.plan.start_stage = match has_responded {
            true => Some(StartStage::Unschedulable),
            false => Some(StartStage::Scheduling),
        };
        if !has_responded {
            self.wake(response_deadline);
        }
        if view.num_pods > 1 {
            self.wake(until);
        }
        self.pending_reason = Some((reason, text));
    }
}
