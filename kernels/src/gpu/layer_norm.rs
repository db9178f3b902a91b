//! Layer normalization over the last dimension.

use std::sync::Arc;

use burn::tensor::Tensor;

use super::product::matrix;
use super::rows;
use super::tape::{Gradient, Operand, Plain, fit_together, has_kernels, plain, record, tensor};

/// See [`layer_norm`](crate::layer_norm()). Returns `None` if the tensors are not on a GPU, or do
/// not fit.
pub(crate) fn layer_norm<const D: usize>(
    x: &Tensor<D>,
    gamma: &Tensor<1>,
    beta: Option<&Tensor<1>>,
    epsilon: f64,
) -> Option<Tensor<D>> {
    let [columns] = gamma.dims();
    let shape = x.dims();
    let has_other_beta = beta.is_some_and(|beta| beta.dims() != [columns]);
    if shape.iter().product::<usize>() == 0 || shape[D - 1] != columns || has_other_beta {
        return None;
    }
    let (x, gamma) = (Operand::new(x)?, Operand::new(gamma)?);
    let beta = match beta {
        Some(beta) => Some(Operand::new(beta)?),
        None => None,
    };
    let operands: Vec<&Operand> = [&x, &gamma].into_iter().chain(&beta).collect();
    if !fit_together(&operands) {
        return None;
    }
    let x_tensor = x.tensor::<D>();
    let (of_gamma, of_beta) = (gamma.tensor::<1>(), beta.as_ref().map(Operand::tensor::<1>));
    let (output, moments) = match has_kernels(&x_tensor) {
        true => rows::layer_norm(x_tensor.clone(), of_gamma.clone(), of_beta, epsilon),
        false => composed(x_tensor.clone(), of_gamma.clone(), of_beta, epsilon),
    };
    let gradient = || -> Arc<dyn Gradient> {
        let (x, gamma, moments) = (plain(x_tensor), plain(of_gamma), plain(moments));
        Arc::new(LayerNormGradient::<D> { x, gamma, moments })
    };
    let output = plain(output);
    Some(match beta {
        Some(beta) => record([x, gamma, beta], output, gradient),
        None => record([x, gamma], output, gradient),
    })
}

/// Returns the output, and the mean and the reciprocal standard deviation of each row.
fn composed<const D: usize>(
    x: Tensor<D>,
    gamma: Tensor<1>,
    beta: Option<Tensor<1>>,
    epsilon: f64,
) -> (Tensor<D>, Tensor<2>) {
    let shape = x.dims();
    let x = matrix(x);
    let mean = x.clone().mean_dim(1);
    let centered = x - mean.clone();
    let variance = (centered.clone() * centered.clone()).mean_dim(1);
    let reciprocal = (variance + epsilon).sqrt().recip();
    let output = centered * reciprocal.clone() * gamma.unsqueeze();
    let output = match beta {
        Some(beta) => output + beta.unsqueeze(),
        None => output,
    };
    (output.reshape(shape), Tensor::cat(vec![mean, reciprocal], 1))
}

struct LayerNormGradient<const D: usize> {
    x: Plain,
    gamma: Plain,
    /// Mean and reciprocal standard deviation of each row.
    moments: Plain,
}

impl<const D: usize> Gradient for LayerNormGradient<D> {
    /// With `g = dy * gamma` and the normalized input `n`:
    /// `dx = (g - mean(g) - n * mean(g * n)) / sqrt(variance + epsilon)`,
    /// `dgamma` = column sums of `dy * n`, `dbeta` = column sums of `dy`.
    fn backward(&self, output: Plain, is_wanted: &[bool]) -> Vec<Option<Plain>> {
        let (x, moments): (Tensor<D>, Tensor<2>) =
            (tensor(self.x.clone()), tensor(self.moments.clone()));
        let gamma: Tensor<1> = tensor(self.gamma.clone());
        let output: Tensor<D> = tensor(output);
        let is_beta_wanted = is_wanted.get(2).is_some_and(|is_wanted| *is_wanted);
        if has_kernels(&x) {
            let dx = is_wanted[0].then(|| {
                let (x, moments) = (x.clone(), moments.clone());
                plain(rows::layer_norm_gradient(output.clone(), x, gamma, moments))
            });
            if !is_wanted[1] && !is_beta_wanted {
                return vec![dx, None, None];
            }
            let [dbeta, dgamma] = rows::column_sums(output, x, moments);
            return vec![dx, Some(plain(dgamma)), Some(plain(dbeta))];
        }
        let shape = output.dims();
        let (x, output) = (matrix(x), matrix(output));
        let reciprocal = moments.clone().narrow(1, 1, 1);
        let normalized = (x - moments.narrow(1, 0, 1)) * reciprocal.clone();
        let dx = is_wanted[0].then(|| {
            let scaled = output.clone() * gamma.unsqueeze();
            let mean = scaled.clone().mean_dim(1);
            let projection = (scaled.clone() * normalized.clone()).mean_dim(1);
            let dx = (scaled - mean - normalized.clone() * projection) * reciprocal;
            plain(dx.reshape(shape))
        });
        let columns = |matrix: Tensor<2>| plain(matrix.sum_dim(0).squeeze_dim::<1>(0));
        let dgamma = is_wanted[1].then(|| columns(output.clone() * normalized));
        let dbeta = is_beta_wanted.then(|| columns(output));
        vec![dx, dgamma, dbeta]
    }
}
