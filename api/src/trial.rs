//! The record of one trial: its draw, its grants, its facts.
//!
//! The record is the log. A *fact* is what happened; it is written once, in no order. A *grant* gives a fact its
//! place in the order and says what length follows from it. A search is a fold over the facts by order.

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::condition::Condition;
use crate::experiment::{Phase, Unit};
use crate::time::Timestamp;

/// One training with fixed hyperparameters. Its draw is never changed; grants are only added.
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
        doc = "The record of one trial: its draw, its grants, its facts.",
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
                self.unit == oldSelf.unit && self.units == oldSelf.units",
            "message": "a trial's draw never changes"
        },
        {
            "rule": "!has(oldSelf.grants) || (has(self.grants) && \
                oldSelf.grants.all(old, self.grants.exists(new, new.order == old.order)))",
            "message": "grants are added, never taken away"
        }
    ]))
)]
#[serde(rename_all = "camelCase")]
pub struct TrialSpec {
    /// The experiment's name.
    pub experiment: String,
    /// The place in the experiment, from 0 and without gaps.
    pub index: u32,
    /// The draw's identity, a version 4 UUID made from the experiment's seed.
    pub request_id: String,
    /// Seeds the initial weights, the order of the data and dropout; from 0 to 2^31 - 1.
    pub seed: u32,
    /// The values drawn.
    #[cfg_attr(feature = "crd", schemars(schema_with = "crate::experiment::schema::free_object"))]
    pub hyperparameters: Value,
    /// What grants count.
    pub unit: Unit,
    /// The length allowed from the start, in `unit`.
    pub units: u64,
    /// Facts in their order, each with the length it allows. Added to, never changed.
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
    /// What is wanted of the trial now.
    #[serde(default, skip_serializing_if = "WantedState::is_run")]
    pub wanted: WantedState,
    /// Since when it is wanted; unset: from the start.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub wanted_since: Option<Timestamp>,
}

/// What is wanted of a trial. It only ever becomes graver, but that `pause` may become `run` again.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[cfg_attr(feature = "crd", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub enum WantedState {
    /// That it trains to the length granted.
    #[default]
    Run,
    /// Nothing now: it takes a checkpoint and exits.
    Pause,
    /// Nothing more: it takes a checkpoint and exits.
    Stop,
    /// That it ends at once.
    Kill,
}

impl WantedState {
    /// Whether it is to train.
    pub fn is_run(&self) -> bool {
        *self == Self::Run
    }
}

/// A fact's place in the order over the whole experiment, and the length it allows.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "crd", derive(schemars::JsonSchema))]
#[cfg_attr(
    feature = "crd",
    schemars(extend("x-kubernetes-validations" = [{
        "rule": "self == oldSelf",
        "message": "a grant never changes"
    }]))
)]
#[serde(rename_all = "camelCase")]
pub struct Grant {
    /// The place: unique in the experiment, from 0 and without gaps.
    pub order: u64,
    /// Index of the fact in `status.facts`.
    pub fact: u32,
    /// The length this trial may train to once the fact is placed, in the trial's unit; never less than before.
    pub units: u64,
}

/// What has been seen of a trial.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Serialize)]
#[cfg_attr(feature = "crd", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase", default)]
pub struct TrialStatus {
    /// Where it stands.
    pub phase: Phase,
    /// What happened, in no order. Added to, never changed.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[cfg_attr(feature = "crd", schemars(extend("maxItems" = 514)))]
    pub facts: Vec<Fact>,
    /// Lives of the trial's gang, in order; the last one may be running.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[cfg_attr(feature = "crd", schemars(extend("maxItems" = 128)))]
    pub attempts: Vec<Attempt>,
    /// Failures of the trial's own that count against `maxRestarts`.
    pub restarts: u32,
    /// Checkpoints that exist, oldest first.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[cfg_attr(feature = "crd", schemars(extend("maxItems" = 256)))]
    pub checkpoints: Vec<CheckpointRecord>,
    /// Global batches trained, as last reported.
    pub batches: u64,
    /// Batches at which the granted length ends, as the trainer reckons; 0 before it said.
    pub batches_total: u64,
    /// The latest validation metrics, as decimal strings by name.
    #[serde(skip_serializing_if = "std::collections::BTreeMap::is_empty")]
    #[cfg_attr(feature = "crd", schemars(extend("maxProperties" = 64)))]
    pub metrics: std::collections::BTreeMap<String, String>,
    /// The best searched metric of all validations, as a decimal string; unset before the first.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "crd", schemars(extend("maxLength" = 32)))]
    pub best_metric: Option<String>,
    /// Why it is pending, in one word, such as `Unschedulable`; unset in other phases.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// Why it stands there, for people.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "crd", schemars(extend("maxLength" = 1000)))]
    pub message: Option<String>,
    /// What its program last said it is doing, in this attempt.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "crd", schemars(extend("maxLength" = 1000)))]
    pub activity: Option<String>,
    /// When it was closed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ended_at: Option<Timestamp>,
    /// The generation of the spec that this was said of.
    pub observed_generation: i64,
    /// `Scheduled`, `Running`, `Completed`, `Failed`.
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

/// Something that happened and that decisions follow from. Never retracted.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "crd", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub enum Fact {
    /// The searched metric at a granted length. One for each length: the first recorded wins.
    Result(ResultFact),
    /// The trial will do nothing more.
    Closed(ClosedFact),
}

/// The searched metric at a granted length.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "crd", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct ResultFact {
    /// The granted length, in the trial's unit.
    pub units: u64,
    /// The metric as a decimal string; `NaN` ranks last.
    #[cfg_attr(feature = "crd", schemars(extend("maxLength" = 32)))]
    pub metric: String,
}

/// Why a trial will do nothing more.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "crd", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct ClosedFact {
    /// The cause.
    pub cause: CloseCause,
}

/// Why a trial was closed.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[cfg_attr(feature = "crd", derive(schemars::JsonSchema))]
pub enum CloseCause {
    /// It trained to the end of what was granted, or the search stopped it.
    Completed,
    /// Its program ended before the granted length, because of its own `stop_training`.
    StoppedEarly,
    /// Its hyperparameters cannot be trained; the search may draw others in its place.
    InvalidHyperparameters,
    /// It failed more often than `maxRestarts` allows.
    Failed,
    /// Somebody asked.
    Cancelled,
    /// Its object was deleted by hand.
    Deleted,
}

/// One life of a trial's gang.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "crd", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct Attempt {
    /// Its number, from 0.
    pub number: u32,
    /// How it ended; unset while it runs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub end: Option<AttemptEnd>,
    /// The checkpoint it started from.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "crd", schemars(extend("maxLength" = 63)))]
    pub resumed_from: Option<String>,
    /// What its last report or its runner said of the end, for people.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "crd", schemars(extend("maxLength" = 1000)))]
    pub message: Option<String>,
    /// Why it ended, in one word, such as `OOMKilled`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "crd", schemars(extend("maxLength" = 63)))]
    pub reason: Option<String>,
    /// When it was begun; unset where no clock was asked.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub started_at: Option<Timestamp>,
    /// When all of its pods were first seen without scheduling gates. The start deadline counts from here.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ungated_at: Option<Timestamp>,
    /// When it ended.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ended_at: Option<Timestamp>,
    /// Whether all of its pods were made: one that is missing later is lost.
    #[serde(default, skip_serializing_if = "is_false")]
    pub has_pods: bool,
}

/// How an attempt ended, the worst over its ranks.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "crd", derive(schemars::JsonSchema))]
pub enum AttemptEnd {
    /// Its program finished.
    Completed,
    /// It checkpointed and left because it was asked to.
    Preempted,
    /// Its hyperparameters cannot be trained.
    InvalidHyperparameters,
    /// The program failed: an error, a panic, a signal, out of memory. Counts against `maxRestarts`.
    UserError,
    /// What is under the program failed: storage, network, node, runner. Does not count against `maxRestarts`.
    Infrastructure,
    /// Its runner ended, and the attempt with it. Says nothing of the trial, and counts for nothing.
    RunnerLost,
    /// It found no place to run: not all of its pods were scheduled in time. Counts for nothing.
    NotStarted,
}

/// A checkpoint that exists: its manifest was written.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "crd", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct CheckpointRecord {
    /// Its folder's name under `checkpoints/`: batches (12 digits) and attempt.
    #[cfg_attr(feature = "crd", schemars(extend("maxLength" = 63)))]
    pub name: String,
    /// Global batches trained.
    pub batches: u64,
    /// The searched metric of a validation at the same batch, as a decimal string.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "crd", schemars(extend("maxLength" = 32)))]
    pub metric: Option<String>,
    /// SHA-256 of its manifest, in hex.
    #[cfg_attr(feature = "crd", schemars(extend("maxLength" = 64)))]
    pub manifest_sha256: String,
    /// Sum of its files' sizes.
    pub bytes: u64,
}

fn is_false(value: &bool) -> bool {
    !value
}
