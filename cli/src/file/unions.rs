//! Errors of objects that must have exactly one of several fields, but have none.

use serde_json::Value;
use stoker_api::validate::{FieldError, member};

use super::schema::suggested;

/// Searches without required fields.
const EMPTY: [&str; 3] = ["single", "grid", "hyperband"];

/// Replaces the error if one of the fields lacks a value, and drops it if one is misspelled.
pub(super) fn explain(errors: &mut Vec<FieldError>, object: &Value) {
    let misspelled: Vec<(String, String)> = errors.iter().filter_map(misspelled).collect();
    errors.retain(|error| {
        let is_misspelled = |(parent, name): &(String, String)| {
            *parent == error.path && names(error).any(|known| known == name.as_str())
        };
        !error.is_empty_union() || !misspelled.iter().any(is_misspelled)
    });
    for error in errors.iter_mut().filter(|error| error.is_empty_union()) {
        let mut path = error.path.split('.');
        let parent = path.try_fold(object, |value, name| value.get(name));
        let is_null =
            |name: &&str| parent.and_then(|parent| parent.get(*name)) == Some(&Value::Null);
        let Some(name) = names(error).find(is_null) else { continue };
        let rule = match EMPTY.contains(&name) {
            true => format!("has no value; write `{name}: {{}}`"),
            false => "has no value; give it one or remove the line".to_owned(),
        };
        let path = member(&error.path, name);
        *error = FieldError::absent(&path, &rule);
    }
}

/// Returns the parent of a misspelled field and the correct name.
fn misspelled(error: &FieldError) -> Option<(String, String)> {
    let (parent, _) = error.path.rsplit_once('.')?;
    Some((parent.to_owned(), suggested(&error.rule)?.to_owned()))
}

/// Returns the words of the rule, including the names of which one must be set.
fn names(error: &FieldError) -> impl Iterator<Item = &str> {
    error.rule.split([' ', ',']).filter(|word| !word.is_empty())
}
