//! Status of an experiment.

use serde::{Deserialize, Serialize};

use crate::condition::Condition;
use crate::decisions::LogEntry;
use crate::time::Timestamp;

/// Status of an experiment, derived from its trials. Its size does not depend on the number of
/// trials.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Serialize)]
#[cfg_attr(feature = "crd", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase", default)]
pub struct ExperimentStatus {
    /// Current phase of the experiment.
    pub phase: Phase,
    /// Number of trials created so far. Trial indexes are never reused.
    pub trials_created: u32,
    /// Number of trials that have ended, for any reason.
    pub trials_closed: u32,
    /// Best trial so far by the searched metric.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub best: Option<BestTrial>,
    /// Trials with several objectives that no other trial surpasses in all of them, by their latest
    /// results. At most 64, spread evenly along the first objective.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[cfg_attr(feature = "crd", schemars(extend("maxItems" = 64)))]
    pub pareto: Vec<ParetoTrial>,
    /// Why the experiment is pending, in one word, such as `Unschedulable`. Unset in other phases.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// Human-readable explanation of the phase.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub message: Option<String>,
    /// Number of trials in phase `Running`.
    pub trials_running: u32,
    /// Progress of the experiment in percent.
    pub progress_percent: u32,
    /// Time when the experiment ended.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ended_at: Option<Timestamp>,
    /// Number of trials, in index order, that were cleaned up after the experiment ended: their
    /// checkpoints that are not retained are deleted.
    pub trials_cleaned: u32,
    /// Whether the cleanup after the end of the experiment is complete.
    pub cleaned_up: bool,
    /// Storage of the experiment's files. The operator records it before it creates the first pod.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub storage: Option<StorageRecord>,
    /// Turns of the search whose event is not a fact of a trial. Append-only, except that of the
    /// answers of an external searcher only the latest stays.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[cfg_attr(feature = "crd", schemars(extend("maxItems" = 1024)))]
    pub log: Vec<LogEntry>,
    /// Generation of the spec that this status describes.
    pub observed_generation: i64,
    /// Conditions of the experiment: `Valid`, `Running`, `Refused`, `Completed`, `Failed` and
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

/// Phase of an experiment, a trial or an inference job. `Completed`, `Failed` and `Cancelled` are
/// final.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "crd", derive(schemars::JsonSchema))]
pub enum Phase {
    /// Nothing runs now. The program starts once the cause in the status is resolved.
    #[default]
    Pending,
    /// The program runs. An experiment runs if at least one of its trials does.
    Running,
    /// Nothing runs, because the user paused it. It can be resumed.
    Paused,
    /// Ended as intended.
    Completed,
    /// Ended by failures.
    Failed,
    /// Ended because the user cancelled or killed it.
    Cancelled,
}

impl Phase {
    /// Returns `true` if the phase is final.
    pub fn is_terminal(self) -> bool {
        matches!(self, Self::Completed | Self::Failed | Self::Cancelled)
    }
}

/// Storage of the files of an experiment or a job. The operator records it before it creates the
/// first pod, and never changes it afterwards.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "crd", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct StorageRecord {
    /// URL of the storage root.
    pub url: String,
    /// Endpoint of an S3-compatible server other than AWS, as pods reach it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub endpoint: Option<String>,
    /// Directory of the experiment or job below the root.
    pub path: String,
    /// Name of the Secret with the storage credentials. Unset: pods have no such Secret.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub secret_name: Option<String>,
    /// Time since which this record is immutable. Unset in records of earlier versions, which
    /// followed the operator's settings.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fixed_at: Option<Timestamp>,
}

impl StorageRecord {
    /// Returns `true` if this record is immutable.
    pub fn is_fixed(&self) -> bool {
        self.fixed_at.is_some() && !self.url.is_empty()
    }
}

/// The trial with the best result.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "crd", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct BestTrial {
    /// Index of the trial.
    pub index: u32,
    /// Value of the searched metric, as a decimal string: the best result, or of a trial that
    /// stopped early, its best validation if that is better.
    pub metric: String,
    /// Name of the newest checkpoint with this metric that no attempt refused, if one exists.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub checkpoint: Option<String>,
}

/// A trial of the Pareto front.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "crd", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct ParetoTrial {
    /// Index of the trial.
    pub index: u32,
    /// Values of all objectives, as decimal strings.
    #[cfg_attr(feature = "crd", schemars(extend("maxItems" = 4)))]
    pub values: Vec<String>,
}
