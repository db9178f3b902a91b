//! The InferenceJob resource: batch inference with a trained model, exactly once per input row.

mod checkpoint;
mod files;
#[cfg(feature = "crd")]
mod schema;
mod status;

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::experiment::{CodeContext, DesiredState, Entrypoint, EnvVar};
use crate::pod::PodTemplate;

pub use checkpoint::{CheckpointChoice, StoredTrial, WhichCheckpoint};
pub use files::{
    COMMITS, Commit, ErrorsPart, FILES_FORMAT, INCOMPLETE_SHARDS, InferenceTask, InputFile,
    OutputManifest, OutputPart, PLAN, PinnedCheckpoint, PlanFile, PlanShard, Role, RowError,
    STATE_FOLDER, ShardPlan, commit_path, commits_path, fresh_run_path, is_part_name, part_name,
    plan_path, shard_of_commit,
};
pub use status::{InferenceStatus, WorkerEnd, WorkerStatus};

/// Specification of an inference job: program, model, input, output and workers.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
#[cfg_attr(
    feature = "crd",
    derive(kube::CustomResource, schemars::JsonSchema),
    kube(
        group = "stoker.dev",
        version = "v1alpha1",
        kind = "InferenceJob",
        namespaced,
        status = "InferenceStatus",
        shortname = "ij",
        category = "stoker",
        doc = "Batch inference with a trained model, exactly once per input row.",
        validation = kube::core::Rule::new(crate::experiment::schema::NAME_RULE)
            .message(crate::experiment::schema::NAME_MESSAGE),
        printcolumn(name = "Phase", type_ = "string", json_path = ".status.phase"),
        printcolumn(name = "Stage", type_ = "string", json_path = ".status.stage"),
        printcolumn(name = "Slots", type_ = "integer", json_path = ".spec.resources.slots"),
        printcolumn(name = "Rows", type_ = "integer", json_path = ".status.rows"),
        printcolumn(name = "Of", type_ = "integer", json_path = ".status.rowsTotal"),
        printcolumn(name = "Rejected", type_ = "integer", json_path = ".status.rejected"),
        printcolumn(name = "Restarts", type_ = "integer", json_path = ".status.restarts"),
        printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp")
    ),
    schemars(extend("x-kubernetes-validations" = schema::rules()))
)]
#[serde(rename_all = "camelCase")]
pub struct InferenceJobSpec {
    /// Human-readable description of the job.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub description: Option<String>,

    /// Arbitrary configuration passed to the program unchanged. Default: empty.
    #[serde(default = "empty_object")]
    #[cfg_attr(feature = "crd", schemars(schema_with = "crate::experiment::schema::free_object"))]
    pub data: Value,

    /// Program that every worker runs.
    pub entrypoint: Entrypoint,

    /// Checkpoint with the model's weights. Unset: the program provides the weights.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub checkpoint: Option<CheckpointChoice>,

    /// Hyperparameters of the model. Unset: those of the trial that saved the checkpoint.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "crd", schemars(schema_with = "crate::experiment::schema::free_object"))]
    pub hyperparameters: Option<Value>,

    /// Input rows.
    pub input: InferenceInput,

    /// Output of the program.
    #[serde(default)]
    pub output: InferenceOutput,

    /// Number of rows in a shard, from 1 to 10,000,000. A shard is committed as a whole, so a
    /// killed worker loses the work on two shards at most. Default: 1000.
    #[serde(default = "default_shard_rows")]
    #[cfg_attr(feature = "crd", schemars(range(min = 1, max = 10_000_000)))]
    pub shard_rows: u32,

    /// Maximum number of rows passed to the program at once, from 1 to 10,000,000. Default: 64.
    #[serde(default = "default_batch_rows")]
    #[cfg_attr(feature = "crd", schemars(range(min = 1, max = 10_000_000)))]
    pub batch_rows: u32,

    /// Handling of rows that cannot be read or that the program rejects. Default: `fail`.
    #[serde(default)]
    pub on_error: OnError,

    /// Number of workers and the resources of each.
    #[serde(default)]
    pub resources: InferenceResources,

    /// Environment variables of the program. Names that start with `STOKER_` are reserved, with the
    /// same exceptions as in an Experiment, such as `STOKER_DEVICE`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub env: Vec<EnvVar>,

    /// Storage of the job's logs. By default, the output is stored here too. If `checkpoint.trial`
    /// is set, the trial must be in this storage.
    #[serde(default)]
    pub storage: InferenceStorage,

    /// Number of restarts of each worker after failures of the program. With 5 (the default), the
    /// sixth failure of a worker fails the job. Infrastructure failures and preemptions do not
    /// count.
    #[serde(default = "default_max_restarts")]
    pub max_restarts: u32,

    /// Seconds that a worker has to exit after a pause or cancel request. Then it is killed.
    /// Default: 3600.
    #[serde(default = "default_preemption_timeout_seconds")]
    #[cfg_attr(feature = "crd", schemars(range(min = 1)))]
    pub preemption_timeout_seconds: u32,

    /// Desired state of the job. The only mutable field of the spec.
    #[serde(default)]
    pub state: DesiredState,

    /// Files sent with the job, such as the program. Each pod unpacks them into its working
    /// directory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub context: Option<CodeContext>,

    /// Settings of the workers' pods. `stoker job run` ignores them.
    #[serde(default)]
    pub pod: PodTemplate,

    /// JSON merge patch that is applied to each worker's pod last, as in an Experiment.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "crd", schemars(schema_with = "crate::experiment::schema::free_object"))]
    pub pod_overrides: Option<Value>,
}

impl InferenceJobSpec {
    /// Returns the part of the spec that programs receive as `spec`: all fields except the mutable
    /// `state`, and `data` and `hyperparameters`, which programs receive separately.
    pub fn for_programs(&self) -> Value {
        let mut spec = serde_json::to_value(self).unwrap_or_default();
        if let Some(fields) = spec.as_object_mut() {
            fields.retain(|name, _| !["state", "data", "hyperparameters"].contains(&name.as_str()));
        }
        spec
    }
}

/// Input rows of an inference job.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "crd", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct InferenceInput {
    /// A file, a directory or a pattern with `*` and `?` in names. Directories are read
    /// recursively. Either a path, relative to the program's working directory, or a URL
    /// (`file:///`, `s3://`, `gs://` or `az://`).
    #[cfg_attr(feature = "crd", schemars(length(min = 1)))]
    pub url: String,
    /// Endpoint of an S3-compatible server other than AWS.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub endpoint: Option<String>,
    /// Format of the files. Unset: determined by the extension of each file name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub format: Option<RowFormat>,
}

/// Output of an inference job.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "crd", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase", default)]
pub struct InferenceOutput {
    /// Path or URL (`file:///`, `s3://`, `gs://` or `az://`) of the output directory. Relative
    /// paths are accepted by `stoker job run` only. Unset: a dedicated directory in the job's
    /// storage.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub url: Option<String>,
    /// Endpoint of an S3-compatible server other than AWS.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub endpoint: Option<String>,
    /// Format of the output files. Default: `jsonLines`.
    pub format: RowFormat,
    /// Columns of the output table, in order. Required for `parquet` and `arrow`, and rejected for
    /// other formats.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub columns: Vec<Column>,
}

/// File format of rows.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "crd", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub enum RowFormat {
    /// One JSON value per line: `.jsonl`, `.ndjson`.
    #[default]
    JsonLines,
    /// Comma-separated values with a header line: `.csv`.
    Csv,
    /// Apache Parquet: `.parquet`.
    Parquet,
    /// Apache Arrow IPC file: `.arrow`, `.feather`.
    Arrow,
}

impl RowFormat {
    /// Returns the file name extension of output files.
    pub fn extension(self) -> &'static str {
        match self {
            Self::JsonLines => "jsonl",
            Self::Csv => "csv",
            Self::Parquet => "parquet",
            Self::Arrow => "arrow",
        }
    }

    /// Returns the format of a file by its extension; `None` if the extension is unknown.
    ///
    /// # Examples
    ///
    /// ```
    /// use stoker_api::inference::RowFormat;
    ///
    /// assert_eq!(RowFormat::of_name("a/b.ndjson"), Some(RowFormat::JsonLines));
    /// assert_eq!(RowFormat::of_name("README"), None);
    /// ```
    pub fn of_name(name: &str) -> Option<Self> {
        let (_, ending) = name.rsplit('/').next()?.rsplit_once('.')?;
        match ending.to_ascii_lowercase().as_str() {
            "jsonl" | "ndjson" => Some(Self::JsonLines),
            "csv" => Some(Self::Csv),
            "parquet" => Some(Self::Parquet),
            "arrow" | "feather" => Some(Self::Arrow),
            _ => None,
        }
    }

    /// Returns `true` if the format has typed columns.
    pub fn is_typed(self) -> bool {
        matches!(self, Self::Parquet | Self::Arrow)
    }
}

/// A nullable column of a typed table.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "crd", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct Column {
    /// Name of the column: a field of the program's output.
    #[cfg_attr(feature = "crd", schemars(length(min = 1)))]
    pub name: String,
    /// Type of the values.
    #[serde(rename = "type")]
    pub kind: ColumnType,
}

/// Type of the values in a column.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "crd", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub enum ColumnType {
    /// True or false.
    Boolean,
    /// 64-bit integers.
    Integer,
    /// 64-bit floating-point numbers.
    Double,
    /// UTF-8 strings.
    String,
}

/// Handling of rows that cannot be read or that the program rejects.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "crd", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub enum OnError {
    /// Fail the job with an error that names the row.
    #[default]
    Fail,
    /// Skip the row and add it to the list of rejected rows.
    Skip,
}

/// Number of workers and the resources of each.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "crd", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase", default)]
pub struct InferenceResources {
    /// Number of workers, from 1 to 1024. Each worker has one pod and one slot: a GPU, or a CPU
    /// process if `slotResource` is unset. Default: 1.
    #[cfg_attr(feature = "crd", schemars(range(min = 1, max = 1024)))]
    pub slots: u32,
    /// Extended resource of a slot, such as `nvidia.com/gpu`. Each worker's pod requests one unit.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub slot_resource: Option<String>,
    /// Resource requests of each worker's pod, such as `cpu: "4"`. Must not contain `slotResource`.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub requests: BTreeMap<String, String>,
    /// Resource limits of each worker's pod, such as `memory: 16Gi`. Must not contain
    /// `slotResource`.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub limits: BTreeMap<String, String>,
    /// Size limit of the memory-backed volume at `/dev/shm`. Default: `4Gi`.
    pub shm_size: String,
}

impl Default for InferenceResources {
    fn default() -> Self {
        Self {
            slots: 1,
            slot_resource: None,
            requests: BTreeMap::new(),
            limits: BTreeMap::new(),
            shm_size: "4Gi".to_owned(),
        }
    }
}

/// Storage of a job's files.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "crd", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase", default)]
pub struct InferenceStorage {
    /// Storage root, as in an Experiment's `checkpointStorage.url`. Unset: the operator's default
    /// storage, or `./.stoker` with `stoker job run`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub url: Option<String>,
    /// Endpoint of an S3-compatible server other than AWS.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub endpoint: Option<String>,
    /// Secret in the job's namespace with the credentials. Its keys become environment variables.
    /// Unset: the operator's default Secret if `url` is unset too, otherwise no Secret.
    /// `stoker job run` ignores this field and takes the credentials from its environment.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub secret_name: Option<String>,
}

fn empty_object() -> Value {
    Value::Object(serde_json::Map::new())
}

fn default_shard_rows() -> u32 {
    1000
}

fn default_batch_rows() -> u32 {
    64
}

fn default_max_restarts() -> u32 {
    5
}

fn default_preemption_timeout_seconds() -> u32 {
    3600
}
