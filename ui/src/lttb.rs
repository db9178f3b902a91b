//! Down-sampling of curves.
//!
//! Source: Sveinn Steinarsson, "Downsampling Time Series for Visual Representation" (2013),
//! algorithm Largest-Triangle-Three-Buckets. It keeps the point of each bucket that forms the
//! largest triangle with the kept point before it and the mean of the next bucket.

/// A point of a curve. Finite.
pub(crate) type Point = (f64, f64);

/// Returns at most `max` points, or 4, in order: always the first, the last, the smallest and the
/// greatest one, and the selection of LTTB. The result depends on `points` and `max` only.
pub(crate) fn down_sample(points: &[Point], max: usize) -> Vec<Point> {
    sample(points, max).into_iter().map(|position| points[position]).collect()
}

/// Returns the positions of the points that [`down_sample`] returns.
pub(crate) fn sample(points: &[Point], max: usize) -> Vec<usize> {
    if points.len() <= max.max(4) {
        return (0..points.len()).collect();
    }
    let least = extreme(points, |one, other| one < other);
    let most = extreme(points, |one, other| one > other);
    let mut kept = lttb(points, max.max(4) - 2);
    for position in [least, most] {
        if let Err(at) = kept.binary_search(&position) {
            kept.insert(at, position);
        }
    }
    kept
}

fn extreme(points: &[Point], is_better: impl Fn(f64, f64) -> bool) -> usize {
    let mut best = 0;
    for (position, (_, y)) in points.iter().enumerate() {
        if is_better(*y, points[best].1) {
            best = position;
        }
    }
    best
}

/// Returns the positions that LTTB selects, ascending. `max` is at least 2.
fn lttb(points: &[Point], max: usize) -> Vec<usize> {
    let len = points.len();
    let num_buckets = max.saturating_sub(2);
    let mut kept = vec![0];
    // Bucket `i` has the positions from `bound(i)` to `bound(i + 1)`, without the first and last
    // point, which are always kept.
    let bound = |bucket: usize| 1 + bucket * (len - 2) / num_buckets.max(1);
    for bucket in 0..num_buckets {
        let (begin, end) = (bound(bucket), bound(bucket + 1));
        let next = if bucket + 1 < num_buckets { end..bound(bucket + 2) } else { len - 1..len };
        let Some(mean) = mean(&points[next]) else { continue };
        let last = points[kept[kept.len() - 1]];
        let area = |position: usize| triangle(last, points[position], mean);
        let selected = (begin..end).max_by(|one, other| {
            // Of equal areas, the first one: `max_by` would take the last.
            area(*one).total_cmp(&area(*other)).then(other.cmp(one))
        });
        kept.extend(selected);
    }
    kept.push(len - 1);
    kept
}

fn mean(points: &[Point]) -> Option<Point> {
    let num = points.len() as f64;
    if points.is_empty() {
        return None;
    }
    let sum =
        points.iter().fold((0.0, 0.0), |sum, point| (sum.0 + point.0 / num, sum.1 + point.1 / num));
    Some(sum)
}

/// Returns twice the area of a triangle.
fn triangle(a: Point, b: Point, c: Point) -> f64 {
    ((a.0 - c.0) * (b.1 - a.1) - (a.0 - b.0) * (c.1 - a.1)).abs()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn curve(values: &[f64]) -> Vec<Point> {
        values.iter().enumerate().map(|(x, y)| (x as f64, *y)).collect()
    }

    #[test]
    fn peaks_and_ends_are_kept() {
        let mut values = vec![0.0; 1000];
        values[137] = 5.0;
        values[801] = -3.0;
        values[999] = 1.0;
        let kept = down_sample(&curve(&values), 20);
        for expected in [(0.0, 0.0), (137.0, 5.0), (801.0, -3.0), (999.0, 1.0)] {
            assert!(kept.contains(&expected), "{expected:?} is missing in {kept:?}");
        }
        assert!(kept.len() <= 20, "{}", kept.len());
    }

    #[test]
    fn short_curves_are_unchanged() {
        let points = curve(&[1.0, 2.0, 3.0]);
        assert_eq!(down_sample(&points, 100), points);
        assert_eq!(down_sample(&[], 100), []);
    }

    proptest! {
        #[test]
        fn points_are_a_bounded_ordered_subset(
            values in proptest::collection::vec(-1e6..1e6f64, 0..400), max in 0..200usize,
        ) {
            let points = curve(&values);
            let kept = down_sample(&points, max);
            prop_assert!(kept.len() <= max.max(4));
            prop_assert!(kept.windows(2).all(|pair| pair[0].0 < pair[1].0));
            prop_assert!(kept.iter().all(|point| points.contains(point)));
            prop_assert_eq!(kept.first(), points.first());
            prop_assert_eq!(kept.last(), points.last());
        }
    }
}
