//! Group of ranks that are connected by TCP, and by shared memory within a pod.
//!
//! Large messages use a ring, small messages go through one rank. The first failure closes all
//! connections, which notifies the other ranks.

use std::io;
use std::net::TcpStream;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use burn::tensor::{Tensor, bf16, f16};
use bytes::Bytes;

use super::hub::{Call, Hub};
use super::link::Link;
use super::progress::{ProgressState, StallLimits};
use super::rendezvous::Connections;
use super::ring::{Buffer, Ring, Summable};
use super::watchdog::{self, GangAbort, start};
use super::wire::{mismatched_call, socket_error};
use super::{Collective, CollectiveOp, Topology, sum_in_rank_order, sum_on_host};
use crate::Result;
use crate::error::{Infrastructure, PeerFailed};

/// All-reduces with segments up to this size are summed on rank 0, or by both of two ranks: fewer
/// round trips, but more bytes through one rank. The head does not count. Its size changes when
/// ranks agree on the names of metrics, as after a restart, and the path decides in which order the
/// ranks add to segments. They add to a head in rank order on both paths.
const GATHERED_BYTES_MAX: usize = 16 << 10;
/// Time that a sum on devices may take after a rank has exited. That rank may have completed the
/// sum a moment earlier than this one.
const EXIT_GRACE: Duration = Duration::from_secs(5);

/// Connected ranks.
#[derive(Debug)]
pub(super) struct Group {
    rank: usize,
    size: usize,
    /// `None` after a failure.
    channels: Mutex<Option<Channels>>,
    progress: Arc<ProgressState>,
    gang: Arc<GangState>,
}

#[derive(Debug)]
struct Channels {
    hub: Option<Hub>,
    ring: Option<Ring>,
    device: Option<Box<dyn DeviceAllReduce>>,
    /// Sequence number of the next message.
    next_sequence: u32,
}

/// All-reduces tensors on their device, for example with NCCL.
pub(super) trait DeviceAllReduce: Send + std::fmt::Debug {
    /// Returns `true` if the tensor is supported; the result must be the same on all ranks.
    fn supports(&self, values: &Tensor<1>) -> bool;

    /// Returns the all-reduced sum of a flat tensor. Calls `check_running` while waiting,
    /// and fails if it does.
    fn sum(
        &mut self,
        values: Tensor<1>,
        check_running: &dyn Fn() -> Result<()>,
    ) -> Result<Tensor<1>>;

    /// Marks the gang as failed, so that dropping this value does not wait for other ranks.
    fn mark_failed(&mut self);
}

/// Abort state of a gang; closes its connections when the last group is dropped.
#[derive(Debug)]
struct GangState {
    abort: GangAbort,
    progress: Arc<ProgressState>,
    /// Connections for the shutdown message.
    watchdog_streams: Vec<Arc<TcpStream>>,
}

impl GangState {
    fn check_running(&self) -> Result<()> {
        match self.abort.has_failed() {
            true => Err(PeerFailed("another rank failed".into()).into()),
            false => Ok(()),
        }
    }
}

impl Drop for GangState {
    fn drop(&mut self) {
        self.abort.stop_watchdog();
        if !self.abort.has_failed() && self.progress.announce_exit() {
            watchdog::send_shutdown(&self.watchdog_streams, &self.progress);
        }
        self.abort.close();
    }
}

/// Creates the group of all ranks, and the group of this pod's ranks if there are several pods with
/// several ranks.
///
/// # Errors
///
/// Fails if the system rejects a socket option or cannot start a thread.
pub(super) fn create_groups(
    topology: Topology,
    connections: Connections,
    limits: StallLimits,
    progress: Arc<ProgressState>,
) -> Result<(Group, Option<Group>)> {
    let Connections { watchdog_streams, hub, local_hub, ring: (next, previous) } = connections;
    let [watchdog_streams, hub, local_hub] = [watchdog_streams, hub, local_hub].map(shared);
    let streams = |peers: &[Peer]| peers.iter().map(|(_, stream)| stream.clone()).collect();
    let shutdown_streams: Vec<Arc<TcpStream>> = streams(&watchdog_streams);
    let all = [shutdown_streams.clone(), streams(&hub), streams(&local_hub)].concat();
    let ring: io::Result<Vec<Link>> =
        [&next, &previous].map(Link::try_clone_socket).into_iter().collect();
    let abort = GangAbort::new(all, ring.map_err(socket_error)?);
    start(topology.rank, watchdog_streams, limits, progress.clone(), abort.clone())
        .map_err(socket_error)?;
    let gang = Arc::new(GangState {
        abort,
        progress: progress.clone(),
        watchdog_streams: shutdown_streams,
    });
    let hub_of = |is_first: bool, peers: Vec<Peer>| match peers.is_empty() {
        true => Ok(None),
        false => Hub::new(is_first, peers).map(Some),
    };
    let local = match hub_of(topology.local_rank == 0, local_hub)? {
        None => None,
        Some(hub) => {
            let channels = Mutex::new(Some(Channels {
                hub: Some(hub),
                ring: None,
                device: None,
                next_sequence: 0,
            }));
            let (rank, size) = (topology.local_rank, topology.local_size);
            Some(Group { rank, size, channels, progress: progress.clone(), gang: gang.clone() })
        }
    };
    let ring = Some(Ring::new(topology.rank, topology.size, next, previous)?);
    let hub = hub_of(topology.rank == 0, hub)?;
    let channels = Channels { hub, ring, device: None, next_sequence: 0 };
    let (rank, size) = (topology.rank, topology.size);
    Ok((Group { rank, size, channels: Mutex::new(Some(channels)), progress, gang }, local))
}

/// A rank and the connection to it.
type Peer = (usize, Arc<TcpStream>);

/// Lets the abort state use the same file descriptors.
fn shared(peers: Vec<(usize, TcpStream)>) -> Vec<Peer> {
    peers.into_iter().map(|(rank, stream)| (rank, Arc::new(stream))).collect()
}

impl Group {
    fn with_channels<T>(
        &self,
        op: CollectiveOp,
        operation: impl FnOnce(&mut Channels, u32) -> Result<T>,
    ) -> Result<T> {
        let abort = &self.gang.abort;
        let mut guard = self.channels.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(channels) = guard.as_mut() else {
            return Err(PeerFailed("an earlier collective call failed".into()).into());
        };
        self.progress.begin_call(op, channels.ring.is_some());
        let result = operation(channels, channels.next_sequence);
        self.progress.end_call();
        match result {
            Ok(result) => {
                channels.next_sequence = channels.next_sequence.wrapping_add(1);
                Ok(result)
            }
            Err(error) => {
                // A failed collective is final. Notify the other ranks before waiting for anything.
                abort.mark_failed();
                abort.close();
                channels.mark_failed();
                *guard = None;
                // If the watchdog closed the connections, report its reason instead.
                Err(abort.reason().map_or(error, |why| Infrastructure(why.into()).into()))
            }
        }
    }

    /// Uses this implementation for tensors from now on.
    #[cfg(any(test, feature = "cuda"))]
    pub(super) fn attach_device(&mut self, device: Box<dyn DeviceAllReduce>) {
        let channels = self.channels.get_mut().unwrap_or_else(PoisonError::into_inner);
        if let Some(channels) = channels {
            channels.device = Some(device);
        }
    }

    /// Fails if the gang has failed.
    pub(super) fn check_running(&self) -> Result<()> {
        self.gang.check_running()
    }

    /// Fails if the gang has failed, or if a rank has exited. A sum on devices may not notice the
    /// exit; all other calls end with the connections of that rank.
    fn check_complete(&self) -> Result<()> {
        self.check_running()?;
        match self.gang.abort.exited_rank(EXIT_GRACE) {
            Some(rank) => Err(PeerFailed(format!("rank {rank} has exited")).into()),
            None => Ok(()),
        }
    }

    /// Returns `true` if the gang has failed.
    #[cfg(test)]
    pub(super) fn has_failed(&self) -> bool {
        self.gang.abort.has_failed()
    }

    fn sum<T: Summable>(&self, op: CollectiveOp, mut values: Buffer<'_, T>) -> Result<()> {
        let is_small = values.segment_bytes() <= GATHERED_BYTES_MAX;
        self.with_channels(op, |channels, number| match (&mut channels.hub, &mut channels.ring) {
            (_, Some(ring)) if !is_small => ring.sum(op, number, values, &self.progress),
            (Some(hub), ring) => {
                let call = Call { op, number, progress: &self.progress, ring: ring.as_ref() };
                let local = values.to_bytes().into();
                let sum = |all: &[Bytes]| {
                    sum_in_rank_order(all, &mut values)?;
                    Ok(values.to_bytes().into())
                };
                let sums = hub.sum(call, local, sum)?;
                match values.take_in(&sums, false) {
                    true => Ok(()),
                    false => Err(mismatched_call(hub.first_rank())),
                }
            }
            _ => {
                let local = values.to_bytes().into();
                sum_in_rank_order(&channels.gather(op, number, local, self)?, &mut values)
            }
        })
    }

    /// Same as [`sum`](Self::sum), for values without a head.
    fn sum_flat<T: Summable>(&self, op: CollectiveOp, values: &mut [T]) -> Result<()> {
        self.sum(op, Buffer::new(&mut [], std::iter::once(values)))
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        let channels = self.channels.get_mut().unwrap_or_else(PoisonError::into_inner);
        if let Some(channels) = channels
            && (self.gang.abort.has_failed() || !self.progress.exits_cleanly())
        {
            channels.mark_failed();
        }
    }
}

impl Channels {
    fn mark_failed(&mut self) {
        if let Some(device) = &mut self.device {
            device.mark_failed();
        }
    }

    fn gather(
        &mut self,
        op: CollectiveOp,
        number: u32,
        local: Bytes,
        group: &Group,
    ) -> Result<Vec<Bytes>> {
        match (&mut self.hub, &mut self.ring) {
            (Some(hub), ring) => {
                let progress = &group.progress;
                hub.gather(Call { op, number, progress, ring: ring.as_ref() }, local)
            }
            (None, Some(ring)) => {
                let remote = ring.exchange(op, number, &local, &group.progress)?;
                Ok(if group.rank == 0 { vec![local, remote] } else { vec![remote, local] })
            }
            (None, None) => Ok(vec![local]),
        }
    }
}

impl Collective for Group {
    fn rank(&self) -> usize {
        self.rank
    }

    fn size(&self) -> usize {
        self.size
    }

    fn sum_f32(&self, values: &mut [f32]) -> Result<()> {
        self.sum_flat(CollectiveOp::SumF32, values)
    }

    fn sum_segments(&self, head: &mut [f64], segments: &mut [&mut [f32]]) -> Result<()> {
        let segments = segments.iter_mut().map(|segment| &mut **segment);
        self.sum(CollectiveOp::SumSegments, Buffer::new(head, segments))
    }

    fn sum_f64(&self, values: &mut [f64]) -> Result<()> {
        self.sum_flat(CollectiveOp::SumF64, values)
    }

    fn sum_f16(&self, values: &mut [f16]) -> Result<()> {
        self.sum_flat(CollectiveOp::SumF16, values)
    }

    fn sum_bf16(&self, values: &mut [bf16]) -> Result<()> {
        self.sum_flat(CollectiveOp::SumBf16, values)
    }

    fn sums_on_device(&self) -> bool {
        let channels = self.channels.lock().unwrap_or_else(PoisonError::into_inner);
        channels.as_ref().is_some_and(|channels| channels.device.is_some())
    }

    fn sum_tensor(&self, values: Tensor<1>) -> Result<Tensor<1>> {
        let supports = |channels: &Channels| {
            channels.device.as_ref().is_some_and(|device| device.supports(&values))
        };
        let channels = self.channels.lock().unwrap_or_else(PoisonError::into_inner);
        let supports = channels.as_ref().is_some_and(supports);
        drop(channels);
        if !supports {
            return sum_on_host(self, values);
        }
        self.with_channels(CollectiveOp::SumTensor, |channels, _| match &mut channels.device {
            Some(device) => device.sum(values, &|| self.check_complete()),
            None => Ok(values),
        })
    }

    fn all_gather(&self, local: Bytes) -> Result<Vec<Bytes>> {
        let op = CollectiveOp::AllGather;
        self.with_channels(op, |channels, number| channels.gather(op, number, local, self))
    }

    fn gather_to_root(&self, local: Bytes) -> Result<Vec<Bytes>> {
        let op = CollectiveOp::Gather;
        self.with_channels(op, |channels, number| channels.gather(op, number, local, self))
    }
}
