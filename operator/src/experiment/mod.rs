//! Controller of experiments: their trials, the desired state of each, and the status.
//!
//! ```text
//!   caches -> validate -> engine: steer -> apply: kills, grants, desired states, creates, status
//! ```
//!
//! An error stops only the writes that depend on the failed one. The status is always written.

pub(crate) mod apply;
mod clean_up;

use std::time::Duration;

use kube::runtime::events::EventType;
use stoker_api::condition::{self, Condition, ConditionStatus};
use stoker_api::experiment::{DesiredState, Experiment, ExperimentStatus, Phase, StorageRecord};
use stoker_api::trial::{AttemptEnd, DesiredTrialState};
use stoker_api::validate::{FieldError, ValidExperiment};
use stoker_engine::experiment::{
    ExperimentPlan, Refusal, Steering, TRIAL_INVALID, conditions, failed, kills, refusal,
    set_refusal, steer,
};
use stoker_engine::search::SearchConfig;
use stoker_engine::trial::TrialRecord;

use self::apply::Writer;
use crate::cache::Key;
use crate::declared::CachedExperiment;
use crate::error::Error;
use crate::objects::CachedTrial;
use crate::storage;
use crate::trial::config::seed;
use crate::world::{World, now};

/// Delay before a refused write is retried: no watch event announces that it would succeed.
const BLOCKED: Duration = Duration::from_secs(10);

/// Reconciles one experiment and returns the delay until the next reconcile.
///
/// # Errors
///
/// See [`Error`]. Completed writes stay, and the next plan contains the rest.
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
        // An ended experiment keeps its result, even if its trials change afterwards.
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
    let state = experiment.spec.state;
    let trials = apply::trials_of(world, key, uid);
    let (unreadable, readable): (Vec<_>, Vec<_>) =
        trials.iter().cloned().partition(|trial| trial.unreadable.is_some());
    let records: Vec<&TrialRecord> = readable.iter().map(|trial| &trial.record).collect();
    let mut writer = Writer::new(world, &readable);
    writer.want(&kills(&records, state)).await;
    let in_use = storage::of_experiment(world, key, experiment, valid, &trials).await;
    let in_use = in_use.unwrap_or_else(|error| {
        writer.errors.push(error);
        None
    });
    let storage = in_use.or_else(|| status.storage.clone());
    if let Some(trial) = unreadable.first() {
        if storage != status.storage {
            let after = ExperimentStatus { storage, ..status.clone() };
            apply::write_status(world, experiment, after).await?;
        }
        // A plan without this trial could differ from one with it, so wait.
        let index = trial.record.spec.index;
        tracing::warn!(experiment = %key, trial = index, "waiting: a trial cannot be parsed");
        return worst(writer.errors).map_or_else(|| Ok(Some(world.safety(key))), Err);
    }
    let config = SearchConfig::new(valid, seed(valid, uid));
    let Steering { plan, wanted } = steer(&config, &records, status.trials_created, state);
    let by_trials = refusal(&records);
    let is_doomed = by_trials.as_ref().is_some_and(Refusal::is_final);
    let mut planned = plan.status.clone();
    let done = match is_doomed {
        true => Done { missing: plan.create.len() as u32, ..Done::default() },
        false => carry_out(&mut writer, experiment, valid, plan, wanted).await,
    };
    planned.trials_created -= done.missing;
    if !done.is_placed && planned.phase.is_terminal() {
        // The end of the search depends on facts that unrecorded grants order, so do not record it.
        (planned.phase, planned.message) = (status.phase, status.message.clone());
        planned.reason.clone_from(&status.reason);
    }
    let (mut refusals, mut errors) = sorted(writer.errors, done.creation);
    let wait = if refusals.is_empty() { world.safety(key) } else { BLOCKED };
    refusals.extend(by_trials);
    refusals.sort_by_key(|refusal| !refusal.is_final());
    let refused = refusals.first();
    if let Some(refusal) = refused.filter(|refusal| refusal.is_final()) {
        planned = failed(planned, refusal);
    }
    let generation = experiment.metadata.generation.unwrap_or_default();
    let mut after = conditions(status, planned, generation, now());
    set_refusal(&mut after, refused, generation, now());
    after.storage = storage;
    if after != *status {
        match apply::write_status(world, experiment, after.clone()).await {
            Ok(written) => {
                tell(world, &written, status, &after).await;
                tell_unrecorded(world, &written, &after).await;
            }
            Err(error) => errors.push(error),
        }
    }
    worst(errors).map_or(Ok(Some(wait)), Err)
}

/// Writes of a pass that succeeded.
#[derive(Debug, Default)]
struct Done {
    /// Planned trials that were not created.
    missing: u32,
    /// Whether all grants are recorded.
    is_placed: bool,
    /// Error of a trial's creation.
    creation: Option<Error>,
}

/// Writes grants, desired states and new trials. If the grants cannot be recorded, decisions of the
/// search are not written either.
async fn carry_out(
    writer: &mut Writer<'_>,
    experiment: &Experiment,
    valid: &ValidExperiment,
    plan: ExperimentPlan,
    wanted: Vec<(u32, DesiredTrialState)>,
) -> Done {
    let state = experiment.spec.state;
    let is_users = matches!(state, DesiredState::Cancelled | DesiredState::Killed);
    let is_placed = writer.grant(&plan.grants).await;
    let may_be_written = |wanted: DesiredTrialState| match wanted {
        DesiredTrialState::Kill => false,
        DesiredTrialState::Stop => is_placed || is_users,
        DesiredTrialState::Run | DesiredTrialState::Pause => true,
    };
    let wanted: Vec<_> = wanted.into_iter().filter(|(_, wanted)| may_be_written(*wanted)).collect();
    writer.want(&wanted).await;
    let missing = plan.create.len() as u32;
    if !is_placed {
        return Done { missing, is_placed, creation: None };
    }
    let specs = plan.create.into_iter().map(|draw| draw.into_spec(&valid.name, valid.unit));
    let (created, creation) = writer.create(experiment, specs).await;
    Done { missing: missing - created, is_placed, creation }
}

/// Separates refusals from other errors.
fn sorted(errors: Vec<Error>, creation: Option<Error>) -> (Vec<Refusal>, Vec<Error>) {
    let (mut refusals, mut others) = (vec![], vec![]);
    let created = creation.map(|error| (error, TRIAL_INVALID));
    for (error, invalid) in
        created.into_iter().chain(errors.into_iter().map(|error| (error, "WriteRefused")))
    {
        match crate::error::refusal(error) {
            Ok((end, reason, message)) => {
                let is_invalid = end == AttemptEnd::UserError;
                let reason = if is_invalid { invalid } else { reason }.to_owned();
                refusals.push(Refusal { reason, message });
            }
            Err(error) => others.push(error),
        }
    }
    (refusals, others)
}

/// Returns the error that determines the retry delay and logs the others. Conflicts come last: they
/// pass soon.
fn worst(mut errors: Vec<Error>) -> Option<Error> {
    errors.sort_by_key(|error| matches!(error, Error::Conflict { .. } | Error::Gone { .. }));
    let mut errors = errors.into_iter();
    let first = errors.next();
    errors.for_each(|error| tracing::debug!(%error, "additional error in the same reconcile"));
    first
}

/// Fails an experiment with an invalid spec, which cannot change.
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
    let mut after = ExperimentStatus { phase: Phase::Failed, reason: None, ..status.clone() };
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

/// Reports a running experiment that newer validation rules reject. Its trials stay as they are and
/// continue once an operator accepts the experiment.
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
        tracing::error!(
            experiment = %key,
            message,
            "running experiment is invalid under newer validation rules"
        );
        apply::write_status(world, experiment, after).await?;
        world.tell_once(key, generation);
    }
    Ok(Some(world.safety(key)))
}

/// Builds a condition whose last transition is now.
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

/// Writes the parse error of an object to its status. Other objects are not affected.
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
    tracing::warn!(experiment = %key, error = error.error, "cannot parse an experiment");
    let version = error.metadata.resource_version.clone();
    let valid = said("Valid", ConditionStatus::False, generation, "Unreadable", &error.error);
    apply::mark_unreadable::<Experiment>(world, key, version, &valid).await?;
    world.tell_once(key, generation);
    Ok(Some(world.safety(key)))
}

/// Emits events for the change from `before` to `after`.
async fn tell(
    world: &World,
    experiment: &Experiment,
    before: &ExperimentStatus,
    after: &ExperimentStatus,
) {
    tell_refusal(world, experiment, before, after).await;
    if after.phase == before.phase && !before.conditions.is_empty() {
        return;
    }
    let key = Key::of(experiment);
    tracing::info!(experiment = %key, phase = ?after.phase, "experiment phase changed");
    let (type_, reason) = match after.phase {
        Phase::Pending if before.conditions.is_empty() => (EventType::Normal, "Accepted"),
        // Sequential trials make the experiment `Pending` in between. Its status shows the reason.
        Phase::Pending => return,
        Phase::Running => (EventType::Normal, "Running"),
        Phase::Paused => (EventType::Normal, "Paused"),
        Phase::Completed => (EventType::Normal, "Completed"),
        Phase::Failed => (EventType::Warning, "Failed"),
        Phase::Cancelled => (EventType::Normal, "Cancelled"),
    };
    let best = after.best.as_ref();
    let best = best.map(|best| format!("; best: trial {}, metric {}", best.index, best.metric));
    let why = after.message.as_ref().filter(|_| after.phase == Phase::Failed);
    let note = format!(
        "{} of {} trials ended{}{}",
        after.trials_closed,
        after.trials_created,
        best.unwrap_or_default(),
        why.map(|message| format!("; {message}")).unwrap_or_default()
    );
    world.event(experiment, type_, reason, note).await;
}

/// Emits an event if the API server dropped the storage record. No pod is created without it.
async fn tell_unrecorded(world: &World, written: &Experiment, after: &ExperimentStatus) {
    let is_fixed =
        |status: &ExperimentStatus| status.storage.as_ref().is_some_and(StorageRecord::is_fixed);
    if is_fixed(after) && !written.status.as_ref().is_some_and(is_fixed) {
        let note = "cannot record status.storage: the custom resource definitions are older than \
                    the operator; apply crds/ of its version";
        tracing::error!(experiment = %Key::of(written), note);
        world.event(written, EventType::Warning, "OldDefinitions", note.to_owned()).await;
    }
}

/// Emits an event with the API server's message if a refusal has a new reason.
pub(crate) async fn tell_refusal(
    world: &World,
    experiment: &Experiment,
    before: &ExperimentStatus,
    after: &ExperimentStatus,
) {
    let refused = |status: &ExperimentStatus| {
        let condition = condition::find(&status.conditions, "Refused");
        condition.filter(|condition| condition.status == ConditionStatus::True).cloned()
    };
    let Some(now) = refused(after) else { return };
    if refused(before).is_none_or(|before| before.reason != now.reason) {
        tracing::warn!(experiment = %Key::of(experiment), now.reason, now.message, "refused");
        let action = now.reason.clone();
        world.event_of(experiment, EventType::Warning, &now.reason, &action, now.message).await;
    }
}

/// Whether the owner of a trial has this UID. Excludes trials of an earlier experiment with the
/// same name.
pub(crate) fn is_owned(trial: &CachedTrial, uid: &str) -> bool {
    trial.trial.metadata.owner_references.iter().flatten().any(|owner| owner.uid == uid)
}
