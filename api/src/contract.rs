//! What a trainer is told, reports and is answered.
//!
//! Unknown fields are ignored and new ones have defaults, so that a trainer one version older or newer than its
//! runner works.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::experiment::{CheckpointPolicy, GradientCompression, Length, MixedPrecision, Unit};
use crate::inference::InferenceTask;

/// Version of [`TrialConfig`] and [`Report`] written by this crate.
pub const CONTRACT_VERSION: u32 = 1;

/// All that one attempt is told at its start: a JSON file named by
/// [`ENV_TRIAL_CONFIG`](crate::names::ENV_TRIAL_CONFIG).
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct TrialConfig {
    /// [`CONTRACT_VERSION`] of the writer.
    pub version: u32,
    /// The experiment's name.
    pub experiment: String,
    /// The experiment's unique id: a run with the same id goes on, another is another.
    pub experiment_id: String,
    /// The trial's index.
    pub trial: u32,
    /// The attempt's number, from 0. Reports carry it, and an old one's are refused.
    pub attempt: u32,
    /// The trial's seed.
    pub seed: u32,
    /// The experiment's seed.
    pub experiment_seed: u32,
    /// Hyperparameters drawn.
    pub hyperparameters: Value,
    /// The experiment's `data`, as it is.
    #[serde(default)]
    pub data: Value,
    /// The experiment's whole `spec`, but for `data` and `hyperparameters`, with defaults: for programs to look at.
    #[serde(default)]
    pub spec: Value,
    /// What granted lengths count.
    pub unit: Unit,
    /// The length granted so far, in `unit`.
    pub units: u64,
    /// The searched validation metric.
    pub metric: String,
    /// Whether a smaller metric is a better one.
    pub smaller_is_better: bool,
    /// Batches between two looks at whether to stop, and between two rows of training metrics; at least 1.
    pub scheduling_unit: u64,
    /// Records in an epoch, as the experiment's field of this name; 0: the training data's size.
    #[serde(default)]
    pub records_per_epoch: u64,
    /// Validate at least this often.
    #[serde(default)]
    pub validation_period: Option<Length>,
    /// Take a checkpoint at least this often.
    #[serde(default)]
    pub checkpoint_period: Option<Length>,
    /// After which periodic validations a checkpoint is taken.
    #[serde(default)]
    pub checkpoint_policy: CheckpointPolicy,
    /// Validate once before the first batch.
    #[serde(default)]
    pub perform_initial_validation: bool,
    /// Batches whose gradients are added up before the optimizer steps; at least 1.
    pub aggregation_frequency: u32,
    /// Whether those are averaged, not added up.
    #[serde(default = "averaged")]
    pub average_aggregated_gradients: bool,
    /// How gradients are written where they cross the network.
    #[serde(default)]
    pub gradient_compression: GradientCompression,
    /// Whether models compute in half precision, with weights in single precision.
    #[serde(default)]
    pub mixed_precision: MixedPrecision,
    /// Where this trial's files go.
    pub storage: StorageConfig,
    /// Checkpoints to start from, the first that is whole; empty to start anew.
    #[serde(default)]
    pub resume_from: Vec<CheckpointRef>,
    /// Where to report.
    pub door: Door,
    /// The gang, if it has more than one rank or its pods were started by an operator.
    #[serde(default)]
    pub gang: Option<Gang>,
    /// The program's files, to be unpacked before it starts.
    #[serde(default)]
    pub context: Option<ContextRef>,
    /// For a process of an inference job: what it does. It then trains nothing, and its storage is the job's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub inference: Option<InferenceTask>,
}

/// What a runner that does not say meant.
fn averaged() -> bool {
    true
}

/// The ranks of an attempt, over its pods.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Gang {
    /// Ranks in all.
    pub world_size: u32,
    /// Ranks of each pod: rank = pod index * `ranks_per_pod` + local rank.
    pub ranks_per_pod: u32,
    /// Where rank 0 is met by the others, `HOST:PORT`.
    pub rendezvous: String,
    /// What ranks of this attempt alone know, in hex: an HMAC of the trial's UID and the attempt.
    pub secret: String,
}

/// A program's files, sent with the experiment.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ContextRef {
    /// The archive's path below the storage's root: `NAMESPACE/contexts/SHA256.tar.gz`.
    pub path: String,
    /// SHA-256 of the archive, in hex.
    pub sha256: String,
}

/// Where a trial's files go. Credentials come from the environment.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct StorageConfig {
    /// The root, as in `checkpointStorage.url`.
    pub url: String,
    /// The address of an S3 server other than Amazon's.
    #[serde(default)]
    pub endpoint: Option<String>,
    /// The trial's folder below the root: `NAMESPACE/EXPERIMENT-UID8/trials/INDEX`.
    pub trial_path: String,
}

/// One checkpoint, by what its record says.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct CheckpointRef {
    /// Its folder's name under `checkpoints/`.
    pub name: String,
    /// SHA-256 of its manifest, in hex.
    pub manifest_sha256: String,
}

/// Where rank 0 reports.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Door {
    /// Reports are POSTed here as JSON; the answer is a [`Directive`].
    pub url: String,
    /// File that holds the bearer token; read anew for each request.
    pub token_file: String,
    /// The authority that signed the door's certificate, as PEM; unset: none is needed.
    #[serde(default)]
    pub ca: Option<String>,
}

/// How a container ended, as JSON in its termination message: what its exit code says, why, and the
/// reports that had no answer, so that a lost answer changes nothing.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Termination {
    /// The exit code.
    pub code: u8,
    /// Why, for people.
    #[serde(default)]
    pub message: Option<String>,
    /// Reports without an answer, oldest first: those that fit.
    #[serde(default)]
    pub unsent: Vec<Report>,
}

/// The longest [`ReportEvent::Progress::activity`] in characters: what is longer is cut.
pub const ACTIVITY_CHARS_MAX: usize = 200;

/// The longest termination message in bytes: Kubernetes cuts a longer one.
pub const TERMINATION_BYTES_MAX: usize = 4096;

/// What a cleanup pod deletes.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Cleanup {
    /// Where the checkpoints are.
    pub storage: CleanupStorage,
    /// Of which trials, and which.
    pub delete: Vec<CleanupTrial>,
}

/// A storage root. Credentials come from the environment.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct CleanupStorage {
    /// The root, as in `checkpointStorage.url`.
    pub url: String,
    /// The address of an S3 server other than Amazon's.
    #[serde(default)]
    pub endpoint: Option<String>,
}

/// Checkpoints of one trial that go, and those that stay.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct CleanupTrial {
    /// The trial's folder below the root.
    pub trial_path: String,
    /// Names of checkpoints to delete.
    #[serde(default)]
    pub checkpoints: Vec<String>,
    /// Names of checkpoints that stay, whatever else is said.
    #[serde(default)]
    pub keep: Vec<String>,
    /// Attempts of lower numbers are over: what they left in neither list, such as halves of
    /// checkpoints, is deleted too. 0: nothing is.
    #[serde(default)]
    pub attempts_over: u32,
}

/// What rank 0 says. Idempotent by (trial, batches, kind): the first recorded wins.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Report {
    /// [`CONTRACT_VERSION`] of the writer.
    pub version: u32,
    /// The attempt that reports.
    pub attempt: u32,
    /// Global batches trained.
    pub batches: u64,
    /// What happened.
    pub event: ReportEvent,
}

/// What a report is about.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
#[serde(rename_all = "camelCase", rename_all_fields = "camelCase")]
pub enum ReportEvent {
    /// Training starts, anew or from a checkpoint.
    Started {
        /// The checkpoint restored.
        #[serde(default)]
        resumed_from: Option<String>,
        /// Batches at which the granted length ends.
        batches_total: u64,
        /// Checkpoints of `resumeFrom` that were not whole, with what was wrong.
        #[serde(default)]
        refused: BTreeMap<String, String>,
    },
    /// Nothing new but the batches: a sign of life and a question for the directive.
    Progress {
        /// Batches at which the granted length ends.
        batches_total: u64,
        /// What the program says it is doing, for people; unset: nothing new.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        activity: Option<String>,
    },
    /// A validation has finished.
    Validated {
        /// Means over the validation data, as decimal strings by name.
        metrics: BTreeMap<String, String>,
        /// Where the granted length ends here: that length. The searched metric is then a result.
        #[serde(default)]
        granted_units: Option<u64>,
    },
    /// A checkpoint exists: its manifest is written.
    Checkpointed {
        /// Its folder's name under `checkpoints/`.
        name: String,
        /// SHA-256 of its manifest, in hex.
        manifest_sha256: String,
        /// Sum of its files' sizes.
        bytes: u64,
        /// The searched metric of a validation at the same batch.
        #[serde(default)]
        metric: Option<String>,
    },
    /// The process is about to end. The exit code says the same.
    Exiting {
        /// The exit code.
        code: u8,
        /// Why, for people.
        #[serde(default)]
        message: Option<String>,
    },
}

/// The answer to a report.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase", rename_all_fields = "camelCase")]
pub enum Directive {
    /// Train on to this length.
    Continue {
        /// The length granted, in the trial's unit.
        units: u64,
    },
    /// Undecided: ask again with [`ReportEvent::Progress`] soon.
    Wait,
    /// Checkpoint and exit with [`ExitCode::Preempted`].
    Preempt,
    /// Nothing more is wanted: checkpoint and exit with [`ExitCode::Completed`].
    Stop,
    /// This attempt is over for the runner: exit at once, write nothing.
    Fenced,
}

/// How a trainer's process ends. Any other code, and a signal, is an error of the user's program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum ExitCode {
    /// The granted length was reached and nothing more is wanted, or the program stopped itself.
    Completed = 0,
    /// An error of the user's program.
    UserError = 1,
    /// The hyperparameters cannot be trained.
    InvalidHyperparameters = 78,
    /// Checkpointed and left because it was asked to, by a directive or SIGTERM.
    Preempted = 79,
    /// What is under the program failed: storage, network, the runner.
    Infrastructure = 80,
    /// Another rank failed; says nothing of this one.
    PeerFailed = 81,
}

impl ExitCode {
    /// The exit code that a process ended with, if it is one of ours.
    pub fn from_code(code: i32) -> Option<Self> {
        [
            Self::Completed,
            Self::UserError,
            Self::InvalidHyperparameters,
            Self::Preempted,
            Self::Infrastructure,
            Self::PeerFailed,
        ]
        .into_iter()
        .find(|it| *it as i32 == code)
    }
}

/// What makes a folder of files a checkpoint. Written last.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Manifest {
    /// Version of the checkpoint's format.
    pub format: u32,
    /// The experiment's id.
    pub experiment_id: String,
    /// The trial's index.
    pub trial: u32,
    /// The attempt that wrote it.
    pub attempt: u32,
    /// Global batches trained.
    pub batches: u64,
    /// The searched metric of a validation at the same batch, as a decimal string.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub metric: Option<String>,
    /// The files, by name.
    pub files: BTreeMap<String, FileEntry>,
    /// Reports that had no answer yet; sent after a restore.
    #[serde(default)]
    pub unsent: Vec<Report>,
    /// What the user's program adds.
    #[serde(default)]
    pub metadata: BTreeMap<String, Value>,
}

/// One file of a checkpoint.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct FileEntry {
    /// Its size.
    pub bytes: u64,
    /// SHA-256 of its bytes, in hex.
    pub sha256: String,
}
