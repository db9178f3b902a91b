//! One curve, with as many points as a plot shows.

use super::CurvesQuery;
use crate::lttb::{Point, down_sample};
use crate::rows::{Position, TrialMetrics};

/// A curve of one metric.
#[derive(Debug, Default)]
pub(super) struct Curve {
    pub(super) x: Vec<f64>,
    pub(super) y: Vec<f64>,
    /// Positions of the first and the last NaN or infinity of each run of them in the range.
    pub(super) nonfinite: Vec<f64>,
    /// Number of values before sampling.
    pub(super) total: usize,
}

impl Curve {
    /// Returns at most `max` points of the range of the query. `max` must be at least 8.
    pub(super) fn new(
        metrics: &TrialMetrics,
        values: &[(u32, f64)],
        query: &CurvesQuery,
        x: &str,
        per_epoch: Option<f64>,
        max: usize,
    ) -> Self {
        let (mut points, mut nonfinite) = (Vec::<Point>::new(), Vec::new());
        // Whether the first mark of a run is in the list, and the position of the last one.
        let (mut has_first, mut last) = (false, None);
        for (position, value) in values {
            let x = x_of(metrics.at[*position as usize], x, per_epoch);
            if value.is_finite() {
                points.push((x, *value));
                nonfinite.extend(last.take());
                has_first = false;
            } else if query.contains(x) && has_first {
                last = Some(x);
            } else if query.contains(x) {
                nonfinite.push(x);
                has_first = true;
            }
        }
        nonfinite.extend(last);
        let nonfinite = thin(nonfinite, max / 2);
        let points = down_sample(&in_range(points, query), max - nonfinite.len());
        let (x, y) = points.into_iter().unzip();
        Self { x, y, nonfinite, total: values.len() }
    }

    /// Returns the number of points after sampling.
    pub(super) fn drawn(&self) -> usize {
        self.x.len() + self.nonfinite.len()
    }
}

/// Returns the value on the x axis.
pub(super) fn x_of(at: Position, x: &str, per_epoch: Option<f64>) -> f64 {
    match (x, per_epoch) {
        ("time", _) => at.seconds,
        ("epochs", Some(batches)) => at.batches as f64 / batches,
        ("epochs", None) => at.epoch as f64,
        _ => at.batches as f64,
    }
}

/// Returns the points in the range of a query and their neighbors, so that lines leave the plot at
/// the right height.
fn in_range(points: Vec<Point>, query: &CurvesQuery) -> Vec<Point> {
    let is_inside: Vec<bool> = points.iter().map(|(x, _)| query.contains(*x)).collect();
    let len = points.len();
    let is_kept =
        |i: usize| is_inside[i] || (i + 1 < len && is_inside[i + 1]) || (i > 0 && is_inside[i - 1]);
    let kept = points.into_iter().enumerate().filter(|(i, _)| is_kept(*i));
    kept.map(|(_, point)| point).collect()
}

/// Returns at most `max` of ascending positions: if there are more, the first one of each of `max`
/// equal parts.
fn thin(positions: Vec<f64>, max: usize) -> Vec<f64> {
    let (Some(first), Some(last)) = (positions.first().copied(), positions.last().copied()) else {
        return positions;
    };
    if positions.len() <= max {
        return positions;
    }
    let part = |x: f64| ((x - first) / (last - first) * max as f64).min(max as f64 - 1.0).floor();
    let mut latest = -1.0;
    let is_next = |x: &f64| {
        let part = part(*x);
        let is_next = part > latest;
        if is_next {
            latest = part;
        }
        is_next
    };
    positions.into_iter().filter(is_next).collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const NAN: f64 = f64::NAN;

    /// Returns the curve of values after 0, 1, 2, … batches.
    fn curve(values: &[f64], range: Option<(f64, f64)>, max: usize) -> Curve {
        let at = |batches: u64| Position { batches, epoch: 0, seconds: 0.0, attempt: 0 };
        let metrics =
            TrialMetrics { at: (0..values.len() as u64).map(at).collect(), ..Default::default() };
        let values: Vec<(u32, f64)> = (0u32..).zip(values.iter().copied()).collect();
        let (from, to) = range.unzip();
        let query = CurvesQuery { from, to, ..Default::default() };
        Curve::new(&metrics, &values, &query, "batches", None, max)
    }

    #[test]
    fn runs_of_nonfinite_values_have_two_marks() {
        let check = |values: &[f64], range: Option<(f64, f64)>, expected: &[f64]| {
            let curve = curve(values, range, 100);
            assert_eq!(curve.nonfinite, expected, "{values:?} {range:?}");
            assert_eq!(curve.total, values.len());
        };
        check(&[1.0, 2.0], None, &[]);
        check(&[1.0, NAN, NAN, f64::INFINITY], None, &[1.0, 3.0]);
        check(&[NAN, NAN, 1.0, NAN, 2.0, NAN, NAN], None, &[0.0, 1.0, 3.0, 5.0, 6.0]);
        check(&[NAN, 1.0, NAN, 1.0, NAN], Some((1.0, 3.0)), &[2.0]);
        // The line ended left of the range.
        check(&[1.0, NAN, NAN, NAN], Some((2.0, 3.0)), &[2.0, 3.0]);
        check(&[1.0, NAN, NAN, NAN, NAN, 1.0], Some((2.0, 3.0)), &[2.0, 3.0]);
    }

    #[test]
    fn marks_of_nonfinite_values_are_thinned() {
        let values: Vec<f64> = (0..100_000).map(|at| if at % 2 == 0 { 1.0 } else { NAN }).collect();
        let curve = curve(&values, None, 200);
        assert_eq!((curve.nonfinite.len(), curve.nonfinite[0]), (100, 1.0));
        assert!(curve.drawn() <= 200, "{}", curve.drawn());
    }

    proptest! {
        #[test]
        fn curves_have_at_most_the_points_of_the_plot(
            values in proptest::collection::vec(
                prop_oneof![Just(NAN), Just(f64::INFINITY), -1.0..1.0f64], 0..400,
            ),
            max in 8..200usize,
        ) {
            let curve = curve(&values, None, max);
            prop_assert!(curve.drawn() <= max, "{} > {max}", curve.drawn());
        }
    }
}
