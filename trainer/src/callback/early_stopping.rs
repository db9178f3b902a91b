//! Stops a training that has stopped getting better.

use serde_json::Value;

use super::{Callback, Control, Logs};
use crate::Result;

/// Stops when a metric has not become better for some validations. Stateful: a resumed trial waits
/// no longer than one never stopped.
#[derive(Clone, Debug, PartialEq)]
pub struct EarlyStopping {
    metric: String,
    patience: u32,
    min_delta: f64,
    larger_is_better: bool,
    restores_best: bool,
    best: Option<f64>,
    num_waited: u32,
}

impl EarlyStopping {
    /// Watches a metric of validation, such as `val_loss`; smaller is better.
    pub fn new(metric: &str) -> Self {
        Self {
            metric: metric.into(),
            patience: 0,
            min_delta: 0.0,
            larger_is_better: false,
            restores_best: false,
            best: None,
            num_waited: 0,
        }
    }

    /// The validation without improvement after which training stops, in a row of them: at 0 and at 1
    /// the first, as in Keras (default: 0).
    #[must_use]
    pub fn patience(self, patience: u32) -> Self {
        Self { patience, ..self }
    }

    /// What counts as an improvement: more than this (default: 0).
    #[must_use]
    pub fn min_delta(self, min_delta: f64) -> Self {
        Self { min_delta, ..self }
    }

    /// A larger metric is a better one, as with an accuracy.
    #[must_use]
    pub fn larger_is_better(self) -> Self {
        Self { larger_is_better: true, ..self }
    }

    /// Ends training with the weights of the best validation, as [`Control::keep_weights`] says: whether
    /// this callback stops it, another one does, or it reaches its length.
    #[must_use]
    pub fn restore_best_weights(self) -> Self {
        Self { restores_best: true, ..self }
    }

    /// Takes in a validation; says whether it is the best yet.
    pub(super) fn notes(&mut self, logs: &Logs) -> Result<bool> {
        let Some(value) = logs.get(&self.metric).copied() else {
            let names = logs.keys().map(String::as_str).collect::<Vec<_>>().join(", ");
            return Err(format!("there is no metric {}; there are {names}", self.metric).into());
        };
        let is_better = self.is_better(value);
        if is_better {
            self.best = Some(value);
        }
        Ok(is_better)
    }

    fn is_better(&self, value: f64) -> bool {
        let Some(best) = self.best else { return !value.is_nan() };
        let gain = if self.larger_is_better { value - best } else { best - value };
        gain > self.min_delta
    }
}

impl Callback for EarlyStopping {
    fn on_validation_end(&mut self, logs: &Logs, control: &mut Control) -> Result<()> {
        if self.notes(logs)? {
            self.num_waited = 0;
            if self.restores_best {
                control.keep_weights();
            }
            return Ok(());
        }
        self.num_waited += 1;
        if self.num_waited >= self.patience {
            let best = self.best.unwrap_or(f64::NAN);
            let (metric, waited) = (&self.metric, self.num_waited);
            control.stop_training(format!(
                "{metric} has not improved on {best} for {waited} validations"
            ));
        }
        Ok(())
    }

    fn state(&self) -> Result<Value> {
        Ok(serde_json::to_value((self.best.map(f64::to_bits), self.num_waited))?)
    }

    fn load_state(&mut self, state: Value) -> Result<()> {
        let (best, num_waited): (Option<u64>, u32) = serde_json::from_value(state)?;
        (self.best, self.num_waited) = (best.map(f64::from_bits), num_waited);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The validation after which `stopping` stops, where each has one of `values`; its state is
    /// carried to a new callback after each.
    fn stops_after(stopping: &EarlyStopping, values: &[f64]) -> Option<usize> {
        let mut current = stopping.clone();
        values.iter().position(|value| {
            let mut control = Control::default();
            current
                .on_validation_end(&Logs::from([("val_loss".into(), *value)]), &mut control)
                .unwrap();
            let state = current.state().unwrap();
            current = stopping.clone();
            current.load_state(state).unwrap();
            control.stop.is_some()
        })
    }

    #[test]
    fn stops_after_patience_and_keeps_its_state() {
        let watch = EarlyStopping::new("val_loss");
        let check = |stopping: EarlyStopping, values: &[f64], expected| {
            assert_eq!(stops_after(&stopping, values), expected, "{stopping:?} {values:?}");
        };
        check(watch.clone(), &[3.0, 2.0, 1.0], None);
        check(watch.clone(), &[3.0, 3.0], Some(1));
        check(watch.clone().patience(1), &[3.0, 3.0], Some(1));
        check(watch.clone().patience(3), &[3.0, 4.0, 4.0, 4.0], Some(3));
        check(watch.clone().patience(3), &[3.0, 4.0, 4.0, 2.0, 4.0, 4.0], None);
        check(watch.clone().min_delta(0.5), &[3.0, 2.6], Some(1));
        check(watch.clone().larger_is_better(), &[3.0, 4.0, 3.5], Some(2));
        check(watch.clone().patience(2), &[f64::NAN, 1.0, f64::NAN, f64::NAN], Some(3));
    }

    #[test]
    fn weights_are_kept_at_each_best_validation_if_asked_for() {
        let check = |mut stopping: EarlyStopping, expected: [bool; 3]| {
            let kept = [2.0, 1.0, 3.0].map(|value| {
                let (logs, mut control) =
                    (Logs::from([("val_loss".into(), value)]), Control::default());
                stopping.on_validation_end(&logs, &mut control).unwrap();
                control.keeps_weights
            });
            assert_eq!(kept, expected);
        };
        check(EarlyStopping::new("val_loss").patience(9), [false; 3]);
        check(
            EarlyStopping::new("val_loss").patience(9).restore_best_weights(),
            [true, true, false],
        );
    }

    #[test]
    fn a_metric_that_is_not_there_is_an_error_with_those_that_are() {
        let logs = Logs::from([("val_accuracy".into(), 1.0)]);
        let error = EarlyStopping::new("val_los").on_validation_end(&logs, &mut Control::default());
        assert_eq!(
            error.unwrap_err().to_string(),
            "there is no metric val_los; there are val_accuracy"
        );
    }
}
