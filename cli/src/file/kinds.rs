//! Notes on constants that are probably meant as parameters of a search.

use std::collections::BTreeMap;

use serde_json::Value;
use stoker_api::hyperparameters::{Parameter, Space};
use stoker_api::validate::{item, member};

use super::notes::Format;
use super::schema::distance;

/// Kinds of parameters with bounds.
const RANGES: [&str; 3] = ["double", "int", "log"];

/// Kind of parameters with a list of values.
const CATEGORICAL: &str = "categorical";

/// Choice of a group.
const ONE_OF: &str = "oneOf";

/// Names of distributions in other tools without `_`, and the kind to use instead.
const OTHER_KINDS: [(&str, &str); 18] = [
    ("choice", CATEGORICAL),
    ("float", "double"),
    ("floatuniform", "double"),
    ("gridsearch", CATEGORICAL),
    ("integer", "int"),
    ("intuniform", "int"),
    ("loguniform", "log"),
    ("loguniformvalues", "log"),
    ("qloguniform", "log"),
    ("qrandint", "int"),
    ("quniform", "double"),
    ("randint", "int"),
    ("range", "int"),
    ("real", "double"),
    ("reallog", "log"),
    ("uniform", "double"),
    ("uniformint", "int"),
    ("values", CATEGORICAL),
];

/// Fields of other tools for the bounds of a range.
const BOUNDS: [(&str, &str); 4] =
    [("min", "max"), ("minval", "maxval"), ("low", "high"), ("lower", "upper")];

/// Members of a group.
type Members = BTreeMap<String, Space>;

/// Adds a note for each group of constants that looks like a parameter of a search. The root and
/// the items of `oneOf` must be groups, so `space` itself is not noted.
pub(super) fn notes(path: &str, space: &Space, format: Format, notes: &mut Vec<String>) {
    match space {
        Space::Parameter(_) => {}
        Space::Group(members) => {
            for (name, space) in members {
                let path = member(path, name);
                match note(&path, space, format) {
                    // Groups in it may look like parameters, too.
                    Some(note) => notes.push(note),
                    None => self::notes(&path, space, format, notes),
                }
            }
        }
        Space::OneOf(groups) => {
            let path = member(path, ONE_OF);
            for (i, group) in groups.iter().enumerate() {
                self::notes(&item(&path, i), group, format, notes);
            }
        }
    }
}

/// Returns the note on a group at `path`, if it looks like a parameter.
fn note(path: &str, space: &Space, format: Format) -> Option<String> {
    let Space::Group(members) = space else { return None };
    let mut only = members.iter().filter(|_| members.len() == 1);
    only.find_map(|(name, only)| other_kind(path, name, only, format))
        .or_else(|| determined_kind(path, members).filter(|_| !format.is_legacy))
        .or_else(|| only_bounds(path, members, format).filter(|_| format.searches))
}

/// Returns the kind that the only member of a group probably means.
fn meant_kind(name: &str, space: &Space) -> Option<&'static str> {
    let plain = name.replace(['_', '-'], "").to_lowercase();
    if let Some((_, kind)) = OTHER_KINDS.iter().find(|(other, _)| *other == plain) {
        let is_meant = match *kind {
            CATEGORICAL => list(space).is_some(),
            _ => {
                list(space).is_some_and(|values| values.iter().all(Value::is_number))
                    || (matches!(space, Space::Group(_)) && space.num_dimensions() == 0)
            }
        };
        return is_meant.then_some(*kind);
    }
    let is_near = |kind: &str, edits: usize| distance(&plain, &kind.to_lowercase()) <= edits;
    match space {
        Space::Group(members) => {
            let has_bounds = BOUNDS.iter().any(|bounds| bounds_of(members, *bounds).is_some());
            // Words such as `init` and `lag` are near the short kinds.
            let is_meant = |kind: &str| match kind.len() {
                ..=3 => plain.strip_suffix('s').unwrap_or(&plain) == kind,
                _ => is_near(kind, 2),
            };
            RANGES.into_iter().find(|kind| has_bounds && is_meant(kind))
        }
        _ => match list(space)? {
            values if values.iter().all(Value::is_object) => {
                Some(ONE_OF).filter(|kind| is_near(kind, 1))
            }
            _ => Some(CATEGORICAL).filter(|kind| is_near(kind, 2)),
        },
    }
}

/// Returns the items of a constant list, unless it is empty.
fn list(space: &Space) -> Option<&Vec<Value>> {
    constant(space)?.as_array().filter(|values| !values.is_empty())
}

fn constant(space: &Space) -> Option<&Value> {
    match space {
        Space::Parameter(Parameter::Const(value)) => Some(value),
        _ => None,
    }
}

/// Returns the bounds in a group, if they are constant numbers in this order.
fn bounds_of<'a>(members: &'a Members, names: (&str, &str)) -> Option<(&'a Value, &'a Value)> {
    let bound = |name: &str| constant(members.get(name)?);
    let (min, max) = (bound(names.0)?, bound(names.1)?);
    (min.as_f64()? < max.as_f64()?).then_some((min, max))
}

/// Returns a note if the only member of a group is a constant and has the name of a distribution in
/// another tool, or almost the name of a kind.
fn other_kind(path: &str, name: &str, space: &Space, format: Format) -> Option<String> {
    let kind = meant_kind(name, space)?;
    let form = match (kind, format.is_legacy) {
        (ONE_OF, true) => return None,
        (ONE_OF | CATEGORICAL, false) => kind.to_owned(),
        (CATEGORICAL, true) => format!("{{type: {kind}, vals: LIST}}"),
        (_, false) => format!("{kind}: {{min: MIN, max: MAX}}"),
        (_, true) => format!("{{type: {kind}, minval: MIN, maxval: MAX}}"),
    };
    let replaced = if format.is_legacy { format!("{{{name}: VALUE}}") } else { name.to_owned() };
    let exponents = if kind == "log" { "; MIN and MAX are exponents of 10" } else { "" };
    Some(format!(
        "note: {} is a constant; to search over {path}, write `{form}` instead of `{replaced}`\
         {exponents}",
        member(path, name),
    ))
}

/// Returns a note if a group is a distribution in the form of Determined.
fn determined_kind(path: &str, members: &Members) -> Option<String> {
    let constant = |name: &str| constant(members.get(name)?);
    let kind = constant("type")?.as_str()?;
    let form = match kind {
        "int" | "double" | "log" => {
            let (min, max) = (constant("minval")?, constant("maxval")?);
            let other = |name: &str| Some(format!(", {name}: {}", constant(name)?));
            let others: String = ["base", "count"].into_iter().filter_map(other).collect();
            format!("{kind}: {{min: {min}, max: {max}{others}}}")
        }
        "categorical" => format!("categorical: {}", constant("vals")?),
        _ => return None,
    };
    Some(format!("note: {path} is a group of constants; to search over it, write `{form}`"))
}

/// Returns a note if a group consists of the bounds of a range.
fn only_bounds(path: &str, members: &Members, format: Format) -> Option<String> {
    let (min, max) = bounds_of(members, BOUNDS[0]).filter(|_| members.len() == 2)?;
    let is_whole = [min, max].into_iter().all(Value::is_i64);
    let kind = if is_whole { "int" } else { "double" };
    let form = match format.is_legacy {
        true => format!("{{type: {kind}, minval: {min}, maxval: {max}}}"),
        false => format!("{kind}: {{min: {min}, max: {max}}}"),
    };
    let other = if is_whole { ", or with `double` for fractions" } else { "" };
    Some(format!("note: {path} is a group of constants; to search over it, write `{form}`{other}"))
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use crate::file::metadata::Target;
    use crate::file::parse;

    /// Returns the notes on a search with the hyperparameter `x` and another, which varies.
    fn notes(x: &Value) -> Vec<String> {
        let file = json!({
            "apiVersion": "stoker.dev/v1alpha1", "kind": "Experiment", "metadata": { "name": "a" },
            "spec": {
                "entrypoint": { "command": ["train"] },
                "hyperparameters": { "x": x, "y": { "categorical": [1, 2] } },
                "searcher": {
                    "metric": "loss", "maxLength": { "epochs": 2 }, "random": { "maxTrials": 2 },
                },
            },
        });
        parse(&file.to_string(), "a", &[], Target::Local).unwrap().notes
    }

    #[test]
    fn misspelled_kinds_are_noted() {
        let range = json!({ "min": 0.5, "max": 1 });
        for (kind, value, form) in [
            ("categorial", json!([0.1, 0.2]), "`categorical` instead of `categorial`"),
            ("catagorical", json!(["a"]), "`categorical` instead"),
            ("Categorical", json!([1]), "`categorical` instead"),
            ("one_of", json!([{ "a": 1 }, {}]), "`oneOf` instead of `one_of`"),
            ("Double", range.clone(), "`double: {min: MIN, max: MAX}` instead of `Double`"),
            ("duoble", range.clone(), "`double: {"),
            ("Log", range.clone(), "`log: {min: MIN, max: MAX}` instead of `Log`; MIN and MAX are"),
            ("ints", range.clone(), "`int: {"),
            ("float", range.clone(), "`double: {"),
            ("real", json!({ "low": 1, "high": 2 }), "`double: {"),
            ("q_uniform", range.clone(), "`double: {"),
            ("LogUniform", json!([1, 2]), "`log: {"),
            ("grid_search", json!([1, 2]), "`categorical` instead"),
        ] {
            let notes = notes(&json!({ kind: value }));
            let expected = format!(
                "note: hyperparameters.x.{kind} is a constant; to search over hyperparameters.x, \
                 write {form}"
            );
            assert_eq!(notes.len(), 1, "{notes:?}");
            assert!(notes[0].starts_with(&expected), "{notes:?}\n{expected}");
        }
    }

    #[test]
    fn groups_of_bounds_are_noted() {
        let note = |x: Value| notes(&x).pop();
        let expected = |form: &str| {
            Some(format!(
                "note: hyperparameters.x is a group of constants; to search over it, write {form}"
            ))
        };
        let whole = expected("`int: {min: 0, max: 1}`, or with `double` for fractions");
        assert_eq!(note(json!({ "min": 0, "max": 1 })), whole);
        let fraction = note(json!({ "min": 0, "max": 0.5 }));
        assert_eq!(fraction, expected("`double: {min: 0, max: 0.5}`"));
        let nested = note(json!({ "a": { "min": 0, "max": 1 }, "b": 2 })).unwrap();
        assert!(nested.contains("hyperparameters.x.a is a group"), "{nested}");
        // These names are near `int` and `log`.
        for name in ["init", "lag"] {
            let note = note(json!({ name: { "min": 1, "max": 14 } })).unwrap();
            assert!(note.contains("is a group of constants"), "{note}");
        }
    }

    #[test]
    fn usual_groups_of_constants_are_not_noted() {
        for x in [
            json!({ "min": 1, "max": 1 }),
            json!({ "min": "a", "max": "b" }),
            json!({ "min": 0, "max": 1, "steps": 5 }),
            json!({ "min": 0 }),
            json!({ "lag": 3 }),
            json!({ "lags": [1, 2] }),
            json!({ "categories": ["cat", "dog"] }),
            json!({ "double": { "min": 0, "max": 1 } }),
            json!({ "doubled": true }),
            json!({ "float": ["age", "height"] }),
            json!({ "real": 1.5 }),
            json!({ "units": [64, 32] }),
            json!({ "layers": [{ "size": 4 }, { "size": 8 }] }),
            json!({ "betas": [0.9, 0.999] }),
            json!({ "optimizer": { "name": "sgd", "momentum": 0.9 } }),
        ] {
            assert_eq!(notes(&x), [""; 0], "{x}");
        }
    }
}
