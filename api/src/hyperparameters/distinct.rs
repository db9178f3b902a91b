//! Tells the groups of a choice apart by the values that they can have.

use serde_json::Value;

use super::{Parameter, Space};

/// Returns `true` if no value belongs to both spaces, as far as names, constants, choices and types
/// show. Ranges of numbers are not compared.
pub(super) fn are_distinct(one: &Space, other: &Space) -> bool {
    match (one, other) {
        (Space::OneOf(groups), space) | (space, Space::OneOf(groups)) => {
            groups.iter().all(|group| are_distinct(group, space))
        }
        (Space::Group(one), Space::Group(other)) => {
            !one.keys().eq(other.keys())
                || one.iter().any(|(name, space)| are_distinct(space, &other[name]))
        }
        (Space::Group(_), Space::Parameter(parameter))
        | (Space::Parameter(parameter), Space::Group(_)) => {
            choices(parameter).is_none_or(|values| !values.iter().any(Value::is_object))
        }
        (Space::Parameter(one), Space::Parameter(other)) => match (choices(one), choices(other)) {
            (None, None) => false,
            (Some(values), None) | (None, Some(values)) => !values.iter().any(Value::is_number),
            (Some(one), Some(other)) => !one.iter().any(|value| other.contains(value)),
        },
    }
}

/// Returns the values of a parameter; `None` for a range of numbers.
fn choices(parameter: &Parameter) -> Option<&[Value]> {
    match parameter {
        Parameter::Const(value) => Some(std::slice::from_ref(value)),
        Parameter::Categorical(values) => Some(values),
        Parameter::Int(_) | Parameter::Double(_) | Parameter::Log(_) => None,
    }
}
