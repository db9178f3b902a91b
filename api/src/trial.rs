//! The record of one trial: sampled hyperparameters, grants and facts.
//!
//! Facts and grants are append-only. A *fact* is an event of the trial, such as a result. Facts of
//! different trials are unordered. A *grant* assigns a fact its position in the order of the whole
//! experiment, and records what the search decided on it. Other grants are effects of decisions on
//! other trials' facts. A grant also contains the training length that the trial may reach.

mod attempt;
mod checkpoint;
mod reopened;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::condition::Condition;
use crate::decisions::StepRecord;
use crate::experiment::{Phase, Unit};
use crate::time::Timestamp;

pub use attempt::{Attempt, AttemptEnd};
pub use checkpoint::{CheckpointRecord, ResultCheckpoint, TrialSource};
pub use reopened::ReopenedFact;

/// Specification of a trial: one training run with fixed hyperparameters. The sampled values are
/// immutable; grants are append-only.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
#[cfg_attr(
    feature = "crd",
    derive(kube::CustomResource, schemars::JsonSchema),
    kube(
        group = "stoker.dev",
        version = "v1alpha1",
        kind = "Trial",
        namespaced,
        status = "TrialStatus",
        shortname = "tr",
        category = "stoker",
        doc = "One training run with fixed hyperparameters, created by its experiment.",
        printcolumn(name = "Experiment", type_ = "string", json_path = ".spec.experiment"),
        printcolumn(name = "Index", type_ = "integer", json_path = ".spec.index"),
        printcolumn(name = "Phase", type_ = "string", json_path = ".status.phase"),
        printcolumn(name = "Reason", type_ = "string", json_path = ".status.reason"),
        printcolumn(name = "Batches", type_ = "integer", json_path = ".status.batches"),
        printcolumn(name = "Of", type_ = "integer", json_path = ".status.batchesTotal"),
        printcolumn(name = "Metric", type_ = "string", json_path = ".status.bestMetric"),
        printcolumn(name = "Restarts", type_ = "integer", json_path = ".status.restarts"),
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
            "rule": "self.experiment == oldSelf.experiment && self.index == oldSelf.index && \
                self.requestId == oldSelf.requestId && self.seed == oldSelf.seed && \
                self.hyperparameters == oldSelf.hyperparameters && \
                self.unit == oldSelf.unit && self.units == oldSelf.units && \
                has(self.order) == has(oldSelf.order) && \
                (!has(self.order) || self.order == oldSelf.order) && \
                has(self.group) == has(oldSelf.group) && \
                (!has(self.group) || self.group == oldSelf.group) && \
                has(self.randomWords) == has(oldSelf.randomWords) && \
                (!has(self.randomWords) || self.randomWords == oldSelf.randomWords) && \
                has(self.source) == has(oldSelf.source) && \
                (!has(self.source) || self.source == oldSelf.source) && \
                has(self.tag) == has(oldSelf.tag) && (!has(self.tag) || self.tag == oldSelf.tag)",
            "message": "the sampled values of a trial are immutable; create a new experiment"
        },
        {
            "rule": "!has(oldSelf.grants) || (has(self.grants) && \
                oldSelf.grants.all(old, self.grants.exists(new, new.order == old.order)))",
            "message": "grants are append-only and cannot be removed"
        }
    ]))
)]
#[serde(rename_all = "camelCase")]
pub struct TrialSpec {
    /// Name of the experiment.
    pub experiment: String,
    /// Index of the trial in the experiment, from 0 without gaps.
    pub index: u32,
    /// ID of the sampled trial: a version 4 UUID derived from the experiment's seed.
    pub request_id: String,
    /// Seed of the initial weights, the data order and dropout, from 0 to 2^31 - 1.
    pub seed: u32,
    /// Sampled hyperparameters.
    #[cfg_attr(feature = "crd", schemars(schema_with = "crate::experiment::schema::free_object"))]
    pub hyperparameters: Value,
    /// Unit of `units` and of the lengths in `grants`.
    pub unit: Unit,
    /// Training length granted from the start, in `unit`.
    pub units: u64,
    /// Position of the turn that created the trial. Unset in records of earlier versions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub order: Option<u64>,
    /// Bracket of the trial, from 0.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub group: u32,
    /// Number of 32-bit words taken from the experiment's random stream up to and with this trial.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub random_words: Option<u64>,
    /// Trial that this one copies. Its first attempt resumes from the checkpoint of the source.
    /// Unset: the trial starts from scratch.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub source: Option<TrialSource>,
    /// Names of checkpoints of this trial from which copies start. They are not deleted until the
    /// copies have checkpoints of their own, or have ended.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[cfg_attr(
        feature = "crd",
        schemars(
            extend("x-kubernetes-list-type" = "set", "maxItems" = 128),
            inner(length(max = 63))
        )
    )]
    pub pins: Vec<String>,
    /// Name of the trial for the external searcher that created it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "crd", schemars(extend("maxLength" = 128)))]
    pub tag: Option<String>,
    /// Ordered facts, each with the training length it grants. Append-only.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[cfg_attr(
        feature = "crd",
        schemars(extend(
            "x-kubernetes-list-type" = "map",
            "x-kubernetes-list-map-keys" = ["order"],
            "maxItems" = 512
        ))
    )]
    pub grants: Vec<Grant>,
    /// Desired state of the trial. Set by the operator. Default: `run`.
    #[serde(rename = "wanted", default, skip_serializing_if = "DesiredTrialState::is_run")]
    pub desired_state: DesiredTrialState,
    /// Time of the last change of `wanted`. Unset: never changed.
    #[serde(rename = "wantedSince", default, skip_serializing_if = "Option::is_none")]
    pub desired_since: Option<Timestamp>,
}

/// Desired state of the trial. It only moves forward (run, pause, stop, kill), except from `pause`
/// back to `run`, and to `pause` when the search reopens a trial that has ended.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[cfg_attr(feature = "crd", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub enum DesiredTrialState {
    /// Train to the granted length.
    #[default]
    Run,
    /// Save a checkpoint and exit; the trial may resume.
    Pause,
    /// Save a checkpoint and exit; the trial ends.
    Stop,
    /// End at once, without a checkpoint.
    Kill,
}

impl DesiredTrialState {
    /// Returns `true` for [`Run`](Self::Run).
    pub fn is_run(&self) -> bool {
        *self == Self::Run
    }
}

/// A turn of the search that concerns this trial: the position of one of its facts and the steps
/// that the search decided on it, or the effect of another trial's turn.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "crd", derive(schemars::JsonSchema))]
#[cfg_attr(
    feature = "crd",
    schemars(extend("x-kubernetes-validations" = [{
        "rule": "self.units == oldSelf.units && has(self.fact) == has(oldSelf.fact) && \
            (!has(self.fact) || self.fact == oldSelf.fact) && \
            has(self.steps) == has(oldSelf.steps) && \
            (!has(self.steps) || self.steps.size() == oldSelf.steps.size())",
        "message": "a grant is immutable"
    }]))
)]
#[serde(rename_all = "camelCase")]
pub struct Grant {
    /// Position of the turn in the order of the experiment; unique, with gaps.
    pub order: u64,
    /// Index of the fact in `status.facts`, if the turn is about a fact of this trial.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fact: Option<u32>,
    /// Training length granted to this trial, in the trial's unit. Never less than before.
    pub units: u64,
    /// Decisions of the search on the fact; without a fact, its decisions about this trial. Unset
    /// in records of earlier versions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "crd", schemars(extend("maxItems" = 2048)))]
    pub steps: Option<Vec<StepRecord>>,
}

/// Observed status of a trial.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Serialize)]
#[cfg_attr(feature = "crd", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase", default)]
pub struct TrialStatus {
    /// Current phase of the trial.
    pub phase: Phase,
    /// Events of the trial that the search depends on. Append-only; `spec.grants` orders them.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[cfg_attr(feature = "crd", schemars(extend("maxItems" = 578)))]
    pub facts: Vec<Fact>,
    /// The latest attempts to run the trial, oldest first. The last one may be running.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[cfg_attr(feature = "crd", schemars(extend("maxItems" = 128)))]
    pub attempts: Vec<Attempt>,
    /// Total seconds of earlier attempts that `attempts` no longer lists.
    #[serde(skip_serializing_if = "is_zero")]
    pub unlisted_attempt_seconds: u64,
    /// Number of program failures, which count against `maxRestarts`. Zero again when the trial is
    /// reopened.
    pub restarts: u32,
    /// Existing checkpoints, oldest first.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[cfg_attr(feature = "crd", schemars(extend("maxItems" = 384)))]
    pub checkpoints: Vec<CheckpointRecord>,
    /// Number of global batches trained, as last reported.
    pub batches: u64,
    /// Number of global batches in the granted length, as last reported; 0 before the first report.
    pub batches_total: u64,
    /// Metrics of the latest validation by name, as decimal strings. At most 64.
    #[serde(skip_serializing_if = "std::collections::BTreeMap::is_empty")]
    #[cfg_attr(feature = "crd", schemars(extend("maxProperties" = 64)))]
    pub metrics: std::collections::BTreeMap<String, String>,
    /// Best searched metric of all validations, as a decimal string. Unset before the first.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "crd", schemars(extend("maxLength" = 32)))]
    pub best_metric: Option<String>,
    /// Why the trial is pending, in one word, such as `Unschedulable`. Unset in other phases.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// Human-readable explanation of the phase.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "crd", schemars(extend("maxLength" = 1000)))]
    pub message: Option<String>,
    /// Current activity, as last reported by the program in this attempt.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "crd", schemars(extend("maxLength" = 1000)))]
    pub activity: Option<String>,
    /// Time when the trial ended.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ended_at: Option<Timestamp>,
    /// Generation of the spec that this status describes.
    pub observed_generation: i64,
    /// Conditions of the trial: `Scheduled`, `Running`, `Completed` and `Failed`.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[cfg_attr(
        feature = "crd",
        schemars(extend(
            "x-kubernetes-list-type" = "map",
            "x-kubernetes-list-map-keys" = ["type"],
            "maxItems" = 16
        ))
    )]
    pub conditions: Vec<Condition>,
}

/// An event that the search depends on. Facts are never retracted.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "crd", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub enum Fact {
    /// The searched metric at a granted length. Each length has one result: the first that was
    /// recorded.
    Result(ResultFact),
    /// The trial has ended.
    Closed(ClosedFact),
    /// The trial continues after its end. Of the last end and the last reopening, the later one
    /// counts.
    Reopened(ReopenedFact),
}

/// Maximum number of times that a trial can be reopened. It limits the size of `status.facts`.
pub const REOPENINGS_MAX: usize = 32;

/// The searched metric at a granted length.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "crd", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct ResultFact {
    /// Granted length, in the trial's unit.
    pub units: u64,
    /// Value of the metric as a decimal string; `NaN` ranks last.
    #[cfg_attr(feature = "crd", schemars(extend("maxLength" = 32)))]
    pub metric: String,
    /// Values of the other objectives, as decimal strings.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[cfg_attr(feature = "crd", schemars(extend("maxItems" = 3)))]
    pub values: Vec<String>,
    /// Newest checkpoint at the time of the result, from which copies start. Recorded only in
    /// searches that copy trials.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub checkpoint: Option<ResultCheckpoint>,
    /// Time at which the result was recorded. Unset in records of earlier versions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub at: Option<Timestamp>,
}

/// The end of a trial.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "crd", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct ClosedFact {
    /// Cause of the end.
    pub cause: CloseCause,
    /// Time at which the end was recorded. Unset in records of earlier versions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub at: Option<Timestamp>,
}

/// Cause of the end of a trial.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[cfg_attr(feature = "crd", derive(schemars::JsonSchema))]
pub enum CloseCause {
    /// The trial reached the granted length, or the search stopped it.
    Completed,
    /// The program ended cleanly before the granted length, after a validation.
    StoppedEarly,
    /// The hyperparameters cannot be trained. The search may sample others instead.
    InvalidHyperparameters,
    /// The trial failed: more program failures than `maxRestarts`, ten infrastructure failures
    /// without a new checkpoint, or a clean exit without any validation.
    Failed,
    /// The user cancelled or killed the experiment, or a limit of the search was reached.
    Cancelled,
    /// The user deleted the Trial object.
    Deleted,
}

fn is_false(value: &bool) -> bool {
    !value
}

fn is_zero<N: Default + PartialEq>(value: &N) -> bool {
    *value == N::default()
}
