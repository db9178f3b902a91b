//! Custom resource definitions generated from the types.

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1 as apiextensions;
use kube::CustomResourceExt;
use serde_json::{Value, json};

pub use apiextensions::CustomResourceDefinition;

use crate::experiment::Experiment;
use crate::inference::InferenceJob;
use crate::names::GROUP;
use crate::trial::Trial;

/// Returns all custom resource definitions.
///
/// # Panics
///
/// Never: definitions generated from types are plain JSON, and number formats are optional in them.
pub fn all() -> Vec<CustomResourceDefinition> {
    let plain = |definition: CustomResourceDefinition| {
        let mut value = serde_json::to_value(definition).expect("a definition is plain JSON");
        drop_unsigned_formats(&mut value);
        serde_json::from_value(value).expect("a definition without formats is valid")
    };
    [Experiment::crd(), Trial::crd(), InferenceJob::crd()].map(plain).into()
}

/// Name of the policy for free-form fields, and of its binding.
const POLICY: &str = "free-form-fields.stoker.dev";
/// Fields of a spec that are or contain free-form objects.
const FREE_FORM_FIELDS: [&str; 4] = ["data", "hyperparameters", "pod", "podOverrides"];

/// Returns a `ValidatingAdmissionPolicy` that refuses changes of free-form fields, and its binding.
///
/// The rules of a definition do not notice all changes: without declared properties, two objects
/// with the same number of keys are equal to them if the keys that both have hold equal values. A
/// policy compares all keys. Decision record 0062 explains this.
pub fn policy() -> [Value; 2] {
    let validations = FREE_FORM_FIELDS.map(|field| {
        let (new, old) = (format!("object.spec.{field}"), format!("oldObject.spec.{field}"));
        json!({
            "expression": format!("has({new}) == has({old}) && (!has({new}) || {new} == {old})"),
            "message": format!(
                "spec.{field} cannot change after creation; create a new experiment or job"
            ),
        })
    });
    let (api_version, metadata) = ("admissionregistration.k8s.io/v1", json!({ "name": POLICY }));
    let rule = json!({
        "apiGroups": [GROUP],
        "apiVersions": ["*"],
        "operations": ["UPDATE"],
        "resources": ["experiments", "trials", "inferencejobs"],
        "scope": "*",
    });
    // Every field that the API server would set is written: `helm` and `kubectl apply` own the
    // constraints as one value, so a value without them conflicts with the stored one.
    let constraints = json!({
        "matchPolicy": "Equivalent",
        "namespaceSelector": {},
        "objectSelector": {},
        "resourceRules": [rule],
    });
    let policy = json!({
        "apiVersion": api_version,
        "kind": "ValidatingAdmissionPolicy",
        "metadata": metadata,
        "spec": {
            "failurePolicy": "Fail",
            "matchConstraints": constraints,
            "validations": validations,
        },
    });
    let binding = json!({
        "apiVersion": api_version,
        "kind": "ValidatingAdmissionPolicyBinding",
        "metadata": metadata,
        "spec": { "policyName": POLICY, "validationActions": ["Deny"] },
    });
    [policy, binding]
}

/// Removes the formats of Rust's unsigned numbers. Kubernetes does not know these formats and warns
/// about each of them on every `kubectl apply`. The schema excludes negative numbers by `minimum`.
fn drop_unsigned_formats(value: &mut Value) {
    match value {
        Value::Object(fields) => {
            let format = fields.get("format").and_then(Value::as_str);
            if format.is_some_and(|format| format.starts_with("uint")) {
                fields.remove("format");
            }
            fields.values_mut().for_each(drop_unsigned_formats);
        }
        Value::Array(items) => items.iter_mut().for_each(drop_unsigned_formats),
        _ => {}
    }
}

/// Returns the OpenAPI schema of an Experiment's `spec`.
///
/// # Panics
///
/// Never: a definition generated from a type has one version with a schema.
pub fn experiment_spec_schema() -> Value {
    let definition = serde_json::to_value(Experiment::crd()).expect("a definition is plain JSON");
    definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"].clone()
}

/// Returns the OpenAPI schema of an InferenceJob's `spec`.
///
/// # Panics
///
/// Never; see [`experiment_spec_schema`].
pub fn inference_spec_schema() -> Value {
    let definition = serde_json::to_value(InferenceJob::crd()).expect("a definition is plain JSON");
    definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"].clone()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn unsigned_formats_are_removed() {
        let text = serde_json::to_string(&all()).unwrap();
        assert!(!text.contains("uint") && text.contains("\"minimum\":0"));
    }

    /// Adds the top-level fields in which a schema has free-form objects.
    fn add_free_form_fields(schema: &Value, field: &str, fields: &mut BTreeSet<String>) {
        if schema["x-kubernetes-preserve-unknown-fields"] == true {
            fields.insert(field.to_owned());
        }
        for (name, part) in schema["properties"].as_object().into_iter().flatten() {
            let field = if field.is_empty() { name } else { field };
            add_free_form_fields(part, field, fields);
        }
        for part in ["items", "additionalProperties"].map(|name| &schema[name]) {
            if part.is_object() {
                add_free_form_fields(part, field, fields);
            }
        }
    }

    #[test]
    fn policy_covers_all_free_form_fields() {
        let mut fields = BTreeSet::new();
        for definition in all() {
            let definition = serde_json::to_value(definition).unwrap();
            let version = &definition["spec"]["versions"][0];
            let spec = &version["schema"]["openAPIV3Schema"]["properties"]["spec"];
            add_free_form_fields(spec, "", &mut fields);
        }
        assert_eq!(fields, FREE_FORM_FIELDS.map(str::to_owned).into());
    }

    #[test]
    fn spec_schema_has_its_fields() {
        let schema = experiment_spec_schema();
        assert_eq!(schema["required"], serde_json::json!(["entrypoint", "searcher"]));
        assert!(schema["properties"]["searcher"]["properties"]["maxLength"].is_object());
    }
}
