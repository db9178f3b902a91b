//! Custom operators on burn's backend for GPUs, with and without autodiff.

use std::fmt;
use std::sync::Arc;

use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::checkpoint::strategy::NoCheckpointing;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, NodeGuard, Ops, OpsKind};
use burn::backend::tensor::FloatTensor;
use burn::backend::{Autodiff, Cube, DispatchAutodiffContext};
use burn::tensor::{Bool, DType, Tensor};

use crate::switch::{Switch, switch};

/// Tensor without autodiff, of any number of dimensions.
pub(super) type Plain = FloatTensor<Cube>;

/// Returns a tensor without autodiff.
pub(super) fn tensor<const D: usize>(plain: Plain) -> Tensor<D> {
    Tensor::from_primitive::<Cube>(plain)
}

/// Returns the primitive of a tensor without autodiff.
pub(super) fn plain<const D: usize>(tensor: Tensor<D>) -> Plain {
    tensor.try_into_primitive::<Cube>().expect("a tensor of a GPU without autodiff")
}

/// Returns whether the [kernels](super::rows) support a tensor without autodiff: it is on an NVIDIA
/// GPU, and 32 bits can index it.
pub(super) fn has_kernels<const D: usize>(tensor: &Tensor<D>) -> bool {
    u32::try_from(tensor.shape().num_elements()).is_ok() && is_on_nvidia(tensor)
}

/// Returns whether a tensor without autodiff is on an NVIDIA GPU.
#[cfg(feature = "cuda")]
pub(super) fn is_on_nvidia<const D: usize>(tensor: &Tensor<D>) -> bool {
    let plain = tensor.clone().try_into_primitive::<Cube>();
    plain.is_ok_and(|plain| matches!(plain.client.device(), burn_cubecl::CubeDevice::Cuda(_)))
}

/// No tensor is on an NVIDIA GPU.
#[cfg(not(feature = "cuda"))]
pub(super) fn is_on_nvidia<const D: usize>(_: &Tensor<D>) -> bool {
    false
}

/// Backward pass of an operator, with the values that it needs from the forward pass.
pub(super) trait Gradient: Send + Sync {
    /// Returns the gradients of the inputs, in the order of the operands, given the gradient of
    /// the output. `is_wanted` is `false` for inputs whose gradient is not used; it may be `None`.
    fn backward(&self, output: Plain, is_wanted: &[bool]) -> Vec<Option<Plain>>;
}

/// Float input of an operator.
#[derive(Debug)]
pub(super) struct Operand {
    value: Plain,
    /// Node of the autodiff graph. `None` without autodiff.
    guard: Option<NodeGuard>,
}

impl Operand {
    /// Returns `None` if the tensor is not on a GPU, is quantized or has double precision, or if
    /// kernels are off.
    pub(super) fn new<const D: usize>(tensor: &Tensor<D>) -> Option<Self> {
        let has_type = matches!(tensor.dtype(), DType::F32 | DType::F16 | DType::BF16);
        if switch() == Switch::Off || !has_type { None } else { Self::of_any_type(tensor) }
    }

    /// Returns `None` if the tensor is not on a GPU.
    pub(super) fn of_any_type<const D: usize>(tensor: &Tensor<D>) -> Option<Self> {
        if tensor.clone().into_dispatch().autodiff == DispatchAutodiffContext::Disabled {
            let value = tensor.clone().try_into_primitive::<Cube>().ok()?;
            return Some(Self { value, guard: None });
        }
        let tracked = tensor.clone().try_into_primitive::<Autodiff<Cube>>().ok()?;
        let (value, guard) = tracked.into_parts();
        Some(Self { value, guard: Some(guard) })
    }

    /// Returns the values without autodiff.
    pub(super) fn tensor<const D: usize>(&self) -> Tensor<D> {
        tensor(self.plain())
    }

    /// Returns the primitive of the values without autodiff.
    pub(super) fn plain(&self) -> Plain {
        self.value.clone()
    }

    /// Returns whether the tensor is on the autodiff backend.
    pub(super) fn is_tracked(&self) -> bool {
        self.guard.is_some()
    }
}

/// Returns whether all operands have one type, and either all or none are on the autodiff backend.
pub(super) fn fit_together(operands: &[&Operand]) -> bool {
    operands.windows(2).all(|pair| {
        pair[0].guard.is_some() == pair[1].guard.is_some()
            && pair[0].value.dtype == pair[1].value.dtype
    })
}

/// Returns a boolean tensor of a GPU.
pub(super) fn booleans(tensor: &Tensor<4, Bool>) -> Option<Tensor<4, Bool>> {
    let plain = tensor.clone().try_into_primitive::<Cube>();
    let plain = plain.or_else(|_| tensor.clone().try_into_primitive::<Autodiff<Cube>>());
    plain.ok().map(Tensor::from_primitive::<Cube>)
}

/// Returns the tensor of an operator, and records its backward pass.
///
/// # Panics
///
/// Only some of the operands are on the autodiff backend. See [`fit_together`].
pub(super) fn record<const N: usize, const D: usize>(
    operands: [Operand; N],
    output: Plain,
    gradient: impl FnOnce() -> Arc<dyn Gradient>,
) -> Tensor<D> {
    if operands.iter().all(|operand| operand.guard.is_none()) {
        return tensor(output);
    }
    let guards = operands.map(|operand| operand.guard.expect("operands fit together"));
    let operation = Fused::<N>.prepare::<NoCheckpointing>(guards).compute_bound().stateful();
    Tensor::from_primitive::<Autodiff<Cube>>(match operation {
        OpsKind::Tracked(operation) => operation.finish(State(gradient()), output),
        OpsKind::UnTracked(operation) => operation.finish(output),
    })
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

impl<const N: usize> Backward<Cube, N> for Fused<N> {
    type State = State;

    fn backward(self, ops: Ops<State, N>, grads: &mut Gradients, _: &mut Checkpointer) {
        let output = grads.consume::<Cube>(&ops.node);
        let is_wanted = ops.parents.each_ref().map(Option::is_some);
        let gradients = ops.state.0.backward(output, &is_wanted);
        for (parent, gradient) in ops.parents.into_iter().zip(gradients) {
            if let (Some(parent), Some(gradient)) = (parent, gradient) {
                grads.register::<Cube>(parent.id, gradient);
            }
        }
    }
}
