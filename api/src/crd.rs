//! Custom resource definitions generated from the types.

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1 as apiextensions;
use kube::CustomResourceExt;
use serde_json::Value;

pub use apiextensions::CustomResourceDefinition;

use crate::experiment::Experiment;
use crate::inference::InferenceJob;
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
    use super::*;

    #[test]
    fn unsigned_formats_are_removed() {
        let text = serde_json::to_string(&all()).unwrap();
        assert!(!text.contains("uint") && text.contains("\"minimum\":0"));
    }

    #[test]
    fn spec_schema_has_its_fields() {
        let schema = experiment_spec_schema();
        assert_eq!(schema["required"], serde_json::json!(["entrypoint", "searcher"]));
        assert!(schema["properties"]["searcher"]["properties"]["maxLength"].is_object());
    }
}
