//! Hyperparameters as users write them: a tree whose leaves say what may vary.
//!
//! An object whose only key is one of `const int double log categorical` is a parameter, any other object a group,
//! and anything else stands for itself (an implicit constant). Groups may not use those five names.

mod read;

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::Value;

pub(crate) use self::read::ROOT;
use crate::validate::{FieldError, member};

/// The names that make an object a parameter, and that groups may not use.
pub const KINDS: [&str; 5] = ["const", "int", "double", "log", "categorical"];

/// Limit of a trial's hyperparameters in bytes, as JSON: a Trial must stay far below the 1.5 MiB of
/// an object in Kubernetes.
pub const TRIAL_BYTES_MAX: usize = 16 << 10;

/// A tree of hyperparameters. Names are sorted by bytes, the order in which they are drawn.
#[derive(Clone, Debug, PartialEq)]
pub enum Space {
    /// One parameter.
    Parameter(Parameter),
    /// Named parameters and groups.
    Group(BTreeMap<String, Self>),
}

/// One parameter: how it is drawn, and which points a grid visits.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Parameter {
    /// Always this value, any JSON.
    Const(Value),
    /// Uniform over the integers from `min` to `max`, both included.
    Int(IntRange),
    /// Uniform over `[min, max)`.
    Double(DoubleRange),
    /// `base` to a power that is uniform over `[min, max)`: **`min` and `max` are exponents**.
    Log(LogRange),
    /// One of these values, each as likely.
    Categorical(Vec<Value>),
}

/// Integers from `min` to `max`, both included.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct IntRange {
    /// The smallest value.
    pub min: i64,
    /// The largest value; more than `min`.
    pub max: i64,
    /// Points on a grid's axis, at least 1. Needed by grid search alone.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub count: Option<u32>,
}

/// Numbers from `min` up to, not including, `max`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DoubleRange {
    /// The smallest value.
    pub min: f64,
    /// The upper bound; more than `min`.
    pub max: f64,
    /// Points on a grid's axis, at least 1, both ends included. Needed by grid search alone.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub count: Option<u32>,
}

/// Powers of `base` with exponents from `min` up to, not including, `max`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LogRange {
    /// More than 0; 10 unless given.
    #[serde(default = "default_base")]
    pub base: f64,
    /// The smallest exponent.
    pub min: f64,
    /// The upper bound of the exponent; more than `min`.
    pub max: f64,
    /// Points on a grid's axis, at least 1, both ends included. Needed by grid search alone.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub count: Option<u32>,
}

fn default_base() -> f64 {
    10.0
}

impl Space {
    /// Reads the tree in an experiment's `hyperparameters`, with every number in one form: what has no fraction is
    /// an integer, as it comes back from an API server.
    ///
    /// # Errors
    ///
    /// Everything that is wrong with the tree, each with its path from `spec.hyperparameters`.
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
        }
    }

    /// Calls `visit` with each parameter and its path below `spec.hyperparameters`, in the order of drawing.
    pub fn each_parameter<'a>(&'a self, visit: &mut dyn FnMut(&str, &'a Parameter)) {
        self.each_below(read::ROOT, visit);
    }

    fn each_below<'a>(&'a self, path: &str, visit: &mut dyn FnMut(&str, &'a Parameter)) {
        match self {
            Self::Parameter(parameter) => visit(path, parameter),
            Self::Group(members) => {
                for (name, space) in members {
                    space.each_below(&member(path, name), visit);
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

    /// The one of [`KINDS`] that it is.
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Const(_) => "const",
            Self::Int(_) => "int",
            Self::Double(_) => "double",
            Self::Log(_) => "log",
            Self::Categorical(_) => "categorical",
        }
    }

    /// Points on its axis of a grid; `None` if it needs a `count` and has none.
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
