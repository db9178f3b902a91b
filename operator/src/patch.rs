//! Writes that change known fields and keep all others.
//!
//! During a rolling upgrade, operators of two versions write the same objects. A write of the whole
//! object would drop the fields that only the newer version knows. A JSON patch of the difference
//! between two typed values keeps them. A `test` of the `resourceVersion` makes the patch fail if
//! another client has changed the object.

use std::fmt::Debug;

use json_patch::jsonptr::{Pointer, PointerBuf};
use json_patch::{
    AddOperation, MoveOperation, Patch, PatchOperation, RemoveOperation, TestOperation,
};
use kube::api::PatchParams;
use kube::{Api, Resource, ResourceExt as _};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::error::{Error, request};

/// Lists whose entries have an identity, with the field that holds it. Entries of other lists are
/// compared by position: facts are only appended, and a job's workers are numbered by position.
const LIST_KEYS: [(&str, &str); 6] = [
    ("attempts", "number"),
    ("checkpoints", "name"),
    ("conditions", "type"),
    ("ends", "attempt"),
    ("grants", "order"),
    ("log", "order"),
];

/// The part of an object that a write changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ObjectPart {
    /// `spec`, by a write of the object.
    Spec,
    /// `status`, by a write of the subresource.
    Status,
}

/// Changes one part of `object` from `before` to `after`, unless the object changed since it was
/// read.
///
/// # Errors
///
/// [`Error::Conflict`] if the object changed since; otherwise see [`Error`].
pub(crate) async fn write<K, T>(
    api: &Api<K>,
    operation: String,
    object: &K,
    part: ObjectPart,
    (before, after): (&T, &T),
) -> Result<K, Error>
where
    K: Resource + Clone + DeserializeOwned + Debug,
    T: Serialize,
{
    let name = object.name_any();
    let version = object.resource_version().unwrap_or_default();
    let field = if part == ObjectPart::Spec { "spec" } else { "status" };
    let json = |value: &T| serde_json::to_value(value);
    let (Ok(before), Ok(after)) = (json(before), json(after)) else {
        let reason = format!("its {field} contains a value that JSON cannot represent");
        return Err(Error::Unavailable { operation, reason });
    };
    let patch = kube::api::Patch::Json::<()>(difference(&version, field, &before, &after));
    let parameters = PatchParams::default();
    let written = match part {
        ObjectPart::Spec => request(operation, api.patch(&name, &parameters, &patch)).await,
        ObjectPart::Status => {
            request(operation, api.patch_status(&name, &parameters, &patch)).await
        }
    };
    let Err(Error::Refused { operation, code: 422, message }) = written else { return written };
    // The API server responds with 422 both to a failed test and to an invalid object. The current
    // version distinguishes the two.
    let current = request(operation.clone(), api.get_metadata(&name)).await?;
    match current.resource_version().is_some_and(|current| current == version) {
        true => Err(Error::Refused { operation, code: 422, message }),
        false => Err(Error::Conflict { operation }),
    }
}

/// Returns the patch that turns `before` into `after`, both at `field`, in an object of this
/// version.
fn difference(version: &str, field: &str, before: &Value, after: &Value) -> Patch {
    let test = PatchOperation::Test(TestOperation {
        path: PointerBuf::from_tokens(["metadata", "resourceVersion"]),
        value: version.into(),
    });
    let mut operations = vec![test];
    compare(&mut operations, &PointerBuf::from_tokens([field]), before, after);
    Patch(operations)
}

fn compare(operations: &mut Vec<PatchOperation>, path: &Pointer, before: &Value, after: &Value) {
    match (before, after) {
        _ if before == after => {}
        (Value::Object(before), Value::Object(after)) => {
            for name in before.keys().filter(|name| !after.contains_key(*name)) {
                remove(operations, path.with_trailing_token(name));
            }
            for (name, after) in after {
                let path = path.with_trailing_token(name);
                match before.get(name) {
                    Some(before) => compare(operations, &path, before, after),
                    None => add(operations, path, after),
                }
            }
        }
        (Value::Array(before), Value::Array(after)) => {
            let name = path.last().map(|token| token.decoded().into_owned()).unwrap_or_default();
            match LIST_KEYS.iter().find(|(list, _)| *list == name) {
                Some((_, key)) => compare_keyed(operations, path, key, before, after),
                None => compare_by_position(operations, path, before, after),
            }
        }
        // `add` sets a member whether or not it exists: a default that this version writes out may
        // be absent on the API server. `replace` would fail.
        _ => add(operations, path.to_buf(), after),
    }
}

fn compare_by_position(
    operations: &mut Vec<PatchOperation>,
    path: &Pointer,
    before: &[Value],
    after: &[Value],
) {
    for position in (after.len()..before.len()).rev() {
        remove(operations, path.with_trailing_token(position));
    }
    for (position, after) in after.iter().enumerate() {
        let path = path.with_trailing_token(position);
        match before.get(position) {
            // `add` would insert into a list instead of replacing the entry.
            Some(before) if before == after => {}
            Some(before) if before.is_object() && after.is_object() => {
                compare(operations, &path, before, after);
            }
            Some(_) => {
                remove(operations, path.clone());
                add(operations, path, after);
            }
            None => add(operations, path, after),
        }
    }
}

fn compare_keyed(
    operations: &mut Vec<PatchOperation>,
    path: &Pointer,
    key: &str,
    before: &[Value],
    after: &[Value],
) {
    let is_same = |a: &Value, b: &Value| a.get(key).is_some() && a.get(key) == b.get(key);
    let mut current: Vec<&Value> = before.iter().collect();
    // Most lists only grow, so entries before the first difference in keys need no search.
    let num_same = before.iter().zip(after).take_while(|(a, b)| is_same(a, b)).count();
    for position in (num_same..before.len()).rev() {
        if !after[num_same..].iter().any(|after| is_same(after, &before[position])) {
            remove(operations, path.with_trailing_token(position));
            current.remove(position);
        }
    }
    for (position, after) in after.iter().enumerate() {
        let at = path.with_trailing_token(position);
        let rest = &current[position..];
        match rest.iter().position(|before| is_same(before, after)) {
            Some(0) => {}
            Some(distance) => {
                let from = path.with_trailing_token(position + distance);
                let operation = MoveOperation { from, path: at.clone() };
                operations.push(PatchOperation::Move(operation));
                let moved = current.remove(position + distance);
                current.insert(position, moved);
            }
            None => {
                add(operations, at, after);
                current.insert(position, after);
                continue;
            }
        }
        compare(operations, &at, current[position], after);
    }
    // Entries whose key occurs twice.
    for position in (after.len()..current.len()).rev() {
        remove(operations, path.with_trailing_token(position));
    }
}

fn add(operations: &mut Vec<PatchOperation>, path: PointerBuf, value: &Value) {
    operations.push(PatchOperation::Add(AddOperation { path, value: value.clone() }));
}

fn remove(operations: &mut Vec<PatchOperation>, path: PointerBuf) {
    operations.push(PatchOperation::Remove(RemoveOperation { path }));
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;

    const UNKNOWN: &str = "ofANewerVersion";

    /// Status that the API server holds after the patch.
    fn patched(mut object: Value, before: &Value, after: &Value) -> Result<Value, String> {
        let patch = difference("7", "status", before, after);
        json_patch::patch(&mut object, &patch).map_err(|error| error.to_string())?;
        Ok(object["status"].clone())
    }

    fn holding(status: &Value) -> Value {
        json!({ "metadata": { "resourceVersion": "7" }, "status": status })
    }

    /// Adds an unknown field to each object in `value`.
    fn extended(value: &Value) -> Value {
        match value {
            Value::Object(fields) => {
                let fields = fields.iter().map(|(name, field)| (name.clone(), extended(field)));
                fields.chain([(UNKNOWN.to_owned(), json!({ "a": 1 }))]).collect()
            }
            Value::Array(entries) => entries.iter().map(extended).collect(),
            plain => plain.clone(),
        }
    }

    /// Undoes [`extended`].
    fn known(value: &Value) -> Value {
        match value {
            Value::Object(fields) => {
                let fields = fields.iter().filter(|(name, _)| *name != UNKNOWN);
                fields.map(|(name, field)| (name.clone(), known(field))).collect()
            }
            Value::Array(entries) => entries.iter().map(known).collect(),
            plain => plain.clone(),
        }
    }

    #[test]
    fn entries_keep_unknown_fields_by_key() {
        let attempts = |entries: Value| json!({ "attempts": entries });
        let check = |held: Value, after: Value, expected: Value| {
            let (held, before) = (attempts(held.clone()), attempts(known(&held)));
            let status = patched(holding(&held), &before, &attempts(after)).unwrap();
            assert_eq!(status, attempts(expected));
        };
        let held = json!([{ "number": 3, UNKNOWN: "three" }, { "number": 4, UNKNOWN: "four" }]);
        // Appended, changed in place, cut at the front, and reordered.
        check(
            held.clone(),
            json!([{ "number": 3 }, { "number": 4 }, { "number": 5 }]),
            json!([
                { "number": 3, UNKNOWN: "three" }, { "number": 4, UNKNOWN: "four" }, { "number": 5 }
            ]),
        );
        check(
            held.clone(),
            json!([{ "number": 3 }, { "number": 4, "end": "Completed" }]),
            json!([
                { "number": 3, UNKNOWN: "three" },
                { "number": 4, "end": "Completed", UNKNOWN: "four" }
            ]),
        );
        check(
            held.clone(),
            json!([{ "number": 4 }, { "number": 5 }]),
            json!([{ "number": 4, UNKNOWN: "four" }, { "number": 5 }]),
        );
        check(
            held,
            json!([{ "number": 4 }, { "number": 3 }]),
            json!([{ "number": 4, UNKNOWN: "four" }, { "number": 3, UNKNOWN: "three" }]),
        );
    }

    #[test]
    fn missing_fields_are_added() {
        // This version writes out defaults that another version omitted.
        let (before, after) = (json!({ "restarts": 0 }), json!({ "restarts": 1 }));
        assert_eq!(patched(holding(&json!({})), &before, &after), Ok(after.clone()));
        let empty = json!({ "metadata": { "resourceVersion": "7" } });
        assert_eq!(patched(empty, &Value::Null, &after), Ok(after));
    }

    #[test]
    fn other_resource_version_fails_the_patch() {
        let other = json!({ "metadata": { "resourceVersion": "8" }, "status": {} });
        assert!(patched(other, &json!({}), &json!({ "a": 1 })).is_err());
    }

    fn any_json() -> impl Strategy<Value = Value> {
        let name = prop::sample::select(vec!["attempts", "facts", "number", "a/b", "~c", "d"]);
        let plain = prop_oneof![(0..4).prop_map(|number| json!(number)), Just(Value::Null)];
        plain.prop_recursive(4, 40, 5, move |inner| {
            let entry = (0..5u32, inner.clone())
                .prop_map(|(number, field)| json!({ "number": number, "field": field }));
            prop_oneof![
                prop::collection::btree_map(
                    name.clone().prop_map(str::to_owned),
                    inner.clone(),
                    0..5
                )
                .prop_map(|fields| fields.into_iter().collect::<Value>()),
                prop::collection::vec(inner, 0..5).prop_map(Value::Array),
                prop::collection::vec(entry, 0..5).prop_map(Value::Array),
            ]
        })
    }

    proptest! {
        #[test]
        fn patches_give_the_new_value(before in any_json(), after in any_json()) {
            let held = extended(&before);
            let status = patched(holding(&held), &before, &after);
            let status = status.map_err(|error| TestCaseError::fail(error.to_owned()))?;
            prop_assert_eq!(known(&status), after);
        }

        #[test]
        fn equal_values_change_nothing(value in any_json()) {
            prop_assert_eq!(difference("7", "status", &value, &value).0.len(), 1);
        }
    }
}
