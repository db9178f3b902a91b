//! Controller of trials: their pods, attempts and outcome.
//!
//! ```text
//!   cache -> observe -> engine: gang::plan -> apply: status, deletes, creates
//! ```

pub(crate) mod apply;
pub mod config;
pub(crate) mod observe;
pub mod pods;

use std::sync::Arc;
use std::time::Duration;

use kube::runtime::events::EventType;
use stoker_api::experiment::Phase;
use stoker_api::trial::TrialStatus;
use stoker_engine::gang::{GangPlan, plan};

use crate::cache::Key;
use crate::context::{Context, now};
use crate::error::Error;
use crate::node::report_deletion;
use crate::objects::CachedTrial;
use observe::ObservedTrial;

/// Reconciles one trial and returns the delay until the next reconcile.
///
/// Idempotent: the plan depends only on the recorded status and the observed pods.
///
/// # Errors
///
/// See [`Error`]. Completed writes stay.
pub async fn reconcile(context: &Context, key: &Key) -> Result<Option<Duration>, Error> {
    let Some(observed) = observe_with_nodes(context, key).await? else {
        observe::update_admission(context, key, None);
        return Ok(None);
    };
    let mut planned = plan(&observed.view(now(), false));
    let record =
        |start_stage| observe::update_admission(context, key, observed.candidate(start_stage));
    let begins = record(planned.start_stage);
    if begins {
        planned = plan(&observed.view(now(), true));
        record(planned.start_stage);
    }
    let wake = planned.wake_seconds.map(Duration::from_secs);
    let retry = apply(context, key, &observed, planned).await;
    if retry.is_err() && begins {
        // The trial may not have started. Until its retry, it must not block other trials.
        record(None);
    }
    let retry = retry?;
    let soonest = [retry, wake, Some(context.resync_interval(key))].into_iter().flatten().min();
    Ok(soonest)
}

/// Observes a trial. Nodes of its pods that no cache contains are looked up first.
async fn observe_with_nodes(context: &Context, key: &Key) -> Result<Option<ObservedTrial>, Error> {
    let Some(observed) = observe::observe(context, key) else { return Ok(None) };
    let unknown = observe::unknown_nodes(context, &key.namespace, &observed.pods);
    match apply::find_nodes(context, &unknown).await? {
        true => Ok(observe::observe(context, key)),
        false => Ok(Some(observed)),
    }
}

async fn apply(
    context: &Context,
    key: &Key,
    observed: &ObservedTrial,
    planned: GangPlan,
) -> Result<Option<Duration>, Error> {
    let GangPlan { record, delete_service, delete, create, .. } = planned;
    let mut retry = None;
    let mut trial: Arc<CachedTrial> = observed.trial.clone();
    if record.status != trial.record.status {
        let is_deferrable = is_deferrable(&trial.record.status, &record.status);
        match if is_deferrable { context.debounce(key) } else { Ok(()) } {
            Err(rest) => retry = Some(rest),
            Ok(()) => {
                trial = apply::write_status(context, &trial, record.status).await?;
                context.clear_debounce(key);
                emit_events(context, observed, &trial);
            }
        }
    } else {
        context.clear_debounce(key);
    }
    if delete_service {
        apply::delete_service(context, &trial).await;
    }
    for pod in &delete {
        apply::delete_pod(context, &key.namespace, pod).await?;
        report_deletion(context, &observed.trial.trial, pod);
    }
    if !create.is_empty() {
        apply::create_pods(context, observed, &trial, &create).await?;
    }
    Ok(retry)
}

/// Whether a change affects only conditions, reason and message, or a pending trial started to run.
/// Such a change can be written a few seconds later.
fn is_deferrable(before: &TrialStatus, after: &TrialStatus) -> bool {
    let runs = (before.phase, after.phase) == (Phase::Pending, Phase::Running);
    let bare = |status: &TrialStatus| TrialStatus {
        phase: if runs { Phase::Running } else { status.phase },
        conditions: vec![],
        reason: None,
        message: None,
        observed_generation: 0,
        ..status.clone()
    };
    bare(before) == bare(after)
}

/// Emits events, metrics and logs for changes in a trial's status.
fn emit_events(context: &Context, observed: &ObservedTrial, after: &CachedTrial) {
    let before = &observed.trial.record.status;
    let status = &after.record.status;
    let trial = &after.trial;
    let name = &*observed.key.name;
    let latest = |status: &TrialStatus| status.attempts.last().map(|attempt| attempt.number);
    if let Some(attempt) = latest(status).filter(|number| Some(*number) > latest(before)) {
        context.metrics.attempts_started.inc();
        let experiment = &trial.spec.experiment;
        tracing::info!(experiment, trial = name, attempt, "attempt started");
    }
    for attempt in &status.attempts {
        let number = attempt.number;
        let has_ended = |attempt: &stoker_api::trial::Attempt| {
            attempt.number == number && attempt.end.is_some()
        };
        if before.attempts.iter().any(has_ended) {
            continue;
        }
        let Some(end) = attempt.end else { continue };
        let reason = attempt.reason.clone().unwrap_or_default();
        let message = attempt.message.clone().unwrap_or_default();
        context.metrics.attempt_ended(end);
        let experiment = &trial.spec.experiment;
        tracing::info!(
            experiment,
            trial = name,
            attempt = number,
            ?end,
            reason,
            message,
            "attempt ended"
        );
        let (type_, event) = match end {
            stoker_api::trial::AttemptEnd::Completed | stoker_api::trial::AttemptEnd::Preempted => {
                continue;
            }
            _ => (EventType::Warning, "AttemptEnded"),
        };
        let note = format!("attempt {number}: {end:?}: {reason}: {message}");
        context.event_with_action(trial, type_, event, &format!("EndAttempt{number}"), note);
    }
    if status.phase.is_terminal() && !before.phase.is_terminal() {
        let note = status.message.clone().unwrap_or_default();
        context.metrics.trial_ended(status.phase);
        let (type_, reason) = match status.phase {
            Phase::Failed => (EventType::Warning, "Failed"),
            Phase::Cancelled => (EventType::Normal, "Cancelled"),
            _ => (EventType::Normal, "Completed"),
        };
        context.event(trial, type_, reason, note);
    }
}
