//! Pods of a job on a cluster: what their exits mean, and which are created and deleted.
//!
//! ```text
//!   status + pods + now -> plan -> status to write, then pods to delete, then pods to create
//! ```
//!
//! A pod is one process. As with gangs, the status records an attempt before its pod is created,
//! and then that the pod was created. Unlike the ranks of a gang, slots are independent: one that
//! fails or cannot be scheduled does not block the others.

use stoker_api::experiment::{DesiredState, Phase};
use stoker_api::inference::{InferenceStatus, Role, WorkerEnd, WorkerStatus};
use stoker_api::time::Timestamp;
use stoker_api::trial::AttemptEnd;

use super::conditions::{self, Waits};
use super::{End, Start, back_off, begin, next, resume};
use crate::gang::{Delete, NodeState, Patience, PodSeen, ended};
use crate::trial::BackOffLimits;

/// Seconds that a pod has to exit by itself after it is deleted.
const DELETE_GRACE_SECONDS: u32 = 30;
/// Least grace with which the node still confirms the end of a killed pod. With 0, the API server
/// would remove the pod at once.
const KILL_GRACE_SECONDS: u32 = 1;
/// Seconds that the API server's clock may be ahead of the operator's.
const CLOCKS_DIFFER_SECONDS: u32 = 10;
/// Message for a process that exited with code 0 without a report.
const SAID_NOTHING: &str = "the process exited with code 0 without a report; the job's program \
                            must implement `Inference`, and a wrapper script must pass on its exit \
                            code";
/// Latest ends that are kept.
const ENDS_MAX: usize = 16;
/// Maximum length of an end's message, in characters. A status must stay small.
const MESSAGE_CHARS_MAX: usize = 1000;

/// Input of a plan.
#[derive(Clone, Copy, Debug)]
pub struct JobView<'a> {
    /// Recorded status of the job.
    pub status: &'a InferenceStatus,
    /// State that the user requested.
    pub wanted: DesiredState,
    /// Generation of the job's spec.
    pub generation: i64,
    /// Number of slots.
    pub slots: u32,
    /// The job's `maxRestarts`.
    pub max_restarts: u32,
    /// Pods of all attempts of the job. A pod's index is its slot.
    pub pods: &'a [PodSeen],
    /// Pods of the job that may be unscheduled at a time; at least 1.
    pub starting_max: u32,
    /// Timeouts.
    pub patience: Patience,
    /// Current time.
    pub now: Timestamp,
}

/// Steps to apply, in field order.
#[derive(Clone, Debug, PartialEq)]
pub struct JobPlan {
    /// Status to write before any other step.
    pub status: InferenceStatus,
    /// Pods to delete.
    pub delete: Vec<Delete>,
    /// Processes whose pods to create.
    pub create: Vec<Start>,
    /// Seconds until the next plan is due, even if nothing else changes.
    pub wake_seconds: Option<u64>,
}

/// Plans the pods of a job. The status of an ended job does not change.
pub fn plan(view: &JobView<'_>) -> JobPlan {
    let plan =
        JobPlan { status: view.status.clone(), delete: vec![], create: vec![], wake_seconds: None };
    let mut planner = Planner { view, plan, waits: Waits::default() };
    if !view.status.phase.is_terminal() {
        planner.live();
        planner.apply_wanted();
        planner.start();
    }
    planner.delete_stale_pods();
    let Planner { mut plan, waits, .. } = planner;
    // `refuse` may have ended the job without setting the end time and the conditions.
    if view.status.ended_at.is_none() {
        finish(view, &mut plan.status);
        conditions::set(view, &mut plan.status, &waits);
    }
    plan
}

/// Ends an attempt whose pod the API server refused. `end` sets the class: a refusal by a quota or
/// a policy is not a failure, and a malformed pod is the user's error.
pub fn refuse(
    status: &mut InferenceStatus,
    start: Start,
    end: AttemptEnd,
    reason: &str,
    message: &str,
    max_restarts: u32,
    now: Timestamp,
) {
    record_end(status, start.slot, start.attempt, end, reason, message, max_restarts, now);
    update_totals(status);
}

/// Updates the fields that follow from the workers.
fn update_totals(status: &mut InferenceStatus) {
    if status.phase.is_terminal() {
        status.workers.iter_mut().for_each(|worker| worker.attempt = None);
    }
    status.restarts = status.workers.iter().map(|worker| worker.restarts).sum();
    let running = status.workers.iter().filter(|worker| worker.has_pod && worker.attempt.is_some());
    status.running = running.count() as u32;
    status.progress_percent = super::percent(status);
}

fn finish(view: &JobView<'_>, status: &mut InferenceStatus) {
    update_totals(status);
    if status.started_at.is_none() && status.attempts > 0 {
        status.started_at = Some(view.now);
    }
    status.ended_at = status.phase.is_terminal().then_some(view.now);
    status.observed_generation = view.generation;
}

struct Planner<'a> {
    view: &'a JobView<'a>,
    plan: JobPlan,
    waits: Waits,
}

impl Planner<'_> {
    fn wake(&mut self, at: Timestamp) {
        let seconds = at.seconds_since(self.view.now).max(1);
        let earliest = self.plan.wake_seconds.map_or(seconds, |planned| planned.min(seconds));
        self.plan.wake_seconds = Some(earliest);
    }

    fn is_unwanted(&self) -> bool {
        self.view.wanted != DesiredState::Active
    }

    /// Plans each live attempt.
    fn live(&mut self) {
        let view = self.view;
        let is_refused = self.is_refused();
        for slot in 0..self.plan.status.workers.len() {
            // The end of an attempt may change the stage of the job, or end the job.
            if self.plan.status.phase.is_terminal() {
                return;
            }
            let (is_unwanted, role) = (self.is_unwanted(), self.plan.status.stage);
            let worker = &mut self.plan.status.workers[slot];
            let Some(attempt) = worker.attempt else { continue };
            let slot = slot as u32;
            match view.pods.iter().find(|pod| pod.attempt == attempt) {
                Some(pod) => {
                    worker.has_pod = true;
                    self.watch(slot, attempt, pod);
                }
                None if worker.has_pod => {
                    let text = format!("the pod of attempt {attempt} was deleted");
                    self.end(slot, attempt, AttemptEnd::Infrastructure, "PodDeleted", &text);
                }
                // Another slot's pod was refused before this pod was created, so this slot waits.
                None if is_unwanted || is_refused => worker.attempt = None,
                None => self.plan.create.push(Start { role, slot, attempt }),
            }
        }
    }

    fn watch(&mut self, slot: u32, attempt: u32, pod: &PodSeen) {
        let view = self.view;
        if let Some(end) = ended(pod, &view.patience, view.now) {
            self.end(slot, attempt, end.end.attempt_end(), &end.reason, &end.message);
            return;
        }
        if pod.is_on_dead_node(&view.patience, view.now) {
            self.delete_within(pod, DELETE_GRACE_SECONDS);
        }
        if let NodeState::NotReady(since) = pod.node {
            self.wake(since.plus(view.patience.node_lost_seconds));
        }
        match pod.scheduled_at {
            None => {
                let (reason, text) = pod.without_node();
                self.waits.say(reason, text);
            }
            Some(since) => {
                if let Some(waiting) = &pod.waiting {
                    self.waits.stuck(waiting);
                    self.wake(since.plus(view.patience.pull_deadline_seconds));
                }
            }
        }
        // `delete_stale_pods` deletes the pods of a killed job.
        if matches!(view.wanted, DesiredState::Paused | DesiredState::Cancelled) {
            let grace = view.patience.preemption_timeout_seconds;
            self.delete_within(pod, u32::try_from(grace).unwrap_or(u32::MAX));
        }
    }

    fn end(&mut self, slot: u32, attempt: u32, end: AttemptEnd, reason: &str, message: &str) {
        // The pod was deleted because the user paused, cancelled or killed the job.
        let end = match end {
            AttemptEnd::Infrastructure if self.is_unwanted() => AttemptEnd::RunnerLost,
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

    /// Applies the state that the user requested. Paused and cancelled jobs wait for live attempts.
    fn apply_wanted(&mut self) {
        let view = self.view;
        let status = &mut self.plan.status;
        if status.phase.is_terminal() {
            return;
        }
        if view.wanted == DesiredState::Killed {
            status.workers.iter_mut().for_each(|worker| worker.attempt = None);
        }
        let is_alive = status.workers.iter().any(|worker| worker.attempt.is_some());
        match view.wanted {
            DesiredState::Active if matches!(status.phase, Phase::Pending | Phase::Paused) => {
                resume(status, view.slots);
            }
            DesiredState::Paused if !is_alive => status.phase = Phase::Paused,
            DesiredState::Cancelled | DesiredState::Killed if !is_alive => {
                status.phase = Phase::Cancelled;
                let word = if view.wanted == DesiredState::Killed { "killed" } else { "cancelled" };
                status.message = Some(word.to_owned());
            }
            _ => {}
        }
    }

    /// Begins attempts of idle slots.
    fn start(&mut self) {
        let view = self.view;
        if self.is_unwanted() || self.plan.status.phase != Phase::Running {
            return;
        }
        let is_waiting =
            |pod: &&PodSeen| is_live(&self.plan.status, pod) && pod.scheduled_at.is_none();
        let waiting = view.pods.iter().filter(is_waiting).count() + self.plan.create.len();
        let mut allowed = (view.starting_max.max(1) as usize).saturating_sub(waiting);
        let is_refused = self.is_refused();
        for Start { role, slot, .. } in next(&self.plan.status) {
            let worker = &self.plan.status.workers[slot as usize];
            if let Some(until) = worker.not_before.filter(|until| *until > view.now) {
                self.wake(until);
                let last = self.plan.status.ends.iter().rfind(|end| end.slot == slot);
                let why = last.map_or("", |end| end.message.as_str());
                self.waits.say("BackOff", format!("retry at {until}: {why}"));
                continue;
            }
            let earlier = |pod: &&PodSeen| {
                pod.index == slot && !pod.is_terminal() && !pod.is_lost(&view.patience, view.now)
            };
            if let Some(pod) = view.pods.iter().find(earlier) {
                let text = format!("pod {} of an earlier attempt has not terminated", pod.name);
                self.waits.say("EarlierAttempt", text);
                continue;
            }
            if is_refused {
                // The refused slot's `BackOff` above has the reason and the time of the retry.
                continue;
            }
            if allowed == 0 {
                let text = "other pods of the job wait to be scheduled".to_owned();
                self.waits.say("Starting", text);
                break;
            }
            allowed -= 1;
            let start = Start { role, slot, attempt: self.plan.status.attempts };
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
        let is_known = |pod: &&PodSeen| pod.attempt < self.plan.status.attempts;
        let stale: Vec<&PodSeen> = view
            .pods
            .iter()
            .filter(is_known)
            .filter(|pod| !is_live(&self.plan.status, pod))
            .collect();
        for pod in stale {
            let exit = pod.exit.as_ref();
            let ended_at = exit.and_then(|exit| exit.finished_at).or(pod.scheduled_at);
            let ended_at = ended_at.unwrap_or_default();
            let until = ended_at.plus(view.patience.finished_pods_seconds);
            let settles = ended_at.plus(DELETE_GRACE_SECONDS.into());
            if pod.is_lost(&view.patience, view.now) {
                self.delete(pod, 0);
            } else if pod.is_terminal() && view.now < until {
                self.wake(until);
            } else if !pod.is_terminal()
                && pod.deletion.is_none()
                && pod.has_left()
                && view.now < settles
            {
                // The program has exited. Wait for the node to report the pod as finished, so that
                // the pod is kept for its logs.
                self.wake(settles);
            } else {
                let is_killed = view.wanted == DesiredState::Killed;
                let grace = if is_killed { KILL_GRACE_SECONDS } else { DELETE_GRACE_SECONDS };
                self.delete_within(pod, grace);
            }
        }
    }

    /// Deletes a pod, unless an earlier deletion ends about as soon.
    fn delete_within(&mut self, pod: &PodSeen, grace_seconds: u32) {
        let soon = u64::from(grace_seconds) + u64::from(CLOCKS_DIFFER_SECONDS);
        match pod.deletion {
            Some(until) if until <= self.view.now.plus(soon) => self.wake(until.plus(1)),
            Some(_) | None => self.delete(pod, grace_seconds),
        }
    }

    fn delete(&mut self, pod: &PodSeen, grace_seconds: u32) {
        let (name, uid) = (pod.name.clone(), pod.uid.clone());
        self.plan.delete.push(Delete { name, uid, grace_seconds });
    }
}

/// Returns whether a pod belongs to a live attempt.
fn is_live(status: &InferenceStatus, pod: &PodSeen) -> bool {
    let attempt = Some(pod.attempt);
    !status.phase.is_terminal() && status.workers.iter().any(|worker| worker.attempt == attempt)
}

/// Records the end of an attempt and the back-off of its slot. Keeps reason and message of an end
/// other than `Completed`.
#[expect(clippy::too_many_arguments, reason = "an end has this many parts")]
fn record_end(
    status: &mut InferenceStatus,
    slot: u32,
    attempt: u32,
    end: AttemptEnd,
    reason: &str,
    message: &str,
    max_restarts: u32,
    now: Timestamp,
) {
    let is_known = |worker: &WorkerStatus| worker.attempt == Some(attempt);
    if !status.workers.get(slot as usize).is_some_and(is_known) {
        return;
    }
    let message: String = message.chars().take(MESSAGE_CHARS_MAX).collect();
    let role = status.stage;
    // A program without `Inference` may also exit with code 0, without having done anything.
    let is_silent = end == AttemptEnd::Completed && role != Role::Work && !status.reported;
    let (end, reason, message) = match is_silent {
        true => (AttemptEnd::Infrastructure, "SaidNothing", SAID_NOTHING.to_owned()),
        false => (end, reason, message),
    };
    if end != AttemptEnd::Completed {
        let reason = reason.to_owned();
        let at = now;
        let message = message.clone();
        status.ends.push(WorkerEnd { attempt, role, slot, end, reason, message, at });
        let extra = status.ends.len().saturating_sub(ENDS_MAX);
        status.ends.drain(..extra);
    }
    // `has_committed` is not needed: the report of a commit has already reset the counts.
    let end_of_slot = End { slot, attempt, end, message: Some(message), has_committed: false };
    super::ended(status, end_of_slot, max_restarts);
    let Some(worker) = status.workers.get_mut(slot as usize) else { return };
    let wait = back_off(end, worker, &BackOffLimits::CLUSTER);
    worker.not_before = (!wait.is_zero()).then(|| now.plus(wait.as_secs()));
    worker.has_pod = false;
    if status.stage != role && role == Role::Finish {
        // All slots search for missing shards. Only slot 0 has failed, so the others need not wait.
        status.workers.iter_mut().skip(1).for_each(|worker| worker.not_before = None);
    }
}

#[cfg(test)]
mod tests;
