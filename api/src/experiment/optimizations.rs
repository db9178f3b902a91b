//! Settings of gradient accumulation, gradient compression and precision.

use serde::{Deserialize, Serialize};

/// Settings of gradient accumulation, gradient compression and precision.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "crd", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase", default)]
pub struct Optimizations {
    /// Number of batches over which gradients are accumulated before each optimizer step; at least
    /// 1. Default: 1.
    #[cfg_attr(feature = "crd", schemars(range(min = 1)))]
    pub aggregation_frequency: u32,
    /// Whether a step uses the mean of the accumulated gradients. If false, it uses their sum, as
    /// if each batch had made a separate step from the same weights. Default: true.
    pub average_aggregated_gradients: bool,
    /// Number format of gradients that are sent between ranks. Default: `none`.
    pub gradient_compression: GradientCompression,
    /// Precision of model computations. Weights always stay in single precision. Default: `none`.
    pub mixed_precision: MixedPrecision,
}

impl Default for Optimizations {
    fn default() -> Self {
        Self {
            aggregation_frequency: 1,
            average_aggregated_gradients: true,
            gradient_compression: GradientCompression::None,
            mixed_precision: MixedPrecision::None,
        }
    }
}

/// Precision of model computations.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "crd", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub enum MixedPrecision {
    /// The precision in which the program creates tensors.
    #[default]
    None,
    /// bf16. Weights, gradients and optimizer state stay in single precision.
    Bf16,
}

/// Number format of gradients that are sent between ranks. Partial sums are rounded too. With one
/// rank, nothing is rounded.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "crd", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub enum GradientCompression {
    /// Single precision, unchanged.
    #[default]
    None,
    /// Half precision: half the bytes, 11 bits of precision, values up to 65,504.
    F16,
    /// bf16: half the bytes, 8 bits of precision, the same range as single precision.
    Bf16,
}
