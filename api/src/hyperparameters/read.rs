//! Parser of a hyperparameter tree that reports all errors at once.

use std::collections::BTreeMap;

use serde_json::{Map, Value};

use super::distinct::are_distinct;
use super::{DoubleRange, IntRange, KINDS, LogRange, ONE_OF, Parameter, Space, default_base};
use crate::validate::{FieldError, item, member};

/// Path of the tree in an experiment.
pub(crate) const ROOT: &str = "spec.hyperparameters";

/// Smallest double that exceeds `i64::MAX`.
const INTEGER_END: f64 = 9_223_372_036_854_775_808.0;

/// Parses the tree. Invalid parts are added to `errors` and omitted from the result.
pub(super) fn space(tree: &Value, errors: &mut Vec<FieldError>) -> Space {
    match tree {
        Value::Object(members) => Space::Group(group(ROOT, members, errors)),
        other => {
            errors.push(FieldError::new(ROOT, other, "must be an object of named parameters"));
            Space::Group(BTreeMap::new())
        }
    }
}

fn group(
    path: &str,
    members: &Map<String, Value>,
    errors: &mut Vec<FieldError>,
) -> BTreeMap<String, Space> {
    let mut spaces = BTreeMap::new();
    for (name, value) in members {
        let path = member(path, name);
        if KINDS.contains(&name.as_str()) {
            let rule = format!(
                "`{name}` is reserved: it turns an object with no other key into a parameter; move \
                 the other keys inside, or rename it"
            );
            errors.push(FieldError::new(&path, value, &rule));
            continue;
        }
        if let Some(space) = subspace(&path, value, errors) {
            spaces.insert(name.clone(), space);
        }
    }
    spaces
}

fn subspace(path: &str, value: &Value, errors: &mut Vec<FieldError>) -> Option<Space> {
    let Value::Object(members) = value else {
        return Some(Space::Parameter(Parameter::Const(constant(path, value, errors)?)));
    };
    let mut entries = members.iter();
    if let (Some((kind, body)), None) = (entries.next(), entries.next())
        && KINDS.contains(&kind.as_str())
    {
        let path = member(path, kind);
        return match kind.as_str() {
            ONE_OF => one_of(&path, body, errors).map(Space::OneOf),
            _ => parameter(&path, kind, body, errors).map(Space::Parameter),
        };
    }
    Some(Space::Group(group(path, members, errors)))
}

/// Parses the groups of a choice. A trial's hyperparameters must show which group they are of.
fn one_of(path: &str, body: &Value, errors: &mut Vec<FieldError>) -> Option<Vec<Space>> {
    let groups = body.as_array().filter(|groups| !groups.is_empty());
    let Some(groups) = groups else {
        let rule = "must be a list with at least one group to choose from";
        errors.push(FieldError::new(path, body, rule));
        return None;
    };
    let num_errors = errors.len();
    let mut spaces: Vec<Space> = vec![];
    for (i, value) in groups.iter().enumerate() {
        let path = item(path, i);
        let is_parameter = |members: &&Map<String, Value>| {
            members.len() == 1 && members.keys().all(|name| KINDS.contains(&name.as_str()))
        };
        let Some(members) = value.as_object().filter(|members| !is_parameter(members)) else {
            let rule = "must be a group: an object of named hyperparameters";
            errors.push(FieldError::new(&path, value, rule));
            continue;
        };
        let space = Space::Group(group(&path, members, errors));
        let twin = spaces.iter().position(|other| !are_distinct(other, &space));
        if let Some(twin) = twin.filter(|_| errors.len() == num_errors) {
            let rule = format!(
                "cannot be told apart from group {twin}; give each group a constant of one name \
                 with another value, such as `name`"
            );
            errors.push(FieldError::new(&path, value, &rule));
        }
        spaces.push(space);
    }
    (errors.len() == num_errors).then_some(spaces)
}

fn parameter(
    path: &str,
    kind: &str,
    body: &Value,
    errors: &mut Vec<FieldError>,
) -> Option<Parameter> {
    match kind {
        "const" => constant(path, body, errors).map(Parameter::Const),
        "categorical" => categorical(path, body, errors).map(Parameter::Categorical),
        "int" => int(path, body, errors).map(Parameter::Int),
        "double" => double(path, body, errors).map(Parameter::Double),
        _ => log(path, body, errors).map(Parameter::Log),
    }
}

fn categorical(path: &str, body: &Value, errors: &mut Vec<FieldError>) -> Option<Vec<Value>> {
    let Value::Array(values) = body else {
        errors.push(FieldError::new(path, body, "must be a list of the values to choose from"));
        return None;
    };
    if values.is_empty() {
        errors.push(FieldError::new(path, body, "must have at least one value to choose from"));
        return None;
    }
    let values: Vec<_> = values
        .iter()
        .enumerate()
        .map(|(i, value)| constant(&item(path, i), value, errors))
        .collect();
    values.into_iter().collect()
}

/// Returns a constant with its numbers normalized: those without a fraction become integers.
fn constant(path: &str, value: &Value, errors: &mut Vec<FieldError>) -> Option<Value> {
    match value {
        Value::Number(number) => match (number.as_i64(), number.as_f64()) {
            (Some(_), _) => Some(value.clone()),
            (None, Some(float)) if float.fract() != 0.0 => Some(value.clone()),
            (None, Some(float)) if number.is_f64() && float.abs() < INTEGER_END => {
                Some(Value::from(float as i64))
            }
            _ => {
                errors.push(FieldError::new(path, value, INTEGER_RULE));
                None
            }
        },
        Value::Array(values) => {
            let values = values.iter().enumerate();
            let values: Vec<_> =
                values.map(|(i, value)| constant(&item(path, i), value, errors)).collect();
            values.into_iter().collect::<Option<Vec<_>>>().map(Value::Array)
        }
        Value::Object(members) => {
            let members: Vec<_> = members
                .iter()
                .map(|(name, value)| {
                    Some((name.clone(), constant(&member(path, name), value, errors)?))
                })
                .collect();
            members.into_iter().collect::<Option<Map<_, _>>>().map(Value::Object)
        }
        Value::Null | Value::Bool(_) | Value::String(_) => Some(value.clone()),
    }
}

const INTEGER_RULE: &str = "a number without a fraction is an integer, even with a decimal point \
                            or an exponent, and must be between -2^63 and 2^63 - 1: larger \
                            integers lose digits in JSON; write it as a string";

/// Fields of an `int`, `double` or `log`.
struct Fields<'a> {
    path: &'a str,
    body: &'a Map<String, Value>,
    errors: &'a mut Vec<FieldError>,
}

impl<'a> Fields<'a> {
    fn new(
        path: &'a str,
        body: &'a Value,
        known: &[&str],
        errors: &'a mut Vec<FieldError>,
    ) -> Option<Self> {
        let Value::Object(body) = body else {
            let rule = format!("must be an object with the fields {}", known.join(", "));
            errors.push(FieldError::new(path, body, &rule));
            return None;
        };
        for (name, value) in body {
            if !known.contains(&name.as_str()) {
                let rule = format!("unknown field; use one of {}", known.join(", "));
                errors.push(FieldError::new(&member(path, name), value, &rule));
            }
        }
        Some(Self { path, body, errors })
    }

    fn refuse(&mut self, name: &str, rule: &str) {
        let value = self.body.get(name).unwrap_or(&Value::Null);
        self.errors.push(FieldError::new(&member(self.path, name), value, rule));
    }

    /// Returns `min` and `max`, read by `read`. Reports an error unless `min` is less than `max`.
    fn bounds<T: PartialOrd>(&mut self, read: fn(&mut Self, &str) -> Option<T>) -> Option<(T, T)> {
        let min = self.required("min", read);
        let max = self.required("max", read);
        let (min, max) = (min?, max?);
        if min < max {
            return Some((min, max));
        }
        let rule = format!("must be less than max, which is {}", self.body["max"]);
        self.refuse("min", &rule);
        None
    }

    fn required<T>(&mut self, name: &str, read: fn(&mut Self, &str) -> Option<T>) -> Option<T> {
        if self.body.contains_key(name) {
            return read(self, name);
        }
        let path = member(self.path, name);
        self.errors.push(FieldError::absent(&path, "is required and missing"));
        None
    }

    fn integer(&mut self, name: &str) -> Option<i64> {
        let value = self.body.get(name)?;
        let float = value.as_f64().filter(|float| value.is_f64() && float.fract() == 0.0);
        let integral = float.filter(|float| float.abs() < INTEGER_END).map(|float| float as i64);
        let integer = value.as_i64().or(integral);
        if integer.is_none() {
            let rule = if value.is_u64() || float.is_some() {
                INTEGER_RULE
            } else {
                "must be an integer; use `double` for numbers with a fraction"
            };
            self.refuse(name, rule);
        }
        integer
    }

    fn float(&mut self, name: &str) -> Option<f64> {
        let float = self.body.get(name)?.as_f64().filter(|float| float.is_finite());
        if float.is_none() {
            self.refuse(name, "must be a finite number");
        }
        float
    }

    /// Returns the count, if present; `Err` if it is invalid.
    fn count(&mut self) -> Result<Option<u32>, ()> {
        let Some(value) = self.body.get("count") else { return Ok(None) };
        let integral =
            value.as_f64().filter(|float| float.fract() == 0.0).map(|float| float as u32);
        match integral.filter(|count| *count >= 1 && value.as_f64() == Some(f64::from(*count))) {
            Some(count) => Ok(Some(count)),
            None => {
                let rule = "must be an integer of at least 1: the number of grid points";
                self.refuse("count", rule);
                Err(())
            }
        }
    }
}

fn int(path: &str, body: &Value, errors: &mut Vec<FieldError>) -> Option<IntRange> {
    let mut fields = Fields::new(path, body, &["min", "max", "count"], errors)?;
    let bounds = fields.bounds(Fields::integer);
    let count = fields.count();
    let (min, max) = bounds?;
    Some(IntRange { min, max, count: count.ok()? })
}

fn double(path: &str, body: &Value, errors: &mut Vec<FieldError>) -> Option<DoubleRange> {
    let mut fields = Fields::new(path, body, &["min", "max", "count"], errors)?;
    let bounds = fields.bounds(Fields::float);
    let count = fields.count();
    let (min, max) = bounds?;
    if !(max - min).is_finite() {
        fields.refuse("max", "the range from min to max is too wide for a double");
    }
    Some(DoubleRange { min, max, count: count.ok()? })
}

fn log(path: &str, body: &Value, errors: &mut Vec<FieldError>) -> Option<LogRange> {
    let mut fields = Fields::new(path, body, &["base", "min", "max", "count"], errors)?;
    let base = match fields.body.get("base") {
        None => Some(default_base()),
        Some(_) => fields.float("base"),
    };
    let is_positive = base.is_none_or(|base| base > 0.0);
    if !is_positive {
        fields.refuse("base", "must be more than 0");
    }
    let bounds = fields.bounds(Fields::float);
    let count = fields.count();
    let (base, (min, max)) = (base?, bounds?);
    for (name, exponent) in [("min", min), ("max", max)] {
        if is_positive && !base.powf(exponent).is_finite() {
            let rule = format!("min and max are exponents, and {base} to this power is infinite");
            fields.refuse(name, &rule);
        }
    }
    Some(LogRange { base, min, max, count: count.ok()? })
}
