//! Random streams. The seed of each stream is derived from the trial's seed and the stream's
//! purpose. No stream therefore depends on how often another was used. The derivation must never
//! change.
//!
//! burn's CPU backend has one random stream per process. Constructors must not seed it: a session
//! created in one thread must not change the weights that another thread samples.

use std::cell::Cell;
use std::sync::{Mutex, PoisonError};

use burn::tensor::Device;

/// Purpose: weights.
const WEIGHTS: u64 = 1;
/// Purpose: random numbers of a step, such as dropout.
const STEP: u64 = 2;
/// Purpose: order of the samples.
pub(crate) const ORDER: u64 = 3;
/// Purpose: random operations of a [`Stream`](crate::Stream).
pub(crate) const STREAM: u64 = 4;
/// Purpose: random numbers of a validation.
const VALIDATION: u64 = 5;

/// SplitMix64 by Steele, Lea and Flood: returns the output for the state `value`.
pub(crate) fn mix(value: u64) -> u64 {
    let z = value.wrapping_add(0x9E37_79B9_7F4A_7C15);
    let z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

/// Mixes several numbers into one seed: `mix(seed ^ mix(part))` over the parts, starting from 0.
/// `mix` is SplitMix64.
///
/// # Examples
///
/// ```
/// use stoker_trainer::mix_seed;
/// assert_ne!(mix_seed(&[1, 2]), mix_seed(&[2, 1]));
/// ```
pub fn mix_seed(parts: &[u64]) -> u64 {
    parts.iter().fold(0, |seed, part| mix(seed ^ mix(*part)))
}

/// Locked while seeding the stream, and from seeding until the last sample that depends on it.
static SEEDING: Mutex<()> = Mutex::new(());

thread_local! {
    /// Whether this thread holds [`SEEDING`]: code that builds a model may initialize another
    /// model.
    static IS_HELD: Cell<bool> = const { Cell::new(false) };
}

/// Calls `act` while no other thread can seed the stream. May be nested.
pub(crate) fn with_exclusive_stream<T>(act: impl FnOnce() -> T) -> T {
    // Another test's training would sample from this seed.
    #[cfg(test)]
    crate::train::tests::assert_stream_is_locked();
    struct Release;
    impl Drop for Release {
        fn drop(&mut self) {
            IS_HELD.set(false);
        }
    }
    if IS_HELD.get() {
        return act();
    }
    let _stream = SEEDING.lock().unwrap_or_else(PoisonError::into_inner);
    IS_HELD.set(true);
    // Dropped before the lock, also when `act` panics.
    let _release = Release;
    act()
}

/// Calls `sample` with the stream seeded for weights. No other thread can seed the stream
/// meanwhile.
pub(crate) fn with_weight_seed<T>(device: &Device, seed: u32, sample: impl FnOnce() -> T) -> T {
    with_exclusive_stream(|| {
        device.seed(mix_seed(&[u64::from(seed), WEIGHTS]));
        sample()
    })
}

/// Seeds burn's stream for batch `batch` on this rank, so that a resumed run samples the same
/// numbers as an uninterrupted one.
pub(crate) fn seed_step(device: &Device, seed: u32, batch: u64, rank: usize) {
    with_exclusive_stream(|| device.seed(mix_seed(&[u64::from(seed), STEP, batch, rank as u64])));
}

/// Seeds burn's stream for the validation after `batches` batches on this rank, so that a
/// validation that starts over after a resume samples the same numbers. The next step seeds the
/// stream again.
pub(crate) fn seed_validation(device: &Device, seed: u32, batches: u64, rank: usize) {
    let parts = [u64::from(seed), VALIDATION, batches, rank as u64];
    with_exclusive_stream(|| device.seed(mix_seed(&parts)));
}

#[cfg(test)]
mod tests {
    use burn::tensor::{Distribution, Tensor};

    use super::*;
    use crate::Standalone;
    use crate::train::tests::lock_random_stream;

    fn sampled(device: &Device) -> Vec<f32> {
        Tensor::<1>::random([8], Distribution::Default, device).into_data().try_to_vec().unwrap()
    }

    #[test]
    fn new_session_does_not_seed_the_stream() {
        let _stream = lock_random_stream();
        let device = Device::flex();
        let expected = with_weight_seed(&device, 3, || [sampled(&device), sampled(&device)]);
        let actual = with_weight_seed(&device, 3, || {
            let first = sampled(&device);
            let context = Standalone { quiet: true, ..Standalone::default() }.context().unwrap();
            drop(context.with_device(Device::flex()));
            [first, sampled(&device)]
        });
        assert_eq!(actual, expected);
    }

    #[test]
    fn threads_sample_weights_independently() {
        let _stream = lock_random_stream();
        let device = Device::flex();
        let sample =
            |seed| with_weight_seed(&device, seed, || [sampled(&device), sampled(&device)]);
        let expected = [0, 1, 2, 3].map(sample);
        std::thread::scope(|scope| {
            for (seed, expected) in (0..).zip(&expected) {
                scope.spawn(move || {
                    for _ in 0..500 {
                        assert_eq!(sample(seed), *expected);
                        seed_step(&Device::flex(), seed, 0, 0);
                    }
                });
            }
        });
    }

    #[test]
    fn weight_sampling_may_nest_and_panic() {
        let _stream = lock_random_stream();
        let device = Device::flex();
        let nested =
            || with_weight_seed(&device, 1, || with_weight_seed(&device, 2, || sampled(&device)));
        let expected = with_weight_seed(&device, 2, || sampled(&device));
        assert_eq!(nested(), expected);
        let panicking = || with_weight_seed(&device, 1, || panic!("a model that cannot be built"));
        std::panic::catch_unwind(std::panic::AssertUnwindSafe(panicking)).unwrap_err();
        assert_eq!(std::thread::scope(|scope| scope.spawn(nested).join()).unwrap(), expected);
    }
}
