//! Edits of small searches, while they run and after their end.

use stoker_api::decisions::StepRecord;
use stoker_api::experiment::{
    AdaptiveAshaSearch, AsyncHalvingSearch, ReopenedTrials, SearchLimits, SearchMode,
};
use stoker_api::trial::CloseCause;
use stoker_api::validate::Method;

use super::super::tests::case::{Case, random, reopened};
use super::*;
use crate::search::book::TrialState;

#[test]
fn raised_total_continues_an_ended_search() {
    let mut case = Case::new(random(2));
    assert_eq!(case.edit(|_| {}), None);
    case.result(0);
    case.result(1);
    assert!(case.ledger.book().is_finished());
    let steps = case.edit(|settings| settings.max_trials = Some(4)).unwrap();
    assert_eq!(steps.len(), 2, "{steps:?}");
    assert_eq!((case.trials.len(), case.ledger.book().num_open()), (4, 2));
    assert_eq!(case.edit(|_| {}), None);
    // A total below the trials that exist creates no more, and the others go on.
    assert_eq!(case.edit(|settings| settings.max_trials = Some(1)), Some(vec![]));
    case.result(2);
    assert_eq!(case.trials.len(), 4);
}

#[test]
fn more_places_are_used_at_once() {
    let mut case = Case::new(random(5));
    assert_eq!(case.trials.len(), 2);
    case.edit(|settings| settings.max_concurrent_trials = Some(4));
    assert_eq!((case.trials.len(), case.ledger.places()), (4, Some(4)));
}

#[test]
fn longer_trials_continue_from_their_result() {
    let mut case = Case::new(random(2));
    case.edit(|settings| settings.max_length = 12);
    case.result(0);
    assert_eq!(case.lengths(), [12, 9]);
    case.result(0);
    assert_eq!(case.ledger.book().num_open(), 1);
}

#[test]
fn longer_searches_get_rungs_above() {
    let search = AsyncHalvingSearch {
        max_trials: 30,
        num_rungs: 1,
        divisor: 3,
        max_concurrent_trials: 1,
        stop_once: false,
    };
    let mut case = Case::new(Method::AsyncHalving(search));
    case.edit(|settings| settings.max_length = 30);
    for trial in 0..3 {
        case.result(trial);
    }
    // The best of three is promoted to the rung above the old top, and then to the new top.
    assert_eq!(case.lengths(), [27, 9, 9]);
}

#[test]
fn brackets_share_the_new_total() {
    let search = AdaptiveAshaSearch {
        max_trials: 11,
        mode: SearchMode::Conservative,
        max_rungs: 3,
        bracket_rungs: vec![],
        divisor: 3,
        max_concurrent_trials: 3,
        stop_once: false,
    };
    let mut case = Case::new(Method::AdaptiveAsha(search));
    let total = |case: &Case| case.ledger.num_expected();
    assert_eq!(total(&case), 11);
    case.edit(|settings| settings.max_trials = Some(40));
    assert_eq!(total(&case), 40);
    case.edit(|settings| settings.max_trials = Some(3));
    assert_eq!(total(&case), 3);
}

/// The record of the deleted trial, with the replacement of its invalid hyperparameters, is gone.
#[test]
fn bracket_totals_survive_deletion_of_an_invalid_trial() {
    let mut case = Case::new(Method::AdaptiveAsha(AdaptiveAshaSearch {
        max_trials: 4,
        mode: SearchMode::Conservative,
        max_rungs: 3,
        bracket_rungs: vec![],
        divisor: 2,
        max_concurrent_trials: 0,
        stop_once: false,
    }));
    case.end(2, CloseCause::InvalidHyperparameters);
    assert_eq!(case.trials.len(), 5);
    // Any edit shares the total again.
    case.edit(|settings| settings.release_seconds = 30);
    case.delete(2);
}

#[test]
fn limit_that_is_still_reached_ends_the_search() {
    let mut case = Case::new(random(2));
    let limit = |seconds| SearchLimits { seconds, ..SearchLimits::default() };
    let is_limited = |case: &Case| match &case.log.last().unwrap().event {
        LogEvent::Edited(event) => event.is_limited,
        other => panic!("{other:?}"),
    };
    case.edit(|settings| settings.limits = limit(Some(50)));
    assert!(!is_limited(&case), "the limit is reached by the next turn");
    case.reach_limit();
    assert!(case.ledger.book().is_finished());
    let steps = case.edit(|settings| settings.max_trials = Some(9)).unwrap();
    assert!(matches!(steps[..], [StepRecord::Finish(_)]), "{steps:?}");
    assert!(is_limited(&case));
    assert!(case.ledger.limit_reached().is_some());
    let steps = case.edit(|settings| settings.limits = limit(None)).unwrap();
    // The trials that the limit has stopped take both places.
    assert_eq!(reopened(&steps), [0, 1]);
    assert_eq!(steps.len(), 1, "{steps:?}");
    assert!(case.ledger.limit_reached().is_none());
    assert_eq!(case.trials.len(), 2);
}

/// Less is spent than at the end, as if an earlier version had counted more units of copies.
#[test]
fn only_edits_that_grant_more_undo_a_limit() {
    let limits = |units| SearchLimits { units, ..SearchLimits::default() };
    let check = |expected: bool, edit: &dyn Fn(&mut SearchSettings)| {
        let mut case = Case::new(random(2));
        case.edit(|settings| settings.limits = limits(Some(9)));
        case.result(0);
        case.reach_limit();
        let mut settings = case.config.settings();
        edit(&mut settings);
        let (edited, trials) = (case.config.with(&settings), &case.trials);
        let record_of = |index: u32| trials.get(&index);
        let writes = case.ledger.edit(&edited, &Summary::default(), record_of, Timestamp(60));
        let Some([Write::Log(entry), ..]) = writes.as_deref() else { panic!("{writes:?}") };
        let LogEvent::Edited(event) = &entry.event else { panic!("{entry:?}") };
        assert_eq!(event.is_limited, expected, "{settings:?}");
        assert_eq!(case.ledger.book().is_finished(), expected, "{settings:?}");
    };
    check(true, &|settings| settings.release_seconds = 30);
    check(true, &|settings| settings.max_concurrent_trials = Some(4));
    check(true, &|settings| settings.limits.seconds = Some(1000));
    check(true, &|settings| settings.limits.units = Some(8));
    check(false, &|settings| settings.limits.units = Some(10));
    check(false, &|settings| settings.limits.units = None);
    check(false, &|settings| settings.max_trials = Some(3));
    check(false, &|settings| settings.max_length = 12);
}

/// A limit keeps the edit of the length from continuing trials. The edit of the limit continues
/// the same trials as one edit of both.
#[test]
fn completed_trials_continue_once_no_limit_holds() {
    let asha = Method::AsyncHalving(AsyncHalvingSearch {
        max_trials: 9,
        num_rungs: 1,
        divisor: 3,
        max_concurrent_trials: 1,
        stop_once: false,
    });
    let limits = |seconds| SearchLimits { seconds, ..SearchLimits::default() };
    let lengths = |method: &Method, num_results, length, edits_first| {
        let mut case = Case::new(method.clone());
        case.edit(|settings| settings.limits = limits(Some(50)));
        (0..num_results).for_each(|trial| case.result(trial));
        case.reach_limit();
        if edits_first {
            let steps = case.edit(|settings| settings.max_length = length).unwrap();
            assert!(reopened(&steps).is_empty(), "{steps:?}");
        }
        let edit = |settings: &mut SearchSettings| {
            (settings.max_length, settings.limits) = (length, limits(None));
        };
        let steps = case.edit(edit).unwrap();
        assert_eq!(reopened(&steps), (0..=num_results).collect::<Vec<_>>(), "{method:?}");
        assert_eq!(case.edit(edit).unwrap_or_default(), [], "it takes effect once");
        let active = |case: &Case| {
            let mut trials = (0..).zip(case.ledger.book().trials());
            trials.find(|(_, entry)| entry.state == TrialState::Active).map(|(trial, _)| trial)
        };
        while let Some(trial) = active(&case) {
            case.result(trial);
        }
        assert!(case.ledger.book().is_finished());
        case.lengths()
    };
    for (method, num_results, length, expected) in
        [(random(2), 1, 12, &[12, 12][..]), (asha, 8, 27, &[27, 27, 27, 9, 9, 9, 9, 9, 9])]
    {
        for edits_first in [false, true] {
            assert_eq!(lengths(&method, num_results, length, edits_first), expected);
        }
    }
}

#[test]
fn edits_and_requests_are_new_until_recorded() {
    let mut case = Case::new(random(2));
    let request = |number| Some(ReopenRequest { number, trials: ReopenedTrials::Failed });
    let settings = SearchSettings { max_length: 12, ..case.config.settings() };
    let edited = case.config.with(&settings);
    let is_new = |case: &Case, request| {
        (is_edited(&case.config, request, &case.log), is_requested(request, &case.log))
    };
    assert_eq!(is_new(&case, None), (false, false));
    assert!(is_edited(&edited, None, &case.log));
    assert_eq!(is_new(&case, request(1)), (true, true));
    case.edit(|settings| settings.max_length = 12);
    assert!(!is_edited(&edited, None, &case.log));
    case.request(ReopenedTrials::Failed);
    assert_eq!(is_new(&case, request(1)), (false, false));
    assert_eq!(is_new(&case, request(2)), (true, true));
    // A version before these settings recorded none.
    assert!(!is_edited(&edited, None, &[]));
}

#[test]
fn total_below_created_trials_is_refused() {
    let searcher = |max_trials: u32| -> Searcher {
        let fields = serde_json::json!({
            "metric": "loss", "maxLength": { "epochs": 9 }, "random": { "maxTrials": max_trials },
        });
        serde_json::from_value(fields).unwrap()
    };
    let mut case = Case::new(random(5));
    case.result(0);
    for (max_trials, is_refused) in [(2, true), (3, false), (5, false), (9, false)] {
        let refused = refused_edit(&searcher(max_trials), &case.log, 3);
        assert_eq!(refused.is_some(), is_refused, "{max_trials}: {refused:?}");
    }
    let refused = refused_edit(&searcher(2), &case.log, 3).unwrap();
    let expected = "spec.searcher.random.maxTrials: must be at least 3, the number of trials";
    assert!(refused.message.starts_with(expected), "{refused:?}");
    assert!(refused.message.contains("`stoker experiment cancel` (found 2)"), "{refused:?}");
    assert!(refused.message.contains("continues with 5"), "{refused:?}");
    assert!(!refused.is_final());
}

/// Returns why an experiment of this size refuses an edit.
fn refused(
    case: &Case,
    num_bytes: usize,
    edit: impl FnOnce(&mut SearchSettings),
) -> Option<Refusal> {
    let mut settings = case.config.settings();
    edit(&mut settings);
    let config = case.config.with(&settings);
    let record_of = |index: u32| case.trials.get(&index);
    case.ledger.large_edit(&config, &Summary::default(), record_of, num_bytes, Timestamp(50))
}

#[test]
fn edits_that_create_too_many_trials_are_refused() {
    let case = Case::new(random(5));
    assert_eq!(refused(&case, 2_000_000, |_| {}), None);
    assert_eq!(refused(&case, 2_000_000, |settings| settings.release_seconds = 30), None);
    let more = |settings: &mut SearchSettings| settings.max_concurrent_trials = Some(4);
    // Each of the two new trials takes 43 bytes.
    assert_eq!(refused(&case, EXPERIMENT_BYTES_MAX - 86, more), None);
    let message = refused(&case, EXPERIMENT_BYTES_MAX - 85, more).unwrap().message;
    assert!(message.contains("(1499915 of 1500000 bytes are in use)"), "{message}");
}

/// The spec gives the number of rungs of a new search.
#[test]
fn places_of_added_rungs_count() {
    let case = Case::new(Method::AsyncHalving(AsyncHalvingSearch {
        max_trials: 30,
        num_rungs: 1,
        divisor: 3,
        max_concurrent_trials: 1,
        stop_once: false,
    }));
    let edit = |settings: &mut SearchSettings, num_rungs: u32| {
        settings.max_trials = Some(100_000);
        settings.max_concurrent_trials = Some(0);
        settings.max_length = 3_u64.pow(1 + num_rungs);
    };
    // With 9 rungs, 3^8 trials train at the same time.
    assert_eq!(refused(&case, 10_000, |settings| edit(settings, 9)), None);
    assert!(refused(&case, 10_000, |settings| edit(settings, 12)).is_some());
}

#[test]
fn trials_that_an_edit_continues_count() {
    let mut case = Case::new(Method::Random { max_trials: 3, max_concurrent: 0 });
    (0..3).for_each(|trial| case.result(trial));
    assert!(case.ledger.book().is_finished());
    let longer = |settings: &mut SearchSettings| settings.max_length = 12;
    let is_refused = |num_bytes: usize| refused(&case, num_bytes, longer).is_some();
    // Few trials train at a time, but the edit reopens all.
    let one_by_one = |settings: &mut SearchSettings| {
        longer(settings);
        settings.max_concurrent_trials = Some(1);
    };
    let found = [138, 137].map(|num| is_refused(EXPERIMENT_BYTES_MAX - num));
    assert_eq!(found, [false, true]);
    assert_eq!(refused(&case, EXPERIMENT_BYTES_MAX - 137, one_by_one), None);
    // Without the brackets, and with a comma after each step.
    let steps = case.edit(longer).unwrap();
    assert_eq!(reopened(&steps), [0, 1, 2]);
    assert_eq!(serde_json::to_string(&steps).unwrap().len(), 138 + 1);
}
