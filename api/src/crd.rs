//! The custom resource definitions, made from the types.

pub use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;

use kube::CustomResourceExt;
use serde_json::Value;

use crate::experiment::Experiment;
use crate::trial::Trial;

/// All definitions, in the order in which they are applied.
pub fn all() -> Vec<CustomResourceDefinition> {
    vec![Experiment::crd(), Trial::crd()]
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_schema_of_a_spec_has_its_fields() {
        let schema = experiment_spec_schema();
        assert_eq!(schema["required"], serde_json::json!(["entrypoint", "searcher"]));
        assert!(schema["properties"]["searcher"]["properties"]["maxLength"].is_object());
    }
}
