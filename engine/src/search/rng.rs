//! Random numbers fixed by a specification: MT19937, the generator of `numpy.random.RandomState`.
//!
//! Searches of the reference draw from it, so the same seed gives the same hyperparameters here as
//! there.

use std::fmt;

const STATE_LEN: usize = 624;
const SHIFT: usize = 397;

/// A stream of random numbers that a seed fixes.
#[derive(Clone, PartialEq, Eq)]
pub struct Random {
    state: [u32; STATE_LEN],
    next_idx: usize,
    num_words: u64,
}

impl fmt::Debug for Random {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Random").field("next_idx", &self.next_idx).finish_non_exhaustive()
    }
}

impl Random {
    /// The stream of `RandomState(seed)`.
    pub fn new(seed: u32) -> Self {
        let mut state = [0; STATE_LEN];
        let mut word = seed;
        for (idx, place) in (0_u32..).zip(&mut state) {
            if idx > 0 {
                word = 1_812_433_253_u32.wrapping_mul(word ^ (word >> 30)).wrapping_add(idx);
            }
            *place = word;
        }
        Self { state, next_idx: STATE_LEN, num_words: 0 }
    }

    /// The next 32 bits.
    pub fn bits32(&mut self) -> u32 {
        if self.next_idx == STATE_LEN {
            self.refill();
        }
        let mut word = self.state[self.next_idx];
        self.next_idx += 1;
        self.num_words += 1;
        word ^= word >> 11;
        word ^= (word << 7) & 0x9d2c_5680;
        word ^= (word << 15) & 0xefc6_0000;
        word ^ (word >> 18)
    }

    /// Returns the number of words taken so far.
    pub fn num_words(&self) -> u64 {
        self.num_words
    }

    /// Drops words until `num_words` were taken. Does nothing if so many were taken already.
    pub fn skip_to(&mut self, num_words: u64) {
        while self.num_words < num_words {
            self.bits32();
        }
    }

    /// An integer from 0 to `max`, both included; draws nothing if `max` is 0.
    pub fn up_to(&mut self, max: u64) -> u64 {
        if max == 0 {
            return 0;
        }
        let mask = u64::MAX >> max.leading_zeros();
        loop {
            let word = if max <= u64::from(u32::MAX) {
                u64::from(self.bits32())
            } else {
                let high = u64::from(self.bits32());
                high << 32 | u64::from(self.bits32())
            };
            if word & mask <= max {
                return word & mask;
            }
        }
    }

    /// A number from 0 up to, not including, 1, of 53 random bits.
    pub fn unit(&mut self) -> f64 {
        let high = f64::from(self.bits32() >> 5);
        let low = f64::from(self.bits32() >> 6);
        (high * 67_108_864.0 + low) / 9_007_199_254_740_992.0
    }

    /// A number from `min` up to, not including, `max` (but for rounding).
    pub fn uniform(&mut self, min: f64, max: f64) -> f64 {
        min + (max - min) * self.unit()
    }

    /// A version 4 UUID from 16 random bytes, little-endian words.
    pub fn uuid(&mut self) -> String {
        let mut bytes = [0; 16];
        for word in bytes.chunks_exact_mut(4) {
            word.copy_from_slice(&self.bits32().to_le_bytes());
        }
        bytes[6] = bytes[6] & 0x0f | 0x40;
        bytes[8] = bytes[8] & 0x3f | 0x80;
        let hex = format!("{:032x}", u128::from_be_bytes(bytes));
        let parts = [&hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..]];
        parts.join("-")
    }

    /// A seed from 0 to 2^31 - 1.
    pub fn seed(&mut self) -> u32 {
        self.up_to((1 << 31) - 1) as u32
    }

    fn refill(&mut self) {
        for idx in 0..STATE_LEN {
            let high = self.state[idx] & 0x8000_0000;
            let bits = high | self.state[(idx + 1) % STATE_LEN] & 0x7fff_ffff;
            let odd = if bits & 1 == 1 { 0x9908_b0df } else { 0 };
            self.state[idx] = self.state[(idx + SHIFT) % STATE_LEN] ^ (bits >> 1) ^ odd;
        }
        self.next_idx = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check<T: PartialEq + fmt::Debug>(
        seed: u32,
        mut draw: impl FnMut(&mut Random) -> T,
        expected: &[T],
    ) {
        let mut random = Random::new(seed);
        let drawn: Vec<_> = expected.iter().map(|_| draw(&mut random)).collect();
        assert_eq!(drawn, expected, "seed {seed}");
    }

    #[test]
    fn bits_and_units_are_those_of_numpy() {
        check(42, Random::bits32, &[1608637542, 3421126067, 4083286876, 787846414]);
        let units =
            [0.3745401188473625, 0.9507143064099162, 0.7319939418114051, 0.5986584841970366];
        check(42, Random::unit, &units);
    }

    #[test]
    fn the_10000th_word_is_the_one_that_the_cpp_standard_demands() {
        let mut random = Random::new(5489);
        assert_eq!((0..10_000).map(|_| random.bits32()).last(), Some(4_123_659_995));
    }

    #[test]
    fn integers_reject_what_is_beyond_the_bound() {
        let tens = [6, 3, 7, 4, 6, 9, 2, 6, 7, 4, 3, 7, 7, 2, 5, 4, 1, 7, 5, 1];
        check(42, |random| random.up_to(9), &tens);
        check(999, Random::seed, &[1303213504, 648491356, 118207333, 2129740257]);
        let first_two = 1608637542 << 32 | 3421126067;
        check(42, |random| random.up_to(u64::MAX), &[first_two]);
    }

    #[test]
    fn debug_output_omits_the_state() {
        assert_eq!(format!("{:?}", Random::new(42)), "Random { next_idx: 624, .. }");
    }

    #[test]
    fn a_choice_of_one_draws_nothing() {
        check(42, |random| (random.up_to(0), random.bits32()), &[(0, 1608637542)]);
    }
}
