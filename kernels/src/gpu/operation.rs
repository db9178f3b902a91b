//! Custom operations in burn's queue.

use std::fmt;

use burn::tensor::DType;
use burn_cubecl::CubeBackend;
use burn_cubecl::fusion::FusionCubeRuntime;
use burn_cubecl::tensor::CubeTensor;
use burn_fusion::custom::{
    CustomOpIr, HandleContainer, Operation, OperationIr, StreamId, TensorId, TensorIr,
};
use burn_fusion::{ExecutionError, FusionRuntime};

use super::tape::Plain;

/// Queues an operation on float tensors. `run` gets the inputs and returns the outputs, in order.
///
/// burn reads the shapes and types of the outputs from `outputs`, without running the operation.
pub(super) fn queue<const N: usize>(
    name: &'static str,
    inputs: Vec<Plain>,
    outputs: [(Vec<usize>, DType); N],
    run: impl Fn(Vec<CubeTensor>) -> [CubeTensor; N] + Send + Sync + 'static,
) -> [Plain; N] {
    let client = inputs[0].client.clone();
    let inputs: Vec<TensorIr> = inputs.into_iter().map(Plain::into_ir).collect();
    let outputs = outputs
        .map(|(shape, dtype)| TensorIr::uninit(client.create_empty_handle(), shape.into(), dtype));
    let description = CustomOpIr::new(name, &inputs, &outputs);
    let outputs = outputs.map(|output| output.id);
    let queued = Queued { name, inputs, outputs, run };
    let outputs = client.register(StreamId::current(), OperationIr::Custom(description), queued);
    outputs.try_into().unwrap_or_else(|_| unreachable!("burn returns all outputs"))
}

/// Returns the tensor in row-major order.
pub(super) fn contiguous(x: Plain) -> Plain {
    let output = (x.shape.to_vec(), x.dtype);
    let [output] = queue("contiguous", vec![x], [output], |inputs| {
        let [x] = inputs.try_into().unwrap_or_else(|_| unreachable!("there is one input"));
        [burn_cubecl::kernel::into_contiguous(x)]
    });
    output
}

struct Queued<F, const N: usize> {
    name: &'static str,
    inputs: Vec<TensorIr>,
    outputs: [TensorId; N],
    run: F,
}

impl<F, const N: usize> fmt::Debug for Queued<F, N> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Queued").field("name", &self.name).finish_non_exhaustive()
    }
}

type Handles = HandleContainer<<FusionCubeRuntime as FusionRuntime>::FusionHandle>;

impl<F, const N: usize> Operation<FusionCubeRuntime> for Queued<F, N>
where
    F: Fn(Vec<CubeTensor>) -> [CubeTensor; N] + Send + Sync,
{
    fn execute(&self, handles: &mut Handles) -> Result<(), ExecutionError> {
        let input = |input: &TensorIr| handles.get_float_tensor::<CubeBackend>(input);
        let inputs = self.inputs.iter().map(input).collect();
        for (id, output) in self.outputs.iter().zip((self.run)(inputs)) {
            handles.register_float_tensor::<CubeBackend>(id, output);
        }
        Ok(())
    }
}
