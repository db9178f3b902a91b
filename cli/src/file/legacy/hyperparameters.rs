//! Translates hyperparameters with a `type` field to objects whose only key is the type.

use serde_json::{Map, Value};
use stoker_api::hyperparameters::KINDS;

use super::{Translation, member, unknown_field};

/// Fields of each type: Determined's and Stoker's name.
const TYPES: [(&str, &[(&str, &str)]); 3] = [
    ("int", &[("minval", "min"), ("maxval", "max"), ("count", "count")]),
    ("double", &[("minval", "min"), ("maxval", "max"), ("count", "count")]),
    ("log", &[("base", "base"), ("minval", "min"), ("maxval", "max"), ("count", "count")]),
];

/// Translates all hyperparameters.
pub(super) fn translate(translation: &mut Translation<'_>) {
    let Some(value) = translation.take("hyperparameters") else { return };
    let Some(members) = value.as_object() else {
        translation.set("spec.hyperparameters", value.clone(), "hyperparameters");
        return;
    };
    translation.set("spec.hyperparameters", Value::Object(Map::new()), "hyperparameters");
    let mut num_typed = 0;
    let tree =
        group(translation, members, "hyperparameters", "spec.hyperparameters", &mut num_typed);
    translation.value["spec"]["hyperparameters"] = tree;
    if num_typed > 0 {
        translation.notes.push(format!(
            "hyperparameters: {num_typed} with a `type` -> objects whose only key is the type"
        ));
    }
}

fn group(
    translation: &mut Translation<'_>,
    members: &Map<String, Value>,
    from: &str,
    to: &str,
    num_typed: &mut usize,
) -> Value {
    let mut group = Map::new();
    for (name, value) in members {
        let (from, to) = (member(from, name), member(to, name));
        translation.position_tree.copy_positions(translation.source, &from, &to);
        let value = match value.as_object() {
            None => Some(value.clone()),
            Some(fields) if fields.get("type").is_some() => {
                *num_typed += 1;
                parameter(translation, fields, &from, &to)
            }
            Some(fields) => match reserved_name(fields) {
                Some(name) => reserved_group(translation, value, name, &from, &to),
                None => Some(self::group(translation, fields, &from, &to, num_typed)),
            },
        };
        if let Some(value) = value {
            group.insert(name.clone(), value);
        }
    }
    Value::Object(group)
}

/// Returns the name of a group's only member if Stoker would read the group as a parameter.
fn reserved_name(fields: &Map<String, Value>) -> Option<&str> {
    let name = fields.keys().next().filter(|_| fields.len() == 1)?;
    KINDS.contains(&name.as_str()).then_some(name.as_str())
}

/// Translates a group with a reserved name to a constant; `None` if it was refused.
fn reserved_group(
    translation: &mut Translation<'_>,
    group: &Value,
    name: &str,
    from: &str,
    to: &str,
) -> Option<Value> {
    if has_parameter(group) {
        let rule = format!(
            "`{name}` is reserved: it turns an object with no other key into a parameter; rename it"
        );
        translation.refuse(&member(from, name), &group[name], &rule);
        return None;
    }
    translation.position_tree.copy_positions(translation.source, from, &member(to, "const"));
    translation.notes.push(format!("{from}: a group of constants -> {to}.const"));
    Some(Value::Object(Map::from_iter([("const".to_owned(), group.clone())])))
}

/// Returns `true` if a hyperparameter with a `type` is in the tree. Lists are constants.
fn has_parameter(tree: &Value) -> bool {
    let of = |fields: &Map<String, Value>| {
        fields.contains_key("type") || fields.values().any(has_parameter)
    };
    tree.as_object().is_some_and(of)
}

/// Translates one hyperparameter; `None` if it was refused.
fn parameter(
    translation: &mut Translation<'_>,
    fields: &Map<String, Value>,
    from: &str,
    to: &str,
) -> Option<Value> {
    let kind = fields["type"].as_str().unwrap_or_default();
    match kind {
        "const" => single_field(translation, fields, "val", "const", from, to),
        "categorical" => single_field(translation, fields, "vals", "categorical", from, to),
        _ => {
            let Some((kind, known)) = TYPES.iter().find(|(name, _)| *name == kind) else {
                let rule = "must be one of const, int, double, log, categorical";
                translation.refuse(&member(from, "type"), &fields["type"], rule);
                return None;
            };
            let inner = member(to, kind);
            translation.position_tree.copy_positions(translation.source, from, &inner);
            let mut range = Map::new();
            for (theirs, ours) in *known {
                let (from, to) = (member(from, theirs), member(&inner, ours));
                translation.set_origin(&to, &from);
                if let Some(value) = fields.get(*theirs).filter(|value| !value.is_null()) {
                    translation.position_tree.copy_positions(translation.source, &from, &to);
                    range.insert((*ours).to_owned(), value.clone());
                }
            }
            let theirs: Vec<_> = known.iter().map(|(theirs, _)| *theirs).collect();
            refuse_others(translation, fields, from, &theirs);
            Some(Value::Object(Map::from_iter([((*kind).to_owned(), Value::Object(range))])))
        }
    }
}

/// Translates a hyperparameter with a single field.
fn single_field(
    translation: &mut Translation<'_>,
    fields: &Map<String, Value>,
    field: &str,
    kind: &str,
    from: &str,
    to: &str,
) -> Option<Value> {
    refuse_others(translation, fields, from, &[field]);
    let Some(value) = fields.get(field) else {
        let rule = format!("`{field}` is required and missing");
        translation.refuse(from, &Value::Object(fields.clone()), &rule);
        return None;
    };
    translation.position_tree.copy_positions(
        translation.source,
        &member(from, field),
        &member(to, kind),
    );
    Some(Value::Object(Map::from_iter([(kind.to_owned(), value.clone())])))
}

fn refuse_others(
    translation: &mut Translation<'_>,
    fields: &Map<String, Value>,
    from: &str,
    known: &[&str],
) {
    for (name, value) in fields {
        if name != "type" && !known.contains(&name.as_str()) {
            let rule = unknown_field(name, known.iter().copied());
            translation.refuse(&member(from, name), value, &rule);
        }
    }
}
