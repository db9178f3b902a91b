//! Medians of measurements in alternating turns.

use std::fmt;

use serde::Serialize;

/// Comparison of two sides, with one measurement of each per round.
#[derive(Debug, Serialize)]
pub(crate) struct Comparison {
    /// Name of the comparison.
    pub(crate) name: String,
    /// Median of our side.
    pub(crate) ours: f64,
    /// Median of the other side.
    pub(crate) theirs: f64,
    /// Ratio of the medians.
    pub(crate) ratio: f64,
    /// Smallest and largest ratio of a round. The spread shows how noisy the machine was.
    pub(crate) ratio_range: (f64, f64),
}

impl Comparison {
    /// Creates a comparison from rounds of (ours, theirs).
    pub(crate) fn new(name: impl Into<String>, rounds: &[(f64, f64)]) -> Self {
        let (ours, theirs) = rounds.iter().copied().unzip::<_, _, Vec<_>, Vec<_>>();
        let (ours, theirs) = (median(ours), median(theirs));
        let ratios = || rounds.iter().map(|(ours, theirs)| ours / theirs);
        let range = (ratios().fold(f64::INFINITY, f64::min), ratios().fold(0.0, f64::max));
        Self { name: name.into(), ours, theirs, ratio: ours / theirs, ratio_range: range }
    }
}

impl fmt::Display for Comparison {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { name, ours, theirs, ratio, ratio_range: (least, greatest) } = self;
        write!(
            f,
            "{name:<34} {ours:>10.2} {theirs:>10.2} {ratio:>8.3}   {least:.3} to {greatest:.3}"
        )
    }
}

/// Measures both sides in turns and returns (ours, theirs) of each round. The first round is a
/// warm-up and is left out.
///
/// # Errors
///
/// Returns the first error of a side.
pub(crate) fn alternate<E>(
    rounds: usize,
    mut ours: impl FnMut() -> Result<f64, E>,
    mut theirs: impl FnMut() -> Result<f64, E>,
) -> Result<Vec<(f64, f64)>, E> {
    let mut pairs = vec![];
    for round in 0..=rounds {
        let pair = if round % 2 == 0 {
            (ours()?, theirs()?)
        } else {
            let theirs = theirs()?;
            (ours()?, theirs)
        };
        if round > 0 {
            pairs.push(pair);
        }
    }
    Ok(pairs)
}

/// Returns the median: the middle value, or the mean of the two middle values. NaN without values.
pub(crate) fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    let half = values.len() / 2;
    match values.len() {
        0 => f64::NAN,
        length if length % 2 == 1 => values[half],
        _ => f64::midpoint(values[half - 1], values[half]),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn median_of_odd_and_even_counts() {
        let check = |values: &[f64], expected: f64| assert_eq!(median(values.to_vec()), expected);
        check(&[3.0], 3.0);
        check(&[9.0, 1.0, 2.0], 2.0);
        check(&[4.0, 1.0, 2.0, 100.0], 3.0);
        assert!(median(vec![]).is_nan());
    }

    #[test]
    fn sides_alternate_after_a_warm_up() {
        let turns = std::cell::RefCell::new(String::new());
        let take = |side: char| -> Result<f64, ()> {
            turns.borrow_mut().push(side);
            Ok(turns.borrow().len() as f64)
        };
        let pairs = alternate(2, || take('a'), || take('b'));
        assert_eq!(pairs, Ok(vec![(4.0, 3.0), (5.0, 6.0)]));
        assert_eq!(*turns.borrow(), "abbaab");
    }

    #[test]
    fn ratio_is_of_medians_and_range_of_rounds() {
        let comparison = Comparison::new("x", &[(2.0, 1.0), (3.0, 3.0), (10.0, 2.0)]);
        assert_eq!((comparison.ours, comparison.theirs, comparison.ratio), (3.0, 2.0, 1.5));
        assert_eq!(comparison.ratio_range, (1.0, 5.0));
    }
}
