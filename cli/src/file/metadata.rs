//! Metadata of a file: namespace, labels and annotations.

use std::collections::BTreeMap;

use serde_json::{Value, json};
use stoker_api::validate::{FieldError, member};

use super::tree::Tree;

/// Maximum length of a name in a label, of a label's value and of a namespace.
const NAME_MAX: usize = 63;
/// Maximum length of the prefix of a label's name.
const PREFIX_MAX: usize = 253;

/// Where a file is used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Target {
    /// On this machine, where labels and annotations may be any text.
    Local,
    /// On this machine, to resume a run or job that an earlier version may have started. The rules
    /// of new ones do not apply.
    Started,
    /// On a cluster, whose API server has rules for labels and annotations.
    Cluster,
}

/// Metadata of an object, except its name.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Metadata {
    /// Namespace in the file.
    pub(crate) namespace: Option<String>,
    /// Labels in the file.
    pub(crate) labels: BTreeMap<String, String>,
    /// Annotations in the file.
    pub(crate) annotations: BTreeMap<String, String>,
}

impl Metadata {
    /// Reads `metadata` of a file.
    pub(super) fn read(value: &Value) -> Self {
        let texts = |name: &str| -> BTreeMap<String, String> {
            let fields = value[name].as_object().into_iter().flatten();
            let texts = fields.filter_map(|(key, value)| Some((key.clone(), value.as_str()?)));
            texts.map(|(key, value)| (key, value.to_owned())).collect()
        };
        Self {
            namespace: value["namespace"].as_str().map(str::to_owned),
            labels: texts("labels"),
            annotations: texts("annotations"),
        }
    }

    /// Checks the rules of the Kubernetes API server that apply to files for `target`.
    pub(super) fn check(&self, target: Target, errors: &mut Vec<FieldError>) {
        if let Some(namespace) = self.namespace.as_deref().filter(|name| !is_dns_label(name)) {
            let rule = "must have at most 63 lowercase letters, digits and `-`, and start and end \
                        with a letter or digit";
            errors.push(FieldError::new("metadata.namespace", &json!(namespace), rule));
        }
        if target == Target::Cluster {
            self.check_texts(errors);
        }
    }

    /// Returns a note for each label and annotation in the file that a cluster refuses.
    pub(super) fn notes(&self, tree: &Tree) -> Vec<String> {
        let mut errors = Vec::new();
        self.check_texts(&mut errors);
        let note = |error: &FieldError| {
            let field = tree.original(&error.path);
            format!("note: a cluster refuses {field}: {} (found {})", error.rule, error.value)
        };
        errors.iter().map(note).collect()
    }

    /// Checks labels and annotations.
    fn check_texts(&self, errors: &mut Vec<FieldError>) {
        for (field, texts) in [("labels", &self.labels), ("annotations", &self.annotations)] {
            let is_allowed = |key: &str| match field {
                "labels" => is_qualified(key),
                _ => is_qualified(&key.to_ascii_lowercase()),
            };
            for (key, value) in texts.iter().filter(|(key, _)| !is_allowed(key.as_str())) {
                let rule = "the key must be NAME or DOMAIN/NAME, such as team or example.com/team; \
                            NAME must have at most 63 letters, digits, `-`, `_` and `.`, and start \
                            and end with a letter or digit";
                let path = member(&member("metadata", field), key);
                errors.push(FieldError::new(&path, &json!(value), rule));
            }
        }
        let values = self
            .labels
            .iter()
            .filter(|(key, value)| is_qualified(key) && !value.is_empty() && !is_label_name(value));
        for (key, value) in values {
            let rule = "must have at most 63 letters, digits, `-`, `_` and `.`, and start and end \
                        with a letter or digit";
            errors.push(FieldError::new(&member("metadata.labels", key), &json!(value), rule));
        }
    }
}

/// Returns `true` for `NAME` and `DOMAIN/NAME`.
fn is_qualified(key: &str) -> bool {
    let Some((domain, name)) = key.split_once('/') else { return is_label_name(key) };
    domain.len() <= PREFIX_MAX && domain.split('.').all(is_domain_part) && is_label_name(name)
}

fn is_label_name(text: &str) -> bool {
    let is_inner = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.');
    text.len() <= NAME_MAX
        && text.bytes().all(is_inner)
        && text.bytes().next().is_some_and(|byte| byte.is_ascii_alphanumeric())
        && text.bytes().last().is_some_and(|byte| byte.is_ascii_alphanumeric())
}

fn is_dns_label(text: &str) -> bool {
    text.len() <= NAME_MAX && is_domain_part(text)
}

fn is_domain_part(text: &str) -> bool {
    let is_inner = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit();
    text.bytes().all(|byte| is_inner(byte) || byte == b'-')
        && text.bytes().next().is_some_and(is_inner)
        && text.bytes().last().is_some_and(is_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_follow_the_rules_of_kubernetes() {
        let check = |key: &str, value: &str, expected: &[&str]| {
            let metadata = json!({ "labels": { key: value }, "annotations": { "A.b/c": "d e" } });
            let mut errors = Vec::new();
            Metadata::read(&metadata).check(Target::Cluster, &mut errors);
            let paths: Vec<_> = errors.iter().map(|error| error.path.as_str()).collect();
            assert_eq!(paths, expected, "{errors:?}");
        };
        let long = "a".repeat(63);
        for (key, value) in
            [("team", "a"), ("example.com/Team_1", "v1.2-x"), ("a", ""), (long.as_str(), "x")]
        {
            check(key, value, &[]);
        }
        let longer = "a".repeat(64);
        check("a b", "c", &[r#"metadata.labels["a b"]"#]);
        check("team", "c d", &["metadata.labels.team"]);
        check("team", "-c", &["metadata.labels.team"]);
        check("team", &longer, &["metadata.labels.team"]);
        let path = format!("metadata.labels.{longer}");
        check(&longer, "a", &[path.as_str()]);
        check("a/b/c", "a", &["metadata.labels.a/b/c"]);
        check("Example.com/a", "a", &[r#"metadata.labels["Example.com/a"]"#]);
        check("/a", "a", &["metadata.labels./a"]);
        check("", "a", &[r#"metadata.labels[""]"#]);
    }
}
