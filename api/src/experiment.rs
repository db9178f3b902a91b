//! What a user writes: an experiment, a search over trials.

use serde::{Deserialize, Serialize};
use serde_json::Value;

/// A search over trials: which program to train, what may vary, how trials are compared and when to stop.
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
        doc = "A search over trials: which program to train, what may vary, how trials are compared.",
        validation = kube::core::Rule::new(schema::NAME_RULE).message(schema::NAME_MESSAGE),
        printcolumn(name = "Phase", type_ = "string", json_path = ".status.phase"),
        printcolumn(name = "Trials", type_ = "integer", json_path = ".status.trialsCreated"),
        printcolumn(name = "Ended", type_ = "integer", json_path = ".status.trialsClosed"),
        printcolumn(name = "Best", type_ = "string", json_path = ".status.best.metric"),
        printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp")
    ),
    schemars(extend("x-kubernetes-validations" = [{
        "rule": "self == oldSelf",
        "message": "an experiment's spec never changes: create another experiment"
    }]))
)]
#[serde(rename_all = "camelCase")]
pub struct ExperimentSpec {
    /// What this experiment is about, for people.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub description: Option<String>,

    /// Labels for finding experiments; they change nothing else.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub labels: Vec<String>,

    /// Free-form configuration handed to the program as it is, such as where the data set lies.
    #[serde(default = "empty_object")]
    #[cfg_attr(feature = "crd", schemars(schema_with = "schema::free_object"))]
    pub data: Value,

    /// The program that every trial runs.
    pub entrypoint: Entrypoint,

    /// What may vary: a tree of parameters. An object whose only key is one of `const`, `int`, `double`, `log` and
    /// `categorical` is a parameter, any other object a group, and any other value a constant.
    #[serde(default = "empty_object")]
    #[cfg_attr(feature = "crd", schemars(schema_with = "schema::free_object"))]
    pub hyperparameters: Value,

    /// How trials are chosen, how long they train and how they are compared.
    pub searcher: Searcher,

    /// What each trial needs.
    #[serde(default)]
    pub resources: Resources,

    /// Environment variables of the program. Names that begin with `STOKER_` are Stoker's own.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub env: Vec<EnvVar>,

    /// Where checkpoints, metrics and logs go, and which checkpoints are kept at the end.
    #[serde(default)]
    pub checkpoint_storage: CheckpointStorage,

    /// After which periodic validations a checkpoint is taken.
    #[serde(default)]
    pub checkpoint_policy: CheckpointPolicy,

    /// Validate at least this often. Unset: only where the search compares.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub min_validation_period: Option<Length>,

    /// Take a checkpoint at least this often. Unset: only where the search compares, and on a stop.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub min_checkpoint_period: Option<Length>,

    /// Validate once before the first batch.
    #[serde(default)]
    pub perform_initial_validation: bool,

    /// Records in an epoch; 0 means those of the training data. If set, a length or period of N epochs is N times
    /// as many records, cut to whole batches (at least one), and an epoch ends, for callbacks and metrics, every
    /// `recordsPerEpoch` records, cut likewise. The data's order and its passes stay by its own size.
    #[serde(default)]
    pub records_per_epoch: u64,

    /// Batches between two looks at whether to stop, and between two reports of training metrics; at least 1.
    #[serde(default = "default_scheduling_unit")]
    #[cfg_attr(feature = "crd", schemars(range(min = 1)))]
    pub scheduling_unit: u64,

    /// How often a trial is restarted from its latest checkpoint after a failure of its own; 5 means six runs.
    #[serde(default = "default_max_restarts")]
    pub max_restarts: u32,

    /// Seconds that a trial has to checkpoint and exit when asked to; after them it is killed.
    #[serde(default = "default_preemption_timeout_seconds")]
    #[cfg_attr(feature = "crd", schemars(range(min = 1)))]
    pub preemption_timeout_seconds: u32,

    /// What makes a run repeatable.
    #[serde(default)]
    pub reproducibility: Reproducibility,

    /// How gradients are computed.
    #[serde(default)]
    pub optimizations: Optimizations,
}

/// A program and its arguments. `command` is not run in a shell.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "crd", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct Entrypoint {
    /// The program, followed by its first arguments; at least one word.
    #[cfg_attr(feature = "crd", schemars(length(min = 1)))]
    pub command: Vec<String>,
    /// More arguments, after those of `command`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub args: Vec<String>,
}

/// How trials are chosen and compared. Exactly one of `single`, `random` and `grid` is set.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "crd", derive(schemars::JsonSchema))]
#[cfg_attr(
    feature = "crd",
    schemars(extend("x-kubernetes-validations" = [{
        "rule": "[has(self.single), has(self.random), has(self.grid)].exists_one(x, x)",
        "message": "exactly one of single, random and grid must be set"
    }]))
)]
#[serde(rename_all = "camelCase")]
pub struct Searcher {
    /// The validation metric by which trials are compared.
    #[cfg_attr(feature = "crd", schemars(length(min = 1)))]
    pub metric: String,
    /// Whether a smaller metric is a better one.
    #[serde(default = "yes")]
    pub smaller_is_better: bool,
    /// How long a trial trains if nothing stops it.
    pub max_length: Length,
    /// One trial.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub single: Option<SingleSearch>,
    /// Trials with hyperparameters drawn at random.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub random: Option<RandomSearch>,
    /// Trials for every point of a grid.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub grid: Option<GridSearch>,
}

/// One trial; parameters that vary are drawn once.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "crd", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct SingleSearch {}

/// Trials with hyperparameters drawn at random.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "crd", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct RandomSearch {
    /// Trials in all, at least 1.
    #[cfg_attr(feature = "crd", schemars(range(min = 1)))]
    pub max_trials: u32,
    /// Trials at a time; 0 means no limit.
    #[serde(default = "default_max_concurrent_trials")]
    pub max_concurrent_trials: u32,
}

/// Trials for every point of a grid: `int`, `double` and `log` parameters need a `count`.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "crd", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct GridSearch {
    /// Trials at a time; 0 means no limit.
    #[serde(default = "default_max_concurrent_trials")]
    pub max_concurrent_trials: u32,
}

/// A length of training. Exactly one field is set.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "crd", derive(schemars::JsonSchema))]
#[cfg_attr(
    feature = "crd",
    schemars(extend("x-kubernetes-validations" = [{
        "rule": "[has(self.records), has(self.batches), has(self.epochs)].exists_one(x, x)",
        "message": "exactly one of records, batches and epochs must be set"
    }]))
)]
#[serde(rename_all = "camelCase")]
pub struct Length {
    /// Samples seen.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "crd", schemars(range(min = 1)))]
    pub records: Option<u64>,
    /// Global batches.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "crd", schemars(range(min = 1)))]
    pub batches: Option<u64>,
    /// Passes over the training data.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "crd", schemars(range(min = 1)))]
    pub epochs: Option<u64>,
}

/// What a length counts.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "crd", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub enum Unit {
    /// Samples seen.
    Records,
    /// Global batches.
    Batches,
    /// Passes over the training data.
    Epochs,
}

impl Length {
    /// A length of `units` in `unit`.
    pub fn new(unit: Unit, units: u64) -> Self {
        let of = |this| (unit == this).then_some(units);
        Self { records: of(Unit::Records), batches: of(Unit::Batches), epochs: of(Unit::Epochs) }
    }

    /// What it counts, and how many; `None` unless exactly one field is set.
    pub fn get(&self) -> Option<(Unit, u64)> {
        match (self.records, self.batches, self.epochs) {
            (Some(units), None, None) => Some((Unit::Records, units)),
            (None, Some(units), None) => Some((Unit::Batches, units)),
            (None, None, Some(units)) => Some((Unit::Epochs, units)),
            _ => None,
        }
    }
}

/// What a trial needs.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "crd", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase", default)]
pub struct Resources {
    /// Slots of each trial: GPUs, or CPU ranks where there are none; at least 1.
    #[cfg_attr(feature = "crd", schemars(range(min = 1)))]
    pub slots_per_trial: u32,
}

impl Default for Resources {
    fn default() -> Self {
        Self { slots_per_trial: 1 }
    }
}

/// One environment variable.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "crd", derive(schemars::JsonSchema))]
pub struct EnvVar {
    /// Its name.
    #[cfg_attr(feature = "crd", schemars(length(min = 1)))]
    pub name: String,
    /// Its value.
    #[serde(default)]
    pub value: String,
}

/// Where a run's files go, and which checkpoints are kept once the experiment has ended.
///
/// A checkpoint goes when it is neither among the experiment's best, nor its trial's best, nor its trial's latest.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "crd", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase", default)]
pub struct CheckpointStorage {
    /// The root: `file:///path`, `s3://bucket/prefix`, `gs://bucket/prefix` or `az://container/prefix`. Credentials
    /// come from the environment. Unset: where the runner keeps its own.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub url: Option<String>,
    /// The address of an S3 server other than Amazon's, such as `http://127.0.0.1:8333`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub endpoint: Option<String>,
    /// Best checkpoints kept over all trials.
    pub save_experiment_best: u32,
    /// Best checkpoints kept of each trial.
    pub save_trial_best: u32,
    /// Latest checkpoints kept of each trial.
    pub save_trial_latest: u32,
}

impl Default for CheckpointStorage {
    fn default() -> Self {
        Self {
            url: None,
            endpoint: None,
            save_experiment_best: 0,
            save_trial_best: 1,
            save_trial_latest: 1,
        }
    }
}

/// After which periodic validations a checkpoint is taken.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "crd", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub enum CheckpointPolicy {
    /// After those that are the trial's best so far.
    #[default]
    Best,
    /// After all.
    All,
    /// After none.
    None,
}

/// What makes a run repeatable.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "crd", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase", default)]
pub struct Reproducibility {
    /// The seed of the search, from 0 to 2^31 - 1. Unset: derived from the experiment's id.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "crd", schemars(range(min = 0, max = 2_147_483_647)))]
    pub experiment_seed: Option<u32>,
}

/// How gradients are computed.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "crd", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase", default)]
pub struct Optimizations {
    /// Batches whose gradients are added up before the optimizer steps; at least 1.
    #[cfg_attr(feature = "crd", schemars(range(min = 1)))]
    pub aggregation_frequency: u32,
}

impl Default for Optimizations {
    fn default() -> Self {
        Self { aggregation_frequency: 1 }
    }
}

/// How an experiment is going. Constant in size, and derived from its trials.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Serialize)]
#[cfg_attr(feature = "crd", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase", default)]
pub struct ExperimentStatus {
    /// Where it stands.
    pub phase: Phase,
    /// Trials ever created. An index is never used again.
    pub trials_created: u32,
    /// Trials that have ended, however.
    pub trials_closed: u32,
    /// The best trial so far, by the searched metric.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub best: Option<BestTrial>,
    /// Why it stands there, for people.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub message: Option<String>,
}

/// Where an experiment or a trial stands. The last three are final.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "crd", derive(schemars::JsonSchema))]
pub enum Phase {
    /// Nothing has run yet.
    #[default]
    Pending,
    /// Something runs, or may run.
    Running,
    /// Ended as intended.
    Completed,
    /// Ended by failures: of an experiment, all its trials failed.
    Failed,
    /// Ended because somebody asked.
    Cancelled,
}

impl Phase {
    /// Whether nothing follows.
    pub fn is_terminal(self) -> bool {
        matches!(self, Self::Completed | Self::Failed | Self::Cancelled)
    }
}

/// A trial with the best result.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "crd", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct BestTrial {
    /// The trial's index.
    pub index: u32,
    /// The searched metric, as a decimal string.
    pub metric: String,
    /// The checkpoint that has it, if one was kept.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub checkpoint: Option<String>,
}

fn empty_object() -> Value {
    Value::Object(serde_json::Map::new())
}

fn yes() -> bool {
    true
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

fn default_max_concurrent_trials() -> u32 {
    16
}

#[cfg(feature = "crd")]
pub(crate) mod schema {
    //! Schemas that a type cannot say.

    /// What `crate::validate` asks of a name, in CEL.
    pub(crate) const NAME_RULE: &str = "self.metadata.name.size() <= 40 && \
                                        self.metadata.name.matches('^[a-z]([-a-z0-9]*[a-z0-9])?$')";
    /// Why a name is refused.
    pub(crate) const NAME_MESSAGE: &str = "metadata.name must be at most 40 lower-case letters, digits and `-`, \
                                           begin with a letter and not end with `-`";

    /// An object of any shape: Kubernetes keeps all of its fields.
    pub(crate) fn free_object(_: &mut schemars::SchemaGenerator) -> schemars::Schema {
        schemars::json_schema!({ "type": "object", "x-kubernetes-preserve-unknown-fields": true })
    }
}
