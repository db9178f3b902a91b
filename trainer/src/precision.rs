//! Training in half precision with weights in single precision.
//!
//! Each step and each validation use a copy of the model rounded to bf16, with inputs in bf16.
//! Gradients of the copy serve as gradients of the weights, so optimizers compute in single
//! precision. bf16 has the exponent range of f32: losses need no scaling. See P. Micikevicius et
//! al., "Mixed precision training", 2018, and D. Kalamkar et al., "A study of BFLOAT16 for deep
//! learning training", 2019.
//!
//! Setting burn's default type of a device would save programs the cast of inputs that they create
//! themselves. But optimizer states would then be rounded when a checkpoint is loaded.

use std::borrow::Cow;

use burn::module::{Module, ModuleMapper, Param};
use burn::tensor::{DType, Tensor};
use stoker_api::experiment::MixedPrecision;

/// Data type that models compute in.
pub(crate) fn dtype(precision: MixedPrecision) -> DType {
    match precision {
        MixedPrecision::None => DType::F32,
        MixedPrecision::Bf16 => DType::BF16,
    }
}

/// Returns the model to compute with; its gradients apply to `model`. Running statistics are shared
/// between both, and in half precision from then on.
pub(crate) fn cast_for_compute<M: Module>(model: &M, precision: MixedPrecision) -> Cow<'_, M> {
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

/// Returns the model with its running statistics, which steps have rounded, in single precision.
pub(crate) fn restore_statistics<M: Module>(model: M, precision: MixedPrecision) -> M {
    struct Raise;
    impl ModuleMapper for Raise {
        fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
            if !matches!(param.val().dtype(), DType::F16 | DType::BF16) {
                return param;
            }
            let (id, tensor, mapper) = param.consume();
            Param::from_mapped_value(id, single(tensor).detach(), mapper)
        }
    }
    match precision {
        MixedPrecision::None => model,
        MixedPrecision::Bf16 => {
            // Updates the running statistics in place.
            let _ = model.valid();
            model.map(&mut Raise)
        }
    }
}

/// Casts half precision to single: sums over many elements do not fit half precision.
pub(crate) fn single<const D: usize>(tensor: Tensor<D>) -> Tensor<D> {
    match tensor.dtype() {
        DType::F16 | DType::BF16 => tensor.cast(DType::F32),
        _ => tensor,
    }
}

#[cfg(test)]
mod tests {
    use burn::nn::{BatchNorm, BatchNormConfig};
    use burn::tensor::Device;

    use super::*;

    #[test]
    fn half_precision_statistics_work_in_single_precision() {
        let device = Device::flex().autodiff();
        let norm: BatchNorm = BatchNormConfig::new(2).init(&device);
        let x = || Tensor::<3>::ones([3, 2, 4], &device) * 3.0;
        for _ in 0..2 {
            let half = cast_for_compute(&norm, MixedPrecision::Bf16);
            let y = half.forward(x().cast(DType::BF16));
            assert_eq!(y.dtype(), DType::BF16);
        }
        let norm = restore_statistics(norm, MixedPrecision::Bf16);
        assert_eq!(norm.running_mean.value().dtype(), DType::F32);
        let mean: Vec<f32> = norm.running_mean.value().into_data().try_to_vec().unwrap();
        assert!((mean[0] - 0.57).abs() < 0.01, "{mean:?}");
        assert_eq!(norm.valid().forward(x().inner()).dtype(), DType::F32);
    }
}
