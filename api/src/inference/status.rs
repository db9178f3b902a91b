//! What has been seen of a job. Of constant size for a number of slots.

use serde::{Deserialize, Serialize};

use super::Role;
use crate::condition::Condition;
use crate::experiment::{Phase, UsedStorage};
use crate::time::Timestamp;
use crate::trial::AttemptEnd;

/// What has been seen of a job.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "crd", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase", default)]
pub struct InferenceStatus {
    /// Where it stands.
    pub phase: Phase,
    /// What is done now.
    pub stage: Role,
    /// Processes started so far: the next one's attempt. No two processes of a job ever share one, nor what they write.
    pub attempts: u32,
    /// One for each slot. The first plans and finishes too.
    pub workers: Vec<WorkerStatus>,
    /// Rows done: in a committed shard, rejected ones included.
    pub rows: u64,
    /// Rows of the input; 0 before it was planned.
    pub rows_total: u64,
    /// Rows of those done that have no output. On a cluster known at the end.
    pub rejected: u64,
    /// Whether the process that plans or finishes has said what it did. On a cluster.
    #[serde(skip_serializing_if = "is_false")]
    pub reported: bool,
    /// Why it stands there, for people.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub message: Option<String>,
    /// Processes that run now. On a cluster, as the fields after it.
    pub running: u32,
    /// Failures that count against `maxRestarts`, over all slots.
    pub restarts: u32,
    /// The part of the rows that is done, in percent.
    pub progress_percent: u32,
    /// When it began.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub started_at: Option<Timestamp>,
    /// When it ended.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ended_at: Option<Timestamp>,
    /// Where its logs go, and its output unless it says otherwise.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub storage: Option<UsedStorage>,
    /// The folder of its output.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub output: Option<String>,
    /// The latest ends of processes that did not go well, oldest first.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub ends: Vec<WorkerEnd>,
    /// The generation of the spec that this was said of.
    pub observed_generation: i64,
    /// `Valid`, `Scheduled`, `Running`, `Completed`, `Failed`, `Cancelled`.
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

/// What has been seen of one slot.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "crd", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase", default)]
pub struct WorkerStatus {
    /// The attempt that runs, if one does.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub attempt: Option<u32>,
    /// Whether the stage needs nothing more of it.
    pub is_done: bool,
    /// Failures of its own that count against `maxRestarts`.
    pub restarts: u32,
    /// Failures in a row without a new shard between them, of whatever class.
    pub barren: u32,
    /// Rows of its shards that are done, as it reported last.
    #[serde(skip_serializing_if = "is_zero")]
    pub rows: u64,
    /// Whether the attempt's pod was made: one that is missing later is lost.
    #[serde(skip_serializing_if = "is_false")]
    pub has_pod: bool,
    /// Attempts in a row that had no pod, or left unasked: the next waits longer each time.
    #[serde(skip_serializing_if = "is_none_yet")]
    pub turned_away: u32,
    /// No attempt begins before then.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub not_before: Option<Timestamp>,
}

/// How a process ended that did not go well.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "crd", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct WorkerEnd {
    /// Its number.
    pub attempt: u32,
    /// What it did.
    pub role: Role,
    /// Whose it was.
    pub slot: u32,
    /// How it ended.
    pub end: AttemptEnd,
    /// Why, in one word, such as `OOMKilled`.
    pub reason: String,
    /// Why, for people.
    pub message: String,
    /// When it was seen.
    pub at: Timestamp,
}

fn is_zero(value: &u64) -> bool {
    *value == 0
}

fn is_none_yet(value: &u32) -> bool {
    *value == 0
}

fn is_false(value: &bool) -> bool {
    !value
}
