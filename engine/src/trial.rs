//! One trial's record: attempts and restarts, what reports add to it, and what its trainer is
//! answered.
//!
//! ```text
//!   next -> Start -> begin_attempt -> record_report, directive ... -> end_attempt -> next ...
//!                                                          Close -> close -> Done
//! ```
//!
//! A closed trial stays closed: nothing here changes its facts, whatever comes late.

mod back_off;
pub mod budget;
mod report;

use serde::{Deserialize, Serialize};
use stoker_api::contract::{CheckpointRef, Directive};
use stoker_api::experiment::Phase;
use stoker_api::names::parse_checkpoint_name;
use stoker_api::trial::{
    Attempt, AttemptEnd, CloseCause, ClosedFact, Fact, ResultFact, TrialSpec, TrialStatus,
};

pub use back_off::{BackOff, BackOffLimits, back_off};
pub use report::{Recorded, SearchedMetric, record_report};
pub(crate) use report::{compare, compare_losses};

/// Checkpoints named to an attempt: the newest one, and so many to fall back to, less one.
pub const RESUME_FROM_MAX: usize = 16;

/// Attempts that failed by what is under the program, without a new checkpoint, after which a trial
/// has failed.
pub const INFRASTRUCTURE_ATTEMPTS_MAX: u32 = 10;

/// The latest attempts whose messages are kept: a record must stay small however often a trial is
/// paused or lost.
const MESSAGES_MAX: usize = 16;

/// The latest attempts that are kept: whoever is paused or preempted every hour for a month has had
/// more.
const ATTEMPTS_MAX: usize = 128;
/// Why a trial has failed whose program found nothing to complain of.
const WITHOUT_RESULT: &str = "its program exited with code 0 without having reported a validation \
                              with the searched metric: it must train through Stoker, or exit with \
                              another code";

/// What is recorded of a trial.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub struct TrialRecord {
    /// Its draw and its grants.
    pub spec: TrialSpec,
    /// What has been seen of it.
    #[serde(default)]
    pub status: TrialStatus,
}

/// How often a trial is tried again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Failures of the program after which it is still restarted; 5 means six runs.
    pub max_restarts: u32,
    /// Failures of what is under it, without a new checkpoint, that fail the trial.
    pub infrastructure_attempts_max: u32,
    /// How long a restart waits.
    pub back_off: BackOffLimits,
}

impl Limits {
    /// An experiment's `maxRestarts`, [`INFRASTRUCTURE_ATTEMPTS_MAX`] and the runner's back-off.
    pub fn new(max_restarts: u32, back_off: BackOffLimits) -> Self {
        let infrastructure_attempts_max = INFRASTRUCTURE_ATTEMPTS_MAX;
        Self { max_restarts, infrastructure_attempts_max, back_off }
    }
}

/// What is wanted of a trial now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wanted {
    /// That it trains to the length granted.
    Run,
    /// Nothing more: the search stopped it, or it is cancelled.
    Stop,
    /// Nothing now.
    Pause,
}

/// What to do with a trial now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Next {
    /// Begin an attempt.
    Start {
        /// Its number.
        attempt: u32,
        /// Checkpoints to start from, newest first; empty to start anew.
        resume_from: Vec<CheckpointRef>,
        /// The length granted.
        units: u64,
    },
    /// An attempt is alive.
    Running,
    /// Nothing runs, and nothing is to run now: it is paused, or waits for the search's decision.
    Idle,
    /// Nothing runs and nothing more is wanted: [`close`] it.
    Close {
        /// The cause to close it with.
        cause: CloseCause,
    },
    /// It is closed.
    Done,
}

/// The length that a trial may train to.
pub fn granted_units(spec: &TrialSpec) -> u64 {
    spec.grants.iter().map(|it| it.units).fold(spec.units, u64::max)
}

/// Why the trial is closed; `None` if it is not.
pub fn closed(record: &TrialRecord) -> Option<CloseCause> {
    record.status.facts.iter().find_map(|it| match it {
        Fact::Closed(fact) => Some(fact.cause),
        Fact::Result(_) => None,
    })
}

/// The result at a length, if there is one.
pub fn result_at(record: &TrialRecord, units: u64) -> Option<&ResultFact> {
    record.status.facts.iter().find_map(|it| match it {
        Fact::Result(fact) if fact.units == units => Some(fact),
        Fact::Result(_) | Fact::Closed(_) => None,
    })
}

/// The attempt that is alive, if one is.
pub fn live_attempt(record: &TrialRecord) -> Option<u32> {
    record.status.attempts.last().filter(|it| it.end.is_none()).map(|it| it.number)
}

/// What to do with the trial now.
pub fn next(record: &TrialRecord, wanted: Wanted) -> Next {
    let units = granted_units(&record.spec);
    let has_result = result_at(record, units).is_some();
    if closed(record).is_some() {
        return Next::Done;
    }
    if live_attempt(record).is_some() {
        return Next::Running;
    }
    match wanted {
        Wanted::Stop if has_result => Next::Close { cause: CloseCause::Completed },
        Wanted::Stop => Next::Close { cause: CloseCause::Cancelled },
        Wanted::Pause => Next::Idle,
        Wanted::Run if has_result => Next::Idle,
        Wanted::Run => {
            Next::Start { attempt: next_attempt(record), resume_from: resume_from(record), units }
        }
    }
}

/// Records that an attempt begins. To be written before anything of the attempt exists. Does
/// nothing where the trial is closed or an attempt with this number, or a later one, was recorded.
pub fn begin_attempt(record: &mut TrialRecord, number: u32) {
    if closed(record).is_some() || number < next_attempt(record) {
        return;
    }
    record.status.phase = Phase::Running;
    let attempt = Attempt { number, ..Attempt::default() };
    record.status.attempts.push(attempt);
    let num_old = record.status.attempts.len().saturating_sub(ATTEMPTS_MAX);
    record.status.attempts.drain(..num_old);
    let num_told = record.status.attempts.len().saturating_sub(MESSAGES_MAX);
    record.status.attempts[..num_told].iter_mut().for_each(|it| it.message = None);
}

/// Records how the live attempt ended, and closes the trial where that is its end. Does nothing if
/// no attempt is alive.
///
/// | end | what follows |
/// |---|---|
/// | `Completed` with a result at the granted length | closed as `Completed` |
/// | `Completed` with a validation before it | closed as `StoppedEarly` |
/// | `Completed` with neither | closed as `Failed` |
/// | `Preempted` | runs again; counts for nothing |
/// | `InvalidHyperparameters` | closed |
/// | `UserError` | a restart; closed as `Failed` when there are more than `max_restarts` |
/// | `Infrastructure` | runs again; closed as `Failed` at the limit without a new checkpoint |
/// | `RunnerLost`, `NotStarted` | runs again; counts for nothing |
///
/// A program that exits as completed before the granted length has stopped itself, as early
/// stopping does. One that never validated has done nothing, and would do so again. Lost attempts
/// count from the one that wrote the newest checkpoint, whatever other ends are between them.
pub fn end_attempt(
    record: &mut TrialRecord,
    end: AttemptEnd,
    message: Option<String>,
    limits: &Limits,
) {
    let Some(attempt) = record.status.attempts.last_mut().filter(|it| it.end.is_none()) else {
        return;
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
                    let what =
                        message.as_deref().map_or(String::new(), |it| format!("; it said: {it}"));
                    let what = format!("{WITHOUT_RESULT}{what}");
                    close(record, CloseCause::Failed, Some(what));
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
                let what = format!("failed {} times", record.status.restarts);
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

/// Closes the trial. Does nothing if it is closed: the first cause stands.
pub fn close(record: &mut TrialRecord, cause: CloseCause, message: Option<String>) {
    if closed(record).is_some() {
        return;
    }
    record.status.facts.push(Fact::Closed(ClosedFact { cause }));
    record.status.phase = match cause {
        CloseCause::Completed | CloseCause::StoppedEarly => Phase::Completed,
        CloseCause::InvalidHyperparameters | CloseCause::Failed => Phase::Failed,
        CloseCause::Cancelled | CloseCause::Deleted => Phase::Cancelled,
    };
    record.status.message = message;
    budget::bound_message(&mut record.status.message);
}

/// What the trainer of an attempt is told now.
pub fn directive(record: &TrialRecord, attempt: u32, wanted: Wanted) -> Directive {
    if closed(record).is_some() || live_attempt(record) != Some(attempt) {
        return Directive::Fenced;
    }
    let units = granted_units(&record.spec);
    let has_result = result_at(record, units).is_some();
    match wanted {
        Wanted::Stop if has_result => Directive::Stop,
        Wanted::Stop | Wanted::Pause => Directive::Preempt,
        Wanted::Run if has_result => Directive::Wait,
        Wanted::Run => Directive::Continue { units },
    }
}

/// The attempt that wrote a checkpoint.
fn attempt_of(name: &str) -> Option<u32> {
    parse_checkpoint_name(name).map(|it| it.1)
}

fn next_attempt(record: &TrialRecord) -> u32 {
    record.status.attempts.last().map_or(0, |it| it.number.saturating_add(1))
}

/// Checkpoints that an attempt begun now starts from, newest first; empty to start anew.
pub fn resume_from(record: &TrialRecord) -> Vec<CheckpointRef> {
    let newest_first = record.status.checkpoints.iter().rev().take(RESUME_FROM_MAX);
    newest_first
        .map(|it| CheckpointRef {
            name: it.name.clone(),
            manifest_sha256: it.manifest_sha256.clone(),
        })
        .collect()
}

/// Attempts lost to what is under the program since the one that wrote the newest checkpoint.
fn infrastructure_attempts(record: &TrialRecord) -> u32 {
    let written_by = record.status.checkpoints.last().and_then(|it| attempt_of(&it.name));
    let since = record.status.attempts.iter().filter(|it| Some(it.number) > written_by);
    since.filter(|it| it.end == Some(AttemptEnd::Infrastructure)).count() as u32
}

fn with_cause(what: String, cause: Option<String>) -> String {
    match cause {
        Some(cause) => format!("{what}; the last: {cause}"),
        None => what,
    }
}

#[cfg(test)]
mod tests;
