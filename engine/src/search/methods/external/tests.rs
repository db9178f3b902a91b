//! Tables of questions and of answers that are refused.

use serde_json::{Value, json};
use stoker_api::decisions::AnsweredEvent;
use stoker_api::experiment::ExternalSearch;
use stoker_api::external::{ACTIONS_BYTES_MAX, Action};
use stoker_api::trial::CloseCause;
use stoker_api::validate::Method;

use crate::fixture::config;
use crate::search::book::TrialState;
use crate::search::rung::Loss;
use crate::search::state::{SearchState, Turn};
use crate::search::turn::{Edit, Event, Step};
use crate::search::view::BracketView;

/// Returns a search of at most 4 trials over nine epochs, which has begun.
fn search() -> SearchState {
    search_of(4)
}

fn search_of(max_trials: u32) -> SearchState {
    let command = vec!["searcher".to_owned()];
    let external = ExternalSearch { url: None, command, max_trials, max_concurrent_trials: 0 };
    let mut search = SearchState::of(&config(Method::External(external)));
    search.advance(Event::Began);
    search
}

/// Answers the question that is due.
fn answer(search: &mut SearchState, actions: &Value) -> Result<Turn, String> {
    let question = search.question().unwrap();
    let actions: Vec<Action> = serde_json::from_value(actions.clone()).unwrap();
    let (call, through) = (question.call, question.through);
    search.answer(AnsweredEvent { call, through, actions }).map(Option::unwrap)
}

fn result(search: &mut SearchState, trial: u32) {
    let units = search.book().trial(trial).units;
    let event = Event::Result { trial, units, loss: Loss::new(0.5), others: vec![] };
    search.advance(event).unwrap();
}

fn create(units: u64) -> Value {
    json!({ "create": { "units": units } })
}

/// Returns a search whose trials 0 to 2 train, wait and are paused, with a question that is due.
fn running() -> SearchState {
    let mut search = search();
    answer(&mut search, &json!([create(3), create(3), create(3)])).unwrap();
    result(&mut search, 2);
    answer(&mut search, &json!([{ "pause": { "trial": 2 } }])).unwrap();
    result(&mut search, 1);
    search
}

/// Other searches end after ten failures.
#[test]
fn failures_do_not_end_an_external_search() {
    let mut search = search_of(40);
    for trial in 0..20 {
        answer(&mut search, &json!([create(9)])).unwrap();
        search.advance(Event::Closed { trial, cause: CloseCause::Failed }).unwrap();
    }
    assert!(search.book().is_hopeless() && !search.has_given_up());
    assert!(search.question().is_some());
}

#[test]
fn impossible_answers_are_refused() {
    let check = |actions: Value, expected: &str| {
        let mut search = running();
        let before = search.clone();
        let error = answer(&mut search, &actions).map(|turn| turn.steps).unwrap_err();
        assert!(error.starts_with(expected), "{error}");
        assert_eq!(search, before, "a refused answer changes nothing");
    };
    let outside = json!({ "depth": 4, "net": { "rate": 0.5 } });
    check(
        json!([{ "create": { "hyperparameters": outside } }]),
        "actions[0].create.hyperparameters: {\"depth\":4,",
    );
    let partial = json!({ "depth": 3 });
    check(
        json!([{ "create": { "hyperparameters": partial } }]),
        "actions[0].create.hyperparameters: ",
    );
    check(json!([create(0)]), "actions[0].create.units: 0: must be from 1 to");
    check(json!([create(10)]), "actions[0].create.units: 10: must be from 1 to");
    check(json!([{ "create": { "trial": 4 } }]), "actions[0].create.trial: 4: the next trial is 3");
    check(json!([create(1), create(1)]), "actions[1].create: trial 4 would be one more than");
    check(json!([{ "create": { "tag": "x".repeat(129) } }]), "actions[0].create.tag: \"xxx");
    let to = |trial: u32, units: u64| json!({ "continue": { "trial": trial, "units": units } });
    check(json!([to(7, 4)]), "actions[0].continue.trial: 7: no such trial; 3 exist");
    check(json!([create(1), to(3, 4)]), "actions[1].continue.trial: 3: no such trial");
    check(json!([to(1, 3)]), "actions[0].continue.units: 3: must be above 3");
    check(json!([to(1, 10)]), "actions[0].continue.units: 10: must be at most");
    check(json!([to(0, 9)]), "actions[0].continue.trial: 0: it has no result");
    check(json!([{ "pause": { "trial": 0 } }]), "actions[0].pause.trial: 0: it has no result");
    check(json!([{ "pause": { "trial": 7 } }]), "actions[0].pause.trial: 7: no such trial");
    check(json!([{ "stop": { "trial": 7 } }]), "actions[0].stop.trial: 7: no such trial");
    let twice = json!([to(1, 4), { "stop": { "trial": 1 } }]);
    check(twice, "actions[1].stop.trial: 1: another action");
    check(json!([{ "finish": {} }, create(1)]), "actions[0].finish: other actions follow");
    check(json!([{ "stop": { "trial": 0 } }]), "actions: no trial trains after them");
    let large: Vec<Value> = vec![to(1, 4); ACTIONS_BYTES_MAX / 20];
    check(json!(large), "actions: ");
    // As many bytes as are allowed: the first action is refused, for its trial.
    let mut trials = vec![7_u32; (ACTIONS_BYTES_MAX - 1) / r#"{"stop":{"trial":7}},"#.len()];
    let stops = |trials: &[u32]| {
        json!(trials.iter().map(|trial| json!({ "stop": { "trial": trial } })).collect::<Vec<_>>())
    };
    for i in (0..trials.len()).cycle() {
        if stops(&trials).to_string().len() == ACTIONS_BYTES_MAX {
            break;
        }
        trials[i] *= 10;
    }
    check(stops(&trials), "actions[0].stop.trial: 7");
}

#[test]
fn accepted_actions_become_steps() {
    let check = |actions: Value, expected: Vec<Step>| {
        let mut search = running();
        assert_eq!(answer(&mut search, &actions).unwrap().steps, expected);
    };
    let continue_ = Step::Continue { trial: 1, units: 9 };
    check(json!([{ "continue": { "trial": 1, "units": 9 } }]), vec![continue_.clone()]);
    check(json!([{ "pause": { "trial": 1 } }]), vec![Step::Pause { trial: 1 }]);
    check(json!([{ "pause": { "trial": 2 } }]), vec![]);
    let steps = vec![Step::Stop { trial: 0 }, continue_];
    check(json!([{ "stop": { "trial": 0 } }, { "continue": { "trial": 1, "units": 9 } }]), steps);
    check(json!([{ "finish": {} }]), vec![Step::StopAll, Step::Finish]);
    check(json!([]), vec![]);
    let stop = |trial: u32| json!({ "stop": { "trial": trial } });
    let mut steps: Vec<Step> = (0..3).map(|trial| Step::Stop { trial }).collect();
    steps.push(Step::Finish);
    check(json!([stop(0), stop(1), stop(2), { "finish": {} }]), steps);
    let tag = "x".repeat(128);
    let create = Step::Create { group: 0, units: 9, source: None, hyperparameters: None };
    check(json!([{ "create": { "tag": tag } }]), vec![create]);
}

#[test]
fn finish_without_open_trials_stops_none() {
    let mut search = search();
    answer(&mut search, &json!([create(9)])).unwrap();
    search.advance(Event::Closed { trial: 0, cause: CloseCause::Failed }).unwrap();
    let turn = answer(&mut search, &json!([{ "finish": {} }])).unwrap();
    assert_eq!(turn.steps, [Step::Finish]);
}

#[test]
fn finished_search_asks_no_more() {
    let mut search = running();
    // The question has the result of trial 1 only.
    result(&mut search, 0);
    answer(&mut search, &json!([{ "finish": {} }])).unwrap();
    assert_eq!((search.unsent().len(), search.question()), (1, None));
}

#[test]
fn stopped_trials_continue_neither_by_answers_nor_limits() {
    let to_end = json!([{ "continue": { "trial": 1, "units": 9 } }]);
    let mut search = running();
    answer(&mut search, &json!([{ "stop": { "trial": 1 } }])).unwrap();
    result(&mut search, 0);
    let error = answer(&mut search, &to_end).unwrap_err();
    assert!(error.starts_with("actions[0].continue.trial: 1: it was stopped"), "{error}");
    // The service may not know yet that a limit stopped the trial.
    let mut search = running();
    search.advance(Event::LimitReached).unwrap();
    let edit = Edit {
        max_trials: None,
        max_concurrent: None,
        units_max: 9,
        is_limited: false,
        bracket_trials: vec![],
    };
    search.advance(Event::Edited(edit)).unwrap();
    assert_eq!(search.book().trial(1).state, TrialState::Stopped);
    let turn = answer(&mut search, &to_end).unwrap();
    assert!(!turn.steps.iter().any(|step| matches!(step, Step::Continue { .. })), "{turn:?}");
}

#[test]
fn records_of_trials_are_full_only_on_a_cluster() {
    let edit = |search: &mut SearchState| {
        let edit = Edit {
            max_trials: None,
            max_concurrent: None,
            units_max: 1000,
            is_limited: false,
            bracket_trials: vec![],
        };
        search.advance(Event::Edited(edit)).unwrap();
    };
    let num_continued = |is_paused: bool| {
        let mut search = search();
        answer(&mut search, &json!([create(1), create(9)])).unwrap();
        edit(&mut search);
        answer(&mut search, &json!([])).unwrap();
        let is_refused = |number: &u64| {
            result(&mut search, 0);
            if is_paused {
                answer(&mut search, &json!([{ "pause": { "trial": 0 } }])).unwrap();
                // Leads to a question.
                edit(&mut search);
            }
            let actions = json!([{ "continue": { "trial": 0, "units": number + 1 } }]);
            let checked: Vec<Action> = serde_json::from_value(actions.clone()).unwrap();
            let error = search.check_grants(&checked).err().unwrap_or_default();
            assert!(error.is_empty() || error.contains("its record is full"), "{error}");
            answer(&mut search, &actions).unwrap();
            !error.is_empty()
        };
        (1..1000).find(is_refused).map(|refused| refused - 1)
    };
    assert_eq!(num_continued(false), Some(254));
    assert_eq!(num_continued(true), Some(169));
}

#[test]
fn actions_on_trials_that_ended_meanwhile_do_nothing() {
    for event in
        [Event::Closed { trial: 1, cause: CloseCause::Failed }, Event::Deleted { trial: 1 }]
    {
        let mut search = running();
        let through = search.question().unwrap().through;
        search.advance(event).unwrap();
        for action in [
            json!({ "continue": { "trial": 1, "units": 9 } }),
            json!({ "stop": { "trial": 1 } }),
            json!({ "pause": { "trial": 1 } }),
        ] {
            let actions = serde_json::from_value(json!([action])).unwrap();
            let answered = AnsweredEvent { call: 2, through, actions };
            let turn = search.clone().answer(answered).unwrap().unwrap();
            assert_eq!(turn.steps, []);
        }
    }
}

#[test]
fn question_has_the_events_before_the_last_answer() {
    let orders = |search: &SearchState| {
        let through = search.question().map_or(0, |question| question.through);
        let events = search.events_through(through, &[true], &|_| None);
        events.iter().map(|event| event.order).collect::<Vec<_>>()
    };
    let mut search = search();
    assert_eq!(orders(&search), [0]);
    answer(&mut search, &json!([create(1), create(1), create(1)])).unwrap();
    assert_eq!(search.question(), None);
    // The first event is asked alone, whatever follows it.
    (0..3).for_each(|trial| result(&mut search, trial));
    assert_eq!((search.question().unwrap().call, orders(&search)), (1, vec![2]));
    answer(&mut search, &json!([])).unwrap();
    // All that happened before the answer is asked together.
    assert_eq!((search.question().unwrap().call, orders(&search)), (2, vec![3, 4]));
    // Results of a deleted trial leave the question.
    search.advance(Event::Deleted { trial: 1 }).unwrap();
    assert_eq!(orders(&search), [4]);
    answer(&mut search, &json!([])).unwrap();
    assert_eq!((search.question().unwrap().call, orders(&search)), (3, vec![6]));
}

#[test]
fn search_ends_without_open_trials_or_questions() {
    let mut search = search();
    assert_eq!(answer(&mut search.clone(), &json!([])).unwrap().steps, [Step::Finish]);
    answer(&mut search, &json!([create(9)])).unwrap();
    let turn = {
        let event = Event::Result { trial: 0, units: 9, loss: Loss::new(0.5), others: vec![] };
        search.advance(event).unwrap()
    };
    // A trial with the full length is complete, but the service must hear of it.
    assert_eq!(turn.steps, [Step::Stop { trial: 0 }]);
    assert!(!search.book().is_finished());
    assert_eq!(answer(&mut search, &json!([])).unwrap().steps, [Step::Finish]);
    assert_eq!(search.question(), None);
}

#[test]
fn finish_waits_for_an_edit_that_it_does_not_know() {
    let mut search = running();
    let through = search.question().unwrap().through;
    let edit = Edit {
        max_trials: Some(9),
        max_concurrent: None,
        units_max: 9,
        is_limited: false,
        bracket_trials: vec![],
    };
    search.advance(Event::Edited(edit)).unwrap();
    let actions = serde_json::from_value(json!([{ "finish": {} }])).unwrap();
    let turn = search.answer(AnsweredEvent { call: 2, through, actions }).unwrap().unwrap();
    assert_eq!(turn.steps, [Step::StopAll]);
    assert_eq!(search.book().trial(0).state, TrialState::Stopped);
    assert_eq!(answer(&mut search, &json!([create(1)])).unwrap().steps.len(), 1);
}

#[test]
fn late_answers_change_nothing() {
    let mut search = running();
    let before = search.clone();
    assert_eq!(search.num_answers(), 2);
    for call in [0, 1, 3] {
        let answered = AnsweredEvent { call, through: 9, actions: vec![] };
        assert_eq!(search.advance(Event::Answered(answered)), None);
    }
    assert_eq!(search, before);
}

#[test]
fn edits_change_the_numbers_of_the_search() {
    let mut search = running();
    let check = |search: &SearchState, units: u64, num_trials: u64, places: Option<u32>| {
        assert_eq!((search.first_units(0), search.greatest_units(0)), (units, units));
        assert_eq!(search.forecast(), [(units, num_trials)].into());
        assert_eq!(search.places(), places);
        assert_eq!(search.views(), [BracketView { rungs: vec![], num_missing: 0, places }]);
        assert!(!search.may_reopen(0), "the service may have replaced the trial");
    };
    check(&search, 9, 4, None);
    let edit = Edit {
        max_trials: Some(6),
        max_concurrent: Some(3),
        units_max: 12,
        is_limited: false,
        bracket_trials: vec![],
    };
    search.advance(Event::Edited(edit)).unwrap();
    check(&search, 12, 6, Some(3));
}
