//! What ranks do together.

use std::ops::Range;

use burn::tensor::{DType, Element, Tensor, TensorData, bf16, f16};
use bytes::Bytes;
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::{Result, record};

mod distributed;
#[cfg(any(test, feature = "cuda"))]
mod gpu_gang;
mod group;
mod handshake;
mod hub;
mod launched;
#[cfg(feature = "cuda")]
mod nccl;
mod program;
mod pulse;
mod rendezvous;
mod ring;
mod threads;
mod watch;
mod wire;

pub use distributed::Distributed;
pub(crate) use launched::Launched;
pub(crate) use pulse::{Doing, Pulse};
pub use threads::ThreadRank;

/// Sums and exchanges over ranks.
///
/// All methods are collective: every rank makes the same calls in the same order, and a call returns
/// on one rank only once every rank has made it.
///
/// # Shapes
///
/// Values are flat. Their numbers are equal on all ranks, but for what is gathered.
///
/// # Errors
///
/// A failure is final: every later call fails too. There is no way back within a process; it exits,
/// and the gang starts again from its last checkpoint.
pub trait Collective: Send + Sync + std::fmt::Debug {
    /// This rank, in `0..size`.
    fn rank(&self) -> usize;

    /// The number of ranks, at least 1.
    fn size(&self) -> usize;

    /// Replaces `values` by their sums over all ranks: the same bits on all of them, and in another
    /// run of as many ranks. Implementations may add up in different orders.
    ///
    /// # Errors
    ///
    /// Another rank is gone, or does something else.
    fn sum_f32(&self, values: &mut [f32]) -> Result<()>;

    /// As [`sum_f32`](Self::sum_f32), in double precision.
    ///
    /// # Errors
    ///
    /// As it.
    fn sum_f64(&self, values: &mut [f64]) -> Result<()>;

    /// As [`sum_f32`](Self::sum_f32), of half the bytes: each partial sum is rounded to 11 bits, and one beyond
    /// 65,504 is infinite.
    ///
    /// # Errors
    ///
    /// As it.
    fn sum_f16(&self, values: &mut [f16]) -> Result<()> {
        let mut wide: Vec<f32> = values.iter().map(|it| it.to_f32()).collect();
        self.sum_f32(&mut wide)?;
        values.iter_mut().zip(wide).for_each(|(value, sum)| *value = f16::from_f32(sum));
        Ok(())
    }

    /// As [`sum_f32`](Self::sum_f32), of half the bytes: each partial sum is rounded to 8 bits.
    ///
    /// # Errors
    ///
    /// As it.
    fn sum_bf16(&self, values: &mut [bf16]) -> Result<()> {
        let mut wide: Vec<f32> = values.iter().map(|it| it.to_f32()).collect();
        self.sum_f32(&mut wide)?;
        values.iter_mut().zip(wide).for_each(|(value, sum)| *value = bf16::from_f32(sum));
        Ok(())
    }

    /// The sums over all ranks of a flat tensor of `f64`, `f32`, `f16` or `bf16`, of this type and on its device.
    ///
    /// # Errors
    ///
    /// As [`sum_f32`](Self::sum_f32).
    fn sum_tensor(&self, values: Tensor<1>) -> Result<Tensor<1>> {
        sum_on_host(self, values)
    }

    /// Whether [`sum_tensor`](Self::sum_tensor) sums where the values lie. Otherwise they go over the host.
    fn sums_on_device(&self) -> bool {
        false
    }

    /// What each rank gives, in the order of ranks, on every rank.
    ///
    /// # Errors
    ///
    /// As [`sum_f32`](Self::sum_f32).
    fn gather(&self, mine: Bytes) -> Result<Vec<Bytes>>;

    /// What each rank gives, in the order of ranks, on rank 0; elsewhere what comes is not to be looked
    /// at. Costs rank 0 no more than it takes in.
    ///
    /// # Errors
    ///
    /// As [`sum_f32`](Self::sum_f32).
    fn collect(&self, mine: Bytes) -> Result<Vec<Bytes>> {
        self.gather(mine)
    }

    /// What rank 0 gives, on every rank; what the others give is not looked at.
    ///
    /// # Errors
    ///
    /// As [`sum_f32`](Self::sum_f32).
    fn broadcast(&self, mine: Bytes) -> Result<Bytes> {
        let mine = if self.rank() == 0 { mine } else { Bytes::new() };
        Ok(self.gather(mine)?.swap_remove(0))
    }
}

/// One rank: it has every sum already.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Alone;

impl Collective for Alone {
    fn rank(&self) -> usize {
        0
    }

    fn size(&self) -> usize {
        1
    }

    fn sum_f32(&self, _values: &mut [f32]) -> Result<()> {
        Ok(())
    }

    fn sum_f64(&self, _values: &mut [f64]) -> Result<()> {
        Ok(())
    }

    fn sum_tensor(&self, values: Tensor<1>) -> Result<Tensor<1>> {
        Ok(values)
    }

    fn gather(&self, mine: Bytes) -> Result<Vec<Bytes>> {
        Ok(vec![mine])
    }
}

/// What ranks do together at one time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
enum Kind {
    SumF32 = 1,
    SumF64 = 2,
    Gather = 3,
    Collect = 4,
    SumF16 = 5,
    SumBf16 = 6,
    SumTensor = 7,
}

impl Kind {
    const ALL: [Self; 7] = [
        Self::SumF32,
        Self::SumF64,
        Self::Gather,
        Self::Collect,
        Self::SumF16,
        Self::SumBf16,
        Self::SumTensor,
    ];

    /// As people know it.
    fn name(self) -> &'static str {
        match self {
            Self::SumF32 | Self::SumF64 | Self::SumF16 | Self::SumBf16 | Self::SumTensor => {
                "all_reduce"
            }
            Self::Gather => "all_gather",
            Self::Collect => "gather",
        }
    }
}

/// Where a rank is among all, among those of its pod, and its pod among the pods.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Numbers {
    pub(crate) rank: usize,
    pub(crate) size: usize,
    pub(crate) local_rank: usize,
    pub(crate) local_size: usize,
    pub(crate) cross_rank: usize,
    pub(crate) cross_size: usize,
}

impl Numbers {
    const ALONE: Self =
        Self { rank: 0, size: 1, local_rank: 0, local_size: 1, cross_rank: 0, cross_size: 1 };

    /// The ranks of this pod.
    fn local_ranks(&self) -> Range<usize> {
        let first = self.rank - self.local_rank;
        first..first + self.local_size
    }

    /// Whether the ranks of this pod are some of several, but not all.
    fn has_local_group(&self) -> bool {
        self.local_size > 1 && self.local_size < self.size
    }
}

/// Replaces `values` by the sums of what each rank gave of them, in the order of ranks.
fn added_up<T: ring::Summed>(all: &[Bytes], values: &mut [T]) -> Result<()> {
    for (rank, theirs) in all.iter().enumerate() {
        if theirs.len() != size_of_val(values) {
            return Err(wire::differs(rank));
        }
        // What was received need not lie as numbers do.
        let theirs = theirs.chunks_exact(size_of::<T>()).map(bytemuck::pod_read_unaligned::<T>);
        for (value, theirs) in values.iter_mut().zip(theirs) {
            if rank == 0 { *value = theirs } else { *value += theirs }
        }
    }
    Ok(())
}

/// The sums of a flat tensor, which is brought to the host and back.
fn sum_on_host(ranks: &(impl Collective + ?Sized), values: Tensor<1>) -> Result<Tensor<1>> {
    fn sum<T: Element>(
        data: TensorData,
        sum: impl FnOnce(&mut [T]) -> Result<()>,
    ) -> Result<TensorData> {
        let unlike = |it| format!("a tensor's values are not of its type: {it:?}");
        let shape = data.shape().clone();
        let mut values: Vec<T> = data.try_to_vec().map_err(unlike)?;
        sum(&mut values)?;
        Ok(TensorData::new(values, shape))
    }
    let (device, dtype) = (values.device(), values.dtype());
    let data = values.try_into_data().map_err(record::unreadable)?;
    let data = match dtype {
        DType::F64 => sum(data, |it| ranks.sum_f64(it)),
        DType::F32 => sum(data, |it| ranks.sum_f32(it)),
        DType::F16 => sum(data, |it| ranks.sum_f16(it)),
        DType::BF16 => sum(data, |it| ranks.sum_bf16(it)),
        other => Err(format!("ranks do not sum tensors of {other:?}").into()),
    }?;
    Ok(Tensor::from_data(data, (&device, dtype)))
}

/// What each rank says at one place of the program, in the order of ranks.
///
/// # Errors
///
/// Another rank is gone, or is somewhere else: the program does not do the same on all ranks.
pub(crate) fn exchange<T: Serialize + DeserializeOwned>(
    ranks: &dyn Collective,
    place: &str,
    mine: T,
) -> Result<Vec<T>> {
    if ranks.size() == 1 {
        return Ok(vec![mine]);
    }
    let said = ranks.gather(serde_json::to_vec(&(place, mine))?.into())?;
    let read = |(rank, said): (usize, &Bytes)| -> Result<T> {
        let (other, said): (String, T) = match serde_json::from_slice(said) {
            Ok(said) => said,
            // It is read as what is said elsewhere: its place alone is of interest.
            Err(error) => match serde_json::from_slice::<(String, serde_json::Value)>(said) {
                Ok((other, _)) if other != place => return Err(elsewhere(rank, &other, place)),
                _ => return Err(format!("rank {rank} says what cannot be read: {error}").into()),
            },
        };
        if other == place { Ok(said) } else { Err(elsewhere(rank, &other, place)) }
    };
    said.iter().enumerate().map(read).collect()
}

fn elsewhere(rank: usize, other: &str, place: &str) -> crate::Error {
    format!(
        "rank {rank} is at its {other}, this rank at its {place}: callbacks and data must be the \
         same on all ranks"
    )
    .into()
}

#[cfg(test)]
mod tests;
