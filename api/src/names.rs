//! Names of environment variables, files, checkpoints and labels. Each name is defined once.

/// API group of all custom resources.
pub const GROUP: &str = "stoker.dev";
/// Version of all custom resources.
pub const VERSION: &str = "v1alpha1";
/// `apiVersion` of all custom resources.
pub const API_VERSION: &str = "stoker.dev/v1alpha1";

/// Path of the JSON file with the [`TrialConfig`](crate::contract::TrialConfig). Unset: the program
/// runs standalone.
pub const ENV_TRIAL_CONFIG: &str = "STOKER_TRIAL_CONFIG";
/// Cache directory for files that outlive the process but may be lost with the machine, such as
/// downloaded data sets.
pub const ENV_CACHE: &str = "STOKER_CACHE";
/// Seconds that ranks wait for each other at the start. Default: 600.
pub const ENV_RENDEZVOUS_SECONDS: &str = "STOKER_RENDEZVOUS_SECONDS";
/// Seconds without progress after which a gang ends; 0 means never. Default: 300. Applies to a
/// trial of one process only if this variable is set.
pub const ENV_SILENCE_SECONDS: &str = "STOKER_SILENCE_SECONDS";
/// Median step times without progress after which a gang ends, if that is longer than
/// [`ENV_SILENCE_SECONDS`]. Default: 10.
pub const ENV_SILENCE_STEPS: &str = "STOKER_SILENCE_STEPS";
/// Variables with the prefix `STOKER_` that users may set.
pub const ENV_SETTABLE: [&str; 8] = [
    ENV_DEVICE,
    ENV_KERNELS,
    ENV_RENDEZVOUS_SECONDS,
    ENV_SILENCE_SECONDS,
    ENV_SILENCE_STEPS,
    ENV_TEST,
    ENV_DATA_CACHE,
    ENV_DATA_CACHE_BYTES,
];
/// Directory of the data cache, in which data sets are built once per machine. Unset: in the user's
/// cache directory.
pub const ENV_DATA_CACHE: &str = "STOKER_DATA_CACHE";
/// Maximum total size of the data cache in bytes. Unset: limited by the free disk space.
pub const ENV_DATA_CACHE_BYTES: &str = "STOKER_DATA_CACHE_BYTES";
/// `1` enables the test mode: the trainer reports which stages of the program work, and verifies
/// its last checkpoint.
pub const ENV_TEST: &str = "STOKER_TEST";
/// Fused operators: `on`, `avx2` (without AVX-512) or `off`. Unset: `on`.
pub const ENV_KERNELS: &str = "STOKER_KERNELS";
/// Device of a trainer: `cpu` or `cuda`. Unset: the GPU of its rank if available, otherwise the
/// CPU.
pub const ENV_DEVICE: &str = "STOKER_DEVICE";

/// File that receives the [`Termination`](crate::contract::Termination). Unset: none is written.
pub const ENV_TERMINATION_FILE: &str = "STOKER_TERMINATION_FILE";
/// Index of the pod in its gang, from 0. It is the `CROSS_RANK` of all ranks of the pod.
pub const ENV_POD_INDEX: &str = "STOKER_POD_INDEX";
/// `off` if the process that started the launcher stores its output.
pub const ENV_LAUNCHER_LOGS: &str = "STOKER_LAUNCHER_LOGS";
/// Set to `1` for each rank by the launcher, or by a runner that starts a rank without it.
pub const ENV_LAUNCHED: &str = "STOKER_LAUNCHED";
/// Port of rank 0's rendezvous and of `TF_CONFIG`. Default: [`RENDEZVOUS_PORT`].
pub const ENV_RENDEZVOUS_PORT: &str = "C10D_PORT";
/// Default of [`ENV_RENDEZVOUS_PORT`].
pub const RENDEZVOUS_PORT: u16 = 29_400;

/// Label of a trial's objects: name of the experiment.
pub const LABEL_EXPERIMENT: &str = "stoker.dev/experiment";
/// Label of a trial's objects: name of the trial.
pub const LABEL_TRIAL: &str = "stoker.dev/trial";
/// Label of a pod: attempt number.
pub const LABEL_ATTEMPT: &str = "stoker.dev/attempt";
/// Label of a pod: index in the gang.
pub const LABEL_POD_INDEX: &str = "stoker.dev/pod-index";
/// Label of an inference job's pods: name of the job.
pub const LABEL_JOB: &str = "stoker.dev/job";
/// Label of a pod: its purpose, [`COMPONENT_TRIAL`], [`COMPONENT_CLEANUP`] or [`COMPONENT_JOB`].
pub const LABEL_COMPONENT: &str = "stoker.dev/component";
/// Component of pods that train.
pub const COMPONENT_TRIAL: &str = "trial";
/// Component of pods that delete checkpoints of an ended experiment.
pub const COMPONENT_CLEANUP: &str = "cleanup";
/// Component of pods of an inference job.
pub const COMPONENT_JOB: &str = "job";
/// Annotation of a pod: its [`TrialConfig`](crate::contract::TrialConfig) as JSON.
pub const ANNOTATION_TRIAL_CONFIG: &str = "stoker.dev/trial-config";
/// Header of the response to a report: comma-separated names of checkpoints that may be deleted
/// now. They are removed from the record. The trainer may delete their files; otherwise the cleanup
/// at the end does.
pub const HEADER_PRUNABLE: &str = "stoker-superfluous";
/// Header of a report: the response should contain the trial's record, as in
/// [`ReportResponse`](crate::contract::ReportResponse).
pub const HEADER_RECORD: &str = "stoker-record";
/// Annotation of a stored record: time at which it was made, in RFC 3339. An older record never
/// replaces a newer one.
pub const ANNOTATION_RECORDED_AT: &str = "stoker.dev/recorded-at";
/// Label of a clean-up pod: index of the first trial that the pod does not process.
pub const LABEL_CLEANUP_END: &str = "stoker.dev/cleanup-end";
/// Audience of the tokens with which trainers authenticate to the report server.
pub const TOKEN_AUDIENCE: &str = "stoker";

/// Paths in a trial's pod.
pub mod pod_paths {
    /// File with the [`TrialConfig`](crate::contract::TrialConfig).
    pub const TRIAL_CONFIG: &str = "/etc/stoker/trial.json";
    /// Directory of [`TRIAL_CONFIG`].
    pub const TRIAL_CONFIG_FOLDER: &str = "/etc/stoker";
    /// File with the bearer token for reports.
    pub const TOKEN: &str = "/var/run/stoker/token";
    /// Directory of [`TOKEN`].
    pub const TOKEN_FOLDER: &str = "/var/run/stoker";
    /// Copy of the launcher for images that do not contain it.
    pub const LAUNCHER: &str = "/stoker/bin/stoker-trainer";
    /// Directory with the unpacked files of the program, and its working directory. Only if files
    /// were sent.
    pub const CONTEXT: &str = "/stoker/context";
    /// Directory of [`LAUNCHER`] and [`CONTEXT`], shared by the pod's containers.
    pub const SHARED: &str = "/stoker";
    /// File with the [`Termination`](crate::contract::Termination).
    pub const TERMINATION: &str = "/dev/termination-log";
    /// File with the [`Cleanup`](crate::contract::Cleanup) of a pod that deletes checkpoints.
    pub const CLEANUP: &str = "/etc/stoker/cleanup.json";
}

/// File name of a checkpoint's manifest. A checkpoint exists if and only if its manifest does.
pub const MANIFEST: &str = "manifest.json";
/// File name of the record of an experiment or a trial, stored next to its other files.
pub const RECORD: &str = "record.json";

/// Returns the name of the checkpoint that `attempt` saves after `batches` global batches. Names
/// sort by batches and are unique across attempts.
///
/// # Examples
///
/// ```
/// assert_eq!(stoker_api::names::checkpoint_name(100, 3), "000000000100-3");
/// ```
pub fn checkpoint_name(batches: u64, attempt: u32) -> String {
    format!("{batches:012}-{attempt}")
}

/// Returns the batches and the attempt of a name from [`checkpoint_name`]; `None` for other names.
pub fn parse_checkpoint_name(name: &str) -> Option<(u64, u32)> {
    let (batches, attempt) = name.split_once('-')?;
    let (batches, attempt) = (batches.parse().ok()?, attempt.parse().ok()?);
    (checkpoint_name(batches, attempt) == name).then_some((batches, attempt))
}

/// Returns the directory of an experiment below the storage root. It contains the first 8
/// alphanumeric characters of the ID, so that experiments with the same name have separate
/// directories.
///
/// # Examples
///
/// ```
/// let path = stoker_api::names::experiment_path("default", "mnist", "0b3f9c1e-77aa");
/// assert_eq!(path, "default/mnist-0b3f9c1e");
/// ```
pub fn experiment_path(namespace: &str, experiment: &str, experiment_id: &str) -> String {
    let uid8: String = experiment_id.chars().filter(char::is_ascii_alphanumeric).take(8).collect();
    format!("{namespace}/{experiment}-{uid8}")
}

/// Returns the directory of a trial below the storage root, as in
/// [`StorageConfig::trial_path`](crate::contract::StorageConfig::trial_path).
pub fn trial_path(namespace: &str, experiment: &str, experiment_id: &str, trial: u32) -> String {
    format!("{}/trials/{trial}", experiment_path(namespace, experiment, experiment_id))
}

/// Returns the directory of the files of a job's processes, given the job's directory.
pub fn workers_path(job_path: &str) -> String {
    format!("{job_path}/workers")
}

/// Returns the directory of the files of the processes in one slot of a job, as in
/// [`StorageConfig::trial_path`](crate::contract::StorageConfig::trial_path).
pub fn worker_path(job_path: &str, slot: u32) -> String {
    format!("{}/{slot}", workers_path(job_path))
}

/// Returns the path of an experiment's or a trial's record, given its directory.
pub fn record_path(folder: &str) -> String {
    format!("{folder}/{RECORD}")
}

/// Returns the path below the storage root of the archive that was sent with an experiment.
pub fn context_path(namespace: &str, sha256: &str) -> String {
    format!("{namespace}/contexts/{sha256}.tar.gz")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(name: &str, expected: Option<(u64, u32)>) {
        assert_eq!(parse_checkpoint_name(name), expected, "{name}");
    }

    #[test]
    fn only_checkpoint_names_are_parsed() {
        check(&checkpoint_name(100, 3), Some((100, 3)));
        check("000000000100-3", Some((100, 3)));
        check("000000000100-03", None);
        check("100-3", None);
        check("manifest.json", None);
        check("../../x", None);
        check("+00000000100-3", None);
    }

    #[test]
    fn names_sort_by_batches() {
        assert!(checkpoint_name(999, 12) < checkpoint_name(1_000, 2));
    }
}
