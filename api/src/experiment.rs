//! What a user writes: an experiment, a search over trials.

mod resources;
mod search;
mod status;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::pod::PodTemplate;

pub use resources::Resources;
pub use search::{GridSearch, Length, RandomSearch, Searcher, SingleSearch, Unit};
pub use status::{BestTrial, ExperimentStatus, Phase, UsedStorage};

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
            "message": "of an experiment's spec, only state may be changed: create another experiment"
        },
        {
            "rule": "!has(oldSelf.state) || !(oldSelf.state in ['cancelled', 'killed']) || \
                     self.state == oldSelf.state || self.state == 'killed'",
            "message": "a cancelled experiment stays cancelled, and a killed one killed: create another experiment"
        }
    ]))
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

    /// Environment variables of the program. Names that begin with `STOKER_` are Stoker's own, but for `STOKER_DEVICE`,
    /// `STOKER_RENDEZVOUS_SECONDS`, `STOKER_SILENCE_SECONDS`, `STOKER_SILENCE_STEPS`, `STOKER_TEST`, `STOKER_DATA_CACHE` and `STOKER_DATA_CACHE_BYTES`.
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

    /// What is wanted of the experiment now. The one field that may be changed.
    #[serde(default)]
    pub state: DesiredState,

    /// Files sent with the experiment, among them perhaps the program: unpacked in each pod, whose working folder they
    /// become. Set by `stoker experiment create FILE FOLDER`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub context: Option<CodeContext>,

    /// How the trials' pods are made.
    #[serde(default)]
    pub pod: PodTemplate,

    /// Merged into each trial's pod last, as a JSON merge patch, but that containers, volumes, mounts and variables of
    /// the same name are merged and others added. A key that Kubernetes does not know is refused.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "crd", schemars(schema_with = "schema::free_object"))]
    pub pod_overrides: Option<Value>,
}

impl ExperimentSpec {
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

/// What a user wants of an experiment.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "crd", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub enum DesiredState {
    /// That it runs.
    #[default]
    Active,
    /// That nothing runs until it is active again: trials take a checkpoint and exit.
    Paused,
    /// That it ends: trials take a checkpoint and exit. There is no way back.
    Cancelled,
    /// That it ends at once, without checkpoints. There is no way back.
    Killed,
}

/// Files sent with an experiment.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "crd", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct CodeContext {
    /// SHA-256 of the archive, in hex: it lies at `NAMESPACE/contexts/SHA256.tar.gz` below the storage's root.
    #[cfg_attr(feature = "crd", schemars(regex(pattern = "^[0-9a-f]{64}$")))]
    pub sha256: String,
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

/// The most checkpoints that each `save*` field of [`CheckpointStorage`] keeps: a trial's status lists them.
pub const SAVE_MAX: u32 = 100;

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
    /// The Secret of the experiment's namespace whose keys are the credentials' environment variables, such as
    /// `AWS_ACCESS_KEY_ID`. Unset: as the operator is set up. `stoker run` reads its own environment alone.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub secret_name: Option<String>,
    /// Best checkpoints kept over all trials; at most 100.
    #[cfg_attr(feature = "crd", schemars(range(max = 100)))]
    pub save_experiment_best: u32,
    /// Best checkpoints kept of each trial; at most 100.
    #[cfg_attr(feature = "crd", schemars(range(max = 100)))]
    pub save_trial_best: u32,
    /// Latest checkpoints kept of each trial; at most 100.
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
    /// Whether those are averaged: a step then learns from their mean. Otherwise it learns from as many means added
    /// up, as if each batch had made a step of its own at the same place.
    pub average_aggregated_gradients: bool,
    /// How gradients are written where they cross the network.
    pub gradient_compression: GradientCompression,
    /// Whether models compute in half precision, with weights in single precision.
    pub mixed_precision: MixedPrecision,
}

impl Default for Optimizations {
    fn default() -> Self {
        Self {
            aggregation_frequency: 1,
            average_aggregated_gradients: true,
            gradient_compression: GradientCompression::None,
            mixed_precision: MixedPrecision::None,
        }
    }
}

/// In what precision models compute.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "crd", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub enum MixedPrecision {
    /// In the precision in which their programs make tensors.
    #[default]
    None,
    /// In bf16. Weights, gradients and optimizers stay in single precision.
    Bf16,
}

/// How gradients are written where they cross the network. Partial sums are rounded too; one rank rounds nothing.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "crd", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub enum GradientCompression {
    /// As they are, in single precision.
    #[default]
    None,
    /// In half precision, 11 bits of it, up to 65,504.
    F16,
    /// In half the bytes too, 8 bits of it, of all sizes that single precision has.
    Bf16,
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

#[cfg(feature = "crd")]
pub(crate) mod schema {
    //! Schemas that a type cannot say.

    /// That nothing but `state` has changed.
    pub(crate) const UNCHANGED_RULE: &str = "self.entrypoint == oldSelf.entrypoint && \
        self.searcher == oldSelf.searcher && \
        self.resources == oldSelf.resources && \
        self.checkpointStorage == oldSelf.checkpointStorage && \
        self.checkpointPolicy == oldSelf.checkpointPolicy && \
        self.performInitialValidation == oldSelf.performInitialValidation && \
        self.recordsPerEpoch == oldSelf.recordsPerEpoch && \
        self.schedulingUnit == oldSelf.schedulingUnit && \
        self.maxRestarts == oldSelf.maxRestarts && \
        self.preemptionTimeoutSeconds == oldSelf.preemptionTimeoutSeconds && \
        self.reproducibility == oldSelf.reproducibility && \
        self.optimizations == oldSelf.optimizations && \
        self.pod == oldSelf.pod && \
        self.data == oldSelf.data && \
        self.hyperparameters == oldSelf.hyperparameters && \
        has(self.description) == has(oldSelf.description) && \
        (!has(self.description) || self.description == oldSelf.description) && \
        has(self.labels) == has(oldSelf.labels) && \
        (!has(self.labels) || self.labels == oldSelf.labels) && \
        has(self.env) == has(oldSelf.env) && \
        (!has(self.env) || self.env == oldSelf.env) && \
        has(self.minValidationPeriod) == has(oldSelf.minValidationPeriod) && \
        (!has(self.minValidationPeriod) || self.minValidationPeriod == oldSelf.minValidationPeriod) && \
        has(self.minCheckpointPeriod) == has(oldSelf.minCheckpointPeriod) && \
        (!has(self.minCheckpointPeriod) || self.minCheckpointPeriod == oldSelf.minCheckpointPeriod) && \
        has(self.context) == has(oldSelf.context) && \
        (!has(self.context) || self.context == oldSelf.context) && \
        has(self.podOverrides) == has(oldSelf.podOverrides) && \
        (!has(self.podOverrides) || self.podOverrides == oldSelf.podOverrides)";
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

    /// A list of [`free_object`].
    pub(crate) fn free_objects(_: &mut schemars::SchemaGenerator) -> schemars::Schema {
        schemars::json_schema!({
            "type": "array",
            "items": { "type": "object", "x-kubernetes-preserve-unknown-fields": true }
        })
    }
}
