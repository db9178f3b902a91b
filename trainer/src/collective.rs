//! Collective communication between ranks.

use std::ops::Range;

use burn::tensor::{DType, Element, Tensor, TensorData, bf16, f16};
use bytes::Bytes;
use serde::Serialize;
use serde::de::{DeserializeOwned, IgnoredAny};

use crate::{Result, record};

mod distributed;
mod group;
mod handshake;
mod hub;
mod launch_config;
mod link;
#[cfg(feature = "cuda")]
mod nccl;
#[cfg(any(test, feature = "cuda"))]
mod nccl_check;
mod pipe;
mod program;
mod progress;
mod rendezvous;
mod ring;
mod threads;
mod watchdog;
mod wire;

pub use distributed::Distributed;
pub(crate) use launch_config::LaunchConfig;
pub(crate) use progress::{ProgressState, RankActivity};
pub use threads::ThreadRank;

/// Collective operations between ranks.
///
/// Every rank must make the same calls in the same order. A call returns on a rank only after all
/// ranks have made it.
///
/// # Shapes
///
/// Values are flat. Their number is equal on all ranks, except for gathered bytes.
///
/// # Errors
///
/// Errors are final: all later calls fail too. The process cannot recover; it exits, and the gang
/// restarts from its last checkpoint.
pub trait Collective: Send + Sync + std::fmt::Debug {
    /// Returns this rank, in `0..size`.
    fn rank(&self) -> usize;

    /// Returns the number of ranks, at least 1.
    fn size(&self) -> usize;

    /// All-reduces `values` in place (sum). The result is bit-identical on all ranks and across
    /// runs with the same world size. Summation order may differ between implementations.
    ///
    /// # Errors
    ///
    /// Fails if another rank exited, or made a different call.
    fn sum_f32(&self, values: &mut [f32]) -> Result<()>;

    /// All-reduces a few values in double precision and many in single, in place. The segments need
    /// not be adjacent in memory. Ranks over connections and in threads need one exchange, and add
    /// each value of `head` in rank order.
    ///
    /// # Shapes
    ///
    /// - head: the same length on all ranks
    /// - segments: the same total length on all ranks
    ///
    /// # Errors
    ///
    /// Same as [`sum_f32`](Self::sum_f32).
    fn sum_segments(&self, head: &mut [f64], segments: &mut [&mut [f32]]) -> Result<()> {
        self.sum_f64(head)?;
        if segments.iter().all(|segment| segment.is_empty()) {
            return Ok(());
        }
        let mut flat: Vec<f32> = segments.concat();
        self.sum_f32(&mut flat)?;
        let mut sums = flat.as_slice();
        for segment in segments {
            let (of_segment, rest) = sums.split_at(segment.len());
            segment.copy_from_slice(of_segment);
            sums = rest;
        }
        Ok(())
    }

    /// Same as [`sum_f32`](Self::sum_f32), in double precision.
    ///
    /// # Errors
    ///
    /// Same as [`sum_f32`](Self::sum_f32).
    fn sum_f64(&self, values: &mut [f64]) -> Result<()>;

    /// Same as [`sum_f32`](Self::sum_f32), with half the bytes. Each partial sum is rounded to 11
    /// significant bits; a partial sum beyond 65,504 becomes infinite.
    ///
    /// # Errors
    ///
    /// Same as [`sum_f32`](Self::sum_f32).
    fn sum_f16(&self, values: &mut [f16]) -> Result<()> {
        let mut wide: Vec<f32> = values.iter().map(|value| value.to_f32()).collect();
        self.sum_f32(&mut wide)?;
        values.iter_mut().zip(wide).for_each(|(value, sum)| *value = f16::from_f32(sum));
        Ok(())
    }

    /// Same as [`sum_f32`](Self::sum_f32), with half the bytes. Each partial sum is rounded to 8
    /// significant bits.
    ///
    /// # Errors
    ///
    /// Same as [`sum_f32`](Self::sum_f32).
    fn sum_bf16(&self, values: &mut [bf16]) -> Result<()> {
        let mut wide: Vec<f32> = values.iter().map(|value| value.to_f32()).collect();
        self.sum_f32(&mut wide)?;
        values.iter_mut().zip(wide).for_each(|(value, sum)| *value = bf16::from_f32(sum));
        Ok(())
    }

    /// Returns the all-reduced sum of a flat tensor of `f64`, `f32`, `f16` or `bf16`, with the same
    /// type and on the same device.
    ///
    /// # Errors
    ///
    /// Same as [`sum_f32`](Self::sum_f32); also fails for other element types.
    fn sum_tensor(&self, values: Tensor<1>) -> Result<Tensor<1>> {
        sum_on_host(self, values)
    }

    /// Returns `true` if [`sum_tensor`](Self::sum_tensor) reduces on the tensor's device.
    /// Otherwise, values are copied through the host.
    fn sums_on_device(&self) -> bool {
        false
    }

    /// Gathers each rank's bytes on every rank, in rank order.
    ///
    /// # Errors
    ///
    /// Same as [`sum_f32`](Self::sum_f32).
    fn all_gather(&self, local: Bytes) -> Result<Vec<Bytes>>;

    /// Gathers each rank's bytes on rank 0, in rank order. The result on other ranks is
    /// unspecified. Unlike [`all_gather`](Self::all_gather), rank 0 need not send the data back.
    ///
    /// # Errors
    ///
    /// Same as [`sum_f32`](Self::sum_f32).
    fn gather_to_root(&self, local: Bytes) -> Result<Vec<Bytes>> {
        self.all_gather(local)
    }

    /// Returns the bytes of rank 0 on every rank. The arguments of other ranks are ignored.
    ///
    /// # Errors
    ///
    /// Same as [`sum_f32`](Self::sum_f32).
    fn broadcast(&self, local: Bytes) -> Result<Bytes> {
        let local = if self.rank() == 0 { local } else { Bytes::new() };
        Ok(self.all_gather(local)?.swap_remove(0))
    }
}

/// A single rank, for which every operation is the identity.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct SingleRank;

impl Collective for SingleRank {
    fn rank(&self) -> usize {
        0
    }

    fn size(&self) -> usize {
        1
    }

    fn sum_f32(&self, _values: &mut [f32]) -> Result<()> {
        Ok(())
    }

    fn sum_segments(&self, _head: &mut [f64], _segments: &mut [&mut [f32]]) -> Result<()> {
        Ok(())
    }

    fn sum_f64(&self, _values: &mut [f64]) -> Result<()> {
        Ok(())
    }

    fn sum_tensor(&self, values: Tensor<1>) -> Result<Tensor<1>> {
        Ok(values)
    }

    fn all_gather(&self, local: Bytes) -> Result<Vec<Bytes>> {
        Ok(vec![local])
    }
}

/// Kind of a collective operation, as sent between ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
enum CollectiveOp {
    SumF32 = 1,
    SumF64 = 2,
    AllGather = 3,
    Gather = 4,
    SumF16 = 5,
    SumBf16 = 6,
    SumTensor = 7,
    SumSegments = 8,
}

impl CollectiveOp {
    const ALL: [Self; 8] = [
        Self::SumF32,
        Self::SumF64,
        Self::AllGather,
        Self::Gather,
        Self::SumF16,
        Self::SumBf16,
        Self::SumTensor,
        Self::SumSegments,
    ];

    /// Returns the name used by MPI and PyTorch, for messages.
    fn name(self) -> &'static str {
        match self {
            Self::AllGather => "all_gather",
            Self::Gather => "gather",
            Self::SumF32
            | Self::SumF64
            | Self::SumF16
            | Self::SumBf16
            | Self::SumTensor
            | Self::SumSegments => "all_reduce",
        }
    }
}

/// Rank and size globally, within the pod (`local`) and over the pods (`cross`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Topology {
    pub(crate) rank: usize,
    pub(crate) size: usize,
    pub(crate) local_rank: usize,
    pub(crate) local_size: usize,
    pub(crate) cross_rank: usize,
    pub(crate) cross_size: usize,
}

impl Topology {
    const SINGLE_RANK: Self =
        Self { rank: 0, size: 1, local_rank: 0, local_size: 1, cross_rank: 0, cross_size: 1 };

    /// Returns the ranks of this pod.
    fn local_ranks(&self) -> Range<usize> {
        let first = self.rank - self.local_rank;
        first..first + self.local_size
    }

    /// Returns `true` if this pod has several ranks, but not all of them.
    fn has_local_group(&self) -> bool {
        self.local_size > 1 && self.local_size < self.size
    }
}

/// Replaces `values` by the sums over the ranks' values, added in rank order.
fn sum_in_rank_order<T: ring::Summable>(
    all: &[Bytes],
    values: &mut ring::Buffer<'_, T>,
) -> Result<()> {
    for (rank, bytes) in all.iter().enumerate() {
        if !values.take_in(bytes, rank > 0) {
            return Err(wire::mismatched_call(rank));
        }
    }
    Ok(())
}

/// All-reduces a flat tensor through the host.
fn sum_on_host(ranks: &(impl Collective + ?Sized), values: Tensor<1>) -> Result<Tensor<1>> {
    fn sum<T: Element>(
        data: TensorData,
        sum: impl FnOnce(&mut [T]) -> Result<()>,
    ) -> Result<TensorData> {
        let unlike =
            |error| format!("cannot read a tensor's values as its element type: {error:?}");
        let shape = data.shape().clone();
        let mut values: Vec<T> = data.try_to_vec().map_err(unlike)?;
        sum(&mut values)?;
        Ok(TensorData::new(values, shape))
    }
    let (device, dtype) = (values.device(), values.dtype());
    let data = values.try_into_data().map_err(record::tensor_read_error)?;
    let data = match dtype {
        DType::F64 => sum(data, |values| ranks.sum_f64(values)),
        DType::F32 => sum(data, |values| ranks.sum_f32(values)),
        DType::F16 => sum(data, |values| ranks.sum_f16(values)),
        DType::BF16 => sum(data, |values| ranks.sum_bf16(values)),
        other => {
            Err(format!("cannot all-reduce tensors of {other:?}; use F64, F32, F16 or BF16").into())
        }
    }?;
    Ok(Tensor::from_data(data, (&device, dtype)))
}

/// Gathers each rank's value on every rank, in rank order. `position` names the position in the
/// program for error messages.
///
/// # Errors
///
/// Fails if another rank exited, or is at a different position: ranks must execute the same
/// program.
pub(crate) fn all_gather_cbor<T: Serialize + DeserializeOwned>(
    ranks: &dyn Collective,
    position: &str,
    local: T,
) -> Result<Vec<T>> {
    if ranks.size() == 1 {
        return Ok(vec![local]);
    }
    let gathered = ranks.all_gather(to_cbor(&(position, local))?)?;
    let read = |(rank, bytes): (usize, &Bytes)| -> Result<T> {
        let (other, value): (String, T) = match from_cbor(bytes) {
            Ok(message) => message,
            // The type may differ because the other rank is elsewhere, so read only its position.
            Err(error) => match from_cbor::<(String, IgnoredAny)>(bytes) {
                Ok((other, _)) if other != position => {
                    return Err(position_mismatch(rank, &other, position));
                }
                _ => {
                    return Err(format!("cannot read the message of rank {rank}: {error}").into());
                }
            },
        };
        if other == position { Ok(value) } else { Err(position_mismatch(rank, &other, position)) }
    };
    gathered.iter().enumerate().map(read).collect()
}

/// Encodes a value for other ranks. Unlike JSON, CBOR has NaN and infinities. Unlike more compact
/// formats, it describes its types, which serde's `untagged` and `flatten` require.
fn to_cbor(value: &impl Serialize) -> Result<Bytes> {
    let mut bytes = vec![];
    ciborium::into_writer(value, &mut bytes)?;
    Ok(bytes.into())
}

/// Decodes a value of another rank.
fn from_cbor<T: DeserializeOwned>(bytes: &[u8]) -> Result<T> {
    Ok(ciborium::from_reader(bytes)?)
}

fn position_mismatch(rank: usize, other: &str, position: &str) -> crate::Error {
    format!(
        "rank {rank} is at `{other}`, but this rank is at `{position}`; use the same callbacks and \
         data on all ranks"
    )
    .into()
}

#[cfg(test)]
pub(crate) mod tests;
