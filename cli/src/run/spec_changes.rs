//! Differences of two specs, for messages.

use serde::Serialize;
use serde_json::Value;

use crate::failure::Failure;

/// Returns the differences of two specs by field path, such as `spec.seed: was 1, now 2`.
pub(crate) fn spec_changes<S: Serialize>(
    path: &str,
    old: &S,
    new: &S,
) -> Result<Vec<String>, Failure> {
    let value =
        |spec| serde_json::to_value(spec).map_err(|error| Failure::System(error.to_string()));
    let mut changes = Vec::new();
    differences(path, &value(old)?, &value(new)?, &mut changes);
    Ok(changes)
}

/// Collects the differences of two values, by field path.
fn differences(path: &str, old: &Value, new: &Value, changes: &mut Vec<String>) {
    match (old, new) {
        (Value::Object(old), Value::Object(new)) => {
            let mut names: Vec<&String> = old.keys().chain(new.keys()).collect();
            names.sort();
            names.dedup();
            for name in names {
                let (old, new) = (old.get(name).cloned(), new.get(name).cloned());
                let path = format!("{path}.{name}");
                match (old, new) {
                    (Some(old), Some(new)) => differences(&path, &old, &new, changes),
                    (Some(old), None) => {
                        changes.push(format!("{path}: was {}, now unset", masked(&old)));
                    }
                    (None, Some(new)) => {
                        changes.push(format!("{path}: was unset, now {}", masked(&new)));
                    }
                    (None, None) => {}
                }
            }
        }
        (old, new) if old != new => {
            changes.push(format!("{path}: was {}, now {}", masked(old), masked(new)));
        }
        _ => {}
    }
}

/// Returns `value` with the values of environment variables replaced: they may be credentials.
fn masked(value: &Value) -> Value {
    match value {
        Value::Array(items) => items.iter().map(masked).collect(),
        Value::Object(fields) => {
            let is_variable = fields.contains_key("name") && fields.contains_key("value");
            let field = |(name, value): (&String, &Value)| match is_variable && name == "value" {
                true => (name.clone(), Value::from("***")),
                false => (name.clone(), masked(value)),
            };
            fields.iter().map(field).collect()
        }
        other => other.clone(),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn check(old: Value, new: Value, expected: &[&str]) {
        let mut changes = Vec::new();
        differences("spec", &old, &new, &mut changes);
        assert_eq!(changes, expected, "{old} {new}");
    }

    #[test]
    fn differences_show_path_and_both_values() {
        check(json!({"a": 1}), json!({"a": 1}), &[]);
        check(json!({"a": {"b": 1}}), json!({"a": {"b": 2}}), &["spec.a.b: was 1, now 2"]);
        check(json!({"a": 1}), json!({}), &["spec.a: was 1, now unset"]);
        check(json!({}), json!({"a": [1]}), &["spec.a: was unset, now [1]"]);
    }

    #[test]
    fn values_of_environment_variables_are_masked() {
        let spec = |value: &str| json!({ "env": [{ "name": "TOKEN", "value": value }] });
        let shown = r#"[{"name":"TOKEN","value":"***"}]"#;
        let expected = format!("spec.env: was {shown}, now {shown}");
        check(spec("one"), spec("two"), &[&expected]);
        check(json!({}), spec("two"), &[&format!("spec.env: was unset, now {shown}")]);
        let pod = |value: &str| json!({ "pod": { "containers": [spec(value)] } });
        let shown = format!(r#"[{{"env":{shown}}}]"#);
        check(pod("one"), pod("two"), &[&format!("spec.pod.containers: was {shown}, now {shown}")]);
    }
}
