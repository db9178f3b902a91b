//! Decisions of a search, as an experiment and its trials record them.
//!
//! A *turn* is an event and the steps that the search decided on it. It is recorded as a whole in
//! one object: in the trial whose fact is the event, otherwise in the experiment's log. A step that
//! changes another trial is repeated there, as the *effect* of the turn.

use serde::{Deserialize, Serialize};

use crate::experiment::{ReopenRequest, SearchLimits};
use crate::external::Action;
use crate::time::Timestamp;
use crate::trial::TrialSource;

/// A recorded step.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "crd", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub enum StepRecord {
    /// Creates a trial.
    Create(CreateStep),
    /// Continues a trial to a greater length.
    Continue(LengthStep),
    /// Promotes a trial that has ended. It keeps its rank, but does not train.
    PromoteClosed(LengthStep),
    /// Pauses a trial: it releases its slots, and may continue later.
    Pause(TrialStep),
    /// Stops a trial for good.
    Stop(TrialStep),
    /// Stops all paused trials of a bracket that have one length.
    StopPaused(StopPausedStep),
    /// Stops all open trials.
    StopAll(StopAllStep),
    /// Reopens trials that have ended.
    Reopen(ReopenStep),
    /// Ends the search.
    Finish(FinishStep),
}

/// Creation of a trial.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "crd", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct CreateStep {
    /// Index of the trial.
    pub trial: u32,
    /// Bracket of the trial, from 0.
    pub group: u32,
    /// Granted length.
    pub units: u64,
    /// Trial that the new one copies. Unset: the new trial starts from scratch.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub source: Option<TrialSource>,
}

/// A trial, and its new length.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "crd", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct LengthStep {
    /// Index of the trial.
    pub trial: u32,
    /// Length of the next rung.
    pub units: u64,
}

/// A trial.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "crd", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct TrialStep {
    /// Index of the trial.
    pub trial: u32,
}

/// The paused trials of a bracket at one length.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "crd", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct StopPausedStep {
    /// Bracket of the trials.
    pub group: u32,
    /// Length that the trials have.
    pub units: u64,
    /// Indexes of trials that stay paused.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub except: Vec<u32>,
}

/// All open trials.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "crd", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct StopAllStep {}

/// Trials that continue after their end.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "crd", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct ReopenStep {
    /// Indexes of the trials.
    pub trials: Vec<u32>,
}

/// The end of a search.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "crd", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct FinishStep {}

/// A turn whose event is not a fact of a trial.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "crd", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct LogEntry {
    /// Position of the turn in the order of the experiment.
    pub order: u64,
    /// Time of the decision.
    pub at: Timestamp,
    /// The event.
    pub event: LogEvent,
    /// The decisions, in order.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub steps: Vec<StepRecord>,
}

impl LogEntry {
    /// Returns `true` if the turn continues a search that had ended.
    pub fn continues_search(&self) -> bool {
        let is_end = |step: &StepRecord| matches!(step, StepRecord::Finish(_));
        matches!(self.event, LogEvent::Edited(_) | LogEvent::Reopened(_))
            && !self.steps.iter().any(is_end)
    }
}

/// Event of an experiment that is not a fact of a trial.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "crd", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub enum LogEvent {
    /// The search began.
    Began(BeganEvent),
    /// Trials were deleted.
    Deleted(DeletedEvent),
    /// The user has edited the experiment.
    Edited(EditedEvent),
    /// The search has spent what `spec.searcher.limits` allows.
    LimitReached(LimitReachedEvent),
    /// The external searcher answered.
    Answered(AnsweredEvent),
    /// The user has asked to reopen trials that have ended.
    Reopened(ReopenRequest),
}

/// Beginning of a search.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "crd", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct BeganEvent {
    /// Version of Stoker that decided.
    pub version: String,
    /// Settings with which the search began. Unset in records of earlier versions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub settings: Option<SearchSettings>,
    /// Trials of earlier experiments that the search knows, best first.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub prior_trials: Vec<PriorTrial>,
}

/// A trial of an earlier experiment.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "crd", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct PriorTrial {
    /// Name of the trial.
    pub name: String,
    /// Hyperparameters.
    #[cfg_attr(feature = "crd", schemars(schema_with = "crate::experiment::schema::free_object"))]
    pub hyperparameters: serde_json::Value,
    /// Best value of the searched metric.
    pub metric: String,
}

/// An edit by the user.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "crd", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct EditedEvent {
    /// Settings of the search from then on.
    pub settings: SearchSettings,
    /// Whether a limit that was reached still ends the search.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub is_limited: bool,
    /// Number of trials that each bracket had then, without those with invalid hyperparameters.
    /// Unset if the method has no brackets.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[cfg_attr(feature = "crd", schemars(length(max = 64)))]
    pub bracket_trials: Vec<u32>,
}

/// Fields of `spec.searcher` that may be edited while the experiment runs or after its end.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "crd", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct SearchSettings {
    /// Total number of trials. Unset if the method determines it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_trials: Option<u32>,
    /// Maximum number of trials that train concurrently. Unset if the method determines it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_concurrent_trials: Option<u32>,
    /// Training length of a trial, in the unit of `maxLength`.
    pub max_length: u64,
    /// Limits on the resources of the search.
    #[serde(default)]
    pub limits: SearchLimits,
    /// Seconds for which a paused trial keeps its slots.
    pub release_seconds: u32,
}

/// Deletion of trials by the user.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "crd", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct DeletedEvent {
    /// The trials.
    pub trials: Vec<DeletedTrial>,
}

/// A deleted trial.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "crd", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct DeletedTrial {
    /// Index of the trial.
    pub index: u32,
    /// Bracket of the trial.
    pub group: u32,
    /// Number of 32-bit words taken from the experiment's random stream up to and with this trial.
    pub random_words: u64,
    /// Trial that this one copied.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub source: Option<TrialSource>,
}

/// Answer of an external searcher. The entry is dropped once the next answer is recorded: by then,
/// all its effects are in trials.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "crd", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct AnsweredEvent {
    /// Number of the question.
    pub call: u64,
    /// Position of the last event of the question.
    pub through: u64,
    /// Actions of the answer. Those on trials that had ended meanwhile have no effect.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub actions: Vec<Action>,
}

/// A limit of a search that is reached.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "crd", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct LimitReachedEvent {
    /// The limit. Of several that were reached, the first in the order of `spec.searcher.limits`.
    pub limit: SearchLimit,
    /// Value of the limit.
    pub maximum: u64,
    /// Amount that was spent.
    pub spent: u64,
}

/// A field of `spec.searcher.limits`.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "crd", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub enum SearchLimit {
    /// Time since the search began.
    Seconds,
    /// Slots times the time of attempts.
    SlotSeconds,
    /// Trained units.
    Units,
}

impl SearchLimit {
    /// Returns the name of the field.
    pub fn name(self) -> &'static str {
        match self {
            Self::Seconds => "seconds",
            Self::SlotSeconds => "slotSeconds",
            Self::Units => "units",
        }
    }
}
