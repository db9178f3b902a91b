//! Names of hyperparameters.

use serde_json::json;

use super::{check, good, run};
use crate::validate::validate_started;

#[test]
fn unusable_names_are_refused() {
    let root = "spec.hyperparameters";
    for (name, words) in [
        ("", "without characters"),
        ("-lr", "starts with `-`"),
        ("@index", "starts with `@`"),
        ("x,y", "comma"),
    ] {
        let path = match name {
            "-lr" => format!("{root}.net.-lr"),
            name => format!("{root}.net[{}]", json!(name)),
        };
        check("hyperparameters/net", json!({ name: 1, "width": 2 }), &path, words);
        let mut spec = good();
        spec["hyperparameters"] = json!({ name: 1 });
        validate_started("x", &serde_json::from_value(spec).unwrap()).unwrap();
    }
}

#[test]
fn names_joined_by_dots_are_unique() {
    let words = "`net.a.b`, and so is spec.hyperparameters.net.a.b;";
    let twice = json!({ "a.b": { "int": { "min": 1, "max": 2 } }, "a": { "b": 1 } });
    check("hyperparameters/net", twice, "spec.hyperparameters.net[\"a.b\"]", words);
    let constant = json!({ "a": { "const": { "b": 1 } }, "a.b": 1 });
    check("hyperparameters/net", constant, "spec.hyperparameters.net[\"a.b\"]", "`net.a.b`");
    let nested = json!({ "a": { "const": { "b": { "c": 1 } } }, "a.b.c": 1 });
    check("hyperparameters/net", nested, "spec.hyperparameters.net[\"a.b.c\"]", "`net.a.b.c`");
    let category = json!({ "a": { "categorical": [{ "b": 1 }, { "b": 2 }] }, "a.b": 1 });
    check("hyperparameters/net", category, "spec.hyperparameters.net[\"a.b\"]", "`net.a.b`");
    // Groups of a choice are alternatives.
    let groups = json!([{ "kind": "x", "a": { "b": 1 } }, { "kind": "y", "a": { "b": 2 } }]);
    let mut spec = good();
    spec["hyperparameters"] = json!({ "net": { "oneOf": groups }, "dotted.name": 1 });
    run("x", spec).unwrap();
}
