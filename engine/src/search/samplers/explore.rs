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
                // Away from the original.
                let shrinks = value < original.as_f64().unwrap_or(value);
                let value = if shrinks { value.floor() } else { value.ceil() };
                Value::from((value as i64).clamp(range.min, range.max))
            }
            (Parameter::Double(range), Some(value)) => {
                json_number(value.clamp(range.min, range.max))
            }
            (Parameter::Log(range), Some(value)) => {
                // A base below 1, which earlier versions accepted, reverses the bounds.
                let [one, other] = [range.min, range.max].map(|bound| range.base.powf(bound));
                json_number(value.clamp(one.min(other), one.max(other)))
            }
            _ => original.clone(),
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::search::{is_in_space, normalized};

    fn explore(parameter: &Value, resample_probability: f64) -> Explore {
        let space = Space::parse(&json!({ "x": parameter })).unwrap();
        Explore { space, resample_probability, perturb_factor: 0.2 }
    }

    /// Returns copies with a fixed random stream. NumPy's first numbers for this seed are 0.37,
    /// 0.95, 0.73, 0.60, 0.156, 0.156, 0.06, 0.87, 0.60, 0.71, 0.02, 0.97, 0.83, 0.21, 0.18, 0.18.
    fn copies(explore: &Explore, original: &Value, num: usize) -> Vec<Value> {
        let (original, mut random) = (json!({ "x": original }), Random::new(42));
        (0..num).map(|_| explore.draw(Some(&original), &mut random)["x"].clone()).collect()
    }

    /// The second number of each pair decides: below 0.5, the value shrinks.
    #[test]
    fn numbers_shrink_or_grow_within_their_range() {
        let check = |parameter: Value, original: Value, shrunk: f64, grown: f64| {
            let expected = [grown, grown, shrunk, grown, grown, grown, shrunk, shrunk];
            let copies = copies(&explore(&parameter, 0.0), &original, expected.len());
            for (copy, expected) in copies.iter().zip(expected) {
                let error = (copy.as_f64().unwrap() - expected).abs();
                assert!(error < 1e-12, "{parameter} {original}: {copies:?}");
            }
        };
        let double = |min: f64, max: f64| json!({ "double": { "min": min, "max": max } });
        check(double(0.0, 10.0), json!(5), 4.0, 6.0);
        check(double(4.5, 5.5), json!(5), 4.5, 5.5);
        let int = |min: i64, max: i64| json!({ "int": { "min": min, "max": max } });
        // 5.6 and 8.4 are rounded away from 7.
        check(int(0, 20), json!(7), 5.0, 9.0);
        check(int(6, 8), json!(7), 6.0, 8.0);
        check(int(-20, 0), json!(-7), -5.0, -9.0);
        check(int(-20, 0), json!(-4), -3.0, -5.0);
        let log = json!({ "log": { "min": -3, "max": -1, "base": 10 } });
        check(log.clone(), json!(0.01), 0.008, 0.012);
        check(log.clone(), json!(0.1), 0.08, 0.1);
        check(log, json!(0.001), 0.001, 0.0012);
        let reverse = json!({ "log": { "min": 1, "max": 3, "base": 0.1 } });
        check(reverse, json!(0.1), 0.08, 0.1);
    }

    #[test]
    fn other_values_stay() {
        let categorical = json!({ "categorical": [1, "two", 3] });
        for (parameter, original) in
            [(categorical.clone(), json!(1)), (categorical, json!("two")), (json!(7), json!(7))]
        {
            let copies = copies(&explore(&parameter, 0.0), &original, 8);
            assert!(copies.iter().all(|copy| *copy == original), "{copies:?}");
        }
    }

    /// Of the decisions 0.37, 0.73, 0.156 and 0.06, the last two are below the probability.
    #[test]
    fn parameters_are_sampled_again_with_the_probability() {
        let double = json!({ "double": { "min": 0, "max": 10 } });
        let copies = copies(&explore(&double, 0.3), &json!(5), 4);
        for (copy, expected) in copies.iter().zip([6.0, 6.0, 1.5599452, 8.6617615]) {
            assert!((copy.as_f64().unwrap() - expected).abs() < 1e-6, "{copies:?}");
        }
    }

    #[test]
    fn choices_keep_their_group_unless_sampled_again() {
        let parameter = json!({ "oneOf": [
            { "kind": "deep", "depth": { "int": { "min": 0, "max": 20 } } },
            { "kind": "flat" },
        ] });
        let original = json!({ "kind": "deep", "depth": 7 });
        let kept = copies(&explore(&parameter, 0.0), &original, 50);
        let is_changed =
            |copy: &Value| copy["kind"] == "deep" && (copy["depth"] == 5 || copy["depth"] == 9);
        assert!(kept.iter().all(is_changed), "{kept:?}");
        let sampled = copies(&explore(&parameter, 1.0), &original, 50);
        let num_flat = sampled.iter().filter(|copy| copy["kind"] == "flat").count();
        assert!((10..40).contains(&num_flat), "{sampled:?}");
    }

    #[test]
    fn without_an_original_all_parameters_are_sampled() {
        let explore = explore(&json!({ "int": { "min": 3, "max": 4 } }), 0.0);
        let draw = normalized(&explore.draw(None, &mut Random::new(1)));
        assert!(is_in_space(&explore.space, &draw), "{draw}");
    }
}
