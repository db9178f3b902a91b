//! Rounds of a population.

use super::*;
use crate::search::methods::SearchMethod;
use crate::search::view::NextPromotion::{AfterResults, Closed, Top};

/// Losses grow with the index, so that two of five trials are replaced.
#[test]
fn rounds_of_a_population_follow_each_other() {
    let config =
        PbtConfig { population_size: 5, units_per_round: 3, num_rounds: 4, num_truncated: 2 };
    let mut search =
        SearchState::new(AnyMethod::Pbt(Pbt::new(config)), Sampler::Random(space()), 7);
    let next = |search: &SearchState| {
        search.views()[0].rungs.iter().map(|rung| rung.next).collect::<Vec<_>>()
    };
    let cuts = |search: &SearchState| {
        search.views()[0].rungs.iter().map(|rung| rung.cut.map(Loss::value)).collect::<Vec<_>>()
    };
    search.advance(Event::Began);
    let report = |search: &mut SearchState, trial: u32| {
        let loss = Loss::new(f64::from(trial));
        search.advance(Event::Result { trial, units: 3, loss, others: vec![] }).unwrap();
    };
    report(&mut search, 0);
    // All results of the later rounds are missing.
    let five = AfterResults(5);
    assert_eq!(next(&search), [AfterResults(4), five, five, Top]);
    assert_eq!(cuts(&search), [None; 4]);
    (1..5).for_each(|trial| report(&mut search, trial));
    assert_eq!(next(&search), [Closed, five, five, Top]);
    assert_eq!(cuts(&search), [Some(2.0), None, None, None]);
    let peers = search.standing(1, 3).unwrap().peers;
    assert_eq!(peers.iter().map(|(trial, _)| *trial).collect::<Vec<_>>(), [0, 2, 3, 4]);
    // Only trials of the latest round may continue after their end.
    for trial in [0, 4] {
        search.advance(Event::Closed { trial, cause: CloseCause::Failed });
    }
    assert_eq!([0, 4].map(|trial| search.may_reopen(trial)), [true, false]);
}

#[test]
fn copies_do_not_stop_before_their_first_round() {
    let config =
        PbtConfig { population_size: 5, units_per_round: 3, num_rounds: 4, num_truncated: 2 };
    let pbt = Pbt::new(config);
    for (group, units, expected) in [(0, 1, 3), (0, 3, 3), (0, 4, 6), (1, 2, 6), (2, 12, 12)] {
        assert_eq!(pbt.length_at(group, units), expected, "{group} {units}");
    }
    assert_eq!(pbt.length_at(0, u64::MAX), 12);
}

/// The version that ended the first round has replaced one trial, and this one replaces two.
#[test]
fn rounds_that_have_ended_get_no_copies() {
    let begin = |num_truncated: u32| {
        let config =
            PbtConfig { population_size: 5, units_per_round: 3, num_rounds: 4, num_truncated };
        SearchState::new(AnyMethod::Pbt(Pbt::new(config)), Sampler::Random(space()), 7)
    };
    let result = |trial: u32, units: u64| {
        let loss = Loss::new(f64::from(trial));
        Event::Result { trial, units, loss, others: vec![] }
    };
    let mut before = begin(1);
    let began = before.advance(Event::Began).unwrap();
    let results: Vec<Turn> =
        (0..5).map(|trial| before.advance(result(trial, 3)).unwrap()).collect();
    let mut search = begin(2);
    for turn in std::iter::once(&began).chain(&results) {
        let drawn = turn.created.iter().zip(&turn.random_words);
        let drawn = drawn.map(|(draw, random_words)| RecordedDraw::Present {
            hyperparameters: draw.hyperparameters.clone(),
            random_words: *random_words,
        });
        search.replay(turn.order, &turn.events, &turn.steps, drawn).unwrap();
    }
    assert_eq!(search.book().next_index(), 6);
    // Trial 4 was replaced by trial 5.
    let closed = Event::Closed { trial: 0, cause: CloseCause::Failed };
    for event in [closed, result(1, 6), result(2, 6), result(3, 6)] {
        assert_eq!(search.advance(event.clone()).unwrap().steps, [], "{event:?}");
    }
    let steps = search.advance(result(5, 6)).unwrap().steps;
    assert_eq!(steps[0], Step::Stop { trial: 5 }, "{steps:?}");
    assert_eq!(search.book().next_index(), 8);
}
