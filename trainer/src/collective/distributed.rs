//! Public interface to the gang of ranks.

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

/// The ranks that train together, with operations to exchange values between them.
///
/// The methods that send or receive values are collective: every rank must call them in the same
/// order. For the `local` methods, this applies to the ranks of one pod. Values are serialized as
/// JSON; an `f64` keeps its exact bits.
#[derive(Debug)]
pub struct Distributed {
    numbers: Numbers,
    ranks: Box<dyn Collective>,
    /// Group of the ranks of this pod, if there are ranks in other pods.
    local: Option<Box<dyn Collective>>,
    pub(crate) pulse: Arc<Pulse>,
}

impl Distributed {
    /// Creates a gang of one rank.
    pub fn alone() -> Self {
        Self::of(Box::new(Alone))
    }

    /// Creates a gang from a [`Collective`], with all ranks in one pod.
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

    /// Connects to the other ranks of the trial, if there are any.
    ///
    /// # Errors
    ///
    /// Fails on a timeout, if the ranks run different programs or configurations, or if `stop` is
    /// set.
    pub(crate) fn join(
        config: &TrialConfig,
        launched: &Launched,
        gpu: Option<usize>,
        stop: &StopSignal,
    ) -> Result<Self> {
        Self::meet(launched, config.attempt, || sameness(config), gpu, stop)
    }

    /// Connects to the other ranks, configured by environment variables as torchrun sets them:
    /// `RANK`, `WORLD_SIZE`, `LOCAL_RANK`, `LOCAL_WORLD_SIZE`, `GROUP_RANK`, `GROUP_WORLD_SIZE`,
    /// `MASTER_ADDR` and `MASTER_PORT`. Without `MASTER_ADDR`, returns a gang of one rank. Blocks
    /// until all ranks are connected. Ranks authenticate each other by `STOKER_GANG_SECRET`.
    ///
    /// # Errors
    ///
    /// Fails if a variable is missing or invalid, or on a timeout while waiting for the other
    /// ranks.
    pub fn from_environment() -> Result<Self> {
        Self::outside(&Launched::from_environment()?)
    }

    /// Same as [`from_environment`](Self::from_environment), but configured by the workers in
    /// `TF_CONFIG`.
    ///
    /// # Errors
    ///
    /// Same as [`from_environment`](Self::from_environment); also fails if the task is not a
    /// worker.
    pub fn from_tf_config() -> Result<Self> {
        Self::outside(&Launched::from_tf_config()?)
    }

    /// Connects ranks that were not started by a runner.
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
        let local = local.map(|group| -> Box<dyn Collective> { Box::new(group) });
        Ok(Self { numbers, ranks: Box::new(ranks), local, pulse })
    }

    /// Returns this rank, in `0..size`.
    pub fn rank(&self) -> usize {
        self.numbers.rank
    }

    /// Returns the number of ranks.
    pub fn size(&self) -> usize {
        self.numbers.size
    }

    /// Returns the index of this rank within its pod.
    pub fn local_rank(&self) -> usize {
        self.numbers.local_rank
    }

    /// Returns the number of ranks of this pod.
    pub fn local_size(&self) -> usize {
        self.numbers.local_size
    }

    /// Returns the index of this rank's pod.
    pub fn cross_rank(&self) -> usize {
        self.numbers.cross_rank
    }

    /// Returns the number of pods.
    pub fn cross_size(&self) -> usize {
        self.numbers.cross_size
    }

    /// Returns the underlying operations on numbers, tensors and bytes.
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

    /// Gathers each rank's value on rank 0, in rank order; returns `None` on the other ranks.
    ///
    /// # Errors
    ///
    /// Fails if another rank exited, or made a different call.
    pub fn gather<T: Serialize + DeserializeOwned>(&self, value: T) -> Result<Option<Vec<T>>> {
        let all = self.allgather(value)?;
        Ok((self.rank() == 0).then_some(all))
    }

    /// Gathers the values of the pod's ranks on the first of them; returns `None` on the others.
    ///
    /// # Errors
    ///
    /// Same as [`gather`](Self::gather).
    pub fn gather_local<T: Serialize + DeserializeOwned>(
        &self,
        value: T,
    ) -> Result<Option<Vec<T>>> {
        let all = self.allgather_local(value)?;
        Ok((self.local_rank() == 0).then_some(all))
    }

    /// Gathers each rank's value on every rank, in rank order.
    ///
    /// # Errors
    ///
    /// Same as [`gather`](Self::gather).
    pub fn allgather<T: Serialize + DeserializeOwned>(&self, value: T) -> Result<Vec<T>> {
        exchange(&*self.ranks, "allgather", value)
    }

    /// Gathers the values of the pod's ranks on each of them.
    ///
    /// # Errors
    ///
    /// Same as [`gather`](Self::gather).
    pub fn allgather_local<T: Serialize + DeserializeOwned>(&self, value: T) -> Result<Vec<T>> {
        exchange(self.local(), "allgather_local", value)
    }

    /// Returns the value of rank 0 on every rank.
    ///
    /// # Errors
    ///
    /// Same as [`gather`](Self::gather).
    pub fn broadcast<T: Serialize + DeserializeOwned>(&self, value: T) -> Result<T> {
        broadcast(&*self.ranks, value)
    }

    /// Returns the value of the pod's first rank on every rank of the pod.
    ///
    /// # Errors
    ///
    /// Same as [`gather`](Self::gather).
    pub fn broadcast_local<T: Serialize + DeserializeOwned>(&self, value: T) -> Result<T> {
        broadcast(self.local(), value)
    }

    /// Waits until every rank has called this method.
    ///
    /// # Errors
    ///
    /// Same as [`gather`](Self::gather).
    pub fn barrier(&self) -> Result<()> {
        exchange(&*self.ranks, "barrier", ()).map(drop)
    }

    /// Returns this rank's share of a global batch size, rounded down.
    ///
    /// # Errors
    ///
    /// Fails if the batch size is smaller than the number of ranks.
    pub fn shard_batch_size(&self, global: usize) -> Result<usize> {
        let size = self.size();
        if global < size {
            let text = format!(
                "global_batch_size is {global}, but must be at least {size}, the number of ranks"
            );
            return Err(InvalidHyperparameters(text).into());
        }
        Ok(global / size)
    }

    /// Records what this rank does until the next call. The watchdog reports a rank that makes no
    /// progress for long.
    pub(crate) fn tick(&self, doing: Doing) {
        self.pulse.tick(doing);
    }
}

/// All-reduces tensors with NCCL from now on, if the ranks train on GPUs.
#[cfg(feature = "cuda")]
fn on_gpus(ranks: &mut Group, gpu: Option<usize>, stop: &StopSignal) -> Result<()> {
    super::nccl::attach(ranks, gpu, stop)
}

/// Does nothing: this build supports CPUs only.
#[cfg(not(feature = "cuda"))]
fn on_gpus(_ranks: &mut Group, _gpu: Option<usize>, _stop: &StopSignal) -> Result<()> {
    Ok(())
}

fn broadcast<T: Serialize + DeserializeOwned>(ranks: &dyn Collective, value: T) -> Result<T> {
    if ranks.size() == 1 {
        return Ok(value);
    }
    let bytes = match ranks.rank() {
        0 => serde_json::to_vec(&value)?.into(),
        _ => Bytes::new(),
    };
    Ok(serde_json::from_slice(&ranks.broadcast(bytes)?)?)
}

/// Returns what must be the same on all ranks: the program and its configuration, except the report
/// endpoint, which may differ.
fn sameness(config: &TrialConfig) -> Result<Sameness> {
    let mut config_json = serde_json::to_value(config)?;
    if let Some(config_json) = config_json.as_object_mut() {
        config_json.remove("door");
    }
    let config = Sha256::digest(serde_json::to_vec(&config_json)?).into();
    Ok(Sameness { program: program::fingerprint()?, config })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn single_rank_does_not_hash_its_program() {
        let launched = Launched::ALONE;
        let same = || panic!("the program was hashed");
        let stop = StopSignal::default();
        assert_eq!(Distributed::meet(&launched, 0, same, None, &stop).unwrap().size(), 1);
    }
}
