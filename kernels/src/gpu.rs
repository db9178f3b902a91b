//! Operators on burn's backend for GPUs.
//!
//! They are composed of burn's operators, which burn fuses, and of matrix products. Backward
//! passes are formulas instead of the chains of burn's autodiff, so they read and write fewer
//! tensors. On NVIDIA GPUs, products call cuBLAS if it is installed, and kernels compute softmax
//! and layer normalization.
//!
//! The same backend also runs on CPUs, for tests.

mod attention;
#[cfg(feature = "cuda")]
mod cublas;
mod embedding;
mod layer_norm;
mod linear;
mod operation;
pub(crate) mod optim;
mod order;
mod product;
mod rows;
#[cfg(feature = "cuda")]
mod stream;
mod tape;

#[cfg(test)]
#[cfg(any(feature = "cuda", feature = "cubecl-cpu"))]
mod tests;

pub(crate) use attention::attention;
#[cfg(feature = "cuda")]
pub use cublas::is_installed as has_cublas;
pub(crate) use embedding::embedding;
pub(crate) use layer_norm::layer_norm;
pub(crate) use linear::linear;
pub(crate) use order::{row_major, swap_first};
