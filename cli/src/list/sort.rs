//! Order of a list.

use std::cmp::Ordering;

use serde_json::Value;

use super::{Column, Key, Row};
use crate::failure::Failure;

/// Short forms of paths in the objects of trials.
const SHORT_FORMS: [(&str, &str); 3] = [
    ("hparams.", "spec.hyperparameters."),
    ("hyperparameters.", "spec.hyperparameters."),
    ("metrics.", "status.metrics."),
];

/// Sorts rows by the metric, best first, and rows without one last.
pub(super) fn by_rank(rows: &mut [Row]) {
    let rank = |row: &Row| row.rank.filter(|rank| !rank.is_nan());
    rows.sort_by(|a, b| match (rank(a), rank(b)) {
        (Some(a), Some(b)) => a.total_cmp(&b),
        (a, b) => b.is_some().cmp(&a.is_some()),
    });
}

/// Sorts rows by a column, or by a field of their values. A leading `-` and `is_reversed` each
/// reverse the order.
///
/// # Errors
///
/// The field is neither a column nor a field of any row.
pub(super) fn sort(
    columns: &[Column],
    rows: &mut Vec<Row>,
    field: &str,
    is_reversed: bool,
) -> Result<(), Failure> {
    let (name, is_reversed) = match field.strip_prefix('-') {
        Some(name) => (name, !is_reversed),
        None => (field, is_reversed),
    };
    let column = columns.iter().position(|column| column.header.eq_ignore_ascii_case(name));
    let path = path(name);
    let key = |row: &Row| match column {
        Some(at) => row.cells.get(at).and_then(|cell| cell.key.clone()),
        None => key_of(find(&row.value, &path)?),
    };
    let mut keyed: Vec<(Option<Key>, Row)> = rows.drain(..).map(|row| (key(&row), row)).collect();
    if column.is_none() && !keyed.is_empty() && keyed.iter().all(|(key, _)| key.is_none()) {
        let names: Vec<&str> = columns.iter().map(|column| column.header.as_str()).collect();
        return Err(Failure::Input(format!(
            "cannot sort with --sort-by {field}: no listed object has this field; use one of the \
             columns {}, or the path of a number or text in --output json, such as .metadata.name",
            names.join(", ")
        )));
    }
    keyed.sort_by(|(a, _), (b, _)| compare(a.as_ref(), b.as_ref(), is_reversed));
    rows.extend(keyed.into_iter().map(|(_, row)| row));
    Ok(())
}

/// Returns the path in the objects: `{.a.b}`, `.a.b` or `a.b`, or a short form.
fn path(name: &str) -> String {
    let inner = name.strip_prefix('{').and_then(|rest| rest.strip_suffix('}')).unwrap_or(name);
    let short = SHORT_FORMS
        .iter()
        .find_map(|(short, long)| inner.strip_prefix(short).map(|rest| format!("{long}{rest}")));
    short.unwrap_or_else(|| inner.strip_prefix('.').unwrap_or(inner).to_owned())
}

/// Finds a field by its path. Names of fields may contain dots.
fn find<'a>(value: &'a Value, path: &str) -> Option<&'a Value> {
    if let Some(found) = value.get(path) {
        return Some(found);
    }
    path.match_indices('.').find_map(|(at, _)| find(value.get(&path[..at])?, &path[at + 1..]))
}

fn key_of(value: &Value) -> Option<Key> {
    match value {
        Value::Number(number) => number.as_f64().map(Key::Number),
        Value::String(text) => Some(Key::Text(text.clone())),
        Value::Bool(is_true) => Some(Key::Number(f64::from(u8::from(*is_true)))),
        Value::Null | Value::Array(_) | Value::Object(_) => None,
    }
}

fn compare(a: Option<&Key>, b: Option<&Key>, is_reversed: bool) -> Ordering {
    let order = match (a, b) {
        (Some(Key::Number(a)), Some(Key::Number(b))) => a.total_cmp(b),
        (Some(Key::Text(a)), Some(Key::Text(b))) => a.cmp(b),
        (Some(Key::Number(_)), Some(Key::Text(_))) => Ordering::Less,
        (Some(Key::Text(_)), Some(Key::Number(_))) => Ordering::Greater,
        (Some(_), None) => return Ordering::Less,
        (None, Some(_)) => return Ordering::Greater,
        (None, None) => return Ordering::Equal,
    };
    if is_reversed { order.reverse() } else { order }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn fields_are_found_by_path() {
        let value = json!({
            "metadata": {"labels": {"stoker.dev/trial": "m-0"}},
            "spec": {"hyperparameters": {"net": {"width": 8}, "a.b": 3}},
            "status": {"metrics": {"top.1": 0.5}},
        });
        let check = |name: &str, expected: Option<&Value>| {
            assert_eq!(find(&value, &path(name)), expected, "{name}");
        };
        check("hparams.net.width", Some(&json!(8)));
        check("hparams.a.b", Some(&json!(3)));
        check("metrics.top.1", Some(&json!(0.5)));
        check(".metadata.labels.stoker.dev/trial", Some(&json!("m-0")));
        check("{.spec.hyperparameters.net.width}", Some(&json!(8)));
        check("spec.missing", None);
        check("", None);
    }
}
