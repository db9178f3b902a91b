//! CEL rules by which the API server validates updates of a job.

use serde_json::{Value, json};

/// Fields that are always present: required, or with a default.
const ALWAYS_PRESENT: [&str; 12] = [
    "entrypoint",
    "input",
    "data",
    "output",
    "shardRows",
    "batchRows",
    "onError",
    "resources",
    "storage",
    "maxRestarts",
    "preemptionTimeoutSeconds",
    "pod",
];
/// Fields that may be absent.
const OPTIONAL: [&str; 6] =
    ["description", "checkpoint", "hyperparameters", "env", "context", "podOverrides"];

/// Returns the CEL rules of a job's spec: only `state` may change, and a cancelled or killed job
/// cannot be activated.
pub(super) fn rules() -> Value {
    let always = ALWAYS_PRESENT.map(|name| format!("self.{name} == oldSelf.{name}"));
    let perhaps = OPTIONAL.map(|name| {
        let (new, old) = (format!("self.{name}"), format!("oldSelf.{name}"));
        format!("has({new}) == has({old}) && (!has({new}) || {new} == {old})")
    });
    let unchanged = always.into_iter().chain(perhaps).collect::<Vec<_>>().join(" && ");
    json!([
        {
            "rule": unchanged,
            "message": "spec is immutable: only state may be changed; create a new job",
        },
        {
            "rule": "!has(oldSelf.state) || !(oldSelf.state in ['cancelled', 'killed']) || \
                     self.state == oldSelf.state || self.state == 'killed'",
            "message": "a cancelled job stays cancelled and can only be killed; create a new job",
        },
    ])
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A field in neither list would be mutable.
    #[test]
    fn every_field_is_in_a_list() {
        let schema = crate::crd::inference_spec_schema();
        let fields = schema["properties"].as_object().unwrap().keys().map(String::as_str);
        let mut fields: Vec<&str> = fields.filter(|name| *name != "state").collect();
        let mut listed: Vec<&str> = ALWAYS_PRESENT.into_iter().chain(OPTIONAL).collect();
        fields.sort_unstable();
        listed.sort_unstable();
        assert_eq!(fields, listed);
    }
}
