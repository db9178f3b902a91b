//! Observed status of an inference job. Its size depends only on the number of slots.

use serde::{Deserialize, Serialize};

use super::Role;
use crate::condition::Condition;
use crate::experiment::{Phase, StorageRecord};
use crate::time::Timestamp;
use crate::trial::AttemptEnd;

/// Observed status of an inference job.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "crd", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase", default)]
pub struct InferenceStatus {
    /// Current phase of the job.
    pub phase: Phase,
    /// Current stage of the job: plan, work or finish.
    pub stage: Role,
    /// Number of processes started so far, and the next attempt number. Attempt numbers are never
    /// reused in a job, and each attempt writes separate files.
    pub attempts: u32,
    /// Status of each slot, in order. The first slot also plans and finishes.
    pub workers: Vec<WorkerStatus>,
    /// Number of rows in committed shards, including rejected rows.
    pub rows: u64,
    /// Number of rows of the input; 0 before the job is planned.
    pub rows_total: u64,
    /// Number of processed rows without output. The operator sets it when the job ends.
    pub rejected: u64,
    /// Whether the process that plans or finishes has reported its result. Used by the operator.
    #[serde(skip_serializing_if = "is_false")]
    pub reported: bool,
    /// Human-readable explanation of the phase.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub message: Option<String>,
    /// Number of running processes. Set by the operator.
    pub running: u32,
    /// Number of program failures over all slots. Set by the operator.
    pub restarts: u32,
    /// Progress of the job in percent of its rows.
    pub progress_percent: u32,
    /// Time when the job started. Set by the operator.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub started_at: Option<Timestamp>,
    /// Time when the job ended. Set by the operator.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ended_at: Option<Timestamp>,
    /// Storage of the logs, and of the output by default. Set by the operator.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub storage: Option<StorageRecord>,
    /// URL of the output directory. Set by the operator.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub output: Option<String>,
    /// The latest 16 processes that did not complete and the latest 16 failures, oldest first. Set
    /// by the operator.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub ends: Vec<WorkerEnd>,
    /// Generation of the spec that this status describes.
    pub observed_generation: i64,
    /// Conditions of the job: `Valid`, `Scheduled`, `Running`, `Completed`, `Failed` and
    /// `Cancelled`.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[cfg_attr(
        feature = "crd",
        schemars(extend(
            "x-kubernetes-list-type" = "map",
            "x-kubernetes-list-map-keys" = ["type"]
        ))
    )]
    pub conditions: Vec<Condition>,
}

/// Observed status of one slot.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "crd", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase", default)]
pub struct WorkerStatus {
    /// Number of the running attempt. Unset if none runs.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub attempt: Option<u32>,
    /// Whether the slot has finished the current stage.
    pub is_done: bool,
    /// Number of program failures of the slot, which count against `maxRestarts`.
    pub restarts: u32,
    /// Consecutive failures, of any class, since the last committed shard.
    #[serde(rename = "barren")]
    pub consecutive_failures: u32,
    /// Number of rows in committed shards of the slot, as last reported.
    #[serde(skip_serializing_if = "is_zero")]
    pub rows: u64,
    /// Whether the pod of the attempt was created. From then on, a missing pod counts as deleted.
    #[serde(skip_serializing_if = "is_false")]
    pub has_pod: bool,
    /// Consecutive attempts that could not start or exited as preempted. The back-off grows with
    /// it.
    #[serde(rename = "turnedAway", skip_serializing_if = "is_zero_count")]
    pub backoff_count: u32,
    /// Earliest time of the next attempt.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub not_before: Option<Timestamp>,
}

/// The end of a process that did not complete.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "crd", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct WorkerEnd {
    /// Attempt number of the process.
    pub attempt: u32,
    /// Stage in which the process ran.
    pub role: Role,
    /// Slot of the process.
    pub slot: u32,
    /// Outcome of the process.
    pub end: AttemptEnd,
    /// Why the process ended, in one word, such as `OOMKilled`.
    pub reason: String,
    /// Human-readable explanation of the outcome.
    pub message: String,
    /// Time when the operator saw the end.
    pub at: Timestamp,
}

fn is_zero(value: &u64) -> bool {
    *value == 0
}

fn is_zero_count(value: &u32) -> bool {
    *value == 0
}

fn is_false(value: &bool) -> bool {
    !value
}
