//! Changed copies of hyperparameters, for population based training.

use serde_json::Value;
use stoker_api::hyperparameters::{Parameter, Space};

use crate::search::rng::Random;
use crate::search::sample::{group_of, json_number, sample};

/// How a copy differs from its original.
///
/// Source: Determined's PBT searcher: each parameter is sampled again with some probability;
/// otherwise a number grows or shrinks by a factor, and everything else stays. A choice keeps its
/// group, whose members change.
#[derive(Clone, Debug, PartialEq)]
pub struct Explore {
    /// Space of the hyperparameters.
    pub space: Space,
    /// Probability that a parameter is sampled again, from 0 to 1.
    pub resample_probability: f64,
    /// Relative change of a number, from 0 to 1.
    pub perturb_factor: f64,
}

impl Explore {
    /// Returns a changed copy, or a random sample without an original.
    pub fn draw(&self, original: Option<&Value>, random: &mut Random) -> Value {
        match original {
            None => sample(&self.space, random),
            Some(original) => self.change(&self.space, original, random),
        }
    }

    fn change(&self, space: &Space, original: &Value, random: &mut Random) -> Value {
        match space {
            Space::Parameter(parameter) => self.change_parameter(parameter, original, random),
            Space::Group(members) => {
                let change = |(name, member): (&String, &Space)| {
                    let value = original.get(name).unwrap_or(&Value::Null);
                    (name.clone(), self.change(member, value, random))
                };
                Value::Object(members.iter().map(change).collect())
            }
            Space::OneOf(groups) => {
                let is_resampled = random.unit() < self.resample_probability;
                let group = group_of(groups, original).filter(|_| !is_resampled);
                match group {
                    Some(group) => self.change(&groups[group], original, random),
                    None => sample(space, random),
                }
            }
        }
    }

    fn change_parameter(
        &self,
        parameter: &Parameter,
        original: &Value,
        random: &mut Random,
    ) -> Value {
        if let Parameter::Const(value) = parameter {
            return value.clone();
        }
        if random.unit() < self.resample_probability {
            return sample(&Space::Parameter(parameter.clone()), random);
        }
        let shrinks = random.unit() < 0.5;
        let factor = 1.0 + if shrinks { -self.perturb_factor } else { self.perturb_factor };
        let changed = original.as_f64().map(|value| value * factor);
        match (parameter, changed) {
            (Parameter::Int(range), Some(value)) => {
                let value = if shrinks { value.floor() } else { value.ceil() };
                Value::from((value as i64).clamp(range.min, range.max))
            }
            (Parameter::Double(range), Some(value)) => {
                json_number(value.clamp(range.min, range.max))
            }
            (Parameter::Log(range), Some(value)) => {
                json_number(value.clamp(range.base.powf(range.min), range.base.powf(range.max)))
            }
            _ => original.clone(),
        }
    }
}
