//! The Experiment resource: a search over trials, as users write it.

mod external;
mod full_length;
mod length;
mod limits;
mod optimizations;
mod pbt;
mod reopen;
mod resources;
mod samplers;
#[cfg(feature = "crd")]
pub(crate) mod schema;
mod search;
mod status;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::pod::PodTemplate;

pub use external::ExternalSearch;
pub use full_length::{GridSearch, RandomSearch, SingleSearch, SobolSearch, TpeSearch};
pub use length::{Length, Unit};
pub use limits::SearchLimits;
pub use optimizations::{GradientCompression, MixedPrecision, Optimizations};
pub use pbt::PbtSearch;
pub use reopen::{ReopenRequest, ReopenedTrials};
pub use resources::Resources;
pub use samplers::{
    MEDIAN_STEPS_MAX, MedianStopping, Objective, PriorTrials, SamplerSpec, SobolSampler, TpeSampler,
};
pub use search::{
    AdaptiveAshaSearch, AdaptiveSearch, AdaptiveSimpleSearch, AsyncHalvingSearch, HyperbandSearch,
    SEARCH_METHODS, SearchMode, Searcher, SyncHalvingSearch,
};
pub use status::{BestTrial, ExperimentStatus, ParetoTrial, Phase, StorageRecord};

/// Specification of an experiment: program, search space, search method and training length.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
#[cfg_attr(
    feature = "crd",
    derive(kube::CustomResource, schemars::JsonSchema),
    kube(
        group = "stoker.dev",
        version = "v1alpha1",
        kind = "Experiment",
        namespaced,
        status = "ExperimentStatus",
        shortname = "exp",
        category = "stoker",
        doc = "A hyperparameter search over trials of one training program.",
        validation = kube::core::Rule::new(schema::NAME_RULE).message(schema::NAME_MESSAGE),
        printcolumn(name = "Phase", type_ = "string", json_path = ".status.phase"),
        printcolumn(name = "Reason", type_ = "string", json_path = ".status.reason"),
        printcolumn(name = "Trials", type_ = "integer", json_path = ".status.trialsCreated"),
        printcolumn(name = "Running", type_ = "integer", json_path = ".status.trialsRunning"),
        printcolumn(name = "Ended", type_ = "integer", json_path = ".status.trialsClosed"),
        printcolumn(name = "Progress", type_ = "integer", json_path = ".status.progressPercent"),
        printcolumn(name = "Best", type_ = "string", json_path = ".status.best.metric"),
        printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp"),
        printcolumn(
            name = "Message",
            type_ = "string",
            json_path = ".status.message",
            priority = 1
        )
    ),
    schemars(extend("x-kubernetes-validations" = [
        {
            "rule": schema::UNCHANGED_RULE,
            "message": "spec is immutable except for state, reopen and some fields of searcher; \
                        create a new experiment"
        },
        {
            "rule": schema::REOPEN_RULE,
            "message": schema::REOPEN_MESSAGE
        },
        { "rule": schema::PERIODS_RULE, "message": schema::PERIODS_MESSAGE },
        {
            "rule": "!has(oldSelf.state) || !(oldSelf.state in ['cancelled', 'killed']) || \
                     self.state == oldSelf.state || self.state == 'killed'",
            "message": "a cancelled experiment stays cancelled and can only be killed; \
                        create a new experiment"
        }
    ]))
)]
#[serde(rename_all = "camelCase")]
pub struct ExperimentSpec {
    /// Human-readable description of the experiment.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub description: Option<String>,

    /// Labels of the experiment, shown by `stoker experiment describe` and the web page, which can
    /// filter by them. They have no other effect: `--selector` compares `metadata.labels`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub labels: Vec<String>,

    /// Arbitrary configuration passed to the program unchanged, for example the location of the
    /// data set. Default: empty.
    #[serde(default = "empty_object")]
    #[cfg_attr(feature = "crd", schemars(schema_with = "schema::free_object"))]
    pub data: Value,

    /// Program that every trial runs, once for each rank.
    pub entrypoint: Entrypoint,

    /// Search space: a tree of parameters. An object whose only key is `const`, `int`, `double`,
    /// `log` or `categorical` is a parameter. An object whose only key is `oneOf` chooses one of
    /// several groups. Any other object is a group, and any other value is a constant. `min` and
    /// `max` of `log` are exponents: `log: {min: -3, max: -1}` samples from 0.001 to 0.1. Default:
    /// empty.
    #[serde(default = "empty_object")]
    #[cfg_attr(feature = "crd", schemars(schema_with = "schema::free_object"))]
    pub hyperparameters: Value,

    /// Search method, training length, and the metric that ranks trials.
    pub searcher: Searcher,

    /// Resources of each trial.
    #[serde(default)]
    pub resources: Resources,

    /// Environment variables of the program. Names that start with `STOKER_` are reserved, except
    /// `STOKER_DEVICE`, `STOKER_KERNELS`, `STOKER_RENDEZVOUS_SECONDS`, `STOKER_SILENCE_SECONDS`,
    /// `STOKER_SILENCE_STEPS`, `STOKER_TEST`, `STOKER_DATA_CACHE` and `STOKER_DATA_CACHE_BYTES`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub env: Vec<EnvVar>,

    /// Storage of checkpoints, metrics and logs, and the retention of checkpoints.
    #[serde(default)]
    pub checkpoint_storage: CheckpointStorage,

    /// Which periodic validations are followed by a checkpoint. Default: `best`.
    #[serde(default)]
    pub checkpoint_policy: CheckpointPolicy,

    /// Interval between validations. Each trial also validates at the end of each granted length.
    /// Unset: no periodic validations.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub min_validation_period: Option<Length>,

    /// Interval between checkpoints. Each trial also saves a checkpoint at the end of each granted
    /// length, on preemption, and as `checkpointPolicy` specifies. Unset: no periodic checkpoints.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub min_checkpoint_period: Option<Length>,

    /// Whether to validate once before the first batch. Default: false.
    #[serde(default)]
    pub perform_initial_validation: bool,

    /// Number of records in an epoch; 0 (the default) means the size of the training data. If set,
    /// a length or interval of N epochs is N times this number of records, rounded down to whole
    /// batches, at least one. For callbacks and metrics, each epoch is rounded down to whole
    /// batches, so they may count more epochs than the length has, unless this number is a multiple
    /// of the global batch size. The order of the data and its passes still follow the size of the
    /// training data.
    #[serde(default)]
    pub records_per_epoch: u64,

    /// Batches between training metric reports; at least 1. A pause or stop reaches the trainer in
    /// the reply to a report. Default: 100.
    #[serde(default = "default_scheduling_unit")]
    #[cfg_attr(feature = "crd", schemars(range(min = 1)))]
    pub scheduling_unit: u64,

    /// Number of restarts after failures of the program. With 5 (the default), the sixth failure
    /// fails the trial. Infrastructure failures and preemptions do not count.
    #[serde(default = "default_max_restarts")]
    pub max_restarts: u32,

    /// Seconds that a trial has to save a checkpoint and exit after a pause or stop request. Then
    /// it is killed. If Kubernetes deletes a pod, for example to drain its node, the grace period
    /// is at most 600 seconds. Default: 3600.
    #[serde(default = "default_preemption_timeout_seconds")]
    #[cfg_attr(feature = "crd", schemars(range(min = 1)))]
    pub preemption_timeout_seconds: u32,

    /// Settings that make a run repeatable.
    #[serde(default)]
    pub reproducibility: Reproducibility,

    /// Settings of gradient accumulation, gradient compression and precision.
    #[serde(default)]
    pub optimizations: Optimizations,

    /// Desired state of the experiment. Besides it, only `reopen` and these fields of `searcher`
    /// are mutable: `maxTrials`, `maxConcurrentTrials`, `maxLength`, `limits` and
    /// `releaseSeconds`.
    #[serde(default)]
    pub state: DesiredState,

    /// Latest request to continue trials that have ended. Set by `stoker experiment continue`.
    /// `stoker run` ignores this field of a file.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reopen: Option<ReopenRequest>,

    /// Files sent with the experiment, such as the program. Each pod unpacks them into its working
    /// directory. Set by `stoker experiment create FILE DIR`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub context: Option<CodeContext>,

    /// Settings of the trials' pods. `stoker run` ignores them.
    #[serde(default)]
    pub pod: PodTemplate,

    /// JSON merge patch that is applied to each trial's pod last. Lists of named items, such as
    /// containers, volumes and variables, are merged by name instead of replaced, and mounts by
    /// path. Other lists, such as `envFrom` and `tolerations`, are replaced. Keys that Kubernetes
    /// does not know are rejected. `stoker run` ignores the patch.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "crd", schemars(schema_with = "schema::free_object"))]
    pub pod_overrides: Option<Value>,
}

impl ExperimentSpec {
    /// Returns the part of the spec that programs receive as `spec`: all fields except the mutable
    /// `state` and `reopen`, and `data` and `hyperparameters`, which programs receive separately.
    pub fn for_programs(&self) -> Value {
        let mut spec = serde_json::to_value(self).unwrap_or_default();
        if let Some(fields) = spec.as_object_mut() {
            let left_out = ["state", "reopen", "data", "hyperparameters"];
            fields.retain(|name, _| !left_out.contains(&name.as_str()));
        }
        spec
    }
}

/// Desired state of an experiment or an inference job.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "crd", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub enum DesiredState {
    /// Run. The default.
    #[default]
    Active,
    /// Run nothing until the state is `active` again. Trials save a checkpoint and exit.
    Paused,
    /// End. Trials save a checkpoint and exit. Cannot be undone.
    Cancelled,
    /// End at once, without checkpoints. Cannot be undone.
    Killed,
}

/// Files sent with an experiment or an inference job.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "crd", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct CodeContext {
    /// SHA-256 of the archive in lowercase hex. The archive is stored at
    /// `NAMESPACE/contexts/SHA256.tar.gz` below the storage root.
    #[cfg_attr(feature = "crd", schemars(regex(pattern = "^[0-9a-f]{64}$")))]
    pub sha256: String,
}

/// A program and its arguments. The program is not run in a shell.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "crd", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct Entrypoint {
    /// Program, followed by its first arguments. At least one item.
    #[cfg_attr(feature = "crd", schemars(length(min = 1)))]
    pub command: Vec<String>,
    /// Further arguments, appended to those in `command`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub args: Vec<String>,
}

/// An environment variable.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "crd", derive(schemars::JsonSchema))]
pub struct EnvVar {
    /// Name of the variable: letters, digits and `_`, not starting with a digit.
    #[cfg_attr(feature = "crd", schemars(length(min = 1)))]
    pub name: String,
    /// Value of the variable. Default: empty.
    #[serde(default)]
    pub value: String,
}

/// Maximum value of each `save*` field of [`CheckpointStorage`]. It limits the size of a trial's
/// status, which lists the checkpoints.
pub const SAVE_MAX: u32 = 100;

/// Storage of a run's files, and the retention of checkpoints.
///
/// A checkpoint is retained if it is among the best of the experiment, or among the best or the
/// latest of its trial. Others are deleted when the experiment ends, some of them earlier.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "crd", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase", default)]
pub struct CheckpointStorage {
    /// Storage root: `file:///path`, an absolute path, `s3://bucket/prefix`, `gs://bucket/prefix`
    /// or `az://container/prefix`. Credentials come from environment variables; see `secretName`.
    /// Unset: the operator's default storage, or `./.stoker` with `stoker run`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub url: Option<String>,
    /// Endpoint of an S3-compatible server other than AWS, such as `http://127.0.0.1:8333`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub endpoint: Option<String>,
    /// Secret in the experiment's namespace with the credentials. Its keys become environment
    /// variables, such as `AWS_ACCESS_KEY_ID`. Unset: the operator's default Secret if `url` is
    /// unset too, otherwise no Secret. `stoker run` ignores this field and takes the credentials
    /// from its environment.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub secret_name: Option<String>,
    /// Number of best checkpoints to retain over all trials, from 0 to 100. Default: 0.
    #[cfg_attr(feature = "crd", schemars(range(max = 100)))]
    pub save_experiment_best: u32,
    /// Number of best checkpoints to retain of each trial, from 0 to 100. Default: 1.
    #[cfg_attr(feature = "crd", schemars(range(max = 100)))]
    pub save_trial_best: u32,
    /// Number of latest checkpoints to retain of each trial, from 0 to 100. Default: 1.
    #[cfg_attr(feature = "crd", schemars(range(max = 100)))]
    pub save_trial_latest: u32,
}

impl Default for CheckpointStorage {
    fn default() -> Self {
        Self {
            url: None,
            endpoint: None,
            secret_name: None,
            save_experiment_best: 0,
            save_trial_best: 1,
            save_trial_latest: 1,
        }
    }
}

/// Which periodic validations are followed by a checkpoint.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "crd", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub enum CheckpointPolicy {
    /// Those with the best searched metric of the trial so far.
    #[default]
    Best,
    /// All.
    All,
    /// None.
    None,
}

/// Settings that make a run repeatable.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "crd", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase", default)]
pub struct Reproducibility {
    /// Seed of the search, from 0 to 2^31 - 1. Unset: derived from the experiment's ID.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "crd", schemars(range(min = 0, max = 2_147_483_647)))]
    pub experiment_seed: Option<u32>,
}

fn empty_object() -> Value {
    Value::Object(serde_json::Map::new())
}

fn default_scheduling_unit() -> u64 {
    100
}

fn default_max_restarts() -> u32 {
    5
}

fn default_preemption_timeout_seconds() -> u32 {
    3600
}
