//! Status conditions of a job, for users and for `kubectl wait`.

use stoker_api::condition::{self, Condition, ConditionStatus};
use stoker_api::experiment::Phase;
use stoker_api::inference::{InferenceStatus, Role};

use super::pods::{JobView, is_live};
use crate::gang::{PodPhase, Waiting, creation};

/// Why some processes do not run although they should. The first of each kind is kept.
#[derive(Debug, Default)]
pub(super) struct PendingReasons {
    /// Reason and message of a process that cannot start or be scheduled.
    unscheduled: Option<(&'static str, String)>,
    /// A container that cannot start.
    stuck_container: Option<Waiting>,
}

impl PendingReasons {
    pub(super) fn set_unscheduled(&mut self, reason: &'static str, text: String) {
        self.unscheduled.get_or_insert((reason, text));
    }

    /// Records a container that cannot start.
    pub(super) fn set_stuck_container(&mut self, waiting: &Waiting) {
        self.stuck_container.get_or_insert_with(|| waiting.clone());
    }
}

/// Sets the conditions that follow from a status and its pods.
pub(super) fn set(view: &JobView<'_>, status: &mut InferenceStatus, pending: &PendingReasons) {
    let mut conditions = vec![("Valid", true, "Accepted".to_owned(), String::new())];
    let mut add = |type_, holds, reason: &str, message: &str| {
        conditions.push((type_, holds, reason.to_owned(), message.to_owned()));
    };
    let phase = status.phase;
    let (scheduled, reason, message) = scheduled(view, status, pending);
    add("Scheduled", scheduled, reason, message);
    let is_running = |attempt: u32| {
        view.pods.iter().any(|pod| pod.attempt == attempt && pod.phase == PodPhase::Running)
    };
    let any_runs = status.workers.iter().filter_map(|worker| worker.attempt).any(is_running);
    let live_pods = view.pods.iter().filter(|pod| is_live(status, pod));
    let late = creation::late_message(live_pods, view.now).unwrap_or_default();
    match (phase, &pending.stuck_container) {
        (Phase::Running, Some(waiting)) => {
            add("Running", false, &waiting.reason, &waiting.message);
        }
        (Phase::Running, None) if any_runs => add("Running", true, stage(status.stage), &late),
        (Phase::Running, None) => add("Running", false, "Starting", &late),
        (Phase::Pending | Phase::Paused, _) => add("Running", false, &format!("{phase:?}"), ""),
        _ => add("Running", false, "Ended", ""),
    }
    if phase.is_terminal() {
        let message = status.message.clone().unwrap_or_default();
        let ends = [Phase::Completed, Phase::Failed, Phase::Cancelled];
        for (type_, of) in ["Completed", "Failed", "Cancelled"].into_iter().zip(ends) {
            let message = if phase == of { message.as_str() } else { "" };
            add(type_, phase == of, &format!("{phase:?}"), message);
        }
    }
    for (type_, holds, reason, message) in conditions {
        let new = Condition {
            type_: type_.to_owned(),
            status: ConditionStatus::from(holds),
            observed_generation: view.generation,
            last_transition_time: view.now,
            reason,
            message,
        };
        condition::set(&mut status.conditions, new);
    }
}

fn scheduled<'a>(
    view: &JobView<'_>,
    status: &InferenceStatus,
    pending: &'a PendingReasons,
) -> (bool, &'static str, &'a str) {
    let live = || status.workers.iter().filter_map(|worker| worker.attempt);
    let has_node = |attempt: u32| {
        view.pods.iter().any(|pod| pod.attempt == attempt && pod.scheduled_at.is_some())
    };
    match &pending.unscheduled {
        _ if status.phase.is_terminal() => (false, "Ended", ""),
        Some((reason, message)) => (false, reason, message),
        None if live().next().is_none() => (false, "NoAttempt", ""),
        None if live().all(has_node) => (true, "AllPodsScheduled", ""),
        None => (false, "Starting", "pods are being created"),
    }
}

/// Returns the reason of the condition `Running` in a stage.
fn stage(role: Role) -> &'static str {
    match role {
        Role::Plan => "Planning",
        Role::Work => "WorkersRun",
        Role::Finish => "Finishing",
    }
}
