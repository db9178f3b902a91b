//! Attempts to run a trial.

use serde::{Deserialize, Serialize};

use super::is_false;
use crate::time::Timestamp;

/// One attempt to run a trial.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "crd", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct Attempt {
    /// Attempt number, from 0.
    pub number: u32,
    /// Outcome of the attempt. Unset while it runs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub end: Option<AttemptEnd>,
    /// Name of the checkpoint that the attempt resumed from.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "crd", schemars(extend("maxLength" = 63)))]
    pub resumed_from: Option<String>,
    /// Human-readable explanation of the outcome, from the last report or from the runner.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "crd", schemars(extend("maxLength" = 1000)))]
    pub message: Option<String>,
    /// Why the attempt ended, in one word, such as `OOMKilled`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "crd", schemars(extend("maxLength" = 63)))]
    pub reason: Option<String>,
    /// Time when the attempt started. Unset if the runner recorded none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub started_at: Option<Timestamp>,
    /// Time when the operator saw all pods without gates, or when the last was scheduled before.
    /// The start deadline and `limits.slotSeconds` count from here.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ungated_at: Option<Timestamp>,
    /// Time when the attempt ended.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ended_at: Option<Timestamp>,
    /// Whether all pods of the attempt were created. From then on, a missing pod counts as deleted.
    #[serde(default, skip_serializing_if = "is_false")]
    pub has_pods: bool,
    /// Whether the program has reported that it trains, after it loaded its checkpoint, if any.
    #[serde(default, skip_serializing_if = "is_false")]
    pub has_started: bool,
}

/// Outcome of an attempt. The most severe outcome of its ranks determines it.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "crd", derive(schemars::JsonSchema))]
pub enum AttemptEnd {
    /// The program finished.
    Completed,
    /// The program saved a checkpoint and exited before reaching its length, usually after a stop
    /// request.
    Preempted,
    /// The hyperparameters cannot be trained.
    InvalidHyperparameters,
    /// The program failed: an error, a panic, a signal or out of memory. Counts against
    /// `maxRestarts`.
    UserError,
    /// The infrastructure failed: storage, network or node. Does not count against
    /// `maxRestarts`.
    Infrastructure,
    /// The runner ended the attempt, or ended itself. Not a failure of the trial; does not count.
    RunnerLost,
    /// Training did not begin: not all pods were scheduled in time, or the API server refused one.
    /// Also if the storage, an image, a Secret or a node was unavailable, and a trial of the
    /// experiment has trained before. Does not count.
    NotStarted,
}
