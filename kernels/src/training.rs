//! Tests of whole trainings with fused operators and optimizers: their bits depend neither on the
//! instruction set nor on the threads.

use std::process::Command;

use burn::module::{Module, ModuleVisitor, Param};
use burn::nn::conv::{Conv2d, Conv2dConfig};
use burn::nn::loss::{CrossEntropyLoss, CrossEntropyLossConfig};
use burn::nn::pool::{MaxPool2d, MaxPool2dConfig};
use burn::nn::{
    Embedding, EmbeddingConfig, LayerNorm, LayerNormConfig, Linear, LinearConfig, PaddingConfig2d,
};
use burn::optim::momentum::MomentumConfig;
use burn::optim::{AdamConfig, AdamWConfig, GradientsParams, ModuleOptimizer, SgdConfig};
use burn::tensor::ops::AttentionModuleOptions;
use burn::tensor::{Device, Int, Tensor, TensorData};
use stoker_test_cluster::record_skip;

use crate::machine::Instructions;
use crate::testing::{bits, random};
use crate::{
    Activation, Conv2dExt, CrossEntropyLossExt, LayerNormExt, LinearExt, MaxPool2dExt,
    OptimizerConfigExt, attention,
};

/// Model with a loss on generated data.
trait Trained: Module + 'static {
    fn new(device: &Device) -> Self;
    fn optimizer() -> ModuleOptimizer;
    fn loss(&self, batch: u64, device: &Device) -> Tensor<1>;
}

#[derive(Debug, Module)]
struct Mlp {
    hidden: Linear,
    output: Linear,
}

impl Trained for Mlp {
    fn new(device: &Device) -> Self {
        Self {
            hidden: LinearConfig::new(784, 300).init(device),
            output: LinearConfig::new(300, 10).init(device),
        }
    }

    fn optimizer() -> ModuleOptimizer {
        let momentum = MomentumConfig::new().with_momentum(0.9).with_nesterov(true);
        SgdConfig::new().with_momentum(Some(momentum)).init_fused()
    }

    fn loss(&self, batch: u64, device: &Device) -> Tensor<1> {
        let x: Tensor<2> = random([96, 784], batch).into_tensor(device);
        let hidden = self.hidden.forward_fused(x, Activation::Relu);
        let logits = self.output.forward_fused(hidden, Activation::Identity);
        loss(device).forward_fused(logits, classes(96, 10, batch, device))
    }
}

#[derive(Debug, Module)]
struct Cnn {
    first: Conv2d,
    second: Conv2d,
    pool: MaxPool2d,
    output: Linear,
}

impl Trained for Cnn {
    fn new(device: &Device) -> Self {
        let conv = |channels| {
            Conv2dConfig::new(channels, [3, 3]).with_padding(PaddingConfig2d::Same).init(device)
        };
        Self {
            first: conv([1, 16]),
            second: conv([16, 32]),
            pool: MaxPool2dConfig::new([2, 2]).with_strides([2, 2]).init(),
            output: LinearConfig::new(32 * 7 * 7, 10).init(device),
        }
    }

    fn optimizer() -> ModuleOptimizer {
        AdamConfig::new().init_fused()
    }

    fn loss(&self, batch: u64, device: &Device) -> Tensor<1> {
        let x: Tensor<4> = random([24, 1, 28, 28], batch).into_tensor(device);
        let x = self.first.forward_pooled(x, Activation::Relu, &self.pool);
        let x = self.pool.forward_fused(self.second.forward_fused(x, Activation::Gelu));
        let logits = self.output.forward_fused(x.flatten(1, 3), Activation::Identity);
        loss(device).forward_fused(logits, classes(24, 10, batch, device))
    }
}

const WIDTH: usize = 64;
const HEADS: usize = 4;
const SEQUENCE: usize = 40;
const VOCABULARY: usize = 50;

/// One layer of a causal language model.
#[derive(Debug, Module)]
struct Gpt {
    tokens: Embedding,
    norm: LayerNorm,
    attention: Linear,
    wide: Linear,
    narrow: Linear,
    output: Linear,
}

impl Trained for Gpt {
    fn new(device: &Device) -> Self {
        Self {
            tokens: EmbeddingConfig::new(VOCABULARY, WIDTH).init(device),
            norm: LayerNormConfig::new(WIDTH).init(device),
            attention: LinearConfig::new(WIDTH, 3 * WIDTH).init(device),
            wide: LinearConfig::new(WIDTH, 4 * WIDTH).init(device),
            narrow: LinearConfig::new(4 * WIDTH, WIDTH).init(device),
            output: LinearConfig::new(WIDTH, VOCABULARY).init(device),
        }
    }

    fn optimizer() -> ModuleOptimizer {
        AdamWConfig::new().init_fused()
    }

    fn loss(&self, batch: u64, device: &Device) -> Tensor<1> {
        let num = 8 * SEQUENCE;
        let tokens = classes(num, VOCABULARY, batch, device).reshape([8, SEQUENCE]);
        let x = self.tokens.forward(tokens);
        let parts = self.norm.forward_fused(x.clone(), 1e-5);
        let parts = self.attention.forward_fused(parts, Activation::Identity);
        let head = |part: usize| {
            let columns = part * WIDTH..(part + 1) * WIDTH;
            let part = parts.clone().slice([0..8, 0..SEQUENCE, columns]);
            part.reshape([8, SEQUENCE, HEADS, WIDTH / HEADS]).swap_dims(1, 2)
        };
        let options = AttentionModuleOptions { is_causal: true, ..Default::default() };
        let attended = attention(head(0), head(1), head(2), None, None, options);
        let x = x + attended.swap_dims(1, 2).reshape([8, SEQUENCE, WIDTH]);
        let wide = self.wide.forward_fused(x.clone(), Activation::Gelu);
        let x = x + self.narrow.forward_fused(wide, Activation::Identity);
        let logits = self.output.forward_fused(x, Activation::Identity);
        let targets = classes(num, VOCABULARY, batch + 100, device);
        loss(device).forward_fused(logits.reshape([num, VOCABULARY]), targets)
    }
}

fn loss(device: &Device) -> CrossEntropyLoss {
    CrossEntropyLossConfig::new().init(device)
}

fn classes(num: usize, num_classes: usize, seed: u64, device: &Device) -> Tensor<1, Int> {
    let class = |index: usize| ((index as u64 * 7919 + seed * 31) % num_classes as u64) as i64;
    let values: Vec<i64> = (0..num).map(class).collect();
    Tensor::from_data(TensorData::new(values, [num]), device)
}

/// Returns a hash of all weights after some batches.
fn train<M: Trained>() -> u64 {
    struct Hash(u64);
    impl ModuleVisitor for Hash {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            for bits in bits(&param.val().into_data()) {
                self.0 = (self.0 ^ u64::from(bits)).wrapping_mul(0x0100_0000_01B3);
            }
        }
    }
    let device = Device::flex().autodiff();
    device.seed(7);
    let (mut model, mut optimizer) = (M::new(&device), M::optimizer());
    for batch in 0..4 {
        let gradients = model.loss(batch, &device).backward();
        let gradients = GradientsParams::from_grads(gradients, &model);
        model = optimizer.step(0.01, model, gradients);
    }
    let mut hash = Hash(0);
    model.visit(&mut hash);
    hash.0
}

/// Marks the child processes of `trainings_are_bit_identical_with_avx512`.
const ENV_CHILD: &str = "TEST_TRAINING_CHILD";

/// Returns the instruction set and the hashes for each number of threads.
fn train_in_child(switch: &str) -> (String, Vec<String>) {
    let mut child = Command::new(std::env::current_exe().unwrap());
    child.args(["--exact", "training::trainings_are_bit_identical_with_avx512"]);
    child.arg("--nocapture").env(ENV_CHILD, "").env("STOKER_KERNELS", switch);
    let output = child.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let output = String::from_utf8(output.stdout).unwrap();
    let lines = |prefix: &str| -> Vec<String> {
        output
            .lines()
            .filter_map(|line| line.split_once(prefix))
            .map(|(_, rest)| rest.into())
            .collect()
    };
    (lines("instructions: ").concat(), lines("weights: "))
}

/// Compares AVX2 and AVX-512 on one processor, for several numbers of threads.
#[test]
fn trainings_are_bit_identical_with_avx512() {
    if std::env::var_os(ENV_CHILD).is_some() {
        println!("\ninstructions: {:?}", Instructions::current());
        for num_threads in [1, 2, 4, 8] {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(num_threads).build().unwrap();
            let hashes = pool.install(|| [train::<Mlp>(), train::<Cnn>(), train::<Gpt>()]);
            println!("\nweights: {hashes:x?}");
        }
        return;
    }
    let (instructions, expected) = train_in_child("avx2");
    assert!(!instructions.starts_with("Avx512"), "{instructions}");
    assert_eq!(expected.len(), 4);
    assert!(expected.iter().all(|weights| *weights == expected[0]), "threads: {expected:?}");
    if !Instructions::Avx512.is_supported() {
        record_skip("needs a processor with AVX-512");
        return;
    }
    let (instructions, weights) = train_in_child("on");
    assert!(instructions.starts_with("Avx512"), "{instructions}");
    assert_eq!(weights, expected);
}
