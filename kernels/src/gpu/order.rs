//! The order of samples and positions in memory.

use std::sync::Arc;

use burn::tensor::Tensor;

use super::operation::contiguous;
use super::tape::{Gradient, Operand, Plain, plain, record, tensor};

/// Returns `x` with swapped first dimensions, in row-major order. Returns `None` if it is not on a
/// GPU. Without the copy, sums with `x` would have its order in memory.
pub(crate) fn swap_first(x: &Tensor<3>) -> Option<Tensor<3>> {
    let operand = Operand::new(x)?;
    let swapped = plain(operand.tensor::<3>().swap_dims(0, 1));
    let gradient = || -> Arc<dyn Gradient> { Arc::new(Swapped) };
    Some(record([operand], contiguous(swapped), gradient))
}

struct Swapped;

impl Gradient for Swapped {
    fn backward(&self, output: Plain, _: &[bool]) -> Vec<Option<Plain>> {
        vec![Some(plain(tensor::<3>(output).swap_dims(0, 1)))]
    }
}
