//! `--set PATH=VALUE`: overrides fields of a file before validation.

use serde_json::{Map, Value};
use stoker_api::validate::{item, member};

use super::{Problem, Tree, tree};

/// One step of a path.
#[derive(Clone, Debug, PartialEq)]
enum Step {
    Member(String),
    Item(usize),
}

/// Applies `PATH=VALUE` to the tree. A path that does not start with a top-level field of an object
/// is relative to `spec`, unless the file has Determined's format.
///
/// # Errors
///
/// The text is not `PATH=VALUE`, the value is not valid YAML, or the path does not match the
/// objects and lists of the tree.
pub(super) fn apply(tree: &mut Tree, set: &str, is_legacy: bool) -> Result<(), Problem> {
    let refuse = |rule: &str| Problem::without_position("--set", set, rule);
    let Some((path, text)) = set.split_once('=') else {
        return Err(refuse("must be PATH=VALUE, such as searcher.random.maxTrials=4"));
    };
    let mut steps = steps(path.trim()).ok_or_else(|| {
        refuse("must start with a path, such as searcher.random.maxTrials or env[0].value")
    })?;
    let is_top_level = ["apiVersion", "kind", "metadata", "spec"]
        .iter()
        .any(|name| steps[0] == Step::Member((*name).to_owned()));
    if !is_legacy && !is_top_level {
        steps.insert(0, Step::Member("spec".to_owned()));
    }
    let value = value(text).map_err(|rule| refuse(&rule))?;
    let mut path = String::new();
    let mut changed = tree.value.clone();
    let mut target = &mut changed;
    let mut created = None;
    for step in &steps {
        let is_new = lacks(target, step);
        (target, path) = enter(target, step, &path)
            .map_err(|rule| Problem::without_position(&path, "", &rule))?;
        if is_new && created.is_none() {
            created = Some(path.clone());
        }
    }
    *target = value;
    tree.value = changed;
    // The file does not contain the new parents of the field.
    tree.positions.extend(created.map(|path| (path, None)));
    let is_below = |other: &String| {
        other.strip_prefix(path.as_str()).is_some_and(|rest| rest.starts_with(['.', '[']))
    };
    tree.positions.retain(|other, _| !is_below(other));
    tree.positions.insert(path, None);
    Ok(())
}

fn value(text: &str) -> Result<Value, String> {
    if text.trim().is_empty() {
        return Ok(Value::from(""));
    }
    match tree::read(text) {
        (Some(tree), problems) if problems.is_empty() => Ok(tree.value),
        (_, problems) => {
            let rules: Vec<_> = problems.into_iter().map(|problem| problem.rule).collect();
            Err(format!("invalid value: {}", rules.join(", ")))
        }
    }
}

/// Parses a path such as `a.b[2].c`.
fn steps(path: &str) -> Option<Vec<Step>> {
    let mut steps = Vec::new();
    for part in path.split('.') {
        let (name, items) = part.find('[').map_or((part, ""), |at| part.split_at(at));
        if name.is_empty() {
            return None;
        }
        steps.push(Step::Member(name.to_owned()));
        let mut items = items;
        while let Some(rest) = items.strip_prefix('[') {
            let (idx, rest) = rest.split_once(']')?;
            steps.push(Step::Item(idx.parse().ok()?));
            items = rest;
        }
        if !items.is_empty() {
            return None;
        }
    }
    Some(steps)
}

/// Returns `true` if the step leads to a field that does not exist yet.
fn lacks(value: &Value, step: &Step) -> bool {
    matches!(step, Step::Member(name) if value.get(name.as_str()).is_none())
}

fn enter<'a>(
    value: &'a mut Value,
    step: &Step,
    path: &str,
) -> Result<(&'a mut Value, String), String> {
    if value.is_null() && matches!(step, Step::Member(_)) {
        *value = Value::Object(Map::new());
    }
    match (step, value) {
        (Step::Member(name), Value::Object(members)) => {
            Ok((members.entry(name.as_str()).or_insert(Value::Null), member(path, name)))
        }
        (Step::Item(idx), Value::Array(values)) => {
            let num_values = values.len();
            let value = values.get_mut(*idx);
            let value = value.ok_or_else(|| {
                format!("item {idx} not found: the list has {num_values} items, numbered from 0")
            })?;
            Ok((value, item(path, *idx)))
        }
        (Step::Member(name), _) => Err(format!("is not an object and has no field `{name}`")),
        (Step::Item(_), Value::Null) => {
            let path = path.strip_prefix("spec.").unwrap_or(path);
            Err(format!("is unset; set the whole list, such as --set '{path}=[A, B]'"))
        }
        (Step::Item(idx), _) => Err(format!("is not a list and has no item {idx}")),
    }
}
