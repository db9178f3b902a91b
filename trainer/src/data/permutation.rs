//! Sample order of an epoch: a keyed bijection of positions to samples that needs no table.
//!
//! This is the exact definition, for other implementations. Let `n` be the number of samples, `h`
//! half the number of bits of `n`, rounded up, and `mask = 2^h - 1`.
//!
//! 1. Split a position into its upper part `l = position >> h` and its lower part `r = position &
//!    mask`.
//! 2. In six rounds, `i` from 0 to 5, replace `(l, r)` by `(r, l ^ (mix(key ^ mix(r ^ (i << 60))) &
//!    mask))`. `mix` is SplitMix64's output for a state. This is a Feistel network over `4^h >= n`
//!    values.
//! 3. The result is `l << h | r`. While it is `n` or more, apply the rounds to it again (cycle
//!    walking). This terminates because the start value is below `n`.
//!
//! The key of an epoch is `mix_seed(&[trial seed, 3, epoch])`.

use crate::rng::mix;

/// Rounds of the network. Four rounds make it a pseudo-random permutation; two more cost little.
const NUM_ROUNDS: u64 = 6;

/// A permutation of `0..len`.
#[derive(Clone, Copy, Debug)]
pub struct Permutation {
    len: u64,
    half_bits: u32,
    key: u64,
}

impl Permutation {
    /// Creates the permutation of `0..len` selected by `key`.
    pub fn new(len: u64, key: u64) -> Self {
        Self { len, half_bits: (u64::BITS - len.leading_zeros()).div_ceil(2), key }
    }

    /// Returns the image of `position`.
    ///
    /// # Panics
    ///
    /// Panics if `position` is not below the length.
    pub fn at(&self, position: u64) -> u64 {
        assert!(position < self.len, "position {position} is out of range (length {})", self.len);
        let mut value = self.rounds(position);
        while value >= self.len {
            value = self.rounds(value);
        }
        value
    }

    fn rounds(&self, value: u64) -> u64 {
        let mask = (1 << self.half_bits) - 1;
        let (mut left, mut right) = (value >> self.half_bits, value & mask);
        for round in 0..NUM_ROUNDS {
            let mixed = mix(self.key ^ mix(right ^ (round << 60))) & mask;
            (left, right) = (right, left ^ mixed);
        }
        left << self.half_bits | right
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn order(len: u64, key: u64) -> Vec<u64> {
        let permutation = Permutation::new(len, key);
        (0..len).map(|position| permutation.at(position)).collect()
    }

    proptest! {
        #[test]
        fn every_sample_has_one_place(len in 1_u64..3000, key: u64) {
            let mut order = order(len, key);
            order.sort_unstable();
            prop_assert_eq!(order, (0..len).collect::<Vec<_>>());
        }

        #[test]
        fn large_lengths_stay_inside(len in 1_u64..1 << 62, key: u64, position: u64) {
            prop_assert!(Permutation::new(len, key).at(position % len) < len);
        }
    }

    #[test]
    fn order_never_changes() {
        assert_eq!(order(10, 1), ORDER_OF_10);
        assert_ne!(order(10, 1), order(10, 2));
    }

    /// Computed once by an independent program, written from this file's documentation only.
    const ORDER_OF_10: [u64; 10] = [0, 2, 9, 3, 6, 7, 8, 5, 1, 4];
}
