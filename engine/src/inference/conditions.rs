//! A job's conditions: what is true of it now, for people and for `kubectl wait`.

use stoker_api::condition::{self, Condition, ConditionStatus};
use stoker_api::experiment::Phase;
use stoker_api::inference::{InferenceStatus, Role};

use super::pods::JobView;
use crate::gang::{PodPhase, Waiting};

/// Why some of what should run does not. What was said first stays.
#[derive(Debug, Default)]
pub(super) struct Waits {
    said: Option<(&'static str, String)>,
    stuck: Option<Waiting>,
}

impl Waits {
    pub(super) fn say(&mut self, reason: &'static str, text: String) {
        self.said.get_or_insert((reason, text));
    }

    /// A container that cannot start.
    pub(super) fn stuck(&mut self, waiting: &Waiting) {
        self.stuck.get_or_insert_with(|| waiting.clone());
    }
}

/// Sets the conditions that follow from a status and its pods.
pub(super) fn set(view: &JobView<'_>, status: &mut InferenceStatus, waits: &Waits) {
    let mut said = vec![("Valid", true, "Accepted".to_owned(), String::new())];
    let mut say = |type_, holds, reason: &str, message: &str| {
        said.push((type_, holds, reason.to_owned(), message.to_owned()));
    };
    let phase = status.phase;
    let (scheduled, reason, message) = scheduled(view, status, waits);
    say("Scheduled", scheduled, reason, message);
    let is_running = |attempt: u32| {
        view.pods.iter().any(|it| it.attempt == attempt && it.phase == PodPhase::Running)
    };
    let any_runs = status.workers.iter().filter_map(|it| it.attempt).any(is_running);
    match (phase, &waits.stuck) {
        (Phase::Running, Some(it)) => say("Running", false, &it.reason, &it.message),
        (Phase::Running, None) if any_runs => say("Running", true, stage(status.stage), ""),
        (Phase::Running, None) => say("Running", false, "Starting", ""),
        (Phase::Pending | Phase::Paused, _) => say("Running", false, &format!("{phase:?}"), ""),
        _ => say("Running", false, "Ended", ""),
    }
    if phase.is_terminal() {
        let message = status.message.clone().unwrap_or_default();
        let ends = [Phase::Completed, Phase::Failed, Phase::Cancelled];
        for (type_, of) in ["Completed", "Failed", "Cancelled"].into_iter().zip(ends) {
            let message = if phase == of { message.as_str() } else { "" };
            say(type_, phase == of, &format!("{phase:?}"), message);
        }
    }
    for (type_, holds, reason, message) in said {
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
    waits: &'a Waits,
) -> (bool, &'static str, &'a str) {
    let live = || status.workers.iter().filter_map(|it| it.attempt);
    let has_node = |attempt: u32| {
        view.pods.iter().any(|it| it.attempt == attempt && it.scheduled_at.is_some())
    };
    match &waits.said {
        _ if status.phase.is_terminal() => (false, "Ended", ""),
        Some((reason, message)) => (false, reason, message),
        None if live().next().is_none() => (false, "NoAttempt", ""),
        None if live().all(has_node) => (true, "AllPodsScheduled", ""),
        None => (false, "Starting", "its pods are being made"),
    }
}

/// What is done, in one word.
fn stage(role: Role) -> &'static str {
    match role {
        Role::Plan => "Planning",
        Role::Work => "WorkersRun",
        Role::Finish => "Finishing",
    }
}
