//! Compares steps with those on CPUs. See [`gpu`](super::super::tests::gpu) for the device.

use burn::optim::decay::WeightDecayConfig;
use burn::optim::momentum::MomentumConfig;
use burn::optim::{AdamConfig, AdamWConfig, Optimizer, SgdConfig};
use burn::tensor::{Device, Tensor};

use super::super::tests::gpu;
use crate::OptimizerConfigExt;
use crate::testing::{device, random};

/// Number of steps. burn's operators take the first, which has no state.
const STEPS: u64 = 4;

fn sample(shape: [usize; 2], seed: u64, device: &Device) -> Tensor<2> {
    random(shape, seed).into_tensor(device)
}

/// Returns the weights after all steps. Fails if a step changes copies of weights or state.
fn weights_of(optimizer: &impl Optimizer, device: &Device) -> Vec<f32> {
    let values = |tensor: &Tensor<2>| tensor.to_data().try_to_vec::<f32>().unwrap();
    let (mut weights, mut state) = (sample([30, 17], 1, device), None);
    for step in 0..STEPS {
        // A gradient in another order than row-major.
        let gradient = sample([17, 30], 2 + step, device).transpose();
        let (copy, state_copy) = (weights.clone(), state.clone());
        let before = values(&copy);
        let (next, _) = optimizer.step(0.1, weights.clone(), gradient.clone(), state.clone());
        let expected = values(&next);
        assert_eq!(values(&copy), before, "step {step} changes a copy of the weights");
        drop(next);
        let (again, _) = optimizer.step(0.1, weights.clone(), gradient.clone(), state_copy);
        assert_eq!(values(&again), expected, "step {step} changes a copy of the state");
        drop((again, copy));
        // Now nothing is shared, and the step is in place.
        (weights, state) = optimizer.step(0.1, weights, gradient, state);
        assert_eq!(values(&weights), expected, "step {step} in place");
    }
    values(&weights)
}

#[track_caller]
fn compare(gpu: &Device, name: &str, optimizer: &impl Optimizer) {
    let (ours, expected) = (weights_of(optimizer, gpu), weights_of(optimizer, &device()));
    for (index, (ours, expected)) in ours.iter().zip(&expected).enumerate() {
        let error = (ours - expected).abs();
        assert!(error <= 1e-4, "{name}: weight {index} is {ours} instead of {expected}");
    }
}

#[test]
fn steps_match_those_on_cpus() {
    let Some(gpu) = gpu() else { return };
    let decay = || Some(WeightDecayConfig::new(0.13));
    for nesterov in [false, true] {
        for decay in [None, decay()] {
            let momentum = MomentumConfig::new().with_momentum(0.87).with_nesterov(nesterov);
            let momentum = Some(momentum.with_dampening(0.2));
            let config = SgdConfig::new().with_momentum(momentum).with_weight_decay(decay);
            compare(&gpu, &format!("{config:?}"), &config.build_fused());
        }
    }
    for decay in [None, decay()] {
        let config = AdamConfig::new().with_beta_1(0.6).with_weight_decay(decay);
        compare(&gpu, &format!("{config:?}"), &config.build_fused());
    }
    for (decay, is_cautious) in [(0.0, false), (0.3, false), (0.3, true)] {
        let config = AdamWConfig::new().with_weight_decay(decay);
        let config = config.with_cautious_weight_decay(is_cautious);
        compare(&gpu, &format!("{config:?}"), &config.build_fused());
    }
}
