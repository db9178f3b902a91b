//! From a report to a trial's status, and from there to the answer.

use std::sync::Arc;

use axum::http::StatusCode;
use stoker_api::contract::{Directive, Report, ReportEvent};
use stoker_api::trial::{TrialStatus, WantedState};
use stoker_api::validate::ValidExperiment;
use stoker_engine::retention::superfluous;
use stoker_engine::trial::{
    Recorded, SearchedMetric, TrialRecord, Wanted, directive, record_report,
};

use super::auth::Denied;
use super::{Door, Refusal, Taken};
use crate::cache::Key;
use crate::error::{Error, request};
use crate::metrics::Answer;
use crate::objects::CachedTrial;
use crate::trial::apply::{keep, write_status};
use crate::world::World;

/// Tries to write a report, when others write the trial at the same time.
const TRIES_MAX: u32 = 16;
/// Parts of the way to the granted length of which each is recorded once: finer progress is in the
/// bucket.
const PROGRESS_PARTS: u64 = 4;

/// Returns the trial of this name and UID, from the cache or else from the API server; `None` if it was
/// deleted, even if another trial has its name now.
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

/// As [`owned`], from the API server.
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

/// The experiment that a trial is of. A later experiment of its name may search by another metric.
fn experiment(world: &World, trial: &CachedTrial) -> Result<Arc<ValidExperiment>, Refusal> {
    let key = trial.experiment_key();
    let experiment = world.experiments.get(&key).filter(|experiment| {
        let mut owners = trial.trial.metadata.owner_references.iter().flatten();
        owners.any(|owner| owner.uid == experiment.uid())
    });
    let valid = experiment.and_then(|experiment| experiment.valid());
    valid.ok_or_else(|| Refusal::unavailable(format!("experiment {key} is not known yet")))
}

/// Records a report of the trial of this UID, if it says something new, and answers it.
pub(super) async fn record(
    door: &Door,
    key: &Key,
    uid: &str,
    report: &Report,
) -> Result<Taken, Refusal> {
    let world = &door.world;
    let mut current = owned(world, key, uid).await?;
    let mut is_live = false;
    for _ in 0..TRIES_MAX {
        let Some(trial) = current else { return Ok(Taken::fenced()) };
        let valid = experiment(world, &trial)?;
        let searcher = &valid.spec.searcher;
        let searched = SearchedMetric {
            name: &searcher.metric,
            smaller_is_better: searcher.smaller_is_better,
        };
        let mut record = trial.record.clone();
        match record_report(&mut record, report, &searched) {
            Recorded::Repeat => {
                return Ok(Taken::new(Answer::Repeat, told(&record, report.attempt)));
            }
            Recorded::New if is_fine(&trial.record.status, &record.status, report) => {
                return Ok(Taken::new(Answer::Repeat, told(&record, report.attempt)));
            }
            Recorded::New => {
                // A record must stay small however often is saved: the trainer deletes the files.
                let storage = &valid.spec.checkpoint_storage;
                let checkpoints = &mut record.status.checkpoints;
                let gone = superfluous(storage, searcher.smaller_is_better, checkpoints);
                checkpoints.retain(|it| !gone.contains(&it.name));
                match write_status(world, &trial, record.status).await {
                    Ok(written) => {
                        let directive = told(&written.record, report.attempt);
                        let taken = Taken::new(Answer::Directive, directive);
                        return Ok(Taken { superfluous: gone, ..taken });
                    }
                    Err(Error::Conflict { .. } | Error::Gone { .. }) => {}
                    Err(error) => return Err(Refusal::unavailable(error.to_string())),
                }
            }
            // What is cached may be older than the attempt.
            Recorded::Fenced if is_live => return Ok(Taken::fenced()),
            Recorded::Refused { why } if is_live => {
                let status = StatusCode::UNPROCESSABLE_ENTITY;
                return Err(Refusal::new(Answer::Refused, status, why));
            }
            Recorded::Fenced | Recorded::Refused { .. } => {}
        }
        current = read_owned(world, key, uid).await?;
        is_live = true;
    }
    Err(Refusal::unavailable(format!("trial {key} is written by too many at once")))
}

/// What the trainer of the trial of this UID is told now. `Wait` if that cannot be found out.
pub(super) async fn answer(world: &World, key: &Key, uid: &str, attempt: u32) -> Directive {
    match owned(world, key, uid).await {
        Ok(Some(trial)) => told(&trial.record, attempt),
        Ok(None) => Directive::Fenced,
        Err(_) => Directive::Wait,
    }
}

fn told(record: &TrialRecord, attempt: u32) -> Directive {
    let wanted = match record.spec.wanted {
        WantedState::Run => Wanted::Run,
        WantedState::Pause => Wanted::Pause,
        WantedState::Stop | WantedState::Kill => Wanted::Stop,
    };
    directive(record, attempt, wanted)
}

/// Whether a report tells nothing but a little more progress, which is not worth a write.
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
