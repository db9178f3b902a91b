//! Tasks of a job's processes, and the files in its output directory.
//!
//! ```text
//! OUTPUT/manifest.json                                lists all parts; written last
//! OUTPUT/part-00042-of-00391-UID8-ATTEMPT.jsonl       the output of one shard
//! OUTPUT/errors-UID8.jsonl                            rejected rows
//! OUTPUT/_stoker/UID8/plan.json                       the shards; written once
//! OUTPUT/_stoker/UID8/commits/00042.json              the part of shard 42
//! OUTPUT/_stoker/UID8/fresh.json                      latest `--fresh` run of a standalone job
//! ```

use serde::{Deserialize, Serialize};

use super::{CheckpointChoice, InferenceInput, InferenceOutput, OnError, RowFormat};

/// Format version of plans, commits and manifests.
pub const FILES_FORMAT: u32 = 1;
/// Directory of a job's state in its output directory. Other programs that read such directories
/// skip names that start with `_`.
pub const STATE_FOLDER: &str = "_stoker";
/// File name of the plan.
pub const PLAN: &str = "plan.json";
/// File name of a standalone job's latest run with `--fresh`.
const FRESH_RUN: &str = "fresh.json";
/// Directory name of the commits.
pub const COMMITS: &str = "commits";

/// Start of the message of a finishing process that found shards without a valid commit.
pub const INCOMPLETE_SHARDS: &str = "shards without a complete part";

/// Stage of a job, and role of its processes.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "crd", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub enum Role {
    /// Reads the input and writes the plan. If a plan exists, checks that the input still matches.
    #[default]
    Plan,
    /// Runs inference on the shards of one slot: those with shard number modulo slots = slot.
    Work,
    /// Writes the manifest after all shards are committed.
    Finish,
}

/// Task of one process of a job: the part of a `TrialConfig` that is specific to inference.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct InferenceTask {
    /// Role of the process.
    pub role: Role,
    /// Slot of the process, from 0.
    pub slot: u32,
    /// Total number of slots.
    pub slots: u32,
    /// The job's `input`.
    pub input: InferenceInput,
    /// The job's `output`, always with a URL.
    pub output: InferenceOutput,
    /// The job's `checkpoint`.
    #[serde(default)]
    pub checkpoint: Option<CheckpointChoice>,
    /// Whether the job specifies `hyperparameters`. Otherwise, those of the trial apply.
    #[serde(default)]
    pub has_hyperparameters: bool,
    /// Whether the output of another job in the same directory may be replaced.
    #[serde(default)]
    pub replace: bool,
    /// ID of the job whose output may be replaced, if `replace` is set. Earlier versions of the
    /// runner do not set this field; then any output may be replaced.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub replaced_job: Option<String>,
    /// Number of rows in a shard.
    pub shard_rows: u32,
    /// Maximum number of rows in a batch.
    pub batch_rows: u32,
    /// Handling of rows that cannot be read or that the program rejects.
    #[serde(default)]
    pub on_error: OnError,
}

impl InferenceTask {
    /// Returns whether the output of the job with this ID may be replaced.
    pub fn may_replace(&self, job_id: &str) -> bool {
        let is_replaced = |replaced: &str| replaced == job_id;
        self.replace && self.replaced_job.as_deref().is_none_or(is_replaced)
    }
}

/// Division of an input into shards. It depends only on the input and `shardRows`, and is written
/// once.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ShardPlan {
    /// [`FILES_FORMAT`] of the writer.
    pub format: u32,
    /// Unique ID of the job.
    pub job_id: String,
    /// URL of the input.
    pub input: String,
    /// Format of the input files.
    pub input_format: RowFormat,
    /// Number of rows in a shard. The last shard of a file may have fewer.
    pub shard_rows: u32,
    /// Input files, sorted by name.
    pub files: Vec<PlanFile>,
    /// Shards, in the order of files and rows.
    pub shards: Vec<PlanShard>,
    /// Checkpoint with the model's weights.
    #[serde(default)]
    pub checkpoint: Option<PinnedCheckpoint>,
}

/// An input file in a plan.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct PlanFile {
    /// Path of the file, relative to the input directory.
    pub name: String,
    /// Size of the file in bytes.
    pub bytes: u64,
    /// SHA-256 of the file, in hex.
    pub sha256: String,
    /// Number of rows in the file.
    pub rows: u64,
    /// Column names of a CSV file; empty for other formats.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub columns: Vec<String>,
}

/// Rows that are committed together.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct PlanShard {
    /// Index of the shard's file in the plan.
    pub file: u32,
    /// First row of the shard, from 0 in the file.
    pub first_row: u64,
    /// Number of rows in the shard.
    pub rows: u32,
    /// Start of the shard's byte range in the file; 0 if the format does not store rows one after
    /// another.
    pub start: u64,
    /// End of the shard's byte range in the file.
    pub end: u64,
    /// SHA-256 of the byte range, in hex. Empty if the format does not store rows one after
    /// another; then the hash of the file applies.
    pub sha256: String,
}

impl ShardPlan {
    /// Returns the total number of rows.
    pub fn rows(&self) -> u64 {
        self.files.iter().map(|file| file.rows).sum()
    }
}

/// The checkpoint that a job selected.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct PinnedCheckpoint {
    /// URL of the storage root, or the checkpoint directory if `trialPath` is unset.
    pub url: String,
    /// Endpoint of an S3-compatible server other than AWS.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub endpoint: Option<String>,
    /// Directory of the trial below the root.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub trial_path: Option<String>,
    /// Name of the checkpoint.
    pub name: String,
    /// SHA-256 of the checkpoint's manifest, in hex.
    pub manifest_sha256: String,
    /// Hyperparameters of the trial, if its record is stored with the checkpoint; otherwise null.
    #[serde(default, skip_serializing_if = "serde_json::Value::is_null")]
    pub hyperparameters: serde_json::Value,
}

/// The object that contains a shard's output. If several processes commit the same shard, any of
/// their commits is valid.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Commit {
    /// [`FILES_FORMAT`] of the writer.
    pub format: u32,
    /// Index of the shard in the plan.
    pub shard: u32,
    /// SHA-256 of the shard's bytes in the plan, so that a commit of another plan is ignored.
    pub of: String,
    /// File name of the part in the output directory.
    pub part: String,
    /// Size of the part in bytes.
    pub bytes: u64,
    /// SHA-256 of the part, in hex.
    pub sha256: String,
    /// Number of rows in the part.
    pub rows: u32,
    /// Rejected rows of the shard.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub rejected: Vec<RowError>,
    /// Attempt number of the process that wrote the part.
    pub attempt: u32,
}

/// A rejected row: it has no output.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct RowError {
    /// Index of the row, from 0 in its file.
    pub row: u64,
    /// Why the row was rejected.
    pub reason: String,
}

/// The manifest of an output directory. It is written last: without it, the output is incomplete.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct OutputManifest {
    /// [`FILES_FORMAT`] of the writer.
    pub format: u32,
    /// Name of the job.
    pub job: String,
    /// Unique ID of the job.
    pub job_id: String,
    /// Format of the output files.
    pub output_format: RowFormat,
    /// Number of rows in all parts.
    pub rows: u64,
    /// Number of rows of the input: the sum of `rows` and `rejected`.
    pub input_rows: u64,
    /// Number of rejected rows.
    pub rejected: u64,
    /// Parts, in the order of the input rows.
    pub parts: Vec<OutputPart>,
    /// File with the rejected rows. Unset if no row was rejected.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub errors: Option<ErrorsPart>,
    /// Input files.
    pub input: Vec<InputFile>,
    /// Checkpoint with the model's weights.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub checkpoint: Option<PinnedCheckpoint>,
}

/// One part of an output: the output of one shard.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct OutputPart {
    /// File name of the part in the output directory.
    pub name: String,
    /// Size of the part in bytes.
    pub bytes: u64,
    /// SHA-256 of the part, in hex.
    pub sha256: String,
    /// Number of rows in the part.
    pub rows: u32,
    /// Index of the input file in `input`.
    pub file: u32,
    /// First row of the shard, from 0 in the input file.
    pub first_row: u64,
    /// Number of input rows in the shard.
    pub input_rows: u32,
}

/// The file with the rejected rows: one JSON object per line with `file`, `row` (from 0) and
/// `reason`.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ErrorsPart {
    /// File name in the output directory.
    pub name: String,
    /// Size of the file in bytes.
    pub bytes: u64,
    /// SHA-256 of the file, in hex.
    pub sha256: String,
    /// Number of rejected rows.
    pub rows: u64,
}

/// An input file, as it was read.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct InputFile {
    /// Path of the file, relative to the input directory.
    pub name: String,
    /// Size of the file in bytes.
    pub bytes: u64,
    /// SHA-256 of the file, in hex.
    pub sha256: String,
    /// Number of rows in the file.
    pub rows: u64,
}

/// Returns the path of a job's plan in its output directory.
pub fn plan_path(job_id: &str) -> String {
    format!("{STATE_FOLDER}/{}/{PLAN}", uid8(job_id))
}

/// Returns the path of a standalone job's latest run with `--fresh`, in the output directory.
/// `job_id` is the ID without this option.
pub fn fresh_run_path(job_id: &str) -> String {
    format!("{STATE_FOLDER}/{}/{FRESH_RUN}", uid8(job_id))
}

/// Returns the directory of a job's commits in its output directory.
pub fn commits_path(job_id: &str) -> String {
    format!("{STATE_FOLDER}/{}/{COMMITS}", uid8(job_id))
}

/// Returns the path of a shard's commit in the output directory.
pub fn commit_path(job_id: &str, shard: u32) -> String {
    format!("{}/{shard:05}.json", commits_path(job_id))
}

/// Returns the shard index of the commit at a path; `None` for the path of another object.
///
/// # Examples
///
/// ```
/// use stoker_api::inference::{commit_path, shard_of_commit};
///
/// assert_eq!(shard_of_commit(&commit_path("0b3f9c1e", 42)), Some(42));
/// assert_eq!(shard_of_commit("_stoker/0b3f9c1e/plan.json"), None);
/// ```
pub fn shard_of_commit(path: &str) -> Option<u32> {
    path.rsplit('/').next()?.strip_suffix(".json")?.parse().ok()
}

/// Returns the file name of a shard's output. It contains the attempt number, so that attempts
/// never overwrite each other's files.
///
/// # Examples
///
/// ```
/// use stoker_api::inference::{RowFormat, part_name};
///
/// let name = part_name(42, 391, "0b3f9c1e-77aa", 7, RowFormat::Csv);
/// assert_eq!(name, "part-00042-of-00391-0b3f9c1e-7.csv");
/// ```
pub fn part_name(
    shard: u32,
    num_shards: u32,
    job_id: &str,
    attempt: u32,
    format: RowFormat,
) -> String {
    let (uid8, extension) = (uid8(job_id), format.extension());
    format!("part-{shard:05}-of-{num_shards:05}-{uid8}-{attempt}.{extension}")
}

/// Returns whether a file name has the form of [`part_name`].
///
/// # Examples
///
/// ```
/// use stoker_api::inference::is_part_name;
///
/// assert!(is_part_name("part-00042-of-00391-0b3f9c1e-7.csv"));
/// assert!(!is_part_name("part-00042-of-00391.csv"));
/// ```
pub fn is_part_name(name: &str) -> bool {
    let stem = name.split_once('.').map(|(stem, _)| stem);
    let fields: Vec<&str> = stem.unwrap_or_default().split('-').collect();
    let is_number = |field: &str| field.parse::<u32>().is_ok();
    match fields[..] {
        ["part", shard, "of", num_shards, uid8, attempt] => {
            !uid8.is_empty() && [shard, num_shards, attempt].into_iter().all(is_number)
        }
        _ => false,
    }
}

fn uid8(job_id: &str) -> String {
    job_id.chars().filter(char::is_ascii_alphanumeric).take(8).collect()
}
