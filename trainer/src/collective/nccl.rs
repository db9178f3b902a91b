//! All-reduces tensors on GPUs with NCCL.
//!
//! NCCL is loaded after the ranks are connected, so a single rank does not need it. All other
//! messages use the ranks' connections, including the ID by which NCCL connects its ranks.
//!
//! # Order on the device
//!
//! burn queues its kernels on private streams, which NCCL cannot use. The order is therefore:
//!
//! 1. Request the address of the tensor, which makes this thread's stream wait for the stream that
//!    writes it.
//! 2. The host waits for that stream.
//! 3. NCCL all-reduces on a separate stream, and the host waits for it too, before burn gets the
//!    tensor back.

use std::time::{Duration, Instant};

use burn::tensor::{DType, Tensor};
use burn_cubecl::cubecl::cuda::CudaRuntime;
use burn_cubecl::cubecl::future::block_on;
use cubecl_runtime::runtime::Runtime;
use cubecl_runtime::server::ServerStorage;
use cubecl_runtime::storage::{ComputeStorage, ManagedResource};

use super::group::{DeviceAllReduce, Group};
use super::handshake::check_interrupt;
use super::nccl_check::{check_versions, nccl_failed, nccl_unavailable};
use super::{Collective as _, all_gather_cbor};
use crate::Result;
use crate::device::gpu_tensor::GpuTensor;
use crate::error::{Infrastructure, PeerFailed};
use crate::stop::StopSignal;

mod library;

use library::{Communicator, Element, GpuStream, Library, NcclError};

/// Timeout for connecting the ranks in NCCL, which itself waits forever for an unreachable rank.
const JOIN_TIMEOUT: Duration = Duration::from_secs(120);

type CudaServer = <CudaRuntime as Runtime>::Server;
type CudaStorage = <CudaServer as ServerStorage>::Storage;
type GpuMemory = <CudaStorage as ComputeStorage>::Resource;

/// Connects the ranks in NCCL if they train on GPUs.
///
/// # Errors
///
/// Fails if another rank exited, `stop` is set, only some ranks train on GPUs, or NCCL cannot
/// connect the ranks.
pub(super) fn attach(ranks: &mut Group, gpu: Option<usize>, stop: &StopSignal) -> Result<()> {
    let gpus = all_gather_cbor(ranks, "GPUs", gpu.is_some())?;
    if let Some(other) = gpus.iter().position(|is_gpu| *is_gpu != gpus[0]) {
        let (yes, no) = if gpus[0] { (0, other) } else { (other, 0) };
        let text = format!(
            "rank {yes} trains on a GPU, but rank {no} on the CPU; use the same device on all ranks"
        );
        return Err(Infrastructure(text).into());
    }
    let Some(gpu) = gpu else { return Ok(()) };
    // Do everything that can fail on one rank before the other ranks wait for it.
    let ready = Library::open()
        .and_then(|library| Ok((library, GpuStream::new(gpu).map_err(|failure| failure.why)?)));
    let versions = ready.as_ref().map(|(library, _)| library.version()).map_err(Clone::clone);
    let versions = all_gather_cbor(ranks, "NCCL", versions)?;
    check_versions(&versions)?;
    let (library, stream) = ready.map_err(|why| nccl_unavailable(&why))?;
    let id = match ranks.rank() {
        0 => library.new_id().map(|id| id.to_vec()).map_err(|failure| failure.why),
        _ => Ok(vec![]),
    };
    let id = all_gather_cbor(ranks, "NCCL id", id)?.swap_remove(0);
    let id = id.and_then(|id| id.try_into().map_err(|_| "rank 0 sent an invalid NCCL ID".into()));
    let joined = id.and_then(|id| {
        let (rank, size, start) = (ranks.rank(), ranks.size(), Instant::now());
        let check_running = || -> Result<(), NcclError> {
            ranks.check_running().map_err(|error| error.to_string())?;
            match (stop.is_set(), start.elapsed() < JOIN_TIMEOUT) {
                (true, _) => Err("preempted by a signal".to_owned().into()),
                (_, false) => {
                    let seconds = JOIN_TIMEOUT.as_secs();
                    Err(format!("NCCL did not connect all ranks within {seconds} s").into())
                }
                _ => Ok(()),
            }
        };
        Communicator::join(library, id, rank, size, stream, &check_running)
            .map_err(|failure| failure.why)
    });
    let outcome = joined.as_ref().map(drop).map_err(Clone::clone);
    let all = all_gather_cbor(ranks, "NCCL joined", outcome)?;
    let failed =
        all.iter().enumerate().find_map(|(rank, outcome)| Some((rank, outcome.as_ref().err()?)));
    match (failed, joined) {
        (None, Ok(communicator)) => {
            ranks.attach_device(Box::new(Nccl { communicator, failed: vec![] }))
        }
        (Some((rank, why)), joined) => {
            // Some ranks did not join, so do not wait for them when the communicator ends.
            joined.ok().iter_mut().for_each(Communicator::mark_failed);
            check_interrupt(stop)?;
            return Err(nccl_failed(&format!("rank {rank}: {why}")));
        }
        (None, Err(why)) => return Err(nccl_failed(&why)),
    }
    Ok(())
}

/// This process's rank in NCCL.
struct Nccl {
    // Dropped first, which aborts operations that still use the buffers.
    communicator: Communicator,
    /// Buffers of a failed sum: NCCL may read and write them until the communicator is aborted.
    failed: Vec<GpuBuffer>,
}

/// A tensor and its memory.
struct GpuBuffer {
    tensor: GpuTensor,
    memory: ManagedResource<GpuMemory>,
}

impl GpuBuffer {
    /// Waits until the tensor has memory. All kernels that write it are then queued.
    fn new(values: Tensor<1>) -> Result<Self> {
        let tensor = GpuTensor::new(values)?;
        let (client, handle) = (tensor.client(), tensor.handle());
        let memory = client.get_resource::<CudaServer>(handle).map_err(|error| failed(&error))?;
        Ok(Self { tensor, memory })
    }

    fn address(&self) -> u64 {
        self.memory.resource().ptr
    }
}

impl std::fmt::Debug for Nccl {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Nccl")
            .field("communicator", &self.communicator)
            .field("has_failed", &!self.failed.is_empty())
            .finish()
    }
}

impl DeviceAllReduce for Nccl {
    fn supports(&self, values: &Tensor<1>) -> bool {
        let has_element = matches!(values.dtype(), DType::F32 | DType::F16 | DType::BF16);
        let is_plain = !values.device().is_autodiff();
        has_element && is_plain && GpuTensor::supports(values)
    }

    fn sum(
        &mut self,
        values: Tensor<1>,
        check_running: &dyn Fn() -> Result<()>,
    ) -> Result<Tensor<1>> {
        let element = match values.dtype() {
            DType::F16 => Element::F16,
            DType::BF16 => Element::Bf16,
            _ => Element::F32,
        };
        let (num, device) = (values.shape().num_elements(), values.device());
        let from = GpuBuffer::new(values)?;
        // In place, if no other value shares the memory.
        let to = match from.tensor.is_shared() {
            false => None,
            true => Some(GpuBuffer::new(Tensor::empty([num], (&device, from.tensor.dtype())))?),
        };
        let to_address = to.as_ref().map_or(from.address(), GpuBuffer::address);
        // Wait for all kernels queued so far, including those that the lines above depend on.
        block_on(from.tensor.client().sync()).map_err(|error| failed(&error))?;
        let cancel_check = || check_running().map_err(|error| NcclError::from(error.to_string()));
        let done = self.communicator.sum(from.address(), to_address, num, element, &cancel_check);
        let Err(failure) = done else {
            return Ok(to.unwrap_or(from).tensor.into_tensor());
        };
        self.failed = std::iter::once(from).chain(to).collect();
        let why = format!("NCCL all-reduce failed: {}", failure.why);
        // If the gang has failed, report that instead of the consequential error of NCCL.
        Err(match check_running() {
            Err(over) => over,
            Ok(()) if failure.is_remote => PeerFailed(why).into(),
            Ok(()) => Infrastructure(why).into(),
        })
    }

    fn mark_failed(&mut self) {
        self.communicator.mark_failed();
    }
}

fn failed(error: &dyn std::fmt::Debug) -> crate::Error {
    Infrastructure(format!("the GPU failed: {error:?}")).into()
}
