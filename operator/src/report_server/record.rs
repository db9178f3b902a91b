//! Records reports in a trial's status and derives the directive of the response.

use std::sync::Arc;
use std::time::Duration;

use axum::http::StatusCode;
use futures::StreamExt as _;
use kube::runtime::events::EventType;
use stoker_api::contract::{Directive, Report, ReportEvent};
use stoker_api::trial::{DesiredTrialState, TrialStatus};
use stoker_api::validate::ValidExperiment;
use stoker_engine::retention::{pinned, prunable};
use stoker_engine::trial::{
    ReportEffect, SearchedMetric, TargetState, TrialRecord, directive, record_report, stamp_facts,
};

use super::auth::AuthError;
use super::{Accepted, Refusal, ReportServer};
use crate::cache::Key;
use crate::context::{Context, now};
use crate::error::{Error, request};
use crate::metrics::Answer;
use crate::objects::CachedTrial;
use crate::trial::apply::{cache_trial, write_status};
use crate::user_resources::CachedExperiment;

/// Maximum number of tries to write a report while other clients write the trial.
const TRIES_MAX: u32 = 16;
/// Steps on the way to the granted length at which progress is recorded. Storage has finer
/// progress.
const PROGRESS_STEPS: u64 = 4;
/// Longest time in which a stopping replica writes its delayed validations.
const LAST_WRITES_MAX: Duration = Duration::from_secs(5);
/// Wait of a stopping replica between two tries to write its delayed validations.
const LAST_WRITES_INTERVAL: Duration = Duration::from_millis(200);
/// Maximum number of delayed validations that a stopping replica writes concurrently.
const LAST_WRITES_CONCURRENT_MAX: usize = 64;

/// Returns the trial with this name and UID, from the cache or else from the API server. Returns
/// `None` if it was deleted, even if another trial has its name now.
pub(super) async fn owned_trial(
    context: &Context,
    key: &Key,
    uid: &str,
) -> Result<Option<Arc<CachedTrial>>, AuthError> {
    match context.trials.get(key).filter(|trial| trial.uid() == uid) {
        Some(trial) => Ok(Some(trial)),
        None => read_owned_trial(context, key, uid).await,
    }
}

/// Same as [`owned_trial`], but always from the API server.
pub(super) async fn read_owned_trial(
    context: &Context,
    key: &Key,
    uid: &str,
) -> Result<Option<Arc<CachedTrial>>, AuthError> {
    let api = context.trial_api(&key.namespace);
    let trial = request(format!("read trial {key}"), api.get_opt(&key.name)).await;
    let trial = trial.map_err(|error| AuthError::Unavailable(error.to_string()))?;
    Ok(trial.map(|trial| cache_trial(context, trial)).filter(|trial| trial.uid() == uid))
}

/// Returns the owning experiment of a trial. A later experiment with its name may search another
/// metric.
fn experiment(context: &Context, trial: &CachedTrial) -> Result<Arc<ValidExperiment>, Refusal> {
    let key = trial.experiment_key();
    let experiment = context.experiments.get(&key).filter(|experiment| {
        let mut owners = trial.trial.metadata.owner_references.iter().flatten();
        owners.any(|owner| owner.uid == experiment.uid())
    });
    let valid = experiment.as_ref().and_then(|experiment| experiment.valid());
    valid.ok_or_else(|| Refusal::unavailable(why_unavailable(&key, experiment.as_deref())))
}

/// Returns why no report can be recorded for an experiment without a valid spec.
fn why_unavailable(key: &Key, experiment: Option<&CachedExperiment>) -> String {
    match experiment.map(|experiment| (&experiment.object, &experiment.validation)) {
        Some((Err(_), _)) => format!(
            "this version of the operator cannot parse experiment {key}; see its condition Valid"
        ),
        Some((_, Some(Err(errors)))) => {
            let first = errors.first().map_or(String::new(), |error| format!(" ({error})"));
            format!(
                "experiment {key} is invalid under the rules of this version of the \
                 operator{first}; see its condition Valid"
            )
        }
        Some(_) | None => format!("experiment {key} is not in the operator's cache yet; retry"),
    }
}

/// Records a report of the trial with this UID if it contains something new, and answers it.
pub(super) async fn record(
    server: &Arc<ReportServer>,
    key: &Key,
    uid: &str,
    report: &Report,
) -> Result<Accepted, Refusal> {
    let start_delay = || {
        let (server, key, uid) = (server.clone(), key.clone(), uid.to_owned());
        tokio::spawn(async move { write_delayed(&server, &key, &uid).await });
    };
    record_with(server, key, uid, report, Some(&start_delay)).await
}

/// Writes the delayed validations of a trial at intervals, until an interval passes without one.
async fn write_delayed(server: &ReportServer, key: &Key, uid: &str) {
    let interval = Duration::from_secs(server.context.options.validation_write_seconds);
    loop {
        tokio::time::sleep(interval).await;
        let Some(report) = server.delayed.next(uid) else { return };
        // A failed write is retried after the next interval, since no caller waits for it.
        try_write_delayed(server, key, uid, &report).await;
    }
}

/// Tries to write a delayed validation, and drops it if it was written or refused.
async fn try_write_delayed(server: &ReportServer, key: &Key, uid: &str, report: &Report) {
    match record_with(server, key, uid, report, None).await {
        Ok(_) => server.delayed.drop_written(uid, report),
        Err(Refusal { answer: Answer::Refused, why, .. }) => {
            tracing::warn!(trial = %key, why, "validation not recorded");
            server.delayed.drop_written(uid, report);
        }
        Err(Refusal { why, .. }) => {
            tracing::debug!(trial = %key, why, "validation not recorded yet; retrying");
        }
    }
}

/// Writes all delayed validations, for at most [`LAST_WRITES_MAX`]. From now on, validations are
/// written before they are answered, because this replica may end before it writes them later.
pub(super) async fn write_all_delayed(server: &ReportServer) {
    server.delayed.close();
    let write_all = async {
        loop {
            let delayed = server.delayed.all();
            if delayed.is_empty() {
                return;
            }
            let writes = futures::stream::iter(&delayed)
                .for_each_concurrent(LAST_WRITES_CONCURRENT_MAX, |(key, uid, report)| {
                    try_write_delayed(server, key, uid, report)
                });
            writes.await;
            tokio::time::sleep(LAST_WRITES_INTERVAL).await;
        }
    };
    if tokio::time::timeout(LAST_WRITES_MAX, write_all).await.is_err() {
        let num = server.delayed.all().len();
        let seconds = LAST_WRITES_MAX.as_secs();
        tracing::warn!(num, seconds, "delayed validations not recorded in time; dropping them");
    }
}

/// Same as [`record`]. A validation that decides nothing may be delayed, except the first one, for
/// which `start_delay` is called. Without `start_delay`, the report is a delayed one.
async fn record_with(
    server: &ReportServer,
    key: &Key,
    uid: &str,
    report: &Report,
    start_delay: Option<&(dyn Fn() + Sync)>,
) -> Result<Accepted, Refusal> {
    let context = &server.context;
    let mut current = owned_trial(context, key, uid).await?;
    let (mut is_live, mut may_write) = (false, false);
    for _ in 0..TRIES_MAX {
        let Some(trial) = current else { return Ok(Accepted::fenced()) };
        let valid = experiment(context, &trial)?;
        let before = &trial.record.status;
        let mut record = trial.record.clone();
        let accepted = |answer, record: &TrialRecord| {
            Ok(Accepted::new(answer, directive_for(record, report.attempt)))
        };
        match record_report(&mut record, report, &searched_metric(&valid)) {
            ReportEffect::Repeat => return accepted(Answer::Repeat, &record),
            ReportEffect::New if is_minor_progress(before, &record.status, report) => {
                return accepted(Answer::Repeat, &record);
            }
            ReportEffect::New => {
                let is_idle = is_idle_validation(before, &record.status, report);
                if let (true, Some(start_delay)) = (is_idle, start_delay) {
                    if server.delayed.delay(key, uid, report) {
                        return accepted(Answer::Held, &record);
                    }
                    start_delay();
                }
                if !may_write {
                    may_write = true;
                    if server.wait_to_write(key, is_decisive(report)).await? {
                        current = owned_trial(context, key, uid).await?;
                        continue;
                    }
                }
                // A delayed report has no response that could name files to delete.
                let prunes = start_delay.is_some();
                if let Some(written) = write(server, &trial, &valid, report, record, prunes).await?
                {
                    return Ok(written);
                }
            }
            // The cache may be older than the attempt, so check the API server before fencing or
            // refusing.
            ReportEffect::Fenced if is_live => return Ok(Accepted::fenced()),
            ReportEffect::Refused { why } if is_live => {
                let status = StatusCode::UNPROCESSABLE_ENTITY;
                return Err(Refusal::new(Answer::Refused, status, why));
            }
            ReportEffect::Fenced | ReportEffect::Refused { .. } => {}
        }
        current = read_owned_trial(context, key, uid).await?;
        is_live = true;
    }
    let why = format!("trial {key} has too many concurrent writes; retry later");
    Err(Refusal::unavailable(why))
}

/// Writes `record`, which contains `report`, together with a delayed report of the trial. Returns
/// `None` if the trial was changed or deleted since it was read.
async fn write(
    server: &ReportServer,
    trial: &CachedTrial,
    valid: &ValidExperiment,
    report: &Report,
    mut record: TrialRecord,
    prunes: bool,
) -> Result<Option<Accepted>, Refusal> {
    let searched = searched_metric(valid);
    let delayed = server.delayed.get(trial.uid()).filter(|delayed| delayed != report);
    if let Some(delayed) = &delayed {
        // Record the older, delayed report first, so that the newer report prevails.
        record = trial.record.clone();
        record_report(&mut record, delayed, &searched);
        record_report(&mut record, report, &searched);
    }
    // Keep the record small, however often the program saves. The trainer deletes the files.
    stamp_facts(&mut record, trial.record.status.facts.len(), now());
    // The write fails if the trial has changed, so the pins are current.
    let pins = pinned(&record);
    let checkpoints = &mut record.status.checkpoints;
    let (policy, smaller_is_better) = (&valid.spec.checkpoint_storage, searched.smaller_is_better);
    let pruned = match prunes {
        true => prunable(policy, smaller_is_better, checkpoints, &pins),
        false => vec![],
    };
    checkpoints.retain(|checkpoint| !pruned.contains(&checkpoint.name));
    match write_status(&server.context, trial, record.status).await {
        Ok(written) => {
            delayed.iter().for_each(|delayed| server.delayed.drop_written(trial.uid(), delayed));
            report_lost_checkpoints(&server.context, &written, report);
            let directive = directive_for(&written.record, report.attempt);
            let accepted = Accepted::new(Answer::Directive, directive);
            Ok(Some(Accepted { prunable: pruned, ..accepted }))
        }
        Err(Error::Conflict { .. } | Error::Gone { .. }) => Ok(None),
        Err(error) => Err(Refusal::unavailable(error.to_string())),
    }
}

/// Emits an event if training starts from scratch although the trial has checkpoints.
fn report_lost_checkpoints(context: &Context, trial: &CachedTrial, report: &Report) {
    let ReportEvent::Started { resumed_from: None, refused, .. } = &report.event else { return };
    if let Some((name, why)) = refused.last_key_value() {
        let number = report.attempt;
        let note = format!(
            "attempt {number} trains from scratch: of {} checkpoints, none can be used; the \
             newest is {name}: {why}",
            refused.len()
        );
        let action = format!("StartAttempt{number}");
        let reason = "StartedFromScratch";
        context.event_with_action(&trial.trial, EventType::Warning, reason, &action, note);
    }
}

fn searched_metric(valid: &ValidExperiment) -> SearchedMetric<'_> {
    let searcher = &valid.spec.searcher;
    SearchedMetric {
        name: &searcher.metric,
        smaller_is_better: searcher.smaller_is_better,
        others: searcher.other_objectives(),
        is_copied: searcher.pbt.is_some(),
    }
}

/// Returns the current directive for the trainer of the trial with this UID; `Wait` if the trial
/// cannot be read or parsed.
pub(super) async fn current_directive(
    context: &Context,
    key: &Key,
    uid: &str,
    attempt: u32,
) -> Directive {
    match owned_trial(context, key, uid).await {
        Ok(Some(trial)) => cached_directive(&trial, attempt),
        Ok(None) => Directive::Fenced,
        Err(_) => Directive::Wait,
    }
}

/// Returns the directive of a cached trial. The placeholder of a trial that cannot be parsed has no
/// attempt, so a live trainer would be fenced. During an upgrade, an older replica cannot parse
/// what the new leader has written.
fn cached_directive(trial: &CachedTrial, attempt: u32) -> Directive {
    match trial.unreadable {
        Some(_) => Directive::Wait,
        None => directive_for(&trial.record, attempt),
    }
}

fn directive_for(record: &TrialRecord, attempt: u32) -> Directive {
    let wanted = match record.spec.desired_state {
        DesiredTrialState::Run => TargetState::Run,
        DesiredTrialState::Pause => TargetState::Pause,
        DesiredTrialState::Stop | DesiredTrialState::Kill => TargetState::Stop,
    };
    directive(record, attempt, wanted)
}

/// Whether a decision of the search, a restart or a directive can follow from a report.
fn is_decisive(report: &Report) -> bool {
    match report.event {
        ReportEvent::Progress { .. } => false,
        ReportEvent::Validated { granted_units, .. } => granted_units.is_some(),
        _ => true,
    }
}

/// Whether a report is a validation without effect. The first validation and a better metric matter
/// when a program stops early.
fn is_idle_validation(before: &TrialStatus, after: &TrialStatus, report: &Report) -> bool {
    matches!(report.event, ReportEvent::Validated { granted_units: None, .. })
        && !before.metrics.is_empty()
        && before.best_metric == after.best_metric
}

/// Whether a report contains only a little more progress, which is not worth a write.
fn is_minor_progress(before: &TrialStatus, after: &TrialStatus, report: &Report) -> bool {
    if !matches!(report.event, ReportEvent::Progress { .. }) {
        return false;
    }
    let part = |batches: u64| match after.batches_total {
        0 => 0,
        total => batches.saturating_mul(PROGRESS_STEPS) / total,
    };
    let is_same = TrialStatus { batches: before.batches, ..after.clone() } == *before;
    is_same && part(before.batches) == part(after.batches)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn trainer_of_an_unreadable_trial_waits() {
        let read = |units: serde_json::Value| {
            let spec = json!({
                "experiment": "mnist", "index": 0, "requestId": "r", "seed": 0,
                "hyperparameters": {}, "unit": "batches", "units": units,
            });
            let trial = json!({
                "apiVersion": "stoker.dev/v1alpha1", "kind": "Trial",
                "metadata": { "name": "mnist-0", "namespace": "n", "uid": "u" },
                "spec": spec, "status": { "attempts": [{ "number": 0 }] },
            });
            CachedTrial::read(serde_json::from_value(trial).unwrap())
        };
        let readable = read(json!(100));
        assert_eq!(cached_directive(&readable, 0), Directive::Continue { units: 100 });
        assert_eq!(cached_directive(&readable, 1), Directive::Fenced);
        let newer = read(json!("all"));
        assert!(newer.unreadable.is_some());
        assert_eq!(cached_directive(&newer, 0), Directive::Wait);
    }

    #[test]
    fn reports_of_an_invalid_experiment_name_the_reason() {
        let why = |spec: serde_json::Value| {
            let experiment = json!({
                "apiVersion": "stoker.dev/v1alpha1", "kind": "Experiment",
                "metadata": { "name": "e", "namespace": "n" }, "spec": spec,
            });
            let experiment = CachedExperiment::new(serde_json::from_value(experiment).unwrap());
            why_unavailable(&Key::new("n", "e"), Some(&experiment))
        };
        let invalid = why(json!({
            "entrypoint": { "command": ["program"] }, "hyperparameters": {},
            "searcher": {
                "single": {}, "metric": "loss", "smallerIsBetter": true,
                "maxLength": { "batches": 0 },
            },
        }));
        let expected =
            "experiment n/e is invalid under the rules of this version of the operator (";
        assert!(invalid.starts_with(expected), "{invalid}");
        let newer = why(json!({ "newer": true }));
        assert!(newer.contains("cannot parse experiment n/e"), "{newer}");
        let missing = why_unavailable(&Key::new("n", "e"), None);
        assert!(missing.ends_with("is not in the operator's cache yet; retry"), "{missing}");
    }

    #[test]
    fn only_validations_without_effect_are_held() {
        let status = |best: Option<&str>, metrics: &[&str]| TrialStatus {
            best_metric: best.map(str::to_owned),
            metrics: metrics.iter().map(|loss| ("loss".to_owned(), loss.to_string())).collect(),
            ..Default::default()
        };
        let check = |before: TrialStatus,
                     best: &str,
                     granted_units: Option<u64>,
                     expected: bool| {
            let event = ReportEvent::Validated { metrics: Default::default(), granted_units };
            let report = Report { version: 1, attempt: 0, batches: 1, event };
            let after = status(Some(best), &["0.5"]);
            assert_eq!(is_idle_validation(&before, &after, &report), expected, "{before:?} {best}");
        };
        check(status(None, &[]), "0.5", None, false);
        check(status(Some("0.4"), &["0.6"]), "0.4", None, true);
        check(status(Some("0.6"), &["0.6"]), "0.5", None, false);
        check(status(Some("0.4"), &["0.6"]), "0.4", Some(10), false);
        let event = ReportEvent::Progress { batches_total: 1, activity: None };
        let report = Report { version: 1, attempt: 0, batches: 1, event };
        let same = status(Some("0.4"), &["0.6"]);
        assert!(!is_idle_validation(&same, &same, &report));
    }

    #[test]
    fn progress_is_recorded_in_quarters() {
        let check = |before: u64, after: u64, total: u64, expected: bool| {
            let status =
                |batches| TrialStatus { batches, batches_total: 100, ..Default::default() };
            let event = ReportEvent::Progress { batches_total: total, activity: None };
            let report = Report { version: 1, attempt: 0, batches: after, event };
            let after = TrialStatus { batches_total: total, ..status(after) };
            assert_eq!(
                is_minor_progress(&status(before), &after, &report),
                expected,
                "{before} {after:?}"
            );
        };
        check(0, 10, 100, true);
        check(0, 25, 100, false);
        check(25, 49, 100, true);
        check(25, 50, 100, false);
        check(25, 26, 200, false);
    }
}
