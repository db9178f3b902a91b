//! Reduces the learning rate when a metric stops improving.

use serde_json::Value;

use super::{Callback, Control, EarlyStopping, Logs};
use crate::Result;

/// Multiplies the learning rate by a factor when a validation metric has not improved for a number
/// of validations. Follows the rules of Keras' `ReduceLROnPlateau` and keeps its state in
/// checkpoints.
#[derive(Clone, Debug, PartialEq)]
pub struct ReduceOnPlateau {
    watch: EarlyStopping,
    factor: f64,
    patience: u32,
    cooldown: u32,
    min_scale: f64,
    num_waited: u32,
    num_cooling: u32,
}

impl ReduceOnPlateau {
    /// Watches a validation metric, for example `val_loss`. The metric's name determines the
    /// direction, as with [`EarlyStopping`]. By default, divides the learning rate by ten after ten
    /// validations without improvement.
    pub fn new(metric: &str) -> Self {
        Self {
            watch: EarlyStopping::new(metric).min_delta(1e-4),
            factor: 0.1,
            patience: 10,
            cooldown: 0,
            min_scale: 0.0,
            num_waited: 0,
            num_cooling: 0,
        }
    }

    /// Sets the factor for the learning rate: more than 0 and less than 1 (default: 0.1).
    #[must_use]
    pub fn factor(self, factor: f64) -> Self {
        Self { factor, ..self }
    }

    /// Sets the number of validations without improvement before a reduction (default: 10).
    #[must_use]
    pub fn patience(self, patience: u32) -> Self {
        Self { patience, ..self }
    }

    /// Sets the minimum change that counts as an improvement (default: 1e-4).
    #[must_use]
    pub fn min_delta(self, min_delta: f64) -> Self {
        Self { watch: self.watch.min_delta(min_delta), ..self }
    }

    /// Sets how many validations to ignore after a reduction (default: 0).
    #[must_use]
    pub fn cooldown(self, cooldown: u32) -> Self {
        Self { cooldown, ..self }
    }

    /// Sets the lower bound of the learning rate factor (default: 0).
    #[must_use]
    pub fn min_scale(self, min_scale: f64) -> Self {
        Self { min_scale, ..self }
    }

    /// Treats larger values as better, regardless of the metric's name.
    #[must_use]
    pub fn larger_is_better(self) -> Self {
        Self { watch: self.watch.larger_is_better(), ..self }
    }

    /// Treats smaller values as better, regardless of the metric's name.
    #[must_use]
    pub fn smaller_is_better(self) -> Self {
        Self { watch: self.watch.smaller_is_better(), ..self }
    }
}

impl Callback for ReduceOnPlateau {
    fn wants_batch_logs(&self) -> bool {
        false
    }

    fn needs_validation(&self) -> bool {
        true
    }

    fn watched_metric(&self) -> Option<&str> {
        self.watch.watched_metric()
    }

    fn on_train_begin(&mut self, _: &mut Control) -> Result<()> {
        match self.factor {
            factor if factor > 0.0 && factor < 1.0 => Ok(()),
            factor => {
                Err(format!("factor is {factor}; it must be more than 0 and less than 1").into())
            }
        }
    }

    fn on_validation_end(&mut self, logs: &Logs, control: &mut Control) -> Result<()> {
        let is_better = self.watch.notes(logs)?;
        if self.num_cooling > 0 {
            self.num_cooling -= 1;
            self.num_waited = 0;
        }
        if is_better {
            self.num_waited = 0;
        } else if self.num_cooling == 0 {
            self.num_waited += 1;
            if self.num_waited >= self.patience {
                let scale = control.learning_rate_scale();
                if scale > self.min_scale {
                    control.set_learning_rate_scale((scale * self.factor).max(self.min_scale));
                    self.num_cooling = self.cooldown;
                    self.num_waited = 0;
                }
            }
        }
        Ok(())
    }

    fn state(&self) -> Result<Value> {
        Ok(serde_json::to_value((self.watch.state()?, self.num_waited, self.num_cooling))?)
    }

    fn load_state(&mut self, state: Value) -> Result<()> {
        let watch;
        (watch, self.num_waited, self.num_cooling) = serde_json::from_value(state)?;
        self.watch.load_state(watch)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the scale after each validation. The state is moved to a new callback after each.
    fn scales(reduce: &ReduceOnPlateau, values: &[f64]) -> Vec<f64> {
        let (mut current, mut scale) = (reduce.clone(), 1.0);
        let mut all = vec![];
        for value in values {
            let mut control = Control { learning_rate_scale: scale, ..Control::default() };
            let logs = Logs::from([("val_loss".into(), *value)]);
            current.on_validation_end(&logs, &mut control).unwrap();
            scale = control.learning_rate_scale();
            all.push(scale);
            let state = current.state().unwrap();
            current = reduce.clone();
            current.load_state(state).unwrap();
        }
        all
    }

    #[test]
    fn rate_falls_after_patience_and_cooldown() {
        let reduce = ReduceOnPlateau::new("val_loss").factor(0.5).patience(2);
        assert_eq!(scales(&reduce, &[3.0, 3.0, 3.0, 3.0, 3.0]), [1.0, 1.0, 0.5, 0.5, 0.25]);
        assert_eq!(scales(&reduce, &[3.0, 3.0, 2.0, 3.0, 3.0]), [1.0, 1.0, 1.0, 1.0, 0.5]);
        // The first validation after a reduction is ignored. During the second, the counter starts
        // again, as in Keras.
        let cools = reduce.clone().cooldown(2);
        let expected = [1.0, 1.0, 0.5, 0.5, 0.5, 0.25];
        assert_eq!(scales(&cools, &[3.0; 6]), expected);
        let least = reduce.min_scale(0.4);
        assert_eq!(scales(&least, &[3.0; 7]), [1.0, 1.0, 0.5, 0.5, 0.4, 0.4, 0.4]);
    }
}
