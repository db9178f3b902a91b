//! `--set PATH=VALUE`: fields laid over a file before it is checked.

use serde_json::{Map, Value, json};
use stoker_api::validate::{item, member};

use super::{Problem, Tree, tree};

/// One step of a path.
#[derive(Clone, Debug, PartialEq)]
enum Step {
    Member(String),
    Item(usize),
}

/// Lays `PATH=VALUE` over the tree. A path that begins with none of an object's own fields begins
/// in `spec`, unless
/// the file has a format of its own.
///
/// # Errors
///
/// The text is no `PATH=VALUE`, the value no YAML, or the path leads through something that is no
/// object or list.
pub(super) fn apply(tree: &mut Tree, set: &str, is_legacy: bool) -> Result<(), Problem> {
    let refuse = |rule: &str| Problem::nowhere("--set", &json!(set).to_string(), rule);
    let Some((path, text)) = set.split_once('=') else {
        return Err(refuse("must be PATH=VALUE, such as searcher.random.maxTrials=4"));
    };
    let mut steps = steps(path.trim()).ok_or_else(|| {
        refuse("must begin with a path, such as searcher.random.maxTrials or env[0].value")
    })?;
    let is_whole = ["apiVersion", "kind", "metadata", "spec"]
        .iter()
        .any(|name| steps[0] == Step::Member((*name).to_owned()));
    if !is_legacy && !is_whole {
        steps.insert(0, Step::Member("spec".to_owned()));
    }
    let value = value(text).map_err(|rule| refuse(&rule))?;
    let mut path = String::new();
    let mut whole = tree.value.clone();
    let mut target = &mut whole;
    for step in &steps {
        (target, path) = enter(target, step, &path)
            .map_err(|rule| Problem::nowhere(&path, "", &format!("--set: {rule}")))?;
    }
    *target = value;
    tree.value = whole;
    let is_below = |it: &String| {
        it.strip_prefix(path.as_str()).is_some_and(|rest| rest.starts_with(['.', '[']))
    };
    tree.places.retain(|it, _| !is_below(it));
    tree.places.insert(path, None);
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
            Err(format!("the value {}", rules.join(", ")))
        }
    }
}

/// `a.b[2].c` as steps.
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
            let found = values.get_mut(*idx);
            let value = found.ok_or_else(|| format!("the list has {num_values} items, from 0"))?;
            Ok((value, item(path, *idx)))
        }
        (Step::Member(name), _) => Err(format!("is no object, so it has no field `{name}`")),
        (Step::Item(idx), _) => Err(format!("is no list, so it has no item {idx}")),
    }
}
