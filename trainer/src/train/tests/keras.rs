//! Tables of what `EarlyStopping` and `ReduceLROnPlateau` do, derived from the rules in Keras'
//! documentation:
//!
//! - *Improvement*: less than the best by more than `min_delta`, or greater in mode `max`. It
//!   resets the wait.
//! - *Stop*: after `patience` consecutive epochs without improvement, but not after the first
//!   epoch. The documentation does not mention the first epoch; Keras 3 checks it.
//! - *Reduce*: likewise, to `max(rate * factor, min_lr)`. The next `cooldown` epochs do not count,
//!   but an improvement in them becomes the best.

use super::*;
use crate::ReduceOnPlateau;

/// Calls the validation hook with each value. Returns the scale after each, until training stops.
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
    // Columns: mode, min_delta, patience, metric of each epoch, number of epochs trained.
    check("min", 0.0, 0, &[5.0, 4.0, 4.0, 3.0], 3);
    check("min", 0.0, 1, &[5.0, 4.0, 4.0, 3.0], 3);
    check("min", 0.0, 2, &[5.0, 4.0, 4.0, 3.0], 4);
    check("min", 0.0, 2, &[5.0, 4.0, 4.0, 4.0, 3.0], 4);
    // The best is over all epochs, not only the last ones.
    check("min", 0.0, 2, &[2.0, 5.0, 4.0, 3.0], 3);
    check("min", 0.0, 3, &[2.0, 5.0, 4.0, 1.0, 5.0, 5.0, 5.0, 0.0], 7);
    // A gain of exactly `min_delta` is not an improvement. A larger one is, and becomes the best.
    check("min", 1.0, 2, &[5.0, 4.0, 4.0, 0.0], 3);
    check("min", 1.0, 2, &[5.0, 4.5, 3.5, 3.0, 2.0, 2.0, 2.0, 0.0], 7);
    check("min", 0.5, 1, &[8.0, 7.0, 6.0, 5.75, 5.0], 4);
    // Slow gains accumulate: 0.4 per epoch is less than 0.5, but 0.8 in two epochs is more.
    check("min", 0.5, 2, &[8.0, 7.6, 7.2, 6.8, 6.4, 6.4, 6.4], 7);
    check("max", 0.0, 2, &[1.0, 2.0, 2.0, 3.0, 3.0, 2.0, 9.0], 6);
    check("max", 0.5, 2, &[1.0, 1.25, 1.5, 9.0], 3);
    check("max", 0.5, 2, &[1.0, 1.25, 1.75, 2.0, 2.5, 2.5, 2.5, 9.0], 7);
    check("max", 0.0, 1, &[-3.0, -2.0, -2.5], 3);
    // NaN is not an improvement.
    check("min", 0.0, 2, &[3.0, f64::NAN, f64::NAN, 1.0], 3);
    check("min", 0.0, 0, &[f64::NAN, 3.0, 4.0, 1.0], 3);
    check("min", 0.0, 1, &[f64::NAN, f64::NAN, 1.0], 2);
    check("max", 0.0, 2, &[3.0, f64::NAN, 4.0, f64::NAN, f64::INFINITY, f64::NAN], 6);
}

/// Settings of `ReduceOnPlateau`.
struct Settings {
    mode: &'static str,
    min_delta: f64,
    patience: u32,
    cooldown: u32,
    factor: f64,
    min_scale: f64,
}

#[test]
fn plateau_reduces_the_rate_like_keras() {
    let check = |settings: &Settings, values: &[f64], expected: &[f64]| {
        let Settings { mode, min_delta, patience, cooldown, factor, min_scale } = *settings;
        let reduce = ReduceOnPlateau::new("val_it")
            .min_delta(min_delta)
            .patience(patience)
            .cooldown(cooldown)
            .factor(factor)
            .min_scale(min_scale);
        let reduce = if mode == "max" { reduce.larger_is_better() } else { reduce };
        assert_eq!(scales(reduce, values), expected, "{mode} {patience} {cooldown} {values:?}");
    };
    let plain = Settings {
        mode: "min",
        min_delta: 0.0,
        patience: 2,
        cooldown: 0,
        factor: 0.5,
        min_scale: 0.0,
    };
    // Scale after each epoch; it is 1 at first.
    check(&plain, &[4.0, 3.0, 3.0, 3.0, 3.0, 3.0], &[1.0, 1.0, 1.0, 0.5, 0.5, 0.25]);
    check(&plain, &[4.0, 4.0, 3.0, 3.0, 2.0, 2.0], &[1.0; 6]);
    check(&Settings { patience: 1, ..plain }, &[4.0, 4.0, 3.0, 3.0], &[1.0, 0.5, 0.5, 0.25]);
    // Patience 0 is the same as 1: an improvement never reduces the rate.
    check(&Settings { patience: 0, ..plain }, &[4.0, 4.0, 3.0, 3.0], &[1.0, 0.5, 0.5, 0.25]);
    check(&Settings { factor: 0.25, ..plain }, &[4.0; 5], &[1.0, 1.0, 0.25, 0.25, 0.0625]);
    // With two cooldown epochs, only the first is ignored. The counter reaches zero in the second,
    // in which the wait starts.
    let cools = Settings { cooldown: 2, ..plain };
    check(&cools, &[4.0; 8], &[1.0, 1.0, 0.5, 0.5, 0.5, 0.25, 0.25, 0.25]);
    check(&Settings { cooldown: 1, ..plain }, &[4.0; 6], &[1.0, 1.0, 0.5, 0.5, 0.25, 0.25]);
    check(
        &Settings { cooldown: 3, patience: 1, ..plain },
        &[4.0; 6],
        &[1.0, 0.5, 0.5, 0.5, 0.25, 0.25],
    );
    // An improvement during the cooldown becomes the best, and the wait starts after it.
    let values = [4.0, 4.0, 4.0, 3.0, 3.5, 3.5, 3.5];
    check(&cools, &values, &[1.0, 1.0, 0.5, 0.5, 0.5, 0.25, 0.25]);
    let values = [4.0, 4.0, 4.0, 4.0, 3.0, 3.5, 3.5];
    check(&cools, &values, &[1.0, 1.0, 0.5, 0.5, 0.5, 0.5, 0.25]);
    // At the minimum, there is neither a cooldown nor a reset of the wait.
    let least = Settings { min_scale: 0.4, patience: 1, ..plain };
    check(&least, &[4.0; 5], &[1.0, 0.5, 0.4, 0.4, 0.4]);
    check(&Settings { min_scale: 1.0, ..plain }, &[4.0; 4], &[1.0; 4]);
    // `min_delta` works as in early stopping.
    let coarse = Settings { min_delta: 1.0, ..plain };
    check(&coarse, &[5.0, 4.0, 4.0, 3.5, 3.0], &[1.0, 1.0, 0.5, 0.5, 0.5]);
    let up = Settings { mode: "max", min_delta: 0.5, ..plain };
    check(&up, &[1.0, 1.5, 1.25, 2.0, 2.5, 2.5], &[1.0, 1.0, 0.5, 0.5, 0.5, 0.25]);
    check(&up, &[-4.0, -3.0, -3.0, -4.0, f64::NAN, -2.0], &[1.0, 1.0, 1.0, 0.5, 0.5, 0.5]);
}
