//! Compares the operators with those for CPUs.
//!
//! With feature `cubecl-cpu`, the tests run on the backend of GPUs on a CPU. Otherwise they need a
//! GPU, and are skipped without one.

use burn::module::Module;
use burn::nn::loss::CrossEntropyLossConfig;
use burn::nn::transformer::TransformerEncoderConfig;
use burn::tensor::ops::AttentionModuleOptions;
use burn::tensor::{Bool, DType, Device, Int, Tensor, TensorData};

use crate::testing::{Case, Operator, Outcome, device, run, run_on};
use crate::{
    Activation, AttentionMask, TransformerEncoderExt, attention, attention_with_dropout, embedding,
    layer_norm, linear,
};

/// Largest length of the difference of two results, relative to the length of the result, or to 1
/// if that is shorter. GPUs round the inputs of products to TF32, with 10 bits of mantissa.
const TOLERANCE: f32 = if cfg!(feature = "cubecl-cpu") { 1e-5 } else { 5e-3 };

/// Tolerance with a ReLU. Rounding changes a few outputs from zero to a small value, or back, and
/// so whether they have a gradient.
const RELU_TOLERANCE: f32 = if cfg!(feature = "cubecl-cpu") { TOLERANCE } else { 0.1 };

/// Returns the device of the tests. Without one, the test is skipped.
pub(super) fn gpu() -> Option<Device> {
    #[cfg(feature = "cubecl-cpu")]
    return Some(Device::cpu());
    #[cfg(not(feature = "cubecl-cpu"))]
    match std::path::Path::new("/dev/nvidiactl").exists() {
        true => Some(Device::cuda(0)),
        false => {
            stoker_test_cluster::record_skip("needs an NVIDIA GPU");
            None
        }
    }
}

#[track_caller]
fn assert_close(name: &str, tolerance: f32, ours: &Outcome, expected: &Outcome) {
    let parts = |outcome: &Outcome| -> Vec<Vec<f32>> {
        std::iter::once(&outcome.output).chain(&outcome.gradients).cloned().collect()
    };
    for (part, (ours, expected)) in parts(ours).iter().zip(parts(expected)).enumerate() {
        assert_eq!(ours.len(), expected.len(), "{name}: part {part}");
        let length = |values: &[f32]| values.iter().map(|value| value * value).sum::<f32>().sqrt();
        let differences: Vec<f32> = ours.iter().zip(&expected).map(|(a, b)| a - b).collect();
        let (error, limit) = (length(&differences), tolerance * length(&expected).max(1.0));
        // Also fails if a value is NaN.
        assert!(error <= limit, "{name}: part {part} differs by {error}, but may by {limit}");
    }
}

/// Compares output and gradients on the GPU with those on the CPU.
#[track_caller]
fn compare(gpu: &Device, name: &str, sizes: &[usize], operator: Operator<'_>) {
    let case = Case::new(sizes);
    let tolerance = if name.contains("Relu") { RELU_TOLERANCE } else { TOLERANCE };
    assert_close(name, tolerance, &run_on(gpu, &case, operator), &run(&case, operator));
}

#[test]
fn linear_layers_match_those_on_cpus() {
    let Some(gpu) = gpu() else { return };
    let layers = [[1, 1, 1, 1], [1, 2, 3, 5], [3, 7, 33, 17], [4, 32, 64, 128], [2, 50, 784, 10]];
    for [batch, rows, d_input, d_output] in layers {
        for activation in [Activation::Identity, Activation::Relu, Activation::Gelu] {
            let sizes = [batch * rows * d_input, d_input * d_output, d_output];
            for has_bias in [false, true] {
                let name = format!("{batch} {rows} {d_input} {d_output} {activation:?} {has_bias}");
                let operator = |inputs: &[Tensor<1>]| {
                    let x = inputs[0].clone().reshape([batch, rows, d_input]);
                    let weight = inputs[1].clone().reshape([d_input, d_output]) * 0.1;
                    let bias = inputs[2].clone();
                    let y = match has_bias {
                        true => linear(x, weight, Some(bias), activation),
                        false => linear(x, weight, None, activation) + bias.unsqueeze(),
                    };
                    y.reshape([batch * rows * d_output])
                };
                compare(&gpu, &name, &sizes, &operator);
            }
        }
    }
}

/// Transposed inputs, and inputs whose gradient is not used.
#[test]
fn linear_layers_accept_views_and_constants() {
    let Some(gpu) = gpu() else { return };
    let views = |inputs: &[Tensor<1>]| {
        let x: Tensor<2> = inputs[0].clone().reshape([24, 40]).transpose();
        let weight: Tensor<2> = inputs[1].clone().reshape([16, 24]).transpose();
        linear(x, weight, None, Activation::Relu).reshape([40 * 16])
    };
    compare(&gpu, "views with Relu", &[24 * 40, 16 * 24], &views);
    for constant in 0..2 {
        let constants = |inputs: &[Tensor<1>]| {
            let mut inputs = inputs.to_vec();
            // A gradient of each input is read: here 0.
            let kept = inputs[constant].clone().sum() * 0.0;
            inputs[constant] = inputs[constant].clone().detach();
            let x: Tensor<2> = inputs[0].clone().reshape([12, 20]).narrow(1, 2, 16);
            let weight: Tensor<2> = inputs[1].clone().reshape([16, 8]);
            linear(x, weight, None, Activation::Gelu).reshape([12 * 8]) + kept
        };
        compare(&gpu, "constants", &[12 * 20, 16 * 8], &constants);
    }
}

#[test]
fn embeddings_match_those_on_cpus() {
    let Some(gpu) = gpu() else { return };
    for [num_rows, batch, len, width] in [[1, 1, 1, 1], [5, 2, 7, 3], [65, 4, 64, 96]] {
        let operator = |inputs: &[Tensor<1>]| {
            let weight = inputs[0].clone().reshape([num_rows, width]);
            let index = |position: usize| ((position * 7919) % num_rows) as i64;
            let indices = (0..batch * len).map(index).collect::<Vec<_>>();
            let indices = TensorData::new(indices, [batch, len]);
            let indices = Tensor::<2, Int>::from_data(indices, &weight.device());
            embedding(weight, indices).reshape([batch * len * width])
        };
        compare(&gpu, &format!("{num_rows} {width}"), &[num_rows * width], &operator);
    }
}

#[test]
fn layer_norms_match_those_on_cpus() {
    let Some(gpu) = gpu() else { return };
    for [rows, columns] in [[1, 1], [5, 3], [64, 128], [33, 768]] {
        for has_beta in [false, true] {
            let operator = |inputs: &[Tensor<1>]| {
                let x = inputs[0].clone().reshape([rows, 1, columns]);
                let (gamma, beta) = (inputs[1].clone(), inputs[2].clone());
                let y = match has_beta {
                    true => layer_norm(x, gamma, Some(beta), 1e-5),
                    false => layer_norm(x, gamma, None, 1e-5) + beta.unsqueeze(),
                };
                y.reshape([rows * columns])
            };
            compare(
                &gpu,
                &format!("{rows} {columns}"),
                &[rows * columns, columns, columns],
                &operator,
            );
        }
    }
}

/// Heads as a transformer creates them: views of one tensor.
fn heads(x: &Tensor<1>, [batch, heads, len, depth]: [usize; 4]) -> Tensor<4> {
    x.clone().reshape([batch, len, heads, depth]).swap_dims(1, 2)
}

#[test]
fn attention_matches_attention_on_cpus() {
    let Some(gpu) = gpu() else { return };
    // Batch, heads, queries, keys, depth.
    for [batch, num, queries, keys, depth] in
        [[1, 1, 1, 1, 1], [2, 3, 5, 7, 4], [2, 2, 33, 33, 16], [1, 4, 64, 64, 32]]
    {
        let sizes = [queries, keys, keys].map(|len| batch * num * len * depth);
        for (is_causal, has_mask) in [(false, false), (true, false), (false, true), (true, true)] {
            let name = format!("{batch} {num} {queries} {keys} {depth} {is_causal} {has_mask}");
            let operator = |inputs: &[Tensor<1>]| {
                let query = heads(&inputs[0], [batch, num, queries, depth]);
                let key = heads(&inputs[1], [batch, num, keys, depth]);
                let value = heads(&inputs[2], [batch, num, keys, depth]);
                // The first query of the first sample sees no key.
                let hidden = (0..batch * queries * keys).map(|i| i < keys || i % 5 == 0);
                let hidden = TensorData::new(hidden.collect::<Vec<_>>(), [batch, 1, queries, keys]);
                let mask = Tensor::<4, Bool>::from_data(hidden, &query.device());
                let options = AttentionModuleOptions { is_causal, ..Default::default() };
                let mask = has_mask.then_some(mask);
                attention(query, key, value, mask, None, options)
                    .reshape([batch * num * queries * depth])
            };
            compare(&gpu, &name, &sizes, &operator);
        }
    }
}

/// Attention with dropout samples its own factors, so its gradients are compared with finite
/// differences of equal seeds.
#[test]
fn gradients_of_attention_with_dropout_match_differences() {
    const STEP: f32 = 0.05;
    let Some(gpu) = gpu() else { return };
    let shape = [2, 2, 8, 4];
    let num = shape.iter().product::<usize>();
    let operator = |inputs: &[Tensor<1>]| {
        gpu.seed(3);
        let [query, key, value] = [0, 1, 2].map(|index| heads(&inputs[index], shape));
        let options = AttentionModuleOptions { is_causal: true, ..Default::default() };
        attention_with_dropout(query, key, value, None, options, 0.4).reshape([num])
    };
    let case = Case::new(&[num, num, num]);
    let outcome = run_on(&gpu, &case, &operator);
    let loss = |case: &Case| run_on(&gpu, case, &operator).loss();
    for input in 0..3 {
        for index in [0, 17, num - 1] {
            let at = |offset: f32| {
                let mut inputs = case.inputs.clone();
                inputs[input][index] += offset;
                loss(&Case::from_values(inputs))
            };
            let difference = (at(STEP) - at(-STEP)) / (2.0 * STEP);
            let gradient = outcome.gradients[input][index];
            let limit = 0.05 * (1.0 + difference.abs());
            assert!(
                (gradient - difference).abs() <= limit,
                "{input} {index}: {gradient} {difference}"
            );
        }
    }
}

/// A loss in half precision is close to one in single precision.
#[test]
fn half_precision_is_close_to_single() {
    let Some(gpu) = gpu() else { return };
    if cfg!(feature = "cubecl-cpu") {
        return;
    }
    let case = Case::new(&[64 * 96, 96 * 32, 32]);
    let of = |dtype: DType| {
        let operator = move |inputs: &[Tensor<1>]| {
            let [x, weight, bias] = [0, 1, 2].map(|index| inputs[index].clone().cast(dtype));
            let (x, weight) = (x.reshape([64, 96]), weight.reshape([96, 32]));
            let y = linear(x, weight, Some(bias), Activation::Gelu);
            y.cast(DType::F32).reshape([64 * 32])
        };
        run_on(&gpu, &case, &operator)
    };
    let expected = of(DType::F32);
    for dtype in [DType::BF16, DType::F16] {
        let outcome = of(dtype);
        let largest =
            |values: &[f32]| values.iter().fold(0.0_f32, |max, value| max.max(value.abs()));
        let pairs = std::iter::once((&outcome.output, &expected.output))
            .chain(outcome.gradients.iter().zip(&expected.gradients));
        for (part, (ours, expected)) in pairs.enumerate() {
            let differences: Vec<f32> = ours.iter().zip(expected).map(|(a, b)| a - b).collect();
            let relative = largest(&differences) / largest(expected);
            assert!(relative < 0.03, "{dtype:?}, part {part}: {relative}");
        }
    }
}

/// Equal steps give equal bits, also after other work.
#[test]
fn repeated_products_are_bit_identical() {
    let Some(gpu) = gpu() else { return };
    let case = Case::new(&[256 * 512, 512 * 384, 384]);
    let operator = |inputs: &[Tensor<1>]| {
        let (x, weight) = (inputs[0].clone().reshape([256, 512]), inputs[1].clone());
        let weight = weight.reshape([512, 384]);
        linear(x, weight, Some(inputs[2].clone()), Activation::Gelu).reshape([256 * 384])
    };
    let bits = |outcome: &Outcome| -> Vec<u32> {
        let gradients = outcome.gradients.iter().flatten();
        outcome.output.iter().chain(gradients).map(|value| value.to_bits()).collect()
    };
    let first = bits(&run_on(&gpu, &case, &operator));
    for _ in 0..5 {
        let loss = CrossEntropyLossConfig::new().init(&gpu);
        let targets = Tensor::<1, Int>::zeros([8], &gpu);
        let _ = crate::cross_entropy(&loss, Tensor::ones([8, 10], &gpu), targets).into_data();
        assert!(first == bits(&run_on(&gpu, &case, &operator)));
    }
}

/// Layers change the order of batch and positions on GPUs.
#[test]
fn encoders_match_those_on_cpus() {
    const SHAPE: [usize; 3] = [3, 10, 16];
    let Some(gpu) = gpu() else { return };
    for norm_first in [false, true] {
        let config = TransformerEncoderConfig::new(16, 32, 2, 2).with_dropout(0.0);
        let encoder = config.with_norm_first(norm_first).init(&device().autodiff());
        let outcome = |device: &Device| {
            let encoder = encoder.clone().to_device(&device.clone().autodiff());
            let operator = |inputs: &[Tensor<1>]| {
                let x = inputs[0].clone().reshape(SHAPE);
                // Padding hides the last keys of the first sample.
                let padding = (0..30).map(|index| (7..10).contains(&index)).collect::<Vec<_>>();
                let padding = TensorData::new(padding, [SHAPE[0], SHAPE[1]]);
                let padding = Tensor::<2, Bool>::from_data(padding, &x.device());
                let causal = AttentionMask::causal();
                let padded = AttentionMask::default().with_padding(padding);
                let y = encoder.forward_fused(x.clone(), &causal, 1e-5)
                    + encoder.forward_fused(x, &padded, 1e-5);
                y.reshape([SHAPE.iter().product::<usize>()])
            };
            run_on(device, &Case::new(&[SHAPE.iter().product()]), &operator)
        };
        let name = format!("norm first: {norm_first}");
        assert_close(&name, TOLERANCE, &outcome(&gpu), &outcome(&device()));
    }
}
