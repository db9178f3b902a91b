//! Record of one trial: attempts, restarts, reports, and directives to its trainer.
//!
//! ```text
//!   next -> Start -> begin_attempt -> record_report, directive ... -> end_attempt -> next ...
//!                                                          Close -> close -> Done
//!                                            Done, and the search reopens it -> Reopen -> reopen
//! ```
//!
//! A closed trial stays closed until the search reopens it: late events never change its facts.

mod attempt_time;
mod back_off;
pub mod budget;
pub mod config;
mod limits;
mod reopening;
mod report;
mod trained;
mod unreported;

use serde::{Deserialize, Serialize};
use stoker_api::contract::{CheckpointRef, Directive, RESUME_FROM_MAX};
use stoker_api::experiment::Phase;
use stoker_api::names::parse_checkpoint_name;
use stoker_api::time::Timestamp;
use stoker_api::trial::{
    Attempt, AttemptEnd, CloseCause, ClosedFact, Fact, ResultFact, TrialSource, TrialSpec,
    TrialStatus,
};

pub use attempt_time::{ended_at, held_seconds, held_seconds_until};
pub(crate) use attempt_time::{ended_seconds, running_since};
pub use back_off::{BackOff, BackOffLimits, back_off};
pub use limits::{INFRASTRUCTURE_ATTEMPTS_MAX, RestartLimits};
pub(crate) use reopening::first_counted_attempt;
pub use reopening::{is_open, is_reopening, is_reopening_due, num_reopenings, reopen};
pub use report::{ReportEffect, SearchedMetric, record_report};
pub(crate) use report::{compare, compare_losses};
pub use trained::{batches_per_unit, trained_units};
pub use unreported::unreported_since;

/// Latest attempts that keep their messages. A record must stay small however often a trial is
/// paused or lost.
const MESSAGES_MAX: usize = 16;

/// Latest attempts that are kept. A trial that is preempted every hour for a month has had more.
const ATTEMPTS_MAX: usize = 128;
/// Message of a trial that failed although its program exited with code 0.
const NO_RESULT_MESSAGE: &str = "the program exited with code 0 without having reported a \
                                 validation with the searched metric; train through Stoker, or \
                                 exit with another code";

/// Record of a trial.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub struct TrialRecord {
    /// Sampled hyperparameters, seed and grants.
    pub spec: TrialSpec,
    /// Observed state: attempts, facts, metrics and checkpoints.
    #[serde(default)]
    pub status: TrialStatus,
}

/// Desired state of a trial.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TargetState {
    /// Train to the granted length.
    Run,
    /// Stop for good: the search stopped the trial, or the trial is cancelled.
    Stop,
    /// Do not run until resumed.
    Pause,
}

/// Next step for a trial.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NextStep {
    /// Begin an attempt.
    Start {
        /// Number of the attempt.
        attempt: u32,
        /// Own checkpoints to start from, newest first. See [`resume_from`].
        resume_from: Vec<CheckpointRef>,
        /// Granted length.
        units: u64,
    },
    /// Do nothing: an attempt is alive.
    Running,
    /// Do nothing: the trial is paused, or waits for the search's decision.
    Idle,
    /// Call [`close`]: no attempt is alive, and none may begin.
    Close {
        /// Cause of the close.
        cause: CloseCause,
    },
    /// Call [`reopen`]: the trial continues after its end.
    Reopen,
    /// Do nothing: the trial is closed.
    Done,
}

/// Returns the length that a trial may train to.
pub fn granted_units(spec: &TrialSpec) -> u64 {
    spec.grants.iter().map(|grant| grant.units).fold(spec.units, u64::max)
}

/// Returns why the trial is closed; `None` if it is open.
pub fn closed(record: &TrialRecord) -> Option<CloseCause> {
    let latest = record.status.facts.iter().rev().find_map(|fact| match fact {
        Fact::Closed(fact) => Some(Some(fact.cause)),
        Fact::Reopened(_) => Some(None),
        Fact::Result(_) => None,
    });
    latest.flatten()
}

/// Returns the result at a length, if recorded.
pub fn result_at(record: &TrialRecord, units: u64) -> Option<&ResultFact> {
    record.status.facts.iter().find_map(|fact| match fact {
        Fact::Result(fact) if fact.units == units => Some(fact),
        Fact::Result(_) | Fact::Closed(_) | Fact::Reopened(_) => None,
    })
}

/// Returns when the latest result was recorded; the epoch if there is none.
pub fn last_result_at(record: &TrialRecord) -> Timestamp {
    let latest = record.status.facts.iter().rev().find_map(|fact| match fact {
        Fact::Result(result) => Some(result.at),
        Fact::Closed(_) | Fact::Reopened(_) => None,
    });
    latest.flatten().unwrap_or_default()
}

/// Returns whether the program of a trial has begun to train in any attempt.
pub fn has_trained(record: &TrialRecord) -> bool {
    let status = &record.status;
    let has_started = |attempt: &Attempt| attempt.has_started;
    status.batches > 0 || !status.checkpoints.is_empty() || status.attempts.iter().any(has_started)
}

/// Returns the number of the live attempt, if any.
pub fn live_attempt(record: &TrialRecord) -> Option<u32> {
    let last = record.status.attempts.last();
    last.filter(|attempt| attempt.end.is_none()).map(|attempt| attempt.number)
}

/// Returns the next step for the trial.
pub fn next(record: &TrialRecord, target: TargetState) -> NextStep {
    let units = granted_units(&record.spec);
    let has_result = result_at(record, units).is_some();
    let is_closed = closed(record).is_some();
    let is_live = live_attempt(record).is_some();
    let may_reopen = match is_closed {
        true => target != TargetState::Stop || reopening::is_killed_since_reopening(record),
        false => !is_live,
    };
    if may_reopen && is_reopening_due(record) {
        return NextStep::Reopen;
    }
    if is_closed {
        return NextStep::Done;
    }
    if is_live {
        return NextStep::Running;
    }
    match target {
        TargetState::Stop if has_result => NextStep::Close { cause: CloseCause::Completed },
        TargetState::Stop => NextStep::Close { cause: CloseCause::Cancelled },
        TargetState::Pause => NextStep::Idle,
        TargetState::Run if has_result => NextStep::Idle,
        TargetState::Run if lacks_source(record).is_some() => {
            NextStep::Close { cause: CloseCause::Failed }
        }
        TargetState::Run => NextStep::Start {
            attempt: next_attempt(record),
            resume_from: resume_from(record),
            units,
        },
    }
}

/// Records that an attempt begins. The record must be written before anything of the attempt
/// exists. Does nothing if the trial is closed, or if this attempt or a later one was recorded.
pub fn begin_attempt(record: &mut TrialRecord, number: u32) {
    if closed(record).is_some() || number < next_attempt(record) {
        return;
    }
    record.status.phase = Phase::Running;
    let attempt = Attempt { number, ..Attempt::default() };
    record.status.attempts.push(attempt);
    let num_old = record.status.attempts.len().saturating_sub(ATTEMPTS_MAX);
    let unlisted = record.status.attempts.drain(..num_old);
    let seconds: u64 = unlisted.map(|attempt| attempt_time::seconds(&attempt)).sum();
    record.status.unlisted_attempt_seconds += seconds;
    let num_cleared = record.status.attempts.len().saturating_sub(MESSAGES_MAX);
    record.status.attempts[..num_cleared].iter_mut().for_each(|attempt| attempt.message = None);
}

/// Records how the live attempt ended, and closes the trial if it ends with the attempt. Does
/// nothing if no attempt is alive.
///
/// | end | consequence |
/// |---|---|
/// | `Completed` with a result at the granted length | closed as `Completed` |
/// | `Completed` with a validation before that length | closed as `StoppedEarly` |
/// | `Completed` with neither | closed as `Failed` |
/// | `Preempted` | runs again; not counted |
/// | `InvalidHyperparameters` | closed |
/// | `UserError` | a restart; closed as `Failed` after more than `max_restarts`; see [`after`] |
/// | `Infrastructure` | runs again; closed as `Failed` at the limit without a new checkpoint |
/// | `Infrastructure` before training, after another one [trained](RestartLimits) | `NotStarted` |
/// | `RunnerLost`, `NotStarted` | runs again; not counted |
///
/// A program that exits as completed before the granted length has stopped itself, as early
/// stopping does. A program that never validated has done nothing, and a restart would not help.
/// Infrastructure failures are counted since the attempt that wrote the newest checkpoint, or since
/// the trial was reopened, also if attempts with other outcomes are in between. They count for a
/// copy that has not saved a checkpoint, also before training: that of its source may be lost.
///
/// [`after`]: RestartLimits::after
pub fn end_attempt(
    record: &mut TrialRecord,
    end: AttemptEnd,
    message: Option<String>,
    limits: &RestartLimits,
) {
    let is_fresh_copy = is_fresh_copy(record);
    let last = record.status.attempts.last_mut();
    let Some(attempt) = last.filter(|attempt| attempt.end.is_none()) else {
        return;
    };
    let waits_for_outage = limits.has_trained && !attempt.has_started && !is_fresh_copy;
    let end = match end {
        AttemptEnd::Infrastructure if waits_for_outage => AttemptEnd::NotStarted,
        other => other,
    };
    attempt.end = Some(end);
    if message.is_some() {
        attempt.message = message;
        budget::bound_message(&mut attempt.message);
    }
    let message = attempt.message.clone();
    if closed(record).is_some() {
        return;
    }
    match end {
        AttemptEnd::Completed => {
            let has_result = result_at(record, granted_units(&record.spec)).is_some();
            match record.status.best_metric {
                _ if has_result => close(record, CloseCause::Completed, message),
                Some(_) => close(record, CloseCause::StoppedEarly, message),
                None => {
                    let last_message = message
                        .map_or(String::new(), |message| format!("; last message: {message}"));
                    let text = format!("{NO_RESULT_MESSAGE}{last_message}");
                    close(record, CloseCause::Failed, Some(text));
                }
            }
        }
        AttemptEnd::Preempted | AttemptEnd::RunnerLost | AttemptEnd::NotStarted => {}
        AttemptEnd::InvalidHyperparameters => {
            close(record, CloseCause::InvalidHyperparameters, message);
        }
        AttemptEnd::UserError => {
            record.status.restarts = record.status.restarts.saturating_add(1);
            if record.status.restarts > limits.max_restarts {
                let what = format!("failed {}", times(record.status.restarts));
                close(record, CloseCause::Failed, Some(with_cause(what, message)));
            }
        }
        AttemptEnd::Infrastructure => {
            let num_lost = infrastructure_attempts(record);
            if num_lost >= limits.infrastructure_attempts_max {
                let what = format!("lost {num_lost} attempts without a new checkpoint");
                close(record, CloseCause::Failed, Some(with_cause(what, message)));
            }
        }
    }
}

/// Closes the trial. Does nothing if the trial is closed: the first cause stands.
pub fn close(record: &mut TrialRecord, cause: CloseCause, message: Option<String>) {
    if closed(record).is_some() {
        return;
    }
    let message = message.or_else(|| lacks_source(record).filter(|_| cause == CloseCause::Failed));
    record.status.facts.push(Fact::Closed(ClosedFact { cause, at: None }));
    record.status.phase = match cause {
        CloseCause::Completed | CloseCause::StoppedEarly => Phase::Completed,
        CloseCause::InvalidHyperparameters | CloseCause::Failed => Phase::Failed,
        CloseCause::Cancelled | CloseCause::Deleted => Phase::Cancelled,
    };
    record.status.message = message;
    budget::bound_message(&mut record.status.message);
}

/// Sets the time of facts that a change has added. `num_before` is their number before the change.
pub fn stamp_facts(record: &mut TrialRecord, num_before: usize, now: Timestamp) {
    for fact in record.status.facts.iter_mut().skip(num_before) {
        let at = match fact {
            Fact::Result(result) => &mut result.at,
            Fact::Closed(closed) => &mut closed.at,
            Fact::Reopened(reopened) => &mut reopened.at,
        };
        at.get_or_insert(now);
    }
}

/// Returns the directive for the trainer of an attempt.
pub fn directive(record: &TrialRecord, attempt: u32, target: TargetState) -> Directive {
    if closed(record).is_some() || live_attempt(record) != Some(attempt) {
        return Directive::Fenced;
    }
    let units = granted_units(&record.spec);
    let has_result = result_at(record, units).is_some();
    match target {
        TargetState::Stop if has_result => Directive::Stop,
        TargetState::Stop | TargetState::Pause => Directive::Preempt,
        TargetState::Run if has_result => Directive::Wait,
        TargetState::Run => Directive::Continue { units },
    }
}

/// Returns the attempt that wrote a checkpoint.
fn attempt_of(name: &str) -> Option<u32> {
    parse_checkpoint_name(name).map(|(_, attempt)| attempt)
}

fn next_attempt(record: &TrialRecord) -> u32 {
    record.status.attempts.last().map_or(0, |attempt| attempt.number.saturating_add(1))
}

/// Returns whether a trial is a copy that has not saved a checkpoint yet.
pub(crate) fn is_fresh_copy(record: &TrialRecord) -> bool {
    record.spec.source.is_some() && record.status.checkpoints.is_empty()
}

/// Returns why a copy cannot start, if its source has no checkpoint.
fn lacks_source(record: &TrialRecord) -> Option<String> {
    let source = record.spec.source.as_ref().filter(|_| is_fresh_copy(record))?;
    let TrialSource { trial, units, checkpoint: None, .. } = source else { return None };
    Some(format!(
        "trial {trial} had no checkpoint at {units} {}, so it cannot be copied; save a checkpoint \
         before the result of each granted length",
        record.spec.unit.plural()
    ))
}

/// Returns the trial's own checkpoints that the next attempt starts from, newest first. A copy
/// falls back to the checkpoint of its source, and any other trial to a start from scratch.
pub fn resume_from(record: &TrialRecord) -> Vec<CheckpointRef> {
    let newest_first = record.status.checkpoints.iter().rev().take(RESUME_FROM_MAX);
    newest_first
        .map(|checkpoint| CheckpointRef {
            name: checkpoint.name.clone(),
            manifest_sha256: checkpoint.manifest_sha256.clone(),
            trial_path: None,
        })
        .collect()
}

/// Counts infrastructure failures since the attempt that wrote the newest checkpoint, and since the
/// trial was reopened.
fn infrastructure_attempts(record: &TrialRecord) -> u32 {
    let newest = record.status.checkpoints.last();
    let written_by = newest.and_then(|checkpoint| attempt_of(&checkpoint.name));
    let first = first_counted_attempt(record);
    let is_lost = |attempt: &&Attempt| {
        Some(attempt.number) > written_by
            && attempt.number >= first
            && attempt.end == Some(AttemptEnd::Infrastructure)
    };
    record.status.attempts.iter().filter(is_lost).count() as u32
}

/// Returns `once` or `3 times`.
pub(crate) fn times(count: u32) -> String {
    match count {
        1 => "once".to_owned(),
        _ => format!("{count} times"),
    }
}

fn with_cause(what: String, cause: Option<String>) -> String {
    match cause {
        Some(cause) => format!("{what}; last failure: {cause}"),
        None => what,
    }
}

#[cfg(test)]
mod tests;
