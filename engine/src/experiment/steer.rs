//! Desired states of an experiment's trials, and its conditions.

use std::borrow::Borrow;
use std::cmp::Reverse;
use std::collections::BTreeMap;

use stoker_api::condition::{self, Condition, ConditionStatus};
use stoker_api::decisions::{LogEntry, LogEvent};
use stoker_api::experiment::{DesiredState, ExperimentStatus, Phase};
use stoker_api::time::Timestamp;
use stoker_api::trial::{DesiredTrialState, TrialStatus};

use super::{Ledger, TrialRecord};
use crate::search::book::TrialState;
use crate::trial::{closed, granted_units, is_open, last_result_at, live_attempt, result_at};

/// Reason of an experiment of which no trial says why it is pending.
const PENDING: &str = "Pending";
/// Reasons of trials that wait for room.
const WAITING_FOR_ROOM: [&str; 2] = ["WaitingForAdmission", "Unschedulable"];

/// Desired state from the user, and the current time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// Desired state of the experiment.
    pub state: DesiredState,
    /// Seconds for which a trial with nothing to train keeps its GPUs while no other needs them.
    pub release_seconds: u32,
    /// Current time.
    pub now: Timestamp,
}

/// Desired states of trials.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DesiredStates {
    /// Trials whose desired state changes, by index.
    pub wanted: Vec<(u32, DesiredTrialState)>,
    /// Number of new trials that may run; the others are created with the desired state `pause`.
    pub num_free: u32,
    /// Seconds until the GPUs of a trial are released.
    pub wake_seconds: Option<u64>,
}

/// Returns the desired states of trials.
///
/// The desired state only ever becomes graver, except that a pause may end. A trial that the search
/// has reopened counts as open, even if its runner has not recorded that yet. At most as many
/// trials as the search has places run at a time. Those that have trained resume before others
/// start, in the order in which the search continued or created them. A trial with nothing to train
/// releases its GPUs at once if another one waits for room, otherwise after `release_seconds`.
pub fn desired_states<R: Borrow<TrialRecord>>(
    ledger: &Ledger,
    trials: &[R],
    request: Request,
) -> DesiredStates {
    let open: Vec<&TrialRecord> =
        trials.iter().map(Borrow::borrow).filter(|trial| is_open(trial)).collect();
    let state_of = |trial: &TrialRecord| ledger.state(trial.spec.index);
    let is_active =
        |trial: &TrialRecord| state_of(trial).is_none_or(|state| state == TrialState::Active);
    let is_live = |trial: &TrialRecord| live_attempt(trial).is_some();
    let places = ledger.places().unwrap_or(u32::MAX);
    let mut num_free =
        places.saturating_sub(open.iter().filter(|trial| is_live(trial)).count() as u32);
    let mut waiting: Vec<&TrialRecord> =
        open.iter().filter(|trial| is_active(trial) && !is_live(trial)).copied().collect();
    // A trial that may already start keeps its place.
    waiting
        .sort_by_key(|trial| (!trial.spec.desired_state.is_run(), start_position(ledger, trial)));
    let num_starting = waiting.len().min(num_free as usize);
    num_free -= num_starting as u32;
    let starting: Vec<u32> = waiting[..num_starting].iter().map(|trial| trial.spec.index).collect();
    let is_room_wanted = waiting.len() > num_starting
        || ledger.missing().len() > num_free as usize
        || open.iter().any(|trial| {
            let reason = trial.status.reason.as_deref().unwrap_or_default();
            is_active(trial) && WAITING_FOR_ROOM.contains(&reason)
        });
    if request.state != DesiredState::Active {
        num_free = 0;
    }
    let mut desired = DesiredStates { num_free, ..DesiredStates::default() };
    for trial in open {
        let index = trial.spec.index;
        let before = trial.spec.desired_state;
        let target = match requested(request.state, state_of(trial)) {
            Some(requested) => requested,
            None if is_active(trial) => match is_live(trial) || starting.contains(&index) {
                true => DesiredTrialState::Run,
                false => DesiredTrialState::Pause,
            },
            None if !is_live(trial) => DesiredTrialState::Pause,
            None => {
                let until = release_at(trial, request, is_room_wanted);
                match until.seconds_since(request.now) {
                    0 => DesiredTrialState::Pause,
                    seconds => {
                        let earliest = desired.wake_seconds.unwrap_or(seconds).min(seconds);
                        desired.wake_seconds = Some(earliest);
                        before
                    }
                }
            }
        };
        let is_resumed = (before, target) == (DesiredTrialState::Pause, DesiredTrialState::Run);
        if target > before || is_resumed {
            desired.wanted.push((index, target));
        }
    }
    desired.wanted.sort_unstable_by_key(|(index, _)| *index);
    desired
}

/// Returns the desired state of an open trial that follows from the user's request, or from the
/// search having stopped the trial; `None` if the trial may run when the search lets it.
pub fn requested(state: DesiredState, of_search: Option<TrialState>) -> Option<DesiredTrialState> {
    match (state, of_search) {
        (DesiredState::Killed, _) => Some(DesiredTrialState::Kill),
        (DesiredState::Cancelled, _) | (_, Some(TrialState::Stopped)) => {
            Some(DesiredTrialState::Stop)
        }
        (DesiredState::Paused, _) => Some(DesiredTrialState::Pause),
        (DesiredState::Active, _) => None,
    }
}

/// Returns the position of a trial among those that wait for room: trials that have trained before
/// others, then in the order in which the search continued or created them.
pub fn start_position(ledger: &Ledger, trial: &TrialRecord) -> (Reverse<bool>, u64, u32) {
    let index = trial.spec.index;
    let has_trained = !trial.status.checkpoints.is_empty() || !trial.status.facts.is_empty();
    (Reverse(has_trained), ledger.granted_in(index), index)
}

/// Returns when a trial with nothing to train releases its GPUs.
fn release_at(trial: &TrialRecord, request: Request, is_room_wanted: bool) -> Timestamp {
    match is_room_wanted {
        true => request.now,
        false => last_result_at(trial).plus(request.release_seconds.into()),
    }
}

/// Completes the phase of an experiment: whether it is paused, and why it is pending.
pub fn set_phase<R: Borrow<TrialRecord>>(
    status: &mut ExperimentStatus,
    trials: &[R],
    state: DesiredState,
) {
    let records = || trials.iter().map(Borrow::borrow);
    let is_live = records().any(|trial| live_attempt(trial).is_some());
    if state == DesiredState::Paused && !status.phase.is_terminal() && !is_live {
        status.phase = Phase::Paused;
    }
    if status.phase == Phase::Pending {
        let (reason, message) = cause(records());
        (status.reason, status.message) = (Some(reason), message);
    }
}

/// Returns the open trials to kill, if the user wants the experiment killed. A kill depends on no
/// decision of the search.
pub fn kills<R: Borrow<TrialRecord>>(
    trials: &[R],
    state: DesiredState,
) -> Vec<(u32, DesiredTrialState)> {
    match state {
        DesiredState::Killed => {
            let request = Request { state, release_seconds: 0, now: Timestamp::default() };
            without_search(trials, request).wanted
        }
        DesiredState::Active | DesiredState::Paused | DesiredState::Cancelled => vec![],
    }
}

/// Returns the desired states of the open trials of an experiment that has ended: they were created
/// meanwhile. A killed trial stays ended, and an edit may continue the experiment, so they are only
/// stopped unless the user wants the experiment killed.
pub fn stops<R: Borrow<TrialRecord>>(
    trials: &[R],
    state: DesiredState,
) -> Vec<(u32, DesiredTrialState)> {
    let target = match state {
        DesiredState::Killed => DesiredTrialState::Kill,
        DesiredState::Active | DesiredState::Paused | DesiredState::Cancelled => {
            DesiredTrialState::Stop
        }
    };
    let is_meant =
        |trial: &&TrialRecord| closed(trial).is_none() && trial.spec.desired_state < target;
    let meant = trials.iter().map(Borrow::<TrialRecord>::borrow).filter(is_meant);
    meant.map(|trial| (trial.spec.index, target)).collect()
}

/// Returns the desired states of the open trials of an experiment whose search cannot decide, for
/// example because it cannot be rebuilt. The user can still pause, cancel and kill them. A trial
/// with a result at its granted length releases its GPUs after `release_seconds`, and resumes once
/// the search has continued it. No trial is started.
pub fn without_search<R: Borrow<TrialRecord>>(trials: &[R], request: Request) -> DesiredStates {
    let mut desired = DesiredStates::default();
    let open = trials.iter().map(Borrow::borrow).filter(|trial: &&TrialRecord| is_open(trial));
    for trial in open {
        let target = match requested(request.state, None) {
            Some(requested) => requested,
            None if !is_idle(trial) => continue,
            None => match release_at(trial, request, false).seconds_since(request.now) {
                0 => DesiredTrialState::Pause,
                seconds => {
                    let earliest = desired.wake_seconds.unwrap_or(seconds).min(seconds);
                    desired.wake_seconds = Some(earliest);
                    continue;
                }
            },
        };
        if trial.spec.desired_state < target {
            desired.wanted.push((trial.spec.index, target));
        }
    }
    desired
}

/// Returns whether a trial that may run holds GPUs, but has nothing to train.
fn is_idle(trial: &TrialRecord) -> bool {
    trial.spec.desired_state.is_run()
        && live_attempt(trial).is_some()
        && result_at(trial, granted_units(&trial.spec)).is_some()
}

/// Why no trial runs: the reason of most trials, and the message of the first of these.
fn cause<'a>(trials: impl Iterator<Item = &'a TrialRecord>) -> (String, Option<String>) {
    let mut by_reason: BTreeMap<&str, (usize, Reverse<u32>, Option<&String>)> = BTreeMap::new();
    let mut num_pending = 0;
    for trial in trials.filter(|trial| trial.status.phase == Phase::Pending) {
        let (TrialStatus { reason, message, .. }, index) = (&trial.status, trial.spec.index);
        let reason = reason.as_deref().unwrap_or(PENDING);
        let entry = by_reason.entry(reason).or_insert((0, Reverse(index), message.as_ref()));
        entry.0 += 1;
        if index < entry.1.0 {
            (entry.1, entry.2) = (Reverse(index), message.as_ref());
        }
        num_pending += 1;
    }
    // The most frequent reason; of several, the one whose first trial is the oldest.
    let most = by_reason.into_iter().max_by_key(|(_, (num, index, _))| (*num, *index));
    let Some((reason, (num, Reverse(index), Some(message)))) = most else {
        return (most.map_or(PENDING, |(reason, _)| reason).to_owned(), None);
    };
    let text = format!("{num} of {num_pending} pending trials: trial {index}: {message}");
    (reason.to_owned(), Some(text))
}

/// Sets the conditions of an experiment that can run, and when it ended.
pub fn conditions(
    before: &ExperimentStatus,
    mut status: ExperimentStatus,
    generation: i64,
    now: Timestamp,
) -> ExperimentStatus {
    let phase = status.phase;
    status.conditions.clone_from(&before.conditions);
    status.log.clone_from(&before.log);
    // An edit may continue an experiment that has ended.
    status.cleaned_up = before.cleaned_up && phase.is_terminal();
    // Reopened trials have new checkpoints, so the next clean-up begins with the first trial.
    status.trials_cleaned = if phase.is_terminal() { before.trials_cleaned } else { 0 };
    status.ended_at = before.ended_at.filter(|_| phase.is_terminal());
    status.ended_at = status.ended_at.or(phase.is_terminal().then_some(now));
    status.observed_generation = generation;
    let message = status.message.clone().unwrap_or_default();
    let is_limited = is_limited(&status.log);
    let mut put = |type_: &str, holds: bool, reason: &str, message: &str| {
        let new = Condition {
            type_: type_.to_owned(),
            status: ConditionStatus::from(holds),
            observed_generation: generation,
            last_transition_time: now,
            reason: reason.to_owned(),
            message: message.to_owned(),
        };
        condition::set(&mut status.conditions, new);
    };
    put("Valid", true, "Accepted", "");
    let pending = status.reason.clone().unwrap_or_else(|| PENDING.to_owned());
    let (runs, reason) = match phase {
        Phase::Pending => (false, pending.as_str()),
        Phase::Running => (true, "TrialsRun"),
        Phase::Paused => (false, "Paused"),
        Phase::Completed | Phase::Failed | Phase::Cancelled => (false, "Ended"),
    };
    put("Running", runs, reason, if phase == Phase::Pending { &message } else { "" });
    let outcomes = [
        ("Completed", Phase::Completed),
        ("Failed", Phase::Failed),
        ("Cancelled", Phase::Cancelled),
    ];
    if phase.is_terminal() {
        let is_limited = is_limited && phase == Phase::Completed;
        let reason = if is_limited { "LimitReached".to_owned() } else { format!("{phase:?}") };
        for (type_, of) in outcomes {
            put(type_, phase == of, &reason, if phase == of { &message } else { "" });
        }
    } else {
        for (type_, _) in outcomes {
            if condition::find(&before.conditions, type_).is_some() {
                put(type_, false, "Continued", "");
            }
        }
    }
    status
}

/// Returns whether a limit has ended the search, and no edit has continued it since.
fn is_limited(log: &[LogEntry]) -> bool {
    let ends = |entry: &LogEntry| match &entry.event {
        LogEvent::LimitReached(_) => Some(true),
        LogEvent::Edited(event) if event.is_limited => None,
        LogEvent::Began(_) | LogEvent::Edited(_) => Some(false),
        LogEvent::Deleted(_) | LogEvent::Answered(_) | LogEvent::Reopened(_) => None,
    };
    log.iter().rev().find_map(ends).unwrap_or(false)
}

#[cfg(test)]
mod tests;
