//! Controller of experiments: their trials, the desired state of each, and the status.
//!
//! ```text
//!   caches -> validate -> kills -> decide: turns, new trials, desired states -> status
//! ```
//!
//! An error stops only the writes that depend on the failed one. The status is always written.

mod answers;
pub(crate) mod apply;
mod clean_up;
mod decide;
mod deletion;
mod edits;
mod events;
pub(crate) mod homes;
pub(crate) mod kept;
mod prior;
mod unreadable;

use std::time::Duration;

use kube::runtime::events::EventType;
use stoker_api::condition::{self, Condition, ConditionStatus};
use stoker_api::experiment::{DesiredState, Experiment, ExperimentStatus, Phase};
use stoker_api::trial::AttemptEnd;
use stoker_api::validate::{FieldError, ValidExperiment};
use stoker_engine::experiment::{
    Ledger, Refusal, Request, Summary, conditions, failed, kills, malformed_trial, refusal,
    set_phase, set_refusal,
};
use stoker_engine::search::SearchConfig;
use stoker_engine::trial::TrialRecord;
use stoker_engine::trial::config::experiment_seed;

use self::apply::Writer;
use self::decide::{Decided, decide, want_without_search};
pub(crate) use self::deletion::state_in_deletion;
use self::kept::Kept;
use crate::cache::Key;
use crate::context::{Context, now};
use crate::error::Error;
use crate::objects::CachedTrial;
use crate::storage;
use crate::user_resources::{INVALID, was_accepted};

/// Delay before a refused write is retried: no watch event announces that it would succeed.
const REFUSAL_RETRY: Duration = Duration::from_secs(10);
/// Remedies for an experiment that newer rules reject.
const NO_LONGER_VALID_REMEDY: &str = "its trials train without decisions of the operator: use the \
                                      earlier version of the operator, or pause, cancel, kill or \
                                      delete the experiment";

/// Reconciles one experiment and returns the delay until the next reconcile.
///
/// # Errors
///
/// See [`Error`]. Completed writes stay, and the next plan contains the rest.
pub async fn reconcile(context: &Context, key: &Key) -> Result<Option<Duration>, Error> {
    let kept = context.kept_searches.take(key);
    homes::settle(context, key).await;
    let Some(cached) = context.experiments.get(key) else {
        context.searchers.forget(key);
        return Ok(None);
    };
    let Some(experiment) = cached.experiment() else {
        return unreadable::report_experiment(context, key, &cached).await;
    };
    if experiment.metadata.deletion_timestamp.is_some() {
        let is_valid = matches!(cached.validation, Some(Ok(_)));
        return deletion::stop_trials(context, key, experiment, is_valid).await;
    }
    let status = experiment.status.clone().unwrap_or_default();
    match &cached.validation {
        // An ended experiment keeps its result, even if its trials change afterwards.
        Some(Ok(valid)) if status.phase.is_terminal() => {
            edits::reconcile_ended(context, key, experiment, valid, &status).await
        }
        Some(Ok(valid)) => run(context, key, (experiment, valid), &status, kept).await,
        _ if status.phase.is_terminal() => Ok(None),
        Some(Err(errors)) => fail_invalid(context, key, experiment, &status, errors).await,
        None => Ok(None),
    }
}

async fn run(
    context: &Context,
    key: &Key,
    (experiment, valid): (&Experiment, &ValidExperiment),
    status: &ExperimentStatus,
    kept: Option<Kept>,
) -> Result<Option<Duration>, Error> {
    let uid = experiment.metadata.uid.as_deref().unwrap_or_default();
    let state = experiment.spec.state;
    let trials = apply::trials_of(context, key, uid);
    let (unreadable, readable): (Vec<_>, Vec<_>) =
        trials.iter().cloned().partition(|trial| trial.unreadable.is_some());
    let mut writer = Writer::new(context, experiment, &readable);
    writer.want(&kills(&writer.records(), state)).await;
    let in_use = storage::of_experiment(context, key, experiment, valid, &trials).await;
    let in_use = in_use.unwrap_or_else(|error| {
        writer.errors.push(error);
        None
    });
    let storage = in_use.or_else(|| status.storage.clone());
    let release_seconds = valid.spec.searcher.release_seconds;
    let request = Request { state, release_seconds, now: now() };
    if !unreadable.is_empty() {
        let after = ExperimentStatus { storage, ..status.clone() };
        return unreadable::wait_for_trials(key, writer, request, &unreadable, after).await;
    }
    let config = SearchConfig::new(valid, experiment_seed(valid, uid));
    let trial_refusal = refusal(&writer.records());
    let is_final = trial_refusal.as_ref().is_some_and(Refusal::is_final);
    let decided = match decide(&mut writer, kept, (valid, &config), request, is_final).await {
        Ok(decided) => decided,
        Err(unreadable) => {
            let wait = want_without_search(&mut writer, request).await;
            let reported = unreadable::report_search(context, key, experiment, &unreadable).await;
            return most_severe(writer.errors).map_or(reported.map(|()| Some(wait)), Err);
        }
    };
    let Decided { ledger, wake, creation, refusal } = decided;
    events::emit_decisions(context, &writer, &writer.decisions);
    let mut planned = status_of(key, &writer.records(), &ledger, state);
    let creation = creation.map(|error| (error, malformed_trial(planned.trials_created)));
    let (mut refusals, mut errors) = split_refusals(writer.errors, creation);
    refusals.extend(refusal);
    let wait = if refusals.is_empty() { context.resync_interval(key) } else { REFUSAL_RETRY };
    refusals.extend(trial_refusal.into_iter().chain(edits::invalid_edit(key, experiment, valid)));
    refusals.sort_by_key(|refusal| !refusal.is_final());
    let refused = refusals.first();
    if let Some(refusal) = refused.filter(|refusal| refusal.is_final()) {
        planned = failed(planned, refusal);
    }
    let recorded = writer.experiment.status.clone().unwrap_or_default();
    let generation = experiment.metadata.generation.unwrap_or_default();
    let mut after = conditions(&recorded, planned, generation, now());
    set_refusal(&mut after, refused, generation, now());
    after.storage = storage;
    if after != recorded {
        match apply::write_status(context, &writer.experiment, after.clone()).await {
            Ok(written) => {
                emit_events(context, &written, status, &after);
                events::emit_unrecorded_storage(context, &written, &after);
            }
            Err(error) => errors.push(error),
        }
    }
    let wait = wake.map_or(wait, |wake| wait.min(wake));
    most_severe(errors).map_or(Ok(Some(wait)), Err)
}

/// Returns the status of an experiment, without conditions.
fn status_of(
    key: &Key,
    records: &[&TrialRecord],
    ledger: &Ledger,
    state: DesiredState,
) -> ExperimentStatus {
    let is_over = matches!(state, DesiredState::Cancelled | DesiredState::Killed);
    let summary = Summary::new(ledger.config(), records.iter().copied());
    let record_of = |index| records.iter().copied().find(|record| record.spec.index == index);
    let name = format!("{} -n {}", key.name, key.namespace);
    let mut status = summary.status(ledger, is_over, &name, record_of);
    set_phase(&mut status, records, state);
    status
}

/// Separates refusals from other errors. The error of a creation comes with the reason for a
/// malformed trial.
fn split_refusals(
    errors: Vec<Error>,
    creation: Option<(Error, &'static str)>,
) -> (Vec<Refusal>, Vec<Error>) {
    let (mut refusals, mut others) = (vec![], vec![]);
    for (error, invalid) in
        creation.into_iter().chain(errors.into_iter().map(|error| (error, "WriteRefused")))
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
pub(crate) fn most_severe(mut errors: Vec<Error>) -> Option<Error> {
    errors.sort_by_key(|error| matches!(error, Error::Conflict { .. } | Error::Gone { .. }));
    let mut errors = errors.into_iter();
    let first = errors.next();
    errors.for_each(|error| tracing::debug!(%error, "additional error in the same reconcile"));
    first
}

/// Fails an experiment with an invalid spec, which cannot change.
async fn fail_invalid(
    context: &Context,
    key: &Key,
    experiment: &Experiment,
    status: &ExperimentStatus,
    errors: &[FieldError],
) -> Result<Option<Duration>, Error> {
    let message = errors.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ");
    if was_accepted(status) {
        return report_no_longer_valid(context, key, experiment, status, &message).await;
    }
    let mut after = ExperimentStatus { phase: Phase::Failed, reason: None, ..status.clone() };
    after.message = Some(format!("invalid: {message}"));
    let generation = experiment.metadata.generation.unwrap_or_default();
    after.observed_generation = generation;
    after.ended_at = Some(now());
    after.cleaned_up = true;
    set_invalid(&mut after.conditions, generation, &message);
    tracing::info!(experiment = %key, message, "experiment is invalid");
    let written = apply::write_status(context, experiment, after).await?;
    context.event(&written, EventType::Warning, "Invalid", message);
    Ok(None)
}

/// Reports a running experiment that newer validation rules reject, and stops its pods if the user
/// has paused, cancelled or killed it or their trial. Otherwise its trials stay as they are, and
/// continue once an operator accepts the experiment.
async fn report_no_longer_valid(
    context: &Context,
    key: &Key,
    experiment: &Experiment,
    status: &ExperimentStatus,
    message: &str,
) -> Result<Option<Duration>, Error> {
    let generation = experiment.metadata.generation.unwrap_or_default();
    let uid = experiment.metadata.uid.as_deref().unwrap_or_default();
    let mut errors = vec![];
    if !context.reported.contains(key, uid, generation) {
        let mut after = status.clone();
        let text = format!("{message}; {NO_LONGER_VALID_REMEDY}");
        let valid =
            new_condition("Valid", ConditionStatus::False, generation, "NoLongerValid", &text);
        condition::set(&mut after.conditions, valid);
        tracing::error!(
            experiment = %key,
            message,
            "running experiment is invalid under newer validation rules"
        );
        // A stop must not wait for this write.
        match apply::write_status(context, experiment, after).await {
            Ok(_) => context.reported.add(key, uid, generation),
            Err(error) => errors.push(error),
        }
    }
    let trials = apply::trials_of(context, key, uid);
    errors.extend(unreadable::stop_trials(context, experiment, trials).await);
    most_severe(errors).map_or(Ok(Some(context.resync_interval(key))), Err)
}

/// Builds a condition whose last transition is now.
pub(crate) fn new_condition(
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

/// Sets the conditions of an object that has failed because its spec is invalid.
pub(crate) fn set_invalid(conditions: &mut Vec<Condition>, generation: i64, message: &str) {
    for (type_, status) in [
        ("Valid", ConditionStatus::False),
        ("Running", ConditionStatus::False),
        ("Completed", ConditionStatus::False),
        ("Failed", ConditionStatus::True),
    ] {
        condition::set(conditions, new_condition(type_, status, generation, INVALID, message));
    }
}

/// Emits events for the change from `before` to `after`.
fn emit_events(
    context: &Context,
    experiment: &Experiment,
    before: &ExperimentStatus,
    after: &ExperimentStatus,
) {
    emit_refusal(context, experiment, before, after);
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
    context.event(experiment, type_, reason, note);
}

/// Emits an event with the API server's message if a refusal has a new reason.
pub(crate) fn emit_refusal(
    context: &Context,
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
        let (type_, action) = (EventType::Warning, now.reason.clone());
        context.event_with_action(experiment, type_, &now.reason, &action, now.message);
    }
}

/// Whether the owner of a trial has this UID. Excludes trials of an earlier experiment with the
/// same name.
pub(crate) fn is_owned(trial: &CachedTrial, uid: &str) -> bool {
    trial.trial.metadata.owner_references.iter().flatten().any(|owner| owner.uid == uid)
}
