//! Linear layers with bias and activation.

use std::f64::consts::{FRAC_1_SQRT_2, PI};
use std::sync::Arc;

use burn::tensor::Tensor;

use super::product::{Factor, matrix, multiply_columns, multiply_columns_and_sum, multiply_rows};
use super::tape::{Gradient, Operand, Plain, fit_together, plain, record, tensor};
use crate::activation::Activation;

/// See [`linear`](crate::linear()). Returns `None` if the tensors are not on a GPU, or do not fit.
pub(crate) fn linear<const D: usize>(
    x: &Tensor<D>,
    weight: &Tensor<2>,
    bias: Option<&Tensor<1>>,
    activation: Activation,
) -> Option<Tensor<D>> {
    let [d_input, d_output] = weight.dims();
    let shape = x.dims();
    let has_other_bias = bias.is_some_and(|bias| bias.dims() != [d_output]);
    if D < 2 || shape[D - 1] != d_input || has_other_bias {
        return None;
    }
    let rows: usize = shape[..D - 1].iter().product();
    if rows * d_input * d_output == 0 {
        return None;
    }
    let (x, weight) = (Operand::new(x)?, Operand::new(weight)?);
    let bias = match bias {
        Some(bias) => Some(Operand::new(bias)?),
        None => None,
    };
    let operands: Vec<&Operand> = [&x, &weight].into_iter().chain(&bias).collect();
    if !fit_together(&operands) {
        return None;
    }
    let (x_tensor, weight_matrix) = (x.tensor::<D>(), weight.tensor::<2>());
    let bias_vector = bias.as_ref().map(Operand::tensor::<1>);
    let before = multiply_rows(x_tensor.clone(), weight_matrix.clone(), bias_vector);
    let output = activation.apply_burn(before.clone());
    let kept = match activation {
        Activation::Identity => Kept::Nothing,
        Activation::Relu => Kept::Output(plain(output.clone())),
        Activation::Gelu => Kept::Before(plain(before)),
    };
    let gradient = || -> Arc<dyn Gradient> {
        let (x, weight) = (plain(x_tensor), plain(weight_matrix));
        Arc::new(LinearGradient::<D> { x, weight, kept })
    };
    let output = plain(output);
    Some(match bias {
        Some(bias) => record([x, weight, bias], output, gradient),
        None => record([x, weight], output, gradient),
    })
}

/// Values from which the derivative of the activation follows.
enum Kept {
    Nothing,
    /// Output of a ReLU.
    Output(Plain),
    /// Input of a GELU.
    Before(Plain),
}

struct LinearGradient<const D: usize> {
    x: Plain,
    weight: Plain,
    kept: Kept,
}

impl<const D: usize> Gradient for LinearGradient<D> {
    /// `dx = dy * weight^T`, `dweight = x^T * dy`, `dbias` = column sums of `dy`.
    fn backward(&self, output: Plain, is_wanted: &[bool]) -> Vec<Option<Plain>> {
        let output: Tensor<D> = tensor(output);
        let output = match &self.kept {
            Kept::Nothing => output,
            Kept::Output(relu) => {
                let is_zero = tensor::<D>(relu.clone()).lower_equal_scalar(0.0);
                output.mask_fill(is_zero, 0.0)
            }
            Kept::Before(x) => output * gelu_derivative(tensor(x.clone())),
        };
        let (x, weight): (Tensor<D>, Tensor<2>) =
            (tensor(self.x.clone()), tensor(self.weight.clone()));
        let dx = is_wanted[0]
            .then(|| plain(multiply_rows(output.clone(), Factor::transposed(weight), None)));
        let is_bias_wanted = is_wanted.get(2).is_some_and(|is_wanted| *is_wanted);
        if is_wanted[1] && is_bias_wanted {
            let (dweight, dbias) = multiply_columns_and_sum(x, output);
            return vec![dx, Some(plain(dweight)), Some(plain(dbias))];
        }
        let dweight = is_wanted[1].then(|| plain(multiply_columns(x, output.clone())));
        let dbias = is_bias_wanted.then(|| plain(matrix(output).sum_dim(0).squeeze_dim::<1>(0)));
        vec![dx, dweight, dbias]
    }
}

/// Derivative of `x * cdf(x)` with the distribution function of the normal distribution.
fn gelu_derivative<const D: usize>(x: Tensor<D>) -> Tensor<D> {
    let cdf = ((x.clone() * FRAC_1_SQRT_2).erf() + 1.0) * 0.5;
    let density = (x.clone() * x.clone() * -0.5).exp() * (1.0 / (2.0 * PI).sqrt());
    cdf + x * density
}
