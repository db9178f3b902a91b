//! Values of one metric over the batches, and a line of blocks that shows their course.

use stoker_engine::experiment::explain::metric;

/// Maximum number of columns of a sparkline.
pub(super) const COLUMNS_MAX: usize = 40;

/// Blocks of a sparkline, from the smallest to the greatest value.
const BLOCKS: [char; 8] = ['▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];

/// Values of one metric, in the order of their batches.
#[derive(Clone, Debug, Default)]
pub(super) struct Curve {
    values: Vec<f64>,
    /// Batches of the last value.
    pub(super) batches: u64,
}

impl Curve {
    pub(super) fn push(&mut self, batches: u64, value: f64) {
        self.values.push(value);
        self.batches = batches;
    }

    /// Returns the number of values, and how many of them are NaN or infinite.
    pub(super) fn points(&self) -> String {
        let num_other = self.values.iter().filter(|value| !value.is_finite()).count();
        match num_other {
            0 => self.values.len().to_string(),
            _ => format!("{} ({num_other} not finite)", self.values.len()),
        }
    }

    pub(super) fn first(&self) -> String {
        metric(self.values.first().copied())
    }

    pub(super) fn last(&self) -> String {
        metric(self.values.last().copied())
    }

    /// Returns the best value, or the smallest and the greatest one if the direction is unknown.
    pub(super) fn best(&self, smaller_is_better: Option<bool>) -> String {
        if let Some(smaller_is_better) = smaller_is_better {
            return metric(self.best_value(smaller_is_better));
        }
        let (smallest, greatest) = (self.best_value(true), self.best_value(false));
        match smallest == greatest {
            true => metric(smallest),
            false => format!("{} to {}", metric(smallest), metric(greatest)),
        }
    }

    /// Returns the best value, except NaN.
    pub(super) fn best_value(&self, smaller_is_better: bool) -> Option<f64> {
        let values = self.values.iter().copied().filter(|value| !value.is_nan());
        values.reduce(if smaller_is_better { f64::min } else { f64::max })
    }

    /// Returns a line of at most [`COLUMNS_MAX`] blocks. Each column is the mean of equally many
    /// successive values, except NaN and infinities; a column of these alone is blank.
    pub(super) fn sparkline(&self) -> String {
        let len = self.values.len();
        let num_columns = len.min(COLUMNS_MAX);
        let bound = |column: usize| column * len / num_columns;
        let columns: Vec<Option<f64>> = (0..num_columns)
            .map(|column| mean(&self.values[bound(column)..bound(column + 1)]))
            .collect();
        let finite = || columns.iter().flatten().copied();
        let least = finite().reduce(f64::min).unwrap_or_default();
        let most = finite().reduce(f64::max).unwrap_or_default();
        let block = |mean: &Option<f64>| mean.map_or(' ', |mean| block(mean, least, most));
        columns.iter().map(block).collect()
    }
}

/// Returns the mean of the finite values.
fn mean(values: &[f64]) -> Option<f64> {
    let finite = || values.iter().copied().filter(|value| value.is_finite());
    let (least, most) = (finite().reduce(f64::min)?, finite().reduce(f64::max)?);
    let num = finite().count() as f64;
    // Divide before adding, so that the sum stays finite. The bounds undo the rounding for equal
    // values, which would otherwise show as steps.
    Some(finite().map(|value| value / num).sum::<f64>().clamp(least, most))
}

fn block(mean: f64, least: f64, most: f64) -> char {
    if least == most {
        return BLOCKS[BLOCKS.len() / 2 - 1];
    }
    // Halves, because the difference of two finite numbers may be infinite.
    let height = (mean / 2.0 - least / 2.0) / (most / 2.0 - least / 2.0);
    let level = (height * (BLOCKS.len() - 1) as f64).round() as usize;
    BLOCKS[level.min(BLOCKS.len() - 1)]
}

#[cfg(test)]
mod tests {
    use super::*;

    const NAN: f64 = f64::NAN;
    const INF: f64 = f64::INFINITY;

    fn curve(values: impl IntoIterator<Item = f64>) -> Curve {
        let mut curve = Curve::default();
        values.into_iter().zip(1..).for_each(|(value, batches)| curve.push(batches, value));
        curve
    }

    #[test]
    fn sparklines_show_the_course() {
        let check = |values: &[f64], expected: &str| {
            assert_eq!(curve(values.iter().copied()).sparkline(), expected, "{values:?}");
        };
        check(&[], "");
        check(&[0.5], "▄");
        check(&[2.0, 2.0, 2.0], "▄▄▄");
        check(&[0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0], "▁▂▃▄▅▆▇█");
        check(&[0.2, -0.5, 0.2], "█▁█");
        check(&[1.0, NAN, 0.0, INF, -INF, 1.0], "█ ▁  █");
        check(&[NAN, NAN], "  ");
        check(&[-f64::MAX, 0.0, f64::MAX], "▁▅█");
    }

    #[test]
    fn long_curves_are_averaged_per_column() {
        let check = |len: u32, values: &dyn Fn(u32) -> f64, expected: &str| {
            assert_eq!(curve((0..len).map(values)).sparkline(), expected, "{len}");
        };
        let steps: String = BLOCKS.iter().flat_map(|block| [*block; 5]).collect();
        check(40, &|index| f64::from(index / 5), &steps);
        check(4000, &|index| f64::from(index / 500), &steps);
        check(41, &|_| 1.0, &"▄".repeat(40));
        // One value of the first column is NaN, and all values of the second one are.
        let gap = |index| if index == 0 || (10..20).contains(&index) { NAN } else { 1.0 };
        check(400, &gap, &format!("▄ {}", "▄".repeat(38)));
        // The sum of the values of a column would be infinite.
        check(
            400,
            &|index| if index < 200 { f64::MAX } else { 0.0 },
            &format!("{}{}", "█".repeat(20), "▁".repeat(20)),
        );
    }

    #[test]
    fn best_value_depends_on_the_direction() {
        let check = |values: &[f64], expected: [&str; 3]| {
            let curve = curve(values.iter().copied());
            let directions = [Some(true), Some(false), None];
            assert_eq!(directions.map(|smaller| curve.best(smaller)), expected, "{values:?}");
        };
        check(&[0.5, 0.25, 0.75], ["0.25", "0.75", "0.25 to 0.75"]);
        check(&[NAN, 0.25], ["0.25", "0.25", "0.25"]);
        check(&[NAN], ["NaN", "NaN", "NaN"]);
        check(&[1.0, -INF], ["-inf", "1", "-inf to 1"]);
    }

    #[test]
    fn first_last_and_points_include_nan() {
        let curve = curve([NAN, 0.5, 0.00012345, INF]);
        let cells = [curve.points(), curve.first(), curve.last()];
        assert_eq!(cells, ["4 (2 not finite)", "NaN", "inf"]);
        assert_eq!(curve.batches, 4);
    }
}
