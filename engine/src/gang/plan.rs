//! Plans the pods of a trial.

mod deletion;
mod exits;
mod scheduling;
mod stop;

use std::collections::BTreeMap;

use stoker_api::contract::{CheckpointRef, Report};
use stoker_api::experiment::Phase;
use stoker_api::time::Timestamp;
use stoker_api::trial::{AttemptEnd, DesiredTrialState};

use self::exits::worst;
use super::admission::StartStage;
use super::{ObservedPod, PodOutcome, PodPhase, Timeouts, conditions, pod_outcome};
use crate::trial::{
    BackOff, NextStep, RestartLimits, SearchedMetric, TargetState, TrialRecord, back_off,
    begin_attempt, close, closed, end_attempt, granted_units, live_attempt, next, record_report,
    reopen, result_at, stamp_facts,
};

/// Longest grace period of a pod that may store a checkpoint after it is deleted, for example by a
/// node drain.
pub const POD_GRACE_SECONDS_MAX: u32 = 600;

/// Input of a plan.
#[derive(Clone, Copy, Debug)]
pub struct GangView<'a> {
    /// Record of the trial.
    pub record: &'a TrialRecord,
    /// Generation of the trial's spec.
    pub generation: i64,
    /// Pods of all attempts of the trial.
    pub pods: &'a [ObservedPod],
    /// Time at which the trial certainly had its desired state, by the clock of this runner: when
    /// it first observed the state, or earlier.
    pub desired_state_seen_at: Timestamp,
    /// Number of pods of the gang.
    pub num_pods: u32,
    /// Whether a new attempt may begin: see [`admission`](super::admission).
    pub is_admitted: bool,
    /// Whether the user paused the experiment. Otherwise a pause is the search's.
    pub is_paused_by_user: bool,
    /// Metric by which trials are compared.
    pub searched: SearchedMetric<'a>,
    /// Timeouts.
    pub timeouts: Timeouts,
    /// Limits of restarts.
    pub limits: RestartLimits,
    /// Current time.
    pub now: Timestamp,
}

/// A pod to delete.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PodDeletion {
    /// Name of the pod.
    pub name: String,
    /// UID of the pod. A different pod with this name is not deleted.
    pub uid: String,
    /// Grace period in seconds; 0 removes a pod whose node is unreachable.
    pub grace_seconds: u32,
    /// Whether the reason is that the pod's node does not respond.
    pub is_for_node: bool,
}

/// Steps to apply, in field order.
#[derive(Clone, Debug, PartialEq)]
pub struct GangPlan {
    /// Record to write before any other step.
    pub record: TrialRecord,
    /// Whether to delete the gang's Service. The next attempt creates it again.
    pub delete_service: bool,
    /// Pods to delete.
    pub delete: Vec<PodDeletion>,
    /// Indexes of the live attempt's pods to create.
    pub create: Vec<u32>,
    /// Checkpoints from which an attempt that this plan begins starts, newest first.
    pub resume_from: Vec<CheckpointRef>,
    /// Stage of a start, for admission; `None` if no attempt starts or waits to start.
    pub start_stage: Option<StartStage>,
    /// Seconds until the next plan is due, even if nothing else changes.
    pub wake_seconds: Option<u64>,
}

/// Plans the pods of a trial.
pub fn plan(view: &GangView<'_>) -> GangPlan {
    let mut planner = Planner {
        view,
        plan: GangPlan {
            record: view.record.clone(),
            delete_service: false,
            delete: vec![],
            create: vec![],
            resume_from: vec![],
            start_stage: None,
            wake_seconds: None,
        },
        pending_reason: None,
    };
    planner.plan_live_attempt();
    planner.delete_stale_pods();
    planner.close_or_begin();
    if !planner.plan.record.status.phase.is_terminal() {
        planner.plan.record.status.phase = open_phase(view, &planner.plan.record);
    }
    conditions::set(view, &mut planner.plan.record, planner.pending_reason.as_ref());
    stamp_facts(&mut planner.plan.record, view.record.status.facts.len(), view.now);
    let status = &mut planner.plan.record.status;
    if status.ended_at.is_none() && status.phase.is_terminal() {
        status.ended_at = Some(view.now);
    }
    status.observed_generation = view.generation;
    planner.plan.delete_service = releases_service(view, &planner.plan);
    planner.plan
}

/// Returns whether the Service of a gang is to be deleted: no attempt needs it or follows soon. A
/// deletion that failed is repeated when pods are deleted and when the trial ends.
fn releases_service(view: &GangView<'_>, plan: &GangPlan) -> bool {
    let record = &plan.record;
    let is_closed = closed(record).is_some();
    let may_restart = !is_closed && record.spec.desired_state.is_run();
    if view.num_pods == 1 || may_restart || live_attempt(record).is_some() {
        return false;
    }
    let was_open = closed(view.record).is_none();
    live_attempt(view.record).is_some() || (is_closed && was_open) || !plan.delete.is_empty()
}

/// Returns the phase of an open trial. It is `Running` once all pods of the live attempt have
/// started.
fn open_phase(view: &GangView<'_>, record: &TrialRecord) -> Phase {
    let Some(attempt) = live_attempt(record) else {
        return match record.spec.desired_state {
            DesiredTrialState::Pause if waits_for_place(view, record) => Phase::Pending,
            DesiredTrialState::Pause => Phase::Paused,
            DesiredTrialState::Run | DesiredTrialState::Stop | DesiredTrialState::Kill => {
                Phase::Pending
            }
        };
    };
    let has_not_started = |pod: &ObservedPod| pod.phase == PodPhase::Pending && pod.exit.is_none();
    let mut pods = view.pods.iter().filter(|pod| pod.attempt == attempt);
    // Once all pods were created, a missing pod was deleted.
    let has_pods = record.status.attempts.last().is_some_and(|attempt| attempt.has_pods);
    match has_pods && !pods.any(has_not_started) {
        true => Phase::Running,
        false => Phase::Pending,
    }
}

/// Returns whether a trial has a length to train, and waits until another one of its search ends.
fn waits_for_place(view: &GangView<'_>, record: &TrialRecord) -> bool {
    let has_result = result_at(record, granted_units(&record.spec)).is_some();
    record.spec.desired_state == DesiredTrialState::Pause && !view.is_paused_by_user && !has_result
}

/// Ends the live attempt because the API server refused its pods. `end` sets the class: a
/// refusal by a quota or a policy is not a failure, and a malformed pod is the user's error.
pub fn refuse(
    record: &mut TrialRecord,
    end: AttemptEnd,
    reason: &str,
    message: String,
    limits: &RestartLimits,
    now: Timestamp,
) {
    end_live_attempt(record, end, reason, message, limits, now);
}

struct Planner<'a> {
    view: &'a GangView<'a>,
    plan: GangPlan,
    /// Reason and message if an attempt should run but does not.
    pending_reason: Option<(&'static str, String)>,
}

impl Planner<'_> {
    fn wake(&mut self, at: Timestamp) {
        let seconds = at.seconds_since(self.view.now).max(1);
        let earliest = self.plan.wake_seconds.map_or(seconds, |planned| planned.min(seconds));
        self.plan.wake_seconds = Some(earliest);
    }

    fn end(&mut self, end: AttemptEnd, reason: &str, message: String) {
        let view = self.view;
        end_live_attempt(&mut self.plan.record, end, reason, message, &view.limits, view.now);
    }

    /// Ends the live attempt after exits of which `worst` determines the outcome.
    fn end_after(&mut self, worst: &PodOutcome, end: AttemptEnd, reason: &str, message: String) {
        let view = self.view;
        let limits = view.limits.after(worst.class);
        end_live_attempt(&mut self.plan.record, end, reason, message, &limits, view.now);
    }

    /// Plans the live attempt.
    fn plan_live_attempt(&mut self) {
        let Some(attempt) = live_attempt(&self.plan.record) else { return };
        if closed(&self.plan.record).is_some() {
            return;
        }
        let view = self.view;
        let pods = view.pods.iter().filter(|pod| pod.attempt == attempt);
        let pods: BTreeMap<u32, &ObservedPod> = pods.map(|pod| (pod.index, pod)).collect();
        let missing = (0..view.num_pods).filter(|index| !pods.contains_key(index));
        let missing: Vec<u32> = missing.collect();
        let last = self.plan.record.status.attempts.last();
        let has_pods = last.is_some_and(|attempt| attempt.has_pods);
        let started_at = last.and_then(|attempt| attempt.started_at);
        if self.enforce_stop_deadline(has_pods, &pods) {
            return;
        }
        // A paused or stopped trial that has its result exits by itself; do not end it here.
        let units = granted_units(&view.record.spec);
        let must_stop =
            !view.record.spec.desired_state.is_run() && result_at(view.record, units).is_none();
        if !has_pods && must_stop {
            let text = "paused or stopped before the attempt began".to_owned();
            self.end(AttemptEnd::RunnerLost, "NotWanted", text);
            return;
        }
        if !missing.is_empty() && !has_pods {
            self.create_missing(missing, started_at.unwrap_or(view.now));
            return;
        }
        if let (false, Some(attempt)) = (has_pods, self.plan.record.status.attempts.last_mut()) {
            attempt.has_pods = true;
        }
        if let Some(index) = missing.first() {
            self.end_with_lead(*index, &pods);
            return;
        }
        self.record_ungated(&pods);
        let has_not_started =
            |pod: &&ObservedPod| pod.phase == PodPhase::Pending && pod.exit.is_none();
        if must_stop && pods.values().all(has_not_started) {
            let text = "paused or stopped before its pods started".to_owned();
            self.end(AttemptEnd::RunnerLost, "NotWanted", text);
            return;
        }
        self.check_pods(&pods);
    }

    /// Checks a gang whose pods all exist.
    fn check_pods(&mut self, pods: &BTreeMap<u32, &ObservedPod>) {
        let view = self.view;
        let outcomes = self.outcomes(pods);
        if let Some(worst) = worst(&outcomes) {
            let Some(until) = self.exit_deadline(pods, &outcomes) else {
                let end = match worst.class.attempt_end() {
                    // The same program has started before.
                    _ if worst.cannot_start() && view.limits.has_trained => AttemptEnd::NotStarted,
                    end => end,
                };
                let (end, reason, message) = self
                    .missed_start(pods, worst)
                    .unwrap_or_else(|| (end, worst.reason.clone(), worst.message.clone()));
                self.record_unsent_reports(pods);
                self.end_after(worst, end, &reason, message);
                return;
            };
            self.wake(until);
            self.follow_drain(pods, &outcomes);
        }
        self.check_nodes(pods);
        if outcomes.is_empty() {
            self.wait_for_start(pods);
        }
    }

    /// Deletes running pods whose node does not respond, so that they count as lost soon. If their
    /// node returns, they still have time to store a checkpoint.
    fn check_nodes(&mut self, pods: &BTreeMap<u32, &ObservedPod>) {
        let view = self.view;
        let is_running = |pod: &&&ObservedPod| !pod.is_terminal() && !pod.has_program_exited();
        for pod in pods.values().filter(is_running) {
            if pod.is_on_dead_node(&view.timeouts, view.now) {
                self.delete_for_node(pod);
            }
            if let Some(change) = pod.next_node_change(&view.timeouts, view.now) {
                self.wake(change);
            }
        }
    }

    /// Records reports that the gang could not send; its pods left them in termination messages.
    fn record_unsent_reports(&mut self, pods: &BTreeMap<u32, &ObservedPod>) {
        let view = self.view;
        let outcomes = pods.values().filter_map(|pod| pod_outcome(pod, &view.timeouts, view.now));
        let unsent: Vec<Report> = outcomes
            .filter_map(|outcome| outcome.termination)
            .flat_map(|termination| termination.unsent)
            .collect();
        for report in &unsent {
            // Ignore refusals: the report server would have refused the report, too.
            let _ = record_report(&mut self.plan.record, report, &view.searched);
        }
    }

    /// Closes the trial or begins an attempt if no attempt is alive.
    fn close_or_begin(&mut self) {
        let view = self.view;
        match next(&self.plan.record, target_state(view.record.spec.desired_state)) {
            NextStep::Close { cause } => close(&mut self.plan.record, cause, None),
            NextStep::Reopen => reopen(&mut self.plan.record),
            NextStep::Start { attempt, resume_from, units: _ } => {
                let is_alive = |pod: &&ObservedPod| {
                    !pod.is_terminal() && !pod.is_lost(&view.timeouts, view.now)
                };
                if let Some(pod) = view.pods.iter().find(is_alive) {
                    let text = format!("pod {} of an earlier attempt has not terminated", pod.name);
                    self.pending_reason = Some(("EarlierAttempt", text));
                    return;
                }
                let limits = &view.limits.back_off;
                if let Some(BackOff { wait, why }) = back_off(&self.plan.record, view.now, limits) {
                    let until = view.now.plus(wait.as_secs().max(1));
                    self.wake(until);
                    self.pending_reason = Some(("BackOff", format!("retry at {until}: {why}")));
                    return;
                }
                self.plan.start_stage = Some(StartStage::Waiting);
                if !view.is_admitted {
                    let text = "other trials start first".to_owned();
                    self.pending_reason = Some(("WaitingForAdmission", text));
                    return;
                }
                begin_attempt(&mut self.plan.record, attempt);
                if let Some(attempt) = self.plan.record.status.attempts.last_mut() {
                    attempt.started_at = Some(view.now);
                }
                self.plan.resume_from = resume_from;
                self.plan.create = (0..view.num_pods).collect();
                self.plan.start_stage = Some(StartStage::Scheduling);
            }
            NextStep::Idle if view.record.spec.desired_state.is_run() => {
                let text = "the search has not decided yet how long the trial trains".to_owned();
                self.pending_reason = Some(("WaitingForSearch", text));
            }
            NextStep::Idle if waits_for_place(view, &self.plan.record) => {
                let text = "as many trials of the search train as it allows (maxConcurrentTrials)";
                self.pending_reason = Some(("WaitingForPlace", text.to_owned()));
            }
            NextStep::Running | NextStep::Idle | NextStep::Done => {}
        }
    }
}

fn end_live_attempt(
    record: &mut TrialRecord,
    end: AttemptEnd,
    reason: &str,
    message: String,
    limits: &RestartLimits,
    now: Timestamp,
) {
    end_attempt(record, end, Some(message), limits);
    if let Some(attempt) = record.status.attempts.last_mut() {
        attempt.reason = Some(reason.to_owned());
        attempt.ended_at = Some(now);
    }
}

fn target_state(state: DesiredTrialState) -> TargetState {
    match state {
        DesiredTrialState::Run => TargetState::Run,
        DesiredTrialState::Pause => TargetState::Pause,
        DesiredTrialState::Stop | DesiredTrialState::Kill => TargetState::Stop,
    }
}
