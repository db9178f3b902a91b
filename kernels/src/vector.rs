//! Sums, maxima and exponentials of slices, in an order that fits vector registers.

use crate::machine::vectorize;

/// Independent partial results of a reduction. Four vectors of AVX2 hide the latency of additions.
const LANES: usize = 32;

/// Added to any number, this keeps its bits, even if the number is 0 or -0. A NaN becomes quiet.
pub(crate) const NO_BIAS: f32 = -0.0;

/// Copies a short slice to one of the same length, without a call of the C library.
///
/// # Panics
///
/// The lengths differ.
#[inline(always)]
pub(crate) fn copy(out: &mut [f32], values: &[f32]) {
    const WIDTH: usize = 8;
    assert_eq!(out.len(), values.len(), "a copy has another length");
    let (blocks, rest) = out.as_chunks_mut::<WIDTH>();
    blocks.iter_mut().zip(values.as_chunks().0).for_each(|(out, values)| *out = *values);
    if rest.is_empty() {
        return;
    }
    // A last block that overlaps the one before.
    match (out.last_chunk_mut::<WIDTH>(), values.last_chunk()) {
        (Some(out), Some(values)) => *out = *values,
        _ => out.iter_mut().zip(values).for_each(|(out, value)| *out = *value),
    }
}

/// Returns the sum of `function(value)`, with a fixed order of additions.
#[inline(always)]
pub(crate) fn sum_of(values: &[f32], function: impl Fn(f32) -> f32) -> f32 {
    let mut lanes = [0.0; LANES];
    let blocks = values.chunks_exact(LANES);
    let rest: f32 = blocks.remainder().iter().map(|value| function(*value)).sum();
    for block in blocks {
        for (lane, value) in lanes.iter_mut().zip(block) {
            *lane += function(*value);
        }
    }
    lanes.iter().sum::<f32>() + rest
}

/// Returns the sum of the products of two slices of equal length.
#[inline(always)]
pub(crate) fn dot(left: &[f32], right: &[f32]) -> f32 {
    let mut lanes = [0.0; LANES];
    let (left_blocks, right_blocks) = (left.chunks_exact(LANES), right.chunks_exact(LANES));
    let rest = left_blocks.remainder().iter().zip(right_blocks.remainder());
    let rest: f32 = rest.map(|(left, right)| left * right).sum();
    for (left, right) in left_blocks.zip(right_blocks) {
        for ((lane, left), right) in lanes.iter_mut().zip(left).zip(right) {
            *lane += left * right;
        }
    }
    lanes.iter().sum::<f32>() + rest
}

/// Adds each value to the sum at its position. The shorter slice ends the operation.
///
/// # Panics
///
/// `STOKER_KERNELS` is invalid, as for [`is_enabled`](crate::is_enabled).
pub fn add_each(sums: &mut [f32], values: &[f32]) {
    vectorize(
        #[inline(always)]
        || sums.iter_mut().zip(values).for_each(|(sum, value)| *sum += *value),
    );
}

/// Multiplies each value by `factor`.
///
/// # Panics
///
/// `STOKER_KERNELS` is invalid, as for [`is_enabled`](crate::is_enabled).
pub fn scale_each(values: &mut [f32], factor: f32) {
    vectorize(
        #[inline(always)]
        || values.iter_mut().for_each(|value| *value *= factor),
    );
}

/// Returns the largest value, ignoring NaN. Negative infinity without any.
#[inline(always)]
pub(crate) fn max(values: &[f32]) -> f32 {
    let larger = |a: f32, b: f32| if b > a { b } else { a };
    let mut lanes = [f32::NEG_INFINITY; LANES];
    let blocks = values.chunks_exact(LANES);
    let rest = blocks.remainder().iter().copied().fold(f32::NEG_INFINITY, larger);
    for block in blocks {
        for (lane, value) in lanes.iter_mut().zip(block) {
            *lane = larger(*lane, *value);
        }
    }
    lanes.into_iter().fold(rest, larger)
}

/// Exponents below this give 0: the exponential is not a normal number.
const EXPONENT_MIN: f32 = -87.336_54;

/// Returns the exponential of a number that is at most 0, or NaN.
///
/// The relative error is at most 2e-7. Reduces the argument by `x = n ln 2 + r` with `ln 2` in two
/// parts (Cody and Waite), and evaluates the polynomial of `expf` of the Cephes library.
#[inline(always)]
pub(crate) fn exp_nonpositive(x: f32) -> f32 {
    /// Adding 1.5 * 2^23 rounds to an integer, and leaves it in the lowest bits.
    const ROUND: f32 = 12_582_912.0;
    let reduced = if x < EXPONENT_MIN { EXPONENT_MIN } else { x };
    let rounded = reduced * std::f32::consts::LOG2_E + ROUND;
    let n = rounded - ROUND;
    let r = n.mul_add(-0.693_359_4, reduced);
    let r = n.mul_add(2.121_944_4e-4, r);
    let polynomial = 1.987_569_1e-4_f32
        .mul_add(r, 1.398_199_9e-3)
        .mul_add(r, 8.333_452e-3)
        .mul_add(r, 4.166_579_6e-2)
        .mul_add(r, 1.666_666_5e-1)
        .mul_add(r, 0.5);
    let fraction = polynomial.mul_add(r * r, r) + 1.0;
    let power = f32::from_bits((rounded.to_bits() << 23).wrapping_add(127 << 23));
    if x < EXPONENT_MIN { 0.0 } else { fraction * power }
}

/// Returns the distribution function of the normal distribution.
///
/// The absolute error is at most 2e-7. Formula 7.1.26 of Abramowitz and Stegun, Handbook of
/// Mathematical Functions, with `erf(x / sqrt(2))`.
#[inline(always)]
pub(crate) fn normal_cdf(x: f32) -> f32 {
    let z = x.abs() * std::f32::consts::FRAC_1_SQRT_2;
    let t = 1.0 / 0.327_591_1_f32.mul_add(z, 1.0);
    let polynomial = 1.061_405_4_f32
        .mul_add(t, -1.453_152_1)
        .mul_add(t, 1.421_413_8)
        .mul_add(t, -0.284_496_72)
        .mul_add(t, 0.254_829_6)
        * t;
    let tail = 0.5 * polynomial * exp_nonpositive(-z * z);
    if x < 0.0 { tail } else { 1.0 - tail }
}

/// Returns the density of the normal distribution.
#[inline(always)]
pub(crate) fn normal_density(x: f32) -> f32 {
    const FACTOR: f32 = 0.398_942_3;
    FACTOR * exp_nonpositive(-0.5 * x * x)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::machine::{Instructions, vectorize_for};

    #[test]
    fn exponential_is_accurate() {
        for step in 0..87_000 {
            let x = -(step as f32) / 1000.0;
            let expected = f64::from(x).exp();
            let error = (f64::from(exp_nonpositive(x)) - expected).abs() / expected;
            assert!(error < 2e-7, "the relative error at {x} is {error}");
        }
        assert_eq!(exp_nonpositive(0.0), 1.0);
        assert_eq!(exp_nonpositive(-100.0), 0.0);
        assert_eq!(exp_nonpositive(f32::NEG_INFINITY), 0.0);
        assert!(exp_nonpositive(f32::NAN).is_nan());
    }

    #[test]
    fn normal_distribution_is_accurate() {
        // Sums the density from 0 by Simpson's rule, in f64.
        let density = |x: f64| (-x * x / 2.0).exp() / std::f64::consts::TAU.sqrt();
        let step = 1.0 / 64.0;
        let mut expected = 0.5;
        for index in 0..512 {
            let x = f64::from(index) * step;
            for (x, expected) in [(x, expected), (-x, 1.0 - expected)] {
                let error = (f64::from(normal_cdf(x as f32)) - expected).abs();
                assert!(error < 2e-7, "the error at {x} is {error}");
            }
            expected +=
                step / 6.0 * (density(x) + 4.0 * density(x + step / 2.0) + density(x + step));
        }
        assert_eq!(normal_cdf(f32::INFINITY), 1.0);
        assert_eq!(normal_cdf(f32::NEG_INFINITY), 0.0);
        assert!(normal_cdf(f32::NAN).is_nan());
        assert!((normal_density(1.5) - 0.129_517_6).abs() < 1e-7);
    }

    #[test]
    fn vectors_do_not_change_bits() {
        #[inline(always)]
        fn compute(values: &[f32]) -> Vec<u32> {
            let cdf = values.iter().map(|value| normal_cdf(*value));
            let density = values.iter().map(|value| normal_density(*value));
            let exponentials = values.iter().map(|value| exp_nonpositive(-value.abs()));
            let sum = sum_of(values, |value| value * 1.1 + 0.3);
            let reductions = [sum, dot(values, values), max(values)];
            cdf.chain(density).chain(exponentials).chain(reductions).map(f32::to_bits).collect()
        }
        let values: Vec<f32> = (0..1000).map(|index| (index as f32 - 500.0) / 61.0).collect();
        for instructions in Instructions::supported() {
            let vectorized = vectorize_for(
                instructions,
                #[inline(always)]
                || compute(&values),
            );
            assert_eq!(vectorized, compute(&values), "{instructions:?}");
        }
    }

    #[test]
    fn copies_of_any_length() {
        let values: Vec<f32> = (1..40).map(|value| value as f32).collect();
        for num in 0..40 {
            let mut out = [0.0; 40];
            copy(&mut out[..num], &values[..num]);
            assert_eq!(out[..num], values[..num]);
            assert!(out[num..].iter().all(|value| *value == 0.0), "{num}");
        }
    }

    #[test]
    fn reductions_of_any_length() {
        for num in [0, 1, 31, 32, 33, 64, 100] {
            let values: Vec<f32> = (0..num).map(|index| (index * 7 % 13) as f32 - 6.0).collect();
            assert_eq!(sum_of(&values, |value| value), values.iter().sum::<f32>(), "{num}");
            let squares = values.iter().map(|value| value * value).sum::<f32>();
            assert_eq!(dot(&values, &values), squares, "{num}");
            let expected = values.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            assert_eq!(max(&values), expected, "{num}");
        }
        assert_eq!(max(&[f32::NAN, 1.0, f32::NAN]), 1.0);
    }
}
