//! Sums of tensors by NCCL, where they lie on GPUs.
//!
//! NCCL is looked for when ranks have met: a program that has none starts all the same. All else that ranks say goes
//! over their connections, and so does the id by which NCCL's ranks find each other.
//!
//! # Order on the device
//!
//! burn queues its kernels on streams of its own, which nobody else may have. So the address of a tensor is asked for,
//! which makes this thread's stream wait for whichever stream writes it; that stream is waited for by the host; NCCL sums
//! on a stream of its own, which the host waits for too, before burn is given the tensor back.

use burn::backend::Cube;
use burn::tensor::{DType, Tensor};
use burn_cubecl::CubeBackend;
use burn_cubecl::cubecl::cuda::CudaRuntime;
use burn_cubecl::cubecl::future::block_on;
use bytes::Bytes;
use cubecl_runtime::runtime::Runtime;

use super::group::{Group, OnDevice};
use super::{Collective as _, exchange};
use crate::Result;
use crate::error::Infrastructure;

mod library;

use library::{Communicator, Element, ID_BYTES, Library};

type CudaServer = <CudaRuntime as Runtime>::Server;

/// Brings the ranks together in NCCL, if all of them have a GPU and the same NCCL; says on rank 0 why they do not.
///
/// # Errors
///
/// Another rank is gone, or only some train on GPUs.
pub(super) fn attach(ranks: &mut Group, gpu: Option<usize>) -> Result<()> {
    let gpus = exchange(ranks, "GPUs", gpu.is_some())?;
    if let Some(other) = gpus.iter().position(|it| *it != gpus[0]) {
        let (yes, no) = if gpus[0] { (0, other) } else { (other, 0) };
        let text = format!("rank {yes} trains on a GPU, but rank {no} on its CPU");
        return Err(Infrastructure(text).into());
    }
    let Some(gpu) = gpu else { return Ok(()) };
    let library = Library::open();
    let found = library.as_ref().map(Library::version).map_err(Clone::clone);
    let versions = exchange(ranks, "NCCL", found)?;
    if let Err(why) = same_version(&versions) {
        return stays_slow(ranks, &why);
    }
    let id = match &library {
        Ok(library) if ranks.rank() == 0 => library.new_id(),
        _ => Ok([0; ID_BYTES]),
    };
    let ids = exchange(ranks, "NCCL id", id.as_ref().map(|it| it.to_vec()).map_err(Clone::clone))?;
    let id = ids.into_iter().next().unwrap_or_else(|| Err("no id came".into()));
    let joined = match (library, id) {
        (Ok(library), Ok(id)) => {
            let (rank, size) = (ranks.rank(), ranks.size());
            let goes_on = || ranks.goes_on().map_err(|it| it.to_string());
            id.try_into()
                .map_err(|_| "rank 0's id is none of NCCL's".to_owned())
                .and_then(|id| Communicator::join(library, id, rank, size, gpu, &goes_on))
        }
        (Err(why), _) | (_, Err(why)) => Err(why),
    };
    let all = exchange(ranks, "NCCL joined", joined.as_ref().map(drop).map_err(Clone::clone))?;
    let failed = all.iter().enumerate().find_map(|(rank, it)| Some((rank, it.as_ref().err()?)));
    if let Some((rank, why)) = failed {
        return stays_slow(ranks, &format!("rank {rank}: {why}"));
    }
    if let Ok(communicator) = joined {
        ranks.attach(Box::new(Nccl { communicator }));
    }
    Ok(())
}

/// All ranks' version of NCCL.
fn same_version(versions: &[Result<i32, String>]) -> Result<(), String> {
    let first = versions.first();
    for (rank, version) in versions.iter().enumerate() {
        match (version, first) {
            (Err(why), _) => return Err(format!("rank {rank}: {why}")),
            (Ok(own), Some(Ok(first))) if own != first => {
                return Err(format!("rank 0 has version {first}, rank {rank} version {own}"));
            }
            _ => {}
        }
    }
    Ok(())
}

fn stays_slow(ranks: &Group, why: &str) -> Result<()> {
    if ranks.rank() == 0 {
        eprintln!("stoker: gradients go over the host and TCP, not by NCCL: {why}");
    }
    // Whoever has left NCCL in the midst of it must have done so before the others go on.
    ranks.gather(Bytes::new()).map(drop)
}

/// NCCL, of which this process is one rank.
#[derive(Debug)]
struct Nccl {
    communicator: Communicator,
}

impl OnDevice for Nccl {
    fn sum(&mut self, values: Tensor<1>, goes_on: &dyn Fn() -> Result<()>) -> Result<Tensor<1>> {
        let element = match values.dtype() {
            DType::F32 => Element::F32,
            DType::F16 => Element::F16,
            DType::BF16 => Element::Bf16,
            other => return Err(format!("ranks do not sum tensors of {other:?}").into()),
        };
        let num = values.shape().num_elements();
        let device = |why: String| Infrastructure(format!("the GPU failed: {why}"));
        let fused = values.clone().try_into_primitive::<Cube>();
        let fused = fused.map_err(|it| format!("ranks sum tensors on CUDA alone: {it:?}"))?;
        let client = fused.client.clone();
        let cube = client.resolve_tensor_float::<CubeBackend>(fused);
        if !cube.is_contiguous() {
            return Err("ranks sum flat tensors alone".into());
        }
        let resource = cube.client.get_resource::<CudaServer>(cube.handle.clone());
        let resource = resource.map_err(|it| device(format!("{it:?}")))?;
        block_on(cube.client.sync()).map_err(|it| device(format!("{it:?}")))?;
        let address = resource.resource().ptr;
        let goes_on = || goes_on().map_err(|it| it.to_string());
        self.communicator
            .sum(address, num, element, &goes_on)
            .map_err(|why| Infrastructure(format!("NCCL's all-reduce: {why}")))?;
        Ok(values)
    }
}
