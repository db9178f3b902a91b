//! Validates values against the schema generated from our types. Supports the part of OpenAPI that
//! these schemas use.

use serde_json::{Map, Value, json};
use stoker_api::names::API_VERSION;
use stoker_api::validate::{FieldError, item, member};

use super::scalar::{Scalar, resolve};

/// Result of a validation.
#[derive(Debug, Default)]
pub(super) struct Checked {
    /// All errors.
    pub(super) errors: Vec<FieldError>,
    /// Fields whose value was replaced by one that the schema allows, so that other rules can be
    /// checked too.
    pub(super) replaced: Vec<String>,
}

impl Checked {
    /// Returns `true` if `path` is a replaced field or is inside one.
    pub(super) fn is_replaced(&self, path: &str) -> bool {
        self.replaced.iter().any(|replaced| {
            path.strip_prefix(replaced.as_str()).is_some_and(|rest| {
                replaced.is_empty() || rest.is_empty() || rest.starts_with(['.', '['])
            })
        })
    }

    /// Returns `true` if the rule of `error` reads a replaced field.
    pub(super) fn reads_replaced(&self, error: &FieldError) -> bool {
        let has_replaced = |path: &String| {
            let is_below = |replaced: &String| {
                replaced
                    .strip_prefix(path.as_str())
                    .is_some_and(|rest| rest.starts_with(['.', '[']))
            };
            self.is_replaced(path) || self.replaced.iter().any(is_below)
        };
        self.is_replaced(&error.path) || error.other_paths.iter().any(has_replaced)
    }

    fn refuse(&mut self, path: &str, value: &Value, schema: &Value, rule: &str) -> Value {
        self.errors.push(FieldError::new(path, value, rule));
        self.replaced.push(path.to_owned());
        placeholder(schema)
    }

    /// Adds an error of a value that the deserializer accepts, so that other rules see it.
    fn refuse_and_keep(&mut self, path: &str, value: Value, rule: &str) -> Value {
        self.errors.push(FieldError::new(path, &value, rule));
        value
    }

    /// Checks `value`. Returns it with invalid fields replaced and unknown fields removed.
    pub(super) fn check(&mut self, schema: &Value, value: &Value, path: &str) -> Value {
        if value.is_null() && schema["nullable"] == json!(true) {
            return Value::Null;
        }
        let kind = schema["type"].as_str().unwrap_or("any");
        if !is_kind(kind, value) {
            return self.refuse(path, value, schema, &kind_rule(kind, schema, value));
        }
        match value {
            Value::Object(members) => Value::Object(self.object(schema, members, path)),
            Value::Array(values) => self.list(schema, values, path),
            Value::Number(_) => self.number(schema, value, path),
            Value::String(text) => self.text(schema, text, path),
            Value::Null | Value::Bool(_) => value.clone(),
        }
    }

    fn object(
        &mut self,
        schema: &Value,
        members: &Map<String, Value>,
        path: &str,
    ) -> Map<String, Value> {
        if schema["x-kubernetes-preserve-unknown-fields"] == json!(true) {
            return members.clone();
        }
        let none = Map::new();
        let properties = schema["properties"].as_object().unwrap_or(&none);
        let mut known = Map::new();
        for (name, value) in members {
            let path = member(path, name);
            match (properties.get(name), schema.get("additionalProperties")) {
                (Some(schema), _) | (None, Some(schema)) => {
                    known.insert(name.clone(), self.check(schema, value, &path));
                }
                (None, None) => {
                    let rule = unknown_field(name, properties.keys().map(String::as_str));
                    self.errors.push(FieldError::new(&path, value, &rule));
                }
            }
        }
        for name in schema["required"].as_array().into_iter().flatten().filter_map(Value::as_str) {
            if !members.contains_key(name) {
                let path = member(path, name);
                let what = properties[name]["description"].as_str().unwrap_or_default();
                let what =
                    what.split(". ").next().unwrap_or_default().lines().next().unwrap_or_default();
                let what = what.trim_end_matches('.');
                let rule = format!("is required and missing: {}", lower_first(what));
                self.errors.push(FieldError::absent(&path, &rule));
                self.replaced.push(path);
                known.insert(name.to_owned(), placeholder(&properties[name]));
            }
        }
        known
    }

    fn list(&mut self, schema: &Value, values: &[Value], path: &str) -> Value {
        let num_min = schema["minItems"].as_u64().unwrap_or(0);
        if (values.len() as u64) < num_min {
            let rule = format!("must have at least {num_min} item{}", plural(num_min));
            self.errors.push(FieldError::new(path, &json!(values), &rule));
        }
        if let Some(num_max) = schema["maxItems"].as_u64()
            && values.len() as u64 > num_max
        {
            let rule = format!("must have at most {num_max} item{}", plural(num_max));
            self.errors.push(FieldError::new(path, &json!(values), &rule));
        }
        let values = values.iter().enumerate();
        values.map(|(i, value)| self.check(&schema["items"], value, &item(path, i))).collect()
    }

    fn number(&mut self, schema: &Value, value: &Value, path: &str) -> Value {
        let number = value.as_f64().unwrap_or_default();
        let min = schema["minimum"].as_f64();
        let format_max = (schema["format"] == "uint32").then_some(f64::from(u32::MAX));
        let max = schema["maximum"].as_f64().or(format_max);
        let rule = match (min, max) {
            (Some(min), _) if number < min => format!("must be at least {min}"),
            (_, Some(max)) if number > max => format!("must be at most {max}"),
            _ => return value.clone(),
        };
        let is_unsigned = value.is_u64() && format_max.is_none_or(|max| number <= max);
        match schema["type"] == "number" || is_unsigned {
            true => self.refuse_and_keep(path, value.clone(), &rule),
            false => self.refuse(path, value, schema, &rule),
        }
    }

    fn text(&mut self, schema: &Value, text: &str, path: &str) -> Value {
        let value = Value::from(text);
        if let Some(allowed) = schema["enum"].as_array() {
            if allowed.contains(&value) {
                return value;
            }
            let allowed = allowed.iter().filter_map(Value::as_str);
            let hint = suggestion(text, allowed.clone());
            let rule = match allowed.collect::<Vec<_>>()[..] {
                [only] => format!("must be {only}"),
                ref allowed => format!("must be one of {}{hint}", allowed.join(", ")),
            };
            return self.refuse(path, &value, schema, &rule);
        }
        let num_chars = text.chars().count() as u64;
        if num_chars < schema["minLength"].as_u64().unwrap_or(0) {
            return self.refuse_and_keep(path, value, "must not be empty");
        }
        if let Some(num_max) = schema["maxLength"].as_u64()
            && num_chars > num_max
        {
            let rule = format!("has {num_chars} characters, but must have at most {num_max}");
            return self.refuse_and_keep(path, value, &rule);
        }
        value
    }
}

/// Returns the rule for a value of another kind, with its correct form if that is known.
fn kind_rule(kind: &str, schema: &Value, value: &Value) -> String {
    let is_quoted = value.as_str().is_some_and(|text| match resolve(text) {
        Scalar::Value(plain) => is_kind(kind, &plain),
        Scalar::Refused(_) => false,
    });
    match kind {
        _ if value.is_null() => {
            format!("must be {}; give it a value or remove the line", kind_name(kind))
        }
        "array" => format!("must be a list{}", list_example(schema, value)),
        "object" if schema["properties"]["epochs"].is_object() => {
            let epochs = value.as_u64().unwrap_or(2);
            format!("must be a length, such as {{ epochs: {epochs} }}")
        }
        "string" if !value.is_array() && !value.is_object() => {
            "must be a string; put it in quotes".to_owned()
        }
        _ if is_quoted => format!("must be {}; remove the quotes", kind_name(kind)),
        "boolean" => "must be a boolean; write true or false".to_owned(),
        _ => format!("must be {}", kind_name(kind)),
    }
}

/// Returns the name of a kind in YAML, with its article.
fn kind_name(kind: &str) -> String {
    match kind {
        "array" => "a list".to_owned(),
        "integer" | "object" => format!("an {kind}"),
        _ => format!("a {kind}"),
    }
}

/// Writes a value as a list, if its items have the kind of the value.
fn list_example(schema: &Value, value: &Value) -> String {
    let items = &schema["items"];
    let fields = &items["properties"];
    let entry = value.as_object().and_then(|members| members.iter().next());
    match (value, entry) {
        (Value::String(text), _) if items["type"] == "string" && !text.trim().is_empty() => {
            let words: Vec<_> = text.split_whitespace().collect();
            format!(", such as [{}]", words.join(", "))
        }
        (_, Some((name, Value::String(text))))
            if fields["name"].is_object() && fields["value"].is_object() =>
        {
            format!(", such as [{{name: {name}, value: {text}}}]")
        }
        _ => String::new(),
    }
}

fn is_kind(kind: &str, value: &Value) -> bool {
    match kind {
        "object" => value.is_object(),
        "array" => value.is_array(),
        "string" => value.is_string(),
        "boolean" => value.is_boolean(),
        "integer" => value.is_i64() || value.is_u64(),
        "number" => value.is_number(),
        _ => true,
    }
}

/// Returns a simple value that the schema allows.
fn placeholder(schema: &Value) -> Value {
    if let Some(default) = schema.get("default") {
        return default.clone();
    }
    if let Some(first) = schema["enum"].get(0) {
        return first.clone();
    }
    match schema["type"].as_str() {
        Some("object") => {
            let required = schema["required"].as_array().into_iter().flatten();
            let names = required.filter_map(Value::as_str);
            let members =
                names.map(|name| (name.to_owned(), placeholder(&schema["properties"][name])));
            Value::Object(members.collect())
        }
        Some("array") => {
            let num_min = schema["minItems"].as_u64().unwrap_or(0);
            (0..num_min).map(|_| placeholder(&schema["items"])).collect()
        }
        Some("integer") => json!(schema["minimum"].as_f64().unwrap_or(0.0).max(0.0) as u64),
        Some("number") => json!(0.0),
        Some("boolean") => json!(false),
        Some("string") => json!("x"),
        _ => Value::Null,
    }
}

/// Units of time, without the final `s`.
const TIMES: [&str; 4] = ["second", "minute", "hour", "day"];

/// Rule for a time instead of a length.
const NO_TIME: &str = "unknown field; a length is a number of records, batches or epochs, not a \
                       time";

/// Returns the rule for an unknown field, with the most similar known field or all known fields.
pub(super) fn unknown_field<'a>(
    name: &str,
    known: impl Iterator<Item = &'a str> + Clone,
) -> String {
    let is_length = known.clone().any(|known| known == "batches");
    if is_length && TIMES.contains(&name.to_lowercase().trim_end_matches('s')) {
        return NO_TIME.to_owned();
    }
    let hint = suggestion(name, known.clone());
    if !hint.is_empty() {
        return format!("unknown field{hint}");
    }
    let known: Vec<_> = known.collect();
    match known[..] {
        [] => "unknown field; no fields are allowed here".to_owned(),
        _ => format!("unknown field; known fields: {}", known.join(", ")),
    }
}

/// Returns the name that the rule for an unknown field suggests, or one of several names.
pub(super) fn suggested(rule: &str) -> Option<&str> {
    if rule == NO_TIME {
        return Some("records");
    }
    rule.strip_prefix("unknown field: did you mean `")?.strip_suffix("`?")
}

fn suggestion<'a>(name: &str, known: impl Iterator<Item = &'a str>) -> String {
    let plain = |text: &str| text.replace(['_', '-'], "").to_lowercase();
    let name = plain(name);
    let nearest = known.map(|known| (distance(&name, &plain(known)), known)).min();
    match nearest {
        Some((edits, known)) if edits <= 1 + name.len() / 4 && edits < known.len() => {
            format!(": did you mean `{known}`?")
        }
        _ => String::new(),
    }
}

/// Returns the edit distance: insertions, deletions, replacements and swaps of adjacent letters.
pub(super) fn distance(left: &str, right: &str) -> usize {
    let (left, right): (Vec<_>, Vec<_>) = (left.chars().collect(), right.chars().collect());
    let mut rows = vec![(0..=right.len()).collect::<Vec<_>>()];
    for i in 1..=left.len() {
        let mut row = vec![i];
        for j in 1..=right.len() {
            let is_changed = usize::from(left[i - 1] != right[j - 1]);
            let edits =
                (rows[i - 1][j] + 1).min(row[j - 1] + 1).min(rows[i - 1][j - 1] + is_changed);
            let is_swapped =
                i > 1 && j > 1 && left[i - 1] == right[j - 2] && left[i - 2] == right[j - 1];
            row.push(if is_swapped { edits.min(rows[i - 2][j - 2] + 1) } else { edits });
        }
        rows.push(row);
    }
    rows[left.len()][right.len()]
}

fn lower_first(text: &str) -> String {
    let mut chars = text.chars();
    match chars.next() {
        Some(first) => first.to_lowercase().chain(chars).collect(),
        None => String::new(),
    }
}

fn plural(count: u64) -> &'static str {
    if count == 1 { "" } else { "s" }
}

/// Returns the schema of a whole file, with the spec schema of the CRD.
pub(super) fn file_schema(kind: &str, spec: Value) -> Value {
    json!({
        "type": "object",
        "required": ["apiVersion", "kind", "metadata", "spec"],
        "properties": {
            "apiVersion": {
                "type": "string", "enum": [API_VERSION], "description": API_VERSION,
            },
            "kind": { "type": "string", "enum": [kind], "description": kind },
            "metadata": {
                "type": "object",
                "description": format!("The {kind}'s name and labels"),
                "required": ["name"],
                "properties": {
                    "name": { "type": "string", "description": format!("The {kind}'s name") },
                    "namespace": { "type": "string" },
                    "labels": { "type": "object", "additionalProperties": { "type": "string" } },
                    "annotations": {
                        "type": "object", "additionalProperties": { "type": "string" },
                    },
                },
            },
            "spec": spec,
        },
    })
}
