//! Where a program runs.

use serde::Serialize;

use super::Session;

/// Where a program runs, and as what. Hyperparameters, seeds and data are the
/// [`Context`](crate::Context)'s.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
#[non_exhaustive]
pub struct ClusterInfo {
    /// Whether a runner started it: an operator or `stoker run`.
    pub has_runner: bool,
    /// The experiment's name; `alone` for a program that runs alone.
    pub experiment: String,
    /// The experiment's unique id.
    pub experiment_id: String,
    /// The trial's index.
    pub trial: u32,
    /// The life of the trial that this is, from 0.
    pub attempt: u32,
    /// This rank, and how many there are.
    pub rank: usize,
    /// Ranks in all.
    pub size: usize,
    /// This rank among those of its pod.
    pub local_rank: usize,
    /// Ranks of this pod.
    pub local_size: usize,
    /// This rank's pod among the pods.
    pub pod_index: usize,
    /// Pods in all.
    pub num_pods: usize,
    /// The machine's name: in a cluster the pod's.
    pub host: String,
    /// The root of the storage; none where the program keeps nothing.
    pub storage_url: Option<String>,
    /// The trial's folder below it.
    pub trial_path: String,
    /// The checkpoint that a restart would go on from.
    pub latest_checkpoint: Option<String>,
}

impl Session<'_> {
    /// Where this program runs, and as what.
    pub fn info(&self) -> ClusterInfo {
        let (config, ranks) = (&self.context.config, self.context.distributed());
        let outlet = self.context.outlet();
        let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
        ClusterInfo {
            has_runner: outlet.has_runner(),
            experiment: config.experiment.clone(),
            experiment_id: config.experiment_id.clone(),
            trial: config.trial,
            attempt: config.attempt,
            rank: ranks.rank(),
            size: ranks.size(),
            local_rank: ranks.local_rank(),
            local_size: ranks.local_size(),
            pod_index: ranks.cross_rank(),
            num_pods: ranks.cross_size(),
            host,
            storage_url: Some(config.storage.url.clone()).filter(|it| !it.is_empty()),
            trial_path: config.storage.trial_path.clone(),
            latest_checkpoint: outlet.latest(),
        }
    }
}
