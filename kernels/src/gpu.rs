//! Operators on burn's backend for GPUs.
//!
//! They are composed of burn's operators, which burn fuses, and of matrix products. Backward
//! passes are formulas instead of the chains of burn's autodiff, so they read and write fewer
//! tensors. On NVIDIA GPUs, products call [cuBLAS](cublas) if it is installed.
//!
//! The same backend also runs on CPUs, for tests.

mod attention;
#[cfg(feature = "cuda")]
mod cublas;
mod embedding;
mod layer_norm;
mod linear;
mod operation;
mod product;
mod rows;
#[cfg(feature = "cuda")]
mod stream;
mod tape;

#[cfg(test)]
mod tests;

use std::sync::Arc;

use burn::tensor::Tensor;

/// Returns `x` with swapped first dimensions, in row-major order. Returns `None` if it is not on a
/// GPU. Without the copy, sums with `x` would have its order in memory.
pub(crate) fn swap_first(x: &Tensor<3>) -> Option<Tensor<3>> {
    let operand = tape::Operand::new(x)?;
    let swapped = tape::plain(operand.tensor::<3>().swap_dims(0, 1));
    let gradient = || -> Arc<dyn tape::Gradient> { Arc::new(Swapped) };
    Some(tape::record([operand], operation::contiguous(swapped), gradient))
}

struct Swapped;

impl tape::Gradient for Swapped {
    fn backward(&self, output: tape::Plain, _: &[bool]) -> Vec<Option<tape::Plain>> {
        vec![Some(tape::plain(tape::tensor::<3>(output).swap_dims(0, 1)))]
    }
}

#[cfg(feature = "cuda")]
pub use cublas::is_installed as has_cublas;

pub(crate) use attention::attention;
pub(crate) use embedding::embedding;
pub(crate) use layer_norm::layer_norm;
pub(crate) use linear::linear;
