//! Trials that continue after their end.

use serde::{Deserialize, Serialize};

use crate::time::Timestamp;

/// The continuation of a trial after its end.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "crd", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct ReopenedFact {
    /// Number of times that the search had reopened the trial. More than one of them may be new: a
    /// limit can stop a trial again before it continues.
    pub number: u32,
    /// Number of the next attempt. Failures of earlier attempts no longer count.
    pub attempt: u32,
    /// Time at which the continuation was recorded.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub at: Option<Timestamp>,
}
