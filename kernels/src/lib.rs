//! Fused operators for burn models on CPUs and NVIDIA GPUs.
//!
//! burn composes operators such as layer normalization from many small ones, each with a tensor
//! of intermediate results and a separate backward step. The operators here compute forward and
//! backward in one pass each, on burn's CPU backend Flex. With feature `cuda`, linear layers, layer
//! normalization, embeddings, attention in training and transformers also have operators for
//! burn's CUDA backend, with products by cuBLAS.
//!
//! A model keeps burn's modules and records, and calls `forward_fused` instead of `forward`:
//!
//! ```
//! use burn::nn::LinearConfig;
//! use burn::prelude::*;
//! use stoker_kernels::{Activation, LinearExt};
//!
//! let device = Device::flex();
//! let linear = LinearConfig::new(4, 2).init(&device);
//! let x = Tensor::<2>::ones([3, 4], &device);
//! let y = linear.forward_fused(x, Activation::Relu);
//! assert_eq!(y.dims(), [3, 2]);
//! ```
//!
//! # Fallback
//!
//! An operator calls burn's operator in these cases: another backend, a data type other than `f32`
//! (on GPUs also `f16` and `bf16`), gradient checkpointing, a mixture of tensors with and without
//! autodiff, an option that its documentation excludes, or shapes that do not fit (burn then
//! reports the error).
//! Linear layers then still multiply all rows as one matrix, and batch normalization in half
//! precision computes in `f32`.
//! `STOKER_KERNELS=off` turns all operators of this crate off, and `STOKER_KERNELS=avx2` the use of
//! AVX-512.
//!
//! # Invariants on CPUs
//!
//! - **Results do not depend on the number of threads.** Sums run over a fixed number of chunks,
//!   and are added in the order of the chunks.
//! - **Results do not depend on the instruction set.** Loops and matrix products are compiled for
//!   AVX2 and for AVX-512, with the same operations in the same order.
//! - **NaN and infinity propagate as in PyTorch**, except in rows of attention without any
//!   visible position, which are zero as in burn.

mod activation;
mod array;
mod attention;
mod batch_norm;
mod chunks;
mod conv;
mod cross_entropy;
mod dropout;
mod embedding;
#[cfg(feature = "cubecl")]
mod gpu;
mod layer_norm;
mod linear;
mod machine;
mod modules;
mod new_values;
mod optim;
mod order;
mod pool;
mod softmax;
mod statistics;
mod sum;
mod switch;
mod tape;
mod threads;
mod transformer;
mod vector;
mod window;

#[cfg(test)]
mod pytorch;
#[cfg(test)]
mod testing;
#[cfg(test)]
mod training;

pub use crate::activation::Activation;
pub use crate::attention::{attention, attention_with_dropout};
pub use crate::batch_norm::{batch_norm, batch_norm_train};
pub use crate::conv::{conv2d, conv2d_max_pool2d};
pub use crate::cross_entropy::{cross_entropy, cross_entropy_of_samples, weighted_cross_entropy};
pub use crate::embedding::embedding;
#[cfg(feature = "cuda")]
pub use crate::gpu::has_cublas;
pub use crate::layer_norm::layer_norm;
pub use crate::linear::linear;
pub use crate::modules::{
    AvgPool2dExt, BatchNormExt, Conv2dExt, CrossEntropyLossExt, EmbeddingExt, LayerNormExt,
    LinearExt, MaxPool2dExt,
};
pub use crate::optim::{FusedAdam, FusedAdamW, FusedSgd, OptimizerConfigExt};
pub use crate::order::row_major;
pub use crate::pool::{avg_pool2d, max_pool2d};
pub use crate::softmax::{log_softmax, softmax};
pub use crate::statistics::unfused_batch_norms;
pub use crate::sum::sum_in_order;
pub use crate::switch::is_enabled;
pub use crate::transformer::{
    AttentionMask, MultiHeadAttentionExt, PositionWiseFeedForwardExt, TransformerEncoderExt,
    TransformerEncoderLayerExt,
};
pub use crate::vector::{add_each, scale_each};
