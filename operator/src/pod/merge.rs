//! Merges `podOverrides` into a pod.

use serde_json::{Map, Value};

/// Merges `over` into `base` like a JSON merge patch, except that lists of named items are merged
/// by name, and mounts by path.
pub(crate) fn merge(base: &mut Value, over: &Value) {
    merge_values("name", base, over);
}

/// Merges values. If they are lists, `key` is the field that identifies their items.
fn merge_values(key: &str, base: &mut Value, over: &Value) {
    match (base, over) {
        (Value::Object(base), Value::Object(over)) => merge_objects(base, over),
        (Value::Array(base), Value::Array(over)) if has_keys(key, base) && has_keys(key, over) => {
            for item in over {
                match base.iter_mut().find(|old| is_same(key, old, item)) {
                    Some(old) => merge(old, item),
                    None => base.push(item.clone()),
                }
            }
        }
        (base, over) => base.clone_from(over),
    }
}

fn merge_objects(base: &mut Map<String, Value>, over: &Map<String, Value>) {
    for (field, value) in over {
        if value.is_null() {
            base.remove(field);
        } else if let Some(old) = base.get_mut(field) {
            merge_values(key_of(field), old, value);
        } else {
            base.insert(field.clone(), value.clone());
        }
    }
}

/// Returns the field that identifies the items of a list. The name of a mount is the name of its
/// volume, which may be mounted several times.
fn key_of(list: &str) -> &'static str {
    match list {
        "volumeMounts" => "mountPath",
        "volumeDevices" => "devicePath",
        _ => "name",
    }
}

fn has_keys(key: &str, items: &[Value]) -> bool {
    items.iter().all(|item| item[key].is_string() || item["name"].is_string())
}

/// Returns whether an item of the overrides changes the item `old`. A mount without a path changes
/// the first one of its volume.
fn is_same(key: &str, old: &Value, item: &Value) -> bool {
    match item[key].is_string() {
        true => old[key] == item[key],
        false => old["name"] == item["name"],
    }
}
