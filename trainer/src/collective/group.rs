//! A group of ranks over TCP connections. Large messages use a ring, small messages go through one
//! rank. The first failure closes all connections, which notifies the other ranks.

use std::net::TcpStream;
use std::sync::{Arc, Mutex, PoisonError};

use burn::tensor::{Tensor, bf16, f16};
use bytes::Bytes;

use super::hub::Hub;
use super::pulse::{Limits, Pulse};
use super::rendezvous::Connections;
use super::ring::{Ring, Summed};
use super::watch::{self, Alarm, start};
use super::wire::useless;
use super::{Collective, Kind, Numbers, added_up, sum_on_host};
use crate::Result;
use crate::error::{Infrastructure, PeerFailed};

/// All-reduces up to this size are gathered and summed on each rank: fewer round trips, but more
/// bytes.
const GATHERED_BYTES_MAX: usize = 16 << 10;

/// Connected ranks.
#[derive(Debug)]
pub(super) struct Group {
    place: usize,
    size: usize,
    /// `None` after a failure.
    open: Mutex<Option<Open>>,
    pulse: Arc<Pulse>,
    gang: Arc<Watched>,
}

#[derive(Debug)]
struct Open {
    hub: Option<Hub>,
    ring: Option<Ring>,
    on_device: Option<Box<dyn OnDevice>>,
    /// Sequence number of the next message.
    next: u32,
}

/// All-reduces tensors on their device, for example with NCCL.
pub(super) trait OnDevice: Send + std::fmt::Debug {
    /// Returns `true` if the tensor is supported; the result must be the same on all ranks.
    fn takes(&self, values: &Tensor<1>) -> bool;

    /// Returns the all-reduced sum of a flat tensor. Calls `goes_on` while waiting, and fails if it
    /// does.
    fn sum(&mut self, values: Tensor<1>, goes_on: &dyn Fn() -> Result<()>) -> Result<Tensor<1>>;

    /// Marks the gang as failed, so that dropping this value does not wait for other ranks.
    fn abandon(&mut self);
}

/// Abort state of a gang; closes its connections when the last group is dropped.
#[derive(Debug)]
struct Watched {
    alarm: Alarm,
    pulse: Arc<Pulse>,
    /// Connections for the shutdown message.
    watch: Vec<TcpStream>,
}

impl Watched {
    fn goes_on(&self) -> Result<()> {
        match self.alarm.is_ringing() {
            true => Err(PeerFailed("another rank failed".into()).into()),
            false => Ok(()),
        }
    }
}

impl Drop for Watched {
    fn drop(&mut self) {
        self.alarm.end();
        if !self.alarm.is_ringing() && self.pulse.part() {
            watch::farewell(&self.watch, &self.pulse);
        }
        self.alarm.close();
    }
}

/// Creates the group of all ranks, and the group of this pod's ranks if there are several pods with
/// several ranks.
///
/// # Errors
///
/// Fails if the system rejects a socket option or cannot start a thread.
pub(super) fn groups(
    numbers: Numbers,
    connections: Connections,
    limits: Limits,
    pulse: Arc<Pulse>,
) -> Result<(Group, Option<Group>)> {
    let Connections { watch, hub, local_hub, ring: (next, previous) } = connections;
    let alarm = Alarm::default();
    let stars = [&watch, &hub, &local_hub].into_iter().flatten().map(|(_, stream)| stream);
    alarm.guard(stars.chain([&next, &previous])).map_err(useless)?;
    let farewell =
        watch.iter().map(|(_, stream)| stream.try_clone()).collect::<std::io::Result<_>>();
    let farewell = farewell.map_err(useless)?;
    start(numbers.rank, watch, limits, pulse.clone(), alarm.clone()).map_err(useless)?;
    let gang = Arc::new(Watched { alarm, pulse: pulse.clone(), watch: farewell });
    let hub_of = |is_first: bool, peers: Vec<(usize, TcpStream)>| match peers.is_empty() {
        true => Ok(None),
        false => Hub::new(is_first, peers).map(Some),
    };
    let local = match hub_of(numbers.local_rank == 0, local_hub)? {
        None => None,
        Some(hub) => {
            let open =
                Mutex::new(Some(Open { hub: Some(hub), ring: None, on_device: None, next: 0 }));
            let (place, size) = (numbers.local_rank, numbers.local_size);
            Some(Group { place, size, open, pulse: pulse.clone(), gang: gang.clone() })
        }
    };
    let ring = Some(Ring::new(numbers.rank, numbers.size, next, previous)?);
    let hub = hub_of(numbers.rank == 0, hub)?;
    let open = Open { hub, ring, on_device: None, next: 0 };
    let (place, size) = (numbers.rank, numbers.size);
    Ok((Group { place, size, open: Mutex::new(Some(open)), pulse, gang }, local))
}

impl Group {
    fn with_open<T>(&self, kind: Kind, act: impl FnOnce(&mut Open, u32) -> Result<T>) -> Result<T> {
        let alarm = &self.gang.alarm;
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(links) = open.as_mut() else {
            return Err(PeerFailed("an earlier collective call failed".into()).into());
        };
        self.pulse.enter(kind, links.ring.is_some());
        let done = act(links, links.next);
        self.pulse.leave();
        match done {
            Ok(done) => {
                links.next = links.next.wrapping_add(1);
                Ok(done)
            }
            Err(error) => {
                // A failed collective is final. Notify the other ranks before waiting for anything.
                alarm.fail();
                alarm.close();
                links.abandon();
                *open = None;
                // If the watchdog closed the connections, report its reason instead.
                Err(alarm.why().map_or(error, |why| Infrastructure(why.into()).into()))
            }
        }
    }

    /// Uses this implementation for tensors from now on.
    #[cfg(any(test, feature = "cuda"))]
    pub(super) fn attach(&mut self, on_device: Box<dyn OnDevice>) {
        let open = self.open.get_mut().unwrap_or_else(PoisonError::into_inner);
        if let Some(open) = open {
            open.on_device = Some(on_device);
        }
    }

    /// Fails if the gang has failed.
    pub(super) fn goes_on(&self) -> Result<()> {
        self.gang.goes_on()
    }

    /// Returns `true` if the gang has failed.
    #[cfg(test)]
    pub(super) fn is_over(&self) -> bool {
        self.gang.alarm.is_ringing()
    }

    fn sum<T: Summed>(&self, kind: Kind, values: &mut [T]) -> Result<()> {
        let is_gathered = size_of_val(values) <= GATHERED_BYTES_MAX;
        self.with_open(kind, |open, number| match &mut open.ring {
            Some(ring) if !is_gathered => ring.sum(kind, number, values, &self.pulse),
            _ => {
                let local = Bytes::copy_from_slice(bytemuck::cast_slice(values));
                added_up(&open.gather(kind, number, local, self)?, values)
            }
        })
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        let open = self.open.get_mut().unwrap_or_else(PoisonError::into_inner);
        if let Some(open) = open
            && (self.gang.alarm.is_ringing() || !self.pulse.is_well())
        {
            open.abandon();
        }
    }
}

impl Open {
    fn abandon(&mut self) {
        if let Some(on_device) = &mut self.on_device {
            on_device.abandon();
        }
    }

    fn gather(&mut self, kind: Kind, number: u32, local: Bytes, of: &Group) -> Result<Vec<Bytes>> {
        match (&mut self.hub, &mut self.ring) {
            (Some(hub), _) => hub.gather(kind, number, local, &of.pulse),
            (None, Some(ring)) => {
                let remote = ring.exchange(kind, number, &local, &of.pulse)?;
                Ok(if of.place == 0 { vec![local, remote] } else { vec![remote, local] })
            }
            (None, None) => Ok(vec![local]),
        }
    }
}

impl Collective for Group {
    fn rank(&self) -> usize {
        self.place
    }

    fn size(&self) -> usize {
        self.size
    }

    fn sum_f32(&self, values: &mut [f32]) -> Result<()> {
        self.sum(Kind::SumF32, values)
    }

    fn sum_f64(&self, values: &mut [f64]) -> Result<()> {
        self.sum(Kind::SumF64, values)
    }

    fn sum_f16(&self, values: &mut [f16]) -> Result<()> {
        self.sum(Kind::SumF16, values)
    }

    fn sum_bf16(&self, values: &mut [bf16]) -> Result<()> {
        self.sum(Kind::SumBf16, values)
    }

    fn sums_on_device(&self) -> bool {
        let open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        open.as_ref().is_some_and(|open| open.on_device.is_some())
    }

    fn sum_tensor(&self, values: Tensor<1>) -> Result<Tensor<1>> {
        let takes =
            |open: &Open| open.on_device.as_ref().is_some_and(|device| device.takes(&values));
        let open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        let takes = open.as_ref().is_some_and(takes);
        drop(open);
        if !takes {
            return sum_on_host(self, values);
        }
        self.with_open(Kind::SumTensor, |open, _| match &mut open.on_device {
            Some(on_device) => on_device.sum(values, &|| self.goes_on()),
            None => Ok(values),
        })
    }

    fn gather(&self, local: Bytes) -> Result<Vec<Bytes>> {
        let kind = Kind::Gather;
        self.with_open(kind, |open, number| open.gather(kind, number, local, self))
    }

    fn collect(&self, local: Bytes) -> Result<Vec<Bytes>> {
        let kind = Kind::Collect;
        self.with_open(kind, |open, number| open.gather(kind, number, local, self))
    }
}
