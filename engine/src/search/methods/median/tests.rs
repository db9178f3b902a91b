//! Median stopping against a literal transcription of the published rule.

use proptest::prelude::*;
use stoker_api::experiment::MedianStopping;
use stoker_api::hyperparameters::Space;
use stoker_api::trial::CloseCause;

use super::{Means, Median};
use crate::search::book::TrialState;
use crate::search::layout;
use crate::search::methods::{AsyncHalving, FixedLength};
use crate::search::rung::Loss;
use crate::search::samplers::Sampler;
use crate::search::state::{AnyMethod, SearchState};
use crate::search::turn::{Event, Step};
use crate::search::view::MedianStanding;

const RULE: MedianStopping = MedianStopping { start_units: 4, every_units: 2, min_trials: 2 };

fn search(method: AnyMethod, rule: MedianStopping) -> SearchState {
    let space = Space::Group(Default::default());
    let method = AnyMethod::Median(Median::new(method, rule));
    let mut search = SearchState::new(method, Sampler::Random(space), 7);
    search.advance(Event::Began);
    search
}

fn random(max_trials: u32, concurrency: u32) -> AnyMethod {
    AnyMethod::FixedLength(FixedLength::new(9, max_trials, concurrency, true))
}

/// Reports a result at the granted length of a trial. Returns the steps.
fn report(search: &mut SearchState, trial: u32, loss: f64) -> Vec<Step> {
    let units = search.book().trial(trial).units;
    let loss = Loss::new(loss);
    search.advance(Event::Result { trial, units, loss, others: vec![] }).unwrap().steps
}

#[test]
fn trials_train_in_steps_to_the_full_length() {
    let mut search = search(random(1, 1), RULE);
    let mut lengths = vec![search.book().trial(0).units];
    while search.book().trial(0).state == TrialState::Active {
        report(&mut search, 0, 1.0);
        lengths.push(search.book().trial(0).units);
    }
    assert_eq!(lengths, [2, 4, 6, 8, 9, 9]);
    assert_eq!(search.forecast(), [(9, 1)].into());
}

#[test]
fn trial_stops_below_the_median_of_others() {
    let losses = |search: &mut SearchState, losses: [f64; 3], trial: u32| {
        losses.map(|loss| report(search, trial, loss).pop().unwrap())
    };
    let mut search = search(random(4, 0), RULE);
    let go = |trial, units| Step::Continue { trial, units };
    // Running means at 4 and 6 are 3 and 2 for trial 0, and 5 and 4 for trial 1.
    assert_eq!(losses(&mut search, [4.0, 2.0, 0.0], 0), [go(0, 4), go(0, 6), go(0, 8)]);
    assert_eq!(losses(&mut search, [6.0, 4.0, 2.0], 1), [go(1, 4), go(1, 6), go(1, 8)]);
    // The best result of trial 2 equals the median 4 at 4, and exceeds the median 3 at 6.
    assert_eq!(
        losses(&mut search, [4.0, 9.0, 9.0], 2),
        [go(2, 4), go(2, 6), Step::Stop { trial: 2 }]
    );
    let (best, median) = (Loss::new(4.0), Loss::new(3.0));
    let standing = MedianStanding { best, median, num_others: 2 };
    assert_eq!([1, 2].map(|trial| search.median_of(trial)), [None, Some(standing)]);
    // No trial stops before startUnits.
    assert_eq!(report(&mut search, 3, f64::NAN), [go(3, 4)]);
    assert_eq!(report(&mut search, 3, f64::NAN), [Step::Stop { trial: 3 }]);
}

#[test]
fn stopped_trials_free_their_places() {
    let rule = MedianStopping { start_units: 0, min_trials: 1, ..RULE };
    let mut search = search(random(3, 1), rule);
    for _ in 0..5 {
        report(&mut search, 0, 1.0);
    }
    let create = Step::Create { group: 0, units: 2, source: None, hyperparameters: None };
    let steps = report(&mut search, 1, 2.0);
    assert_eq!(steps, [Step::Stop { trial: 1 }, create]);
    let steps = report(&mut search, 2, 2.0);
    assert_eq!(steps, [Step::Stop { trial: 2 }, Step::Finish]);
}

#[test]
fn rung_counts_stopped_trials_as_worst() {
    let config = layout::async_halving(9, 3, 2, 3, 0, false);
    let rule = MedianStopping { start_units: 0, every_units: 2, min_trials: 1 };
    let mut search = search(AnyMethod::AsyncHalving(AsyncHalving::new(config)), rule);
    report(&mut search, 0, 1.0);
    assert_eq!(report(&mut search, 1, 2.0), [Step::Stop { trial: 1 }]);
    assert_eq!(report(&mut search, 2, 3.0), [Step::Stop { trial: 2 }]);
    // The first of three trials is promoted at the rung of 3 units, in steps of 2.
    assert_eq!(report(&mut search, 0, 1.0), [Step::Continue { trial: 0, units: 4 }]);
    assert_eq!(search.book().trial(2).state, TrialState::Stopped);
}

#[test]
fn deleted_and_invalid_trials_leave_the_median() {
    let rule = MedianStopping { start_units: 0, min_trials: 1, ..RULE };
    for event in [
        Event::Deleted { trial: 0 },
        Event::Closed { trial: 0, cause: CloseCause::InvalidHyperparameters },
    ] {
        let mut search = search(random(2, 0), rule);
        report(&mut search, 0, 1.0);
        search.advance(event);
        assert_eq!(report(&mut search, 1, 2.0), [Step::Continue { trial: 1, units: 4 }]);
    }
}

#[test]
fn means_of_other_trials_stay() {
    let rule = MedianStopping { start_units: 0, min_trials: 1, ..RULE };
    let mut search = search(random(3, 0), rule);
    report(&mut search, 0, 2.0);
    report(&mut search, 1, 1.0);
    search.advance(Event::Deleted { trial: 0 });
    assert_eq!(report(&mut search, 2, 1.5), [Step::Stop { trial: 2 }]);
}

/// The steps of a result may be missing in the record.
#[test]
fn deleted_trials_are_not_decided() {
    let mut search = search(random(2, 0), RULE);
    let result = Event::Result { trial: 0, units: 2, loss: Loss::new(1.0), others: vec![] };
    search.replay(1, &[result], &[], std::iter::empty()).unwrap();
    assert_eq!(search.advance(Event::Deleted { trial: 0 }).unwrap().steps, []);
}

/// The rule as published, from all results.
fn stops(results: &[Vec<f64>], trial: usize, rule: MedianStopping) -> bool {
    let own = &results[trial];
    let mut means: Vec<f64> = results
        .iter()
        .enumerate()
        .filter(|(other, losses)| *other != trial && losses.len() >= own.len())
        .map(|(_, losses)| losses[..own.len()].iter().sum::<f64>() / own.len() as f64)
        .collect();
    means.sort_by(f64::total_cmp);
    let num = means.len();
    let units = own.len() as u64 * rule.every_units;
    if num < rule.min_trials as usize || units < rule.start_units {
        return false;
    }
    let median = (means[(num - 1) / 2] + means[num / 2]) / 2.0;
    own.iter().copied().fold(f64::INFINITY, f64::min) > median
}

proptest! {
    #[test]
    fn decisions_equal_the_published_rule(
        picks in prop::collection::vec((0..6_usize, 0..8_u8), 0..60),
    ) {
        let mut search = search(random(6, 0), RULE);
        let mut results = vec![vec![]; 6];
        for (trial, loss) in picks {
            let entry = search.book().trial(trial as u32);
            if entry.state != TrialState::Active || entry.units == 9 {
                continue;
            }
            results[trial].push(f64::from(loss));
            let steps = report(&mut search, trial as u32, f64::from(loss));
            let is_stopped = steps[0] == Step::Stop { trial: trial as u32 };
            prop_assert_eq!(is_stopped, stops(&results, trial, RULE), "{:?}", results);
        }
    }

    #[test]
    fn median_equals_that_of_a_sorted_list(
        changes in prop::collection::vec((0..12_u32, 0..9_u8, any::<bool>()), 0..60),
    ) {
        let mut means = Means::default();
        for (trial, mean, is_removed) in changes {
            match is_removed {
                true => means.remove(trial),
                false => means.insert(trial, Loss::new(f64::from(mean))),
            }
            let mut sorted: Vec<f64> = means.by_trial.values().map(|mean| mean.value()).collect();
            sorted.sort_by(f64::total_cmp);
            let num = sorted.len();
            let expected =
                (num > 0).then(|| (sorted[(num - 1) / 2] + sorted[num / 2]) / 2.0);
            prop_assert_eq!(means.median().map(Loss::value), expected);
        }
    }
}
