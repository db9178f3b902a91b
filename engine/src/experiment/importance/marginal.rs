//! Variances of a tree's marginal predictions.
//!
//! Source: Hutter et al. (2014), theorem 3 and algorithm 2. The marginal prediction of a
//! hyperparameter is the mean of all predictions that have its value. Its variance over the values,
//! divided by the variance of all predictions, is the share of the hyperparameter. Every value
//! counts with the probability with which the space is sampled.
//!
//! The paper has no conditional hyperparameters. A tree splits along one of them only where it is
//! active for all results, so its prediction is a function of all axes, on which inactive
//! hyperparameters have no effect. The share of a conditional hyperparameter is its variance where
//! it is active, times the probability of that. In terms of the paper, these are its own effect and
//! its interaction with the choices that activate it.

use super::axes::{Axes, Axis, Condition, Kind};
use super::tree::{Leaf, Side};

/// A leaf with the share of each side in its axis.
struct Region<'a> {
    leaf: &'a Leaf,
    widths: Vec<f64>,
}

/// Returns the share of each axis that varies; `None` if all predictions are equal.
pub(super) fn shares(axes: &Axes, leaves: &[Leaf]) -> Option<Vec<f64>> {
    let widths = |leaf: &Leaf| leaf.sides.iter().map(|(_, side)| side.width()).collect();
    let regions: Vec<Region<'_>> =
        leaves.iter().map(|leaf| Region { leaf, widths: widths(leaf) }).collect();
    let variance = total_variance(&regions);
    let share = |i: usize| variance_of(axes, i, &regions) / variance;
    (variance > 0.0).then(|| axes.varying_indices().into_iter().map(share).collect())
}

/// Returns the variance of a tree's predictions over the space.
fn total_variance(regions: &[Region<'_>]) -> f64 {
    let volume = |region: &Region<'_>| region.widths.iter().product::<f64>();
    let mean: f64 = regions.iter().map(|region| volume(region) * region.leaf.value).sum();
    let square = |region: &Region<'_>| (region.leaf.value - mean) * (region.leaf.value - mean);
    regions.iter().map(|region| volume(region) * square(region)).sum()
}

/// Returns the variance of the marginal predictions of an axis.
fn variance_of(axes: &Axes, axis: usize, regions: &[Region<'_>]) -> f64 {
    let Axis { kind, conditions, .. } = &axes.all[axis];
    let contributions: Vec<(f64, Option<&Side>)> = regions
        .iter()
        .map(|region| {
            let side = region.leaf.sides.iter().find(|(of, _)| *of == axis).map(|(_, side)| side);
            (region.leaf.value * volume_of_others(region, axis, conditions), side)
        })
        .collect();
    let probability: f64 = conditions
        .iter()
        .map(|condition| match axes.all[condition.axis].kind {
            Kind::Choice(num) => 1.0 / num as f64,
            Kind::Number { .. } | Kind::Integer { .. } => 1.0,
        })
        .product();
    let variance = match kind {
        Kind::Choice(num) => variance_of_choice(*num, &contributions),
        Kind::Number { .. } | Kind::Integer { .. } => variance_of_numbers(&contributions),
    };
    probability * variance
}

/// Returns the share of a leaf in the space of the other axes, where the conditions are true.
fn volume_of_others(region: &Region<'_>, axis: usize, conditions: &[Condition]) -> f64 {
    let width = |((of, side), width): (&(usize, Side), &f64)| {
        let condition = conditions.iter().find(|condition| condition.axis == *of);
        match (side, condition) {
            _ if *of == axis => 1.0,
            (Side::Set(values), Some(condition)) => f64::from(values[condition.group]),
            _ => *width,
        }
    };
    region.leaf.sides.iter().zip(&region.widths).map(width).product()
}

fn variance_of_choice(num: usize, contributions: &[(f64, Option<&Side>)]) -> f64 {
    let mut marginals = vec![0.0; num];
    for (value, side) in contributions {
        for (i, marginal) in marginals.iter_mut().enumerate() {
            let is_in = match side {
                Some(Side::Set(values)) => values[i],
                _ => true,
            };
            *marginal += if is_in { *value } else { 0.0 };
        }
    }
    let mean = marginals.iter().sum::<f64>() / num as f64;
    marginals.iter().map(|marginal| (marginal - mean) * (marginal - mean)).sum::<f64>() / num as f64
}

fn variance_of_numbers(contributions: &[(f64, Option<&Side>)]) -> f64 {
    // The marginal prediction is a step function: changes by position.
    let mut changes = vec![(1.0, 0.0)];
    for (value, side) in contributions {
        let (low, high) = match side {
            Some(Side::Interval(low, high)) => (*low, *high),
            _ => (0.0, 1.0),
        };
        changes.extend([(low, *value), (high, -value)]);
    }
    changes.sort_by(|(one, _), (other, _)| one.total_cmp(other));
    let steps = || {
        changes.iter().scan((0.0, 0.0), |(position, marginal), (next, change)| {
            let step = (*next - *position, *marginal);
            (*position, *marginal) = (*next, *marginal + change);
            Some(step)
        })
    };
    let mean: f64 = steps().map(|(width, marginal)| width * marginal).sum();
    steps().map(|(width, marginal)| width * (marginal - mean) * (marginal - mean)).sum()
}

#[cfg(test)]
mod tests {
    use serde_json::json;
    use stoker_api::hyperparameters::Space;

    use super::*;

    /// Returns shares by axis, and the total variance.
    fn check(space: serde_json::Value, leaves: &[(f64, &[(usize, Side)])], expected: &[f64]) {
        let axes = Axes::new(&Space::parse(&space).unwrap());
        let leaf = |(value, sides): &(f64, &[(usize, Side)])| Leaf {
            value: *value,
            sides: sides.to_vec(),
        };
        let leaves: Vec<Leaf> = leaves.iter().map(leaf).collect();
        let actual = shares(&axes, &leaves).unwrap();
        assert_eq!(actual.len(), expected.len());
        for (actual, expected) in actual.iter().zip(expected) {
            assert!((actual - expected).abs() < 1e-12, "{actual} {expected}");
        }
    }

    /// Variances by hand. The tree predicts 0 for a below 0.5; otherwise 1 for b below 0.25, and 3.
    #[test]
    fn variances_of_a_small_tree() {
        let number = json!({ "double": { "min": 0, "max": 1 } });
        let at = |low, high| Side::Interval(low, high);
        let leaves: [(f64, &[(usize, Side)]); 3] = [
            (0.0, &[(0, at(0.0, 0.5))]),
            (1.0, &[(0, at(0.5, 1.0)), (1, at(0.0, 0.25))]),
            (3.0, &[(0, at(0.5, 1.0)), (1, at(0.25, 1.0))]),
        ];
        // Mean 1.25, mean of squares 3.5. Marginals of a: 0 and 2.5; of b: 0.5 and 1.5.
        let total = 3.5 - 1.5625;
        let shares = [1.5625 / total, 0.1875 / total];
        check(json!({ "a": number, "b": number }), &leaves, &shares);
    }

    /// The tree predicts 0 for group 0; for group 1, 0 or 2 by its parameter.
    #[test]
    fn conditional_axis_counts_where_it_is_active() {
        let number = json!({ "double": { "min": 0, "max": 1 } });
        let space = json!({ "choice": { "oneOf": [{}, { "a": number }] } });
        let group = |group| Side::Set(vec![group == 0, group == 1]);
        let half = |low| Side::Interval(low, low + 0.5);
        let leaves: [(f64, &[(usize, Side)]); 3] = [
            (0.0, &[(0, group(0))]),
            (0.0, &[(0, group(1)), (1, half(0.0))]),
            (2.0, &[(0, group(1)), (1, half(0.5))]),
        ];
        // Mean 0.5, mean of squares 1, total 0.75. Marginals of the choice: 0 and 1, variance 0.25.
        // Where a is active, its variance is 1.
        check(space, &leaves, &[0.25 / 0.75, 0.5 / 0.75]);
        assert_eq!(shares(&Axes::new(&Space::Group(Default::default())), &[]), None);
    }
}
