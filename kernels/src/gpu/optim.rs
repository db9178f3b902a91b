//! Optimizer steps by one kernel for each parameter. Composed of burn's operators, a step of AdamW
//! would queue about 15 operations for each parameter, and drop as many intermediate results.

use burn::backend::Cube;
use burn::tensor::{DType, Tensor};
use burn_cubecl::cubecl::{CubeCount, CubeDim, calculate_cube_count_elemwise};
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::tensor::CubeTensor;

use self::kernels::{adam_kernel, sgd_kernel};
use super::operation::queue;
use super::tape::{plain, tensor};
use crate::switch::{Switch, switch};

mod kernels;

#[cfg(test)]
#[cfg(any(feature = "cuda", feature = "cubecl-cpu"))]
mod tests;

/// Returns whether the kernels support these tensors: they are in single precision on a GPU,
/// without autodiff, have one shape, and 32 bits can index them.
pub(crate) fn are_supported<const D: usize>(tensors: &[&Tensor<D>]) -> bool {
    let num = tensors[0].shape().num_elements();
    let is_supported = |tensor: &&Tensor<D>| {
        tensor.dtype() == DType::F32
            && tensor.dims() == tensors[0].dims()
            && (*tensor).clone().try_into_primitive::<Cube>().is_ok()
    };
    switch() != Switch::Off
        && num > 0
        && u32::try_from(num).is_ok()
        && tensors.iter().all(is_supported)
}

/// Values of a step of SGD with momentum.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SgdStep {
    pub(crate) rate: f32,
    /// Weight decay.
    pub(crate) penalty: Option<f32>,
    pub(crate) momentum: f32,
    /// Factor of the gradient in the velocity.
    pub(crate) share: f32,
    pub(crate) is_nesterov: bool,
}

/// Returns the weights and the velocity after a step, by the formula of burn's SGD. Inputs that no
/// other tensor shares are changed in place. All tensors have one shape.
///
/// # Panics
///
/// The tensors are not [supported](are_supported).
pub(crate) fn sgd<const D: usize>(
    step: SgdStep,
    weight: Tensor<D>,
    gradient: Tensor<D>,
    velocity: Tensor<D>,
) -> [Tensor<D>; 2] {
    let output = (weight.dims().to_vec(), DType::F32);
    let inputs = vec![plain(weight), plain(gradient), plain(velocity)];
    queue("sgd", inputs, [output.clone(), output], move |inputs| {
        let [weight, gradient, velocity] =
            inputs.try_into().unwrap_or_else(|_| unreachable!("burn passes all inputs"));
        let (weight, velocity) = (unshared(weight), unshared(velocity));
        let client = weight.client.clone();
        let (count, dim, num) = grid(&weight);
        sgd_kernel::launch(
            &client,
            count,
            dim,
            weight.clone().into_tensor_arg(),
            into_contiguous(gradient).into_tensor_arg(),
            velocity.clone().into_tensor_arg(),
            num,
            step.rate,
            step.penalty.unwrap_or(0.0),
            step.momentum,
            step.share,
            step.penalty.is_some(),
            step.is_nesterov,
        );
        [weight, velocity]
    })
    .map(tensor)
}

/// Weight decay of [`AdamStep`].
#[derive(Clone, Copy, Debug)]
pub(crate) enum Decay {
    /// Factor of the weight that is added to the gradient.
    OfGradient(f32),
    /// Factor of the weight.
    Factor(f32),
    /// Factor that is subtracted from weights with the sign of the first moment.
    Cautious(f32),
}

/// Values of a step of Adam or AdamW.
#[derive(Clone, Copy, Debug)]
pub(crate) struct AdamStep {
    pub(crate) rate: f32,
    pub(crate) betas: [f32; 2],
    /// `1 - beta^t` of both moments.
    pub(crate) divisors: [f32; 2],
    pub(crate) epsilon: f32,
    pub(crate) decay: Option<Decay>,
}

/// Returns the weights and both moments after a step other than the first, by the formulas of
/// burn's Adam and AdamW. Inputs that no other tensor shares are changed in place. All tensors have
/// one shape.
///
/// # Panics
///
/// The tensors are not [supported](are_supported).
pub(crate) fn adam<const D: usize>(
    step: AdamStep,
    weight: Tensor<D>,
    gradient: Tensor<D>,
    moments: [Tensor<D>; 2],
) -> [Tensor<D>; 3] {
    let output = (weight.dims().to_vec(), DType::F32);
    let [first, second] = moments.map(plain);
    let inputs = vec![plain(weight), plain(gradient), first, second];
    queue("adam", inputs, [output.clone(), output.clone(), output], move |inputs| {
        let [weight, gradient, first, second] =
            inputs.try_into().unwrap_or_else(|_| unreachable!("burn passes all inputs"));
        let [weight, first, second] = [weight, first, second].map(unshared);
        let client = weight.client.clone();
        let (count, dim, num) = grid(&weight);
        let AdamStep { rate, betas, divisors, epsilon, decay } = step;
        let decay_value = match decay {
            None => 0.0,
            Some(Decay::OfGradient(value) | Decay::Factor(value) | Decay::Cautious(value)) => value,
        };
        adam_kernel::launch(
            &client,
            count,
            dim,
            weight.clone().into_tensor_arg(),
            into_contiguous(gradient).into_tensor_arg(),
            first.clone().into_tensor_arg(),
            second.clone().into_tensor_arg(),
            num,
            rate,
            betas[0],
            betas[1],
            divisors[0],
            divisors[1],
            epsilon,
            decay_value,
            matches!(decay, Some(Decay::OfGradient(_))),
            matches!(decay, Some(Decay::Factor(_))),
            matches!(decay, Some(Decay::Cautious(_))),
        );
        [weight, first, second]
    })
    .map(tensor)
}

/// Returns the tensor in row-major order, in memory that no other tensor uses.
fn unshared(tensor: CubeTensor) -> CubeTensor {
    let tensor = into_contiguous(tensor);
    // burn pads the rows of a copy.
    let tensor = if tensor.can_mut() { tensor } else { into_contiguous(tensor.copy()) };
    assert!(tensor.is_contiguous(), "the kernels index weights and state without strides");
    tensor
}

/// Returns a thread for each element, and the number of elements.
fn grid(tensor: &CubeTensor) -> (CubeCount, CubeDim, u32) {
    let num = tensor.meta.num_elements();
    let dim = CubeDim::new(&tensor.client, num);
    (calculate_cube_count_elemwise(&tensor.client, num, dim), dim, num as u32)
}
