//! A trial's conditions: what is true of it now, for people and for `kubectl wait`.

use stoker_api::condition::{self, Condition, ConditionStatus};
use stoker_api::experiment::Phase;

use super::GangView;
use crate::trial::{TrialRecord, closed, live_attempt};

/// Sets the conditions that follow from a record, its phase and its pods, and why it is pending.
/// `waits` says why nothing runs although something should.
pub(super) fn set(
    view: &GangView<'_>,
    record: &mut TrialRecord,
    waits: Option<&(&'static str, String)>,
) {
    let all = match record.status.phase.is_terminal() {
        true => of_ended(record),
        false => of_open(view, record, waits),
    };
    let is_pending = record.status.phase == Phase::Pending;
    let cause = all.iter().find(|(_, holds, ..)| is_pending && !holds);
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
type Said = (&'static str, bool, String, String);

fn said(type_: &'static str, holds: bool, reason: &str, message: &str) -> Said {
    (type_, holds, reason.to_owned(), message.to_owned())
}

fn of_ended(record: &TrialRecord) -> Vec<Said> {
    let phase = record.status.phase;
    let message = record.status.message.as_deref().unwrap_or_default();
    let reason = closed(record).map_or("Closed".to_owned(), |it| format!("{it:?}"));
    vec![
        said("Scheduled", false, "Ended", ""),
        said("Running", false, "Ended", ""),
        said("Completed", phase == Phase::Completed, &reason, message),
        said("Failed", phase == Phase::Failed, &reason, message),
    ]
}

fn of_open(
    view: &GangView<'_>,
    record: &TrialRecord,
    waits: Option<&(&'static str, String)>,
) -> Vec<Said> {
    let live = live_attempt(record);
    let pods = || view.pods.iter().filter(|it| Some(it.attempt) == live);
    let num_scheduled = pods().filter(|it| it.scheduled_at.is_some()).count();
    let num_pods = view.num_pods as usize;
    let scheduled = match (waits, live) {
        (Some((reason, message)), _) => said("Scheduled", false, reason, message),
        (None, None) => said("Scheduled", false, "NoAttempt", "nothing is to run now"),
        (None, Some(_)) if num_scheduled < num_pods => {
            said("Scheduled", false, "Starting", "its pods are being made")
        }
        (None, Some(_)) => said("Scheduled", true, "AllPodsScheduled", ""),
    };
    let stuck = pods().find_map(|it| it.waiting.as_ref());
    let running = match (live, stuck) {
        (None, _) => said("Running", false, "NoAttempt", ""),
        (Some(_), Some(it)) => said("Running", false, &it.reason, &it.message),
        (Some(_), None) if record.status.phase == Phase::Running => {
            said("Running", true, "AllPodsRunning", "")
        }
        (Some(_), None) => said("Running", false, "Starting", "not all of its pods run yet"),
    };
    vec![scheduled, running]
}
