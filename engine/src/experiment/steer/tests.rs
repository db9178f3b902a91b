//! Tests of desired states, phases and conditions.

use stoker_api::decisions::{EditedEvent, LimitReachedEvent, SearchLimit, SearchSettings};
use stoker_api::experiment::AsyncHalvingSearch;
use stoker_api::trial::{Attempt, CheckpointRecord, CloseCause, Fact, Grant, ResultFact};
use stoker_api::validate::Method;

use super::*;
use crate::experiment::Record;
use crate::fixture::{config, plain_record};
use crate::trial::close;

fn ledger(trials: &[TrialRecord], places: u32) -> Ledger {
    let mut ledger = advanced(trials, Method::Random { max_trials: 9, max_concurrent: places });
    let missing: Vec<u32> = ledger.missing().map(|spec| spec.index).collect();
    missing.into_iter().for_each(|index| ledger.created(index));
    ledger
}

/// Returns a search that has taken in all facts, and may have decided to create more trials.
fn advanced(trials: &[TrialRecord], method: Method) -> Ledger {
    let config = config(method);
    let by_index = trials.iter().map(|trial| (trial.spec.index, trial)).collect();
    let record = Record { log: &[], trials: &by_index, trials_created: trials.len() as u32 };
    let (mut ledger, _) = Ledger::rebuild(&config, record).unwrap();
    for fact in ledger.pending(trials) {
        ledger.advance(&fact);
    }
    ledger
}

/// Trials are `run`, `pause`, `stop` or `kill` as desired before, with `*` if an attempt is alive,
/// `9` if they have their result and `.` if they are closed.
fn records(trials: &str) -> Vec<TrialRecord> {
    let record = |(index, text): (u32, &str)| {
        let mut record = plain_record(index);
        record.spec.desired_state = match text.trim_end_matches(['*', '.', '9']) {
            "run" => DesiredTrialState::Run,
            "pause" => DesiredTrialState::Pause,
            "stop" => DesiredTrialState::Stop,
            other => panic!("{other}"),
        };
        if text.contains('*') {
            record.status.phase = Phase::Running;
            record.status.attempts.push(Attempt::default());
        }
        if text.contains('9') {
            let metric = "0.5".to_owned();
            record.status.facts.push(Fact::Result(ResultFact {
                units: 9,
                metric,
                values: vec![],
                checkpoint: None,
                at: None,
            }));
        }
        if text.contains('.') {
            close(&mut record, CloseCause::Cancelled, None);
        }
        record
    };
    (0..).zip(trials.split_whitespace()).map(record).collect()
}

#[track_caller]
fn check(trials: &str, places: u32, state: DesiredState, expected: &str) {
    let records = records(trials);
    let request = Request { state, release_seconds: 60, now: Timestamp(5) };
    let desired = desired_states(&ledger(&records, places), &records, request);
    let found = desired.wanted.iter().map(|(trial, wanted)| format!("{trial}:{wanted:?}"));
    let free = format!("free {}", desired.num_free.min(9));
    let found: Vec<_> = found.chain([free]).collect();
    assert_eq!(found.join(" "), expected, "{trials} {state:?}");
}

#[test]
fn user_request_reaches_every_open_trial() {
    check("run* run", 2, DesiredState::Active, "free 0");
    check("run* run", 2, DesiredState::Paused, "0:Pause 1:Pause free 0");
    check("pause pause", 2, DesiredState::Paused, "free 0");
    check("pause pause* stop*", 3, DesiredState::Active, "0:Run 1:Run free 0");
    check("run* pause run.", 2, DesiredState::Cancelled, "0:Stop 1:Stop free 0");
    check("stop* run", 2, DesiredState::Killed, "0:Kill 1:Kill free 0");
    check("stop. run.", 2, DesiredState::Cancelled, "free 0");
}

#[test]
fn trials_wait_for_free_places() {
    check("pause pause pause", 2, DesiredState::Active, "0:Run 1:Run free 0");
    check("pause* pause pause", 2, DesiredState::Active, "0:Run 1:Run free 0");
    check("pause run pause", 1, DesiredState::Active, "free 0");
    check("run. run", 4, DesiredState::Active, "free 3");
    check("run run", 0, DesiredState::Active, "free 9");
    // A stopped trial holds its place until its attempt has ended.
    check("run*9 pause", 1, DesiredState::Active, "0:Stop free 0");
    check("run9 pause", 1, DesiredState::Active, "0:Stop 1:Run free 0");
}

/// Checks a halving search of `max_trials` trials at 100. Trials are as in [`records`], with `=`
/// and the time of a result at the first rung, and `?` if their pods wait for room.
#[track_caller]
fn check_release(trials: &str, (max_trials, places): (u32, u32), expected: &str) {
    let words: Vec<&str> = trials.split_whitespace().collect();
    let states = words.iter().map(|word| word.split(['=', '?']).next().unwrap());
    let mut records = records(&states.collect::<Vec<_>>().join(" "));
    for (record, word) in records.iter_mut().zip(words) {
        record.spec.units = 3;
        if let Some((_, at)) = word.split_once('=') {
            record.status.facts.push(Fact::Result(ResultFact {
                units: 3,
                metric: "0.5".to_owned(),
                values: vec![],
                checkpoint: None,
                at: Some(Timestamp(at.trim_end_matches('?').parse().unwrap())),
            }));
        }
        if word.ends_with('?') {
            record.status.reason = Some("Unschedulable".to_owned());
        }
    }
    let search = AsyncHalvingSearch {
        max_trials,
        num_rungs: 2,
        divisor: 3,
        max_concurrent_trials: places,
        stop_once: false,
    };
    let ledger = advanced(&records, Method::AsyncHalving(search));
    let request = Request { state: DesiredState::Active, release_seconds: 60, now: Timestamp(100) };
    let desired = desired_states(&ledger, &records, request);
    let found = desired.wanted.iter().map(|(trial, wanted)| format!("{trial}:{wanted:?}"));
    let wake = desired.wake_seconds.map(|seconds| format!("wake {seconds}"));
    assert_eq!(found.chain(wake).collect::<Vec<_>>().join(" "), expected, "{trials}");
}

/// A paused trial keeps its GPUs for 60 s after its result, unless another trial needs them.
#[test]
fn idle_trial_releases_gpus_for_others_or_later() {
    check_release("run*=70 run*", (2, 2), "wake 30");
    check_release("run*=70 run*=50", (3, 3), "wake 10");
    check_release("run*=50 run*=70", (3, 3), "wake 10");
    check_release("run*=40 run*=70", (3, 3), "0:Pause wake 30");
    // A trial without an attempt holds nothing.
    check_release("run=70 run*", (2, 2), "0:Pause");
    // The other trial may start, waits for a place, or waits for room on a node.
    check_release("run*=70 pause", (2, 2), "1:Run wake 30");
    check_release("run*=70 pause", (2, 1), "0:Pause");
    check_release("run*=70 run*?", (2, 2), "0:Pause");
    check_release("run*=70? run*", (2, 2), "wake 30");
    // The second trial is decided, but not created yet.
    check_release("run*=70", (2, 2), "wake 30");
    check_release("run*=70", (2, 1), "0:Pause");
}

#[test]
fn trained_trials_start_before_new_ones() {
    let mut trials = records("pause pause pause9 pause");
    trials[1].status.checkpoints.push(CheckpointRecord {
        name: "000000000001-0".to_owned(),
        batches: 1,
        metric: None,
        manifest_sha256: String::new(),
        bytes: 1,
        refused: false,
    });
    let ledger = ledger(&trials, 4);
    let mut order = [3, 2, 1, 0];
    order.sort_by_key(|index| start_position(&ledger, &trials[*index]));
    assert_eq!(order, [1, 2, 0, 3]);
}

#[test]
fn kill_reaches_open_trials_without_the_search() {
    let trials = records("run* pause stop* run.");
    let all: Vec<_> = (0..3).map(|index| (index, DesiredTrialState::Kill)).collect();
    assert_eq!(kills(&trials, DesiredState::Killed), all);
    for state in [DesiredState::Active, DesiredState::Paused, DesiredState::Cancelled] {
        assert_eq!(kills(&trials, state), []);
    }
}

#[test]
fn trials_left_by_an_ended_experiment_can_continue() {
    let trials = records("run* pause stop* run.");
    let check = |state, expected: &[u32], wanted| {
        let expected: Vec<_> = expected.iter().map(|index| (*index, wanted)).collect();
        assert_eq!(stops(&trials, state), expected, "{state:?}");
    };
    check(DesiredState::Active, &[0, 1], DesiredTrialState::Stop);
    check(DesiredState::Cancelled, &[0, 1], DesiredTrialState::Stop);
    check(DesiredState::Killed, &[0, 1, 2], DesiredTrialState::Kill);
}

#[track_caller]
fn check_without_search(trials: &str, (state, now): (DesiredState, i64), expected: &str) {
    let request = Request { state, release_seconds: 60, now: Timestamp(now) };
    let desired = without_search(&records(trials), request);
    let found = desired.wanted.iter().map(|(trial, wanted)| format!("{trial}:{wanted:?}"));
    let wake = desired.wake_seconds.map(|seconds| format!("wake {seconds}"));
    assert_eq!(found.chain(wake).collect::<Vec<_>>().join(" "), expected, "{trials} {state:?}");
}

#[test]
fn user_ends_trials_of_unreadable_search() {
    let trials = "run* pause stop* run.";
    check_without_search(trials, (DesiredState::Active, 99), "");
    check_without_search(trials, (DesiredState::Paused, 99), "0:Pause");
    check_without_search(trials, (DesiredState::Cancelled, 99), "0:Stop 1:Stop");
    check_without_search(trials, (DesiredState::Killed, 99), "0:Kill 1:Kill 2:Kill");
}

/// The results are from the time 0, and a release is due 60 s later.
#[test]
fn idle_trials_of_unreadable_search_release_gpus() {
    let trials = "run*9 run* run9 pause*9 stop*9 run*9.";
    check_without_search(trials, (DesiredState::Active, 59), "wake 1");
    check_without_search(trials, (DesiredState::Active, 60), "0:Pause");
    let mut continued = records("run*9");
    continued[0].spec.grants.push(Grant { order: 1, fact: Some(0), units: 18, steps: None });
    let request = Request { state: DesiredState::Active, release_seconds: 0, now: Timestamp(9) };
    assert_eq!(without_search(&continued, request), DesiredStates::default());
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
                // Gated pods belong to a live attempt.
                record.status.attempts.push(Attempt::default());
                record.status.reason = Some(reason.to_owned());
                record.status.message = Some(format!("message {index}"));
            }
        }
        record
    };
    let records: Vec<_> = (0..).zip(trials.split_whitespace()).map(record).collect();
    let ledger = ledger(&records, 4);
    let summary = crate::experiment::Summary::new(ledger.config(), &records);
    let mut status = summary.status(&ledger, false, "mnist", |_| None);
    set_phase(&mut status, &records, DesiredState::Active);
    let status = conditions(&ExperimentStatus::default(), status, 1, Timestamp(5));
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
fn experiment_runs_while_a_trial_runs() {
    check_phase("running Gated", "Running 1");
    check_phase("Gated", "Pending 0 1 of 1 pending trials: trial 0: message 0");
    check_phase("ended Gated", "Pending 0 1 of 1 pending trials: trial 1: message 1");
    check_phase("Quota Gated Gated", "Pending 0 2 of 3 pending trials: trial 1: message 1");
    check_phase("Quota Gated", "Pending 0 1 of 2 pending trials: trial 0: message 0");
}

#[test]
fn first_pending_trial_gives_the_message() {
    let mut records = records("run run");
    for (number, record) in records.iter_mut().enumerate() {
        record.status.message = Some(format!("message {number}"));
    }
    records.reverse();
    let mut status = ExperimentStatus::default();
    set_phase(&mut status, &records, DesiredState::Active);
    let expected = "2 of 2 pending trials: trial 0: message 0";
    assert_eq!(status.message.as_deref(), Some(expected));
}

#[test]
fn experiment_is_paused_once_no_trial_runs() {
    let check = |trials: &str, before: Phase, state: DesiredState, expected: Phase| {
        let mut status = ExperimentStatus { phase: before, ..ExperimentStatus::default() };
        set_phase(&mut status, &records(trials), state);
        assert_eq!(status.phase, expected, "{trials} {before:?} {state:?}");
    };
    check("pause pause", Phase::Pending, DesiredState::Paused, Phase::Paused);
    check("pause pause*", Phase::Running, DesiredState::Paused, Phase::Running);
    check("pause pause", Phase::Pending, DesiredState::Active, Phase::Pending);
    check("run. run.", Phase::Completed, DesiredState::Paused, Phase::Completed);
}

#[test]
fn end_is_recorded_once_and_stays() {
    let before = ExperimentStatus::default();
    let message = Some("all failed".to_owned());
    let ended = ExperimentStatus { phase: Phase::Failed, message, ..ExperimentStatus::default() };
    let first = conditions(&before, ended.clone(), 1, Timestamp(5));
    let again = conditions(&first, ended, 1, Timestamp(9));
    assert_eq!(first, again);
    let holds = |type_: &str| {
        let found = condition::find(&first.conditions, type_).unwrap();
        (found.status == ConditionStatus::True, &*found.message)
    };
    assert_eq!(holds("Failed"), (true, "all failed"));
    assert_eq!(holds("Completed"), (false, ""));
    assert_eq!(first.ended_at, Some(Timestamp(5)));
}

#[test]
fn continued_experiment_has_not_ended() {
    let status = |phase| ExperimentStatus { phase, ..ExperimentStatus::default() };
    let reached = LimitReachedEvent { limit: SearchLimit::Seconds, maximum: 1, spent: 2 };
    let entry = |order, event| LogEntry { order, at: Timestamp(1), event, steps: vec![] };
    let mut before = status(Phase::Running);
    before.log.push(entry(1, LogEvent::LimitReached(reached)));
    let mut ended = conditions(&before, status(Phase::Completed), 1, Timestamp(5));
    let completed = |status: &ExperimentStatus| {
        let found = condition::find(&status.conditions, "Completed").unwrap();
        (found.status == ConditionStatus::True, found.reason.clone())
    };
    assert_eq!(completed(&ended), (true, "LimitReached".to_owned()));
    let edited = |is_limited| {
        let settings = SearchSettings::default();
        LogEvent::Edited(EditedEvent { settings, is_limited, bracket_trials: vec![] })
    };
    // An edit that leaves the limit reached changes nothing.
    ended.log.push(entry(2, edited(true)));
    ended = conditions(&ended, status(Phase::Completed), 1, Timestamp(5));
    assert_eq!(completed(&ended), (true, "LimitReached".to_owned()));
    ended.log.push(entry(3, edited(false)));
    ended.cleaned_up = true;
    let running = conditions(&ended, status(Phase::Running), 2, Timestamp(6));
    assert_eq!(completed(&running), (false, "Continued".to_owned()));
    assert_eq!((running.ended_at, running.cleaned_up), (None, false));
    let again = conditions(&running, status(Phase::Completed), 2, Timestamp(9));
    assert_eq!(completed(&again), (true, "Completed".to_owned()));
    assert_eq!(again.ended_at, Some(Timestamp(9)));
}
