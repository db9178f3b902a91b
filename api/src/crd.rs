//! The custom resource definitions, made from the types.

pub use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;

use kube::CustomResourceExt;
use serde_json::Value;

use crate::experiment::Experiment;
use crate::inference::InferenceJob;
use crate::trial::Trial;

/// All definitions, in the order in which they are applied.
///
/// # Panics
///
/// Never: a definition made from a type is plain JSON, with a part of it left out or not.
pub fn all() -> Vec<CustomResourceDefinition> {
    let plain = |definition: CustomResourceDefinition| {
        let mut value = serde_json::to_value(definition).expect("a definition is plain JSON");
        drop_unsigned_formats(&mut value);
        serde_json::from_value(value).expect("a definition without formats is one")
    };
    [Experiment::crd(), Trial::crd(), InferenceJob::crd()].map(plain).into()
}

/// Takes away the formats that Rust's unsigned numbers have: Kubernetes does not know them and warns of each on every
/// `kubectl apply`. Their minimum of 0 says the same.
fn drop_unsigned_formats(value: &mut Value) {
    match value {
        Value::Object(fields) => {
            let format = fields.get("format").and_then(Value::as_str);
            if format.is_some_and(|it| it.starts_with("uint")) {
                fields.remove("format");
            }
            fields.values_mut().for_each(drop_unsigned_formats);
        }
        Value::Array(items) => items.iter_mut().for_each(drop_unsigned_formats),
        _ => {}
    }
}

/// The OpenAPI schema of an Experiment's `spec`.
///
/// # Panics
///
/// Never: a definition made from a type has one version, and a schema in it.
pub fn experiment_spec_schema() -> Value {
    let definition = serde_json::to_value(Experiment::crd()).expect("a definition is plain JSON");
    definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"].clone()
}

/// The OpenAPI schema of an InferenceJob's `spec`.
///
/// # Panics
///
/// As [`experiment_spec_schema`].
pub fn inference_spec_schema() -> Value {
    let definition = serde_json::to_value(InferenceJob::crd()).expect("a definition is plain JSON");
    definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"].clone()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_format_is_unknown_to_kubernetes() {
        let text = serde_json::to_string(&all()).unwrap();
        assert!(!text.contains("uint") && text.contains("\"minimum\":0"));
    }

    #[test]
    fn the_schema_of_a_spec_has_its_fields() {
        let schema = experiment_spec_schema();
        assert_eq!(schema["required"], serde_json::json!(["entrypoint", "searcher"]));
        assert!(schema["properties"]["searcher"]["properties"]["maxLength"].is_object());
    }
}
