//! Training in half precision with weights in single precision.
//!
//! Each step and each validation take a copy of the model rounded to bf16, and inputs in bf16; gradients of the copy are
//! gradients of the weights, so that optimizers see single precision alone. bf16 has the exponents of f32: losses need no
//! scaling. See P. Micikevicius et al., "Mixed precision training", 2018, and D. Kalamkar et al., "A study of BFLOAT16 for
//! deep learning training", 2019.
//!
//! burn's default type of a device would spare programs the cast of inputs that they make themselves, but optimizers'
//! states are then rounded where a checkpoint is loaded.

use std::borrow::Cow;

use burn::module::{Module, ModuleMapper, Param};
use burn::tensor::{DType, Tensor};
use stoker_api::experiment::MixedPrecision;

/// What models compute in.
pub(crate) fn dtype(precision: MixedPrecision) -> DType {
    match precision {
        MixedPrecision::None => DType::F32,
        MixedPrecision::Bf16 => DType::BF16,
    }
}

/// The model to compute with: its gradients are those of `model`. Running statistics are shared with it, and in half
/// precision from then on.
pub(crate) fn lowered<M: Module>(model: &M, precision: MixedPrecision) -> Cow<'_, M> {
    struct Lower(DType);
    impl ModuleMapper for Lower {
        fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
            let (id, tensor, mapper) = param.consume();
            Param::from_mapped_value(id, tensor.cast(self.0), mapper)
        }
    }
    match precision {
        MixedPrecision::None => Cow::Borrowed(model),
        MixedPrecision::Bf16 => Cow::Owned(model.clone().map(&mut Lower(dtype(precision)))),
    }
}

/// In single precision, what was in half: sums over many have no room in it.
pub(crate) fn single<const D: usize>(tensor: Tensor<D>) -> Tensor<D> {
    match tensor.dtype() {
        DType::F16 | DType::BF16 => tensor.cast(DType::F32),
        _ => tensor,
    }
}
