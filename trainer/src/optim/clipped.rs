//! Clipping of gradients by norm, with sums in a fixed order.

use burn::optim::{LearningRate, Optimizer};
use burn::tensor::{Device, FloatDType, Tensor};
use stoker_kernels::sum_in_order;

use crate::precision::to_single;

/// Optimizer that clips the gradient of each parameter by its norm before the step.
#[derive(Clone)]
pub(super) struct ClippedByNorm<O> {
    pub(super) optimizer: O,
    pub(super) norm_max: f32,
}

impl<O: Optimizer> Optimizer for ClippedByNorm<O> {
    type State<const D: usize> = O::State<D>;

    fn step<const D: usize>(
        &self,
        rate: LearningRate,
        tensor: Tensor<D>,
        gradient: Tensor<D>,
        state: Option<O::State<D>>,
    ) -> (Tensor<D>, Option<O::State<D>>) {
        self.optimizer.step(rate, tensor, clip_by_norm(gradient, self.norm_max), state)
    }

    fn to_device<const D: usize>(state: O::State<D>, device: &Device) -> O::State<D> {
        O::to_device(state, device)
    }
}

/// Clips a gradient with the formula of burn's `GradientClipping::Norm`. burn sums large tensors in
/// an order that depends on the threads.
fn clip_by_norm<const D: usize>(gradient: Tensor<D>, norm_max: f32) -> Tensor<D> {
    let dtype = gradient.dtype();
    let gradient = to_single(gradient);
    let norm = sum_in_order(gradient.clone().square()).sqrt();
    let limits = gradient.dtype().finfo().unwrap_or(FloatDType::F32.finfo());
    let factor = (norm_max / norm.add_scalar(limits.min_positive)).clamp_max(1.0);
    gradient.mul(factor.unsqueeze()).cast(dtype)
}

#[cfg(test)]
mod tests {
    use burn::grad_clipping::GradientClipping;
    use burn::tensor::TensorData;

    use super::*;
    use crate::device::host;

    /// Squares of 2^24 and of 1: near 2^24, single precision has no odd numbers, so the sum depends
    /// on the order of the additions.
    fn gradient(len: usize) -> Tensor<1> {
        let value = |i: usize| if i == 0 { 4096.0_f32 } else { 1.0 };
        Tensor::from_data(TensorData::new((0..len).map(value).collect(), [len]), &host())
    }

    fn bits(tensor: Tensor<1>) -> Vec<u32> {
        let values = tensor.into_data().try_to_vec_as::<f32>().unwrap();
        values.into_iter().map(f32::to_bits).collect()
    }

    #[test]
    fn clipped_gradients_equal_those_of_burn() {
        for norm_max in [0.5, 1e5] {
            let expected = GradientClipping::Norm(norm_max).clip_gradient(gradient(1000));
            assert!(bits(clip_by_norm(gradient(1000), norm_max)) == bits(expected), "{norm_max}");
        }
    }

    #[test]
    fn large_gradients_are_clipped_in_order() {
        let gradient = gradient((4 << 20) + 7);
        let norm = sum_in_order(gradient.clone().square()).sqrt().into_scalar::<f32>();
        let clipped = clip_by_norm(gradient.clone(), 2.0);
        assert!(bits(clipped) == bits(gradient.mul_scalar(2.0 / norm)));
    }
}
