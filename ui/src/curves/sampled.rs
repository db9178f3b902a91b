//! One curve, with as many points as a plot shows.

use super::CurvesQuery;
use crate::lttb::{Point, down_sample};
use crate::rows::{Position, TrialMetrics};

/// A curve of one metric.
#[derive(Debug, Default)]
pub(super) struct Curve {
    pub(super) x: Vec<f64>,
    pub(super) y: Vec<f64>,
    /// Positions of NaN and infinities.
    pub(super) nonfinite: Vec<f64>,
    /// Number of values before sampling.
    pub(super) total: usize,
}

impl Curve {
    /// Returns at most `max` finite points of the range of the query.
    pub(super) fn new(
        metrics: &TrialMetrics,
        values: &[(u32, f64)],
        query: &CurvesQuery,
        x: &str,
        per_epoch: Option<f64>,
        max: usize,
    ) -> Self {
        let (mut points, mut nonfinite) = (Vec::<Point>::new(), Vec::new());
        for (position, value) in values {
            let x = x_of(metrics.at[*position as usize], x, per_epoch);
            match value.is_finite() {
                false => nonfinite.push(x),
                true => points.push((x, *value)),
            }
        }
        let points = down_sample(&in_range(points, query), max);
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
