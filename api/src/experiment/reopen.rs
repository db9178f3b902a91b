//! Requests to continue trials that have ended.

use serde::{Deserialize, Serialize};

/// Request to continue trials that have ended. Each request takes effect once.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "crd", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct ReopenRequest {
    /// Number of the request, at least 1. A request takes effect if its number is greater than that
    /// of all earlier ones.
    #[cfg_attr(feature = "crd", schemars(range(min = 1, max = u32::MAX)))]
    pub number: u32,
    /// Trials to continue. Default: `stopped`.
    #[serde(default)]
    pub trials: ReopenedTrials,
}

/// Trials that a request continues.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "crd", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub enum ReopenedTrials {
    /// Trials whose program ended cleanly before the granted length, and trials that a limit has
    /// stopped.
    #[default]
    Stopped,
    /// Trials that failed.
    Failed,
}
