//! One experiment: its trials, what is wanted of them, how it is going.
//!
//! ```text
//!   caches -> validate -> engine: steer -> apply: grants and wishes, creates, status
//! ```

pub(crate) mod apply;
mod clean_up;

use std::time::Duration;

use kube::runtime::events::EventType;
use stoker_api::condition::{self, Condition, ConditionStatus};
use stoker_api::experiment::{Experiment, ExperimentStatus, Phase, UsedStorage};
use stoker_api::validate::{FieldError, ValidExperiment};
use stoker_engine::experiment::{Steering, conditions, steer};
use stoker_engine::search::SearchConfig;
use stoker_engine::trial::TrialRecord;

use crate::cache::Key;
use crate::declared::CachedExperiment;
use crate::error::Error;
use crate::objects::CachedTrial;
use crate::storage;
use crate::trial::config::seed;
use crate::world::{World, now};

/// How long until a name that was taken is tried again: nobody tells when it is free.
const BLOCKED: Duration = Duration::from_secs(10);

/// Moves one experiment a step closer to its end, and says when to look again.
///
/// # Errors
///
/// See [`Error`]. What was done so far stands, and planning again gives the rest.
pub async fn reconcile(world: &World, key: &Key) -> Result<Option<Duration>, Error> {
    let Some(cached) = world.experiments.get(key) else { return Ok(None) };
    let Some(experiment) = cached.experiment() else {
        return unreadable(world, key, &cached).await;
    };
    if experiment.metadata.deletion_timestamp.is_some() {
        return Ok(None);
    }
    let status = experiment.status.clone().unwrap_or_default();
    match &cached.checked {
        // What has ended stays as it is, whatever becomes of its trials.
        Some(Ok(valid)) if status.phase.is_terminal() => {
            clean_up::clean_up(world, key, experiment, valid, &status).await
        }
        _ if status.phase.is_terminal() => Ok(None),
        Some(Ok(valid)) => run(world, key, experiment, valid, &status).await,
        Some(Err(errors)) => refuse(world, key, experiment, &status, errors).await,
        None => Ok(None),
    }
}

async fn run(
    world: &World,
    key: &Key,
    experiment: &Experiment,
    valid: &ValidExperiment,
    status: &ExperimentStatus,
) -> Result<Option<Duration>, Error> {
    let uid = experiment.metadata.uid.as_deref().unwrap_or_default();
    let trials = apply::trials_of(world, key, uid);
    let storage = storage::of_experiment(world, key, experiment, valid, &trials).await?;
    let storage = storage.or_else(|| status.storage.clone());
    if let Some(trial) = trials.iter().find(|it| it.unreadable.is_some()) {
        if storage != status.storage {
            let after = ExperimentStatus { storage, ..status.clone() };
            apply::write_status(world, experiment, after).await?;
        }
        // Deciding without it would decide otherwise than with it.
        tracing::warn!(experiment = %key, trial = trial.record.spec.index, "waits for a trial's record");
        return Ok(Some(world.safety(key)));
    }
    let records: Vec<&TrialRecord> = trials.iter().map(|it| &it.record).collect();
    let config = SearchConfig::new(valid, seed(valid, uid));
    let Steering { plan, wanted } =
        steer(&config, &records, status.trials_created, experiment.spec.state);
    apply::write_specs(world, &trials, &plan.grants, &wanted).await?;
    let unit = valid.unit;
    for draw in plan.create {
        let made = apply::create_trial(world, experiment, draw.into_spec(&valid.name, unit)).await;
        if let Err(Error::Exists { doing }) = &made {
            return blocked(world, experiment, status, storage, doing).await;
        }
        made?;
    }
    let generation = experiment.metadata.generation.unwrap_or_default();
    let mut after = conditions(status, plan.status, generation, now());
    after.storage = storage;
    if after != *status {
        let written = apply::write_status(world, experiment, after.clone()).await?;
        tell(world, &written, status, &after).await;
    }
    Ok(Some(world.safety(key)))
}

/// Says that an object of another owner has the name of a trial. It is left alone, and nothing of the
/// search goes on without that trial.
async fn blocked(
    world: &World,
    experiment: &Experiment,
    status: &ExperimentStatus,
    storage: Option<UsedStorage>,
    doing: &str,
) -> Result<Option<Duration>, Error> {
    let text = format!("cannot {doing}: a trial of this name has another owner; delete it");
    let generation = experiment.metadata.generation.unwrap_or_default();
    let mut after = ExperimentStatus { message: Some(text.clone()), storage, ..status.clone() };
    after.observed_generation = generation;
    let running = said("Running", ConditionStatus::False, generation, "NameTaken", &text);
    condition::set(&mut after.conditions, running);
    if after != *status {
        let written = apply::write_status(world, experiment, after).await?;
        world.event(&written, EventType::Warning, "NameTaken", text).await;
    }
    Ok(Some(BLOCKED))
}

/// Ends an experiment that can never run: its spec does not change.
async fn refuse(
    world: &World,
    key: &Key,
    experiment: &Experiment,
    status: &ExperimentStatus,
    errors: &[FieldError],
) -> Result<Option<Duration>, Error> {
    let message = errors.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ");
    if status.trials_created > 0 {
        return no_longer_valid(world, key, experiment, status, &message).await;
    }
    let mut after = ExperimentStatus { phase: Phase::Failed, ..status.clone() };
    after.message = Some(format!("invalid: {message}"));
    let generation = experiment.metadata.generation.unwrap_or_default();
    after.observed_generation = generation;
    after.ended_at = Some(now());
    after.cleaned_up = true;
    for (type_, status) in [
        ("Valid", ConditionStatus::False),
        ("Running", ConditionStatus::False),
        ("Completed", ConditionStatus::False),
        ("Failed", ConditionStatus::True),
    ] {
        condition::set(&mut after.conditions, said(type_, status, generation, "Invalid", &message));
    }
    tracing::info!(experiment = %key, message, "experiment is invalid");
    let written = apply::write_status(world, experiment, after).await?;
    world.event(&written, EventType::Warning, "Invalid", message).await;
    Ok(None)
}

/// Rules were looser when this experiment began: its trials are left as they are, and go on under an
/// operator that takes it.
async fn no_longer_valid(
    world: &World,
    key: &Key,
    experiment: &Experiment,
    status: &ExperimentStatus,
    message: &str,
) -> Result<Option<Duration>, Error> {
    let generation = experiment.metadata.generation.unwrap_or_default();
    if !world.was_told(key, generation) {
        let mut after = status.clone();
        let valid = said("Valid", ConditionStatus::False, generation, "NoLongerValid", message);
        condition::set(&mut after.conditions, valid);
        tracing::error!(experiment = %key, message, "a running experiment is invalid by newer rules");
        apply::write_status(world, experiment, after).await?;
        world.tell_once(key, generation);
    }
    Ok(Some(world.safety(key)))
}

/// A condition, said now.
pub(crate) fn said(
    type_: &str,
    status: ConditionStatus,
    generation: i64,
    reason: &str,
    message: &str,
) -> Condition {
    Condition {
        type_: type_.to_owned(),
        status,
        observed_generation: generation,
        last_transition_time: now(),
        reason: reason.to_owned(),
        message: message.to_owned(),
    }
}

/// Says on an object that this version cannot read what is wrong with it. Nobody else is stopped by
/// it.
async fn unreadable(
    world: &World,
    key: &Key,
    cached: &CachedExperiment,
) -> Result<Option<Duration>, Error> {
    let Err(error) = &cached.object else { return Ok(None) };
    let generation = error.metadata.generation.unwrap_or_default();
    if world.was_told(key, generation) {
        return Ok(Some(world.safety(key)));
    }
    tracing::warn!(experiment = %key, error = error.error, "an experiment cannot be read");
    let version = error.metadata.resource_version.clone();
    let valid = said("Valid", ConditionStatus::False, generation, "Unreadable", &error.error);
    apply::mark_unreadable::<Experiment>(world, key, version, &valid).await?;
    world.tell_once(key, generation);
    Ok(Some(world.safety(key)))
}

/// Events of what was recorded.
async fn tell(
    world: &World,
    experiment: &Experiment,
    before: &ExperimentStatus,
    after: &ExperimentStatus,
) {
    if after.phase == before.phase && !before.conditions.is_empty() {
        return;
    }
    let key = Key::of(experiment);
    tracing::info!(experiment = %key, phase = ?after.phase, "experiment's phase");
    let (type_, reason) = match after.phase {
        Phase::Pending => (EventType::Normal, "Accepted"),
        Phase::Running => (EventType::Normal, "Running"),
        Phase::Paused => (EventType::Normal, "Paused"),
        Phase::Completed => (EventType::Normal, "Completed"),
        Phase::Failed => (EventType::Warning, "Failed"),
        Phase::Cancelled => (EventType::Normal, "Cancelled"),
    };
    let best = after.best.as_ref();
    let best = best.map(|it| format!("; best is trial {} with {}", it.index, it.metric));
    let note = format!(
        "{} of {} trials have ended{}",
        after.trials_closed,
        after.trials_created,
        best.unwrap_or_default()
    );
    world.event(experiment, type_, reason, note).await;
}

/// Trials are told apart from those of an earlier experiment of the name by their owner.
pub(crate) fn is_owned(trial: &CachedTrial, uid: &str) -> bool {
    trial.trial.metadata.owner_references.iter().flatten().any(|it| it.uid == uid)
}
