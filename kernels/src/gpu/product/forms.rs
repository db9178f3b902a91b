//! Compares products of all forms with those on CPUs. See [`gpu`](super::super::tests::gpu) for the
//! device.

use burn::tensor::Device;

use super::super::tests::gpu;
use super::*;
use crate::testing::{device, random};

/// Sizes of rows in memory are multiples of 512 bytes, so burn does not pad them.
const M: usize = 128;
const K: usize = 128;
const N: usize = 256;

fn sample<const D: usize>(shape: [usize; D], seed: u64, device: &Device) -> Tensor<D> {
    random(shape, seed).into_tensor(device)
}

/// Compares values on the GPU with those that burn computes on the CPU. GPUs round to TF32.
#[track_caller]
fn assert_close<const D: usize>(name: &str, ours: Tensor<D>, expected: Tensor<D>) {
    assert_eq!(ours.dims(), expected.dims(), "{name}");
    let values = |tensor: Tensor<D>| tensor.into_data().try_to_vec::<f32>().unwrap();
    for (ours, expected) in values(ours).into_iter().zip(values(expected)) {
        let limit = 0.02 * (1.0 + expected.abs());
        assert!((ours - expected).abs() <= limit, "{name}: {ours} instead of {expected}");
    }
}

#[test]
fn products_of_all_forms_match_those_on_cpus() {
    let Some(gpu) = gpu() else { return };
    let cpu = device();
    let on = |device: &Device| {
        let (x, y) = (sample([2, 3, K], 1, device), sample([2, 3, N], 2, device));
        let (weight, bias) = (sample([K, N], 3, device), sample([N], 4, device));
        (x, y, weight, bias)
    };
    let (x, y, weight, bias) = on(&gpu);
    let (x_cpu, y_cpu, weight_cpu, bias_cpu) = on(&cpu);
    let product = x_cpu.clone().matmul(weight_cpu.clone().unsqueeze());
    assert_close("rows", multiply_rows(x.clone(), weight.clone(), None), product.clone());
    let with_bias = multiply_rows(x.clone(), weight.clone(), Some(bias));
    assert_close("rows with bias", with_bias, product + bias_cpu.unsqueeze());
    let product = y_cpu.clone().matmul(weight_cpu.transpose().unsqueeze());
    let transposed = multiply_rows(y.clone(), Factor::transposed(weight), None);
    assert_close("rows with a transpose", transposed, product);
    let product = matrix(x_cpu).transpose().matmul(matrix(y_cpu.clone()));
    assert_close("columns", multiply_columns(x.clone(), y.clone()), product.clone());
    let (columns, sums) = multiply_columns_and_sum(x, y);
    assert_close("columns with sums", columns, product);
    assert_close("sums", sums, matrix(y_cpu).sum_dim(0).squeeze_dim::<1>(0));

    for (is_a, is_b) in [(false, false), (false, true), (true, false), (true, true)] {
        // Each factor is stored as it is, or as its transpose.
        let factors = |device: &Device| {
            let a = sample(if is_a { [1, 2, K, M] } else { [1, 2, M, K] }, 5, device);
            let b = sample(if is_b { [1, 2, N, K] } else { [1, 2, K, N] }, 6, device);
            let of = |tensor, is_transposed| Factor { tensor, is_transposed };
            [of(a, is_a), of(b, is_b)]
        };
        let ([a, b], [a_cpu, b_cpu]) = (factors(&gpu), factors(&cpu));
        let product = a_cpu.into_tensor().matmul(b_cpu.into_tensor()) * 0.3;
        let name = format!("heads, {is_a} {is_b}");
        assert_close(&name, multiply(a.clone(), b.clone(), 0.3), product.clone());
        // In the order in memory, so that reading the values needs no copy.
        let in_memory = |heads: Tensor<4>| heads.permute([2, 0, 1, 3]);
        let ours = multiply_heads(a, b, 0.3);
        assert_close(&name, in_memory(ours), in_memory(product));
    }
}
