//! The order of tensors in memory.

use burn::tensor::Tensor;

/// Returns the same values in row-major order without gaps if `x` is on a GPU, as a leaf of the
/// autodiff graph. Otherwise returns `x`.
///
/// Use it for weights before their first product. burn pads the rows of tensors that it copies to
/// NVIDIA GPUs, but not those of an optimizer's results. burn and cuBLAS choose algorithms by the
/// order in memory, and the last bits differ between algorithms.
#[must_use]
pub fn row_major<const D: usize>(x: Tensor<D>) -> Tensor<D> {
    #[cfg(feature = "cubecl")]
    let x = crate::gpu::row_major(x);
    x
}
