//! Hyperparameters as users write them: a tree whose leaves say what may vary.
//!
//! An object whose only key is one of `const int double log categorical` is a parameter, any other object a group,
//! and anything else stands for itself (an implicit constant). Groups may not use those five names.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::Value;

/// The names that make an object a parameter, and that groups may not use.
pub const KINDS: [&str; 5] = ["const", "int", "double", "log", "categorical"];

/// A tree of hyperparameters. Names are sorted by bytes, the order in which they are drawn.
#[derive(Clone, Debug, PartialEq)]
pub enum Space {
    /// One parameter.
    Parameter(Parameter),
    /// Named parameters and groups.
    Group(BTreeMap<String, Space>),
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
