//! Comparison by several objectives: Pareto fronts, and subsets of them with a large hypervolume.

use super::rung::Loss;

/// Returns `true` if a point is nowhere worse than another one, and better in some objective.
pub(crate) fn dominates(one: &[Loss], other: &[Loss]) -> bool {
    one != other && one.iter().zip(other).all(|(one, other)| one <= other)
}

/// Returns the points of `among` that no other one dominates, by index.
pub(crate) fn front(points: &[Vec<Loss>], among: &[usize]) -> Vec<usize> {
    let mut sorted = among.to_vec();
    // A point comes after all points that dominate it.
    sorted.sort_by(|one, other| points[*one].cmp(&points[*other]).then(one.cmp(other)));
    let mut front: Vec<usize> = vec![];
    for point in sorted {
        if !front.iter().any(|other| dominates(&points[*other], &points[point])) {
            front.push(point);
        }
    }
    front.sort_unstable();
    front
}

/// Returns `num` points of the first fronts, by index. The last front is cut by hypervolume.
///
/// Source: Ozaki et al., "Multiobjective Tree-Structured Parzen Estimator for Computationally
/// Expensive Optimization Problems" (2020), with the greedy choice of Guerreiro et al. (2016).
pub(crate) fn best(points: &[Vec<Loss>], num: usize) -> Vec<usize> {
    let mut left: Vec<usize> = (0..points.len()).collect();
    let mut chosen = vec![];
    while chosen.len() < num && !left.is_empty() {
        let front = front(points, &left);
        left.retain(|point| front.binary_search(point).is_err());
        let room = num - chosen.len();
        let taken = if front.len() > room { largest(points, &front, room) } else { front };
        chosen.extend(taken);
    }
    chosen.sort_unstable();
    chosen
}

/// Returns `num` points of a front whose common hypervolume is large: each adds the most to those
/// before it.
fn largest(points: &[Vec<Loss>], front: &[usize], num: usize) -> Vec<usize> {
    let scaled = scaled(points, front);
    let mut chosen: Vec<usize> = vec![];
    let mut volumes: Vec<Vec<f64>> = vec![];
    // The contribution of a point never grows, so an outdated value is an upper bound.
    let mut gains: Vec<f64> = scaled.iter().map(|point| box_volume(point)).collect();
    let mut is_left = vec![true; front.len()];
    while chosen.len() < num {
        let mut best: Option<(f64, usize)> = None;
        let mut order: Vec<usize> = (0..front.len()).filter(|i| is_left[*i]).collect();
        order.sort_by(|one, other| gains[*other].total_cmp(&gains[*one]).then(one.cmp(other)));
        for i in order {
            if best.is_some_and(|(gain, _)| gain >= gains[i]) {
                break;
            }
            gains[i] = box_volume(&scaled[i]) - volume(&limited(&volumes, &scaled[i]));
            if best.is_none_or(|(gain, _)| gains[i] > gain) {
                best = Some((gains[i], i));
            }
        }
        let Some((_, i)) = best else { break };
        is_left[i] = false;
        chosen.push(front[i]);
        volumes.push(scaled[i].clone());
    }
    chosen
}

/// Distances from the reference point, by objective. It is a tenth worse than the worst loss, in
/// the range of the front. Infinite losses have the distance 0.
fn scaled(points: &[Vec<Loss>], front: &[usize]) -> Vec<Vec<f64>> {
    const REFERENCE: f64 = 1.1;
    let num_objectives = front.first().map_or(0, |first| points[*first].len());
    let range = |objective: usize| {
        let values = front.iter().map(|point| points[*point][objective].value());
        values
            .filter(|value| value.is_finite())
            .fold((f64::INFINITY, f64::NEG_INFINITY), |(min, max), value| {
                (min.min(value), max.max(value))
            })
    };
    let ranges: Vec<(f64, f64)> = (0..num_objectives).map(range).collect();
    let distance = |loss: &Loss, (min, max): (f64, f64)| match loss.value() {
        f64::INFINITY => 0.0,
        f64::NEG_INFINITY => REFERENCE,
        _ if max <= min => REFERENCE,
        // Halves, because the difference of two large numbers may be infinite.
        value => REFERENCE - (value / 2.0 - min / 2.0) / (max / 2.0 - min / 2.0),
    };
    let scale = |point: &usize| {
        points[*point].iter().zip(&ranges).map(|(loss, range)| distance(loss, *range)).collect()
    };
    front.iter().map(scale).collect()
}

fn box_volume(point: &[f64]) -> f64 {
    point.iter().product()
}

/// Returns the boxes of points inside the box of one.
fn limited(points: &[Vec<f64>], one: &[f64]) -> Vec<Vec<f64>> {
    let limit = |point: &Vec<f64>| point.iter().zip(one).map(|(x, max)| x.min(*max)).collect();
    points.iter().map(limit).collect()
}

/// Returns the volume of the union of boxes that begin at 0.
///
/// Source: While et al., "A Fast Way of Calculating Exact Hypervolumes" (2012).
fn volume(points: &[Vec<f64>]) -> f64 {
    let mut kept: Vec<&Vec<f64>> = vec![];
    let contains = |one: &[f64], other: &[f64]| one.iter().zip(other).all(|(x, y)| x >= y);
    for point in points {
        if !kept.iter().any(|other| contains(other, point)) {
            kept.retain(|other| !contains(point, other));
            kept.push(point);
        }
    }
    let kept: Vec<Vec<f64>> = kept.into_iter().cloned().collect();
    let added = |i: usize| box_volume(&kept[i]) - volume(&limited(&kept[i + 1..], &kept[i]));
    (0..kept.len()).map(added).sum()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn losses(points: &[Vec<f64>]) -> Vec<Vec<Loss>> {
        points.iter().map(|point| point.iter().map(|loss| Loss::new(*loss)).collect()).collect()
    }

    fn points() -> impl Strategy<Value = Vec<Vec<f64>>> {
        let loss = prop_oneof![12 => (0..6_u8).prop_map(f64::from), 1 => Just(f64::NAN)];
        prop::collection::vec(prop::collection::vec(loss, 3), 0..24)
    }

    #[test]
    fn volume_counts_common_parts_once() {
        let check = |points: &[&[f64]], expected: f64| {
            let points: Vec<Vec<f64>> = points.iter().map(|point| point.to_vec()).collect();
            assert!((volume(&points) - expected).abs() < 1e-12, "{points:?}");
        };
        check(&[], 0.0);
        check(&[&[2.0, 3.0]], 6.0);
        check(&[&[2.0, 3.0], &[3.0, 1.0]], 7.0);
        check(&[&[2.0, 3.0], &[2.0, 3.0], &[1.0, 1.0]], 6.0);
        check(&[&[1.0, 2.0, 3.0], &[3.0, 2.0, 1.0], &[2.0, 1.0, 2.0]], 11.0);
    }

    #[test]
    fn last_front_is_cut_by_hypervolume() {
        let check = |points: &[[f64; 2]], num: usize, expected: &[usize]| {
            let points: Vec<Vec<f64>> = points.iter().map(|point| point.to_vec()).collect();
            assert_eq!(best(&losses(&points), num), expected, "{points:?}");
        };
        // Both ends of the front are close to others; the knee has the largest box.
        let front = [[0.0, 1.0], [0.01, 0.99], [0.2, 0.2], [0.99, 0.01], [1.0, 0.0]];
        check(&front, 1, &[2]);
        check(&front, 5, &[0, 1, 2, 3, 4]);
        // The reference point is (11, 11), so the boxes have the areas 11, 63, 54, 30 and 11. Of
        // what the second one leaves, the others add 2, 12, 9 and 4; then 2, 3 and 2 are left.
        let front = [[0.0, 10.0], [2.0, 4.0], [5.0, 2.0], [8.0, 1.0], [10.0, 0.0]];
        check(&front, 1, &[1]);
        check(&front, 2, &[1, 2]);
        check(&front, 3, &[1, 2, 3]);
        // The first front is complete before the second one begins.
        check(&[[3.0, 3.0], [1.0, 2.0], [2.0, 1.0], [2.5, 2.5]], 3, &[1, 2, 3]);
        // Infinite losses come last.
        check(&[[0.0, f64::NAN], [1.0, 1.0]], 1, &[1]);
        // Negative infinity is as good as the best finite loss.
        check(&[[f64::NEG_INFINITY, 1.0], [0.0, 0.0], [-1.0, 1.0]], 1, &[1]);
        check(&[[1.0, 1.0]; 3], 2, &[0, 1]);
    }

    /// The reference point of the losses 3, 5 and 11 is 11 + 0.1 * (11 - 3) = 11.8.
    #[test]
    fn distances_are_fractions_of_the_range() {
        let check = |losses: [f64; 3], expected: [f64; 3]| {
            let points = losses.map(|loss| vec![Loss::new(loss)]);
            for (distances, expected) in scaled(&points, &[0, 1, 2]).iter().zip(expected) {
                assert!((distances[0] - expected).abs() < 1e-12, "{losses:?}: {distances:?}");
            }
        };
        check([3.0, 5.0, 11.0], [8.8 / 8.0, 6.8 / 8.0, 0.8 / 8.0]);
        check([-11.0, -5.0, -3.0], [8.8 / 8.0, 2.8 / 8.0, 0.8 / 8.0]);
        check([f64::MIN, 0.0, f64::MAX], [1.1, 0.6, 0.1]);
        check([7.0, 7.0, f64::NAN], [1.1, 1.1, 0.0]);
        check([7.0, 9.0, f64::NEG_INFINITY], [1.1, 0.1, 1.1]);
    }

    proptest! {
        #[test]
        fn front_has_all_points_that_none_dominates(points in points()) {
            let points = losses(&points);
            let all: Vec<usize> = (0..points.len()).collect();
            let is_free = |point: &usize| {
                !points.iter().any(|other| dominates(other, &points[*point]))
            };
            let expected: Vec<usize> = all.iter().copied().filter(is_free).collect();
            prop_assert_eq!(front(&points, &all), expected);
        }

        #[test]
        fn best_points_are_distinct_and_undominated_by_others(
            points in points(),
            num in 0..30_usize,
        ) {
            let points = losses(&points);
            let chosen = best(&points, num);
            prop_assert_eq!(chosen.len(), num.min(points.len()));
            prop_assert!(chosen.is_sorted_by(|one, other| one < other));
            for other in (0..points.len()).filter(|point| !chosen.contains(point)) {
                let is_better = |point: &usize| dominates(&points[other], &points[*point]);
                prop_assert!(!chosen.iter().any(is_better));
            }
        }
    }
}
