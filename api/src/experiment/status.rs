//! How an experiment is going.

use serde::{Deserialize, Serialize};

use crate::condition::Condition;
use crate::time::Timestamp;

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
    /// Why it is pending, in one word, such as `Unschedulable`; unset in other phases.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// Why it stands there, for people.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub message: Option<String>,
    /// Trials in phase `Running`.
    pub trials_running: u32,
    /// The part of it that is done, in percent.
    pub progress_percent: u32,
    /// When it ended.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ended_at: Option<Timestamp>,
    /// Trials, by index from 0, whose checkpoints that nobody keeps are deleted since the end.
    pub trials_cleaned: u32,
    /// All of them are: nothing is left to do.
    pub cleaned_up: bool,
    /// Storage of its files, fixed before the first pod.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub storage: Option<UsedStorage>,
    /// The generation of the spec that this was said of.
    pub observed_generation: i64,
    /// `Valid`, `Running`, `Completed`, `Failed`, `Cancelled`.
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

/// Where an experiment or a trial stands. The last three are final.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "crd", derive(schemars::JsonSchema))]
pub enum Phase {
    /// Nothing runs now. Something will, once the cause is gone.
    #[default]
    Pending,
    /// Its program runs; of an experiment, that of at least one trial.
    Running,
    /// Nothing runs, because somebody asked; it may go on.
    Paused,
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

/// Storage of an experiment's or a job's files. The operator records it before the first pod that uses it, and never
/// changes it afterwards.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "crd", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct UsedStorage {
    /// The root.
    pub url: String,
    /// The address of an S3 server other than Amazon's, as pods reach it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub endpoint: Option<String>,
    /// The experiment's folder below the root.
    pub path: String,
    /// Name of the Secret with the storage's credentials. Unset: pods have no such Secret.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub secret_name: Option<String>,
    /// Time from which this record never changes. Unset in records of versions that followed the operator's settings.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fixed_at: Option<Timestamp>,
}

impl UsedStorage {
    /// Whether this record never changes.
    pub fn is_fixed(&self) -> bool {
        self.fixed_at.is_some() && !self.url.is_empty()
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
