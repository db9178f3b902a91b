//! Sums of tensors by NCCL, where they lie on GPUs.
//!
//! NCCL is loaded when ranks have met, so a single rank needs none. All else that ranks say goes over their connections, and so does the id by which NCCL's ranks find each other.
//!
//! # Order on the device
//!
//! burn queues its kernels on streams of its own, which nobody else may have. So the address of a tensor is asked for,
//! which makes this thread's stream wait for whichever stream writes it; that stream is waited for by the host; NCCL sums
//! on a stream of its own, which the host waits for too, before burn is given the tensor back.

use std::time::{Duration, Instant};

use burn::backend::Cube;
use burn::tensor::{DType, Tensor};
use burn_cubecl::CubeBackend;
use burn_cubecl::cubecl::cuda::CudaRuntime;
use burn_cubecl::cubecl::future::block_on;
use burn_cubecl::tensor::CubeTensor;
use cubecl_runtime::runtime::Runtime;
use cubecl_runtime::server::ServerStorage;
use cubecl_runtime::storage::{ComputeStorage, ManagedResource};

use super::gpu_gang::{refused, same_version};
use super::group::{Group, OnDevice};
use super::handshake::look;
use super::{Collective as _, exchange};
use crate::Result;
use crate::error::{Infrastructure, PeerFailed};
use crate::stop::StopSignal;

mod library;

use library::{Communicator, Element, Failure, Library, Queue};

/// How long NCCL may take to bring the ranks together: it waits for ever for one that cannot be reached.
const JOIN_MAX: Duration = Duration::from_secs(120);

type CudaServer = <CudaRuntime as Runtime>::Server;

/// Joins the ranks in NCCL if they train on GPUs.
///
/// # Errors
///
/// Another rank is gone, `stop` is set, only some ranks train on GPUs, or NCCL cannot join them.
pub(super) fn attach(ranks: &mut Group, gpu: Option<usize>, stop: &StopSignal) -> Result<()> {
    let gpus = exchange(ranks, "GPUs", gpu.is_some())?;
    if let Some(other) = gpus.iter().position(|it| *it != gpus[0]) {
        let (yes, no) = if gpus[0] { (0, other) } else { (other, 0) };
        let text = format!("rank {yes} trains on a GPU, but rank {no} on its CPU");
        return Err(Infrastructure(text).into());
    }
    let Some(gpu) = gpu else { return Ok(()) };
    // All that a rank can fail in by itself comes before what the others wait for.
    let ready = Library::open()
        .and_then(|library| Ok((library, Queue::new(gpu).map_err(|failure| failure.why)?)));
    let versions = ready.as_ref().map(|(library, _)| library.version()).map_err(Clone::clone);
    let versions = exchange(ranks, "NCCL", versions)?;
    same_version(&versions)?;
    let (library, queue) = ready.map_err(|why| refused(&why))?;
    let id = match ranks.rank() {
        0 => library.new_id().map(|it| it.to_vec()).map_err(|failure| failure.why),
        _ => Ok(vec![]),
    };
    let id = exchange(ranks, "NCCL id", id)?.swap_remove(0);
    let id = id.and_then(|id| id.try_into().map_err(|_| "rank 0's id is none of NCCL's".into()));
    let joined = id.and_then(|id| {
        let (rank, size, start) = (ranks.rank(), ranks.size(), Instant::now());
        let goes_on = || -> Result<(), Failure> {
            ranks.goes_on().map_err(|it| it.to_string())?;
            match (stop.is_set(), start.elapsed() < JOIN_MAX) {
                (true, _) => Err("asked to stop by a signal".to_owned().into()),
                (_, false) => {
                    let seconds = JOIN_MAX.as_secs();
                    Err(format!("ranks have not found each other in {seconds} s").into())
                }
                _ => Ok(()),
            }
        };
        Communicator::join(library, id, rank, size, queue, &goes_on).map_err(|it| it.why)
    });
    let outcome = joined.as_ref().map(drop).map_err(Clone::clone);
    let all = exchange(ranks, "NCCL joined", outcome)?;
    let failed = all.iter().enumerate().find_map(|(rank, it)| Some((rank, it.as_ref().err()?)));
    match (failed, joined) {
        (None, Ok(communicator)) => ranks.attach(Box::new(Nccl { communicator })),
        (Some((rank, why)), joined) => {
            // Those that have not joined wait for nobody.
            joined.ok().iter_mut().for_each(Communicator::abandon);
            look(stop)?;
            return Err(refused(&format!("rank {rank}: {why}")));
        }
        (None, Err(why)) => return Err(refused(&why)),
    }
    Ok(())
}

/// NCCL, of which this process is one rank.
#[derive(Debug)]
struct Nccl {
    communicator: Communicator,
}

impl OnDevice for Nccl {
    fn takes(&self, values: &Tensor<1>) -> bool {
        let has_element = matches!(values.dtype(), DType::F32 | DType::F16 | DType::BF16);
        let is_plain = !values.device().is_autodiff();
        has_element && is_plain && values.clone().try_into_primitive::<Cube>().is_ok()
    }

    fn sum(&mut self, values: Tensor<1>, goes_on: &dyn Fn() -> Result<()>) -> Result<Tensor<1>> {
        let element = match values.dtype() {
            DType::F16 => Element::F16,
            DType::BF16 => Element::Bf16,
            _ => Element::F32,
        };
        let num = values.shape().num_elements();
        // Not in place: others may hold the same tensor.
        let sums = Tensor::empty([num], (&values.device(), values.dtype()));
        let (from, to) = (OnGpu::of(values)?, OnGpu::of(sums.clone())?);
        let (from_memory, to_memory) = (from.memory()?, to.memory()?);
        let (from_at, to_at) = (from_memory.resource().ptr, to_memory.resource().ptr);
        // What was asked of the GPU so far, which the two lines above have brought before this.
        block_on(from.0.client.sync()).map_err(|it| failed(&it))?;
        let asked = || goes_on().map_err(|it| Failure::from(it.to_string()));
        self.communicator.sum(from_at, to_at, num, element, &asked).map_err(|failure| {
            let why = format!("NCCL's all-reduce: {}", failure.why);
            // Whoever is told that the gang is over says so, and not that NCCL is at fault.
            match goes_on() {
                Err(over) => over,
                Ok(()) if failure.is_remote => PeerFailed(why).into(),
                Ok(()) => Infrastructure(why).into(),
            }
        })?;
        Ok(sums)
    }

    fn abandon(&mut self) {
        self.communicator.abandon();
    }
}

/// A tensor with its memory, which no kernel that is still to be fused owns.
struct OnGpu(CubeTensor);

impl OnGpu {
    fn of(tensor: Tensor<1>) -> Result<Self> {
        let fused = tensor.try_into_primitive::<Cube>();
        let fused = fused.map_err(|it| format!("ranks sum tensors on CUDA alone: {it:?}"))?;
        let client = fused.client.clone();
        let cube = client.resolve_tensor_float::<CubeBackend>(fused);
        match cube.is_contiguous() {
            true => Ok(Self(cube)),
            false => Err("ranks sum flat tensors alone".into()),
        }
    }

    /// Its memory, after all that writes it.
    fn memory(
        &self,
    ) -> Result<ManagedResource<<<CudaServer as ServerStorage>::Storage as ComputeStorage>::Resource>>
    {
        let memory = self.0.client.get_resource::<CudaServer>(self.0.handle.clone());
        memory.map_err(|it| failed(&it))
    }
}

fn failed(error: &dyn std::fmt::Debug) -> crate::Error {
    Infrastructure(format!("the GPU failed: {error:?}")).into()
}
