//! Custom operators on burn's Flex backend, with and without autodiff.

use std::fmt;
use std::sync::Arc;

use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::checkpoint::strategy::NoCheckpointing;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, NodeGuard, Ops, OpsKind};
use burn::backend::flex::FlexTensor;
use burn::backend::{Autodiff, DispatchAutodiffContext, Flex};
use burn::tensor::{Bool, DType, Int, Tensor};

use crate::array::Array;
use crate::switch::is_enabled;

/// Backward pass of an operator, with the values that it needs from the forward pass.
pub(crate) trait Gradient: Send + Sync {
    /// Returns the gradients of the inputs, in the order of the operands, given the gradient of
    /// the output. `is_wanted` is `false` for inputs whose gradient is not used; it may be `None`.
    fn backward(&self, output: FlexTensor, is_wanted: &[bool]) -> Vec<Option<FlexTensor>>;
}

/// Backward pass of an operator that reads and writes contiguous values.
pub(crate) trait ArrayGradient: Send + Sync {
    /// See [`Gradient::backward`].
    fn gradients(&self, output: &Array, is_wanted: &[bool]) -> Vec<Option<Array>>;
}

impl<G: ArrayGradient> Gradient for G {
    fn backward(&self, output: FlexTensor, is_wanted: &[bool]) -> Vec<Option<FlexTensor>> {
        let gradients = self.gradients(&Array::new(output), is_wanted);
        gradients.into_iter().map(|gradient| gradient.map(FlexTensor::from)).collect()
    }
}

/// Float input of an operator.
#[derive(Debug)]
pub(crate) struct Operand {
    value: FlexTensor,
    /// Node of the autodiff graph. `None` without autodiff.
    guard: Option<NodeGuard>,
    is_tracked: bool,
}

impl Operand {
    /// Returns `None` if the operators of this crate do not support the tensor.
    pub(crate) fn new<const D: usize>(tensor: &Tensor<D>) -> Option<Self> {
        if !is_enabled() || tensor.dtype() != DType::F32 {
            return None;
        }
        if tensor.clone().into_dispatch().autodiff == DispatchAutodiffContext::Disabled {
            let value = tensor.clone().try_into_primitive::<Flex>().ok()?;
            return Some(Self { value, guard: None, is_tracked: false });
        }
        let tracked = tensor.clone().try_into_primitive::<Autodiff<Flex>>().ok()?;
        let is_tracked = is_tracked(tracked.node());
        let (value, guard) = tracked.into_parts();
        Some(Self { value, guard: Some(guard), is_tracked })
    }

    /// Returns the values in row-major order. Copies them unless they are contiguous.
    pub(crate) fn array(&self) -> Array {
        Array::new(self.value.clone())
    }

    /// Returns the values with their strides.
    pub(crate) fn tensor(&self) -> FlexTensor {
        self.value.clone()
    }

    /// Returns `true` if the backward pass computes a gradient of this input.
    pub(crate) fn is_tracked(&self) -> bool {
        self.is_tracked
    }
}

/// Returns `true` if a backward pass reaches the node.
fn is_tracked(guard: NodeGuard) -> bool {
    let operation = Fused::<1>.prepare::<NoCheckpointing>([guard]).compute_bound().stateful();
    matches!(operation, OpsKind::Tracked(_))
}

/// Returns `true` if either all operands or none are on the autodiff backend.
pub(crate) fn share_tape(operands: &[&Operand]) -> bool {
    operands.windows(2).all(|pair| pair[0].guard.is_some() == pair[1].guard.is_some())
}

/// Returns the tensor of an operator, and records its backward pass.
///
/// # Panics
///
/// Only some of the operands are on the autodiff backend. See [`share_tape`].
pub(crate) fn record<const N: usize, const D: usize>(
    operands: [Operand; N],
    output: impl Into<FlexTensor>,
    gradient: impl FnOnce() -> Arc<dyn Gradient>,
) -> Tensor<D> {
    let output = output.into();
    if operands.iter().all(|operand| operand.guard.is_none()) {
        return Tensor::from_primitive::<Flex>(output);
    }
    let guards = operands.map(|operand| operand.guard.expect("operands share a tape"));
    let operation = Fused::<N>.prepare::<NoCheckpointing>(guards).compute_bound().stateful();
    Tensor::from_primitive::<Autodiff<Flex>>(match operation {
        OpsKind::Tracked(operation) => operation.finish(State(gradient()), output),
        OpsKind::UnTracked(operation) => operation.finish(output),
    })
}

/// Returns the contiguous values of an integer tensor on Flex.
pub(crate) fn integers<const D: usize>(tensor: &Tensor<D, Int>) -> Option<Vec<i64>> {
    let plain = tensor.clone().try_into_primitive::<Flex>();
    let value = plain.or_else(|_| tensor.clone().try_into_primitive::<Autodiff<Flex>>()).ok()?;
    let value = value.to_contiguous();
    if value.layout().num_elements() == 0 {
        return Some(vec![]);
    }
    match value.dtype() {
        DType::I64 => value.as_slice::<i64>().map(<[i64]>::to_vec),
        DType::I32 => {
            value.as_slice::<i32>().map(|values| values.iter().copied().map(i64::from).collect())
        }
        _ => None,
    }
}

/// Returns a boolean tensor on Flex, which stores `true` as a byte other than 0.
pub(crate) fn booleans(tensor: &Tensor<4, Bool>) -> Option<FlexTensor> {
    let plain = tensor.clone().try_into_primitive::<Flex>();
    plain.or_else(|_| tensor.clone().try_into_primitive::<Autodiff<Flex>>()).ok()
}

/// Backward step of any operator with `N` operands.
#[derive(Debug)]
struct Fused<const N: usize>;

#[derive(Clone)]
struct State(Arc<dyn Gradient>);

impl fmt::Debug for State {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("State").finish_non_exhaustive()
    }
}

impl<const N: usize> Backward<Flex, N> for Fused<N> {
    type State = State;

    fn backward(self, ops: Ops<State, N>, grads: &mut Gradients, _: &mut Checkpointer) {
        let output = grads.consume::<Flex>(&ops.node);
        let is_wanted = ops.parents.each_ref().map(Option::is_some);
        let gradients = ops.state.0.backward(output, &is_wanted);
        for (parent, gradient) in ops.parents.into_iter().zip(gradients) {
            if let (Some(parent), Some(gradient)) = (parent, gradient) {
                grads.register::<Flex>(parent.id, gradient);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use burn::tensor::TensorData;

    use crate::testing::{Case, device, run};
    use crate::{Activation, conv2d, linear};

    use super::*;

    fn linear_of(x: &Tensor<1>, weight: &Tensor<1>) -> Tensor<1> {
        let (x, weight) = (x.clone().reshape([3, 4]), weight.clone().reshape([4, 2]));
        linear(x, weight, None, Activation::Relu).reshape([6])
    }

    fn conv_of(x: &Tensor<1>, weight: &Tensor<1>) -> Tensor<1> {
        let (x, weight) = (x.clone().reshape([1, 1, 4, 4]), weight.clone().reshape([2, 1, 3, 3]));
        let options = burn::tensor::ops::ConvOptions::new([1, 1], [0, 0], [1, 1], 1);
        conv2d(x, weight, None, options, Activation::Identity).reshape([8])
    }

    /// The first layer of a model has an input without gradient.
    #[test]
    fn inputs_without_gradient_change_no_other_gradient() {
        type Layer = fn(&Tensor<1>, &Tensor<1>) -> Tensor<1>;
        for (sizes, layer) in [([12, 8], linear_of as Layer), ([16, 18], conv_of)] {
            let case = Case::new(&sizes);
            let expected = run(&case, &|inputs: &[Tensor<1>]| layer(&inputs[0], &inputs[1]));
            for constant in 0..2 {
                let outcome = run(&case, &|inputs: &[Tensor<1>]| {
                    let mut inputs = inputs.to_vec();
                    // `run` reads a gradient of each input: here 0.
                    let kept = inputs[constant].clone().sum() * 0.0;
                    inputs[constant] = inputs[constant].clone().detach();
                    layer(&inputs[0], &inputs[1]) + kept
                });
                assert_eq!(outcome.output, expected.output);
                assert_eq!(outcome.gradients[1 - constant], expected.gradients[1 - constant]);
                assert!(outcome.gradients[constant].iter().all(|value| *value == 0.0));
            }
        }
    }

    #[test]
    fn gradients_of_repeated_inputs_are_added() {
        let case = Case::new(&[12, 8]);
        let once = run(&case, &|inputs: &[Tensor<1>]| linear_of(&inputs[0], &inputs[1]));
        let twice = run(&case, &|inputs: &[Tensor<1>]| {
            linear_of(&inputs[0], &inputs[1]) + linear_of(&inputs[0], &inputs[1])
        });
        for (once, twice) in once.gradients.iter().zip(&twice.gradients) {
            assert_eq!(once.iter().map(|value| 2.0 * value).collect::<Vec<_>>(), *twice);
        }
    }

    #[test]
    fn checkpointing_and_other_types_are_left_to_burn() {
        let is_supported = |device: &burn::tensor::Device| {
            let data = TensorData::new(vec![1.0_f32], [1]);
            Operand::new(&Tensor::<1>::from_data(data, device)).is_some()
        };
        assert!(is_supported(&device()));
        assert!(is_supported(&device().autodiff()));
        assert!(!is_supported(&device().autodiff().gradient_checkpointing()));
        let half = Tensor::<1>::ones([1], &device()).cast(DType::F16);
        assert!(Operand::new(&half).is_none());
    }
}
