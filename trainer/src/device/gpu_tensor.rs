//! Tensors of burn's backend for GPUs: taken out of its queue of operations and put back, and
//! copied to the host while later operations are queued.

use std::sync::{Mutex, OnceLock, PoisonError};

use burn::backend::Cube;
use burn::tensor::{DType, Device, Tensor, TensorData};
use burn_cubecl::CubeBackend;
use burn_cubecl::cubecl::client::Client as ComputeClient;
use burn_cubecl::cubecl::future::{DynFut, block_on};
use burn_cubecl::cubecl::server::{CopyDescriptor, Handle, ServerError};
use burn_cubecl::fusion::FusionCubeRuntime;
use burn_cubecl::tensor::CubeTensor;
use burn_fusion::custom::{CustomOpIr, HandleContainer, Operation, OperationIr, StreamId};
use burn_fusion::custom::{TensorId, TensorIr};
use burn_fusion::{Client, ExecutionError, FusionRuntime};

use crate::Result;
use crate::error::Infrastructure;

/// Contiguous tensor whose operations are all queued on the GPU.
pub(crate) struct GpuTensor {
    cube: CubeTensor,
    fusion: Client<FusionCubeRuntime>,
}

impl GpuTensor {
    /// Returns whether a tensor belongs to burn's backend for GPUs.
    pub(crate) fn supports(values: &Tensor<1>) -> bool {
        values.clone().try_into_primitive::<Cube>().is_ok()
    }

    /// Takes a tensor out of burn's queue. All operations before are then queued on the GPU.
    ///
    /// # Errors
    ///
    /// Fails if the tensor is on another backend, or not contiguous.
    pub(crate) fn new(values: Tensor<1>) -> Result<Self> {
        let fused = values.try_into_primitive::<Cube>();
        let fused = fused.map_err(|error| format!("not a tensor on a GPU: {error:?}"))?;
        let fusion = fused.client.clone();
        let cube = fusion.resolve_tensor_float::<CubeBackend>(fused);
        match cube.is_contiguous() {
            true => Ok(Self { cube, fusion }),
            false => Err("not a contiguous tensor".into()),
        }
    }

    pub(crate) fn client(&self) -> &ComputeClient {
        &self.cube.client
    }

    pub(crate) fn handle(&self) -> Handle {
        self.cube.handle.clone()
    }

    pub(crate) fn dtype(&self) -> DType {
        self.cube.dtype
    }

    /// Returns whether another value shares the memory.
    pub(crate) fn is_shared(&self) -> bool {
        !self.cube.can_mut()
    }

    /// Gives the tensor back to burn.
    pub(crate) fn into_tensor(self) -> Tensor<1> {
        let Self { cube, fusion } = self;
        let id = fusion.create_empty_handle();
        let output = TensorIr::uninit(id, cube.meta.shape().clone(), cube.dtype);
        let operation = CustomOpIr::new("give_back", &[], &[output]);
        let give_back = GiveBack { id, cube: Mutex::new(Some(cube)) };
        let operation = OperationIr::Custom(operation);
        let mut outputs = fusion.register(StreamId::current(), operation, give_back);
        Tensor::from_primitive::<Cube>(outputs.swap_remove(0))
    }
}

/// Operation without inputs whose output is a given tensor.
#[derive(Debug)]
struct GiveBack {
    id: TensorId,
    /// Taken when the operation runs: another owner would prevent later operations in place.
    cube: Mutex<Option<CubeTensor>>,
}

impl Operation<FusionCubeRuntime> for GiveBack {
    fn execute(
        &self,
        handles: &mut HandleContainer<<FusionCubeRuntime as FusionRuntime>::FusionHandle>,
    ) -> std::result::Result<(), ExecutionError> {
        let cube = self.cube.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(cube) = cube {
            handles.register_float_tensor::<CubeBackend>(&self.id, cube);
        }
        Ok(())
    }
}

/// The GPU of this process, with its client, which copies borrow until they are done.
static CLIENT: OnceLock<(Device, ComputeClient)> = OnceLock::new();

/// Copy of tensors to the host that is queued on the GPU. Work that is queued later does not delay
/// it.
pub(crate) struct QueuedCopy {
    copied: Option<Copied>,
    /// Kept so that burn does not write later results into their memory.
    tensors: Vec<GpuTensor>,
}

type Copied = DynFut<std::result::Result<Vec<burn::tensor::Bytes>, ServerError>>;

impl std::fmt::Debug for QueuedCopy {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("QueuedCopy").field("tensors", &self.tensors.len()).finish_non_exhaustive()
    }
}

impl QueuedCopy {
    /// Queues a copy of tensors with one element each. Returns `None` if a tensor is not on a GPU,
    /// or on another GPU than the first one.
    pub(crate) fn new(tensors: &[Tensor<1>]) -> Option<Self> {
        let first = tensors.first()?;
        if tensors.iter().any(|tensor| tensor.dims() != [1] || tensor.device() != first.device()) {
            return None;
        }
        let device = first.device();
        let tensors = tensors.iter().cloned().map(GpuTensor::new);
        let tensors: Vec<GpuTensor> = tensors.collect::<Result<_>>().ok()?;
        // A process trains on one GPU. Others have no queued copies.
        let of_process = CLIENT.get_or_init(|| (device.clone(), tensors[0].client().clone()));
        let (_, client) = Some(of_process).filter(|(of_process, _)| *of_process == device)?;
        let of = |tensor: &GpuTensor| {
            let size = tensor.dtype().size();
            CopyDescriptor::new(tensor.handle().binding(), [1].into(), [1].into(), size)
        };
        let copied = client.read_tensor_async(tensors.iter().map(of).collect());
        Some(Self { copied: Some(Box::pin(copied)), tensors })
    }

    /// Waits for the copy and returns the values.
    ///
    /// # Errors
    ///
    /// Fails if the GPU failed.
    pub(crate) fn wait(mut self) -> Result<Vec<f64>> {
        let Some(copied) = self.copied.take() else { return Ok(vec![]) };
        let copied = block_on(copied)
            .map_err(|error| Infrastructure(format!("the GPU failed: {error:?}")))?;
        let value = |(bytes, tensor): (_, &GpuTensor)| {
            TensorData::from_bytes(bytes, [1], tensor.dtype()).iter().next()
        };
        Ok(copied.into_iter().zip(&self.tensors).filter_map(value).collect())
    }
}

impl Drop for QueuedCopy {
    /// Waits for the copy: cubecl would reuse the host's memory while the GPU writes to it.
    fn drop(&mut self) {
        if let Some(copied) = self.copied.take() {
            // The next use of the GPU reports a failure.
            drop(block_on(copied));
        }
    }
}

#[cfg(test)]
pub(crate) mod tests;
