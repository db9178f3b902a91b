//! Edits of an ended experiment, and requests to reopen its trials.

use std::time::Duration;

use stoker_api::condition::{self, Condition, ConditionStatus};
use stoker_api::experiment::{DesiredState, Experiment, ExperimentStatus, Phase};
use stoker_api::time::Timestamp;
use stoker_api::validate::{ValidExperiment, validate_started, with_edits};
use stoker_engine::experiment::{
    EDIT_REFUSED, LOG_FULL, Ledger, POD_INVALID, Refusal, TRIAL_INVALID, full_log, is_edited,
    is_requested, refused_edit, set_refusal,
};
use stoker_engine::search::SearchConfig;
use stoker_engine::trial::config::experiment_seed;

use super::apply::Writer;
use super::clean_up::{self, CleanUpState};
use super::{apply, emit_refusal, kept, run};
use crate::cache::Key;
use crate::context::{Context, now};
use crate::error::Error;

/// Reconciles an ended experiment: cleans it up, unless the user continues it.
pub(super) async fn reconcile_ended(
    context: &Context,
    key: &Key,
    experiment: &Experiment,
    valid: &ValidExperiment,
    status: &ExperimentStatus,
) -> Result<Option<Duration>, Error> {
    let config = SearchConfig::new(valid, 0);
    let full = full_log(&config, valid.spec.reopen, &status.log);
    let is_continued = full.is_none() && is_continued(experiment, valid, status);
    let refused = refused_edit(&valid.spec.searcher, &status.log, status.trials_created);
    let refused = refused.or_else(|| match is_continued {
        true => large_edit_after_end(context, key, experiment, valid),
        false => None,
    });
    // A request to reopen trials applies also beside a refused edit.
    let may_continue = refused.is_none() || is_requested(valid.spec.reopen, &status.log);
    let refused = refused.or(full);
    let mut is_wanted = true;
    if is_continued && may_continue {
        match clean_up::stop(context, key, experiment, valid, status).await? {
            CleanUpState::Idle => {
                return run(context, key, (experiment, valid), status, None).await;
            }
            CleanUpState::Stopping(wait) => return Ok(Some(wait)),
            CleanUpState::Finished => is_wanted = false,
        }
    }
    context.searchers.forget(key);
    let wait = clean_up::clean_up(context, key, experiment, valid, status, is_wanted).await?;
    if status.cleaned_up {
        let refused = invalid_edit(key, experiment, valid).or(refused);
        report_refused_edit(context, experiment, status, refused.as_ref()).await?;
    }
    Ok(wait)
}

/// Returns why an experiment cannot record the decisions on an edit; `None` if it can, or nothing
/// was edited.
pub(super) fn large_edit(
    writer: &Writer<'_>,
    ledger: &Ledger,
    config: &SearchConfig,
    now: Timestamp,
) -> Option<Refusal> {
    if !is_edited(config, None, kept::log(&writer.experiment)) {
        return None;
    }
    let num_bytes = serde_json::to_string(&writer.experiment).map_or(0, |json| json.len());
    let spending = writer.spending(config);
    ledger.large_edit(config, &spending, |index| writer.record(index), num_bytes, now)
}

/// Same as [`large_edit`], for an ended experiment.
fn large_edit_after_end(
    context: &Context,
    key: &Key,
    experiment: &Experiment,
    valid: &ValidExperiment,
) -> Option<Refusal> {
    let uid = experiment.metadata.uid.as_deref().unwrap_or_default();
    let config = SearchConfig::new(valid, experiment_seed(valid, uid));
    // The search is rebuilt only for an edit.
    if !is_edited(&config, None, kept::log(experiment)) {
        return None;
    }
    let trials = apply::trials_of(context, key, uid);
    // An experiment that continues reports unreadable objects, and decides nothing.
    if trials.iter().any(|trial| trial.unreadable.is_some()) {
        return None;
    }
    let writer = Writer::new(context, experiment, &trials);
    let (ledger, _) = writer.rebuild(&config).ok()?;
    large_edit(&writer, &ledger, &config, now())
}

/// Returns whether the user has edited an experiment that may continue, or has asked to reopen
/// trials. The objects of an experiment that a final refusal has failed stay malformed.
fn is_continued(
    experiment: &Experiment,
    valid: &ValidExperiment,
    status: &ExperimentStatus,
) -> bool {
    let is_over = matches!(experiment.spec.state, DesiredState::Cancelled | DesiredState::Killed);
    let is_malformed = status.phase == Phase::Failed
        && reported(status)
            .is_some_and(|refused| [POD_INVALID, TRIAL_INVALID].contains(&&*refused.reason));
    let config = SearchConfig::new(valid, 0);
    !is_over && !is_malformed && is_edited(&config, valid.spec.reopen, &status.log)
}

/// Returns why the search does not follow an edit that makes the experiment invalid; `None` if the
/// experiment is valid. Otherwise, `valid` has the settings that the search has recorded.
pub(super) fn invalid_edit(
    key: &Key,
    experiment: &Experiment,
    valid: &ValidExperiment,
) -> Option<Refusal> {
    let recorded = &valid.spec.searcher;
    if with_edits(recorded, &experiment.spec.searcher) == *recorded {
        return None;
    }
    let errors = validate_started(&key.name, &experiment.spec).err()?;
    let errors = errors.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ");
    let message = format!("{errors}. The search continues with the settings before this edit");
    Some(Refusal { reason: EDIT_REFUSED.to_owned(), message })
}

/// Returns the condition `Refused` if it holds.
fn reported(status: &ExperimentStatus) -> Option<&Condition> {
    let refused = condition::find(&status.conditions, "Refused");
    refused.filter(|refused| refused.status == ConditionStatus::True)
}

/// Reports an edit that the search of an ended experiment cannot follow, until it is corrected.
async fn report_refused_edit(
    context: &Context,
    experiment: &Experiment,
    status: &ExperimentStatus,
    refused: Option<&Refusal>,
) -> Result<(), Error> {
    // The search of an ended experiment does not wait for deleted trials any more.
    let is_reported = reported(status)
        .is_some_and(|refused| [EDIT_REFUSED, LOG_FULL].contains(&&*refused.reason));
    if refused.is_none() && !is_reported {
        return Ok(());
    }
    let generation = experiment.metadata.generation.unwrap_or_default();
    let mut after = status.clone();
    set_refusal(&mut after, refused, generation, now());
    if after != *status {
        let written = apply::write_status(context, experiment, after.clone()).await?;
        emit_refusal(context, &written, status, &after);
    }
    Ok(())
}
