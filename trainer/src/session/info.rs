//! Information about the process and its cluster.

use serde::Serialize;

use super::Session;

/// Information about the process, its trial and its cluster. Hyperparameters, seeds and data are in
/// the [`Context`](crate::Context).
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
#[non_exhaustive]
pub struct ClusterInfo {
    /// Whether a runner started this program: an operator or `stoker run`.
    pub has_runner: bool,
    /// Name of the experiment, or `alone` without a runner.
    pub experiment: String,
    /// Unique ID of the experiment, or `alone` without a runner.
    pub experiment_id: String,
    /// Index of the trial in its experiment.
    pub trial: u32,
    /// Attempt number, from 0.
    pub attempt: u32,
    /// Rank of this process.
    pub rank: usize,
    /// World size.
    pub size: usize,
    /// Rank of this process within its pod.
    pub local_rank: usize,
    /// Number of ranks in this pod.
    pub local_size: usize,
    /// Index of this pod.
    pub pod_index: usize,
    /// Number of pods.
    pub num_pods: usize,
    /// Host name; in a cluster, the name of the pod.
    pub host: String,
    /// Root of the storage; `None` if the program stores nothing.
    pub storage_url: Option<String>,
    /// Directory of the trial below the root of the storage.
    pub trial_path: String,
    /// Checkpoint from which a restart would resume.
    pub latest_checkpoint: Option<String>,
}

impl Session<'_> {
    /// Returns information about the process, its trial and its cluster.
    pub fn info(&self) -> ClusterInfo {
        let (config, ranks) = (&self.context.config, self.context.distributed());
        let io = self.context.io();
        let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
        ClusterInfo {
            has_runner: io.has_runner(),
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
            storage_url: Some(config.storage.url.clone()).filter(|url| !url.is_empty()),
            trial_path: config.storage.trial_path.clone(),
            latest_checkpoint: io.latest_checkpoint(),
        }
    }
}
