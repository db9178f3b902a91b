//! Early stopping: stops a training that no longer improves.

use serde_json::Value;

use super::{Callback, Control, Logs};
use crate::{Error, Result};

/// Stops training when a validation metric has not improved for a number of validations. The state
/// is part of checkpoints, so a resumed trial stops at the same validation as an uninterrupted run.
///
/// As in Keras, larger is better if the metric's name ends in `acc`, `accuracy` or `auc`. For all
/// other names, smaller is better.
#[derive(Clone, Debug, PartialEq)]
pub struct EarlyStopping {
    metric: String,
    patience: u32,
    min_delta: f64,
    larger_is_better: bool,
    baseline: Option<f64>,
    /// Number of initial validations to ignore.
    start_after: u32,
    restores_best: bool,
    best: Option<f64>,
    num_waited: u32,
    num_seen: u32,
}

impl EarlyStopping {
    /// Watches a validation metric, for example `val_loss`. `validation_loss` has the same meaning.
    pub fn new(metric: &str) -> Self {
        let larger_is_better = ["acc", "accuracy", "auc"].iter().any(|end| metric.ends_with(end));
        let metric = match metric.strip_prefix("validation_") {
            Some(name) => format!("val_{name}"),
            None => metric.into(),
        };
        Self {
            metric,
            patience: 0,
            min_delta: 0.0,
            larger_is_better,
            baseline: None,
            start_after: 0,
            restores_best: false,
            best: None,
            num_waited: 0,
            num_seen: 0,
        }
    }

    /// Sets the number of consecutive validations without improvement after which training stops.
    /// With 0 and 1, the first such validation stops training (default: 0). As in Keras, the very
    /// first validation never does, even if its metric is NaN.
    #[must_use]
    pub fn patience(self, patience: u32) -> Self {
        Self { patience, ..self }
    }

    /// Sets the minimum change that counts as an improvement; the sign is ignored (default: 0).
    #[must_use]
    pub fn min_delta(self, min_delta: f64) -> Self {
        Self { min_delta: min_delta.abs(), ..self }
    }

    /// Treats larger values as better, regardless of the metric's name.
    #[must_use]
    pub fn larger_is_better(self) -> Self {
        Self { larger_is_better: true, ..self }
    }

    /// Treats smaller values as better, regardless of the metric's name.
    #[must_use]
    pub fn smaller_is_better(self) -> Self {
        Self { larger_is_better: false, ..self }
    }

    /// Resets the patience counter only when an improvement also beats this baseline.
    #[must_use]
    pub fn baseline(self, baseline: f64) -> Self {
        Self { baseline: Some(baseline), ..self }
    }

    /// Ignores this many validations at the start (default: 0).
    #[must_use]
    pub fn start_after(self, validations: u32) -> Self {
        Self { start_after: validations, ..self }
    }

    /// Ends training with the weights of the best validation; see [`Control::keep_weights`]. This
    /// applies if this or another callback stops training, and if training reaches its length.
    #[must_use]
    pub fn restore_best_weights(self) -> Self {
        Self { restores_best: true, ..self }
    }

    /// Records a validation and returns whether it is the best so far.
    pub(super) fn notes(&mut self, logs: &Logs) -> Result<bool> {
        let Some(value) = logs.get(&self.metric).copied() else {
            return Err(missing_metric(&self.metric, logs));
        };
        let is_better = self.is_better(value);
        if is_better {
            self.best = Some(value);
        }
        Ok(is_better)
    }

    fn is_better(&self, value: f64) -> bool {
        self.best.map_or(!value.is_nan(), |best| self.is_better_than(value, best))
    }

    fn is_better_than(&self, value: f64, other: f64) -> bool {
        let gain = if self.larger_is_better { value - other } else { other - value };
        gain > self.min_delta
    }
}

/// Returns the error of a callback whose metric is not in the means of a validation.
pub(crate) fn missing_metric(metric: &str, logs: &Logs) -> Error {
    let names = logs.keys().map(String::as_str).collect::<Vec<_>>().join(", ");
    let of_validation = format!("val_{metric}");
    let remedy = if logs.contains_key(&of_validation) {
        format!("callbacks watch the metrics of validations; did you mean {of_validation}?")
    } else {
        "watch one of these, or report it in validations".to_owned()
    };
    format!("metric {metric} not found: validation reported {names}; {remedy}").into()
}

impl Callback for EarlyStopping {
    fn wants_batch_logs(&self) -> bool {
        false
    }

    fn needs_validation(&self) -> bool {
        true
    }

    fn watched_metric(&self) -> Option<&str> {
        Some(&self.metric)
    }

    fn on_validation_end(&mut self, logs: &Logs, control: &mut Control) -> Result<()> {
        self.num_seen += 1;
        if self.num_seen <= self.start_after {
            return Ok(());
        }
        self.num_waited += 1;
        if self.notes(logs)? {
            let best = self.best.unwrap_or(f64::NAN);
            if self.baseline.is_none_or(|baseline| self.is_better_than(best, baseline)) {
                self.num_waited = 0;
            }
            if self.restores_best {
                control.keep_weights();
            }
            return Ok(());
        }
        // The first validation has nothing to improve on; Keras has the same rule.
        if self.num_waited >= self.patience && self.num_seen > 1 {
            let best = self.best.unwrap_or(f64::NAN);
            let (metric, waited) = (&self.metric, self.num_waited);
            control.stop_training(format!(
                "{metric} has not improved on {best} for {waited} validations"
            ));
        }
        Ok(())
    }

    fn state(&self) -> Result<Value> {
        let best = self.best.map(f64::to_bits);
        Ok(serde_json::to_value((best, self.num_waited, self.num_seen))?)
    }

    fn load_state(&mut self, state: Value) -> Result<()> {
        let best: Option<u64>;
        (best, self.num_waited, self.num_seen) = serde_json::from_value(state)?;
        self.best = best.map(f64::from_bits);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the index of the validation at which `stopping` stops, given the metric of each. The
    /// state is moved to a new callback after each validation.
    fn stops_after(stopping: &EarlyStopping, values: &[f64]) -> Option<usize> {
        let (mut current, metric) = (stopping.clone(), stopping.metric.clone());
        values.iter().position(|value| {
            let mut control = Control::default();
            current
                .on_validation_end(&Logs::from([(metric.clone(), *value)]), &mut control)
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
        check(watch.clone().min_delta(-0.5), &[3.0, 2.6], Some(1));
        check(watch.clone().larger_is_better(), &[3.0, 4.0, 3.5], Some(2));
        let named = EarlyStopping::new("val_accuracy");
        check(named.clone(), &[0.3, 0.4, 0.35], Some(2));
        check(named.smaller_is_better(), &[0.3, 0.4], Some(1));
        check(watch.clone().start_after(2), &[3.0, 9.0, 5.0, 4.0, 4.0], Some(4));
        // An improvement that does not beat the baseline does not reset the counter, and the next
        // validation without improvement stops training.
        check(watch.clone().patience(2).baseline(1.0), &[3.0, 2.0, 2.0], Some(2));
        check(watch.clone().patience(2).baseline(2.5), &[3.0, 2.0, 2.0], None);
        check(watch.clone().patience(2).baseline(2.5), &[3.0, 2.0, 2.0, 2.0], Some(3));
        check(watch.clone().patience(2), &[f64::NAN, 1.0, f64::NAN, f64::NAN], Some(3));
    }

    #[test]
    fn best_weights_are_kept_on_request() {
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
    fn missing_metric_error_lists_available_metrics() {
        let logs = Logs::from([("val_accuracy".into(), 1.0)]);
        let error = EarlyStopping::new("val_los").on_validation_end(&logs, &mut Control::default());
        assert_eq!(
            error.unwrap_err().to_string(),
            "metric val_los not found: validation reported val_accuracy; watch one of these, or \
             report it in validations"
        );
        assert_eq!(
            missing_metric("accuracy", &logs).to_string(),
            "metric accuracy not found: validation reported val_accuracy; callbacks watch the \
             metrics of validations; did you mean val_accuracy?"
        );
    }
}
