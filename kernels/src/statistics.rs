//! Running statistics of models that compute in half precision.

use std::collections::BTreeSet;
use std::sync::{Mutex, PoisonError};

use burn::module::{Module, ModuleVisitor, Param, RunningState};
use burn::tensor::{DType, Tensor};

/// IDs of the running means that `BatchNormExt` has used in half precision.
static USED: Mutex<BTreeSet<u64>> = Mutex::new(BTreeSet::new());

/// Returns whether the type is a floating-point type of 16 bits.
pub(crate) fn is_half(dtype: DType) -> bool {
    matches!(dtype, DType::F16 | DType::BF16)
}

/// Casts half precision to single precision.
pub(crate) fn to_single<const D: usize>(tensor: Tensor<D>) -> Tensor<D> {
    if is_half(tensor.dtype()) { tensor.cast(DType::F32) } else { tensor }
}

/// Records that `BatchNormExt` uses this running mean in half precision.
pub(crate) fn record_use(mean: &RunningState<Tensor<1>>) {
    struct Id;
    impl ModuleVisitor for Id {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            USED.lock().unwrap_or_else(PoisonError::into_inner).insert(param.id.val());
        }
    }
    mean.visit(&mut Id);
}

/// Returns the paths of the `BatchNorm` layers that no method of `BatchNormExt` has used in half
/// precision in this process.
///
/// burn's `BatchNorm::forward` does not support statistics in single precision with inputs in half
/// precision. On some devices, its results are then wrong without an error.
pub fn unfused_batch_norms<M: Module>(model: &M) -> Vec<String> {
    #[derive(Default)]
    struct Walk {
        path: Vec<String>,
        container: Vec<String>,
        unused: Vec<String>,
    }
    impl ModuleVisitor for Walk {
        fn enter_module(&mut self, name: &str, container_type: &str) {
            self.path.push(name.into());
            self.container.push(container_type.into());
        }

        fn exit_module(&mut self, _name: &str, _container_type: &str) {
            self.path.pop();
            self.container.pop();
        }

        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            let is_norm = self.container.last().is_some_and(|name| name == "Struct:BatchNorm");
            let Some((name, layer)) = self.path.split_last().filter(|_| is_norm) else { return };
            let used = USED.lock().unwrap_or_else(PoisonError::into_inner);
            if name == "running_mean" && !used.contains(&param.id.val()) {
                self.unused.push(layer.join("."));
            }
        }
    }
    let mut walk = Walk::default();
    model.visit(&mut walk);
    walk.unused
}

#[cfg(test)]
mod tests {
    use burn::nn::BatchNormConfig;

    use super::*;
    use crate::BatchNormExt;
    use crate::testing::device;

    #[test]
    fn layers_without_fused_forward_are_found() {
        let layer = || BatchNormConfig::new(2).init(&device());
        let model = vec![layer(), layer()];
        let half = |value: f64| Param::from_tensor(Tensor::<1>::full([2], value, &device()));
        let mut lowered = model[0].clone();
        (lowered.gamma, lowered.beta) = (half(1.0), half(0.0));
        let y = lowered.forward_fused(Tensor::<2>::ones([3, 2], &device()).cast(DType::BF16));
        assert_eq!(y.dtype(), DType::BF16);
        assert_eq!(unfused_batch_norms(&model), ["1"]);
    }
}
