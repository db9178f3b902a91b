//! Plans the pods of a trial.

use std::collections::BTreeMap;

use stoker_api::contract::{CheckpointRef, Report};
use stoker_api::experiment::Phase;
use stoker_api::time::Timestamp;
use stoker_api::trial::{AttemptEnd, DesiredTrialState};

use super::admission::Standing;
use super::{Ended, Patience, PodPhase, PodSeen, conditions, ended};
use crate::trial::{
    BackOff, Limits, Next, SearchedMetric, TrialRecord, Wanted, back_off, begin_attempt, close,
    closed, end_attempt, granted_units, live_attempt, next, record_report, result_at,
};

/// Seconds that a pod has to exit by itself after it is deleted.
const DELETE_GRACE_SECONDS: u32 = 30;
/// Least grace with which the node still confirms the end of a killed pod. With 0, the API server
/// would remove the pod at once.
const KILL_GRACE_SECONDS: u32 = 1;

/// Seconds that a start blocks other starts while no scheduler has processed its pods. A pod may
/// name a scheduler that does not exist.
const SCHEDULER_ANSWER_SECONDS: u64 = 60;

/// Seconds that the API server's clock may be ahead of the operator's.
const CLOCKS_DIFFER_SECONDS: u32 = 10;

/// Input of a plan.
#[derive(Clone, Copy, Debug)]
pub struct GangView<'a> {
    /// Record of the trial.
    pub record: &'a TrialRecord,
    /// Generation of the trial's spec.
    pub generation: i64,
    /// Pods of all attempts of the trial.
    pub pods: &'a [PodSeen],
    /// Number of pods of the gang.
    pub num_pods: u32,
    /// Whether a new attempt may begin: see [`admission`](super::admission).
    pub is_admitted: bool,
    /// Metric by which trials are compared.
    pub searched: SearchedMetric<'a>,
    /// Timeouts.
    pub patience: Patience,
    /// Limits of restarts.
    pub limits: Limits,
    /// Current time.
    pub now: Timestamp,
}

/// A pod to delete.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Delete {
    /// Name of the pod.
    pub name: String,
    /// UID of the pod. A different pod with this name is not deleted.
    pub uid: String,
    /// Grace period in seconds; 0 removes a pod whose node is unreachable.
    pub grace_seconds: u32,
}

/// Steps to apply, in field order.
#[derive(Clone, Debug, PartialEq)]
pub struct GangPlan {
    /// Record to write before any other step.
    pub record: TrialRecord,
    /// Pods to delete.
    pub delete: Vec<Delete>,
    /// Indexes of the live attempt's pods to create.
    pub create: Vec<u32>,
    /// Checkpoints from which an attempt that this plan begins starts, newest first.
    pub resume_from: Vec<CheckpointRef>,
    /// State of a start for admission; `None` if no attempt starts or waits to start.
    pub standing: Option<Standing>,
    /// Seconds until the next plan is due, even if nothing else changes.
    pub wake_seconds: Option<u64>,
}

/// Plans the pods of a trial.
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
    planner.delete_stale_pods();
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

/// Returns the phase of an open trial. It is `Running` once all pods of the live attempt have
/// started.
fn open_phase(view: &GangView<'_>, record: &TrialRecord) -> Phase {
    let Some(attempt) = live_attempt(record) else {
        return match record.spec.desired_state {
            DesiredTrialState::Pause => Phase::Paused,
            DesiredTrialState::Run | DesiredTrialState::Stop | DesiredTrialState::Kill => {
                Phase::Pending
            }
        };
    };
    let has_started = |pod: &&PodSeen| pod.phase != PodPhase::Pending || pod.exit.is_some();
    let pods = view.pods.iter().filter(|pod| pod.attempt == attempt);
    match pods.filter(has_started).count() >= view.num_pods as usize {
        true => Phase::Running,
        false => Phase::Pending,
    }
}

/// Ends the live attempt because the API server refused its pods. `as_end` sets the class: a
/// refusal by a quota or a policy is not a failure, and a malformed pod is the user's error.
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
    /// Reason and message if an attempt should run but does not.
    waits: Option<(&'static str, String)>,
}

impl Planner<'_> {
    fn wake(&mut self, at: Timestamp) {
        let seconds = at.seconds_since(self.view.now).max(1);
        let earliest = self.plan.wake_seconds.map_or(seconds, |planned| planned.min(seconds));
        self.plan.wake_seconds = Some(earliest);
    }

    fn end(&mut self, end_as: AttemptEnd, reason: &str, message: String) {
        let view = self.view;
        end(&mut self.plan.record, end_as, reason, message, &view.limits, view.now);
    }

    /// Plans the live attempt.
    fn live(&mut self) {
        let Some(attempt) = live_attempt(&self.plan.record) else { return };
        if closed(&self.plan.record).is_some() {
            return;
        }
        let view = self.view;
        let pods = view.pods.iter().filter(|pod| pod.attempt == attempt);
        let pods: BTreeMap<u32, &PodSeen> = pods.map(|pod| (pod.index, pod)).collect();
        let missing = (0..view.num_pods).filter(|index| !pods.contains_key(index));
        let missing: Vec<u32> = missing.collect();
        let last = self.plan.record.status.attempts.last();
        let has_pods = last.is_some_and(|attempt| attempt.has_pods);
        let started_at = last.and_then(|attempt| attempt.started_at);
        if self.enforce_stop_deadline() {
            return;
        }
        // A paused or stopped trial that has its result exits by itself; do not end it here.
        let units = granted_units(&view.record.spec);
        let is_unwanted =
            !view.record.spec.desired_state.is_run() && result_at(view.record, units).is_none();
        if !has_pods && is_unwanted {
            let text = "paused or stopped before the attempt began".to_owned();
            self.end(AttemptEnd::RunnerLost, "NotWanted", text);
            return;
        }
        if !missing.is_empty() && !has_pods {
            let deadline = view.patience.start_deadline_seconds;
            let until = started_at.unwrap_or(view.now).plus(deadline);
            if until <= view.now {
                let text = format!("not all pods were created within {deadline} s");
                self.end(AttemptEnd::NotStarted, "PodsNotMade", text);
                return;
            }
            self.wake(until);
            self.plan.standing = Some(Standing::Scheduling);
            self.plan.create = missing;
            return;
        }
        if let (false, Some(attempt)) = (has_pods, self.plan.record.status.attempts.last_mut()) {
            attempt.has_pods = true;
        }
        if let Some(index) = missing.first() {
            let text = format!("the pod with index {index} was deleted");
            self.finish(&pods);
            self.end(AttemptEnd::Infrastructure, "PodDeleted", text);
            return;
        }
        let waits = |pod: &&PodSeen| pod.phase == PodPhase::Pending && pod.exit.is_none();
        if is_unwanted && pods.values().all(waits) {
            let text = "paused or stopped before its pods started".to_owned();
            self.end(AttemptEnd::RunnerLost, "NotWanted", text);
            return;
        }
        self.watch(&pods);
    }

    /// Ends the attempt if the trial was killed, or was paused or stopped and did not exit in time.
    /// Returns whether it ended the attempt.
    fn enforce_stop_deadline(&mut self) -> bool {
        let view = self.view;
        let spec = &view.record.spec;
        let since = spec.desired_since.unwrap_or_default();
        let until = since.plus(view.patience.preemption_timeout_seconds);
        match spec.desired_state {
            DesiredTrialState::Run => false,
            DesiredTrialState::Kill => {
                self.end(AttemptEnd::RunnerLost, "Killed", "killed".to_owned());
                true
            }
            DesiredTrialState::Pause | DesiredTrialState::Stop if until <= view.now => {
                let text = format!(
                    "killed: the trial did not exit within {} s (preemptionTimeoutSeconds)",
                    view.patience.preemption_timeout_seconds
                );
                self.end(AttemptEnd::RunnerLost, "PreemptionTimeout", text);
                true
            }
            DesiredTrialState::Pause | DesiredTrialState::Stop => {
                self.wake(until);
                false
            }
        }
    }

    /// Checks a gang whose pods all exist.
    fn watch(&mut self, pods: &BTreeMap<u32, &PodSeen>) {
        let view = self.view;
        let ends: Vec<Ended> =
            pods.values().filter_map(|pod| ended(pod, &view.patience, view.now)).collect();
        if let Some(worst) = worst(&ends) {
            // A pod without an end time may have ended long ago, so the others get no grace.
            let first_end = ends.iter().map(|end| end.at).min().flatten();
            let until = first_end.map(|at| at.plus(view.patience.end_grace_seconds));
            let until = until.filter(|until| ends.len() < pods.len() && *until > view.now);
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
        for pod in pods.values().filter(|pod| pod.is_on_dead_node(&view.patience, view.now)) {
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
            // The controller that set the gate decides how long it stays, so no deadline applies.
            self.plan.standing = Some(Standing::Gated);
            self.waits = Some(pod.without_node());
            return;
        }
        let Some(attempt) = self.plan.record.status.attempts.last_mut() else { return };
        // A pod does not have the time at which its last gate was removed: while its condition
        // `PodScheduled` stays false, the condition keeps the transition time of the gate. So the
        // operator records when it first observed all pods without gates. The record survives a
        // restart of the operator.
        let since = *attempt.ungated_at.get_or_insert(view.now);
        let deadline = view.patience.start_deadline_seconds;
        let until = since.plus(deadline);
        let (reason, text) = unscheduled().find(is_rejected).unwrap_or(first).without_node();
        // A single pod holds no resources while it is unscheduled, so it waits for a new node
        // without a deadline.
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

    /// Records reports that the gang could not send; its pods left them in termination messages.
    fn finish(&mut self, pods: &BTreeMap<u32, &PodSeen>) {
        let view = self.view;
        let ends = pods.values().filter_map(|pod| ended(pod, &view.patience, view.now));
        let unsent: Vec<Report> = ends
            .filter_map(|end| end.termination)
            .flat_map(|termination| termination.unsent)
            .collect();
        for report in &unsent {
            // Ignore refusals: the report server would have refused the report, too.
            let _ = record_report(&mut self.plan.record, report, &view.searched);
        }
    }

    /// Deletes pods of ended attempts once their time is over.
    fn delete_stale_pods(&mut self) {
        let view = self.view;
        let live = live_attempt(&self.plan.record);
        let is_killed = view.record.spec.desired_state == DesiredTrialState::Kill;
        for pod in view.pods.iter().filter(|pod| Some(pod.attempt) != live) {
            let attempts = &self.plan.record.status.attempts;
            let attempt = attempts.iter().find(|attempt| attempt.number == pod.attempt);
            let ended_at = attempt.and_then(|attempt| attempt.ended_at).unwrap_or(view.now);
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
                let grace = if is_killed { KILL_GRACE_SECONDS } else { DELETE_GRACE_SECONDS };
                self.delete_within(pod, grace);
            }
        }
    }

    /// Deletes a pod, unless an earlier deletion ends about as soon. An earlier deletion, such as a
    /// node drain, may have a grace period of minutes. It is cut short, because nothing waits for
    /// what the pod saves.
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

    /// Closes the trial or begins an attempt if no attempt is alive.
    fn without_attempt(&mut self) {
        let view = self.view;
        match next(&self.plan.record, wanted(view.record.spec.desired_state)) {
            Next::Close { cause } => close(&mut self.plan.record, cause, None),
            Next::Start { attempt, resume_from, units: _ } => {
                let is_alive =
                    |pod: &&PodSeen| !pod.is_terminal() && !pod.is_lost(&view.patience, view.now);
                if let Some(pod) = view.pods.iter().find(is_alive) {
                    let text = format!("pod {} of an earlier attempt has not terminated", pod.name);
                    self.waits = Some(("EarlierAttempt", text));
                    return;
                }
                let limits = &view.limits.back_off;
                if let Some(BackOff { wait, why }) = back_off(&self.plan.record, view.now, limits) {
                    let until = view.now.plus(wait.as_secs().max(1));
                    self.wake(until);
                    self.waits = Some(("BackOff", format!("retry at {until}: {why}")));
                    return;
                }
                self.plan.standing = Some(Standing::Waiting);
                if !view.is_admitted {
                    let text = "other trials start first".to_owned();
                    self.waits = Some(("WaitingForAdmission", text));
                    return;
                }
                begin_attempt(&mut self.plan.record, attempt);
                if let Some(attempt) = self.plan.record.status.attempts.last_mut() {
                    attempt.started_at = Some(view.now);
                }
                self.plan.resume_from = resume_from;
                self.plan.create = (0..view.num_pods).collect();
                self.plan.standing = Some(Standing::Scheduling);
            }
            Next::Idle if view.record.spec.desired_state.is_run() => {
                let text = "the search has not decided yet how long the trial trains".to_owned();
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
    if let Some(attempt) = record.status.attempts.last_mut() {
        attempt.reason = Some(reason.to_owned());
        attempt.ended_at = Some(now);
    }
}

fn wanted(state: DesiredTrialState) -> Wanted {
    match state {
        DesiredTrialState::Run => Wanted::Run,
        DesiredTrialState::Pause => Wanted::Pause,
        DesiredTrialState::Stop | DesiredTrialState::Kill => Wanted::Stop,
    }
}

/// Returns the pod outcome that determines the attempt's outcome: the worst, and among equals the
/// earliest.
fn worst(ends: &[Ended]) -> Option<&Ended> {
    let earliest_first = |end: &Ended| std::cmp::Reverse(end.at.unwrap_or_default());
    ends.iter().max_by_key(|end| (end.end, earliest_first(end)))
}
