//! What to do with a trial's pods now.

use std::collections::BTreeMap;

use stoker_api::contract::{CheckpointRef, Report};
use stoker_api::experiment::Phase;
use stoker_api::time::Timestamp;
use stoker_api::trial::{AttemptEnd, WantedState};

use super::admission::Standing;
use super::{Ended, Patience, PodPhase, PodSeen, conditions, ended};
use crate::trial::{
    BackOff, Limits, Next, SearchedMetric, TrialRecord, Wanted, back_off, begin_attempt, close,
    closed, end_attempt, granted_units, live_attempt, next, record_report, result_at,
};

/// Seconds that a pod which is not wanted any more has to end by itself.
const DELETE_GRACE_SECONDS: u32 = 30;
/// As little as leaves the node to say when the pod is gone; 0 would forget the pod at once.
const KILL_GRACE_SECONDS: u32 = 1;

/// How long a start is in the way of others while the scheduler does not look at its pods. There may be
/// no such scheduler.
const SCHEDULER_ANSWER_SECONDS: u64 = 60;

/// How much the API server's clock may be ahead of ours.
const CLOCKS_DIFFER_SECONDS: u32 = 10;

/// All that a plan follows from.
#[derive(Clone, Copy, Debug)]
pub struct GangView<'a> {
    /// What is recorded.
    pub record: &'a TrialRecord,
    /// The generation of the trial's spec.
    pub generation: i64,
    /// The pods of the trial, of whatever attempt.
    pub pods: &'a [PodSeen],
    /// Pods of a gang.
    pub num_pods: u32,
    /// Whether a new attempt may begin: see [`admission`](super::admission).
    pub is_admitted: bool,
    /// The metric by which trials are compared.
    pub searched: SearchedMetric<'a>,
    /// How patient to be.
    pub patience: Patience,
    /// How often the trial is tried again.
    pub limits: Limits,
    /// Now.
    pub now: Timestamp,
}

/// A pod to delete.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Delete {
    /// Its name.
    pub name: String,
    /// Its UID: another pod of the name is left alone.
    pub uid: String,
    /// Seconds it has to end; 0 forgets a pod that nobody can reach.
    pub grace_seconds: u32,
}

/// What to do, in this order.
#[derive(Clone, Debug, PartialEq)]
pub struct GangPlan {
    /// What is to be recorded before anything else is done.
    pub record: TrialRecord,
    /// Pods to delete.
    pub delete: Vec<Delete>,
    /// Indexes of the live attempt's pods to make.
    pub create: Vec<u32>,
    /// Checkpoints that an attempt begun by this plan starts from.
    pub resume_from: Vec<CheckpointRef>,
    /// How far the start of an attempt is; `None` if none starts or waits to.
    pub standing: Option<Standing>,
    /// Seconds after which something may follow from the time alone.
    pub wake_seconds: Option<u64>,
}

/// Says what to do with a trial's pods.
pub fn plan(view: &GangView<'_>) -> GangPlan {
    let mut planner = Planner {
        view,
        plan: GangPlan {
            record: view.record.clone(),
            delete: vec![],
            create: vec![],
            resume_from: vec![],
            standing: None,
            wake_seconds: None,
        },
        waits: None,
    };
    planner.live();
    planner.leftovers();
    planner.without_attempt();
    if !planner.plan.record.status.phase.is_terminal() {
        planner.plan.record.status.phase = open_phase(view, &planner.plan.record);
    }
    conditions::set(view, &mut planner.plan.record, planner.waits.as_ref());
    let status = &mut planner.plan.record.status;
    if status.ended_at.is_none() && status.phase.is_terminal() {
        status.ended_at = Some(view.now);
    }
    status.observed_generation = view.generation;
    planner.plan
}

/// The phase of a trial that is not closed. It runs while all pods of an attempt run.
fn open_phase(view: &GangView<'_>, record: &TrialRecord) -> Phase {
    let Some(attempt) = live_attempt(record) else {
        return match record.spec.wanted {
            WantedState::Pause => Phase::Paused,
            WantedState::Run | WantedState::Stop | WantedState::Kill => Phase::Pending,
        };
    };
    let has_started = |pod: &&PodSeen| pod.phase != PodPhase::Pending || pod.exit.is_some();
    let pods = view.pods.iter().filter(|pod| pod.attempt == attempt);
    match pods.filter(has_started).count() >= view.num_pods as usize {
        true => Phase::Running,
        false => Phase::Pending,
    }
}

/// Ends the live attempt because the API server refused its pods. What a quota or a policy refuses
/// may be granted later, and counts for nothing; what is no pod at all is the user's error.
pub fn refuse(
    record: &mut TrialRecord,
    as_end: AttemptEnd,
    reason: &str,
    message: String,
    limits: &Limits,
    now: Timestamp,
) {
    end(record, as_end, reason, message, limits, now);
}

struct Planner<'a> {
    view: &'a GangView<'a>,
    plan: GangPlan,
    /// Why nothing runs although something should.
    waits: Option<(&'static str, String)>,
}

impl Planner<'_> {
    fn wake(&mut self, at: Timestamp) {
        let seconds = at.seconds_since(self.view.now).max(1);
        self.plan.wake_seconds = Some(self.plan.wake_seconds.map_or(seconds, |it| it.min(seconds)));
    }

    fn end(&mut self, end_as: AttemptEnd, reason: &str, message: String) {
        let view = self.view;
        end(&mut self.plan.record, end_as, reason, message, &view.limits, view.now);
    }

    /// What follows for the live attempt.
    fn live(&mut self) {
        let Some(attempt) = live_attempt(&self.plan.record) else { return };
        if closed(&self.plan.record).is_some() {
            return;
        }
        let view = self.view;
        let pods: BTreeMap<u32, &PodSeen> =
            view.pods.iter().filter(|it| it.attempt == attempt).map(|it| (it.index, it)).collect();
        let missing: Vec<u32> = (0..view.num_pods).filter(|it| !pods.contains_key(it)).collect();
        let has_pods = self.plan.record.status.attempts.last().is_some_and(|it| it.has_pods);
        if self.asked_too_long() {
            return;
        }
        // One that is not wanted because it has its result ends as it would.
        let units = granted_units(&view.record.spec);
        let is_unwanted =
            !view.record.spec.wanted.is_run() && result_at(view.record, units).is_none();
        if !has_pods && is_unwanted {
            self.end(AttemptEnd::RunnerLost, "NotWanted", "not wanted before it began".to_owned());
            return;
        }
        if !missing.is_empty() && !has_pods {
            let deadline = view.patience.start_deadline_seconds;
            let started = self.plan.record.status.attempts.last().and_then(|it| it.started_at);
            let until = started.unwrap_or(view.now).plus(deadline);
            if until <= view.now {
                let text = format!("not all pods could be made within {deadline} s");
                self.end(AttemptEnd::NotStarted, "PodsNotMade", text);
                return;
            }
            self.wake(until);
            self.plan.standing = Some(Standing::Scheduling);
            self.plan.create = missing;
            return;
        }
        if let (false, Some(it)) = (has_pods, self.plan.record.status.attempts.last_mut()) {
            it.has_pods = true;
        }
        if let Some(index) = missing.first() {
            let text = format!("the pod of index {index} was deleted");
            self.finish(&pods);
            self.end(AttemptEnd::Infrastructure, "PodDeleted", text);
            return;
        }
        let waits = |it: &&PodSeen| it.phase == PodPhase::Pending && it.exit.is_none();
        if is_unwanted && pods.values().all(waits) {
            self.end(AttemptEnd::RunnerLost, "NotWanted", "not wanted before it ran".to_owned());
            return;
        }
        self.watch(&pods);
    }

    /// Whether the attempt is over because it was told to be.
    fn asked_too_long(&mut self) -> bool {
        let view = self.view;
        let spec = &view.record.spec;
        let since = spec.wanted_since.unwrap_or_default();
        let until = since.plus(view.patience.preemption_timeout_seconds);
        match spec.wanted {
            WantedState::Run => false,
            WantedState::Kill => {
                self.end(AttemptEnd::RunnerLost, "Killed", "killed".to_owned());
                true
            }
            WantedState::Pause | WantedState::Stop if until <= view.now => {
                let text = format!(
                    "killed: it did not exit within the {} s of preemptionTimeoutSeconds",
                    view.patience.preemption_timeout_seconds
                );
                self.end(AttemptEnd::RunnerLost, "PreemptionTimeout", text);
                true
            }
            WantedState::Pause | WantedState::Stop => {
                self.wake(until);
                false
            }
        }
    }

    /// Looks at a whole gang.
    fn watch(&mut self, pods: &BTreeMap<u32, &PodSeen>) {
        let view = self.view;
        let ends: Vec<Ended> =
            pods.values().filter_map(|it| ended(it, &view.patience, view.now)).collect();
        if let Some(worst) = worst(&ends) {
            // What nobody saw end may have ended long ago: the others need no more grace.
            let until = ends.iter().map(|it| it.at).min().flatten();
            let until = until.map(|it| it.plus(view.patience.end_grace_seconds));
            let until = until.filter(|it| ends.len() < pods.len() && *it > view.now);
            if let Some(until) = until {
                self.wake(until);
            } else {
                let (end, reason, message) =
                    (worst.end.attempt_end(), worst.reason.clone(), worst.message.clone());
                self.finish(pods);
                self.end(end, &reason, message);
            }
            return;
        }
        for pod in pods.values().filter(|it| it.is_on_dead_node(&view.patience, view.now)) {
            self.delete_within(pod, DELETE_GRACE_SECONDS);
        }
        for pod in pods.values() {
            if let super::NodeState::NotReady(since) = pod.node {
                self.wake(since.plus(view.patience.node_lost_seconds));
            }
        }
        self.wait_for_start(pods);
    }

    fn wait_for_start(&mut self, pods: &BTreeMap<u32, &PodSeen>) {
        let view = self.view;
        for pod in pods.values().filter(|pod| pod.waiting.is_some()) {
            if let Some(since) = pod.scheduled_at {
                self.wake(since.plus(view.patience.pull_deadline_seconds));
            }
        }
        let unscheduled = || pods.values().filter(|pod| pod.scheduled_at.is_none());
        let is_rejected = |pod: &&&PodSeen| pod.unschedulable.is_some();
        let Some(first) = unscheduled().next() else { return };
        if let Some(pod) = unscheduled().find(|pod| pod.is_gated()) {
            // Whoever set the gate decides how long it stays.
            self.plan.standing = Some(Standing::Gated);
            self.waits = Some(pod.without_node());
            return;
        }
        let Some(attempt) = self.plan.record.status.attempts.last_mut() else { return };
        // Nothing of a pod says since when it has no gate: its condition `PodScheduled` keeps the
        // transition time of the gate while it stays false. So the operator records when it first
        // saw all pods without gates. Unlike a clock in memory, the record outlives the operator.
        let since = *attempt.ungated_at.get_or_insert(view.now);
        let deadline = view.patience.start_deadline_seconds;
        let until = since.plus(deadline);
        let (reason, text) = unscheduled().find(is_rejected).unwrap_or(first).without_node();
        // A pod that is alone holds nothing that others need: it waits for a node that is added.
        if until <= view.now && view.num_pods > 1 {
            let text = format!("not all pods were scheduled within {deadline} s: {text}");
            self.end(AttemptEnd::NotStarted, reason, text);
            return;
        }
        let answer = since.plus(SCHEDULER_ANSWER_SECONDS);
        let is_answered = answer <= view.now || unscheduled().any(|pod| is_rejected(&pod));
        self.plan.standing = match is_answered {
            true => Some(Standing::Unschedulable),
            false => Some(Standing::Scheduling),
        };
        if !is_answered {
            self.wake(answer);
        }
        if view.num_pods > 1 {
            self.wake(until);
        }
        self.waits = Some((reason, text));
    }

    /// Takes in what the gang could not report any more.
    fn finish(&mut self, pods: &BTreeMap<u32, &PodSeen>) {
        let view = self.view;
        let ends = pods.values().filter_map(|it| ended(it, &view.patience, view.now));
        let unsent: Vec<Report> =
            ends.filter_map(|it| it.termination).flat_map(|it| it.unsent).collect();
        for report in &unsent {
            // One that cannot be true was refused before, or would have been.
            let _ = record_report(&mut self.plan.record, report, &view.searched);
        }
    }

    /// Pods of attempts that are over.
    fn leftovers(&mut self) {
        let view = self.view;
        let live = live_attempt(&self.plan.record);
        let is_killed = view.record.spec.wanted == WantedState::Kill;
        for pod in view.pods.iter().filter(|it| Some(it.attempt) != live) {
            let attempts = &self.plan.record.status.attempts;
            let attempt = attempts.iter().find(|it| it.number == pod.attempt);
            let ended_at = attempt.and_then(|it| it.ended_at).unwrap_or(view.now);
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
                let grace = if is_killed { KILL_GRACE_SECONDS } else { DELETE_GRACE_SECONDS };
                self.delete_within(pod, grace);
            }
        }
    }

    /// Deletes a pod unless it is being deleted and over soon. Whoever deleted it may have given it
    /// minutes to save in, as a drained node does; here nobody waits for what it saves.
    fn delete_within(&mut self, pod: &PodSeen, grace_seconds: u32) {
        let soon = self.view.now.plus((grace_seconds + CLOCKS_DIFFER_SECONDS).into());
        match pod.deletion {
            Some(until) if until <= soon => self.wake(until.plus(1)),
            Some(_) | None => self.delete(pod, grace_seconds),
        }
    }

    fn delete(&mut self, pod: &PodSeen, grace_seconds: u32) {
        let (name, uid) = (pod.name.clone(), pod.uid.clone());
        self.plan.delete.push(Delete { name, uid, grace_seconds });
    }

    /// What follows where no attempt is alive.
    fn without_attempt(&mut self) {
        let view = self.view;
        match next(&self.plan.record, wanted(view.record.spec.wanted)) {
            Next::Close { cause } => close(&mut self.plan.record, cause, None),
            Next::Start { attempt, resume_from, units: _ } => {
                let is_alive =
                    |it: &&PodSeen| !it.is_terminal() && !it.is_lost(&view.patience, view.now);
                if let Some(pod) = view.pods.iter().find(is_alive) {
                    let text = format!("pod {} of an earlier attempt has not ended", pod.name);
                    self.waits = Some(("EarlierAttempt", text));
                    return;
                }
                let limits = &view.limits.back_off;
                if let Some(BackOff { wait, why }) = back_off(&self.plan.record, view.now, limits) {
                    let until = view.now.plus(wait.as_secs().max(1));
                    self.wake(until);
                    self.waits = Some(("BackOff", format!("tried again at {until}: {why}")));
                    return;
                }
                self.plan.standing = Some(Standing::Waiting);
                if !view.is_admitted {
                    let text = "other trials start first".to_owned();
                    self.waits = Some(("WaitingForAdmission", text));
                    return;
                }
                begin_attempt(&mut self.plan.record, attempt);
                if let Some(it) = self.plan.record.status.attempts.last_mut() {
                    it.started_at = Some(view.now);
                }
                self.plan.resume_from = resume_from;
                self.plan.create = (0..view.num_pods).collect();
                self.plan.standing = Some(Standing::Scheduling);
            }
            Next::Idle if view.record.spec.wanted.is_run() => {
                let text = "the search has not decided yet how long it trains".to_owned();
                self.waits = Some(("WaitingForSearch", text));
            }
            Next::Running | Next::Idle | Next::Done => {}
        }
    }
}

fn end(
    record: &mut TrialRecord,
    end: AttemptEnd,
    reason: &str,
    message: String,
    limits: &Limits,
    now: Timestamp,
) {
    end_attempt(record, end, Some(message), limits);
    if let Some(it) = record.status.attempts.last_mut() {
        it.reason = Some(reason.to_owned());
        it.ended_at = Some(now);
    }
}

fn wanted(state: WantedState) -> Wanted {
    match state {
        WantedState::Run => Wanted::Run,
        WantedState::Pause => Wanted::Pause,
        WantedState::Stop | WantedState::Kill => Wanted::Stop,
    }
}

/// The end that counts: the worst, and of those the first.
fn worst(ends: &[Ended]) -> Option<&Ended> {
    let time = |it: &Ended| std::cmp::Reverse(it.at.unwrap_or_default());
    ends.iter().max_by_key(|it| (it.end, time(it)))
}
