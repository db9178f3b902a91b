//! Names of hyperparameters. Tables, filters and exports join the names of groups by dots.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use crate::hyperparameters::{ONE_OF, Parameter, ROOT, Space};
use crate::validate::{FieldError, item, member};

/// Names of the groups of a parameter, and its own.
type Names<'a> = Vec<&'a str>;

/// Checks the names, and that no two parameters have the same names joined by dots.
pub(super) fn check(space: &Space, errors: &mut Vec<FieldError>) {
    check_below(space, ROOT, &vec![], &mut BTreeMap::new(), errors);
}

fn check_below<'a>(
    space: &'a Space,
    path: &str,
    names: &Names<'a>,
    joined: &mut BTreeMap<String, Names<'a>>,
    errors: &mut Vec<FieldError>,
) {
    match space {
        Space::Group(members) => {
            for (name, space) in members {
                let path = member(path, name);
                errors.extend(check_name(&path, name));
                check_below(space, &path, &with(names, name), joined, errors);
            }
        }
        Space::OneOf(groups) => {
            for (i, group) in groups.iter().enumerate() {
                check_below(group, &item(&member(path, ONE_OF), i), names, joined, errors);
            }
        }
        Space::Parameter(Parameter::Const(value)) => {
            let of_object = value.is_object().then(|| member(path, "const"));
            check_value(value, of_object.as_deref().unwrap_or(path), names, joined, errors);
        }
        Space::Parameter(Parameter::Categorical(values)) => {
            for (i, value) in values.iter().enumerate() {
                let path = item(&member(path, "categorical"), i);
                check_value(value, &path, names, joined, errors);
            }
        }
        Space::Parameter(_) => errors.extend(check_joined(path, names.clone(), joined)),
    }
}

/// Checks a value. Members of objects are displayed like groups.
fn check_value<'a>(
    value: &'a Value,
    path: &str,
    names: &Names<'a>,
    joined: &mut BTreeMap<String, Names<'a>>,
    errors: &mut Vec<FieldError>,
) {
    let Value::Object(members) = value else {
        errors.extend(check_joined(path, names.clone(), joined));
        return;
    };
    for (name, value) in members {
        let path = member(path, name);
        errors.extend(check_name(&path, name));
        check_value(value, &path, &with(names, name), joined, errors);
    }
}

fn with<'a>(names: &Names<'a>, name: &'a str) -> Names<'a> {
    names.iter().copied().chain([name]).collect()
}

fn check_name(path: &str, name: &str) -> Option<FieldError> {
    let rule = if name.is_empty() {
        "is a name without characters; rename it".to_owned()
    } else if name.starts_with(['-', '@']) {
        let first = &name[..1];
        format!("is a name that starts with `{first}`, which has a meaning in URLs; rename it")
    } else if name.contains(',') {
        "is a name with a comma, which separates names in URLs; rename it".to_owned()
    } else {
        return None;
    };
    Some(FieldError::new(path, &json!(name), &rule))
}

/// Parameters of different groups of a choice may have the same names.
fn check_joined<'a>(
    path: &str,
    names: Names<'a>,
    joined: &mut BTreeMap<String, Names<'a>>,
) -> Option<FieldError> {
    let text = names.join(".");
    let other = joined.entry(text.clone()).or_insert_with(|| names.clone());
    (*other != names).then(|| {
        let other = other.iter().fold(ROOT.to_owned(), |path, name| member(&path, name));
        let rule = format!(
            "is displayed as `{text}`, and so is {other}; rename one of them, because names of \
             groups are joined by dots"
        );
        FieldError::new(path, &json!(text), &rule)
    })
}
