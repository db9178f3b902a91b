//! From a report to a trial's status, and from there to the answer.

use std::sync::Arc;

use axum::http::StatusCode;
use stoker_api::contract::{Directive, Report, ReportEvent};
use stoker_api::trial::{TrialStatus, WantedState};
use stoker_engine::retention::superfluous;
use stoker_engine::trial::{
    Recorded, SearchedMetric, TrialRecord, Wanted, directive, record_report,
};

use super::auth::Denied;
use super::{Door, Refusal};
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

/// A trial by the cache, or else by the API server; `None` if there is none.
pub(super) async fn trial(world: &World, key: &Key) -> Result<Option<Arc<CachedTrial>>, Denied> {
    if let Some(trial) = world.trials.get(key) {
        return Ok(Some(trial));
    }
    read(world, key).await.map_err(|it| Denied::Away(it.to_string()))
}

async fn read(world: &World, key: &Key) -> Result<Option<Arc<CachedTrial>>, Error> {
    let api = world.trial_api(&key.namespace);
    let found = request(format!("read trial {key}"), api.get_opt(&key.name)).await?;
    Ok(found.map(|it| keep(world, it)))
}

/// Records a report, if it says something new, and answers it: with a directive, and with the
/// checkpoints that the record has forgotten.
pub(super) async fn record(
    door: &Door,
    key: &Key,
    report: &Report,
) -> Result<(Directive, Vec<String>), Refusal> {
    let world = &door.world;
    let away = |why: String| {
        door.count(Answer::Unavailable);
        (StatusCode::SERVICE_UNAVAILABLE, why)
    };
    let fenced = || {
        door.count(Answer::Fenced);
        Ok((Directive::Fenced, vec![]))
    };
    let mut current = trial(world, key).await.map_err(|it| door.denied(it))?;
    let mut is_live = false;
    for _ in 0..TRIES_MAX {
        let Some(trial) = current.clone() else { return fenced() };
        let experiment = world.experiments.get(&trial.experiment_key());
        let Some(valid) = experiment.and_then(|it| it.valid()) else {
            return Err(away(format!("experiment {} is not known yet", trial.experiment_key())));
        };
        let searcher = &valid.spec.searcher;
        let searched = SearchedMetric {
            name: &searcher.metric,
            smaller_is_better: searcher.smaller_is_better,
        };
        let mut record = trial.record.clone();
        match record_report(&mut record, report, &searched) {
            Recorded::Repeat => {
                door.count(Answer::Repeat);
                return Ok((told(&record, report.attempt), vec![]));
            }
            Recorded::New if is_fine(&trial.record.status, &record.status, report) => {
                door.count(Answer::Repeat);
                return Ok((told(&record, report.attempt), vec![]));
            }
            Recorded::New => {
                // A record must stay small however often is saved: the trainer deletes the files.
                let storage = &valid.spec.checkpoint_storage;
                let checkpoints = &mut record.status.checkpoints;
                let gone = superfluous(storage, searcher.smaller_is_better, checkpoints);
                checkpoints.retain(|it| !gone.contains(&it.name));
                match write_status(world, &trial, record.status).await {
                    Ok(written) => {
                        door.count(Answer::Directive);
                        return Ok((told(&written.record, report.attempt), gone));
                    }
                    Err(Error::Conflict { .. } | Error::Gone { .. }) => {}
                    Err(error) => return Err(away(error.to_string())),
                }
            }
            // What is cached may be older than the attempt.
            Recorded::Fenced if is_live => return fenced(),
            Recorded::Refused { why } if is_live => {
                door.count(Answer::Refused);
                return Err((StatusCode::UNPROCESSABLE_ENTITY, why));
            }
            Recorded::Fenced | Recorded::Refused { .. } => {}
        }
        current = read(world, key).await.map_err(|it| away(it.to_string()))?;
        is_live = true;
    }
    Err(away(format!("trial {key} is written by too many at once")))
}

/// What a trainer is told by what is cached now.
pub(super) fn answer(world: &World, key: &Key, attempt: u32) -> Directive {
    world.trials.get(key).map_or(Directive::Wait, |it| told(&it.record, attempt))
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
