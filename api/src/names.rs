//! Names of environment variables, files, checkpoints and labels, each written once.

/// API group of all custom resources.
pub const GROUP: &str = "stoker.dev";
/// Version of all custom resources.
pub const VERSION: &str = "v1alpha1";
/// `apiVersion` of all custom resources.
pub const API_VERSION: &str = "stoker.dev/v1alpha1";

/// Path of the JSON file that holds the [`TrialConfig`](crate::contract::TrialConfig). Unset: the program trains alone.
pub const ENV_TRIAL_CONFIG: &str = "STOKER_TRIAL_CONFIG";
/// Folder where results that outlive the process but not the machine are kept, such as downloaded data sets.
pub const ENV_CACHE: &str = "STOKER_CACHE";
/// How many seconds ranks wait for each other at their start (600).
pub const ENV_RENDEZVOUS_SECONDS: &str = "STOKER_RENDEZVOUS_SECONDS";
/// After how many seconds in which nothing moves a gang ends (300); 0: never.
pub const ENV_SILENCE_SECONDS: &str = "STOKER_SILENCE_SECONDS";
/// After how many median steps in which nothing moves, if that is longer (10).
pub const ENV_SILENCE_STEPS: &str = "STOKER_SILENCE_STEPS";
/// What a user may set of the variables that begin with `STOKER_`.
pub const ENV_SETTABLE: [&str; 7] = [
    ENV_DEVICE,
    ENV_RENDEZVOUS_SECONDS,
    ENV_SILENCE_SECONDS,
    ENV_SILENCE_STEPS,
    ENV_TEST,
    ENV_DATA_CACHE,
    ENV_DATA_CACHE_BYTES,
];
/// Folder of the data sets that are built once for each machine. Unset: in the user's cache folder.
pub const ENV_DATA_CACHE: &str = "STOKER_DATA_CACHE";
/// The most bytes that these data sets may take together. Unset: as many as the disk has left.
pub const ENV_DATA_CACHE_BYTES: &str = "STOKER_DATA_CACHE_BYTES";
/// `1`: a trainer says which part of the program works, reads its last checkpoint back and compares it.
pub const ENV_TEST: &str = "STOKER_TEST";
/// Where a trainer trains: `cpu` or `cuda`. Unset: on the GPU of its rank if there is any, or else on the CPU.
pub const ENV_DEVICE: &str = "STOKER_DEVICE";

/// File that receives the [`Termination`](crate::contract::Termination). Unset: none is written.
pub const ENV_TERMINATION_FILE: &str = "STOKER_TERMINATION_FILE";
/// The pod's index in its gang, from 0: `CROSS_RANK` of all its ranks.
pub const ENV_POD_INDEX: &str = "STOKER_POD_INDEX";
/// Set to `off` for a launcher whose output is stored by whoever started it.
pub const ENV_LAUNCHER_LOGS: &str = "STOKER_LAUNCHER_LOGS";
/// The port of rank 0's rendezvous and of `TF_CONFIG`, unless the variable of this name says otherwise.
pub const ENV_RENDEZVOUS_PORT: &str = "C10D_PORT";
/// See [`ENV_RENDEZVOUS_PORT`].
pub const RENDEZVOUS_PORT: u16 = 29_400;

/// Label of a trial's objects: the experiment's name.
pub const LABEL_EXPERIMENT: &str = "stoker.dev/experiment";
/// Label of a trial's objects: the trial's name.
pub const LABEL_TRIAL: &str = "stoker.dev/trial";
/// Label of a pod: the attempt's number.
pub const LABEL_ATTEMPT: &str = "stoker.dev/attempt";
/// Label of a pod: its index in the gang.
pub const LABEL_POD_INDEX: &str = "stoker.dev/pod-index";
/// Label of an inference job's pods: the job's name.
pub const LABEL_JOB: &str = "stoker.dev/job";
/// Label of a pod: what it is for. [`COMPONENT_TRIAL`], [`COMPONENT_CLEANUP`] or [`COMPONENT_JOB`].
pub const LABEL_COMPONENT: &str = "stoker.dev/component";
/// A pod that trains.
pub const COMPONENT_TRIAL: &str = "trial";
/// A pod that deletes an ended experiment's checkpoints.
pub const COMPONENT_CLEANUP: &str = "cleanup";
/// A pod of an inference job.
pub const COMPONENT_JOB: &str = "job";
/// Annotation of a pod: its [`TrialConfig`](crate::contract::TrialConfig) as JSON.
pub const ANNOTATION_TRIAL_CONFIG: &str = "stoker.dev/trial-config";
/// Header of an answer to a report: names of checkpoints that nobody needs any more, by commas. The
/// record has forgotten them; whoever can may delete their files, and the clean-up does at the end.
pub const HEADER_SUPERFLUOUS: &str = "stoker-superfluous";
/// Audience of the tokens that trainers report with.
pub const TOKEN_AUDIENCE: &str = "stoker";

/// Paths in a trial's pod.
pub mod pod_paths {
    /// The [`TrialConfig`](crate::contract::TrialConfig).
    pub const TRIAL_CONFIG: &str = "/etc/stoker/trial.json";
    /// The folder of [`TRIAL_CONFIG`].
    pub const TRIAL_CONFIG_FOLDER: &str = "/etc/stoker";
    /// The token that reports carry.
    pub const TOKEN: &str = "/var/run/stoker/token";
    /// The folder of [`TOKEN`].
    pub const TOKEN_FOLDER: &str = "/var/run/stoker";
    /// Where the launcher is put that starts programs of images without one.
    pub const LAUNCHER: &str = "/stoker/bin/stoker-trainer";
    /// Where the program's files are unpacked: its working folder, if any were sent.
    pub const CONTEXT: &str = "/stoker/context";
    /// A folder that both live in, shared by the pod's containers.
    pub const SHARED: &str = "/stoker";
    /// The [`Termination`](crate::contract::Termination).
    pub const TERMINATION: &str = "/dev/termination-log";
    /// The [`Cleanup`](crate::contract::Cleanup) of a pod that deletes checkpoints.
    pub const CLEANUP: &str = "/etc/stoker/cleanup.json";
}

/// The manifest's name in a checkpoint's folder. A checkpoint exists when it does.
pub const MANIFEST: &str = "manifest.json";
/// The file that carries a trial's record beside its checkpoints.
pub const RECORD: &str = "record.json";

/// The name of the checkpoint that `attempt` takes after `batches` global batches. Names sort by
/// batches; two attempts never share one.
///
/// # Examples
///
/// ```
/// assert_eq!(stoker_api::names::checkpoint_name(100, 3), "000000000100-3");
/// ```
pub fn checkpoint_name(batches: u64, attempt: u32) -> String {
    format!("{batches:012}-{attempt}")
}

/// The batches and the attempt in a name that [`checkpoint_name`] wrote; `None` for another name.
pub fn parse_checkpoint_name(name: &str) -> Option<(u64, u32)> {
    let (batches, attempt) = name.split_once('-')?;
    let parsed = (batches.parse().ok()?, attempt.parse().ok()?);
    (checkpoint_name(parsed.0, parsed.1) == name).then_some(parsed)
}

/// The folder of an experiment below the storage's root: its name and the first 8 characters of its id, so that a later
/// experiment of the same name has a folder of its own.
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

/// The folder of a trial below the storage's root: what
/// [`StorageConfig::trial_path`](crate::contract::StorageConfig::trial_path) holds.
pub fn trial_path(namespace: &str, experiment: &str, experiment_id: &str, trial: u32) -> String {
    format!("{}/trials/{trial}", experiment_path(namespace, experiment, experiment_id))
}

/// The archive of files that were sent with an experiment, below the storage's root.
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
    fn checkpoint_names_are_read_back_and_other_names_are_not() {
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
