//! One curve, with as many points as a plot shows.

use super::CurvesQuery;
use crate::lttb::{Point, down_sample, sample};
use crate::rows::{Position, TrialMetrics};

/// A curve of one metric.
#[derive(Debug, Default)]
pub(super) struct Curve {
    pub(super) x: Vec<f64>,
    /// `None` between points that are separated by NaN or infinity.
    pub(super) y: Vec<Option<f64>>,
    /// Positions of the first and the last NaN or infinity of each run of them in the range.
    pub(super) nonfinite: Vec<f64>,
    /// Number of values before sampling, in the range and next to it.
    pub(super) total: usize,
}

/// Consecutive finite values of a curve.
#[derive(Debug)]
struct Piece {
    /// Position of the first NaN or infinity before the points; of the first point, if there is
    /// none.
    gap: f64,
    points: Vec<Point>,
}

impl Curve {
    /// Returns at most `max` points of the range of the query. `max` must be at least 16.
    pub(super) fn new(
        metrics: &TrialMetrics,
        values: &[(u32, f64)],
        query: &CurvesQuery,
        x: &str,
        per_epoch: Option<f64>,
        max: usize,
    ) -> Self {
        let (mut pieces, mut nonfinite) = (Vec::<Piece>::new(), Vec::new());
        // Whether the first mark of a run is in the list, and the position of the last one.
        let (mut has_first, mut last) = (false, None);
        // Position of the first value of the run before the next point.
        let mut gap = None;
        let mut total = 0;
        for (position, value) in values {
            let x = x_of(metrics.at[*position as usize], x, per_epoch);
            if value.is_finite() {
                if gap.is_some() || pieces.is_empty() {
                    pieces.push(Piece { gap: gap.take().unwrap_or(x), points: Vec::new() });
                }
                if let Some(piece) = pieces.last_mut() {
                    piece.points.push((x, *value));
                }
                nonfinite.extend(last.take());
                has_first = false;
                continue;
            }
            gap = gap.or(Some(x));
            if !query.contains(x) {
                continue;
            }
            total += 1;
            if has_first {
                last = Some(x);
            } else {
                nonfinite.push(x);
                has_first = true;
            }
        }
        nonfinite.extend(last);
        let nonfinite = thin(nonfinite, max / 2);
        let pieces: Vec<Piece> = pieces
            .into_iter()
            .map(|Piece { gap, points }| Piece { gap, points: in_range(points, query) })
            .filter(|piece| !piece.points.is_empty())
            .collect();
        total += pieces.iter().map(|piece| piece.points.len()).sum::<usize>();
        let (x, y) = join(&pieces, max - nonfinite.len()).into_iter().unzip();
        Self { x, y, nonfinite, total }
    }

    /// Returns the number of points after sampling.
    pub(super) fn drawn(&self) -> usize {
        self.y.iter().flatten().count() + self.nonfinite.len()
    }
}

/// Samples each piece, and joins them with `None` between two pieces. Returns at most `max` items,
/// or 8.
fn join(pieces: &[Piece], max: usize) -> Vec<(f64, Option<f64>)> {
    // `down_sample` never returns fewer points.
    let least = |piece: &Piece| piece.points.len().min(4);
    let reserved = pieces.iter().map(|piece| least(piece) + 1).sum::<usize>();
    let Some(spare) = max.checked_sub(reserved.saturating_sub(1)) else {
        return join_some(pieces, max);
    };
    let rest = pieces.iter().map(|piece| piece.points.len() - least(piece)).sum::<usize>().max(1);
    let mut joined = Vec::new();
    for piece in pieces {
        if !joined.is_empty() {
            joined.push((piece.gap, None));
        }
        let share = least(piece) + spare * (piece.points.len() - least(piece)) / rest;
        let points = down_sample(&piece.points, share).into_iter();
        joined.extend(points.map(|(x, y)| (x, Some(y))));
    }
    joined
}

/// Like [`join`] for more pieces than can be drawn: samples all points, so that some pieces are
/// left out.
fn join_some(pieces: &[Piece], max: usize) -> Vec<(f64, Option<f64>)> {
    let points = pieces.iter().flat_map(|piece| piece.points.iter().copied()).collect::<Vec<_>>();
    let numbered = pieces.iter().enumerate();
    let piece_of: Vec<usize> =
        numbered.flat_map(|(number, piece)| vec![number; piece.points.len()]).collect();
    let mut joined = Vec::new();
    let mut latest = None;
    for position in sample(&points, max / 2) {
        let number = piece_of[position];
        if latest.is_some_and(|latest| latest != number) {
            joined.push((pieces[number].gap, None));
        }
        latest = Some(number);
        let (x, y) = points[position];
        joined.push((x, Some(y)));
    }
    joined
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
    fn totals_count_the_values_of_the_range() {
        let check = |range: Option<(f64, f64)>, expected: (usize, usize)| {
            let curve = curve(&[1.0, 2.0, NAN, NAN, NAN, 3.0, 4.0, 5.0, 6.0], range, 100);
            assert_eq!((curve.drawn(), curve.total), expected, "{range:?}");
        };
        check(None, (8, 9));
        // With the point next to the range, to which the line leads.
        check(Some((5.0, 6.0)), (3, 3));
        check(Some((3.0, 3.0)), (1, 1));
    }

    #[test]
    fn marks_of_nonfinite_values_are_thinned() {
        let values: Vec<f64> = (0..100_000).map(|at| if at % 2 == 0 { 1.0 } else { NAN }).collect();
        let curve = curve(&values, None, 200);
        assert_eq!((curve.nonfinite.len(), curve.nonfinite[0]), (100, 1.0));
        assert!(curve.drawn() <= 200, "{}", curve.drawn());
    }

    #[test]
    fn nonfinite_values_separate_pieces_of_a_line() {
        let check = |values: &[f64], range, expected: &[(f64, Option<f64>)]| {
            let curve = curve(values, range, 100);
            let points: Vec<_> = curve.x.into_iter().zip(curve.y).collect();
            assert_eq!(points, expected, "{values:?} {range:?}");
        };
        check(&[0.5, NAN, NAN, 0.4], None, &[(0.0, Some(0.5)), (1.0, None), (3.0, Some(0.4))]);
        check(&[NAN, 0.5, f64::INFINITY], None, &[(1.0, Some(0.5))]);
        // No line leads to a point beyond NaN.
        check(&[0.5, NAN, 0.4, 0.3], Some((2.0, 2.0)), &[(2.0, Some(0.4)), (3.0, Some(0.3))]);
    }

    #[test]
    fn sampled_pieces_keep_their_ends() {
        let mut values = vec![1.0; 1000];
        values[300..500].fill(NAN);
        let curve = curve(&values, None, 100);
        let points: Vec<_> = curve.x.iter().copied().zip(curve.y.iter().copied()).collect();
        let at = points.iter().position(|point| *point == (300.0, None)).unwrap();
        let ends = [points[at - 1], points[at + 1]];
        assert_eq!(ends, [(299.0, Some(1.0)), (500.0, Some(1.0))]);
        assert!(points.len() > 90, "{}", points.len());
    }

    proptest! {
        #[test]
        fn curves_have_at_most_the_points_of_the_plot(
            values in proptest::collection::vec(
                prop_oneof![Just(NAN), Just(f64::INFINITY), -1.0..1.0f64], 0..400,
            ),
            max in 16..200usize,
        ) {
            let curve = curve(&values, None, max);
            let num = curve.x.len() + curve.nonfinite.len();
            prop_assert!(num <= max, "{num} > {max}");
            prop_assert!(curve.x.is_sorted());
            // Of two neighbors, both are points only if all values between them are finite.
            for (x, y) in curve.x.windows(2).zip(curve.y.windows(2)) {
                let between = &values[x[0] as usize..=x[1] as usize];
                let is_finite = between.iter().all(|value| value.is_finite());
                prop_assert!(is_finite || y.contains(&None), "{between:?}");
            }
        }
    }
}
