//! What has been seen of a job. Of constant size for a number of slots.

use serde::{Deserialize, Serialize};

use super::Role;
use crate::experiment::Phase;

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
    /// Rows of those done that have no output.
    pub rejected: u64,
    /// Why it stands there, for people.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub message: Option<String>,
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
}
