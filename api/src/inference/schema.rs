//! What the API server checks of a job's changes.

use serde_json::{Value, json};

/// Fields that are always there, by their defaults.
const ALWAYS: [&str; 12] = [
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
const PERHAPS: [&str; 6] =
    ["description", "checkpoint", "hyperparameters", "env", "context", "podOverrides"];

/// The rules of a job's spec, in CEL: nothing but `state` changes, and what has ended stays so.
pub(super) fn rules() -> Value {
    let always = ALWAYS.map(|it| format!("self.{it} == oldSelf.{it}"));
    let perhaps = PERHAPS.map(|it| {
        format!(
            "has(self.{it}) == has(oldSelf.{it}) && (!has(self.{it}) || self.{it} == oldSelf.{it})"
        )
    });
    let unchanged = always.into_iter().chain(perhaps).collect::<Vec<_>>().join(" && ");
    json!([
        {
            "rule": unchanged,
            "message": "of a job's spec, only state may be changed: create another job",
        },
        {
            "rule": "!has(oldSelf.state) || !(oldSelf.state in ['cancelled', 'killed']) || \
                     self.state == oldSelf.state || self.state == 'killed'",
            "message": "a cancelled job stays cancelled, and a killed one killed: create another job",
        },
    ])
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A field that is in neither list could be changed.
    #[test]
    fn every_field_is_in_a_list() {
        let schema = crate::crd::inference_spec_schema();
        let fields = schema["properties"].as_object().unwrap().keys().map(String::as_str);
        let mut fields: Vec<&str> = fields.filter(|it| *it != "state").collect();
        let mut listed: Vec<&str> = ALWAYS.into_iter().chain(PERHAPS).collect();
        fields.sort_unstable();
        listed.sort_unstable();
        assert_eq!(fields, listed);
    }
}
