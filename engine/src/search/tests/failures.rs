//! Searches whose trials all fail.

use super::*;
use crate::search::methods::{AnyMethod, Pbt, PbtConfig};
use crate::search::samplers::Sampler;

/// Fails all trials in order, after this event of the first one. Returns the number of trials.
fn num_created(search: &mut SearchState, first: Option<Event>) -> u32 {
    search.advance(Event::Began);
    if let Some(event) = first {
        search.advance(event);
    }
    for trial in 0..200 {
        search.advance(Event::Closed { trial, cause: Failed });
    }
    assert!(search.book().is_finished());
    search.book().next_index()
}

#[test]
fn search_ends_if_all_trials_fail() {
    let check = |max_concurrent: u32, first: Option<Event>, expected: u32| {
        let method = Method::Random { max_trials: 100, max_concurrent };
        let mut search = SearchState::of(&config(method));
        assert_eq!(num_created(&mut search, first.clone()), expected, "{first:?}");
        assert_eq!(search.has_given_up(), expected < 100);
    };
    let closed = |cause| Some(Event::Closed { trial: 0, cause });
    let result = Event::Result { trial: 0, units: 9, loss: Loss::INFINITE, others: vec![] };
    check(1, None, 10);
    // Creation stops once no fewer trials have failed than are open: 15 of 30.
    check(16, None, 30);
    check(1, closed(InvalidHyperparameters), 11);
    check(1, Some(result), 100);
    for cause in [Completed, StoppedEarly, Cancelled] {
        check(1, closed(cause), 100);
    }
    check(1, Some(Event::Deleted { trial: 0 }), 100);
    let all = Method::Random { max_trials: 100, max_concurrent: 0 };
    assert_eq!(num_created(&mut SearchState::of(&config(all)), None), 100);
}

/// A grid begins with all points of one value, which may be the cause of all failures.
#[test]
fn grids_train_all_points_after_failures() {
    let mut search = search_over(40, json!({ "grid": { "maxConcurrentTrials": 1 } }));
    assert_eq!(num_created(&mut search, None), 40);
}

/// A replacement that is delayed while all trials fail is created after the first result.
#[test]
fn populations_are_complete_after_a_late_result() {
    let config =
        PbtConfig { population_size: 20, units_per_round: 3, num_rounds: 2, num_truncated: 4 };
    let sampler = Sampler::Random(Space::Group(BTreeMap::new()));
    let mut search = SearchState::new(AnyMethod::Pbt(Pbt::new(config)), sampler, 7);
    search.advance(Event::Began);
    let close = |search: &mut SearchState, trial, cause| {
        search.advance(Event::Closed { trial, cause }).unwrap();
        search.book().next_index()
    };
    assert_eq!(close(&mut search, 0, InvalidHyperparameters), 21);
    (1..=10).for_each(|trial| assert_eq!(close(&mut search, trial, Failed), 21));
    assert!(search.has_given_up());
    (11..=12).for_each(|trial| assert_eq!(close(&mut search, trial, InvalidHyperparameters), 21));
    let result = Event::Result { trial: 13, units: 3, loss: Loss::new(0.5), others: vec![] };
    search.advance(result);
    assert_eq!(search.book().next_index(), 23);
    assert_eq!(close(&mut search, 14, Failed), 23);
}

#[test]
fn edits_and_requests_continue_failed_searches() {
    let edit = Event::Edited(Edit {
        max_trials: None,
        max_concurrent: None,
        units_max: 9,
        is_limited: false,
        bracket_trials: vec![],
    });
    for (event, reopened) in [(edit, vec![]), (Event::Reopened, vec![0])] {
        let method = Method::Random { max_trials: 40, max_concurrent: 1 };
        let mut search = SearchState::of(&config(method));
        assert_eq!(num_created(&mut search, None), 10);
        search.reopen(event, reopened).unwrap();
        assert_eq!(num_created(&mut search, None), 40);
    }
}

#[test]
fn late_result_resumes_the_creation_of_trials() {
    let method = Method::Random { max_trials: 100, max_concurrent: 11 };
    let mut search = SearchState::of(&config(method));
    search.advance(Event::Began);
    // All but the first fail, until no more are created.
    for trial in 1..=20 {
        search.advance(Event::Closed { trial, cause: Failed });
    }
    let num_created = search.book().next_index();
    assert!(num_created < 30 && search.has_given_up(), "{num_created}");
    search.advance(Event::Result { trial: 0, units: 9, loss: Loss::new(0.5), others: vec![] });
    assert!(search.book().next_index() > num_created);
}
