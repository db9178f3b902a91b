//! Linear layers with bias and activation.

use std::sync::Arc;

use burn::tensor::{Tensor, module};

use crate::activation::{Activation, Kept};
use crate::array::{Array, Strided};
use crate::chunks::column_sums;
use crate::is_enabled;
use crate::machine::{Matrix, Threads, product};
use crate::tape::{ArrayGradient, Gradient, Operand, record, share_tape};

/// Returns `activation(x * weight + bias)`.
///
/// # Shapes
///
/// `x` `[.., d_input]` with at least two dimensions, `weight` `[d_input, d_output]`, `bias`
/// `[d_output]`, result `[.., d_output]`.
pub fn linear<const D: usize>(
    x: Tensor<D>,
    weight: Tensor<2>,
    bias: Option<Tensor<1>>,
    activation: Activation,
) -> Tensor<D> {
    #[cfg(feature = "cubecl")]
    if let Some(y) = crate::gpu::linear(&x, &weight, bias.as_ref(), activation) {
        return y;
    }
    fused(&x, &weight, bias.as_ref(), activation)
        .unwrap_or_else(|| composed(x, weight, bias, activation))
}

/// Linear layer from burn's operators, as one product of two matrices. For more than two
/// dimensions, burn's own layer computes a gradient of the weight for each matrix in `x`, and adds
/// these up.
fn composed<const D: usize>(
    x: Tensor<D>,
    weight: Tensor<2>,
    bias: Option<Tensor<1>>,
    activation: Activation,
) -> Tensor<D> {
    if D <= 2 || !is_enabled() {
        return activation.apply_burn(module::linear(x, weight, bias));
    }
    let (mut shape, d_output) = (x.dims(), weight.dims()[1]);
    let rows = shape[..D - 1].iter().product();
    let y = module::linear(x.reshape([rows, shape[D - 1]]), weight, bias);
    shape[D - 1] = d_output;
    activation.apply_burn(y).reshape(shape)
}

fn fused<const D: usize>(
    x: &Tensor<D>,
    weight: &Tensor<2>,
    bias: Option<&Tensor<1>>,
    activation: Activation,
) -> Option<Tensor<D>> {
    let [d_input, d_output] = weight.dims();
    let mut shape = x.dims();
    let has_other_bias = bias.is_some_and(|bias| bias.dims() != [d_output]);
    if D < 2 || shape[D - 1] != d_input || has_other_bias {
        return None;
    }
    let (x, weight) = (Operand::new(x)?, Operand::new(weight)?);
    let bias = match bias {
        Some(bias) => Some(Operand::new(bias)?),
        None => None,
    };
    if !share_tape(&[&x, &weight]) || bias.iter().any(|bias| !share_tape(&[&x, bias])) {
        return None;
    }
    let rows = shape[..D - 1].iter().product();
    let (x_array, strided) = (x.array(), Strided::new(weight.tensor()));
    let x_matrix = Matrix::row_major(x_array.values(), rows, d_input);
    let bias_array = bias.as_ref().map(Operand::array);
    let bias_values = bias_array.as_ref().map(Array::values);
    let output = product(x_matrix, strided.matrix(&[]), bias_values, Threads::All);
    shape[D - 1] = d_output;
    let is_tracked = [&x, &weight].into_iter().chain(&bias).any(Operand::is_tracked);
    let (output, kept) = activation.apply(output, &shape, is_tracked);
    let gradient = || -> Arc<dyn Gradient> {
        Arc::new(LinearGradient { x: x_array, weight: strided, rows, d_input, d_output, kept })
    };
    Some(match bias {
        Some(bias) => record([x, weight, bias], output, gradient),
        None => record([x, weight], output, gradient),
    })
}

struct LinearGradient {
    x: Array,
    weight: Strided,
    rows: usize,
    d_input: usize,
    d_output: usize,
    kept: Kept,
}

impl ArrayGradient for LinearGradient {
    /// `dx = dy * weight^T`, `dweight = x^T * dy`, `dbias` = column sums of `dy`.
    fn gradients(&self, output: &Array, is_wanted: &[bool]) -> Vec<Option<Array>> {
        let Self { rows, d_input, d_output, .. } = *self;
        let gradient = self.kept.gradient(output.values());
        let matrix = Matrix::row_major(&gradient, rows, d_output);
        let array = |shape: &[usize], left: Matrix<'_>, right: Matrix<'_>| {
            Array::from_vec(product(left, right, None, Threads::All), shape)
        };
        let x = is_wanted[0]
            .then(|| array(&self.x.shape(), matrix, self.weight.matrix(&[]).transposed()));
        let weight = is_wanted[1].then(|| {
            let x = Matrix::row_major(self.x.values(), rows, d_input).transposed();
            array(&[d_input, d_output], x, matrix)
        });
        let bias = is_wanted.get(2).is_some_and(|is_wanted| *is_wanted);
        let bias = bias.then(|| Array::from_vec(column_sums(&gradient, d_output), &[d_output]));
        vec![x, weight, bias]
    }
}

#[cfg(test)]
mod tests {
    use burn::tensor::{Distribution, activation};

    use super::*;
    use crate::testing::{
        Case, assert_gradients, assert_matches_burn, assert_same_on_threads, bits, device, run,
    };

    const ACTIVATIONS: [Activation; 3] = [Activation::Identity, Activation::Relu, Activation::Gelu];

    /// Inputs are x, weight and bias.
    fn case(rows: usize, d_input: usize, d_output: usize) -> Case {
        Case::new(&[rows * d_input, d_input * d_output, d_output])
    }

    #[test]
    fn matches_burn_for_shapes_and_activations() {
        for [rows, d_input, d_output] in [[1, 1, 1], [2, 3, 5], [7, 33, 17], [0, 3, 2], [64, 9, 8]]
        {
            for activation in ACTIVATIONS {
                let name = format!("{rows} x {d_input} x {d_output}, {activation:?}");
                let shaped = |inputs: &[Tensor<1>]| {
                    let x = inputs[0].clone().reshape([rows, d_input]);
                    (x, inputs[1].clone().reshape([d_input, d_output]))
                };
                let ours = |inputs: &[Tensor<1>]| {
                    let (x, weight) = shaped(inputs);
                    let y = fused(&x, &weight, Some(&inputs[2]), activation);
                    y.unwrap().reshape([rows * d_output])
                };
                let burns = |inputs: &[Tensor<1>]| {
                    let (x, weight) = shaped(inputs);
                    let y = module::linear(x, weight, Some(inputs[2].clone()));
                    activation.apply_burn(y).reshape([rows * d_output])
                };
                assert_matches_burn(&name, &case(rows, d_input, d_output), &ours, &burns);
            }
        }
    }

    #[test]
    fn transposed_weight_and_higher_rank_match_burn() {
        let case = Case::new(&[2 * 3 * 4 * 5, 5 * 6]);
        let shaped = |inputs: &[Tensor<1>]| {
            let x = inputs[0].clone().reshape([2, 5, 4, 3]).swap_dims(1, 3);
            (x, inputs[1].clone().reshape([6, 5]).transpose())
        };
        let ours = |inputs: &[Tensor<1>]| {
            let (x, weight) = shaped(inputs);
            fused(&x, &weight, None, Activation::Identity).unwrap().reshape([2 * 3 * 4 * 6])
        };
        let burns = |inputs: &[Tensor<1>]| {
            let (x, weight) = shaped(inputs);
            module::linear(x, weight, None).reshape([2 * 3 * 4 * 6])
        };
        assert_matches_burn("views", &case, &ours, &burns);
    }

    #[test]
    fn operators_of_burn_on_rows_match_those_on_matrices() {
        for [batch, rows] in [[2, 3], [1, 1]] {
            let case = Case::new(&[batch * rows * 5, 5 * 6, 6]);
            let shaped = |inputs: &[Tensor<1>]| {
                let x = inputs[0].clone().reshape([batch, rows, 5]);
                (x, inputs[1].clone().reshape([5, 6]), Some(inputs[2].clone()))
            };
            let ours = |inputs: &[Tensor<1>]| {
                let (x, weight, bias) = shaped(inputs);
                composed(x, weight, bias, Activation::Relu).reshape([batch * rows * 6])
            };
            let burns = |inputs: &[Tensor<1>]| {
                let (x, weight, bias) = shaped(inputs);
                let y = Activation::Relu.apply_burn(module::linear(x, weight, bias));
                y.reshape([batch * rows * 6])
            };
            assert_matches_burn(&format!("{batch} x {rows}"), &case, &ours, &burns);
        }
    }

    /// burn's operator of matrices reads invalid memory here.
    #[test]
    fn empty_matrices_are_rows() {
        let tensor = |num: usize| Tensor::<1>::ones([num], &device().autodiff()).require_grad();
        let (x, weight) = (tensor(0).reshape([0, 3, 5]), tensor(30));
        let y = composed(x, weight.clone().reshape([5, 6]), None, Activation::Relu);
        assert_eq!(y.dims(), [0, 3, 6]);
        let gradient = weight.grad(&y.sum().backward()).unwrap();
        assert_eq!(gradient.into_data().try_to_vec::<f32>().unwrap(), [0.0; 30]);
    }

    #[test]
    fn gradients_match_finite_differences() {
        for activation in ACTIVATIONS {
            let ours = |inputs: &[Tensor<1>]| {
                let x = inputs[0].clone().reshape([3, 4]);
                let weight = inputs[1].clone().reshape([4, 2]);
                let y = fused(&x, &weight, Some(&inputs[2]), activation);
                y.unwrap().reshape([6])
            };
            let reference = |inputs: &[Vec<f64>]| {
                let value = |index: usize| {
                    let (row, column) = (index / 2, index % 2);
                    let terms = (0..4).map(|k| inputs[0][row * 4 + k] * inputs[1][k * 2 + column]);
                    let y = terms.sum::<f64>() + inputs[2][column];
                    match activation {
                        Activation::Identity => y,
                        Activation::Relu => y.max(0.0),
                        Activation::Gelu => {
                            0.5 * y * (1.0 + libm::erf(y * std::f64::consts::FRAC_1_SQRT_2))
                        }
                    }
                };
                (0..6).map(value).collect()
            };
            assert_gradients(&format!("{activation:?}"), &case(3, 4, 2), &ours, &reference);
        }
    }

    #[test]
    fn threads_do_not_change_bits() {
        let ours = |inputs: &[Tensor<1>]| {
            let x = inputs[0].clone().reshape([301, 130]);
            let weight = inputs[1].clone().reshape([130, 140]);
            let y = fused(&x, &weight, Some(&inputs[2]), Activation::Gelu);
            y.unwrap().reshape([301 * 140])
        };
        assert_same_on_threads(&case(301, 130, 140), &ours);
    }

    #[test]
    fn relu_propagates_nan_and_its_gradient() {
        let x = vec![f32::NAN, f32::INFINITY, f32::NEG_INFINITY, -1.0, 0.0, 2.0];
        let inputs = Case::from_values(vec![x, vec![1.0], vec![0.0]]);
        let outcome = run(&inputs, &|inputs: &[Tensor<1>]| {
            let x = inputs[0].clone().reshape([6, 1]);
            let weight = inputs[1].clone().reshape([1, 1]);
            fused(&x, &weight, Some(&inputs[2]), Activation::Relu).unwrap().reshape([6])
        });
        assert!(outcome.output[0].is_nan());
        assert_eq!(outcome.output[1..], [f32::INFINITY, 0.0, 0.0, 0.0, 2.0]);
        // As torch.relu: the gradient passes where the output is not 0.
        let passes: Vec<bool> = outcome.gradients[0].iter().map(|value| *value != 0.0).collect();
        assert_eq!(passes, [true, true, false, false, false, true]);
    }

    #[test]
    fn unsupported_inputs_use_operator_of_burn() {
        let plain = device();
        let tensor = |shape| Tensor::<2>::random(shape, Distribution::Default, &plain);
        let (x, weight) = (tensor([3, 4]), tensor([4, 2]));
        assert!(fused(&x, &weight, None, Activation::Identity).is_some());
        let tracked = Tensor::<2>::from_inner(weight.clone());
        assert!(fused(&x, &tracked, None, Activation::Identity).is_none(), "mixed tapes");
        let half = x.clone().cast(burn::tensor::DType::F16);
        let half_weight = weight.clone().cast(burn::tensor::DType::F16);
        assert!(fused(&half, &half_weight, None, Activation::Identity).is_none(), "dtype");
        assert!(fused(&weight, &x, None, Activation::Identity).is_none(), "shapes");
        let ours = linear(x.clone(), tracked.clone(), None, Activation::Relu);
        let expected = activation::relu(module::linear(x, tracked, None));
        assert_eq!(bits(&ours.into_data()), bits(&expected.into_data()));
    }
}
