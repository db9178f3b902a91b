//! Conditions of a status, by the conventions of the Kubernetes API.

use serde::{Deserialize, Serialize};

use crate::text::{self, MESSAGE_BYTES_MAX};
use crate::time::Timestamp;

/// The most bytes that a reason takes, as JSON.
pub const REASON_BYTES_MAX: usize = 63;

/// One thing that is true, false or unknown of an object now.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "crd", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct Condition {
    /// What is said, such as `Completed`.
    #[serde(rename = "type")]
    pub type_: String,
    /// `True`, `False` or `Unknown`.
    pub status: ConditionStatus,
    /// The generation of the object's spec that it was said of.
    #[serde(default)]
    pub observed_generation: i64,
    /// When `status` last changed.
    pub last_transition_time: Timestamp,
    /// Why, in one word of `CamelCase`; one of a fixed list.
    pub reason: String,
    /// Why, for people.
    #[serde(default)]
    pub message: String,
}

/// Whether a condition holds.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "crd", derive(schemars::JsonSchema))]
pub enum ConditionStatus {
    /// It holds.
    True,
    /// It does not.
    False,
    /// Nobody knows.
    Unknown,
}

impl From<bool> for ConditionStatus {
    fn from(holds: bool) -> Self {
        if holds { Self::True } else { Self::False }
    }
}

/// Sets a condition. The time of its transition changes with its status alone; conditions of other types stay.
pub fn set(conditions: &mut Vec<Condition>, new: Condition) {
    match conditions.iter_mut().find(|it| it.type_ == new.type_) {
        Some(old) if old.status == new.status => {
            *old = Condition { last_transition_time: old.last_transition_time, ..new };
        }
        Some(old) => *old = new,
        None => conditions.push(new),
    }
}

/// Cuts the reason and the message of a trial's condition where they are too long.
pub fn bound(condition: &mut Condition) {
    text::bound(&mut condition.reason, REASON_BYTES_MAX);
    text::bound(&mut condition.message, MESSAGE_BYTES_MAX);
}

/// The condition of a type, if there is one.
pub fn find<'a>(conditions: &'a [Condition], type_: &str) -> Option<&'a Condition> {
    conditions.iter().find(|it| it.type_ == type_)
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
    fn the_time_moves_with_the_status_alone() {
        let mut conditions = vec![];
        let mut check = |new: Condition, expected: i64| {
            let message = new.message.clone();
            set(&mut conditions, new);
            let found = find(&conditions, "Valid").unwrap();
            assert_eq!(
                (found.last_transition_time, &found.message),
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
