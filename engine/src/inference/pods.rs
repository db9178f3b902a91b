//! A job's pods on a cluster: what their ends mean, and which are made and deleted now.
//!
//! ```text
//!   status + pods + now -> plan -> the status to write, then pods to delete, then pods to make
//! ```
//!
//! A pod is one process. As with gangs, an attempt is recorded before its pod is made, and that it was
//! made is recorded too; but slots are on their own: one that fails, or finds no room, holds nobody up.

use stoker_api::experiment::{DesiredState, Phase};
use stoker_api::inference::{InferenceStatus, Role, WorkerEnd, WorkerStatus};
use stoker_api::time::Timestamp;
use stoker_api::trial::AttemptEnd;

use super::conditions::{self, Waits};
use super::{End, Start, back_off, begin, next, resume};
use crate::gang::{Delete, NodeState, Patience, PodSeen, ended};
use crate::trial::BackOffLimits;

/// Seconds that a pod which is not wanted any more has to end by itself.
const DELETE_GRACE_SECONDS: u32 = 30;
/// As little as leaves the node to say when the pod is gone; 0 would forget the pod at once.
const KILL_GRACE_SECONDS: u32 = 1;
/// How much the API server's clock may be ahead of ours.
const CLOCKS_DIFFER_SECONDS: u32 = 10;
/// What is said of a process that ended well and reported nothing.
const SAID_NOTHING: &str = "it ended with exit code 0 and did not say what it did: the job's program must \
                            implement `Inference`, and a script around it must pass its exit code on";
/// Ends that are kept.
const ENDS_MAX: usize = 16;
/// Characters of an end's message that are kept: a status must stay small.
const MESSAGE_CHARS_MAX: usize = 1000;

/// All that a plan follows from.
#[derive(Clone, Copy, Debug)]
pub struct JobView<'a> {
    /// What is recorded.
    pub status: &'a InferenceStatus,
    /// What the user wants.
    pub wanted: DesiredState,
    /// The generation of the job's spec.
    pub generation: i64,
    /// Slots that the job has.
    pub slots: u32,
    /// The job's `maxRestarts`.
    pub max_restarts: u32,
    /// The pods of the job, of whatever attempt. A pod's index is its slot.
    pub pods: &'a [PodSeen],
    /// Pods of the job that may wait for a node at a time; at least 1.
    pub starting_max: u32,
    /// How patient to be.
    pub patience: Patience,
    /// Now.
    pub now: Timestamp,
}

/// What to do, in this order.
#[derive(Clone, Debug, PartialEq)]
pub struct JobPlan {
    /// What is to be recorded before anything else is done.
    pub status: InferenceStatus,
    /// Pods to delete.
    pub delete: Vec<Delete>,
    /// Processes whose pods are to be made.
    pub create: Vec<Start>,
    /// Seconds after which something may follow from the time alone.
    pub wake_seconds: Option<u64>,
}

/// Says what to do with a job's pods. What has ended stays as it is.
pub fn plan(view: &JobView<'_>) -> JobPlan {
    let plan =
        JobPlan { status: view.status.clone(), delete: vec![], create: vec![], wake_seconds: None };
    let mut planner = Planner { view, plan, waits: Waits::default() };
    if !view.status.phase.is_terminal() {
        planner.live();
        planner.wish();
        planner.start();
    }
    planner.leftovers();
    let Planner { mut plan, waits, .. } = planner;
    // One that was refused its last pod has ended, and nobody has said so yet.
    if view.status.ended_at.is_none() {
        finish(view, &mut plan.status);
        conditions::set(view, &mut plan.status, &waits);
    }
    plan
}

/// Ends an attempt whose pod the API server refused. What a quota or a policy refuses may be granted
/// later, and counts for nothing; what is no pod at all is the user's error.
pub fn refuse(
    status: &mut InferenceStatus,
    start: Start,
    end: AttemptEnd,
    reason: &str,
    message: &str,
    max_restarts: u32,
    now: Timestamp,
) {
    note(status, start.slot, start.attempt, end, reason, message, max_restarts, now);
    tidy(status);
}

/// Numbers that follow from the workers.
fn tidy(status: &mut InferenceStatus) {
    if status.phase.is_terminal() {
        status.workers.iter_mut().for_each(|it| it.attempt = None);
    }
    status.restarts = status.workers.iter().map(|it| it.restarts).sum();
    status.running =
        status.workers.iter().filter(|it| it.has_pod && it.attempt.is_some()).count() as u32;
    status.progress_percent = super::percent(status);
}

fn finish(view: &JobView<'_>, status: &mut InferenceStatus) {
    tidy(status);
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
        self.plan.wake_seconds = Some(self.plan.wake_seconds.map_or(seconds, |it| it.min(seconds)));
    }

    fn is_unwanted(&self) -> bool {
        self.view.wanted != DesiredState::Active
    }

    /// What follows for each attempt that is alive.
    fn live(&mut self) {
        let view = self.view;
        let is_refused = self.is_refused();
        for slot in 0..self.plan.status.workers.len() {
            // An end may take the whole job to its next stage, or to its end.
            if self.plan.status.phase.is_terminal() {
                return;
            }
            let (is_unwanted, role) = (self.is_unwanted(), self.plan.status.stage);
            let worker = &mut self.plan.status.workers[slot];
            let Some(attempt) = worker.attempt else { continue };
            let slot = slot as u32;
            match view.pods.iter().find(|it| it.attempt == attempt) {
                Some(pod) => {
                    worker.has_pod = true;
                    self.watch(slot, attempt, pod);
                }
                None if worker.has_pod => {
                    let text = format!("the pod of attempt {attempt} was deleted");
                    self.end(slot, attempt, AttemptEnd::Infrastructure, "PodDeleted", &text);
                }
                // Recorded, and not made before another was refused: it waits with that one.
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
        // Of a job that is killed none goes on: its pods are leftovers.
        if matches!(view.wanted, DesiredState::Paused | DesiredState::Cancelled) {
            let grace = view.patience.preemption_timeout_seconds;
            self.delete_within(pod, u32::try_from(grace).unwrap_or(u32::MAX));
        }
    }

    fn end(&mut self, slot: u32, attempt: u32, end: AttemptEnd, reason: &str, message: &str) {
        // Its pod was deleted because nobody wants it to run.
        let end = match end {
            AttemptEnd::Infrastructure if self.is_unwanted() => AttemptEnd::RunnerLost,
            end => end,
        };
        let (max_restarts, now) = (self.view.max_restarts, self.view.now);
        note(&mut self.plan.status, slot, attempt, end, reason, message, max_restarts, now);
    }

    /// Whether a slot waits because its pod was refused, as by a quota: others would be too.
    fn is_refused(&self) -> bool {
        let status = &self.plan.status;
        (0..).zip(&status.workers).any(|(slot, worker)| {
            let last = status.ends.iter().rfind(|it| it.slot == slot);
            worker.not_before.is_some_and(|it| it > self.view.now)
                && last.is_some_and(|it| it.end == AttemptEnd::NotStarted)
        })
    }

    /// What the user wants, as far as nothing runs that has to leave first.
    fn wish(&mut self) {
        let view = self.view;
        let status = &mut self.plan.status;
        if status.phase.is_terminal() {
            return;
        }
        if view.wanted == DesiredState::Killed {
            status.workers.iter_mut().for_each(|it| it.attempt = None);
        }
        let is_alive = status.workers.iter().any(|it| it.attempt.is_some());
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

    /// Begins attempts.
    fn start(&mut self) {
        let view = self.view;
        if self.is_unwanted() || self.plan.status.phase != Phase::Running {
            return;
        }
        let live = |it: &&PodSeen| is_live(&self.plan.status, it);
        let waiting = view.pods.iter().filter(live).filter(|it| it.scheduled_at.is_none()).count();
        let waiting = waiting + self.plan.create.len();
        let mut room = (view.starting_max.max(1) as usize).saturating_sub(waiting);
        let is_refused = self.is_refused();
        for Start { role, slot, .. } in next(&self.plan.status) {
            let worker = &self.plan.status.workers[slot as usize];
            if let Some(until) = worker.not_before.filter(|it| *it > view.now) {
                self.wake(until);
                let last = self.plan.status.ends.iter().rfind(|it| it.slot == slot);
                let why = last.map_or("", |it| it.message.as_str());
                self.waits.say("BackOff", format!("tried again at {until}: {why}"));
                continue;
            }
            let earlier = |it: &&PodSeen| {
                it.index == slot && !it.is_terminal() && !it.is_lost(&view.patience, view.now)
            };
            if let Some(pod) = view.pods.iter().find(earlier) {
                let text = format!("pod {} of an earlier attempt has not ended", pod.name);
                self.waits.say("EarlierAttempt", text);
                continue;
            }
            if is_refused {
                // It says above why, and when it is tried again.
                continue;
            }
            if room == 0 {
                self.waits.say("Starting", "other pods of the job wait for a node".to_owned());
                break;
            }
            room -= 1;
            let start = Start { role, slot, attempt: self.plan.status.attempts };
            begin(&mut self.plan.status, start);
            if let Some(worker) = self.plan.status.workers.get_mut(slot as usize) {
                (worker.has_pod, worker.not_before) = (false, None);
            }
            self.plan.create.push(start);
        }
    }

    /// Pods of attempts that are over. Of one that is not recorded nothing is known here yet.
    fn leftovers(&mut self) {
        let view = self.view;
        let is_known = |it: &&PodSeen| it.attempt < self.plan.status.attempts;
        let over: Vec<&PodSeen> = view
            .pods
            .iter()
            .filter(is_known)
            .filter(|it| !is_live(&self.plan.status, it))
            .collect();
        for pod in over {
            let exit = pod.exit.as_ref();
            let ended_at = exit.and_then(|it| it.finished_at).or(pod.scheduled_at);
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
                // Its node says next that all of it has ended, and nothing needs to be deleted.
                self.wake(settles);
            } else {
                let is_killed = view.wanted == DesiredState::Killed;
                let grace = if is_killed { KILL_GRACE_SECONDS } else { DELETE_GRACE_SECONDS };
                self.delete_within(pod, grace);
            }
        }
    }

    /// Deletes a pod unless it is being deleted and over soon.
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

/// Whether a pod is of an attempt that goes on.
fn is_live(status: &InferenceStatus, pod: &PodSeen) -> bool {
    !status.phase.is_terminal() && status.workers.iter().any(|it| it.attempt == Some(pod.attempt))
}

/// Records an end, when its slot may go on, and, if it did not go well, what was said of it.
#[expect(clippy::too_many_arguments, reason = "an end has as many parts")]
fn note(
    status: &mut InferenceStatus,
    slot: u32,
    attempt: u32,
    end: AttemptEnd,
    reason: &str,
    message: &str,
    max_restarts: u32,
    now: Timestamp,
) {
    let is_known = |it: &WorkerStatus| it.attempt == Some(attempt);
    if !status.workers.get(slot as usize).is_some_and(is_known) {
        return;
    }
    let message: String = message.chars().take(MESSAGE_CHARS_MAX).collect();
    let role = status.stage;
    // A program that is none of ours ends well too, and has done nothing.
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
    // What was committed was reported before, and has begun the count anew.
    let of = End { slot, attempt, end, message: Some(message), has_committed: false };
    super::ended(status, of, max_restarts);
    let Some(worker) = status.workers.get_mut(slot as usize) else { return };
    let wait = back_off(end, worker, &BackOffLimits::CLUSTER);
    worker.not_before = (!wait.is_zero()).then(|| now.plus(wait.as_secs()));
    worker.has_pod = false;
    if status.stage != role && role == Role::Finish {
        // All look for what is missing; nobody else has failed.
        status.workers.iter_mut().skip(1).for_each(|it| it.not_before = None);
    }
}

#[cfg(test)]
mod tests;
