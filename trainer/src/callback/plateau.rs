//! Lowers the learning rate where a metric has stopped getting better.

use serde_json::Value;

use super::{Callback, Control, EarlyStopping, Logs};
use crate::Result;

/// Multiplies the learning rate by a factor when a metric of validation has not become better for some
/// validations. Stateful, with the rules of Keras' `ReduceLROnPlateau`.
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
    /// Watches a metric such as `val_loss`; which direction is better goes by its name, as with
    /// [`EarlyStopping`]. Divides by ten after ten validations.
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

    /// What the learning rate is multiplied by: more than 0 and less than 1 (default: 0.1).
    #[must_use]
    pub fn factor(self, factor: f64) -> Self {
        Self { factor, ..self }
    }

    /// The validation without improvement after which that happens (default: the tenth).
    #[must_use]
    pub fn patience(self, patience: u32) -> Self {
        Self { patience, ..self }
    }

    /// What counts as an improvement: more than this (default: 1e-4).
    #[must_use]
    pub fn min_delta(self, min_delta: f64) -> Self {
        Self { watch: self.watch.min_delta(min_delta), ..self }
    }

    /// Validations after a reduction that do not count (default: 0).
    #[must_use]
    pub fn cooldown(self, cooldown: u32) -> Self {
        Self { cooldown, ..self }
    }

    /// The least that the schedule is multiplied by (default: 0).
    #[must_use]
    pub fn min_scale(self, min_scale: f64) -> Self {
        Self { min_scale, ..self }
    }

    /// A larger metric is a better one, whatever it is called.
    #[must_use]
    pub fn larger_is_better(self) -> Self {
        Self { watch: self.watch.larger_is_better(), ..self }
    }

    /// A smaller metric is a better one, whatever it is called.
    #[must_use]
    pub fn smaller_is_better(self) -> Self {
        Self { watch: self.watch.smaller_is_better(), ..self }
    }
}

impl Callback for ReduceOnPlateau {
    fn on_train_begin(&mut self, _: &mut Control) -> Result<()> {
        match self.factor {
            factor if factor > 0.0 && factor < 1.0 => Ok(()),
            factor => {
                Err(format!("factor is {factor}, but must be more than 0 and less than 1").into())
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

    /// The scale after each validation; the state is carried to a new callback after each.
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
    fn the_rate_falls_after_patience_and_not_while_it_cools() {
        let reduce = ReduceOnPlateau::new("val_loss").factor(0.5).patience(2);
        assert_eq!(scales(&reduce, &[3.0, 3.0, 3.0, 3.0, 3.0]), [1.0, 1.0, 0.5, 0.5, 0.25]);
        assert_eq!(scales(&reduce, &[3.0, 3.0, 2.0, 3.0, 3.0]), [1.0, 1.0, 1.0, 1.0, 0.5]);
        // Two that do not count, of which the second begins to wait again, as Keras has it.
        let cools = reduce.clone().cooldown(2);
        let expected = [1.0, 1.0, 0.5, 0.5, 0.5, 0.25];
        assert_eq!(scales(&cools, &[3.0; 6]), expected);
        let least = reduce.min_scale(0.4);
        assert_eq!(scales(&least, &[3.0; 7]), [1.0, 1.0, 0.5, 0.5, 0.4, 0.4, 0.4]);
    }
}
