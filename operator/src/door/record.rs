//! Records reports in a trial's status and derives the directive of the response.

use std::sync::Arc;
use std::time::Duration;

use axum::http::StatusCode;
use stoker_api::contract::{Directive, Report, ReportEvent};
use stoker_api::trial::{DesiredTrialState, TrialStatus};
use stoker_api::validate::ValidExperiment;
use stoker_engine::retention::prunable;
use stoker_engine::trial::{
    ReportEffect, SearchedMetric, TargetState, TrialRecord, directive, record_report,
};

use super::auth::Denied;
use super::{Door, Refusal, Taken};
use crate::cache::Key;
use crate::error::{Error, request};
use crate::metrics::Answer;
use crate::objects::CachedTrial;
use crate::trial::apply::{keep, write_status};
use crate::world::World;

/// Maximum number of tries to write a report while other clients write the trial.
const TRIES_MAX: u32 = 16;
/// Steps on the way to the granted length at which progress is recorded. Storage has finer
/// progress.
const PROGRESS_PARTS: u64 = 4;
/// Interval between two writes of validations that decide nothing. Storage has all of them.
const HOLD: Duration = Duration::from_secs(5);

/// Returns the trial with this name and UID, from the cache or else from the API server. Returns
/// `None` if it was deleted, even if another trial has its name now.
pub(super) async fn owned(
    world: &World,
    key: &Key,
    uid: &str,
) -> Result<Option<Arc<CachedTrial>>, Denied> {
    match world.trials.get(key).filter(|trial| trial.uid() == uid) {
        Some(trial) => Ok(Some(trial)),
        None => read_owned(world, key, uid).await,
    }
}

/// Same as [`owned`], but always from the API server.
pub(super) async fn read_owned(
    world: &World,
    key: &Key,
    uid: &str,
) -> Result<Option<Arc<CachedTrial>>, Denied> {
    let api = world.trial_api(&key.namespace);
    let trial = request(format!("read trial {key}"), api.get_opt(&key.name)).await;
    let trial = trial.map_err(|error| Denied::Away(error.to_string()))?;
    Ok(trial.map(|trial| keep(world, trial)).filter(|trial| trial.uid() == uid))
}

/// Returns the owning experiment of a trial. A later experiment with its name may search another
/// metric.
fn experiment(world: &World, trial: &CachedTrial) -> Result<Arc<ValidExperiment>, Refusal> {
    let key = trial.experiment_key();
    let experiment = world.experiments.get(&key).filter(|experiment| {
        let mut owners = trial.trial.metadata.owner_references.iter().flatten();
        owners.any(|owner| owner.uid == experiment.uid())
    });
    let valid = experiment.and_then(|experiment| experiment.valid());
    valid.ok_or_else(|| {
        Refusal::unavailable(format!("experiment {key} is not in the operator's cache yet; retry"))
    })
}

/// Records a report of the trial with this UID if it contains something new, and answers it.
pub(super) async fn record(
    door: &Arc<Door>,
    key: &Key,
    uid: &str,
    report: &Report,
) -> Result<Taken, Refusal> {
    let begin_hold = || {
        let (door, key, uid) = (door.clone(), key.clone(), uid.to_owned());
        tokio::spawn(async move { write_held(&door, &key, &uid).await });
    };
    record_with(door, key, uid, report, Some(&begin_hold)).await
}

/// Writes the delayed validations of a trial at intervals, until an interval passes without one.
async fn write_held(door: &Door, key: &Key, uid: &str) {
    loop {
        tokio::time::sleep(HOLD).await;
        let Some(report) = door.held.next(uid) else { return };
        // A failed write is retried after the next interval, since no caller waits for it.
        match record_with(door, key, uid, &report, None).await {
            Ok(_) => door.held.drop_written(uid, &report),
            Err(Refusal { answer: Answer::Refused, why, .. }) => {
                tracing::warn!(trial = %key, why, "validation not recorded");
                door.held.drop_written(uid, &report);
            }
            Err(Refusal { why, .. }) => {
                tracing::debug!(trial = %key, why, "validation not recorded yet; retrying");
            }
        }
    }
}

/// Same as [`record`]. A validation that decides nothing may be delayed, except the first one, for
/// which `begin_hold` is called. Without `begin_hold`, the report is a delayed one.
async fn record_with(
    door: &Door,
    key: &Key,
    uid: &str,
    report: &Report,
    begin_hold: Option<&(dyn Fn() + Sync)>,
) -> Result<Taken, Refusal> {
    let world = &door.world;
    let mut current = owned(world, key, uid).await?;
    let (mut is_live, mut may_write) = (false, false);
    for _ in 0..TRIES_MAX {
        let Some(trial) = current else { return Ok(Taken::fenced()) };
        let valid = experiment(world, &trial)?;
        let searcher = &valid.spec.searcher;
        let searched = SearchedMetric {
            name: &searcher.metric,
            smaller_is_better: searcher.smaller_is_better,
        };
        let before = &trial.record.status;
        let mut record = trial.record.clone();
        let directive = |record: &TrialRecord| directive_for(record, report.attempt);
        match record_report(&mut record, report, &searched) {
            ReportEffect::Repeat => return Ok(Taken::new(Answer::Repeat, directive(&record))),
            ReportEffect::New if is_fine(before, &record.status, report) => {
                return Ok(Taken::new(Answer::Repeat, directive(&record)));
            }
            ReportEffect::New => {
                let is_idle = is_idle_validation(before, &record.status, report);
                if let (true, Some(begin_hold)) = (is_idle, begin_hold) {
                    if door.held.hold(uid, report) {
                        return Ok(Taken::new(Answer::Held, directive(&record)));
                    }
                    begin_hold();
                }
                if !may_write {
                    may_write = true;
                    if door.wait_to_write(key, decides(report)).await? {
                        current = owned(world, key, uid).await?;
                        continue;
                    }
                }
                let held = door.held.get(uid).filter(|held| held != report);
                if let Some(held) = &held {
                    // Record the older, delayed report first, so that the newer report prevails.
                    record = trial.record.clone();
                    record_report(&mut record, held, &searched);
                    record_report(&mut record, report, &searched);
                }
                // Keep the record small, however often the program saves. The trainer deletes the
                // files.
                let storage = &valid.spec.checkpoint_storage;
                let checkpoints = &mut record.status.checkpoints;
                let pruned = match begin_hold {
                    Some(_) => prunable(storage, searcher.smaller_is_better, checkpoints),
                    // A delayed report has no response that could name files to delete.
                    None => vec![],
                };
                checkpoints.retain(|checkpoint| !pruned.contains(&checkpoint.name));
                match write_status(world, &trial, record.status).await {
                    Ok(written) => {
                        held.iter().for_each(|held| door.held.drop_written(uid, held));
                        let taken = Taken::new(Answer::Directive, directive(&written.record));
                        return Ok(Taken { superfluous: pruned, ..taken });
                    }
                    Err(Error::Conflict { .. } | Error::Gone { .. }) => {}
                    Err(error) => return Err(Refusal::unavailable(error.to_string())),
                }
            }
            // The cache may be older than the attempt, so check the API server before fencing or
            // refusing.
            ReportEffect::Fenced if is_live => return Ok(Taken::fenced()),
            ReportEffect::Refused { why } if is_live => {
                let status = StatusCode::UNPROCESSABLE_ENTITY;
                return Err(Refusal::new(Answer::Refused, status, why));
            }
            ReportEffect::Fenced | ReportEffect::Refused { .. } => {}
        }
        current = read_owned(world, key, uid).await?;
        is_live = true;
    }
    let why = format!("trial {key} has too many concurrent writes; retry later");
    Err(Refusal::unavailable(why))
}

/// Returns the current directive for the trainer of the trial with this UID; `Wait` if the trial
/// cannot be read.
pub(super) async fn answer(world: &World, key: &Key, uid: &str, attempt: u32) -> Directive {
    match owned(world, key, uid).await {
        Ok(Some(trial)) => directive_for(&trial.record, attempt),
        Ok(None) => Directive::Fenced,
        Err(_) => Directive::Wait,
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
fn decides(report: &Report) -> bool {
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
fn is_fine(before: &TrialStatus, after: &TrialStatus, report: &Report) -> bool {
    if !matches!(report.event, ReportEvent::Progress { .. }) {
        return false;
    }
    let part = |batches: u64| match after.batches_total {
        0 => 0,
        total => batches.saturating_mul(PROGRESS_PARTS) / total,
    };
    let is_same = TrialStatus { batches: before.batches, ..after.clone() } == *before;
    is_same && part(before.batches) == part(after.batches)
}

#[cfg(test)]
mod tests {
    use super::*;

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
            assert_eq!(is_fine(&status(before), &after, &report), expected, "{before} {after:?}");
        };
        check(0, 10, 100, true);
        check(0, 25, 100, false);
        check(25, 49, 100, true);
        check(25, 50, 100, false);
        check(25, 26, 200, false);
    }
}
