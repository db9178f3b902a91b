//! Random factors of dropout. They depend only on a seed and on the position of a value.

use burn::tensor::{Device, Distribution, Tensor};

/// Factors of all values of a tensor: 0 with the probability of the dropout, and otherwise the
/// number that keeps the mean.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Dropout {
    seed: u64,
    /// Random numbers below this drop a value.
    threshold: u32,
    scale: f32,
}

impl Dropout {
    /// Samples a seed from the random numbers of the device.
    ///
    /// # Panics
    ///
    /// `probability` is not in [0, 1).
    pub(crate) fn new(probability: f64, device: &Device) -> Self {
        // Integers below 2^24 are exact.
        let uniform = Distribution::Uniform(0.0, f64::from(1 << 24));
        let device = device.clone().without_autodiff();
        let parts = Tensor::<1>::random([2], uniform, &device).into_data();
        let seed = parts.iter::<f32>().fold(0, |seed, part| (seed << 24) | u64::from(part as u32));
        Self::with_seed(probability, seed)
    }

    pub(crate) fn with_seed(probability: f64, seed: u64) -> Self {
        assert!(
            (0.0..1.0).contains(&probability),
            "the dropout probability is {probability}, but must be in [0, 1)"
        );
        let threshold = (probability * f64::from(u32::MAX)) as u32;
        Self { seed, threshold, scale: (1.0 / (1.0 - probability)) as f32 }
    }

    /// Multiplies the values of a row by their factors.
    #[inline(always)]
    pub(crate) fn apply(&self, row: usize, values: &mut [f32]) {
        let key = mix(mix(self.seed).wrapping_add(row as u64));
        let [low, high] = [key as u32, (key >> 32) as u32];
        for (index, value) in (0_u32..).zip(values) {
            let random = scramble(scramble(index ^ low).wrapping_add(high));
            *value *= if random < self.threshold { 0.0 } else { self.scale };
        }
    }
}

/// Finalizer of SplitMix64. Steele, Lea and Flood, Fast Splittable Pseudorandom Number
/// Generators, 2014.
fn mix(value: u64) -> u64 {
    let value = value.wrapping_add(0x9E37_79B9_7F4A_7C15);
    let value = (value ^ (value >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let value = (value ^ (value >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    value ^ (value >> 31)
}

/// Finalizer of MurmurHash3 for 32 bits, which maps different numbers to different numbers.
#[inline(always)]
fn scramble(value: u32) -> u32 {
    let value = (value ^ (value >> 16)).wrapping_mul(0x85EB_CA6B);
    let value = (value ^ (value >> 13)).wrapping_mul(0xC2B2_AE35);
    value ^ (value >> 16)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::machine::{Instructions, vectorize_for};
    use crate::testing::{device, is_alone};

    const ROWS: usize = 200;
    const COLUMNS: usize = 500;

    fn factors(dropout: Dropout) -> Vec<Vec<f32>> {
        let row = |row: usize| {
            let mut values = vec![1.0; COLUMNS];
            dropout.apply(row, &mut values);
            values
        };
        (0..ROWS).map(row).collect()
    }

    /// Counts are within five standard deviations of independent samples.
    #[test]
    fn factors_are_independent_and_keep_the_mean() {
        for probability in [0.1, 0.5, 0.9] {
            let dropout = Dropout::with_seed(probability, 1);
            let other = factors(Dropout::with_seed(probability, 2));
            let rows = factors(dropout);
            let is_dropped = |value: &f32| *value == 0.0;
            let check = |num: usize, of: usize, expected: f64, name: &str| {
                let deviation = (of as f64 * expected * (1.0 - expected)).sqrt();
                let distance = (num as f64 - of as f64 * expected).abs();
                assert!(distance < 5.0 * deviation, "{probability}, {name}: {num} of {of}");
            };
            let num = rows.iter().flatten().filter(|value| is_dropped(value)).count();
            check(num, ROWS * COLUMNS, probability, "all");
            for column in 0..COLUMNS {
                let num = rows.iter().filter(|row| is_dropped(&row[column])).count();
                check(num, ROWS, probability, "column");
            }
            for row in &rows {
                let num = row.iter().filter(|value| is_dropped(value)).count();
                check(num, COLUMNS, probability, "row");
            }
            // Pairs of different rows, columns and seeds. No value is in two pairs.
            let num_pairs = |pairs: &mut dyn Iterator<Item = (&f32, &f32)>| {
                pairs.filter(|(left, right)| is_dropped(left) && is_dropped(right)).count()
            };
            let mut of_rows = rows.chunks_exact(2).flat_map(|pair| pair[0].iter().zip(&pair[1]));
            let mut of_columns =
                rows.iter().flat_map(|row| row.chunks_exact(2)).map(|pair| (&pair[0], &pair[1]));
            let mut of_seeds = rows.iter().flatten().zip(other.iter().flatten());
            let both = probability * probability;
            let half = ROWS * COLUMNS / 2;
            check(num_pairs(&mut of_rows), half, both, "rows");
            check(num_pairs(&mut of_columns), half, both, "columns");
            check(num_pairs(&mut of_seeds), 2 * half, both, "seeds");
            let kept = rows.iter().flatten().find(|value| !is_dropped(value)).unwrap();
            assert_eq!(*kept, (1.0 / (1.0 - probability)) as f32);
        }
    }

    #[test]
    fn equal_seeds_of_the_device_give_equal_factors() {
        if !is_alone("dropout::tests::equal_seeds_of_the_device_give_equal_factors") {
            return;
        }
        let device = device().autodiff();
        let sample = || factors(Dropout::new(0.5, &device));
        device.seed(7);
        let (first, second) = (sample(), sample());
        device.seed(7);
        assert_eq!([sample(), sample()], [first.clone(), second.clone()]);
        assert_ne!(first, second);
    }

    #[test]
    fn vectors_do_not_change_bits() {
        let dropout = Dropout::with_seed(0.3, 1);
        let mut plain = vec![1.5_f32; 1001];
        dropout.apply(3, &mut plain);
        for instructions in Instructions::supported() {
            let mut vectorized = vec![1.5_f32; 1001];
            vectorize_for(
                instructions,
                #[inline(always)]
                || dropout.apply(3, &mut vectorized),
            );
            assert_eq!(vectorized, plain, "{instructions:?}");
        }
    }

    #[test]
    fn nan_is_not_dropped() {
        let mut values = vec![f32::NAN; 100];
        Dropout::with_seed(0.5, 1).apply(0, &mut values);
        assert!(values.iter().all(|value| value.is_nan()));
    }

    #[test]
    #[should_panic(expected = "the dropout probability is 1, but must be in [0, 1)")]
    fn dropping_everything_is_refused() {
        let _ = Dropout::with_seed(1.0, 0);
    }
}
