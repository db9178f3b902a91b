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
use crate::error::Error;
use crate::objects::CachedTrial;
use crate::world::{World, now};
use observe::Observed;

/// Debounce time of slight changes: pods start in several steps.
const CONDITIONS_LINGER: Duration = Duration::from_secs(3);

/// Reconciles one trial and returns the delay until the next reconcile.
///
/// Idempotent: the plan depends only on the recorded status and the observed pods.
///
/// # Errors
///
/// See [`Error`]. Completed writes stay.
pub async fn reconcile(world: &World, key: &Key) -> Result<Option<Duration>, Error> {
    let Some(observed) = with_nodes(world, key).await? else {
        observe::update_admission(world, key, None);
        return Ok(None);
    };
    let mut planned = plan(&observed.view(now(), false));
    let record =
        |start_stage| observe::update_admission(world, key, observed.candidate(start_stage));
    let begins = record(planned.start_stage);
    if begins {
        planned = plan(&observed.view(now(), true));
        record(planned.start_stage);
    }
    let wake = planned.wake_seconds.map(Duration::from_secs);
    let again = apply(world, key, &observed, planned).await;
    if again.is_err() && begins {
        // The trial may not have started. Until its retry, it must not block other trials.
        record(None);
    }
    let again = again?;
    let soonest = [again, wake, Some(world.safety(key))].into_iter().flatten().min();
    Ok(soonest)
}

/// Observes a trial. A pod's node that no cache contains is looked up first.
async fn with_nodes(world: &World, key: &Key) -> Result<Option<Observed>, Error> {
    let Some(observed) = observe::observe(world, key) else { return Ok(None) };
    match observe::unknown_node(world, &key.namespace, &observed.pods) {
        Some(node) if apply::find_node(world, &node).await? => Ok(observe::observe(world, key)),
        _ => Ok(Some(observed)),
    }
}

async fn apply(
    world: &World,
    key: &Key,
    observed: &Observed,
    planned: GangPlan,
) -> Result<Option<Duration>, Error> {
    let GangPlan { record, delete, create, .. } = planned;
    let mut again = None;
    let mut trial: Arc<CachedTrial> = observed.trial.clone();
    if record.status != trial.record.status {
        let is_slight = is_slight(&trial.record.status, &record.status);
        match if is_slight { world.lingers(key, CONDITIONS_LINGER) } else { Ok(()) } {
            Err(rest) => again = Some(rest),
            Ok(()) => {
                trial = apply::write_status(world, &trial, record.status).await?;
                world.settled(key);
                tell(world, observed, &trial).await;
            }
        }
    } else {
        world.settled(key);
    }
    for pod in &delete {
        apply::delete_pod(world, &key.namespace, pod).await?;
    }
    if !create.is_empty() {
        apply::create_pods(world, observed, &trial, &create).await?;
    }
    Ok(again)
}

/// Whether a change affects only conditions, reason and message, or a pending trial started to run.
/// Such a change can be written a few seconds later.
fn is_slight(before: &TrialStatus, after: &TrialStatus) -> bool {
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
async fn tell(world: &World, observed: &Observed, after: &CachedTrial) {
    let before = &observed.trial.record.status;
    let status = &after.record.status;
    let trial = &after.trial;
    let name = &*observed.key.name;
    let latest = |status: &TrialStatus| status.attempts.last().map(|attempt| attempt.number);
    if let Some(attempt) = latest(status).filter(|number| Some(*number) > latest(before)) {
        world.metrics.attempts_started.inc();
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
        world.metrics.attempt_ended(end);
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
        world.event_of(trial, type_, event, &format!("EndAttempt{number}"), note).await;
    }
    if status.phase.is_terminal() && !before.phase.is_terminal() {
        let note = status.message.clone().unwrap_or_default();
        world.metrics.trial_ended(status.phase);
        let (type_, reason) = match status.phase {
            Phase::Failed => (EventType::Warning, "Failed"),
            Phase::Cancelled => (EventType::Normal, "Cancelled"),
            _ => (EventType::Normal, "Completed"),
        };
        world.event(trial, type_, reason, note).await;
    }
}
