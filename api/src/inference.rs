//! What a user writes to put a data set through a trained model: a batch inference, every input exactly once.

mod files;
#[cfg(feature = "crd")]
mod schema;
mod status;

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::experiment::{CodeContext, DesiredState, Entrypoint, EnvVar};
use crate::pod::PodTemplate;

pub use files::{
    COMMITS, Commit, ErrorsPart, FILES_FORMAT, InferenceTask, InputFile, OutputManifest,
    OutputPart, PLAN, PinnedCheckpoint, PlanFile, PlanShard, Role, RowError, STATE_FOLDER,
    ShardPlan, commit_path, commits_path, part_name, plan_path, shard_of_commit,
};
pub use status::{InferenceStatus, WorkerEnd, WorkerStatus};

/// A data set through a trained model: what is read and written, by which program, and by how many at a time.
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
        doc = "A data set through a trained model, every input exactly once.",
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
    /// What this job is about, for people.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub description: Option<String>,

    /// Free-form configuration handed to the program as it is.
    #[serde(default = "empty_object")]
    #[cfg_attr(feature = "crd", schemars(schema_with = "crate::experiment::schema::free_object"))]
    pub data: Value,

    /// The program that every worker runs.
    pub entrypoint: Entrypoint,

    /// The model's weights. Unset: the program brings its own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub checkpoint: Option<CheckpointChoice>,

    /// Hyperparameters of the model. Unset: those of the trial that the checkpoint is of.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "crd", schemars(schema_with = "crate::experiment::schema::free_object"))]
    pub hyperparameters: Option<Value>,

    /// The rows to read.
    pub input: InferenceInput,

    /// Where what the model says of them goes.
    #[serde(default)]
    pub output: InferenceOutput,

    /// Rows of a shard, which is committed as a whole: what a kill costs at most, for each worker; at least 1.
    #[serde(default = "default_shard_rows")]
    #[cfg_attr(feature = "crd", schemars(range(min = 1, max = 10_000_000)))]
    pub shard_rows: u32,

    /// Rows that the program is given at a time, at most; at least 1.
    #[serde(default = "default_batch_rows")]
    #[cfg_attr(feature = "crd", schemars(range(min = 1, max = 10_000_000)))]
    pub batch_rows: u32,

    /// What happens when a row cannot be read.
    #[serde(default)]
    pub on_error: OnError,

    /// How many workers there are, and what each needs.
    #[serde(default)]
    pub resources: InferenceResources,

    /// Environment variables of the program. Names that begin with `STOKER_` are Stoker's own, but for `STOKER_DEVICE`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub env: Vec<EnvVar>,

    /// Where logs go, and the output unless it says otherwise; trials are looked for there by their names.
    #[serde(default)]
    pub storage: InferenceStorage,

    /// How often a worker is started again after a failure of its own; 5 means six runs.
    #[serde(default = "default_max_restarts")]
    pub max_restarts: u32,

    /// Seconds that a worker has to exit when asked to; after them it is killed.
    #[serde(default = "default_preemption_timeout_seconds")]
    #[cfg_attr(feature = "crd", schemars(range(min = 1)))]
    pub preemption_timeout_seconds: u32,

    /// What is wanted of the job now. The one field that may be changed.
    #[serde(default)]
    pub state: DesiredState,

    /// Files sent with the job, among them perhaps the program: unpacked in each pod, whose working folder they become.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub context: Option<CodeContext>,

    /// How the workers' pods are made.
    #[serde(default)]
    pub pod: PodTemplate,

    /// Merged into each worker's pod last, as in an Experiment.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "crd", schemars(schema_with = "crate::experiment::schema::free_object"))]
    pub pod_overrides: Option<Value>,
}

impl InferenceJobSpec {
    /// What programs are told of it: all but `state`, which alone may change, and `data` and `hyperparameters`, which
    /// they are told of by themselves.
    pub fn for_programs(&self) -> Value {
        let mut told = serde_json::to_value(self).unwrap_or_default();
        if let Some(fields) = told.as_object_mut() {
            fields.retain(|name, _| !["state", "data", "hyperparameters"].contains(&name.as_str()));
        }
        told
    }
}

/// Which checkpoint holds the weights: exactly one of `trial`, `folder` and `stored`. It is chosen once, when the job
/// begins, and stays the same for all workers and restarts.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "crd", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase", default)]
pub struct CheckpointChoice {
    /// A trial by its name, such as `mnist-3`, in the job's storage and namespace.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub trial: Option<String>,
    /// A checkpoint's folder, such as one that was downloaded, where the program runs.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub folder: Option<String>,
    /// A trial in any storage.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stored: Option<StoredTrial>,
    /// Which of the trial's checkpoints.
    pub which: WhichCheckpoint,
    /// The checkpoint of this name, such as `000000000400-0`, in place of `which`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
}

/// A trial in any storage.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "crd", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct StoredTrial {
    /// The storage's root.
    pub url: String,
    /// The address of an S3 server other than Amazon's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub endpoint: Option<String>,
    /// The trial's folder below the root, such as `default/mnist-0b3f9c1e/trials/3`.
    #[cfg_attr(feature = "crd", schemars(length(min = 1)))]
    pub trial_path: String,
}

/// Which of a trial's checkpoints.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "crd", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub enum WhichCheckpoint {
    /// The latest.
    #[default]
    Latest,
    /// The one with the smallest searched metric, of those saved where a validation was.
    SmallestMetric,
    /// The one with the largest.
    LargestMetric,
}

/// The rows to read.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "crd", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct InferenceInput {
    /// A file, a folder with all that is below it, or a pattern with `*` and `?` in names: a path from the program's
    /// working folder, or `file:///`, `s3://`, `gs://` or `az://`.
    #[cfg_attr(feature = "crd", schemars(length(min = 1)))]
    pub url: String,
    /// The address of an S3 server other than Amazon's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub endpoint: Option<String>,
    /// The format. Unset: by the files' names.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub format: Option<RowFormat>,
}

/// Where the output goes.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "crd", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase", default)]
pub struct InferenceOutput {
    /// The folder: a path from the program's working folder, or `file:///`, `s3://`, `gs://` or `az://`. Unset: a folder
    /// of the job's own below its storage's root.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub url: Option<String>,
    /// The address of an S3 server other than Amazon's.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub endpoint: Option<String>,
    /// The format.
    pub format: RowFormat,
    /// The columns of a table with types, in their order: for `parquet` and `arrow`, which need them.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub columns: Vec<Column>,
}

/// How rows are written in a file.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "crd", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub enum RowFormat {
    /// One JSON value a line: `.jsonl`, `.ndjson`.
    #[default]
    JsonLines,
    /// Commas between columns, which the first line names: `.csv`.
    Csv,
    /// Apache Parquet: `.parquet`.
    Parquet,
    /// Apache Arrow's file of record batches: `.arrow`, `.feather`.
    Arrow,
}

impl RowFormat {
    /// The ending of the names of such files.
    pub fn extension(self) -> &'static str {
        match self {
            Self::JsonLines => "jsonl",
            Self::Csv => "csv",
            Self::Parquet => "parquet",
            Self::Arrow => "arrow",
        }
    }

    /// The format of a file of this name, if its ending tells.
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

    /// Whether its files have typed columns.
    pub fn is_typed(self) -> bool {
        matches!(self, Self::Parquet | Self::Arrow)
    }
}

/// A column of a table with types. Each may hold nulls.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "crd", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct Column {
    /// Its name: a field of the program's output.
    #[cfg_attr(feature = "crd", schemars(length(min = 1)))]
    pub name: String,
    /// What it holds.
    #[serde(rename = "type")]
    pub kind: ColumnType,
}

/// What a column holds.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "crd", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub enum ColumnType {
    /// True or false.
    Boolean,
    /// Integers of 64 bits.
    Integer,
    /// Floating-point numbers of 64 bits.
    Double,
    /// Texts.
    String,
}

/// What happens when a row cannot be read.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "crd", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub enum OnError {
    /// The job fails, and names the row.
    #[default]
    Fail,
    /// The row has no output; the manifest's errors list it.
    Skip,
}

/// How many workers there are, and what each needs.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "crd", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase", default)]
pub struct InferenceResources {
    /// Workers at a time: one a GPU, or a CPU process where there are none; at least 1.
    #[cfg_attr(feature = "crd", schemars(range(min = 1, max = 1024)))]
    pub slots: u32,
    /// The resource that each worker needs one of, such as `nvidia.com/gpu`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub slot_resource: Option<String>,
    /// What each worker's pod asks for, by resource, such as `cpu: "4"`.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub requests: BTreeMap<String, String>,
    /// What each worker's pod may use at most, by resource, such as `memory: 16Gi`.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub limits: BTreeMap<String, String>,
    /// The size of `/dev/shm`.
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

/// Where a job's own files go.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "crd", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase", default)]
pub struct InferenceStorage {
    /// The root, as in an Experiment's `checkpointStorage.url`. Unset: where the runner keeps its own.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub url: Option<String>,
    /// The address of an S3 server other than Amazon's.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub endpoint: Option<String>,
    /// The Secret whose keys are the credentials' environment variables. `stoker job run` reads its own environment
    /// alone.
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
