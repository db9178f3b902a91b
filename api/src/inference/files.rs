//! What the processes of a job are told, and what they leave in its output folder.
//!
//! ```text
//! OUTPUT/manifest.json                                written last: readers follow it
//! OUTPUT/part-00042-of-00391-UID8-ATTEMPT.jsonl       the output of one shard
//! OUTPUT/errors-UID8.jsonl                            rejected rows
//! OUTPUT/_stoker/UID8/plan.json                       the shards, written once
//! OUTPUT/_stoker/UID8/commits/00042.json              the part that is shard 42's
//! ```

use serde::{Deserialize, Serialize};

use super::{CheckpointChoice, InferenceInput, InferenceOutput, OnError, RowFormat};

/// Version of plans, commits and manifests.
pub const FILES_FORMAT: u32 = 1;
/// The folder of a job's own state in its output folder. Other programs that read such folders pass over names that
/// begin with `_`.
pub const STATE_FOLDER: &str = "_stoker";
/// The plan's name.
pub const PLAN: &str = "plan.json";
/// The folder of commits.
pub const COMMITS: &str = "commits";

/// What one process of a job does.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "crd", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub enum Role {
    /// Looks at the input and writes the plan; where there is one, checks that the input is still the planned one.
    #[default]
    Plan,
    /// Puts shards through the model: of the plan those whose number divided by the number of slots leaves its own.
    Work,
    /// Writes the manifest, once all shards are committed.
    Finish,
}

/// What one process of a job is told, beside what every program is: part of a `TrialConfig`.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct InferenceTask {
    /// What it does.
    pub role: Role,
    /// Which of the slots it is, from 0.
    pub slot: u32,
    /// Slots in all.
    pub slots: u32,
    /// The job's `input`.
    pub input: InferenceInput,
    /// The job's `output`, with its URL.
    pub output: InferenceOutput,
    /// The job's `checkpoint`.
    #[serde(default)]
    pub checkpoint: Option<CheckpointChoice>,
    /// Whether `hyperparameters` are the job's own: otherwise they are the trial's.
    #[serde(default)]
    pub has_hyperparameters: bool,
    /// Whether another job's output in the same folder may be replaced.
    #[serde(default)]
    pub replace: bool,
    /// Rows of a shard.
    pub shard_rows: u32,
    /// Rows of a batch, at most.
    pub batch_rows: u32,
    /// What happens when a row cannot be read.
    #[serde(default)]
    pub on_error: OnError,
}

/// How an input is cut into shards: a function of the input and of `shardRows`, written once.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ShardPlan {
    /// [`FILES_FORMAT`].
    pub format: u32,
    /// The job's unique id.
    pub job_id: String,
    /// The input's URL.
    pub input: String,
    /// How its rows are written.
    pub input_format: RowFormat,
    /// Rows of a shard: the last one of a file may have fewer.
    pub shard_rows: u32,
    /// The files, by name.
    pub files: Vec<PlanFile>,
    /// The shards, in the order of files and rows.
    pub shards: Vec<PlanShard>,
    /// The model.
    #[serde(default)]
    pub checkpoint: Option<PinnedCheckpoint>,
}

/// A file of the input.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct PlanFile {
    /// Its path, below the input's folder.
    pub name: String,
    /// Its size.
    pub bytes: u64,
    /// SHA-256 of its bytes, in hex.
    pub sha256: String,
    /// Its rows.
    pub rows: u64,
    /// Of a CSV file, the names of its columns.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub columns: Vec<String>,
}

/// Rows that are committed together.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct PlanShard {
    /// Index of its file.
    pub file: u32,
    /// The first row, from 0 in the file.
    pub first_row: u64,
    /// Its rows.
    pub rows: u32,
    /// Where its bytes begin; 0 for a format with no rows in its bytes.
    pub start: u64,
    /// Where they end.
    pub end: u64,
    /// SHA-256 of these bytes, in hex; empty for a format with no rows in its bytes, of which the file's counts.
    pub sha256: String,
}

impl ShardPlan {
    /// Rows in all.
    pub fn rows(&self) -> u64 {
        self.files.iter().map(|it| it.rows).sum()
    }
}

/// The checkpoint that a job uses, as it was chosen.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct PinnedCheckpoint {
    /// The storage's root, or the checkpoint's folder where there is no `trialPath`.
    pub url: String,
    /// The address of an S3 server other than Amazon's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub endpoint: Option<String>,
    /// The trial's folder below the root.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub trial_path: Option<String>,
    /// The checkpoint's name.
    pub name: String,
    /// SHA-256 of its manifest, in hex.
    pub manifest_sha256: String,
    /// The trial's hyperparameters, where its record lies beside the checkpoint.
    #[serde(default, skip_serializing_if = "serde_json::Value::is_null")]
    pub hyperparameters: serde_json::Value,
}

/// Which object is a shard's output. Whoever writes the path again names another object that is as good.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Commit {
    /// [`FILES_FORMAT`].
    pub format: u32,
    /// The shard.
    pub shard: u32,
    /// SHA-256 of the shard's bytes in the plan, so that a commit of another plan is none.
    pub of: String,
    /// The part's name in the output folder.
    pub part: String,
    /// Its size.
    pub bytes: u64,
    /// SHA-256 of its bytes, in hex.
    pub sha256: String,
    /// Rows in the part.
    pub rows: u32,
    /// Rows of the shard that are not.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub rejected: Vec<RowError>,
    /// The process that wrote it.
    pub attempt: u32,
}

/// A row that has no output.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct RowError {
    /// The row, from 0 in its file.
    pub row: u64,
    /// What is wrong with it.
    pub reason: String,
}

/// What makes a folder of parts an output. Written last.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct OutputManifest {
    /// [`FILES_FORMAT`].
    pub format: u32,
    /// The job's name.
    pub job: String,
    /// Its unique id.
    pub job_id: String,
    /// How rows are written.
    pub output_format: RowFormat,
    /// Rows in all parts.
    pub rows: u64,
    /// Rows of the input: `rows` and `rejected` together.
    pub input_rows: u64,
    /// Rows of the input that are in no part.
    pub rejected: u64,
    /// The parts, in the order of the input's rows.
    pub parts: Vec<OutputPart>,
    /// The rejected rows, if there are any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub errors: Option<ErrorsPart>,
    /// The input, by file.
    pub input: Vec<InputFile>,
    /// The model.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub checkpoint: Option<PinnedCheckpoint>,
}

/// One part of an output.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct OutputPart {
    /// Its name in the output folder.
    pub name: String,
    /// Its size.
    pub bytes: u64,
    /// SHA-256 of its bytes, in hex.
    pub sha256: String,
    /// Its rows.
    pub rows: u32,
    /// The input's file that they are of: an index into `input`.
    pub file: u32,
    /// The first row of the file that it stands for, from 0.
    pub first_row: u64,
    /// Rows of the file that it stands for.
    pub input_rows: u32,
}

/// The rejected rows: an object with one JSON object a line: `file`, `row` from 0, `reason`.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ErrorsPart {
    /// Its name in the output folder.
    pub name: String,
    /// Its size.
    pub bytes: u64,
    /// SHA-256 of its bytes, in hex.
    pub sha256: String,
    /// Its lines.
    pub rows: u64,
}

/// A file of the input, as it was read.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct InputFile {
    /// Its path, below the input's folder.
    pub name: String,
    /// Its size.
    pub bytes: u64,
    /// SHA-256 of its bytes, in hex.
    pub sha256: String,
    /// Its rows.
    pub rows: u64,
}

/// Where a job's plan lies in its output folder.
pub fn plan_path(job_id: &str) -> String {
    format!("{STATE_FOLDER}/{}/{PLAN}", uid8(job_id))
}

/// The folder of a job's commits in its output folder.
pub fn commits_path(job_id: &str) -> String {
    format!("{STATE_FOLDER}/{}/{COMMITS}", uid8(job_id))
}

/// Where the commit of a shard lies in the output folder.
pub fn commit_path(job_id: &str, shard: u32) -> String {
    format!("{}/{shard:05}.json", commits_path(job_id))
}

/// The shard that the object at a path is the commit of; `None` for another object.
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

/// The name of a shard's output. Two attempts never share one, so that nobody overwrites another's.
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

fn uid8(job_id: &str) -> String {
    job_id.chars().filter(char::is_ascii_alphanumeric).take(8).collect()
}
