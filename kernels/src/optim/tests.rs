//! Tests of the optimizers against those of burn.

use burn::backend::Flex;
use burn::module::{Module, ModuleVisitor, Param, ParamGroup};
use burn::nn::conv::{Conv2d, Conv2dConfig};
use burn::nn::{Linear, LinearConfig};
use burn::optim::GradientsParams;
use burn::tensor::{DType, Device, FloatDType, Tensor, TensorData};

use super::*;
use crate::testing::{bits, device, random};

/// Parameters of one to four dimensions. The first is large enough for several threads.
#[derive(Debug, Module)]
struct Model {
    linear: Linear,
    conv: Conv2d,
}

impl Model {
    fn new() -> Self {
        let device = device().autodiff();
        let model = Self {
            linear: LinearConfig::new(300, 150).init(&device),
            conv: Conv2dConfig::new([3, 5], [3, 3]).init(&device),
        };
        // Samples the weights, so that all copies have the same.
        let _ = model.weights();
        model
    }

    /// Returns all weights as bits.
    fn weights(&self) -> Vec<Vec<u32>> {
        struct Bits(Vec<Vec<u32>>);
        impl ModuleVisitor for Bits {
            fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
                self.0.push(bits(&param.val().into_data()));
            }
        }
        let mut visitor = Bits(vec![]);
        self.visit(&mut visitor);
        visitor.0
    }

    /// Returns gradients of different sizes, with both zeros. Those of matrices are not contiguous.
    fn gradients(&self, step: u64) -> GradientsParams {
        struct Fill(GradientsParams, u64);
        impl ModuleVisitor for Fill {
            fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
                self.1 += 1;
                let mut shape = param.dims();
                shape.reverse();
                let scale = [1e-3, 0.1, 3.0][self.1 as usize % 3];
                let random = random(shape, self.1).into_tensor(&device()) * scale;
                let is_small = random.clone().abs().lower_scalar(scale * 0.01);
                let sparse = random.mask_fill(is_small.clone(), 0.0);
                let mut axes: [isize; D] = std::array::from_fn(|axis| axis as isize);
                axes.reverse();
                self.0.register(param.id, (sparse * -1.0).permute(axes));
            }
        }
        let mut visitor = Fill(GradientsParams::new(), step * 10);
        self.visit(&mut visitor);
        visitor.0
    }

    fn step(self, optimizer: &mut ModuleOptimizer, step: u64) -> Self {
        let gradients = self.gradients(step);
        optimizer.step(0.1 / (step + 1) as f64, self, gradients)
    }
}

/// burn's optimizers, each with the fused one of the same configuration.
fn pairs() -> Vec<(String, ModuleOptimizer, ModuleOptimizer)> {
    fn pair(
        config: &(impl OptimizerConfigExt + std::fmt::Debug),
        burns: ModuleOptimizer,
    ) -> (String, ModuleOptimizer, ModuleOptimizer) {
        (format!("{config:?}"), burns, config.init_fused())
    }
    let decay = || Some(WeightDecayConfig::new(0.013));
    let clips = [
        None,
        Some(GradientClippingConfig::Value(0.05)),
        Some(GradientClippingConfig::Norm(0.7)),
        Some(GradientClippingConfig::Norm(1e6)),
    ];
    let mut pairs = vec![];
    for clip in &clips {
        for nesterov in [false, true] {
            let momentum = MomentumConfig::new().with_momentum(0.87).with_nesterov(nesterov);
            for momentum in [Some(momentum.clone()), Some(momentum.with_dampening(0.0)), None] {
                let config = SgdConfig::new()
                    .with_momentum(momentum)
                    .with_weight_decay(decay())
                    .with_gradient_clipping(clip.clone());
                pairs.push(pair(&config, config.init()));
            }
        }
        let adam = AdamConfig::new().with_grad_clipping(clip.clone()).with_beta_1(0.4);
        for config in
            [adam.clone(), adam.clone().with_weight_decay(decay()), adam.with_amsgrad(true)]
        {
            pairs.push(pair(&config, config.init()));
        }
        let adamw = AdamWConfig::new().with_grad_clipping(clip.clone()).with_weight_decay(0.3);
        for config in [
            adamw.clone(),
            adamw.clone().with_weight_decay(0.0),
            adamw.clone().with_cautious_weight_decay(true),
            adamw.with_amsgrad(true),
        ] {
            pairs.push(pair(&config, config.init()));
        }
    }
    let plain = SgdConfig::new();
    pairs.push(pair(&plain, plain.init()));
    pairs
}

#[test]
fn weights_are_bit_identical_to_burn() {
    let model = Model::new();
    for (name, mut burns, mut ours) in pairs() {
        let (mut expected, mut actual) = (model.clone(), model.clone());
        for step in 0..12 {
            expected = expected.step(&mut burns, step);
            actual = actual.step(&mut ours, step);
            assert!(actual.weights() == expected.weights(), "{name}, step {step}");
        }
        assert!(actual.weights() != model.weights(), "{name} changes nothing");
    }
}

/// Both optimizers continue from the records of both.
#[test]
fn records_are_exchangeable_with_burn() {
    for (name, burns, ours) in pairs() {
        let mut outcomes = vec![];
        let start = Model::new();
        for first in [&burns, &ours] {
            for second in [&burns, &ours] {
                let (mut model, mut optimizer) = (start.clone(), first.clone());
                for step in 0..3 {
                    model = model.step(&mut optimizer, step);
                }
                let bytes = optimizer.into_bytes().unwrap();
                let mut optimizer = second.clone().from_bytes(bytes).unwrap();
                for step in 3..6 {
                    model = model.step(&mut optimizer, step);
                }
                outcomes.push(model.weights());
            }
        }
        assert!(outcomes.iter().all(|outcome| *outcome == outcomes[0]), "{name}");
    }
}

#[test]
fn bits_do_not_depend_on_threads() {
    let model = Model::new();
    for (name, _, ours) in pairs() {
        let run_on = |num_threads: usize| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(num_threads).build().unwrap();
            let (mut model, mut optimizer) = (model.clone(), ours.clone());
            pool.install(|| {
                for step in 0..2 {
                    model = model.clone().step(&mut optimizer, step);
                }
            });
            model.weights()
        };
        let expected = run_on(1);
        for num_threads in [2, 4, 8] {
            assert!(run_on(num_threads) == expected, "{name}, {num_threads} threads");
        }
    }
}

/// Flex sums 4 Mi values or more in an order that depends on its threads.
#[test]
fn large_norms_do_not_depend_on_threads() {
    const NUM: usize = 4 << 20;
    // Single precision has no odd numbers beyond 2^24, so the order of these sums matters.
    let mut values = vec![0.0_f32; NUM];
    values.iter_mut().step_by(64 << 10).for_each(|value| *value = 1.0);
    values[0] = 4096.0;
    let gradient = Tensor::<1>::from_data(TensorData::new(values, [NUM]), &device());
    let optimizer = FusedSgd::new(None, None, Some(GradientClippingConfig::Norm(1.0)));
    let step_on = |num_threads: usize| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(num_threads).build().unwrap();
        let (weights, gradient) = (gradient.zeros_like(), gradient.clone());
        pool.install(|| {
            let (weights, _) = optimizer.step(1.0, weights, gradient, None);
            bits(&weights.slice(0..1).into_data())
        })
    };
    let expected = step_on(1);
    for num_threads in [2, 4, 8] {
        assert_eq!(step_on(num_threads), expected, "{num_threads} threads");
    }
}

/// Snapshots of a model and an optimizer share tensors with them.
#[test]
fn steps_do_not_change_copies() {
    for (name, _, mut ours) in pairs() {
        let model = Model::new().step(&mut ours, 0);
        let (weights, copy) = (model.weights(), ours.clone());
        let next = model.clone().step(&mut ours, 1).weights();
        assert!(model.weights() == weights, "{name} changed a copy of the model");
        let again = model.step(&mut copy.clone(), 1).weights();
        assert!(again == next, "{name} changed a copy of the state");
    }
}

/// Gradients of concatenated parameters are parts of one tensor.
#[test]
fn parameters_do_not_keep_larger_gradients() {
    let gradients: Tensor<2> = random([4, 3], 1).into_tensor(&device());
    let optimizer = SgdConfig::new().build_fused();
    for rows in [0..2, 2..4] {
        let weights: Tensor<2> = random([2, 3], 2).into_tensor(&device());
        let (weights, _) = optimizer.step(0.1, weights, gradients.clone().slice([rows]), None);
        let weights = weights.try_into_primitive::<Flex>().unwrap();
        assert_eq!(weights.bytes().len(), 6 * size_of::<f32>());
    }
}

#[test]
fn groups_take_fused_optimizers() {
    let group = || ParamGroup::from_predicate("bias");
    let config = AdamConfig::new().with_beta_2(0.9);
    let mut burns = SgdConfig::new().init().with_group(group(), config.build(), None);
    let mut ours = SgdConfig::new().init_fused().with_group(group(), config.build_fused(), None);
    let model = Model::new();
    let (mut expected, mut actual) = (model.clone(), model);
    for step in 0..3 {
        expected = expected.step(&mut burns, step);
        actual = actual.step(&mut ours, step);
    }
    assert!(actual.weights() == expected.weights());
}

/// Returns the bytes of weights of another type after four steps.
fn steps_of_type<O: Optimizer>(optimizer: &O, dtype: FloatDType) -> Vec<u8> {
    let cast = |seed| {
        let tensor: Tensor<2> = random([7, 9], seed).into_tensor(&Device::flex());
        tensor.cast(dtype)
    };
    let (mut weights, mut state) = (cast(1), None);
    for step in 0..4 {
        (weights, state) = optimizer.step(0.1, weights, cast(2 + step), state);
    }
    assert_eq!(weights.dtype(), DType::from(dtype));
    assert!(weights.clone().try_into_primitive::<Flex>().is_ok());
    weights.into_data().as_bytes().to_vec()
}

#[test]
fn other_types_use_operators_of_burn() {
    fn check(ours: &impl Optimizer, burns: &impl Optimizer) {
        for dtype in [FloatDType::F16, FloatDType::F64] {
            assert_eq!(steps_of_type(ours, dtype), steps_of_type(burns, dtype), "{dtype:?}");
        }
    }
    // The default dampening differs between single and double precision.
    let momentum = Some(MomentumConfig::new().with_nesterov(true));
    let sgd = SgdConfig::new().with_momentum(momentum);
    let sgd = sgd.with_weight_decay(Some(WeightDecayConfig::new(0.1)));
    check(&sgd.build_fused(), &sgd.build());
    let adam = AdamConfig::new();
    check(&adam.build_fused(), &adam.build());
    let adamw = AdamWConfig::new();
    check(&adamw.build_fused(), &adamw.build());
}

#[test]
#[should_panic(expected = "the configuration of an optimizer has an invalid value")]
fn infinite_values_are_refused() {
    let _ = AdamConfig::new().with_epsilon(f32::INFINITY).init_fused();
}
