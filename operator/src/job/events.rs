//! Events, metrics and logs for changes in a job's status.

use kube::runtime::events::EventType;
use stoker_api::experiment::Phase;
use stoker_api::inference::{InferenceJob, InferenceStatus};
use stoker_api::trial::AttemptEnd;

use crate::cache::Key;
use crate::context::Context;

/// Emits events, metrics and logs for the change from `before` to `after`.
pub(super) fn emit_events(
    context: &Context,
    key: &Key,
    job: &InferenceJob,
    before: &InferenceStatus,
    after: &InferenceStatus,
) {
    for attempt in before.attempts..after.attempts {
        context.metrics.attempts_started.inc();
        tracing::info!(job = %key, attempt, stage = ?after.stage, "attempt started");
    }
    let is_new = |attempt: u32| !before.ends.iter().any(|end| end.attempt == attempt);
    let new: Vec<_> = after.ends.iter().filter(|end| is_new(end.attempt)).collect();
    // Attempts that ended without an error: they were alive and have no entry in `ends`.
    let alive_before = before.workers.iter().filter_map(|worker| worker.attempt);
    let is_alive =
        |attempt: u32| after.workers.iter().any(|worker| worker.attempt == Some(attempt));
    let has_failed = |attempt: u32| new.iter().any(|end| end.attempt == attempt);
    for attempt in alive_before.filter(|&attempt| !is_alive(attempt) && !has_failed(attempt)) {
        context.metrics.attempt_ended(AttemptEnd::Completed);
        tracing::info!(job = %key, attempt, "attempt completed");
    }
    for end in new {
        context.metrics.attempt_ended(end.end);
        let (attempt, reason, message) = (end.attempt, &end.reason, &end.message);
        tracing::info!(job = %key, attempt, end = ?end.end, reason, message, "attempt ended");
        if end.end != AttemptEnd::Preempted {
            let note = format!("attempt {attempt}: {:?}: {reason}: {message}", end.end);
            let action = format!("EndAttempt{attempt}");
            context.event_with_action(job, EventType::Warning, "AttemptEnded", &action, note);
        }
    }
    if after.phase == before.phase && !before.conditions.is_empty() {
        return;
    }
    tracing::info!(job = %key, phase = ?after.phase, "job phase changed");
    if after.phase.is_terminal() && !before.phase.is_terminal() {
        context.metrics.job_ended(after.phase);
    }
    let type_ = match after.phase {
        Phase::Failed => EventType::Warning,
        _ => EventType::Normal,
    };
    let message = after.message.as_ref().map(|message| format!("; {message}"));
    let note = format!(
        "{} of {} rows processed{}",
        after.rows,
        after.rows_total,
        message.unwrap_or_default()
    );
    context.event(job, type_, &format!("{:?}", after.phase), note);
}
