//! Words, colors and icons of states, and the bar of trials by state.

use stoker_api::experiment::{DesiredState, Experiment, Phase};
use stoker_api::trial::AttemptEnd;
use stoker_engine::experiment::explain::{DisplayState, Kind, State};
use stoker_engine::trial::{TrialRecord, live_attempt};

use crate::store::Run;
use crate::views::{Badge, Bar, Segment};

const fn badge(state: DisplayState, class: &'static str) -> Badge {
    Badge { word: state.as_str(), class }
}

pub(crate) const COMPLETED: Badge = badge(DisplayState::Completed, "completed");
pub(crate) const RUNNING: Badge = badge(DisplayState::Running, "running");
pub(crate) const WAITING: Badge = badge(DisplayState::Waiting, "waiting");
pub(crate) const QUEUED: Badge = badge(DisplayState::Queued, "queued");
pub(crate) const PENDING: Badge = badge(DisplayState::Pending, "pending");
pub(crate) const PAUSED: Badge = badge(DisplayState::Paused, "paused");
pub(crate) const STOPPED: Badge = badge(DisplayState::Stopped, "stopped");
pub(crate) const STOPPED_EARLY: Badge = badge(DisplayState::StoppedEarly, "stopped-early");
pub(crate) const FAILED: Badge = badge(DisplayState::Failed, "failed");
pub(crate) const INVALID: Badge = badge(DisplayState::Invalid, "invalid");
pub(crate) const CANCELLED: Badge = badge(DisplayState::Cancelled, "cancelled");
pub(crate) const DELETED: Badge = badge(DisplayState::Deleted, "deleted");

/// Returns all states of trials, in the order of the bar.
pub(crate) fn all() -> [Badge; 12] {
    DisplayState::ALL.map(of_display)
}

fn of_display(state: DisplayState) -> Badge {
    match state {
        DisplayState::Completed => COMPLETED,
        DisplayState::Running => RUNNING,
        DisplayState::Waiting => WAITING,
        DisplayState::Queued => QUEUED,
        DisplayState::Pending => PENDING,
        DisplayState::Paused => PAUSED,
        DisplayState::Stopped => STOPPED,
        DisplayState::StoppedEarly => STOPPED_EARLY,
        DisplayState::Failed => FAILED,
        DisplayState::Invalid => INVALID,
        DisplayState::Cancelled => CANCELLED,
        DisplayState::Deleted => DELETED,
    }
}

/// Returns the state of a trial.
pub(crate) fn of_trial(trial: &TrialRecord, state: Option<State>, is_running: bool) -> Badge {
    of_display(DisplayState::of(trial, state, is_running))
}

/// Returns the phase of an experiment. Without a runner, an open experiment is paused or stopped. A
/// local record contains the phase of its last decision: since then, a trial may have started.
pub(crate) fn of_run(run: &Run) -> Badge {
    let phase = run.phase();
    if phase == Phase::Pending && num_training(run) > 0 {
        return RUNNING;
    }
    match phase.is_terminal() || run.is_running {
        true => of_phase(phase),
        false => without_runner(run.experiment.spec.state),
    }
}

/// Returns the phase of an open experiment or job without a runner. If the user has paused it, the
/// next runner waits.
pub(crate) fn without_runner(state: DesiredState) -> Badge {
    if state == DesiredState::Paused { PAUSED } else { STOPPED }
}

/// Returns the number of trials with an attempt that runs.
pub(crate) fn num_training(run: &Run) -> u64 {
    match run.is_live() {
        true => run.trials.values().filter(|trial| live_attempt(trial).is_some()).count() as u64,
        false => 0,
    }
}

/// Returns the phase of an experiment or a job.
pub(crate) fn of_phase(phase: Phase) -> Badge {
    match phase {
        Phase::Pending => PENDING,
        Phase::Running => RUNNING,
        Phase::Paused => PAUSED,
        Phase::Completed => COMPLETED,
        Phase::Failed => FAILED,
        Phase::Cancelled => CANCELLED,
    }
}

/// Returns the state that follows from a decision, for its icon.
pub(crate) fn of_decision(kind: Kind) -> Badge {
    match kind {
        Kind::Created | Kind::Reopened => QUEUED,
        Kind::Promoted | Kind::CountedAsPromoted => RUNNING,
        Kind::Paused => PAUSED,
        Kind::Waits => WAITING,
        Kind::Stopped => STOPPED,
        Kind::Completed => COMPLETED,
        Kind::EndedEarly => STOPPED_EARLY,
        Kind::Failed => FAILED,
        Kind::Invalid => INVALID,
        Kind::Cancelled => CANCELLED,
        Kind::Deleted => DELETED,
    }
}

/// Returns the end of an attempt: icon and words. A running attempt has no end.
pub(crate) fn of_attempt(end: Option<AttemptEnd>) -> (Badge, &'static str) {
    match end {
        None => (RUNNING, "Running"),
        Some(AttemptEnd::Completed) => (COMPLETED, "Completed"),
        Some(AttemptEnd::Preempted) => (PAUSED, "Preempted"),
        Some(AttemptEnd::InvalidHyperparameters) => (INVALID, "Invalid"),
        Some(AttemptEnd::UserError) => (FAILED, "Program error"),
        Some(AttemptEnd::Infrastructure) => (FAILED, "Infrastructure"),
        Some(AttemptEnd::RunnerLost) => (CANCELLED, "Runner ended"),
        Some(AttemptEnd::NotStarted) => (PENDING, "Not started"),
    }
}

/// Returns the number of trials that a search creates in total, if it is known.
pub(crate) fn trials_max(experiment: &Experiment) -> Option<u32> {
    let searcher = serde_json::to_value(&experiment.spec.searcher).ok()?;
    let method = *experiment.spec.searcher.methods_set().first()?;
    match method {
        "single" => Some(1),
        method => searcher[method]["maxTrials"].as_u64().and_then(|num| u32::try_from(num).ok()),
    }
}

/// Returns the bar of trials by state. Trials that are not created yet come last.
pub(crate) fn bar(states: impl IntoIterator<Item = Badge>, total: Option<u32>) -> Bar {
    let states: Vec<Badge> = states.into_iter().collect();
    let num = |badge: &Badge| states.iter().filter(|state| *state == badge).count() as u32;
    let created = states.len() as u32;
    let mut parts: Vec<(&'static str, String, u32)> =
        all().iter().map(|badge| (badge.class, badge.word.to_lowercase(), num(badge))).collect();
    let missing = total.unwrap_or(created).saturating_sub(created);
    parts.push(("not-created", "not created".to_owned(), missing));
    parts.retain(|(.., count)| *count > 0);
    let sum = f64::from(created + missing).max(1.0);
    let mut x = 0.0;
    let mut segments = Vec::new();
    for (class, word, count) in parts {
        let width = f64::from(count) / sum * 1000.0;
        let (left, wide) = (format!("{x:.1}"), format!("{width:.1}"));
        segments.push(Segment { class, word, count, x: left, width: wide });
        x += width;
    }
    let words: Vec<String> =
        segments.iter().map(|segment| format!("{} {}", segment.count, segment.word)).collect();
    Bar { label: format!("Trials: {}", words.join(", ")), segments }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::fixture;

    #[test]
    fn open_run_without_a_runner_is_paused_or_stopped() {
        let check = |state: &str, phase: &str, is_running: bool, expected: &str| {
            let mut run = fixture::run(json!({ "state": state }), json!({ "phase": phase }), &[]);
            run.is_running = is_running;
            assert_eq!(of_run(&run).word, expected, "{state} {phase} {is_running}");
        };
        check("paused", "Running", false, "Paused");
        check("paused", "Running", true, "Running");
        check("paused", "Completed", false, "Completed");
        check("active", "Running", false, "Stopped");
        check("active", "Paused", false, "Stopped");
    }

    #[test]
    fn bar_shows_every_state_once() {
        let bar = bar([RUNNING, COMPLETED, RUNNING], Some(4));
        let parts: Vec<(&str, u32, &str, &str)> = bar
            .segments
            .iter()
            .map(|part| (part.class, part.count, part.x.as_str(), part.width.as_str()))
            .collect();
        let expected = [
            ("completed", 1, "0.0", "250.0"),
            ("running", 2, "250.0", "500.0"),
            ("not-created", 1, "750.0", "250.0"),
        ];
        assert_eq!(parts, expected);
        assert_eq!(bar.label, "Trials: 1 completed, 2 running, 1 not created");
    }

    #[test]
    fn empty_bar_has_no_segments() {
        assert!(bar([], None).segments.is_empty());
    }
}
