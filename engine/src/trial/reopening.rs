//! Continuation of a trial after its end.
//!
//! The search decides that a trial is reopened, and writes the step into the trial's grants. The
//! runner then records the fact `Reopened`, before the next attempt and before any other fact. It
//! has the number of steps until then. So further steps are due, and each step takes effect once.

use stoker_api::decisions::StepRecord;
use stoker_api::experiment::Phase;
use stoker_api::trial::{DesiredTrialState, Fact, Grant, ReopenedFact};

use super::{TrialRecord, closed, next_attempt};

/// Returns whether a grant reopens its trial.
pub fn is_reopening(grant: &Grant) -> bool {
    let mut steps = grant.steps.iter().flatten();
    grant.fact.is_none() && steps.any(|step| matches!(step, StepRecord::Reopen(_)))
}

/// Returns whether the search has reopened the trial, and the fact is not recorded yet.
pub fn is_reopening_due(record: &TrialRecord) -> bool {
    num_decided(record) > latest(record).map_or(0, |reopened| reopened.number)
}

/// Returns how often the search has reopened the trial.
fn num_decided(record: &TrialRecord) -> u32 {
    record.spec.grants.iter().filter(|grant| is_reopening(grant)).count() as u32
}

fn latest(record: &TrialRecord) -> Option<&ReopenedFact> {
    record.status.facts.iter().rev().find_map(|fact| match fact {
        Fact::Reopened(reopened) => Some(reopened),
        Fact::Result(_) | Fact::Closed(_) => None,
    })
}

/// Returns whether the trial has not ended, or is about to continue.
pub fn is_open(record: &TrialRecord) -> bool {
    let is_wanted = match record.spec.desired_state {
        DesiredTrialState::Run | DesiredTrialState::Pause => !is_stopped_again(record),
        DesiredTrialState::Stop => false,
        DesiredTrialState::Kill => is_killed_since_reopening(record),
    };
    closed(record).is_none() || (is_wanted && is_reopening_due(record))
}

/// Returns whether the trial was killed, and the search has not stopped it since it reopened the
/// trial. The search waits for the end of the trial, so a trial whose reopening is due is reopened,
/// and ends again.
pub(super) fn is_killed_since_reopening(record: &TrialRecord) -> bool {
    record.spec.desired_state == DesiredTrialState::Kill && !is_stopped_again(record)
}

/// Returns whether the search has stopped the trial since it last reopened it. If the trial ended
/// before, the reopening has no effect. For example, a result that arrived while a limit stopped
/// the trial is taken in after the limit was raised, and completes the trial.
fn is_stopped_again(record: &TrialRecord) -> bool {
    let index = record.spec.index;
    let (mut is_paused, mut is_stopped) = (false, false);
    for grant in &record.spec.grants {
        for step in grant.steps.iter().flatten() {
            match step {
                StepRecord::Reopen(_) => (is_paused, is_stopped) = (false, false),
                StepRecord::Continue(step) if step.trial == index => is_paused = false,
                StepRecord::Pause(step) if step.trial == index => is_paused = true,
                StepRecord::Stop(step) if step.trial == index => is_stopped = true,
                StepRecord::StopPaused(step) if step.units == grant.units => {
                    is_stopped |= is_paused && !step.except.contains(&index);
                }
                _ => {}
            }
        }
    }
    is_stopped
}

/// Returns how often the trial was reopened.
pub fn num_reopenings(record: &TrialRecord) -> usize {
    record.status.facts.iter().filter(|fact| matches!(fact, Fact::Reopened(_))).count()
}

/// Records that the trial continues. Failures of earlier attempts no longer count. Does nothing if
/// no reopening is due.
pub fn reopen(record: &mut TrialRecord) {
    if !is_reopening_due(record) {
        return;
    }
    let (number, attempt) = (num_decided(record), next_attempt(record));
    record.status.facts.push(Fact::Reopened(ReopenedFact { number, attempt, at: None }));
    record.status.restarts = 0;
    record.status.phase = Phase::Pending;
    record.status.message = None;
    record.status.ended_at = None;
}

/// Returns the number of the first attempt that counts for restarts and waits: the first one since
/// the trial was last reopened.
pub(crate) fn first_counted_attempt(record: &TrialRecord) -> u32 {
    latest(record).map_or(0, |reopened| reopened.attempt)
}
