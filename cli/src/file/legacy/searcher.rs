//! Translates the searcher of a file in Determined's format.

use serde_json::{Value, json};

use super::Translation;
use super::known_fields::known;

/// Translates all fields of the searcher.
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
    time_metric(translation);
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
    let has_time_metric = !translation.source.value["searcher"]["time_metric"].is_null();
    let has_stop_once = !translation.source.value["searcher"]["stop_once"].is_null();
    if has_time_metric && !has_stop_once && fields.contains(&"stop_once") {
        let to = format!("{to}.stopOnce");
        translation.set(&to, json!(true), "searcher.time_metric");
        translation.notes.push(format!(
            "searcher.time_metric -> {to}: true, as in Determined 0.38; false would pause trials, \
             and promote them later"
        ));
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
    let names = SEARCHERS.map(|(name, ..)| name).join(", ");
    let rule = match name.as_str() {
        Some("custom") => format!(
            "is not supported; use one of {names}, or spec.searcher.external in a Stoker file"
        ),
        _ => format!("must be one of {names}"),
    };
    let rule = &rule;
    translation.refuse("searcher.name", name, rule);
    for field in known("searcher") {
        translation.take(&format!("searcher.{field}"));
    }
    translation.set("spec.searcher.single", json!({}), "searcher.name");
}

/// Translates the metric that measures progress, and its end.
fn time_metric(translation: &mut Translation<'_>) {
    let (from_metric, from_max) = ("searcher.time_metric", "searcher.max_time");
    let (metric, max) = (translation.take(from_metric), translation.take(from_max));
    let to = "spec.searcher.maxLength";
    let (metric, max) = match (metric, max) {
        (None, None) => return,
        (Some(metric), Some(max)) => (metric, max),
        (metric, max) => {
            let (from, missing) = match metric {
                Some(_) => (from_metric, from_max),
                None => (from_max, from_metric),
            };
            let rule = format!("requires {missing}; set both or remove it");
            translation.refuse(from, metric.or(max).unwrap_or(&Value::Null), &rule);
            return translation.set(to, json!({ "batches": 1 }), from);
        }
    };
    let unit = metric.as_str().filter(|unit| ["batches", "records", "epochs"].contains(unit));
    if let Some(unit) = unit {
        translation.set(to, json!({ unit: max }), from_max);
        return translation.note(from_max, &format!("{to}.{unit}"));
    }
    translation.set(to, json!({ "units": max }), from_max);
    translation.note(from_max, &format!("{to}.units"));
    translation.set("spec.searcher.timeMetric", metric.clone(), from_metric);
    translation.note(from_metric, "spec.searcher.timeMetric");
}

/// Translates a length. A number without a unit is in the program's own count.
pub(super) fn length(translation: &mut Translation<'_>, from: &str, to: &str) {
    translation.set_origin(to, from);
    let Some(value) = translation.take(from) else { return };
    if !value.is_number() {
        translation.set(to, value.clone(), from);
        return translation.note(from, to);
    }
    translation.set(to, json!({ "units": value }), from);
    translation.notes.push(format!(
        "{from} -> {to}.units, the count of a custom loop; for other programs, write \
         {{batches: N}}, {{records: N}} or {{epochs: N}}"
    ));
}

/// Translates a length in steps of Determined 0.12.
pub(super) fn steps_length(translation: &mut Translation<'_>, steps: &Value, from: &str, to: &str) {
    let size = translation.batches_per_step();
    let Some(batches) = steps.as_u64().and_then(|steps| steps.checked_mul(size)) else {
        translation.refuse(from, steps, "must be a number of steps");
        return translation.set(to, json!({ "batches": 1 }), from);
    };
    translation.set(to, json!({ "batches": batches }), from);
    translation
        .notes
        .push(format!("{from}: {steps} steps of {size} batches -> {to}.batches: {batches}"));
}
