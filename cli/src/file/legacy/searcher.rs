//! Translates the searcher of a file in Determined's format.

use serde_json::{Value, json};

use super::Translation;
use super::known_fields::known;
use super::parts::{length, steps_length};

/// Translates the search method and its lengths.
pub(super) fn translate(translation: &mut Translation<'_>) {
    let Some(value) = translation.take("searcher") else { return };
    translation.set("spec.searcher", json!({}), "searcher");
    if !value.is_object() {
        translation.set("spec.searcher", value.clone(), "searcher");
        return;
    }
    translation.copy_field("searcher.metric", "spec.searcher.metric");
    translation.copy_field("searcher.smaller_is_better", "spec.searcher.smallerIsBetter");
    length(translation, "searcher.max_length", "spec.searcher.maxLength");
    if let Some(steps) = translation.take("searcher.max_steps") {
        steps_length(translation, steps, "searcher.max_steps", "spec.searcher.maxLength");
    }
    let Some(name) = translation.take("searcher.name") else {
        let rule = "is required and missing; set it to single, random, grid or adaptive_asha";
        translation.refuse("searcher.name", &Value::Null, rule);
        return translation.set("spec.searcher.single", json!({}), "searcher");
    };
    let kind = name.as_str().unwrap_or_default();
    let Some((_, ours, fields)) = SEARCHERS.iter().find(|(theirs, ..)| *theirs == kind) else {
        return unknown_searcher(translation, name);
    };
    let to = format!("spec.searcher.{ours}");
    translation.set(&to, json!({}), "searcher.name");
    translation.note(&format!("searcher.name: {kind}"), &to);
    for field in *fields {
        let from = format!("searcher.{field}");
        let to = format!("{to}.{}", camel_case(field));
        match *field {
            "budget" | "length_per_round" => length(translation, &from, &to),
            _ => translation.copy_field(&from, &to),
        }
    }
    if kind == "pbt" {
        population(translation, &to);
    }
    if translation.take("searcher.train_stragglers").is_some() {
        translation.ignore("searcher.train_stragglers", "late results count as long as they can");
    }
}

/// Searchers of both files, and the fields that have the same meaning.
const SEARCHERS: [(&str, &str, &[&str]); 9] = [
    ("single", "single", &[]),
    ("random", "random", &["max_trials", "max_concurrent_trials"]),
    ("grid", "grid", &["max_concurrent_trials"]),
    (
        "async_halving",
        "asyncHalving",
        &["max_trials", "num_rungs", "divisor", "max_concurrent_trials", "stop_once"],
    ),
    (
        "adaptive_asha",
        "adaptiveAsha",
        &[
            "max_trials",
            "mode",
            "divisor",
            "max_rungs",
            "bracket_rungs",
            "max_concurrent_trials",
            "stop_once",
        ],
    ),
    ("adaptive_simple", "adaptiveSimple", &["max_trials", "mode", "divisor", "max_rungs"]),
    ("sync_halving", "syncHalving", &["num_rungs", "budget", "divisor"]),
    ("adaptive", "adaptive", &["budget", "mode", "divisor", "max_rungs", "bracket_rungs"]),
    ("pbt", "pbt", &["population_size", "num_rounds", "length_per_round"]),
];

/// Translates the fields of population based training that have other names.
fn population(translation: &mut Translation<'_>, to: &str) {
    if let Some(steps) = translation.take("searcher.steps_per_round") {
        steps_length(
            translation,
            steps,
            "searcher.steps_per_round",
            &format!("{to}.lengthPerRound"),
        );
    }
    for (group, fields) in [
        ("replace_function", &["truncate_fraction"][..]),
        ("explore_function", &["resample_probability", "perturb_factor"][..]),
    ] {
        let from = format!("searcher.{group}");
        let Some(value) = translation.take(&from) else { continue };
        let Some(members) = value.as_object() else {
            translation.refuse(&from, value, &format!("must have {}", fields.join(" and ")));
            continue;
        };
        for (field, value) in members {
            let from = format!("{from}.{field}");
            if fields.contains(&field.as_str()) {
                let to = format!("{to}.{}", camel_case(field));
                translation.set(&to, value.clone(), &from);
                translation.note(&from, &to);
            } else {
                let rule = format!("is unknown; {group} has {}", fields.join(" and "));
                translation.refuse(&from, value, &rule);
            }
        }
    }
}

/// Returns `max_trials` as `maxTrials`.
fn camel_case(name: &str) -> String {
    let mut words = name.split('_');
    let first = words.next().unwrap_or_default().to_owned();
    words.fold(first, |text, word| {
        let (initial, rest) = word.split_at(word.len().min(1));
        text + &initial.to_ascii_uppercase() + rest
    })
}

/// Refuses an unknown searcher, without further errors about its fields.
fn unknown_searcher(translation: &mut Translation<'_>, name: &Value) {
    let rule = match name.as_str() {
        Some("custom") => "is not supported; use adaptive_asha".to_owned(),
        _ => {
            let names = SEARCHERS.map(|(name, ..)| name);
            format!("must be one of {}", names.join(", "))
        }
    };
    let rule = &rule;
    translation.refuse("searcher.name", name, rule);
    for field in known("searcher") {
        translation.take(&format!("searcher.{field}"));
    }
    translation.set("spec.searcher.single", json!({}), "searcher.name");
}
