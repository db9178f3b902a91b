//! Random streams: each is a number made of the seed and of what it is for, so that none depends on
//! how often another was used. The values are fixed by what is written here.

use burn::tensor::Device;

/// Weights.
const WEIGHTS: u64 = 1;
/// What a step draws, such as dropout.
const STEP: u64 = 2;
/// The order of the samples.
pub(crate) const ORDER: u64 = 3;
/// What a stream's operations draw.
pub(crate) const STREAM: u64 = 4;

/// Steele, Lea and Flood's SplitMix64: the output for the state `value`.
pub(crate) fn mix(value: u64) -> u64 {
    let z = value.wrapping_add(0x9E37_79B9_7F4A_7C15);
    let z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

/// One seed out of several numbers: `mix(seed ^ mix(part))` over the parts, from 0.
///
/// # Examples
///
/// ```
/// use stoker_trainer::key;
/// assert_ne!(key(&[1, 2]), key(&[2, 1]));
/// ```
pub fn key(parts: &[u64]) -> u64 {
    parts.iter().fold(0, |seed, part| mix(seed ^ mix(*part)))
}

/// Sets burn's stream to where weights are drawn from.
pub(crate) fn seed_weights(device: &Device, seed: u32) {
    device.seed(key(&[u64::from(seed), WEIGHTS]));
}

/// Sets burn's stream to where batch `batch` draws from on this rank: a run that starts here draws
/// what one that came by would.
pub(crate) fn seed_step(device: &Device, seed: u32, batch: u64, rank: usize) {
    device.seed(key(&[u64::from(seed), STEP, batch, rank as u64]));
}
