//! The gang as a program sees it.

use std::sync::Arc;

use bytes::Bytes;
use serde::Serialize;
use serde::de::DeserializeOwned;
use sha2::{Digest as _, Sha256};
use stoker_api::contract::TrialConfig;

use super::group::Group;
use super::handshake::Sameness;
use super::launched::Launched;
use super::pulse::{Doing, Limits, Pulse};
use super::{Alone, Collective, Numbers, exchange, group, program, rendezvous};
use crate::Result;
use crate::device::Place;
use crate::error::InvalidHyperparameters;
use crate::stop::StopSignal;

/// The ranks that train together, and what they tell each other.
///
/// Methods that take or give a value are collective: every rank calls them in the same order, the
/// `local` ones every rank of a pod. Values are told as JSON: a `f64` keeps its bits.
#[derive(Debug)]
pub struct Distributed {
    numbers: Numbers,
    ranks: Box<dyn Collective>,
    /// The ranks of this pod, where they are not all.
    local: Option<Box<dyn Collective>>,
    pub(crate) pulse: Arc<Pulse>,
}

impl Distributed {
    /// One rank.
    pub fn alone() -> Self {
        Self::of(Box::new(Alone))
    }

    /// The ranks of `ranks`, all in one pod.
    pub fn of(ranks: Box<dyn Collective>) -> Self {
        let (rank, size) = (ranks.rank(), ranks.size());
        let numbers = Numbers {
            rank,
            size,
            local_rank: rank,
            local_size: size,
            cross_rank: 0,
            cross_size: 1,
        };
        Self { numbers, ranks, local: None, pulse: Arc::default() }
    }

    /// Meets the other ranks of the trial, if there are any.
    ///
    /// # Errors
    ///
    /// They did not come in time, are of another program, or `stop` was set before.
    pub(crate) fn join(
        config: &TrialConfig,
        launched: &Launched,
        gpu: Option<usize>,
        stop: &StopSignal,
    ) -> Result<Self> {
        Self::meet(launched, config.attempt, || sameness(config), gpu, stop)
    }

    /// Meets the other ranks that `RANK`, `WORLD_SIZE`, `LOCAL_RANK`, `LOCAL_WORLD_SIZE`, `GROUP_RANK`,
    /// `GROUP_WORLD_SIZE`, `MASTER_ADDR` and `MASTER_PORT` tell of, as torchrun sets them; one rank
    /// where there is no `MASTER_ADDR`. Ranks prove to each other that they have the same
    /// `STOKER_GANG_SECRET`.
    ///
    /// # Errors
    ///
    /// The variables make no sense, or the other ranks did not come in time.
    pub fn from_environment() -> Result<Self> {
        Self::outside(&Launched::from_environment()?)
    }

    /// As [`from_environment`](Self::from_environment), of the workers in `TF_CONFIG`.
    ///
    /// # Errors
    ///
    /// As it; also where this is no worker.
    pub fn from_tf_config() -> Result<Self> {
        Self::outside(&Launched::from_tf_config()?)
    }

    /// Ranks that no runner has started.
    fn outside(launched: &Launched) -> Result<Self> {
        let same = || Ok(Sameness { program: program::fingerprint()?, config: [0; 32] });
        let gpu = Place::of(launched.numbers.local_rank)?.gpu;
        Self::meet(launched, 0, same, gpu, &StopSignal::default())
    }

    fn meet(
        launched: &Launched,
        attempt: u32,
        same: impl FnOnce() -> Result<Sameness>,
        gpu: Option<usize>,
        stop: &StopSignal,
    ) -> Result<Self> {
        let Launched { numbers, gang: Some(gang) } = launched else { return Ok(Self::alone()) };
        let (numbers, limits) = (*numbers, Limits::from_environment()?);
        let connections = rendezvous::meet(gang, attempt, numbers, same()?, stop)?;
        let pulse = Arc::<Pulse>::default();
        let (mut ranks, local) = group::groups(numbers, connections, limits, pulse.clone())?;
        on_gpus(&mut ranks, gpu, stop)?;
        let local = local.map(|it| -> Box<dyn Collective> { Box::new(it) });
        Ok(Self { numbers, ranks: Box::new(ranks), local, pulse })
    }

    /// This rank, in `0..size`.
    pub fn rank(&self) -> usize {
        self.numbers.rank
    }

    /// The number of ranks.
    pub fn size(&self) -> usize {
        self.numbers.size
    }

    /// This rank among those of its pod.
    pub fn local_rank(&self) -> usize {
        self.numbers.local_rank
    }

    /// The number of ranks of this pod.
    pub fn local_size(&self) -> usize {
        self.numbers.local_size
    }

    /// This rank's pod among the pods.
    pub fn cross_rank(&self) -> usize {
        self.numbers.cross_rank
    }

    /// The number of pods.
    pub fn cross_size(&self) -> usize {
        self.numbers.cross_size
    }

    /// Sums, and bytes as they are.
    pub fn collective(&self) -> &dyn Collective {
        &*self.ranks
    }

    fn local(&self) -> &dyn Collective {
        match &self.local {
            Some(local) => &**local,
            None if self.numbers.local_size == 1 => &Alone,
            None => &*self.ranks,
        }
    }

    /// What each rank gives, in their order, on rank 0.
    ///
    /// # Errors
    ///
    /// Another rank is gone, or is somewhere else in the program.
    pub fn gather<T: Serialize + DeserializeOwned>(&self, mine: T) -> Result<Option<Vec<T>>> {
        let all = self.allgather(mine)?;
        Ok((self.rank() == 0).then_some(all))
    }

    /// As [`gather`](Self::gather), of the ranks of this pod, on its first.
    ///
    /// # Errors
    ///
    /// As it.
    pub fn gather_local<T: Serialize + DeserializeOwned>(&self, mine: T) -> Result<Option<Vec<T>>> {
        let all = self.allgather_local(mine)?;
        Ok((self.local_rank() == 0).then_some(all))
    }

    /// What each rank gives, in their order, on every rank.
    ///
    /// # Errors
    ///
    /// As [`gather`](Self::gather).
    pub fn allgather<T: Serialize + DeserializeOwned>(&self, mine: T) -> Result<Vec<T>> {
        exchange(&*self.ranks, "allgather", mine)
    }

    /// As [`allgather`](Self::allgather), of the ranks of this pod.
    ///
    /// # Errors
    ///
    /// As it.
    pub fn allgather_local<T: Serialize + DeserializeOwned>(&self, mine: T) -> Result<Vec<T>> {
        exchange(self.local(), "allgather_local", mine)
    }

    /// What rank 0 gives, on every rank.
    ///
    /// # Errors
    ///
    /// As [`gather`](Self::gather).
    pub fn broadcast<T: Serialize + DeserializeOwned>(&self, mine: T) -> Result<T> {
        broadcast(&*self.ranks, mine)
    }

    /// What the first rank of this pod gives, on every rank of it.
    ///
    /// # Errors
    ///
    /// As [`gather`](Self::gather).
    pub fn broadcast_local<T: Serialize + DeserializeOwned>(&self, mine: T) -> Result<T> {
        broadcast(self.local(), mine)
    }

    /// Waits until every rank is here.
    ///
    /// # Errors
    ///
    /// As [`gather`](Self::gather).
    pub fn barrier(&self) -> Result<()> {
        exchange(&*self.ranks, "barrier", ()).map(drop)
    }

    /// This rank's share of a batch size.
    ///
    /// # Errors
    ///
    /// The batch has no sample for each rank.
    pub fn shard_batch_size(&self, global: usize) -> Result<usize> {
        let size = self.size();
        if global < size {
            let text = format!("global_batch_size is {global}, but there are {size} ranks");
            return Err(InvalidHyperparameters(text).into());
        }
        Ok(global / size)
    }

    /// Says what this rank does until it says otherwise: whoever says nothing for long is taken for
    /// stuck.
    pub(crate) fn tick(&self, doing: Doing) {
        self.pulse.tick(doing);
    }
}

/// Sums tensors on GPUs from now on, if the ranks train there.
#[cfg(feature = "cuda")]
fn on_gpus(ranks: &mut Group, gpu: Option<usize>, stop: &StopSignal) -> Result<()> {
    super::nccl::attach(ranks, gpu, stop)
}

/// This build trains on CPUs alone.
#[cfg(not(feature = "cuda"))]
fn on_gpus(_ranks: &mut Group, _gpu: Option<usize>, _stop: &StopSignal) -> Result<()> {
    Ok(())
}

fn broadcast<T: Serialize + DeserializeOwned>(ranks: &dyn Collective, mine: T) -> Result<T> {
    if ranks.size() == 1 {
        return Ok(mine);
    }
    let said = match ranks.rank() {
        0 => serde_json::to_vec(&mine)?.into(),
        _ => Bytes::new(),
    };
    Ok(serde_json::from_slice(&ranks.broadcast(said)?)?)
}

/// What must be the same on all ranks: the program, and what it was told but for where things are
/// met, which may differ.
fn sameness(config: &TrialConfig) -> Result<Sameness> {
    let mut told = serde_json::to_value(config)?;
    if let Some(told) = told.as_object_mut() {
        told.remove("door");
    }
    let config = Sha256::digest(serde_json::to_vec(&told)?).into();
    Ok(Sameness { program: program::fingerprint()?, config })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_single_rank_does_not_hash_its_program() {
        let launched = Launched::ALONE;
        let same = || panic!("the program is hashed");
        let stop = StopSignal::default();
        assert_eq!(Distributed::meet(&launched, 0, same, None, &stop).unwrap().size(), 1);
    }
}
