//! Public interface to the gang of ranks.

use std::sync::Arc;

use bytes::Bytes;
use serde::Serialize;
use serde::de::DeserializeOwned;
use sha2::{Digest as _, Sha256};
use stoker_api::contract::TrialConfig;

use super::group::Group;
use super::handshake::Fingerprint;
use super::launch_config::LaunchConfig;
use super::progress::{ProgressState, RankActivity, StallLimits};
use super::watchdog::SingleRankWatchdog;
use super::{
    Collective, SingleRank, Topology, all_gather_cbor, from_cbor, group, program, rendezvous,
    to_cbor,
};
use crate::Result;
use crate::device::RankDevice;
use crate::error::{Infrastructure, InvalidHyperparameters, PeerFailed};
use crate::stop::StopSignal;

/// The ranks that train together, with operations to exchange values between them.
///
/// The methods that send or receive values are collective: every rank must call them in the same
/// order. For the `local` methods, this applies to the ranks of one pod. Values are serialized as
/// CBOR; an `f64` keeps its exact bits, also if it is NaN or infinite.
#[derive(Debug)]
pub struct Distributed {
    topology: Topology,
    ranks: Box<dyn Collective>,
    /// Group of the ranks of this pod, if there are ranks in other pods.
    local: Option<Box<dyn Collective>>,
    pub(crate) progress: Arc<ProgressState>,
    /// Watchdog of a process without other ranks; those of a gang belong to its group.
    _watchdog: Option<SingleRankWatchdog>,
}

impl Distributed {
    /// Creates a gang of one rank.
    pub fn single_rank() -> Self {
        Self::from_collective(Box::new(SingleRank))
    }

    /// Creates a gang from a [`Collective`], with all ranks in one pod.
    pub fn from_collective(ranks: Box<dyn Collective>) -> Self {
        let (rank, size) = (ranks.rank(), ranks.size());
        let topology = Topology {
            rank,
            size,
            local_rank: rank,
            local_size: size,
            cross_rank: 0,
            cross_size: 1,
        };
        Self { topology, ranks, local: None, progress: Arc::default(), _watchdog: None }
    }

    /// Connects to the other ranks of the trial, if there are any.
    ///
    /// # Errors
    ///
    /// Fails on a timeout, if the ranks run different programs or configurations, or if `stop` is
    /// set.
    pub(crate) fn join(
        config: &TrialConfig,
        launch: &LaunchConfig,
        gpu: Option<usize>,
        stop: &StopSignal,
    ) -> Result<Self> {
        Self::connect(launch, config.attempt, || fingerprint(config), gpu, stop)
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
        Self::connect_external(&LaunchConfig::from_environment()?)
    }

    /// Same as [`from_environment`](Self::from_environment), but configured by the workers in
    /// `TF_CONFIG`.
    ///
    /// # Errors
    ///
    /// Same as [`from_environment`](Self::from_environment); also fails if the task is not a
    /// worker.
    pub fn from_tf_config() -> Result<Self> {
        Self::connect_external(&LaunchConfig::from_tf_config()?)
    }

    /// Connects ranks that were not started by a runner.
    fn connect_external(launch: &LaunchConfig) -> Result<Self> {
        let fingerprint_of = || Ok(Fingerprint { program: program::digest()?, config: [0; 32] });
        let gpu = RankDevice::for_local_rank(launch.topology.local_rank)?.gpu;
        Self::connect(launch, 0, fingerprint_of, gpu, &StopSignal::default())
    }

    fn connect(
        launch: &LaunchConfig,
        attempt: u32,
        fingerprint_of: impl FnOnce() -> Result<Fingerprint>,
        gpu: Option<usize>,
        stop: &StopSignal,
    ) -> Result<Self> {
        let LaunchConfig { topology, gang: Some(gang) } = launch else {
            return Self::watched_single_rank();
        };
        let (topology, limits) = (*topology, StallLimits::from_environment()?);
        let connections = rendezvous::connect(gang, attempt, topology, fingerprint_of()?, stop)?;
        let progress = Arc::<ProgressState>::default();
        let (mut ranks, local) =
            group::create_groups(topology, connections, limits, progress.clone())?;
        attach_gpus(&mut ranks, gpu, stop)?;
        let local = local.map(|group| -> Box<dyn Collective> { Box::new(group) });
        Ok(Self { topology, ranks: Box::new(ranks), local, progress, _watchdog: None })
    }

    /// Creates a gang of one rank, with a watchdog if the environment sets its limit.
    fn watched_single_rank() -> Result<Self> {
        let mut single = Self::single_rank();
        if let Some(limits) = StallLimits::of_single_rank()? {
            let watchdog = SingleRankWatchdog::start(limits, single.progress.clone());
            single._watchdog = Some(watchdog.map_err(|error| {
                Infrastructure(format!("cannot start the watchdog's thread: {error}"))
            })?);
        }
        Ok(single)
    }

    /// Returns this rank, in `0..size`.
    pub fn rank(&self) -> usize {
        self.topology.rank
    }

    /// Returns the number of ranks.
    pub fn size(&self) -> usize {
        self.topology.size
    }

    /// Returns the index of this rank within its pod.
    pub fn local_rank(&self) -> usize {
        self.topology.local_rank
    }

    /// Returns the number of ranks of this pod.
    pub fn local_size(&self) -> usize {
        self.topology.local_size
    }

    /// Returns the index of this rank's pod.
    pub fn cross_rank(&self) -> usize {
        self.topology.cross_rank
    }

    /// Returns the number of pods.
    pub fn cross_size(&self) -> usize {
        self.topology.cross_size
    }

    /// Returns the underlying operations on numbers, tensors and bytes.
    pub fn collective(&self) -> &dyn Collective {
        &*self.ranks
    }

    fn local(&self) -> &dyn Collective {
        match &self.local {
            Some(local) => &**local,
            None if self.topology.local_size == 1 => &SingleRank,
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
        all_gather_cbor(&*self.ranks, "allgather", value)
    }

    /// Gathers the values of the pod's ranks on each of them.
    ///
    /// # Errors
    ///
    /// Same as [`gather`](Self::gather).
    pub fn allgather_local<T: Serialize + DeserializeOwned>(&self, value: T) -> Result<Vec<T>> {
        all_gather_cbor(self.local(), "allgather_local", value)
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
        all_gather_cbor(&*self.ranks, "barrier", ()).map(drop)
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

    /// Gathers each rank's result on every rank, in rank order. If some ranks failed, each of them
    /// gets its own error, and the others get [`PeerFailed`]. `position` in the program is used in
    /// error messages.
    pub(crate) fn gather_results<T: Clone + Serialize + DeserializeOwned>(
        &self,
        position: &str,
        local: Result<T>,
    ) -> Result<Vec<T>> {
        let shared = local.as_ref().map_err(ToString::to_string).cloned();
        let all = all_gather_cbor(&*self.ranks, position, shared)?;
        // The caller may access the storage next, which has its own timeouts.
        self.record_activity(RankActivity::Wait);
        local?;
        let mut done = vec![];
        for (rank, outcome) in all.into_iter().enumerate() {
            done.push(outcome.map_err(|why| PeerFailed(format!("rank {rank}: {why}")))?);
        }
        Ok(done)
    }

    /// Records what this rank does until the next call. The watchdog reports a rank that makes no
    /// progress for long.
    pub(crate) fn record_activity(&self, activity: RankActivity) {
        self.progress.record_activity(activity);
    }
}

/// All-reduces tensors with NCCL from now on, if the ranks train on GPUs.
#[cfg(feature = "cuda")]
fn attach_gpus(ranks: &mut Group, gpu: Option<usize>, stop: &StopSignal) -> Result<()> {
    super::nccl::attach(ranks, gpu, stop)
}

/// Does nothing: this build supports CPUs only.
#[cfg(not(feature = "cuda"))]
fn attach_gpus(_ranks: &mut Group, _gpu: Option<usize>, _stop: &StopSignal) -> Result<()> {
    Ok(())
}

fn broadcast<T: Serialize + DeserializeOwned>(ranks: &dyn Collective, value: T) -> Result<T> {
    if ranks.size() == 1 {
        return Ok(value);
    }
    let bytes = match ranks.rank() {
        0 => to_cbor(&value)?,
        _ => Bytes::new(),
    };
    from_cbor(&ranks.broadcast(bytes)?)
}

/// Returns what must be the same on all ranks: the program and its configuration.
fn fingerprint(config: &TrialConfig) -> Result<Fingerprint> {
    Ok(Fingerprint { program: program::digest()?, config: config_digest(config)? })
}

/// Hashes a configuration, except the report endpoint, which may differ, and the records, which
/// only the first pod stores.
fn config_digest(config: &TrialConfig) -> Result<[u8; 32]> {
    let mut config_json = serde_json::to_value(config)?;
    if let Some(config_json) = config_json.as_object_mut() {
        config_json.remove("door");
        config_json.remove("records");
    }
    Ok(Sha256::digest(serde_json::to_vec(&config_json)?).into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_and_report_endpoint_may_differ_between_ranks() {
        let config = crate::train::Standalone::default().config().unwrap();
        let mut other = config.clone();
        other.records = Some("packed".to_owned());
        other.report_endpoint.url = "http://127.0.0.1:1".to_owned();
        assert_eq!(config_digest(&other).unwrap(), config_digest(&config).unwrap());
        other.seed += 1;
        assert_ne!(config_digest(&other).unwrap(), config_digest(&config).unwrap());
    }

    #[test]
    fn single_rank_does_not_hash_its_program() {
        let launch = LaunchConfig::SINGLE_RANK;
        let fingerprint_of = || panic!("the program was hashed");
        let stop = StopSignal::default();
        assert_eq!(
            Distributed::connect(&launch, 0, fingerprint_of, None, &stop).unwrap().size(),
            1
        );
    }
}
