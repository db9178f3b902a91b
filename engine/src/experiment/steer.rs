//! What a user's wish means for an experiment's trials, and what people are told.

use std::borrow::Borrow;
use std::cmp::Reverse;
use std::collections::BTreeMap;

use stoker_api::condition::{self, Condition, ConditionStatus};
use stoker_api::experiment::{DesiredState, ExperimentStatus, Phase};
use stoker_api::time::Timestamp;
use stoker_api::trial::{DesiredTrialState, TrialStatus};

use super::{ExperimentPlan, TrialRecord, plan};
use crate::search::SearchConfig;
use crate::trial::{closed, live_attempt};

/// Reason of an experiment of which no trial says why it is pending.
const PENDING: &str = "Pending";

/// A plan that follows a user's wish.
#[derive(Clone, Debug, PartialEq)]
pub struct Steering {
    /// What is to be done; without `stop`, which is in `wanted`.
    pub plan: ExperimentPlan,
    /// Trials of which something else is wanted than before, by index.
    pub wanted: Vec<(u32, DesiredTrialState)>,
}

/// Plans an experiment whose user wants `state` of it: see [`plan`].
///
/// What is wanted of a trial only ever becomes graver, but that a pause may end.
pub fn steer<R: Borrow<TrialRecord>>(
    config: &SearchConfig,
    trials: &[R],
    trials_created: u32,
    state: DesiredState,
) -> Steering {
    let is_over = matches!(state, DesiredState::Cancelled | DesiredState::Killed);
    let mut plan = plan(config, trials, trials_created, is_over);
    let records = || trials.iter().map(Borrow::borrow);
    let live = || records().filter(|trial| live_attempt(trial).is_some());
    let num_running = live().filter(|trial| trial.status.phase == Phase::Running).count() as u32;
    if state == DesiredState::Paused {
        plan.status.trials_created -= plan.create.len() as u32;
        plan.create.clear();
        if !plan.status.phase.is_terminal() && live().next().is_none() {
            plan.status.phase = Phase::Paused;
        }
    }
    if plan.status.phase == Phase::Pending {
        let (reason, message) = cause(records());
        (plan.status.reason, plan.status.message) = (Some(reason), message);
    }
    plan.status.trials_running = num_running;
    plan.status.progress_percent = (plan.progress.clamp(0.0, 1.0) * 100.0) as u32;
    let wanted = |record: &TrialRecord| {
        let stops = plan.stop.contains(&record.spec.index);
        let target = match state {
            DesiredState::Killed => DesiredTrialState::Kill,
            _ if stops => DesiredTrialState::Stop,
            DesiredState::Paused => DesiredTrialState::Pause,
            DesiredState::Active | DesiredState::Cancelled => DesiredTrialState::Run,
        };
        let now = record.spec.desired_state;
        let changes =
            target > now || (now, target) == (DesiredTrialState::Pause, DesiredTrialState::Run);
        changes.then_some((record.spec.index, target))
    };
    let open = records().filter(|it| closed(it).is_none());
    let mut wanted: Vec<_> = open.filter_map(wanted).collect();
    wanted.sort_unstable_by_key(|it| it.0);
    Steering { plan, wanted }
}

/// Returns the open trials to kill, if the user wants the experiment killed. A kill depends on no decision of the
/// search.
pub fn kills<R: Borrow<TrialRecord>>(
    trials: &[R],
    state: DesiredState,
) -> Vec<(u32, DesiredTrialState)> {
    let records = trials.iter().map(Borrow::borrow).filter(|_| state == DesiredState::Killed);
    let open = records.filter(|record: &&TrialRecord| {
        closed(record).is_none() && record.spec.desired_state != DesiredTrialState::Kill
    });
    open.map(|record| (record.spec.index, DesiredTrialState::Kill)).collect()
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
    status.cleaned_up = before.cleaned_up;
    status.trials_cleaned = before.trials_cleaned;
    status.ended_at = before.ended_at.or(phase.is_terminal().then_some(now));
    status.observed_generation = generation;
    let message = status.message.clone().unwrap_or_default();
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
    if phase.is_terminal() {
        for (type_, of) in [
            ("Completed", Phase::Completed),
            ("Failed", Phase::Failed),
            ("Cancelled", Phase::Cancelled),
        ] {
            put(type_, phase == of, &format!("{phase:?}"), if phase == of { &message } else { "" });
        }
    }
    status
}

#[cfg(test)]
mod tests {
    use stoker_api::trial::{Attempt, CloseCause};
    use stoker_api::validate::Method;

    use super::*;
    use crate::fixture::{config, plain_record};
    use crate::trial::close;

    const NONE: &[TrialRecord] = &[];

    fn random_config(max_trials: u32, max_concurrent: u32) -> SearchConfig {
        config(Method::Random { max_trials, max_concurrent })
    }

    /// Trials are `run`, `pause`, `stop` or `kill` as wanted before, with `*` where an attempt is
    /// alive and `.` where they are closed.
    #[track_caller]
    fn check(trials: &str, state: DesiredState, wanted: &str, phase: Phase) {
        let record = |(index, text): (u32, &str)| {
            let mut record = plain_record(index);
            record.spec.desired_state = match text.trim_end_matches(['*', '.']) {
                "run" => DesiredTrialState::Run,
                "pause" => DesiredTrialState::Pause,
                "stop" => DesiredTrialState::Stop,
                other => panic!("{other}"),
            };
            if text.ends_with('*') {
                record.status.phase = Phase::Running;
                record.status.attempts.push(Attempt::default());
            }
            if text.ends_with('.') {
                close(&mut record, CloseCause::Cancelled, None);
            }
            record
        };
        let records: Vec<_> = (0..).zip(trials.split_whitespace()).map(record).collect();
        let num = records.len() as u32;
        let steering = steer(&random_config(num, num), &records, num, state);
        let found: Vec<_> =
            steering.wanted.iter().map(|(trial, it)| format!("{trial}:{it:?}")).collect();
        let found = (found.join(" "), steering.plan.status.phase);
        assert_eq!(found, (wanted.to_owned(), phase), "{trials} {state:?}");
    }

    #[test]
    fn a_wish_reaches_every_open_trial_and_only_grows_graver() {
        check("run* run", DesiredState::Active, "", Phase::Running);
        check("run* run", DesiredState::Paused, "0:Pause 1:Pause", Phase::Running);
        check("pause pause", DesiredState::Paused, "", Phase::Paused);
        check("pause pause* stop*", DesiredState::Active, "0:Run 1:Run", Phase::Running);
        check("run* pause run.", DesiredState::Cancelled, "0:Stop 1:Stop", Phase::Running);
        check("stop* run", DesiredState::Killed, "0:Kill 1:Kill", Phase::Running);
        check("stop. run.", DesiredState::Cancelled, "", Phase::Cancelled);
    }

    /// Trials are `running`, `ended`, or the reason why they are pending.
    #[track_caller]
    fn check_phase(trials: &str, expected: &str) {
        let record = |(index, text): (u32, &str)| {
            let mut record = plain_record(index);
            match text {
                "running" => {
                    record.status.phase = Phase::Running;
                    record.status.attempts.push(Attempt::default());
                }
                "ended" => close(&mut record, CloseCause::Completed, None),
                reason => {
                    // Gated pods are of an attempt that is alive.
                    record.status.attempts.push(Attempt::default());
                    record.status.reason = Some(reason.to_owned());
                    record.status.message = Some(format!("message {index}"));
                }
            }
            record
        };
        let records: Vec<_> = (0..).zip(trials.split_whitespace()).map(record).collect();
        let num = records.len() as u32 + 1;
        let plan = steer(&random_config(num, num), &records, num, DesiredState::Active).plan;
        let status = conditions(&ExperimentStatus::default(), plan.status, 1, Timestamp(5));
        let running = condition::find(&status.conditions, "Running").unwrap();
        let message = status.message.clone().unwrap_or_default();
        let found = format!("{:?} {} {message}", status.phase, status.trials_running);
        assert_eq!(found.trim_end(), expected, "{trials}");
        let reason = status.reason.as_deref().unwrap_or("TrialsRun");
        assert_eq!((running.reason.as_str(), running.message.as_str()), (reason, &*message));
        let is_running = running.status == ConditionStatus::True;
        assert_eq!(is_running, status.phase == Phase::Running, "{trials}");
    }

    #[test]
    fn an_experiment_runs_while_a_trial_runs() {
        check_phase("running Gated", "Running 1");
        check_phase("Gated", "Pending 0 1 of 1 pending trials: trial 0: message 0");
        check_phase("ended Gated", "Pending 0 1 of 1 pending trials: trial 1: message 1");
        check_phase("Quota Gated Gated", "Pending 0 2 of 3 pending trials: trial 1: message 1");
        check_phase("Quota Gated", "Pending 0 1 of 2 pending trials: trial 0: message 0");
    }

    #[test]
    fn a_paused_experiment_makes_no_trials() {
        let config = random_config(3, 2);
        let steering = steer(&config, NONE, 0, DesiredState::Paused);
        assert!(steering.plan.create.is_empty());
        let status = &steering.plan.status;
        assert_eq!((status.trials_created, status.phase), (0, Phase::Paused));
        let steering = steer(&config, NONE, 0, DesiredState::Active);
        assert_eq!((steering.plan.create.len(), steering.plan.status.trials_created), (2, 2));
    }

    #[test]
    fn an_end_is_told_once_and_stays() {
        let before = ExperimentStatus::default();
        let ended = ExperimentStatus { phase: Phase::Failed, ..ExperimentStatus::default() };
        let first = conditions(&before, ended.clone(), 1, Timestamp(5));
        let again = conditions(&first, ended, 1, Timestamp(9));
        assert_eq!(first, again);
        let holds = |type_: &str| {
            condition::find(&first.conditions, type_).map(|it| it.status == ConditionStatus::True)
        };
        assert_eq!(holds("Failed"), Some(true));
        assert_eq!(holds("Completed"), Some(false));
        assert_eq!(first.ended_at, Some(Timestamp(5)));
    }
}
