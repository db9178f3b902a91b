//! The protocol between trainer and runner: configuration, reports and directives.
//!
//! Unknown fields are ignored and new fields have defaults. A trainer therefore works with a runner
//! that is one version older or newer.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::experiment::{CheckpointPolicy, GradientCompression, Length, MixedPrecision, Unit};
use crate::inference::InferenceTask;

mod cleanup;
mod manifest;
mod metrics;
mod records;

pub use cleanup::{Cleanup, CleanupStorage, CleanupTrial};
pub use manifest::{
    FileEntry, FileHash, HashAlgorithm, MANIFEST_FORMAT, MANIFEST_FORMAT_BLAKE3,
    MANIFEST_FORMAT_CHUNKS, Manifest, ManifestError,
};
pub use metrics::{
    METRIC_NAME_BYTES_MAX, METRICS_MAX, find_metric, find_time_metric, is_metric, metrics_in_order,
    reported_metrics, short_metric_name,
};
pub use records::{ReportResponse, StartRecords, StoredRecord};

/// Version of the [`TrialConfig`] and [`Report`] that this crate writes.
pub const CONTRACT_VERSION: u32 = 1;
/// Checkpoints offered to an attempt: the newest one, and 15 to fall back to.
pub const RESUME_FROM_MAX: usize = 16;
/// Latest checkpoints of a trial that are always kept during training: the one to resume from, and
/// two to fall back to.
pub const FALLBACK_CHECKPOINTS: u32 = 3;

/// Configuration of one attempt: a JSON file whose path is in
/// [`ENV_TRIAL_CONFIG`](crate::names::ENV_TRIAL_CONFIG).
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct TrialConfig {
    /// [`CONTRACT_VERSION`] of the writer.
    pub version: u32,
    /// Name of the experiment.
    pub experiment: String,
    /// Unique ID of the experiment. It distinguishes experiments with the same name.
    pub experiment_id: String,
    /// Index of the trial.
    pub trial: u32,
    /// Attempt number, from 0. Each report carries it; the runner fences earlier attempts.
    pub attempt: u32,
    /// Seed of the trial.
    pub seed: u32,
    /// Seed of the experiment.
    pub experiment_seed: u32,
    /// Sampled hyperparameters.
    pub hyperparameters: Value,
    /// The experiment's `hyperparameters`: the values that trials sample from.
    #[serde(default, skip_serializing_if = "Value::is_null")]
    pub search_space: Value,
    /// The experiment's `data`, unchanged.
    #[serde(default)]
    pub data: Value,
    /// The experiment's `spec` with defaults, except `state`, `data` and `hyperparameters`. For
    /// programs that read other fields.
    #[serde(default)]
    pub spec: Value,
    /// Unit of granted lengths.
    pub unit: Unit,
    /// Length granted so far, in `unit`.
    pub units: u64,
    /// Name of the searched validation metric.
    pub metric: String,
    /// Name of the validation metric whose value is the trained length, if there is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub time_metric: Option<String>,
    /// Whether a smaller metric is better.
    pub smaller_is_better: bool,
    /// Batches between rows of training metrics; at least 1.
    pub scheduling_unit: u64,
    /// Number of records in an epoch, as in the experiment; 0 means the size of the training data.
    #[serde(default)]
    pub records_per_epoch: u64,
    /// Interval between validations.
    #[serde(default)]
    pub validation_period: Option<Length>,
    /// Interval between checkpoints.
    #[serde(default)]
    pub checkpoint_period: Option<Length>,
    /// Which periodic validations are followed by a checkpoint.
    #[serde(default)]
    pub checkpoint_policy: CheckpointPolicy,
    /// Whether to validate once before the first batch.
    #[serde(default)]
    pub perform_initial_validation: bool,
    /// Number of batches over which gradients are accumulated before each optimizer step; at least
    /// 1.
    pub aggregation_frequency: u32,
    /// Whether a step uses the mean of the accumulated gradients instead of their sum.
    #[serde(default = "default_true")]
    pub average_aggregated_gradients: bool,
    /// Number format of gradients that are sent between ranks.
    #[serde(default)]
    pub gradient_compression: GradientCompression,
    /// Precision of model computations.
    #[serde(default)]
    pub mixed_precision: MixedPrecision,
    /// Storage of the trial's files.
    pub storage: StorageConfig,
    /// Checkpoints to resume from, in order of preference: the first complete one is used. Empty to
    /// start from scratch.
    #[serde(default)]
    pub resume_from: Vec<CheckpointRef>,
    /// First attempt whose checkpoints may be missing in `resume_from`, because the runner did not
    /// get their reports. Rank 0 lists the checkpoints of this and later attempts. If some are
    /// newer than the trial's own in `resume_from`, it prefers and reports them. Unset: none is
    /// missing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unreported_since: Option<u32>,
    /// Report endpoint of the runner.
    #[serde(rename = "door")]
    pub report_endpoint: ReportEndpoint,
    /// The gang, if it has more than one rank or an operator started its pods.
    #[serde(default)]
    pub gang: Option<Gang>,
    /// Files of the program, which are unpacked before it starts.
    #[serde(default)]
    pub context: Option<ContextRef>,
    /// Task of a process of an inference job. Such a process does not train, and uses the job's
    /// storage.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub inference: Option<InferenceTask>,
    /// [`StartRecords`], [packed](crate::packed). The launcher stores them next to the trial's
    /// files. Unset if the runner stores them itself, or if they are too large.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub records: Option<String>,
}

/// Default for runners that do not send the field.
fn default_true() -> bool {
    true
}

/// The ranks of an attempt, across its pods.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Gang {
    /// Total number of ranks.
    pub world_size: u32,
    /// Number of ranks in each pod: rank = pod index * `ranks_per_pod` + local rank.
    pub ranks_per_pod: u32,
    /// Rendezvous address of rank 0, `HOST:PORT`.
    pub rendezvous: String,
    /// Shared secret of the ranks of this attempt, in hex: an HMAC of the trial's UID and the
    /// attempt number.
    pub secret: String,
}

/// The archive with a program's files, sent with the experiment.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ContextRef {
    /// Path of the archive below the storage root: `NAMESPACE/contexts/SHA256.tar.gz`.
    pub path: String,
    /// SHA-256 of the archive, in hex.
    pub sha256: String,
}

/// Storage of a trial's files. Credentials come from the environment.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct StorageConfig {
    /// URL of the storage root, as in `checkpointStorage.url`.
    pub url: String,
    /// Endpoint of an S3-compatible server other than AWS.
    #[serde(default)]
    pub endpoint: Option<String>,
    /// Directory of the trial below the root: `NAMESPACE/EXPERIMENT-UID8/trials/INDEX`.
    pub trial_path: String,
}

/// A checkpoint, identified by its record.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct CheckpointRef {
    /// Directory name of the checkpoint below `checkpoints/`.
    pub name: String,
    /// SHA-256 of the checkpoint's manifest, in hex.
    pub manifest_sha256: String,
    /// Directory of the trial that wrote the checkpoint, below the root. Unset: the trial itself.
    /// Otherwise the trial is a copy, which never starts from scratch.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub trial_path: Option<String>,
}

/// The runner's report endpoint, used by rank 0.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ReportEndpoint {
    /// URL that accepts reports as JSON by POST. The response is a [`Directive`].
    pub url: String,
    /// File with the bearer token. The trainer reads it again for each request.
    pub token_file: String,
    /// CA certificate of the endpoint, as PEM. Unset: not required.
    #[serde(default)]
    pub ca: Option<String>,
}

/// Outcome of a container, as JSON in its termination message. It repeats unanswered reports, so
/// that a lost response does not lose a report.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Termination {
    /// Exit code.
    pub code: u8,
    /// Human-readable reason.
    #[serde(default)]
    pub message: Option<String>,
    /// Unanswered reports, oldest first, as far as they fit.
    #[serde(default)]
    pub unsent: Vec<Report>,
}

/// Maximum length of [`ReportEvent::Progress::activity`] in characters. Longer text is truncated.
pub const ACTIVITY_CHARS_MAX: usize = 200;

/// Maximum length of a termination message in bytes. Kubernetes truncates longer messages.
pub const TERMINATION_BYTES_MAX: usize = 4096;

/// A report of rank 0. Idempotent by trial, batches and kind: the first recorded report wins.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Report {
    /// [`CONTRACT_VERSION`] of the writer.
    pub version: u32,
    /// Attempt number of the trainer.
    pub attempt: u32,
    /// Number of global batches trained.
    pub batches: u64,
    /// Reported event.
    pub event: ReportEvent,
}

/// An event that rank 0 reports.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
#[serde(rename_all = "camelCase", rename_all_fields = "camelCase")]
pub enum ReportEvent {
    /// Training starts from scratch or from a checkpoint.
    Started {
        /// Name of the restored checkpoint.
        #[serde(default)]
        resumed_from: Option<String>,
        /// Number of global batches in the granted length.
        batches_total: u64,
        /// Unusable checkpoints of `resumeFrom` by name, with the reason.
        #[serde(default)]
        refused: BTreeMap<String, String>,
    },
    /// A heartbeat with the number of batches. It also fetches the current directive.
    Progress {
        /// Number of global batches in the granted length.
        batches_total: u64,
        /// Human-readable current activity of the program. Unset: unchanged.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        activity: Option<String>,
    },
    /// A validation has finished.
    Validated {
        /// Means over the validation data by metric name, as decimal strings; at most
        /// [`METRICS_MAX`].
        metrics: BTreeMap<String, String>,
        /// Granted length, if this validation is at its end. The searched metric is then a result.
        #[serde(default)]
        granted_units: Option<u64>,
    },
    /// A checkpoint exists: its manifest is written.
    Checkpointed {
        /// Directory name of the checkpoint below `checkpoints/`.
        name: String,
        /// SHA-256 of the checkpoint's manifest, in hex.
        manifest_sha256: String,
        /// Total size of the files in bytes.
        bytes: u64,
        /// Searched metric of a validation at the same batch, as a decimal string.
        #[serde(default)]
        metric: Option<String>,
    },
    /// The process is about to exit.
    Exiting {
        /// Exit code of the process.
        code: u8,
        /// Human-readable reason.
        #[serde(default)]
        message: Option<String>,
    },
}

/// The runner's response to a report.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase", rename_all_fields = "camelCase")]
pub enum Directive {
    /// Continue training to this length.
    Continue {
        /// Granted length, in the trial's unit.
        units: u64,
    },
    /// Undecided: send [`ReportEvent::Progress`] again soon.
    Wait,
    /// Save a checkpoint and exit with [`ExitCode::Preempted`].
    Preempt,
    /// The trial ends: save a checkpoint and exit with [`ExitCode::Completed`].
    Stop,
    /// The runner has ended this attempt: exit at once without writing.
    Fenced,
}

/// Exit codes of a trainer. Any other code, and a signal, is an error of the user's program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum ExitCode {
    /// The program reached the granted length and no more is granted, or it stopped itself.
    Completed = 0,
    /// The user's program failed.
    UserError = 1,
    /// The hyperparameters cannot be trained.
    InvalidHyperparameters = 78,
    /// The program saved a checkpoint and exited after a directive or SIGTERM.
    Preempted = 79,
    /// The infrastructure failed: storage, network or runner.
    Infrastructure = 80,
    /// Another rank failed. This rank is not at fault.
    PeerFailed = 81,
    /// The user's program failed, and a restart would fail in the same way.
    Unrecoverable = 82,
}

impl ExitCode {
    /// Returns the variant of a process's exit code; `None` for other codes.
    pub fn from_code(code: i32) -> Option<Self> {
        [
            Self::Completed,
            Self::UserError,
            Self::InvalidHyperparameters,
            Self::Preempted,
            Self::Infrastructure,
            Self::PeerFailed,
            Self::Unrecoverable,
        ]
        .into_iter()
        .find(|variant| *variant as i32 == code)
    }
}
