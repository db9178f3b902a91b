//! Status conditions of a trial, for users and for `kubectl wait`.

use stoker_api::condition::{self, Condition, ConditionStatus};
use stoker_api::experiment::Phase;

use super::{GangView, creation};
use crate::trial::{TrialRecord, closed, live_attempt};

/// Sets the conditions of a trial, and its reason and message while it is pending. `pending_reason`
/// has the reason and the message if an attempt should run but does not.
pub(super) fn set(
    view: &GangView<'_>,
    record: &mut TrialRecord,
    pending_reason: Option<&(&'static str, String)>,
) {
    let all = match record.status.phase.is_terminal() {
        true => ended_conditions(record),
        false => open_conditions(view, record, pending_reason),
    };
    let is_pending = record.status.phase == Phase::Pending;
    let open = all.iter().filter(|(type_, ..)| ["Scheduled", "Running"].contains(type_));
    let cause = open.into_iter().find(|(_, holds, ..)| is_pending && !holds);
    record.status.reason = cause.map(|(_, _, reason, _)| reason.clone());
    if !record.status.phase.is_terminal() {
        let message = cause.map(|(.., message)| message.clone());
        record.status.message = message.filter(|text| !text.is_empty());
    }
    for (type_, holds, reason, message) in all {
        let mut new = Condition {
            type_: type_.to_owned(),
            status: ConditionStatus::from(holds),
            observed_generation: view.generation,
            last_transition_time: view.now,
            reason,
            message,
        };
        condition::bound(&mut new);
        condition::set(&mut record.status.conditions, new);
    }
}

/// Type, whether it holds, reason, message.
type NewCondition = (&'static str, bool, String, String);

fn condition(type_: &'static str, holds: bool, reason: &str, message: &str) -> NewCondition {
    (type_, holds, reason.to_owned(), message.to_owned())
}

fn ended_conditions(record: &TrialRecord) -> Vec<NewCondition> {
    let phase = record.status.phase;
    let message = record.status.message.as_deref().unwrap_or_default();
    let reason = closed(record).map_or("Closed".to_owned(), |cause| format!("{cause:?}"));
    vec![
        condition("Scheduled", false, "Ended", ""),
        condition("Running", false, "Ended", ""),
        condition("Completed", phase == Phase::Completed, &reason, message),
        condition("Failed", phase == Phase::Failed, &reason, message),
    ]
}

fn open_conditions(
    view: &GangView<'_>,
    record: &TrialRecord,
    pending_reason: Option<&(&'static str, String)>,
) -> Vec<NewCondition> {
    let live = live_attempt(record);
    let pods = || view.pods.iter().filter(|pod| Some(pod.attempt) == live);
    let has_pods = record.status.attempts.last().is_some_and(|attempt| attempt.has_pods);
    let are_scheduled = has_pods && pods().all(|pod| pod.scheduled_at.is_some());
    let scheduled = match (pending_reason, live) {
        (Some((reason, message)), _) => condition("Scheduled", false, reason, message),
        (None, None) => condition("Scheduled", false, "NoAttempt", "no attempt is running or due"),
        (None, Some(_)) if !are_scheduled => {
            condition("Scheduled", false, "Starting", "pods are being created")
        }
        (None, Some(_)) => condition("Scheduled", true, "AllPodsScheduled", ""),
    };
    let stuck = pods().find_map(|pod| pod.waiting.as_ref());
    let running = match (live, stuck) {
        (None, _) => condition("Running", false, "NoAttempt", ""),
        (Some(_), Some(waiting)) => condition("Running", false, &waiting.reason, &waiting.message),
        (Some(_), None) if record.status.phase == Phase::Running => {
            condition("Running", true, "AllPodsRunning", "")
        }
        (Some(_), None) => {
            let late = creation::late_message(pods(), view.now);
            let message = late.as_deref().unwrap_or("not all pods are running yet");
            condition("Running", false, "Starting", message)
        }
    };
    let mut conditions = vec![scheduled, running];
    for type_ in ["Completed", "Failed"] {
        // The trial had ended before.
        if condition::find(&record.status.conditions, type_).is_some() {
            conditions.push(condition(type_, false, "Reopened", ""));
        }
    }
    conditions
}
