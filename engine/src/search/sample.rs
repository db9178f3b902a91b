//! Draws hyperparameters from a space, and gives numbers the one form that they keep through JSON.

use serde_json::{Map, Number, Value};
use stoker_api::hyperparameters::{Parameter, Space};

use crate::search::rng::Random;

/// Draws every parameter, names in the order of their bytes at every level. Constants draw nothing.
/// A choice draws its group, then the parameters of this group.
pub(crate) fn sample(space: &Space, random: &mut Random) -> Value {
    match space {
        Space::Parameter(parameter) => sample_parameter(parameter, random),
        Space::Group(members) => {
            let draw = |(name, it): (&String, _)| (name.clone(), sample(it, random));
            Value::Object(members.iter().map(draw).collect())
        }
        Space::OneOf(groups) => {
            let group = random.up_to((groups.len() as u64).saturating_sub(1));
            groups.get(group as usize).map(|group| sample(group, random)).unwrap_or_default()
        }
    }
}

/// Returns the index of the group that a value was sampled from; `None` if it is of none of them.
pub(crate) fn group_of(groups: &[Space], value: &Value) -> Option<usize> {
    groups.iter().position(|group| has_form(group, value))
}

/// Returns `true` if a value has the names, constants, choices and types of a space.
fn has_form(space: &Space, value: &Value) -> bool {
    match space {
        Space::Group(members) => value.as_object().is_some_and(|values| {
            members.len() == values.len()
                && members.iter().all(|(name, member)| {
                    values.get(name).is_some_and(|value| has_form(member, value))
                })
        }),
        Space::OneOf(groups) => group_of(groups, value).is_some(),
        Space::Parameter(Parameter::Const(constant)) => normalized(constant) == *value,
        Space::Parameter(Parameter::Categorical(values)) => {
            values.iter().any(|choice| normalized(choice) == *value)
        }
        Space::Parameter(Parameter::Int(_) | Parameter::Double(_) | Parameter::Log(_)) => {
            value.is_number()
        }
    }
}

/// Returns `true` if a search of a space may sample these hyperparameters. Counts of a grid and the
/// rounding of the bounds do not matter.
pub fn is_in_space(space: &Space, hyperparameters: &Value) -> bool {
    has_form(space, hyperparameters) && has_values(space, hyperparameters)
}

/// Returns `true` if the numbers of a value, which has the form of the space, are in their ranges.
fn has_values(space: &Space, value: &Value) -> bool {
    let is_between = |value: f64, min: f64, max: f64| {
        let margin = 1e-9 * (max - min).abs();
        (min - margin..=max + margin).contains(&value)
    };
    match space {
        Space::Group(members) => members
            .iter()
            .all(|(name, member)| value.get(name).is_some_and(|value| has_values(member, value))),
        Space::OneOf(groups) => {
            groups.iter().any(|group| has_form(group, value) && has_values(group, value))
        }
        Space::Parameter(Parameter::Const(_) | Parameter::Categorical(_)) => true,
        Space::Parameter(Parameter::Int(range)) => {
            value.as_i64().is_some_and(|value| (range.min..=range.max).contains(&value))
        }
        Space::Parameter(Parameter::Double(range)) => {
            value.as_f64().is_some_and(|value| is_between(value, range.min, range.max))
        }
        Space::Parameter(Parameter::Log(range)) => value.as_f64().is_some_and(|value| {
            value > 0.0 && is_between(value.ln() / range.base.ln(), range.min, range.max)
        }),
    }
}

fn sample_parameter(parameter: &Parameter, random: &mut Random) -> Value {
    match parameter {
        Parameter::Const(value) => value.clone(),
        Parameter::Int(range) => {
            let offset = random.up_to(range.max.wrapping_sub(range.min) as u64);
            Value::from(range.min.wrapping_add(offset as i64))
        }
        Parameter::Double(range) => json_number(random.uniform(range.min, range.max)),
        Parameter::Log(range) => json_number(range.base.powf(random.uniform(range.min, range.max))),
        Parameter::Categorical(values) => {
            let idx = random.up_to((values.len() as u64).saturating_sub(1));
            values.get(idx as usize).cloned().unwrap_or_default()
        }
    }
}

/// A JSON number; null for what JSON cannot say, which validation keeps out.
pub(crate) fn json_number(value: f64) -> Value {
    Number::from_f64(value).map_or(Value::Null, Value::Number)
}

/// The form in which hyperparameters are recorded and compared: every whole number that an `i64`
/// holds is an integer.
///
/// JSON through an API server turns 1.0 into 1. Once in this form, a value comes back from there as
/// it was.
///
/// # Examples
///
/// ```
/// use serde_json::json;
///
/// let drawn = json!({ "rate": 1.0, "sizes": [2.0, 2.5] });
/// let kept = json!({ "rate": 1, "sizes": [2, 2.5] });
/// assert_eq!(stoker_engine::search::normalized(&drawn), kept);
/// ```
pub fn normalized(value: &Value) -> Value {
    match value {
        Value::Number(number) => Value::Number(normalized_number(number)),
        Value::Array(items) => Value::Array(items.iter().map(normalized).collect()),
        Value::Object(members) => {
            let members = members.iter().map(|(name, it)| (name.clone(), normalized(it)));
            Value::Object(members.collect::<Map<_, _>>())
        }
        Value::Null | Value::Bool(_) | Value::String(_) => value.clone(),
    }
}

fn normalized_number(number: &Number) -> Number {
    const I64_END: f64 = 9_223_372_036_854_775_808.0;
    if number.is_i64() {
        return number.clone();
    }
    let Some(value) = number.as_f64() else { return number.clone() };
    if value.fract() == 0.0 && (-I64_END..I64_END).contains(&value) {
        return Number::from(value as i64);
    }
    Number::from_f64(value).unwrap_or_else(|| number.clone())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(value: &str, expected: &str) {
        let value: Value = serde_json::from_str(value).unwrap();
        let expected: Value = serde_json::from_str(expected).unwrap();
        assert_eq!(normalized(&value), expected);
        assert_eq!(normalized(&expected), expected, "once is as good as twice");
    }

    #[test]
    fn whole_numbers_become_integers_where_an_i64_holds_them() {
        check("1.0", "1");
        check("-0.0", "0");
        check("1e16", "10000000000000000");
        check("9223372036854775807", "9223372036854775807");
        check("0.1", "0.1");
        check("1e300", "1e300");
        check("[1.0, {\"a\": 2.0}, \"3.0\", null]", "[1, {\"a\": 2}, \"3.0\", null]");
    }

    #[test]
    fn groups_of_a_choice_have_equal_probability() {
        let groups = serde_json::json!({ "oneOf": [{ "a": 0 }, { "b": 0 }, { "c": 0 }] });
        let space = Space::parse(&serde_json::json!({ "choice": groups })).unwrap();
        let mut random = Random::new(1);
        let mut counts = std::collections::BTreeMap::<String, u32>::new();
        for _ in 0..3000 {
            let value = sample(&space, &mut random)["choice"].to_string();
            *counts.entry(value).or_default() += 1;
        }
        assert_eq!(counts.len(), 3, "{counts:?}");
        assert!(counts.values().all(|count| (900..1100).contains(count)), "{counts:?}");
    }

    #[test]
    fn bounds_of_a_space_are_inclusive() {
        let space = serde_json::json!({
            "constant": 3,
            "choice": { "categorical": ["x", 2] },
            "whole": { "int": { "min": -2, "max": 5 } },
            "real": { "double": { "min": 100, "max": 300 } },
            "scale": { "log": { "min": -3, "max": 1, "base": 10 } },
            "group": { "oneOf": [
                { "a": { "double": { "min": 0, "max": 1 } } },
                { "b": { "double": { "min": 5, "max": 6 } } },
            ] },
        });
        let space = Space::parse(&space).unwrap();
        let inside = serde_json::json!({
            "constant": 3,
            "choice": "x",
            "whole": 0,
            "real": 150,
            "scale": 0.1,
            "group": { "b": 5.5 },
        });
        let check = |name: &str, value: Value, expected: bool| {
            let mut values = inside.clone();
            values[name] = value.clone();
            assert_eq!(is_in_space(&space, &normalized(&values)), expected, "{name}: {value}");
        };
        check("constant", 3.into(), true);
        check("constant", 4.into(), false);
        check("choice", "x".into(), true);
        check("choice", 2.0.into(), true);
        check("choice", "y".into(), false);
        for (value, expected) in [(-3, false), (-2, true), (5, true), (6, false)] {
            check("whole", value.into(), expected);
        }
        check("whole", 0.5.into(), false);
        // The margin is a billionth of the width: 2e-7 here.
        for (value, expected) in [
            (100.0, true),
            (100.0 - 1e-7, true),
            (100.0 - 3e-7, false),
            (300.0, true),
            (300.0 + 1e-7, true),
            (300.0 + 3e-7, false),
            (200.0, true),
        ] {
            check("real", value.into(), expected);
        }
        for (value, expected) in [
            (1e-3, true),
            (1e-3 * (1.0 - 1e-9), true),
            (1e-3 * (1.0 - 1e-7), false),
            (10.0, true),
            (10.0 * (1.0 + 1e-9), true),
            (10.0 * (1.0 + 1e-7), false),
            (0.9e-3, false),
            (10.1, false),
            (0.0, false),
            (-0.1, false),
        ] {
            check("scale", value.into(), expected);
        }
        check("group", serde_json::json!({ "a": 0.5 }), true);
        check("group", serde_json::json!({ "a": 5.5 }), false);
        check("group", serde_json::json!({ "b": 0.5 }), false);
        check("group", serde_json::json!({ "c": 0.5 }), false);
        check("group", serde_json::json!({ "a": 0.5, "b": 5.5 }), false);
        check("unknown", 1.into(), false);
        let missing = serde_json::json!({ "constant": 3 });
        assert!(!is_in_space(&space, &missing));
    }

    #[test]
    fn a_number_between_i64_and_u64_is_a_double() {
        let through_json: Value = serde_json::from_str("10000000000000000000").unwrap();
        assert_eq!(normalized(&through_json), Value::from(1e19));
    }
}
