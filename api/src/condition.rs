//! Conditions of a status, following the Kubernetes API conventions.

use serde::{Deserialize, Serialize};

use crate::text::{self, MESSAGE_BYTES_MAX};
use crate::time::Timestamp;

/// Maximum size in bytes of a reason, as JSON.
pub const REASON_BYTES_MAX: usize = 63;

/// One aspect of an object's current state.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "crd", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct Condition {
    /// Type of the condition, such as `Completed`.
    #[serde(rename = "type")]
    pub type_: String,
    /// Status of the condition: `True`, `False` or `Unknown`.
    pub status: ConditionStatus,
    /// Generation of the object's spec that the condition describes.
    #[serde(default)]
    pub observed_generation: i64,
    /// Time of the last change of `status`.
    pub last_transition_time: Timestamp,
    /// Machine-readable reason for the last update, as one word in `CamelCase`.
    pub reason: String,
    /// Human-readable explanation of the reason.
    #[serde(default)]
    pub message: String,
}

/// Whether a condition holds.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "crd", derive(schemars::JsonSchema))]
pub enum ConditionStatus {
    /// The condition holds.
    True,
    /// The condition does not hold.
    False,
    /// The state cannot be determined.
    Unknown,
}

impl From<bool> for ConditionStatus {
    fn from(holds: bool) -> Self {
        if holds { Self::True } else { Self::False }
    }
}

/// Sets a condition and keeps conditions of other types. The transition time changes only if the
/// status changes.
pub fn set(conditions: &mut Vec<Condition>, new: Condition) {
    match conditions.iter_mut().find(|condition| condition.type_ == new.type_) {
        Some(old) if old.status == new.status => {
            *old = Condition { last_transition_time: old.last_transition_time, ..new };
        }
        Some(old) => *old = new,
        None => conditions.push(new),
    }
}

/// Truncates the reason to [`REASON_BYTES_MAX`] and the message to [`MESSAGE_BYTES_MAX`].
pub fn bound(condition: &mut Condition) {
    text::bound(&mut condition.reason, REASON_BYTES_MAX);
    text::bound(&mut condition.message, MESSAGE_BYTES_MAX);
}

/// Returns the condition of a type, or `None` if it was never set.
pub fn find<'a>(conditions: &'a [Condition], type_: &str) -> Option<&'a Condition> {
    conditions.iter().find(|condition| condition.type_ == type_)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn condition(holds: bool, seconds: i64, message: &str) -> Condition {
        Condition {
            type_: "Valid".to_owned(),
            status: holds.into(),
            observed_generation: 1,
            last_transition_time: Timestamp(seconds),
            reason: "Because".to_owned(),
            message: message.to_owned(),
        }
    }

    #[test]
    fn transition_time_changes_only_with_status() {
        let mut conditions = vec![];
        let mut check = |new: Condition, expected: i64| {
            let message = new.message.clone();
            set(&mut conditions, new);
            let condition = find(&conditions, "Valid").unwrap();
            assert_eq!(
                (condition.last_transition_time, &condition.message),
                (Timestamp(expected), &message)
            );
        };
        check(condition(true, 1, "a"), 1);
        check(condition(true, 2, "b"), 1);
        check(condition(false, 3, "b"), 3);
        check(condition(true, 4, "c"), 4);
        assert_eq!(conditions.len(), 1);
    }
}
