//! Trials that a sampler learns from, and copies of them.

use serde_json::json;
use stoker_api::trial::CloseCause;

use super::*;
use crate::search::turn::{Event, Step};

/// Returns trials that train to 4 units.
fn book(num_trials: u32) -> Book {
    let mut book = Book::default();
    let create = Step::Create { group: 0, units: 4, source: None, hyperparameters: None };
    (0..num_trials).for_each(|_| book.commit(&create));
    book
}

/// Takes in a result with a second objective, which is 100 more.
fn report(book: &mut Book, trial: u32, units: u64, loss: f64) {
    let (loss, others) = (Loss::new(loss), vec![Loss::new(loss + 100.0)]);
    book.observe(0, &Event::Result { trial, units, loss, others });
}

#[test]
fn tpe_learns_from_lengths_with_ten_results() {
    let mut book = book(14);
    (0..10).for_each(|trial| report(&mut book, trial, 4, f64::from(trial)));
    (0..9).for_each(|trial| report(&mut book, trial, 8, f64::from(trial) + 20.0));
    // Trials 10 and 11 train; 12 has ended without a result, and 13 was deleted.
    book.observe(0, &Event::Closed { trial: 12, cause: CloseCause::Failed });
    book.observe(0, &Event::Deleted { trial: 13 });
    let point = |trial: u32| vec![Some(f64::from(trial))];
    let points: Vec<_> = (0..14).map(|trial| (trial != 13).then(|| point(trial))).collect();

    let finished = |trial: u32, loss: f64| Observation {
        point: point(trial),
        loss: Some(Loss::new(loss)),
        others: vec![Loss::new(loss + 100.0)],
    };
    let running = |trial: u32| Observation { point: point(trial), loss: None, others: vec![] };
    let mut expected: Vec<_> = (0..10).map(|trial| finished(trial, f64::from(trial))).collect();
    expected.extend([running(10), running(11)]);
    assert_eq!(observations(&points, &book), expected);

    // The tenth result at 8 units. Trials 10 and 11 may still reach this length.
    report(&mut book, 9, 8, 29.0);
    let mut expected: Vec<_> =
        (0..10).map(|trial| finished(trial, f64::from(trial) + 20.0)).collect();
    expected.extend([running(10), running(11)]);
    assert_eq!(observations(&points, &book), expected);
}

/// With prior trials, fewer than ten results are enough.
#[test]
fn tpe_learns_from_few_results() {
    let mut book = book(3);
    report(&mut book, 0, 4, 0.5);
    let points: Vec<_> = (0..3).map(|trial| Some(vec![Some(f64::from(trial))])).collect();
    let losses = |book: &Book| -> Vec<Option<Loss>> {
        observations(&points, book).into_iter().map(|observation| observation.loss).collect()
    };
    assert_eq!(losses(&book), [Some(Loss::new(0.5)), None, None]);
    book.observe(0, &Event::Closed { trial: 1, cause: CloseCause::Failed });
    report(&mut book, 2, 4, 0.25);
    report(&mut book, 2, 8, 0.125);
    assert_eq!(losses(&book), [Some(Loss::new(0.5)), Some(Loss::new(0.25))]);
}

#[test]
fn given_trials_do_not_replace_copies() {
    let space = json!({ "net": { "categorical": ["a", "b", "c"] } });
    let space = Space::parse(&space).unwrap();
    let explore = Explore { space, resample_probability: 0.0, perturb_factor: 0.2 };
    let given = ["b", "c"].map(|net| (json!({ "net": net }), Loss::new(0.5)));
    let mut sampler = Sampler::explore(explore).with_prior(&given);
    sampler.record(Some(&given[0].0));

    let (book, mut random) = (book(1), Random::new(1));
    let source = Source { trial: 0, units: 4 };
    assert_eq!(sampler.draw(Some(&source), &book, &mut random), Some(given[0].0.clone()));
    assert_eq!(sampler.draw(None, &book, &mut random), Some(given[1].0.clone()));
}
