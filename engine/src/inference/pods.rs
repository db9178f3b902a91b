//! Pods of a job on a cluster: what their exits mean, and which are created and deleted.
//!
//! ```text
//!   status + pods + now -> plan -> status to write, then pods to delete, then pods to create
//! ```
//!
//! A pod is one process. As with gangs, the status records an attempt before its pod is created,
//! and then that the pod was created. Unlike the ranks of a gang, slots are independent: one that
//! fails or cannot be scheduled does not block the others.

mod process_end;

use stoker_api::experiment::{DesiredState, Phase};
use stoker_api::inference::{InferenceStatus, Role};
use stoker_api::time::Timestamp;
use stoker_api::trial::AttemptEnd;

use super::conditions::{self, PendingReasons};
use super::{ProcessStart, apply_desired_state, begin, next, update_totals};
use crate::experiment::{ADMISSION_REFUSED, POD_INVALID};
use crate::gang::{ObservedPod, PodDeletion, Removal, Timeouts, creation, pod_outcome};
use process_end::record_end;

/// Input of a plan.
#[derive(Clone, Copy, Debug)]
pub struct JobView<'a> {
    /// Recorded status of the job.
    pub status: &'a InferenceStatus,
    /// State that the user requested.
    pub desired_state: DesiredState,
    /// Generation of the job's spec.
    pub generation: i64,
    /// Number of slots.
    pub slots: u32,
    /// The job's `maxRestarts`.
    pub max_restarts: u32,
    /// Pods of all attempts of the job. A pod's index is its slot.
    pub pods: &'a [ObservedPod],
    /// Pods of the job that may be unscheduled at a time; at least 1.
    pub starting_max: u32,
    /// Timeouts.
    pub timeouts: Timeouts,
    /// Current time.
    pub now: Timestamp,
}

/// Steps to apply, in field order.
#[derive(Clone, Debug, PartialEq)]
pub struct JobPlan {
    /// Status to write before any other step.
    pub status: InferenceStatus,
    /// Pods to delete.
    pub delete: Vec<PodDeletion>,
    /// Processes whose pods to create.
    pub create: Vec<ProcessStart>,
    /// Seconds until the next plan is due, even if nothing else changes.
    pub wake_seconds: Option<u64>,
}

/// Plans the pods of a job. The status of an ended job does not change.
pub fn plan(view: &JobView<'_>) -> JobPlan {
    let plan =
        JobPlan { status: view.status.clone(), delete: vec![], create: vec![], wake_seconds: None };
    let mut planner = Planner { view, plan, pending: PendingReasons::default() };
    if !view.status.phase.is_terminal() {
        planner.plan_live_attempts();
        apply_desired_state(&mut planner.plan.status, view.desired_state, view.slots);
        planner.begin_attempts();
    }
    planner.delete_stale_pods();
    let Planner { mut plan, pending, .. } = planner;
    // `refuse` may have ended the job without setting the end time and the conditions.
    if view.status.ended_at.is_none() {
        finish(view, &mut plan.status);
        conditions::set(view, &mut plan.status, &pending);
    }
    plan
}

/// Ends an attempt whose pod the API server refused. `end` sets the class: a refusal by a quota or
/// a policy is not a failure, and a malformed pod is the user's error. After the planning, whose
/// pod was accepted, a change in the cluster causes even a malformed pod, so a retry may succeed.
pub fn refuse(
    status: &mut InferenceStatus,
    start: ProcessStart,
    end: AttemptEnd,
    reason: &str,
    message: &str,
    max_restarts: u32,
    now: Timestamp,
) {
    let (end, reason) = match reason {
        POD_INVALID if status.stage != Role::Plan => (AttemptEnd::NotStarted, ADMISSION_REFUSED),
        _ => (end, reason),
    };
    record_end(status, start.slot, start.attempt, end, reason, message, max_restarts, now);
    update_totals(status, |worker| worker.has_pod);
}

fn finish(view: &JobView<'_>, status: &mut InferenceStatus) {
    update_totals(status, |worker| worker.has_pod);
    if status.started_at.is_none() && status.attempts > 0 {
        status.started_at = Some(view.now);
    }
    status.ended_at = status.phase.is_terminal().then_some(view.now);
    status.observed_generation = view.generation;
}

struct Planner<'a> {
    view: &'a JobView<'a>,
    plan: JobPlan,
    pending: PendingReasons,
}

impl Planner<'_> {
    fn wake(&mut self, at: Timestamp) {
        let seconds = at.seconds_since(self.view.now).max(1);
        let earliest = self.plan.wake_seconds.map_or(seconds, |planned| planned.min(seconds));
        self.plan.wake_seconds = Some(earliest);
    }

    fn must_stop(&self) -> bool {
        self.view.desired_state != DesiredState::Active
    }

    /// Plans each live attempt.
    fn plan_live_attempts(&mut self) {
        let view = self.view;
        let is_refused = self.is_refused();
        for slot in 0..self.plan.status.workers.len() {
            // The end of an attempt may change the stage of the job, or end the job.
            if self.plan.status.phase.is_terminal() {
                return;
            }
            let (must_stop, role) = (self.must_stop(), self.plan.status.stage);
            let worker = &mut self.plan.status.workers[slot];
            let Some(attempt) = worker.attempt else { continue };
            let slot = slot as u32;
            match view.pods.iter().find(|pod| pod.attempt == attempt) {
                Some(pod) => {
                    worker.has_pod = true;
                    self.check_pod(slot, attempt, pod);
                }
                None if worker.has_pod => {
                    let text = format!("the pod of attempt {attempt} was deleted");
                    self.end(slot, attempt, AttemptEnd::Infrastructure, "PodDeleted", &text);
                }
                // Another slot's pod was refused before this pod was created, so this slot waits.
                None if must_stop || is_refused => worker.attempt = None,
                None => self.plan.create.push(ProcessStart { role, slot, attempt }),
            }
        }
    }

    fn check_pod(&mut self, slot: u32, attempt: u32, pod: &ObservedPod) {
        let view = self.view;
        if let Some(outcome) = pod_outcome(pod, &view.timeouts, view.now) {
            let end = outcome.class.attempt_end();
            self.end(slot, attempt, end, &outcome.reason, &outcome.message);
            return;
        }
        if pod.is_on_dead_node(&view.timeouts, view.now) {
            let num_before = self.plan.delete.len();
            self.delete_within(pod, view.timeouts.drain_grace_seconds());
            self.plan.delete[num_before..].iter_mut().for_each(|pod| pod.is_for_node = true);
        }
        if let Some(change) = pod.next_node_change(&view.timeouts, view.now) {
            self.wake(change);
        }
        if let Some(change) = creation::next_change(pod, view.now) {
            self.wake(change);
        }
        match pod.scheduled_at {
            None => {
                let (reason, text) = pod.unscheduled_reason();
                self.pending.set_unscheduled(reason, text);
            }
            Some(_) => {
                if let Some(waiting) = &pod.waiting {
                    self.pending.set_stuck_container(waiting);
                    self.wake(waiting.deadline(&view.timeouts));
                }
            }
        }
        // `delete_stale_pods` deletes the pods of a killed job.
        if matches!(view.desired_state, DesiredState::Paused | DesiredState::Cancelled) {
            let grace = view.timeouts.preemption_timeout_seconds;
            self.delete_within(pod, u32::try_from(grace).unwrap_or(u32::MAX));
        }
    }

    fn end(&mut self, slot: u32, attempt: u32, end: AttemptEnd, reason: &str, message: &str) {
        // The pod was deleted because the user paused, cancelled or killed the job.
        let end = match end {
            AttemptEnd::Infrastructure if self.must_stop() => AttemptEnd::RunnerLost,
            end => end,
        };
        let (max_restarts, now) = (self.view.max_restarts, self.view.now);
        record_end(&mut self.plan.status, slot, attempt, end, reason, message, max_restarts, now);
    }

    /// Returns whether a slot waits because its pod was refused, for example by a quota. The pods
    /// of other slots would be refused, too.
    fn is_refused(&self) -> bool {
        let status = &self.plan.status;
        (0..).zip(&status.workers).any(|(slot, worker)| {
            let last = status.ends.iter().rfind(|end| end.slot == slot);
            worker.not_before.is_some_and(|until| until > self.view.now)
                && last.is_some_and(|end| end.end == AttemptEnd::NotStarted)
        })
    }

    /// Begins attempts of idle slots.
    fn begin_attempts(&mut self) {
        let view = self.view;
        if self.must_stop() || self.plan.status.phase != Phase::Running {
            return;
        }
        let is_waiting =
            |pod: &&ObservedPod| is_live(&self.plan.status, pod) && pod.scheduled_at.is_none();
        let waiting = view.pods.iter().filter(is_waiting).count() + self.plan.create.len();
        let mut allowed = (view.starting_max.max(1) as usize).saturating_sub(waiting);
        let is_refused = self.is_refused();
        for ProcessStart { role, slot, .. } in next(&self.plan.status) {
            let worker = &self.plan.status.workers[slot as usize];
            if let Some(until) = worker.not_before.filter(|until| *until > view.now) {
                self.wake(until);
                let last = self.plan.status.ends.iter().rfind(|end| end.slot == slot);
                let why = last.map_or("", |end| end.message.as_str());
                self.pending.set_unscheduled("BackOff", format!("retry at {until}: {why}"));
                continue;
            }
            let earlier = |pod: &&ObservedPod| {
                pod.index == slot && !pod.is_terminal() && !pod.is_lost(&view.timeouts, view.now)
            };
            if let Some(pod) = view.pods.iter().find(earlier) {
                let text = format!("pod {} of an earlier attempt has not terminated", pod.name);
                self.pending.set_unscheduled("EarlierAttempt", text);
                continue;
            }
            if is_refused {
                // The refused slot's `BackOff` above has the reason and the time of the retry.
                continue;
            }
            if allowed == 0 {
                let text = "other pods of the job wait to be scheduled".to_owned();
                self.pending.set_unscheduled("Starting", text);
                break;
            }
            allowed -= 1;
            let start = ProcessStart { role, slot, attempt: self.plan.status.attempts };
            begin(&mut self.plan.status, start);
            if let Some(worker) = self.plan.status.workers.get_mut(slot as usize) {
                (worker.has_pod, worker.not_before) = (false, None);
            }
            self.plan.create.push(start);
        }
    }

    /// Deletes pods of ended attempts once their time is over. Keeps pods of attempts that the
    /// status does not know yet: another leader may have recorded them.
    fn delete_stale_pods(&mut self) {
        let view = self.view;
        let is_known = |pod: &&ObservedPod| pod.attempt < self.plan.status.attempts;
        let stale: Vec<&ObservedPod> = view
            .pods
            .iter()
            .filter(is_known)
            .filter(|pod| !is_live(&self.plan.status, pod))
            .collect();
        for pod in stale {
            let exit = pod.exit.as_ref();
            let ended_at = exit.and_then(|exit| exit.finished_at).or(pod.scheduled_at);
            let ended_at = ended_at.unwrap_or_default();
            let is_killed = view.desired_state == DesiredState::Killed;
            self.remove(pod, pod.stale_removal(ended_at, is_killed, &view.timeouts, view.now));
        }
    }

    /// Deletes a pod, unless an earlier deletion ends about as soon.
    fn delete_within(&mut self, pod: &ObservedPod, grace_seconds: u32) {
        self.remove(pod, pod.removal_within(grace_seconds, self.view.now));
    }

    fn remove(&mut self, pod: &ObservedPod, removal: Removal) {
        match removal {
            Removal::Wait(until) => self.wake(until),
            Removal::Delete(grace_seconds) => {
                let (name, uid) = (pod.name.clone(), pod.uid.clone());
                self.plan.delete.push(PodDeletion { name, uid, grace_seconds, is_for_node: false });
            }
        }
    }
}

/// Returns whether a pod belongs to a live attempt.
pub(super) fn is_live(status: &InferenceStatus, pod: &ObservedPod) -> bool {
    let attempt = Some(pod.attempt);
    !status.phase.is_terminal() && status.workers.iter().any(|worker| worker.attempt == attempt)
}

#[cfg(test)]
mod tests;
