//! Axes of a space, and the coordinates of hyperparameters on them.

use serde_json::Value;
use stoker_api::hyperparameters::{Parameter, Space};

use crate::search::samplers::{self, Tpe};

/// Coordinates by axis: from 0 to 1 for numbers, the index of a choice. `None` where the
/// hyperparameter is not active.
pub(super) type Point = samplers::Point;

/// Axes of a space.
pub(super) struct Axes {
    coordinates: Tpe,
    /// In the order of coordinates.
    pub(super) all: Vec<Axis>,
}

/// A hyperparameter or a choice of groups.
pub(super) struct Axis {
    /// Path in the space.
    pub(super) name: String,
    pub(super) kind: Kind,
    /// Choices that must have been made for the hyperparameter to be active, outermost first.
    pub(super) conditions: Vec<Condition>,
}

/// Values of an axis, uniformly distributed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Kind {
    /// Numbers, or exponents of numbers.
    Number { low: f64, high: f64 },
    /// So many integers.
    Integer { count: f64 },
    /// So many values or groups without an order.
    Choice(usize),
}

/// A group of a choice.
#[derive(Clone, Debug)]
pub(super) struct Condition {
    /// Index of the choice's axis.
    pub(super) axis: usize,
    /// Index of the group.
    pub(super) group: usize,
    label: String,
}

impl Axis {
    /// Returns the innermost group that the hyperparameter is in.
    pub(super) fn group(&self) -> Option<String> {
        self.conditions.last().map(|condition| condition.label.clone())
    }

    /// Returns `true` if there is more than one value. A valid range always has more.
    fn varies(&self) -> bool {
        match self.kind {
            Kind::Number { .. } | Kind::Integer { .. } => true,
            Kind::Choice(count) => count > 1,
        }
    }

    /// Returns the position of a value from 0 to 1, or the index of a choice.
    fn position(&self, x: f64) -> f64 {
        match self.kind {
            Kind::Number { low, high } => ((x - low) / (high - low)).clamp(0.0, 1.0),
            Kind::Integer { count } => (x + 0.5) / count,
            Kind::Choice(_) => x,
        }
    }

    /// Returns the boundary between two positions. Boundaries of integers are between integers.
    pub(super) fn boundary(&self, lower: f64, upper: f64) -> f64 {
        let middle = lower + (upper - lower) / 2.0;
        match self.kind {
            Kind::Integer { count } => (middle * count).round() / count,
            Kind::Number { .. } | Kind::Choice(_) => middle,
        }
    }
}

impl Axes {
    pub(super) fn new(space: &Space) -> Self {
        let mut all = vec![];
        add(space, "", &[], &mut all);
        Self { coordinates: Tpe::new(space.clone(), false), all }
    }

    /// Returns the axes with more than one value.
    pub(super) fn varying(&self) -> impl Iterator<Item = &Axis> {
        self.all.iter().filter(|axis| axis.varies())
    }

    /// Returns the indices of the axes with more than one value.
    pub(super) fn varying_indices(&self) -> Vec<usize> {
        (0..self.all.len()).filter(|i| self.all[*i].varies()).collect()
    }

    /// Returns the coordinates of hyperparameters; `None` if they are not of this space.
    pub(super) fn point(&self, hyperparameters: &Value) -> Option<Point> {
        let point = self.coordinates.coordinates(hyperparameters)?;
        let position = |(axis, x): (&Axis, Option<f64>)| x.map(|x| axis.position(x));
        Some(self.all.iter().zip(point).map(position).collect())
    }
}

/// Adds the axes of a space in the order of coordinates.
fn add(space: &Space, path: &str, conditions: &[Condition], axes: &mut Vec<Axis>) {
    let name = path.to_owned();
    match space {
        Space::Group(members) => {
            for (member, space) in members {
                let separator = if path.is_empty() { "" } else { "." };
                add(space, &format!("{path}{separator}{member}"), conditions, axes);
            }
        }
        Space::Parameter(parameter) => {
            let Some(kind) = kind(parameter) else { return };
            axes.push(Axis { name, kind, conditions: conditions.to_vec() });
        }
        Space::OneOf(groups) => {
            let axis = axes.len();
            let kind = Kind::Choice(groups.len());
            axes.push(Axis { name, kind, conditions: conditions.to_vec() });
            for (group, space) in groups.iter().enumerate() {
                let label = label(groups, group);
                let condition = Condition { axis, group, label };
                let conditions: Vec<Condition> =
                    conditions.iter().cloned().chain([condition]).collect();
                add(space, path, &conditions, axes);
            }
        }
    }
}

/// Returns the values of a parameter; `None` for a constant.
fn kind(parameter: &Parameter) -> Option<Kind> {
    Some(match parameter {
        Parameter::Const(_) => return None,
        Parameter::Int(range) => {
            Kind::Integer { count: range.max.abs_diff(range.min) as f64 + 1.0 }
        }
        Parameter::Double(range) => Kind::Number { low: range.min, high: range.max },
        Parameter::Log(range) => Kind::Number { low: range.min, high: range.max },
        Parameter::Categorical(values) => Kind::Choice(values.len()),
    })
}

/// Returns a text that identifies a group: the first constant that differs in all groups, otherwise
/// the number of the group.
fn label(groups: &[Space], group: usize) -> String {
    let numbered = || format!("group {} of {}", group + 1, groups.len());
    let Some(Space::Group(members)) = groups.get(group) else { return numbered() };
    let constant = |name: &String, of: &Space| match of {
        Space::Group(members) => match members.get(name) {
            Some(Space::Parameter(Parameter::Const(value))) => Some(value.clone()),
            _ => None,
        },
        _ => None,
    };
    let is_unique = |name: &&String| {
        let values: Vec<Option<Value>> = groups.iter().map(|of| constant(name, of)).collect();
        values[group].is_some()
            && values.iter().filter(|value| **value == values[group]).count() == 1
    };
    let Some(name) = members.keys().find(is_unique) else { return numbered() };
    match constant(name, &groups[group]) {
        Some(Value::String(text)) => format!("{name}={text}"),
        Some(value) => format!("{name}={value}"),
        None => numbered(),
    }
}
