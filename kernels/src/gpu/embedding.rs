//! Rows of a matrix by index.

use std::sync::Arc;

use burn::backend::{Autodiff, Cube};
use burn::tensor::{Int, Tensor};

use super::product::{Factor, multiply};
use super::tape::{Gradient, Operand, Plain, plain, record, tensor};

/// Largest matrix of zeros and ones with which the gradient is computed, in elements.
const ELEMENTS_MAX: usize = 1 << 24;

/// See [`embedding`](crate::embedding()). Returns `None` if the tensors are not on a GPU, or are
/// large.
///
/// burn's gradient adds up one row after the other. The gradient here is a product with a matrix
/// that has a one for each index.
pub(crate) fn embedding(weight: &Tensor<2>, indices: &Tensor<2, Int>) -> Option<Tensor<3>> {
    let ([num_rows, d_model], [batch, len]) = (weight.dims(), indices.dims());
    let num = batch * len;
    if num * num_rows * d_model == 0 || num * num_rows > ELEMENTS_MAX {
        return None;
    }
    let weight = Operand::new(weight)?;
    let plain_indices = indices.clone().try_into_primitive::<Cube>();
    let plain_indices =
        plain_indices.or_else(|_| indices.clone().try_into_primitive::<Autodiff<Cube>>());
    let indices = Tensor::<2, Int>::from_primitive::<Cube>(plain_indices.ok()?).reshape([num]);
    let output = weight.tensor::<2>().select(0, indices.clone());
    let output = plain(output.reshape([batch, len, d_model]));
    let gradient =
        || -> Arc<dyn Gradient> { Arc::new(EmbeddingGradient { indices, num_rows, d_model }) };
    Some(record([weight], output, gradient))
}

struct EmbeddingGradient {
    indices: Tensor<1, Int>,
    num_rows: usize,
    d_model: usize,
}

impl Gradient for EmbeddingGradient {
    fn backward(&self, output: Plain, _: &[bool]) -> Vec<Option<Plain>> {
        let (num, device) = (self.indices.dims()[0], self.indices.device());
        let output = tensor::<3>(output).reshape([num, self.d_model]);
        let dtype = self.indices.dtype();
        let rows = Tensor::<1, Int>::arange(0..self.num_rows as i64, (&device, dtype));
        let rows: Tensor<2, Int> = rows.unsqueeze();
        let indices: Tensor<2, Int> = self.indices.clone().unsqueeze_dim(1);
        let shape = [num, self.num_rows];
        let ones = indices.expand(shape).equal(rows.expand(shape)).float().cast(output.dtype());
        vec![Some(plain(multiply(Factor::transposed(ones), output, 1.0)))]
    }
}
