//! Translates files in the format of Determined 0.12 and later to experiments. Each field is
//! translated with a note, ignored with a note, or refused.

mod credentials;
mod entrypoint;
mod hyperparameters;
mod known_fields;
mod parts;
mod searcher;

use std::collections::BTreeSet;

use serde_json::{Map, Value, json};
use stoker_api::names::API_VERSION;
use stoker_api::validate::{FieldError, NAME_BYTES_MAX, item, member};

use super::schema::unknown_field;
use super::tree::Tree;

pub(super) use credentials::mask;

/// Default number of batches per step of Determined 0.12.
const BATCHES_PER_STEP: u64 = 100;

/// Result of a translation.
#[derive(Debug)]
pub(super) struct Translated {
    /// An Experiment. Each field has the position and the path of its original.
    pub(super) tree: Tree,
    /// Notes on translated and ignored fields.
    pub(super) notes: Vec<String>,
    /// Errors, with the original paths.
    pub(super) errors: Vec<FieldError>,
}

/// Returns `true` if a file is in Determined's format: it has none of `kind`, `apiVersion` and
/// `spec`, but one of `searcher`, `hyperparameters` and `entrypoint`.
pub(super) fn is_legacy(value: &Value) -> bool {
    let has = |name: &str| value.get(name).is_some();
    let is_ours = has("kind") || has("apiVersion") || has("spec");
    !is_ours && (has("searcher") || has("hyperparameters") || has("entrypoint"))
}

/// Translates a file. `stem` is the default name of the experiment.
pub(super) fn translate(source: &Tree, stem: &str) -> Translated {
    let mut translation = Translation::new(source);
    translation.set("apiVersion", json!(API_VERSION), "");
    translation.set("kind", json!("Experiment"), "");
    translation.name(stem);
    for part in parts::ALL {
        part(&mut translation);
    }
    translation.refuse_unread_fields();
    let tree = Tree { value: translation.value, ..translation.position_tree };
    Translated { tree, notes: translation.notes, errors: translation.errors }
}

/// State of a translation.
struct Translation<'a> {
    source: &'a Tree,
    value: Value,
    /// Positions and origins of the new fields; its value is unused.
    position_tree: Tree,
    notes: Vec<String>,
    errors: Vec<FieldError>,
    /// Original paths that a part has read, alone or with all their fields.
    read_paths: BTreeSet<String>,
}

impl<'a> Translation<'a> {
    fn new(source: &'a Tree) -> Self {
        let mut position_tree = Tree::default();
        position_tree.positions.insert(String::new(), source.position(""));
        let mut translation = Self {
            source,
            value: Value::Object(Map::new()),
            position_tree,
            notes: Vec::new(),
            errors: Vec::new(),
            read_paths: BTreeSet::new(),
        };
        for from in ["entrypoint", "searcher"] {
            translation.set_origin(&member("spec", from), from);
        }
        translation
    }

    /// Records the original path of a field, which may be missing.
    fn set_origin(&mut self, path: &str, from: &str) {
        if !from.is_empty() {
            self.position_tree.origins.insert(path.to_owned(), from.to_owned());
        }
    }

    /// Returns the field at `path`, unless it is missing or null. Marks the path as read.
    fn take(&mut self, path: &str) -> Option<&'a Value> {
        let mut value = &self.source.value;
        for name in path.split('.') {
            value = value.get(name)?;
        }
        self.read_paths.insert(path.to_owned());
        (!value.is_null()).then_some(value)
    }

    /// Sets a field of the experiment, with the positions of the original field at `from`.
    fn set(&mut self, path: &str, value: Value, from: &str) {
        let mut target = &mut self.value;
        for name in path.split('.') {
            if !target.is_object() {
                *target = Value::Object(Map::new());
            }
            target = &mut target[name];
        }
        *target = value;
        self.position_tree.copy_positions(self.source, from, path);
        self.position_tree.positions.insert(path.to_owned(), self.source.position(from));
        self.set_origin(path, from);
    }

    /// Copies a field unchanged, with a note if its path changes.
    fn copy_field(&mut self, from: &str, to: &str) {
        self.set_origin(to, from);
        if let Some(value) = self.take(from) {
            self.set(to, value.clone(), from);
            if from != to.strip_prefix("spec.").unwrap_or(to) {
                self.note(from, to);
            }
        }
    }

    fn note(&mut self, from: &str, to: &str) {
        self.notes.push(format!("{from} -> {to}"));
    }

    /// Ignores a field without effect, with a note.
    fn ignore(&mut self, path: &str, why: &str) {
        if self.take(path).is_some() {
            self.notes.push(format!("{path}: ignored, {why}"));
        }
    }

    /// Same as [`ignore`](Self::ignore), without a note if the value disables the feature.
    fn ignore_enabled(&mut self, path: &str, why: &str) {
        if self.take(path).is_some_and(|value| !parts::is_disabled(value)) {
            self.notes.push(format!("{path}: ignored, {why}"));
        }
    }

    fn refuse(&mut self, path: &str, value: &Value, rule: &str) {
        self.errors.push(FieldError::new(path, value, rule));
    }

    /// Adds an error for every field that no part has read.
    fn refuse_unread_fields(&mut self) {
        let source = self.source;
        let parents: BTreeSet<String> = self
            .read_paths
            .iter()
            .filter_map(|path| path.split_once('.').map(|(parent, _)| parent.to_owned()))
            .collect();
        let Some(members) = source.value.as_object() else { return };
        for (name, value) in members {
            match value.as_object() {
                Some(fields) if parents.contains(name) || known_fields::is_group(name) => {
                    for (field, value) in fields {
                        self.refuse_unread(name, field, value);
                    }
                }
                _ => self.refuse_unread("", name, value),
            }
        }
    }

    fn refuse_unread(&mut self, parent: &str, name: &str, value: &Value) {
        let path = member(parent, name);
        if self.read_paths.contains(&path) {
            return;
        }
        let known = known_fields::known(parent);
        let rule = match known.contains(&name) {
            true if parts::is_disabled(value) => return,
            true => match known_fields::counterpart(&path) {
                Some(ours) => format!(
                    "is not translated; set {ours} in a Stoker file, or remove the field for \
                     `stoker run`, which starts no pods"
                ),
                None => "has no counterpart in Stoker; remove it".to_owned(),
            },
            false => unknown_field(name, known.iter().copied()),
        };
        self.refuse(&path, value, &rule);
    }

    /// Sets the experiment's name: `name`, else `description`, else the file name.
    fn name(&mut self, stem: &str) {
        let text = |value: Option<&Value>| value.and_then(Value::as_str).map(str::to_owned);
        let candidates = [
            ("name", text(self.take("name"))),
            ("description", text(self.take("description"))),
            ("", Some(stem.to_owned())),
        ];
        let named = candidates.into_iter().find_map(|(from, text)| {
            let label = dns_label(&text?);
            (!label.is_empty()).then_some((from, label))
        });
        let (from, name) = named.unwrap_or(("", "experiment".to_owned()));
        let origin = if from.is_empty() { "file name" } else { from };
        self.notes.push(format!("{origin} -> metadata.name: {name}"));
        self.set("metadata.name", json!(name), from);
        if let Some(description) = self.take("description") {
            self.set("spec.description", description.clone(), "description");
        } else if let Some(name) = self.take("name") {
            self.set("spec.description", name.clone(), "name");
        }
    }

    fn batches_per_step(&mut self) -> u64 {
        self.take("batches_per_step")
            .and_then(Value::as_u64)
            .filter(|batches| *batches > 0)
            .unwrap_or(BATCHES_PER_STEP)
    }
}

/// Converts a text to a name: a DNS label that starts with a letter.
fn dns_label(text: &str) -> String {
    let mut label = String::new();
    for char in text.to_lowercase().chars() {
        let is_plain = char.is_ascii_lowercase() || char.is_ascii_digit();
        match (is_plain, label.is_empty()) {
            (true, true) if char.is_ascii_digit() => label.push_str(&format!("x{char}")),
            (true, _) => label.push(char),
            (false, false) if !label.ends_with('-') => label.push('-'),
            (false, _) => {}
        }
    }
    label.truncate(NAME_BYTES_MAX);
    label.trim_end_matches('-').to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slug_is_a_dns_label() {
        let cases = [
            ("MNIST: CNN (adam)", "mnist-cnn-adam"),
            ("  --x--  ", "x"),
            ("3 layers", "x3-layers"),
            ("été", "t"),
            ("!!", ""),
            (
                "a_very_long_name_that_goes_on_and_on_and_on_and_on",
                "a-very-long-name-that-goes-on-and-on-and",
            ),
        ];
        for (text, expected) in cases {
            assert_eq!(dns_label(text), expected, "{text}");
        }
    }
}
