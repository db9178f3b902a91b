//! Limits on the resources of a search.

use serde::{Deserialize, Serialize};

use crate::decisions::SearchLimit;

/// Limits on the resources of a search. Once one of them is reached, all trials are stopped, and
/// the search ends. Trials that are training save a checkpoint first.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "crd", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct SearchLimits {
    /// Seconds since the search began, at least 1. Pauses count, and so does the time in which no
    /// runner runs. Unset: no limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "crd", schemars(range(min = 1)))]
    pub seconds: Option<u64>,
    /// `slotsPerTrial` times the seconds of all attempts of all trials, at least 1. On a cluster,
    /// an attempt counts from the moment when its pods have no scheduling gates, and one that could
    /// not be scheduled does not count. Unset: no limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "crd", schemars(range(min = 1)))]
    pub slot_seconds: Option<u64>,
    /// Trained length of all trials, in the unit of `maxLength`, at least 1. The length of a
    /// trial's latest result counts; training since then does not. A copy counts from the length of
    /// its source. Unset: no limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "crd", schemars(range(min = 1)))]
    pub units: Option<u64>,
}

impl SearchLimits {
    /// Returns the limits that are set, in the order of the fields.
    pub fn all(&self) -> impl Iterator<Item = (SearchLimit, u64)> + use<> {
        let limits = [
            (SearchLimit::Seconds, self.seconds),
            (SearchLimit::SlotSeconds, self.slot_seconds),
            (SearchLimit::Units, self.units),
        ];
        limits.into_iter().filter_map(|(limit, maximum)| Some((limit, maximum?)))
    }
}
