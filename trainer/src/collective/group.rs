//! A group of ranks over plain connections: what is large goes around a ring, what is small over one
//! rank. The first failure closes all connections, by which the others learn of it.

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

/// Up to so many bytes a sum is gathered, and added up by each rank: fewer turns, more bytes.
const GATHERED_BYTES_MAX: usize = 16 << 10;

/// Ranks that are connected.
#[derive(Debug)]
pub(super) struct Group {
    place: usize,
    size: usize,
    /// None once something has failed.
    open: Mutex<Option<Open>>,
    pulse: Arc<Pulse>,
    gang: Arc<Watched>,
}

#[derive(Debug)]
struct Open {
    hub: Option<Hub>,
    ring: Option<Ring>,
    on_device: Option<Box<dyn OnDevice>>,
    /// The number of the next message.
    next: u32,
}

/// What sums tensors where they lie, beside the connections.
pub(super) trait OnDevice: Send + std::fmt::Debug {
    /// Whether it can sum this; the same for all ranks.
    fn takes(&self, values: &Tensor<1>) -> bool;

    /// The sums of a flat tensor. `goes_on` is asked while it waits, and says when to give up.
    fn sum(&mut self, values: Tensor<1>, goes_on: &dyn Fn() -> Result<()>) -> Result<Tensor<1>>;

    /// The gang is over: its end waits for nobody.
    fn abandon(&mut self);
}

/// A gang's alarm, until its last group is gone.
#[derive(Debug)]
struct Watched {
    alarm: Alarm,
    pulse: Arc<Pulse>,
    /// To say farewell by.
    watch: Vec<TcpStream>,
}

impl Watched {
    fn goes_on(&self) -> Result<()> {
        match self.alarm.is_ringing() {
            true => Err(PeerFailed("another rank has failed".into()).into()),
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

/// All ranks of a gang as one group, and those of this pod where they are some of several.
///
/// # Errors
///
/// The connections are of no use, or the system has no more threads.
pub(super) fn groups(
    numbers: Numbers,
    connections: Connections,
    limits: Limits,
    pulse: Arc<Pulse>,
) -> Result<(Group, Option<Group>)> {
    let Connections { watch, hub, local_hub, ring: (next, previous) } = connections;
    let alarm = Alarm::default();
    let stars = [&watch, &hub, &local_hub].into_iter().flatten().map(|it| &it.1);
    alarm.guard(stars.chain([&next, &previous])).map_err(useless)?;
    let farewell = watch.iter().map(|it| it.1.try_clone()).collect::<std::io::Result<_>>();
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
            return Err(PeerFailed("the gang has failed before".into()).into());
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
                // A collective that fails is final. The others learn of it before this waits for anything.
                alarm.fail();
                alarm.close();
                links.abandon();
                *open = None;
                // Connections end where the watchdog has closed them: it knows why.
                Err(alarm.why().map_or(error, |why| Infrastructure(why.into()).into()))
            }
        }
    }

    /// Sums tensors by this from now on.
    #[cfg(any(test, feature = "cuda"))]
    pub(super) fn attach(&mut self, on_device: Box<dyn OnDevice>) {
        let open = self.open.get_mut().unwrap_or_else(PoisonError::into_inner);
        if let Some(open) = open {
            open.on_device = Some(on_device);
        }
    }

    /// Whether there is anything to wait for.
    pub(super) fn goes_on(&self) -> Result<()> {
        self.gang.goes_on()
    }

    /// Whether nothing can come of the gang any more.
    #[cfg(test)]
    pub(super) fn is_over(&self) -> bool {
        self.gang.alarm.is_ringing()
    }

    fn sum<T: Summed>(&self, kind: Kind, values: &mut [T]) -> Result<()> {
        let is_gathered = size_of_val(values) <= GATHERED_BYTES_MAX;
        self.with_open(kind, |open, number| match &mut open.ring {
            Some(ring) if !is_gathered => ring.sum(kind, number, values, &self.pulse),
            _ => {
                let mine = Bytes::copy_from_slice(bytemuck::cast_slice(values));
                added_up(&open.gather(kind, number, mine, self)?, values)
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

    fn gather(&mut self, kind: Kind, number: u32, mine: Bytes, of: &Group) -> Result<Vec<Bytes>> {
        match (&mut self.hub, &mut self.ring) {
            (Some(hub), _) => hub.gather(kind, number, mine, &of.pulse),
            (None, Some(ring)) => {
                let theirs = ring.exchange(kind, number, &mine, &of.pulse)?;
                Ok(if of.place == 0 { vec![mine, theirs] } else { vec![theirs, mine] })
            }
            (None, None) => Ok(vec![mine]),
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
        open.as_ref().is_some_and(|it| it.on_device.is_some())
    }

    fn sum_tensor(&self, values: Tensor<1>) -> Result<Tensor<1>> {
        let takes = |open: &Open| open.on_device.as_ref().is_some_and(|it| it.takes(&values));
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

    fn gather(&self, mine: Bytes) -> Result<Vec<Bytes>> {
        let kind = Kind::Gather;
        self.with_open(kind, |open, number| open.gather(kind, number, mine, self))
    }

    fn collect(&self, mine: Bytes) -> Result<Vec<Bytes>> {
        let kind = Kind::Collect;
        self.with_open(kind, |open, number| open.gather(kind, number, mine, self))
    }
}
