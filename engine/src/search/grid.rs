//! The points of a grid: the product of its parameters' axes, the first axis slowest.

use serde_json::{Map, Value};
use stoker_api::hyperparameters::{IntRange, Parameter, Space};

use crate::search::sample::json_number;

/// A grid that makes its points when asked, so that its size costs nothing.
#[derive(Clone, Debug, PartialEq)]
pub struct Grid {
    space: Space,
}

impl Grid {
    /// The grid over a space: axes in the order of names' bytes, groups in their place.
    pub(crate) fn new(space: Space) -> Self {
        Self { space }
    }

    /// Points in all, `u64::MAX` if there are more.
    pub(crate) fn num_points(&self) -> u64 {
        u64::try_from(self.space.num_points()).unwrap_or(u64::MAX)
    }

    /// The point at a place in the product; `None` beyond the last.
    pub(crate) fn point(&self, place: u64) -> Option<Value> {
        let place = u128::from(place);
        if place >= self.space.num_points() { None } else { point(&self.space, place) }
    }
}

/// The point of a space at a place below [`Space::num_points`]. The points of a choice are those of
/// its groups, one group after the other.
fn point(space: &Space, place: u128) -> Option<Value> {
    let mut rest = place;
    match space {
        Space::Parameter(parameter) => value(parameter, u64::try_from(place).ok()?),
        Space::Group(members) => {
            let mut values = Map::new();
            for (name, member) in members.iter().rev() {
                let len = member.num_points();
                values.insert(name.clone(), point(member, rest.checked_rem(len)?)?);
                rest /= len;
            }
            Some(Value::Object(values))
        }
        Space::OneOf(groups) => {
            for group in groups {
                let len = group.num_points();
                match rest.checked_sub(len) {
                    Some(others) => rest = others,
                    None => return point(group, rest),
                }
            }
            None
        }
    }
}

/// Values on an axis. A missing `count`, which validation refuses, is 1.
fn len(parameter: &Parameter) -> u64 {
    parameter.num_points().unwrap_or(1)
}

/// The value at a place on an axis; `None` beyond the last.
fn value(parameter: &Parameter, idx: u64) -> Option<Value> {
    let len = len(parameter);
    if idx >= len {
        return None;
    }
    Some(match parameter {
        Parameter::Const(value) => value.clone(),
        Parameter::Int(range) => int_at(range, idx, len),
        Parameter::Double(range) => json_number(spaced(range.min, range.max, idx, len)),
        Parameter::Log(range) => {
            json_number(range.base.powf(spaced(range.min, range.max, idx, len)))
        }
        Parameter::Categorical(values) => values.get(usize::try_from(idx).ok()?)?.clone(),
    })
}

fn int_at(range: &IntRange, idx: u64, len: u64) -> Value {
    let (min, max) = (i128::from(range.min), i128::from(range.max));
    // The value is `scaled / steps`, exactly.
    let (scaled, steps) = match len {
        1 => (min + max, 2),
        _ => (min * i128::from(len - 1) + i128::from(idx) * (max - min), i128::from(len - 1)),
    };
    // Half away from zero: the division truncates.
    let rounded = (2 * scaled + scaled.signum() * steps) / (2 * steps);
    Value::from(rounded as i64)
}

/// Of `len` numbers from `min` to `max`, evenly spaced and both included, the one at `idx`; of one,
/// the middle.
fn spaced(min: f64, max: f64, idx: u64, len: u64) -> f64 {
    if len == 1 {
        return f64::midpoint(min, max);
    }
    // Not rounded: the sum below may be above the bound.
    if idx + 1 == len {
        return max;
    }
    let (idx, steps) = (idx as f64, (len - 1) as f64);
    let x = min + idx * (max - min) / steps;
    if x.is_finite() {
        return x.min(max);
    }
    // The product is too large for a double.
    min * (1.0 - idx / steps) + max * (idx / steps)
}

#[cfg(test)]
mod tests {
    use serde_json::json;
    use stoker_api::hyperparameters::{DoubleRange, LogRange};

    use super::*;
    use crate::search::normalized;

    fn check(parameter: &Parameter, expected: Value) {
        let values = (0..len(parameter)).map(|idx| value(parameter, idx).unwrap()).collect();
        let values = normalized(&Value::Array(values));
        assert_eq!(values, normalized(&expected), "{parameter:?}");
    }

    #[test]
    fn integers_are_spread_and_rounded_half_away_from_zero() {
        let int = |min, max, count| Parameter::Int(IntRange { min, max, count: Some(count) });
        check(&int(0, 20, 3), json!([0, 10, 20]));
        check(&int(0, 3, 9), json!([0, 1, 2, 3]));
        check(&int(1, 10, 4), json!([1, 4, 7, 10]));
        check(&int(-3, 2, 1), json!([-1]));
        check(&int(0, 20, 1), json!([10]));
        check(&int(-4, -2, 2), json!([-4, -2]));
        check(&int(0, 5, 3), json!([0, 3, 5]));
        // The middle is -0.5.
        check(&int(i64::MIN, i64::MAX, 3), json!([i64::MIN, -1, i64::MAX]));
        let min = 1_700_000_000_000_000_000;
        check(&int(min, min + 100, 3), json!([min, min + 50, min + 100]));
    }

    #[test]
    fn doubles_and_exponents_include_both_ends() {
        let double =
            |min, max, count| Parameter::Double(DoubleRange { min, max, count: Some(count) });
        let log =
            |min, max, count| Parameter::Log(LogRange { base: 10.0, min, max, count: Some(count) });
        check(&double(0.0, 1.0, 1), json!([0.5]));
        check(&double(0.0, 1.0, 3), json!([0.0, 0.5, 1.0]));
        check(&log(-3.0, -1.0, 3), json!([0.001, 0.01, 0.1]));
        check(&log(-3.0, -1.0, 1), json!([0.01]));
        assert_eq!(value(&double(-1.0, 0.1, 12), 11), Some(json!(0.1)));
        // The sum of the minimum and the distance is below the maximum.
        assert_eq!(value(&double(2.0, 7.6, 4), 3), Some(json!(7.6)));
        check(&double(-1.7e308, 1.7e308, 3), json!([-1.7e308, 0.0, 1.7e308]));
    }

    #[test]
    fn choices_keep_their_order_and_constants_are_one_point() {
        check(&Parameter::Categorical(vec![json!("b"), json!("a")]), json!(["b", "a"]));
        check(&Parameter::Const(json!([1, 2])), json!([[1, 2]]));
    }

    #[test]
    fn a_grid_with_more_points_than_can_be_counted_still_gives_them() {
        let int = IntRange { min: 0, max: i64::MAX, count: Some(1000) };
        let group = (0..12).map(|idx| (format!("{idx:02}"), Space::Parameter(Parameter::Int(int))));
        let grid = Grid::new(Space::Group(group.collect()));
        assert_eq!(grid.num_points(), u64::MAX);
        assert!(grid.point(u64::MAX - 1).is_some());
    }

    #[test]
    fn choices_add_the_points_of_their_groups() {
        let grid = |space: Value| {
            let grid = Grid::new(Space::parse(&space).unwrap());
            let points: Vec<_> = (0..grid.num_points()).map(|i| grid.point(i).unwrap()).collect();
            assert_eq!(grid.point(grid.num_points()), None);
            normalized(&Value::Array(points))
        };
        let space = json!({ "a": { "categorical": [1, 2] }, "net": { "oneOf": [
            { "kind": "mlp", "depth": { "int": { "min": 1, "max": 2, "count": 2 } } },
            { "kind": "none" },
        ] } });
        let mlp = |a: u32, depth: u32| json!({ "a": a, "net": { "kind": "mlp", "depth": depth } });
        let none = |a: u32| json!({ "a": a, "net": { "kind": "none" } });
        let expected = [mlp(1, 1), mlp(1, 2), none(1), mlp(2, 1), mlp(2, 2), none(2)];
        assert_eq!(grid(space), json!(expected));
    }

    #[test]
    fn the_length_of_an_axis_costs_nothing() {
        let check = |parameter, last: Value| {
            let grid = Grid::new(Space::Parameter(parameter));
            let len = u64::from(u32::MAX);
            assert_eq!((grid.num_points(), grid.point(len)), (len, None));
            assert_eq!(normalized(&grid.point(len - 1).unwrap()), normalized(&last));
        };
        let count = Some(u32::MAX);
        check(Parameter::Double(DoubleRange { min: 0.0, max: 1.0, count }), json!(1.0));
        check(Parameter::Log(LogRange { base: 10.0, min: 0.0, max: 2.0, count }), json!(100.0));
        check(Parameter::Int(IntRange { min: 0, max: i64::MAX, count }), json!(i64::MAX));
    }
}
