//! Training in half precision with weights in single precision.
//!
//! Each step and each validation use a copy of the model rounded to bf16, with inputs in bf16.
//! Buffers, such as running statistics, stay in single precision.
//! Gradients of the copy serve as gradients of the weights, so optimizers compute in single
//! precision. bf16 has the exponent range of f32: losses need no scaling. See P. Micikevicius et
//! al., "Mixed precision training", 2018, and D. Kalamkar et al., "A study of BFLOAT16 for deep
//! learning training", 2019.
//!
//! Setting burn's default type of a device would save programs the cast of inputs that they create
//! themselves. But optimizer states would then be rounded when a checkpoint is loaded.

use std::borrow::Cow;
use std::sync::Once;

use burn::module::{Module, ModuleMapper, Param};
use burn::tensor::{DType, Tensor};
use stoker_api::experiment::MixedPrecision;
use stoker_kernels::unfused_batch_norms;

use crate::context::Context;
use crate::record::{Renumber, is_buffer};

/// Data type that models compute in.
pub(crate) fn dtype(precision: MixedPrecision) -> DType {
    match precision {
        MixedPrecision::None => DType::F32,
        MixedPrecision::Bf16 => DType::BF16,
    }
}

/// Rounds parameters. Buffers stay in single precision, because running statistics in bf16 would
/// stop following the data: their updates are smaller than half a rounding unit.
struct Lower(DType);

impl ModuleMapper for Lower {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        if is_buffer(param.id) {
            return param;
        }
        let (id, tensor, mapper) = param.consume();
        Param::from_mapped_value(id, tensor.cast(self.0), mapper)
    }
}

/// Returns the model to compute with; its gradients apply to `model`, which must be
/// [initialized](crate::record::initialize). Both share buffers.
pub(crate) fn to_compute_precision<M: Module>(model: &M, precision: MixedPrecision) -> Cow<'_, M> {
    match precision {
        MixedPrecision::None => Cow::Borrowed(model),
        MixedPrecision::Bf16 => Cow::Owned(model.clone().map(&mut Lower(dtype(precision)))),
    }
}

/// Returns the model to evaluate, of any model without autodiff.
pub(crate) fn to_evaluation_precision<M: Module>(model: M, precision: MixedPrecision) -> M {
    match precision {
        MixedPrecision::None => model,
        // `is_buffer` requires small IDs of parameters.
        MixedPrecision::Bf16 => {
            model.map(&mut Renumber::default()).map(&mut Lower(dtype(precision)))
        }
    }
}

/// Applies pending updates of buffers in half precision, and returns the model with all buffers in
/// single precision. A module of the program may have stored others.
pub(crate) fn to_single_statistics<M: Module>(model: M, precision: MixedPrecision) -> M {
    struct Raise;
    impl ModuleMapper for Raise {
        fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
            if !matches!(param.val().dtype(), DType::F16 | DType::BF16) {
                return param;
            }
            let (id, tensor, mapper) = param.consume();
            Param::from_mapped_value(id, to_single(tensor).detach(), mapper)
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

/// Prints a warning, once per process after a batch in half precision on rank 0, that names the
/// layers with running statistics that did not use the fused forward pass. On GPUs, the results of
/// burn's own are wrong without an error.
pub(crate) fn warn_of_unfused_statistics<M: Module>(model: &M, context: &Context) {
    static ONCE: Once = Once::new();
    let is_half = context.config.mixed_precision != MixedPrecision::None;
    if !is_half || ONCE.is_completed() || context.distributed().rank() > 0 {
        return;
    }
    ONCE.call_once(|| {
        let layers = unfused_batch_norms(model);
        if !layers.is_empty() {
            eprintln!(
                "stoker: warning: optimizations.mixedPrecision is bf16, and the first batch did \
                 not use `BatchNormExt::forward_fused` of the layers {}; if it used burn's \
                 `BatchNorm::forward`, its results are wrong",
                layers.join(", ")
            );
        }
    });
}

/// Casts half precision to single: sums over many elements do not fit half precision.
pub(crate) fn to_single<const D: usize>(tensor: Tensor<D>) -> Tensor<D> {
    match tensor.dtype() {
        DType::F16 | DType::BF16 => tensor.cast(DType::F32),
        _ => tensor,
    }
}

#[cfg(test)]
mod tests {
    use burn::nn::{BatchNorm, BatchNormConfig};
    use burn::tensor::{Device, Distribution};
    use stoker_kernels::BatchNormExt;

    use super::*;
    use crate::record;
    use crate::train::tests::lock_random_stream;

    fn values(tensor: Tensor<1>) -> Vec<f32> {
        tensor.into_data().try_to_vec().unwrap()
    }

    /// Momentum 0.01 corresponds to the default of Keras. In bf16, the mean would stop near 2.
    #[test]
    fn half_precision_training_keeps_statistics_in_single() {
        let _stream = lock_random_stream();
        let device = Device::flex().autodiff();
        let config = BatchNormConfig::new(2).with_momentum(0.01);
        let mut norm: BatchNorm = record::initialize(config.init(&device));
        let x = Tensor::<3>::random([3, 2, 4], Distribution::Uniform(3.0, 3.5), &device);
        let x = x.cast(DType::BF16);
        for _ in 0..2000 {
            let half = to_compute_precision(&norm, MixedPrecision::Bf16);
            assert_eq!(half.forward_fused(x.clone()).dtype(), DType::BF16);
        }
        norm = to_single_statistics(norm, MixedPrecision::Bf16);
        assert_eq!(norm.running_mean.value().dtype(), DType::F32);
        let single = x.cast(DType::F32).swap_dims(0, 1).reshape([2, 12]);
        let expected = values(single.mean_dim(1).reshape([2]));
        for (mean, expected) in values(norm.running_mean.value()).into_iter().zip(expected) {
            assert!((mean - expected).abs() < 1e-3, "{mean}, not {expected}");
        }
    }

    #[test]
    fn evaluation_uses_statistics_in_single_precision() {
        let device = Device::flex();
        // The parameters of this model have large IDs, as buffers have.
        let norm: BatchNorm = BatchNormConfig::new(1).init(&device);
        norm.running_mean.update(Tensor::from_floats([100.3], &device));
        let half = to_evaluation_precision(norm.valid(), MixedPrecision::Bf16);
        let types = [half.gamma.val().dtype(), half.beta.val().dtype()];
        assert_eq!(types, [DType::BF16; 2]);
        assert_eq!(values(half.running_mean.value()), [100.3]);
        let y = half.forward_fused(Tensor::<2>::full([1, 1], 100.0, &device).cast(DType::BF16));
        assert_eq!(y.dtype(), DType::BF16);
        let y: f32 = y.cast(DType::F32).into_scalar();
        assert!((y + 0.3).abs() < 2e-3, "{y}");
    }
}
