//! Hyperparameters as users write them: a search space in the form of a tree.
//!
//! An object whose only key is one of `const int double log categorical oneOf` is a parameter. Any
//! other object is a group, and any other value is a constant. Groups must not use these names.

mod distinct;
mod read;

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::Value;

pub(crate) use self::read::ROOT;
use crate::validate::{FieldError, item, member};

/// Keys that turn an object into a parameter. Groups must not use them.
pub const KINDS: [&str; 6] = ["const", "int", "double", "log", "categorical", ONE_OF];

/// Kind whose value is one of several groups.
pub(crate) const ONE_OF: &str = "oneOf";

/// Limit of a trial's hyperparameters in bytes, as JSON: a Trial must stay far below the 1.5 MiB of
/// an object in Kubernetes.
pub const TRIAL_BYTES_MAX: usize = 16 << 10;

/// A tree of hyperparameters. Names are sorted by bytes, which is also the sampling order.
#[derive(Clone, Debug, PartialEq)]
pub enum Space {
    /// One parameter.
    Parameter(Parameter),
    /// Named parameters and groups.
    Group(BTreeMap<String, Self>),
    /// One of these groups, with equal probability. The hyperparameters of the other groups are not
    /// active.
    OneOf(Vec<Self>),
}

/// One parameter: its distribution and its grid points.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Parameter {
    /// A constant: any JSON value.
    Const(Value),
    /// Uniform over the integers from `min` to `max`, both inclusive.
    Int(IntRange),
    /// Uniform over `[min, max)`.
    Double(DoubleRange),
    /// Log-uniform: `base` to a power that is uniform over `[min, max)`. **`min` and `max` are
    /// exponents.**
    Log(LogRange),
    /// One of these values, with equal probability.
    Categorical(Vec<Value>),
}

/// Integers from `min` to `max`, both inclusive.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct IntRange {
    /// Smallest value.
    pub min: i64,
    /// Largest value; greater than `min`.
    pub max: i64,
    /// Number of grid points, at least 1. Required by grid search only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub count: Option<u32>,
}

/// Numbers from `min` (inclusive) to `max` (exclusive).
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DoubleRange {
    /// Smallest value.
    pub min: f64,
    /// Upper bound; greater than `min`.
    pub max: f64,
    /// Number of grid points, at least 1, with both bounds. Required by grid search only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub count: Option<u32>,
}

/// Powers of `base` with exponents from `min` (inclusive) to `max` (exclusive).
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LogRange {
    /// Base of the powers; greater than 0. Default: 10.
    #[serde(default = "default_base")]
    pub base: f64,
    /// Smallest exponent.
    pub min: f64,
    /// Upper bound of the exponent; greater than `min`.
    pub max: f64,
    /// Number of grid points, at least 1, with both bounds. Required by grid search only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub count: Option<u32>,
}

fn default_base() -> f64 {
    10.0
}

impl Space {
    /// Parses the tree in an experiment's `hyperparameters`. Numbers without a fraction become
    /// integers, because an API server returns them as such.
    ///
    /// # Errors
    ///
    /// All errors in the tree, each with its path from `spec.hyperparameters`.
    pub fn parse(tree: &Value) -> Result<Self, Vec<FieldError>> {
        let mut errors = Vec::new();
        let space = read::space(tree, &mut errors);
        if errors.is_empty() { Ok(space) } else { Err(errors) }
    }

    /// Returns the size in bytes, as JSON, of the largest hyperparameters that a trial can get.
    pub fn trial_bytes_max(&self) -> usize {
        match self {
            Self::Parameter(parameter) => parameter.bytes_max(),
            Self::Group(members) => {
                // Quotes, colon and comma of each member, and the braces.
                let member = |(name, space): (&String, &Self)| {
                    json_bytes(name) + 2 + space.trial_bytes_max()
                };
                members.iter().map(member).sum::<usize>() + 2
            }
            Self::OneOf(groups) => groups.iter().map(Self::trial_bytes_max).max().unwrap_or(0),
        }
    }

    /// Returns the number of grid points, at most `u128::MAX`. A missing `count` is 1.
    pub fn num_points(&self) -> u128 {
        match self {
            Self::Parameter(parameter) => parameter.num_points().unwrap_or(1).into(),
            Self::Group(members) => {
                members.values().map(Self::num_points).fold(1, u128::saturating_mul)
            }
            Self::OneOf(groups) => {
                groups.iter().map(Self::num_points).fold(0, u128::saturating_add)
            }
        }
    }

    /// Returns the number of dimensions: one for each parameter that varies, in all groups, and one
    /// for each choice.
    pub fn num_dimensions(&self) -> usize {
        match self {
            Self::Parameter(Parameter::Const(_)) => 0,
            Self::Parameter(_) => 1,
            Self::Group(members) => members.values().map(Self::num_dimensions).sum(),
            Self::OneOf(groups) => 1 + groups.iter().map(Self::num_dimensions).sum::<usize>(),
        }
    }

    /// Calls `visit` with the full path and the value of each parameter, in sampling order. Paths
    /// start with `spec.hyperparameters`.
    pub fn for_each_parameter<'a>(&'a self, visit: &mut dyn FnMut(&str, &'a Parameter)) {
        self.visit_below(read::ROOT, visit);
    }

    fn visit_below<'a>(&'a self, path: &str, visit: &mut dyn FnMut(&str, &'a Parameter)) {
        match self {
            Self::Parameter(parameter) => visit(path, parameter),
            Self::Group(members) => {
                for (name, space) in members {
                    space.visit_below(&member(path, name), visit);
                }
            }
            Self::OneOf(groups) => {
                let path = member(path, ONE_OF);
                for (i, group) in groups.iter().enumerate() {
                    group.visit_below(&item(&path, i), visit);
                }
            }
        }
    }
}

/// Returns the size of a value as JSON.
fn json_bytes(value: &impl Serialize) -> usize {
    serde_json::to_vec(value).map_or(usize::MAX / 2, |bytes| bytes.len())
}

impl Parameter {
    /// Returns the size in bytes, as JSON, of the largest value that can be sampled.
    fn bytes_max(&self) -> usize {
        match self {
            Self::Const(value) => json_bytes(value),
            Self::Categorical(values) => values.iter().map(json_bytes).max().unwrap_or(0),
            // `-9223372036854775808` or `-1.2345678901234567e-300`.
            Self::Int(_) | Self::Double(_) | Self::Log(_) => 24,
        }
    }

    /// Returns the kind of the parameter, one of [`KINDS`].
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Const(_) => "const",
            Self::Int(_) => "int",
            Self::Double(_) => "double",
            Self::Log(_) => "log",
            Self::Categorical(_) => "categorical",
        }
    }

    /// Returns the number of grid points; `None` if a required `count` is missing.
    pub fn num_points(&self) -> Option<u64> {
        match self {
            Self::Const(_) => Some(1),
            Self::Categorical(values) => Some(values.len() as u64),
            Self::Int(range) => {
                let size = range.max.abs_diff(range.min).saturating_add(1);
                range.count.map(|count| size.min(count.into()))
            }
            Self::Double(range) => range.count.map(u64::from),
            Self::Log(range) => range.count.map(u64::from),
        }
    }
}
