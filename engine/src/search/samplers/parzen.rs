//! Parzen estimators: mixtures with one kernel for each observed point, and one for the prior.

use std::f64::consts::{PI, SQRT_2};

use crate::search::rng::Random;

/// Number of the newest points that have equal weights.
const WEIGHTED_EQUALLY: usize = 25;
/// Deviation from which on an integer has the density at its center: the difference between the
/// bounds of its cell would lose its digits.
const WIDE_DEVIATION: f64 = 1e6;
/// Maximum number of samples from a normal distribution until one is within the bounds. At least a
/// third of them are, except if there are hardly any doubles between the bounds.
const TRIES_MAX: u32 = 1000;

/// Values of one parameter, as coordinates.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Axis {
    /// Numbers from `low` (inclusive) to `high` (exclusive).
    Number {
        /// Smallest value.
        low: f64,
        /// Upper bound.
        high: f64,
    },
    /// Integers from `low` to `high`, both inclusive.
    Integer {
        /// Smallest value.
        low: f64,
        /// Largest value.
        high: f64,
    },
    /// Indices of this many choices.
    Choice(usize),
}

impl Axis {
    /// Returns the bounds of kernels. Each integer is the center of a cell of width 1.
    fn bounds(self) -> (f64, f64) {
        match self {
            Self::Number { low, high } => (low, high),
            Self::Integer { low, high } => (low - 0.5, high + 0.5),
            Self::Choice(num) => (0.0, num as f64),
        }
    }
}

/// A kernel on one axis.
#[derive(Clone, Copy, Debug)]
enum Kernel {
    /// Normal distribution, truncated to the bounds of the axis.
    Normal { mean: f64, deviation: f64 },
    /// One choice, which has this probability; the others share the rest.
    Choice { center: f64, probability: f64 },
    /// All choices with equal probability.
    AnyChoice,
}

/// Density over several axes, estimated from points.
#[derive(Clone, Debug)]
pub(super) struct Parzen {
    axes: Vec<Axis>,
    /// Kernels by point, then by axis. The last ones are the prior.
    kernels: Vec<Vec<Kernel>>,
    /// Weights of the kernels, with the sum 1.
    weights: Vec<f64>,
}

impl Parzen {
    /// Returns the estimator for points with one coordinate for each axis, the oldest point first.
    pub(super) fn new(axes: &[Axis], points: &[Vec<f64>]) -> Self {
        let mut kernels = vec![Vec::with_capacity(axes.len()); points.len() + 1];
        for (index, axis) in axes.iter().enumerate() {
            let column: Vec<f64> = points.iter().map(|point| point[index]).collect();
            let column = match axis {
                Axis::Choice(num) => choice_kernels(*num, &column),
                _ => neighbor_kernels(*axis, &column),
            };
            kernels.iter_mut().zip(column).for_each(|(row, kernel)| row.push(kernel));
        }
        Self { axes: axes.to_vec(), kernels, weights: weights(points.len()) }
    }

    /// Samples a point.
    pub(super) fn sample(&self, random: &mut Random) -> Vec<f64> {
        let mut rest = random.unit();
        let is_chosen = |weight: &f64| {
            rest -= weight;
            rest < 0.0
        };
        let last = self.kernels.len() - 1;
        let kernel = self.weights.iter().position(is_chosen).unwrap_or(last);
        let axes = self.axes.iter().zip(&self.kernels[kernel]);
        axes.map(|(axis, kernel)| sample_kernel(*axis, *kernel, random)).collect()
    }

    /// Returns the logarithm of the density at a point.
    pub(super) fn log_density(&self, point: &[f64]) -> f64 {
        let of_kernel = |(kernels, weight): (&Vec<Kernel>, &f64)| -> f64 {
            let axes = self.axes.iter().zip(kernels).zip(point);
            let log = axes.map(|((axis, kernel), x)| log_kernel(*axis, *kernel, *x)).sum::<f64>();
            weight.ln() + log
        };
        let logs: Vec<f64> = self.kernels.iter().zip(&self.weights).map(of_kernel).collect();
        let most = logs.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        if most == f64::NEG_INFINITY {
            return most;
        }
        let sum: f64 = logs.iter().map(|log| (log - most).exp()).sum();
        most + sum.ln()
    }
}

/// Returns the weights of the kernels of `num` points and of the prior, with the sum 1. The newest
/// 25 points and the prior weigh the same. The weights of older points decrease linearly with age.
/// Source: Bergstra et al., "Making a Science of Model Search" (2013).
fn weights(num: usize) -> Vec<f64> {
    let num_old = num.saturating_sub(WEIGHTED_EQUALLY);
    let least = 1.0 / num as f64;
    let step = (1.0 - least) / num_old.saturating_sub(1).max(1) as f64;
    let of_point = |index: usize| if index < num_old { least + step * index as f64 } else { 1.0 };
    let weights: Vec<f64> = (0..num).map(of_point).chain([1.0]).collect();
    let sum: f64 = weights.iter().sum();
    weights.iter().map(|weight| weight / sum).collect()
}

fn choice_kernels(num: usize, column: &[f64]) -> Vec<Kernel> {
    let prior = 1.0 / (column.len() + 1) as f64;
    let probability = (1.0 + prior) / (1.0 + num as f64 * prior);
    let kernels = column.iter().map(|center| Kernel::Choice { center: *center, probability });
    kernels.chain([Kernel::AnyChoice]).collect()
}

/// Deviations from the distance to the farther neighbor: Bergstra et al., "Algorithms for
/// Hyper-Parameter Optimization" (2011), with the lower bound of Optuna. The bounds count as
/// neighbors of a single point, but not of the outermost ones of several points.
fn neighbor_kernels(axis: Axis, column: &[f64]) -> Vec<Kernel> {
    let (low, high) = axis.bounds();
    let least = (high - low) / (2 + column.len()).min(100) as f64;
    let mut order: Vec<usize> = (0..column.len()).collect();
    order.sort_by(|one, other| column[*one].total_cmp(&column[*other]));
    let mut deviations = vec![0.0; column.len()];
    for (place, index) in order.iter().enumerate() {
        let at = |place: usize| order.get(place).map(|index| column[*index]);
        let mean = column[*index];
        let below = place.checked_sub(1).and_then(at).map(|below| mean - below);
        let above = at(place + 1).map(|above| above - mean);
        deviations[*index] = match (below, above) {
            (None, None) => (mean - low).max(high - mean),
            (Some(distance), None) | (None, Some(distance)) => distance,
            (Some(below), Some(above)) => below.max(above),
        };
    }
    let kernel = |(mean, deviation): (&f64, f64)| Kernel::Normal {
        mean: *mean,
        deviation: deviation.clamp(least, high - low),
    };
    let prior = Kernel::Normal { mean: f64::midpoint(low, high), deviation: high - low };
    column.iter().zip(deviations).map(kernel).chain([prior]).collect()
}

/// Distribution function of the standard normal distribution.
fn normal_cdf(x: f64) -> f64 {
    0.5 * libm::erfc(-x / SQRT_2)
}

fn log_kernel(axis: Axis, kernel: Kernel, x: f64) -> f64 {
    match (kernel, axis) {
        (Kernel::AnyChoice, _) => -axis.bounds().1.ln(),
        (Kernel::Choice { center, probability }, _) if center == x => probability.ln(),
        (Kernel::Choice { probability, .. }, Axis::Choice(num)) => {
            ((1.0 - probability) / (num as f64 - 1.0)).ln()
        }
        (Kernel::Choice { .. }, _) => f64::NEG_INFINITY,
        (Kernel::Normal { mean, deviation }, _) => {
            let (low, high) = axis.bounds();
            let cdf = |x: f64| normal_cdf((x - mean) / deviation);
            let inside = cdf(high) - cdf(low);
            match axis {
                Axis::Integer { .. } if deviation < WIDE_DEVIATION => {
                    ((cdf(x + 0.5) - cdf(x - 0.5)) / inside).ln()
                }
                _ => {
                    let z = (x - mean) / deviation;
                    -0.5 * z * z - (deviation * (2.0 * PI).sqrt() * inside).ln()
                }
            }
        }
    }
}

fn sample_kernel(axis: Axis, kernel: Kernel, random: &mut Random) -> f64 {
    let (low, high) = axis.bounds();
    match kernel {
        Kernel::AnyChoice => random.up_to(high as u64 - 1) as f64,
        Kernel::Choice { center, probability } => {
            let is_center = high <= 1.0 || random.unit() < probability;
            if is_center {
                return center;
            }
            let other = random.up_to(high as u64 - 2) as f64;
            if other < center { other } else { other + 1.0 }
        }
        Kernel::Normal { mean, deviation } => {
            let is_inside = |x: &f64| (low..high).contains(x);
            let mut samples = (0..TRIES_MAX).map(|_| sample_normal(mean, deviation, random));
            let nearest = mean.clamp(low, high);
            let x = samples.find(is_inside).unwrap_or(nearest);
            match axis {
                Axis::Integer { low, high } => x.round().clamp(low, high),
                _ => x,
            }
        }
    }
}

fn sample_normal(mean: f64, deviation: f64, random: &mut Random) -> f64 {
    let radius = (-2.0 * (1.0 - random.unit()).ln()).sqrt();
    mean + deviation * radius * (2.0 * PI * random.unit()).cos()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The density over all values of an axis is 1, also for repeated points and points on bounds.
    #[test]
    fn densities_integrate_to_one() {
        let columns = [vec![], vec![0.5], vec![-1.0, 2.0, 2.0, 0.25], vec![3.0; 30]];
        for column in columns {
            let points: Vec<Vec<f64>> = column.iter().map(|x: &f64| vec![*x]).collect();
            let number = Axis::Number { low: -1.0, high: 3.0 };
            let parzen = Parzen::new(&[number], &points);
            let steps = 40_000;
            let sum: f64 = (0..steps)
                .map(|step| -1.0 + (f64::from(step) + 0.5) * 4.0 / f64::from(steps))
                .map(|x| parzen.log_density(&[x]).exp() * 4.0 / f64::from(steps))
                .sum();
            assert!((sum - 1.0).abs() < 1e-6, "{column:?}: {sum}");

            let whole: Vec<Vec<f64>> = column.iter().map(|x| vec![x.round()]).collect();
            let parzen = Parzen::new(&[Axis::Integer { low: -1.0, high: 3.0 }], &whole);
            let sum: f64 = (-1..=3).map(|x| parzen.log_density(&[f64::from(x)]).exp()).sum();
            assert!((sum - 1.0).abs() < 1e-9, "{column:?}: {sum}");

            let choices: Vec<Vec<f64>> = column.iter().map(|x| vec![x.abs().floor()]).collect();
            let parzen = Parzen::new(&[Axis::Choice(4)], &choices);
            let sum: f64 = (0..4).map(|x| parzen.log_density(&[f64::from(x)]).exp()).sum();
            assert!((sum - 1.0).abs() < 1e-9, "{column:?}: {sum}");
        }
    }

    #[test]
    fn deviation_is_distance_to_the_farther_neighbor() {
        // The axis may begin anywhere.
        let shifted = |column: &[f64], shift: f64| -> Vec<f64> {
            let axis = Axis::Number { low: shift, high: shift + 10.0 };
            let column: Vec<f64> = column.iter().map(|x| x + shift).collect();
            let kernels = neighbor_kernels(axis, &column).into_iter();
            kernels
                .map(|kernel| match kernel {
                    Kernel::Normal { deviation, .. } => deviation,
                    _ => unreachable!("a number has normal kernels"),
                })
                .collect()
        };
        let deviations = |column: &[f64]| {
            assert_eq!(shifted(column, 4.0), shifted(column, 0.0));
            shifted(column, 0.0)
        };
        assert_eq!(deviations(&[]), [10.0]);
        // The bounds are the neighbors of a single point.
        assert_eq!(deviations(&[3.0]), [7.0, 10.0]);
        // Outermost points: distance to their only neighbor, here below the least deviation 10 / 4.
        assert_eq!(deviations(&[2.0, 1.0]), [2.5, 2.5, 10.0]);
        // Repeated points: each has the others as neighbors. The least deviation is 10 / 6.
        let least = 10.0 / 6.0;
        assert_eq!(deviations(&[5.0, 9.0, 5.0, 0.0]), [5.0, 4.0, 4.0, 5.0, 10.0]);
        assert_eq!(deviations(&[5.0, 5.0, 5.0, 0.0]), [5.0, least, least, 5.0, 10.0]);
    }

    /// As in Optuna: each choice of a kernel has the weight 1 / (number of kernels), and the one
    /// that was observed has 1 more. So it has 1.5 of 2.5 with one point and three choices.
    #[test]
    fn observed_choice_has_the_weight_one_more() {
        let parzen = Parzen::new(&[Axis::Choice(3)], &[vec![2.0]]);
        // The prior, with half of the weight, has the same density for all choices.
        for (choice, expected) in
            [(0.0, 0.5 * 0.2 + 0.5 / 3.0), (1.0, 0.5 * 0.2 + 0.5 / 3.0), (2.0, 0.3 + 0.5 / 3.0)]
        {
            let density = parzen.log_density(&[choice]).exp();
            assert!((density - expected).abs() < 1e-12, "{choice}: {density}");
        }
    }

    /// The sum of rounded weights may be below 1, and the random number above it.
    #[test]
    fn prior_takes_the_weight_lost_by_rounding() {
        let choice = |center: f64| vec![Kernel::Choice { center, probability: 1.0 }];
        let kernels = vec![choice(0.0), choice(1.0)];
        let parzen = Parzen { axes: vec![Axis::Choice(2)], kernels, weights: vec![0.0, 0.0] };
        assert_eq!(parzen.sample(&mut Random::new(1)), [1.0]);
    }

    #[test]
    fn older_points_weigh_less() {
        let relative = |num: usize| {
            let weights = weights(num);
            assert!((weights.iter().sum::<f64>() - 1.0).abs() < 1e-12);
            weights.iter().map(|weight| weight / weights[num]).collect::<Vec<_>>()
        };
        assert_eq!(relative(0), [1.0]);
        assert_eq!(relative(25), [1.0; 26]);
        let old = relative(28);
        for (index, expected) in [1.0 / 28.0, (1.0 + 1.0 / 28.0) / 2.0, 1.0, 1.0].iter().enumerate()
        {
            assert!((old[index] - expected).abs() < 1e-12, "{index}: {}", old[index]);
        }
    }

    #[test]
    fn normal_samples_have_the_mean_and_deviation() {
        let axis = Axis::Number { low: -9.0, high: 11.0 };
        let kernel = Kernel::Normal { mean: 1.0, deviation: 0.5 };
        let mut random = Random::new(3);
        let num = 20_000;
        let samples: Vec<f64> =
            (0..num).map(|_| sample_kernel(axis, kernel, &mut random)).collect();
        let mean = samples.iter().sum::<f64>() / f64::from(num);
        let squares: f64 = samples.iter().map(|x| (x - 1.0).powi(2)).sum();
        let deviation = (squares / f64::from(num)).sqrt();
        // The standard error of the mean is 0.0035.
        assert!(
            (mean - 1.0).abs() < 0.014 && (deviation - 0.5).abs() < 0.014,
            "{mean} {deviation}"
        );
    }

    #[test]
    fn densities_of_wide_integers_are_finite() {
        let width = 2.0_f64.powi(64);
        let axis = Axis::Integer { low: 0.0, high: width };
        let parzen = Parzen::new(&[axis], &[vec![width / 4.0]]);
        for x in [0.0, width / 4.0, width] {
            let relative = parzen.log_density(&[x]) + width.ln();
            assert!(relative.abs() < 1.0, "{x}: {relative}");
        }
    }

    #[test]
    fn sampling_ends_without_a_number_within_bounds() {
        let (low, high) = (1.0, 1.0_f64.next_up());
        let kernel = Kernel::Normal { mean: high, deviation: 1e-20 };
        let x = sample_kernel(Axis::Number { low, high }, kernel, &mut Random::new(1));
        assert!((low..=high).contains(&x), "{x}");
    }

    /// Samples have the frequencies of the density.
    #[test]
    fn samples_follow_the_density() {
        let axes = [Axis::Integer { low: 0.0, high: 4.0 }, Axis::Choice(3)];
        let parzen = Parzen::new(&axes, &[vec![1.0, 2.0], vec![4.0, 0.0]]);
        let mut random = Random::new(3);
        let num = 100_000;
        let mut counts = [[0_u32; 3]; 5];
        for _ in 0..num {
            let point = parzen.sample(&mut random);
            counts[point[0] as usize][point[1] as usize] += 1;
        }
        for (x, row) in counts.iter().enumerate() {
            for (choice, count) in row.iter().enumerate() {
                let expected = parzen.log_density(&[x as f64, choice as f64]).exp();
                let actual = f64::from(*count) / f64::from(num);
                assert!((actual - expected).abs() < 0.01, "{x} {choice}: {actual} {expected}");
            }
        }
    }
}
