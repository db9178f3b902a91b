//! What callbacks decide, beside what Keras's documentation says of `EarlyStopping` and
//! `ReduceLROnPlateau`: tables written by hand from its rules.
//!
//! *Improvement*: less than the best by more than `min_delta`, or greater in mode `max`; then the wait
//! begins anew. *Stop*: after `patience` epochs in a row without it. *Reduce*: likewise, to
//! `max(rate * factor, min_lr)`; the `cooldown` epochs after it do not count, and an improvement in
//! them is the best all the same.

use super::*;
use crate::ReduceOnPlateau;

/// Calls a validation's hook with each value; gives the scale after each, until training is stopped.
fn scales(mut callback: impl Callback, values: &[f64]) -> Vec<f64> {
    let (mut scale, mut all) = (1.0, vec![]);
    for value in values {
        let logs = Logs::from([("val_it".into(), *value)]);
        let mut control = Control { learning_rate_scale: scale, ..Control::default() };
        callback.on_validation_end(&logs, &mut control).unwrap();
        scale = control.learning_rate_scale();
        all.push(scale);
        if control.stop.is_some() {
            break;
        }
    }
    all
}

#[test]
fn early_stopping_stops_where_keras_does() {
    let check = |mode: &str, min_delta, patience, values: &[f64], stops_after: usize| {
        let stopping = EarlyStopping::new("val_it").min_delta(min_delta).patience(patience);
        let stopping = if mode == "max" { stopping.larger_is_better() } else { stopping };
        let num_validated = scales(stopping, values).len();
        assert_eq!(num_validated, stops_after, "{mode} {min_delta} {patience} {values:?}");
    };
    // mode, min_delta, patience, the metric of each epoch: the epochs trained.
    check("min", 0.0, 0, &[5.0, 4.0, 4.0, 3.0], 3);
    check("min", 0.0, 1, &[5.0, 4.0, 4.0, 3.0], 3);
    check("min", 0.0, 2, &[5.0, 4.0, 4.0, 3.0], 4);
    check("min", 0.0, 2, &[5.0, 4.0, 4.0, 4.0, 3.0], 4);
    // The best is not of the last epochs, but of all.
    check("min", 0.0, 2, &[2.0, 5.0, 4.0, 3.0], 3);
    check("min", 0.0, 3, &[2.0, 5.0, 4.0, 1.0, 5.0, 5.0, 5.0, 0.0], 7);
    // An improvement by min_delta is none; by more it is one, and is compared with the best since.
    check("min", 1.0, 2, &[5.0, 4.0, 4.0, 0.0], 3);
    check("min", 1.0, 2, &[5.0, 4.5, 3.5, 3.0, 2.0, 2.0, 2.0, 0.0], 7);
    check("min", 0.5, 1, &[8.0, 7.0, 6.0, 5.75, 5.0], 4);
    // Slow gains that add up: 0.4 is less than 0.5 in each epoch, and 0.8 of two is more.
    check("min", 0.5, 2, &[8.0, 7.6, 7.2, 6.8, 6.4, 6.4, 6.4], 7);
    check("max", 0.0, 2, &[1.0, 2.0, 2.0, 3.0, 3.0, 2.0, 9.0], 6);
    check("max", 0.5, 2, &[1.0, 1.25, 1.5, 9.0], 3);
    check("max", 0.5, 2, &[1.0, 1.25, 1.75, 2.0, 2.5, 2.5, 2.5, 9.0], 7);
    check("max", 0.0, 1, &[-3.0, -2.0, -2.5], 3);
    // What is no number is no improvement.
    check("min", 0.0, 2, &[3.0, f64::NAN, f64::NAN, 1.0], 3);
    check("max", 0.0, 2, &[3.0, f64::NAN, 4.0, f64::NAN, f64::INFINITY, f64::NAN], 6);
}

/// What a plateau is told.
struct Told {
    mode: &'static str,
    min_delta: f64,
    patience: u32,
    cooldown: u32,
    factor: f64,
    min_scale: f64,
}

#[test]
fn a_plateau_lowers_the_rate_where_keras_does() {
    let check = |told: &Told, values: &[f64], expected: &[f64]| {
        let Told { mode, min_delta, patience, cooldown, factor, min_scale } = *told;
        let reduce = ReduceOnPlateau::new("val_it")
            .min_delta(min_delta)
            .patience(patience)
            .cooldown(cooldown)
            .factor(factor)
            .min_scale(min_scale);
        let reduce = if mode == "max" { reduce.larger_is_better() } else { reduce };
        assert_eq!(scales(reduce, values), expected, "{mode} {patience} {cooldown} {values:?}");
    };
    let plain =
        Told { mode: "min", min_delta: 0.0, patience: 2, cooldown: 0, factor: 0.5, min_scale: 0.0 };
    // The rate of the epochs after each, where it is 1 at first.
    check(&plain, &[4.0, 3.0, 3.0, 3.0, 3.0, 3.0], &[1.0, 1.0, 1.0, 0.5, 0.5, 0.25]);
    check(&plain, &[4.0, 4.0, 3.0, 3.0, 2.0, 2.0], &[1.0; 6]);
    check(&Told { patience: 1, ..plain }, &[4.0, 4.0, 3.0, 3.0], &[1.0, 0.5, 0.5, 0.25]);
    // Without patience as with one epoch of it: an epoch that is better never lowers the rate.
    check(&Told { patience: 0, ..plain }, &[4.0, 4.0, 3.0, 3.0], &[1.0, 0.5, 0.5, 0.25]);
    check(&Told { factor: 0.25, ..plain }, &[4.0; 5], &[1.0, 1.0, 0.25, 0.25, 0.0625]);
    // Of two epochs that cool, the first alone is left out: the counter is at none in the second, in
    // which the wait begins.
    let cools = Told { cooldown: 2, ..plain };
    check(&cools, &[4.0; 8], &[1.0, 1.0, 0.5, 0.5, 0.5, 0.25, 0.25, 0.25]);
    check(&Told { cooldown: 1, ..plain }, &[4.0; 6], &[1.0, 1.0, 0.5, 0.5, 0.25, 0.25]);
    check(
        &Told { cooldown: 3, patience: 1, ..plain },
        &[4.0; 6],
        &[1.0, 0.5, 0.5, 0.5, 0.25, 0.25],
    );
    // What is better while it cools is the best, and the wait begins after it.
    let values = [4.0, 4.0, 4.0, 3.0, 3.5, 3.5, 3.5];
    check(&cools, &values, &[1.0, 1.0, 0.5, 0.5, 0.5, 0.25, 0.25]);
    let values = [4.0, 4.0, 4.0, 4.0, 3.0, 3.5, 3.5];
    check(&cools, &values, &[1.0, 1.0, 0.5, 0.5, 0.5, 0.5, 0.25]);
    // Down to the least and no further: it does not cool there, nor wait anew.
    let least = Told { min_scale: 0.4, patience: 1, ..plain };
    check(&least, &[4.0; 5], &[1.0, 0.5, 0.4, 0.4, 0.4]);
    check(&Told { min_scale: 1.0, ..plain }, &[4.0; 4], &[1.0; 4]);
    // By min_delta, as early stopping.
    let coarse = Told { min_delta: 1.0, ..plain };
    check(&coarse, &[5.0, 4.0, 4.0, 3.5, 3.0], &[1.0, 1.0, 0.5, 0.5, 0.5]);
    let up = Told { mode: "max", min_delta: 0.5, ..plain };
    check(&up, &[1.0, 1.5, 1.25, 2.0, 2.5, 2.5], &[1.0, 1.0, 0.5, 0.5, 0.5, 0.25]);
    check(&up, &[-4.0, -3.0, -3.0, -4.0, f64::NAN, -2.0], &[1.0, 1.0, 1.0, 0.5, 0.5, 0.5]);
}
