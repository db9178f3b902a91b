//! Regression trees on bootstrap samples of the results.
//!
//! Sources: Breiman, "Random Forests" (2001). Splits minimize the squared error, and the best split
//! of unordered values is found by their means: Breiman et al., "Classification and Regression
//! Trees" (1984), section 8.4 and theorem 4.5. Each split may use every hyperparameter, as in
//! scikit-learn and Optuna.

use super::axes::{Axes, Axis, Kind, Point};
use crate::search::rng::Random;

/// Maximum depth of a tree, that of Optuna.
const DEPTH_MAX: u32 = 64;

/// Maximum number of results in the sample of a tree. All results may enter, in different trees.
const SAMPLES_MAX: usize = 1000;

/// Maximum product of results and axes in a tree, which bounds the time for large spaces. Eight
/// values of a choice count as an axis.
const CELLS_MAX: usize = 20_000;

/// Number of results in the sample of a tree, for any number of hyperparameters.
const SAMPLES_MIN: usize = 100;

/// Source of trees for some results.
pub(super) struct Forest<'a> {
    axes: &'a Axes,
    points: &'a [Point],
    values: &'a [f64],
    /// Indices of the axes that may split.
    splitting: Vec<usize>,
    /// Results by position, for each splitting axis; those without a position last.
    sorted: Vec<Vec<u32>>,
}

/// A region of the space with the same prediction.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Leaf {
    /// Mean of the results.
    pub(super) value: f64,
    /// Bounds by index of the axis. The region is not bounded along other axes.
    pub(super) sides: Vec<(usize, Side)>,
}

/// Bounds of a region along one axis.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Side {
    /// Positions between two numbers.
    Interval(f64, f64),
    /// Values of a choice, by index.
    Set(Vec<bool>),
}

impl Side {
    /// Returns the share of the axis, from 0 to 1.
    pub(super) fn width(&self) -> f64 {
        match self {
            Self::Interval(low, high) => high - low,
            Self::Set(values) => {
                let num = values.iter().filter(|is_in| **is_in).count();
                num as f64 / values.len() as f64
            }
        }
    }
}

/// A node that may be split: the results from `begin` to `end` in every order.
struct Node {
    begin: usize,
    end: usize,
    depth: u32,
    sides: Vec<(usize, Side)>,
}

/// A split of a node. `score` is greater for a smaller squared error.
struct Split {
    score: f64,
    /// Index among the splitting axes.
    order: usize,
    cut: Cut,
}

enum Cut {
    /// Positions below the number go left.
    Below(f64),
    /// These values of a choice go left.
    Set(Vec<bool>),
}

/// A tree while it grows.
struct Growing<'a, 'f> {
    forest: &'f Forest<'a>,
    /// Number of times that each result is in the sample.
    weights: Vec<u32>,
    /// Results of the sample by position, for each splitting axis.
    orders: Vec<Vec<u32>>,
}

impl<'a> Forest<'a> {
    pub(super) fn new(axes: &'a Axes, points: &'a [Point], values: &'a [f64]) -> Self {
        let splitting = axes.varying_indices();
        let sort = |axis: &usize| {
            let position = |i: &u32| points[*i as usize][*axis].unwrap_or(f64::INFINITY);
            let mut order: Vec<u32> = (0..points.len() as u32).collect();
            order.sort_by(|one, other| position(one).total_cmp(&position(other)));
            order
        };
        let sorted = splitting.iter().map(sort).collect();
        Self { axes, points, values, splitting, sorted }
    }

    /// Returns the leaves of a tree on a bootstrap sample.
    pub(super) fn grow(&mut self, random: &mut Random) -> Vec<Leaf> {
        let num = self.points.len();
        let cost = |axis: &usize| match self.axes.all[*axis].kind {
            Kind::Choice(num) => num.div_ceil(8),
            Kind::Number { .. } | Kind::Integer { .. } => 1,
        };
        let cost: usize = self.splitting.iter().map(cost).sum();
        let num_affordable = (CELLS_MAX / cost.max(1)).clamp(SAMPLES_MIN, SAMPLES_MAX);
        let mut weights = vec![0; num];
        for _ in 0..num.min(num_affordable) {
            weights[random.up_to(num as u64 - 1) as usize] += 1;
        }
        let in_sample = |order: &Vec<u32>| {
            order.iter().copied().filter(|i| weights[*i as usize] > 0).collect::<Vec<u32>>()
        };
        let orders: Vec<Vec<u32>> = self.sorted.iter().map(in_sample).collect();
        let end = orders.first().map_or(0, Vec::len);
        let mut tree = Growing { forest: self, weights, orders };
        let mut leaves = vec![];
        let mut open = vec![Node { begin: 0, end, depth: 0, sides: vec![] }];
        while let Some(node) = open.pop() {
            match tree.best_split(&node, random) {
                Some(split) => open.extend(tree.split(node, split)),
                None => leaves.push(tree.leaf(node)),
            }
        }
        leaves
    }
}

impl Growing<'_, '_> {
    fn position(&self, result: u32, order: usize) -> Option<f64> {
        self.forest.points[result as usize][self.forest.splitting[order]]
    }

    fn axis(&self, order: usize) -> &Axis {
        &self.forest.axes.all[self.forest.splitting[order]]
    }

    /// Returns the weight and the weighted value of a result.
    fn sums(&self, result: u32) -> (f64, f64) {
        let weight = f64::from(self.weights[result as usize]);
        (weight, weight * self.forest.values[result as usize])
    }

    fn leaf(&self, node: Node) -> Leaf {
        let (weight, sum) = self.total(&node);
        Leaf { value: sum / weight, sides: node.sides }
    }

    fn total(&self, node: &Node) -> (f64, f64) {
        let results = self.orders[0][node.begin..node.end].iter();
        results.fold((0.0, 0.0), |(weights, sums), result| {
            let (weight, sum) = self.sums(*result);
            (weights + weight, sums + sum)
        })
    }

    /// Returns the best split of a node; `None` if it is a leaf. Of equal splits, a random axis
    /// counts, because the first one would seem to be more important.
    fn best_split(&self, node: &Node, random: &mut Random) -> Option<Split> {
        let results = &self.orders[0][node.begin..node.end];
        let value = |result: &u32| self.forest.values[*result as usize];
        let first = results.first().map(value)?;
        if node.depth == DEPTH_MAX || results.iter().all(|result| value(result) == first) {
            return None;
        }
        let total = self.total(node);
        let mut order: Vec<usize> = (0..self.orders.len()).collect();
        let mut best: Option<Split> = None;
        for i in 0..order.len() {
            let other = i + random.up_to((order.len() - 1 - i) as u64) as usize;
            order.swap(i, other);
            let split = match self.axis(order[i]).kind {
                Kind::Choice(num) => self.best_set(node, order[i], num, total),
                Kind::Number { .. } | Kind::Integer { .. } => {
                    self.best_boundary(node, order[i], total)
                }
            };
            let is_better =
                |split: &Split| best.as_ref().is_none_or(|best| split.score > best.score);
            if let Some(split) = split.filter(is_better) {
                best = Some(split);
            }
        }
        best
    }

    /// Returns the best split of numbers; `None` if one of the results has no number, or all have
    /// the same.
    fn best_boundary(&self, node: &Node, order: usize, total: (f64, f64)) -> Option<Split> {
        let results = &self.orders[order][node.begin..node.end];
        // Results without a position are the last.
        self.position(*results.last()?, order)?;
        let mut best: Option<(f64, f64)> = None;
        let mut left = (0.0, 0.0);
        for pair in results.windows(2) {
            let (weight, sum) = self.sums(pair[0]);
            left = (left.0 + weight, left.1 + sum);
            let (lower, upper) = (self.position(pair[0], order)?, self.position(pair[1], order)?);
            let (score, boundary) = (score(left, total), self.axis(order).boundary(lower, upper));
            // Equal positions have no boundary, and neighbors may be too close for one.
            let is_between = lower < boundary && boundary <= upper;
            if is_between && best.is_none_or(|(most, _)| score > most) {
                best = Some((score, boundary));
            }
        }
        best.map(|(score, boundary)| Split { score, order, cut: Cut::Below(boundary) })
    }

    /// Returns the best split of a choice; `None` if the choice is not active for all results, or
    /// all have the same value.
    fn best_set(
        &self,
        node: &Node,
        order: usize,
        num_values: usize,
        total: (f64, f64),
    ) -> Option<Split> {
        let mut sums = vec![(0.0, 0.0); num_values];
        for result in &self.orders[order][node.begin..node.end] {
            let of = sums.get_mut(self.position(*result, order)? as usize)?;
            let (weight, sum) = self.sums(*result);
            *of = (of.0 + weight, of.1 + sum);
        }
        let mut present: Vec<usize> = (0..num_values).filter(|i| sums[*i].0 > 0.0).collect();
        let mean = |i: usize| sums[i].1 / sums[i].0;
        present.sort_by(|one, other| mean(*one).total_cmp(&mean(*other)));
        let mut best: Option<(f64, usize, f64)> = None;
        let mut left = (0.0, 0.0);
        for num in 1..present.len() {
            let (weight, sum) = sums[present[num - 1]];
            left = (left.0 + weight, left.1 + sum);
            let score = score(left, total);
            if best.is_none_or(|(most, ..)| score > most) {
                best = Some((score, num, left.0));
            }
        }
        let (score, num, weight) = best?;
        // Values without a result go to the side with more results.
        let mut is_left = vec![2.0 * weight > total.0; num_values];
        present.iter().enumerate().for_each(|(i, value)| is_left[*value] = i < num);
        Some(Split { score, order, cut: Cut::Set(is_left) })
    }

    /// Divides a node into two.
    fn split(&mut self, node: Node, Split { order, cut, .. }: Split) -> [Node; 2] {
        let is_left = |tree: &Self, result: u32| match (&cut, tree.position(result, order)) {
            (Cut::Below(boundary), Some(position)) => position < *boundary,
            (Cut::Set(is_left), Some(value)) => is_left[value as usize],
            (_, None) => false,
        };
        let results = &self.orders[0][node.begin..node.end];
        let num_left = results.iter().filter(|result| is_left(self, **result)).count();
        for i in 0..self.orders.len() {
            let results = self.orders[i][node.begin..node.end].iter().copied();
            let (left, right): (Vec<u32>, Vec<u32>) =
                results.partition(|result| is_left(self, *result));
            let parts = left.into_iter().chain(right);
            let target = self.orders[i][node.begin..node.end].iter_mut();
            target.zip(parts).for_each(|(target, result)| *target = result);
        }
        let middle = node.begin + num_left;
        let axis = self.forest.splitting[order];
        let side = |is_left| part(&node.sides, axis, self.axis(order).kind, &cut, is_left);
        let (left, right) = (side(true), side(false));
        let depth = node.depth + 1;
        [
            Node { begin: node.begin, end: middle, depth, sides: left },
            Node { begin: middle, end: node.end, depth, sides: right },
        ]
    }
}

/// Returns the bounds of one part of a node.
fn part(
    sides: &[(usize, Side)],
    axis: usize,
    kind: Kind,
    cut: &Cut,
    is_left: bool,
) -> Vec<(usize, Side)> {
    let mut sides = sides.to_vec();
    let known = sides.iter().position(|(of, _)| *of == axis).unwrap_or_else(|| {
        sides.push((
            axis,
            match kind {
                Kind::Choice(num) => Side::Set(vec![true; num]),
                Kind::Number { .. } | Kind::Integer { .. } => Side::Interval(0.0, 1.0),
            },
        ));
        sides.len() - 1
    });
    match (&mut sides[known].1, cut) {
        (Side::Interval(_, high), Cut::Below(boundary)) if is_left => *high = *boundary,
        (Side::Interval(low, _), Cut::Below(boundary)) => *low = *boundary,
        (Side::Set(values), Cut::Set(left)) => {
            values.iter_mut().zip(left).for_each(|(is_in, left)| *is_in &= *left == is_left);
        }
        _ => {}
    }
    sides
}

/// Returns the score of a split: the squared error that it removes, plus a constant of the node.
fn score(left: (f64, f64), total: (f64, f64)) -> f64 {
    let right = (total.0 - left.0, total.1 - left.1);
    left.1 * left.1 / left.0 + right.1 * right.1 / right.0
}

#[cfg(test)]
mod tests {
    use serde_json::json;
    use stoker_api::hyperparameters::Space;

    use super::*;

    fn axes(space: &serde_json::Value) -> Axes {
        Axes::new(&Space::parse(space).unwrap())
    }

    /// Breiman et al. (1984), theorem 4.5: no other subset of the values has a smaller error.
    #[test]
    fn split_of_a_choice_is_the_best_of_all() {
        let axes = axes(&json!({ "choice": { "categorical": ["a", "b", "c", "d", "e"] } }));
        // Means differ from sums in their order. No result has the last value.
        let results = [(30, 0.6), (3, 1.0), (40, 0.2), (20, 0.1), (0, 0.0)];
        let of_choice = |(choice, (num, value)): (u32, &(usize, f64))| {
            vec![(vec![Some(f64::from(choice))], *value); *num]
        };
        let (points, values): (Vec<Point>, Vec<f64>) =
            (0..).zip(&results).flat_map(of_choice).unzip();
        let forest = Forest::new(&axes, &points, &values);
        let weights = vec![1; points.len()];
        let tree = Growing { forest: &forest, weights, orders: forest.sorted.clone() };
        let node = Node { begin: 0, end: points.len(), depth: 0, sides: vec![] };
        let split = tree.best_set(&node, 0, 5, tree.total(&node)).unwrap();
        let Cut::Set(found) = split.cut else { panic!("a choice has a set") };
        let error = |is_left: &dyn Fn(usize) -> bool| -> f64 {
            let of_side = |side: bool| {
                let in_side = || (0..4).filter(|i| is_left(*i) == side).map(|i| results[i]);
                let num: usize = in_side().map(|(num, _)| num).sum();
                let sum: f64 = in_side().map(|(num, value)| num as f64 * value).sum();
                let mean = sum / num as f64;
                in_side().map(|(num, value)| num as f64 * (value - mean).powi(2)).sum::<f64>()
            };
            of_side(true) + of_side(false)
        };
        let errors = (1..15).map(|set: usize| error(&|i| set >> i & 1 == 1));
        let least = errors.fold(f64::INFINITY, f64::min);
        assert!((error(&|i| found[i]) - least).abs() < 1e-9, "{found:?}");
    }

    /// Each split divides one result from the others.
    #[test]
    fn depth_of_a_tree_is_limited() {
        let axes = axes(&json!({ "a": { "double": { "min": 0, "max": 1 } } }));
        let (points, values): (Vec<Point>, Vec<f64>) =
            (0..200).map(|i| (vec![Some(f64::from(i) / 200.0)], 0.25_f64.powi(i))).unzip();
        let leaves = Forest::new(&axes, &points, &values).grow(&mut Random::new(7));
        assert_eq!(leaves.len(), DEPTH_MAX as usize + 1);
    }

    #[test]
    fn samples_are_smaller_in_large_spaces() {
        let name = |i: i32| (format!("p{i}"), json!({ "double": { "min": 0, "max": 1 } }));
        let space: serde_json::Map<_, _> = (0..200).map(name).collect();
        let axes = axes(&space.into());
        let (points, values): (Vec<Point>, Vec<f64>) =
            (0..400).map(|i| (vec![Some(f64::from(i) / 400.0); 200], f64::from(i))).unzip();
        let leaves = Forest::new(&axes, &points, &values).grow(&mut Random::new(7));
        // Each leaf has another result, of a sample of 20,000 / 200.
        assert!((50..=100).contains(&leaves.len()), "{}", leaves.len());
    }
}
