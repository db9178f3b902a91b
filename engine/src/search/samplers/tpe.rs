//! Tree-structured Parzen estimator (TPE): samples where good trials are denser than bad ones.
//!
//! Source: Bergstra et al., "Algorithms for Hyper-Parameter Optimization" (2011); numbers as in
//! Optuna: 10 random trials, 24 candidates, a tenth of the trials is good, at most 25.

use serde_json::Value;
use stoker_api::hyperparameters::{Parameter, Space};

use super::parzen::{Axis, Parzen};
use crate::search::rng::Random;
use crate::search::rung::Loss;
use crate::search::sample::{json_number, normalized, sample};

/// Trials with random hyperparameters at the beginning.
const NUM_RANDOM: usize = 10;
/// Candidates for each choice.
const NUM_CANDIDATES: usize = 24;
/// Maximum number of good trials.
const GOOD_MAX: usize = 25;

/// Parameters of a space that vary, as axes.
#[derive(Clone, Debug, PartialEq)]
pub struct Tpe {
    space: Space,
    parameters: Vec<Parameter>,
    axes: Vec<Axis>,
    is_multivariate: bool,
}

/// A trial from which TPE learns.
#[derive(Clone, Debug, PartialEq)]
pub struct Observation {
    /// Coordinates, by [`Tpe::coordinates`].
    pub point: Vec<f64>,
    /// Loss; `None` while the trial runs, which counts as bad.
    pub loss: Option<Loss>,
}

impl Tpe {
    /// Returns a sampler of a space. With `is_multivariate`, it estimates all parameters jointly.
    pub fn new(space: Space, is_multivariate: bool) -> Self {
        let mut parameters = vec![];
        collect(&space, &mut parameters);
        let axes = parameters.iter().filter_map(axis).collect();
        parameters.retain(|parameter| axis(parameter).is_some());
        Self { space, parameters, axes, is_multivariate }
    }

    /// Returns the coordinates of hyperparameters; `None` if they are not of this space.
    pub fn coordinates(&self, hyperparameters: &Value) -> Option<Vec<f64>> {
        let mut point = vec![];
        locate(&self.space, hyperparameters, &mut point)?;
        Some(point)
    }

    /// Samples hyperparameters. Observations are in the order of their trials.
    pub fn draw(&self, observations: &[Observation], random: &mut Random) -> Value {
        let mut finished: Vec<(Loss, usize)> = vec![];
        for (index, Observation { loss, .. }) in observations.iter().enumerate() {
            finished.extend(loss.map(|loss| (loss, index)));
        }
        if finished.len() < NUM_RANDOM || self.axes.is_empty() {
            return sample(&self.space, random);
        }
        // Of equal losses, the older trial is better.
        finished.sort_unstable();
        let num_good = finished.len().div_ceil(10).min(GOOD_MAX);
        let mut is_good = vec![false; observations.len()];
        finished[..num_good].iter().for_each(|(_, index)| is_good[*index] = true);
        let points = |of_good: bool| -> Vec<Vec<f64>> {
            let marked = observations.iter().zip(&is_good);
            let chosen = marked.filter(|(_, is_good)| **is_good == of_good);
            chosen.map(|(observation, _)| observation.point.clone()).collect()
        };
        let (good, bad) = (points(true), points(false));
        let point = match self.is_multivariate {
            true => best_candidate(&self.axes, &good, &bad, random),
            false => (0..self.axes.len())
                .flat_map(|axis| {
                    let column = |points: &[Vec<f64>]| -> Vec<Vec<f64>> {
                        points.iter().map(|point| vec![point[axis]]).collect()
                    };
                    best_candidate(&self.axes[axis..=axis], &column(&good), &column(&bad), random)
                })
                .collect(),
        };
        self.hyperparameters(&point)
    }

    fn hyperparameters(&self, point: &[f64]) -> Value {
        let mut values = self.parameters.iter().zip(point).map(|(parameter, x)| match parameter {
            Parameter::Const(value) => value.clone(),
            Parameter::Int(_) => Value::from(*x as i64),
            Parameter::Double(_) => json_number(*x),
            Parameter::Log(range) => json_number(range.base.powf(*x)),
            Parameter::Categorical(values) => values[*x as usize].clone(),
        });
        assemble(&self.space, &mut values)
    }
}

/// Returns the candidate from the good points with the greatest ratio of densities.
fn best_candidate(
    axes: &[Axis],
    good: &[Vec<f64>],
    bad: &[Vec<f64>],
    random: &mut Random,
) -> Vec<f64> {
    let (good, bad) = (Parzen::new(axes, good), Parzen::new(axes, bad));
    let mut best: Option<(f64, Vec<f64>)> = None;
    for _ in 0..NUM_CANDIDATES {
        let point = good.sample(random);
        let ratio = good.log_density(&point) - bad.log_density(&point);
        if best.as_ref().is_none_or(|(most, _)| ratio > *most) {
            best = Some((ratio, point));
        }
    }
    best.map(|(_, point)| point).unwrap_or_default()
}

fn collect(space: &Space, parameters: &mut Vec<Parameter>) {
    match space {
        Space::Parameter(parameter) => parameters.push(parameter.clone()),
        Space::Group(members) => members.values().for_each(|member| collect(member, parameters)),
    }
}

/// Returns the axis of a parameter; `None` for a constant.
fn axis(parameter: &Parameter) -> Option<Axis> {
    match parameter {
        Parameter::Const(_) => None,
        Parameter::Int(range) => {
            Some(Axis::Integer { low: range.min as f64, high: range.max as f64 })
        }
        Parameter::Double(range) => Some(Axis::Number { low: range.min, high: range.max }),
        Parameter::Log(range) => Some(Axis::Number { low: range.min, high: range.max }),
        Parameter::Categorical(values) => Some(Axis::Choice(values.len())),
    }
}

fn locate(space: &Space, value: &Value, point: &mut Vec<f64>) -> Option<()> {
    match space {
        Space::Parameter(parameter) => {
            match parameter {
                Parameter::Const(_) => {}
                Parameter::Int(range) => {
                    point.push((value.as_i64()? as f64).clamp(range.min as f64, range.max as f64));
                }
                Parameter::Double(range) => point.push(value.as_f64()?.clamp(range.min, range.max)),
                Parameter::Log(range) => {
                    let exponent = value.as_f64()?.ln() / range.base.ln();
                    point.push(exponent.clamp(range.min, range.max));
                }
                Parameter::Categorical(values) => {
                    let index = values.iter().position(|choice| normalized(choice) == *value)?;
                    point.push(index as f64);
                }
            }
            Some(())
        }
        Space::Group(members) => {
            members.iter().try_for_each(|(name, member)| locate(member, value.get(name)?, point))
        }
    }
}

fn assemble(space: &Space, values: &mut impl Iterator<Item = Value>) -> Value {
    match space {
        Space::Parameter(Parameter::Const(value)) => value.clone(),
        Space::Parameter(_) => values.next().unwrap_or_default(),
        Space::Group(members) => {
            let members = members.iter();
            Value::Object(
                members.map(|(name, member)| (name.clone(), assemble(member, values))).collect(),
            )
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn space() -> Space {
        let parameters = json!({
            "rate": { "log": { "base": 10.0, "min": -5.0, "max": 0.0 } },
            "dropout": { "double": { "min": 0.0, "max": 0.9 } },
            "layers": { "int": { "min": 1, "max": 8 } },
            "optimizer": { "categorical": ["sgd", "adam", "adagrad"] },
            "fixed": { "const": 7 },
        });
        Space::parse(&parameters).unwrap()
    }

    /// A smooth function of all parameters, with its minimum 0 inside the space.
    fn loss(value: &Value) -> f64 {
        let number = |name: &str| value[name].as_f64().unwrap();
        let choice = if value["optimizer"] == "adam" { 0.0 } else { 0.5 };
        (number("rate").log10() + 3.0).powi(2) / 4.0
            + (number("dropout") - 0.3).powi(2) * 4.0
            + (number("layers") - 5.0).powi(2) / 8.0
            + choice
    }

    /// Returns the least loss of 60 trials.
    fn search(seed: u32, is_multivariate: Option<bool>) -> f64 {
        let tpe = Tpe::new(space(), is_multivariate == Some(true));
        let mut random = Random::new(seed);
        let mut observations = vec![];
        let mut best = f64::INFINITY;
        for _ in 0..60 {
            let value = match is_multivariate {
                None => sample(&space(), &mut random),
                Some(_) => tpe.draw(&observations, &mut random),
            };
            let value = normalized(&value);
            best = best.min(loss(&value));
            let point = tpe.coordinates(&value).unwrap();
            observations.push(Observation { point, loss: Some(Loss::new(loss(&value))) });
        }
        best
    }

    #[test]
    fn tpe_finds_better_hyperparameters_than_random() {
        let mean =
            |is_multivariate| (0..20).map(|seed| search(seed, is_multivariate)).sum::<f64>() / 20.0;
        let (random, tpe, joint) = (mean(None), mean(Some(false)), mean(Some(true)));
        assert!(tpe < 0.5 * random, "{tpe} {random}");
        assert!(joint < 0.5 * random, "{joint} {random}");
    }

    #[test]
    fn coordinates_lead_back_to_the_hyperparameters() {
        let tpe = Tpe::new(space(), false);
        let mut random = Random::new(1);
        for _ in 0..100 {
            let value = normalized(&sample(&space(), &mut random));
            let point = tpe.coordinates(&value).unwrap();
            let back = normalized(&tpe.hyperparameters(&point));
            for name in ["dropout", "layers", "optimizer", "fixed"] {
                assert_eq!(back[name], value[name]);
            }
            let ratio = back["rate"].as_f64().unwrap() / value["rate"].as_f64().unwrap();
            assert!((ratio - 1.0).abs() < 1e-12, "{ratio}");
        }
        assert_eq!(tpe.coordinates(&json!({ "rate": 0.1 })), None);
    }
}
