//! Training lengths.

use serde::{Deserialize, Serialize};

/// A training length. Exactly one field must be set.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "crd", derive(schemars::JsonSchema))]
#[cfg_attr(
    feature = "crd",
    schemars(extend("x-kubernetes-validations" = [{
        "rule": "[has(self.records), has(self.batches), has(self.epochs), has(self.units)]\
                 .exists_one(x, x)",
        "message": "exactly one of records, batches, epochs and units must be set"
    }]))
)]
#[serde(rename_all = "camelCase")]
pub struct Length {
    /// Length in training samples, rounded down to whole global batches; at least 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "crd", schemars(range(min = 1)))]
    pub records: Option<u64>,
    /// Length in global batches; at least 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "crd", schemars(range(min = 1)))]
    pub batches: Option<u64>,
    /// Length in epochs: passes over the training data, or multiples of `recordsPerEpoch` if that
    /// is set; at least 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "crd", schemars(range(min = 1)))]
    pub epochs: Option<u64>,
    /// Length in the program's own count, such as environment steps; at least 1. Only for programs
    /// with a custom training loop, which report this count by the session API, and not for
    /// intervals.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "crd", schemars(range(min = 1)))]
    pub units: Option<u64>,
}

/// Unit of a training length.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "crd", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub enum Unit {
    /// Training samples.
    Records,
    /// Global batches.
    Batches,
    /// Passes over the training data, or multiples of `recordsPerEpoch`.
    Epochs,
    /// Own count of a program with a custom training loop.
    Units,
}

impl Unit {
    /// Returns the name of several units, which is also the field of [`Length`].
    pub fn plural(self) -> &'static str {
        match self {
            Self::Records => "records",
            Self::Batches => "batches",
            Self::Epochs => "epochs",
            Self::Units => "units",
        }
    }
}

impl Length {
    /// Creates a length of `units` in `unit`.
    pub fn new(unit: Unit, units: u64) -> Self {
        let of = |this| (unit == this).then_some(units);
        Self {
            records: of(Unit::Records),
            batches: of(Unit::Batches),
            epochs: of(Unit::Epochs),
            units: of(Unit::Units),
        }
    }

    /// Returns `true` if no field is set.
    pub fn is_unset(&self) -> bool {
        *self == Self::default()
    }

    /// Returns the unit and the number of units; `None` unless exactly one field is set.
    pub fn get(&self) -> Option<(Unit, u64)> {
        match (self.records, self.batches, self.epochs, self.units) {
            (Some(units), None, None, None) => Some((Unit::Records, units)),
            (None, Some(units), None, None) => Some((Unit::Batches, units)),
            (None, None, Some(units), None) => Some((Unit::Epochs, units)),
            (None, None, None, Some(units)) => Some((Unit::Units, units)),
            _ => None,
        }
    }
}
