//! Trials of small searches that continue after their end.

use stoker_api::decisions::{ReopenStep, StepRecord, StopPausedStep, TrialStep};
use stoker_api::experiment::{
    AsyncHalvingSearch, HyperbandSearch, Length, MedianStopping, Phase, SearchLimits,
    SyncHalvingSearch, Unit,
};
use stoker_api::trial::Grant;
use stoker_api::validate::Method;

use super::super::tests::case::{Case, random, reopened};
use super::*;
use crate::experiment::Summary;
use crate::fixture::config;
use crate::search::SearchConfig;
use crate::trial::{NextStep, TargetState, close, is_open, is_reopening_due, next, reopen};
use ReopenedTrials::{Failed, Stopped};

fn asha(stop_once: bool) -> Method {
    Method::AsyncHalving(AsyncHalvingSearch {
        max_trials: 3,
        num_rungs: 2,
        divisor: 3,
        max_concurrent_trials: 3,
        stop_once,
    })
}

fn sync() -> Method {
    Method::SyncHalving {
        search: SyncHalvingSearch {
            num_rungs: 2,
            budget: Length::new(Unit::Epochs, 24),
            divisor: 3,
            max_concurrent_trials: 0,
        },
        budget: 24,
    }
}

fn hyperband() -> Method {
    Method::Hyperband(HyperbandSearch { num_brackets: 1, divisor: 3, max_concurrent_trials: 0 })
}

/// Ends all trials: trial 0 as `cause` says, the others with results.
fn ended(method: Method, cause: CloseCause) -> Case {
    let mut case = Case::new(method);
    case.end(0, cause);
    while let Some(trial) = active(&case) {
        case.result(trial);
    }
    assert!(case.ledger.book().is_finished());
    case
}

fn active(case: &Case) -> Option<u32> {
    let mut trials = (0..).zip(case.ledger.book().trials());
    trials.find(|(_, entry)| entry.state == TrialState::Active).map(|(trial, _)| trial)
}

#[test]
fn request_continues_trials_that_ended_so() {
    let check = |cause, trials, expected: &[u32]| {
        let mut case = ended(random(3), cause);
        assert_eq!(reopened(&case.request(trials)), expected, "{cause:?} {trials:?}");
        assert_eq!(case.ledger.book().is_finished(), expected.is_empty());
    };
    check(CloseCause::Failed, Failed, &[0]);
    check(CloseCause::Failed, Stopped, &[]);
    check(CloseCause::StoppedEarly, Stopped, &[0]);
    check(CloseCause::StoppedEarly, Failed, &[]);
    check(CloseCause::InvalidHyperparameters, Failed, &[]);
    // The user has killed the trial.
    check(CloseCause::Cancelled, Stopped, &[]);
}

#[test]
fn new_result_of_a_reopened_trial_counts() {
    for method in [random(3), asha(false), asha(true), sync(), hyperband()] {
        let mut case = ended(method.clone(), CloseCause::Failed);
        let num_before = case.ledger.book().num_with_result();
        case.request(Failed);
        assert_eq!(active(&case), Some(0), "{method:?}");
        while let Some(trial) = active(&case) {
            case.result(trial);
        }
        assert!(case.ledger.book().is_finished(), "{method:?}");
        assert_eq!(case.ledger.book().num_with_result(), num_before + 1, "{method:?}");
        assert_eq!(closed(&case.trials[&0]), Some(CloseCause::Completed), "{method:?}");
    }
}

/// Trials 0 and 1 fail before the only rung below the top. The result of the last trial is promoted
/// although the others count as worse. A reopened trial is compared with it.
#[test]
fn reopened_trial_leaves_the_place_of_its_failure() {
    let mut case = Case::new(asha(false));
    case.end(0, CloseCause::Failed);
    case.end(1, CloseCause::Failed);
    case.result(2);
    assert_eq!(case.lengths(), [3, 3, 9]);
    case.request(Failed);
    case.result(0);
    case.result(1);
    case.result(2);
    assert!(case.ledger.book().is_finished());
    assert_eq!(case.lengths(), [3, 3, 9]);
}

#[test]
fn raised_length_continues_completed_trials() {
    for (method, expected) in [(random(2), &[12, 12][..]), (asha(true), &[9, 9, 12])] {
        let mut case = Case::new(method);
        while let Some(trial) = active(&case) {
            case.result(trial);
        }
        assert!(case.ledger.book().is_finished());
        let steps = case.edit(|settings| settings.max_length = 12).unwrap();
        assert!(!reopened(&steps).is_empty(), "{steps:?}");
        while let Some(trial) = active(&case) {
            case.result(trial);
        }
        assert!(case.ledger.book().is_finished());
        assert_eq!(case.lengths(), expected);
        let is_closed = |record: &TrialRecord| closed(record) == Some(CloseCause::Completed);
        assert!(case.trials.values().all(is_closed));
    }
}

#[test]
fn completed_trials_without_checkpoint_stay_ended() {
    let mut case = Case::new(random(2));
    case.result(0);
    case.result(1);
    case.trials.get_mut(&1).unwrap().status.checkpoints.clear();
    let steps = case.edit(|settings| settings.max_length = 12).unwrap();
    assert_eq!(reopened(&steps), [0]);
}

/// The edit takes effect once the stopped trials have ended: a trial is never open and stopped.
#[test]
fn edit_waits_for_trials_that_are_ending() {
    let mut case = Case::new(random(2));
    case.ends_late = true;
    case.result(0);
    case.result(1);
    assert_eq!(case.edit(|settings| settings.max_length = 12), None);
    assert!(case.ledger.book().is_finished());
    case.follow();
    let steps = case.edit(|_| {}).unwrap();
    assert_eq!(reopened(&steps), [0, 1]);
}

#[test]
fn request_reopens_nothing_after_a_limit() {
    let mut case = ended(random(3), CloseCause::Failed);
    // The search had ended before the limit was reached.
    case.edit(|settings| {
        settings.limits = SearchLimits { seconds: Some(55), ..SearchLimits::default() };
    });
    assert!(reopened(&case.request(Failed)).is_empty());
    case.edit(|settings| settings.limits = SearchLimits::default());
    assert_eq!(reopened(&case.request(Failed)), [0]);
}

/// Median stopping hides the lengths between from the search inside it.
#[test]
fn limit_stops_trials_that_wait_to_continue() {
    let rule = MedianStopping { start_units: 100, every_units: 3, min_trials: 1 };
    let method = Method::Random { max_trials: 2, max_concurrent: 1 };
    let mut case = Case::of(SearchConfig { median_stopping: Some(rule), ..config(method) });
    (0..3).for_each(|_| case.result(0));
    case.edit(|settings| settings.max_length = 20);
    let state = |case: &Case, trial| case.ledger.state(trial).unwrap();
    assert_eq!(
        (state(&case, 0), state(&case, 1)),
        (TrialState::Paused, TrialState::Active),
        "trial 0 has no place"
    );
    case.edit(|settings| {
        settings.limits = SearchLimits { seconds: Some(50), ..SearchLimits::default() };
    });
    case.reach_limit();
    case.edit(|settings| settings.limits = SearchLimits::default());
    while let Some(trial) = active(&case) {
        assert!(state(&case, 1 - trial) != TrialState::Active, "one place");
        case.result(trial);
    }
    assert_eq!(case.lengths(), [20, 20]);
}

#[test]
fn raised_limit_continues_what_it_stopped() {
    let limited = |checkpoint: bool, has_result: bool| {
        let mut case = Case::new(asha(false));
        case.edit(|settings| {
            settings.limits = SearchLimits { seconds: Some(50), ..SearchLimits::default() };
        });
        case.result(1);
        if has_result {
            case.result(0);
        }
        match checkpoint {
            true => case.checkpoint(0),
            false => case.trials.get_mut(&0).unwrap().status.checkpoints.clear(),
        }
        case.reach_limit();
        assert!(case.trials.values().all(|record| closed(record).is_some()));
        // Nothing is reopened while the limit is reached.
        assert!(reopened(&case.request(Stopped)).is_empty());
        case
    };
    for (checkpoint, has_result, expected) in [
        (true, false, &[0, 1, 2][..]),
        (false, false, &[0, 1, 2]),
        (true, true, &[0, 1, 2]),
        (false, true, &[1, 2]),
    ] {
        let mut case = limited(checkpoint, has_result);
        let steps = case.edit(|settings| settings.limits = SearchLimits::default()).unwrap();
        assert_eq!(reopened(&steps), expected, "{checkpoint} {has_result}");
        // A trial with a result needs no training before it is compared.
        let state = |trial| case.ledger.state(trial).unwrap();
        assert_eq!(state(1), TrialState::Paused);
        assert_eq!(state(2), TrialState::Active);
        if expected.len() < 3 {
            assert_eq!(reopened(&case.request(Stopped)), [0]);
        }
        while let Some(trial) = active(&case) {
            case.result(trial);
        }
        assert!(case.ledger.book().is_finished());
    }
}

fn kill(case: &mut Case, trial: u32) {
    case.trials.get_mut(&trial).unwrap().spec.desired_state = DesiredTrialState::Kill;
}

/// The user killed trial 0 after the search had stopped it, or while it ended by itself.
#[test]
fn killed_trials_stay_ended() {
    for (cause, trials) in [(CloseCause::Failed, Failed), (CloseCause::StoppedEarly, Stopped)] {
        let mut case = ended(random(3), cause);
        kill(&mut case, 0);
        assert!(reopened(&case.request(trials)).is_empty(), "{cause:?}");
    }
    let mut case = Case::new(random(2));
    case.edit(|settings| {
        settings.limits = SearchLimits { seconds: Some(50), ..SearchLimits::default() };
    });
    case.reach_limit();
    kill(&mut case, 0);
    let steps = case.edit(|settings| settings.limits = SearchLimits::default()).unwrap();
    assert_eq!(reopened(&steps), [1]);
    case.result(1);
    assert!(case.ledger.book().is_finished());
    let mut case = Case::new(random(2));
    case.result(0);
    case.result(1);
    kill(&mut case, 0);
    let steps = case.edit(|settings| settings.max_length = 12).unwrap();
    assert_eq!(reopened(&steps), [1]);
}

/// The kill was recorded after the step of the search and before the fact that follows from it.
#[test]
fn trial_killed_while_it_is_reopened_ends_again() {
    let mut case = ended(random(3), CloseCause::Failed);
    case.ends_late = true;
    case.request(Failed);
    kill(&mut case, 0);
    let record = case.trials.get_mut(&0).unwrap();
    assert!(is_open(record));
    assert_eq!(next(record, TargetState::Stop), NextStep::Reopen);
    reopen(record);
    let cause = CloseCause::Cancelled;
    assert_eq!(next(record, TargetState::Stop), NextStep::Close { cause });
    case.end(0, cause);
    assert!(case.ledger.book().is_finished());
}

/// A trial that has its result when a limit stops the others stays complete.
#[test]
fn raised_limit_leaves_completed_trials_alone() {
    let mut case = Case::new(random(3));
    case.result(0);
    case.edit(|settings| {
        settings.limits = SearchLimits { seconds: Some(50), ..SearchLimits::default() };
    });
    case.reach_limit();
    let steps = case.edit(|settings| settings.limits = SearchLimits::default()).unwrap();
    assert_eq!(reopened(&steps), [1, 2]);
}

/// The trial reported while the limit stopped it. It continues without training again.
#[test]
fn result_after_a_limit_counts_once_it_is_raised() {
    let mut case = Case::new(random(2));
    case.edit(|settings| {
        settings.limits = SearchLimits { seconds: Some(50), ..SearchLimits::default() };
    });
    case.ends_late = true;
    case.reach_limit();
    case.result(0);
    assert_eq!(case.ledger.book().num_with_result(), 0);
    case.follow();
    case.ends_late = false;
    let steps = case.edit(|settings| settings.limits = SearchLimits::default()).unwrap();
    assert_eq!(reopened(&steps), [0, 1]);
    assert_eq!(case.ledger.book().num_with_result(), 1);
    assert_eq!(active(&case), Some(1));
}

/// The same, but the runner takes in the result before it continues the trial.
#[test]
fn trial_that_completes_before_it_continues_has_ended() {
    let mut case = Case::new(random(2));
    case.edit(|settings| {
        settings.limits = SearchLimits { seconds: Some(50), ..SearchLimits::default() };
    });
    case.ends_late = true;
    case.reach_limit();
    case.result(0);
    case.follow();
    case.edit(|settings| settings.limits = SearchLimits::default()).unwrap();
    case.take_facts();
    assert_eq!(case.ledger.state(0), Some(TrialState::Stopped));
    case.ends_late = false;
    case.follow();
    case.result(1);
    assert!(case.ledger.book().is_finished());
    let summary = Summary::new(&case.config, case.trials.values());
    let status = summary.status(&case.ledger, false, "mnist", |trial| case.trials.get(&trial));
    assert_eq!((status.phase, status.trials_closed), (Phase::Completed, 2));
}

/// The turn of a trial's own result may stop it together with others of its rung.
#[test]
fn trials_that_a_rung_stops_have_ended() {
    let mut record = Case::new(random(1)).trials[&0].clone();
    close(&mut record, CloseCause::Completed, None);
    let mut check = |steps: &[StepRecord], expected: bool| {
        let grant = |steps| Grant { order: 1, fact: None, units: 9, steps: Some(steps) };
        let reopen = StepRecord::Reopen(ReopenStep { trials: vec![0] });
        record.spec.grants = vec![grant(vec![reopen]), grant(steps.to_vec())];
        assert_eq!(is_open(&record), expected, "{steps:?}");
    };
    let pause = || StepRecord::Pause(TrialStep { trial: 0 });
    let stop = |units: u64, except: &[u32]| {
        StepRecord::StopPaused(StopPausedStep { group: 0, units, except: except.to_vec() })
    };
    check(&[], true);
    check(&[pause(), stop(9, &[])], false);
    check(&[pause(), stop(9, &[0])], true);
    check(&[pause(), stop(3, &[])], true);
    check(&[stop(9, &[])], true);
}

#[test]
fn each_step_is_followed_by_one_fact() {
    let mut case = Case::new(random(1));
    for number in 0..3 {
        case.end(0, CloseCause::Failed);
        assert_eq!(num_reopenings(&case.trials[&0]), number);
        case.request(Failed);
        assert!(!is_reopening_due(&case.trials[&0]));
    }
    // A late end of the same kind does not reopen the trial again.
    case.end(0, CloseCause::Failed);
    assert_eq!(next(&case.trials[&0], TargetState::Run), NextStep::Done);
}

#[test]
fn trials_are_reopened_a_limited_number_of_times() {
    let mut case = Case::new(random(1));
    for _ in 0..REOPENINGS_MAX {
        case.end(0, CloseCause::Failed);
        assert_eq!(reopened(&case.request(Failed)), [0]);
    }
    case.end(0, CloseCause::Failed);
    let steps = case.request(Failed);
    assert!(matches!(steps[..], [StepRecord::Finish(_)]), "{steps:?}");
}
