//! `stoker-bench kernels`: forward and backward of each fused operator against burn's operator.

use std::time::Instant;

use burn::nn::loss::CrossEntropyLoss;
use burn::nn::{BatchNormConfig, DropoutConfig};
use burn::prelude::*;
use burn::tensor::ops::{AttentionModuleOptions, AvgPoolOptions, ConvOptions, MaxPoolOptions};
use burn::tensor::{Distribution, activation, module};
use clap::Args;
use stoker_kernels::{Activation, BatchNormExt};
use stoker_trainer::Result;

use crate::rounds::Comparison;

/// Options of `kernels`.
#[derive(Args, Debug)]
pub(crate) struct Arguments {
    /// Turns of each side, after one warm-up turn
    #[arg(long, default_value_t = 9)]
    rounds: usize,
    /// Forward and backward passes in one turn
    #[arg(long, default_value_t = 10)]
    passes: usize,
    /// Numbers of threads to benchmark
    #[arg(long, value_delimiter = ',', default_value = "1,2")]
    threads: Vec<usize>,
    /// Print one JSON value
    #[arg(long)]
    json: bool,
}

/// Forward pass on fixed inputs. Returns the loss.
type Pass = Box<dyn Fn() -> Tensor<1> + Sync>;

/// Operator with the shapes of a benchmark model.
struct Operator {
    name: &'static str,
    ours: Pass,
    burns: Pass,
}

/// Runs the benchmark and prints the results.
///
/// # Errors
///
/// The operators are off, or a pool of threads cannot be started.
pub(crate) fn run(arguments: &Arguments) -> Result<()> {
    if !stoker_kernels::is_enabled() {
        return Err("STOKER_KERNELS is off: both sides are the same; unset it".into());
    }
    let mut comparisons = vec![];
    if !arguments.json {
        let heading = "ms per forward and backward";
        println!("{heading:<34} {:>10} {:>10} {:>8}   over rounds", "Stoker", "burn", "ratio");
    }
    for &threads in &arguments.threads {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build()?;
        for operator in operators() {
            let rounds = pool.install(|| alternate(&operator, arguments));
            let name = format!("{}, threads {threads}", operator.name);
            let comparison = Comparison::new(name, &rounds);
            if !arguments.json {
                println!("{comparison}");
            }
            comparisons.push(comparison);
        }
    }
    if arguments.json {
        println!("{}", serde_json::to_string_pretty(&comparisons)?);
    }
    Ok(())
}

/// Returns the milliseconds of a pass of both sides, which take turns.
fn alternate(operator: &Operator, arguments: &Arguments) -> Vec<(f64, f64)> {
    let turn = |pass: &Pass| {
        let start = Instant::now();
        for _ in 0..arguments.passes {
            std::hint::black_box(pass().backward());
        }
        start.elapsed().as_secs_f64() * 1e3 / arguments.passes as f64
    };
    let mut rounds: Vec<_> =
        (0..=arguments.rounds).map(|_| (turn(&operator.ours), turn(&operator.burns))).collect();
    rounds.remove(0);
    rounds
}

fn device() -> Device {
    Device::flex().autodiff()
}

/// Returns an input with a gradient.
fn input<const D: usize>(shape: [usize; D]) -> Tensor<D> {
    Tensor::random(shape, Distribution::Normal(0.0, 1.0), &device()).require_grad()
}

/// Operators of the benchmark models: an MLP, a small CNN and a small GPT.
fn operators() -> Vec<Operator> {
    let mut operators = vec![
        linear("linear + relu, MLP", [128, 784, 512], Activation::Relu),
        linear("linear + gelu, GPT", [1024, 128, 512], Activation::Gelu),
        layer_norm(),
        softmax(),
        log_softmax(),
        cross_entropy(),
        attention(),
        conv2d("conv2d 1 to 16, CNN", [64, 1, 28, 28], 16),
        conv2d("conv2d 16 to 32, CNN", [64, 16, 14, 14], 32),
        conv2d_max_pool(),
        attention_with_dropout(),
        embedding(),
        batch_norm("batch norm, 16 channels of 28 x 28", Activation::Identity),
        batch_norm("batch norm + relu, 16 channels of 28 x 28", Activation::Relu),
    ];
    operators.extend(pools());
    operators
}

fn linear(
    name: &'static str,
    [rows, d_input, d_output]: [usize; 3],
    activation: Activation,
) -> Operator {
    let (x, weight) = (input([rows, d_input]), input([d_input, d_output]));
    let bias = input([d_output]);
    let inputs = (x.clone(), weight.clone(), bias.clone());
    Operator {
        name,
        ours: Box::new(move || {
            let (x, weight, bias) = inputs.clone();
            stoker_kernels::linear(x, weight, Some(bias), activation).sum()
        }),
        burns: Box::new(move || {
            let y = module::linear(x.clone(), weight.clone(), Some(bias.clone()));
            match activation {
                Activation::Identity => y.sum(),
                Activation::Relu => activation::relu(y).sum(),
                Activation::Gelu => activation::gelu(y).sum(),
            }
        }),
    }
}

fn layer_norm() -> Operator {
    let (x, gamma, beta) = (input([1024, 128]), input([128]), input([128]));
    let inputs = (x.clone(), gamma.clone(), beta.clone());
    Operator {
        name: "layer norm, GPT",
        ours: Box::new(move || {
            let (x, gamma, beta) = inputs.clone();
            stoker_kernels::layer_norm(x, gamma, Some(beta), 1e-5).sum()
        }),
        burns: Box::new(move || {
            module::layer_norm(x.clone(), gamma.clone(), Some(beta.clone()), 1e-5).sum()
        }),
    }
}

fn softmax() -> Operator {
    let x = input([1024, 256]);
    let ours = x.clone();
    Operator {
        name: "softmax, 1024 x 256",
        ours: Box::new(move || stoker_kernels::softmax(ours.clone(), 1).sum()),
        burns: Box::new(move || activation::softmax(x.clone(), 1).sum()),
    }
}

fn log_softmax() -> Operator {
    let x = input([1024, 256]);
    let ours = x.clone();
    Operator {
        name: "log-softmax, 1024 x 256",
        ours: Box::new(move || stoker_kernels::log_softmax(ours.clone(), 1).sum()),
        burns: Box::new(move || activation::log_softmax(x.clone(), 1).sum()),
    }
}

fn cross_entropy() -> Operator {
    let (x, targets) = (input([1024, 65]), Tensor::<1, Int>::arange(0..1024, &device()) % 65);
    let loss = CrossEntropyLoss::new(None, &device());
    let inputs = (x.clone(), targets.clone(), loss.clone());
    Operator {
        name: "cross-entropy, GPT",
        ours: Box::new(move || {
            let (x, targets, loss) = &inputs;
            stoker_kernels::cross_entropy(loss, x.clone(), targets.clone())
        }),
        burns: Box::new(move || loss.forward(x.clone(), targets.clone())),
    }
}

fn attention() -> Operator {
    let shape = [16, 4, 64, 32];
    let inputs = [input(shape), input(shape), input(shape)];
    let ours = inputs.clone();
    let options = AttentionModuleOptions { scale: None, softcap: None, is_causal: true };
    Operator {
        name: "causal attention, GPT",
        ours: Box::new(move || {
            let [query, key, value] = ours.clone();
            stoker_kernels::attention(query, key, value, None, None, options).sum()
        }),
        burns: Box::new(move || {
            let [query, key, value] = inputs.clone();
            module::attention(query, key, value, None, None, options).sum()
        }),
    }
}

/// burn's attention has no dropout: its modules compose both from other operators.
fn attention_with_dropout() -> Operator {
    const DROPOUT: f64 = 0.1;
    let shape = [16, 4, 64, 32];
    let inputs = [input(shape), input(shape), input(shape)];
    let ours = inputs.clone();
    let options = AttentionModuleOptions { scale: None, softcap: None, is_causal: true };
    let hidden = Tensor::<2, Bool>::tril_mask([64, 64], 0, &device()).unsqueeze::<4>();
    let dropout = DropoutConfig::new(DROPOUT).init();
    Operator {
        name: "attention with dropout, GPT",
        ours: Box::new(move || {
            let [query, key, value] = ours.clone();
            stoker_kernels::attention_with_dropout(query, key, value, None, options, DROPOUT).sum()
        }),
        burns: Box::new(move || {
            let [query, key, value] = inputs.clone();
            let scores = query.matmul(key.swap_dims(2, 3)).div_scalar(32_f32.sqrt());
            let scores = scores.mask_fill(hidden.clone().expand([16, 4, 64, 64]), -1e4);
            dropout.forward(activation::softmax(scores, 3)).matmul(value).sum()
        }),
    }
}

fn embedding() -> Operator {
    let (weight, indices) = (input([65, 128]), Tensor::<1, Int>::arange(0..1024, &device()) % 65);
    let indices = indices.reshape([16, 64]);
    let inputs = (weight.clone(), indices.clone());
    Operator {
        name: "embedding, GPT",
        ours: Box::new(move || {
            let (weight, indices) = inputs.clone();
            stoker_kernels::embedding(weight, indices).sum()
        }),
        burns: Box::new(move || module::embedding(weight.clone(), indices.clone()).sum()),
    }
}

fn batch_norm(name: &'static str, activation: Activation) -> Operator {
    let (x, device) = (input([64, 16, 28, 28]), device());
    let [ours, burns] = [x.clone(), x];
    let [norm, burns_norm] = std::array::from_fn(|_| BatchNormConfig::new(16).init(&device));
    Operator {
        name,
        ours: Box::new(move || norm.forward_activated(ours.clone(), activation).sum()),
        burns: Box::new(move || {
            let y = burns_norm.forward(burns.clone());
            if activation == Activation::Relu { activation::relu(y).sum() } else { y.sum() }
        }),
    }
}

fn conv2d(name: &'static str, shape: [usize; 4], channels_out: usize) -> Operator {
    let (x, weight) = (input(shape), input([channels_out, shape[1], 3, 3]));
    let bias = input([channels_out]);
    let options = ConvOptions::new([1, 1], [1, 1], [1, 1], 1);
    let inputs = (x.clone(), weight.clone(), bias.clone(), options.clone());
    Operator {
        name,
        ours: Box::new(move || {
            let (x, weight, bias, options) = inputs.clone();
            stoker_kernels::conv2d(x, weight, Some(bias), options, Activation::Identity).sum()
        }),
        burns: Box::new(move || {
            let bias = Some(bias.clone());
            module::conv2d(x.clone(), weight.clone(), bias, options.clone()).sum()
        }),
    }
}

fn conv2d_max_pool() -> Operator {
    let (x, weight, bias) = (input([64, 1, 28, 28]), input([16, 1, 3, 3]), input([16]));
    let options = ConvOptions::new([1, 1], [1, 1], [1, 1], 1);
    let pool = || MaxPoolOptions::new([2, 2]);
    let inputs = (x.clone(), weight.clone(), bias.clone(), options.clone());
    Operator {
        name: "conv2d + relu + max pool, CNN",
        ours: Box::new(move || {
            let (x, weight, bias, options) = inputs.clone();
            let relu = Activation::Relu;
            stoker_kernels::conv2d_max_pool2d(x, weight, Some(bias), options, relu, pool()).sum()
        }),
        burns: Box::new(move || {
            let bias = Some(bias.clone());
            let y = module::conv2d(x.clone(), weight.clone(), bias, options.clone());
            module::max_pool2d(activation::relu(y), pool()).sum()
        }),
    }
}

fn pools() -> [Operator; 2] {
    let x = input([64, 16, 28, 28]);
    let [ours_max, burns_max, ours_average, burns_average] = std::array::from_fn(|_| x.clone());
    let max = || MaxPoolOptions::new([2, 2]);
    let average = || AvgPoolOptions::new([2, 2]);
    let max = Operator {
        name: "max pool 2 x 2, CNN",
        ours: Box::new(move || stoker_kernels::max_pool2d(ours_max.clone(), max()).sum()),
        burns: Box::new(move || module::max_pool2d(burns_max.clone(), max()).sum()),
    };
    let average = Operator {
        name: "average pool 2 x 2, CNN",
        ours: Box::new(move || stoker_kernels::avg_pool2d(ours_average.clone(), average()).sum()),
        burns: Box::new(move || module::avg_pool2d(burns_average.clone(), average()).sum()),
    };
    [max, average]
}
